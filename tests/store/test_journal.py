"""Counters of concurrent processes: no count is lost, and none is counted twice."""

from __future__ import annotations

import json
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from preheat.store.journal import Journal
from preheat.store.lock import hold
from tests.store.support import Clock, finish, start

OpenJournal = Callable[[], Journal]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "stats"


@pytest.fixture
def open_journal(directory: Path, tmp_path: Path, clock: Clock) -> OpenJournal:
    """Opens journals on one directory, as separate processes would."""
    return lambda: Journal(directory, lock_dir=tmp_path / "locks", clock=clock)


def leave_files(open_journal: OpenJournal, count: int) -> None:
    """Return the files of `count` processes with one hit each."""
    for _ in range(count):
        open_journal().write({"hits": 1})


def names(directory: Path) -> set[str]:
    return set(os.listdir(directory))


# Adding up


def test_counters_of_all_processes_add_up(open_journal: OpenJournal) -> None:
    open_journal().write({"hits": 2, "compiles": 1})
    open_journal().write({"hits": 3, "seconds_saved": 0.5})
    assert open_journal().total() == {"hits": 5, "compiles": 1, "seconds_saved": 0.5}


def test_a_process_that_writes_again_counts_once(open_journal: OpenJournal) -> None:
    journal = open_journal()
    for hits in (1, 2, 10):
        journal.write({"hits": hits})
    assert journal.total() == {"hits": 10}


def test_nothing_to_write_makes_no_file(open_journal: OpenJournal, directory: Path) -> None:
    open_journal().write({})
    assert not directory.exists()
    assert open_journal().total() == {}


def test_counters_that_did_not_change_are_not_written_again(
    open_journal: OpenJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = open_journal()
    journal.write({"hits": 1})
    monkeypatch.setattr(os, "replace", lambda *_: pytest.fail("written again"))
    journal.write({"hits": 1})


def test_processes_at_once_lose_nothing(directory: Path, tmp_path: Path) -> None:
    children = [start("count-in-journal", directory, tmp_path / "locks", 50) for _ in range(8)]
    seen = [json.loads(said)["hits.disk"] for said in finish(*children)]
    total = Journal(directory, lock_dir=tmp_path / "locks").total()
    assert total == {"hits.disk": 400, "seconds_saved": 200}
    assert max(seen) <= 400


def test_threads_of_one_process_do_not_disturb_each_other(open_journal: OpenJournal) -> None:
    journal = open_journal()
    trouble = list[Exception]()

    def work(thread: int) -> None:
        try:
            for number in range(50):
                journal.write({"hits": 50 * thread + number})
        except Exception as error:
            trouble.append(error)

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    journal.write({"hits": 1000})
    assert trouble == []
    assert journal.total() == {"hits": 1000}


def test_a_forked_child_counts_in_a_file_of_its_own(open_journal: OpenJournal) -> None:
    parent = open_journal()
    parent.write({"hits": 3})
    child = parent.for_child()
    child.write({"hits": 1})
    parent.write({"hits": 4})
    assert parent.total() == {"hits": 5}


def test_files_are_for_the_owner_only(open_journal: OpenJournal, directory: Path) -> None:
    before = os.umask(0)
    try:
        open_journal().write({"hits": 1})
    finally:
        os.umask(before)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (directory, *directory.iterdir())]
    assert modes == [0o700, 0o600]


# Folding


def test_folding_keeps_the_sum_and_clears_the_litter(
    open_journal: OpenJournal, directory: Path, clock: Clock
) -> None:
    leave_files(open_journal, 64)
    clock.advance(1000)
    open_journal().write({"hits": 1, "compiles": 2})
    assert len(names(directory)) <= 2
    assert open_journal().total() == {"hits": 65, "compiles": 2}


def test_folding_twice_keeps_the_sum(open_journal: OpenJournal, directory: Path, clock: Clock) -> None:
    for _ in range(2):
        leave_files(open_journal, 64)
        clock.advance(1000)
    leave_files(open_journal, 1)
    assert open_journal().total() == {"hits": 129}
    assert len(names(directory)) <= 2


