"""The order of the uses of memory on one device: every use passes through a `Section`.

`docs/ordering.md` describes the model. `preheat.runtime.uses` has the uses of each allocation.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from threading import get_ident
from types import TracebackType

from preheat.callsite import caller
from preheat.devices import base
from preheat.devices.base import LEGACY_STREAMS
from preheat.errors import CaptureError, DeviceError, DriverError
from preheat.runtime.dict_lock import DictLock, run_locked
from preheat.runtime.uses import Dependent, Timeline, Uses

__all__ = ["Order", "Section"]

_NOBODY: Mapping[int, str] = {}


class Order:
    """Orders the uses of memory on one device.

    `libraries` gives the handles of the streams in which other libraries work on the device now, with
    the names of the libraries.
    """

    def __init__(
        self,
        device: base.Device,
        libraries: Callable[[], Mapping[int, str]],
        discard: Callable[[Callable[[], None]], None],
    ) -> None:
        self._device = device
        self._libraries = libraries
        self._discard = discard
        self._lock: DictLock = {0: True}
        self._holder = 0  # the thread that holds the lock
        self._own: dict[int, Timeline] = {}  # streams of ours, by id
        self._capture_streams: dict[int, Timeline] = {}  # streams for captures, by id
        self._by_handle: dict[int, Timeline] = {}  # both, and the legacy default stream, by handle
        self._others: weakref.WeakValueDictionary[int, Timeline] = weakref.WeakValueDictionary()

    # Streams

    def own(self, stream: base.Stream) -> base.Stream:
        """Register a stream of ours, which lives as long as the device."""
        self._own[stream.id] = self._by_handle[stream.handle] = Timeline(stream, self._discard, True)
        return stream

    def keep(self, stream: base.Stream) -> base.Stream:
        """Register a stream for captures, so that `adopt` of its handle returns this object."""
        self._capture_streams[stream.id] = self._by_handle[stream.handle] = Timeline(
            stream, self._discard, False
        )
        return stream

    def owns(self, stream: base.Stream) -> bool:
        """Return True for a stream of ours."""
        return stream.id in self._own

    def streams(self) -> list[base.Stream]:
        """Return the streams of ours."""
        return [line.stream for line in list(self._own.values())]

    def adopt(self, handle: int) -> base.Stream:
        """Return the stream that has this handle now, ours or another library's."""
        return self._adopted(handle).stream

    def _adopted(self, handle: int) -> Timeline:
        # These streams are never destroyed, so a handle identifies one.
        kept = self._by_handle.get(handle)
        if kept is not None:
            return kept
        found = self.timeline(self._device.adopt(handle))
        if handle in LEGACY_STREAMS:
            self._by_handle[handle] = found
        return found

    def timeline(self, stream: base.Stream) -> Timeline:
        """Return the one timeline of a stream."""
        number = stream.id
        found = self._own.get(number) or self._capture_streams.get(number) or self._others.get(number)
        if found is None:
            found = self._others.setdefault(number, Timeline(stream, self._discard, False))
        return found

    def captured(self, stream: base.Stream) -> bool:
        """Return True while another library captures `stream`."""
        return not self.owns(stream) and stream.capture_status() != "none"

    def capturing_library(self) -> str | None:
        """Return the name of a library that is capturing in this thread, or None."""
        for handle, library in self._libraries().items():
            if self.captured(self.adopt(handle)):
                return library
        return None

    # Uses

    def uses(self, home: base.Stream) -> Uses:
        """Return the uses of new memory, which `home` may use without waiting."""
        return Uses(self.timeline(home))

    def section(
        self,
        stream: base.Stream,
        uses: Mapping[Uses, bool],
        others: Mapping[int, str] = _NOBODY,
        *,
        captured: bool | None = None,
    ) -> Section:
        """Describe work in `stream`: the memory it uses, with True for a write.

        `others` are the streams, with the names of their libraries, whose memory the work uses as well.
        `captured` tells whether another library captures `stream`, where the caller knows.
        """
        shared = any(part.shared for each in uses for part in each.parts())
        handles = {**others, **self._libraries()} if shared else others
        lines = {self._adopted(at): name for at, name in handles.items() if at != stream.handle}
        captured = self.captured(stream) if captured is None else captured
        return Section(self, self.timeline(stream), uses, lines, captured)

    def run_locked(self, do: Callable[[], None]) -> None:
        """Run `do` while nobody else changes uses or records marks.

        A finalizer of the caller's may run inside and use memory in turn, so a thread never waits for
        itself.
        """
        if self._holder == get_ident():
            do()
            return

        def held() -> None:
            self._holder = get_ident()
            try:
                do()
            finally:
                self._holder = 0

        run_locked(self._lock, held)

    def absorb_released(self, uses: Uses) -> None:
        """Count the work of consumers that released the memory as writes of the streams they used."""
        for part in uses.parts():
            for handle in list(part.released):
                line = self._of_consumer(handle)
                if line is not None:
                    part.written_by(line)
                part.released.pop(handle, None)

    def _of_consumer(self, handle: int) -> Timeline | None:
        try:
            line = self._adopted(handle)
        except DriverError:  # The stream was destroyed, and its work has ended or is its owner's.
            return None
        if self.captured(line.stream):
            raise CaptureError(
                "another library that used this memory is capturing a graph",
                where=caller(),
                hint="do this before or after that capture",
            )
        return line

    def expose(self, uses: Uses, handles: Iterable[int], *, shared: bool) -> None:
        """Let streams of another library use this memory: they wait for what was done with it.

        `shared` tells that other consumers hold the memory already.
        """
        before = [self._adopted(handle) for handle in self._libraries()] if shared else []
        lines = [self._adopted(handle) for handle in handles]
        if any(self.captured(line.stream) for line in (*lines, *before)):
            raise CaptureError(
                "an array of preheat cannot be taken inside another library's capture",
                where=caller(),
                hint="take it before the capture, or capture with gpu.capture()",
            )

        def expose() -> None:
            marks: dict[Timeline, int] = {}
            self.absorb_released(uses)
            for line in lines:
                for other in before:
                    line.join(other)
                uses.await_all(line, write=True, marks=marks)
            uses.expose()

        self.run_locked(expose)

    def expect(self, uses: Uses, stream: base.Stream) -> None:
        """Let the next write of this memory wait for what `stream`, one of ours, has done."""
        line = self.timeline(stream)
        self.run_locked(lambda: uses.expect(line))

    def add_dependent(
        self,
        dependent: Dependent,
        stream: base.Stream,
        uses: Mapping[Uses, bool],
        ready: Callable[[], None],
    ) -> None:
        """Call `ready` if `stream` has all rights, and invalidate `dependent` when one is lost."""
        line = self.timeline(stream)

        def add() -> None:
            if all(each.allows(line, write=write) for each, write in uses.items()):
                for each in uses:
                    each.add_dependent(dependent)
                ready()

        self.run_locked(add)

    # Lifetime

    def renew(self) -> None:
        """Renew the lock in a forked child."""
        self._lock, self._holder = {0: True}, 0

    def release(self) -> None:
        """Destroy our streams and the events in all of them: the device is closed."""
        for line in [*self._own.values(), *self._capture_streams.values(), *self._others.values()]:
            line.close()
        for line in [*self._own.values(), *self._capture_streams.values()]:
            line.stream.close()


