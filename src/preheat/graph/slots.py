"""Slots: one graph for each key, captured when the key is seen again and replayed from then on."""

from __future__ import annotations

import os
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

from preheat.devices import base
from preheat.errors import (
    BakedError,
    ContextLostError,
    DriverError,
    GraphError,
    InputError,
    StaleGraphError,
)
from preheat.graph import trees
from preheat.graph.graph import Graph, State
from preheat.runtime.context import Context
from preheat.runtime.window import Act

__all__ = ["Graphs", "Quarantined", "Report", "SlotReport"]

R = TypeVar("R")
Body = Callable[[Sequence[Any]], R]  # a step, given the arrays that a slot has copies of

_WAITS = tuple(16 << failures for failures in range(9))  # eager calls after each failed capture
_REMEMBERED = 1024  # keys without a graph, at least

_USABLE = (State.CAPTURED, State.READY)
_WARM = Act("warming graphs", "warm before the capture")


class SlotReport(NamedTuple):
    """One slot. `nbytes` is an estimate: our arrays that it keeps alive, which others may share."""

    key: object
    owner: object
    nodes: int
    nbytes: int
    replays: int


class Quarantined(NamedTuple):
    """A key that could not be captured: why, how often, and how many calls will not even try."""

    key: object
    owner: object
    reason: str
    failures: int
    waits: int


class Report(NamedTuple):
    """What there is: slots, the least recently used first, and keys in quarantine."""

    slots: tuple[SlotReport, ...]
    quarantined: tuple[Quarantined, ...]

    @property
    def nbytes(self) -> int:
        """All slots' estimates together."""
        return sum(slot.nbytes for slot in self.slots)

    def __str__(self) -> str:
        rows = [
            f"{slot.key!r}: {slot.nodes} node{'' if slot.nodes == 1 else 's'}, {slot.nbytes:,} bytes, "
            f"{slot.replays} replays"
            for slot in self.slots
        ]
        rows += [
            f"{one.key!r}: failed {one.failures} times, tries again in {one.waits} calls: {one.reason}"
            for one in self.quarantined
        ]
        return "\n".join(rows) or "no slots"


