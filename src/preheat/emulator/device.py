"""The emulator as a device: memory is host memory, and work is executed when it is submitted.

With a schedule, the memory counts as another device's, and work is queued instead: see
`schedule`.
"""

from __future__ import annotations

import ctypes
import io
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from preheat.devices import base
from preheat.emulator.allocator import TOTAL_BYTES, Allocator, Heap
from preheat.emulator.capture import Captures
from preheat.emulator.errors import error_of
from preheat.emulator.graph import EmulatorExecutable
from preheat.emulator.graph_work import GraphWork
from preheat.emulator.limits import launch_limits, multiprocessor
from preheat.emulator.memory import HostMemory, Memory
from preheat.emulator.schedule import Scheduler
from preheat.emulator.stream import EmulatorEvent, EmulatorStream, Streams
from preheat.errors import DeviceError, InputError, short_repr
from preheat.model.arch import Arch
from preheat.process.lazy import LazyModule

if TYPE_CHECKING:
    from preheat.emulator import module
    from preheat.emulator.surfaces import Surface
    from preheat.emulator.textures import Texture
    from preheat.model.artifact import Artifact
else:
    # All that compiles and executes PTX: a device is opened before it is needed.
    module = LazyModule("preheat.emulator.module")

__all__ = ["COUNT", "EmulatorDevice", "device_name"]

ARCH = "sm_90"  # The default.
COUNT = 8  # The number of devices.
PATIENCE = 5_000_000  # The default.
_DLPACK_OTHER_DEVICE = 12  # DLPack's number for a device that is neither the host nor a known GPU.


