"""Chains of tiers: lookups, writes, and tiers that fail."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import cast

import pytest

from preheat.model.events import Events
from preheat.store import Chain, DiskStore, LayerStore, MemoryStore, chain
from preheat.store.base import CLOSE_SECONDS
from preheat.store.remote.store import RemoteStore
from tests.conftest import Recorder
from tests.store.entries import blob_of, digest_of
from tests.store.support import as_nobody, needs_root, remount, tmpfs, tree

KEY = digest_of(1)
BLOB = blob_of(1)
LARGE = blob_of(1, 100_000)


class BrokenStore:
    """A tier that can do nothing."""

    writable = True

    def __init__(self, name: str = "broken") -> None:
        self.name = name

    def exists(self, digests: Iterable[str]) -> set[str]:
        raise OSError(errno.EIO, "Input/output error", digests)

    def names(self) -> Iterator[str]:
        raise OSError(errno.EIO, "Input/output error")

    def get(self, digest: str) -> bytes | None:
        raise OSError(errno.EIO, "Input/output error", digest)

    def put(self, digest: str, blob: bytes) -> None:
        raise OSError(errno.EIO, "Input/output error", digest, len(blob))

    def remove(self, digest: str) -> None:
        raise TimeoutError(digest)


def disk_at(root: Path, events: Events, locks: Path) -> DiskStore:
    return DiskStore(root, events, lock_dir=locks)


def faults(recorder: Recorder) -> list[tuple[str, str]]:
    return [(event["where"], event["verb"]) for event in recorder.named("fault")]


# Order


def test_the_first_tier_that_has_it_answers(events: Events) -> None:
    near, far = MemoryStore(1000), MemoryStore(1000)
    near.name, far.name = "near", "far"
    chain = Chain([near, far], events)
    far.put(KEY, b"far")
    assert chain.get(KEY) == (b"far", "far")
    near.put(KEY, b"near")
    assert chain.get(KEY) == (b"near", "near")


def test_a_key_that_no_tier_has_is_none_without_any_event(
    disk: DiskStore, events: Events, recorder: Recorder
) -> None:
    assert Chain([MemoryStore(1000), disk], events).get(KEY) is None
    assert Chain([], events).get(KEY) is None
    assert recorder.seen == []


def test_a_hit_fills_the_tiers_before_it(disk: DiskStore, events: Events) -> None:
    disk.put(KEY, BLOB)
    chain = Chain([MemoryStore(1000), disk], events)
    assert chain.get(KEY) == (BLOB, "disk")
    assert chain.get(KEY) == (BLOB, "memory")


def test_a_hit_fills_no_tier_behind_it(disk: DiskStore, events: Events) -> None:
    memory = MemoryStore(1000)
    memory.put(KEY, BLOB)
    Chain([memory, disk], events).get(KEY)
    assert disk.get(KEY) is None


def test_clearing_memory_leaves_the_disk_and_the_next_get_fills_it_again(
    disk: DiskStore, events: Events
) -> None:
    memory = MemoryStore(1000)
    chain = Chain([memory, disk], events)
    chain.put(KEY, BLOB)
    memory.clear()
    assert [chain.get(KEY), chain.get(KEY)] == [(BLOB, "disk"), (BLOB, "memory")]


def test_put_goes_to_every_writable_tier_and_each_says_so(
    disk: DiskStore, events: Events, recorder: Recorder
) -> None:
    memory = MemoryStore(1000)
    Chain([memory, disk], events).put(KEY, BLOB)
    assert (memory.get(KEY), disk.get(KEY)) == (BLOB, BLOB)
    assert [(e["tier"], e["key"], e["bytes"]) for e in recorder.named("put")] == [
        ("memory", KEY, len(BLOB)),
        ("disk", KEY, len(BLOB)),
    ]


def test_remove_takes_it_out_of_every_writable_tier(disk: DiskStore, events: Events) -> None:
    memory = MemoryStore(1000)
    chain = Chain([memory, disk], events)
    chain.put(KEY, BLOB)
    chain.remove(KEY)
    assert (memory.get(KEY), disk.get(KEY)) == (None, None)


def test_each_gives_what_every_tier_has_nearest_first(events: Events) -> None:
    near, empty, far = MemoryStore(1000), MemoryStore(1000), MemoryStore(1000)
    near.name, far.name = "near", "far"
    near.put(KEY, b"near")
    far.put(KEY, b"far")
    assert list(Chain([near, empty, far], events).each(KEY)) == [(b"near", "near"), (b"far", "far")]


# Layers


@pytest.fixture
def layer(tmp_path: Path, events: Events) -> LayerStore:
    disk_at(tmp_path / "image", events, tmp_path / "locks").put(KEY, BLOB)
    return LayerStore(tmp_path / "image")


def test_a_layer_is_asked_before_the_disk_fills_memory_and_is_never_written(
    layer: LayerStore, disk: DiskStore, events: Events
) -> None:
    before = tree(layer.root)
    chain = Chain([MemoryStore(1000), layer, disk], events)
    assert chain.get(KEY) == (BLOB, "layer")
    assert chain.get(KEY) == (BLOB, "memory")
    chain.put(digest_of(2), blob_of(2))
    chain.remove(KEY)
    assert tree(layer.root) == before
    assert disk.get(digest_of(2)) == blob_of(2)


def test_a_layer_is_no_writable_store_and_the_disk_is(layer: LayerStore, disk: DiskStore) -> None:
    assert not layer.writable
    assert disk.writable


def test_a_damaged_layer_is_a_miss_that_the_disk_behind_it_answers(
    layer: LayerStore, disk: DiskStore, events: Events, recorder: Recorder
) -> None:
    recorder.forgive = True
    (layer.root / "v1" / KEY[:2] / f"{KEY}.heat").write_bytes(BLOB[:-1])
    disk.put(KEY, BLOB)
    assert Chain([layer, disk], events).get(KEY) == (BLOB, "disk")
    assert len(recorder.named("damaged")) == 1


# Faults


def test_a_tier_that_fails_is_an_event_and_the_others_answer(
    disk: DiskStore, events: Events, recorder: Recorder
) -> None:
    recorder.forgive = True
    chain = Chain([BrokenStore("first"), disk, BrokenStore("last")], events)
    chain.put(KEY, BLOB)
    assert faults(recorder) == [("first", "write"), ("last", "write")]
    assert [event["tier"] for event in recorder.named("put")] == ["disk"]
    recorder.seen.clear()
    assert chain.get(KEY) == (BLOB, "disk")
    assert faults(recorder) == [("first", "read"), ("first", "write")]
    recorder.seen.clear()
    chain.remove(KEY)
    assert faults(recorder) == [("first", "remove"), ("last", "remove")]
    assert disk.get(KEY) is None


class SlowServer(MemoryStore):
    """A shared tier whose queue is never empty in time."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.waited: list[float] = []

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        self.waited.append(seconds)
        time.sleep(min(0.01, seconds))


