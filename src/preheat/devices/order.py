"""The order of the uses of memory on one device: every use passes through a `Section`.

`docs/ordering.md` describes the model. `preheat.devices.uses` has the uses of each allocation.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from threading import get_ident
from types import TracebackType

from preheat.devices import base
from preheat.devices.base import LEGACY_STREAMS, NOT_SUBMITTED
from preheat.devices.uses import Dependent, Timeline, Uses
from preheat.errors import CaptureError, DeviceError, DriverError
from preheat.process.callsite import caller
from preheat.process.locks import DictLock, run_locked

__all__ = ["Order", "RepeatedUse", "Section"]

_NO_STREAMS: Mapping[int, str] = {}


class Order:
    """Orders the uses of memory on one device.

    `library_streams` returns the handles of the current streams of other libraries, with the names of
    the libraries. `defer` queues what a finalizer must not do itself.
    """

    def __init__(
        self,
        device: base.Device,
        library_streams: Callable[[], Mapping[int, str]],
        defer: Callable[[Callable[[], None]], None],
    ) -> None:
        self._device = device
        self._library_streams = library_streams
        self._defer = defer
        self._lock: DictLock = {0: True}
        self._holder = 0  # the thread that holds the lock
        self._own_streams: dict[int, Timeline] = {}  # by id
        self._capture_streams: dict[int, Timeline] = {}  # by id
        self._by_handle: dict[int, Timeline] = {}  # both, and the legacy default stream, by handle
        self._foreign_streams: weakref.WeakValueDictionary[int, Timeline] = (
            weakref.WeakValueDictionary()
        )

    # Streams

    def register_stream(self, stream: base.Stream) -> base.Stream:
        """Register a stream of ours, which lives as long as the device."""
        timeline = self._own_streams[stream.id] = Timeline(stream, self._defer, True)
        self._by_handle[stream.handle] = timeline
        return stream

    def register_capture_stream(self, stream: base.Stream) -> base.Stream:
        """Register a stream for captures, so that `adopt` of its handle returns this object."""
        timeline = self._capture_streams[stream.id] = Timeline(stream, self._defer, False)
        self._by_handle[stream.handle] = timeline
        return stream

    def destroy_capture_stream(self, stream: base.Stream) -> None:
        """Destroy a stream of `register_capture_stream`, which ends its capture."""
        timeline = self._capture_streams.pop(stream.id)
        del self._by_handle[stream.handle]
        timeline.close()
        stream.close()

    def owns(self, stream: base.Stream) -> bool:
        """Return True for a stream of ours."""
        return stream.id in self._own_streams

    def streams(self) -> list[base.Stream]:
        """Return the streams of ours."""
        return [timeline.stream for timeline in list(self._own_streams.values())]

    def adopt(self, handle: int) -> base.Stream:
        """Return the stream that has this handle now, ours or another library's."""
        return self._timeline_of(handle).stream

    def _timeline_of(self, handle: int) -> Timeline:
        # These streams are not destroyed without a removal here, so a handle identifies one.
        timeline = self._by_handle.get(handle)
        if timeline is None:
            timeline = self.timeline(self._device.adopt(handle))
            if handle in LEGACY_STREAMS:
                self._by_handle[handle] = timeline
        return timeline

    def timeline(self, stream: base.Stream) -> Timeline:
        """Return the one timeline of a stream."""
        number = stream.id
        timeline = self._own_streams.get(number) or self._capture_streams.get(number)
        if timeline is None:
            timeline = self._foreign_streams.get(number)
        if timeline is None:
            timeline = self._foreign_streams.setdefault(number, Timeline(stream, self._defer, False))
        return timeline

    def is_capturing(self, stream: base.Stream) -> bool:
        """Return True while `stream` is captured, by another library or into a graph of ours.

        Streams of `register_stream` are never captured; captures of ours use other streams, those of
        `register_capture_stream`.
        """
        return not self.owns(stream) and stream.capture_status() != "none"

    def capturing_library(self) -> str | None:
        """Return the name of a library that is capturing in this thread, or None."""
        for handle, library in self._library_streams().items():
            if self.is_capturing(self.adopt(handle)):
                return library
        return None

    # Uses

    def new_uses(self, home: base.Stream) -> Uses:
        """Return the uses of new memory, which `home` may use without waiting."""
        return Uses(self.timeline(home))

    def section(
        self,
        stream: base.Stream,
        uses: Mapping[Uses, bool],
        others: Mapping[int, str] = _NO_STREAMS,
        *,
        capturing: bool | None = None,
    ) -> Section:
        """Describe work in `stream`: the memory it uses, with True for a write.

        `others` are streams of other libraries whose memory the work uses as well, by handle, with the
        names of the libraries.
        `capturing` is `is_capturing(stream)`, where the caller knows it.
        """
        exported = any(part.exported for each in uses for part in each.with_freed_parts())
        handles = {**others, **self._library_streams()} if exported else others
        timelines = {self._timeline_of(at): name for at, name in handles.items() if at != stream.handle}
        capturing = self.is_capturing(stream) if capturing is None else capturing
        return Section(self, self.timeline(stream), uses, timelines, capturing)

    def run_locked(self, do: Callable[[], None]) -> None:
        """Run `do` while no other thread changes uses or records marks.

        A finalizer of the caller's may run inside and use memory in turn, so a thread never waits for
        itself.
        """
        if self._holder == get_ident():
            do()
            return

        def locked() -> None:
            self._holder = get_ident()
            try:
                do()
            finally:
                self._holder = 0

        run_locked(self._lock, locked)

    def record_released_exports(self, uses: Uses) -> None:
        """Count the work of consumers that released the memory as writes of the streams they used."""
        for part in uses.with_freed_parts():
            for handle in list(part.released_streams):
                timeline = self._consumer_timeline(handle)
                if timeline is not None:
                    part.record_foreign_write(timeline)
                part.released_streams.pop(handle, None)

    def _consumer_timeline(self, handle: int) -> Timeline | None:
        try:
            timeline = self._timeline_of(handle)
        except DriverError:  # The stream was destroyed. Its owner is responsible for its work.
            return None
        if self.is_capturing(timeline.stream):
            raise CaptureError(
                "another library that used this memory is capturing a graph",
                where=caller(),
                hint="do this before or after that capture",
            )
        return timeline

    def export(self, uses: Uses, handles: Iterable[int], *, exported: bool) -> None:
        """Let streams of another library use this memory. They wait for its earlier uses.

        `exported` means that other consumers hold the memory already.
        """
        before = [self._timeline_of(handle) for handle in self._library_streams()] if exported else []
        timelines = [self._timeline_of(handle) for handle in handles]
        if any(self.is_capturing(timeline.stream) for timeline in (*timelines, *before)):
            raise CaptureError(
                "an array of preheat cannot be taken inside another library's capture",
                where=caller(),
                hint="take it before the capture, or capture with gpu.capture()",
            )

        def export() -> None:
            marks: dict[Timeline, int] = {}
            self.record_released_exports(uses)
            for timeline in timelines:
                for other in before:
                    timeline.wait_for_all(other)
                uses.wait_for_uses(timeline, write=True, marks=marks)
            uses.end_rights()

        self.run_locked(export)

    def add_pending_reader(self, uses: Uses, stream: base.Stream) -> None:
        """Make the next write of this memory wait for all work in our `stream` before that write."""
        timeline = self.timeline(stream)
        self.run_locked(lambda: uses.add_pending_reader(timeline))

    def add_dependent(
        self,
        dependent: Dependent,
        stream: base.Stream,
        uses: Mapping[Uses, bool],
        ready: Callable[[], None],
    ) -> None:
        """Call `ready` if `stream` has all rights, and invalidate `dependent` when one is lost."""
        timeline = self.timeline(stream)

        def add() -> None:
            if all(each.has_right(timeline, write=write) for each, write in uses.items()):
                for each in uses:
                    each.add_dependent(dependent)
                ready()

        self.run_locked(add)

    def repeated_use(
        self,
        stream: base.Stream,
        uses: Mapping[Uses, bool],
        prepare: Callable[[base.Event], base.Replay],
    ) -> RepeatedUse | None:
        """Return a `RepeatedUse` if these uses in `stream`, repeated, wait for nothing; otherwise None.

        `prepare` returns the launch of the work, which records the given event.
        """
        timeline = self.timeline(stream)
        repeated_uses: list[RepeatedUse] = []

        def add() -> None:
            if all(each.needs_no_wait(timeline, write=write) for each, write in uses.items()):
                repeated = RepeatedUse(self, timeline, uses, prepare(timeline.event))
                for each in uses:
                    each.add_dependent(repeated)
                repeated_uses.append(repeated)

        self.run_locked(add)
        return repeated_uses[0] if repeated_uses else None

    # Lifetime

    def after_fork(self) -> None:
        """Renew the lock in a forked child."""
        self._lock = {0: True}
        self._holder = 0

    def close(self) -> None:
        """Destroy our streams and the events in all of them: the device is closed."""
        owned = [*self._own_streams.values(), *self._capture_streams.values()]
        for timeline in [*owned, *self._foreign_streams.values()]:
            timeline.close()
        for timeline in owned:
            timeline.stream.close()


