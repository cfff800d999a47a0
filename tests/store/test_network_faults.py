"""The disk tier on a filesystem whose calls fail for a moment, or for ever."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import NamedTuple

import pytest

from preheat.model.events import Events
from preheat.store import Chain, DiskStore, LayerStore, filesystem
from preheat.store.lock import FileLock
from tests.conftest import Recorder
from tests.store.entries import blob_of, digest_of
from tests.store.faulty_files import FaultyFiles

KEY, BLOB = digest_of(1), blob_of(1)
OTHER, OTHER_BLOB = digest_of(2), blob_of(2)
ERRORS = (errno.ESTALE, errno.EBUSY)
ATTEMPTS = 4


class Store(NamedTuple):
    """A cache directory that has the entry KEY, and in which the calls of `files` may fail."""

    chain: Chain
    disk: DiskStore
    files: FaultyFiles


@pytest.fixture
def store(tmp_path: Path, events: Events, recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> Store:
    recorder.forgive = True
    monkeypatch.setattr(filesystem, "_PAUSES", (0.0,) * (ATTEMPTS - 1))
    disk = DiskStore(tmp_path / "cache", events, lock_dir=tmp_path / "locks")
    disk.put(KEY, BLOB)
    disk.journal().write({"compiles": 3})
    return Store(Chain([disk], events), disk, FaultyFiles(disk.root, monkeypatch))


def stored(store: Store, digest: str) -> object:
    return getattr(Chain([LayerStore(store.disk.root)], Events()).get(digest), "blob", None)


def put(store: Store) -> object:
    store.chain.put(OTHER, OTHER_BLOB)
    return stored(store, OTHER)


def put_again(store: Store) -> object:
    store.chain.put(KEY, BLOB)
    return stored(store, KEY)


def get(store: Store) -> object:
    return getattr(store.chain.get(KEY), "blob", None)


def count(store: Store) -> object:
    return {item.digest: item.bytes for item in store.disk.items()}


def remove(store: Store) -> object:
    store.chain.remove(KEY)
    return os.path.lexists(store.disk._path(KEY))


def pin(store: Store) -> object:
    store.disk.pin(KEY, OTHER)
    pinned = store.disk.pinned()
    store.disk.unpin(KEY)
    return pinned, store.disk.pinned()


def sweep(store: Store) -> object:
    store.disk.sweep(max_files=0)
    return count(store)


def journal(store: Store) -> object:
    store.disk.journal().write({"compiles": 4})
    return store.disk.journal().total()


def lock(store: Store) -> object:
    held = FileLock(store.disk.root / digest_of(3))
    taken = held.acquire(0)
    held.release()
    return taken


#: What is done, and its result where no call fails.
OPERATIONS: dict[Callable[[Store], object], object] = {
    get: BLOB,
    put: OTHER_BLOB,
    put_again: BLOB,
    count: {KEY: len(BLOB)},
    remove: False,
    pin: ({KEY, OTHER}, set()),
    sweep: {},
    journal: {"compiles": 7},
    lock: True,
}


def calls_of(operation: Callable[[Store], object], store: Store) -> dict[str, int]:
    """Carry an operation out, and return how often it made each call."""
    store.files.heal()
    assert operation(store) == OPERATIONS[operation]
    return dict(store.files.calls)


def restore(store: Store) -> None:
    store.files.heal()
    store.disk.clear()
    store.disk.put(KEY, BLOB)
    store.disk.journal().clear()
    store.disk.journal().write({"compiles": 3})
    store.disk._checked_shards.clear()
    store.files.heal()


@pytest.mark.parametrize("error", ERRORS, ids=errno.errorcode.get)
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)
def test_a_call_that_fails_for_a_moment_is_repeated(
    operation: Callable[[Store], object], error: int, store: Store, recorder: Recorder
) -> None:
    calls = calls_of(operation, store)
    assert calls, "the operation uses the directory"
    for name in calls:
        restore(store)
        store.files.fail(name, error, ATTEMPTS - 1)
        assert operation(store) == OPERATIONS[operation], name
        assert recorder.named("fault") == recorder.named("damaged") == [], name


@pytest.mark.parametrize("error", ERRORS, ids=errno.errorcode.get)
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)
def test_a_call_that_fails_for_ever_is_repeated_a_few_times_and_is_one_event(
    operation: Callable[[Store], object], error: int, store: Store, recorder: Recorder
) -> None:
    calls = calls_of(operation, store)
    for name, times in calls.items():
        restore(store)
        recorder.seen.clear()
        store.files.fail(name, error, inf)
        if operation in (get, put, put_again, remove):
            operation(store)  # in a chain, which raises nothing
        else:
            with suppress(OSError):
                operation(store)
        assert store.files.calls[name] <= 3 * ATTEMPTS * times, name
        assert len(recorder.named("fault")) <= 1, (name, recorder.named("fault"))
        assert recorder.named("damaged") == [], name
        restore(store)
        assert operation(store) == OPERATIONS[operation], f"{name}: it works again afterwards"


@pytest.mark.parametrize("error", [errno.ENOENT, errno.EACCES, errno.ENOSPC], ids=errno.errorcode.get)
def test_an_error_that_stays_is_not_waited_for(error: int, store: Store) -> None:
    store.files.fail("open", error, inf)
    get(store)
    assert store.files.calls["open"] == 1


@pytest.mark.parametrize(
    "error", [errno.ESTALE, errno.EBUSY, errno.EIO, errno.ETIMEDOUT], ids=errno.errorcode.get
)
def test_what_a_server_that_restarts_returns_is_transient(error: int, store: Store) -> None:
    store.files.fail("open", error, 1)
    assert get(store) == BLOB
    assert store.files.calls["open"] == 2


def test_no_attempt_begins_after_two_seconds(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that does not answer may keep each call for a minute."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def wait(*_: object) -> None:
        now[0] += 60
        raise OSError(errno.EIO, "the server did not answer")

    with pytest.raises(OSError, match="did not answer"):
        filesystem.retry_transient(wait)
    assert now == [60]
    assert get(store) == BLOB


def test_files_that_were_removed_while_they_were_open_are_ignored(
    store: Store, recorder: Recorder
) -> None:
    """NFS keeps such a file under another name, and unlinking that is EBUSY."""
    base = store.disk.root / "v1"
    store.disk.pin(KEY)
    left = [
        place / ".nfs000000000123456700000001"
        for place in (base, base / KEY[:2], base / "staged", base / "pins", store.disk.root / "stats")
    ]
    for file in left:
        file.write_bytes(b"{}")
        os.utime(file, (1, 1))
    assert count(store) == {KEY: len(BLOB)}
    assert store.disk.pinned() == {KEY}
    assert store.disk.journal().total() == {"compiles": 3}
    store.disk.sweep()
    store.disk.journal().clear()
    assert all(file.exists() for file in left)
    assert not recorder.named("fault")


def test_only_a_shared_directory_is_asked_twice_for_a_missing_entry(
    store: Store, tmp_path: Path
) -> None:
    """A node remembers that a name is missing, until it changes the directory itself."""
    same_shard = KEY[:2] + OTHER[2:]
    assert store.disk.get(same_shard) is None
    assert store.files.calls["open"] == 1
    shared = DiskStore(store.disk.root, Events(), lock_dir=tmp_path / "locks", shared=True)
    shard = store.disk.root / "v1" / KEY[:2]
    os.utime(shard, (1, 1))
    store.files.heal()
    assert shared.get(same_shard) is None
    assert store.files.calls["open"] == 2
    assert shard.stat().st_mtime > 1
    assert shared.get(KEY) == BLOB
    assert shared.get("ff" + KEY[2:]) is None
