"""Bundles: a valid file is opened, and an invalid file is refused with the reason."""

from __future__ import annotations

import gc
import json
import os
import pickle
import struct
import threading
import tracemalloc
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st

from preheat.errors import BundleError
from preheat.model.codec import DamagedEntryError
from preheat.store import bundle
from preheat.store.bundle import Bundle, write
from tests.store.entries import blob_of, content, digest_of
from tests.store.support import as_nobody, finish, needs_root, start, tmpfs

HEAD = struct.Struct("<8sHII")
RECORD = struct.Struct("<32sQ")
META = {"format": "test", "größe": [1, 2]}
SMALL = {digest_of(number): blob_of(number, 10 * number) for number in range(4)}
ENDS = list(accumulate(len(blob) for _, blob in sorted(SMALL.items())))

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=5), v, max_size=3),
)
metas = st.dictionaries(st.text(max_size=5), values, max_size=4)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    directory = tmp_path / "bundles"
    directory.mkdir()
    return directory / "kernels.heat"


@pytest.fixture
def small(path: Path) -> Bundle:
    write(path, SMALL, META)
    return Bundle.open(path)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file that each example of a property writes anew."""
    return tmp_path_factory.mktemp("scratch") / "any.heat"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return the bytes of a valid bundle."""
    path = tmp_path_factory.mktemp("whole") / "whole.heat"
    write(path, SMALL, META)
    return path.read_bytes()


def entries(numbers: Iterable[int], size: int = 50) -> dict[str, bytes]:
    return {digest_of(number): blob_of(number, size) for number in numbers}


def forged(
    records: Iterable[tuple[bytes, int]] = (),
    body: bytes = b"",
    *,
    meta: bytes = b"{}",
    count: int | None = None,
    meta_length: int | None = None,
    version: int = 1,
    magic: bytes = bundle.MAGIC,
) -> bytes:
    """Return a bundle with arbitrary content and a valid checksum.

    Records have the ends of entries counted from the first one's start.
    """
    rows = list(records)
    start = HEAD.size + len(meta) + len(rows) * RECORD.size + 16
    head = HEAD.pack(
        magic,
        version,
        len(meta) if meta_length is None else meta_length,
        len(rows) if count is None else count,
    )
    front = head + meta + b"".join(RECORD.pack(key, (start + end) % 2**64) for key, end in rows)
    return front + xxhash.xxh3_128_digest(front) + body


def behaves(path: Path, originals: dict[str, bytes]) -> bool:
    """Return True if the file opens and each entry is the original, missing, or known as damaged."""
    try:
        opened = Bundle.open(path)
    except BundleError:
        return False
    with opened:
        found = list(opened.digests())
        assert found == sorted(set(found))
        for digest in {*found, *originals}:
            try:
                assert opened.get(digest) in (None, originals.get(digest))
            except DamagedEntryError:
                assert digest in found
    return True


