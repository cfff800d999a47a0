"""Requests to one server, with retries, a circuit breaker and counters."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Literal, NamedTuple, TypeVar

from preheat.model.events import Events
from preheat.process import fork
from preheat.process.locks import Lock, no_fork
from preheat.store.remote.engine import Engine, ObjectError, RemoteError

__all__ = ["Breaker", "Kind", "PausedError", "Server", "size_of"]

T = TypeVar("T")
Kind = Literal["read", "write", "lease"]

_ATTEMPTS = 3
_TIMEOUT_SHARE = 0.9  # A fault after this share of the time limit counts as a time-out.
_REFUSAL_SECONDS = 60.0  # for which requests of a kind are not made after the server refused one
_ACTIONS = {  # how messages describe a verb that is not plain English
    "existing": "ask for many entries",
    "names": "list the objects",
    "read_lease": "read a lease",
    "create_lease": "create a lease",
    "swap_lease": "renew or take over a lease",
    "discard_lease": "release a lease",
}
_MAX_FAULTS = 3  # failed requests, one after another, that open it
_FIRST_PAUSE = 1.0  # seconds
_LONGEST_PAUSE = 60.0
_PAUSE = 0.05  # seconds before the second attempt, on average; twice that before the third

# Engines of the parent process that a forked child can neither use nor close. A destructor may wait for
# threads that the child does not have, so they are kept for ever.
_abandoned: list[Engine] = []


class PausedError(RemoteError):
    """No request was made, because earlier ones failed. Its text is the reason of the last of them."""


def size_of(data: bytes | None) -> int:
    """Return the size of an object, or 0 for None."""
    return len(data or b"")


def _count_nothing(_: object) -> int:
    return 0


class Breaker:
    """Decides whether a request is made. Safe from any thread, and after a fork.

    It is closed at first. It opens after three faults without a success between them, and when such
    faults have taken `patience` seconds in all. While it is open no request is made. After a pause,
    which grows from one second to a minute, it permits one trial: a success closes it, and a fault
    begins a longer pause.
    """

    def __init__(
        self,
        *,
        patience: float,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.closed = True
        self.reason = ""  # of the last fault
        self._patience = patience
        self._clock = clock
        self._chance = chance
        self._lock = Lock()
        self._faults = 0
        self._lost = 0.0  # seconds that the faults since the last success have taken
        self._pause = 0.0
        self._trial_at = 0.0
        self._closed_at = float("-inf")

    def claim_trial(self) -> bool:
        """Return True to one caller when it is open and the pause is over.

        The caller makes one request. A caller that never does so delays the next trial by one pause.
        """
        with self._lock:
            now = self._clock()
            if self.closed or now < self._trial_at:
                return False
            self._trial_at = now + self._pause
            return True

    def count_success(self, *, trial: bool = False) -> bool:
        """Count a success, and return whether it closed the breaker, as only a trial's does."""
        if not trial:
            self._faults = 0
            self._lost = 0.0
            return False
        with self._lock:
            was_open = not self.closed
            self.closed = True
            self._faults = 0
            self._lost = 0.0
            self._closed_at = self._clock()
            return was_open

    def count_fault(self, seconds: float, *, trial: bool = False, reason: str = "") -> bool:
        """Count a fault that took `seconds`, and return whether it opened the breaker.

        Requests that began before it opened may fail later: of those, only the first counts.
        """
        with self._lock:
            self.reason = reason
            if not self.closed:
                if trial:
                    self._begin_pause()
                return False
            self._faults += 1
            self._lost += seconds
            if self._faults < _MAX_FAULTS and self._lost < self._patience:
                return False
            self.closed = False
            if self._clock() - self._closed_at > self._pause:  # It worked for a while.
                self._pause = 0.0
            self._begin_pause()
            return True

    def _begin_pause(self) -> None:
        """Begin a pause. It varies by a quarter, so that many processes do not try at one time."""
        self._pause = min(max(_FIRST_PAUSE, 2 * self._pause), _LONGEST_PAUSE)
        self._trial_at = self._clock() + self._pause * (0.75 + self._chance() / 2)