class RepeatedUse:
    """Uses of memory in a stream of another library, one after the other with nothing in between.

    Such a stream has no right, so each use is marked: `launch` submits the work and records the event
    of `timeline`. As long as `valid`, no use has to wait.
    """

    __slots__ = ("__weakref__", "_launch", "_order", "_timeline", "_uses", "valid")

    def __init__(
        self, order: Order, timeline: Timeline, uses: Mapping[Uses, bool], launch: base.Replay
    ) -> None:
        self._order = order
        self._timeline = timeline
        self._uses = uses
        self._launch = launch
        self.valid = True

    def invalidate(self) -> None:
        """Let the next use be ordered by a `Section`: the memory was used elsewhere, or closed."""
        self.valid = False

    def submit(self) -> tuple[int, ...]:
        """Submit the work and return its status; `NOT_SUBMITTED` if the order must be checked first."""
        order = self._order
        lock = order._lock  # This is `Order.run_locked`, without a wait and without a call.
        submitted = recorded = False
        try:
            del lock[0]
        except KeyError:  # Another thread holds it.
            return NOT_SUBMITTED
        try:
            order._holder = get_ident()
            if not self.valid:
                return NOT_SUBMITTED
            submitted = True  # An interrupt may come after the work was submitted.
            status = self._launch()
            submitted = status is not NOT_SUBMITTED
            recorded = not status[0]
            return status
        finally:
            try:
                if submitted:
                    timeline = self._timeline
                    position = timeline.mark(recorded=recorded)
                    for uses, write in self._uses.items():
                        uses.repeat_use(timeline, position, write=write)
            finally:
                order._holder = 0
                lock[0] = True


