"""Captures on the emulator: the same states, the same refusals and the same numbers as a GPU's.

A stream is captured from `begin` to `end`. Work submitted meanwhile becomes a node. A call that no
capture can hold fails with 900 and invalidates every capture it concerns, as measured on a GPU:

    the device waited for                    every capture on it
    the captured stream waited for or asked  its capture
    a module unloaded, a pool trimmed        those begun "global"; those begun "thread_local" when
                                             their own thread calls; none begun "relaxed"

Waits for other streams and events, allocations and frees concern no capture, because the GPU makes them
with the capture mode of the thread exchanged.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

from preheat.devices import base
from preheat.devices.emulator.refusal import refusal
from preheat.devices.emulator.schedule import Scheduler
from preheat.errors import DriverError

__all__ = ["Capture", "Captures", "EmulatorExecutable", "EmulatorGraph"]

Work = list[Callable[[], object]]


class EmulatorExecutable:
    """Captured work, done in the order of its nodes; `owners` are kept meanwhile."""

    def __init__(self, work: Work, owners: tuple[object, ...], scheduler: Scheduler | None) -> None:
        self._work: Work | None = work
        self._owners, self._scheduler = owners, scheduler

    def upload(self, stream: base.Stream) -> None:
        """Nothing to bring anywhere."""

    def prepare(self, stream: base.Stream) -> base.Replay:
        """Do it all, or queue it as one item; an error of work done at once comes out here."""
        if self._scheduler is not None:
            return partial(self._queue, self._scheduler, stream.id)

        def replay() -> tuple[int, ...]:
            if self._work is None:
                return (400,)
            for do in self._work:
                do()
            return (0,)

        return replay

    def _queue(self, scheduler: Scheduler, stream: int) -> tuple[int, ...]:
        if self._work is None:
            return (400,)
        scheduler.submit(stream, partial(_do_all, self._work, self._owners))
        return (0,)

    def close(self) -> None:
        """Let go of the work and the owners; a replay that is queued keeps them."""
        self._work, self._owners = None, ()


def _do_all(work: Work, owners: tuple[object, ...]) -> None:
    del owners  # whoever queued this replay kept them up to here
    for do in work:
        do()


class EmulatorGraph:
    """What was captured from a stream."""

    def __init__(
        self,
        nodes: list[base.GraphNode],
        work: Work,
        owners: tuple[object, ...],
        scheduler: Scheduler | None,
    ) -> None:
        self._nodes, self._work = nodes, work
        self._owners, self._scheduler = owners, scheduler

    def nodes(self) -> list[base.GraphNode]:
        """What it consists of, oldest first."""
        return list(self._nodes)

    def instantiate(self) -> base.Executable:
        """Make it ready."""
        return EmulatorExecutable(list(self._work), self._owners, self._scheduler)

    def close(self) -> None:
        """Let go of the work and the owners."""
        self._nodes, self._work, self._owners = [], [], ()


class Capture:
    """One capture of one stream, from its begin to its end."""

    def __init__(self, mode: str, scheduler: Scheduler | None = None) -> None:
        self.mode, self.thread, self.valid = mode, threading.get_ident(), True
        self._nodes: list[base.GraphNode] = []
        self._work: Work = []
        self._owners: list[object] = []
        self._scheduler = scheduler

    def add(self, kind: str, name: str, do: Callable[[], object]) -> None:
        """Work that is done at every replay instead of now."""
        self.require(kind)
        self._nodes.append(base.GraphNode(kind, name))
        self._work.append(do)

    def retain(self, owner: object) -> None:
        """Keep `owner` as long as what becomes of this capture."""
        self.require("retain")
        self._owners.append(owner)

    def __len__(self) -> int:
        return len(self._nodes)

    def require(self, call: str) -> None:
        """Refuse to go on with an invalid capture."""
        if not self.valid:
            raise refusal(call, 901)

    def invalidate(self, call: str, code: int = 900) -> DriverError:
        """What a call that no capture can hold raises."""
        self.valid = False
        return refusal(call, code)

    def watches(self) -> bool:
        """Whether this thread's calls beside the captured stream concern it."""
        mine = self.thread == threading.get_ident()
        return self.mode == "global" or (self.mode == "thread_local" and mine)

    def graph(self) -> EmulatorGraph:
        """What was captured."""
        return EmulatorGraph(self._nodes, self._work, tuple(self._owners), self._scheduler)


class Captures:
    """The captures under way on one device."""

    def __init__(self, scheduler: Scheduler | None = None) -> None:
        self._open: dict[int, Capture] = {}  # by the id of the stream
        self._scheduler = scheduler

    def begin(self, stream: int, mode: str) -> Capture:
        """Capture a stream from here on."""
        if stream in self._open:
            raise refusal("begin capture", 401)
        self._open[stream] = Capture(mode, self._scheduler)
        return self._open[stream]

    def abandon(self, stream: int) -> None:
        """Forget the capture of a stream that is destroyed."""
        self._open.pop(stream, None)

    def end(self, stream: int) -> EmulatorGraph:
        """What was captured; the stream is free again whatever happens."""
        capture = self._open.pop(stream, None)
        if capture is None:
            raise refusal("end capture", 401)
        if capture.mode != "relaxed" and capture.thread != threading.get_ident():
            raise refusal("end capture", 908)
        capture.require("end capture")
        return capture.graph()

    def of(self, stream: int) -> Capture | None:
        """The capture of a stream."""
        return self._open.get(stream) if self._open else None

    def forget(self) -> None:
        """In a forked child: the captures of threads that it does not have are over."""
        mine = threading.get_ident()
        self._open = {at: capture for at, capture in self._open.items() if capture.thread == mine}

    def guard(
        self,
        call: str,
        stream: int | None = None,
        *,
        everywhere: bool = False,
        watched: bool = False,
    ) -> None:
        """Refuse a call that no capture can hold, and invalidate the captures it concerns.

        That is the capture of `stream`, every one, or those that watch the calls of this thread.
        """
        if not self._open:
            return
        own = None if stream is None else self._open.get(stream)
        concerned = [
            capture
            for capture in list(self._open.values())
            if everywhere or capture is own or (watched and capture.watches())
        ]
        for capture in concerned:
            capture.invalidate(call)
        if concerned:
            raise refusal(call, 900)
