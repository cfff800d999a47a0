"""What is special about a directory: it fills up, it is not mounted, and names are paths."""

from __future__ import annotations

import os
import resource
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest

from preheat.store.publish import replace
from preheat.store.remote import file_engine
from preheat.store.remote.checks import list_objects, verify
from preheat.store.remote.engine import LEASE_BYTES, Engine, ObjectError
from preheat.store.remote.file_engine import FileEngine
from preheat.store.remote.url import Remote, entry_name
from tests.processes import run_in_fork
from tests.store.remote.faults import LARGE, NAME, fault
from tests.store.remote.stores import Store
from tests.store.support import as_nobody, needs_root


def test_a_file_system_that_is_full_leaves_nothing(open_store: Callable[[str], Store]) -> None:
    """A limit on the size of files stands in for a full disk."""
    store = open_store("file")
    store.open().put(NAME, b"old")

    def write_too_much() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
        engine = store.open()
        assert "File too large" in str(fault(lambda: engine.put(NAME, LARGE)))
        assert "File too large" in str(fault(lambda: engine.create("v1/ab/new", LARGE, seconds=60)))

    run_in_fork(write_too_much)
    assert store.open().get(NAME) == b"old"
    assert list(Path(store.url().removeprefix("file://")).rglob("*.staged")) == []
    assert list(store.open().names()) == [NAME]


def test_a_directory_that_is_not_mounted_is_not_created(
    tmp_path: Path, open_url: Callable[[str], Engine]
) -> None:
    engine = open_url(f"file://{tmp_path}/mount/store")
    assert engine.get(NAME) is None
    assert "No such file" in str(fault(lambda: engine.put(NAME, b"content")))
    assert not (tmp_path / "mount").exists()


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "v1/../../x", "v1//x", "v1/x\n", ""])
def test_a_name_cannot_lead_out_of_a_directory(
    tmp_path: Path, open_url: Callable[[str], Engine], name: str
) -> None:
    engine = open_url(f"file://{tmp_path}/store")
    assert "not a name" in str(fault(lambda: engine.put(name, b"content")))
    assert [path.name for path in tmp_path.rglob("*")] == ["home"]  # that of every test


def private_engine(root: Path) -> FileEngine:
    remote = Remote(service="file", name=f"file://{root}", host="", path=str(root))
    return FileEngine(remote, timeout=60, private=True)


def test_a_private_store_creates_what_only_this_user_can_use(tmp_path: Path) -> None:
    root = tmp_path / "store"
    umask = os.umask(0)
    try:
        engine = private_engine(root)
        engine.put(NAME, b"content")
        assert engine.create("v1/leases/name", b"token", seconds=60)
        assert engine.swap("v1/leases/name", b"token", b"next", seconds=60)
    finally:
        os.umask(umask)
    modes = {str(path.relative_to(root)): path.stat().st_mode & 0o777 for path in root.rglob("*")}
    folders = {"v1": 0o700, "v1/ab": 0o700, "v1/leases": 0o700}
    assert modes == folders | {NAME: 0o600, "v1/leases/name": 0o600}
    assert engine.get(NAME) == b"content"


@pytest.mark.parametrize("changed", ["v1", "v1/ab", NAME])
def test_a_private_store_reads_nothing_that_others_can_write(tmp_path: Path, changed: str) -> None:
    engine = private_engine(tmp_path / "store")
    engine.put(NAME, b"content")
    os.chmod(tmp_path / "store" / changed, 0o770)
    error = fault(lambda: private_engine(tmp_path / "store").get(NAME))
    assert "others can write to it" in str(error)
    assert isinstance(error, ObjectError)


def test_a_link_in_the_place_of_an_object_is_not_followed(tmp_path: Path) -> None:
    engine = private_engine(tmp_path / "store")
    engine.put(NAME, b"content")
    (tmp_path / "other").write_bytes(b"other")
    (tmp_path / "store" / NAME).unlink()
    (tmp_path / "store" / NAME).symlink_to(tmp_path / "other")
    assert isinstance(fault(lambda: engine.get(NAME)), ObjectError)


def put_something_else(path: Path, kind: str) -> None:
    """Put something that is not the file of an object in its place."""
    match kind:
        case "directory":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "socket":
            # The path may be too long for the address of a socket.
            os.mknod(path, stat.S_IFSOCK | 0o600)
        case "link":
            path.symlink_to("/dev/zero")
        case _:
            path.write_bytes(bytes(LEASE_BYTES + 1))


