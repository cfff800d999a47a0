"""The versions of everything that turns a Python function into code for a GPU."""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Mapping

import cuda.pathfinder
import llvmlite
import numba
import numba_cuda
import numpy
from numba.cuda.core import config

__all__ = ["settings", "variables", "versions"]

_SETTINGS = (
    "BOUNDSCHECK", "CUDA_DEBUG_POLY", "CUDA_DEBUG_POLY_USE_TYPED_CONST", "CUDA_ENABLE_NRT",
    "CUDA_NRT_STATS", "DEBUG_NRT",
)  # fmt: skip
# The variables of the environment that change the code of kernels, or the options of `cuda.jit`.
_VARIABLES = (*(f"NUMBA_{name}" for name in _SETTINGS), "NUMBA_OPT", "NUMBA_CUDA_DEBUGINFO")
_LIBRARIES = ("nvvm", "nvJitLink")


@functools.cache
def versions() -> Mapping[str, str]:
    """Return the versions of packages and compilers that make code."""
    return {
        "Python": platform.python_version().rpartition(".")[0],
        "Numba-CUDA": numba_cuda.__version__,
        "Numba": numba.__version__,
        "llvmlite": llvmlite.__version__,
        "NumPy": numpy.__version__,
        **{name: _library(name) for name in _LIBRARIES},
    }


def _library(name: str) -> str:
    """Return what identifies the build of a compiler on every machine.

    The functions of the libraries return a major and a minor version, which several builds have.
    """
    try:
        path = cuda.pathfinder.load_nvidia_dynamic_lib(name).abs_path
    except cuda.pathfinder.DynamicLibNotFoundError:
        return "absent"
    if path is None:
        return "unknown"
    return f"{os.path.basename(os.path.realpath(path))} of {os.path.getsize(path)} bytes"


def variables() -> dict[str, str]:
    """Return the variables of the environment that are set and change the code of kernels."""
    return {name: os.environ[name] for name in _VARIABLES if name in os.environ}


def settings() -> dict[str, str]:
    """Return the settings of Numba that change the code of kernels and are switched on."""
    found = {name: getattr(config, name, None) for name in _SETTINGS}
    return {name: repr(value) for name, value in found.items() if value}
