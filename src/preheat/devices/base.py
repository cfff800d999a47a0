"""The device interface: the protocols that every kind of device implements.

    Device     one GPU, or the emulator: memory, streams, modules
      Module     loaded machine code: functions and symbols
        Function   one kernel of a module: attributes, occupancy, launches
      Stream     work that runs in order; while it is captured, the work becomes a graph
        Event      a point in a stream
      Graph      captured work
        Executable   an instantiated graph, which can be replayed any number of times

The code above this interface runs on every device. The code below it knows one kind of device and
decides nothing: addresses are integers, nothing counts references, and nothing is freed automatically.
Errors are `DeviceError`s. Every method may be called from any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple, Protocol

from preheat.errors import DeviceError
from preheat.model.arch import Arch

if TYPE_CHECKING:
    from preheat.model.artifact import Artifact
    from preheat.model.lines import Lines

__all__ = [
    "DEFAULT_STREAMS", "LEGACY_STREAMS", "NOT_SUBMITTED", "ON_GPU", "ON_HOST", "PER_THREAD_STREAM",
    "Attributes", "BlockSize", "Device", "Dim3", "Event", "Executable", "FindLines", "Function",
    "Geometry", "Graph", "GraphNode", "HostMemory", "Limits", "MemoryInfo", "Module", "Occupancy",
    "Replay", "Setter", "Stream", "Submit", "Symbol",
]  # fmt: skip

Dim3 = tuple[int, int, int]

#: The handles of the legacy default stream, which all threads share.
LEGACY_STREAMS = (0, 1)

#: The handle of the per-thread default stream.
PER_THREAD_STREAM = 2

#: The handles that mean a default stream of the current context.
DEFAULT_STREAMS = (*LEGACY_STREAMS, PER_THREAD_STREAM)

#: DLPack's device types: host memory, which the emulator works in, and memory of a GPU.
ON_HOST, ON_GPU = 1, 2

#: A prepared launch: `submit(pointers, 0)`. `pointers` is the address of an array of pointers, one to
#: the bytes of each parameter, which are read before the call returns. The first item of the result is
#: 0 when the launch was accepted; otherwise the result goes to `Device.check`. The signature is the end
#: of the driver's own (0 is its last argument), so that no Python frame is added to the inner loop of
#: every program. Such a frame would cost a fiftieth of a launch.
Submit = Callable[[int, int], tuple[int, ...]]

#: Finds the source lines of code when an error has to name one; None when they are unknown.
FindLines = Callable[[], "Lines | None"]

#: A prepared replay of a graph in one stream. `Device.check` takes its status, as it takes a launch's.
Replay = Callable[[], tuple[int, ...]]

#: The status of a replay that did nothing, because something has to be checked first: another library
#: captures the stream (see `Executable.prepare`), or the stream or the order of its work is not known.
NOT_SUBMITTED = (-1,)

#: A prepared write of several values to several addresses. It takes the bytes of all values, one after
#: the other, each with the size that was given for its address. They are read before the call returns.
#: `Device.check` takes the status.
Setter = Callable[[bytes], tuple[int, ...]]


#: Called with an artifact, and with what finds its lines, before the driver of a GPU loads it. A driver
#: that executes PTX in the place of machine code adds a function here.
before_load: list[Callable[[Artifact, FindLines | None], None]] = []

#: Called by adapters with machine code of another library and the PTX that it was made from, before
#: that library loads it.
before_foreign_load: list[Callable[[bytes, bytes], None]] = []


class Limits(NamedTuple):
    """The limits of a device for one launch.

    Attributes:
        warp: The number of threads of a warp.
        threads: The maximum number of threads of a block.
        block: The largest block along each axis.
        grid: The largest grid along each axis.
        shared: Bytes of shared memory of a block.
        shared_optin: The same for a kernel that opts in. A launch opts in if it needs to.
        cluster: The maximum number of blocks of a cluster, or 0 without clusters.
        processors: The number of multiprocessors.

    Examples:
        >>> gpu.limits.threads
        1024
    """

    warp: int = 32
    threads: int = 1024  # of one block
    block: Dim3 = (1024, 1024, 64)
    grid: Dim3 = (2**31 - 1, 65535, 65535)
    shared: int = 48 << 10  # bytes of shared memory of one block
    shared_optin: int = 227 << 10  # the same for a function that opts in
    cluster: int = 8  # blocks of one cluster; 0 without clusters
    processors: int = 1


class Geometry(NamedTuple):
    """The shape of one launch, which the caller has checked against the limits."""

    grid: Dim3
    block: Dim3
    shared: int = 0  # dynamic shared memory in bytes
    cluster: Dim3 | None = None
    cooperative: bool = False
    programmatic: bool = False  # may start before the preceding launch has completed


class Attributes(NamedTuple):
    """The attributes of a kernel. Sizes are in bytes.

    Attributes:
        registers: Registers of a thread.
        shared: Static shared memory of a block.
        local: Local memory of a thread.
        constant: Constant memory.
        threads: The maximum number of threads of a block of this kernel.
        binary_version: The architecture of the machine code: 90 for sm_90.
        ptx_version: The architecture of the PTX: 90 for compute_90.
        dynamic_shared: The maximum size of the dynamic shared memory of a launch.
        cluster: The cluster that the kernel was compiled for, or None.
        cache_mode_ca: 1 for code that was assembled with `--dlcm=ca`.

    Examples:
        >>> gpu.kernel(SAXPY, "saxpy").attributes.binary_version
        90
    """

    registers: int
    shared: int  # static
    local: int
    constant: int
    threads: int  # maximum of one block
    binary_version: int  # the architecture of its machine code: 90 for sm_90
    ptx_version: int  # the architecture of the PTX it was made from: 90 for compute_90
    dynamic_shared: int  # maximum of one launch
    #: The cluster that `__cluster_dims__` fixes; zeros when every launch must give one.
    cluster: Dim3 | None = None
    cache_mode_ca: int = 0  # 1 for code that was assembled with --dlcm=ca


class Bounds(NamedTuple):
    """The limits of the launches of a function. Every launch is checked against them."""

    threads: int  # maximum of one block
    shared: int  # bytes of static shared memory
    #: The cluster that `__cluster_dims__` fixes; zeros when every launch must give one.
    cluster: Dim3 | None = None


class Occupancy(NamedTuple):
    """The blocks of a kernel that one multiprocessor runs at once, and the fraction of its threads.

    Examples:
        >>> blocks, fraction = gpu.kernel(SAXPY, "saxpy").occupancy(1024)
        >>> blocks
        2
    """

    blocks: int
    fraction: float


class BlockSize(NamedTuple):
    """The block size with the best occupancy, and the smallest grid that fills the device.

    Examples:
        >>> saxpy = gpu.kernel(SAXPY, "saxpy")
        >>> size = saxpy.max_potential_block_size()
        >>> saxpy[size](2.0, gpu.zeros(4), gpu.zeros(4), 4)
    """

    grid: int
    block: int


class Symbol(NamedTuple):
    """A `__device__` or `__constant__` variable: its address and its size in bytes."""

    address: int
    size: int


class MemoryInfo(NamedTuple):
    """Device memory in bytes.

    Attributes:
        free: The free memory.
        total: All memory of the device.

    Examples:
        >>> free, total = gpu.memory()
    """

    free: int
    total: int


class Event(Protocol):
    """A point in a stream."""

    handle: int

    def done(self) -> bool:
        """Return True once the work before the event has completed."""

    def synchronize(self) -> None:
        """Wait until the event has completed."""

    def elapsed(self, since: Event) -> float:
        """Return the seconds from `since` to this event; both are complete and have `timing`."""

    def close(self) -> None:
        """Destroy the event."""


class Stream(Protocol):
    """Work that runs in order.

    `handle` is the number by which other libraries know the stream. Once the stream is destroyed, a
    new stream may get the same handle. `id` is unique among all streams of the process.
    """

    handle: int
    id: int

    def record(self, *, timing: bool = False, reuse: Event | None = None) -> Event:
        """Return an event after everything submitted so far.

        `reuse` is an event of this device to record once more instead of a new one. Work that already
        waits for it keeps waiting for the earlier point.
        """

    def wait(self, event: Event) -> None:
        """Let later work of the stream wait for `event`; the caller does not wait.

        The wait for an event of a stream that is captured lets this stream take part in that capture:
        its work becomes a branch of the graph. Before the end of the capture, the stream that began it
        has to wait for the branch.
        """

    def done(self) -> bool:
        """Return True once all submitted work has completed."""

    def synchronize(self) -> None:
        """Wait for all submitted work, and raise its errors."""

    def close(self) -> None:
        """Destroy the stream once its work has completed; keep a stream of another library."""

    def begin_capture(self, mode: str) -> None:
        """Record later work in a graph instead of running it.

        A call that cannot be captured fails and invalidates the capture. This concerns calls on this
        stream and, depending on `mode`, potentially unsafe calls of this thread ("thread_local"), of
        every thread ("global"), or none ("relaxed").
        """

    def end_capture(self) -> Graph:
        """End the capture and return its graph; an error when the capture is invalid."""

    def num_captured_nodes(self) -> int:
        """Return how many nodes are captured so far; an error without a valid capture."""

    def capture_id(self) -> int | None:
        """Return the number of the capture that this stream takes part in, or None."""

    def capture_status(self) -> str:
        """Return `none`, `active` or `invalidated`."""

    def retain(self, owner: object) -> None:
        """Keep `owner` alive as long as the graph that is being captured from this stream.

        This library or another one captures the stream. `owner` is released once the graph and all
        executables of it are destroyed.
        """


class GraphNode(NamedTuple):
    """One node of a graph."""

    kind: str  # "kernel", "copy", "fill", …
    name: str  # of the kernel


class Graph(Protocol):
    """Captured work. Only one thread at a time may use it."""

    def num_nodes(self) -> int:
        """Return the number of nodes."""

    def nodes(self) -> list[GraphNode]:
        """Return the nodes in the order of their capture."""

    def dependencies(self) -> list[tuple[int, ...]]:
        """Return, for each node, the positions of the earlier nodes that it waits for directly."""

    def instantiate(self, *, free_on_launch: bool = False) -> Executable:
        """Make the graph executable.

        Memory that the graph allocates and does not free stays allocated after a replay. The next
        replay fails until that memory is freed or, with `free_on_launch`, frees it first.
        """

    def close(self) -> None:
        """Destroy the graph; its executables stay."""


class Executable(Protocol):
    """An instantiated graph. Only one thread at a time may use it."""

    def upload(self, stream: Stream) -> None:
        """Upload the graph to the device, so that the first replay does not have to."""

    def prepare(
        self, stream: Stream, *, unless_captured: bool = False, mark: Event | None = None
    ) -> Replay:
        """Prepare replays in one stream. Each accepted replay records `mark` after its work.

        With `unless_captured`, a replay does nothing and returns the object `NOT_SUBMITTED` while
        another library captures the stream.
        """

    def close(self) -> None:
        """Destroy the executable; a running replay completes."""


class Function(Protocol):
    """A kernel of a loaded module. Launching it loads nothing more."""

    name: str
    bounds: Bounds

    @property
    def attributes(self) -> Attributes:
        """The attributes that the device reports."""

    def prepare(self, geometry: Geometry, stream: Stream) -> Submit:
        """Prepare a launch, opting in to more shared memory when `geometry` needs it."""

    def occupancy(self, threads: int, shared: int = 0) -> Occupancy:
        """Return the occupancy of blocks with `threads` and `shared` bytes of dynamic memory."""

    def carveout(self) -> int:
        """Return the preferred shared memory carveout in percent; -1 for no preference."""

    def set_carveout(self, percent: int) -> None:
        """Set the preferred shared memory carveout; the device may provide more."""


class Module(Protocol):
    """Loaded machine code."""

    def function(self, name: str) -> Function:
        """Return the kernel with this entry name."""

    def symbol(self, name: str) -> Symbol | None:
        """Return the variable with this name, or None."""

    def unload(self) -> None:
        """Unload the module. None of its kernels may be running or be launched again."""


class HostMemory(Protocol):
    """Memory of the host as arguments of kernels, on a device that works in such memory."""

    def accepts(self, address: int, size: int) -> bool:
        """Return True if these bytes may be an argument of a kernel."""

    def register(self, address: int, size: int, writable: bool) -> AbstractContextManager[object]:
        """Let kernels use these bytes for a while."""


class Device(Protocol):
    """One GPU, or a device that behaves like one."""

    name: str  # "cuda:0", "emulator:1"
    model: str  # "NVIDIA H200"
    arch: Arch
    limits: Limits
    dlpack: tuple[int, int]  # DLPack's device type and number
    survives_fork: bool  # True if a forked child can use the device
    recovers: bool  # True if the device works again after a fault and a `reset`
    on_loss: Callable[[DeviceError], None]  # called with an error that ends the context

    def load(self, artifact: Artifact, *, jit: bool = False, lines: FindLines | None = None) -> Module:
        """Load the cubin of an artifact or, with `jit`, its PTX through the compiler of the driver.

        `lines` finds the source lines, for a device whose errors name them. Code that is invalid raises
        `InvalidCodeError`.
        """

    def stream(self, *, priority: int = 0) -> Stream:
        """Return a new stream, which is not ordered with any other stream."""

    def adopt(self, handle: int) -> Stream:
        """Return the stream of another library that has this handle now."""

    def allocate(self, size: int, stream: Stream) -> int:
        """Allocate `size` bytes in the order of `stream` and return their address, aligned to 256.

        In a captured stream, every replay of the graph allocates them at this address.
        """

    def free(self, address: int, stream: Stream) -> None:
        """Free memory after the work that is now in `stream`.

        In a captured stream, it is memory that the graph allocates.
        """

    def copy_in(self, address: int, data: memoryview, stream: Stream) -> None:
        """Copy bytes from the host; `data` may change as soon as the call returns."""

    def copy_out(self, data: memoryview, address: int, stream: Stream) -> None:
        """Copy bytes to the host, and return when they have arrived."""

    def copy(self, target: int, source: int, size: int, stream: Stream) -> None:
        """Copy bytes from device memory to device memory."""

    def fill(self, address: int, value: bytes, count: int, stream: Stream) -> int:
        """Write `value` (1, 2, 4 or 8 bytes) `count` times; return the number of operations used."""

    @property
    def host_memory(self) -> HostMemory | None:
        """Memory of the host as arguments of kernels, or None if no kernel can use it."""

    def setter(self, places: Sequence[tuple[int, int]], stream: Stream) -> Setter:
        """Prepare a write to several addresses, each given with its size: 1, 2, 4, 8 or 16 bytes."""

    def owner(self, address: int) -> object:
        """Return an object that keeps this memory valid, on a device that works in host memory."""

    def memory(self) -> MemoryInfo:
        """Return how much memory is free, and how much the device has."""

    def synchronize(self) -> None:
        """Wait for all work on this device, and raise its errors."""

    def check(self, status: tuple[int, ...], call: str) -> None:
        """Raise the `DeviceError` that the status of a `Submit` means."""

    def trim(self) -> None:
        """Free memory that is cached for later allocations."""

    def reset(self) -> None:
        """Start again without anything that was allocated, loaded or created on this device."""

    def after_fork(self) -> None:
        """Renew the locks in a forked child, on a device that a child can use."""

    def close(self) -> None:
        """Release the device. Nothing of it may be used again."""
