"""Files that one of many processes creates or changes by hard links."""

from __future__ import annotations

import errno
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from preheat.store.remote import links
from preheat.store.remote.checks import probe_conditional
from preheat.store.remote.file_engine import FileEngine
from preheat.store.remote.links import LinkLocks, LockedError, create_by_link, file_content
from preheat.store.remote.url import Remote
from tests.processes import expect_success, kill, read_line, start_process, write_line

RACERS = 8
ROUNDS = 20
_REPOSITORY = Path(__file__).parents[3]
_RACER = """
import sys
from pathlib import Path
from preheat.store.remote.file_engine import FileEngine
from preheat.store.remote.url import Remote

root, mine, rounds = sys.argv[1], sys.argv[2].encode(), int(sys.argv[3])
engine = FileEngine(Remote(service="file", name="file://", host="", path=root), timeout=60)
print("ready", flush=True)
for number in map(int, iter(sys.stdin.readline, "")):
    name = f"v1/leases/{number}"
    won = engine.create(name, mine + b" 0", seconds=60)
    swapped = engine.swap(name, b"x", mine, seconds=60)
    if won:
        # The others try to take over while the holder renews: none of these may be lost.
        for beat in range(rounds):
            assert engine.swap(name, mine + b" %d" % beat, mine + b" %d" % (beat + 1), seconds=60)
        assert engine.discard(name, mine + b" %d" % rounds)
    print(int(won), int(swapped), flush=True)
"""


def engine_at(root: Path, timeout: float = 60) -> FileEngine:
    return FileEngine(
        Remote(service="file", name=f"file://{root}", host="", path=str(root)), timeout=timeout
    )


@pytest.fixture
def lease(tmp_path: Path) -> str:
    return str(tmp_path / "lease")


def test_of_eight_processes_one_creates_a_lease_and_keeps_it(tmp_path: Path) -> None:
    racers = [
        start_process(
            [sys.executable, "-c", _RACER, str(tmp_path / "store"), f"racer{number}", "5"],
            cwd=_REPOSITORY,
        )
        for number in range(RACERS)
    ]
    assert {read_line(racer) for racer in racers} == {"ready"}
    for round_ in range(ROUNDS):
        engine = engine_at(tmp_path / "store")
        for racer in racers:
            write_line(racer, str(round_))
        answers = [read_line(racer) for racer in racers]
        winners = sum(answer.startswith("1") for answer in answers)
        # A racer that comes after the winner has released the lease creates the next one.
        assert winners >= 1, answers
        assert not any(answer.endswith("1") for answer in answers), "a swap of other content"
        assert engine.get(f"v1/leases/{round_}") is None
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.close()
        racer.stdin = None
        expect_success(racer)
    assert os.listdir(tmp_path / "store" / "v1" / "leases") == [], "no private file and no lock is left"


_CHANGE = """
import sys
from preheat.store.remote.file_engine import FileEngine
from preheat.store.remote.url import Remote

root, mine = sys.argv[1], sys.argv[2].encode()
engine = FileEngine(Remote(service="file", name="file://", host="", path=root), timeout=60)
print("ready", flush=True)
for line in iter(sys.stdin.readline, ""):
    name, verb = line.split()
    if verb == "create":
        done = engine.create(name, mine, seconds=60)
    elif verb == "swap":
        done = engine.swap(name, b"dead", mine, seconds=60)
    else:
        done = engine.discard(name, b"dead")
    print(int(done), flush=True)
"""


