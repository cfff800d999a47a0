"""The result of a compile: machine code and all that is known about it, and its exact bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from preheat import container
from preheat.arch import Arch
from preheat.errors import InputError, UnknownEntryError
from preheat.key import Part

__all__ = ["Artifact", "EntryPoint", "Header", "Parameter", "Provenance", "Resources"]


class Parameter(NamedTuple):
    """One kernel parameter: its place in the parameter block, its PTX kind, its C++ type if known."""

    offset: int
    size: int
    align: int
    kind: str
    pointer: bool = False
    type: str | None = None

    def __str__(self) -> str:
        if self.type is not None:
            return self.type
        if self.pointer:
            return "pointer"
        return self.kind if self.kind != "b8" else f"{self.size} bytes"


class Resources(NamedTuple):
    """What one entry uses, in bytes where not a count."""

    registers: int = 0
    shared: int = 0
    stack: int = 0
    spill_stores: int = 0
    spill_loads: int = 0
    barriers: int = 0


class EntryPoint(NamedTuple):
    """A kernel in an artifact. `name` is what the driver knows, `cpp` its C++ name where it has one."""

    name: str
    parameters: tuple[Parameter, ...]
    cpp: str | None = None
    resources: Resources | None = None
    directives: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The name a person would use."""
        return self.cpp or self.name

    def __str__(self) -> str:
        return f"{self.title}({', '.join(map(str, self.parameters))})"


class Header(NamedTuple):
    """A file the compiler opened: which include root it came from, its name there, its content."""

    root: str
    name: str
    digest: str


class Provenance(NamedTuple):
    """What differs from one run to the next: never part of a bundle, never compared."""

    seconds: float = 0.0
    created: str = ""
    timing: str = ""


@dataclass(frozen=True, repr=False)
class Artifact:
    """Verified machine code. Immutable; two artifacts of one key are interchangeable."""

    digest: str
    label: str
    arch: Arch
    toolchain: str
    parts: tuple[Part, ...]
    entries: tuple[EntryPoint, ...]
    cubin: bytes
    ptx: bytes
    names: Mapping[str, str] = field(default_factory=dict, hash=False)  # expression -> entry name
    headers: tuple[Header, ...] = ()
    log: str = ""
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)  # for debuggers
    provenance: Provenance = field(default_factory=Provenance, compare=False)

    def __repr__(self) -> str:
        kernels = ", ".join(map(str, self.entries)) or "no kernels"
        return f"<Artifact {self.label} for {self.arch}, {self.digest[:12]}: {kernels}>"

    @property
    def size(self) -> int:
        """Bytes of code: cubin and PTX."""
        return len(self.cubin) + len(self.ptx)

    def entry(self, name: str) -> EntryPoint:
        """The kernel called `name`: `extern "C"` or plain C++, qualified or not, or `tk<float>`.

        `UnknownEntryError` lists what there is; a name that several kernels share is not guessed.
        """
        found = self._by_name.get(self.names.get(name, name))
        if found is not None:
            return found
        meant = self._by_cpp.get(_folded(name), [])
        if len(meant) > 1:
            raise InputError(
                f"{self.label} has {len(meant)} kernels {name!r}: {', '.join(map(str, meant))}",
                hint=f"use a mangled name: {', '.join(e.name for e in meant)}",
            )
        if not meant:
            raise UnknownEntryError(name, self.label, [e.title for e in self.entries])
        return meant[0]

    def name_of(self, entry: EntryPoint) -> str:
        """The name a person would use for `entry`, where `entry(name)` finds it by that."""
        meant = self._by_name.get(entry.title) or self._by_cpp.get(_folded(entry.title))
        return entry.title if meant in (entry, [entry]) else entry.name

    @cached_property
    def _by_name(self) -> dict[str, EntryPoint]:
        return {e.name: e for e in self.entries}

    @cached_property
    def _by_cpp(self) -> dict[str, list[EntryPoint]]:
        """Entries by C++ name, and by the last part of it where that is not another's whole name."""
        full: dict[str, list[EntryPoint]] = {}
        short: dict[str, list[EntryPoint]] = {}
        for entry in self.entries:
            if entry.cpp:
                full.setdefault(_folded(entry.cpp), []).append(entry)
                short.setdefault(_unqualified(_folded(entry.cpp)), []).append(entry)
        return {**short, **full}

    def encode(self) -> bytes:
        """The bytes of this artifact as one entry; see `preheat.container`."""
        meta = {
            "kind": "artifact",
            "label": self.label,
            "arch": str(self.arch),
            "toolchain": self.toolchain,
            "parts": self.parts,
            "entries": self.entries,
            "names": dict(self.names),
            "headers": self.headers,
        }
        sections = {
            "cubin": self.cubin,
            "ptx": self.ptx,
            "log": self.log.encode(),
            "provenance": json.dumps(self.provenance).encode(),
        }
        if self.sources:
            sections["sources"] = json.dumps(dict(self.sources), sort_keys=True).encode()
        return container.pack(self.digest, meta, sections)

    @classmethod
    def decode(cls, digest: str, meta: Mapping[str, Any], sections: Mapping[str, bytes]) -> Artifact:
        """The artifact in an unpacked entry; `DamagedEntryError` when it holds something else."""
        try:
            return cls(
                digest=digest,
                label=meta["label"],
                arch=Arch.parse(meta["arch"]),
                toolchain=meta["toolchain"],
                parts=tuple(map(Part._make, meta["parts"])),
                entries=tuple(map(_entry_point, meta["entries"])),
                names=meta["names"],
                headers=tuple(map(Header._make, meta["headers"])),
                cubin=sections["cubin"],
                ptx=sections["ptx"],
                log=sections["log"].decode(),
                sources=_texts(json.loads(sections.get("sources", b"{}"))),
                provenance=Provenance(*json.loads(sections.get("provenance", b"[]"))),
            )
        except (KeyError, TypeError, ValueError) as bad:
            raise container.DamagedEntryError(f"not an artifact: {bad!r}") from None


def _entry_point(row: Sequence[Any]) -> EntryPoint:
    name, parameters, cpp, resources, directives = row
    used = None if resources is None else Resources._make(resources)
    return EntryPoint(name, tuple(map(Parameter._make, parameters)), cpp, used, tuple(directives))


def _texts(rows: Any) -> dict[str, str]:
    if not isinstance(rows, dict) or not all(isinstance(text, str) for text in rows.values()):
        raise TypeError("sources are no texts")
    return rows


def _folded(name: str) -> str:
    return "".join(name.split())


def _unqualified(name: str) -> str:
    """`inner` of `ns::inner`; template arguments keep their own qualifiers."""
    head, angle, rest = name.partition("<")
    return head.rpartition("::")[2] + angle + rest
