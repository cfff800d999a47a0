"""Writing a manifest file, and storing the generated texts that it names."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from preheat.ahead.manifest.items import (
    COVERAGES,
    ForeignProgram,
    GraphKeys,
    ManifestProgram,
    UnreadableProgram,
    Unrecorded,
)
from preheat.ahead.manifest.reader import DIGEST_DIGITS, Reader, language_of, sha256
from preheat.ahead.manifest.recorded import recorded_name, write_recorded
from preheat.errors import InputError
from preheat.model.linked_program import KINDS, BinaryPart, LinkedProgram
from preheat.model.portable_paths import FILE, spelled_in_manifest
from preheat.model.program import Program
from preheat.model.setting_values import split_pin
from preheat.process.files import read_whole
from preheat.process.lazy import LazyModule
from preheat.store.publish import publish

if TYPE_CHECKING:
    from preheat.ahead.manifest import document
else:  # Its TOML library is only needed when a manifest is written.
    document = LazyModule("preheat.ahead.manifest.document")

__all__ = ["write_manifest"]


def write_manifest(
    path: str | os.PathLike[str],
    programs: Sequence[ManifestProgram],
    foreign: Sequence[ForeignProgram],
    graphs: Sequence[GraphKeys],
    unrecorded: Sequence[Unrecorded],
    *,
    recorded: Sequence[str],
    fresh: bool,
) -> None:
    """Write a manifest to `path`. Unless `fresh` is given, edit the manifest that is there.

    `recorded` are the bundles with entries that cannot be made again. Those that `foreign` refers to
    are written to one bundle beside the manifest.
    """
    writer = _Writer(path)
    entries = [writer.describe(item) for item in programs]
    entries += [
        document.ManifestTable("foreign", item.identity, writer.describe_foreign(item))
        for item in foreign
    ]
    entries += [
        document.ManifestTable("graph", name, {"name": name, "keys": list(keys)})
        for name, keys in graphs
    ]
    entries += [
        document.ManifestTable("unrecorded", item.identity, _describe_unrecorded(item))
        for item in unrecorded
    ]
    existing = None if fresh else _read_existing(path)
    kept = write_recorded(writer.path, foreign, recorded)
    text = None if existing is None else document.edit(*existing, entries, kept)
    before = _find_named_bundle(path)
    _publish(writer.path, (text or document.render(entries, kept)).encode())
    if before is not None and not kept:
        before.unlink(missing_ok=True)


def _find_named_bundle(path: str | os.PathLike[str]) -> Path | None:
    """Return the bundle that `preheat record` has written beside the manifest at `path`, if any."""
    try:
        place, _ = split_pin(Reader(path).read_recorded())
    except InputError:
        return None
    return place if place.name == recorded_name(os.path.realpath(path)) else None


def _read_existing(path: str | os.PathLike[str]) -> tuple[str, dict[str, list[Any]]] | None:
    """Return the text of the manifest at `path` and the identities of its tables by kind.

    Returns None if there is no manifest that can be read.
    """
    try:
        reader = Reader(path)
        found = reader.read()
    except InputError:
        return None
    return reader.text, {
        **_identities(reader, found.programs),
        "foreign": [item.identity for item in found.foreign],
        "graph": [graph.name for graph in found.graphs],
        "unrecorded": [item.identity for item in found.unrecorded],
    }


def _identities(
    reader: Reader, items: Sequence[ManifestProgram | UnreadableProgram]
) -> dict[str, list[Any]]:
    """Return the identities of [[program]] and [[link]] tables; None for one that cannot be read."""
    found = [item.identity if isinstance(item, ManifestProgram) else None for item in items]
    own = reader.count("program")
    return {"program": found[:own], "link": found[own:]}


class _Writer:
    """Makes the rows of one manifest. Paths in a row are relative to the directory of the manifest."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.path.realpath(path)
        self.directory = os.path.dirname(self.path)
        self.sources = f"{Path(self.path).stem}.sources"

    def describe(self, item: ManifestProgram) -> document.ManifestTable:
        """Return the table of a program: a [[link]] for a linked program, otherwise a [[program]]."""
        observed = {
            "entries": item.entries,
            "arch": [str(arch) for arch in item.archs],
            "seconds": round(item.seconds, 3),
            "requests": item.requests,
            "callers": list(map(_escape, item.callers)),
        }
        program = item.program
        if isinstance(program, LinkedProgram):
            return document.ManifestTable(
                "link", item.identity, _drop_defaults({**self._describe_link(program), **observed})
            )
        own = self._describe_source(program)
        headers = {"headers": own.pop("headers", {})}  # TOML has a table after the values.
        return document.ManifestTable(
            "program", item.identity, _drop_defaults({**own, **observed, **headers})
        )

    def _describe_link(self, program: LinkedProgram) -> dict[str, Any]:
        derived = LinkedProgram.of(program.parts, lto=program.lto).label
        return {
            "label": program.label if program.label != derived else "",
            "lto": program.lto,
            "options": program.options,
            "parts": [
                self._describe_binary(part)
                if isinstance(part, BinaryPart)
                else self._describe_source(part)
                for part in program.parts
            ],
        }

    def _describe_source(self, program: Program) -> dict[str, Any]:
        """Store the generated texts of a program and return what describes it, without defaults."""
        origin, include = self._describe_origin(program)
        row = {
            **origin,
            "options": program.options,
            **self._describe_directories(program, include, origin.get("file")),
            "names": program.names,
            "headers": {name: self._store(text.encode(), ".h") for name, text in program.headers},
        }
        return _drop_defaults(row)

    def _describe_binary(self, part: BinaryPart) -> dict[str, Any]:
        """Store a compiled part unless its file can be named, and return what describes it."""
        path = part.path
        if path is None or self._is_elsewhere(path) or not _holds(path, part.data):
            stored = self._store(part.data, KINDS[part.kind][0])
            return {"label": part.label, "source": stored, "language": part.kind}
        label = part.label if part.label != os.path.basename(path) else ""
        row = {"label": label, "file": self._make_relative(path), "sha256": part.digest}
        return _drop_defaults({**row, "language": part.kind})

    def describe_foreign(self, item: ForeignProgram) -> dict[str, Any]:
        """Return the row of a request of another library, without default values."""
        row = {
            "kind": item.kind,
            "name": item.name,
            "root": self._make_relative(item.root) if item.root else "",
            "request": item.request,
            "recorded": item.recorded,
            "coverage": item.coverage if item.coverage != COVERAGES[0] else "",
            "arch": [str(arch) for arch in item.archs],
            "entries": item.entries,
            "seconds": round(item.seconds, 3),
            "requests": item.requests,
            "callers": list(map(_escape, item.callers)),
        }
        return {key: value for key, value in row.items() if value}

    def _describe_origin(self, program: Program) -> tuple[dict[str, str], tuple[str, ...]]:
        """Return where the text of a program is, and the include directories that must be listed."""
        label, language, path = program.label, program.language, program.path
        if path is None or not self._can_refer_to(path, program):
            suffix = ".ptx" if language == "ptx" else ".cu"
            unneeded = path is not None and self._is_elsewhere(path) and not program.may_include
            include = () if unneeded else program.include
            stored = self._store(program.source.encode(), suffix)
            return {"label": label, "source": stored}, include
        origin = {
            "label": label if label != os.path.basename(path) else "",
            "file": self._make_relative(path),
            "sha256": sha256(program.source),
            "language": language if language != language_of(path) else "",
        }
        return origin, program.include[1:]

    def _describe_directories(
        self, program: Program, include: Iterable[str], file: str | None
    ) -> dict[str, list[str]]:
        """Return include directories, and their spellings if these differ from the default."""
        known = dict(program.spellings)
        places = [self._make_relative(directory) for directory in include]
        spelled = [known[directory] for directory in include]
        follows = spelled == [spelled_in_manifest(place, file) for place in places]
        return {"include": places, "spelled": [] if follows else spelled}

    def _can_refer_to(self, path: str, program: Program) -> bool:
        """Return True if `Program.from_file(path)` gives this source and the same header search."""
        if self._is_elsewhere(path):
            return False
        try:
            self._make_relative(path).encode()  # A file name need not be text.
        except UnicodeEncodeError:
            return False
        found_first = program.spellings[:1] == ((os.path.dirname(path), FILE),)
        return found_first and _holds(path, program.source.encode())

    def _is_elsewhere(self, path: str) -> bool:
        """Return True for a file that a bake on another machine would not find.

        That is a file of an installed package, or one that has only the root directory in common
        with the manifest.
        """
        return os.path.isabs(self._make_relative(path)) or f"-packages{os.sep}" in path

    def _make_relative(self, path: str) -> str:
        """Return `path` relative to the manifest; absolute if they have only the root in common."""
        path = os.path.abspath(path)
        if os.path.commonpath((self.directory, path)) == self.directory:
            return os.path.relpath(path, self.directory)
        parent, name = os.path.split(path)  # `..` leaves the target of a link: resolve links first.
        real = os.path.join(os.path.realpath(parent), name)
        near = os.path.commonpath((self.directory, real)) != os.path.sep
        return os.path.relpath(real, self.directory) if near else path

    def _store(self, data: bytes, suffix: str) -> str:
        """Store a text or a compiled part under its digest, and return its path in the manifest."""
        name = f"{self.sources}/{hashlib.sha256(data).hexdigest()[:DIGEST_DIGITS]}{suffix}"
        _publish(os.path.join(self.directory, name), data)
        return name


def _describe_unrecorded(item: Unrecorded) -> dict[str, Any]:
    """Return the row of what was not recorded. Names of programs need not be text."""
    row = {
        "library": _escape(item.library),
        "compiler": _escape(item.compiler),
        "seconds": round(item.seconds, 3),
        "callers": list(map(_escape, item.callers)),
    }
    return _drop_defaults(row)


def _escape(name: str) -> str:
    """Return a name in which everything that is not text is escaped."""
    return name.encode(errors="backslashreplace").decode()


def _drop_defaults(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if value}


def _holds(path: str, data: bytes) -> bool:
    """Return whether a file can be read and has this content."""
    try:
        return read_whole(path) == data
    except OSError:
        return False


def _publish(path: str, blob: bytes) -> None:
    """Write a file atomically, so that no reader sees a part of it. An equal file is not rewritten."""
    if os.path.isfile(path) and Path(path).read_bytes() == blob:
        return
    os.makedirs(os.path.dirname(path), exist_ok=True)
    publish(Path(path), [blob])
