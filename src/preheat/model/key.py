"""Keys: a request as a table of labelled parts, its digest, and the difference of two keys."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import starmap
from typing import NamedTuple

from preheat.model.arch import Arch
from preheat.model.program import Program
from preheat.process.lazy import lazy

__all__ = [
    "SCHEMA",
    "Key",
    "Part",
    "bundle_key",
    "explain",
    "include_parts",
    "is_text",
    "long_texts",
    "program_rows",
    "request_digest",
    "request_key",
]

SCHEMA = 2  # Raise it whenever equal parts come to mean another compile.
# Rows with the number of other rows. A linked program has them for each of its parts.
_COUNTS = r"(?:part\[\d+\]\.)?(?:options|names|includes)|parts"
_SCHEMA_PART = ("schema", str(SCHEMA).encode())
_SHOWN = 160  # A part of at most this many bytes is stored as text, a longer one as hash and size.


class Part(NamedTuple):
    """One row of a key as it is stored: label and value."""

    label: str
    value: str

    @classmethod
    def of(cls, label: str, payload: bytes) -> Part:
        if len(payload) <= _SHOWN:
            return cls(label, payload.decode("utf-8", "backslashreplace"))
        digest = hashlib.sha256(payload).hexdigest()
        return cls(label, f"{len(payload)} bytes, sha256 {digest}")


@dataclass(frozen=True)
class Key:
    """A key of the cache: labelled parts, and their digest.

    Two keys are equal if their parts are equal, in order. `Builder.key` returns the key of a program.

    Attributes:
        parts: Pairs of a label and bytes.

    Examples:
        >>> key = preheat.Key((("schema", b"1"), ("arch", b"sm_90")))
        >>> len(key.digest)
        64
    """

    parts: tuple[tuple[str, bytes], ...]

    @lazy
    def digest(self) -> str:
        """The SHA-256 of all labels and payloads, each after its length."""
        return hashlib.sha256(_encode_parts(self.parts)).hexdigest()

    @lazy
    def table(self) -> tuple[Part, ...]:
        """The parts as they are stored with an entry, long ones as hashes."""
        return tuple(starmap(Part.of, self.parts))

    def extended(self, parts: Iterable[tuple[str, bytes]]) -> Key:
        """Return this key with more parts.

        Examples:
            >>> key = preheat.Key((("schema", b"1"),)).extended([("arch", b"sm_90")])
            >>> [part.label for part in key.table]
            ['schema', 'arch']
        """
        return Key((*self.parts, *parts))


def _encode_parts(parts: Iterable[tuple[str, bytes]]) -> bytes:
    """Return the bytes of a key that are hashed: each label and payload after its length."""
    pieces: list[bytes] = []
    for label, payload in parts:
        name = label.encode()
        pieces += b"%d:%b%d:" % (len(name), name, len(payload)), payload
    return b"".join(pieces)


def request_key(program: Program, arch: Arch, toolchain: str) -> Key:
    """Return the key of one compile: exactly what determines its output.

    Include directories are left out: the contents of the headers found in them are checked on
    lookup instead, so the same program has the same key on two machines.
    """
    target = _target_parts(arch.name, program.language)
    return Key((_SCHEMA_PART, ("toolchain", toolchain.encode()), *target, *program_rows(program)))


def request_digest(program: Program, arch: Arch, toolchain: str) -> str:
    """Return the digest of `request_key`.

    Most programs have a label and a source and nothing else. Their digest is made without the parts:
    what all such programs of one compiler share is encoded once.
    """
    if program.options or program.headers or program.names or program.part_rows:
        return request_key(program, arch, toolchain).digest
    label, source = program.label.encode(), program.source.encode()
    start = _shared_start(toolchain, arch.name, program.language)
    text = b"%b%d:%b6:source%d:%b%b" % (start, len(label), label, len(source), source, _NO_ROWS)
    return hashlib.sha256(text).hexdigest()


@lru_cache(maxsize=64)
def _shared_start(toolchain: str, arch: str, language: str) -> bytes:
    """Return the hashed bytes of a `request_key` up to the length of the program's label."""
    first = (_SCHEMA_PART, ("toolchain", toolchain.encode()), *_target_parts(arch, language))
    return _encode_parts(first) + b"5:label"


def bundle_key(program: Program, arch: Arch) -> Key:
    """Return the key of one request in a bundle, which does not depend on the compiler.

    A sealed process need not have header files, so the include directories of a program that may
    include a file are part of it, as `preheat.model.portable_paths` spells them.
    """
    include = include_parts(program.include_spellings) if program.may_include else ()
    target = _target_parts(arch.name, program.language)
    return Key((_SCHEMA_PART, *target, *program_rows(program), *include))


def include_parts(spellings: tuple[str, ...]) -> Iterable[tuple[str, bytes]]:
    """Return the parts of a `bundle_key` that name include directories."""
    return _rows("include", spellings)


def program_rows(program: Program) -> tuple[tuple[str, bytes], ...]:
    """Return the rows of a key that describe the program, without architecture and compiler."""
    return (
        ("label", program.label.encode()),
        ("source", program.source.encode()),
        *_rows("option", program.options),
        *(_header_rows(program.headers) if program.headers else ()),
        *_rows("name", program.names),
        *program.part_rows,
    )


def is_text(label: str) -> bool:
    """Return whether a row of a key is a source or a header in memory."""
    return re.fullmatch(r"(?:part\[\d+\]\.)?(?:source|header:.*)", label, re.S) is not None


def long_texts(program: Program) -> dict[str, str]:
    """Return the sources and headers of a program that stored rows have only as a hash, by label."""
    rows = program_rows(program)
    return {label: row.decode() for label, row in rows if is_text(label) and len(row) > _SHOWN}


def _target_parts(arch: str, language: str) -> Iterable[tuple[str, bytes]]:
    return (
        ("arch", arch.encode()),
        ("language", language.encode()),
        ("form", b"cubin" if language == "ptx" else b"cubin+ptx"),
    )


def _header_rows(headers: tuple[tuple[str, str], ...]) -> list[tuple[str, bytes]]:
    return [(f"header:{name}", text.encode()) for name, text in headers]


def _rows(label: str, values: tuple[str, ...]) -> list[tuple[str, bytes]]:
    rows = [(f"{label}s", str(len(values)).encode())]
    for index, value in enumerate(values):
        # The name of a directory may be bytes that are not text.
        rows.append((f"{label}[{index}]", value.encode(errors="surrogateescape")))
    return rows


#: The hashed bytes after the source of a program without options, headers and names.
_NO_ROWS = _encode_parts((*_rows("option", ()), *_rows("name", ())))


def explain(a: Key | Iterable[Part], b: Key | Iterable[Part]) -> tuple[str, ...]:
    """Return one line for each part in which two keys, or two stored tables, differ.

    Examples:
        >>> program, builder = preheat.Program.of(SAXPY), preheat.default_builder()
        >>> preheat.explain(builder.key(program, "sm_90"), builder.key(program, "sm_90a"))
        ("arch: 'sm_90' became 'sm_90a'",)
    """
    left, right = (dict(k.table if isinstance(k, Key) else k) for k in (a, b))
    lines = []
    for label in {**left, **right}:  # In the order of the tables.
        if re.fullmatch(_COUNTS, label):  # The rows that it counts say more.
            continue
        if label not in right:
            lines.append(f"{label}: {left[label]!r} is gone")
        elif label not in left:
            lines.append(f"{label}: {right[label]!r} is new")
        elif left[label] != right[label]:
            lines.append(f"{label}: {left[label]!r} became {right[label]!r}")
    return tuple(lines)
