"""Content hashes of files, and when an unchanged stamp proves unchanged content."""

from __future__ import annotations

import os
import struct
import time
from pathlib import Path
from typing import Any

import pytest

from preheat import native
from preheat.toolchain.headers.evidence import Evidence, FileHasher, Memo


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 1e9

    def __call__(self) -> float:
        return self.now


@pytest.fixture(params=["native", "python"], autouse=True)
def core(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares stamps in the native core and in Python."""
    if request.param == "python":
        monkeypatch.setattr(native, "core", None)
    elif native.core is None:
        pytest.skip(native.reason)


@pytest.fixture
def header(tmp_path: Path) -> Path:
    path = tmp_path / "old.h"
    path.write_text("old")
    return path


def look(memo: Memo, path: Path) -> Evidence:
    return FileHasher(memo).evidence(str(path))


def settled(path: Path) -> Memo:
    """Return a memo that trusts the stamp of `path`."""
    clock = Clock()
    memo = Memo(clock=clock)
    look(memo, path)
    clock.now += 2
    look(memo, path)
    return memo


def test_a_hash_is_believed_while_the_stamp_stays(
    header: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memo = settled(header)
    found = look(memo, header)
    assert memo.changed
    monkeypatch.setattr("os.open", lambda *_, **__: pytest.fail("the file was read again"))
    assert look(memo, header) == found
    assert look(Memo(memo.note()), header) == found


@pytest.mark.parametrize("seconds", [0.0, 1.9, -5.0])
def test_a_stamp_is_not_believed_before_the_clock_has_moved_on(
    header: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    clock = Clock()
    memo = Memo(clock=clock)
    look(memo, header)
    clock.now += seconds
    look(memo, header)
    reads: list[object] = []
    opened = os.open

    def counted(*given: Any, **more: Any) -> int:
        reads.append(given)
        return opened(*given, **more)

    monkeypatch.setattr("os.open", counted)
    look(memo, header)
    assert len(reads) == 1


@pytest.mark.parametrize("days", [-1, 1, 10_000])
def test_it_does_not_matter_what_a_file_is_dated(header: Path, days: int) -> None:
    when = time.time() + days * 86400
    os.utime(header, (when, when))
    assert settled(header).known(str(header), look(Memo(), header).stamp)


def test_a_stamp_that_changed_is_not_believed(header: Path) -> None:
    memo = settled(header)
    first = look(memo, header)
    header.write_text("new")
    assert look(memo, header).digest != first.digest


def test_a_stamp_whose_time_was_put_back_is_not_believed(header: Path) -> None:
    memo = settled(header)
    before = header.stat()
    first = look(memo, header)
    while header.stat().st_ctime_ns == before.st_ctime_ns:  # file systems stamp by the tick
        header.write_text("new")
    os.utime(header, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert header.stat().st_size == before.st_size
    assert look(memo, header).digest != first.digest


def proves(memo: Memo, path: Path, digest: str) -> bool:
    return FileHasher(memo).proves([(str(path), str(path.parent), digest)])


def test_stamps_prove_hashes_without_a_read(header: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memo = settled(header)
    digest = look(memo, header).digest
    monkeypatch.setattr("os.open", lambda *_, **__: pytest.fail("the file was read"))
    assert proves(memo, header, digest)
    assert not proves(memo, header, "0" * 64)
    assert not proves(Memo(), header, digest)
    monkeypatch.setattr("preheat.toolchain.headers.evidence._mount", lambda _: 7)
    assert not proves(memo, header, digest)


def test_stamps_that_are_new_prove_nothing(header: Path) -> None:
    memo = Memo(clock=Clock())
    assert not proves(memo, header, look(memo, header).digest)


@pytest.mark.parametrize("change", ["write", "touch", "chmod", "replace", "remove"])
def test_stamps_prove_nothing_after_a_change(header: Path, change: str) -> None:
    memo = settled(header)
    digest = look(memo, header).digest
    before = header.stat()
    while header.stat().st_ctime_ns == before.st_ctime_ns:  # file systems stamp by the tick
        if change == "write":
            header.write_text("new")
        elif change == "touch":
            os.utime(header)
        elif change == "chmod":
            header.chmod(0o600)
            header.chmod(0o644)
        elif change == "replace":
            other = header.with_suffix(".new")
            other.write_text("old")
            os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
            other.replace(header)
        else:
            header.unlink()
            break
    assert not proves(memo, header, digest)


def test_what_proves_a_list_of_files_is_renewed_with_their_hashes(header: Path) -> None:
    clock = Clock()
    memo = Memo(clock=clock)
    files = [(str(header), str(header.parent), look(memo, header).digest)]
    assert not FileHasher(memo).proves(files)  # The stamp is too new.
    clock.now += 2
    look(memo, header)
    assert FileHasher(memo).proves(files)
    before = header.stat().st_ctime_ns
    while header.stat().st_ctime_ns == before:
        os.utime(header)
    assert not FileHasher(memo).proves(files)
    for _ in range(2):
        look(memo, header)
        clock.now += 2
    assert FileHasher(memo).proves(files)  # The stamp is another one, and the content is the same.


def test_files_of_one_directory_that_were_hashed_in_two_mounts_prove_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memo = Memo(clock=(clock := Clock()))
    files = []
    for mount, name in enumerate(("a.h", "b.h")):
        path = tmp_path / name
        path.write_text(name)
        monkeypatch.setattr("preheat.toolchain.headers.evidence._mount", lambda _, mount=mount: mount)
        for _ in range(2):
            digest = look(memo, path).digest
            clock.now += 2
        files.append((str(path), str(tmp_path), digest))
    assert FileHasher(memo).proves(files[1:])
    assert not FileHasher(memo).proves(files)


def test_another_mount_or_boot_voids_every_stamp(header: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memo = settled(header)
    stamp = look(memo, header).stamp
    assert Memo(memo.note()).known(str(header), stamp)
    with monkeypatch.context() as patch:
        patch.setattr("preheat.toolchain.headers.evidence._mount", lambda _: 7)
        assert look(memo, header).stamp != stamp
    note = memo.note()
    monkeypatch.setattr("preheat.toolchain.headers.evidence._boots", ["another"])
    assert Memo(note).known(str(header), stamp) is None


def test_on_a_mount_without_identity_files_are_read_every_time(
    header: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("preheat.toolchain.headers.evidence._mount", lambda _: -1)
    memo = settled(header)
    assert not memo.changed


def test_a_kernel_that_cannot_distinguish_mounts_counts_on_its_own_time_stamps(
    header: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("preheat.toolchain.headers.evidence._unique_mount", lambda _: None)
    assert settled(header).changed


def test_a_pipe_is_no_header(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.h")
    with pytest.raises(OSError, match="not a regular file"):
        look(Memo(), tmp_path / "pipe.h")


@pytest.mark.parametrize(
    "note", [b"", b"{", b"[]", b"7", b'["", {"a": 1}]', b'["", {"a": [1, 2, 3]}]', b"\xff"]
)
def test_a_damaged_note_is_an_empty_one(
    header: Path, note: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("preheat.toolchain.headers.evidence._boots", [""])
    assert look(Memo(note), header) == look(Memo(), header)


def test_a_file_that_was_removed_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        look(Memo(), tmp_path / "gone.h")


# The native core


@pytest.mark.skipif(native.core is None, reason="the native core is not built")
@pytest.mark.parametrize("core", ["native"], indirect=True)
def test_the_native_core_returns_the_stamps_of_files_in_order(tmp_path: Path) -> None:
    files = [tmp_path / "a.h", tmp_path / os.fsdecode(b"\xc3\xa9\xff.h"), tmp_path]
    files[0].write_text("one")
    files[1].write_text("other")
    os.utime(files[1], ns=(-5_000_000_001, -5_000_000_001))  # before 1970
    stamps = native.core.file_times(b"".join(os.fsencode(file) + b"\0" for file in files))
    status = [file.stat() for file in files]
    assert list(struct.iter_unpack("=qqqQQ", stamps)) == [
        (each.st_size, each.st_mtime_ns, each.st_ctime_ns, each.st_ino, each.st_dev) for each in status
    ]
    assert native.core.file_times(b"") == b""


@pytest.mark.skipif(native.core is None, reason="the native core is not built")
@pytest.mark.parametrize("core", ["native"], indirect=True)
def test_the_native_core_raises_for_a_file_that_is_gone_and_for_other_values(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        native.core.file_times(os.fsencode(tmp_path) + b"\0/absent\0")
    with pytest.raises(TypeError, match="paths are bytes"):
        native.core.file_times(str(tmp_path))


def test_a_note_with_numbers_that_no_file_has_proves_nothing(header: Path) -> None:
    FileHasher(memo := Memo()).evidence(str(header))
    row = memo.rows[str(header)]
    memo.rows[str(header)] = row._replace(stamp=(1 << 70, *row.stamp[1:]), settled=True)
    assert not FileHasher(memo).proves([(str(header), str(header.parent), row.digest)])
