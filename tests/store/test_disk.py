"""The disk tier and the read-only layer."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from preheat.model.codec import DamagedEntryError
from preheat.model.events import Events
from preheat.store import Chain, DiskStore, LayerStore, MemoryStore
from preheat.store.disk import Swept
from tests.conftest import Recorder
from tests.store.entries import blob_of, digest_of
from tests.store.support import Clock, as_nobody, needs_root, tree

KEY = digest_of(1)
BLOB = blob_of(1)


def flip(blob: bytes, position: int) -> bytes:
    return blob[:position] + bytes([blob[position] ^ 1]) + blob[position + 1 :]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "truncated by a byte": lambda blob: blob[:-1],
    "truncated by half": lambda blob: blob[: len(blob) // 2],
    "filled with zeros": lambda blob: bytes(len(blob)),
    "with trailing bytes": lambda blob: blob + b"\0",
    "flipped in the magic": lambda blob: flip(blob, 0),
    "of another version": lambda blob: flip(blob, 8),
    "flipped in the key": lambda blob: flip(blob, 20),
    "flipped in the JSON": lambda blob: flip(blob, 50),
    "flipped in the payload": lambda blob: flip(blob, len(blob) - 40),
    "flipped in the checksum": lambda blob: flip(blob, len(blob) - 1),
    "of another key": lambda _: blob_of(2),
    "text": lambda _: b"not an entry at all\n" * 10,
}
damages = pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())


def entry_file(disk: LayerStore, digest: str = KEY) -> Path:
    return disk.root / "v1" / digest[:2] / f"{digest}.heat"


def note_file(disk: LayerStore, digest: str = KEY) -> Path:
    return entry_file(disk, digest).with_suffix(".note")


def staged_files(disk: DiskStore) -> list[str]:
    return os.listdir(disk.root / "v1" / "staged")


@pytest.fixture
def open_umask() -> Iterator[None]:
    """A user whose umask permits everyone to write."""
    before = os.umask(0)
    yield
    os.umask(before)


# Reading and writing


def test_get_returns_the_stored_blob(disk: DiskStore) -> None:
    disk.put(KEY, BLOB)
    assert disk.get(KEY) == BLOB


def test_another_store_on_the_same_directory_finds_it(open_disk: Callable[..., DiskStore]) -> None:
    open_disk().put(KEY, BLOB)
    assert open_disk().get(KEY) == BLOB


def test_an_absent_entry_is_none_without_any_event(disk: DiskStore, recorder: Recorder) -> None:
    assert disk.get(KEY) is None
    disk.put(digest_of(2), blob_of(2))
    assert disk.get(KEY) is None
    assert recorder.seen == []


def test_a_get_makes_no_directory(disk: DiskStore) -> None:
    disk.get(KEY)
    assert not disk.root.exists()


def test_putting_again_replaces(disk: DiskStore) -> None:
    disk.put(KEY, BLOB)
    disk.put(KEY, blob_of(1, 5000))
    assert disk.get(KEY) == blob_of(1, 5000)


def test_threads_that_put_do_not_wait_in_turns_for_the_file_of_the_totals(
    disk: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk.put(digest_of(0), blob_of(0))  # The first entry is counted.
    pauses: list[float] = []
    sleep = time.sleep

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        sleep(seconds)

    monkeypatch.setattr("preheat.store.lock.time.sleep", pause)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda n: disk.put(digest_of(n), blob_of(n)), range(1, 100)))
    assert pauses == []
    assert len(list(disk.items())) == 100


def test_a_large_entry_comes_back_whole(disk: DiskStore) -> None:
    disk.put(KEY, blob_of(1, 10 << 20))
    assert disk.get(KEY) == blob_of(1, 10 << 20)


def test_remove_takes_the_entry_and_its_note_away(disk: DiskStore) -> None:
    disk.put(KEY, BLOB)
    disk.put_note(KEY, b"note")
    disk.remove(KEY)
    assert disk.get(KEY) is None
    assert disk.note(KEY) is None


def test_removing_what_is_not_there_does_nothing(disk: DiskStore) -> None:
    disk.remove(KEY)
    assert not disk.root.exists()


def test_items_tell_size_with_note_stamp_and_pin(disk: DiskStore) -> None:
    disk.put(KEY, BLOB)
    disk.put_note(KEY, b"12345")
    disk.put(digest_of(2), blob_of(2))
    disk.pin(KEY)
    os.utime(entry_file(disk), (1000, 2000))
    found = {item.digest: item for item in disk.items()}
    assert found.keys() == {KEY, digest_of(2)}
    assert found[KEY].bytes == len(BLOB) + note_file(disk).stat().st_size
    assert found[KEY].last_read == 2000
    assert (found[KEY].pinned, found[digest_of(2)].pinned) == (True, False)


def test_a_pin_holds_what_leads_to_its_entry(disk: DiskStore) -> None:
    for number in range(4):
        disk.put(digest_of(number), blob_of(number))
    disk.pin(KEY, digest_of(2), digest_of(3))
    disk.pin(digest_of(0), digest_of(3))
    assert disk.sweep(max_files=0) == Swept()
    disk.unpin(KEY)
    disk.sweep(max_files=0)
    assert {item.digest for item in disk.items()} == {digest_of(0), digest_of(3)}


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\n", b"abc\n../../x\n"])
def test_a_pin_whose_list_makes_no_sense_holds_its_own_entry(disk: DiskStore, content: bytes) -> None:
    disk.put(KEY, BLOB)
    disk.pin(KEY)
    (disk.root / "v1" / "pins" / KEY).write_bytes(content)
    assert disk.pinned() == {KEY}


def test_clear_removes_everything_pinned_entries_too(disk: DiskStore) -> None:
    for number in range(3):
        disk.put(digest_of(number), blob_of(number))
    disk.put_note(KEY, b"12345")
    disk.pin(KEY)
    size = sum(len(blob_of(number)) for number in range(3)) + note_file(disk).stat().st_size
    assert disk.clear() == Swept(files=3, bytes=size)
    assert list(disk.items()) == []
    disk.put(KEY, BLOB)
    assert [item.pinned for item in disk.items()] == [False]


def test_a_cache_that_does_not_exist_can_be_cleared_and_swept(disk: DiskStore) -> None:
    assert disk.clear().files == 0
    assert disk.sweep().files == 0
    assert not disk.root.exists()


def test_a_directory_whose_name_is_no_text_can_be_used(
    tmp_path: Path, events: Events, recorder: Recorder
) -> None:
    root = tmp_path / os.fsdecode(b"caf\xe9")
    disk = DiskStore(root, events, lock_dir=tmp_path / "locks")
    disk.put(KEY, BLOB)
    assert disk.get(KEY) == BLOB
    assert recorder.seen == []


# Damage


@damages
def test_a_damaged_entry_is_none_counted_and_removed(
    disk: DiskStore, events: Events, recorder: Recorder, damage: Callable[[bytes], bytes]
) -> None:
    recorder.forgive = True
    disk.put(KEY, BLOB)
    entry_file(disk).write_bytes(damage(BLOB))
    assert Chain([disk], events).get(KEY) is None
    assert not entry_file(disk).exists()
    assert [(e["tier"], e["key"]) for e in recorder.named("damaged")] == [("disk", KEY)]
    assert events.stats() == {"damaged": 1}
    assert Chain([disk], events).get(KEY) is None
    assert events.stats() == {"damaged": 1}, "removed, so the second time it is just absent"


def test_a_damaged_entry_can_be_put_again(disk: DiskStore, recorder: Recorder) -> None:
    recorder.forgive = True
    disk.put(KEY, BLOB)
    entry_file(disk).write_bytes(b"")
    with pytest.raises(DamagedEntryError):
        disk.get(KEY)
    disk.put(KEY, BLOB)
    assert disk.get(KEY) == BLOB


def test_an_entry_that_cannot_be_read_is_none_and_a_fault(
    disk: DiskStore, events: Events, recorder: Recorder
) -> None:
    recorder.forgive = True
    entry_file(disk).mkdir(parents=True)
    assert Chain([disk], events).get(KEY) is None
    assert [(e["where"], e["verb"]) for e in recorder.named("fault")] == [("disk", "read")]


@needs_root
def test_an_entry_without_permission_is_none_and_a_fault(
    disk: DiskStore, events: Events, recorder: Recorder
) -> None:
    recorder.forgive = True
    disk.put(KEY, BLOB)
    with as_nobody():
        assert Chain([disk], events).get(KEY) is None
    assert [e["error"].split(":")[0] for e in recorder.named("fault")] == ["PermissionError"]
    assert disk.get(KEY) == BLOB, "and it was left alone"


def test_an_entry_that_is_a_symbolic_link_is_not_followed(
    disk: DiskStore, events: Events, recorder: Recorder, tmp_path: Path
) -> None:
    recorder.forgive = True
    disk.put(KEY, BLOB)
    entry_file(disk).rename(tmp_path / "elsewhere")
    entry_file(disk).symlink_to(tmp_path / "elsewhere")
    assert Chain([disk], events).get(KEY) is None
    assert len(recorder.named("fault")) == 1


# How it is written


def test_files_are_for_the_owner_alone_whatever_the_umask(
    disk: DiskStore, open_umask: None, tmp_path: Path
) -> None:
    del open_umask
    disk.put(KEY, BLOB)
    disk.put_note(KEY, b"note")
    disk.pin(KEY)
    found = [disk.root, *disk.root.rglob("*"), tmp_path / "locks"]
    assert {"CACHEDIR.TAG", "usage", f"{KEY}.heat", f"{KEY}.note", KEY} <= {path.name for path in found}
    modes = {path: stat.S_IMODE(path.lstat().st_mode) for path in found}
    assert modes == {path: 0o700 if path.is_dir() else 0o600 for path in found}


def test_a_staged_entry_is_not_visible(disk: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bytes | None, int, int]] = []
    replace = os.replace

    def look_then_replace(source: str, target: str) -> None:
        seen.append((disk.get(KEY), len(list(disk.items())), len(staged_files(disk))))
        replace(source, target)

    disk.pin(KEY)  # makes the directory and its tag
    monkeypatch.setattr(os, "replace", look_then_replace)
    disk.put(KEY, BLOB)
    assert seen == [(None, 0, 1)]
    assert staged_files(disk) == []


def test_an_entry_is_on_the_disk_before_it_is_visible(
    disk: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[object] = []
    fsync, replace = os.fsync, os.replace

    def noted_fsync(descriptor: int) -> None:
        order.append(os.fstat(descriptor).st_size)
        fsync(descriptor)

    def noted_replace(source: str, target: str) -> None:
        order.append("rename")
        replace(source, target)

    disk.pin(KEY)  # makes the directory and its tag
    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    disk.put(KEY, BLOB)
    assert order == [len(BLOB), "rename"]


@pytest.mark.parametrize("step", ["write", "fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_entry_and_no_litter(
    disk: DiskStore, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def broken(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    disk.put(KEY, BLOB)
    with monkeypatch.context() as patch:
        patch.setattr(os, step, broken)
        with pytest.raises(OSError, match="Input/output error"):
            disk.put(KEY, blob_of(1, 5000))
    assert disk.get(KEY) == BLOB
    assert staged_files(disk) == []


def test_a_write_in_pieces_is_put_together(disk: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: write(fd, data[:7]))
        disk.put(KEY, BLOB)
    assert disk.get(KEY) == BLOB


def test_the_directory_carries_the_tag_that_backup_programs_know(disk: DiskStore) -> None:
    disk.put(KEY, BLOB)
    tag = (disk.root / "CACHEDIR.TAG").read_bytes()
    assert tag.startswith(b"Signature: 8a477f597d28d172789f06886806bc55\n")


@pytest.mark.parametrize("gone", [".", "v1", "v1/staged", f"v1/{KEY[:2]}"])
def test_a_vanished_directory_is_made_again(disk: DiskStore, recorder: Recorder, gone: str) -> None:
    disk.put(KEY, BLOB)
    shutil.rmtree(disk.root / gone)
    disk.put(KEY, BLOB)
    assert disk.get(KEY) == BLOB
    assert (disk.root / "CACHEDIR.TAG").exists()
    assert recorder.seen == []


# Notes


def test_a_note_comes_back_until_it_is_replaced(disk: DiskStore) -> None:
    assert disk.note(KEY) is None
    disk.put_note(KEY, b"one")
    assert disk.note(KEY) == b"one"
    disk.put_note(KEY, b"two")
    assert disk.note(KEY) == b"two"


def test_a_note_without_an_entry_is_no_entry(disk: DiskStore) -> None:
    disk.put_note(KEY, b"note")
    assert disk.get(KEY) is None


# Stamps


def test_reading_stamps_an_entry_at_most_once_an_hour(disk: DiskStore, clock: Clock) -> None:
    disk.put(KEY, BLOB)
    written = entry_file(disk).stat().st_mtime_ns
    clock.advance(3500)
    disk.get(KEY)
    assert entry_file(disk).stat().st_mtime_ns == written
    clock.advance(200)
    disk.get(KEY)
    assert entry_file(disk).stat().st_mtime == pytest.approx(clock.now, abs=0.001)


# Layers


@pytest.fixture
def layer(disk: DiskStore) -> LayerStore:
    """Return a directory that was filled earlier, in which the store would write stamps."""
    disk.put(KEY, BLOB)
    disk.put(digest_of(2), blob_of(2))
    for digest in (KEY, digest_of(2)):
        os.utime(entry_file(disk, digest), (0, 0))
    return LayerStore(disk.root)


def test_a_layer_gives_its_entries(layer: LayerStore) -> None:
    assert layer.get(KEY) == BLOB
    assert layer.get(digest_of(3)) is None
    assert {item.digest for item in layer.items()} == {KEY, digest_of(2)}


def test_a_layer_is_never_written_when_read(layer: LayerStore) -> None:
    before = tree(layer.root)
    layer.get(KEY)
    layer.get(digest_of(3))
    assert tree(layer.root) == before


@damages
def test_a_layer_is_never_written_to_repair_it(
    layer: LayerStore, events: Events, recorder: Recorder, damage: Callable[[bytes], bytes]
) -> None:
    recorder.forgive = True
    entry_file(layer).write_bytes(damage(BLOB))
    before = tree(layer.root)
    assert Chain([layer], events).get(KEY) is None
    assert tree(layer.root) == before
    assert [e["tier"] for e in recorder.named("damaged")] == ["layer"]


def test_a_layer_that_does_not_exist_has_nothing(tmp_path: Path) -> None:
    layer = LayerStore(tmp_path / "nowhere")
    assert layer.get(KEY) is None
    assert list(layer.items()) == []
    assert not layer.root.exists()


def test_a_layer_offers_no_way_to_write(layer: LayerStore) -> None:
    assert not any(hasattr(layer, verb) for verb in ("sweep", "clear", "put_note"))
    before = tree(layer.root)
    with pytest.raises(OSError, match="Read-only"):
        layer.put(KEY, BLOB)
    with pytest.raises(OSError, match="Read-only"):
        layer.remove(KEY)
    assert tree(layer.root) == before


def test_no_store_pretends_that_asking_and_getting_are_two_steps() -> None:
    assert not any(
        hasattr(store, "__contains__") for store in (DiskStore, LayerStore, MemoryStore, Chain)
    )


def test_the_first_put_of_a_process_sweeps_what_dead_writers_left(
    tmp_path: Path, events: Events
) -> None:
    def opened() -> DiskStore:
        return DiskStore(tmp_path / "cache", events, lock_dir=tmp_path / "l", clock=lambda: 10_000.0)

    opened().put(KEY, BLOB)
    staged = tmp_path / "cache" / "v1" / "staged"
    for name, stamp in (("orphan", 1_000.0), ("in-use", 9_000.0)):
        (staged / name).touch()
        os.utime(staged / name, (stamp, stamp))
    opened().put(digest_of(2), blob_of(2))
    assert [file.name for file in staged.iterdir()] == ["in-use"]
