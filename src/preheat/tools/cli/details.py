"""The details of one entry of the cache, for people and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from preheat.errors import InputError
from preheat.model.artifact import Artifact, EntryPoint, Header
from preheat.model.foreign import ForeignEntry
from preheat.toolchain.headers.states import is_toolkit
from preheat.tools.cli.output import columns, count, duration, size
from preheat.tools.cli.stored import CUDA, Stored

__all__ = ["details", "details_as_json", "file_of", "ptx_of"]


def ptx_of(entry: Stored) -> bytes:
    """Return the PTX of an entry. Raises `InputError` when it has none."""
    if isinstance(entry, Artifact):
        return entry.ptx
    return file_of(entry, next((name for name in entry.files if name.endswith(".ptx")), ".ptx"))


def file_of(entry: Stored, name: str) -> bytes:
    """Return a file of an entry. Raises `InputError` when it has no such file."""
    files = {"cubin": entry.cubin, "ptx": entry.ptx} if isinstance(entry, Artifact) else entry.files
    if name not in files:
        raise InputError(
            f"entry {entry.digest[:12]} has no file {name}", hint=f"it has {', '.join(files)}"
        )
    return files[name]


def details_as_json(entry: Stored) -> dict[str, Any]:
    """Return all facts about an entry, without its code, as JSON values."""
    if isinstance(entry, ForeignEntry):
        return {
            "key": entry.digest,
            "kind": entry.kind,
            "program": entry.label,
            "arch": entry.target,
            "foreign_key": entry.key,
            "variant": entry.variant,
            "properties": dict(entry.properties),
            "files": {name: len(content) for name, content in entry.files.items()},
            "provenance": entry.provenance._asdict(),
        }
    return {
        "key": entry.digest,
        "kind": CUDA,
        "program": entry.label,
        "arch": str(entry.arch),
        "toolchain": entry.toolchain,
        "parts": [list(part) for part in entry.parts],
        "names": dict(entry.names),
        "kernels": [_as_dict(kernel) for kernel in entry.entries],
        "headers": [header._asdict() for header in entry.headers],
        "cubin_bytes": len(entry.cubin),
        "ptx_bytes": len(entry.ptx),
        "provenance": entry.provenance._asdict(),
        "log": entry.log,
    }


def details(entry: Stored, *, all_headers: bool) -> Iterator[str]:
    """Yield the lines that describe an entry. Without `all_headers`, count those of the toolkit."""
    if isinstance(entry, ForeignEntry):
        return _foreign(entry)
    return _describe(entry, all_headers=all_headers)


def _foreign(entry: ForeignEntry) -> Iterator[str]:
    made = entry.provenance
    rows = [
        ("key", entry.digest),
        ("kind", entry.kind),
        ("program", entry.label or "-"),
        ("architecture", entry.target),
        (f"key of {entry.kind}", entry.key),
        ("variant", entry.variant),
        ("made", f"{made.created} in {duration(made.seconds)}" if made.created else ""),
    ]
    yield from columns(row for row in rows if row[1])
    yield "\nfiles"
    table = ((name, size(len(content))) for name, content in entry.files.items())
    yield from (f"  {line}" for line in columns(table, right=(1,)))
    if entry.properties:
        yield "\nproperties"
        yield from (f"  {line}" for line in columns(sorted(entry.properties.items())))


def _describe(artifact: Artifact, *, all_headers: bool) -> Iterator[str]:
    made = artifact.provenance
    yield from columns(
        [
            ("key", artifact.digest),
            ("program", artifact.label),
            ("architecture", str(artifact.arch)),
            ("compiler", artifact.toolchain),
            ("compiled", f"{made.created} in {duration(made.seconds)}"),
            ("code", f"cubin {size(len(artifact.cubin))}, PTX {size(len(artifact.ptx))}"),
        ]
    )
    yield "\nkernels"
    for entry in artifact.entries:
        yield from (f"  {line}" for line in _kernel(entry))
    yield "\nkey parts"
    yield from (f"  {line}" for line in columns(artifact.parts))
    if artifact.headers:
        yield f"\nheaders ({len(artifact.headers):,})"
        yield from (f"  {line}" for line in _headers(artifact.headers, everything=all_headers))
    if artifact.log.strip():
        yield "\ncompiler log"
        yield from (f"  {line}" for line in artifact.log.rstrip().split("\n"))


def _headers(headers: Sequence[Header], *, everything: bool) -> Iterator[str]:
    """Yield name and digest of header files. Without `everything`, count those of the toolkit."""
    own = [header for header in headers if everything or not is_toolkit(header.root)]
    yield from columns((h.root, h.name, h.digest[:12]) for h in own)
    if len(own) < len(headers):
        yield f"{len(headers) - len(own):,} of the CUDA toolkit; --headers lists them"


def _as_dict(entry: EntryPoint) -> dict[str, Any]:
    return {
        **entry._asdict(),
        "parameters": [parameter._asdict() for parameter in entry.parameters],
        "resources": entry.resources._asdict() if entry.resources else None,
    }


def _kernel(entry: EntryPoint) -> Iterator[str]:
    yield entry.prototype + (f"  [{entry.name}]" if entry.cpp else "")
    if entry.remark:
        yield f"  {entry.remark}"
    for index, parameter in enumerate(entry.parameters):
        where = f"offset {parameter.offset}, {count(parameter.size, 'byte')}, {parameter.kind}"
        yield f"  {index}: {parameter}  ({where})"
    if used := entry.resources:
        yield (
            f"  {count(used.registers, 'register')}, shared {size(used.shared)}, "
            f"stack {size(used.stack)}, spills {size(used.spill_stores)} out "
            f"{size(used.spill_loads)} in, {count(used.barriers, 'barrier')}"
        )
