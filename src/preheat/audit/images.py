"""Modules that reached the driver: their kind, their digest, and who loaded them."""

from __future__ import annotations

import hashlib
import os
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from preheat.audit.events import Event, EventLog
from preheat.audit.sites import Caller, caller_of_event
from preheat.process.files import read_part
from preheat.toolchain.binaries import fatbin
from preheat.toolchain.binaries.elf import ELF, elf_size
from preheat.toolchain.binaries.fatbin import FatbinEntry, compiled_on, parse_fatbin

__all__ = ["Image", "Load", "canonical", "read_loads"]

_NAMES = {
    "cubin": "cubin", "fatbin": "fat binary", "ptx": "PTX", "ltoir": "LTO-IR", "object": "object",
    "archive": "archive", "linked": "link",
}  # fmt: skip

_MAX_BYTES = 1 << 30  # of a module


@dataclass(frozen=True)
class Image:
    """The bytes of a module. `file` is the file that they are in, if they are in one."""

    kind: str
    bytes: int
    digest: str | None = None
    file: str = ""
    contents: str = ""  # of a fat binary: what it has for which architecture


@dataclass(frozen=True)
class Load:
    """One load of a module. `compiled` says that the driver compiled it; `result` is a CUresult."""

    pid: int
    time: float
    call: str
    image: Image
    compiled: bool
    seconds: float
    result: int
    by: Caller
    library_path: str = ""  # the library that called the driver

    @property
    def is_module(self) -> bool:
        """Whether it put a module into a context, which a step of a link does not."""
        return not self.call.startswith("cuLink")


def read_loads(log: EventLog, directory: Path) -> tuple[Load, ...]:
    """Return all loads in the order of time, with the images that the processes have saved."""
    capabilities = {event.pid: int(event.number("capability")) for event in log.named("device")}
    known: dict[tuple[str, float, float], _Examined] = {}  # Many processes load the same files.
    loads = []
    for event in log.named("load"):
        place = (event.text("file"), event.number("offset"), event.number("bytes"))
        if not place[0] or (examined := known.get(place)) is None:
            examined = known[place] = _examine(event.text("kind"), _bytes(event, directory))
        loads.append(_load(event, examined, capabilities.get(event.pid)))
    return tuple(loads)


class _Examined(NamedTuple):
    """What the bytes of an image say."""

    kind: str
    bytes: int
    digest: str | None
    entries: tuple[FatbinEntry, ...] = ()


def _examine(kind: str, data: bytes | None) -> _Examined:
    if data is None:
        return _Examined(kind, 0, None)
    kind = _kind_of(data) if kind == "file" else kind
    entries: tuple[FatbinEntry, ...] = ()
    if kind == "fatbin":
        with suppress(ValueError):  # A damaged one has no entries that could be compiled.
            entries = parse_fatbin(data)
    return _Examined(kind, len(data), hashlib.sha256(canonical(data)).hexdigest(), entries)


def _load(event: Event, examined: _Examined, capability: int | None) -> Load:
    kind, size, digest, entries = examined
    names = (f"{each.kind} {each.arch}{'a' if each.specific else ''}" for each in entries)
    size = int(event.number("bytes")) or size
    contents = ", ".join(names)
    return Load(
        event.pid,
        event.time,
        event.text("call"),
        Image(_NAMES.get(kind, "unknown"), size, digest, event.text("file"), contents),
        kind in ("ptx", "ltoir") or compiled_on(entries, capability),
        event.number("seconds"),
        int(event.number("result")),
        caller_of_event(event),
        event.text("caller"),
    )


def _bytes(event: Event, directory: Path) -> bytes | None:
    """Return the bytes of an image: its copy, or its place in a file."""
    size = int(event.number("bytes"))
    try:
        if saved := os.path.basename(event.text("saved")):
            return read_part(directory / saved, _MAX_BYTES, own=True)
        path = event.text("file")
        offset = int(event.number("offset"))
        return read_part(path, _MAX_BYTES, offset=offset, size=size) if path else None
    except (OSError, ValueError, OverflowError):
        return None


def _kind_of(data: bytes) -> str:
    if data.startswith(ELF):
        return "cubin"
    if data.startswith(struct.pack("<I", fatbin.MAGIC)):
        return "fatbin"
    return "ptx" if b".version" in data[:4096] else "unknown"


def canonical(data: bytes) -> bytes:
    """Return the bytes that the driver reads: machine code without what follows its last section.

    The audit library saves exactly these, because a call of the driver gives no size. CuPy stores
    machine code without its last byte, which is zero. Its loads work because a zero follows every
    `bytes` object in memory. Such code is completed here.
    """
    if data.startswith(struct.pack("<I", fatbin.MAGIC)):
        return data
    if not data.startswith(ELF):
        return data.rstrip(b"\0")  # PTX may be followed by NUL bytes.
    image = data + b"\0"
    try:
        end = elf_size(lambda offset, size: image[offset : offset + size])
    except ValueError:
        return data
    return image[:end] if end <= len(image) else data
