"""Requests to one server, with retries, circuit breakers and counters."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, TypeVar

from preheat import fork
from preheat.events import Events
from preheat.locks import Lock, no_fork
from preheat.store.remote.breaker import Breaker
from preheat.store.remote.engine import Engine, ObjectError, RemoteError

__all__ = ["PausedError", "Server", "Traffic", "received", "sent"]

T = TypeVar("T")

_ATTEMPTS = 3
_TIMEOUT_SHARE = 0.9  # A fault after this share of the time limit counts as a time-out.
_ACTIONS = {  # how messages describe a verb that is not plain English
    "existing": "ask for many entries",
    "names": "list the objects",
    "read_lease": "read a lease",
    "create_lease": "create a lease",
    "swap_lease": "renew or take over a lease",
    "discard_lease": "release a lease",
}
_PAUSE = 0.05  # seconds before the second attempt, on average; twice that before the third

# Engines of the parent process that a forked child can neither use nor close. A destructor may wait for
# threads that the child does not have, so they are kept for ever.
_abandoned: list[Engine] = []


class PausedError(RemoteError):
    """No request was made, because earlier ones failed. Its text is the reason of the last of them."""


class Traffic(NamedTuple):
    """The bytes of objects that a request has sent and received, for the counters."""

    sent: int = 0
    received: int = 0


def sent(size: int) -> Traffic:
    """Return the traffic of a request that has sent `size` bytes."""
    return Traffic(sent=size)


def received(data: bytes | None) -> Traffic:
    """Return the traffic of a request that has received an object, or None."""
    return Traffic(received=len(data or b""))


_NO_TRAFFIC = Traffic()


def _uncounted(_: object) -> Traffic:
    return _NO_TRAFFIC


class Server:
    """Makes requests to one server. Safe from any thread, and after a fork.

    `tier` is the name in events. `can_hold_leases` is False for a kind of server that never has atomic
    operations. `open_engine` is called when the process makes its first request, and again in a forked
    child.

    A fault that opens a breaker is one `fault` event, and the trial that closes it one `recovered`
    event; the faults between them are only counted. Reads, writes and leases have a breaker each: a
    server that refuses writes can be read, and one that cannot hold leases can store entries. If
    several open for the same reason, the first one alone is reported. An `ObjectError` is a `fault`
    event and opens none.
    """

    def __init__(
        self,
        tier: str,
        open_engine: Callable[[], Engine],
        events: Events,
        *,
        timeout: float,
        can_hold_leases: bool = True,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.tier = tier
        self.can_hold_leases = can_hold_leases
        self._patience = _TIMEOUT_SHARE * timeout
        self.reads = Breaker(patience=self._patience, clock=clock)
        self.writes = Breaker(patience=self._patience, clock=clock)
        self.leases = Breaker(patience=self._patience, clock=clock)
        self._open_engine = open_engine
        self._events = events
        self._clock = clock
        self._sleep = sleep
        self._engine: Engine | None = None
        self._reported: dict[str, Breaker] = {}  # those that are open, by the reason that was reported
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

    def call(
        self,
        verb: str,
        act: Callable[[Engine], T],
        *,
        writes: bool = False,
        background: bool = False,
        traffic: Callable[[T], Traffic] = _uncounted,
    ) -> T:
        """Return what `act` returns, with retries; `RemoteError` when it fails or is not tried.

        The error is already reported. `verb` names the request in counters, and `traffic` returns the
        bytes to count for what `act` has returned. A verb that ends in `_lease` uses the breaker of
        leases. With `background`, nobody waits for the request, so it may be the trial after a pause.
        Writes are always made in the background.
        """
        breaker = self._breaker(verb, writes=writes)
        trial = False
        if not breaker.closed:
            trial = (writes or background) and breaker.claim_trial()
            if not trial:
                raise PausedError(breaker.reason)
        for attempt in range(_ATTEMPTS):
            if attempt:
                self._sleep(_PAUSE * attempt * (0.5 + random.random()))
            try:
                return self._attempt(verb, act, breaker, trial=trial, traffic=traffic)
            except RemoteError as error:
                if error.retryable and breaker.closed and attempt + 1 < _ATTEMPTS:
                    continue
                # The breaker is still closed. `_attempt` reports a fault that opens it.
                if breaker.closed:
                    self._fault(verb, error)
                raise
        raise AssertionError("the last attempt returns or raises")

    def read(self, name: str) -> bytes | None:
        """Return an object, or None if it does not exist, by `call`."""
        return self.call("read", lambda engine: engine.read(name), traffic=received)

    def write(self, name: str, data: bytes) -> None:
        """Create or replace an object, by `call`."""

        def write(engine: Engine) -> int:
            engine.write(name, data)
            return len(data)

        self.call("write", write, writes=True, traffic=sent)

    def trial(
        self, verb: str, act: Callable[[Engine], T], *, traffic: Callable[[T], Traffic] = _uncounted
    ) -> None:
        """Make the one request that the breaker of reads or leases permits after a pause.

        It raises no `RemoteError`.
        """
        try:
            self._attempt(verb, act, self._breaker(verb), trial=True, traffic=traffic)
        except RemoteError:
            return  # It was counted, and the next pause has begun.

    def _breaker(self, verb: str, *, writes: bool = False) -> Breaker:
        if verb.endswith("_lease"):
            return self.leases
        return self.writes if writes else self.reads

    def _attempt(
        self,
        verb: str,
        act: Callable[[Engine], T],
        breaker: Breaker,
        *,
        trial: bool,
        traffic: Callable[[T], Traffic],
    ) -> T:
        """Make one request, count it, and report its outcome to the breaker."""
        started = self._clock()
        try:
            result = act(self.engine())
        except ObjectError:
            self._count(verb, self._clock() - started, failed=True)
            self._succeeded(verb, breaker, trial=trial)
            raise
        except RemoteError as error:
            seconds = self._clock() - started
            self._count(verb, seconds, failed=True)
            # A server that was too slow is not tried again at once, but may be quick a second later.
            lasting = not error.retryable and seconds < self._patience
            # One that is too slow for a question about many objects may be quick with a single one.
            lost = 0.0 if verb == "existing" else seconds
            if breaker.failed(lost, lasting=lasting, trial=trial, reason=str(error)):
                self._opened(verb, breaker, error)
            raise
        self._count(verb, self._clock() - started, traffic=traffic(result))
        self._succeeded(verb, breaker, trial=trial)
        return result

    def _opened(self, verb: str, breaker: Breaker, error: RemoteError) -> None:
        """Report a breaker that has opened, unless another one is open for the same reason."""
        if self._reported.setdefault(str(error), breaker) is breaker:
            self._fault(verb, error)

    def _succeeded(self, verb: str, breaker: Breaker, *, trial: bool) -> None:
        if not breaker.succeeded(trial=trial):
            return
        reasons = [reason for reason, opened in list(self._reported.items()) if opened is breaker]
        for reason in reasons:
            del self._reported[reason]
        if reasons:
            self._events.emit("recovered", tier=self.tier, verb=_ACTIONS.get(verb, verb))

    def _fault(self, verb: str, error: RemoteError) -> None:
        self._events.fault(self.tier, _ACTIONS.get(verb, verb), error)

    def _count(
        self, verb: str, seconds: float, *, failed: bool = False, traffic: Traffic = _NO_TRAFFIC
    ) -> None:
        self._events.emit(
            "remote", tier=self.tier, verb=verb, seconds=seconds, failed=failed, sent=traffic.sent,
            received=traffic.received,
        )  # fmt: skip

    def close(self) -> None:
        """Close the engine. The next request opens another one."""
        with self._opening:
            engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def after_fork(self) -> None:
        """Let a forked child open its own engine. That of the parent is closed if possible."""
        engine, self._engine = self._engine, None
        if engine is None:
            return
        if engine.closes_after_fork:
            with suppress(OSError):
                engine.close()
        else:
            _abandoned.append(engine)
