"""Captures on the emulator: the same states, the same refusals and the same numbers as a GPU's.

A stream is captured from `begin` to `end`. Work submitted meanwhile becomes a node. A call that no
capture can hold fails with 900 and invalidates every capture it concerns, as measured on a GPU:

    the device waited for                    every capture on it
    the captured stream waited for or asked  its capture
    another stream waited for or asked,      those begun "global"; those begun "thread_local" when
    memory taken or given back, a module     their own thread calls; none begun "relaxed"
    unloaded
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from preheat.devices import base
from preheat.errors import DriverError

__all__ = ["Capture", "Captures", "EmulatorExecutable", "EmulatorGraph"]

_NAMES = {
    401: ("ILLEGAL_STATE", "the stream is not in a state for this"),
    801: ("NOT_SUPPORTED", "captured work goes to one stream alone"),
    900: ("STREAM_CAPTURE_UNSUPPORTED", "no capture can hold this"),
    901: ("STREAM_CAPTURE_INVALIDATED", "an earlier call made this capture invalid"),
    905: ("STREAM_CAPTURE_ISOLATION", "captured work cannot wait for work that is not captured"),
    907: ("CAPTURED_EVENT", "a captured event never happens by itself"),
    908: ("STREAM_CAPTURE_WRONG_THREAD", "another thread began this capture"),
}


def refusal(call: str, code: int) -> DriverError:
    """The error with a GPU's number."""
    name, meaning = _NAMES[code]
    return DriverError(f"emulator {call}", code, f"EMULATOR_{name}", meaning)


class EmulatorExecutable:
    """Captured work, done in the order of its nodes."""

    def __init__(self, work: list[Callable[[], object]]) -> None:
        self._work: list[Callable[[], object]] | None = work

    def upload(self, stream: base.Stream) -> None:
        """Nothing to bring anywhere."""

    def prepare(self, stream: base.Stream) -> base.Replay:
        """Do it all; an error of the work comes out here."""
        del stream

        def replay() -> tuple[int, ...]:
            if self._work is None:
                return (400,)
            for do in self._work:
                do()
            return (0,)

        return replay

    def close(self) -> None:
        """Let go of the work."""
        self._work = None


class EmulatorGraph:
    """What was captured from a stream."""

    def __init__(self, nodes: list[base.GraphNode], work: list[Callable[[], object]]) -> None:
        self._nodes, self._work = nodes, work

    def nodes(self) -> list[base.GraphNode]:
        """What it consists of, oldest first."""
        return list(self._nodes)

    def instantiate(self) -> base.Executable:
        """Make it ready."""
        return EmulatorExecutable(list(self._work))

    def close(self) -> None:
        """Let go of the work."""
        self._nodes, self._work = [], []


class Capture:
    """One capture of one stream, from its begin to its end."""

    def __init__(self, mode: str) -> None:
        self.mode, self.thread, self.valid = mode, threading.get_ident(), True
        self._nodes: list[base.GraphNode] = []
        self._work: list[Callable[[], object]] = []

    def add(self, kind: str, name: str, do: Callable[[], object]) -> None:
        """Work that is done at every replay instead of now."""
        self.require(kind)
        self._nodes.append(base.GraphNode(kind, name))
        self._work.append(do)

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
        return EmulatorGraph(self._nodes, self._work)


class Captures:
    """The captures under way on one device."""

    def __init__(self) -> None:
        self._open: dict[int, Capture] = {}  # by the number of the stream

    def begin(self, stream: int, mode: str) -> Capture:
        """Capture a stream from here on."""
        if stream in (0, 1):
            raise refusal("begin capture", 900)
        if stream in self._open:
            raise refusal("begin capture", 401)
        self._open[stream] = Capture(mode)
        return self._open[stream]

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

    def guard(self, call: str, stream: int | None = None, *, everywhere: bool = False) -> None:
        """Refuse a call that no capture can hold, and invalidate the captures it concerns."""
        if not self._open:
            return
        own = None if stream is None else self._open.get(stream)
        concerned = [
            capture
            for capture in list(self._open.values())
            if everywhere or capture is own or (own is None and capture.watches())
        ]
        for capture in concerned:
            capture.invalidate(call)
        if concerned:
            raise refusal(call, 900)
