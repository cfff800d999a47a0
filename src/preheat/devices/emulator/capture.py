"""Captures on the emulator, with the states, errors and error codes of a GPU.

A stream is captured from `begin` to `end`. Work submitted in between becomes a node. A call that cannot
be captured fails with 900 and invalidates every capture that it concerns, as measured on a GPU:

    waiting for the device                      every capture on it
    waiting for or querying a captured stream   its capture
    unloading a module, trimming a pool         captures in mode "global"; in mode "thread_local" if
                                                their own thread calls; none in mode "relaxed"

Waits for other streams and events, and allocations and frees in them, concern no capture, because the
GPU device makes them with the capture mode of the thread exchanged. An allocation in the captured
stream is a node: its address is fixed, and each replay allocates the memory, which stays allocated
until it is freed, in the graph or outside.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from preheat.devices import base
from preheat.devices.emulator.driver_errors import driver_error
from preheat.devices.emulator.quarantine import Allocation
from preheat.devices.emulator.schedule import Scheduler
from preheat.errors import DriverError

__all__ = ["Capture", "Captures", "EmulatorExecutable", "EmulatorGraph"]

WorkList = list[Callable[[], object]]


class ClaimMemory(Protocol):
    """Counts the memory that a replay leaves allocated as memory of the device."""

    def __call__(self, allocations: Sequence[Allocation], stream: base.Stream, *, free: bool) -> bool:
        """Return False if memory of an earlier replay is still allocated, unless `free` frees it."""


class CapturedWork(NamedTuple):
    """The work of each replay, the objects that it keeps alive, the memory that it leaves allocated."""

    work: WorkList
    owners: tuple[object, ...]
    unfreed: tuple[Allocation, ...]


class EmulatorExecutable:
    """Captured work, executed in the order of its nodes. It keeps owners alive."""

    def __init__(
        self,
        captured: CapturedWork,
        scheduler: Scheduler | None,
        claim: ClaimMemory,
        *,
        free_on_launch: bool,
    ) -> None:
        self._captured: CapturedWork | None = captured
        self._scheduler = scheduler
        self._claim = claim
        self._free_on_launch = free_on_launch

    def upload(self, stream: base.Stream) -> None:
        """Do nothing: there is nothing to upload."""

    def prepare(
        self, stream: base.Stream, *, unless_captured: bool = False, mark: base.Event | None = None
    ) -> base.Replay:
        """Return a function that executes the work or queues it as one item."""
        replay = partial(self._replay, stream, mark)
        if unless_captured:
            return lambda: replay() if stream.capture_status() == "none" else base.NOT_SUBMITTED
        return replay

    def _replay(self, stream: base.Stream, mark: base.Event | None) -> tuple[int, ...]:
        captured = self._captured
        scheduler = self._scheduler
        if captured is None:
            return (400,)
        if captured.unfreed and not self._claim(captured.unfreed, stream, free=self._free_on_launch):
            return (1,)
        if scheduler is None:
            _run_all(captured)
        else:
            scheduler.submit(stream.id, partial(_run_all, captured))  # The item keeps the owners alive.
        if mark is not None:
            stream.record(reuse=mark)
        return (0,)

    def close(self) -> None:
        """Release the work and the owners. A queued replay keeps them alive."""
        self._captured = None


def _run_all(captured: CapturedWork) -> None:
    for work in captured.work:
        work()


class EmulatorGraph:
    """The work captured from a stream."""

    def __init__(
        self,
        nodes: list[base.GraphNode],
        captured: CapturedWork,
        scheduler: Scheduler | None,
        claim: ClaimMemory,
    ) -> None:
        self._nodes = nodes
        self._captured = captured
        self._scheduler = scheduler
        self._claim = claim

    def num_nodes(self) -> int:
        """Return the number of nodes."""
        return len(self._nodes)

    def nodes(self) -> list[base.GraphNode]:
        """Return its nodes, oldest first."""
        return list(self._nodes)

    def instantiate(self, *, free_on_launch: bool = False) -> base.Executable:
        """Return an executable."""
        return EmulatorExecutable(
            self._captured, self._scheduler, self._claim, free_on_launch=free_on_launch
        )

    def close(self) -> None:
        """Release the work and the owners."""
        self._nodes = []
        self._captured = CapturedWork([], (), ())


class Capture:
    """One capture of one stream, from its begin to its end."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.thread = threading.get_ident()
        self.valid = True
        self.nodes: list[base.GraphNode] = []
        self.unfreed: dict[int, Allocation] = {}  # Its allocations by address.
        self._work: WorkList = []
        self._owners: list[object] = []

    def add(self, kind: str, name: str, work: Callable[[], object]) -> None:
        """Add work that each replay executes."""
        self.require(kind)
        self.nodes.append(base.GraphNode(kind, name))
        self._work.append(work)

    def retain(self, owner: object) -> None:
        """Keep `owner` alive as long as the result of this capture."""
        self.require("retain")
        self._owners.append(owner)

    def __len__(self) -> int:
        return len(self.nodes)

    def require(self, call: str) -> None:
        """Raise if the capture is invalid."""
        if not self.valid:
            raise driver_error(call, 901)

    def invalidate(self, call: str, code: int = 900) -> DriverError:
        """Make the capture invalid. Return the error for a call that cannot be captured."""
        self.valid = False
        return driver_error(call, code)

    def concerns_this_thread(self) -> bool:
        """Return whether calls of this thread outside the captured stream concern this capture."""
        mine = self.thread == threading.get_ident()
        return self.mode == "global" or (self.mode == "thread_local" and mine)

    def captured(self) -> CapturedWork:
        """Return what each replay does."""
        return CapturedWork(self._work, tuple(self._owners), tuple(self.unfreed.values()))


