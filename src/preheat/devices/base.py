"""The seam: the few nouns a device is made of.

    Device     one GPU, or the emulator: memory, streams, modules
      Module     machine code that is loaded: functions and symbols
        Function   one kernel of it: attributes, occupancy, launches
      Stream     work in order; while it is captured, work in order that becomes a graph
        Event      a point in that order
      Graph      captured work: what it consists of
        Executable   the same, ready to be done again and again

Everything above this file is written once and runs on every device; everything below knows one
kind of device and keeps no policy: addresses are integers, nothing is counted, nothing is freed by
itself. Errors are `DeviceError`s. Every verb may be called from any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple, Protocol

from preheat.arch import Arch
from preheat.artifact import Artifact
from preheat.errors import DeviceError

if TYPE_CHECKING:  # only errors need it
    from preheat.toolchain.lines import Lines

__all__ = [
    "LEGACY_STREAMS",
    "ON_GPU",
    "ON_HOST",
    "PER_THREAD_STREAM",
    "Attributes",
    "BlockSize",
    "Device",
    "Dim3",
    "Event",
    "Executable",
    "FindLines",
    "Function",
    "Geometry",
    "Graph",
    "GraphNode",
    "Limits",
    "MemoryInfo",
    "Module",
    "Occupancy",
    "Replay",
    "Setter",
    "Stream",
    "Submit",
    "Symbol",
]

Dim3 = tuple[int, int, int]

#: The handles of default streams: the legacy one, which all threads share, and one for each thread.
LEGACY_STREAMS, PER_THREAD_STREAM = (0, 1), 2

#: DLPack's numbers for where memory is: the host's, which the emulator shares, or a GPU's.
ON_HOST, ON_GPU = 1, 2

#: A prepared launch: `submit(pointers, 0)`. `pointers` is the address of an array of pointers, one to
#: each parameter's bytes, which are read before it returns. It gives a tuple whose first item is 0
#: when the launch was accepted; anything else goes to `Device.check`. This is the end of the driver's
#: own call (the 0 is its last argument), because it is the inner loop of every program and one more
#: Python frame would be a fiftieth of a launch.
Submit = Callable[[int, int], tuple[int, ...]]

#: Finds the source lines of code when an error is to name one; None where they are not known.
FindLines = Callable[[], "Lines | None"]

#: A prepared replay of a graph in one stream; its status goes to `Device.check` like a launch's.
Replay = Callable[[], tuple[int, ...]]

#: A prepared write of several values to several places, in one operation: each is as long as its place
#: and is read before this returns, so that nothing on the host has to stay as it is. Not for two
#: threads at once. Its status goes to `Device.check`.
Setter = Callable[[Sequence[bytes]], tuple[int, ...]]


class Limits(NamedTuple):
    """What a launch may ask for."""

    warp: int = 32
    threads: int = 1024  # in one block
    block: Dim3 = (1024, 1024, 64)
    grid: Dim3 = (2**31 - 1, 65535, 65535)
    shared: int = 48 << 10  # bytes of shared memory of one block
    shared_optin: int = 227 << 10  # the same for a function that opted in
    cluster: int = 8  # blocks in one cluster; 0 where there are none
    processors: int = 1


class Geometry(NamedTuple):
    """The shape of one launch, checked against the limits by the caller."""

    grid: Dim3
    block: Dim3
    shared: int = 0  # dynamic shared memory in bytes
    cluster: Dim3 | None = None
    cooperative: bool = False
    programmatic: bool = False  # may start before the launch in front of it has ended


class Attributes(NamedTuple):
    """What the device says about one function, in bytes where not a count."""

    registers: int
    shared: int  # static
    local: int
    constant: int
    threads: int  # most threads a block of it can have
    binary_version: int  # the architecture of its machine code: 90 for sm_90
    ptx_version: int  # the architecture of the PTX it was made from: 90 for compute_90
    dynamic_shared: int  # most dynamic shared memory a launch of it can have
    #: The cluster that `__cluster_dims__` fixes; zeros where every launch has to give one.
    cluster: Dim3 | None = None


class Occupancy(NamedTuple):
    """How many blocks of a function one processor holds at once, and what share of it that fills."""

    blocks: int
    fraction: float


class BlockSize(NamedTuple):
    """A block that fills processors best, and the smallest grid that fills the device with it."""

    grid: int
    block: int


class Symbol(NamedTuple):
    """A `__device__` or `__constant__` variable: where it lies and how many bytes it has."""

    address: int
    size: int


class MemoryInfo(NamedTuple):
    """Bytes of device memory."""

    free: int
    total: int


class Event(Protocol):
    """A point in a stream."""

    handle: int

    def done(self) -> bool:
        """Whether the work before it has ended."""

    def synchronize(self) -> None:
        """Wait until it has."""

    def elapsed(self, since: Event) -> float:
        """Seconds from `since` to this event; both were recorded with `timing`, both are done."""

    def close(self) -> None:
        """Give it back."""


class Stream(Protocol):
    """Work that is done in order.

    `handle` is the number by which other libraries know the stream; once the stream is destroyed,
    the next one may get the same number. `id` identifies the stream: no other stream of the process
    ever has it.
    """

    handle: int
    id: int

    def record(self, *, timing: bool = False, again: Event | None = None) -> Event:
        """Return an event after everything submitted so far.

        `again` is an event of this device to record once more instead of creating one. Work that
        waits for it already goes on waiting for the earlier point.
        """

    def wait(self, event: Event) -> None:
        """Let later work wait for `event`; the caller does not wait."""

    def done(self) -> bool:
        """Whether everything submitted has ended."""

    def synchronize(self) -> None:
        """Wait until it has. Errors of that work come out here."""

    def close(self) -> None:
        """Give it back, once its work has ended. A stream of another library is left alone."""

    def begin_capture(self, mode: str) -> None:
        """From here on work is not done but becomes a graph.

        Calls that no capture can hold fail and invalidate it. Which those are beside the ones that
        concern this stream depends on `mode`: "thread_local" watches the calls of this thread,
        "global" those of every thread, "relaxed" none.
        """

    def end_capture(self) -> Graph:
        """What was captured; an error where the capture is invalid. Afterwards there is none."""

    def captured(self) -> int:
        """How many nodes were captured so far; an error where there is no valid capture."""

    def capture_status(self) -> str:
        """`none`, `active` or `invalidated`."""

    def retain(self, owner: object) -> None:
        """Keep `owner` alive as long as the graph that is being captured from this stream.

        The stream is under capture, by this library or another. `owner` is released once the graph
        and everything instantiated from it are gone.
        """


class GraphNode(NamedTuple):
    """One piece of captured work."""

    kind: str  # "kernel", "copy", "fill", …
    name: str  # of the kernel


class Graph(Protocol):
    """Captured work. Not for two threads at once."""

    def nodes(self) -> list[GraphNode]:
        """What it consists of, oldest first."""

    def instantiate(self, *, free_on_launch: bool = False) -> Executable:
        """Make it ready to be done.

        Memory that the graph allocates and does not free stays allocated after a replay. The next
        replay is refused until that memory is freed or, with `free_on_launch`, frees it first.
        """

    def close(self) -> None:
        """Give it back; what was instantiated stays."""


class Executable(Protocol):
    """A graph that is ready to be done. Not for two threads at once."""

    def upload(self, stream: Stream) -> None:
        """Bring it to the device, so that the first replay need not."""

    def prepare(self, stream: Stream) -> Replay:
        """Make replays in one stream ready."""

    def close(self) -> None:
        """Give it back; a replay under way is finished."""


class Function(Protocol):
    """One kernel that is loaded and resolved: launching it loads nothing more."""

    name: str

    @property
    def attributes(self) -> Attributes:
        """What the device says about it."""

    def prepare(self, geometry: Geometry, stream: Stream) -> Submit:
        """Make a launch ready, opting in to more shared memory where `geometry` needs it."""

    def occupancy(self, threads: int, shared: int = 0) -> Occupancy:
        """How well blocks of `threads` with `shared` dynamic bytes fill a processor."""

    def carveout(self) -> int:
        """The part of a processor's cache that it wants as shared memory, in percent; -1 for any."""

    def set_carveout(self, percent: int) -> None:
        """Ask for that part, of which the device may give more."""