def test_exactly_one_of_eight_processes_changes_an_object(tmp_path: Path) -> None:
    root = str(tmp_path / "store")
    engine = engine_at(tmp_path / "store")
    racers = [
        start_process([sys.executable, "-c", _CHANGE, root, str(number)], cwd=_REPOSITORY)
        for number in range(RACERS)
    ]
    assert {read_line(racer) for racer in racers} == {"ready"}
    for number, verb in enumerate(["create", "swap", "discard"] * (ROUNDS // 2)):
        name = f"v1/leases/{number}"
        if verb != "create":
            engine.put(name, b"dead")
        for racer in racers:
            write_line(racer, f"{name} {verb}")
        won = [read_line(racer) for racer in racers]
        assert won.count("1") == 1, verb
        expected = None if verb == "discard" else str(won.index("1")).encode()
        assert engine.get(name) == expected


def test_a_link_whose_answer_was_lost_counts_as_made(
    lease: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client sends the request again, and the server says that the file exists."""
    link = os.link

    def lose_the_answer(*paths: Any) -> None:
        link(*paths)
        raise FileExistsError(errno.EEXIST, "File exists")

    monkeypatch.setattr(os, "link", lose_the_answer)
    assert create_by_link(lease, b"mine")
    assert file_content(lease) == b"mine"


@pytest.mark.parametrize("error", [errno.EEXIST, errno.ESTALE, errno.EIO], ids=errno.errorcode.get)
def test_a_link_that_was_not_made_does_not(
    error: int, lease: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "link", refuse)
    if error == errno.EEXIST:
        assert not create_by_link(lease, b"mine")
    else:
        with pytest.raises(OSError, match=os.strerror(error)):
            create_by_link(lease, b"mine")
    assert file_content(lease) is None


_HOLD = """
import sys, time
from preheat.store.remote.links import LinkLocks

with LinkLocks(timeout=60, abandoned=60).hold(sys.argv[1]):
    print("held", flush=True)
    time.sleep(600)
"""


def test_the_lock_of_a_killed_process_is_broken(lease: str) -> None:
    holder = start_process([sys.executable, "-c", _HOLD, lease], cwd=_REPOSITORY)
    assert read_line(holder) == "held"
    kill(holder)
    assert file_content(lease) is not None
    with LinkLocks(timeout=60, abandoned=0.2).hold(lease):
        assert file_content(lease) is not None
    assert file_content(lease) is None


def test_a_dead_lock_is_broken_by_several_calls(lease: str) -> None:
    """Each call waits for a shorter time than the age of an abandoned lock."""
    Path(lease).write_bytes(b"of a process that died")
    locks = LinkLocks(timeout=0.1, abandoned=0.35)
    failed = 0
    for _ in range(20):
        try:
            with locks.hold(lease):
                break
        except LockedError:
            failed += 1
    else:
        raise AssertionError("the lock was never broken")
    assert failed >= 2


def test_the_lock_of_a_living_process_is_kept_for_the_time_of_a_request(
    lease: str,
) -> None:
    """The holder is slow: the other one gives up first, and changes nothing."""
    with LinkLocks(timeout=1.0, abandoned=10.0).hold(lease) as require:
        with pytest.raises(LockedError), LinkLocks(timeout=0.6, abandoned=10.0).hold(lease):
            raise AssertionError("it is held")
        require()


def test_a_holder_that_was_stopped_changes_nothing(lease: str) -> None:
    with LinkLocks(timeout=1.0, abandoned=0.2).hold(lease) as require:
        require()
        time.sleep(0.11)
        with pytest.raises(LockedError, match="stopped"):
            require()


@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_something_else_in_the_place_of_a_lock_is_an_error(lease: str, kind: str) -> None:
    os.mkfifo(lease) if kind == "pipe" else os.symlink("/dev/zero", lease)
    with pytest.raises(OSError), LinkLocks(timeout=60, abandoned=60).hold(lease):  # noqa: PT011
        raise AssertionError("it is held")


def test_a_lock_that_is_held_again_and_again_is_not_broken(
    lease: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each holder has another token: nobody has died."""
    broken: list[bytes] = []
    monkeypatch.setattr(links, "_break", lambda _, content: broken.append(content))
    monkeypatch.setattr(time, "sleep", lambda _: Path(lease).write_bytes(os.urandom(8)))
    Path(lease).write_bytes(b"another")
    with pytest.raises(LockedError), LinkLocks(timeout=0.2, abandoned=0.05).hold(lease):
        raise AssertionError("it is held")
    assert broken == []


def test_a_process_that_lost_its_lock_does_not_remove_that_of_another(lease: str) -> None:
    with LinkLocks(timeout=1, abandoned=1).hold(lease):
        Path(lease).write_bytes(b"of another process, which broke the lock")
    assert file_content(lease) == b"of another process, which broke the lock"


def test_a_lock_that_changed_before_it_was_broken_is_put_back(lease: str) -> None:
    Path(lease).write_bytes(b"the next holder")
    links._break(lease, b"the dead holder")
    assert file_content(lease) == b"the next holder"
    links._break(lease, b"the next holder")
    assert file_content(lease) is None
    links._break(lease, b"the next holder")
    assert os.listdir(os.path.dirname(lease)) == ["home"]


def test_a_directory_has_conditions_where_it_has_links(tmp_path: Path) -> None:
    engine = engine_at(tmp_path / "store")
    assert probe_conditional(engine)
    assert engine.conditional


def test_without_links_conditions_are_best_effort(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As behind rclone and many other gateways to object stores."""

    def refuse(*_: Any) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    engine = engine_at(tmp_path / "store")
    assert engine.create("v1/leases/a", b"1", seconds=60)
    assert not engine.conditional
    assert not engine.create("v1/leases/a", b"2", seconds=60)
    assert not engine.swap("v1/leases/a", b"2", b"3", seconds=60)
    assert engine.swap("v1/leases/a", b"1", b"2", seconds=60)
    assert engine.discard("v1/leases/a", b"2")
    assert not probe_conditional(engine_at(tmp_path / "store"))