class EmulatorDevice:
    """Runs PTX on the CPU, deterministically, and stops at errors that a GPU would not survive.

    A kernel counts as hanging if `patience` basic blocks ran and no thread wrote global or shared
    memory, passed a barrier or ended, or if ten times as many ran and no thread ended.

    With a `schedule`, which is a seed, streams are deferred: work is queued and executed late, in an
    order that the seed chooses among those that streams and events allow.

    With `sanitize`, a kernel also stops where it uses a value that CUDA leaves undefined: shared memory
    that was never written, or the value of a lane that does not take part in a shuffle. It also stops
    at a barrier that not all threads of its block reach.

    With `host_arrays`, kernels also use memory of the host that no GPU could use: arrays of NumPy and
    tensors on the CPU.

    `thread_mode` returns the capture mode of the calling thread, for programs that exchange it.

    Attributes:
        textures: What kernels find by the handles of texture and surface objects.
    """

    def __init__(
        self,
        index: int = 0,
        arch: Arch | str = ARCH,
        *,
        patience: int = PATIENCE,
        schedule: int | None = None,
        sanitize: bool = False,
        host_arrays: bool = False,
        thread_mode: Callable[[], str] = lambda: "global",
    ) -> None:
        self.name = device_name(index, arch, patience, schedule, sanitize, host_arrays)
        self.index = index
        self.arch = Arch.parse(arch)
        self.model = "PTX emulator"
        self.limits = launch_limits(self.arch)
        self.multiprocessor = multiprocessor(self.arch)
        self.dlpack = (base.ON_HOST, 0) if schedule is None else (_DLPACK_OTHER_DEVICE, index)
        self.survives_fork = True
        self.recovers = True
        self.on_loss: Callable[[DeviceError], None] = lambda _: None
        self.patience = patience
        self.schedule = schedule
        self.sanitize = sanitize
        self.host_arrays = host_arrays
        self.executed = 0  # kernels
        self._thread_mode = thread_mode
        self.lock = threading.RLock()
        self._reset_state()

    def _reset_state(self) -> None:
        self._memory = Memory()
        self.heap = Heap(self._memory)
        self.textures: dict[int, Texture | Surface] = {}
        self.host_memory = HostMemory(self, self._memory)
        self.scheduler = None
        if self.schedule is not None:
            self.scheduler = Scheduler(self.schedule, self.lock, lambda fault: self.on_loss(fault))
        self.allocator = Allocator(self._memory, self.scheduler, self.lock)
        self.captures = Captures(self.scheduler, self._thread_mode)
        self.streams = Streams(self.captures, self.scheduler)

    def report_fault(self, fault: DeviceError) -> None:
        """Report a fault at once. A scheduler reports it when a call raises it."""
        if self.scheduler is None:
            self.on_loss(fault)

    def import_loader(self) -> None:
        """Import what loads and executes PTX now, and not at the first `load`."""
        _ = module.load

    def load(
        self, artifact: Artifact, *, jit: bool = False, lines: base.FindLines | None = None
    ) -> module.EmulatorModule:
        """Load an artifact's PTX, or raise `InvalidCodeError` if it cannot run."""
        del jit
        if artifact.cubin and not artifact.ptx:
            raise DeviceError(
                f"{artifact.label} is a cubin, and {self.name} executes PTX alone",
                hint="compile it to PTX, or pass its source",
            )
        return module.load(artifact, self._memory, self, lines, sanitize=self.sanitize)

    def stream(self, *, priority: int = 0, blocking: bool = False) -> EmulatorStream:
        """Return a new stream. One that is `blocking` is ordered with the legacy default stream."""
        del priority
        return self.streams.open(blocking=blocking)

    def event(self) -> EmulatorEvent:
        """Return an event that was not recorded yet."""
        return EmulatorEvent(self.captures, self.scheduler)

    def executable(self, work: GraphWork, *, free_on_launch: bool = False) -> EmulatorExecutable:
        """Return work that can be executed as one graph any number of times."""
        return EmulatorExecutable(work, self.scheduler, free_on_launch=free_on_launch)

    def adopt(self, handle: int) -> EmulatorStream:
        """Return the stream with this handle."""
        return self.streams.adopt(handle)

    def allocate(self, size: int, stream: base.Stream) -> int:
        """Return the address of `size` new bytes of `POISON`; in a captured stream, of each replay."""
        branch = self.captures.find(stream.id)
        if branch is None:
            return self.allocator.allocate(size, stream)
        made = self.allocator.graph_allocation(size)
        branch.add("allocation", "", made)
        return made.address

    def free(self, address: int, stream: base.Stream) -> None:
        """Free memory after the work that is queued in `stream`, or in each replay."""
        branch = self.captures.find(stream.id)
        if branch is None:
            self.allocator.free(address, stream)
            return
        made = branch.capture.find_unfreed(address)
        if made is None:  # A graph frees what it allocated.
            raise branch.capture.invalidate("free", 1)
        branch.add("free", "", self.allocator.graph_free(made))

    def copy_in(self, address: int, data: memoryview, stream: base.Stream) -> None:
        """Copy bytes from the host."""
        self.captures.reject("copy from the host", stream.id)
        if not data.nbytes:
            return
        if self.scheduler is not None:
            target = [(address, data.nbytes)]
            work = self._deferred_write("copy from the host", target, [data.tobytes()])
            self.scheduler.submit(stream.id, work)
            return
        with self.lock:
            ctypes.memmove(address, np.frombuffer(data, np.uint8).ctypes.data, data.nbytes)

    def copy_out(self, data: memoryview, address: int, stream: base.Stream) -> None:
        """Copy bytes to the host."""
        self.captures.reject("copy to the host", stream.id)
        if not data.nbytes:
            return
        host = np.frombuffer(data, np.uint8)

        def work() -> None:
            with self.lock:
                self.allocator.require_valid("copy to the host", address, data.nbytes, write=False)
                ctypes.memmove(host.ctypes.data, address, data.nbytes)

        if self.scheduler is None:
            work()
        else:
            self.scheduler.run_until(self.scheduler.submit(stream.id, work))

    def copy(self, target: int, source: int, size: int, stream: base.Stream) -> None:
        """Copy bytes within device memory."""
        addresses = (source, target)
        self._submit("copy", stream, lambda: ctypes.memmove(target, source, size), size, addresses)

    def fill(self, address: int, value: bytes, count: int, stream: base.Stream) -> int:
        """Write `value` `count` times."""
        size = len(value) * count
        self._submit(
            "fill", stream, lambda: ctypes.memmove(address, value * count, size), size, (address,)
        )
        return 1

    def _submit(
        self,
        kind: str,
        stream: base.Stream,
        work: Callable[[], object],
        size: int,
        addresses: tuple[int, ...],  # The last one is written.
    ) -> None:
        """Execute work, queue it, or add it to the capture of the stream."""

        def locked() -> None:
            with self.lock:
                for address in addresses:
                    write = address == addresses[-1]
                    self.allocator.require_valid(kind, address, size, write=write)
                work()

        self.submit(kind, stream, locked)

    def submit(
        self, kind: str, stream: base.Stream, work: Callable[[], object], *, wait: bool = False
    ) -> None:
        """Execute work of the host, queue it, or add it to the capture of the stream.

        With `wait`, it is executed when the call returns, unless the stream is captured.
        """
        branch = self.captures.find(stream.id)
        if branch is not None:
            branch.add(kind, "", work)
        elif self.scheduler is None:
            work()
        else:
            position = self.scheduler.submit(stream.id, work)
            if wait:
                self.scheduler.run_until(position)

    def setter(self, places: Sequence[tuple[int, int]], stream: base.Stream) -> base.Setter:
        """Return a function that writes several values."""

        def set_all(data: bytes) -> tuple[int, ...]:
            given = io.BytesIO(data)
            values = [given.read(size) for _, size in places]
            if (branch := self.captures.find(stream.id)) is not None:
                raise branch.capture.invalidate("set")
            if self.scheduler is not None:
                work = self._deferred_write("set", places, values)
                self.scheduler.submit(stream.id, work)
                return (0,)
            with self.lock:
                for (address, size), value in zip(places, values, strict=True):
                    ctypes.memmove(address, value, size)
            return (0,)

        return set_all

    def _deferred_write(
        self, kind: str, places: Sequence[tuple[int, int]], values: Sequence[bytes]
    ) -> Callable[[], None]:
        """Return a function that writes values which have been read already."""

        def work() -> None:
            for (address, size), value in zip(places, values, strict=True):
                self.allocator.require_valid(kind, address, size)
                ctypes.memmove(address, value, size)

        return work

    def owner(self, address: int) -> object:
        """Return the array that allocated memory is part of."""
        return self.allocator.owner(address)

    def memory(self) -> base.MemoryInfo:
        """Return the memory in use and the total."""
        return base.MemoryInfo(TOTAL_BYTES - self.allocator.used, TOTAL_BYTES)

    def synchronize(self) -> None:
        """Wait for launches of other threads, and execute queued work."""
        self.captures.reject("synchronize", everywhere=True)
        with self.lock:
            if self.scheduler is not None:
                self.scheduler.run_all()
                self.scheduler.raise_fault()

    def check(self, status: tuple[int, ...], call: str) -> None:
        """Raise for a status that is not 0. Launches of the emulator raise by themselves."""
        if status[0]:
            raise error_of(call, status[0])

    def trim(self) -> None:
        """Do nothing: no unused memory is kept."""
        self.captures.reject("trim", watched=True)

    def reset(self) -> None:
        """Reset the device: all allocated memory and loaded modules are gone."""
        with self.lock:
            if self.scheduler is not None:
                self.scheduler.run_all()
            self._reset_state()

    def after_fork(self) -> None:
        """Reset the lock in a forked child: the thread that held it does not exist here."""
        self.lock = threading.RLock()
        self.allocator.lock = self.lock
        if self.scheduler is not None:
            self.scheduler.lock = self.lock
        self.captures.drop_other_threads()

    def close(self) -> None:
        """Close the device."""
        self.reset()


