"""The limits of the disk tier: which entries are evicted, which stay, and what eviction costs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from preheat.store import DiskStore
from preheat.store.layer import Item
from tests.conftest import Recorder
from tests.store.entries import blob_of, digest_of
from tests.store.support import Clock

SIZE = len(blob_of(100))
OpenDisk = Callable[..., DiskStore]


def fill(disk: DiskStore, numbers: range) -> None:
    for number in numbers:
        disk.put(digest_of(number), blob_of(number))


def left(disk: DiskStore, numbers: range) -> list[int]:
    digests = {item.digest for item in disk.items()}
    return [number for number in numbers if digest_of(number) in digests]


def stamp(disk: DiskStore, number: int, *, read: float) -> None:
    digest = digest_of(number)
    path = disk.root / "v1" / digest[:2] / f"{digest}.heat"
    os.utime(path, (read, read))


def staged(disk: DiskStore, name: str, *, written: float) -> Path:
    path = disk.root / "v1" / "staged" / name
    path.write_bytes(b"half an entry")
    os.utime(path, (written, written))
    return path


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets each scan of the whole cache."""
    seen: list[str] = []
    items = DiskStore.items

    def counted(self: DiskStore) -> Iterator[Item]:
        seen.append(str(self.root))
        return items(self)

    monkeypatch.setattr(DiskStore, "items", counted)
    return seen


# What goes


def test_the_number_of_entries_stays_within_its_limit(open_disk: OpenDisk) -> None:
    disk = open_disk(max_files=20)
    for number in range(100):
        disk.put(digest_of(number), blob_of(number))
        assert len(list(disk.items())) <= 20


def test_the_bytes_stay_within_their_limit(open_disk: OpenDisk) -> None:
    disk = open_disk(limit=50_000)
    for number in range(100):
        disk.put(digest_of(number), blob_of(number, 100 * number))
        assert sum(item.bytes for item in disk.items()) <= 50_000


def test_the_least_recently_read_go_first_by_our_own_stamps(open_disk: OpenDisk, clock: Clock) -> None:
    disk = open_disk(max_files=10)
    fill(disk, range(10))
    for number in range(10):
        stamp(disk, number, read=clock.now - 10_000 + number)
    disk.get(digest_of(0))
    disk.get(digest_of(2))
    disk.put(digest_of(10), blob_of(10))
    assert left(disk, range(11)) == [0, 2, 5, 6, 7, 8, 9, 10]


def test_the_time_of_access_that_the_system_keeps_does_not_count(
    open_disk: OpenDisk, clock: Clock
) -> None:
    disk = open_disk(max_files=4)
    fill(disk, range(4))
    for number in range(4):
        digest = digest_of(number)
        path = disk.root / "v1" / digest[:2] / f"{digest}.heat"
        os.utime(path, (clock.now - 10 * number, clock.now - 10_000 + number))
    disk.sweep(max_files=2)
    assert left(disk, range(4)) == [2, 3]


def test_eviction_is_one_event_with_what_it_freed(open_disk: OpenDisk, recorder: Recorder) -> None:
    disk = open_disk(max_files=100)
    fill(disk, range(100, 201))
    assert recorder.named("evict") == [{"files": 21, "bytes": 21 * SIZE}]


def test_a_sweep_tells_what_it_removed(open_disk: OpenDisk) -> None:
    disk = open_disk()
    fill(disk, range(100, 110))
    swept = disk.sweep(max_files=4)
    assert (swept.files, swept.bytes) == (6, 6 * SIZE)
    assert len(list(disk.items())) == 4
    assert disk.sweep(limit=SIZE).files == 3


def test_an_evicted_entry_takes_its_note_along(open_disk: OpenDisk) -> None:
    disk = open_disk()
    fill(disk, range(1))
    disk.put_note(digest_of(0), b"note")
    disk.sweep(max_files=0)
    assert disk.note(digest_of(0)) is None


def test_the_limit_still_holds_after_a_sweep_that_had_nothing_to_do(open_disk: OpenDisk) -> None:
    disk = open_disk(max_files=20)
    fill(disk, range(20))
    disk.sweep()
    for number in range(20, 30):
        disk.put(digest_of(number), blob_of(number))
        assert len(list(disk.items())) <= 20


