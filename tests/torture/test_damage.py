"""Damaged and forged files of the cache, and entries that are no files, do not affect builds."""

from __future__ import annotations

import copy
import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash

from preheat.model import codec
from preheat.model.arch import Arch
from preheat.model.artifact import Artifact, EntryPoint, Header, Parameter, Provenance, Resources
from preheat.model.codec import DamagedEntryError
from preheat.model.events import Events, JsonLines
from preheat.model.key import Part
from preheat.store import Chain, DiskStore
from preheat.store.journal import Journal
from preheat.toolchain.headers.states import HeaderState, decode_states, encode_states
from preheat.toolchain.locate import Library, Located, _Memo
from tests.command import Cli, command_line
from tests.conftest import Recorder
from tests.store.entries import blob_of, digest_of
from tests.torture.conftest import Campaign
from tests.torture.hangs import no_hang as no_hang

KEY = digest_of(1)
BLOB = blob_of(1)
#: A value of every type that JSON has, some of them absurd, for the place of any other.
VALUES: tuple[Any, ...] = (
    *(None, True, 0, -1, 7, 1.5, 1e308, 2**70, float("nan"), float("inf")),
    *("", "x", "sm_90", "0" * 64, "../../../x", "\0", "\ud800", "a" * 1000),
    *([], [[]], [None], ["a", "b"], ["a", "b", "c"], [["a", "b", "c"]], {}, {"a": 1}, {"a": "b"}),
)


@pytest.fixture
def disk(tmp_path: Path, events: Events) -> DiskStore:
    return DiskStore(tmp_path / "cache", events, lock_dir=tmp_path / "locks")


pytestmark = pytest.mark.usefixtures("no_hang")


