"""Helpers for the tests with torch and CuPy: kernels, slow work, and one interface to both."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from preheat.devices import dlpack
from preheat.devices.array import Array
from preheat.devices.kernel import Kernel
from preheat.errors import CaptureError
from preheat.gpu import Gpu
from tests.devices.support import import_or_skip
from tests.processes import SOURCE as PACKAGE

N = (1 << 16) + 33
SLOW = 100_000_000  # cycles, about 50 milliseconds
BLOCK = 256
GRID = -(-N // BLOCK)

SPIN = """
extern "C" __global__ void spin(long long cycles) {
    long long start = clock64();
    while (clock64() - start < cycles) { }
}
"""

SOURCE = (
    SPIN
    + """
extern "C" __global__ void put(float* x, float value, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] = value;
}
extern "C" __global__ void copy(const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i];
}
extern "C" __global__ void spread(const float* s, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = *s;
}
extern "C" __global__ void gather(const float* x, long long step, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i * step];
}
extern "C" __global__ void pairs(const float2* x, float2* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i];
}
"""
)


class Work(NamedTuple):
    """Kernels of one device on arrays of N float32 numbers. Launches go to `stream`."""

    gpu: Gpu

    def kernel(self, name: str) -> Kernel:
        return self.gpu.kernel(SOURCE, name)

    def _launch(self, name: str, stream: object, *args: Any) -> None:
        kernel = self.kernel(name)
        if stream is None:
            kernel[GRID, BLOCK](*args)
        else:
            kernel.launch(*args, grid=GRID, block=BLOCK, stream=stream)

    def linger(self, stream: object = None, cycles: int = SLOW) -> None:
        """Keep a stream busy for a while."""
        self.kernel("spin").launch(cycles, grid=1, block=1, stream=stream)

    def put(self, x: Any, value: float, stream: object = None) -> None:
        """Set every element of `x`."""
        self._launch("put", stream, x, value, N)

    def copy(self, x: Any, y: Any, stream: object = None) -> None:
        """Copy `x` to `y`."""
        self._launch("copy", stream, x, y, N)

    def spread(self, scalar: Any, y: Any, stream: object = None) -> None:
        """Copy one number to every element of `y`."""
        self._launch("spread", stream, scalar, y, N)

    def gather(self, x: Any, step: int, y: Any, stream: object = None) -> None:
        """Copy every `step`th element of `x`."""
        self._launch("gather", stream, x, step, y, N)

    def warm(self) -> None:
        """Load every kernel, and launch often enough for the fast functions to be in use."""
        x = self.gpu.zeros(N)
        y = self.gpu.zeros(N)
        scalar = self.gpu.scalar("float32")
        for _ in range(4):
            self.linger(cycles=1)
            self.put(x, 0.0)
            self.copy(x, y)
            self.spread(scalar, y)
            self.gather(x, 1, y)
        self.gpu.synchronize()


def distinct(values: Any) -> set[Any]:
    """Return the set of values in an array on the host."""
    return set(np.unique(np.asarray(values)).tolist())


# The libraries


class Recording(Protocol):
    """A graph of another library."""

    def replay(self) -> None:
        """Replay the graph in the current stream of the library."""


class Peer(ABC):
    """Another library with its own current stream. Its arrays are N float32 numbers."""

    name: str

    def __init__(self) -> None:
        self.module = import_or_skip(self.name)
        for work in (self.copied, self.host, lambda x: self.fill(x, 1.0), lambda x: self.add(x, 1.0)):
            work(self.full(0.0))  # Every kernel must be loaded before a capture needs it.
        self.linger(1)
        self.synchronize()

    @abstractmethod
    def full(self, value: float) -> Any:
        """Return a new array."""

    @abstractmethod
    def take(self, array: Array, how: str = "dlpack") -> Any:
        """Import one of our arrays by DLPack or by the array interface."""

    @abstractmethod
    def linger(self, cycles: int = SLOW) -> None:
        """Keep the current stream busy for a while."""

    @abstractmethod
    def fill(self, x: Any, value: float) -> None:
        """Set every element."""

    @abstractmethod
    def add(self, x: Any, value: float) -> None:
        """Add to every element."""

    @abstractmethod
    def copied(self, x: Any) -> Any:
        """Return a copy that the library makes in its current stream."""

    @abstractmethod
    def host(self, x: Any) -> np.ndarray[Any, Any]:
        """Return the values after the work of the current stream."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for the GPU with the function of the library."""

    @abstractmethod
    def current(self) -> Any:
        """Return the current stream."""

    @abstractmethod
    def stream(self) -> AbstractContextManager[Any]:
        """Make a new stream the current one for a while."""

    @abstractmethod
    def capture(self, mode: str = "global", stream: object = None) -> AbstractContextManager[Recording]:
        """Capture the work of the library in `stream` or a new one; always end the capture."""

    def place(self, *, side: bool) -> AbstractContextManager[Any]:
        """Work in a new stream, or in the default one."""
        return self.stream() if side else nullcontext()