class Module(Protocol):
    """Loaded machine code."""

    def function(self, name: str) -> Function:
        """The kernel with this entry name."""

    def symbol(self, name: str) -> Symbol | None:
        """The variable with this name, or None."""

    def unload(self) -> None:
        """Unload it. Nothing of it may be running or be launched again."""


class Device(Protocol):
    """One GPU, or something that behaves like one."""

    name: str  # "cuda:0", "emulator:1"
    model: str  # "NVIDIA H200"
    arch: Arch
    limits: Limits
    dlpack: tuple[int, int]  # DLPack's device type and number
    forks: bool  # whether it can still be used in a forked child
    recovers: bool  # whether `reset` begins anew after a fault
    on_loss: Callable[[DeviceError], None]  # told of an error that nothing on the device survives

    def load(self, artifact: Artifact, *, jit: bool = False, lines: FindLines | None = None) -> Module:
        """Load an artifact: its cubin or, for `jit`, its PTX through the driver's own compiler.

        `lines` finds its source lines, for a device whose errors name them. `InvalidCodeError` when the
        code itself is at fault.
        """

    def stream(self, *, priority: int = 0) -> Stream:
        """A new stream, ordered with no other."""

    def adopt(self, handle: int) -> Stream:
        """A stream of another library, by its number; asks the driver for its id."""

    def allocate(self, size: int, stream: Stream) -> int:
        """Address of `size` new bytes, usable from here on in `stream`; aligned to 256.

        In a captured stream the graph allocates them, at this address, whenever it is done.
        """

    def free(self, address: int, stream: Stream) -> None:
        """Give memory back after the work now in `stream`.

        In a captured stream it is memory that the graph allocates.
        """

    def copy_in(self, address: int, data: memoryview, stream: Stream) -> None:
        """Bytes from the host; `data` may change as soon as this returns."""

    def copy_out(self, data: memoryview, address: int, stream: Stream) -> None:
        """Bytes to the host, there when this returns."""

    def copy(self, target: int, source: int, size: int, stream: Stream) -> None:
        """Bytes from device memory to device memory."""

    def fill(self, address: int, value: bytes, count: int, stream: Stream) -> int:
        """Write `value` (1, 2, 4 or 8 bytes) `count` times; returns in how many pieces of work."""

    def setter(self, places: Sequence[tuple[int, int]], stream: Stream) -> Setter:
        """Make a write to several places ready: each is an address and 1, 2, 4, 8 or 16 bytes."""

    def lend(self, address: int, size: int, writable: bool) -> AbstractContextManager[object]:
        """Let kernels use host memory of the caller meanwhile, on a device that can."""

    def owner(self, address: int) -> object:
        """What keeps that memory in being while it is held, on a device that shares the host's."""

    def memory(self) -> MemoryInfo:
        """How much there is."""

    def synchronize(self) -> None:
        """Wait for all work on this device. Errors of that work come out here."""

    def check(self, status: tuple[int, ...], call: str) -> None:
        """Raise the `DeviceError` that `status`, given by a `Submit`, stands for."""

    def trim(self) -> None:
        """Give memory that is kept for later allocations back."""

    def reset(self) -> None:
        """Begin anew: everything allocated, loaded or made on this device is gone."""

    def after_fork(self) -> None:
        """In a forked child, where it can still be used: begin with locks of its own."""

    def close(self) -> None:
        """Give the device back. Nothing of it may be used again."""
