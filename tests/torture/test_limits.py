"""The limits of the cache under concurrent writers, and leftovers of killed writers."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from preheat.model.events import Events
from preheat.store import DiskStore
from preheat.store.bundle import write
from preheat.store.journal import Journal
from preheat.store.lock import FileLock
from preheat.toolchain.locate import Library, Located, _Memo
from tests.conftest import Recorder
from tests.store.entries import blob_of, digest_of
from tests.store.support import tmpfs
from tests.torture.conftest import Campaign

WRITERS = 8
SIZE = len(blob_of(0, 3000))


def forked(act: Callable[[], object]) -> int:
    """Return a forked child that does one thing, and exits with status 0 if that succeeded."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            act()
            status = 0
        finally:
            os._exit(status)
    return child


def fill_up(path: Path) -> None:
    """Write until the disk is full."""
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass


def held(disk: DiskStore) -> int:
    return sum(item.bytes for item in disk.items())


def test_eight_writers_pass_the_limit_by_no_more_than_an_entry_each(
    tmp_path: Path, events: Events, campaign: Campaign
) -> None:
    """And an entry for each two seconds that a sweep takes, for which these are too small."""
    puts = campaign.rounds(quick=40, long=3_000)
    limit = 20 * SIZE
    disk = DiskStore(tmp_path / "cache", events, lock_dir=tmp_path / "locks", limit=limit)

    def fill(writer: int) -> None:
        for number in range(writer * puts, (writer + 1) * puts):
            disk.put(digest_of(number), blob_of(number, 3000))

    writers = {forked(partial(fill, writer)) for writer in range(WRITERS)}
    peak = 0
    while writers:
        peak = max(peak, held(disk))
        for writer in tuple(writers):  # not `wait`: there are other children
            ended, status = os.waitpid(writer, os.WNOHANG)
            assert status == 0
            writers.discard(ended)
    assert max(peak, held(disk)) <= limit + 2 * WRITERS * SIZE
    usage = disk._read_usage()
    assert usage is not None
    assert usage.bytes >= held(disk), "rather too much than too little"


def test_writers_killed_as_they_publish_do_not_let_the_cache_grow(
    tmp_path: Path, events: Events
) -> None:
    disk = DiskStore(tmp_path / "cache", events, lock_dir=tmp_path / "locks", limit=5 * SIZE)
    disk.put(digest_of(0), blob_of(0, 3000))
    replace = os.replace

    def replace_and_die(old: str, new: str) -> None:
        replace(old, new)
        os._exit(0)

    def put_and_die(number: int) -> None:
        os.replace = replace_and_die  # type: ignore[assignment]
        disk.put(digest_of(number), blob_of(number, 3000))

    for number in range(1, 40):
        assert os.waitpid(forked(partial(put_and_die, number)), 0)[1] == 0
    disk.put(digest_of(40), blob_of(40, 3000))
    assert held(disk) <= 5 * SIZE


# Leftovers


def test_a_full_disk_is_left_without_litter(
    tmp_path: Path, events: Events, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder.forgive = True
    monkeypatch.setattr("preheat.toolchain.locate._build_of", lambda library: library.build)
    library = tmp_path / "lib.so"
    library.write_bytes(b"ELF")
    found = Located({"nvrtc": Library("NVRTC", (str(library),), "ab", "13")}, {}, {"cuda": "/x"}, (90,))
    with tmpfs(tmp_path / "small", "size=64k,mode=700") as place:
        disk = DiskStore(place / "cache", events, lock_dir=tmp_path / "locks")
        disk.put(digest_of(0), blob_of(0))
        fill_up(place / "fill")
        for number in range(1, 20):
            with pytest.raises(OSError, match="space"):
                disk.put(digest_of(number), blob_of(number, 5000))
        with pytest.raises(OSError, match="space"):
            disk.journal().write({"hits": 1})
        _Memo(disk.root, digest_of(1)).remember(found)
        left = {path.name for path in disk.root.rglob("*") if path.is_file()}
        assert left == {"CACHEDIR.TAG", "usage", f"{digest_of(0)}.heat"}
        assert disk.get(digest_of(0)) == blob_of(0)
        (place / "fill").unlink()
        disk.put(digest_of(1), blob_of(1))
        usage = disk._read_usage()
        assert usage is not None
        assert usage.bytes == held(disk)


def test_what_killed_processes_left_is_swept_once_it_is_old(tmp_path: Path, events: Events) -> None:
    disk = DiskStore(tmp_path / "cache", events, lock_dir=tmp_path / "locks")
    disk.put(digest_of(0), blob_of(0))
    locks = tmp_path / "locks"
    names = [
        disk.root / "v1" / "staged" / ".preheat-1-ab.staged",
        disk.root / ".preheat-2-cd.staged",
        locks / digest_of(7),
    ]
    foreign = [disk.root / "mine.txt", locks / "mine.txt"]
    for path in (*names, *foreign):
        path.touch()
    held_lock = FileLock(locks / digest_of(8))
    assert held_lock.acquire(0)
    for path in (*names, *foreign, locks / digest_of(8)):
        os.utime(path, (1000, 1000))
    DiskStore(disk.root, events, lock_dir=locks).put(digest_of(1), blob_of(1))
    assert [path for path in names if path.exists()] == []
    assert [path for path in foreign if path.exists()] == foreign
    assert (locks / digest_of(8)).exists(), "somebody holds it"
    held_lock.release()


def test_what_a_killed_bake_left_goes_with_the_next_one(tmp_path: Path) -> None:
    old, young = tmp_path / ".preheat-1-ab.staged", tmp_path / ".preheat-2-cd.staged"
    for path in (old, young, tmp_path / "mine.staged"):
        path.touch()
    os.utime(old, (1000, 1000))
    os.utime(tmp_path / "mine.staged", (1000, 1000))
    write(tmp_path / "app.heat", {digest_of(1): blob_of(1)}, {})
    assert (old.exists(), young.exists(), (tmp_path / "mine.staged").exists()) == (False, True, True)


def test_what_a_killed_journal_left_is_folded_away(tmp_path: Path) -> None:
    now = time.time()
    (tmp_path / "stats").mkdir(mode=0o700)
    for number in range(70):
        path = tmp_path / "stats" / f".preheat-{number}-ab.staged"
        path.write_text('{"hits": 1000}')
        os.utime(path, (1000, 1000))
    journal = Journal(tmp_path / "stats", lock_dir=tmp_path / "locks", clock=lambda: now)
    journal.write({"hits": 1})
    assert journal.total() == {"hits": 1}
    assert len(list((tmp_path / "stats").iterdir())) <= 2
