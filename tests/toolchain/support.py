"""Helpers for the tests of the toolchain: real kernels, an independent parser, and worker processes."""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from tests.processes import wait_for

ARCHS = ("sm_80", "sm_90", "sm_100")  # both dialects of PTX: registers are untyped from sm_100 on

#: Kernels that need most of what compilers emit: every kind of parameter, calls, scopes, branches.
KERNELS = """\
#include <cuda_fp16.h>

struct Pair { int a; double b; char c[3]; };
struct __align__(64) Wide { char bytes[128]; };

__device__ __noinline__ float helper(float x, int n) {
    for (int i = 0; i < n; i++) x = x * x + 1.0f;
    return x;
}

extern "C" __global__ void __launch_bounds__(128)
every(bool b, char c, short s, int i, long long l, float f, double d, const float* p, Pair v, __half h,
      float4 q, float** pp) {
    pp[0][0] = b + c + s + i + l + f + d + p[i] + v.b + (float)h + q.x + helper(f, i);
}

extern "C" __global__ void wide(int i, Wide w, int* out) { *out = w.bytes[i]; }

template <class T> __global__ void scale(T* x, T by, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] = x[i] * by;
}

__global__ void branch(int a, int* out) {
    switch (a) {
        case 0: *out = 3; break;
        case 1: *out = 77; break;
        case 2: *out = a * a; break;
        case 3: *out = a << 7; break;
        case 4: *out = -a; break;
        default: *out = 9;
    }
}

__global__ void halves(__half2* x, float4* y) {
    x[0] = __hadd2(x[0], x[1]);
    y[0] = make_float4(y[1].w, y[1].z, y[1].y, y[1].x);
}

extern "C" __global__ void nothing() {}
"""
NAMES = ("scale<float>", "scale<__half>")


def parameters(cubin: bytes) -> dict[str, list[tuple[int, int]]]:
    """Offset and size of each kernel's parameters, in order, as the machine code itself has them."""
    found = {}
    for name, payload in _sections(cubin):
        if name.startswith(".nv.info."):
            rows = sorted(_parameter_rows(payload))
            found[name.removeprefix(".nv.info.")] = [(offset, size) for _, offset, size in rows]
    return found


def _sections(elf: bytes) -> Iterator[tuple[str, bytes]]:
    offset, size, count, names = struct.unpack_from("<Q10xHHH", elf, 40)
    table = [struct.unpack_from("<IIQQQQ", elf, offset + index * size) for index in range(count)]
    strings = table[names][4]
    for name, _, _, _, position, length in table:
        start = strings + name
        yield elf[start : elf.index(b"\0", start)].decode(), elf[position : position + length]


def _parameter_rows(info: bytes) -> Iterator[tuple[int, int, int]]:
    at = 0
    while at < len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        if (form, attribute) == (4, 0x17):
            _, ordinal, offset, packed = struct.unpack_from("<IHHI", info, at + 4)
            yield ordinal, offset, packed >> 18
        at += 4 + (size if form == 4 else 0)


def slow(terms: int) -> str:
    """Return a program whose compile time grows with the square of `terms`: 1000 take seconds."""
    chain = "".join(f"a == {i} ? {i} : " for i in range(terms))
    return f'extern "C" __global__ void k(int a, int* o) {{ *o = {chain}0; }}\n'


def workers_of(process: int) -> set[int]:
    """Return the compiler processes that `process` started and that are still there."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent = entry.joinpath("stat").read_text().rpartition(")")[2].split()[1]
            command = entry.joinpath("cmdline").read_bytes()
            if int(parent) == process and b"preheat.toolchain.worker" in command:
                found.add(int(entry.name))
    return found


def scratch_of(worker: int) -> Path | None:
    """Return the directory a worker compiles in, while it does."""
    with suppress(OSError):
        place = Path(f"/proc/{worker}/cwd").readlink()
        return None if place == Path("/") else place
    return None


def compiling(process: int, besides: Collection[int] = ()) -> tuple[int, Path]:
    """Return a compiling worker of `process`, and its directory."""

    def busy() -> tuple[int, Path] | None:
        for worker in workers_of(process) - set(besides):
            if place := scratch_of(worker):
                return worker, place
        return None

    return wait_for(busy)


def gone(worker: int) -> bool:
    """Return True if a process has ended; a zombie process has ended."""
    try:
        state = Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state == "Z"
