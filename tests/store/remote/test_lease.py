"""Leases on a server in memory, with a clock that the tests move: nothing here waits."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from preheat.model.events import Events
from preheat.process.locks import Holder
from preheat.store.remote.engine import RemoteError
from preheat.store.remote.lease import Lease, LeaseContent, Leases, lease_name
from preheat.store.remote.lease_request import LeaseRequest
from preheat.store.remote.server import Server
from tests.conftest import Recorder
from tests.processes import run_in_fork, wait_for
from tests.store.remote.memory_engine import MemoryEngine
from tests.store.remote.remote_stores import Clock

DIGEST = "ab" * 32
NAME = lease_name(DIGEST)
SECONDS = 15.0


class Host:
    """One host: its leases, and whether it finds the entry. Uploads end when the test says so."""

    def __init__(self, engine: MemoryEngine, clock: Clock, events: Events) -> None:
        self.stored = False
        self.looks = 0
        self.uploads: list[Callable[[], object]] = []
        self.server = Server("remote", lambda: engine, events, timeout=2.0, sleep=lambda _: None)
        self.leases = Leases(
            self.server, self.uploads.append, events,
            seconds=SECONDS, clock=clock, start=lambda _: None,
        )  # fmt: skip
        self._clock = clock

    def look(self) -> str | None:
        self.looks += 1
        return "entry" if self.stored else None

    def request(self, limit: float = 300.0) -> LeaseRequest[str]:
        return LeaseRequest(self.leases, DIGEST, self.look, limit=limit)

    def waiting(self, limit: float = 300.0) -> LeaseRequest[str]:
        """Return a request that has seen the holder once."""
        request = self.request(limit)
        pause = request.poll()
        assert pause is not None
        self.poll_at(request, pause)
        return request

    def poll_at(self, request: LeaseRequest[str], after: float) -> float | None:
        """Poll, that many seconds later."""
        self._clock.now += after
        return request.poll()

    def holder(self) -> Lease:
        """Take the lease."""
        request = self.request()
        assert request.poll() is None
        assert request.lease is not None
        return request.lease


@pytest.fixture
def open_host(engine: MemoryEngine, clock: Clock, events: Events) -> Callable[[], Host]:
    return lambda: Host(engine, clock, events)


@pytest.fixture
def host(open_host: Callable[[], Host]) -> Host:
    return open_host()


@pytest.fixture
def other(open_host: Callable[[], Host]) -> Host:
    return open_host()


def outcomes(recorder: Recorder, name: str = "lease") -> list[str]:
    return [fields["outcome"] for fields in recorder.named(name)]


# Who has it


def test_the_first_host_gets_the_lease_and_looks_once_more(
    host: Host, engine: MemoryEngine, recorder: Recorder
) -> None:
    host.holder()
    assert host.looks == 1  # The last holder may have stored the entry after this host had looked.
    assert engine.calls == {"create": 1}
    assert outcomes(recorder) == ["held"]
    assert recorder.named("wait") == []


def test_a_host_that_finds_the_entry_with_the_lease_gives_the_lease_back(
    host: Host, engine: MemoryEngine
) -> None:
    host.stored = True
    request = host.request()
    assert request.poll() is None
    assert (request.found, request.lease) == ("entry", None)
    assert NAME not in engine.objects


def test_the_second_host_waits_until_the_entry_is_on_the_server(
    host: Host, other: Host, engine: MemoryEngine, recorder: Recorder
) -> None:
    lease = host.holder()
    waiting = other.waiting()
    lease.release()
    assert other.poll_at(waiting, 1.0) is not None  # The upload has not ended.
    (uploaded,) = host.uploads
    other.stored = True
    uploaded()
    assert NAME not in engine.objects
    assert other.poll_at(waiting, 1.0) is None
    assert (waiting.found, waiting.lease) == ("entry", None)
    assert outcomes(recorder, "wait") == ["finished"]
    assert outcomes(recorder) == ["held", "released", "found"]


def test_a_poll_that_is_not_due_makes_no_request(host: Host, other: Host, engine: MemoryEngine) -> None:
    host.holder()
    waiting = other.waiting()
    before = engine.calls.total()
    pause = waiting.poll()
    assert pause is not None
    assert pause == waiting.pause() > 0
    assert engine.calls.total() == before


def test_pauses_grow_and_differ(host: Host, open_host: Callable[[], Host]) -> None:
    host.holder()

    def pauses() -> list[float]:
        waiter = open_host()
        request = waiter.request()
        found = [request.poll()]
        while len(found) < 20:
            host.leases.renew()
            assert found[-1] is not None
            found.append(waiter.poll_at(request, found[-1]))
        return [pause for pause in found if pause is not None]

    one, two = pauses(), pauses()
    assert one != two
    assert max(one[:1] + two[:1]) <= 0.05
    assert min(one[-3:] + two[-3:]) >= 1.0
    assert max(one + two) <= 2.0


def test_one_poll_of_a_waiting_host_is_one_request(
    host: Host, other: Host, engine: MemoryEngine
) -> None:
    host.holder()
    waiting = other.waiting()
    engine.calls.clear()
    for _ in range(10):
        other.poll_at(waiting, 2.0)
        host.leases.renew()
    assert engine.calls == {"read": 10, "swap": 10}
    assert other.looks == 3  # in 20 seconds, for an entry whose holder has not released the lease


def test_a_holder_that_dies_after_the_upload_does_not_keep_the_entry_from_others(
    host: Host, other: Host
) -> None:
    host.holder()
    waiting = other.waiting()
    other.stored = True
    assert other.poll_at(waiting, SECONDS / 3) is None
    assert waiting.found == "entry"


# A holder that dies


def test_a_dead_holder_is_replaced_after_the_time_of_a_lease(
    host: Host, other: Host, engine: MemoryEngine, recorder: Recorder
) -> None:
    host.holder()
    waiting = other.waiting()
    assert other.poll_at(waiting, SECONDS - 0.5) is not None
    assert other.poll_at(waiting, 2.0) is None
    assert waiting.lease is not None
    assert engine.calls["swap"] == 1
    assert outcomes(recorder, "wait") == ["taken over"]


def test_a_living_holder_is_never_replaced(host: Host, other: Host) -> None:
    lease = host.holder()
    waiting = other.waiting(limit=1e9)
    for _ in range(100):
        host.leases.renew()
        assert other.poll_at(waiting, SECONDS - 0.1) is not None
    assert host.leases.has(lease)


def test_of_two_waiting_hosts_one_takes_over(
    host: Host, other: Host, open_host: Callable[[], Host], clock: Clock
) -> None:
    host.holder()
    third = open_host()
    one, two = other.waiting(), third.waiting()
    clock.now += SECONDS + 2.0
    ended = [one.poll() is None, two.poll() is None]
    assert ended == [True, False]
    assert (
        third.poll_at(two, SECONDS - 0.1) is not None
    )  # The new holder has the time of a lease again.


def test_a_lease_that_the_server_removed_is_created_by_one_waiting_host(
    host: Host, other: Host, open_host: Callable[[], Host], engine: MemoryEngine, clock: Clock
) -> None:
    host.holder()
    third = open_host()
    one, two = other.waiting(), third.waiting()
    del engine.objects[NAME]
    clock.now += 2.0
    assert one.poll() is None
    assert two.poll() is not None
    assert one.lease is not None


def test_a_holder_whose_lease_was_taken_over_leaves_it_alone(
    host: Host, other: Host, engine: MemoryEngine, recorder: Recorder
) -> None:
    lease = host.holder()
    waiting = other.waiting()
    assert other.poll_at(waiting, SECONDS + 2.0) is None
    taken = engine.objects[NAME]
    host.leases.renew()
    assert not host.leases.has(lease)
    lease.release()
    lease.free()
    assert host.uploads == []
    assert engine.objects[NAME] == taken
    assert outcomes(recorder)[-1] == "lost"


def test_a_holder_that_releases_before_it_knows_of_the_loss_leaves_the_lease_alone(
    host: Host, other: Host, engine: MemoryEngine, recorder: Recorder
) -> None:
    lease = host.holder()
    assert other.poll_at(other.waiting(), SECONDS + 2.0) is None
    taken = engine.objects[NAME]
    lease.free()
    assert engine.objects[NAME] == taken
    assert outcomes(recorder)[-1] == "lost"


@pytest.mark.parametrize("jump", [-86400.0, 86400.0])
def test_the_clock_of_a_holder_means_nothing_to_others(
    jump: float, host: Host, engine: MemoryEngine, clock: Clock, events: Events
) -> None:
    """The holder's clock jumps. A waiting host has a clock of its own and compares contents alone."""
    host.holder()
    elsewhere = Clock()
    waiter = Host(engine, elsewhere, events)
    waiting = waiter.waiting()
    clock.now += jump
    host.leases.renew()
    assert waiter.poll_at(waiting, 2.0) is not None
    assert waiting.lease is None