class Graphs:
    """Graphs by key on one device, at most `capacity` of them: the least recently used one goes first.

        graphs = gpu.graphs(capacity=8)
        graphs.run(size, lambda: step(size))   # runs; the second time captures; then replays

    Each `owner` has slots of its own, which go when it does: it is held weakly where that is possible.
    `checked` captures each call of `run` anew, compares it with the slot, and raises `BakedError`
    where a replay would use something else. After a reset of the device there are no slots, and it
    goes on with the new life. Safe from any thread.
    """

    def __init__(
        self,
        context: Callable[[], Context],
        capture: Callable[..., Graph],
        capacity: int = 64,
        *,
        checked: bool = False,
    ) -> None:
        if capacity < 1:
            raise InputError(f"{capacity} slots hold no graph", hint="capacity=1 or more")
        self.capacity, self.checked = capacity, checked
        self._context, self._capture = context, capture
        self._life = context()
        self._slots: OrderedDict[_Place, _Slot] = OrderedDict()  # the least recently used first
        self._known: OrderedDict[_Place, _Known] = OrderedDict()  # keys without a graph, likewise
        self._claims: dict[_Place, _Claim] = {}  # captures under way
        self._owners: dict[int, _Owner] = {}
        self._dead: deque[_Owner] = deque()
        self._bury = partial(_bury, weakref.ref(self))
        self._lock = threading.Lock()
        _alive.add(self)

    # Running steps

    def run(
        self, key: Hashable, body: Callable[[], R], *, owner: object = None, copy: bool = False
    ) -> R:
        """Do what `body` does on the device, exactly once, and return what it returned.

        At first sight of `key` the body runs, the second time it is captured and the graph replayed,
        from then on the graph is replayed. What comes back is what the body returned as it was
        captured: the same arrays, with new content after every call; with `copy`, copies of them.
        Python inside the body therefore runs the first two times only.

        A body that cannot be captured runs as it is, and its key is left in peace for a while: see
        `report`. An error that the device does not survive is raised. Inside a capture the body becomes
        part of that.
        """
        return self._step(key, lambda _: body(), (), owner=owner, copy=copy)

    def _step(
        self, key: Hashable, body: Body[R], given: Sequence[Any], *, owner: object, copy: bool
    ) -> R:
        """`run` for a body of arrays: slots have arrays of their own, which are `given` the content."""
        if self._context().window() is not None:
            return body(given)
        place = self._place(key, owner)
        slot = self._find(place)
        if slot is None:
            slot = self._captured(place, body, given)
        elif self.checked:
            slot.check(self._graph(key), body)
        if slot is not None:
            try:
                outputs: R = slot.step(given, copy=copy)
                return outputs
            except StaleGraphError:
                self._drop(place, slot)
        made = body(given)
        self._seen(place)
        return trees.copies(made) if copy else made

    def replay(self, key: Hashable, /, *, owner: object = None, **scalars: Any) -> bool:
        """Replay the graph of `key` as `Graph.replay` does, scalars set; False where there is none."""
        place = self._place(key, owner)
        slot = self._find(place)
        if slot is None:
            return False
        try:
            slot.graph.replay(**scalars)
        except StaleGraphError:
            self._drop(place, slot)
            return False
        return True

    def warm(self, keys: Iterable[Any], body: Callable[[Any], object], *, owner: object = None) -> None:
        """Capture `body(key)` for all keys without a slot, the largest first.

        For each, the body is executed once, which loads its kernels, and then captured, which executes
        nothing. `GraphError` at the end lists the keys that could not be captured.
        """
        self._context().forbid(_WARM)
        wanted = _largest_first(keys)
        if len(wanted) > self.capacity:
            raise InputError(
                f"{len(wanted)} keys do not fit into {self.capacity} slots",
                hint=f"gpu.graphs(capacity={len(wanted)})",
            )
        reasons = {key: self._warmed(key, body, owner) for key in wanted}
        failed = [f"{key!r}: {reason}" for key, reason in reasons.items() if reason]
        if failed:
            text = f"{len(failed)} of {len(wanted)} keys could not be captured"
            raise GraphError("\n  ".join((text, *failed)), hint="until they can, `run` runs them as is")

    def _warmed(self, key: Any, body: Callable[[Any], object], owner: object) -> str | None:
        """Warm one key; returns why that was impossible."""
        place = self._place(key, owner)
        if self._find(place) is not None:
            return None
        body(key)
        self._seen(place, ready=True)
        self._captured(place, lambda _: body(key), ())
        with self._lock:
            known = self._known.get(place)
            return None if known is None else known.reason

    # Slots

    def install(
        self, key: Hashable, graph: Graph, outputs: object = None, *, owner: object = None
    ) -> None:
        """Let `key` mean `graph` from now on, and `run` return `outputs`. The graph stays yours too."""
        if graph.state not in _USABLE:
            raise GraphError(f"{graph} cannot be installed: it is {graph.state.value}")
        place = self._place(key, owner)
        with self._lock:
            gone = self._refresh()
            if graph._context is not self._life:
                raise InputError(f"{graph} is of another device, or from before a reset of this one")
            evicted = self._put(place, _Slot(graph, outputs), gone)
        self._let_go(gone, evicted)

    def invalidate(self, *keys: Hashable, owner: object = None) -> None:
        """Forget these keys, and that they failed; without any, all of `owner`, or of everybody."""
        places = [self._place(key, owner) for key in keys]
        token = self._token(owner)
        with self._lock:
            gone = self._refresh()
            if not keys:
                known = {*self._slots, *self._known, *self._claims}
                places = [place for place in known if owner is None or place.owner == token]
            for place in places:
                self._forget(place, gone)
        self._let_go(gone)

    def __contains__(self, key: Hashable) -> bool:
        place = self._place(key, None)
        with self._lock:
            gone = self._refresh()
            slot = self._slots.get(place)
        self._let_go(gone)
        return slot is not None and not slot.graph.stale

    def __len__(self) -> int:
        return len(self.report().slots)

    def __iter__(self) -> Iterator[Any]:
        return iter([slot.key for slot in self.report().slots])

    def report(self) -> Report:
        """What there is now."""
        with self._lock:
            gone = self._refresh()
            slots = tuple(
                slot.report(place) for place, slot in self._slots.items() if not slot.graph.stale
            )
            known = [(place, one) for place, one in self._known.items() if one.reason is not None]
            quarantined = tuple(
                Quarantined(place.key, place.whose, str(one.reason), one.failures, one.wait)
                for place, one in known
            )
        self._let_go(gone)
        return Report(slots, quarantined)

    def __repr__(self) -> str:
        checked = ", checked" if self.checked else ""
        count = len(self._slots)  # without the lock: a debugger may ask any time
        return f"<Graphs on {self._life.device.name}: {count} of {self.capacity} slots{checked}>"

    @property
    def _device(self) -> base.Device:
        return self._context().device

    # Places

    def _place(self, key: Hashable, owner: object) -> _Place:
        return _Place(self._token(owner), _hashable(key, "a key"))

    def _token(self, owner: object) -> Hashable:
        """What stands for an owner: a weak reference where there can be one."""
        if owner is None:
            return None
        known = self._owners.get(id(owner))
        if known is not None and known() is owner:
            return known
        try:
            made = _Owner(owner, self._bury)
        except TypeError:
            return _hashable(owner, "an owner")
        with self._lock:
            known = self._owners.get(id(owner))
            if known is None or known() is not owner:
                known = self._owners[id(owner)] = made
            return known

    # Under the lock

    def _refresh(self) -> _Gone:
        """Take out what belongs to an earlier life or to owners that are gone."""
        gone: _Gone = []
        if (life := self._context()) is not self._life:
            for place in {*self._slots, *self._known, *self._claims}:
                self._forget(place, gone)
            self._life = life
        while self._dead:
            owner = self._dead.popleft()
            for place in {*self._slots, *self._known, *self._claims}:
                if place.owner is owner:
                    self._forget(place, gone)
            for number in [number for number, one in self._owners.items() if one is owner]:
                del self._owners[number]
        return gone

    def _forget(self, place: _Place, gone: _Gone) -> None:
        """Nothing is known of a place; a capture that is under way for it comes too late."""
        if (claim := self._claims.get(place)) is not None:
            claim.void = True
        self._known.pop(place, None)
        if (slot := self._slots.pop(place, None)) is not None:
            gone.append((place, slot))

    def _put(self, place: _Place, slot: _Slot, gone: _Gone) -> list[_Place]:
        """Give a place its slot; returns the least recently used ones, whose slots had to go for it."""
        self._forget(place, gone)
        self._slots[place] = slot
        over = [self._slots.popitem(last=False) for _ in range(len(self._slots) - self.capacity)]
        gone += over
        return [place for place, _ in over]

    def _remember(self, place: _Place) -> _Known:
        known = self._known.setdefault(place, _Known())
        self._known.move_to_end(place)
        while len(self._known) > max(_REMEMBERED, 4 * self.capacity):
            self._known.popitem(last=False)
        return known

    # Finding and filling

    def _find(self, place: _Place) -> _Slot | None:
        """The slot of a place, now the most recently used; one that is stale is dropped."""
        with self._lock:
            gone = self._refresh()
            slot = self._slots.get(place)
            if slot is not None:
                self._slots.move_to_end(place)
        if slot is not None and slot.graph.stale:
            self._drop(place, slot)
            slot = None
        self._let_go(gone)
        return slot

    def _drop(self, place: _Place, slot: _Slot) -> None:
        with self._lock:
            if self._slots.get(place) is slot:
                del self._slots[place]

    def _seen(self, place: _Place, *, ready: bool = False) -> None:
        """The body of a place ran; `ready` says that nothing more is waited for."""
        with self._lock:
            if place not in self._slots:
                known = self._remember(place)
                known.wait = 0 if ready else known.wait

    def _claim(self, place: _Place) -> _Claim | None:
        """The right to capture a key that was seen and is not in quarantine: one thread's at a time."""
        with self._lock:
            known = self._known.get(place)
            if known is None or place in self._claims:
                return None
            self._known.move_to_end(place)
            if known.wait:
                known.wait -= 1
                return None
            claim = self._claims[place] = _Claim(self._life)
            return claim

    def _captured(self, place: _Place, body: Body[Any], given: Sequence[Any]) -> _Slot | None:
        """A new slot, where it is time for one and the body can be captured."""
        claim = self._claim(place)
        if claim is None:
            return None
        slot: _Slot | None = None
        reason: str | None = None
        try:
            slot = _Slot.captured(partial(self._graph, place.key), body, given)
        except Exception as error:
            if claim.life.lost is not None or _fatal(error):
                raise
            reason = _reason(error)
        finally:
            self._settle(place, claim, slot, reason)
        return slot

    def _graph(self, key: Hashable) -> Graph:
        return self._capture(name=key if isinstance(key, str) else repr(key))

    def _settle(self, place: _Place, claim: _Claim, slot: _Slot | None, reason: str | None) -> None:
        """The end of a capture: a slot, or a reason for quarantine, or neither."""
        evicted: list[_Place] = []
        with self._lock:
            gone = self._refresh()
            if self._claims.get(place) is claim:
                del self._claims[place]
            late = claim.void or claim.life is not self._life
            if slot is not None and not late:
                evicted = self._put(place, slot, gone)
            if reason is not None and not late:
                self._remember(place).failed(reason)
        if slot is not None:
            self._tell("captured", place)
        if reason is not None:
            self._tell("quarantined", place, reason)
        self._let_go(gone, evicted)

    def _let_go(self, gone: _Gone, evicted: Iterable[_Place] = ()) -> None:
        """Drop slots, outside the lock: each graph goes once no other thread is replaying it."""
        for place in evicted:
            self._tell("evicted", place)
        if gone:
            gone.clear()
            self._life.drain()

    def _tell(self, what: str, place: _Place, reason: str = "") -> None:
        device = self._life.device.name
        self._life.events.emit("graph", what=what, device=device, key=repr(place.key), reason=reason)

    def _forked(self) -> None:
        """Only one thread came along: nobody holds a lock or captures."""
        self._lock = threading.Lock()
        self._claims.clear()
        for slot in self._slots.values():
            slot.lock = threading.Lock()


