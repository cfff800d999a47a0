"""Compiles and links in each way that gives a cubin, and prints the PTX in each of them as JSON.

LD_PRELOAD=libcuda.so.1 python -m tests.driver.compiled
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cuda.bindings import nvjitlink, nvrtc

from preheat.toolchain.binaries.ptx_section import attach_ptx, attached_ptx, detach_ptx

CALLER = b"""
__device__ float f(float);
extern "C" __global__ void k(float* x) { x[threadIdx.x] = f(x[threadIdx.x]); }
"""
CALLEE = b"__device__ float f(float x) { return 2 * x; }"
KERNEL = b'extern "C" __global__ void k(float* x) { x[threadIdx.x] += 1; }'
KINDS = nvjitlink.InputType


class Compiled(NamedTuple):
    """The results of one compile."""

    cubin: bytes
    ptx: bytes
    ltoir: bytes


def checked(result: Sequence[Any]) -> Any:
    """Return what a function of NVRTC returned, without its status."""
    assert int(result[0]) == 0, result[0]
    return result[1] if len(result) == 2 else None


def compiled(source: bytes, *options: bytes) -> Compiled:
    """Compile a program by NVRTC."""
    program = checked(nvrtc.nvrtcCreateProgram(source, b"k.cu", 0, [], []))
    checked(nvrtc.nvrtcCompileProgram(program, len(options), list(options)))
    found = []
    for kind in ("CUBIN", "PTX", "LTOIR"):
        size = checked(getattr(nvrtc, f"nvrtcGet{kind}Size")(program))
        data = b" " * size
        if size:
            checked(getattr(nvrtc, f"nvrtcGet{kind}")(program, data))
        found.append(data)
    checked(nvrtc.nvrtcDestroyProgram(program))
    return Compiled(*found)


def linked(inputs: Sequence[tuple[int, bytes]], *options: str, files: bool = False) -> bytes:
    """Link by nvJitLink. With `files`, it reads the inputs from files."""
    handle = nvjitlink.create(len(options) + 1, ["-arch=sm_90", *options])
    with tempfile.TemporaryDirectory() as place:
        for number, (kind, data) in enumerate(inputs):
            path = Path(place, f"input{number}")
            path.write_bytes(data)
            if files:
                nvjitlink.add_file(handle, kind, str(path))
            else:
                nvjitlink.add_data(handle, kind, data, len(data), path.name)
        nvjitlink.complete(handle)
    size = nvjitlink.get_linked_cubin_size(handle)
    code = bytearray(size)
    nvjitlink.get_linked_cubin(handle, code)
    assert nvjitlink.get_linked_cubin_size(handle) == size
    nvjitlink.destroy(handle)
    return bytes(code)


def results() -> dict[str, bytes]:
    """Return the cubins, by the way in which they were made."""
    arch, part = b"-arch=sm_90", b"-rdc=true"
    kernel = compiled(KERNEL, arch)
    caller, callee = compiled(CALLER, arch, part), compiled(CALLEE, arch, part)
    ir = [(KINDS.LTOIR, compiled(source, arch, b"-dlto").ltoir) for source in (CALLER, CALLEE)]
    cubins = [(KINDS.CUBIN, each.cubin) for each in (caller, callee)]
    text = (KINDS.PTX, callee.ptx.rstrip(b"\0"))
    expected = attach_ptx(detach_ptx(kernel.cubin), kernel.ptx.rstrip(b"\0") + b"\0")
    assert kernel.cubin in (expected, detach_ptx(kernel.cubin)), "Python makes another section"
    return {
        "compiled": kernel.cubin,
        "only PTX": compiled(KERNEL, b"-arch=compute_90").cubin,
        "linked PTX": linked([(KINDS.PTX, kernel.ptx.rstrip(b"\0"))]),
        "linked cubins": linked(cubins),
        "linked files": linked(cubins, files=True),
        "linked anything": linked([(KINDS.ANY, data) for _, data in (cubins[0], text)]),
        "optimised": linked(ir, "-lto"),
        "optimised beside PTX": linked([ir[0], text], "-lto"),
    }


if __name__ == "__main__":
    found = {name: [text.decode() for text in attached_ptx(data)] for name, data in results().items()}
    json.dump(found, sys.stdout)
