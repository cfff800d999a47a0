"""Leases on a server that fails: entries, other leases and other hosts are not affected."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from preheat.model.events import Events
from preheat.process.locks import Holder
from preheat.store.remote import lease as lease_module
from preheat.store.remote.engine import LEASE_BYTES, ObjectError, RemoteError
from preheat.store.remote.file_engine import FileEngine
from preheat.store.remote.lease import Lease, LeaseContent, Leases, lease_name
from preheat.store.remote.lease_request import LeaseRequest
from preheat.store.remote.store import RemoteStore
from preheat.store.remote.url import Remote, entry_name
from tests.conftest import Recorder
from tests.processes import TIMEOUT_SECONDS, wait_for
from tests.store.entries import blob_of, digest_of
from tests.store.remote.memory_engine import MemoryEngine
from tests.store.remote.remote_stores import Clock, entry, store_on

Started = list[Callable[[], None]]
UNREACHABLE = RemoteError("reset", retryable=True)


@pytest.fixture
def tier(engine: MemoryEngine, events: Events, clock: Clock) -> RemoteStore:
    return store_on(engine, events, clock)


@pytest.fixture
def started() -> Started:
    """Return the functions for which a thread was started. They run when a test calls them."""
    return []


@pytest.fixture
def leases(tier: RemoteStore, events: Events, clock: Clock, started: Started) -> Leases:
    return Leases(
        tier.server, tier.when_written, events,
        was_dropped=tier.was_dropped, clock=clock, start=started.append,
    )  # fmt: skip


def failing(*verbs: str, error: Exception | None = None) -> Callable[[str, str], None]:
    def before(verb: str, _: str) -> None:
        if verb in verbs:
            raise error or RemoteError("it refuses the operation")

    return before


def ask(leases: Leases, digest: str) -> LeaseRequest[str]:
    request: LeaseRequest[str] = LeaseRequest(leases, digest, lambda: None, limit=300.0)
    request.poll()
    return request


def take(leases: Leases, number: int) -> Lease:
    lease = ask(leases, digest_of(number)).lease
    assert lease is not None
    return lease


def outcomes(recorder: Recorder) -> list[str]:
    return [fields["outcome"] for fields in recorder.named("lease")]


def beats(engine: MemoryEngine, numbers: range) -> list[bytes]:
    return [engine.objects[lease_name(digest_of(number))].split()[1] for number in numbers]


# Entries


@pytest.mark.parametrize("verb", ["create", "discard"])
def test_entries_are_stored_after_a_fault_of_a_lease(
    verb: str, engine: MemoryEngine, tier: RemoteStore, leases: Leases, recorder: Recorder
) -> None:
    recorder.forgive = True
    engine.before = failing(verb)
    for number in range(6):
        request = ask(leases, digest_of(number))
        tier.put_later(digest_of(number), blob_of(number))
        if request.lease is not None:
            request.lease.release()
        assert tier.flush(TIMEOUT_SECONDS)
    assert {entry_name(digest_of(number)) for number in range(6)} <= engine.objects.keys()
    assert len(recorder.named("fault")) == 1
    assert recorder.named("dropped") == []
    assert entry(tier, digest_of(1)) == blob_of(1)


def test_a_server_that_does_not_answer_is_tried_again_in_the_background(
    engine: MemoryEngine, leases: Leases, clock: Clock, started: Started, recorder: Recorder
) -> None:
    recorder.forgive = True
    engine.before = failing("create", "read", error=UNREACHABLE)
    assert ask(leases, digest_of(0)).lease is None
    assert ask(leases, digest_of(1)).lease is None
    assert started == []  # The pause is not over.
    clock.now += 2.0
    for _ in range(3):
        assert ask(leases, digest_of(1)).lease is None
    (trial,) = started
    trial()
    assert recorder.named("recovered") == []  # The server still does not answer.
    engine.before = None
    clock.now += 4.0
    assert ask(leases, digest_of(1)).lease is None
    started.pop()()
    assert [fields["verb"] for fields in recorder.named("recovered")] == ["read a lease"]
    assert ask(leases, digest_of(1)).lease is not None


def test_a_server_that_refuses_leases_is_asked_again_after_a_minute(
    engine: MemoryEngine, leases: Leases, clock: Clock, started: Started, recorder: Recorder
) -> None:
    recorder.forgive = True
    engine.before = failing("discard")
    take(leases, 0).free()
    started.clear()
    made = engine.calls.total()
    clock.now += 59.0
    assert ask(leases, digest_of(1)).lease is None
    assert (engine.calls.total(), started) == (made, [])
    engine.before = None
    clock.now += 1.0
    assert ask(leases, digest_of(1)).lease is not None
    assert [fields["verb"] for fields in recorder.named("recovered")] == ["create a lease"]
    assert len(recorder.named("fault")) == 1


@pytest.mark.parametrize("give_back", [Lease.free, Lease.end])
def test_giving_a_lease_back_is_never_the_trial_after_a_pause(
    give_back: Callable[[Lease], None],
    engine: MemoryEngine,
    leases: Leases,
    clock: Clock,
    recorder: Recorder,
) -> None:
    recorder.forgive = True
    lease, other = take(leases, 0), take(leases, 1)
    engine.before = failing("discard", error=UNREACHABLE)
    other.free()
    clock.now += 120.0
    made = engine.calls.total()
    give_back(lease)
    assert engine.calls.total() == made
    assert outcomes(recorder)[-1] == "fault"


def test_a_renewal_is_the_trial_after_a_pause(
    engine: MemoryEngine, leases: Leases, clock: Clock, recorder: Recorder
) -> None:
    recorder.forgive = True
    take(leases, 0)
    engine.before = failing("swap")
    leases.renew()
    engine.before = None
    leases.renew()
    assert engine.calls["swap"] == 1
    clock.now += 120.0
    leases.renew()
    assert beats(engine, range(1)) != [b"0"]
    assert leases.server.available("lease")


def test_no_lease_is_asked_for_where_the_entry_would_be_dropped(
    engine: MemoryEngine, tier: RemoteStore, leases: Leases, recorder: Recorder
) -> None:
    recorder.forgive = True
    engine.before = failing("write")
    tier.put_later(digest_of(0), blob_of(0))
    assert tier.flush(TIMEOUT_SECONDS)
    assert ask(leases, digest_of(1)).lease is None
    assert engine.calls["create"] == 0


# Entries that cannot be written


def test_a_lease_is_ended_if_its_entry_was_dropped(
    engine: MemoryEngine, tier: RemoteStore, leases: Leases, recorder: Recorder
) -> None:
    recorder.forgive = True
    engine.before = failing("write")
    lease = take(leases, 0)
    tier.put_later(digest_of(0), blob_of(0))
    lease.release()
    assert tier.flush(TIMEOUT_SECONDS)
    wait_for(lambda: outcomes(recorder) == ["held", "ended"])
    assert LeaseContent(engine.objects[lease.name]).ended


def test_a_lease_is_ended_if_the_code_was_dropped_and_the_list_that_leads_to_it_was_not(
    engine: MemoryEngine, tier: RemoteStore, leases: Leases, recorder: Recorder
) -> None:
    recorder.forgive = True
    code = entry_name(digest_of(9))

    def before(verb: str, name: str) -> None:
        if verb == "write" and name == code:
            raise ObjectError("it is too large")

    engine.before = before
    lease = take(leases, 0)
    tier.put_later(digest_of(9), blob_of(9))
    tier.put_later(digest_of(0), blob_of(0))
    lease.release(digest_of(9))
    assert tier.flush(TIMEOUT_SECONDS)
    wait_for(lambda: outcomes(recorder) == ["held", "ended"])


def test_an_entry_that_is_put_again_counts_as_written(
    engine: MemoryEngine, tier: RemoteStore, recorder: Recorder
) -> None:
    recorder.forgive = True
    engine.before = failing("write", error=ObjectError("it is too large"))
    for dropped in (True, False):
        tier.put_later(digest_of(0), blob_of(0))
        assert tier.flush(TIMEOUT_SECONDS)
        assert tier.was_dropped(digest_of(0)) == dropped
        engine.before = None


def test_a_host_looks_for_the_entry_when_the_holder_has_ended(
    engine: MemoryEngine, leases: Leases, clock: Clock
) -> None:
    lease = take(leases, 0)
    stored: list[str] = []
    waiting: LeaseRequest[str] = LeaseRequest(
        leases, digest_of(0), lambda: stored[0] if stored else None, limit=300.0
    )
    for _ in range(2):
        pause = waiting.poll()
        assert pause is not None
        clock.now += pause
    stored.append("entry")
    lease.end()
    assert waiting.poll() is None
    assert waiting.found == "entry"
    assert engine.calls["create"] == 2


# Objects that are no leases


def test_a_large_object_in_the_place_of_a_lease_is_not_received(
    engine: MemoryEngine, leases: Leases, clock: Clock, recorder: Recorder
) -> None:
    recorder.forgive = True
    engine.objects[lease_name(digest_of(0))] = bytes(LEASE_BYTES + 1)
    request = ask(leases, digest_of(0))
    clock.now += 1.0
    assert request.poll() is None
    assert request.lease is None
    assert outcomes(recorder) == ["fault"]
    take(leases, 1)  # Other leases are not affected.


def test_a_link_in_the_place_of_the_folder_of_leases_does_not_affect_entries(
    tmp_path: Path, events: Events, recorder: Recorder
) -> None:
    recorder.forgive = True
    root, outside = tmp_path / "store", tmp_path / "outside"
    (root / "v1").mkdir(parents=True)
    outside.mkdir()
    (root / "v1/leases").symlink_to(outside)
    remote = Remote(service="file", name=f"file://{root}", host="", path=str(root))
    tier = store_on(lambda: FileEngine(remote, timeout=60), events)
    leases = Leases(tier.server, tier.when_written, events, start=lambda _: None)
    assert [ask(leases, digest_of(number)).lease for number in range(4)] == [None] * 4
    assert not tier.server.available("lease")
    tier.put_later(digest_of(0), blob_of(0))
    assert tier.flush(TIMEOUT_SECONDS)
    assert entry(tier, digest_of(0)) == blob_of(0)
    assert list(outside.iterdir()) == []


# Renewals


def test_many_leases_are_renewed_at_the_same_time(
    engine: MemoryEngine, tier: RemoteStore, events: Events
) -> None:
    leases = Leases(tier.server, tier.when_written, events, start=start_if_round)
    for number in range(16):
        take(leases, number)
    together = threading.Barrier(4)

    def before(verb: str, _: str) -> None:
        if verb == "swap":  # A renewal ends when three others have begun.
            together.wait(TIMEOUT_SECONDS)

    engine.before = before
    leases.renew()
    wait_for(lambda: beats(engine, range(16)) == [b"1"] * 16)
    wait_for(lambda: leases._helpers == 0)


def start_if_round(run: Callable[[], None]) -> None:
    """Start the threads of a round, and not the one that begins rounds."""
    if run.__name__ == "_help":
        threading.Thread(target=run, daemon=True).start()


def test_a_round_needs_no_further_thread(engine: MemoryEngine, leases: Leases) -> None:
    """`start` runs nothing here, as in a process that has too many threads."""
    for number in range(16):
        take(leases, number)
    for _ in range(3):
        leases.renew()
    assert beats(engine, range(16)) == [b"3"] * 16


@pytest.mark.parametrize("error", [ObjectError("of another type"), RuntimeError("a defect")])
def test_a_lease_that_cannot_be_renewed_does_not_affect_the_others(
    error: Exception, engine: MemoryEngine, leases: Leases, recorder: Recorder
) -> None:
    recorder.forgive = True
    bad = take(leases, 0)
    for number in range(1, 4):
        take(leases, number)

    def before(verb: str, name: str) -> None:
        if verb == "swap" and name == bad.name:
            raise error

    engine.before = before
    for _ in range(5):
        leases.renew()
    assert beats(engine, range(4)) == [b"0", b"5", b"5", b"5"]
    assert {fields["error"] for fields in recorder.named("fault")} == {
        f"{type(error).__name__}: {error}"
    }


def test_a_round_ends_when_the_server_is_not_asked_any_more(
    engine: MemoryEngine, leases: Leases, recorder: Recorder
) -> None:
    recorder.forgive = True
    for number in range(20):
        take(leases, number)
    engine.before = failing("swap")
    leases.renew()
    assert engine.calls["swap"] == 1
    assert len(recorder.named("fault")) == 1


def test_a_thread_that_ends_early_is_replaced(
    engine: MemoryEngine, leases: Leases, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)
    take(leases, 0)

    def end(verb: str, _: str) -> None:
        if verb == "swap":
            raise SystemExit

    engine.before = end
    with pytest.raises(SystemExit):
        started.pop()()
    engine.before = None
    take(leases, 1)
    assert len(started) == 1


def test_the_time_of_a_round_is_a_part_of_the_pause(
    engine: MemoryEngine, leases: Leases, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        nonlocal now
        slept.append(round(seconds, 3))
        now += seconds
        if len(slept) == 4:
            lease.free()

    monkeypatch.setattr(lease_module, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))

    def before(verb: str, _: str) -> None:
        nonlocal now
        if verb == "swap":
            now += 9.0 if engine.calls["swap"] == 2 else 1.0

    engine.before = before
    lease = take(leases, 0)
    started.pop()()
    assert slept == [3.333, 2.333, 0.0, 2.333]


def test_a_release_during_a_check_of_the_owner_waits_for_the_upload(
    engine: MemoryEngine, tier: RemoteStore, events: Events
) -> None:
    uploads: list[Callable[[], object]] = []
    leases = Leases(tier.server, uploads.append, events, start=lambda _: None)

    class Owner(Holder):
        """A call that releases the lease and ends while another thread checks it."""

        def alive(self, frames: object = None) -> bool:
            del frames
            lease.release()
            self.end()
            return False

    content = LeaseContent.of(b"token", 0)
    engine.objects[lease_name(digest_of(0))] = content.data
    lease = leases.hold(digest_of(0), content, Owner(sys._getframe()))
    lease.renew()
    assert leases.has(lease)
    assert not LeaseContent(engine.objects[lease.name]).ended
    (uploaded,) = uploads
    uploaded()
    assert lease.name not in engine.objects
