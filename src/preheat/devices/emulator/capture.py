"""Captures on the emulator: the same states, the same refusals and the same numbers as a GPU's.

A stream is captured from `begin` to `end`. Work submitted meanwhile becomes a node. A call that no
capture can hold fails with 900 and invalidates every capture it concerns, as measured on a GPU:

    the device waited for                    every capture on it
    the captured stream waited for or asked  its capture
    a module unloaded, a pool trimmed        those begun "global"; those begun "thread_local" when
                                             their own thread calls; none begun "relaxed"

Waits for other streams and events, allocations and frees in them concern no capture, because the GPU
makes them with the capture mode of the thread exchanged. An allocation in the captured stream is a
node: its address is fixed, and each replay allocates the memory, which stays allocated until it is
freed, in the graph or outside.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from preheat.devices import base
from preheat.devices.emulator.refusal import refusal
from preheat.devices.emulator.retired import Block
from preheat.devices.emulator.schedule import Scheduler
from preheat.errors import DriverError

__all__ = ["Capture", "Captures", "EmulatorExecutable", "EmulatorGraph"]

Work = list[Callable[[], object]]


class Claim(Protocol):
    """The memory that a replay leaves allocated, at the device."""

    def __call__(self, blocks: Sequence[Block], stream: base.Stream, *, free: bool) -> bool:
        """Count it as allocated; what an earlier replay left must be freed, or is in `stream`."""


class Captured(NamedTuple):
    """What each replay does: the work, what that keeps alive, and the memory it leaves allocated."""

    work: Work
    owners: tuple[object, ...]
    unfreed: tuple[Block, ...]


class EmulatorExecutable:
    """Captured work, done in the order of its nodes; owners are kept meanwhile."""

    def __init__(
        self, captured: Captured, scheduler: Scheduler | None, claim: Claim, *, free_on_launch: bool
    ) -> None:
        self._captured: Captured | None = captured
        self._scheduler, self._claim, self._free_on_launch = scheduler, claim, free_on_launch

    def upload(self, stream: base.Stream) -> None:
        """Nothing to bring anywhere."""

    def prepare(self, stream: base.Stream) -> base.Replay:
        """Do it all, or queue it as one item; an error of work done at once comes out here."""
        return partial(self._replay, stream)

    def _replay(self, stream: base.Stream) -> tuple[int, ...]:
        captured, scheduler = self._captured, self._scheduler
        if captured is None:
            return (400,)
        if captured.unfreed and not self._claim(captured.unfreed, stream, free=self._free_on_launch):
            return (1,)
        if scheduler is None:
            _do_all(captured)
        else:
            scheduler.submit(stream.id, partial(_do_all, captured))  # which keeps the owners
        return (0,)

    def close(self) -> None:
        """Let go of the work and the owners; a replay that is queued keeps them."""
        self._captured = None


def _do_all(captured: Captured) -> None:
    for do in captured.work:
        do()


class EmulatorGraph:
    """What was captured from a stream."""

    def __init__(
        self,
        nodes: list[base.GraphNode],
        captured: Captured,
        scheduler: Scheduler | None,
        claim: Claim,
    ) -> None:
        self._nodes, self._captured = nodes, captured
        self._scheduler, self._claim = scheduler, claim

    def nodes(self) -> list[base.GraphNode]:
        """What it consists of, oldest first."""
        return list(self._nodes)

    def instantiate(self, *, free_on_launch: bool = False) -> base.Executable:
        """Make it ready."""
        return EmulatorExecutable(
            self._captured, self._scheduler, self._claim, free_on_launch=free_on_launch
        )

    def close(self) -> None:
        """Let go of the work and the owners."""
        self._nodes, self._captured = [], Captured([], (), ())


class Capture:
    """One capture of one stream, from its begin to its end."""

    def __init__(self, mode: str) -> None:
        self.mode, self.thread, self.valid = mode, threading.get_ident(), True
        self.nodes: list[base.GraphNode] = []
        self.unfreed: dict[int, Block] = {}  # what it allocates, by address
        self._work: Work = []
        self._owners: list[object] = []

    def add(self, kind: str, name: str, do: Callable[[], object]) -> None:
        """Work that is done at every replay instead of now."""
        self.require(kind)
        self.nodes.append(base.GraphNode(kind, name))
        self._work.append(do)

    def retain(self, owner: object) -> None:
        """Keep `owner` as long as what becomes of this capture."""
        self.require("retain")
        self._owners.append(owner)

    def __len__(self) -> int:
        return len(self.nodes)

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

    def captured(self) -> Captured:
        """What each replay is to do."""
        return Captured(self._work, tuple(self._owners), tuple(self.unfreed.values()))


class Captures:
    """The captures under way on one device."""

    def __init__(self, scheduler: Scheduler | None, claim: Claim) -> None:
        self._open: dict[int, Capture] = {}  # by the id of the stream
        self._scheduler, self._claim = scheduler, claim

    def begin(self, stream: int, mode: str) -> Capture:
        """Capture a stream from here on."""
        if stream in self._open:
            raise refusal("begin capture", 401)
        self._open[stream] = Capture(mode)
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
        return EmulatorGraph(capture.nodes, capture.captured(), self._scheduler, self._claim)

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
