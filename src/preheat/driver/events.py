"""Events, and the waits of streams for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from preheat.driver.calls import CallError, entry
from preheat.driver.contexts import Context
from preheat.driver.raw import F32, put
from preheat.driver.status import INVALID_HANDLE, INVALID_VALUE, NOT_READY, NOT_SUPPORTED
from preheat.driver.streams import stream_of
from preheat.emulator.graph_work import EventRecord, EventWait

if TYPE_CHECKING:
    from preheat.driver.driver import Driver

__all__ = ["INTERPROCESS", "NO_TIMING", "Event", "add_event"]

NO_TIMING, INTERPROCESS = 2, 4  # flags of events
_KNOWN_FLAGS = 7
_EXTERNAL = 1  # a flag of records and waits: a node of the graph that is being captured


class Event:
    """An event of a context.

    Attributes:
        file: What other processes know it by, from when its handle is asked for.
    """

    def __init__(self, context: Context, flags: int) -> None:
        self.handle = 0
        self.context = context
        self.flags = flags
        self.file: object = None
        self.emulated = context.gpu.emulator.event()

    @property
    def recorded(self) -> bool:
        """False until it is recorded for the first time. It counts as complete until then."""
        return self.emulated.recorded


@entry("cuEventCreate")
def _create(driver: Driver, out: int, flags: int) -> None:
    if not out or flags & ~_KNOWN_FLAGS or (flags & INTERPROCESS and not flags & NO_TIMING):
        raise CallError(INVALID_VALUE)
    put(out, add_event(driver, flags))


def add_event(driver: Driver, flags: int) -> int:
    """Return the handle of a new event of the current context."""
    made = Event(driver.current(), flags)
    made.handle = driver.handles.add(made)
    return made.handle


@entry("cuEventDestroy", 4000)
def _destroy(driver: Driver, handle: int) -> None:
    driver.handles.get(handle, Event)
    driver.handles.remove(handle)


@entry("cuEventRecord", stream=1)
def _record(driver: Driver, handle: int, stream: int) -> None:
    event, where = driver.handles.get(handle, Event), stream_of(driver, stream)
    if where.context is not event.context:
        raise CallError(INVALID_HANDLE)
    where.emulated.record(reuse=event.emulated)
    if event.flags & INTERPROCESS and where.emulated.branch is None:
        event.emulated.synchronize()  # Other processes take it for complete.


@entry("cuEventRecordWithFlags", stream=1)
def _record_with_flags(driver: Driver, handle: int, stream: int, flags: int) -> None:
    where = stream_of(driver, stream)
    branch = where.emulated.branch
    if flags & ~_EXTERNAL or (flags and branch is None):
        raise CallError(INVALID_VALUE)
    if flags and branch is not None:
        event = driver.handles.get(handle, Event)
        if event.flags & INTERPROCESS:
            raise CallError(NOT_SUPPORTED)
        branch.add("record", "", EventRecord(event.emulated, event))
    else:
        _record(driver, handle, stream)


@entry("cuEventQuery")
def _query(driver: Driver, handle: int) -> int:
    event = driver.handles.get(handle, Event)
    event.context.gpu.emulator.captures.reject("event query", watched=True)
    return 0 if not event.recorded or event.emulated.done() else NOT_READY


@entry("cuEventSynchronize")
def _synchronize(driver: Driver, handle: int) -> None:
    event = driver.handles.get(handle, Event)
    event.context.gpu.emulator.captures.reject("event synchronize", watched=True)
    if event.recorded:
        event.emulated.synchronize()


@entry("cuEventElapsedTime")
def _elapsed(driver: Driver, out: int, start: int, end: int) -> None:
    events = [driver.handles.get(each, Event) for each in (start, end)]
    if any(not event.recorded or event.flags & NO_TIMING for event in events):
        raise CallError(INVALID_HANDLE)
    first, last = (event.emulated for event in events)
    put(out, 1e3 * last.elapsed(first), F32)


@entry("cuStreamWaitEvent", stream=0)
def _wait(driver: Driver, handle: int, event: int, flags: int) -> None:
    where, found = stream_of(driver, handle), driver.handles.get(event, Event)
    branch = where.emulated.branch
    if flags & ~_EXTERNAL or (flags and branch is None):
        raise CallError(INVALID_VALUE)
    if flags and branch is not None:
        branch.add("wait", "", EventWait(found.emulated, found))
    else:
        where.emulated.wait(found.emulated)
