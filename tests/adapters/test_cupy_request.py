"""What CuPy was asked to compile, as a value: what makes two requests equal, and how they are kept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from preheat.adapters.cupy.request import CompileRequest, local_options, portable_options
from preheat.model.arch import Arch

PLACES = {"cupy": "/opt/cupy/include", "cuda": "/usr/cuda"}
REQUEST = CompileRequest(
    source='extern "C" __global__ void scale(float* x) { *x *= 2; }',
    options=("-I{cupy}/cub", "--std=c++17", "-I{cuda}"),
    arch="90",
    backend="nvrtc",
    cooperative=False,
    names=("a<int>", "b<int>"),
    jitify=False,
    lto=False,
    headers="8f3c",
    variables=(),
)


@pytest.mark.parametrize(
    "change",
    [
        *(
            {"source": REQUEST.source + " "},
            {"arch": "100"},
            {"backend": "nvcc"},
            {"cooperative": True},
        ),
        *({"options": REQUEST.options[::-1]}, {"options": REQUEST.options[:2]}, {"jitify": True}),
        *({"names": ("a<int>",)}, {"names": ("a<int>b<int>",)}, {"lto": True}, {"headers": "8f3d"}),
        {"variables": (("CUPY_COMPILE_WITH_PTX", "1"),)},
        {"options": (*REQUEST.options, "a<int>"), "names": ("b<int>",)},
    ],
    ids=str,
)
def test_the_key_differs_on(change: dict[str, Any]) -> None:
    assert replace(REQUEST, **change).key != REQUEST.key


def test_the_key_is_the_same_for_names_in_another_order() -> None:
    assert replace(REQUEST, names=REQUEST.names[::-1]).key == REQUEST.key


def test_a_row_makes_the_same_request_for_any_architecture() -> None:
    row = replace(REQUEST, variables=(("CUPY_COMPILE_WITH_PTX", "1"),), release="14.2.0").row()
    assert row is not None
    again = CompileRequest.of_row(row, Arch.parse("sm_100"), "8f3c")
    assert again == replace(REQUEST, arch="100", variables=(("CUPY_COMPILE_WITH_PTX", "1"),))
    assert (row["root"], row["recorded"]) == ("", {"cupy": "14.2.0"})
    assert row["env"] == {"CUPY_COMPILE_WITH_PTX": "1"}


def test_entries_of_two_compilers_are_two_and_the_pointer_is_a_third() -> None:
    entries = [
        *(replace(REQUEST, compiler=each).identity for each in ("nvrtc 13.3", "nvrtc 13.4")),
        REQUEST.pointer,
    ]
    assert len({entry.digest for entry in entries}) == 3
    assert {(entry.key, entry.label, entry.target) for entry in entries} == {
        (REQUEST.key, "a<int>, b<int>", "sm_90")
    }


@pytest.mark.parametrize(
    ("source", "label"),
    [
        ('extern "C" __global__ void scale(float* x) {}', "scale"),
        ("__global__ void __launch_bounds__(256, 2) wide(int a) {}\n", "wide"),
        ("template <class T>\n__global__ void\ntk(T* x) {}", "tk"),
        ("__global__ void a() {} __global__ void b() {} __global__ void a(int);", "a, b"),
        ("".join(f"__global__ void k{n}() {{}}" for n in range(5)), "k0, k1, k2, …"),
        ("__device__ int f() { return 1; }", ""),
    ],
)
def test_a_label_names_the_kernels_of_the_source(source: str, label: str) -> None:
    assert replace(REQUEST, source=source, names=()).label == label


@pytest.mark.parametrize(
    ("change", "needs"),
    [
        *(({"options": ("-dc",)}, True), ({"options": ("--relocatable-device-code=true",)}, True)),
        *(({"jitify": True}, True), ({"options": ("-DCUPY_USE_JITIFY",)}, True)),
        *(
            ({"options": ("-dc",), "backend": "nvcc"}, False),
            ({"options": ("-dc",), "lto": True}, False),
        ),
        ({"options": ("-DX",)}, False),
    ],
    ids=str,
)
def test_code_that_the_driver_links_and_jitify_need_a_device(
    change: dict[str, Any], needs: bool
) -> None:
    assert replace(REQUEST, **change).needs_device is needs


def test_options_have_no_directory_of_the_machine() -> None:
    options = (
        "-I/opt/cupy/include/cub",
        "-I/opt/cupy/include",
        "-I/opt/cupy/include2",
        "-DX",
        "-I/usr/cuda",
    )
    portable = portable_options(options, PLACES)
    assert portable == ("-I{cupy}/cub", "-I{cupy}", "-I/opt/cupy/include2", "-DX", "-I{cuda}")
    assert local_options(portable, PLACES) == options
    assert local_options(portable, {"cupy": "/a", "cuda": "/b"}) == (
        *("-I/a/cub", "-I/a", "-I/opt/cupy/include2", "-DX", "-I/b"),
    )
