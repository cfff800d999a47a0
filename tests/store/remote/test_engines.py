"""What every engine does: objects by name, and conditions that hold between processes."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable

import pytest

from preheat.store.remote import file_engine, redis_engine
from preheat.store.remote.engine import ObjectError
from tests.processes import expect_success, read_line, start_process, write_line
from tests.store.remote.racers import RACES, prepare
from tests.store.remote.stores import Store

pytest.importorskip("opendal", reason="opendal is not installed")

DIGESTS = [f"v1/{each:02x}/{each:064x}" for each in range(3)]


def test_an_object_is_written_read_replaced_and_deleted(store: Store) -> None:
    engine = store.open()
    assert engine.get(DIGESTS[0]) is None
    engine.put(DIGESTS[0], b"first")
    assert store.open().get(DIGESTS[0]) == b"first"
    engine.put(DIGESTS[0], b"\0\r\n$-1 second")
    assert engine.get(DIGESTS[0]) == b"\0\r\n$-1 second"
    engine.remove(DIGESTS[0])
    engine.remove(DIGESTS[0])  # There is nothing to delete any more.
    assert engine.get(DIGESTS[0]) is None


def test_an_object_may_be_large_or_empty(store: Store) -> None:
    engine = store.open()
    large = bytes(range(256)) * (5 << 12)
    for content in (large, b""):
        engine.put(DIGESTS[0], content)
        assert engine.get(DIGESTS[0]) == content
        assert engine.exists(DIGESTS) == {DIGESTS[0]}


def test_an_object_above_the_limit_of_a_read_concerns_that_object(store: Store) -> None:
    engine = store.open()
    engine.put(DIGESTS[0], bytes(4097))
    engine.put(DIGESTS[1], bytes(4096))
    with pytest.raises(ObjectError):
        engine.get(DIGESTS[0], limit=4096)
    assert engine.get(DIGESTS[1], limit=4096) == bytes(4096)
    assert engine.get(DIGESTS[0]) == bytes(4097)


def test_many_names_are_asked_for_at_once(store: Store) -> None:
    engine = store.open()
    folder = [f"v1/aa/{each}" for each in range(12)]  # So many are found by a list of their folder.
    present = {*folder[::2], DIGESTS[0], "v1/aa/other"}
    for name in present:
        engine.put(name, b"content")
    assert engine.exists([*folder, *DIGESTS]) == {*folder[::2], DIGESTS[0]}
    assert engine.exists([]) == engine.exists(["v9/zz/absent"]) == set()


def test_all_names_are_listed_or_those_of_a_folder(store: Store) -> None:
    engine = store.open()
    assert list(engine.names()) == []
    for name in DIGESTS:
        engine.put(name, b"content")
    assert sorted(engine.names()) == sorted(engine.names("v1/")) == DIGESTS
    assert list(engine.names("v1/01/")) == [DIGESTS[1]]
    assert list(engine.names("v1/99/")) == []


def test_lists_and_questions_have_many_parts(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_engine, "_PAGE", 5)
    monkeypatch.setattr("preheat.store.remote.opendal_engine._PAGE", 5)
    monkeypatch.setattr(redis_engine, "_BATCH", 5)
    engine = store.open()
    names = {f"v1/{each % 3}/{each}" for each in range(16)}
    for name in names:
        engine.put(name, b"content")
    assert sorted(engine.names()) == sorted(names)
    assert engine.exists([*names, "v1/0/absent"]) == names
    first = next(iter(engine.names()))  # The rest of the list is not read.
    assert first in names


def test_conditions_compare_the_content(store: Store) -> None:
    engine = store.open()
    name = "v1/leases/1"
    assert not engine.swap(name, b"old", b"new", seconds=600)
    assert not engine.discard(name, b"old")
    assert engine.create(name, b"old", seconds=600)
    assert not engine.create(name, b"other", seconds=600)
    assert not engine.swap(name, b"other", b"new", seconds=600)
    assert engine.swap(name, b"old", b"new", seconds=600)
    assert not engine.discard(name, b"old")
    assert engine.get(name) == b"new"
    assert engine.discard(name, b"new")
    assert engine.create(name, b"again", seconds=600)


def test_threads_share_an_engine(store: Store) -> None:
    engine = store.open()
    wrong: list[str] = []

    def work(number: int) -> None:
        for each in range(10):
            name = f"v1/{number}/{each}"
            engine.put(name, name.encode() * 100)
            if engine.get(name) != name.encode() * 100:
                wrong.append(name)

    threads = [threading.Thread(target=work, args=[number]) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(list(engine.names())) == 80


RACERS = 8
ROUNDS = int(os.environ.get("PREHEAT_TEST_RACES", "10"))  # `make bench-remote` has more of them.


def test_one_of_racing_processes_wins(open_store: Callable[[str], Store]) -> None:
    """Eight processes create, replace and remove the same objects: each has exactly one winner."""
    stores = [open_store(kind) for kind in ("file", "redis", "s3")]
    for store in stores:
        assert store.open().conditional
        prepare(store.open(), ROUNDS)
    command = [sys.executable, "-m", "tests.store.remote.racers"]
    urls = [store.url() for store in stores]
    racers = [start_process([*command, str(each), str(ROUNDS), *urls]) for each in range(RACERS)]
    for racer in racers:
        assert read_line(racer) == "ready"
    for racer in racers:
        write_line(racer)
    won = [json.loads(expect_success(racer)) for racer in racers]

    for number, store in enumerate(stores):
        for which, race in enumerate(RACES):
            winners = sorted(each for racer in won for each in racer[number][which])
            assert winners == list(range(ROUNDS)), (store.kind, race)
        engine = store.open()
        for each in range(ROUNDS):
            winner = next(str(r) for r, racer in enumerate(won) if each in racer[number][1])
            assert engine.get(f"v1/swap/{each}") == winner.encode()
            assert engine.get(f"v1/discard/{each}") is None
