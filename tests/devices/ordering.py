"""A device with deferred streams, beside stand-ins for torch and CuPy.

On deferred streams a missing wait gives a wrong number.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import pytest

from preheat.devices.array import Array
from preheat.devices.kernel import Kernel
from preheat.gpu import Gpu
from preheat.graph.graph import Graph
from tests.standin import FakeCuPy, FakeTorch

N = 33


SEEDS = range(40 if os.environ.get("PREHEAT_TEST_ALL") else 4)


SOURCE = """
extern "C" __global__ void put(int* x, int value, int n) {
    if (threadIdx.x < n) x[threadIdx.x] = value;
}
extern "C" __global__ void copy(const int* x, int* y, int n) {
    if (threadIdx.x < n) y[threadIdx.x] = x[threadIdx.x];
}
extern "C" __global__ void spread(const int* s, int* y, int n) {
    if (threadIdx.x < n) y[threadIdx.x] = *s;
}
"""


class World(NamedTuple):
    """A device with deferred streams, and two other libraries that work on it."""

    gpu: Gpu
    torch: FakeTorch
    cupy: FakeCuPy
    put: Kernel
    copy: Kernel
    spread: Kernel

    def set(self, x: Any, value: int, stream: object = None) -> None:
        """Set every number of an array, by a kernel."""
        self.put.launch(x, value, N, grid=1, block=64, stream=stream)

    def read(self, x: Any, stream: object = None) -> list[int]:
        """Return what a kernel sees in an array."""
        out = self.gpu.zeros(N, "int32")
        self.copy.launch(x, out, N, grid=1, block=64, stream=stream)
        return [int(n) for n in out.numpy()]

    def captured_copy(self, source: Any, target: Any) -> Graph:
        """Copy once, and return a graph that copies."""
        self.copy[1, 64](source, target, N)
        with self.gpu.capture() as graph:
            self.copy[1, 64](source, target, N)
        return graph

    def captured_put(self, x: Any, value: int) -> Graph:
        """Set every number to 1, and return a graph that sets it to `value`."""
        self.put[1, 64](x, 1, N)
        with self.gpu.capture() as graph:
            self.put[1, 64](x, value, N)
        return graph

    def zeros(self, **more: Any) -> Array:
        """Return an array that launches have used, so that later launches take the fast path."""
        made = self.gpu.zeros(N, "int32", **more)
        self.warm(made)
        return made

    def warm(self, x: Any) -> None:
        """Launch the kernels on an array until they take the short path."""
        out = self.gpu.zeros(N, "int32")
        for _ in range(4):
            self.put[1, 64](x, 0, N)
            self.copy[1, 64](x, out, N)


every_schedule = pytest.mark.parametrize("world", SEEDS, indirect=True)


every_consumer = pytest.mark.parametrize("consumer", ["torch", "cupy"])


def shared(world: World, consumer: str, array: Array) -> Any:
    """Return the array as another library has it."""
    return world.torch.from_dlpack(array) if consumer == "torch" else world.cupy.asarray(array)


def fill(tensor: Any, value: int) -> None:
    """Fill a tensor by its own library."""
    (tensor.fill_ if hasattr(tensor, "fill_") else tensor.fill)(value)


def is_shared(array: Array) -> bool:
    """Return True if another library may use the memory at any time."""
    return array.buffer.uses.exported
