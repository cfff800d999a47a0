"""Slots: one graph for each key, captured when the key is seen again and replayed from then on."""

from __future__ import annotations

import operator
import re
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from numbers import Number
from typing import Any, NamedTuple, TypeVar

from preheat import fork
from preheat.callsite import warn_caller
from preheat.devices import base
from preheat.errors import (
    CaptureError,
    CaptureWarning,
    ContextLostError,
    DriverError,
    GraphError,
    InputError,
)
from preheat.graph import trees
from preheat.graph.graph import Graph
from preheat.graph.slot import USABLE, Body, Slot
from preheat.graph.warmers import Warmers
from preheat.runtime.active_capture import Operation
from preheat.runtime.context import Context

__all__ = [
    "WARM", "Graphs", "Quarantined", "Report", "SlotReport", "Step", "described", "key_of", "text_of",
]  # fmt: skip

R = TypeVar("R")
F = TypeVar("F", bound=Callable[[Any], object])

_WAITS = tuple(16 << failures for failures in range(9))  # eager calls after each failed capture
_REMEMBERED = 1024  # keys without a graph, at least

_NO_ARRAYS = "use what it is like instead: x.shape"
WARM = Operation("warming graphs", "warm before the capture")


class Step(NamedTuple):
    """One call to warm: its key, its body, and the arrays that a slot is to have copies of."""

    key: Hashable
    body: Body[Any]
    given: Sequence[Any] = ()


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
            f"{described(slot.key)}: {_count(slot.nodes, 'node')}, {slot.nbytes:,} bytes, "
            f"{_count(slot.replays, 'replay')}"
            for slot in self.slots
        ]
        rows += [
            f"{described(one.key)}: failed {_count(one.failures, 'time')}, "
            f"tries again in {_count(one.waits, 'call')}: {one.reason}"
            for one in self.quarantined
        ]
        return "\n".join(rows) or "no slots"


