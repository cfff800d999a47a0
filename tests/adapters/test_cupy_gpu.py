"""CuPy on a GPU: raw kernels of preheat on its arrays, and its own kernels through the adapter."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import preheat
from preheat import default
from preheat.adapters.cupy import RawKernel, RawModule
from preheat.errors import CompileError, LaunchError, UnknownEntryError
from tests.processes import SOURCE, expect_success, start_process

pytestmark = pytest.mark.gpu

CODE = r"""
extern "C" {
__constant__ float factors[4];
__global__ void add(const float* a, const float* b, float* out, unsigned int n) {
    unsigned int i = blockDim.x * blockIdx.x + threadIdx.x;
    if (i < n) out[i] = a[i] + b[i];
}
__global__ void scale(float* x) { x[threadIdx.x] *= factors[threadIdx.x]; }
__global__ void fill(void* memory, int n, double value) {
    if (threadIdx.x < n) ((double*)memory)[threadIdx.x] = value;
}
__global__ void slow(float* x, long long cycles) {
    long long start = clock64();
    while (clock64() - start < cycles) {}
    x[threadIdx.x] += 1;
}
}
"""
FETCH = r"""
extern "C" __global__ void fetch(cudaTextureObject_t texture, float* out) {
    out[threadIdx.x] = tex1Dfetch<float>(texture, threadIdx.x);
}
"""


@pytest.fixture
def cp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield CuPy, with a cache of preheat of the test's own."""
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    monkeypatch.setenv("PREHEAT_CACHE_DIR", str(tmp_path / "cache"))
    default._builder.cache_clear()
    yield cupy
    preheat.device("cuda:0").close()
    default._builder.cache_clear()


def test_arrays_of_cupy_are_taken_with_their_strides(cp: Any) -> None:
    add = RawKernel(CODE, "add")
    a, out = cp.arange(12, dtype="float32").reshape(3, 4), cp.zeros(12, "float32")
    add((1,), (32,), (a, a, out, 12))
    assert out.tolist() == (a + a).ravel().tolist()
    add((1,), (32,), (a.T, a[:, ::2], out, 8))  # The memory of `a`, whatever the views are.
    assert out[:8].tolist() == (a + a).ravel()[:8].tolist()


def test_a_launch_goes_to_the_current_stream_of_cupy(cp: Any) -> None:
    slow = RawModule(code=CODE).get_function("slow")
    x, host = cp.zeros(32, "float32"), cp.cuda.alloc_pinned_memory(128)
    values = np.frombuffer(host, "float32", 32)
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        slow((1,), (32,), (x, 20_000_000))
        x.get(stream=stream, out=values)  # after the kernel, in the same stream
    stream.synchronize()
    assert values.tolist() == [1.0] * 32
    slow((1,), (32,), (x, 20_000_000), stream=stream)
    stream.synchronize()
    assert x.tolist() == [2.0] * 32


def test_memory_without_a_shape_is_taken_in_the_current_stream(cp: Any) -> None:
    memory = cp.cuda.alloc(64)
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        RawKernel(CODE, "fill")((1,), (32,), (memory, 8, 1.5))
        values = cp.ndarray((8,), "float64", memory).get()
    assert values.tolist() == [1.5] * 8


def test_a_variable_is_memory_of_cupy(cp: Any) -> None:
    module = RawModule(code=CODE)
    pointer = module.get_global("factors")
    assert isinstance(pointer, cp.cuda.MemoryPointer)
    cp.ndarray((4,), "float32", pointer)[...] = cp.arange(4, dtype="float32")
    x = cp.ones(4, "float32")
    module.get_function("scale")((1,), (4,), (x,))
    assert x.tolist() == [0, 1, 2, 3]


def test_a_texture_is_passed_by_its_handle(cp: Any) -> None:
    data, out = cp.arange(32, dtype="float32"), cp.zeros(32, "float32")
    from cupy.cuda import texture

    channel = texture.ChannelFormatDescriptor(32, 0, 0, 0, cp.cuda.runtime.cudaChannelFormatKindFloat)
    resource = texture.ResourceDescriptor(
        cp.cuda.runtime.cudaResourceTypeLinear, arr=data, chDesc=channel, sizeInBytes=data.nbytes
    )
    made = texture.TextureObject(resource, texture.TextureDescriptor())
    RawKernel(FETCH, "fetch")((1,), (32,), (made, out))
    assert out.tolist() == data.tolist()


def test_arrays_of_preheat_and_of_cupy_in_one_launch(cp: Any) -> None:
    gpu = preheat.device("cuda:0")
    a, b, out = gpu.array([1.0] * 8, "float32"), cp.ones(8, "float32"), gpu.zeros(8)
    RawKernel(CODE, "add")((1,), (8,), (a, b, out, 8))
    assert out.numpy().tolist() == [2.0] * 8


