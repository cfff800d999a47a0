"""The encoding of entries: round trips, and detection of every kind of damage."""

from __future__ import annotations

import json
import random
import struct
from typing import Any

import pytest
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

from preheat.model import codec
from preheat.model.codec import DamagedEntryError, pack, unpack
from tests.store.entries import blob_of, digest_of

DIGEST = digest_of(1)
SMALL = pack(DIGEST, {"kind": "test", "größe": 3}, {"code": bytes(range(40)), "log": b""})
HEAD = struct.Struct("<8sH32sI")

texts = st.text(st.characters(codec="utf-8"), max_size=8)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts
values = st.recursive(
    scalars, lambda v: st.lists(v, max_size=3) | st.dictionaries(texts, v, max_size=3)
)
metas = st.dictionaries(texts, values, max_size=4)


def sealed(text: bytes, payload: bytes = b"", *, length: int | None = None) -> bytes:
    """Return an entry with any JSON part and a checksum that is right."""
    head = HEAD.pack(codec.MAGIC, 1, bytes.fromhex(DIGEST), len(text) if length is None else length)
    body = head + text + payload
    return body + xxhash.xxh3_128_digest(body)


def header(table: object, meta: object = None) -> bytes:
    return json.dumps({"meta": {} if meta is None else meta, "sections": table}).encode()


@given(meta=metas, sections=st.dictionaries(texts, st.binary(max_size=50), max_size=4))
def test_packed_content_is_unpacked(meta: dict[str, Any], sections: dict[str, bytes]) -> None:
    assert unpack(DIGEST, pack(DIGEST, meta, sections)) == (meta, sections)


def test_the_same_content_gives_the_same_bytes_whatever_the_order_of_its_keys() -> None:
    one = pack(DIGEST, {"a": 1, "b": {"x": 2, "y": 3}}, {"code": b"c"})
    other = pack(DIGEST, {"b": {"y": 3, "x": 2}, "a": 1}, {"code": b"c"})
    assert one == other


def test_the_bytes_of_an_entry_do_not_change_between_releases() -> None:
    assert SMALL.hex().startswith("8948454154" + "0d0a1a" + "0100" + DIGEST)
    assert xxhash.xxh3_128_hexdigest(SMALL) == "760a9509ad4a694c56965231ab9ab850"


@given(st.binary(max_size=400))
@example(b"")
@example(codec.MAGIC)
@example(SMALL[: HEAD.size])
def test_random_bytes_are_damaged(blob: bytes) -> None:
    with pytest.raises(DamagedEntryError):
        unpack(DIGEST, blob)


@given(st.binary(max_size=200))
def test_random_bytes_after_a_right_head_are_damaged(tail: bytes) -> None:
    with pytest.raises(DamagedEntryError):
        unpack(DIGEST, HEAD.pack(codec.MAGIC, 1, bytes.fromhex(DIGEST), len(tail)) + tail)


@given(
    text=st.binary(max_size=40)
    | st.builds(header, values | st.lists(st.tuples(scalars, scalars)), metas),
    payload=st.binary(max_size=40),
    length=st.none() | st.integers(0, 2**32 - 1),
)
def test_sections_are_exactly_the_payload_even_when_a_sealed_table_lies(
    text: bytes, payload: bytes, length: int | None
) -> None:
    blob = sealed(text, payload, length=length)
    try:
        found = unpack(DIGEST, blob)
    except DamagedEntryError:
        return
    start = HEAD.size + (len(text) if length is None else length)
    assert b"".join(found.sections.values()) == blob[start:-16]


@pytest.mark.parametrize("bit", range(8))
def test_every_flipped_bit_of_an_entry_is_found(bit: int) -> None:
    for position in range(len(SMALL)):
        damaged = bytearray(SMALL)
        damaged[position] ^= 1 << bit
        with pytest.raises(DamagedEntryError):
            unpack(DIGEST, bytes(damaged))


def test_flipped_bytes_of_a_large_payload_are_found() -> None:
    whole = blob_of(1, 1 << 20)
    for position in random.Random(0).sample(range(len(whole)), 200):
        damaged = bytearray(whole)
        damaged[position] ^= 0xFF
        with pytest.raises(DamagedEntryError):
            unpack(DIGEST, bytes(damaged))


def test_every_truncation_is_found() -> None:
    for length in range(len(SMALL)):
        with pytest.raises(DamagedEntryError):
            unpack(DIGEST, SMALL[:length])


@pytest.mark.parametrize("trailing", [b"\0", b"\n", SMALL])
def test_trailing_bytes_are_found(trailing: bytes) -> None:
    with pytest.raises(DamagedEntryError):
        unpack(DIGEST, SMALL + trailing)


