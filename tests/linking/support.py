"""Sources of links: kernels whose device functions and variables are in another file."""

from __future__ import annotations

from pathlib import Path

from preheat.model.linked_program import LinkedProgram
from preheat.model.program import Program

#: Two kernels, one of them a template, that use what `HELPER` defines. `shift` is in both files.
MAIN = """\
extern __device__ float helper(float x);
extern __device__ int calls;
static __device__ __noinline__ float shift(float x) { return x + 1.0f; }

extern "C" __global__ void apply(float* x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] = shift(helper(x[i]));
}
template <class T> __global__ void count(T* out) {
    atomicAdd(&calls, 1);
    out[0] = static_cast<T>(calls);
}
"""
HELPER = """\
__device__ int calls = 5;
__constant__ float factors[2] = {2.0f, 3.0f};
static __device__ __noinline__ float shift(float x) { return x * factors[1]; }
__device__ float helper(float x) { return shift(x) * factors[0]; }
"""
MAIN_PROGRAM = Program.of(MAIN, label="main.cu", names=["count<int>"])
HELPER_PROGRAM = Program.of(HELPER, label="helper.cu")


def linked(*, lto: bool = False, main: Program = MAIN_PROGRAM) -> LinkedProgram:
    """Return both sources as one program."""
    return LinkedProgram.of([main, HELPER_PROGRAM], lto=lto)


def expected(x: float) -> float:
    """Return what `apply` makes of a value."""
    return x * 3.0 * 2.0 + 1.0


def on_disk(place: Path, *, lto: bool = False) -> LinkedProgram:
    """Write two sources and the header that both include to `place`, and return them as one program."""
    place.mkdir(exist_ok=True)
    (place / "both.h").write_text("#define BY 2\n__device__ int times(int x);\n")
    kernel = 'extern "C" __global__ void k(int* x) { x[0] = times(x[0]) + BY; }\n'
    (place / "k.cu").write_text(f'#include "both.h"\n{kernel}')
    (place / "times.cu").write_text(
        '#include "both.h"\n__device__ int times(int x) { return x * BY; }\n'
    )
    return LinkedProgram.of([place / "k.cu", place / "times.cu"], lto=lto)