# No entry


def test_after_a_compile_without_an_entry_waiting_hosts_do_not_wait_for_each_other(
    host: Host, other: Host, open_host: Callable[[], Host], clock: Clock, recorder: Recorder
) -> None:
    third = open_host()
    lease = host.holder()
    one, two = other.waiting(), third.waiting()
    lease.end()
    clock.now += 2.0
    assert (one.poll(), two.poll()) == (None, None)
    assert (one.lease, two.lease) == (None, None)
    assert outcomes(recorder, "wait") == ["ended", "ended"]


def test_a_host_that_comes_later_takes_an_ended_lease(
    host: Host, other: Host, engine: MemoryEngine
) -> None:
    host.holder().end()
    request = other.request()
    pause = request.poll()
    assert pause is not None
    assert other.poll_at(request, pause) is None
    assert request.lease is not None
    request.close()
    assert NAME not in engine.objects


def test_a_released_lease_without_an_entry_goes_to_one_of_the_waiting_hosts(
    host: Host, other: Host, open_host: Callable[[], Host], clock: Clock
) -> None:
    third = open_host()
    lease = host.holder()
    one, two = other.waiting(), third.waiting()
    lease.free()
    clock.now += 2.0
    assert one.poll() is None
    assert two.poll() is not None
    assert one.lease is not None