class Section:
    """One piece of work, to be submitted inside `with section:`.

    On entry the stream waits for the earlier uses of the memory and, where other libraries take part,
    for their current streams. On leaving, those streams wait for the work. Where another library is
    capturing one of these streams, the entry raises before anything was submitted. In a
    stream that is being captured nothing waits: the replay of the graph is ordered as a whole.
    """

    __slots__ = ("_capturing", "_order", "_others", "_timeline", "_ungranted", "_uses")

    def __init__(
        self,
        order: Order,
        timeline: Timeline,
        uses: Mapping[Uses, bool],
        others: Mapping[Timeline, str],
        capturing: bool,
    ) -> None:
        self._order = order
        self._timeline = timeline
        self._uses = uses
        self._capturing = capturing
        self._others = {other: name for other, name in others.items() if other is not timeline}
        self._ungranted: dict[Uses, bool] = {}  # uses without a right, which end with this work

    def __enter__(self) -> None:
        self.enter()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        del kind, traceback
        try:
            if (self._ungranted or self._others) and not self._capturing:
                self._order.run_locked(self._record_uses)
        except DeviceError:
            if error is None:  # Otherwise the error of the work itself is raised.
                raise

    def enter(self) -> None:
        """Wait for what comes before, and acquire the rights to the memory."""
        self._refuse_captures()
        if not self._capturing:
            self._order.run_locked(self._enter)

    def _refuse_captures(self) -> None:
        if self._uses and self._capturing:
            raise CaptureError(
                "an array of preheat cannot be used inside another library's capture",
                where=caller(),
                hint="pass a tensor of that library, such as torch.from_dlpack(array) taken before the "
                "capture; or capture with gpu.capture()",
            )
        for other, name in self._others.items():
            if self._capturing or self._order.is_capturing(other.stream):
                who = "another library" if self._capturing else name
                raise CaptureError(
                    f"{who} is capturing a graph, and this work must be ordered with another stream",
                    where=caller(),
                    hint="do this before or after that capture",
                )

    def _enter(self) -> None:
        timeline = self._timeline
        marks = dict[Timeline, int]()
        for uses in self._uses:
            self._order.record_released_exports(uses)
        for other in self._others:
            timeline.wait_for_all(other)
        for uses, write in self._uses.items():
            if not uses.has_right(timeline, write=write):
                uses.wait_for_uses(timeline, write=write, marks=marks)
        for uses, write in self._uses.items():
            if timeline.owned and uses.allows_rights:
                uses.grant(timeline, write=write)
            else:
                self._ungranted[uses] = write

    def _record_uses(self) -> None:
        position = self._timeline.mark()
        for uses, write in self._ungranted.items():
            uses.record_use(self._timeline, position, write=write)
        for other in self._others:
            other.wait(self._timeline, position)