def test_the_limit_still_holds_after_a_sweep_with_a_larger_one(open_disk: OpenDisk) -> None:
    disk = open_disk(max_files=20)
    fill(disk, range(20))
    open_disk(max_files=1000).put(digest_of(20), blob_of(20))
    disk.sweep(max_files=1000)
    disk.put(digest_of(21), blob_of(21))
    assert len(list(disk.items())) <= 20


def test_notes_that_come_and_go_do_not_wear_the_limit_away(open_disk: OpenDisk) -> None:
    disk = open_disk(limit=100_000)
    for number in range(60):
        disk.put(digest_of(number), blob_of(number, 1000))
    for _ in range(20):
        disk.put(digest_of(1000), blob_of(1000))
        disk.put_note(digest_of(1000), bytes(5000))
        disk.remove(digest_of(1000))
    for number in range(60, 120):
        disk.put(digest_of(number), blob_of(number, 1000))
    assert sum(item.bytes for item in disk.items()) <= 100_000


def test_notes_count_towards_the_limit(open_disk: OpenDisk) -> None:
    disk = open_disk(limit=50_000)
    for number in range(20):
        disk.put_note(digest_of(number), bytes(10_000))
    assert sum(item.bytes for item in disk.items()) <= 50_000


# What stays


def test_pinned_entries_stay_and_unpinned_ones_go_again(open_disk: OpenDisk) -> None:
    disk = open_disk()
    fill(disk, range(10))
    for number in (3, 7):
        disk.pin(digest_of(number))
    disk.sweep(max_files=0)
    assert left(disk, range(10)) == [3, 7]
    disk.unpin(digest_of(3))
    disk.unpin(digest_of(3))
    disk.sweep(max_files=0)
    assert left(disk, range(10)) == [7]


def test_pins_beyond_the_limit_stay_and_a_put_does_not_look_through_the_cache_each_time(
    open_disk: OpenDisk, scans: list[str]
) -> None:
    disk = open_disk(max_files=50)
    for number in range(100):
        disk.pin(digest_of(number))
    fill(disk, range(100))
    scans.clear()
    fill(disk, range(100, 200))
    assert len(scans) <= 25  # two for every eleventh put
    assert left(disk, range(100)) == list(range(100))
    assert len(list(disk.items())) <= 111


def test_pinned_bytes_beyond_the_limit_do_not_cost_a_look_at_each_put(
    open_disk: OpenDisk, scans: list[str]
) -> None:
    disk = open_disk(limit=50 * SIZE)
    for number in range(100):
        disk.pin(digest_of(number))
    fill(disk, range(100))
    scans.clear()
    fill(disk, range(100, 200))
    assert len(scans) <= 25
    assert left(disk, range(100)) == list(range(100))


# What does not belong


@pytest.mark.parametrize("other", ["v0", "v2", "v99"])
def test_entries_of_another_format_version_are_pruned(disk: DiskStore, other: str) -> None:
    fill(disk, range(1))
    shard = disk.root / other / "ab"
    shard.mkdir(parents=True)
    (shard / "abcd.heat").write_bytes(b"12345")
    (shard / "abcd.note").write_bytes(b"678")
    swept = disk.sweep()
    assert (swept.files, swept.bytes) == (2, 8)
    assert not (disk.root / other).exists()
    assert left(disk, range(1)) == [0]


def test_a_sweep_keeps_what_is_not_of_a_format_version(disk: DiskStore) -> None:
    fill(disk, range(1))
    for name in ("stats", "v1x", "version2", "v"):
        (disk.root / name).mkdir()
        (disk.root / name / "file").write_bytes(b"")
    disk.sweep()
    assert all((disk.root / name / "file").exists() for name in ("stats", "v1x", "version2", "v"))


def test_something_that_cannot_be_pruned_does_not_stop_the_eviction(
    disk: DiskStore, tmp_path: Path
) -> None:
    fill(disk, range(3))
    (disk.root / "v7").write_bytes(b"a file")
    (disk.root / "v8").symlink_to(tmp_path)
    assert disk.sweep(max_files=1).files == 2
    assert len(list(disk.items())) == 1
    assert (disk.root / "v8").is_dir(), "nothing was removed through the link"


def test_orphaned_staged_files_go_by_age_and_young_ones_stay(disk: DiskStore, clock: Clock) -> None:
    fill(disk, range(1))
    old = staged(disk, "1-aa", written=clock.now - 3700)
    young = staged(disk, "2-bb", written=clock.now - 3500)
    assert disk.sweep().files == 1
    assert (old.exists(), young.exists()) == (False, True)
    clock.advance(200)
    disk.sweep()
    assert not young.exists()