def device_name(
    index: int = 0,
    arch: Arch | str = ARCH,
    patience: int = PATIENCE,
    schedule: int | None = None,
    sanitize: bool = False,
    host_arrays: bool = False,
) -> str:
    """Return the name of an emulator with all its settings, such as `emulator:1[sm_100]`."""
    if not 0 <= index < COUNT:
        raise InputError(f"there is no emulator:{index}", hint=f"they are numbered 0 to {COUNT - 1}")
    if schedule is not None and (isinstance(schedule, bool) or not isinstance(schedule, int)):
        raise InputError(f"schedule {short_repr(schedule)} is not a seed", hint="pass an integer")
    if isinstance(patience, bool) or not isinstance(patience, int) or patience < 1:
        raise InputError(f"patience {short_repr(patience)} is not a number of basic blocks")
    if schedule is not None and host_arrays:
        raise InputError(
            "an emulator with a schedule cannot use arrays of the host, because its work is queued",
            hint="leave out host_arrays, and pass copies on the device: gpu.array(x)",
        )
    settings = [
        *([] if (target := Arch.parse(arch)) == Arch.parse(ARCH) else [str(target)]),
        *([] if patience == PATIENCE else [f"patience={patience}"]),
        *([] if schedule is None else [f"schedule={schedule}"]),
        *(["sanitize"] if sanitize else []),
        *(["host_arrays"] if host_arrays else []),
    ]
    return f"emulator:{index}" + (f"[{','.join(settings)}]" if settings else "")
