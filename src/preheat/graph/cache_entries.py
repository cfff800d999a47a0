"""The entries of a graph cache: the graph of each key, and the state of keys without a graph.

A key is first seen, then captured, then has a graph:

    unknown ──record_run──▶ UncapturedKey ──begin_capture──▶ PendingCapture ──end_capture──▶ CachedGraph
                                  ▲─────────── the capture failed: quarantine ──────────┘

Each owner has its own entries. They are removed when the owner is garbage-collected. A `CacheReport`
describes what a cache holds.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from preheat.devices.context import Context
from preheat.graph.cached_graph import CachedGraph
from preheat.graph.keys import hashable, stable_repr
from preheat.process.messages import count

__all__ = [
    "CacheReport",
    "CachedGraphReport",
    "Entries",
    "EntryKey",
    "PendingCapture",
    "QuarantinedKey",
]

_WAITS = tuple(16 << failures for failures in range(9))  # calls in quarantine after each failure
_REMEMBERED = 1024  # keys without a graph that are remembered, at least


class CachedGraphReport(NamedTuple):
    """One cached graph. `nbytes` counts the arrays it keeps alive, which other graphs may share."""

    key: object
    owner: object
    nodes: int
    nbytes: int
    replays: int


class QuarantinedKey(NamedTuple):
    """A key that could not be captured: why, how often, and how many calls will not try again."""

    key: object
    owner: object
    reason: str
    failures: int
    waits: int


class CacheReport(NamedTuple):
    """Cached graphs, the least recently used first, and the keys in quarantine."""

    graphs: tuple[CachedGraphReport, ...]
    quarantined: tuple[QuarantinedKey, ...]

    @property
    def nbytes(self) -> int:
        """The sum of `nbytes` of all cached graphs."""
        return sum(graph.nbytes for graph in self.graphs)

    def __str__(self) -> str:
        rows = [
            f"{stable_repr(graph.key)}: {count(graph.nodes, 'node')}, {graph.nbytes:,} bytes, "
            f"{count(graph.replays, 'replay')}"
            for graph in self.graphs
        ]
        rows += [
            f"{stable_repr(one.key)}: failed {count(one.failures, 'time')}, "
            f"tries again in {count(one.waits, 'call')}: {one.reason}"
            for one in self.quarantined
        ]
        return "\n".join(rows) or "no graphs"


class EntryKey(NamedTuple):
    """A key, and the token that `Entries.owner_token` returns for its owner."""

    owner: Hashable
    key: Hashable

    @property
    def owner_object(self) -> object:
        """The owner itself; None if it was collected."""
        return self.owner() if isinstance(self.owner, _OwnerRef) else self.owner


class UncapturedKey:
    """A key without a graph: the calls until the next capture, and why the last capture failed."""

    def __init__(self) -> None:
        self.wait = 0
        self.failures = 0
        self.reason: str | None = None

    def record_failure(self, reason: str) -> None:
        """Note one more failure and wait twice as long as after the one before."""
        self.wait = _WAITS[min(self.failures, len(_WAITS) - 1)]
        self.failures += 1
        self.reason = reason


class PendingCapture:
    """A capture that a thread is doing; `cancelled` once its key was invalidated or got a graph."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.cancelled = False


class _OwnerRef(weakref.ref[Any]):
    """A weak reference to an owner, compared by identity even if owners are equal."""

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


_Removed = list[tuple[EntryKey, CachedGraph]]  # to be dropped after the lock is released


