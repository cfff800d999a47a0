"""Programs of cuda.core for tests."""

from __future__ import annotations

from typing import Any

import pytest

core = pytest.importorskip("cuda.core", reason="cuda.core is not installed")

SAXPY = 'extern "C" __global__ void saxpy(float a, float *x, int n) { if (threadIdx.x < n) x[0] *= a; }'
TEMPLATE = "template<class T> __global__ void fill(T *x, T value) { *x = value; }"
WITH_HEADER = '#include "scale.h"\nextern "C" __global__ void scale(float *x) { *x *= SCALE; }'
PTX = """\
.version 8.0
.target sm_90
.address_size 64
.visible .entry empty(.param .u64 a) { ret; }
"""
NVVM = """\
target triple = "nvptx64-unknown-cuda"
target datalayout = "e-p:64:64:64-i1:8:8-i8:8:8-i16:16:16-i32:32:32-i64:64:64-i128:128:128-f32:32:32-\
f64:64:64-v16:16:16-v32:32:32-v64:64:64-v128:128:128-n16:32:64"
define void @simple(i32* %data) { ret void }
!nvvm.annotations = !{!0}
!0 = !{void (i32*)* @simple, !"kernel", i32 1}
!nvvmir.version = !{!1}
!1 = !{i32 2, i32 0, i32 3, i32 1}
"""


def options(**more: Any) -> Any:
    """Return options for an architecture that the machine need not have."""
    return core.ProgramOptions(**{"arch": "sm_90", **more})


def program(code: str = SAXPY, **more: Any) -> Any:
    """Return a C++ program."""
    return core.Program(code, "c++", options(**more))