def test_errors_are_those_of_cupy_as_well(cp: Any) -> None:
    with pytest.raises(cp.cuda.compiler.CompileException) as caught:
        RawKernel("broken", "k").compile()
    assert isinstance(caught.value, CompileError)
    with pytest.raises(cp.cuda.driver.CUDADriverError, match="named symbol not found") as missing:
        RawModule(code=CODE).get_function("nowhere")
    assert isinstance(missing.value, UnknownEntryError)
    with pytest.raises(cp.cuda.driver.CUDADriverError, match="CUDA_ERROR_FILE_NOT_FOUND"):
        RawModule(path="/nowhere.cubin").get_function("k")
    with pytest.raises(LaunchError, match="cannot take an ndarray of float64"):
        RawKernel(CODE, "add")((1,), (1,), (cp.zeros(1), cp.zeros(1), cp.zeros(1), 1))


def test_complex_functions_are_translated(cp: Any) -> None:
    code = """
    #include <cuComplex.h>
    extern "C" __global__ void add(cuDoubleComplex* a, cuDoubleComplex z, cuDoubleComplex* out) {
        out[threadIdx.x] = cuCadd(a[threadIdx.x], z);
    }
    """
    a, out = cp.arange(4, dtype="complex128"), cp.zeros(4, "complex128")
    add = RawKernel(code, "add", translate_cucomplex=True)
    add((1,), (4,), (a, 2 + 3j, out))
    assert out.tolist() == (a + (2 + 3j)).tolist()


def test_a_kernel_launches_a_kernel(cp: Any) -> None:
    code = """
    extern "C" __global__ void child(float* x) { x[threadIdx.x] = 1; }
    extern "C" __global__ void parent(float* x, int n) { child<<<1, n>>>(x + threadIdx.x * n); }
    """
    x = cp.zeros(32, "float32")
    RawKernel(code, "parent", ("-dc",))((1,), (4,), (x, 8))
    assert x.tolist() == [1.0] * 32


# The adapter

PROGRAM = """
import json
import cupy as cp
import preheat

x = cp.arange(1024, dtype="float32")
raw = cp.RawKernel('extern "C" __global__ void twice(float* x) { x[threadIdx.x] *= 2; }', "twice")
raw((1,), (1024,), (x,))
element = cp.ElementwiseKernel("float32 x, float32 y", "float32 z", "z = x * y + 1", "fused")
reduce = cp.ReductionKernel("T x", "T y", "x * x", "a + b", "y = a", "0", "squares")
y = element(x, x)
code = "template <class T> __global__ void tk(T* x) { *x = 7; }"
names = cp.RawModule(code=code, name_expressions=["tk<int>"])
z = cp.zeros(1, "int32")
names.get_function("tk<int>")((1,), (1,), (z,))
without_reductions = "libnvrtc.so" in open("/proc/self/maps").read()
results = [float(x[3]), float(y[3]), int(z[0]), float(reduce(x)), float((x + 1).sum())]
stats = preheat.default_builder().stats()["process"]
print(json.dumps({"results": results, "stats": stats, "nvrtc": without_reductions}))
"""


def run(place: Path, *words: str) -> str:
    """Run a command with caches of its own, and return what it prints."""
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(SOURCE), *filter(None, sys.path)]),
        "PREHEAT_CACHE_DIR": str(place / "cache"),
        "PREHEAT_LOCK_DIR": str(place / "locks"),
        "CUPY_CACHE_DIR": str(place / "cupy"),
    }
    return expect_success(start_process([sys.executable, *words], env=env, cwd=place))


def test_all_kernels_of_cupy_run_sealed_from_a_bundle(tmp_path: Path) -> None:
    pytest.importorskip("cupy", reason="CuPy is not installed")
    (tmp_path / "program.py").write_text(PROGRAM)
    command = ("--", sys.executable, "program.py")
    recorded = json.loads(run(tmp_path, "-m", "preheat", "record", *command).splitlines()[-1])
    assert recorded["stats"]["compiles"] >= 6
    shutil.rmtree(tmp_path / "cache")
    arch = str(preheat.device("cuda:0").arch)
    manifest = next(tmp_path.glob("*.toml"))
    run(tmp_path, "-m", "preheat", "bake", manifest.name, "--arch", arch, "-o", "kernels.heat")
    shutil.rmtree(tmp_path / "cache")
    sealed = run(tmp_path, "-m", "preheat", "run", "--bundle", "kernels.heat", "--sealed", *command)
    found = json.loads(sealed.splitlines()[-1])
    assert (
        found["results"]
        == recorded["results"]
        == pytest.approx([6.0, 37.0, 7.0, 1429559296.0, 1048576.0])
    )
    assert found["stats"].get("compiles", 0) == 0
    assert found["nvrtc"] is False
