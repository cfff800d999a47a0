"""Captures on the emulator, with the states, errors and error codes of a GPU.

A stream is captured from `begin` to `end`. Work submitted in between becomes a node. A stream that
waits for an event of the capture is forked: its work becomes a branch of the same graph, until the end.
Every node lists the nodes that it depends on. The end fails with 904 if a branch was not joined, which
means that the captured stream does not wait for all of its nodes. Where work is deferred, each replay
executes the nodes in another order that their dependencies allow.

A call that cannot be captured fails with 900 and invalidates every capture that it concerns, as
measured on a GPU:

    waiting for the device                      every capture on it
    waiting for or querying a captured stream   its capture
    unloading a module, trimming a pool         captures in mode "global"; in mode "thread_local" if
                                                their own thread calls; none in mode "relaxed". A thread
                                                can have another mode, which it exchanges: none in mode
                                                "relaxed", in mode "thread_local" its own captures

Waits for other streams and events, and allocations and frees in them, concern no capture, because the
device for GPUs exchanges the capture mode of the thread during these calls. An allocation in the
captured stream is a node: its address is fixed, and each replay allocates the memory, which stays
allocated until it is freed, in the graph or outside.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Sequence

from preheat.devices import base
from preheat.emulator.errors import driver_error
from preheat.emulator.graph import EmulatorGraph
from preheat.emulator.graph_work import GraphAllocation, GraphFree, GraphWork, WorkList
from preheat.emulator.schedule import Scheduler
from preheat.errors import DriverError

__all__ = ["Branch", "Capture", "Captures"]

_numbers = itertools.count(1)  # of captures


class Capture:
    """One capture, from its begin to its end, with the streams that take part in it."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.blocking = False  # True if a stream takes part that waits for the legacy default stream
        self.number = next(_numbers)
        self.thread = threading.get_ident()
        self.valid = True
        self.over = False
        self.nodes: list[base.GraphNode] = []
        self._work: WorkList = []
        self._after: list[tuple[int, ...]] = []  # for each node, the nodes that it depends on
        self._owners: list[object] = []
        self._unfreed: dict[int, GraphAllocation] = {}  # by address
        self._apart: set[int] = set()  # nodes that the captured stream need not wait for

    def add(self, kind: str, name: str, work: Callable[[], object], after: Sequence[int]) -> int:
        """Add work that each replay executes after the nodes `after`. Return the number of its node."""
        self.require(kind)
        self.nodes.append(base.GraphNode(kind, name))
        self._work.append(work)
        self._after.append(tuple(after))
        if isinstance(work, GraphAllocation):
            self._unfreed[work.address] = work
        elif isinstance(work, GraphFree):
            self._unfreed.pop(work.made.address, None)
        return len(self.nodes) - 1

    def retain(self, owner: object) -> None:
        """Keep `owner` alive as long as the result of this capture."""
        self.require("retain")
        self._owners.append(owner)

    def require(self, call: str) -> None:
        """Raise if the capture is invalid."""
        if not self.valid:
            raise driver_error(call, 901)

    def invalidate(self, call: str, code: int = 900) -> DriverError:
        """Make the capture invalid. Return the error for a call that cannot be captured."""
        self.valid = False
        return driver_error(call, code)

    def concerns_this_thread(self, mode: str) -> bool:
        """Return whether calls of this thread outside the captured stream concern this capture.

        `mode` is the capture mode of the thread.
        """
        if "relaxed" in (mode, self.mode):
            return False
        if self.thread == threading.get_ident():
            return True
        return mode == self.mode == "global"

    def has_unjoined(self, last: frozenset[int]) -> bool:
        """Return whether a node is neither in `last` nor before another node."""
        before_others = set(itertools.chain.from_iterable(self._after))
        return not before_others | last | self._apart >= set(range(len(self.nodes)))

    def set_apart(self, nodes: Iterable[int]) -> None:
        """Let the capture end although the captured stream does not wait for these nodes."""
        self._apart.update(nodes)

    def find_unfreed(self, address: int) -> GraphAllocation | None:
        """Return the captured allocation of this address that no captured work frees, or None."""
        return self._unfreed.get(address)

    def captured(self) -> GraphWork:
        """Return what each replay does."""
        return GraphWork(self._work, self._after, tuple(self._owners))