class Graphs:
    """Graphs by key on one device, at most `capacity` of them: the least recently used one goes first.

        graphs = gpu.graphs(capacity=8)
        graphs.run(size, lambda: step(size))   # runs; the second time captures; then replays

    Each `owner` has slots of its own, which go when it does: it is held weakly where that is possible.
    `name` is what recordings and warm-ups know them by; events tell keys as `shown` writes them.
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
        name: str | None = None,
        checked: bool = False,
        warmers: Warmers,
        shown: Callable[[Any], str],
    ) -> None:
        self.capacity, self.name, self.checked = _capacity(capacity), _name(name), checked
        self._context, self._capture = context, capture
        self._warmers, self._shown = warmers, shown
        self._life = context()
        self._slots: OrderedDict[_Place, Slot] = OrderedDict()  # the least recently used first
        self._known: OrderedDict[_Place, _Known] = OrderedDict()  # keys without a graph, likewise
        self._claims: dict[_Place, _Claim] = {}  # captures under way
        self._owners: dict[int, _Owner] = {}
        self._dead: deque[_Owner] = deque()
        self._bury = partial(_bury, weakref.ref(self))
        self._title = "graphs"  # what a program calls them
        self._warned: set[object] = set()  # kinds of failures that were told
        self._lock = threading.Lock()
        fork.register(self)

    # Running steps

    def run(
        self, key: Hashable, body: Callable[[], R], *, owner: object = None, copy: bool = False
    ) -> R:
        """Do what `body` does on the device, exactly once, and return what it returned.

        At first sight of `key` the body runs, the second time it is captured and the graph replayed,
        from then on the graph is replayed. What comes back is what the body returned as it was
        captured: the same arrays, with new content after every call, in lists and dicts that are the
        caller's own; with `copy`, copies of them. Python inside the body therefore runs the first two
        times only.

        A body that cannot be captured runs as it is, and its key is left in peace for a while: see
        `report`. A `CaptureWarning` says so, once for each reason. An error that the device does not
        survive is raised. Inside a capture the body becomes part of that.
        """
        return self._step(key_of(key), lambda _: body(), (), owner=owner, copy=copy)

    def _step(
        self, key: Hashable, body: Body[R], given: Sequence[Any], *, owner: object, copy: bool
    ) -> R:
        """`run` for a body of arrays: slots have arrays of their own, which are `given` the content."""
        if self._context().active_capture() is not None:
            return body(given)
        place = _Place(self._token(owner), key)
        slot, failure = self._find(place), None
        if slot is None:
            slot, failure = self._captured(place, body, given)
        elif self.checked:
            slot.check(self._graph(key), body)
        if slot is not None:
            try:
                outputs: R = slot.step(given, copy=copy)
                return outputs
            except GraphError:
                if slot.usable:
                    raise
                self._drop(place, slot)
        made = body(given)
        self._seen(place)
        if failure is not None:  # Only now: an error of the body itself comes out of its run above.
            self._warn(place, failure)
        return trees.copies(made) if copy else made

    def replay(self, key: Hashable, /, *, owner: object = None, **scalars: Any) -> bool:
        """Replay the graph of `key` as `Graph.replay` does, scalars set; False where there is none."""
        place = self._place(key, owner)
        slot = self._find(place)
        if slot is None:
            return False
        try:
            slot.graph.replay(**scalars)
        except GraphError:
            if slot.usable:
                raise
            self._drop(place, slot)
            return False
        return True

    def warm(self, keys: Iterable[Any], body: Callable[[Any], object], *, owner: object = None) -> None:
        """Capture `body(key)` for all keys without a slot, the largest first.

        For each, the body is executed once, which loads its kernels, and then captured, which executes
        nothing. `GraphError` at the end lists the keys that could not be captured.
        """
        self._warm(
            [Step(key_of(key), partial(_ignoring, body, key)) for key in _largest_first(keys)], owner
        )

    def warmer(self, function: F) -> F:
        """Let `gpu.warm` capture the keys it is told of: `function(key)` does the step of one.

        @graphs.warmer
        def decode(size): …
        """
        self._warmers.add(self.name, self)
        self._warmer: Callable[[Any], object] = function
        return function

    def warm_key(self, key: Any) -> bool:
        """Capture a key as the warmer does it, where there is no slot yet; returns whether that was so.

        `GraphError` says why it cannot be captured.
        """
        return self._warm_one(Step(key_of(key), partial(_ignoring, self._warmer, key)))

    def _warm_one(self, step: Step) -> bool:
        if self._find(_Place(None, step.key)) is not None:
            return False
        reason = self._warmed(step, None)
        if reason is not None:
            raise GraphError(reason)
        return True

    def require_room(self, keys: int) -> None:
        """Raise where so many keys cannot have a slot each."""
        if keys > self.capacity:
            raise InputError(
                f"{keys} keys do not fit into {_count(self.capacity, 'slot')}", hint=f"capacity={keys}"
            )

    def _warm(self, steps: Sequence[Step], owner: object) -> None:
        """`warm`, in this order."""
        self._context().forbid(WARM)
        wanted: dict[Hashable, Step] = {}
        for step in steps:
            wanted.setdefault(step.key, step)
        self.require_room(len(wanted))
        reasons = {key: self._warmed(step, owner) for key, step in wanted.items()}
        failed = [f"{described(key)}: {reason}" for key, reason in reasons.items() if reason]
        if failed:
            text = f"{len(failed)} of {_count(len(wanted), 'key')} could not be captured"
            raise GraphError("\n  ".join((text, *failed)), hint="until they can, calls run as they are")

    def _warmed(self, step: Step, owner: object) -> str | None:
        """Warm one key; returns why that was impossible."""
        place = _Place(self._token(owner), step.key)
        if self._find(place) is not None:
            return None
        step.body(step.given)
        self._seen(place, ready=True)
        self._captured(place, step.body, step.given)
        with self._lock:
            known = self._known.get(place)
            return None if known is None else known.reason

    # Slots

    def install(
        self, key: Hashable, graph: Graph, outputs: object = None, *, owner: object = None
    ) -> None:
        """Let `key` mean `graph` from now on, and `run` return `outputs`. The graph stays yours too."""
        if not isinstance(graph, Graph):
            raise InputError(f"{graph!r} is not a graph", hint="with gpu.capture() as graph: …")
        if graph.state not in USABLE:
            raise GraphError(f"{graph} cannot be installed: it is {graph.state.value}")
        place = self._place(key, owner)
        with self._lock:
            gone = self._refresh()
            if graph.context is not self._life:
                raise InputError(f"{graph} is of another device, or from before a reset of this one")
            evicted = self._put(place, Slot(graph, outputs), gone)
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
        return slot is not None and slot.usable

    def __len__(self) -> int:
        return len(self.report().slots)

    def __iter__(self) -> Iterator[Any]:
        return iter([slot.key for slot in self.report().slots])

    def report(self) -> Report:
        """What there is now."""
        with self._lock:
            gone = self._refresh()
            slots = tuple(_report(*item) for item in self._slots.items() if item[1].usable)
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
        return _Place(self._token(owner), key_of(key))

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

    def _put(self, place: _Place, slot: Slot, gone: _Gone) -> list[_Place]:
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

    def _find(self, place: _Place) -> Slot | None:
        """The slot of a place, now the most recently used; one that cannot be replayed is dropped."""
        with self._lock:
            gone = self._refresh()
            slot = self._slots.get(place)
            if slot is not None:
                self._slots.move_to_end(place)
        if slot is not None and not slot.usable:
            self._drop(place, slot)
            slot = None
        self._let_go(gone)
        return slot

    def _drop(self, place: _Place, slot: Slot) -> None:
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

    def _captured(
        self, place: _Place, body: Body[Any], given: Sequence[Any]
    ) -> tuple[Slot | None, _Failure | None]:
        """A new slot, where it is time for one and the body can be captured; or why it cannot be.

        A body that can, and must not be, is an error: no quarantine hides it.
        """
        claim = self._claim(place)
        if claim is None:
            return None, None
        slot: Slot | None = None
        failure: _Failure | None = None
        try:
            made = Slot.captured(partial(self._graph, place.key), body, given)
        except Exception as error:
            if claim.life.lost is not None or _fatal(error):
                raise
            where = error.where if isinstance(error, CaptureError) else None
            failure = _Failure(_reason(error), type(error), where)
        else:
            made.require_unwritten()
            slot = made
        finally:
            self._settle(place, claim, slot, failure and failure.reason)
        return slot, failure

    def _warn(self, place: _Place, failure: _Failure) -> None:
        """Say once for each kind of failure, at the caller's line, that a body runs without a graph."""
        with self._lock:
            known = failure[1:] in self._warned
            self._warned.add(failure[1:])
        if not known:
            warn_caller(
                CaptureWarning(
                    f"{described(place.key)} cannot be captured and runs without a graph: "
                    f"{failure.reason}\nlater calls try again; {self._title}.report() lists what failed"
                )
            )

    def _graph(self, key: Hashable) -> Graph:
        return self._capture(name=key if isinstance(key, str) else described(key))

    def _settle(self, place: _Place, claim: _Claim, slot: Slot | None, reason: str | None) -> None:
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
        device, key = self._life.device.name, self._shown(place.key)
        # What belongs to an owner has no name: no warmer could say whose it is to be.
        name = self.name if place.owner is None else None
        self._life.events.emit("graph", what=what, device=device, name=name, key=key, reason=reason)

    def after_fork(self) -> None:
        """Only one thread came along: nobody holds a lock or captures."""
        self._lock = threading.Lock()
        self._claims.clear()
        for slot in self._slots.values():
            slot.lock = threading.Lock()


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