class Torch(Peer):
    """torch."""

    name = "torch"

    def full(self, value: float) -> Any:
        return self.module.full((N,), value, device="cuda")

    def take(self, array: Array, how: str = "dlpack") -> Any:
        if how == "dlpack":
            return self.module.from_dlpack(array)
        return self.module.as_tensor(array, device="cuda")

    def linger(self, cycles: int = SLOW) -> None:
        self.module.cuda._sleep(cycles)

    def fill(self, x: Any, value: float) -> None:
        x.fill_(value)

    def add(self, x: Any, value: float) -> None:
        x.add_(value)

    def copied(self, x: Any) -> Any:
        return x.clone()

    def host(self, x: Any) -> np.ndarray[Any, Any]:
        values: np.ndarray[Any, Any] = x.detach().cpu().numpy()
        return values

    def synchronize(self) -> None:
        self.module.cuda.synchronize()

    def current(self) -> Any:
        return self.module.cuda.current_stream()

    @contextmanager
    def stream(self) -> Iterator[Any]:
        made = self.module.cuda.Stream()
        with self.module.cuda.stream(made):
            yield made
        made.synchronize()

    @contextmanager
    def capture(self, mode: str = "global", stream: Any = None) -> Iterator[Recording]:
        graph = self.module.cuda.CUDAGraph()
        before = self.current()
        try:
            with self.module.cuda.graph(graph, stream=stream, capture_error_mode=mode):
                yield graph
        finally:
            # Torch does not restore it after an invalidated capture.
            self.module.cuda.set_stream(before)


class CuPy(Peer):
    """CuPy."""

    name = "cupy"

    def full(self, value: float) -> Any:
        return self.module.full(N, value, self.module.float32)

    def take(self, array: Array, how: str = "dlpack") -> Any:
        return self.module.from_dlpack(array) if how == "dlpack" else self.module.asarray(array)

    def linger(self, cycles: int = SLOW) -> None:
        _cupy_spin()((1,), (1,), (np.int64(cycles),))

    def fill(self, x: Any, value: float) -> None:
        x.fill(value)

    def add(self, x: Any, value: float) -> None:
        self.module.add(x, value, out=x)

    def copied(self, x: Any) -> Any:
        return x.copy()

    def host(self, x: Any) -> np.ndarray[Any, Any]:
        values: np.ndarray[Any, Any] = self.module.asnumpy(x)
        return values

    def synchronize(self) -> None:
        self.module.cuda.runtime.deviceSynchronize()

    def current(self) -> Any:
        return self.module.cuda.get_current_stream()

    @contextmanager
    def stream(self) -> Iterator[Any]:
        made = self.module.cuda.Stream(non_blocking=True)
        with made:
            yield made
        made.synchronize()

    @contextmanager
    def capture(self, mode: str = "global", stream: Any = None) -> Iterator[Recording]:
        made = _CuPyRecording()
        chosen = self.module.cuda.Stream(non_blocking=True) if stream is None else stream
        self.synchronize()
        with chosen:
            chosen.begin_capture(getattr(self.module.cuda.runtime, _CUPY_MODES[mode]))
            try:
                yield made
            finally:
                made.graph = chosen.end_capture()


_CUPY_MODES = {
    "global": "streamCaptureModeGlobal",
    "thread_local": "streamCaptureModeThreadLocal",
    "relaxed": "streamCaptureModeRelaxed",
}


class _CuPyRecording:
    """A graph of CuPy, which exists once its capture has ended."""

    graph: Any = None

    def replay(self) -> None:
        """Launch the graph in the current stream of CuPy."""
        self.graph.launch()


@functools.cache
def _cupy_spin() -> Any:
    return import_or_skip("cupy").RawKernel(SPIN, "spin")


PEERS: dict[str, Callable[[], Peer]] = {"torch": Torch, "cupy": CuPy}


def refusal(do: Callable[[], object]) -> CaptureError | None:
    """Run the work, and return the error if preheat refuses it because of a capture."""
    try:
        do()
    except CaptureError as error:
        return error.with_traceback(None)
    return None


# Producers, streams and processes


class Foreign:
    """A stream that has only the `__cuda_stream__` protocol."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.handle)


class Producer:
    """A tensor of a library that has only DLPack, in the memory of one of our arrays.

    It can claim another version of the protocol, or that it is read-only as JAX's arrays are.
    """

    def __init__(self, array: Array, *, major: int = 1, read_only: bool = False) -> None:
        self.array = array
        self.shape = array.shape
        self.dtype = array.dtype
        self._major, self._read_only = major, read_only

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()

    def __dlpack__(self, *, stream: int | None = None, **_: Any) -> Any:
        given = self.array.__dlpack__(stream=stream, max_version=(1, 0))
        address = dlpack._pointer(id(given), dlpack._VERSIONED)
        tensor = dlpack._Versioned.from_address(address)
        tensor.major = self._major
        tensor.flags = int(self._read_only)
        return given


class ReadOnlyInterface:
    """A read-only tensor of a library that has only the CUDA array interface."""

    def __init__(self, array: Array) -> None:
        self._array = array

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {**self._array.__cuda_array_interface__, "data": (self._array.address, True)}


def child(code: str, cache: Path) -> subprocess.CompletedProcess[str]:
    """Run `code` in a new Python process with this package, and wait for its end.

    Warnings are left out: some libraries give them when they are imported.
    """
    roots = [str(PACKAGE), *filter(None, [os.environ.get("PYTHONPATH")])]
    more = {"PYTHONPATH": os.pathsep.join(roots), "PREHEAT_CACHE_DIR": str(cache)}
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**os.environ, **more}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def ends_in_silence(code: str, cache: Path) -> None:
    """Check that a process with this code exits with 0 and prints nothing."""
    done = child(code, cache)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