class _Slot:
    """A graph with what its body returned, and the arrays that calls copy theirs into."""

    def __init__(self, graph: Graph, outputs: Any = None, inputs: Sequence[Any] = ()) -> None:
        self.graph, self.outputs, self.inputs = graph, outputs, inputs
        self.lock = threading.Lock()  # from the copies in to the copies out

    @classmethod
    def captured(cls, new: Callable[[], Graph], body: Body[Any], given: Sequence[Any]) -> _Slot:
        """What `body` does, as a graph that is ready to replay."""
        inputs = [trees.private(array) for array in given]
        graph = new()
        try:
            with graph:
                outputs = body(inputs)
            graph.upload()
        except BaseException:
            if graph.state in _USABLE:  # captured, but it cannot be made ready
                graph.close()
            raise
        return cls(graph, outputs, inputs)

    def step(self, given: Sequence[Any], *, copy: bool) -> Any:
        """Replay with new content in the arrays; what the body returned, or copies of it."""
        with self.lock:
            for array, other in zip(self.inputs, given, strict=True):
                trees.refill(array, other)
            self.graph.replay()
            return trees.copies(self.outputs) if copy else self.outputs

    def check(self, new: Graph, body: Body[Any]) -> None:
        """Raise where `body` would do something else now, captured as `new`, than this graph does."""
        with self.lock:
            new.begin()
            try:
                body(self.inputs)
            except BaseException as error:
                new.__exit__(type(error), error, error.__traceback__)
                raise
            changes = self.graph.diff(new.end())
            new.close()
        if changes:
            raise BakedError(
                f"{self.graph} was captured for another call; this one would bake other values:",
                changes,
                hint="put what changes into the key, or into a gpu.scalar",
            )

    def report(self, place: _Place) -> SlotReport:
        """What there is to say of it."""
        graph = self.graph
        return SlotReport(place.key, place.whose, len(graph), graph.nbytes, graph.num_replays)


