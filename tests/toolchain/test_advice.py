"""Hints for errors that newcomers to NVRTC meet."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from preheat.errors import CompileError, Diagnostic
from preheat.gpu import Gpu
from preheat.toolchain.advice import ADVICE, advice, advice_about_path
from preheat.toolchain.compiler import Toolchain


def missing(name: str, *roots: Path) -> str | None:
    message = f'cannot open source file "{name}"'
    rows = [
        Diagnostic("k.cu", 1, "warning", "something else"),
        Diagnostic("k.cu", 2, "catastrophic error", message),
    ]
    return advice(rows, map(str, roots))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("cstdint", "#include <cuda/std/cstdint> instead of <cstdint>; its names are in cuda::std"),
        ("stdint.h", "#include <cuda/std/cstdint> instead of <stdint.h>; its names are in cuda::std"),
        ("cstdio", "<cstdio>: printf is built in: remove the include"),
        ("assert.h", "<assert.h>: assert is built in: remove the include"),
        ("vector", "<vector>: device code cannot use host containers: pass pointers and sizes"),
        ("iostream", "<iostream>: device code has no streams or files; printf is built in"),
        ("thread", "<thread>: this header is for host code only"),
        ("mine/util.h", "name the directory that contains mine/util.h: include=[…], or -I DIR"),
        ("crt/mma.h", "pip install nvidia-cuda-crt, or 'preheat[cu13]' for all headers of CUDA"),
        ("cub/block/block_reduce.cuh", "pip install nvidia-cuda-cccl"),
        ("cuda_fp16.h", "pip install nvidia-cuda-runtime"),
    ],
)
def test_a_header_that_is_missing_comes_with_what_to_do(name: str, hint: str) -> None:
    assert (missing(name) or "").startswith(hint)


def test_a_misspelt_header_of_an_installed_package_is_not_a_missing_package(tmp_path: Path) -> None:
    (tmp_path / "cuda_fp16.h").touch()
    assert missing("cuda_fp17.h", tmp_path) == (
        "name the directory that contains cuda_fp17.h: include=[…], or -I DIR"
    )


def test_the_headers_to_include_instead_are_in_cccl_and_the_others_are_not(
    toolchain: Toolchain,
) -> None:
    cccl = Path(toolchain.located.roots["cccl"])
    for name, reported in ADVICE.items():
        if reported.startswith("cuda/std/"):
            assert (cccl / reported).is_file(), name
        elif "cuda/std" not in reported and "built in" not in reported:
            assert not (cccl / "cuda/std" / name).exists(), name
    for reported in ADVICE.values():
        for named in (word.strip("<>.,") for word in reported.split() if word.startswith("<cuda/std/")):
            assert (cccl / named).is_file(), named


def test_a_function_that_another_program_defines_needs_a_link() -> None:
    rows = [Diagnostic("ptxas", None, "fatal", "Unresolved extern function 'other'")]
    assert advice(rows, []) == (
        "define 'other' in this program, or link it with the one that does: preheat.link"
    )


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ("-O3", "leave -O3 out: NVRTC optimises by default"),
        ("-Xcompiler", "leave -Xcompiler out: NVRTC does not have all options of nvcc"),
    ],
)
def test_an_option_of_nvcc_that_nvrtc_lacks_is_to_be_left_out(option: str, hint: str) -> None:
    rows = [Diagnostic("nvrtc", None, "error", f"unrecognized option {option} found")]
    assert advice(rows, []) == hint


def test_other_errors_have_no_advice() -> None:
    assert advice([Diagnostic("k.cu", 1, "error", 'identifier "x" is undefined')], []) is None


@pytest.mark.parametrize(
    "text", ["kernels/nope.cuh", "nope.h", "./nope", "../k.hpp", "/opt/k.cc", "~/k.txt"]
)
def test_a_source_that_looks_like_a_path_is_one(text: str) -> None:
    assert advice_about_path(text) == f"is this a path? pass pathlib.Path({text!r})"


@pytest.mark.parametrize(
    "text", ['#include "kernels/k.cuh"', "#include<k.h>", "//k.h", "/*k*/", "int", "int a/b.h", "a/b;"]
)
def test_other_sources_are_no_paths(text: str) -> None:
    assert advice_about_path(text) is None


def test_the_error_of_a_path_as_source_has_the_hint(open_device: Callable[..., Gpu]) -> None:
    gpu = open_device("emulator")
    for _ in range(2):  # The second error is remembered.
        with pytest.raises(CompileError) as caught:
            gpu.kernel("kernels/nope.cuh", "f")
        assert caught.value.hint == "is this a path? pass pathlib.Path('kernels/nope.cuh')"