@pytest.mark.parametrize("kind", ["directory", "pipe", "socket"])
def test_something_else_in_the_place_of_an_object_concerns_that_object(
    open_store: Callable[[str], Store], kind: str
) -> None:
    store = open_store("file")
    name = entry_name("ab" * 32)
    path = Path(store.url().removeprefix("file://")) / name
    path.parent.mkdir(parents=True)
    put_something_else(path, kind)
    assert isinstance(fault(lambda: store.open().get(name)), ObjectError)
    assert list(store.open().names()) == [name]
    (verified,) = verify(store.open().get, [name], None)
    assert verified.verdict == "foreign"
    assert verified.reason


@pytest.mark.parametrize("kind", ["directory", "pipe", "socket", "link", "large file"])
@pytest.mark.parametrize("private", [False, True])
def test_something_else_in_the_place_of_a_lease_is_refused_at_once(
    tmp_path: Path, kind: str, private: bool
) -> None:
    remote = Remote(service="file", name="file://store", host="", path=str(tmp_path / "store"))
    engine = FileEngine(remote, timeout=60, private=private)
    engine.create("v1/leases/name", b"token", seconds=60)
    path = tmp_path / "store/v1/leases/name"
    path.unlink()
    put_something_else(path, kind)
    for call in (
        lambda: engine.swap("v1/leases/name", b"token", b"next", seconds=60),
        lambda: engine.discard("v1/leases/name", b"token"),
        lambda: engine.get("v1/leases/name", limit=LEASE_BYTES),
    ):
        assert isinstance(fault(call), ObjectError)
    assert not engine.create("v1/leases/name", b"other", seconds=60)
    assert os.listdir(path.parent) == ["name"]


def test_a_lease_is_changed_without_waiting_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = private_engine(tmp_path / "store")

    def fsync(_: int) -> None:
        raise AssertionError("the lock of the lease may be held")

    monkeypatch.setattr(os, "fsync", fsync)
    assert engine.create("v1/leases/name", b"token", seconds=60)
    assert engine.swap("v1/leases/name", b"token", b"next", seconds=60)
    assert engine.discard("v1/leases/name", b"next")


def test_nothing_is_written_while_the_lock_of_a_lease_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = private_engine(tmp_path / "store")
    engine.create("v1/leases/name", b"token", seconds=60)
    hold = engine._locks.hold

    @contextmanager
    def refuse_writes(path: str) -> Iterator[Callable[[], None]]:
        with hold(path) as require, monkeypatch.context() as patch:
            patch.setattr(os, "write", None)
            yield require

    monkeypatch.setattr(engine._locks, "hold", refuse_writes)
    assert engine.swap("v1/leases/name", b"token", b"next", seconds=60)
    assert engine.get("v1/leases/name") == b"next"


@needs_root
def test_an_object_that_another_user_does_not_share_concerns_that_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.chmod(tmp_path, 0o755)
    monkeypatch.chdir(tmp_path)  # Other users cannot search the directories above it.
    remote = Remote(service="file", name="file://store", host="", path="store")
    engine = FileEngine(remote, timeout=60)
    engine.put(NAME, b"content")
    os.chmod(tmp_path / "store" / NAME, 0o600)
    with as_nobody():
        assert isinstance(fault(lambda: engine.get(NAME)), ObjectError)
        os_error = fault(lambda: engine.put("v1/ab/other", b"content"))
        assert not isinstance(os_error, ObjectError)  # The whole store cannot be written.
    os.chmod(tmp_path / "store", 0o700)
    with as_nobody():
        assert not isinstance(fault(lambda: engine.get(NAME)), ObjectError)


def test_staged_files_of_writers_that_were_killed_are_removed(
    open_store: Callable[[str], Store],
) -> None:
    store = open_store("file")
    store.open().put(NAME, b"content")
    folder = Path(store.url().removeprefix("file://")) / "v1/ab"
    for age in (0, 7200):
        staged = folder / f".preheat-1-{age}.staged"
        staged.write_bytes(b"half")
        os.utime(staged, (time.time() - age,) * 2)
    store.open().put("v1/ab/other", b"content")
    assert {path.name for path in folder.iterdir()} == {"name", "other", ".preheat-1-0.staged"}
    assert sorted(store.open().names()) == [NAME, "v1/ab/other"]


def test_staged_files_are_compared_with_the_clock_of_the_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = private_engine(tmp_path / "store")
    engine.put(NAME, b"content")
    staged = tmp_path / "store/v1/ab/.preheat-1-0.staged"
    staged.write_bytes(b"half, by a node whose clock is right")
    ahead = time.time() + 7200
    monkeypatch.setattr(time, "time", lambda: ahead)
    private_engine(tmp_path / "store").put(NAME, b"content")
    assert staged.exists()