def test_all_servers_share_the_time_at_the_end_of_a_process(
    events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chain, "CLOSE_SECONDS", 0.02)
    servers = [SlowServer() for _ in range(4)]
    Chain([], events, shared=cast("list[RemoteStore]", servers)).close()
    waited = [seconds for server in servers for seconds in server.waited]
    assert len(waited) == 4
    assert waited == sorted(waited, reverse=True)
    assert waited[0] <= 0.02
    assert waited[-1] == 0


def test_only_broken_tiers_are_a_miss(events: Events, recorder: Recorder) -> None:
    recorder.forgive = True
    assert Chain([BrokenStore(), BrokenStore()], events).get(KEY) is None
    assert len(recorder.named("fault")) == 2


def test_an_error_of_the_program_is_not_reported_as_a_fault(events: Events) -> None:
    class Wrong(BrokenStore):
        def get(self, digest: str) -> bytes | None:
            raise TypeError(digest)

    with pytest.raises(TypeError):
        Chain([Wrong()], events).get(KEY)


def survives(make: Callable[[], Chain], recorder: Recorder, blob: bytes, error: str) -> None:
    """Each put is one fault, and the memory tier still returns the blob."""
    recorder.forgive = True
    chain = make()
    for attempt in (1, 2):
        chain.put(KEY, blob)
        assert chain.get(KEY) == (blob, "memory")
        assert [e["where"] for e in recorder.named("fault")] == ["disk"] * attempt
        assert error in recorder.named("fault")[-1]["error"]
        assert [e["tier"] for e in recorder.named("put")] == ["memory"] * attempt


