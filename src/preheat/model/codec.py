"""The byte format of an entry: a JSON part and named sections, with a checksum.

    offset  size  what
    0       8     magic  89 'H' 'E' 'A' 'T' 0d 0a 1a
    8       2     format version, little-endian
    10      32    the digest this entry answers to
    42      4     length of the JSON part, little-endian
    46      n     JSON: {"meta": …, "sections": [[name, length], …]}
    46+n    …     the sections, one after another
    end-16  16    XXH3-128 of everything before it

The checksum detects damage, not attacks: a user who can write the directory can write code
(docs/cache-format.md, docs/security.md).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any, NamedTuple

import xxhash

__all__ = [
    "JSON_AT",
    "VERSION",
    "DamagedEntryError",
    "Entry",
    "damage",
    "layout",
    "pack",
    "parse_json",
    "rows",
    "text",
    "unpack",
]

MAGIC = b"\x89HEAT\r\n\x1a"
VERSION = 1
_HEAD = struct.Struct("<8sH32sI")
JSON_AT = _HEAD.size
_LENGTH_AT = JSON_AT - 4
_CHECKSUM = 16

_decoder = json.JSONDecoder()
_scan: Callable[[str, int], tuple[Any, int]] = _decoder.scan_once  # type: ignore[attr-defined]


class DamagedEntryError(ValueError):
    """These bytes are not a complete entry for that digest."""


class Entry(NamedTuple):
    """The parts of an entry."""

    meta: dict[str, Any]
    sections: dict[str, bytes]


def pack(digest: str, meta: Mapping[str, Any], sections: Mapping[str, bytes]) -> bytes:
    """Encode an entry; equal content gives equal bytes."""
    table = [[name, len(section)] for name, section in sections.items()]
    text = json.dumps(
        {"meta": meta, "sections": table}, sort_keys=True, separators=(",", ":"), ensure_ascii=False
    ).encode()
    head = _HEAD.pack(MAGIC, VERSION, bytes.fromhex(digest), len(text))
    body = b"".join((head, text, *sections.values()))
    return body + xxhash.xxh3_128_digest(body)


def damage(digest: str, blob: bytes) -> str | None:
    """Return what is wrong with `blob` as the entry for `digest`, or None when it is valid."""
    if len(blob) < _HEAD.size + _CHECKSUM:
        return "too short"
    magic, version, key, _ = _HEAD.unpack_from(blob)
    if magic != MAGIC:
        return "not an entry"
    if version != VERSION:
        return f"format version {version}"
    if xxhash.xxh3_128_digest(memoryview(blob)[:-_CHECKSUM]) != blob[-_CHECKSUM:]:
        return "checksum mismatch"
    if key.hex() != digest:
        return "entry of another key"
    return None


def unpack(digest: str, blob: bytes) -> Entry:
    """Decode a blob; `DamagedEntryError` when it is not valid."""
    if why := damage(digest, blob):
        raise DamagedEntryError(why)
    return unpack_checked(blob)


def parse_json(document: str) -> Any:
    """Return the value of a JSON document; `ValueError` when it is not one."""
    try:
        value, end = _scan(document, 0)
    except StopIteration:
        end = -1
    if end == len(document):
        return value
    return _decoder.decode(document)  # It skips white space, and raises the error of a bad document.


def text(value: object) -> str:
    """Return `value` if it is text that UTF-8 can encode; `ValueError` or `TypeError` otherwise."""
    if type(value) is not str:
        raise TypeError(f"{value!r} is not text")
    if not value.isascii():
        value.encode()  # A lone surrogate, which JSON can contain, raises here.
    return value


def rows(value: object, width: int) -> list[list[str]]:
    """Return `value` if it is a list of lists of `width` texts; otherwise raise what `text` raises."""
    if type(value) is not list or not set(map(type, value)) <= {list}:
        raise TypeError(f"{value!r} is not a list of lists")
    if not value:
        return value
    if set(map(len, value)) != {width}:
        raise ValueError(f"{value!r} has rows that are not {width} long")
    joined = "".join(chain.from_iterable(value))  # one check for all, because there may be hundreds
    if not joined.isascii():
        joined.encode()  # as in `text`
    return value


def unpack_checked(blob: bytes) -> Entry:
    """Decode a blob that `damage` has accepted, as every blob from a `Chain` was."""
    meta, places = layout(blob)
    return Entry(meta, {name: blob[place] for name, place in places.items()})


def layout(blob: bytes) -> tuple[dict[str, Any], dict[str, slice]]:
    """Return the JSON part of a blob that `damage` has accepted, and the places of its sections."""
    start = JSON_AT + int.from_bytes(blob[_LENGTH_AT:JSON_AT], "little")
    try:
        header = parse_json(blob[JSON_AT:start].decode())
        meta, table = header["meta"], header["sections"]
        places: dict[str, slice] = {}
        for name, length in table:
            if type(name) is not str or name in places or type(length) is not int or length < 0:
                raise ValueError(f"section {name!r} of length {length!r}")
            end = start + length
            places[name] = slice(start, end)
            start = end
    except (ValueError, TypeError, KeyError, RecursionError) as bad:
        raise DamagedEntryError(f"unreadable header: {bad}") from None
    if not isinstance(meta, dict) or start != len(blob) - _CHECKSUM:
        raise DamagedEntryError("sections do not fill the entry")
    return meta, places