class _Failure(NamedTuple):
    """Why a body could not be captured: in words; and what tells one kind of failure from another."""

    reason: str
    error: type[Exception]
    where: str | None  # the line that no capture can hold


class _Claim:
    """A capture under way; `void` once its key was invalidated or got another graph."""

    def __init__(self, life: Context) -> None:
        self.life, self.void = life, False


class _Owner(weakref.ref[Any]):
    """An owner, held weakly and told from every other by identity, whatever it is equal to."""

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


_Gone = list[tuple[_Place, Slot]]


def _report(place: _Place, slot: Slot) -> SlotReport:
    graph = slot.graph
    return SlotReport(place.key, place.whose, len(graph), graph.nbytes, graph.num_replays)


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


def key_of(value: Any) -> Hashable:
    """A key as given; `InputError` for what cannot be found again, or would keep memory alive."""
    made = _hashable(value, "a key")
    if not isinstance(value, str | int):
        _check_key(value)
    return made


def text_of(key: Any) -> str:
    """A key as text: as the literal that is equal to it, where there is one."""
    return repr(_plain(key))


_ADDRESS = re.compile(r" at 0x[0-9A-Fa-f]+(?=>)")


def described(value: object) -> str:
    """A value as Python shows it, without the address of an object: that is another in every run."""
    return _ADDRESS.sub("", repr(value))