def refusal(path: Path) -> str:
    with pytest.raises(BundleError) as caught:
        Bundle.open(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


# Round trips


@settings(deadline=None)
@given(numbers=st.sets(st.integers(0, 1000), max_size=40), meta=metas)
@example(numbers=set(), meta={})
@example(numbers={1}, meta={"lone surrogate": "\ud800"})
def test_written_entries_are_read_back(scratch: Path, numbers: set[int], meta: dict[str, Any]) -> None:
    there = entries(numbers)
    size = write(scratch, there, meta)
    with Bundle.open(scratch) as opened:
        assert opened.meta == meta
        assert opened.nbytes == size == scratch.stat().st_size
        assert len(opened) == len(there)
        assert list(opened.digests()) == sorted(there)
        assert {digest: opened.get(digest) for digest in there} == there
        assert opened.verify() == {}


@pytest.mark.parametrize("count", [0, 1, 2, 100])
def test_a_missing_entry_is_none(path: Path, count: int) -> None:
    write(path, entries(range(count)), {})
    with Bundle.open(path) as opened:
        others = [digest_of(number) for number in range(1000, 1200)]
        odd = ["", "0" * 64, "f" * 64, "g" * 64, digest_of(0)[:-1], digest_of(0).upper(), "größe", "\0"]
        assert {opened.get(digest) for digest in [*others, *odd]} == {None}


def test_the_order_of_entries_and_meta_does_not_reach_the_file(path: Path) -> None:
    write(path, SMALL, {"a": 1, "b": {"x": 2, "y": 3}})
    one = path.read_bytes()
    write(path, dict(reversed(SMALL.items())), {"b": {"y": 3, "x": 2}, "a": 1})
    assert path.read_bytes() == one


def test_the_bytes_of_a_bundle_do_not_change_between_releases(whole: bytes) -> None:
    assert whole.hex().startswith("8942414b45" + "0d0a1a" + "0100")
    assert xxhash.xxh3_128_hexdigest(whole) == "450d1ff61f2827177254650a03e45b55"


def test_opening_reads_the_index_only(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(path, entries(range(10), size=100_000), {})
    read = []
    pread = os.pread

    def counting(descriptor: int, size: int, offset: int) -> bytes:
        read.append(size)
        return pread(descriptor, size, offset)

    monkeypatch.setattr(os, "pread", counting)
    with Bundle.open(path) as opened:
        assert sum(read) < 1000
        opened.get(digest_of(3))
        assert sum(read) < 102_000


def test_a_bundle_is_found_through_a_symbolic_link_and_by_text(small: Bundle, tmp_path: Path) -> None:
    link = tmp_path / "link.heat"
    link.symlink_to(small.path)
    with Bundle.open(str(link)) as opened:
        assert content(opened) == SMALL
        assert opened.path == link


# Damage


@pytest.mark.parametrize("bit", [0, 7])
def test_a_flipped_bit_in_any_byte_is_found(scratch: Path, whole: bytes, bit: int) -> None:
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << bit
        scratch.write_bytes(damaged)
        if behaves(scratch, SMALL):
            with Bundle.open(scratch) as opened:
                assert len(opened.verify()) == 1, position


def test_every_truncation_is_refused(scratch: Path, whole: bytes) -> None:
    for length in range(len(whole)):
        scratch.write_bytes(whole[:length])
        assert not behaves(scratch, SMALL), length


@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_a_spliced_file_is_refused_or_known_to_be_damaged(
    scratch: Path, whole: bytes, data: st.DataObject
) -> None:
    places = st.integers(0, len(whole))
    start, stop, other, end = (data.draw(places) for _ in range(4))
    spliced = whole[:start] + data.draw(st.binary(max_size=40)) + whole[other:end] + whole[stop:]
    scratch.write_bytes(spliced)
    if behaves(scratch, SMALL) and spliced != whole:
        with Bundle.open(scratch) as opened:
            assert opened.verify() != {}


@settings(deadline=None, max_examples=300)
@given(
    records=st.lists(
        st.tuples(
            st.sampled_from([bytes.fromhex(digest) for digest in SMALL])
            | st.binary(min_size=32, max_size=32),
            st.sampled_from(ENDS) | st.integers(0, 600) | st.integers(0, 2**64 - 1),
        ),
        max_size=6,
    ),
    ascending=st.booleans(),
    meta=st.binary(max_size=20) | metas.map(lambda meta: json.dumps(meta).encode()),
    count=st.none() | st.integers(0, 8) | st.integers(0, 2**32 - 1),
    meta_length=st.none() | st.integers(0, 60) | st.integers(0, 2**32 - 1),
)
def test_an_index_that_lies_under_a_right_checksum_is_refused_or_harmless(
    scratch: Path,
    records: list[tuple[bytes, int]],
    ascending: bool,
    meta: bytes,
    count: int | None,
    meta_length: int | None,
) -> None:
    if ascending:
        records = list(zip(*map(sorted, zip(*records, strict=True)), strict=True))
    body = b"".join(blob for _, blob in sorted(SMALL.items()))
    body = body[: records[-1][1]] if records else b""
    scratch.write_bytes(forged(records, body, meta=meta, count=count, meta_length=meta_length))
    behaves(scratch, SMALL)


def test_damage_is_confined_to_its_entry_and_named(small: Bundle) -> None:
    digests = list(small.digests())
    blob = bytearray(small.path.read_bytes())
    blob[-20] ^= 1
    small.path.write_bytes(blob)
    with Bundle.open(small.path) as opened:
        assert [opened.get(digest) for digest in digests[:-1]] == [SMALL[d] for d in digests[:-1]]
        with pytest.raises(DamagedEntryError, match=f"{digests[-1]} of .*kernels.heat: checksum"):
            opened.get(digests[-1])
        assert opened.verify() == {digests[-1]: "checksum mismatch"}


def test_verify_finds_an_entry_whose_parts_do_not_fit_together(path: Path) -> None:
    blob = blob_of(1)
    body = blob[:42] + struct.pack("<I", 2**31) + blob[46:-16]
    lying = body + xxhash.xxh3_128_digest(body)
    write(path, {digest_of(1): lying, digest_of(2): blob_of(2)}, {})
    with Bundle.open(path) as opened:
        assert list(opened.verify()) == [digest_of(1)]


# Refused arguments


ONE, TWO = (bytes.fromhex(digest) for digest in sorted(digest_of(number) for number in (1, 2)))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        pytest.param(b"", "it is too short", id="nothing"),
        pytest.param(bundle.MAGIC, "it is too short", id="magic alone"),
        pytest.param(bytes(1000), "does not begin with the signature", id="zero bytes"),
        pytest.param(b"PK\3\4" + bytes(100), "does not begin with the signature", id="a zip file"),
        pytest.param(blob_of(1), "it is a single entry of a cache", id="an entry"),
        pytest.param(forged(version=0), "it has format version 0, where 1", id="version 0"),
        pytest.param(forged(version=2), "it has format version 2, where 1", id="version 2"),
        pytest.param(forged(count=2**32 - 1), "4,294,967,295 entries", id="far too many entries"),
        pytest.param(forged(count=2**20), "cut short within its index", id="too many entries"),
        pytest.param(
            forged(meta_length=2**32 - 1), "4,294,967,295 bytes of meta", id="far too much meta"
        ),
        pytest.param(forged(meta_length=2**20), "cut short within its index", id="too much meta"),
        pytest.param(forged(meta=b""), "meta part cannot be read", id="no meta"),
        pytest.param(forged(meta=b"{"), "meta part cannot be read", id="broken meta"),
        pytest.param(forged(meta=b"\xff\xfe\xfd"), "meta part cannot be read", id="meta is no text"),
        pytest.param(
            forged(meta=b"[" * 100_000), "meta part cannot be read", id="meta nested too deep"
        ),
        pytest.param(forged(meta=b"9" * 10_000), "meta part cannot be read", id="number too long"),
        pytest.param(forged(meta=b"[]"), "meta part is not an object", id="meta is a list"),
        pytest.param(forged(meta=b"null"), "meta part is not an object", id="meta is null"),
        pytest.param(forged(body=b"x"), "it has bytes after its last entry", id="trailing, no entries"),
        pytest.param(forged([(ONE, 5)], b"x" * 6), "it has bytes after its last entry", id="trailing"),
        pytest.param(forged([(ONE, 5)], b"x" * 4), "it is cut short: ", id="cut short"),
        pytest.param(forged([(ONE, 3), (ONE, 6)], bytes(6)), "out of order at", id="a digest twice"),
        pytest.param(forged([(TWO, 3), (ONE, 6)], bytes(6)), "out of order at", id="digests descend"),
        pytest.param(
            forged([(ONE, 6), (TWO, 3)], bytes(6)), "its index puts entry", id="entries overlap"
        ),
        pytest.param(
            forged([(ONE, 6), (TWO, 6)], bytes(6)), "its index puts entry", id="an entry of no bytes"
        ),
        pytest.param(
            forged([(ONE, -9)], bytes(6)), "its index puts entry", id="an entry within the index"
        ),
        pytest.param(
            forged([(ONE, 2**63)], bytes(6)), "its index puts entry", id="an entry of 2**63 bytes"
        ),
        pytest.param(
            forged([(ONE, -1)], bytes(6)), "its index puts entry", id="an entry around the world"
        ),
    ],
)
def test_an_invalid_file_is_refused_with_the_reason(path: Path, data: bytes, why: str) -> None:
    path.write_bytes(data)
    assert why in refusal(path)