# Bounds


def test_a_host_gives_up_after_its_limit(host: Host, other: Host, recorder: Recorder) -> None:
    host.holder()
    waiting = other.waiting(limit=5.0)
    pause = other.poll_at(waiting, 4.0)
    assert pause is not None
    assert pause <= 1.0
    assert other.poll_at(waiting, 1.0) is None
    assert (waiting.found, waiting.lease) == (None, None)
    assert outcomes(recorder, "wait") == ["gave up"]


def test_a_limit_of_zero_asks_once(host: Host, other: Host, engine: MemoryEngine) -> None:
    host.holder()
    engine.calls.clear()
    request = other.request(limit=0.0)
    assert request.poll() is None
    assert request.lease is None
    assert engine.calls == {"create": 1}


def test_no_lease_is_asked_for_where_none_could_be_held(
    host: Host, engine: MemoryEngine, recorder: Recorder
) -> None:
    engine.conditional = False
    request = host.request()
    assert request.poll() is None
    assert (request.found, request.lease) == (None, None)
    assert host.looks == 1
    assert engine.calls.total() == 0
    assert recorder.named("lease") == recorder.named("wait") == []


# Faults


def fail(engine: MemoryEngine, verb: str, *, applied: bool = False) -> None:
    """Let a verb fail from now on; with `applied`, the first call only, after it had its effect."""
    if applied:
        act = getattr(engine, verb)

        def once(*args: object, **settings: object) -> bool:
            setattr(engine, verb, act)
            act(*args, **settings)
            raise RemoteError("the answer was lost", retryable=True)

        setattr(engine, verb, once)
        return

    def before(called: str, _: str) -> None:
        if called == verb:
            raise RemoteError(f"{verb} does not work")

    engine.before = before


@pytest.mark.parametrize("verb", ["create", "read"])
def test_a_fault_while_asking_is_one_event_and_no_lease(
    verb: str, host: Host, other: Host, engine: MemoryEngine, recorder: Recorder
) -> None:
    recorder.forgive = True
    host.holder()
    request = other.request() if verb == "create" else other.waiting()
    fail(engine, verb)
    assert other.poll_at(request, 2.0) is None
    assert (request.found, request.lease) == (None, None)
    assert len(recorder.named("fault")) == 1
    assert other.request().poll() is None or verb == "read"
    assert len(recorder.named("fault")) == 1  # The breaker is open: the server is not asked again.


