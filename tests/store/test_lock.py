"""File locks: one owner at a time, also after owners are killed or interrupted."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from preheat.store.lock import FileLock, hold, release_lost, sweep
from tests.processes import TIMEOUT_SECONDS, kill, read_line
from tests.store.support import finish, start


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lock"


def test_a_free_lock_is_taken_at_once(path: Path) -> None:
    assert FileLock(path).acquire(0)


def test_only_one_of_two_processes_has_it(path: Path) -> None:
    owner = start("hold", path)
    assert read_line(owner) == "held"
    assert not FileLock(path).acquire(0)
    finish(owner)
    assert FileLock(path).acquire(0)


def test_two_lock_objects_of_one_process_exclude_each_other(path: Path) -> None:
    first, second = FileLock(path), FileLock(path)
    assert first.acquire(0)
    assert not second.acquire(0)
    first.release()
    assert second.acquire(0)


def test_taking_a_held_lock_again_fails_and_keeps_it(path: Path) -> None:
    lock = FileLock(path)
    assert lock.acquire(0)
    assert not lock.acquire(0)
    assert not FileLock(path).acquire(0)
    lock.release()
    assert FileLock(path).acquire(0)


def test_other_locks_are_not_blocked(path: Path) -> None:
    with hold(path, 0), hold(path.with_name("other"), 0) as mine:
        assert mine


def test_a_wait_is_bounded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [5.0]
    pauses = list[float]()

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        now[0] += seconds

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=sleep)
    with hold(path, 0), monkeypatch.context() as patch:
        patch.setattr("preheat.store.lock.time", clock)
        assert not FileLock(path).acquire(0.2)
    assert sum(pauses) == pytest.approx(0.2)
    assert 3 < len(pauses) < 50  # neither idle for long nor busy


def test_a_waiter_gets_it_when_the_owner_is_done(path: Path) -> None:
    owner = start("hold", path)
    read_line(owner)
    outcome: list[bool] = []
    waiter = threading.Thread(target=lambda: outcome.append(FileLock(path).acquire(TIMEOUT_SECONDS)))
    waiter.start()
    finish(owner)
    waiter.join()
    assert outcome == [True]


def test_a_killed_owner_is_succeeded_at_once(path: Path) -> None:
    owner = start("hold", path)
    read_line(owner)
    assert not FileLock(path).acquire(0)
    kill(owner)
    assert path.exists(), "its file stays behind and must not matter"
    assert FileLock(path).acquire(0)


def test_releasing_removes_the_file(path: Path) -> None:
    lock = FileLock(path)
    assert lock.acquire(0)
    assert path.exists()
    lock.release()
    assert not path.exists()


def test_a_lock_that_is_held_often_keeps_its_file(path: Path) -> None:
    for _ in range(2):
        with hold(path, 0) as taken:
            assert taken
        assert path.exists()


def test_a_file_that_was_cleaned_away_and_taken_by_another_stays_unchanged(path: Path) -> None:
    mine, other = FileLock(path), FileLock(path)
    assert mine.acquire(0)
    path.unlink()  # a cleaner of old files
    assert other.acquire(0)
    mine.release()
    assert not FileLock(path).acquire(0)
    other.release()


def test_releasing_what_is_not_held_does_not_affect_the_owner(path: Path) -> None:
    with hold(path, 0):
        stranger = FileLock(path)
        stranger.release()
        stranger.acquire(0)
        stranger.release()
        assert not FileLock(path).acquire(0)


def test_the_lock_is_released_when_the_block_fails(path: Path) -> None:
    with pytest.raises(KeyError), hold(path, 0):
        raise KeyError
    assert FileLock(path).acquire(0)


def test_no_descriptor_is_left_open(path: Path) -> None:
    with hold(path, 0):
        pass
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        with hold(path, 0), hold(path, 0):
            pass
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("where", ["missing/lock", "file/lock"])
def test_a_place_that_allows_no_locks_is_an_error(tmp_path: Path, where: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OSError, match="irectory"):
        FileLock(tmp_path / where).acquire(5)


def test_a_link_in_its_place_is_not_followed(tmp_path: Path, path: Path) -> None:
    path.symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match="symbolic links"):
        FileLock(path).acquire(5)
    assert not (tmp_path / "target").exists()


# Interrupts


def test_the_lock_of_an_interrupted_function_is_released_though_its_exception_is_kept(
    path: Path,
) -> None:
    def interrupted() -> None:
        assert FileLock(path, owner=sys._getframe()).acquire(0)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as kept:
        interrupted()
    assert FileLock(path).acquire(0), kept


def test_an_interrupted_sweep_keeps_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    path = tmp_path / ("ab" * 32)
    path.touch()
    with monkeypatch.context() as patch:
        patch.setattr(FileLock, "release", interrupt)
        with pytest.raises(KeyboardInterrupt):
            sweep(tmp_path, path.stat().st_mtime + 1)
    assert FileLock(path).acquire(0)


def test_releasing_what_an_interrupted_function_only_tried_to_take_does_not_affect_the_owner(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted() -> None:
        FileLock(path, owner=sys._getframe()).acquire(0)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    owner = FileLock(path)
    assert owner.acquire(0)
    with monkeypatch.context() as patch:
        patch.setattr("preheat.store.lock.fcntl.flock", interrupt)
        patch.setattr(FileLock, "_close", interrupt)
        with pytest.raises(KeyboardInterrupt):
            interrupted()
    release_lost()
    assert path.exists()
    owner.release()


def test_a_lock_is_not_lost_while_its_function_runs_in_another_thread(path: Path) -> None:
    taken, done = threading.Event(), threading.Event()

    def keep() -> None:
        with hold(path, 0):
            taken.set()
            done.wait()

    thread = threading.Thread(target=keep)
    thread.start()
    taken.wait()
    release_lost()
    assert not FileLock(path).acquire(0)
    done.set()
    thread.join()
    assert FileLock(path).acquire(0)


# Fork


def test_a_forked_child_does_not_keep_the_lock_of_a_dead_parent(path: Path) -> None:
    owner = start("hold-and-fork", path)
    child = int(read_line(owner))
    try:
        assert not FileLock(path).acquire(0)
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait()
        os.kill(child, 0)
        assert FileLock(path).acquire(0)
    finally:
        os.kill(child, signal.SIGKILL)
        owner.communicate()


def test_a_forked_child_cannot_release_the_lock_of_its_parent(path: Path) -> None:
    owner = start("fork-and-release", path)
    assert read_line(owner) == "held"
    assert path.exists()
    assert not FileLock(path).acquire(0)
    finish(owner)


def test_a_copied_lock_object_does_not_release_another_lock_of_the_child(path: Path) -> None:
    assert finish(start("fork-and-lock-again", path, path.with_name("other"))) == ["held\n"]


# The file that comes and goes


def test_a_lock_on_a_file_that_was_unlinked_does_not_count(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def opened_too_early(*arguments: object) -> int:
        descriptor = opened(*arguments)  # type: ignore[arg-type]
        os.unlink(path)
        return descriptor

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", opened_too_early)
        assert not FileLock(path).acquire(0)
    assert FileLock(path).acquire(0)


def test_a_lock_on_a_file_that_was_replaced_does_not_count(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open
    winner = FileLock(path)

    def opened_too_early(*arguments: object) -> int:
        descriptor = opened(*arguments)  # type: ignore[arg-type]
        os.unlink(path)
        monkeypatch.setattr(os, "open", opened)
        assert winner.acquire(0)
        return descriptor

    monkeypatch.setattr(os, "open", opened_too_early)
    assert not FileLock(path).acquire(0)


def test_no_update_is_lost_when_many_processes_count(path: Path, tmp_path: Path) -> None:
    counter = tmp_path / "counter"
    counter.write_text("0")
    finish(*(start("count-under-lock", path, counter, 200) for _ in range(5)))
    assert counter.read_text() == "1000"
    assert not path.exists()