def test_every_refusal_of_a_file_says_what_to_do(path: Path) -> None:
    for data in (b"", b"x" * 100, blob_of(1), forged(version=2), forged(body=b"x")):
        path.write_bytes(data)
        with pytest.raises(BundleError) as caught:
            Bundle.open(path)
        assert caught.value.hint


def test_a_path_that_is_not_a_file_is_refused_without_waiting(tmp_path: Path) -> None:
    fifo, loop = tmp_path / "pipe.heat", tmp_path / "loop.heat"
    os.mkfifo(fifo)
    loop.symlink_to(loop)
    assert "it is not a file" in refusal(fifo)
    assert "it is not a file" in refusal(tmp_path)
    assert "it is not a file" in refusal(Path("/dev/zero"))
    assert "cannot be read: Too many levels" in refusal(loop)
    assert "cannot be read: No such file" in refusal(tmp_path / "missing.heat")
    assert "cannot be read: Not a directory" in refusal(Path(__file__) / "kernels.heat")


@needs_root
def test_a_file_that_may_not_be_read_is_refused(small: Bundle) -> None:
    small.path.chmod(0)
    with as_nobody():
        assert "cannot be read: Permission denied" in refusal(small.path)


@pytest.mark.parametrize("end", [2**40, 2**30 + 1])
def test_a_vast_file_costs_neither_time_nor_memory(path: Path, end: int) -> None:
    path.write_bytes(forged([(ONE, end)]))
    os.truncate(path, path.stat().st_size + end)  # The file is sparse and takes no disk space.
    tracemalloc.start()
    try:
        assert "its index puts entry" in refusal(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_refused_file_is_not_kept_open(path: Path) -> None:
    gc.collect()  # Close the files of earlier tests before the count, not during it.
    before = os.listdir("/proc/self/fd")
    path.write_bytes(forged(body=b"x"))
    with pytest.raises(BundleError) as kept:
        Bundle.open(path)
    assert os.listdir("/proc/self/fd") == before, kept


# While it is open


def test_a_bundle_replaced_by_another_stays_what_it_was(small: Bundle) -> None:
    write(small.path, entries([7]), {})
    assert content(small) == SMALL
    assert small.verify() == {}
    with Bundle.open(small.path) as new:
        assert list(new.digests()) == [digest_of(7)]


def test_a_bundle_cut_short_or_overwritten_in_place_has_damaged_entries(small: Bundle) -> None:
    whole = small.path.read_bytes()
    for data in (b"", whole[: len(whole) // 2], bytes(len(whole)), whole[1:] + b"x"):
        with open(small.path, "r+b") as file:
            file.truncate()
            file.write(data)
        assert digest_of(3) in small.verify()
        assert behaves_open(small)


def behaves_open(opened: Bundle) -> bool:
    for digest in opened.digests():
        try:
            assert opened.get(digest) == SMALL[digest]
        except DamagedEntryError:
            continue
    return True


def test_a_closed_bundle_says_so(small: Bundle) -> None:
    with small:
        assert small.get(digest_of(1)) == blob_of(1, 10)
    small.close()
    for use in (lambda: small.get(digest_of(1)), lambda: small.get("no"), small.verify):
        with pytest.raises(BundleError, match=r"kernels.heat is closed"):
            use()
    assert list(small.digests()) == sorted(SMALL), "the index is still known"
    assert repr(small).endswith(", closed>")


def test_a_bundle_shows_its_path_count_and_size(small: Bundle, tmp_path: Path) -> None:
    assert repr(small) == f"<Bundle {small.path}: 4 entries, {small.nbytes:,} bytes>"
    write(tmp_path / "one.heat", entries([1]), {})
    assert "one.heat: 1 entry, " in repr(Bundle.open(tmp_path / "one.heat"))


def test_closing_gives_the_descriptor_back(path: Path) -> None:
    write(path, SMALL, {})
    before = os.listdir("/proc/self/fd")
    opened = Bundle.open(path)
    assert os.listdir("/proc/self/fd") != before
    opened.close()
    assert os.listdir("/proc/self/fd") == before


def test_threads_read_at_once(path: Path) -> None:
    there = entries(range(50), size=20_000)
    write(path, there, {})
    with Bundle.open(path) as opened, ThreadPoolExecutor(8) as pool:
        digests = sorted(there) * 8
        assert list(pool.map(opened.get, digests)) == [there[digest] for digest in digests]


def test_closing_under_readers_gives_them_whole_entries_or_the_error(path: Path) -> None:
    there = entries(range(5), size=200_000)
    write(path, there, {})
    for _ in range(20):
        opened = Bundle.open(path)
        started = threading.Barrier(5)
        odd: list[str] = []

        def read(
            opened: Bundle = opened, started: threading.Barrier = started, odd: list[str] = odd
        ) -> None:
            started.wait()
            try:
                for digest, blob in there.items():
                    if opened.get(digest) != blob:
                        odd.append(digest)
            except BundleError as closed:
                if "closed" not in str(closed):
                    odd.append(str(closed))

        with ThreadPoolExecutor(4) as pool:
            done = [pool.submit(read) for _ in range(4)]
            started.wait()
            opened.close()
            others = [os.open("/dev/null", os.O_RDONLY) for _ in range(3)]  # would take its number
            for reader in done:
                reader.result()
            for other in others:
                os.close(other)
        assert odd == []


def test_a_forked_child_reads_and_closes_on_its_own(small: Bundle) -> None:
    assert finish(start("fork-and-read-bundle", small.path)) == ["child: 4\nparent: 4\n"]


def test_a_bundle_sent_to_another_process_is_opened_there(small: Bundle) -> None:
    with pickle.loads(pickle.dumps(small)) as other:
        assert other.path == small.path
        small.close()
        assert content(other) == SMALL


# Writing


@pytest.mark.parametrize(
    ("digest", "blob", "why"),
    [
        (digest_of(1), b"", "too short"),
        (digest_of(1), blob_of(1)[:-1], "checksum mismatch"),
        (digest_of(1), blob_of(2), "entry of another key"),
        (digest_of(1).upper(), blob_of(1), "entry of another key"),
        (digest_of(1)[:-1], blob_of(1), "entry of another key"),
    ],
)
def test_a_damaged_entry_is_not_written(path: Path, digest: str, blob: bytes, why: str) -> None:
    with pytest.raises(
        BundleError, match=f"kernels.heat is not written: entry {digest} is damaged: {why}"
    ):
        write(path, {**SMALL, digest: blob}, {})
    assert os.listdir(path.parent) == []


@pytest.mark.parametrize(
    ("limit", "value"), [("_MAX_META", 20), ("_MAX_ENTRIES", 3), ("_MAX_ENTRY", 100)]
)
def test_what_could_not_be_opened_is_not_written(
    path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    write(path, SMALL, META)
    monkeypatch.setattr(bundle, limit, value)
    refusal(path)
    path.unlink()
    with pytest.raises(BundleError, match=r"kernels.heat is not written: .* (too many|the most)"):
        write(path, SMALL, META)
    assert os.listdir(path.parent) == []


@pytest.mark.parametrize("meta", [{"a": float("nan")}, {"a": object()}, {"a": b"bytes"}])
def test_meta_that_is_not_json_is_not_written(path: Path, meta: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError)):
        write(path, SMALL, meta)
    assert os.listdir(path.parent) == []


@pytest.mark.parametrize(("umask", "mode"), [(0o000, 0o644), (0o022, 0o644), (0o077, 0o600)])
def test_nobody_else_may_write_a_bundle(path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        write(path, SMALL, {})
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o7777 == mode


@pytest.mark.parametrize("call", ["open", "fsync", "replace"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_an_interrupted_write_leaves_the_old_file_and_nothing_else(
    small: Bundle, monkeypatch: pytest.MonkeyPatch, call: str, error: BaseException
) -> None:
    def fail(*_: object) -> None:
        raise error

    before = small.path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises((KeyboardInterrupt, BundleError)) as caught:
            write(small.path, entries([7]), {})
    if isinstance(error, OSError):
        assert str(caught.value) == f"bundle {small.path} cannot be written: No space left on device"
    assert small.path.read_bytes() == before
    assert os.listdir(small.path.parent) == [small.path.name]


def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "mount", "size=64k,mode=700") as mount:
        path = mount / "kernels.heat"
        write(path, SMALL, {})
        before = path.read_bytes()
        with pytest.raises(BundleError, match="cannot be written: No space left"):
            write(path, entries(range(10), size=10_000), {})
        assert path.read_bytes() == before
        assert os.listdir(mount) == [path.name]


def test_the_content_is_on_disk_before_its_name_and_the_name_before_the_end(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def sync(descriptor: int) -> None:
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        done.append("directory" if name == str(path.parent) else "file")
        fsync(descriptor)

    def rename(old: str, new: str) -> None:
        done.append("rename")
        assert os.path.dirname(old) == os.path.dirname(new)
        assert os.stat(old).st_size > 0
        replace(old, new)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", rename)
    write(path, SMALL, {})
    assert done == ["file", "rename", "directory"]


def test_a_bundle_replaces_files_and_links_to_files_only(tmp_path: Path) -> None:
    fifo, link, linked = tmp_path / "pipe", tmp_path / "link", tmp_path / "linked"
    os.mkfifo(fifo)
    linked.write_bytes(b"kept")
    link.symlink_to(linked)
    for odd in (tmp_path, fifo, Path("/dev/null")):
        with pytest.raises(BundleError, match=f"{odd} cannot be written: it exists and is not a file"):
            write(odd, SMALL, {})
    write(link, SMALL, {})
    assert linked.read_bytes() == b"kept"
    assert not link.is_symlink()


def test_a_directory_that_is_missing_is_named(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "kernels.heat"
    with pytest.raises(BundleError) as caught:
        write(path, SMALL, {})
    assert str(caught.value) == f"bundle {path} cannot be written: No such file or directory"


def test_a_writer_killed_at_any_line_leaves_the_old_bundle_or_the_new_one(path: Path) -> None:
    (said,) = finish(start("bundle-and-die-at-every-line", path))
    deaths, found = said.split()
    assert int(deaths) > 20
    assert found == "old,new"


def test_writers_of_one_bundle_do_not_disturb_each_other(path: Path) -> None:
    versions = [entries([number], size=100_000) for number in range(4)]
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(write, path, versions[n % 4], {}) for n in range(40)]:
            done.result()
    with Bundle.open(path) as opened:
        assert content(opened) in versions
    assert os.listdir(path.parent) == [path.name]