def test_two_swapped_blocks_are_found() -> None:
    whole = blob_of(1, 20_000)
    with pytest.raises(DamagedEntryError, match="checksum"):
        unpack(DIGEST, whole[:4096] + whole[8192:12288] + whole[4096:8192] + whole[12288:])


def test_an_entry_answers_to_its_own_key_only() -> None:
    with pytest.raises(DamagedEntryError, match="another key"):
        unpack(digest_of(2), SMALL)


@pytest.mark.parametrize("version", [0, 2, 65535])
def test_an_entry_of_another_format_version_is_named_as_such(version: int) -> None:
    body = SMALL[:8] + struct.pack("<H", version) + SMALL[10:-16]
    with pytest.raises(DamagedEntryError, match=f"format version {version}"):
        unpack(DIGEST, body + xxhash.xxh3_128_digest(body))


def test_something_that_is_no_entry_is_named_as_such() -> None:
    body = b"\x7fELF\2\1\1\0" + SMALL[8:-16]
    with pytest.raises(DamagedEntryError, match="not an entry"):
        unpack(DIGEST, body + xxhash.xxh3_128_digest(body))


def test_damage_says_nothing_about_a_whole_entry() -> None:
    assert codec.damage(DIGEST, SMALL) is None


@pytest.mark.parametrize(
    "blob",
    [
        pytest.param(sealed(b""), id="no JSON"),
        pytest.param(sealed(b"{"), id="broken JSON"),
        pytest.param(sealed(b"\xff\xfe\xfd"), id="no text"),
        pytest.param(sealed(b"[" * 100_000), id="nested too deep"),
        pytest.param(sealed(b"9" * 10_000), id="number too long"),
        pytest.param(sealed(b"null"), id="null"),
        pytest.param(sealed(b"[]"), id="a list"),
        pytest.param(sealed(b"{}"), id="nothing in it"),
        pytest.param(sealed(b'{"meta":{}}'), id="no table"),
        pytest.param(sealed(b'{"sections":[]}'), id="no meta"),
        pytest.param(sealed(header([], meta=[])), id="meta is a list"),
        pytest.param(sealed(header(7)), id="table is a number"),
        pytest.param(sealed(header([["a"]]), b"x"), id="no length"),
        pytest.param(sealed(header([["a", 1, 2]]), b"x"), id="two lengths"),
        pytest.param(sealed(header([["a", "1"]]), b"x"), id="length is text"),
        pytest.param(sealed(header([["a", 1.0]]), b"x"), id="length is a fraction"),
        pytest.param(sealed(header([["a", True]]), b"x"), id="length is a switch"),
        pytest.param(sealed(header([["a", None]]), b"x"), id="length is null"),
        pytest.param(sealed(header([["a", 2]]), b"x"), id="table promises more"),
        pytest.param(sealed(header([["a", 10**30]]), b"x"), id="table promises far more"),
        pytest.param(sealed(header([["a", 1]]), b"xy"), id="table leaves some over"),
        pytest.param(sealed(header([]), b"x"), id="sections without a table"),
        pytest.param(sealed(header([["a", 4], ["b", -2]]), b"xy"), id="sections overlap"),
        pytest.param(sealed(header([["a", -1], ["b", 2]]), b"x"), id="section reaches into the JSON"),
        pytest.param(sealed(header([["a", 17]]), b"x"), id="section reaches into the checksum"),
        pytest.param(sealed(header([["a", 1], ["a", 1]]), b"xy"), id="a name twice"),
        pytest.param(sealed(header([[7, 1]]), b"x"), id="name is a number"),
        pytest.param(sealed(header([]), length=2**32 - 1), id="JSON longer than the entry"),
        pytest.param(sealed(header([]), length=len(header([])) + 1), id="JSON into the checksum"),
        pytest.param(sealed(header([]), length=len(header([])) - 1), id="JSON cut short"),
    ],
)
def test_a_header_that_lies_under_a_right_checksum_is_damage(blob: bytes) -> None:
    assert codec.damage(DIGEST, blob) is None
    with pytest.raises(DamagedEntryError):
        unpack(DIGEST, blob)


@pytest.mark.parametrize(
    ("document", "value"),
    [("{}", {}), (' [1, "é"]\n', [1, "é"]), ("null", None), ('"\\ud800"', "\ud800")],
)
def test_json_is_parsed_with_or_without_white_space_around_it(document: str, value: object) -> None:
    assert codec.parse_json(document) == value


@pytest.mark.parametrize("document", ["", " ", "{", "[1,]", "{} x", "[1] [2]", "nul", "'a'"])
def test_a_document_that_is_not_json_is_an_error(document: str) -> None:
    with pytest.raises(ValueError, match="line 1"):
        codec.parse_json(document)