class Section:
    """One piece of work, to be submitted inside `with section:`.

    On entry the stream waits for the earlier uses of the memory and, where other libraries take part,
    for their current streams. On leaving, those streams wait for the work. Where another library is
    capturing one of these streams, the entry raises before anything was submitted. Inside its capture
    nothing waits: the replay of the graph is ordered as a whole.
    """

    __slots__ = ("_captured", "_line", "_order", "_others", "_ungranted", "_uses")

    def __init__(
        self,
        order: Order,
        line: Timeline,
        uses: Mapping[Uses, bool],
        others: Mapping[Timeline, str],
        captured: bool,
    ) -> None:
        self._order = order
        self._line = line
        self._uses = uses
        self._captured = captured
        self._others = {other: name for other, name in others.items() if other is not line}
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
            self._leave()
        except DeviceError:
            if error is None:  # Otherwise the error of the work itself is raised.
                raise

    def enter(self) -> None:
        """Wait for what comes before, and acquire the rights to the memory."""
        self._refuse_captures()
        if not self._captured:
            self._order.run_locked(self._enter)

    def _refuse_captures(self) -> None:
        if self._uses and self._captured:
            raise CaptureError(
                "an array of preheat cannot be used inside another library's capture",
                where=caller(),
                hint="pass a tensor of that library, such as torch.from_dlpack(array) taken before the "
                "capture; or capture with gpu.capture()",
            )
        for other, name in self._others.items():
            if self._captured or self._order.captured(other.stream):
                who = "another library" if self._captured else name
                raise CaptureError(
                    f"{who} is capturing a graph, and this work must be ordered with another stream",
                    where=caller(),
                    hint="do this before or after that capture",
                )

    def _enter(self) -> None:
        line = self._line
        marks = dict[Timeline, int]()
        for uses in self._uses:
            self._order.absorb_released(uses)
        for other in self._others:
            line.join(other)
        for uses, write in self._uses.items():
            if not uses.allows(line, write=write):
                uses.await_all(line, write=write, marks=marks)
        for uses, write in self._uses.items():
            if line.own and uses.grantable:
                uses.grant(line, write=write)
            else:
                self._ungranted[uses] = write

    def _leave(self) -> None:
        if (self._ungranted or self._others) and not self._captured:
            self._order.run_locked(self._note)

    def _note(self) -> None:
        position = self._line.mark()
        for uses, write in self._ungranted.items():
            uses.note(self._line, position, write=write)
        for other in self._others:
            other.wait(self._line, position)