def test_a_server_that_never_has_a_lease_and_never_creates_one_is_faulty(
    host: Host, other: Host, engine: MemoryEngine, clock: Clock, recorder: Recorder
) -> None:
    """As a proxy that swallows writes. Nobody waits for the limit, and others do not wait at all."""
    recorder.forgive = True
    engine.create = lambda *_, **__: False  # type: ignore[method-assign]
    began = clock.now
    request = host.request()
    while (pause := request.poll()) is not None:
        clock.now += pause
    assert (request.found, request.lease) == (None, None)
    assert engine.calls["read"] == 3
    assert clock.now - began < 1.0
    (reported,) = recorder.named("fault")
    assert "does not exist, and does not create it" in str(reported["error"])
    engine.calls.clear()
    assert host.request().poll() is None
    assert not engine.calls  # The breaker is open.
    assert other.request().poll() is not None  # That of another process is not.


def test_a_lease_that_other_hosts_keep_creating_is_no_fault(
    host: Host, engine: MemoryEngine, clock: Clock
) -> None:
    """A poll that sees a holder shows that the server creates leases."""
    create, waiting = engine.create, host.request()

    def lose(name: str, data: bytes, *, seconds: float) -> bool:
        del data
        create(name, b"other host at %f 0" % clock.now, seconds=seconds)
        return False

    engine.create = lose  # type: ignore[method-assign]
    for _ in range(6):
        assert waiting.poll() is not None
        clock.now += 2.0
        assert waiting.poll() is not None  # It sees the holder, and then the lease is gone.
        del engine.objects[NAME]
        clock.now += 2.0


@pytest.mark.parametrize(("verb", "said"), [("create", "create a lease"), ("read", "read a lease")])
def test_a_fault_is_reported_in_words(
    verb: str, said: str, host: Host, other: Host, engine: MemoryEngine, recorder: Recorder
) -> None:
    recorder.forgive = True
    host.holder()
    request = other.request() if verb == "create" else other.waiting()
    fail(engine, verb)
    assert other.poll_at(request, 2.0) is None
    assert [fault["verb"] for fault in recorder.named("fault")] == [said]


def test_a_server_that_does_not_answer_reads_is_not_asked_for_a_lease(
    host: Host, engine: MemoryEngine, recorder: Recorder
) -> None:
    recorder.forgive = True
    fail(engine, "read")
    with pytest.raises(RemoteError):
        host.server.call("read", lambda engine: engine.get("v1/ab/name"))
    request = host.request()
    assert request.poll() is None
    assert (request.found, request.lease) == (None, None)
    assert engine.calls == {"read": 1}
    assert len(recorder.named("fault")) == 1


def test_a_fault_of_a_takeover_is_one_event_and_no_lease(
    host: Host, other: Host, engine: MemoryEngine, recorder: Recorder
) -> None:
    recorder.forgive = True
    host.holder()
    waiting = other.waiting()
    fail(engine, "swap")
    assert other.poll_at(waiting, SECONDS + 2.0) is None
    assert waiting.lease is None
    assert len(recorder.named("fault")) == 1


def test_a_fault_of_a_renewal_is_one_event_and_the_next_one_tries_again(
    host: Host, engine: MemoryEngine, recorder: Recorder
) -> None:
    recorder.forgive = True
    lease = host.holder()
    before = engine.objects[NAME]

    def unreachable(*_: object) -> None:
        raise RemoteError("reset", retryable=True)

    engine.before = unreachable
    host.leases.renew()
    assert len(recorder.named("fault")) == 1
    assert host.leases.has(lease)
    engine.before = None
    host.server.breaker.count_success(trial=True)
    host.leases.renew()
    assert engine.objects[NAME] != before


def test_a_fault_of_a_release_is_one_event(
    host: Host, engine: MemoryEngine, recorder: Recorder
) -> None:
    recorder.forgive = True
    lease = host.holder()
    fail(engine, "discard")
    lease.free()
    assert len(recorder.named("fault")) == 1
    assert outcomes(recorder) == ["held", "fault"]


def test_a_create_whose_answer_was_lost_is_recognised_as_its_own(
    host: Host, engine: MemoryEngine
) -> None:
    fail(engine, "create", applied=True)
    request = host.request()
    pause = request.poll()  # The second attempt finds an object.
    assert pause is not None
    assert host.poll_at(request, pause) is None
    assert request.lease is not None
    request.close()
    assert NAME not in engine.objects