def test_a_lock_that_others_take_in_turn_ends_the_call_in_time(
    open_store: Callable[[str], Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_engine, "_ABANDONED", 0.5)
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


def root_of(store: Store) -> Path:
    return Path(store.url().removeprefix("file://"))


@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("removed", ["v1/ab", "v1", "."])
def test_a_folder_that_was_removed_is_created_again(
    tmp_path: Path, private: bool, removed: str
) -> None:
    root = tmp_path / "store"
    remote = Remote(service="file", name=f"file://{root}", host="", path=str(root))
    engine = FileEngine(remote, timeout=60, private=private)
    for call in (
        lambda: engine.put(NAME, b"content"),
        lambda: engine.create(NAME, b"content", seconds=60),
    ):
        engine.put(NAME, b"first")
        shutil.rmtree(root / removed)
        call()
        assert engine.get(NAME) == b"content"


def test_folders_of_private_files_are_private_when_they_are_created_again(tmp_path: Path) -> None:
    """Leases of a shared cache directory are such files. A folder that others can write is refused."""
    root = tmp_path / "cache"
    remote = Remote(service="file", name=f"file://{root}", host="", path=str(root))
    engine = FileEngine(remote, timeout=60, mode=0o600)
    umask = os.umask(0)
    try:
        for name in ("v1/leases/1", "v1/leases/2"):
            assert engine.create(name, b"token", seconds=60)
            assert [path.stat().st_mode & 0o777 for path in (root, root / "v1/leases")] == [0o700] * 2
            shutil.rmtree(root)
    finally:
        os.umask(umask)


@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("linked", ["v1", "v1/ab"])
@pytest.mark.parametrize("known", [False, True])
def test_a_link_in_the_place_of_a_folder_is_not_followed(
    tmp_path: Path, private: bool, linked: str, known: bool
) -> None:
    root, outside = tmp_path / "store", tmp_path / "outside"
    remote = Remote(service="file", name=f"file://{root}", host="", path=str(root))
    engine = FileEngine(remote, timeout=60, private=private)
    engine.put(NAME, b"content")
    os.rename(root / linked, outside)
    (root / linked).symlink_to(outside)
    if not known or private:  # Nobody else can exchange the folder of a private store.
        engine = FileEngine(remote, timeout=60, private=private)
    before = {path: path.is_file() and path.read_bytes() for path in outside.rglob("*")}
    for call in (
        lambda: engine.get(NAME),
        lambda: engine.put(NAME, b"new"),
        lambda: engine.put("v1/ab/other", b"new"),
        lambda: engine.remove(NAME),
        lambda: engine.create("v1/ab/other", b"new", seconds=60),
        lambda: engine.swap(NAME, b"content", b"new", seconds=60),
        lambda: engine.discard(NAME, b"content"),
    ):
        error = fault(call)
        assert "is a link or a file, and not a folder" in str(error)
        assert isinstance(error, ObjectError) == (linked == "v1/ab")  # There are other such folders.
    assert {path: path.is_file() and path.read_bytes() for path in outside.rglob("*")} == before
    engine.put("v2/cd/name", b"content")
    assert engine.get("v2/cd/name") == b"content"


def test_the_root_of_a_store_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir(mode=0o700)
    (tmp_path / "store").symlink_to(tmp_path / "disk")
    engine = private_engine(tmp_path / "store")
    engine.put(NAME, b"content")
    assert engine.get(NAME) == b"content"
    assert list(engine.names()) == [NAME]


def test_a_private_store_checks_a_root_that_was_created_later(tmp_path: Path) -> None:
    engine = private_engine(tmp_path / "store")
    assert engine.get(NAME) is None
    (tmp_path / "store").mkdir()
    os.chmod(tmp_path / "store", 0o777)
    for call in (lambda: engine.get(NAME), lambda: engine.put(NAME, b"content")):
        error = fault(call)
        assert "others can write to it" in str(error)
        assert not isinstance(error, ObjectError)


def test_a_foreign_folder_is_one_name(open_store: Callable[[str], Store]) -> None:
    store = open_store("file")
    store.open().put(NAME, b"content")
    (root_of(store) / "lost+found" / "inside").mkdir(parents=True)
    assert sorted(store.open().names()) == ["lost+found", NAME]
    names = list_objects(store.open())
    found = {each.name: each.verdict for each in verify(store.open().get, names, None)}
    assert found == {"lost+found": "foreign", NAME: "foreign"}


@needs_root
def test_a_foreign_folder_that_cannot_be_read_is_one_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.chmod(tmp_path, 0o755)
    monkeypatch.chdir(tmp_path)
    engine = FileEngine(Remote(service="file", name="file://store", host="", path="store"), timeout=60)
    engine.put(NAME, b"content")
    engine.put("other/a/b", b"content")
    os.chmod(tmp_path / "store" / "other", 0o700)
    with as_nobody():
        assert sorted(engine.names()) == ["other", NAME]
    os.chmod(tmp_path / "store" / "v1", 0o700)
    with as_nobody():
        assert "Permission denied" in str(fault(lambda: list(engine.names())))
