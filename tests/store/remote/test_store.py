"""Entries on a server: what the store verifies, what a fault costs, and what it writes."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

import pytest

from preheat.model.events import Events
from preheat.store import Chain, MemoryStore, chain
from preheat.store.base import Upload
from preheat.store.remote.engine import ObjectError, RemoteError
from preheat.store.remote.server import PausedError
from preheat.store.remote.store import RemoteStore
from preheat.store.remote.url import digest_of as digest_of_name
from preheat.store.remote.url import entry_name
from preheat.store.remote.worker import Worker
from preheat.store.signing import entries as envelope
from preheat.store.signing.keys import Keyring, Keys, SigningKey
from tests.conftest import Recorder
from tests.processes import TIMEOUT_SECONDS
from tests.store.entries import blob_of, digest_of
from tests.store.remote.memory_engine import MemoryEngine, limited
from tests.store.remote.remote_stores import TIMEOUT, Clock, entry, store_on
from tests.store.remote.test_worker import Gate

pytest.importorskip("cryptography", reason="cryptography is not installed")

KEY = digest_of(1)
BLOB = blob_of(1)
NAME = entry_name(KEY)


@pytest.fixture(scope="module")
def signer() -> SigningKey:
    return SigningKey.new()


def signed(signer: SigningKey) -> Callable[[], Keys]:
    return lambda: Keys(Keyring((signer.public,)), signer)


def failing(error: RemoteError, clock: Clock, seconds: float = 0.0) -> Callable[[str, str], None]:
    """Return what an engine does before each call: it takes time, and fails."""

    def before(_: str, __: str) -> None:
        clock.now += seconds
        raise error

    return before


def put(tier: RemoteStore, digest: str = KEY, blob: bytes = BLOB) -> None:
    tier.put_later(digest, blob)
    assert tier.flush(TIMEOUT_SECONDS)


# Names


def test_names_of_entries_are_read_back() -> None:
    assert f"v1/{KEY[:2]}/{KEY}" == NAME
    assert digest_of_name(NAME) == KEY
    for other in ("v1/probe", f"v1/leases/{KEY}", f"v1/zz/{KEY}", f"v2/{KEY[:2]}/{KEY}", f"{NAME}x"):
        assert digest_of_name(other) is None


# Reading and writing


def test_what_one_process_puts_another_one_gets(
    engine: MemoryEngine, events: Events, signer: SigningKey
) -> None:
    put(store_on(engine, events, keys=signed(signer)))
    reader = store_on(engine, events, keys=lambda: Keys(Keyring((signer.public,))), writable=False)
    assert entry(reader, KEY) == BLOB
    assert entry(reader, digest_of(2)) is None
    assert engine.calls == {"write": 1, "read": 2}


def test_requests_and_bytes_are_counted(engine: MemoryEngine, events: Events) -> None:
    tier = store_on(engine, events)
    put(tier)
    entry(tier, KEY)
    entry(tier, digest_of(2))
    size = len(engine.objects[NAME])
    stats = events.stats()
    assert stats["requests.remote.read"] == 2
    assert stats["requests.remote.write"] == stats["puts.remote"] == 1
    assert stats["bytes_sent.remote"] == stats["bytes_received.remote"] == size
    assert "failed_requests.remote" not in stats


def test_a_process_without_a_key_to_sign_writes_nothing(engine: MemoryEngine, events: Events) -> None:
    put(store_on(engine, events, writable=False))
    assert not engine.calls


def test_the_engine_and_the_keys_are_made_by_the_first_request(events: Events) -> None:
    made: list[str] = []

    def open_engine() -> MemoryEngine:
        made.append("engine")
        return MemoryEngine()

    def read_keys() -> Keys:
        made.append("keys")
        return Keys()

    tier = store_on(open_engine, events, keys=read_keys)
    assert made == []
    entry(tier, KEY)
    entry(tier, KEY)
    assert made == ["engine", "keys"]


def test_a_closed_tier_opens_another_engine(events: Events) -> None:
    opened: list[MemoryEngine] = []

    def open_engine() -> MemoryEngine:
        opened.append(MemoryEngine())
        return opened[-1]

    tier = store_on(open_engine, events)
    tier.put_later(KEY, BLOB)
    tier.close()
    tier.close()
    entry(tier, KEY)
    assert [engine.closed for engine in opened] == [True, False]
    assert NAME in opened[0].objects


# What is not trusted


def objects(signer: SigningKey) -> dict[str, bytes]:
    """Return objects that must not be used, by what is wrong with them."""
    good = envelope.wrap(KEY, BLOB, signer)
    return {
        "unsigned": envelope.wrap(KEY, BLOB, None),
        "signed by another key": envelope.wrap(KEY, BLOB, SigningKey.new()),
        "of another entry": envelope.wrap(digest_of(2), blob_of(2), signer),
        "truncated": good[:-1],
        "changed": good[:-1] + bytes([good[-1] ^ 1]),
        "foreign": b"<html>404</html>",
        "empty": b"",
    }


@pytest.mark.parametrize("what", list(objects(SigningKey.new())))
def test_an_object_that_nobody_trusted_has_signed_is_a_counted_miss(
    what: str, engine: MemoryEngine, events: Events, recorder: Recorder, signer: SigningKey
) -> None:
    recorder.forgive = True
    engine.objects[NAME] = objects(signer)[what]
    memory = MemoryStore(1 << 20)
    chain = Chain([memory], events, shared=[store_on(engine, events, keys=signed(signer))])
    assert chain.get(KEY) is None
    assert memory.get(KEY) is None  # Nothing was filled from it.
    (event,) = recorder.named("untrusted")
    assert event["tier"] == "remote"
    assert event["key"] == KEY
    assert events.stats()["untrusted.remote"] == 1
    assert engine.calls == {"read": 1}  # A store of others is not cleaned up.


def test_a_signed_entry_that_is_damaged_is_a_counted_miss(
    engine: MemoryEngine, events: Events, recorder: Recorder, signer: SigningKey
) -> None:
    recorder.forgive = True
    damaged = BLOB[:-1] + bytes([BLOB[-1] ^ 1])
    engine.objects[NAME] = envelope.wrap(KEY, damaged, signer)
    assert entry(store_on(engine, events, keys=signed(signer)), KEY) is None
    assert [event["reason"] for event in recorder.named("damaged")] == ["checksum mismatch"]


def test_unsigned_entries_are_used_where_that_is_allowed(engine: MemoryEngine, events: Events) -> None:
    engine.objects[NAME] = envelope.wrap(KEY, BLOB, None)
    assert entry(store_on(engine, events), KEY) == BLOB


def test_keys_that_cannot_be_read_are_one_fault(
    engine: MemoryEngine, events: Events, recorder: Recorder
) -> None:
    recorder.forgive = True

    def read_keys() -> Keys:
        raise RemoteError("key file x: it cannot be read")

    tier = store_on(engine, events, keys=read_keys)
    engine.objects[NAME] = envelope.wrap(KEY, BLOB, None)
    for _ in range(5):
        assert entry(tier, KEY) is None
        put(tier)
    assert not engine.calls
    assert [fault["verb"] for fault in recorder.named("fault")] == ["read"]


# Faults of reads


def test_two_reasons_are_two_faults(engine: MemoryEngine, events: Events, recorder: Recorder) -> None:
    recorder.forgive = True

    def fail(verb: str, _: str) -> None:
        raise RemoteError(f"{verb} is refused")

    engine.before = fail
    tier = store_on(engine, events)
    for _ in range(3):
        assert entry(tier, KEY) is None
        put(tier)
    assert [fault["verb"] for fault in recorder.named("fault")] == ["read", "write"]


def test_an_object_that_cannot_be_read_is_a_miss_and_the_others_are_found(
    engine: MemoryEngine, events: Events, recorder: Recorder
) -> None:
    recorder.forgive = True
    tier = store_on(engine, events)
    put(tier, digest_of(2), blob_of(2))

    def fail(verb: str, name: str) -> None:
        if verb == "read" and name == NAME:
            raise ObjectError("it is a directory")

    engine.before = fail
    for _ in range(5):
        assert entry(tier, KEY) is None
    assert entry(tier, digest_of(2)) == blob_of(2)
    faults = recorder.named("fault")
    assert [fault["error"] for fault in faults] == ["ObjectError: it is a directory"] * 5
    assert tier.unanswered == 0


def test_a_server_that_answers_with_a_bad_object_works_again(
    engine: MemoryEngine, events: Events, recorder: Recorder, clock: Clock
) -> None:
    recorder.forgive = True
    tier = store_on(engine, events, clock)
    engine.before = failing(RemoteError("it did not answer in time"), clock, TIMEOUT)
    assert entry(tier, KEY) is None
    clock.now += 60
    engine.before = failing(ObjectError("it is a directory"), clock)
    assert entry(tier, KEY) is None  # It begins a trial.
    assert tier.flush(TIMEOUT_SECONDS)
    assert tier.server.available("read")
    assert len(recorder.named("recovered")) == 1


def test_a_question_about_many_entries_that_takes_too_long_does_not_end_lookups(
    engine: MemoryEngine, events: Events, recorder: Recorder, clock: Clock
) -> None:
    recorder.forgive = True
    tier = store_on(engine, events, clock)
    put(tier)

    def stall(verb: str, _: str) -> None:
        if verb == "existing":
            clock.now += TIMEOUT
            raise RemoteError("it did not answer in time")

    engine.before = stall
    tier.look_ahead([KEY, digest_of(2)])
    assert [fault["verb"] for fault in recorder.named("fault")] == ["ask for many entries"]
    assert entry(tier, KEY) == BLOB
    assert entry(tier, digest_of(2)) is None
    assert engine.calls["read"] == 2
    assert tier.unanswered == 0


def test_a_dead_server_costs_three_attempts_once(
    engine: MemoryEngine, events: Events, recorder: Recorder, clock: Clock
) -> None:
    recorder.forgive = True
    engine.before = failing(RemoteError("connection refused", retryable=True), clock)
    tier = store_on(engine, events, clock)
    assert [entry(tier, digest_of(number)) for number in range(100)] == [None] * 100
    assert engine.calls["read"] == 3
    assert len(recorder.named("fault")) == 1
    assert len(clock.slept) == 2
    assert sum(clock.slept) < 0.3
    assert events.stats()["failed_requests.remote"] == 3


def test_a_slow_server_costs_one_time_out_once(
    engine: MemoryEngine, events: Events, recorder: Recorder, clock: Clock
) -> None:
    recorder.forgive = True
    engine.before = failing(RemoteError("did not answer in time"), clock, TIMEOUT)
    tier = store_on(engine, events, clock)
    assert [entry(tier, digest_of(number)) for number in range(100)] == [None] * 100
    assert engine.calls["read"] == 1
    assert clock.now == 1000 + TIMEOUT
    assert len(recorder.named("fault")) == 1


def test_wrong_credentials_cost_one_request(
    engine: MemoryEngine, events: Events, recorder: Recorder, clock: Clock
) -> None:
    recorder.forgive = True
    engine.before = failing(RemoteError("permission denied"), clock)
    tier = store_on(engine, events, clock)
    for number in range(100):
        assert entry(tier, digest_of(number)) is None
    clock.now += 30  # It is a fault that lasts, so the first pause is long.
    entry(tier, KEY)
    assert tier.flush(TIMEOUT_SECONDS)
    assert engine.calls["read"] == 1
    assert len(recorder.named("fault")) == 1


def test_a_request_that_is_not_made_has_the_reason_of_the_fault_before_it(
    engine: MemoryEngine, events: Events, recorder: Recorder
) -> None:
    """Threads of a sync share a server, and any of them may be the one whose error is shown."""
    recorder.forgive = True
    server = store_on(engine, events).server

    def refuse(*_: str) -> None:
        raise RemoteError("memory://test: it refuses the credentials")

    engine.before = refuse
    with pytest.raises(RemoteError):
        server.get("v1/ab/name")
    with pytest.raises(PausedError, match=r"^memory://test: it refuses the credentials$"):
        server.get("v1/ab/name")


def test_a_fault_that_passes_is_retried_and_not_reported(
    engine: MemoryEngine, events: Events, clock: Clock
) -> None:
    engine.objects[NAME] = envelope.wrap(KEY, BLOB, None)
    faults = [RemoteError("reset", retryable=True)] * 2

    def before(_: str, __: str) -> None:
        if faults:
            raise faults.pop()

    engine.before = before
    tier = store_on(engine, events, clock)
    assert entry(tier, KEY) == BLOB
    assert engine.calls["read"] == 3
    assert tier.server.available("read")


def test_an_engine_that_cannot_be_opened_is_one_fault(events: Events, recorder: Recorder) -> None:
    recorder.forgive = True
    opened: list[int] = []

    def open_engine() -> MemoryEngine:
        opened.append(1)
        raise RemoteError("no credentials")

    tier = store_on(open_engine, events)
    for _ in range(10):
        assert entry(tier, KEY) is None
    assert len(opened) == len(recorder.named("fault")) == 1


def test_a_server_that_works_again_is_noticed_in_the_background(
    engine: MemoryEngine, events: Events, recorder: Recorder, clock: Clock
) -> None:
    recorder.forgive = True
    engine.objects[NAME] = envelope.wrap(KEY, BLOB, None)
    engine.before = failing(RemoteError("refused", retryable=True), clock)
    tier = store_on(engine, events, clock)
    entry(tier, KEY)
    clock.now += 2
    assert entry(tier, KEY) is None  # It starts a trial, which fails.
    assert tier.flush(TIMEOUT_SECONDS)
    assert engine.calls["read"] == 4
    engine.before = None
    clock.now += 1
    assert entry(tier, KEY) is None  # The pause is longer now.
    assert engine.calls["read"] == 4
    clock.now += 2
    assert entry(tier, KEY) is None  # The caller does not wait for the trial.
    assert tier.flush(TIMEOUT_SECONDS)
    assert entry(tier, KEY) == BLOB
    assert len(recorder.named("fault")) == len(recorder.named("recovered")) == 1


def test_a_lying_server_costs_a_lookup_and_nothing_else(
    engine: MemoryEngine, events: Events, recorder: Recorder
) -> None:
    recorder.forgive = True
    tier = store_on(engine, events)
    engine._existing = lambda names: {"v1/zz/lie", *names}  # type: ignore[method-assign]
    tier.look_ahead([KEY])
    assert entry(tier, KEY) is None
    engine._existing = lambda _: set()  # type: ignore[assignment, method-assign]
    engine.objects[NAME] = envelope.wrap(KEY, BLOB, None)
    tier.look_ahead([KEY])
    assert entry(tier, KEY) is None
    assert entry(tier, KEY) == BLOB


# Faults of writes


def test_a_server_that_cannot_be_written_stays_readable(
    engine: MemoryEngine, events: Events, recorder: Recorder, clock: Clock
) -> None:
    recorder.forgive = True
    engine.objects[NAME] = envelope.wrap(KEY, BLOB, None)

    def before(verb: str, _: str) -> None:
        if verb == "write":
            raise RemoteError("read-only, or full")

    engine.before = before
    tier = store_on(engine, events, clock)
    for number in range(2, 50):
        put(tier, digest_of(number), blob_of(number))
    assert engine.calls["write"] == 1
    assert [(fault["where"], fault["verb"]) for fault in recorder.named("fault")] == [
        ("remote", "write")
    ]
    assert len(recorder.named("dropped")) == 48
    assert entry(tier, KEY) == BLOB


def test_a_server_that_does_not_answer_is_one_fault_whatever_it_was_asked(
    engine: MemoryEngine, events: Events, recorder: Recorder, clock: Clock
) -> None:
    recorder.forgive = True
    engine.before = failing(RemoteError("reset", retryable=True), clock)
    tier = store_on(engine, events, clock)
    put(tier)
    assert entry(tier, KEY) is None
    with pytest.raises(PausedError):
        tier.server.call("create_lease", lambda engine: engine.get("v1/leases/a"), kind="lease")
    assert engine.calls == {"write": 3}
    assert [fault["verb"] for fault in recorder.named("fault")] == ["write"]
    clock.now += 2
    engine.before = None
    put(tier)  # It is the trial.
    assert tier.server.available("read", "write", "lease")
    assert [event["verb"] for event in recorder.named("recovered")] == ["write"]
    assert entry(tier, KEY) == BLOB


def test_writes_begin_again_after_a_pause(
    engine: MemoryEngine, events: Events, recorder: Recorder, clock: Clock
) -> None:
    recorder.forgive = True
    engine.before = failing(RemoteError("full"), clock)
    tier = store_on(engine, events, clock)
    put(tier)
    engine.before = None
    put(tier)
    assert engine.calls["write"] == 1
    clock.now += 80
    put(tier)
    put(tier, digest_of(2), blob_of(2))
    assert engine.calls["write"] == 3
    assert [event["verb"] for event in recorder.named("recovered")] == ["write"]


@pytest.mark.parametrize("works", [True, False])
def test_a_bake_tries_a_server_in_the_middle_of_a_pause(
    engine: MemoryEngine, events: Events, recorder: Recorder, clock: Clock, works: bool
) -> None:
    recorder.forgive = True
    engine.before = failing(RemoteError("permission denied"), clock)
    tier = store_on(engine, events, clock)
    assert entry(tier, KEY) is None
    tier.put_later(KEY, BLOB)
    assert tier.flush(TIMEOUT_SECONDS)
    before = engine.calls.copy()
    if works:
        engine.before = None
    filled = tier.upload([Upload(KEY, lambda: BLOB), Upload(digest_of(2), lambda: blob_of(2))])
    assert filled is not None
    if works:
        assert (filled.written, filled.missing) == (2, 0)
        assert engine.objects.keys() == {entry_name(KEY), entry_name(digest_of(2))}
    else:
        assert (filled.written, filled.missing, filled.reason) == (0, 2, "permission denied")
        assert engine.calls - before == {"read": 1}
        assert len(recorder.named("fault")) == 1


def test_a_full_queue_drops_entries_and_never_waits(
    engine: MemoryEngine, events: Events, recorder: Recorder
) -> None:
    recorder.forgive = True
    gate = Gate()
    engine.before = lambda _, __: gate()
    tier = store_on(engine, events, worker=Worker(threads=1, max_jobs=2))
    for number in range(10):
        tier.put_later(digest_of(number), blob_of(number))
    assert len(recorder.named("dropped")) == 8
    assert [fault["verb"] for fault in recorder.named("fault")] == ["queue an entry"]
    gate.opened.set()
    assert tier.flush(TIMEOUT_SECONDS)
    assert len(engine.objects) == 2
    assert events.stats()["dropped.remote"] == 8


def test_the_end_of_a_process_waits_for_a_bounded_time(
    engine: MemoryEngine, events: Events, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder.forgive = True
    monkeypatch.setattr(chain, "CLOSE_SECONDS", 0.05)
    gate = Gate()
    engine.before = lambda _, __: gate()
    tier = store_on(engine, events, worker=Worker(threads=1))
    for number in range(3):
        tier.put_later(digest_of(number), blob_of(number))
    assert gate.entered.wait(TIMEOUT_SECONDS)
    Chain([], events, shared=[tier]).close()
    assert len(recorder.named("dropped")) == 2
    assert [fault["verb"] for fault in recorder.named("fault")] == ["write"]
    gate.opened.set()


def test_an_entry_that_is_too_long_for_a_server_is_dropped(
    engine: MemoryEngine, events: Events, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder.forgive = True
    monkeypatch.setattr(envelope, "_MAX_ENTRY", 10)
    tier = store_on(engine, events)
    put(tier)
    (dropped,) = recorder.named("dropped")
    assert "is too long" in dropped["reason"]
    assert not engine.objects


def test_entries_are_written_where_no_thread_can_start_any_more(
    engine: MemoryEngine, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some versions of Python start no thread while the interpreter ends."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    tier = store_on(lambda: limited(engine, TIMEOUT), events)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    tier.put_later(KEY, BLOB)
    tier.close()
    assert NAME in engine.objects


# Removal


def test_a_removed_entry_stays_on_the_server_and_is_not_taken_from_there(
    engine: MemoryEngine, events: Events
) -> None:
    tier = store_on(engine, events)
    put(tier)
    tier.remove(KEY)
    assert entry(tier, KEY) is None
    assert NAME in engine.objects
    assert entry(store_on(engine, events), KEY) == BLOB  # in another process
    put(tier, blob=blob_of(1, by="again"))
    assert entry(tier, KEY) == blob_of(1, by="again")


def test_a_removed_entry_is_ignored_until_a_new_one_is_written(
    engine: MemoryEngine, events: Events, recorder: Recorder
) -> None:
    recorder.forgive = True
    put(store_on(engine, events))
    reader = store_on(engine, events, writable=False)
    reader.remove(KEY)
    put(reader)
    assert entry(reader, KEY) is None
    writer = store_on(engine, events)
    writer.remove(KEY)
    engine.before = failing(ObjectError("the object is too large"), Clock())
    put(writer)
    engine.before = None
    assert entry(writer, KEY) is None
    put(writer)
    assert entry(writer, KEY) == BLOB


def test_an_entry_that_is_removed_while_it_waits_to_be_written_is_ignored(
    engine: MemoryEngine, events: Events
) -> None:
    gate = Gate()
    engine.before = lambda _, __: gate()
    tier = store_on(engine, events)
    tier.put_later(KEY, BLOB)
    assert gate.entered.wait(TIMEOUT_SECONDS)
    tier.remove(KEY)
    gate.opened.set()
    assert tier.flush(TIMEOUT_SECONDS)
    assert entry(tier, KEY) is None


def test_a_removed_entry_that_a_bake_writes_again_is_used(engine: MemoryEngine, events: Events) -> None:
    tier = store_on(engine, events)
    tier.remove(KEY)
    filled = tier.upload([Upload(KEY, lambda: BLOB)])
    assert filled is not None
    assert filled.written == 1
    assert entry(tier, KEY) == BLOB


# Many digests


def test_absent_digests_cost_one_request_together(engine: MemoryEngine, events: Events) -> None:
    tier = store_on(engine, events)
    put(tier)
    digests = [digest_of(number) for number in range(1, 500)]
    tier.look_ahead(digests)
    assert [digest for digest in digests if entry(tier, digest) is not None] == [KEY]
    assert engine.calls == {"write": 1, "existing": 1, "read": 1}


def test_an_absence_is_used_once_or_for_a_while(engine: MemoryEngine, events: Events) -> None:
    tier = store_on(engine, events)
    tier.look_ahead([KEY])
    assert (entry(tier, KEY), entry(tier, KEY)) == (None, None)
    assert engine.calls["read"] == 1
    tier.look_ahead([KEY], once=False)
    assert (entry(tier, KEY), entry(tier, KEY)) == (None, None)
    assert engine.calls["read"] == 1
    put(tier)
    assert entry(tier, KEY) == BLOB


def test_an_absence_is_out_of_date_after_a_minute(
    engine: MemoryEngine, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = store_on(engine, events)
    monkeypatch.setattr("preheat.store.remote.store._ABSENCE_SECONDS", -1.0)
    tier.look_ahead([KEY], once=False)
    entry(tier, KEY)
    assert engine.calls["read"] == 1


def test_many_threads_look_ahead_at_the_same_time(engine: MemoryEngine, events: Events) -> None:
    tier = store_on(engine, events)
    errors: list[BaseException] = []
    deadline = time.monotonic() + 1.5
    interval = sys.getswitchinterval()

    def look(thread: int) -> None:
        number = 0
        try:
            while time.monotonic() < deadline and not errors:
                number += 1
                digests = [f"{thread:032x}{number:016x}{each:016x}" for each in range(12)]
                tier.look_ahead(digests)
                assert [entry(tier, digest) for digest in digests] == [None] * 12
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=look, args=[number]) for number in range(16)]
    try:
        sys.setswitchinterval(1e-6)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert errors == []


def test_a_chain_does_not_ask_for_what_this_machine_has(engine: MemoryEngine, events: Events) -> None:
    memory = MemoryStore(1 << 20)
    memory.put(KEY, BLOB)
    chain = Chain([memory], events, shared=[store_on(engine, events)])
    chain.look_ahead([KEY])
    assert not engine.calls
    chain.look_ahead([KEY, digest_of(2)])
    assert engine.calls == {"existing": 1}


# Several servers


def test_a_hit_is_copied_to_the_servers_before_it(events: Events) -> None:
    near, far = MemoryEngine(), MemoryEngine()
    memory = MemoryStore(1 << 20)
    tiers = [store_on(near, events), store_on(far, events, name="remote.2")]
    chain = Chain([memory], events, shared=tiers)
    far.objects[NAME] = envelope.wrap(KEY, BLOB, None)
    assert chain.get(KEY) == (BLOB, "remote.2")
    chain.close()
    assert memory.get(KEY) == BLOB
    assert NAME in near.objects
    assert far.calls == {"read": 1}


def test_an_entry_is_put_on_all_servers_and_each_reports_its_own(events: Events) -> None:
    engines = [MemoryEngine(), MemoryEngine()]
    names = ["remote", "remote.2"]
    tiers = [store_on(each, events, name=name) for each, name in zip(engines, names, strict=True)]
    chain = Chain([MemoryStore(1 << 20)], events, shared=tiers)
    chain.put(KEY, BLOB)
    chain.close()
    assert all(NAME in each.objects for each in engines)
    stats = events.stats()
    assert [stats[f"puts.{name}"] for name in ("memory", *names)] == [1, 1, 1]
