"""Graphs: captured once, owning what they use, replayed as often as one likes."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from preheat import fork
from preheat.callsite import caller
from preheat.devices import base
from preheat.devices.base import LEGACY_STREAMS, ON_HOST
from preheat.errors import (
    CaptureError,
    DriverError,
    GraphError,
    InputError,
    StaleGraphError,
    did_you_mean,
)
from preheat.graph.capture import MODES, Capture
from preheat.graph.profile import OFF, Laps, Switches
from preheat.graph.record import Node, culprit, diff
from preheat.runtime.active_capture import INSTANTIATE, REPLAY, Operation
from preheat.runtime.array import Array, Scalar
from preheat.runtime.context import Context
from preheat.runtime.dict_lock import DictLock, run_locked
from preheat.runtime.host import packer
from preheat.runtime.launch import MANY_STREAMS, LaunchArguments, lent, ordered
from preheat.runtime.libraries import LIBRARIES, StreamHandle
from preheat.runtime.memory import Buffer
from preheat.runtime.operands import Operand
from preheat.runtime.stream import Event, raw_stream, record_event
from preheat.runtime.uses import Uses

if TYPE_CHECKING:
    from preheat.graph.pool import Pool

__all__ = ["RESERVED", "Graph", "State"]

T = TypeVar("T")
RESERVED = ("stream", "synchronize", "owner")  # what replays take beside the names of scalars
_AGAIN = "capture the graph again: gpu.capture()"


class State(enum.Enum):
    """Where a graph is in its life.

    new ──begin──▶ capturing ──end──▶ captured ──instantiate──▶ ready ──close──▶ closed
                       └── the body raises, or the end fails ──▶ failed
    """

    NEW = "new"
    CAPTURING = "capturing"
    CAPTURED = "captured"
    READY = "ready"
    FAILED = "failed"
    CLOSED = "closed"


class Graph:
    """Work captured once and replayed, with everything it uses kept alive.

        with gpu.capture() as graph:
            kernel[4, 256](x, y)
        graph.replay()

    Inside the `with` nothing runs: launches, fills and copies of this thread become nodes, and what no
    graph can hold raises where it stands. Afterwards the graph owns arrays, scalars and programs it
    uses, so dropping your names changes nothing; closing an array makes the graph stale, and the
    next replay says so. Replays are safe from any thread.
    """

    def __init__(
        self,
        context: Context,
        *,
        stream: object = None,
        mode: str = "thread_local",
        name: str | None = None,
        pool: Pool | None = None,
        free_on_launch: bool = False,
        switches: Switches = OFF,
    ) -> None:
        if mode not in MODES:
            raise InputError(f"{mode!r} is not a capture mode", hint=f"use one of {', '.join(MODES)}")
        context.require()
        self.mode, self.name, self._context, self._allocator = mode, name, context, pool
        self._free_on_launch = free_on_launch
        self._given = stream  # kept: it may be another library's
        self._stream = None if stream is None else raw_stream(context, stream)
        if self._stream is not None and self._stream.handle in LEGACY_STREAMS:
            raise CaptureError(
                "the legacy default stream cannot be captured",
                hint="leave `stream` out: a capture brings a stream of its own",
            )
        self.state = State.NEW
        self.num_replays = 0
        self._capture: Capture | None = None
        self._raw: base.Graph | None = None
        self._executable: base.Executable | None = None
        self._uploaded = False
        self._nodes: tuple[Node, ...] = ()
        self._scalars: dict[str, Scalar] = {}
        self._buffers: list[Buffer] = []
        self._uses: dict[Uses, bool] = {}  # of their memory, and True where the graph writes it
        self._foreign: list[Operand] = []
        self._libraries: tuple[str, ...] = ()  # others that work in it
        self._modules: list[object] = []
        self._pool: object = None  # another library's, for what it allocated inside the capture
        self._replays: dict[int, base.Replay] = {}  # by the id of the stream
        self._setters: dict[tuple[tuple[str, ...], int], base.Setter] = {}
        self._quick_setters: dict[tuple[str, ...], base.Setter] = {}
        self._last: base.Stream | Event | None = None  # where the last replay went, or its end
        self._switches = switches
        self._lock: DictLock = {0: True}  # whoever uses the graph takes it
        self._launch: base.Replay = _unready  # what a replay is, where it is nothing more
        self._stale = False
        self._doubts: set[Callable[[Graph], None]] = set()  # to be asked before the next replay
        fork.register(self)
        context.holders.add(self)

    # Capture

    def begin(self) -> Graph:
        """Capture what this thread does from here on; returns the graph."""
        if self.state is State.CAPTURING:
            raise CaptureError(
                f"this graph is being captured already, since {self._began}", hint="end it first"
            )
        if self.state is not State.NEW:
            raise CaptureError(
                f"this graph is {self.state.value} already", hint="a new capture is a new graph"
            )
        self._context.require(_AGAIN)
        if self._allocator is not None:
            self._allocator.admit_capture()
        self._context.drain()
        self._capture = Capture(self._context, self._stream, self.mode, self, self._allocator)
        try:
            self.state, self.name = State.CAPTURING, self.name or f"captured at {self._capture.began}"
            self._capture.open()
        except BaseException:
            self._abandon()
            self.state = State.NEW
            raise
        return self

    def after_fork(self) -> None:
        """Give the graph back in a forked child, where no thread is replaying it."""
        self._lock[0] = True

    def _abandon(self) -> None:
        """End a capture whose body did not come to its end."""
        capture = self._capture
        if capture is not None:
            capture.abort()
            self._failed(capture)

    def end(self) -> Graph:
        """End the capture; `CaptureError` names what went wrong in it first. Returns the graph."""
        capture = self._capture
        if capture is None or self.state is not State.CAPTURING:
            raise CaptureError(
                f"there is no capture to end: this graph is {self.state.value}",
                hint="begin it first: graph.begin()",
            )
        try:
            raw = capture.end()
        except BaseException:
            if capture.over:
                self._failed(capture)
            raise
        self._capture = None
        if not capture.nodes:
            raw.close()
            self._failed(capture)
            raise CaptureError(
                "nothing was captured: this graph would be empty",
                where=capture.began,
                hint="launch inside the capture, from the thread that began it",
            )
        self._own(capture, raw)
        return self

    def _own(self, capture: Capture, raw: base.Graph) -> None:
        """Take over what the capture holds."""
        try:
            self._scalars = _named(capture.arrays)
        except CaptureError:
            raw.close()
            self._failed(capture)
            raise
        self._allocator = None  # The arrays that the graph uses keep their memory.
        self._raw, self._nodes, self._foreign = raw, tuple(capture.nodes), capture.foreign
        self._buffers = list({array.buffer: None for array in capture.arrays})
        self._uses = capture.uses | {scalar.buffer.uses: True for scalar in self._scalars.values()}
        self._modules = [*capture.modules]
        libraries = capture.libraries | (capture.guests.libraries if self.foreign else set())
        self._libraries = tuple(sorted(libraries))
        if self.foreign:
            self._pool = capture.guests.claim()
        capture.guests.spare()
        self.state = State.CAPTURED
        for buffer in self._buffers:
            buffer.tell(self)
            self._stale = self._stale or not buffer.open  # closed before it could tell us

    def _failed(self, capture: Capture) -> None:
        self.state, self._capture = State.FAILED, None
        capture.first = None  # the traceback of which leads back to it
        capture.let_go()

    def __enter__(self) -> Graph:
        try:
            return self.begin()
        except BaseException:  # an interrupt may come between begin and body
            self._abandon()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        del kind, traceback
        if error is None:
            self.end().instantiate()
        elif self._capture is not None:
            capture = self._capture
            try:
                capture.discard(error)
            finally:
                self._failed(capture)

    @property
    def status(self) -> str:
        """Of the capture: `none`, `active` or `invalidated`."""
        return "none" if self._capture is None else self._capture.stream.capture_status()

    @property
    def stream(self) -> StreamHandle:
        """The stream that is captured, for libraries that are told by hand where to work."""
        if self._capture is None:
            raise CaptureError("no capture is under way", hint="ask inside `with gpu.capture()`")
        return StreamHandle(self._capture.stream.handle)

    @property
    def _began(self) -> str:
        return self._capture.began if self._capture else "?"

    # Making it ready

    def instantiate(self) -> Graph:
        """Make the captured work ready to replay; `replay` does so by itself. Returns the graph."""
        self._exclusively(self._instantiate)
        return self

    def _instantiate(self) -> base.Executable:
        if self._executable is None:
            if self._raw is None:
                raise self._unusable()
            self._context.forbid(INSTANTIATE)
            self._executable = self._raw.instantiate(free_on_launch=self._free_on_launch)
            self._close_raw()
            self.state = State.READY
        return self._executable

    def _close_raw(self) -> None:
        raw, self._raw = self._raw, None
        if raw is not None:
            raw.close()

    def upload(self, stream: object = None) -> Graph:
        """Bring the graph to the device now rather than with the first replay. Returns the graph."""
        self._check(INSTANTIATE)
        self._exclusively(lambda: self._bring(self._target(stream)))
        return self

    def _bring(self, stream: base.Stream) -> None:
        self._instantiate().upload(stream)
        self._uploaded = True

    def _prepared(self, stream: base.Stream) -> base.Replay:
        found = self._replays.get(stream.id)
        if found is None:
            if len(self._replays) >= MANY_STREAMS:
                self._replays.clear()
                self._setters.clear()
            found = self._replays[stream.id] = self._instantiate().prepare(stream)
        return found

    # Replay

    def replay(self, /, stream: object = None, synchronize: bool = False, **scalars: Any) -> None:
        """Do all of it once more, with named scalars set before; waits for nothing unless asked.

        `graph.replay(step=7)` sets the scalar that `gpu.scalar(…, name="step")` made, in the same
        stream and by value, so replays can be queued as far ahead as one likes.
        """
        context, lock = self._context, self._lock
        if scalars or synchronize or stream is not None or context.alert is not None:
            if synchronize or stream is not None or not self._set_and_launch(scalars):
                self._whole(stream, synchronize, scalars)
            return
        try:
            del lock[0]
        except KeyError:  # another thread holds it
            self._whole(stream, synchronize, scalars)
            return
        try:
            context.replayed = self.name
            status = self._launch()
            self.num_replays += 1
        finally:
            lock[0] = True
        if status[0]:
            self._refused(status)

    def _refused(self, status: tuple[int, ...]) -> None:
        """What was counted as a replay was none."""
        self._exclusively(self._uncount)
        if status is not _UNREADY:
            self._complain(status)
        self._whole(None, False, {})

    def _uncount(self) -> None:
        self.num_replays -= 1

    def _set_and_launch(self, scalars: dict[str, Any]) -> bool:
        """A replay that is setting scalars and a launch; False where it may be more."""
        setter, lock = self._quick_setters.get(tuple(scalars)), self._lock
        if setter is None or self._context.alert is not None:
            return False
        values = [self._value(name, value) for name, value in scalars.items()]
        try:
            del lock[0]
        except KeyError:  # another thread holds it
            return False
        try:
            launch = self._launch
            if launch is _unready:
                return False
            self._go(launch, setter, scalars, values)
            self.num_replays += 1
        finally:
            lock[0] = True
        return True

    def _whole(self, stream: object, synchronize: bool, scalars: dict[str, Any]) -> None:
        """A replay that may be more than a launch."""
        target, laps = self._exclusively(partial(self._replay, stream, scalars))
        if laps is not None:
            laps.write()
        if synchronize:
            target.synchronize()

    def _exclusively(self, do: Callable[[], T]) -> T:
        """Do it with the graph to oneself."""
        return run_locked(self._lock, do)

    def _replay(self, given: object, scalars: dict[str, Any]) -> tuple[base.Stream, Laps | None]:
        """The whole story; returns the stream it went to and, where it was sampled, what it took."""
        laps = self._switches.laps(self.name, self.num_replays)
        self._check(REPLAY)
        for ask in [*self._doubts]:
            self._doubts.discard(ask)  # before it is asked, since it may doubt again
            ask(self)
        values = [self._value(name, value) for name, value in scalars.items()]
        stream = self._target(given)
        if self._context.order.captured(stream):
            raise CaptureError(
                f"{self} cannot be replayed inside another library's capture",
                where=caller(),
                hint="replay it before or after that capture",
            )
        launch = self._prepared(stream)
        if self._switches.upload or not self._uploaded:
            self._bring(stream)
        if laps:
            laps.lap("upload")
        setter, gathered = self._setter(tuple(scalars), stream), self._gathered()
        with ordered(self._context, gathered, stream), lent(self._context, gathered):
            self._go(launch, setter, scalars, values)
        self._last = self._end_of(stream)
        self.num_replays += 1
        if laps:
            laps.lap("launch")
        if self._switches.sync:
            stream.synchronize()
        if laps and self._switches.sync:
            laps.lap("sync")
        self._learn(given, stream, tuple(scalars))
        return stream, laps

    def _end_of(self, stream: base.Stream) -> base.Stream | Event:
        """Return what marks the end of a replay: the stream, or an event if it may be destroyed."""
        return stream if self._context.order.owns(stream) else record_event(self._context, stream)

    def _learn(self, given: object, stream: base.Stream, names: tuple[str, ...]) -> None:
        """Find out what the next replay has to be: the launch, or all of this again."""
        self._launch = _unready
        alone = given is None and not self._libraries and not self._foreign and self._switches == OFF
        if not alone:
            self._quick_setters.clear()
            return
        if names:
            self._quick_setters[names] = self._setters[names, stream.id]
        launch = self._replays[stream.id]

        def ready() -> None:
            self._launch = launch
            if self._stale or self._doubts:  # Another thread may have set them meanwhile.
                self._launch = _unready

        self._context.order.claim(self, stream, self._uses, ready)

    def revoke(self) -> None:
        """Another stream used memory of this graph: the next replay waits for it."""
        self._launch = _unready

    def _go(
        self, launch: base.Replay, setter: base.Setter | None, names: Iterable[str], values: list[bytes]
    ) -> None:
        self._context.replayed = self.name
        if setter is not None:
            status = setter(values)
            if status[0]:
                self._context.device.check(status, f"setting {', '.join(names)}")
        status = launch()
        if status[0]:
            self._complain(status)

    def _complain(self, status: tuple[int, ...]) -> None:
        try:
            self._context.device.check(status, f"replay of {self}")
        except DriverError as error:
            if error.code == _INVALID_VALUE and self._leaves_memory_allocated():
                error.hint = (
                    "this graph allocates memory that it does not free: free that before the next "
                    "replay, or capture with free_on_launch=True"
                )
            raise

    def _leaves_memory_allocated(self) -> bool:
        """Return True where other libraries allocate more in the graph than they free there."""
        kinds = [node.kind for node in self._nodes]
        return kinds.count("allocation") > kinds.count("free")

    def _check(self, act: Operation) -> None:
        """Raise where this graph cannot be used."""
        self._context.require(_AGAIN)
        self._context.forbid(act)
        if self._executable is None and self._raw is None:
            raise self._unusable()
        if self._stale:
            gone = [buffer for buffer in self._buffers if not buffer.open]
            raise StaleGraphError(
                f"{self} is stale: {culprit(self._nodes, gone)} was closed after the capture",
                hint="keep what a graph uses open; capture again after replacing it",
            )

    def _unusable(self) -> GraphError:
        told = {
            State.NEW: ("nothing was captured yet", "with gpu.capture() as graph: …"),
            State.CAPTURING: ("it is still being captured", "replay after the end"),
            State.FAILED: ("its capture failed", "capture again, into a new graph"),
            State.CLOSED: ("it was closed", None),
        }
        why, hint = told.get(self.state, ("it cannot be instantiated", None))
        return GraphError(f"{self} cannot be replayed: {why}", hint=hint)

    def _target(self, given: object) -> base.Stream:
        """The stream a replay goes to: the given one, that of the capture, or of its library."""
        if given is not None:
            stream = raw_stream(self._context, given)
            self._context.active_capture(stream)  # which raises where another thread captures it
            return stream
        if self._stream is not None:
            return self._stream
        if self._libraries:
            return self._context.order.adopt(self._current(self._libraries[-1]))
        return self._context.stream

    def _current(self, library: str) -> int:
        return LIBRARIES[library].current(self._context.device.dlpack[1])

    def _gathered(self) -> LaunchArguments:
        others = {self._current(library): library for library in self._libraries}
        return LaunchArguments(uses=self._uses, foreign=self._foreign, others=others)

    # Scalars

    def _value(self, name: str, value: Any) -> bytes:
        scalar = self._scalars.get(name)
        if scalar is None:
            known = ", ".join(self._scalars) or "none"
            raise InputError(
                f"{self} uses no scalar called {name!r}; it uses: {known}",
                hint=did_you_mean(name, self._scalars)
                or f"gpu.scalar(…, name={name!r}), given to a captured kernel",
            )
        return packer(scalar.dtype)(value)

    def _setter(self, names: tuple[str, ...], stream: base.Stream) -> base.Setter | None:
        """What sets these scalars in `stream`."""
        if not names:
            return None
        found = self._setters.get((names, stream.id))
        if found is None:
            chosen = [self._scalars[name] for name in names]
            places = [(scalar.address, scalar.dtype.size) for scalar in chosen]
            found = self._setters[names, stream.id] = self._context.device.setter(places, stream)
        return found

    # What it is

    @property
    def nodes(self) -> tuple[Node, ...]:
        """What the graph does, in order; other libraries' work is among it, marked `foreign`."""
        return self._nodes

    @property
    def foreign(self) -> tuple[Node, ...]:
        """The work of other libraries, of which only kind and name are known."""
        return tuple(node for node in self._nodes if node.foreign)

    @property
    def scalars(self) -> dict[str, Scalar]:
        """The scalars that `replay` can set, by name."""
        return dict(self._scalars)

    @property
    def nbytes(self) -> int:
        """Bytes of our arrays that it keeps alive: an estimate, without what the driver adds."""
        return sum(buffer.size for buffer in self._buffers)

    @property
    def stale(self) -> bool:
        """Whether memory it uses was closed."""
        return self._stale

    def diff(self, other: Graph | Sequence[Node]) -> list[str]:
        """What `other` does differently, in words; empty where a replay of either is the same."""
        nodes = other.nodes if isinstance(other, Graph) else other
        return diff(self._nodes, nodes)

    def __len__(self) -> int:
        return len(self._nodes)

    def __bool__(self) -> bool:
        return True  # also without nodes

    def __repr__(self) -> str:
        count = f"{len(self._nodes)} node{'' if len(self._nodes) == 1 else 's'}"
        foreign = f", {len(self.foreign)} of other libraries" if self.foreign else ""
        name = f" {self.name!r}" if self.name else ""
        return f"<Graph{name}: {self.state.value}, {count}{foreign} on {self._context.device.name}>"

    def __str__(self) -> str:
        return f"graph {self.name!r}" if self.name else "graph"

    # Life

    def expire(self, reason: str) -> None:
        """A buffer calls this when memory that the graph uses is closed."""
        del reason
        self._stale, self._launch = True, _unready

    def doubt(self, ask: Callable[[Graph], None]) -> None:
        """Let the next replay call `ask` first; that raises where it cannot be, and may doubt again."""
        self._doubts.add(ask)
        self._launch = _unready

    def close(self) -> None:
        """Give it back, after the replays now queued, and let go of what it holds. Twice is fine."""
        if self.state is State.CAPTURING:
            raise CaptureError("this graph is still being captured", hint="end the capture first")
        give_back = self._exclusively(self._end)
        if self._context.lost is None:
            self._context.garbage.append(give_back)
            self._context.drain()

    def _end(self) -> Callable[[], None]:
        """Nothing of it can be used from now on; what is left to do."""
        give_back = self._give_back()
        self.state, self._raw, self._executable = State.CLOSED, None, None
        self._launch = _unready
        for known in (self._replays, self._setters, self._quick_setters):
            known.clear()
        for node in self._nodes:
            node.let_go()
        self._buffers, self._uses, self._foreign, self._scalars = [], {}, [], {}
        self._modules, self._pool = [], None
        return give_back

    def release(self) -> None:
        """Give back what is at the device, which is closed."""
        _close(self._context, self._executable, self._raw, last=None, keep=())

    def _give_back(self) -> Callable[[], None]:
        """What to do at a safe point; other libraries' memory goes after the last replay."""
        context, parts = self._context, (self._executable, self._raw)
        last, keep = self._last, (self._pool, self._foreign)
        return lambda: _close(context, *parts, last=last, keep=keep)

    def __del__(self) -> None:
        if getattr(self, "_executable", None) is not None or getattr(self, "_raw", None) is not None:
            self._context.garbage.append(self._give_back())


def _named(arrays: Iterable[Array]) -> dict[str, Scalar]:
    """The scalars among them, by name."""
    found: dict[str, Scalar] = {}
    for array in arrays:
        if not isinstance(array, Scalar) or array.name is None:
            continue
        if found.setdefault(array.name, array).buffer is not array.buffer:
            raise CaptureError(
                f"two scalars of this graph are called {array.name!r}",
                hint="give each a name of its own: graph.replay() sets scalars by name",
            )
    return found


_INVALID_VALUE = 1  # how the driver refuses a replay that would allocate memory twice
_UNREADY = (-1,)


def _unready() -> tuple[int, ...]:
    """The launch of a graph whose replays need a second look."""
    return _UNREADY


def _close(
    context: Context,
    *parts: base.Executable | base.Graph | None,
    last: base.Stream | Event | None,
    keep: tuple[object, ...],
) -> None:
    """Destroy the parts of a graph and hold `keep` until its last replay, in or before `last`, ends."""
    if last is not None and any(keep) and context.device.dlpack[0] != ON_HOST:
        context.hold(last if isinstance(last, Event) else record_event(context, last), keep)
    for part in parts:
        if part is not None:
            part.close()
