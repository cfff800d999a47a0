"""Helpers for the tests of graphs: kernels, cases with operands, line numbers, and checks for leaks."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pytest

from preheat.devices.array import Array, Scalar
from preheat.devices.kernel import Kernel
from preheat.errors import CaptureWarning
from preheat.gpu import Gpu
from preheat.graph.graph import Graph
from preheat.graph.replay import Replayer
from preheat.process.callsite import shown_path
from tests.faulty import FaultyGpu

T = TypeVar("T")

KERNELS = """\
__device__ int table[3] = {1, 2, 3};

extern "C" __global__ void axpy(int a, const int* x, int* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = a * x[i] + y[i];
}
extern "C" __global__ void mix(float by, bool odd, const float* x, float* y, int n) {
    extern __shared__ float room[];
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = y[i] * 0.75f + x[odd ? n - 1 - i : i] * by;
}
extern "C" __global__ void note(const int* step, int* out, int* count) { out[(*count)++] = *step; }
extern "C" __global__ void keep(const void* value, int size, unsigned char* out, int* count) {
    for (int i = 0; i < size; i++) out[*count * size + i] = ((const unsigned char*)value)[i];
    (*count)++;
}
extern "C" __global__ void pair(const int* a, const int* b, int* out, int* count) {
    out[2 * *count] = *a;
    out[2 * *count + 1] = *b;
    (*count)++;
}
extern "C" __global__ void spin(long long cycles) {
    long long start = clock64();
    while (clock64() - start < cycles) {}
}
extern "C" __global__ void crash(int** chain) { *chain[0] = 1; }
"""


MODES = ["thread_local", "global", "relaxed"]
#: The factor of a launch that names none.
FACTOR = 3


class BodyError(Exception):
    """Raised by the body of a capture."""


class InterruptedByTestError(Exception):
    """Raised by a signal handler of a test, in the place of KeyboardInterrupt."""


class AxpyCase(NamedTuple):
    """A kernel that adds `a * x` to `y`, with its operands on a device; integers make results exact."""

    gpu: Gpu
    axpy: Kernel
    x: Array
    y: Array
    n: int
    xs: np.ndarray[Any, Any]
    ys: np.ndarray[Any, Any]

    def launch(self, a: int = FACTOR, times: int = 1) -> None:
        """Launch the kernel; from the third time on the launch is a fast one."""
        for _ in range(times):
            self.axpy[-(-self.n // 64), 64](a, self.x, self.y, self.n)

    def check(self, factor: int) -> None:
        """Check that `y` is the result of launches whose factors add up to `factor`."""
        np.testing.assert_array_equal(self.y.numpy(), self.ys + factor * self.xs)

    def check_launches(self, times: int) -> None:
        """Check that `y` is the result of this number of launches with the default factor."""
        self.check(FACTOR * times)

    def check_usable(self, launches: int = 0) -> None:
        """Check that the device works with and without a capture, after this number of launches."""
        context = self.gpu._context
        assert (context.captures_by_thread, context.unrestricted) == ({}, True)
        self.check_launches(launches)
        self.launch()
        graph = self.captured()
        graph.replay()
        self.check_launches(launches + 2)
        graph.close()

    def captured(self, a: int = FACTOR, **more: Any) -> Graph:
        """Return a graph of one launch."""
        with self.gpu.capture(**more) as graph:
            self.launch(a)
        return graph


def axpy_case(gpu: Gpu, n: int = 257) -> AxpyCase:
    """Return axpy on `gpu` with operands of `n` elements."""
    random = np.random.default_rng(n)
    xs, ys = (random.integers(-1000, 1000, n, dtype=np.int32) for _ in range(2))
    return AxpyCase(gpu, gpu.kernel(KERNELS, "axpy"), gpu.array(xs), gpu.array(ys), n, xs, ys)


@dataclass(frozen=True)
class ScalarLog:
    """A kernel that appends the value of a scalar to an array at every launch."""

    gpu: Gpu
    note: Kernel
    step: Scalar
    out: Array
    count: Array

    def captured(self, **more: Any) -> Graph:
        """Return a graph of one launch."""
        with self.gpu.capture(**more) as graph:
            self.note[1, 1](self.step, self.out, self.count)
        return graph

    def seen(self) -> list[int]:
        """Return the appended values in order."""
        return [int(value) for value in self.out.numpy()[: int(self.count.numpy()[0])]]


def scalar_log(gpu: Gpu, capacity: int = 200, name: str = "step") -> ScalarLog:
    """Return a log that holds up to `capacity` values."""
    step = gpu.scalar("int32", -1, name=name)
    out = gpu.array(np.full(capacity, -7, np.int32))
    count = gpu.zeros(1, "int32")
    return ScalarLog(gpu, gpu.kernel(KERNELS, "note"), step, out, count)


def replayer(graph: Graph) -> Replayer:
    """Return the object that replays a captured graph."""
    assert graph._replayer is not None
    return graph._replayer


class LegacyDefaultStream:
    """The legacy default stream as an object of another library."""

    def __init__(self, handle: int = 0) -> None:
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.handle)


def line_here(lines: int = 0) -> str:
    """Return the file and line of the caller plus `lines`, in the format of error messages."""
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return f"{shown_path(frame.f_back.f_code.co_filename)}:{frame.f_back.f_lineno + lines}"


def line_of(function: Callable[..., object], lines: int = 0) -> str:
    """Return the file and first line of a function plus `lines`, in the format of error messages."""
    code = function.__code__
    return f"{shown_path(code.co_filename)}:{code.co_firstlineno + lines}"


def runs_without_a_graph(reason: str = "") -> pytest.WarningsRecorder:
    """Expect a `CaptureWarning` that the body runs without a graph, for this reason."""
    return pytest.warns(CaptureWarning, match=f"(?s)runs without a graph: .*{re.escape(reason)}")


@contextmanager
def nothing_left_open(faulty: FaultyGpu, **failed: int) -> Iterator[None]:
    """Check that captures and graphs which begin in the block are ended and released.

    `failed` is the number of ends (`end`) and instantiations (`instantiate`) that fail.
    """
    before = faulty.device.calls.copy()
    yield
    faulty.gpu.synchronize()
    calls = faulty.device.calls - before
    assert calls["stream.begin_capture"] == calls["stream.end_capture"]
    assert calls["graph.close"] == calls["stream.end_capture"] - failed.get("end", 0)
    made = calls["graph.instantiate"] - failed.get("instantiate", 0)
    assert calls["executable.close"] == made
