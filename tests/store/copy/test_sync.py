"""Copies between stores: only what is missing, verified, merged and repeatable."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from preheat.ahead.stores import Choice, copy_entries, open_directory, open_store
from preheat.errors import InputError, PreheatError
from preheat.model.arch import Arch
from preheat.model.events import Events
from preheat.store import DiskStore, Store
from preheat.store.bundle import Bundle
from preheat.store.bundle import write as write_bundle
from preheat.store.copy import CopyResult
from preheat.store.remote import store as remote_store
from preheat.store.remote.engine import ObjectError, RemoteError
from preheat.store.remote.url import entry_name
from preheat.store.signing import entries as envelope
from preheat.store.signing.keys import Keyring, Keys, SigningKey
from tests.store.copy.support import artifact, code_of, directory, foreign, listing, remote, settings
from tests.store.remote.memory_engine import MemoryEngine

A, B, OTHER_ARCH = artifact("a.cu"), artifact("b.cu"), artifact("c.cu", "sm_100")
TRITON = foreign("softmax")
LIST, LISTED = listing("a.cu", "a.cu")
ALL = {each.digest: each.encode() for each in (A, B, OTHER_ARCH, TRITON)} | {LIST: LISTED}

Open = Callable[[str, bool], tuple[Store, Store]]


@pytest.fixture(params=["directory", "remote"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """Return each kind of store that keeps every entry, empty."""
    if request.param == "remote":
        return remote(MemoryEngine())
    return directory(tmp_path, "target", {}, write=True)


@pytest.fixture(params=["directory", "remote"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """Return each kind of store that has every entry."""
    if request.param == "directory":
        return directory(tmp_path, "source", ALL, write=False)
    engine = MemoryEngine()
    for digest, blob in ALL.items():
        engine.objects[entry_name(digest)] = envelope.wrap(digest, blob, None)
    engine.objects["v1/leases/" + A.digest] = b"a lease"
    engine.objects["something/else"] = b"of someone else"
    return remote(engine)


def counts(result: CopyResult) -> tuple[int, int, int, int]:
    return result.copied, result.present, result.merged, result.left_out


# What is copied


def test_everything_is_copied_once(source: Store, target: Store) -> None:
    first = copy_entries(source, target)
    assert counts(first) == (4, 0, 1, 0)
    assert first.bytes == sum(len(blob) for digest, blob in ALL.items() if digest != LIST)
    assert target.exists(ALL) == set(ALL)
    again = copy_entries(source, target)
    assert counts(again) == (0, 4, 0, 0)
    assert first.refused == again.refused == {}


def test_what_is_copied_is_what_was_there(tmp_path: Path) -> None:
    here = directory(tmp_path, "source", ALL, write=False)
    server = remote(MemoryEngine())
    there = directory(tmp_path, "target", {}, write=True)
    copy_entries(here, server)
    copy_entries(server, there)
    assert {digest: there.get(digest) for digest in there.names()} == ALL


def test_a_dry_run_writes_nothing(source: Store, target: Store) -> None:
    planned = copy_entries(source, target, dry_run=True)
    assert target.exists(ALL) == set()
    assert planned == copy_entries(source, target)


@pytest.mark.parametrize(
    ("choice", "copied"),
    [
        (Choice(frozenset({Arch.parse("sm_100")})), {OTHER_ARCH.digest}),
        (Choice(kind="triton"), {TRITON.digest}),
        (Choice(kind="cuda"), {A.digest, B.digest, OTHER_ARCH.digest, LIST}),
        (Choice(frozenset({Arch.parse("sm_90")}), "cuda"), {A.digest, B.digest, LIST}),
        (Choice(kind="numba"), set()),
    ],
)
def test_entries_can_be_selected(
    source: Store, target: Store, choice: Choice, copied: set[str]
) -> None:
    result = copy_entries(source, target, choice)
    assert target.exists(ALL) == copied
    assert result.copied == len(copied - {LIST})


def test_files_for_no_architecture_suit_all(tmp_path: Path) -> None:
    entry = foreign("tuning", None)
    here = directory(tmp_path, "source", {entry.digest: entry.encode()}, write=False)
    there = directory(tmp_path, "target", {}, write=True)
    assert copy_entries(here, there, Choice(frozenset({Arch.parse("sm_90")}))).copied == 1


def test_entries_that_exist_are_asked_for_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_store, "DIGESTS_PER_REQUEST", 50)
    many = {each.digest: each.encode() for each in (artifact(str(number)) for number in range(120))}
    engine = MemoryEngine()
    assert copy_entries(directory(tmp_path, "source", many, write=False), remote(engine)).copied == 120
    assert engine.calls["existing"] == 3
    again = copy_entries(directory(tmp_path, "source", {}, write=False), remote(engine))
    assert again.present == 120
    assert engine.calls["existing"] == 6
    assert engine.calls["write"] == 120
    assert engine.calls["read"] == 0


# Header lists


def test_header_lists_are_merged(target: Store, tmp_path: Path) -> None:
    digest, mine = listing("p.cu", "a.cu", "b.cu")
    _, theirs = listing("p.cu", "b.cu", "c.cu")
    codes = {each.digest: each.encode() for each in (A, B, OTHER_ARCH)}
    copy_entries(directory(tmp_path, "mine", {**codes, digest: mine}, write=False), target)
    other = directory(tmp_path, "theirs", {**codes, digest: theirs}, write=False)
    assert copy_entries(other, target).merged == 1
    merged = code_of(target.get(digest))
    assert sorted(merged) == sorted([A.digest, B.digest, OTHER_ARCH.digest])
    assert merged[-2:] == [A.digest, B.digest]  # Those of the target stay the newest.
    assert copy_entries(other, target).merged == 0


def test_a_state_without_its_code_is_not_copied(target: Store, tmp_path: Path) -> None:
    digest, blob = listing("p.cu", "a.cu", "gone.cu")
    entries = {A.digest: A.encode(), digest: blob}
    assert copy_entries(directory(tmp_path, "source", entries, write=False), target).merged == 1
    assert code_of(target.get(digest)) == [A.digest]


def test_code_of_the_target_counts(target: Store, tmp_path: Path) -> None:
    copy_entries(directory(tmp_path, "before", {B.digest: B.encode()}, write=False), target)
    digest, blob = listing("p.cu", "b.cu")
    assert copy_entries(directory(tmp_path, "source", {digest: blob}, write=False), target).merged == 1
    assert code_of(target.get(digest)) == [B.digest]


def test_a_list_is_written_after_its_code() -> None:
    engine, written = MemoryEngine(), list[str]()
    engine.before = lambda verb, name: written.append(name) if verb == "write" else None
    source = MemoryEngine()
    for digest, blob in ALL.items():
        source.objects[entry_name(digest)] = envelope.wrap(digest, blob, None)
    copy_entries(remote(source), remote(engine))
    assert written[-1] == entry_name(LIST)


def test_a_damaged_list_of_the_target_is_replaced(tmp_path: Path) -> None:
    there = directory(tmp_path, "target", ALL, write=True)
    path = next((tmp_path / "target").rglob(f"{LIST}.heat"))
    path.write_bytes(LISTED[:-1])
    assert copy_entries(directory(tmp_path, "source", ALL, write=False), there).merged == 1
    assert there.get(LIST) == LISTED


# What is refused


def test_damaged_entries_are_counted_and_the_others_copied(tmp_path: Path, target: Store) -> None:
    here = directory(tmp_path, "source", ALL, write=False)
    path = next((tmp_path / "source").rglob(f"{B.digest}.heat"))
    blob = bytearray(path.read_bytes())
    blob[-20] ^= 1
    path.write_bytes(blob)
    result = copy_entries(here, target)
    assert {digest: row.what for digest, row in result.refused.items()} == {B.digest: "damaged"}
    assert result.refused[B.digest].reason == "checksum mismatch"
    assert target.exists(ALL) == set(ALL) - {B.digest}
    assert path.read_bytes() == bytes(blob)  # The source is only read.


def test_an_entry_that_others_can_write_is_not_trusted(tmp_path: Path, target: Store) -> None:
    here = directory(tmp_path, "source", ALL, write=False)
    os.chmod(next((tmp_path / "source").rglob(f"{A.digest}.heat")), 0o666)
    result = copy_entries(here, target)
    assert result.refused[A.digest].what == "untrusted"
    assert A.digest not in target.exists(ALL)
    assert result.merged == 0  # Its list would lead nowhere.


def test_content_that_is_no_entry_is_damaged(tmp_path: Path, target: Store) -> None:
    from preheat.model import codec

    blob = codec.pack(A.digest, {"kind": "artifact", "label": 7}, {})
    result = copy_entries(directory(tmp_path, "source", {A.digest: blob}, write=False), target)
    assert result.refused[A.digest].what == "damaged"
    assert target.exists({A.digest}) == set()


def test_only_signed_entries_of_a_server_are_copied(tmp_path: Path) -> None:
    mine, stranger = SigningKey.new(), SigningKey.new()
    trusted = Keys(Keyring((mine.public,)), mine)
    engine = MemoryEngine()
    signers = {A: mine, B: stranger, OTHER_ARCH: None}
    for entry, key in signers.items():
        blob = envelope.wrap(entry.digest, entry.encode(), key)
        engine.objects[entry_name(entry.digest)] = blob
    replayed = engine.objects[entry_name(A.digest)]
    engine.objects[entry_name(TRITON.digest)] = replayed
    there = directory(tmp_path, "target", {}, write=True)
    result = copy_entries(remote(engine, trusted), there)
    assert set(there.names()) == {A.digest}
    assert set(result.refused) == {B.digest, OTHER_ARCH.digest, TRITON.digest}
    assert {row.what for row in result.refused.values()} == {"untrusted"}


def test_entries_are_signed_for_a_server(tmp_path: Path) -> None:
    key = SigningKey.new()
    engine = MemoryEngine()
    copy_entries(directory(tmp_path, "source", ALL, write=False), remote(engine, Keys(None, key)))
    for digest, blob in ALL.items():
        assert (
            envelope.unwrap(digest, engine.objects[entry_name(digest)], Keyring((key.public,))) == blob
        )


# Faults


class Blob(bytes):
    """Bytes of an entry. `alive` counts those that are in memory."""

    alive = 0

    def __init__(self, _: bytes) -> None:
        Blob.alive += 1

    def __del__(self) -> None:
        Blob.alive -= 1


def test_a_copy_does_not_keep_entries_in_memory(tmp_path: Path) -> None:
    entries = {each.digest: each.encode() for each in map(artifact, map("{}.cu".format, range(200)))}
    here = directory(tmp_path, "source", entries, write=False)
    read, most = here.get, 0

    def counted(digest: str) -> bytes | None:
        nonlocal most
        most = max(most, Blob.alive)
        return Blob(read(digest) or b"")

    here.get = counted  # type: ignore[assignment, method-assign]
    assert copy_entries(here, directory(tmp_path, "target", {}, write=True)).copied == 200
    assert most <= 40
    assert Blob.alive == 0


def test_an_entry_that_a_server_does_not_accept_is_counted_and_the_others_are_copied(
    tmp_path: Path,
) -> None:
    engine = MemoryEngine()

    def before(verb: str, name: str) -> None:
        if verb == "write" and name in (entry_name(B.digest), entry_name(LIST)):
            raise ObjectError("memory://test: the object is too large")

    engine.before = before
    result = copy_entries(directory(tmp_path, "source", ALL, write=False), remote(engine))
    assert counts(result) == (3, 0, 0, 0)
    assert set(result.refused) == {B.digest, LIST}
    assert {row.what for row in result.refused.values()} == {"not written"}
    engine.before = None
    again = copy_entries(directory(tmp_path, "source", ALL, write=False), remote(engine))
    assert counts(again) == (1, 3, 1, 0)


def test_a_server_that_fails_ends_the_copy_and_a_repetition_continues(tmp_path: Path) -> None:
    engine = MemoryEngine()
    writes = threading.Semaphore(2)

    def before(verb: str, name: str) -> None:
        del name
        if verb == "write" and not writes.acquire(blocking=False):
            raise RemoteError("the disk is full")

    engine.before = before
    here = directory(tmp_path, "source", ALL, write=False)
    with pytest.raises(PreheatError, match=r"memory://test|remote.*ended.*the disk is full") as ended:
        copy_entries(here, remote(engine))
    assert ended.value.hint == "repeat the command: it copies what is missing"
    assert len(engine.objects) == 2
    engine.before = None
    assert copy_entries(here, remote(engine)).copied == 2
    assert {entry_name(digest) for digest in ALL} == set(engine.objects)


def test_a_request_that_fails_once_is_repeated(tmp_path: Path) -> None:
    engine = MemoryEngine()
    failures = threading.Semaphore(1)

    def before(verb: str, name: str) -> None:
        del verb, name
        if failures.acquire(blocking=False):
            raise RemoteError("the connection was reset", retryable=True)

    engine.before = before
    assert copy_entries(directory(tmp_path, "source", ALL, write=False), remote(engine)).copied == 4


def test_an_entry_that_is_evicted_meanwhile_is_no_fault(tmp_path: Path, target: Store) -> None:
    here = directory(tmp_path, "source", ALL, write=False)
    listed = list(here.names())
    next((tmp_path / "source").rglob(f"{B.digest}.heat")).unlink()
    here.names = lambda: iter(listed)  # type: ignore[method-assign]
    assert copy_entries(here, target).copied == 3


@pytest.mark.parametrize("write", [False, True])
def test_a_directory_that_cannot_be_used_is_an_error(tmp_path: Path, write: bool) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(InputError, match="cannot be used"):
        open_directory(tmp_path / "file", settings(tmp_path), write=write)


# Bundles


def test_a_bundle_takes_the_files_of_other_libraries(tmp_path: Path) -> None:
    here = directory(tmp_path, "source", ALL, write=False)
    output = tmp_path / "kernels.heat"
    for other in (foreign("first"), foreign("second", "sm_100")):
        target = open_store(str(output), settings(tmp_path), write=True)
        before = directory(tmp_path, f"of {other.key}", {other.digest: other.encode()}, write=False)
        assert copy_entries(before, target).copied == 1
        target.close()
    target = open_store(str(output), settings(tmp_path), write=True)
    result = copy_entries(here, target)
    target.close()
    assert (result.copied, result.merged) == (1, 0)
    assert list(result.skipped.values()) == [3]
    with Bundle.open(output) as bundle:
        assert len(bundle) == 3
        assert bundle.meta["archs"] == ["sm_90", "sm_100"]
        assert bundle.verify() == {}


def test_nothing_to_add_leaves_a_bundle_as_it_is(tmp_path: Path) -> None:
    output = tmp_path / "kernels.heat"
    write_bundle(output, {}, {"format": "preheat bundle", "toolchains": [], "archs": [], "graphs": []})
    before = output.stat()
    target = open_store(str(output), settings(tmp_path), write=True)
    copy_entries(directory(tmp_path, "source", {A.digest: A.encode()}, write=False), target)
    target.close()
    assert output.stat() == before


def test_limits_hold_in_the_target(tmp_path: Path) -> None:
    many = {each.digest: each.encode() for each in (artifact(str(number)) for number in range(40))}
    here = directory(tmp_path, "source", many, write=False)
    config = settings(tmp_path, PREHEAT_CACHE_FILES="20")
    copy_entries(here, open_directory(tmp_path / "target", config, write=True))
    disk = DiskStore(tmp_path / "target", Events(), lock_dir=config.lock_dir)
    assert len(list(disk.items())) <= 20