class Captures:
    """The active captures of one device."""

    def __init__(self, scheduler: Scheduler | None, claim: ClaimMemory) -> None:
        self._active: dict[int, Capture] = {}  # By the id of the stream.
        self._scheduler = scheduler
        self._claim = claim

    def begin(self, stream: int, mode: str) -> Capture:
        """Begin to capture a stream."""
        if stream in self._active:
            raise driver_error("begin capture", 401)
        self._active[stream] = Capture(mode)
        return self._active[stream]

    def abandon(self, stream: int) -> None:
        """Drop the capture of a stream that is destroyed."""
        self._active.pop(stream, None)

    def end(self, stream: int) -> EmulatorGraph:
        """Return the captured work. The stream is no longer captured, whatever happens."""
        capture = self._active.pop(stream, None)
        if capture is None:
            raise driver_error("end capture", 401)
        if capture.mode != "relaxed" and capture.thread != threading.get_ident():
            raise driver_error("end capture", 908)
        capture.require("end capture")
        return EmulatorGraph(capture.nodes, capture.captured(), self._scheduler, self._claim)

    def find(self, stream: int) -> Capture | None:
        """Return the capture of a stream, or None."""
        return self._active.get(stream) if self._active else None

    def drop_other_threads(self) -> None:
        """Drop the captures of threads that do not exist in a forked child."""
        mine = threading.get_ident()
        self._active = {at: capture for at, capture in self._active.items() if capture.thread == mine}

    def reject(
        self,
        call: str,
        stream: int | None = None,
        *,
        everywhere: bool = False,
        watched: bool = False,
    ) -> None:
        """Raise for a call that cannot be captured, and invalidate the captures that it concerns.

        These are the capture of `stream`, all captures if `everywhere`, and, if `watched`, those that
        calls of this thread concern.
        """
        if not self._active:
            return
        own = None if stream is None else self._active.get(stream)
        concerned = [
            capture
            for capture in list(self._active.values())
            if everywhere or capture is own or (watched and capture.concerns_this_thread())
        ]
        for capture in concerned:
            capture.invalidate(call)
        if concerned:
            raise driver_error(call, 900)