def _plain(key: Any) -> Any:
    """`torch.Size` as the tuple and NumPy's integers as the number that they are equal to."""
    if isinstance(key, tuple) and not hasattr(key, "_fields"):
        return tuple(map(_plain, key))
    whole = isinstance(key, Number) and hasattr(key, "__index__") and not isinstance(key, int)
    return operator.index(key) if whole else key


def _check_key(value: Any) -> None:
    for item in value if isinstance(value, frozenset) else (trees.parts(value) or {}).values():
        _check_key(item)
    if trees.is_array(value):
        raise InputError(f"{value!r} cannot be part of a key: it is an array", hint=_NO_ARRAYS)
    if isinstance(value, Number) and value != value:
        raise InputError(f"{value!r} cannot be part of a key: it is not equal to itself")


def _hashable(value: Any, what: str) -> Hashable:
    try:
        hash(value)
    except TypeError as bad:
        hint = _NO_ARRAYS if trees.is_array(value) else "use plain values, or a tuple of them"
        raise InputError(f"{value!r} cannot be {what}: {bad}", hint=hint) from None
    made: Hashable = value
    return made


def _capacity(given: Any) -> int:
    try:
        capacity = operator.index(given)
    except TypeError:
        raise InputError(f"{given!r} is not a number of slots", hint="capacity=1 or more") from None
    if capacity < 1:
        raise InputError(f"{_count(capacity, 'slot')} hold no graph", hint="capacity=1 or more")
    return capacity


def _name(given: Any) -> str | None:
    if given is not None and (not isinstance(given, str) or not given.strip()):
        raise InputError(f"{given!r} cannot be a name of graphs", hint='name="decode"')
    name: str | None = given
    return name


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _ignoring(body: Callable[[Any], R], key: Any, given: Sequence[Any]) -> R:
    del given
    return body(key)


def _largest_first(keys: Iterable[Any]) -> list[Any]:
    if not isinstance(keys, Iterable):
        raise InputError(f"{keys!r} is not a collection of keys", hint=f"use [{keys!r}]")
    known = dict.fromkeys(map(key_of, keys))
    try:
        return sorted(known, reverse=True)
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
    hint = getattr(error, "hint", None)
    text = f"{type(error).__name__}: {error}" + (f" (hint: {hint})" if hint else "")
    others = (note for note in getattr(error, "__notes__", ()) if note != f"hint: {hint}")
    return "\n".join((text, *others))
