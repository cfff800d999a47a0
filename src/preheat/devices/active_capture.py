"""The interface of an active capture, and the operations that captures refuse."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from preheat.devices import base
from preheat.process.callsite import CallSite

if TYPE_CHECKING:
    from preheat.devices.array import Array
    from preheat.devices.launch import Launch, LaunchArguments
    from preheat.devices.operands import Operand
    from preheat.devices.uses import Uses
    from preheat.model.dtypes import DType

__all__ = [
    "ALLOCATE", "FREE", "FROM_HOST", "INSTANTIATE", "LOAD", "MEASURE_POOL", "OTHER_STREAM",
    "REPLAY", "RESET", "RESOLVE_KERNEL", "SET_SCALAR", "SYNCHRONIZE", "TIME_EVENT", "TO_HOST", "UNLOAD",
    "WAIT_OUTSIDE", "WARM_GRAPHS", "ActiveCapture", "Allocator", "CapturePoint", "CaptureStreams",
    "RecordedLaunch", "RefusedOperation",
]  # fmt: skip

#: A captured launch: the launch, its packed parameters, its arguments, the place in the program and the
#: memory of other libraries. Of the arguments, only arrays of preheat matter: the record keeps them
#: alive.
RecordedLaunch = tuple["Launch", bytes, tuple[Any, ...], CallSite, "Sequence[Operand]"]


class RefusedOperation(NamedTuple):
    """An operation that cannot become part of a graph. The thread that captures must not do it.

    A relaxed capture permits the operation if `relaxed` is True. If `unsafe` is True, the operation
    invalidates a global capture from any thread, so all threads are refused during such a capture.
    """

    name: str
    hint: str
    relaxed: bool = False
    unsafe: bool = False


LOAD = RefusedOperation(
    "compiling or loading a program", "ask for the kernel before the capture", relaxed=True
)
RESOLVE_KERNEL = RefusedOperation(
    "first use of a kernel", "take the kernel from its module before the capture", relaxed=True
)
ALLOCATE = RefusedOperation(
    "allocating memory", "make arrays before the capture, or take them from a gpu.pool()",
    relaxed=True, unsafe=True,
)  # fmt: skip
FREE = RefusedOperation("freeing memory", "close arrays after the capture", relaxed=True, unsafe=True)
UNLOAD = RefusedOperation("unloading programs", "trim after the capture", relaxed=True, unsafe=True)
SYNCHRONIZE = RefusedOperation("synchronising", "synchronise after the replay", unsafe=True)
WAIT_OUTSIDE = RefusedOperation(
    "waiting for outside work",
    "wait before the replay; memory that the graph uses is ordered already",
)
TIME_EVENT = RefusedOperation(
    "timing an event", "record the events outside, before and after the replay"
)
TO_HOST = RefusedOperation("copying to the host", "read results after the replay", unsafe=True)
FROM_HOST = RefusedOperation(
    "copying from the host", "write before the replay; the graph reads the array's newest content",
    unsafe=True,
)  # fmt: skip
SET_SCALAR = RefusedOperation("setting a scalar", "graph.replay(name=value) sets it for each replay")
INSTANTIATE = RefusedOperation("making a graph ready", "do so before or after the capture", unsafe=True)
REPLAY = RefusedOperation("replaying a graph", "replay after the capture")
RESET = RefusedOperation("resetting or closing the device", "leave the capture first", unsafe=True)
OTHER_STREAM = RefusedOperation(
    "work in a stream other than the captured one",
    "omit the stream: work of the capturing thread goes to the captured stream; or fork the stream "
    "from it: stream.wait(gpu.record())",
    relaxed=True,
)
MEASURE_POOL = RefusedOperation(
    "measuring a pool", "measure before the capture: it runs the body for real"
)
WARM_GRAPHS = RefusedOperation("warming graphs", "warm before the capture")


class Allocator(Protocol):
    """Provides memory for the new arrays of a thread, in place of an allocation by the device."""

    def empty(self, shape: tuple[int, ...], dtype: DType) -> Array:
        """Return a new array with undefined content."""


class CapturePoint(Protocol):
    """A point in the work of a capture, which other streams of the capture can wait for."""

    @property
    def event(self) -> base.Event:
        """The event of the device."""


class CaptureStreams(Protocol):
    """The streams of a capture: the captured one, and those that were forked from it."""

    def includes(self, stream: base.Stream | None) -> bool:
        """Return True if work for this stream becomes part of the capture."""

    def stream_for(self, stream: base.Stream | None, libraries: Iterable[int]) -> base.Stream:
        """Return the captured stream for work in `stream` or, without one, for tensors of `libraries`.

        `libraries` has the handles of the current streams of those libraries.
        """

    def ordered(
        self, stream: base.Stream, uses: Mapping[Uses, bool], libraries: Mapping[int, str] = ...
    ) -> AbstractContextManager[None]:
        """Order work in a captured stream with uses of its memory in other streams of the capture."""

    def record(self, stream: base.Stream | None) -> CapturePoint:
        """Return the point after the captured work of `stream`; None means the captured stream."""

    def wait(self, stream: base.Stream | None, point: object) -> None:
        """Let later work of `stream` wait for `point`. Work for `stream` is captured from here on."""


class ActiveCapture(Protocol):
    """A capture that has begun and not ended. Work of its thread becomes part of the graph.

    It remembers the first error inside, and the line that caused it, for its end.
    """

    stream: base.Stream  # the stream that the device captures
    allocator: Allocator | None  # where new arrays of the thread come from; None permits no new arrays
    graph: Callable[[], object]  # returns None once the graph was dropped
    interrupted: bool  # An interrupt kept the device from ending the capture.
    records: list[Any]  # Launches are appended to it as `RecordedLaunch`.
    last_site: CallSite  # of the last work that became part of the capture

    @property
    def streams(self) -> CaptureStreams:
        """The captured stream, and those that were forked from it."""

    @property
    def abandoned(self) -> bool:
        """Return True if nothing can end the capture: its graph was dropped or its thread has ended."""

    def abort(self) -> None:
        """End the capture and drop what was captured."""

    def refuse(self, operation: RefusedOperation, stream: base.Stream | None) -> None:
        """Raise if this capture does not permit `operation` in this thread, on `stream` if given."""

    def operation(self) -> AbstractContextManager[None]:
        """Do one piece of work inside the capture, which remembers its place and the first error."""

    def add_export(self, array: Array) -> None:
        """Keep an array that another library uses in its part of the capture."""

    def add_uses(self, arguments: LaunchArguments) -> None:
        """Keep the operands of a call that became part of the capture."""

    def add_launch(self, launch: Launch, data: bytes, arguments: LaunchArguments) -> None:
        """Add a launch with the packed parameters `data`, and keep its operands."""

    def add_fill(self, array: Array, value: bytes, pieces: int) -> None:
        """Add a node for filling an array with `value`, which the device does in `pieces` nodes."""

    def add_copy(self, target: Array, source: Array) -> None:
        """Add a node for copying `source` to `target`."""
