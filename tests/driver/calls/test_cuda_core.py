"""Programs of cuda.core run on the CPU driver."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.driver.calls.cuda import cu, ok

pytestmark = pytest.mark.cpu_driver

core = pytest.importorskip("cuda.core")

ADD = """
template <typename T> __global__ void add(const T* a, const T* b, T* c, size_t n) {
    size_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) c[i] = a[i] + b[i];
}
extern "C" __global__ void count(int* x) { atomicAdd(x, 1); }
"""
SIZE = 5000


@pytest.fixture
def stream() -> Iterator[Any]:
    device = core.Device()
    device.set_current()
    made = device.create_stream()
    yield made
    made.close()
    ok(cu.cuCtxSetCurrent(cu.CUcontext(0)))  # The stack of contexts of this thread is empty again.


def compiled(kind: str, name: str) -> Any:
    """Return a kernel that NVRTC has compiled."""
    options = core.ProgramOptions(std="c++17", arch="sm_90")
    made = core.Program(ADD, "c++", options).compile(kind, name_expressions=(name,))
    return made.get_kernel(name)


@pytest.mark.parametrize("kind", ["cubin", "ptx"])
def test_a_kernel_is_compiled_and_launched(stream: Any, kind: str) -> None:
    kernel = compiled(kind, "add<float>")
    a, b = (np.random.default_rng(seed).random(SIZE, np.float32) for seed in (1, 2))
    buffers = [core.Device().allocate(4 * SIZE, stream=stream) for _ in range(3)]
    for buffer, array in zip(buffers, (a, b), strict=False):
        ok(cu.cuMemcpyHtoDAsync(int(buffer.handle), array.ctypes.data, 4 * SIZE, stream.handle))
    config = core.LaunchConfig(grid=(SIZE + 255) // 256, block=256)
    core.launch(stream, config, kernel, *buffers, np.uint64(SIZE))
    found = np.empty_like(a)
    ok(cu.cuMemcpyDtoHAsync(found.ctypes.data, int(buffers[2].handle), 4 * SIZE, stream.handle))
    assert (found == a + b).all()
    for buffer in buffers:
        buffer.close(stream)


def test_a_graph_is_built_and_launched(stream: Any) -> None:
    kernel = compiled("cubin", "count")
    counter = core.Device().allocate(4, stream=stream)
    counter.fill(0, stream=stream)
    builder = stream.create_graph_builder()
    builder.begin_building()
    for _ in range(2):
        core.launch(builder, core.LaunchConfig(grid=1, block=32), kernel, counter)
    graph = builder.end_building().complete()
    graph.upload(stream)
    graph.launch(stream)
    graph.launch(stream)
    found = np.zeros(1, np.int32)
    ok(cu.cuMemcpyDtoHAsync(found.ctypes.data, int(counter.handle), 4, stream.handle))
    assert found.tolist() == [128]
    counter.close(stream)