class Branch:
    """A stream that takes part in a capture. Its next node depends on the nodes `last`."""

    def __init__(self, capture: Capture, last: frozenset[int] = frozenset(), *, origin: bool) -> None:
        self.capture = capture
        self.last = last
        self.origin = origin  # False for a stream that was forked

    def add(self, kind: str, name: str, work: Callable[[], object]) -> None:
        """Add work that each replay executes after the work of this stream so far."""
        self.last = frozenset({self.capture.add(kind, name, work, sorted(self.last))})

    def wait(self, last: frozenset[int]) -> None:
        """Let later work of this stream depend on more nodes."""
        self.last |= last


class Captures:
    """The active captures of one device, by the streams that take part in them.

    `thread_mode` returns the capture mode of the calling thread.
    """

    def __init__(self, scheduler: Scheduler | None, thread_mode: Callable[[], str]) -> None:
        self._thread_mode = thread_mode
        self._active: dict[int, Branch] = {}  # By the id of the stream.
        self._scheduler = scheduler

    def begin(self, stream: int, mode: str, *, blocking: bool = False) -> None:
        """Begin to capture a stream. One that is `blocking` waits for the legacy default stream."""
        if stream in self._active:
            raise driver_error("begin capture", 401)
        capture = Capture(mode)
        capture.blocking = blocking
        self._active[stream] = Branch(capture, origin=True)

    def fork(
        self, stream: int, capture: Capture, last: frozenset[int], *, blocking: bool = False
    ) -> None:
        """Let the work of a stream become a branch of a capture, after the nodes `last`."""
        capture.blocking |= blocking
        self._active[stream] = Branch(capture, last, origin=False)

    def abandon(self, stream: int) -> None:
        """Drop the capture of a stream that is destroyed; a destroyed branch only leaves it."""
        branch = self._active.pop(stream, None)
        if branch is not None and branch.origin:
            self._leave(branch.capture)

    def end(self, stream: int) -> EmulatorGraph:
        """Return the captured work. The streams are no longer captured, unless a branch ends it."""
        branch = self._active.get(stream)
        if branch is None:
            raise driver_error("end capture", 401)
        capture = branch.capture
        if not branch.origin:
            raise capture.invalidate("end capture", 903)
        self._leave(capture)
        if capture.mode != "relaxed" and capture.thread != threading.get_ident():
            raise driver_error("end capture", 908)
        capture.require("end capture")
        if capture.has_unjoined(branch.last):
            raise driver_error("end capture", 904)
        return EmulatorGraph(capture.nodes, capture.captured(), self._scheduler)

    def _leave(self, capture: Capture) -> None:
        capture.over = True
        self._active = {
            stream: branch for stream, branch in self._active.items() if branch.capture is not capture
        }

    def find(self, stream: int) -> Branch | None:
        """Return the part that a stream has in a capture, or None."""
        return self._active.get(stream) if self._active else None

    def drop_other_threads(self) -> None:
        """Drop the captures of threads that do not exist in a forked child."""
        mine = threading.get_ident()
        self._active = {
            stream: branch for stream, branch in self._active.items() if branch.capture.thread == mine
        }

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
        branch = None if stream is None else self._active.get(stream)
        mode = self._thread_mode() if watched else ""
        own = None if branch is None else branch.capture
        concerned = [
            capture
            for capture in {branch.capture: None for branch in list(self._active.values())}
            if everywhere or capture is own or (watched and capture.concerns_this_thread(mode))
        ]
        for capture in concerned:
            capture.invalidate(call)
        if concerned:
            raise driver_error(call, 900)

    def reject_implicit(self, call: str) -> None:
        """Raise for a call in the legacy default stream if a blocking stream is captured.

        It invalidates these captures: the call would wait for their streams.
        """
        if not self._active:
            return
        concerned = {b.capture for b in list(self._active.values()) if b.capture.blocking}
        for capture in concerned:
            capture.invalidate(call)
        if concerned:
            raise driver_error(call, 906)
