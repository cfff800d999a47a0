"""Code from the cache of preheat, and a link of it with another program."""

import ctypes
import json

import numpy as np
from cuda.core import (
    Device,
    LaunchConfig,
    LegacyPinnedMemoryResource,
    Linker,
    LinkerOptions,
    Program,
    ProgramOptions,
    launch,
)

import preheat
import preheat.adapters.cuda_core

ALONE = 'extern "C" __global__ void k(float *x) { *x *= 2; }'
CALLER = """
extern "C" __device__ float twice(float);
extern "C" __global__ void k(float *x) { *x = twice(*x); }
"""
CALLED = 'extern "C" __device__ float twice(float x) { return 2 * x; }'


def compiled(code, **more):
    options = ProgramOptions(arch=f"sm_{device.arch}", **more)
    return Program(code, "c++", options).compile("cubin", cache=preheat.adapters.cuda_core.cache())


def result_of(code):
    host = LegacyPinnedMemoryResource().allocate(4)
    address = ctypes.cast(int(host.handle), ctypes.POINTER(ctypes.c_float))
    value = np.ctypeslib.as_array(address, (1,))
    value[0] = 3
    launch(stream, LaunchConfig(grid=1, block=1), code.get_kernel("k"), host)
    stream.sync()
    return float(value[0])


device = Device(0)
device.set_current()
stream = device.create_stream()
parts = [compiled(code, relocatable_device_code=True) for code in (CALLER, CALLED)]
linked = Linker(*parts, options=LinkerOptions(arch=f"sm_{device.arch}")).link("cubin")
loaded = compiled(ALONE)
counts = preheat.default_builder().stats()["process"]
(counted,) = (name for name in ("compiles", "hits.disk") if counts.get(name) == 3)
print(json.dumps({"loaded": result_of(loaded), "linked": result_of(linked), "counted": counted}))
