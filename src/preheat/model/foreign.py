"""Entries of other libraries: the files that one of their compilers made, under that library's key."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

from preheat.errors import InputError, short_repr
from preheat.model import codec
from preheat.model.arch import Arch
from preheat.model.artifact import Provenance, read_provenance
from preheat.model.codec import text

__all__ = ["ForeignEntry", "ForeignRequest", "foreign_digest", "foreign_kind", "is_foreign"]

_KIND = re.compile(r"[a-z][a-z0-9_.-]{0,31}")
_PREFIX = "foreign:"  # of the kind in the metadata of an entry
# The first bytes of the JSON part, by which a listing finds the kind without reading the entry.
_FRONT = re.compile(rb'\{"meta":\{"kind":"foreign:([a-z0-9_.-]{1,32})"')
_FILE = "file:"  # of the names of the sections that are files


class ForeignRequest(NamedTuple):
    """The identity of an entry, and a description for people; see `ForeignEntry`."""

    kind: str
    key: str
    variant: str = ""
    label: str = ""
    arch: Arch | None = None

    @property
    def digest(self) -> str:
        """The digest of the entry in caches and bundles."""
        return foreign_digest(self.kind, self.key, self.variant)

    @property
    def reference(self) -> str:
        """Key and variant as one text, from which `referenced` makes the request again."""
        key = self.key.replace("%", "%25").replace(" ", "%20")
        return f"{key} {self.variant}" if self.variant else key

    @classmethod
    def referenced(
        cls, kind: str, reference: str, label: str = "", arch: Arch | None = None
    ) -> ForeignRequest:
        """Return the request whose `reference` is given."""
        key, _, variant = reference.partition(" ")
        return cls(kind, key.replace("%20", " ").replace("%25", "%"), variant, label, arch)

    @property
    def name(self) -> str:
        """The label; the beginning of the key if there is no label."""
        return self.label or self.key[:24]

    @property
    def title(self) -> str:
        """The kind and the name."""
        return f"{self.kind} {self.name}"

    @property
    def target(self) -> str:
        """The architecture in words."""
        return "any" if self.arch is None else str(self.arch)


@dataclass(frozen=True, repr=False)
class ForeignEntry:
    """Named files of another library, and what identifies them.

    `preheat.put_entry`, `get_entry` and `obtain_entry` return it. Kind, key and variant are the
    identity of an entry.

    Attributes:
        kind: The library or the use, such as `"triton"`.
        key: The key of that library, verbatim.
        files: Contents by name.
        variant: A text that distinguishes different entries for which the library has the same key.
        label: A name for people.
        arch: The architecture, or None for files that do not depend on it.
        properties: Texts that the user of the entry may read.
        provenance: Facts about the compile that made the files.

    Examples:
        >>> entry = preheat.put_entry("mylib", "v1", {"kernel.cubin": b"..."}, label="kernel")
        >>> entry.title, entry.size
        ('mylib kernel', 3)
    """

    kind: str
    key: str
    files: Mapping[str, bytes]
    variant: str = ""
    label: str = ""
    arch: Arch | None = None
    properties: Mapping[str, str] = field(default_factory=dict)
    provenance: Provenance = field(default_factory=Provenance, compare=False)

    def __post_init__(self) -> None:
        foreign_digest(
            self.kind, self.key, self.variant
        )  # It raises for a kind or a key that cannot be used.
        if not isinstance(self.files, Mapping):
            raise InputError(
                f"the files of an entry are a mapping from names to bytes, not {short_repr(self.files)}"
            )
        for name, content in self.files.items():
            if not isinstance(name, str) or not name:
                raise InputError(f"a file of an entry has a name, not {short_repr(name)}")
            if not isinstance(content, bytes):
                raise InputError(f"file {name!r} of an entry is bytes, not {type(content).__name__}")
        for value in (self.label, *self.files, *self.properties, *self.properties.values()):
            _require_text(value)

    def __repr__(self) -> str:
        target = "" if self.arch is None else f" for {self.arch}"
        return f"<ForeignEntry {self.title}{target}, {self.digest[:12]}: {', '.join(self.files)}>"

    @property
    def request(self) -> ForeignRequest:
        """The request that this entry answers."""
        return ForeignRequest(self.kind, self.key, self.variant, self.label, self.arch)

    @property
    def digest(self) -> str:
        """The digest under which caches and bundles keep the entry."""
        return self.request.digest

    @property
    def title(self) -> str:
        """The kind and the label; the beginning of the key for an entry without a label."""
        return self.request.title

    @property
    def target(self) -> str:
        """The architecture in words."""
        return self.request.target

    @property
    def size(self) -> int:
        """The size of the files in bytes."""
        return sum(map(len, self.files.values()))

    def encode(self, *, provenance: bool = True) -> bytes:
        """Encode the entry; see `preheat.model.codec`.

        Without `provenance`, equal files give equal bytes, whenever and wherever they were made.
        """
        # The names of these fields are sorted, and the kind has to be the first.
        meta = {
            "kind": f"{_PREFIX}{self.kind}",
            "label": self.label,
            "name": self.key,
            "properties": dict(self.properties),
            "target": None if self.arch is None else str(self.arch),
            "variant": self.variant,
        }
        sections = {f"{_FILE}{name}": self.files[name] for name in sorted(self.files)}
        if provenance:
            sections["provenance"] = json.dumps(self.provenance).encode()
        return codec.pack(self.digest, meta, sections)

    @classmethod
    def decode(
        cls, digest: str, meta: Mapping[str, Any], sections: Mapping[str, bytes]
    ) -> ForeignEntry:
        """Decode an unpacked entry. Raises `DamagedEntryError` when it is not a foreign entry."""
        try:
            kind, properties, target = text(meta["kind"]), meta["properties"], meta["target"]
            if not kind.startswith(_PREFIX):
                raise ValueError(f"its kind is {kind!r}")
            if type(properties) is not dict or type(target) not in (str, type(None)):
                raise TypeError("its properties are not a table, or its target is not text")
            entry = cls(
                kind.removeprefix(_PREFIX),
                text(meta["name"]),
                {
                    name.removeprefix(_FILE): content
                    for name, content in sections.items()
                    if name.startswith(_FILE)
                },
                variant=text(meta["variant"]),
                label=text(meta["label"]),
                arch=None if target is None else Arch.parse(target),
                properties=properties,
                provenance=read_provenance(sections.get("provenance", b"[]")),
            )
        except (KeyError, TypeError, ValueError, RecursionError, InputError) as bad:
            raise codec.DamagedEntryError(f"not an entry of another library: {bad!r:.200}") from None
        if entry.digest != digest:
            raise codec.DamagedEntryError("the key of the entry does not match its digest")
        return entry

    def differences(self, other: ForeignEntry) -> Iterator[str]:
        """Yield what differs between two entries of one key."""
        for name in sorted({*self.properties, *other.properties}):
            mine, theirs = self.properties.get(name), other.properties.get(name)
            if mine != theirs:
                yield f"{name}: {mine} and {theirs}"
        for name in sorted({*self.files, *other.files}):
            if self.files.get(name) != other.files.get(name):
                yield f"file {name} differs"


def foreign_digest(kind: str, key: str, variant: str = "") -> str:
    """Return the digest of an entry. Raises `InputError` for a kind or a key that cannot be used."""
    if not isinstance(kind, str) or not isinstance(key, str) or not isinstance(variant, str):
        _reject_identity(kind, key, variant)
    return _digest(kind, key, variant)


@functools.lru_cache(maxsize=256)  # A lookup needs the digest of one request several times.
def _digest(kind: str, key: str, variant: str) -> str:
    if _KIND.fullmatch(kind) is None or not key:
        _reject_identity(kind, key, variant)
    for value in (key, variant):
        _require_text(value)
    # With the length of the key, two identities with the same joined text differ.
    identity = f"preheat foreign entry\0{kind}\0{len(key)}\0{key}\0{variant}"
    return hashlib.sha256(identity.encode()).hexdigest()


def _reject_identity(kind: object, key: object, variant: object) -> NoReturn:
    if not isinstance(kind, str) or _KIND.fullmatch(kind) is None:
        raise InputError(
            f"{short_repr(kind)} is not a kind of entry",
            hint="a kind is a short name in lower case, such as 'triton'",
        )
    if not isinstance(key, str) or not key:
        raise InputError(f"the key of an entry is text that is not empty, not {short_repr(key)}")
    raise InputError(f"{short_repr(variant)} in an entry is not text")


def is_foreign(meta: Mapping[str, Any]) -> bool:
    """Return whether the metadata of an entry describes a foreign entry."""
    return str(meta.get("kind")).startswith(_PREFIX)


def foreign_kind(front: bytes) -> str | None:
    """Return the kind of a foreign entry that begins with `front`; None for every other entry."""
    match = _FRONT.match(front, codec.JSON_AT)
    return None if match is None else match[1].decode()


def _require_text(value: object) -> None:
    try:
        text(value)
    except (TypeError, UnicodeEncodeError):
        raise InputError(f"{short_repr(value)} in an entry is not text") from None