class Entries:
    """The entries of one cache, which has at most `capacity` graphs. Safe from any thread.

    Everything is forgotten when the device begins a new context. Graphs are dropped outside the lock,
    because dropping one may run other code. A call that finds a graph takes no lock: it reads `graphs`
    once and notes in the graph itself when it was used.
    """

    def __init__(self, current_context: Callable[[], Context], capacity: int) -> None:
        self._current_context = current_context
        self._capacity = capacity
        self.context = current_context()
        self.graphs: dict[Any, CachedGraph] = {}  # by `EntryKey`, or a tuple that is equal to one
        self._next_use = itertools.count(1).__next__
        # The least recently used key is the first one.
        self.uncaptured: OrderedDict[EntryKey, UncapturedKey] = OrderedDict()
        self._pending: dict[EntryKey, PendingCapture] = {}
        self.owners: dict[int, _OwnerRef] = {}  # by id
        self.collected: deque[_OwnerRef] = deque()
        self._on_collected = partial(_remove_owner, weakref.ref(self))
        self.lock = threading.Lock()

    def after_fork(self) -> None:
        """Renew the locks in a forked child, where no thread captures."""
        self.lock = threading.Lock()
        self._pending.clear()
        for cached in self.graphs.values():
            cached.lock[0] = True

    # Keys

    def entry_key(self, key: Hashable, owner: object) -> EntryKey:
        """Return the `EntryKey` of a key of an owner."""
        return EntryKey(self.owner_token(owner), key)

    def owner_token(self, owner: object) -> Hashable:
        """Return the token of an owner: a weak reference if the owner supports that."""
        if owner is None:
            return None
        token = self.owners.get(id(owner))
        if token is not None and token() is owner:
            return token
        try:
            new: _OwnerRef | None = _OwnerRef(owner, self._on_collected)
        except TypeError:
            new = None
        if new is None:
            return hashable(owner, "an owner")
        with self.lock:
            token = self.owners.get(id(owner))
            if token is None or token() is not owner:
                token = self.owners[id(owner)] = new
            return token

    # Graphs

    def find_ready(self, key: Any, owner: object) -> CachedGraph | None:
        """Return the graph of a key if a call has nothing to do but replay it, and count it as used.

        Most calls are such hits. The key may be anything: one that has a graph was checked before.
        """
        if not self.context.unrestricted or self.collected:
            return None
        token = None if owner is None else self.owner_token(owner)
        try:
            cached = self.graphs.get((token, key))
        except TypeError:  # It cannot be hashed.
            return None
        if cached is not None:
            cached.last_use = self._next_use()
        return cached

    def find(self, entry: tuple[Hashable, Hashable]) -> CachedGraph | None:
        """Return the graph of a key and count it as used. A graph that is unusable is dropped.

        The key is given as an `EntryKey` or as a tuple that is equal to one, which costs less to make.
        """
        # A context that is not lost is the current one. While no owner was collected either, there is
        # nothing to remove.
        if not self.context.unrestricted or self.collected:
            with self._current_entries():
                pass
        cached = self.graphs.get(entry)
        if cached is None:
            return None
        if not cached.usable:
            self.drop(entry, cached)
            return None
        cached.last_use = self._next_use()
        return cached

    def has(self, entry: EntryKey) -> bool:
        """Return True if a key has a usable graph, without counting it as used."""
        with self._current_entries():
            cached = self.graphs.get(entry)
        return cached is not None and cached.usable

    def put(self, entry: EntryKey, cached: CachedGraph) -> list[EntryKey]:
        """Give a key its graph; return the keys whose graphs were evicted for it."""
        with self._current_entries() as removed:
            return self._put(entry, cached, removed)

    def drop(self, entry: tuple[Hashable, Hashable], cached: CachedGraph) -> None:
        """Remove a graph, unless its key has another one by now."""
        with self.lock:
            if self.graphs.get(entry) is cached:
                del self.graphs[entry]

    def forget(self, entries: Iterable[EntryKey]) -> None:
        """Forget these keys, their graphs and failures."""
        with self._current_entries() as removed:
            for entry in entries:
                self._forget(entry, removed)

    def forget_all(self, owner: object) -> None:
        """Forget all keys of an owner, or of all owners if it is None."""
        token = self.owner_token(owner)
        with self._current_entries() as removed:
            for entry in self._all_keys():
                if owner is None or entry.owner == token:
                    self._forget(entry, removed)

    def report(self) -> CacheReport:
        """Describe all graphs and the keys in quarantine."""
        with self._current_entries():
            in_order = sorted(self.graphs.items(), key=_last_use)
            graphs = tuple(_report(*item) for item in in_order if item[1].usable)
            quarantined = tuple(
                QuarantinedKey(entry.key, entry.owner_object, one.reason, one.failures, one.wait)
                for entry, one in self.uncaptured.items()
                if one.reason is not None
            )
        return CacheReport(graphs, quarantined)

    # Captures

    def record_run(self, entry: EntryKey, *, ready: bool = False) -> None:
        """Record that the body of a key ran; `ready` ends the quarantine of the key."""
        with self.lock:
            if entry not in self.graphs:
                state = self._remember(entry)
                state.wait = 0 if ready else state.wait

    def begin_capture(self, entry: EntryKey) -> PendingCapture | None:
        """Return the right to capture a key that was seen and is not in quarantine, or None.

        One thread at a time has it, until it calls `end_capture`.
        """
        with self.lock:
            state = self.uncaptured.get(entry)
            if state is None or entry in self._pending:
                return None
            self.uncaptured.move_to_end(entry)
            if state.wait:
                state.wait -= 1
                return None
            pending = self._pending[entry] = PendingCapture(self.context)
            return pending

    def end_capture(
        self,
        entry: EntryKey,
        pending: PendingCapture,
        cached: CachedGraph | None,
        reason: str | None,
    ) -> list[EntryKey]:
        """End a capture with a graph, a reason for quarantine, or neither; return evicted keys."""
        evicted: list[EntryKey] = []
        with self._current_entries() as removed:
            if self._pending.get(entry) is pending:
                del self._pending[entry]
            late = pending.cancelled or pending.context is not self.context
            if cached is not None and not late:
                evicted = self._put(entry, cached, removed)
            if reason is not None and not late:
                self._remember(entry).record_failure(reason)
        return evicted

    def failure(self, entry: EntryKey) -> str | None:
        """Return why the last capture of a key failed, or None."""
        with self.lock:
            state = self.uncaptured.get(entry)
            return None if state is None else state.reason

    @contextmanager
    def _current_entries(self) -> Iterator[_Removed]:
        """Hold the lock while only current entries are left. Drop the removed graphs afterwards."""
        with self.lock:
            removed = self._refresh()
            yield removed
        self._drop_graphs(removed)

    # Under the lock

    def _all_keys(self) -> set[EntryKey]:
        return {*self.graphs, *self.uncaptured, *self._pending}

    def _refresh(self) -> _Removed:
        """Remove entries of an earlier context, and of owners that were collected."""
        removed: _Removed = []
        if (context := self._current_context()) is not self.context:
            for entry in self._all_keys():
                self._forget(entry, removed)
            self.context = context
        while self.collected:
            owner = self.collected.popleft()
            for entry in self._all_keys():
                if entry.owner is owner:
                    self._forget(entry, removed)
            for number in [number for number, one in self.owners.items() if one is owner]:
                del self.owners[number]
        return removed

    def _forget(self, entry: EntryKey, removed: _Removed) -> None:
        if (pending := self._pending.get(entry)) is not None:
            pending.cancelled = True
        self.uncaptured.pop(entry, None)
        if (cached := self.graphs.pop(entry, None)) is not None:
            removed.append((entry, cached))

    def _put(self, entry: EntryKey, cached: CachedGraph, removed: _Removed) -> list[EntryKey]:
        self._forget(entry, removed)
        cached.last_use = self._next_use()
        self.graphs[entry] = cached
        excess = len(self.graphs) - self._capacity
        evicted = sorted(self.graphs.items(), key=_last_use)[:excess] if excess > 0 else []
        for each, _ in evicted:
            del self.graphs[each]
        removed += evicted
        return [each for each, _ in evicted]

    def _remember(self, entry: EntryKey) -> UncapturedKey:
        state = self.uncaptured.setdefault(entry, UncapturedKey())
        self.uncaptured.move_to_end(entry)
        while len(self.uncaptured) > max(_REMEMBERED, 4 * self._capacity):
            self.uncaptured.popitem(last=False)
        return state

    # Outside the lock

    def _drop_graphs(self, removed: _Removed) -> None:
        """Drop graphs. Each one is destroyed once no other thread is replaying it."""
        if removed:
            removed.clear()
            self.context.drain()

    def remove_collected(self, owner: _OwnerRef) -> None:
        """Remove the graphs of an owner now, or with the next call if a thread holds the lock.

        This runs in the garbage collector, perhaps inside a call that holds the lock, so it must not
        wait.
        """
        self.collected.append(owner)
        lock = self.lock
        if lock.acquire(blocking=False):
            try:
                removed = self._refresh()
            finally:
                lock.release()
            removed.clear()


def _remove_owner(entries: weakref.ref[Entries], owner: _OwnerRef) -> None:
    alive = entries()
    if alive is not None:
        alive.remove_collected(owner)


def _last_use(item: tuple[EntryKey, CachedGraph]) -> int:
    return item[1].last_use


def _report(entry: EntryKey, cached: CachedGraph) -> CachedGraphReport:
    graph = cached.graph
    return CachedGraphReport(entry.key, entry.owner_object, len(graph), graph.nbytes, graph.num_replays)