@pytest.mark.parametrize("verb", ["swap", "discard"])
def test_a_change_whose_answer_was_lost_is_no_loss(
    verb: str, host: Host, engine: MemoryEngine, recorder: Recorder
) -> None:
    lease = host.holder()
    fail(engine, verb, applied=True)
    host.leases.renew()
    lease.free()
    assert NAME not in engine.objects
    assert outcomes(recorder) == ["held", "released"]


# Owners, threads and processes


def test_a_lease_whose_owner_ended_without_a_release_is_ended(host: Host, engine: MemoryEngine) -> None:
    def interrupted() -> None:
        request = host.request()
        request.owner = Holder(sys._getframe())
        request.poll()
        host.leases.renew()
        assert NAME in engine.objects

    interrupted()
    host.leases.renew()
    assert LeaseContent(engine.objects[NAME]).ended


def test_closing_gives_all_leases_back(host: Host, engine: MemoryEngine) -> None:
    host.holder()
    host.leases.close()
    (uploaded,) = host.uploads
    uploaded()
    assert NAME not in engine.objects


def test_a_thread_renews_while_there_are_leases(engine: MemoryEngine, events: Events) -> None:
    server = Server("remote", lambda: engine, events, timeout=2.0)
    leases = Leases(server, lambda callback: callback(), events, seconds=0.03)
    for _ in range(2):  # The thread ends with the last lease, and begins again.
        request: LeaseRequest[str] = LeaseRequest(leases, DIGEST, lambda: None, limit=1.0)
        assert request.poll() is None
        assert request.lease is not None
        beats = engine.calls["swap"]
        wait_for(lambda beats=beats: engine.calls["swap"] > beats)  # type: ignore[misc]
        request.lease.release()
        assert NAME not in engine.objects
        wait_for(lambda: not leases._renewing)


def test_a_forked_child_forgets_the_leases_of_its_parent(host: Host, engine: MemoryEngine) -> None:
    lease = host.holder()
    held = dict(engine.objects)

    def child() -> None:
        lease.release()
        lease.free()
        host.leases.renew()
        assert host.uploads == []
        assert engine.objects == held
        waiting = host.waiting()  # The parent has the lease: the child is another holder.
        assert host.poll_at(waiting, 2.0) is not None

    run_in_fork(child)
    host.leases.renew()
    assert host.leases.has(lease)


def test_a_child_renews_its_leases_by_a_thread_of_its_own(engine: MemoryEngine, events: Events) -> None:
    server = Server("remote", lambda: engine, events, timeout=2.0)
    leases = Leases(server, lambda callback: callback(), events, seconds=0.03)
    request: LeaseRequest[str] = LeaseRequest(leases, DIGEST, lambda: None, limit=1.0)
    assert request.poll() is None

    def child() -> None:
        engine.objects.clear()
        mine: LeaseRequest[str] = LeaseRequest(leases, DIGEST, lambda: None, limit=1.0)
        assert mine.poll() is None
        first = engine.objects[NAME]
        wait_for(lambda: engine.objects[NAME] != first)

    run_in_fork(child)
    request.close()
    wait_for(lambda: not leases._renewing)


def test_the_number_of_requests_is_counted(host: Host, engine: MemoryEngine, events: Events) -> None:
    lease = host.holder()
    host.leases.renew()
    lease.free()
    stats = events.stats()
    assert stats["lease_requests"] == engine.calls.total() == 3
    assert (stats["leases.held"], stats["leases.released"]) == (1, 1)


# Traffic


def test_the_bytes_of_leases_that_were_read_are_counted(
    host: Host, other: Host, engine: MemoryEngine, recorder: Recorder
) -> None:
    def received() -> list[int]:
        read = [each["received"] for each in recorder.named("remote") if each["verb"] == "read_lease"]
        recorder.seen.clear()
        return read

    lease = host.holder()
    other.waiting()
    assert received() == [len(engine.objects[NAME])]
    stolen = LeaseContent.of(b"another token", 0)
    engine.objects[NAME] = stolen.data
    lease.renew()
    assert received() == [len(stolen.data)]