def test_files_of_living_processes_are_not_folded(
    open_journal: OpenJournal, directory: Path, clock: Clock
) -> None:
    leave_files(open_journal, 70)
    clock.advance(500)
    leave_files(open_journal, 1)
    assert len(names(directory) - {"total.json"}) == 71
    assert open_journal().total() == {"hits": 71}


def test_a_process_whose_file_was_folded_continues(
    open_journal: OpenJournal, directory: Path, clock: Clock
) -> None:
    sleeper = open_journal()
    sleeper.write({"hits": 10})
    (mine,) = names(directory)
    clock.advance(1000)
    leave_files(open_journal, 64)
    assert mine not in names(directory)
    sleeper.write({"hits": 12, "compiles": 1})
    assert sleeper.total() == {"hits": 76, "compiles": 1}
    sleeper.write({"hits": 15, "compiles": 1})
    assert sleeper.total() == {"hits": 79, "compiles": 1}


def test_a_process_that_writes_while_its_file_is_folded_loses_nothing(
    open_journal: OpenJournal, directory: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleeper = open_journal()
    sleeper.write({"hits": 10})
    (mine,) = names(directory)
    clock.advance(1000)
    read = Journal._read
    asleep = [mine]

    def read_then_wake(journal: Journal, name: str) -> dict[str, float]:
        found = read(journal, name)
        if name in asleep:
            asleep.clear()
            sleeper.write({"hits": 12})
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "_read", read_then_wake)
        leave_files(open_journal, 64)
    assert mine not in names(directory)
    sleeper.write({"hits": 13})
    assert sleeper.total() == {"hits": 77}


def test_only_one_process_folds(
    open_journal: OpenJournal, directory: Path, tmp_path: Path, clock: Clock
) -> None:
    leave_files(open_journal, 64)
    clock.advance(1000)
    locks = tmp_path / "locks"
    locks.mkdir()
    with hold(locks / f"fold-{os.fsencode(directory).hex()[-120:]}", 0):
        open_journal().write({"hits": 1})
        assert len(names(directory)) == 65
    assert open_journal().total() == {"hits": 65}


# Garbage


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"7",
        b"null",
        b"\xff\xfe",
        b'{"hits": "many"}',
        b'{"hits": [1]}',
        b"[" * 100_000,
    ],
    ids=["empty", "cut", "list", "number", "null", "no text", "text value", "list value", "deep"],
)
def test_a_garbage_file_counts_for_nothing(
    open_journal: OpenJournal, directory: Path, content: bytes
) -> None:
    open_journal().write({"hits": 1})
    (directory / "7-garbage.json").write_bytes(content)
    assert open_journal().total() == {"hits": 1}


def test_a_directory_among_the_files_counts_for_nothing(
    open_journal: OpenJournal, directory: Path
) -> None:
    open_journal().write({"hits": 1})
    (directory / "sub.json").mkdir()
    assert open_journal().total() == {"hits": 1}


def test_a_file_that_a_killed_process_had_not_published_is_not_counted_twice(
    open_journal: OpenJournal, directory: Path, clock: Clock
) -> None:
    leave_files(open_journal, 64)
    for name in ("7-abcdef.7", "total.7"):
        (directory / name).write_text('{"hits": 1000}')
    assert open_journal().total() == {"hits": 64}
    clock.advance(1000)
    leave_files(open_journal, 1)
    assert open_journal().total() == {"hits": 65}
    assert len(names(directory)) <= 2, "and folding cleared it away"


# Starting anew


def test_clearing_starts_from_nothing_and_living_processes_continue_from_there(
    open_journal: OpenJournal,
) -> None:
    journal = open_journal()
    journal.write({"hits": 10})
    open_journal().clear()
    assert journal.total() == {}
    journal.write({"hits": 12})
    assert journal.total() == {"hits": 2}


def test_clearing_where_nothing_is_does_nothing(open_journal: OpenJournal, directory: Path) -> None:
    open_journal().clear()
    assert not directory.exists()


def test_a_directory_that_cannot_be_written_is_an_error_for_the_caller_to_tell(
    open_journal: OpenJournal, directory: Path
) -> None:
    directory.parent.mkdir()
    directory.write_bytes(b"a file")
    with pytest.raises(NotADirectoryError):
        open_journal().write({"hits": 1})
