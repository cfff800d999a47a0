"""The emulator as a device: memory is the host's, work is done when it is submitted."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from preheat.arch import Arch
from preheat.artifact import Artifact
from preheat.devices import base
from preheat.devices.emulator.capture import Captures
from preheat.devices.emulator.image import image
from preheat.devices.emulator.memory import POISON, Buffer, Memory
from preheat.devices.emulator.module import EmulatorModule, invalid
from preheat.devices.emulator.stream import EmulatorStream
from preheat.errors import DeviceError, DriverError, InputError, OutOfMemoryError
from preheat.toolchain import ptx

__all__ = ["COUNT", "EmulatorDevice"]

COUNT = 8  # devices that there are
_ALIGN = 256
_TOTAL = 16 << 30


class EmulatorDevice:
    """Runs PTX on the CPU, the same way every time, and stops at what a GPU would not survive.

    A kernel is said to hang when `patience` basic blocks ran and no thread wrote global or shared
    memory, passed a barrier or ended, and when ten times as many ran and no thread ended.
    """

    def __init__(
        self, index: int = 0, arch: Arch | str = "sm_90", *, patience: int = 5_000_000
    ) -> None:
        if not 0 <= index < COUNT:
            raise InputError(
                f"there is no emulator:{index}", hint=f"they are numbered 0 to {COUNT - 1}"
            )
        self.index = index
        self.name = f"emulator:{index}"
        self.model = "PTX emulator"
        self.arch = Arch.parse(arch)
        self.limits = base.Limits()
        self.dlpack = (1, 0)
        self.forks = True
        self.on_loss: Callable[[DeviceError], None] = lambda _: None
        self.patience = patience
        self.lock = threading.RLock()
        self._begin()

    def _begin(self) -> None:
        self._memory = Memory()
        self.captures = Captures()
        self._allocated: dict[int, tuple[Buffer, np.ndarray[Any, Any]]] = {}
        self._used = 0

    def load(self, artifact: Artifact, *, jit: bool = False) -> base.Module:
        """Load an artifact's PTX; `InvalidCodeError` when it has no shape that can run."""
        del jit
        try:
            loaded = image(artifact.ptx.decode())
            with self.lock:
                return EmulatorModule(loaded, artifact, self._memory, self)
        except UnicodeDecodeError as bad:
            raise invalid(f"not a text: {bad}") from None
        except ptx.SyntaxFault as bad:
            raise invalid(f"{bad}, line {bad.line}") from None

    def stream(self, *, priority: int = 0) -> base.Stream:
        """A new stream."""
        del priority
        return EmulatorStream(self.captures)

    def adopt(self, handle: int) -> base.Stream:
        """A stream by its number."""
        return EmulatorStream(self.captures, handle)

    def allocate(self, size: int, stream: base.Stream) -> int:
        """Address of `size` new bytes, each of them `POISON`."""
        self.captures.guard("allocate", stream.handle)
        with self.lock:
            if self._used + size > _TOTAL:
                raise _out_of_memory(size)
            try:
                block = np.full(size + 2 * _ALIGN, POISON, np.uint8)
            except MemoryError:
                raise _out_of_memory(size) from None
            address = -(-block.ctypes.data // _ALIGN) * _ALIGN
            self._allocated[address] = (self._memory.add(address, size), block)
            self._used += size
            return address

    def free(self, address: int, stream: base.Stream) -> None:
        """Give memory back."""
        self.captures.guard("free", stream.handle)
        with self.lock:
            if address not in self._allocated:
                raise DeviceError(f"there is no buffer at {address:#x}")
            buffer, _ = self._allocated.pop(address)
            self._memory.free(buffer)
            self._used -= buffer.end - buffer.start

    @contextmanager
    def lend(self, address: int, size: int, writable: bool) -> Iterator[None]:
        """Let kernels use memory of the host meanwhile."""
        with self.lock:
            memory, buffer = self._memory, self._memory.add(address, size, writable=writable)
        try:
            yield
        finally:
            with self.lock:
                memory.remove(buffer)

    def copy_in(self, address: int, data: memoryview, stream: base.Stream) -> None:
        """Bytes from the host."""
        self.captures.guard("copy from the host", stream.handle)
        if data.nbytes:
            with self.lock:
                ctypes.memmove(address, np.frombuffer(data, np.uint8).ctypes.data, data.nbytes)

    def copy_out(self, data: memoryview, address: int, stream: base.Stream) -> None:
        """Bytes to the host."""
        self.captures.guard("copy to the host", stream.handle)
        if data.nbytes:
            with self.lock:
                ctypes.memmove(np.frombuffer(data, np.uint8).ctypes.data, address, data.nbytes)

    def copy(self, target: int, source: int, size: int, stream: base.Stream) -> None:
        """Bytes from place to place."""
        self._do("copy", stream, lambda: ctypes.memmove(target, source, size))

    def fill(self, address: int, value: bytes, count: int, stream: base.Stream) -> int:
        """Write `value` `count` times."""
        size = len(value) * count
        self._do("fill", stream, lambda: ctypes.memmove(address, value * count, size))
        return 1

    def _do(self, kind: str, stream: base.Stream, work: Callable[[], object]) -> None:
        """Do it, or let it become part of the stream's capture."""

        def locked() -> None:
            with self.lock:
                work()

        capture = self.captures.of(stream.handle)
        if capture is None:
            locked()
        else:
            capture.add(kind, "", locked)

    def setter(self, places: Sequence[tuple[int, int]], stream: base.Stream) -> base.Setter:
        """Write several values."""

        def set_all(values: Sequence[bytes]) -> tuple[int, ...]:
            if (capture := self.captures.of(stream.handle)) is not None:
                raise capture.invalidate("set")
            with self.lock:
                for (address, size), value in zip(places, values, strict=True):
                    ctypes.memmove(address, value, size)
            return (0,)

        return set_all

    def owner(self, address: int) -> object:
        """The array that allocated memory is part of."""
        return self._allocated[address][1]

    def memory(self) -> base.MemoryInfo:
        """How much there is."""
        return base.MemoryInfo(_TOTAL - self._used, _TOTAL)

    def synchronize(self) -> None:
        """Wait for a launch in another thread."""
        self.captures.guard("synchronize", everywhere=True)
        with self.lock:
            pass

    def check(self, status: tuple[int, ...], call: str) -> None:
        """Raise for a status that is not 0; launches here raise by themselves."""
        if status[0]:
            raise DriverError(call, status[0], "EMULATOR_ERROR", "the emulator gives no such status")

    def trim(self) -> None:
        """Nothing is kept."""
        self.captures.guard("trim")

    def reset(self) -> None:
        """Begin anew: everything allocated or loaded is gone."""
        with self.lock:
            self._begin()

    def after_fork(self) -> None:
        """Whoever launched in the parent does not do so here."""
        self.lock = threading.RLock()
        self.captures.forget()

    def close(self) -> None:
        """Give the device back."""
        self.reset()


def _out_of_memory(size: int) -> OutOfMemoryError:
    return OutOfMemoryError(
        "emulator allocate", 2, "EMULATOR_OUT_OF_MEMORY", f"no room for {size} bytes"
    )
