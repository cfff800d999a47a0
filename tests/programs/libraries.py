"""Other libraries for random programs: stand-ins on the emulator, the real libraries on a GPU."""

from __future__ import annotations

from typing import Any, Protocol

from preheat.gpu import Gpu
from tests.standin import FakeCuPy, FakeTorch

__all__ = ["SPIN", "STREAMS", "Library", "RealCuPy", "RealTorch", "Standin"]

STREAMS = 3  # of each library
SPIN = """
extern "C" __global__ void spin(long long cycles) {
    long long start = clock64();
    while (clock64() - start < cycles) {}
}
"""


class Library(Protocol):
    """A library with tensors of int32 and streams of its own, one of which is current."""

    def full(self, count: int, value: int) -> Any:
        """Return a new tensor of one number."""

    def take(self, array: Any) -> Any:
        """Return a tensor over the memory of an array of preheat."""

    def fill(self, tensor: Any, value: int) -> None:
        """Set every number, in the current stream."""

    def copy(self, target: Any, source: Any) -> None:
        """Copy numbers, in the current stream."""

    def read(self, tensor: Any) -> list[int]:
        """Return the numbers, after the work in the current stream."""

    def switch(self, number: int) -> None:
        """Work in another stream from here on, which waits for the one before."""

    def fork(self, number: int) -> None:
        """Inside a capture, work in a side stream from here on, which waits for the captured one."""

    def join(self) -> None:
        """Work in the captured stream again, which waits for the side stream."""

    def handle(self) -> int:
        """Return the handle of the current stream."""

    def slow(self) -> None:
        """Keep the current stream busy for a while."""


class Standin:
    """A stand-in on the emulator."""

    def __init__(self, library: FakeTorch | FakeCuPy) -> None:
        self._library: Any = library
        self._streams = [library.default, *(library.new_stream() for _ in range(STREAMS - 1))]
        self._torch = isinstance(library, FakeTorch)
        self._captured: Any = None

    def full(self, count: int, value: int) -> Any:
        return self._library.full(count, value)

    def take(self, array: Any) -> Any:
        return self._library.from_dlpack(array) if self._torch else self._library.asarray(array)

    def fill(self, tensor: Any, value: int) -> None:
        (tensor.fill_ if self._torch else tensor.fill)(value)

    def copy(self, target: Any, source: Any) -> None:
        (target.copy_ if self._torch else target.copy_from)(source)

    def read(self, tensor: Any) -> list[int]:
        found: list[int] = tensor.tolist()
        return found

    def switch(self, number: int) -> None:
        before = self._library.current
        self._library.current = self._streams[number]
        self._library.order(before)

    def fork(self, number: int) -> None:
        self._captured = self._library.current
        self.switch(number)

    def join(self) -> None:
        side = self._library.current
        self._library.current = self._captured
        self._library.order(side)

    def handle(self) -> int:
        return int(self._library.current.handle)

    def slow(self) -> None:
        """The schedule defers the work already."""


class RealTorch:
    """torch itself."""

    def __init__(self, gpu: Gpu, torch: Any) -> None:
        del gpu
        self._torch = torch
        first = torch.cuda.default_stream()
        self._streams = [first, *(torch.cuda.Stream() for _ in range(STREAMS - 1))]
        torch.cuda.set_stream(first)

    def full(self, count: int, value: int) -> Any:
        return self._torch.full((count,), value, dtype=self._torch.int32, device="cuda")

    def take(self, array: Any) -> Any:
        return self._torch.from_dlpack(array)

    def fill(self, tensor: Any, value: int) -> None:
        tensor.fill_(value)

    def copy(self, target: Any, source: Any) -> None:
        target.copy_(source)

    def read(self, tensor: Any) -> list[int]:
        return [int(n) for n in tensor.cpu().tolist()]

    def switch(self, number: int) -> None:
        before = self._torch.cuda.current_stream()
        there = self._streams[number]
        there.wait_stream(before)
        self._torch.cuda.set_stream(there)

    def fork(self, number: int) -> None:
        self._captured = self._torch.cuda.current_stream()
        self.switch(number)

    def join(self) -> None:
        side = self._torch.cuda.current_stream()
        self._captured.wait_stream(side)
        self._torch.cuda.set_stream(self._captured)

    def handle(self) -> int:
        return int(self._torch.cuda.current_stream().cuda_stream)

    def slow(self) -> None:
        self._torch.cuda._sleep(2_000_000)


class RealCuPy:
    """CuPy itself."""

    def __init__(self, gpu: Gpu, cupy: Any) -> None:
        del gpu
        self._cupy = cupy
        first = cupy.cuda.Stream.null
        self._streams = [first, *(cupy.cuda.Stream(non_blocking=True) for _ in range(STREAMS - 1))]
        first.use()
        self._spin = cupy.RawKernel(SPIN, "spin")

    def full(self, count: int, value: int) -> Any:
        return self._cupy.full((count,), value, dtype=self._cupy.int32)

    def take(self, array: Any) -> Any:
        return self._cupy.asarray(array)

    def fill(self, tensor: Any, value: int) -> None:
        tensor.fill(value)

    def copy(self, target: Any, source: Any) -> None:
        target[...] = source

    def read(self, tensor: Any) -> list[int]:
        return [int(n) for n in tensor.get()]

    def switch(self, number: int) -> None:
        before = self._cupy.cuda.get_current_stream()
        there = self._streams[number]
        there.wait_event(before.record())
        there.use()

    def fork(self, number: int) -> None:
        self._captured = self._cupy.cuda.get_current_stream()
        self.switch(number)

    def join(self) -> None:
        side = self._cupy.cuda.get_current_stream()
        self._captured.wait_event(side.record())
        self._captured.use()

    def handle(self) -> int:
        return int(self._cupy.cuda.get_current_stream().ptr)

    def slow(self) -> None:
        self._spin((1,), (1,), (self._cupy.int64(2_000_000),))
