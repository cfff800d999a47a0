"""What is special about a directory: it fills up, it is not mounted, and names are paths."""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from preheat.cache.publish import replace
from preheat.cache.remote.engine import Engine
from tests.processes import run_in_fork
from tests.remote.faults import LARGE, NAME, fault
from tests.remote.stores import Store


def test_a_file_system_that_is_full_leaves_nothing(open_store: Callable[[str], Store]) -> None:
    """A limit on the size of files stands in for a full disk."""
    store = open_store("file")
    store.open().write(NAME, b"old")

    def write_too_much() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
        engine = store.open()
        assert "File too large" in str(fault(lambda: engine.write(NAME, LARGE)))
        assert "File too large" in str(fault(lambda: engine.create("v1/ab/new", LARGE, seconds=60)))

    run_in_fork(write_too_much)
    assert store.open().read(NAME) == b"old"
    assert list(Path(store.url().removeprefix("file://")).rglob("*.staged")) == []
    assert list(store.open().names()) == [NAME]


def test_a_directory_that_is_not_mounted_is_not_created(
    tmp_path: Path, open_url: Callable[[str], Engine]
) -> None:
    engine = open_url(f"file://{tmp_path}/mount/store")
    assert engine.read(NAME) is None
    assert "No such file" in str(fault(lambda: engine.write(NAME, b"content")))
    assert not (tmp_path / "mount").exists()


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "v1/../../x", "v1//x", "v1/x\n", ""])
def test_a_name_cannot_lead_out_of_a_directory(
    tmp_path: Path, open_url: Callable[[str], Engine], name: str
) -> None:
    engine = open_url(f"file://{tmp_path}/store")
    assert "not a name" in str(fault(lambda: engine.write(name, b"content")))
    assert [path.name for path in tmp_path.rglob("*")] == ["home"]  # that of every test


def test_staged_files_of_writers_that_were_killed_are_removed(
    open_store: Callable[[str], Store],
) -> None:
    store = open_store("file")
    store.open().write(NAME, b"content")
    folder = Path(store.url().removeprefix("file://")) / "v1/ab"
    for age in (0, 7200):
        staged = folder / f".preheat-1-{age}.staged"
        staged.write_bytes(b"half")
        os.utime(staged, (time.time() - age,) * 2)
    store.open().write("v1/ab/other", b"content")
    assert {path.name for path in folder.iterdir()} == {"name", "other", ".preheat-1-0.staged"}
    assert sorted(store.open().names()) == [NAME, "v1/ab/other"]


def test_a_lock_that_others_take_in_turn_ends_the_call_in_time(
    open_store: Callable[[str], Store],
) -> None:
    store = open_store("file")
    store.open().create(NAME, b"old", seconds=60)
    folder, name = os.path.split(NAME)
    lock = Path(store.url().removeprefix("file://")) / folder / f".preheat-lock-{name}"
    lock.touch()  # A lock that nobody changes counts as abandoned, so its holders change.
    stop = threading.Event()

    def hold() -> None:
        for number in count():
            if stop.wait(0.001):
                return
            replace(str(lock), [b"holder %d" % number], durable=False)

    holders = threading.Thread(target=hold)
    holders.start()
    try:
        engine = store.open(timeout=1.0)
        fault(lambda: engine.swap(NAME, b"old", b"new", seconds=60))
    finally:
        stop.set()
        holders.join()
    assert store.open().swap(NAME, b"old", b"new", seconds=60)
