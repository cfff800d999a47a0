"""The cache under concurrent processes and processes that are killed at any instant."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

from preheat.model.events import Events
from preheat.store import DiskStore
from tests.conftest import Recorder
from tests.processes import read_line, write_line
from tests.store.entries import blob_of, digest_of
from tests.store.support import Clock, finish, start

WRITERS = 8
KILLS = 200
ENTRIES = 30


def staged_files(disk: DiskStore) -> list[str]:
    return os.listdir(disk.root / "v1" / "staged")


def test_processes_that_write_one_entry_and_read_it_never_see_a_part(
    disk: DiskStore, tmp_path: Path
) -> None:
    children = [
        start("put-and-get", disk.root, tmp_path / "locks", writer, WRITERS, 25)
        for writer in range(WRITERS)
    ]
    for child in children:
        assert read_line(child) == "ready"
    finish(*children)
    assert disk.get(digest_of(1)) in {blob_of(1, 300_000, by=str(writer)) for writer in range(WRITERS)}
    assert len(list(disk.items())) == 1
    assert staged_files(disk) == []


def test_a_writer_killed_at_any_line_of_a_put_leaves_a_store_that_works(
    disk: DiskStore, tmp_path: Path, clock: Clock, recorder: Recorder
) -> None:
    disk.put(digest_of(-1), blob_of(-1))
    (said,) = finish(start("put-and-die-at-every-line", disk.root, tmp_path / "locks"))
    deaths = int(said)
    assert deaths > 50
    found = [disk.get(digest_of(number)) for number in range(deaths)]
    assert {
        number for number, blob in enumerate(found) if blob not in (None, blob_of(number, 5000))
    } == set()
    assert None in found
    assert found[-1] is not None
    assert staged_files(disk) != [], "some died with a staged file in hand"
    clock.advance(3700)
    disk.sweep()
    assert staged_files(disk) == []
    disk.put(digest_of(0), blob_of(0))
    assert disk.get(digest_of(0)) == blob_of(0)
    assert recorder.seen == []


def test_a_writer_killed_at_any_line_of_the_first_put_leaves_a_directory_that_works(
    tmp_path: Path, events: Events
) -> None:
    locks = tmp_path / "locks"
    (said,) = finish(start("put-and-die-at-every-line", tmp_path / "cache-{}", locks))
    assert int(said) > 100
    for number in range(int(said)):
        disk = DiskStore(tmp_path / f"cache-{number}", events, lock_dir=locks)
        assert disk.get(digest_of(number)) in (None, blob_of(number, 5000))
        disk.put(digest_of(number), blob_of(number))
        assert disk.get(digest_of(number)) == blob_of(number)
        assert len(list(disk.items())) == 1


def test_writers_killed_at_random_leave_a_store_that_works(
    disk: DiskStore, tmp_path: Path, clock: Clock, recorder: Recorder
) -> None:
    chance = random.Random()
    forks = start("put-forever-in-forks", disk.root, tmp_path / "locks", ENTRIES)
    for batch in range(KILLS // WRITERS):
        for number in range(WRITERS):
            write_line(forks, str(batch * WRITERS + number))
        for writer in [int(read_line(forks)) for _ in range(WRITERS)]:
            time.sleep(chance.uniform(0, 0.01))
            os.kill(writer, signal.SIGKILL)
        write_line(forks)
        assert read_line(forks) == f"ended with {[-signal.SIGKILL.value]}"
    finish(forks)
    found = {number: disk.get(digest_of(number)) for number in range(ENTRIES)}
    wrong = {n for n, blob in found.items() if blob not in (None, blob_of(n, 1000 * n))}
    assert wrong == set()
    assert any(found.values())
    clock.advance(3700)
    disk.sweep()
    assert staged_files(disk) == []
    disk.put(digest_of(0), blob_of(0))
    assert disk.get(digest_of(0)) == blob_of(0)
    assert recorder.seen == [], "a rename is whole or not at all: nothing is even damaged"
