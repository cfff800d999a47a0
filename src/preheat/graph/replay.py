"""Replays: checked and ordered with other work, or, in the steady state, nothing but the launch.

`Replayer.run` does everything that a replay may need. It then finds out whether the next replay may
skip all of that, and sets `Replayer.launch` if so. For a graph that uses tensors of one other library,
that is a function that launches it in the current stream of the library. The native core sets scalars,
calls `launch` and does nothing else. Without it, every replay is a `Replayer.run`.

Whatever makes a check necessary again clears `launch` (`Replayer.invalidate`): another stream uses the
memory, memory is closed, or a frame of a pool begins.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, Protocol

from preheat import native
from preheat.devices import base
from preheat.devices.active_capture import REPLAY, RefusedOperation
from preheat.devices.base import NOT_SUBMITTED
from preheat.devices.context import Context
from preheat.devices.launch import MANY_STREAMS, in_order, register_operands
from preheat.devices.stream import raw_stream, record_event
from preheat.errors import CaptureError, DriverError, PreheatError, StaleGraphError
from preheat.graph.executable import GraphExecutable
from preheat.graph.frames import ScratchBuffer
from preheat.graph.nodes import first_user
from preheat.graph.profile import DEFAULT_OPTIONS, ReplayOptions, ReplaySample
from preheat.graph.recorded import RecordedWork
from preheat.model.tracebacks import shorten_traceback
from preheat.process import fork
from preheat.process.callsite import caller
from preheat.process.locks import DictLock, run_locked

__all__ = ["CAPTURE_AGAIN", "ReplayFunction", "Replayer"]

CAPTURE_AGAIN = "capture the graph again: gpu.capture()"
_LibraryStream = tuple[base.Stream, base.Replay]  # a stream of another library, and the launch in it
_INVALID_VALUE = 1  # the driver's error for a replay that would allocate memory twice


class ReplayFunction(Protocol):
    """The type of `Graph.replay`."""

    def __call__(self, stream: object = None, synchronize: bool = False, **scalars: Any) -> None:
        """Run the captured work once more."""


class Replayer:
    """Replays one graph: `work` at the device as `executable`.

    `launch` is the device's function that launches the graph in its usual stream, while a replay has
    nothing else to do, and None otherwise. `number_setters` has the functions that set scalars in that
    stream, with the formats of the scalars, by their names. `lock` protects all of this.
    """

    __slots__ = (
        "__weakref__", "_launches", "_library_streams", "_options", "_scratch", "_setters", "_stream",
        "context", "executable", "launch", "lock", "name", "num_replays", "number_setters", "work",
    )  # fmt: skip

    def __init__(
        self,
        context: Context,
        name: str | None,
        work: RecordedWork,
        executable: GraphExecutable,
        *,
        stream: base.Stream | None,
        options: ReplayOptions,
    ) -> None:
        self.context = context
        self.name = name
        self.work = work
        self.executable = executable
        self.num_replays = 0
        self.lock: DictLock = {0: True}
        self.launch: base.Replay | None = None
        self.number_setters: dict[tuple[str, ...], tuple[base.Setter, str]] = {}
        self._scratch = {each.stack for each in work.buffers if isinstance(each, ScratchBuffer)}
        self._stream = stream
        self._options = options
        self._launches: dict[int, base.Replay] = {}  # by the id of the stream
        self._setters: dict[tuple[tuple[str, ...], int], base.Setter] = {}  # by names and that id
        self._library_streams: dict[int, _LibraryStream] = {}  # by handle
        fork.register(self)
        for buffer in work.buffers:
            buffer.add_graph(self)

    @property
    def stale(self) -> bool:
        """True if memory that the graph uses was closed."""
        return not all(buffer.open for buffer in self.work.buffers)

    # Replays

    def function(self) -> ReplayFunction:
        """Return the function that `Graph.replay` is: of the native core, or `replay` without it."""
        if native.core is None:
            return self.replay
        replay: ReplayFunction = native.core.Replay(
            # in the order of the fields of `Replay` in `native/core.c`
            self, self.replay, self.raise_launch_error, self.raise_setter_error,
            self.context, self.name, self.lock, NOT_SUBMITTED, self.number_setters, Context, Replayer,
        )  # fmt: skip
        return replay

    def replay(self, /, stream: object = None, synchronize: bool = False, **scalars: Any) -> None:
        """Replay the graph: see `Graph.replay`."""
        try:
            self.run(stream, scalars, synchronize)
        except PreheatError as error:
            shorten_traceback(error)
            raise

    def run(self, stream: object, scalars: dict[str, Any], synchronize: bool) -> None:
        """Replay the graph with every check, and in order with other uses of its memory."""
        used, sample = run_locked(self.lock, partial(self._run, stream, scalars))
        if sample is not None:
            sample.write()
        if synchronize:
            used.synchronize()

    def _run(self, given: object, scalars: dict[str, Any]) -> tuple[base.Stream, ReplaySample | None]:
        """Replay once and return the stream, and the measurements if this replay is sampled."""
        profile = self._options.profile
        sample = None if profile is None else profile.sample(self.name, self.num_replays)
        self.check(REPLAY)
        for stack in self._scratch:
            stack.check_replay(self.work.title, self.work.buffers)
        values = [*map(self.work.pack, scalars, scalars.values())]
        stream = self._replay_stream(given)
        if self.context.order.is_capturing(stream):
            raise CaptureError(
                f"{self.work.title} cannot be replayed inside another library's capture",
                where=caller(),
                hint="replay it before or after that capture",
            )
        launch = self._launch_in(stream)
        if not self.executable.uploaded:
            self.executable.upload(stream)
        if sample:
            sample.lap("upload")
        setter = self._setter_in(stream, tuple(scalars))
        operands = self.work.operands(self.context.device)
        with in_order(self.context, operands, stream), register_operands(self.context, operands):
            self.context.last_replayed = self.name
            if setter is not None:
                self._set(setter, scalars, values)
            status = launch()
            if status[0]:
                self.raise_launch_error(status)
        # Another library may destroy its stream, so an event marks the end of the replay there.
        owned = self.context.order.owns(stream)
        self.executable.last_replay = stream if owned else record_event(self.context, stream)
        self.num_replays += 1
        if sample:
            sample.lap("launch")
        if self._options.sync:
            stream.synchronize()
        if sample and self._options.sync:
            sample.lap("sync")
        if native.core is not None:
            self._find_shortcut(given, stream, tuple(scalars))
        return stream, sample

    def _set(self, setter: base.Setter, names: Iterable[str], values: Iterable[bytes]) -> None:
        """Set scalars to the bytes of these values."""
        status = setter(b"".join(values))
        if status[0]:
            self.raise_setter_error(status, names)

    def _find_shortcut(self, given: object, stream: base.Stream, names: tuple[str, ...]) -> None:
        """Set `launch` if the next replay has nothing to do but what this one did in `stream`."""
        self.launch = None
        work = self.work
        plain = given is None and self._options == DEFAULT_OPTIONS
        if plain and not names and self._stream is None and work.is_of_one_library(self.context.device):
            self._prepare_library_launch(stream)
            return
        if not plain or work.libraries or work.foreign:
            self.number_setters.clear()
            return
        if names:
            codes = self.work.number_formats(names)
            if codes is not None and len(codes) <= native.core.MAX_SCALARS:
                self.number_setters[names] = (self._setters[names, stream.id], codes)
        launch = self._launches[stream.id]

        def set_launch() -> None:
            self.launch = launch
            # Another thread may have closed memory or begun a frame before it could see `launch`.
            if self.stale or any(stack.in_use for stack in self._scratch):
                self.launch = None

        self.context.order.add_dependent(self, stream, work.uses, set_launch)

    def _prepare_library_launch(self, stream: base.Stream) -> None:
        """Set `launch` for those current streams of the library that are known to stay valid."""
        library = self.work.library
        assert library is not None
        index = self.context.device.dlpack[1]
        if not library.current_is_permanent(index):
            return
        prepare = partial(self.executable.instantiate().prepare, stream, unless_captured=True)
        uses = self.work.uses
        if not uses:
            self._library_streams[stream.handle] = (stream, prepare())
        else:
            use = self.context.order.repeated_use(stream, uses, lambda event: prepare(mark=event))
            if use is None:
                return
            self._library_streams[stream.handle] = (stream, use.submit)
        streams = self._library_streams
        current = library.current
        executable = self.executable

        def launch() -> tuple[int, ...]:
            known = streams.get(current(index))
            if known is None:
                return NOT_SUBMITTED
            executable.last_replay, launch_in_stream = known
            return launch_in_stream()

        self.launch = launch
        # Another thread may have closed memory or begun a frame before it could see `launch`.
        if self.stale or any(stack.in_use for stack in self._scratch):
            self.launch = None

    def upload(self, stream: object) -> None:
        """Instantiate the graph and copy it to the device, in `stream`."""
        run_locked(self.lock, lambda: self.executable.upload(self._replay_stream(stream)))

    # Prepared for one stream

    def _replay_stream(self, requested: object) -> base.Stream:
        """Return the first that exists: the given stream, the captured one, a library's, ours."""
        if requested is not None:
            stream = raw_stream(self.context, requested)
            self.context.active_capture(stream)  # This raises if another thread captures the stream.
            return stream
        if self._stream is not None:
            return self._stream
        library = self.work.library
        if library is None:
            return self.context.stream
        return self.context.order.adopt(library.current(self.context.device.dlpack[1]))

    def _launch_in(self, stream: base.Stream) -> base.Replay:
        launch = self._launches.get(stream.id)
        if launch is None:
            if len(self._launches) >= MANY_STREAMS:
                self._launches.clear()
                self._setters.clear()
                self._library_streams.clear()
            launch = self._launches[stream.id] = self.executable.instantiate().prepare(stream)
        return launch

    def _setter_in(self, stream: base.Stream, names: tuple[str, ...]) -> base.Setter | None:
        if not names:
            return None
        setter = self._setters.get((names, stream.id))
        if setter is None:
            setter = self.work.setter(names, self.context.device, stream)
            self._setters[names, stream.id] = setter
        return setter

    # Errors

    def check(self, operation: RefusedOperation) -> None:
        """Raise if the graph cannot be used for `operation` now."""
        self.context.require_alive(CAPTURE_AGAIN)
        self.context.refuse_in_capture(operation)
        self.executable.require_open()
        closed = [buffer for buffer in self.work.buffers if not buffer.open]
        if closed:
            user = first_user(self.work.nodes, closed)
            raise StaleGraphError(
                f"{self.work.title} is stale: {user} was closed after the capture",
                hint="keep what a graph uses open; capture again after replacing it",
            )

    def raise_setter_error(self, status: tuple[int, ...], names: Iterable[str]) -> None:
        """Raise what failed when these scalars were set."""
        self.context.device.check(status, f"setting {', '.join(names)}")

    def raise_launch_error(self, status: tuple[int, ...]) -> None:
        """Raise the error for the status of a failed launch of the graph."""
        try:
            self.context.device.check(status, f"replay of {self.work.title}")
        except DriverError as error:
            if error.code == _INVALID_VALUE and self.work.leaves_memory_allocated:
                error.hint = (
                    "this graph allocates memory that it does not free: free that before the next "
                    "replay, or capture with free_on_launch=True"
                )
            raise

    # Invalidation

    def invalidate(self) -> None:
        """Let the next replay check everything: something has happened to memory of the graph."""
        self.launch = None

    def after_fork(self) -> None:
        """Release the lock in a forked child, where no thread is replaying the graph."""
        self.lock[0] = True

    def close(self) -> None:
        """Wait for a replay that another thread is submitting, then release everything."""
        run_locked(self.lock, self._close)

    def _close(self) -> None:
        self.executable.close()
        self.launch = None
        self._launches.clear()
        self._setters.clear()
        self._library_streams.clear()
        self.number_setters.clear()
        self.work.release()