def flips(blob: bytes, campaign: Campaign, *, quick: int) -> Iterator[bytes]:
    """`blob` with one bit flipped, at places by chance; a long campaign flips every bit."""
    bits = range(len(blob) * 8)
    for bit in campaign.random.sample(bits, campaign.rounds(quick=quick, long=len(bits))):
        flipped = bytearray(blob)
        flipped[bit // 8] ^= 1 << bit % 8
        yield bytes(flipped)


# Flipped bits


def test_a_memo_of_the_toolchain_with_a_flipped_bit_is_no_memo(
    tmp_path: Path, campaign: Campaign, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("preheat.toolchain.locate._build_of", lambda library: library.build)
    library = tmp_path / "lib.so"
    library.write_bytes(b"ELF")
    found = Located(
        libraries={"nvrtc": Library("NVRTC", (str(library),), "ab12", "13.0")},
        missing={"nvJitLink": "not there"},
        roots={"cuda": "/usr/include", "cccl": "/usr/cccl"},
        archs=(80, 90),
    )
    memo = _Memo(tmp_path, KEY)
    memo.remember(found)
    assert memo.recall() == found
    (file,) = tmp_path.glob("toolchain-*")
    good = file.read_bytes()
    for flipped in flips(good, campaign, quick=300):
        file.write_bytes(flipped)
        assert memo.recall() is None
    for length in range(0, len(good), 7):
        file.write_bytes(good[:length])
        assert memo.recall() is None
    memo.remember(found)
    assert memo.recall() == found


def test_totals_with_a_flipped_bit_are_counted_again_and_the_limit_holds(
    tmp_path: Path, campaign: Campaign
) -> None:
    limit = 5 * len(blob_of(100, 500))
    disk = DiskStore(tmp_path / "cache", Events(), lock_dir=tmp_path / "locks", limit=limit)
    disk.put(KEY, BLOB)
    usage = disk.root / "v1" / "usage"
    for number in range(100, 100 + campaign.rounds(quick=40, long=2_000)):
        flipped = bytearray(usage.read_bytes())
        flipped[campaign.random.randrange(len(flipped))] ^= 1 << campaign.random.randrange(8)
        usage.write_bytes(flipped)
        disk.put(digest_of(number), blob_of(number, 500))
        assert sum(item.bytes for item in disk.items()) <= limit


@pytest.mark.parametrize("row", [b"\xff" * 32, b"\xff" * 48, b"\xff" * 4096, b"\0" * 48, b""], ids=len)
def test_totals_that_say_anything_do_not_stop_a_put(disk: DiskStore, row: bytes) -> None:
    disk.put(KEY, BLOB)
    usage = disk.root / "v1" / "usage"
    usage.write_bytes(row)
    disk.put(digest_of(2), blob_of(2))
    counted = usage.read_bytes()
    usage.unlink()
    disk.put(digest_of(2), blob_of(2))
    assert counted == usage.read_bytes()


def test_a_note_with_a_flipped_bit_is_no_note(disk: DiskStore, campaign: Campaign) -> None:
    disk.put_note(KEY, b'{"/a.h":[[1,2,3,4],"abc"]}')
    file = disk.root / "v1" / KEY[:2] / f"{KEY}.note"
    for flipped in flips(file.read_bytes(), campaign, quick=200):
        file.write_bytes(flipped)
        assert disk.note(KEY) is None
        assert not file.exists(), "it is removed, and the next one is whole"


# Forged entries, with the checksum that belongs to them

STATE = HeaderState((Header("0", "a.h", "ab" * 32),), (("0", "b.h"),), ("0", "cuda"))
ARTIFACT = Artifact(
    digest=KEY,
    label="k.cu",
    arch=Arch.parse("sm_90"),
    toolchain="NVRTC 13.0",
    parts=(Part("arch", "sm_90"), Part("source", "text")),
    entries=(
        EntryPoint(
            "_Z1kPf",
            (Parameter(0, 8, 8, "u64", True, "float*"), Parameter(8, 4, 4, "u32")),
            "k",
            Resources(32, 0, 0, 0, 0, 1),
            (".maxntid 128",),
        ),
        EntryPoint("plain", ()),
    ),
    cubin=b"\x7fELF",
    ptx=b".version 8.0",
    names={"tk<float>": "_Z1kPf"},
    headers=STATE.headers,
    log="",
    provenance=Provenance(0.5, "2026-01-01T00:00:00Z", ""),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the way to everything in a JSON value."""
    yield path
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(inner, (*path, key))


def forged(value: Any) -> Iterator[tuple[Any, Any]]:
    """`value` with each part in turn replaced by each of `VALUES`, and once left out; and where."""
    for path in places(value):
        if not path:
            continue
        for other in (*VALUES, places):
            whole = copy.deepcopy(value)
            inside = whole
            for key in path[:-1]:
                inside = inside[key]
            if other is places:
                del inside[path[-1]]
            else:
                inside[path[-1]] = other
            yield path, whole


def use(artifact: Artifact) -> None:
    """All that is done with an artifact's fields on the way to a person or back to a file."""
    assert Artifact.decode(KEY, *codec.unpack(KEY, artifact.encode())) == artifact
    repr(artifact).encode()
    for entry in artifact.entries:
        assert artifact.entry(entry.name) in artifact.entries
        artifact.name_of(entry)
    saved = artifact.provenance.seconds
    Events().emit("hit", tier="disk", key=KEY, bytes=artifact.size, seconds_saved=saved)


def sealed(meta: Any, sections: dict[str, bytes]) -> bytes:
    """Return an entry with any JSON part, also one that no writer makes, under a right checksum."""
    table = [[name, len(section)] for name, section in sections.items()]
    text = json.dumps({"meta": meta, "sections": table}).encode()
    head = codec.pack(KEY, {}, {})[: codec.JSON_AT - 4] + len(text).to_bytes(4, "little")
    body = b"".join((head, text, *sections.values()))
    return body + xxhash.xxh3_128_digest(body)


def stored(meta: Any, sections: dict[str, bytes]) -> Artifact | None:
    """Return the artifact that a lookup would find in such an entry; None when it is damaged."""
    blob = sealed(meta, sections)
    assert codec.damage(KEY, blob) is None
    try:
        return Artifact.stored(KEY, blob)
    except DamagedEntryError:
        return None


def test_every_field_of_an_artifact_is_checked() -> None:
    meta, sections = codec.unpack(KEY, ARTIFACT.encode())
    refused = 0
    for path, other in forged(json.loads(json.dumps(meta))):
        found = stored(other, sections)
        try:
            artifact = Artifact.decode(KEY, other, sections)
        except DamagedEntryError:
            refused += 1
            assert found is None, f"{path} became {other}, which is found only when it is read"
            continue
        try:
            assert found is not None
            use(found)
            assert found == artifact
            use(artifact)
        except Exception as error:
            raise AssertionError(f"{path} became {other}") from error
    assert refused > 700
    use(Artifact.decode(KEY, meta, sections))


def test_every_field_of_the_provenance_is_checked() -> None:
    meta, sections = codec.unpack(KEY, ARTIFACT.encode())
    good = json.loads(sections["provenance"])
    others = [other for _, other in forged(good)] + list(VALUES)
    for text in [*map(json.dumps, others), "", "{", "[" * 100_000, "\x00", '"\\ud800"']:
        try:
            use(Artifact.decode(KEY, meta, {**sections, "provenance": text.encode()}))
        except DamagedEntryError:
            continue
        assert json.loads(text)[:1] in ([], [0], [7], [1.5], [0.5]), text


@pytest.mark.parametrize("section", ["log", "provenance", "sources"])
def test_a_section_that_is_decoded_later_is_checked_at_once(section: str) -> None:
    meta, sections = codec.unpack(KEY, ARTIFACT.encode())
    assert stored(meta, sections) == ARTIFACT
    for damaged in (b"\xff", b"\xed\xa0\x80"):
        assert stored(meta, {**sections, section: damaged}) is None


@pytest.mark.parametrize("section", ["cubin", "ptx", "log"])
def test_an_artifact_without_a_section_is_damaged(section: str) -> None:
    meta, sections = codec.unpack(KEY, ARTIFACT.encode())
    del sections[section]
    assert stored(meta, sections) is None


def test_every_field_of_a_header_list_is_checked() -> None:
    good = json.loads(json.dumps({"states": encode_states([(STATE, KEY)])}))
    assert decode_states(good) == [(STATE, KEY)]
    refused = 0
    for _, other in forged(good):
        try:
            states = decode_states(other)
        except DamagedEntryError:
            refused += 1
            continue
        for state, digest in states:
            assert len(digest) == 64
            assert set(digest) <= set("0123456789abcdef")
            "".join([*state.roots, *sum(state.headers, ()), *sum(state.absent, ())]).encode()
            for _, name, *_ in (*state.headers, *state.absent):
                os.path.lexists(f"/{name}")
    assert refused > 250


def pack_anything(meta: Any, sections: dict[str, bytes]) -> bytes:
    """Return an entry with a valid checksum and arbitrary JSON, including lone surrogates."""
    blob = codec.pack(KEY, {}, sections)
    table = [[name, len(section)] for name, section in sections.items()]
    head = bytearray(blob[:46])
    text = json.dumps({"meta": meta, "sections": table}).encode()
    head[42:46] = len(text).to_bytes(4, "little")
    body = bytes(head) + text + b"".join(sections.values())
    return body + xxhash.xxh3_128_digest(body)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cli:
    return command_line(capsys, monkeypatch, tmp_path, tmp_path / "cache")


@pytest.mark.parametrize("field", ["label", "arch", "entries", "names", "parts", "headers"])
@pytest.mark.parametrize("value", [7, "\ud800", [[1, 2], [3]]], ids=ascii)
def test_the_commands_tell_of_forged_entries(
    cli: Cli, disk: DiskStore, field: str, value: object
) -> None:
    meta, sections = codec.unpack(KEY, ARTIFACT.encode())
    disk.put(KEY, pack_anything({**json.loads(json.dumps(meta)), field: value}, sections))
    assert cli("cache", "ls").code == 0
    shown = cli("cache", "show", KEY[:12])
    assert (shown.code, "is damaged" in shown.err) == (1, True)
    assert cli("cache", "verify").code == 1
    assert cli("cache", "verify", "--repair").code == 0
    assert list(disk.items()) == []


@pytest.mark.parametrize("kind", ["pipe", "dangling link"])
def test_the_commands_tell_of_entries_that_are_no_files(cli: Cli, disk: DiskStore, kind: str) -> None:
    disk.put(KEY, BLOB)
    path = disk.root / "v1" / KEY[:2] / f"{KEY}.heat"
    path.unlink()
    ODD[kind](path)
    assert cli("cache", "ls").code == 0
    assert "is damaged" in cli("cache", "show", KEY[:12]).err
    assert cli("cache", "pin", KEY[:12]).code == 0
    assert cli("cache", "prune", "--files", "0").code == 0
    assert cli("cache", "verify").code == 1
    assert cli("cache", "verify", "--repair").code == 0
    assert not os.path.lexists(path)


# Entries that are no files


def _directory(path: Path) -> None:
    path.mkdir()


def _socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the name of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name[:80])
            os.rename(path.name[:80], path.name)
    finally:
        os.chdir(here)


def _circle(path: Path) -> None:
    path.symlink_to(path)


def _dangling(path: Path) -> None:
    path.symlink_to(path.parent / "nowhere")


def _sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 42)


ODD: dict[str, Callable[[Path], None]] = {
    "pipe": lambda path: os.mkfifo(path, 0o600),
    "directory": _directory,
    "socket": _socket,
    "circle": _circle,
    "dangling link": _dangling,
    "sparse": _sparse,
}
FILES = ("entry", "note", "usage", "stats", "pin", "tag", "usage lock", "sweep lock", "shard", "staged")


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD.keys())
@pytest.mark.parametrize("which", FILES)
def test_a_file_of_the_cache_that_is_no_file_stops_nothing(
    tmp_path: Path, events: Events, recorder: Recorder, which: str, odd: Callable[[Path], None]
) -> None:
    recorder.forgive = True
    disk = DiskStore(tmp_path / "cache", events, lock_dir=tmp_path / "locks", limit=5 * len(BLOB))
    disk.put(KEY, BLOB)
    disk.put_note(KEY, b"{}")
    if which == "pin":
        disk.pin(KEY)
    journal = disk.journal()
    journal.write({"hits": 1})
    suffix = os.fsencode(disk.root).hex()[-120:]
    shard = disk.root / "v1" / KEY[:2]
    path = {
        "entry": shard / f"{KEY}.heat",
        "note": shard / f"{KEY}.note",
        "usage": disk.root / "v1" / "usage",
        "stats": next((disk.root / "stats").iterdir()),
        "pin": disk.root / "v1" / "pins" / KEY,
        "tag": disk.root / "CACHEDIR.TAG",
        "usage lock": tmp_path / "locks" / f"usage-{suffix}",
        "sweep lock": tmp_path / "locks" / f"sweep-{suffix}",
        "shard": shard,
        "staged": disk.root / "v1" / "staged",
    }[which]
    if path.exists():
        path.rename(tmp_path / "aside")
    try:
        odd(path)
    except OSError as fault:
        pytest.skip(f"cannot be made here: {fault}")
    assert Chain([disk], events).get(KEY) in (None, (BLOB, "disk"))
    disk.note(KEY)
    for number in range(2, 12):
        try:
            disk.put(digest_of(number), blob_of(number))
        except OSError:
            assert which == "staged", "nothing can be written without that directory"
    if which != "staged":
        assert disk.get(digest_of(11)) == blob_of(11)
        # Without these three files the entries cannot be counted.
        if which not in ("usage", "usage lock", "sweep lock"):
            assert len(list(disk.items())) <= 6
    disk.sweep()
    journal.write({"hits": 2})
    assert journal.total()["hits"] in ({1, 2} if which == "stats" else {2})
    Journal(disk.root / "stats", lock_dir=disk.lock_dir).clear()


# The event file


def test_an_event_pipe_without_a_reader_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    os.mkfifo(tmp_path / "events")
    events = Events(JsonLines(tmp_path / "events"))
    for _ in range(3):
        events.emit("evict", files=1, bytes=1)
    assert len(caplog.records) == 1
    assert "events are not written" in caplog.text


def test_an_event_pipe_whose_reader_is_slow_loses_events_and_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    os.mkfifo(tmp_path / "events")
    reader = os.open(tmp_path / "events", os.O_RDONLY | os.O_NONBLOCK)
    events = Events(JsonLines(tmp_path / "events"))
    for number in range(2000):
        events.emit("evict", files=number, bytes=1)
    assert len(caplog.records) == 1
    assert "too slow" in caplog.text
    kept = [json.loads(line)["files"] for line in os.read(reader, 1 << 20).splitlines()]
    assert kept == sorted(set(kept)), "whole lines, each once"
    events.emit("evict", files=-1, bytes=1)
    assert json.loads(os.read(reader, 1 << 20))["files"] == -1
    os.close(reader)