class _Place(NamedTuple):
    """Where a slot is."""

    owner: Hashable
    key: Hashable

    @property
    def whose(self) -> object:
        """The owner itself."""
        return self.owner() if isinstance(self.owner, _Owner) else self.owner


class _Known:
    """A key without a graph: how many of its calls will not try a capture, and why."""

    def __init__(self) -> None:
        self.wait, self.failures = 0, 0
        self.reason: str | None = None

    def failed(self, reason: str) -> None:
        """Once more; wait twice as long as before."""
        self.wait = _WAITS[min(self.failures, len(_WAITS) - 1)]
        self.failures, self.reason = self.failures + 1, reason


class _Claim:
    """A capture under way; `void` once its key was invalidated or got another graph."""

    def __init__(self, life: Context) -> None:
        self.life, self.void = life, False


class _Owner(weakref.ref[Any]):
    """An owner, held weakly and told from every other by identity, whatever it is equal to."""

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


_Gone = list[tuple[_Place, _Slot]]


def _bury(graphs: weakref.ref[Graphs], owner: _Owner) -> None:
    """An owner died: its slots go now, or soon where somebody has the lock, which none may wait for."""
    alive = graphs()
    if alive is None:
        return
    alive._dead.append(owner)
    lock = alive._lock
    if lock.acquire(blocking=False):
        try:
            gone = alive._refresh()
        finally:
            lock.release()
        gone.clear()


def _hashable(value: Any, what: str) -> Hashable:
    try:
        hash(value)
    except TypeError as bad:
        hint = "use plain values, or a tuple of them"
        raise InputError(f"{value!r} cannot be {what}: {bad}", hint=hint) from None
    made: Hashable = value
    return made


def _largest_first(keys: Iterable[Any]) -> list[Any]:
    try:
        return sorted(dict.fromkeys(keys), reverse=True)
    except TypeError as bad:
        raise InputError(f"keys to warm must have an order: {bad}") from None


def _fatal(error: BaseException | None) -> bool:
    """Whether it, or what caused it, is an error that a device does not survive."""
    while error is not None:
        if isinstance(error, ContextLostError) or (isinstance(error, DriverError) and error.sticky):
            return True
        error = error.__cause__
    return False


def _reason(error: Exception) -> str:
    return "\n".join((f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())))


_alive: weakref.WeakSet[Graphs] = weakref.WeakSet()


def _after_fork() -> None:
    for graphs in list(_alive):
        graphs._forked()


os.register_at_fork(after_in_child=_after_fork)