class _Refusal(NamedTuple):
    """Until when a kind of request is not made, and why. `reported` is set if there was an event."""

    until: float
    reason: str
    reported: bool


class Server:
    """A store of objects by path, which makes requests to one server. Safe from any thread.

    `name` is its tier in events. `can_hold_leases` is False for a kind of server that never has
    atomic operations. `open_engine` is called when the process makes its first request, and again in a
    forked child.

    A server that does not answer opens its breaker: then no request is made for a while. A server that
    answers and refuses a request, such as a write, gets no request of the same kind for a minute. It
    can still be read if it refuses writes, and store entries if it cannot hold leases.

    The fault that begins such a pause is one `fault` event, and the first success after it one
    `recovered` event; the faults between them are only counted. If several kinds of requests are
    refused for the same reason, the first one alone is reported. An `ObjectError` is a `fault` event
    and begins no pause.
    """

    writable = True

    def __init__(
        self,
        name: str,
        open_engine: Callable[[], Engine],
        events: Events,
        *,
        timeout: float,
        can_hold_leases: bool = True,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.name = name
        self.can_hold_leases = can_hold_leases
        self._patience = _TIMEOUT_SHARE * timeout
        self.breaker = Breaker(patience=self._patience, clock=clock)
        self._refusals: dict[Kind, _Refusal] = {}
        self._open_engine = open_engine
        self._events = events
        self._clock = clock
        self._sleep = sleep
        self._engine: Engine | None = None
        self._opening = Lock()
        fork.register(self)

    def engine(self) -> Engine:
        """Return the engine of this process. Raises `RemoteError` when there can be none."""
        engine = self._engine
        if engine is None:
            with self._opening:
                engine = self._engine
                if engine is None:
                    with no_fork:  # It may import a client.
                        engine = self._engine = self._open_engine()
        return engine

    # The methods of a store

    def get(self, name: str) -> bytes | None:
        """Return an object, or None if it does not exist."""
        return self.call("read", lambda engine: engine.get(name), size=size_of)

    def put(self, name: str, data: bytes) -> None:
        """Create or replace an object."""

        def put(engine: Engine) -> int:
            engine.put(name, data)
            return len(data)

        self.call("write", put, kind="write", size=int)

    def exists(self, names: Iterable[str]) -> set[str]:
        """Return the `names` that have an object."""
        wanted = list(names)
        return self.call("existing", lambda engine: engine.exists(wanted))

    def names(self, prefix: str = "") -> Iterator[str]:
        """Yield the name of every object that begins with `prefix`."""
        return iter(self.call("names", lambda engine: list(engine.names(prefix))))

    def remove(self, name: str) -> None:
        """Remove an object, if there is one."""
        self.call("delete", lambda engine: engine.remove(name))

    # Requests

    def call(
        self,
        verb: str,
        act: Callable[[Engine], T],
        *,
        kind: Kind = "read",
        background: bool = False,
        size: Callable[[T], int] = _count_nothing,
    ) -> T:
        """Return what `act` returns, with retries; `RemoteError` when it fails or is not tried.

        The error is already reported. `verb` names the request in counters, and `size` returns the
        bytes to count for what `act` has returned. With `background`, nobody waits for the request, so
        it may be the trial after a pause. Writes are always made in the background.
        """
        if (refusal := self._refusal(kind)) is not None:
            raise PausedError(refusal.reason)
        trial = False
        if not self.breaker.closed:
            trial = (background or kind == "write") and self.breaker.claim_trial()
            if not trial:
                raise PausedError(self.breaker.reason)
        for attempt in range(_ATTEMPTS):
            if attempt:
                self._sleep(_PAUSE * attempt * (0.5 + random.random()))
            try:
                return self._attempt(verb, act, kind, trial=trial, size=size)
            except RemoteError as error:
                if error.retryable and self.breaker.closed and attempt + 1 < _ATTEMPTS:
                    continue
                # `_attempt` reports a fault that begins a pause.
                if self.breaker.closed and kind not in self._refusals:
                    self._report(verb, error)
                raise
        raise AssertionError("the last attempt returns or raises")

    def trial(
        self, verb: str, act: Callable[[Engine], T], *, size: Callable[[T], int] = _count_nothing
    ) -> None:
        """Make the one request that the breaker permits after a pause. It raises no `RemoteError`."""
        try:
            self._attempt(verb, act, "read", trial=True, size=size)
        except RemoteError:
            return  # It was counted, and the next pause has begun.

    def available(self, *kinds: Kind) -> bool:
        """Return whether requests of all these kinds are made now."""
        return self.breaker.closed and all(self._refusal(kind) is None for kind in kinds)

    def forget_refusals(self) -> None:
        """Make requests again that the server has refused in the last minute."""
        for kind, refusal in self._refusals.copy().items():
            self._refusals[kind] = refusal._replace(until=self._clock())

    def _refusal(self, kind: Kind) -> _Refusal | None:
        """Return why requests of a kind are not made now, or None."""
        refusal = self._refusals.get(kind)
        return refusal if refusal is not None and self._clock() < refusal.until else None

    def _attempt(
        self,
        verb: str,
        act: Callable[[Engine], T],
        kind: Kind,
        *,
        trial: bool,
        size: Callable[[T], int],
    ) -> T:
        """Make one request, count it, and notice whether the server answers and accepts it."""
        started = self._clock()
        try:
            result = act(self.engine())
        except ObjectError:
            self._count(verb, self._clock() - started, failed=True)
            self._note_success(verb, kind, trial=trial)
            raise
        except RemoteError as error:
            seconds = self._clock() - started
            self._count(verb, seconds, failed=True)
            self._note_fault(verb, kind, error, seconds, trial=trial)
            raise
        self._count(verb, self._clock() - started, size=size(result))
        self._note_success(verb, kind, trial=trial)
        return result

    def _note_fault(
        self, verb: str, kind: Kind, error: RemoteError, seconds: float, *, trial: bool
    ) -> None:
        if error.retryable or seconds >= self._patience:
            # One that is too slow for a question about many objects may be quick with a single one.
            lost = 0.0 if verb == "existing" else seconds
            if self.breaker.count_fault(lost, trial=trial, reason=str(error)):
                self._report(verb, error)
            return
        if self.breaker.count_success(trial=trial):  # It answers.
            self._events.emit("recovered", tier=self.name, verb=_ACTIONS.get(verb, verb))
        reason = str(error)
        earlier = self._refusals.get(kind)
        known = any(each.reason == reason for each in self._refusals.copy().values())
        reported = not known if earlier is None else earlier.reported
        self._refusals[kind] = _Refusal(self._clock() + _REFUSAL_SECONDS, reason, reported)
        if earlier is None and reported:
            self._report(verb, error)

    def _note_success(self, verb: str, kind: Kind, *, trial: bool) -> None:
        refusal = self._refusals.pop(kind, None)
        closed = self.breaker.count_success(trial=trial)
        if closed or (refusal is not None and refusal.reported):
            self._events.emit("recovered", tier=self.name, verb=_ACTIONS.get(verb, verb))

    def _report(self, verb: str, error: RemoteError) -> None:
        self._events.fault(self.name, _ACTIONS.get(verb, verb), error)

    def _count(self, verb: str, seconds: float, *, failed: bool = False, size: int = 0) -> None:
        sent = size if verb == "write" else 0
        self._events.emit(
            "remote", tier=self.name, verb=verb, seconds=seconds, failed=failed, sent=sent,
            received=size - sent,
        )  # fmt: skip

    def close(self) -> None:
        """Close the engine. The next request opens another one."""
        with self._opening:
            engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def after_fork(self) -> None:
        """Let a forked child open its own engine. The parent's is closed if possible."""
        engine, self._engine = self._engine, None
        if engine is None:
            return
        if engine.closes_after_fork:
            with suppress(OSError):
                engine.close()
        else:
            _abandoned.append(engine)
