"""Writing a manifest file, and storing the generated texts that it names."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from preheat.ahead.manifest.items import COVERAGES, ForeignProgram, GraphKeys, ManifestProgram
from preheat.ahead.manifest.reader import DIGEST_DIGITS, Reader, language_of, sha256
from preheat.cache.publish import publish
from preheat.errors import InputError
from preheat.files import read_whole
from preheat.locks import no_fork
from preheat.portable_paths import FILE, spelled_in_manifest
from preheat.program import Program

__all__ = ["write_manifest"]


def write_manifest(
    path: str | os.PathLike[str],
    programs: Sequence[ManifestProgram],
    foreign: Sequence[ForeignProgram],
    graphs: Sequence[GraphKeys],
    *,
    fresh: bool,
) -> None:
    """Write a manifest to `path`. Unless `fresh` is given, edit the manifest that is there."""
    with no_fork:  # A child forked during the import could not import the module itself.
        from preheat.ahead.manifest import document

    writer = _Writer(path)
    entries = [document.Entry("program", item.identity, writer.program(item)) for item in programs]
    entries += [document.Entry("foreign", item.identity, writer.foreign(item)) for item in foreign]
    entries += [
        document.Entry("graph", name, {"name": name, "keys": list(keys)}) for name, keys in graphs
    ]
    existing = None if fresh else _existing(path)
    text = None if existing is None else document.edited(*existing, entries)
    _publish(writer.path, (text or document.rendered(entries)).encode())


def _existing(path: str | os.PathLike[str]) -> tuple[str, dict[str, list[Any]]] | None:
    """Return the text of the manifest at `path` and the identities of its tables by kind.

    Returns None where there is no manifest that can be read.
    """
    try:
        reader = Reader(path)
        items, foreign, graphs = reader.read()
    except InputError:
        return None
    programs = [item.identity if isinstance(item, ManifestProgram) else None for item in items]
    return reader.text, {
        "program": programs,
        "foreign": [item.identity for item in foreign],
        "graph": [graph.name for graph in graphs],
    }


class _Writer:
    """Makes the rows of one manifest. Paths in a row are relative to the directory of the manifest."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.path.realpath(path)
        self.directory = os.path.dirname(self.path)
        self.sources = f"{Path(self.path).stem}.sources"

    def program(self, item: ManifestProgram) -> dict[str, Any]:
        """Store the generated texts of a program and return its row, without values that follow."""
        program = item.program
        origin, include = self._origin(program)
        row = {
            **origin,
            "options": program.options,
            **self._directories(program, include, origin.get("file")),
            "names": program.names,
            "entries": item.entries,
            "arch": [str(arch) for arch in item.archs],
            "seconds": round(item.seconds, 3),
            "asked": item.asked,
            "by": [caller.encode(errors="backslashreplace").decode() for caller in item.callers],
            "headers": {name: self._store(text, ".h") for name, text in program.headers},
        }
        return {key: value for key, value in row.items() if value}

    def foreign(self, item: ForeignProgram) -> dict[str, Any]:
        """Return the row of a request of another library, without values that follow."""
        row = {
            "kind": item.kind,
            "name": item.name,
            "root": self._relative(item.root) if item.root else "",
            "request": item.request,
            "recorded": item.recorded,
            "coverage": item.coverage if item.coverage != COVERAGES[0] else "",
            "arch": [str(arch) for arch in item.archs],
            "entries": item.entries,
            "seconds": round(item.seconds, 3),
            "asked": item.asked,
            "by": [caller.encode(errors="backslashreplace").decode() for caller in item.callers],
        }
        return {key: value for key, value in row.items() if value}

    def _origin(self, program: Program) -> tuple[dict[str, str], tuple[str, ...]]:
        """Return where the text of a program is, and the include directories that must be listed."""
        label, language, path = program.label, program.language, program.path
        if path is None or not self._can_refer_to(path, program):
            suffix = ".ptx" if language == "ptx" else ".cu"
            unneeded = path is not None and self._is_elsewhere(path) and not program.may_include
            include = () if unneeded else program.include
            return {"label": label, "source": self._store(program.source, suffix)}, include
        origin = {
            "label": label if label != os.path.basename(path) else "",
            "file": self._relative(path),
            "sha256": sha256(program.source),
            "language": language if language != language_of(path) else "",
        }
        return origin, program.include[1:]

    def _directories(
        self, program: Program, include: Iterable[str], file: str | None
    ) -> dict[str, list[str]]:
        """Return include directories and, unless that follows, how the program spells them."""
        known = dict(program.spellings)
        places = [self._relative(directory) for directory in include]
        spelled = [known[directory] for directory in include]
        follows = spelled == [spelled_in_manifest(place, file) for place in places]
        return {"include": places, "spelled": [] if follows else spelled}

    def _can_refer_to(self, path: str, program: Program) -> bool:
        """Return True if `Program.from_file(path)` gives this source and the same header search."""
        if self._is_elsewhere(path):
            return False
        try:
            as_is = read_whole(path) == program.source.encode()
            self._relative(path).encode()  # A file name need not be text.
        except (OSError, UnicodeEncodeError):
            return False
        return as_is and program.spellings[:1] == ((os.path.dirname(path), FILE),)

    def _is_elsewhere(self, path: str) -> bool:
        """Return True for a file that a bake on another machine would not find.

        That is a file of an installed package, or one that has only the root directory in common
        with the manifest.
        """
        return os.path.isabs(self._relative(path)) or f"-packages{os.sep}" in path

    def _relative(self, path: str) -> str:
        """Return `path` relative to the manifest; absolute if they have only the root in common."""
        path = os.path.abspath(path)
        if os.path.commonpath((self.directory, path)) == self.directory:
            return os.path.relpath(path, self.directory)
        parent, name = os.path.split(path)  # `..` leaves the target of a link: resolve links first.
        real = os.path.join(os.path.realpath(parent), name)
        near = os.path.commonpath((self.directory, real)) != os.path.sep
        return os.path.relpath(real, self.directory) if near else path

    def _store(self, text: str, suffix: str) -> str:
        """Store a text under its digest, and return its path relative to the manifest."""
        name = f"{self.sources}/{sha256(text)[:DIGEST_DIGITS]}{suffix}"
        _publish(os.path.join(self.directory, name), text.encode())
        return name


def _publish(path: str, blob: bytes) -> None:
    """Write a file in one step, so that no reader sees a part. An equal file is left alone."""
    if os.path.isfile(path) and Path(path).read_bytes() == blob:
        return
    os.makedirs(os.path.dirname(path), exist_ok=True)
    publish(Path(path), [blob])