def test_a_full_disk_is_one_event_for_each_put(
    tmp_path: Path, events: Events, recorder: Recorder
) -> None:
    with tmpfs(tmp_path / "small", "size=64k") as small:
        disk = disk_at(small / "cache", events, tmp_path / "locks")
        disk.put(digest_of(2), blob_of(2))
        survives(lambda: Chain([MemoryStore(1 << 20), disk], events), recorder, LARGE, "No space left")
        assert list((disk.root / "v1" / "staged").iterdir()) == []
        assert disk.get(digest_of(2)) == blob_of(2)
        disk.put(KEY, BLOB)
        assert disk.get(KEY) == BLOB, "there is room for a small one"


def test_a_disk_without_free_memory_for_a_directory_is_one_event_for_each_put(
    tmp_path: Path, events: Events, recorder: Recorder
) -> None:
    with tmpfs(tmp_path / "small", "size=64k,nr_inodes=2") as small:
        disk = disk_at(small / "cache", events, tmp_path / "locks")
        survives(lambda: Chain([MemoryStore(1 << 20), disk], events), recorder, BLOB, "No space left")


def test_a_read_only_directory_is_one_event_for_each_put_and_still_read(
    tmp_path: Path, events: Events, recorder: Recorder
) -> None:
    with tmpfs(tmp_path / "mount", "size=1m") as mount:
        disk = disk_at(mount / "cache", events, tmp_path / "locks")
        disk.put(digest_of(2), blob_of(2))
        remount(mount, "ro")
        survives(lambda: Chain([MemoryStore(1000), disk], events), recorder, BLOB, "Read-only")
        assert Chain([disk], events).get(digest_of(2)) == (blob_of(2), "disk")


def test_an_empty_read_only_directory_is_one_event_for_each_put(
    tmp_path: Path, events: Events, recorder: Recorder
) -> None:
    with tmpfs(tmp_path / "mount", "size=1m,ro") as mount:
        disk = disk_at(mount / "cache", events, tmp_path / "locks")
        survives(lambda: Chain([MemoryStore(1000), disk], events), recorder, BLOB, "Read-only")


def test_a_damaged_entry_that_cannot_be_removed_is_a_miss_and_one_fault(
    tmp_path: Path, events: Events, recorder: Recorder
) -> None:
    recorder.forgive = True
    with tmpfs(tmp_path / "mount", "size=1m") as mount:
        disk = disk_at(mount / "cache", events, tmp_path / "locks")
        disk.put(KEY, BLOB)
        (disk.root / "v1" / KEY[:2] / f"{KEY}.heat").write_bytes(BLOB[:-1])
        remount(mount, "ro")
        assert Chain([disk], events).get(KEY) is None
    assert [name for name, _ in recorder.seen] == ["damaged", "fault"]


@needs_root
def test_the_directory_of_another_user_is_one_event_for_each_put(
    disk: DiskStore, events: Events, recorder: Recorder
) -> None:
    disk.put(digest_of(2), blob_of(2))
    chain = Chain([MemoryStore(1000), disk], events)
    with as_nobody():
        survives(lambda: chain, recorder, BLOB, "PermissionError")


def test_a_file_in_the_way_of_the_directory_is_one_event_for_each_put(
    disk: DiskStore, events: Events, recorder: Recorder
) -> None:
    disk.root.write_bytes(b"a file")
    survives(lambda: Chain([MemoryStore(1000), disk], events), recorder, BLOB, "NotADirectoryError")