def test_an_eviction_clears_orphans_away_too(open_disk: OpenDisk, clock: Clock) -> None:
    disk = open_disk(max_files=5)
    fill(disk, range(1))
    orphan = staged(disk, "1-aa", written=clock.now - 3700)
    fill(disk, range(1, 6))
    assert not orphan.exists()


# The cost of limits


def test_puts_below_the_limit_look_through_the_cache_at_most_once(
    disk: DiskStore, scans: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    disk.put(digest_of(0), blob_of(0))
    assert len(scans) <= 1
    for look in ("scandir", "listdir", "walk"):
        monkeypatch.setattr(os, look, lambda *_: pytest.fail("looked through a directory"))
    fill(disk, range(1, 200))


def test_a_second_process_does_not_count_the_cache_again(open_disk: OpenDisk, scans: list[str]) -> None:
    fill(open_disk(), range(3))
    scans.clear()
    fill(open_disk(), range(3, 6))
    assert scans == []


def test_eviction_goes_below_the_limit_so_that_it_runs_rarely(
    open_disk: OpenDisk, scans: list[str], recorder: Recorder
) -> None:
    disk = open_disk(max_files=100)
    fill(disk, range(400))
    assert len(recorder.named("evict")) <= 16
    assert len(scans) <= 33


def test_writing_the_same_entry_again_at_the_limit_costs_no_look(
    open_disk: OpenDisk, scans: list[str]
) -> None:
    disk = open_disk(max_files=10, limit=11 * SIZE)
    fill(disk, range(100, 110))
    scans.clear()
    for _ in range(20):
        disk.put(digest_of(100), blob_of(100))
    assert scans == []


def test_removing_is_counted(open_disk: OpenDisk, scans: list[str]) -> None:
    disk = open_disk(max_files=10)
    scans.clear()
    for number in range(50):
        disk.put(digest_of(number), blob_of(number))
        disk.remove(digest_of(number))
    assert len(scans) <= 1


@pytest.mark.parametrize("content", [b"", b"garbage", bytes(31)])
def test_lost_totals_are_counted_anew(open_disk: OpenDisk, content: bytes) -> None:
    disk = open_disk(max_files=10)
    fill(disk, range(10))
    (disk.root / "v1" / "usage").write_bytes(content)
    disk.put(digest_of(10), blob_of(10))
    assert len(list(disk.items())) <= 10


def test_totals_that_claim_too_much_are_put_right_without_losing_entries(open_disk: OpenDisk) -> None:
    disk = open_disk(max_files=10)
    fill(disk, range(5))
    (disk.root / "v1" / "usage").write_bytes((1 << 40).to_bytes(8, "little") * 2 + bytes(16))
    disk.put(digest_of(5), blob_of(5))
    assert left(disk, range(6)) == list(range(6))


def test_a_lock_directory_that_cannot_be_used_is_one_event_and_the_entry_is_there(
    open_disk: OpenDisk, tmp_path: Path, recorder: Recorder
) -> None:
    recorder.forgive = True
    (tmp_path / "locks").write_bytes(b"a file")
    disk = open_disk()
    disk.put(digest_of(1), blob_of(1))
    assert disk.get(digest_of(1)) == blob_of(1)
    assert [(e["where"], e["verb"]) for e in recorder.named("fault")] == [("disk", "keep count")]


def test_a_count_that_misses_an_entry_being_published_leaves_no_total_too_small(
    open_disk: OpenDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The entry is in the totals before the count begins, and in the directory after it was scanned."""
    writer, counter = open_disk(), open_disk()
    fill(writer, range(3))
    digest = digest_of(3)
    blob = blob_of(3)
    items = counter.items

    def published_behind_the_scan() -> list[Item]:
        scanned = list(items())
        writer._publish(writer._path(digest), blob)
        adding.__exit__(None, None, None)
        return scanned

    monkeypatch.setattr(counter, "items", published_behind_the_scan)
    adding = writer._counting(1, len(blob))
    adding.__enter__()
    counter.sweep()
    monkeypatch.undo()
    usage = writer._read_usage()
    assert usage is not None
    assert usage.bytes >= sum(item.bytes for item in writer.items())
    assert usage.files >= 4
