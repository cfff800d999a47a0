"""Graphs: captured once and replayed many times.

Graph             the public class: the stages from the capture to the end
  Capture           the active capture (capture.py)
  RecordedWork      what was captured, and what it keeps alive (recorded.py)
  GraphExecutable   the graph at the device (executable.py)
  Replayer          runs it again (replay.py)
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import NoReturn

from preheat.devices import base
from preheat.devices.active_capture import INSTANTIATE, REPLAY, RefusedOperation
from preheat.devices.array import Scalar
from preheat.devices.base import LEGACY_STREAMS
from preheat.devices.context import Context
from preheat.devices.libraries import StreamHandle
from preheat.devices.stream import raw_stream
from preheat.errors import CaptureError, GraphError, InputError, PreheatError
from preheat.graph.capture import MODES, Capture
from preheat.graph.difference import diff
from preheat.graph.executable import GraphExecutable
from preheat.graph.libraries import SharedPool
from preheat.graph.nodes import Node
from preheat.graph.pictures.drawable import Drawable
from preheat.graph.pool import Pool
from preheat.graph.profile import DEFAULT_OPTIONS, ReplayOptions
from preheat.graph.recorded import RecordedWork
from preheat.graph.replay import CAPTURE_AGAIN, Replayer, ReplayFunction
from preheat.model.tracebacks import short_methods, shorten_traceback
from preheat.process.locks import run_locked
from preheat.process.messages import count

__all__ = ["RESERVED", "Graph", "State"]

RESERVED = ("stream", "synchronize", "owner")  # parameters of `replay`, so not names of scalars
_NO_NODES: tuple[Node, ...] = ()


class State(enum.Enum):
    """The stages of a graph.

    new ──begin──▶ capturing ──end──▶ captured ──instantiate──▶ ready ──close──▶ closed
                       └── the body raises, or the end fails ──▶ failed
    """

    NEW = "new"
    CAPTURING = "capturing"
    CAPTURED = "captured"
    READY = "ready"
    FAILED = "failed"
    CLOSED = "closed"


@short_methods(without={"record_read"})
class Graph(Drawable):
    """Work that is captured once and replayed. `gpu.capture` returns it.

    Inside the `with` block nothing runs: launches, fills and copies of this thread become nodes, and an
    operation that cannot become part of a graph raises `CaptureError` at its line. The graph keeps the
    arrays, scalars and programs that it uses alive. Closing an array that it uses makes it stale, and
    the next replay raises `StaleGraphError`. Replays are safe from any thread. A notebook shows a graph
    as a picture.

    Attributes:
        replay: Runs the captured work once more. `graph.replay(step=7)` first sets the scalar that
            `gpu.scalar(…, name="step")` made. The value is copied and set in the same stream, so any
            number of replays can be queued ahead. `stream=` names another stream, and
            `synchronize=True` waits.
        name: The name in errors and pictures, or None.

    Examples:
        >>> x, step = gpu.zeros(1), gpu.scalar("float32", name="step")
        >>> ADD = 'extern "C" __global__ void add(float* x, const float* by) { *x += *by; }'
        >>> add = gpu.kernel(ADD, "add")
        >>> with gpu.capture() as graph:
        ...     add[1, 1](x, step)
        >>> graph.replay(step=2)
        >>> graph.replay(step=5, synchronize=True)
        >>> x.numpy()
        array([7.], dtype=float32)
    """

    __slots__ = ("__dict__", "__weakref__", "replay")

    # A function and not a method, because the lookup and call of a method cost a tenth of a replay.
    replay: ReplayFunction

    def __init__(
        self,
        context: Context,
        *,
        stream: object = None,
        mode: str = "thread_local",
        name: str | None = None,
        pool: Pool | SharedPool | None = None,
        free_on_launch: bool = False,
        replay_options: ReplayOptions = DEFAULT_OPTIONS,
    ) -> None:
        if mode not in MODES:
            raise InputError(f"{mode!r} is not a capture mode", hint=f"use one of {', '.join(MODES)}")
        context.require_alive()
        self.mode = mode
        self.name = name
        self.context = context
        self._shared_pool = pool if isinstance(pool, SharedPool) else None
        self._allocator = pool if isinstance(pool, Pool) else None
        self._free_on_launch = free_on_launch
        self._given_stream = stream  # Keeps a stream of another library alive.
        self._stream = None if stream is None else raw_stream(context, stream)
        if self._stream is not None and self._stream.handle in LEGACY_STREAMS:
            raise CaptureError(
                "the legacy default stream cannot be captured",
                hint="leave `stream` out: a capture brings its own stream",
            )
        self._stage = State.NEW
        self.replay = partial(_replay_uncaptured, weakref.ref(self))
        self._capture: Capture | None = None
        self._replayer: Replayer | None = None  # once the capture has ended
        self._options = replay_options

    # Capture

    def begin(self) -> Graph:
        """Begin to capture the work of this thread, and return the graph. A `with` block does this.

        Raises:
            CaptureError: The graph was captured before, or a capture of this thread is open.

        Examples:
            >>> x, graph = gpu.zeros(2), gpu.capture().begin()
            >>> x = x.fill(3)
            >>> len(graph.end().nodes)
            1
        """
        capture = self._capture
        if capture is not None:
            raise CaptureError(
                f"this graph is being captured already, since {capture.began}", hint="end it first"
            )
        if self.state is not State.NEW:
            raise CaptureError(
                f"this graph is {self.state.value} already", hint="a new capture is a new graph"
            )
        self.context.require_alive(CAPTURE_AGAIN)
        if self._allocator is not None:
            self._allocator.admit_capture()
        self.context.drain()
        self._capture = capture = Capture(
            self.context, self._stream, self.mode, self, self._allocator, self._shared_pool
        )
        try:
            self._stage = State.CAPTURING
            self.name = self.name or f"captured at {capture.began}"
            capture.open()
        except BaseException:
            self._abort()
            self._stage = State.NEW
            raise
        return self

    def end(self) -> Graph:
        """End the capture, and return the graph. The end of a `with` block does this.

        Raises:
            CaptureError: Something in the capture failed. The error reports the first failure.

        Examples:
            >>> x, graph = gpu.zeros(2), gpu.capture().begin()
            >>> x = x.fill(3)
            >>> graph.end().replay()
        """
        capture = self._capture
        if capture is None:
            raise CaptureError(
                f"there is no capture to end: this graph is {self.state.value}",
                hint="begin it first: graph.begin()",
            )
        try:
            definition = capture.end()
        except BaseException:
            if capture.over:
                self._fail(capture)
            raise
        self._capture = None
        try:
            self._take_over(capture, definition)
        except CaptureError:
            definition.close()
            self._fail(capture)
            raise
        return self

    def _take_over(self, capture: Capture, definition: base.Graph) -> None:
        """Take over the objects that the capture keeps alive."""
        if not capture.records:
            raise CaptureError(
                "nothing was captured: this graph would be empty",
                where=capture.began,
                hint="launch inside the capture, from the thread that began it",
            )
        work = RecordedWork.of(capture, str(self))
        executable = GraphExecutable(
            self.context,
            definition,
            title=str(self),
            free_on_launch=self._free_on_launch,
            keep=(work.pools, work.foreign),
        )
        self._replayer = Replayer(
            self.context, self.name, work, executable, stream=self._stream, options=self._options
        )
        self.replay = self._replayer.function()
        self._allocator = None  # The arrays that the graph uses keep their memory.
        self._shared_pool = None  # The recorded work has it, if other libraries took part.

    def _abort(self) -> None:
        """End a capture that was interrupted before its body began."""
        capture = self._capture
        if capture is not None:
            capture.abort()
            self._fail(capture)

    def _fail(self, capture: Capture) -> None:
        self._stage = State.FAILED
        self._capture = None
        capture.first_error = None  # Its traceback refers to the capture.
        capture.release_pools()

    def __enter__(self) -> Graph:
        try:
            return self.begin()
        except BaseException as error:  # An interrupt may come between `begin` and the body.
            self._abort()
            if isinstance(error, PreheatError):
                shorten_traceback(error)
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        del kind, traceback
        if error is None:
            try:
                self.end().instantiate()
            except PreheatError as fault:
                shorten_traceback(fault)
                raise
        elif self._capture is not None:
            capture = self._capture
            try:
                capture.discard(error)
            finally:
                self._fail(capture)

    @property
    def status(self) -> str:
        """The status of the capture: `none`, `active` or `invalidated`."""
        return "none" if self._capture is None else self._capture.stream.capture_status()

    @property
    def stream(self) -> StreamHandle:
        """The stream that is captured, for libraries that take a stream as an argument."""
        if self._capture is None:
            raise CaptureError("no capture is under way", hint="ask inside `with gpu.capture()`")
        return StreamHandle(self._capture.stream.handle)

    # Replay

    def instantiate(self) -> Graph:
        """Make the graph executable, and return it. Otherwise the first replay does this.

        Raises:
            GraphError: Nothing was captured yet, or the capture failed.

        Examples:
            >>> x = gpu.zeros(2)
            >>> with gpu.capture() as graph:
            ...     x = x.fill(3)
            >>> graph.instantiate().replay()
        """
        replayer = self._replayer or self._not_captured()
        run_locked(replayer.lock, replayer.executable.instantiate)
        return self

    def upload(self, stream: object = None) -> Graph:
        """Copy the graph to the device, and return the graph. Otherwise the first replay does this.

        Args:
            stream: The stream of the copy.

        Raises:
            GraphError: Nothing was captured yet, or the capture failed.

        Examples:
            >>> x = gpu.zeros(2)
            >>> with gpu.capture() as graph:
            ...     x = x.fill(3)
            >>> graph.upload().replay()
        """
        replayer = self._replayer or self._not_captured(INSTANTIATE)
        replayer.check(INSTANTIATE)
        replayer.upload(stream)
        return self

    def record_read(self) -> None:
        """Let other graphs that share memory with this one wait for reads of its results until now.

        Call it after other libraries have read results of a graph with a shared pool in their own
        streams.

        Examples:
            >>> x = gpu.zeros(2)
            >>> with gpu.capture(pool=gpu.shared_pool()) as graph:
            ...     x = x.fill(3)
            >>> graph.replay()
            >>> graph.record_read()
        """
        shared_pool = None if self._replayer is None else self._replayer.work.shared_pool
        if shared_pool is not None:
            shared_pool.record_read()

    def _not_captured(self, operation: RefusedOperation | None = None) -> NoReturn:
        """Raise because there is nothing to replay."""
        if operation is not None:
            self.context.require_alive(CAPTURE_AGAIN)
            self.context.refuse_in_capture(operation)
        why, hint = _NOT_CAPTURED[self.state]
        raise GraphError(f"{self} cannot be replayed: {why}", hint=hint)

    @property
    def num_replays(self) -> int:
        """The number of replays so far."""
        return 0 if self._replayer is None else self._replayer.num_replays

    # Description

    @property
    def state(self) -> State:
        """The stage that the graph has reached."""
        if self._replayer is None:
            return self._stage
        executable = self._replayer.executable
        if executable.closed:
            return State.CLOSED
        return State.READY if executable.instantiated else State.CAPTURED

    @property
    def usable(self) -> bool:
        """True if the graph can be replayed: it was captured, is not closed and not stale."""
        replayer = self._replayer
        if replayer is None:
            return False
        if replayer.launch is not None:  # Closing the graph or memory that it uses clears `launch`.
            return True
        return not replayer.stale and not replayer.executable.closed

    @property
    def stale(self) -> bool:
        """True if memory that the graph uses was closed."""
        return self._replayer is not None and self._replayer.stale

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes of the graph, in order. Those of other libraries are marked `foreign`."""
        return _NO_NODES if self._replayer is None else self._replayer.work.nodes

    @property
    def foreign(self) -> tuple[Node, ...]:
        """The nodes of other libraries, of which only kind and name are known."""
        return _NO_NODES if self._replayer is None else self._replayer.work.foreign_nodes

    @property
    def scalars(self) -> dict[str, Scalar]:
        """The scalars that `replay` can set, by name."""
        return {} if self._replayer is None else dict(self._replayer.work.scalars)

    @property
    def nbytes(self) -> int:
        """Bytes of preheat's arrays that the graph keeps alive, without what the driver adds."""
        return 0 if self._replayer is None else sum(each.size for each in self._replayer.work.buffers)

    def diff(self, other: Graph | Sequence[Node]) -> list[str]:
        """Describe what `other` does differently. An empty list means that replays do the same.

        Args:
            other: Another graph, or its nodes.

        Examples:
            >>> x = gpu.zeros(2)
            >>> with gpu.capture() as one:
            ...     x = x.fill(3)
            >>> with gpu.capture() as two:
            ...     x = x.fill(4)
            >>> len(one.diff(one)), len(one.diff(two))
            (0, 1)
        """
        return diff(self.nodes, other.nodes if isinstance(other, Graph) else other)

    def __len__(self) -> int:
        return len(self.nodes)

    def __bool__(self) -> bool:
        return True  # A graph without nodes is still a graph.

    def __repr__(self) -> str:
        nodes = count(len(self), "node")
        foreign = f", {len(self.foreign)} of other libraries" if self.foreign else ""
        name = f" {self.name!r}" if self.name else ""
        return f"<Graph{name}: {self.state.value}, {nodes}{foreign} on {self.context.device.name}>"

    def __str__(self) -> str:
        return f"graph {self.name!r}" if self.name else "graph"

    def close(self) -> None:
        """Destroy the graph after the replays that are queued now, and release what it keeps alive.

        Closing a graph twice is allowed.

        Examples:
            >>> x = gpu.zeros(2)
            >>> with gpu.capture() as graph:
            ...     x = x.fill(3)
            >>> graph.close()
            >>> graph.usable
            False
        """
        if self._capture is not None:
            raise CaptureError("this graph is still being captured", hint="end the capture first")
        self._stage = State.CLOSED
        if self._replayer is not None:
            self._replayer.close()
        if self.context.lost is None:
            self.context.drain()


def _replay_uncaptured(graph: Callable[[], Graph | None], *_: object, **__: object) -> None:
    """Raise: this is `Graph.replay` until the end of the capture."""
    this = graph()
    if this is None:
        raise GraphError("this graph was dropped before it was captured")
    this._not_captured(REPLAY)


_NOT_CAPTURED: dict[State, tuple[str, str | None]] = {
    State.NEW: ("nothing was captured yet", "with gpu.capture() as graph: …"),
    State.CAPTURING: ("it is still being captured", "replay after the end"),
    State.FAILED: ("its capture failed", "capture again, into a new graph"),
    State.CLOSED: ("it was closed", None),
}
