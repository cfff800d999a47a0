"""Hints for errors that newcomers to NVRTC meet, above all for headers of the host."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from preheat.errors import Diagnostic

__all__ = ["ADVICE", "advice", "advice_about_path"]

_PRINTF = "printf is built in: remove the include"
_ASSERT = "assert is built in: remove the include"
_MATH = "the mathematical functions are built in: remove the include, or use <cuda/std/cmath>"
_BUILT_IN = "its declarations are built in: remove the include"
_CONTAINER = "device code cannot use host containers: pass pointers and sizes, or use <cuda/std/array>"
_STREAM = "device code has no streams or files; printf is built in"
_HOST = "this header is for host code only: remove it from the source of kernels"

#: Headers that host compilers have and NVRTC does not have, and what to do: include the header of CCCL
#: with this name instead, or follow the sentence.
ADVICE: Mapping[str, str] = {
    **{
        name: f"cuda/std/{name}"
        for name in (
            "algorithm array atomic barrier bit bitset cfloat charconv chrono climits complex concepts "
            "cstddef cstdint cstdlib cstring ctime execution expected functional initializer_list "
            "iterator latch limits mdspan memory numbers numeric optional random ranges ratio "
            "semaphore source_location span string_view tuple type_traits utility variant version"
        ).split()
    },
    "float.h": "cuda/std/cfloat",
    "limits.h": "cuda/std/climits",
    "stddef.h": "cuda/std/cstddef",
    "stdint.h": "cuda/std/cstdint",
    "inttypes.h": "cuda/std/cstdint",
    "cinttypes": "cuda/std/cstdint",
    "stdlib.h": "cuda/std/cstdlib",
    "string.h": "cuda/std/cstring",
    "time.h": "cuda/std/ctime",
    **dict.fromkeys(("cstdio", "stdio.h"), _PRINTF),
    **dict.fromkeys(("cassert", "assert.h"), _ASSERT),
    **dict.fromkeys(("cmath", "math.h"), _MATH),
    **dict.fromkeys(("cstdbool", "stdbool.h", "new"), _BUILT_IN),
    **dict.fromkeys(
        "vector string map unordered_map set unordered_set list forward_list deque queue stack".split(),
        _CONTAINER,
    ),
    **dict.fromkeys(
        "iostream ostream istream sstream fstream iomanip ios filesystem format print".split(), _STREAM
    ),
    **dict.fromkeys(
        "thread mutex shared_mutex condition_variable future regex locale stdexcept exception typeinfo "
        "typeindex any valarray csignal cerrno errno.h unistd.h pthread.h omp.h sys/time.h "
        "cuda_profiler_api.h cublas_v2.h curand.h".split(),
        _HOST,
    ),
}
# Optional packages: how the names of their headers begin, and one header of each.
_PACKAGES = {
    "nvidia-cuda-crt": (("crt/",), "crt/host_defines.h"),
    "nvidia-cuda-cccl": (("cub/", "cuda/", "thrust/"), "cub/version.cuh"),
    "nvidia-cuda-runtime": (("cuda_", "cooperative_groups", "mma.h"), "cuda_fp16.h"),
}
_MISSING = re.compile(r'cannot open source file "([^"]+)"')
_OPTION = re.compile(r"unrecognized option (-\S+) found")
_UNRESOLVED = re.compile(r"Unresolved extern (?:function|variable) '([^']+)'")
# A text of this form is a path when it also has a slash or one of the suffixes.
_ONE_WORD = re.compile(r"""(?!//|/\*)[^\s#;{}()<>"]+""")
_SUFFIXES = (".c", ".cc", ".cpp", ".cuh", ".h", ".hpp", ".txt")


def advice_about_path(source: str) -> str | None:
    """Return a hint for a rejected source that is one word and looks like the path of a file."""
    if _ONE_WORD.fullmatch(source) and ("/" in source or source.endswith(_SUFFIXES)):
        return f"is this a path? pass pathlib.Path({source!r})"
    return None


def advice(rows: Iterable[Diagnostic], roots: Iterable[str]) -> str | None:
    """Return a hint about the first error that has one, or None.

    `roots` are the include directories of the compile.
    """
    for row in rows:
        if missing := _MISSING.search(row.message):
            return _about_header(missing[1], [Path(root) for root in roots])
        if option := _OPTION.search(row.message):
            return _about_option(option[1])
        if unresolved := _UNRESOLVED.search(row.message):
            name = unresolved[1]
            return f"define {name!r} in this program, or link it with the one that does: preheat.link"
    return None


def _about_option(option: str) -> str:
    if re.fullmatch(r"-O\w*", option):
        return f"leave {option} out: NVRTC optimises by default"
    return f"leave {option} out: NVRTC does not have all options of nvcc"


def _about_header(name: str, roots: list[Path]) -> str:
    known = ADVICE.get(name)
    if known is not None and known.startswith("cuda/std/"):
        return f"#include <{known}> instead of <{name}>; its names are in cuda::std"
    if known is not None:
        return f"<{name}>: {known}"
    for package, (starts, witness) in _PACKAGES.items():
        if name.startswith(starts) and not any((root / witness).exists() for root in roots):
            return f"pip install {package}, or 'preheat[cu13]' for all headers of CUDA"
    return f"name the directory that contains {name}: include=[…], or -I DIR"
