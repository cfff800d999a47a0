"""Reading a manifest file: checks every key, and names the line of what is wrong."""

from __future__ import annotations

import hashlib
import json
import os
import re
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from preheat.ahead.manifest.items import (
    COVERAGES,
    ForeignProgram,
    GraphKeys,
    ManifestProgram,
    UnreadableProgram,
    Unrecorded,
    key_literal,
)
from preheat.errors import InputError, did_you_mean
from preheat.model.arch import Arch
from preheat.model.linked_program import KINDS, BinaryPart, LinkedProgram
from preheat.model.portable_paths import is_spelling, spelled_in_manifest
from preheat.model.program import Program
from preheat.model.setting_values import split_pin
from preheat.process.files import read_whole
from preheat.process.lazy import LazyModule
from preheat.process.messages import printable
from preheat.store.bundle import MAGIC

if TYPE_CHECKING:
    import tomllib
else:  # It is only needed when a manifest is read.
    tomllib = LazyModule("tomllib")

__all__ = ["DIGEST_DIGITS", "VERSION", "VERSION_1_KEYS", "Reader", "language_of", "sha256"]

VERSION = 2
VERSION_1_KEYS = {"requests": "asked", "callers": "by"}  # the names of keys that were renamed
DIGEST_DIGITS = 16  # of a SHA-256 in the name of a stored text
_RECORDED_HINT = "'preheat record' writes this line; it ends with @sha256: and 64 digits"


# The time and the memory of a parser grow with the square of the parts of a dotted key. A quantifier
# with a second plus never gives characters back, so that the search takes linear time.
_MAX_KEY_PARTS = 100
_KEY_PART = r"""(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')"""
_LONG_KEY = re.compile(rf"(?<![\w-]){_KEY_PART}(?:[ \t]*+\.[ \t]*+{_KEY_PART}){{{_MAX_KEY_PARTS}}}")


def sha256(text: str) -> str:
    """Return the SHA-256 of `text` in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def language_of(path: str) -> str:
    """Return the language that follows from a file name, as in `Program.from_file`."""
    return "ptx" if Path(path).suffix == ".ptx" else "cuda"


def _is_table(text: str) -> bool:
    """Return whether a text is a JSON object."""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _is_list(values: object, of: type) -> bool:
    return isinstance(values, list) and all(isinstance(value, of) for value in values)


# The types of values, as error messages describe them, and their tests.
_TYPES: Mapping[str, Callable[[Any], bool]] = {
    "text": lambda v: isinstance(v, str),
    "a list of texts": lambda v: _is_list(v, str),
    "a table from name to file": lambda v: isinstance(v, dict) and _is_list([*v.values()], str),
    "a whole number": lambda v: type(v) is int and v >= 0,
    "a number of seconds": lambda v: type(v) in (int, float) and 0 <= v < 1e9,
    "true or false": lambda v: isinstance(v, bool),
    "a list of tables": lambda v: _is_list(v, dict),
    "written as [[program]]": lambda v: _is_list(v, dict),
    "written as [[link]]": lambda v: _is_list(v, dict),
    "written as [[foreign]]": lambda v: _is_list(v, dict),
    "written as [[graph]]": lambda v: _is_list(v, dict),
    "written as [[unrecorded]]": lambda v: _is_list(v, dict),
}
_TOP = {
    "version": "a whole number",
    "recorded": "text",
    "program": "written as [[program]]",
    "link": "written as [[link]]",
    "foreign": "written as [[foreign]]",
    "graph": "written as [[graph]]",
    "unrecorded": "written as [[unrecorded]]",
}
# What describes a program: in a [[program]] of its own, or as one of the `parts` of a [[link]].
_SOURCE = {
    **dict.fromkeys(("label", "file", "source", "sha256", "language"), "text"),
    **dict.fromkeys(("options", "include", "spelled", "names"), "a list of texts"),
    "headers": "a table from name to file",
}
_OBSERVED = {
    **dict.fromkeys(("entries", "arch", "callers"), "a list of texts"),
    "seconds": "a number of seconds",
    "requests": "a whole number",
}
_TABLES = {
    "program": {**_SOURCE, **_OBSERVED},
    "link": {
        "label": "text",
        "lto": "true or false",
        "options": "a list of texts",
        "parts": "a list of tables",
        **_OBSERVED,
    },
    "foreign": {
        **dict.fromkeys(("kind", "name", "root", "request", "recorded", "coverage"), "text"),
        **dict.fromkeys(("arch", "entries", "callers"), "a list of texts"),
        "seconds": "a number of seconds",
        "requests": "a whole number",
    },
    "graph": {"name": "text", "keys": "a list of texts"},
    "unrecorded": {
        **dict.fromkeys(("library", "compiler"), "text"),
        "seconds": "a number of seconds",
        "callers": "a list of texts",
    },
}


class _Table(NamedTuple):
    """One [[program]], [[link]], [[foreign]], [[graph]] or [[unrecorded]] of the file."""

    kind: str
    number: int  # among the tables of its kind, from 0
    values: Mapping[str, Any]

    @property
    def title(self) -> str:
        """The first of its naming keys that has a value."""
        names = (self.values.get(key) for key in ("label", "name", "file", "source", "library"))
        found = next((name for name in names if isinstance(name, str) and name), None)
        return printable(found) if found else f"{self.kind} {self.number + 1}"


class Contents(NamedTuple):
    """The tables of a manifest file. Linked programs come after the others."""

    programs: list[ManifestProgram | UnreadableProgram]
    foreign: list[ForeignProgram]
    graphs: list[GraphKeys]
    unrecorded: list[Unrecorded]


class Reader:
    """Reads one manifest file. Errors name the file and, where possible, the line and the title."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self.directory = os.path.dirname(os.path.realpath(path))
        self.text = _read_text(self.path, hint="'preheat record -- COMMAND' writes a manifest")

    def read(self) -> Contents:
        """Return the tables in the order of the file.

        A wrong key or value is an error. A program whose source cannot be read is returned as
        `UnreadableProgram`.
        """
        top = self._read_top()
        graphs = [self._read_graph(table) for table in self._read_tables(top, "graph")]
        foreign = [self._read_foreign(table) for table in self._read_tables(top, "foreign")]
        programs = [self._read_program_table(table) for table in self._read_tables(top, "program")]
        programs += [self._read_link(table) for table in self._read_tables(top, "link")]
        unrecorded = [self._read_unrecorded(table) for table in self._read_tables(top, "unrecorded")]
        return Contents(programs, foreign, graphs, unrecorded)

    def read_recorded(self) -> str:
        """Return the path of the bundle with entries that cannot be made again, with its pin.

        The text is empty for a manifest without such entries.
        """
        name: str = self._read_top().get("recorded", "")
        if not name:
            return ""
        try:
            place, pin = split_pin(name)
        except InputError as bad:
            raise self._refuse(str(bad), key="recorded", hint=_RECORDED_HINT) from None
        if pin is None:
            raise self._refuse("recorded has no SHA-256", key="recorded", hint=_RECORDED_HINT)
        return f"{self._resolve(str(place))}@sha256:{pin}"

    def count(self, kind: str) -> int:
        """Return the number of tables of a kind."""
        return len(self._read_top().get(kind, ()))

    def _read_top(self) -> dict[str, Any]:
        """Parse the file and check its version and its top-level keys."""
        if long := _LONG_KEY.search(self.text):
            above = self.text.count("\n", 0, long.start())
            raise self._refuse(f"a key has more than {_MAX_KEY_PARTS} parts", line=above + 1)
        try:
            top = tomllib.loads(self.text)
        except (ValueError, RecursionError) as bad:  # ValueError also for a number of 5000 digits
            why, _, position = str(bad).partition(" (at ")
            line = re.match(r"line (\d+)", position)
            last = len(self.text.splitlines()) if position.startswith("end of document") else None
            raise self._refuse(f"not TOML: {why}", line=int(line[1]) if line else last) from None
        if "version" not in top:
            raise self._refuse("it has no version", hint=f"begin the file with: version = {VERSION}")
        version = top["version"]
        self._check({"version": version}, _TOP)  # Before other keys: a later version may have more.
        if version not in (1, VERSION):
            raise self._refuse(
                f"version {version} is not known",
                key="version",
                hint=f"this preheat reads version {VERSION} and older: update it, or record again",
            )
        self._check(top, _TOP)
        return top

    def _read_tables(self, top: Mapping[str, Any], kind: str) -> list[_Table]:
        """Return the checked tables of a kind, with the names of keys of this version."""
        names = {key: key for key in _TABLES[kind]}
        if top["version"] == 1:
            names |= {key: old for key, old in VERSION_1_KEYS.items() if key in names}
        known = {names[key]: type for key, type in _TABLES[kind].items()}
        new_names = {old: key for key, old in names.items()}
        tables = []
        for number, values in enumerate(top.get(kind, ())):
            self._check(values, known, _Table(kind, number, values))
            tables.append(_Table(kind, number, {new_names[key]: values[key] for key in values}))
        return tables

    def _check(
        self, values: Mapping[str, Any], known: Mapping[str, str], table: _Table | None = None
    ) -> None:
        """Raise for the first key that is unknown or has a value of another type."""
        for key, value in values.items():
            if key not in known:
                hint = did_you_mean(key, known) or f"the keys are {', '.join(known)}"
                raise self._refuse(f"unknown key {key!r}", table, key, hint=hint)
            if not _TYPES[known[key]](value):
                raise self._refuse(f"{key} must be {known[key]}, not {reprlib.repr(value)}", table, key)

    def _read_graph(self, table: _Table) -> GraphKeys:
        if not table.values.get("name"):
            raise self._refuse("a [[graph]] needs a name", table)
        keys = table.values.get("keys", ())
        for key in keys:
            if key_literal(key) is None:
                hint = 'such as "32" or "(1, \'prefill\')": numbers, texts, None and tuples of them'
                raise self._refuse(f"key {key!r} is not a Python literal", table, "keys", hint=hint)
        return GraphKeys(table.values["name"], tuple(str(key_literal(key)) for key in keys))

    def _read_unrecorded(self, table: _Table) -> Unrecorded:
        values = table.values
        if not values.get("library"):
            raise self._refuse("an [[unrecorded]] needs a library", table)
        return Unrecorded(
            values["library"],
            values.get("compiler", ""),
            seconds=float(values.get("seconds", 0)),
            callers=tuple(values.get("callers", ())),
        )

    def _read_foreign(self, table: _Table) -> ForeignProgram:
        values = table.values
        for key in ("kind", "name"):
            if not values.get(key):
                raise self._refuse(f"a [[foreign]] needs a {key}", table)
        coverage = values.get("coverage", COVERAGES[0])
        if coverage not in COVERAGES:
            raise self._refuse(f"{coverage!r} is not one of {', '.join(COVERAGES)}", table, "coverage")
        if not (values.get("request") or values.get("entries")):
            raise self._refuse("a [[foreign]] needs a `request` or `entries`", table)
        for key in ("request", "recorded"):
            if not _is_table(values.get(key, "{}")):
                hint = "record again; only `coverage` and `arch` are meant to be edited"
                raise self._refuse(f"{key} is not a JSON object", table, key, hint=hint)
        root = values.get("root", "")
        return ForeignProgram(
            *(values["kind"], values["name"], values.get("request", ""), values.get("recorded", "")),
            root=self._resolve(root) if root else "",
            archs=self._read_archs(table),
            entries=tuple(values.get("entries", ())),
            coverage=coverage,
            seconds=float(values.get("seconds", 0)),
            requests=values.get("requests", 0),
            callers=tuple(values.get("callers", ())),
            directory=self.directory,
        )

    def _read_program_table(self, table: _Table) -> ManifestProgram | UnreadableProgram:
        self._check_origin(table, table.values)

        def read() -> tuple[Program, bool]:
            program = self._read_program(table.values)
            return program, _has_changed(program, table.values)

        return self._read_item(table, read)

    def _read_link(self, table: _Table) -> ManifestProgram | UnreadableProgram:
        rows: list[Mapping[str, Any]] = table.values.get("parts", [])
        if not rows:
            hint = 'such as parts = [{file = "a.cu"}, {file = "b.cu"}]'
            raise self._refuse("a [[link]] needs parts", table, hint=hint)
        for row in rows:
            self._check(row, _SOURCE, table)
            self._check_origin(table, row)

        def read() -> tuple[Program, bool]:
            parts = [self._read_part(row) for row in rows]
            values = table.values
            given = {key: values[key] for key in ("label", "lto", "options") if key in values}
            changed = any(map(_has_changed, parts, rows))
            return LinkedProgram.of(parts, **given), changed

        return self._read_item(table, read)

    def _read_item(
        self, table: _Table, read: Callable[[], tuple[Program, bool]]
    ) -> ManifestProgram | UnreadableProgram:
        """Return the program that `read` returns, and whether one of its files has changed."""
        archs = self._read_archs(table)
        values = table.values
        try:
            program, changed = read()
        except InputError as error:
            message = f"{error} ({self._locate(table)})"
            return UnreadableProgram(table.title, InputError(message, hint=error.hint))
        return ManifestProgram(
            program,
            archs,
            entries=tuple(values.get("entries", ())),
            seconds=float(values.get("seconds", 0)),
            requests=values.get("requests", 0),
            callers=tuple(values.get("callers", ())),
            changed=changed,
        )

    def _read_archs(self, table: _Table) -> tuple[Arch, ...]:
        try:
            return tuple(Arch.parse(text) for text in table.values.get("arch", ()))
        except InputError as bad:
            raise self._refuse(str(bad), table, "arch", hint=bad.hint) from None

    def _check_origin(self, table: _Table, values: Mapping[str, Any]) -> None:
        given = [key for key in ("file", "source") if key in values]
        if len(given) != 1:
            wrong = "has both `file` and `source`" if given else "has neither `file` nor `source`"
            raise self._refuse(
                f"it {wrong}",
                table,
                "source",
                hint="name one of them: the file with the source",
            )

    def _read_part(self, values: Mapping[str, Any]) -> Program | BinaryPart:
        """Read one part of a [[link]]. A part whose language is a kind of compiled file is one."""
        language = values.get("language", "")
        if language not in KINDS:
            return self._read_program(values)
        stored = values.get("source")
        path = self._resolve(stored or values["file"])
        part = BinaryPart.from_file(path, kind=language, label=values.get("label"))
        if stored is None:
            return part
        self._check_digest(stored, part.digest, values.get("sha256", ""))
        return replace(part, path=None)

    def _read_program(self, values: Mapping[str, Any]) -> Program:
        """Read the program that a table describes."""
        given: dict[str, Any] = {
            key: values[key] for key in ("label", "language", "options", "names") if key in values
        }
        for option in given.get("options", ()):
            if option.startswith(("-I", "--include-path")):
                raise InputError(f"option {option} does not belong here", hint="list it in `include`")
        given["include"] = [self._resolve(directory) for directory in values.get("include", ())]
        given["headers"] = {
            name: self._read_stored(file) for name, file in values.get("headers", {}).items()
        }
        if "file" in values:
            program = Program.from_file(self._resolve(values["file"]), **given)
        else:
            source = self._read_stored(values["source"], values.get("sha256", ""))
            program = Program.of(source, **{"language": language_of(values["source"]), **given})
        return replace(
            program, spellings=tuple(zip(given["include"], _read_spellings(values), strict=True))
        )

    def _resolve(self, path: str) -> str:
        """Return the absolute path of a path in the manifest."""
        if "\0" in path:
            raise InputError(f"{path!r} is not a path")
        return os.path.abspath(os.path.join(self.directory, path))

    def _read_stored(self, path: str, expected: str = "") -> str:
        """Read a text that is stored under its digest, and verify the digest."""
        text = _read_text(self._resolve(path))
        self._check_digest(path, sha256(text), expected)
        return text

    @staticmethod
    def _check_digest(path: str, digest: str, expected: str) -> None:
        name = Path(path).stem
        named = len(name) >= DIGEST_DIGITS and digest.startswith(name)
        if not named or not digest.startswith(expected.lower()):
            raise InputError(
                f"{printable(path)} does not match its digest: SHA-256 {digest[:DIGEST_DIGITS]}…",
                hint="record again; a text that you edit belongs in `file` or `include`",
            )

    def _refuse(
        self,
        message: str,
        table: _Table | None = None,
        key: str = "",
        *,
        line: int | None = None,
        hint: str | None = None,
    ) -> InputError:
        location = self._locate(table, key, line)
        return InputError(f"{location}: {table.title + ': ' if table else ''}{message}", hint=hint)

    def _locate(self, table: _Table | None, key: str = "", line: int | None = None) -> str:
        line = line or _find_line(self.text, table, key)
        return self.path if line is None else f"{self.path}:{line}"


def _read_spellings(values: Mapping[str, Any]) -> list[str]:
    """Return how the application spells the include directories of a program."""
    include: list[str] = values.get("include", [])
    spelled: list[str] = values.get("spelled", [])
    if not spelled:
        return [spelled_in_manifest(directory, values.get("file")) for directory in include]
    if len(spelled) != len(include):
        raise InputError(
            f"spelled has {len(spelled)} texts for {len(include)} include directories",
            hint="list one for each directory, or remove `spelled`",
        )
    if bad := [text for text in spelled if not is_spelling(text)]:
        hint = "such as {file}/include, {cwd}/include, {caller}/include, {packages}/x/include or /opt/x"
        raise InputError(f"spelled has {bad[0]!r}, which is not a spelling of a directory", hint=hint)
    return spelled


def _has_changed(part: Program | BinaryPart, values: Mapping[str, Any]) -> bool:
    """Return whether the file of a program or part is no longer the recorded one."""
    digest = part.digest if isinstance(part, BinaryPart) else sha256(part.source)
    return not digest.startswith(values.get("sha256", "").lower())


_HEADER = re.compile(r"^[ \t]*(\[\[?)[ \t]*([\w-]+)", re.M)


def _find_line(text: str, table: _Table | None, key: str) -> int | None:
    """Return the line of `key`, or of its table. A text search finds it: `tomllib` has no positions."""
    start = 0
    end = len(text)
    if table is not None:
        headers = list(_HEADER.finditer(text))
        own = [header.start() for header in headers if (header[1], header[2]) == ("[[", table.kind)]
        if table.number >= len(own):  # The table is not written as [[…]].
            return None
        start = own[table.number]
        end = next((header.start() for header in headers if header.start() > start), end)
    pattern = re.compile(rf"^[ \t]*+\[*+[ \t]*+[\"']?{re.escape(key)}[\"']?[ \t]*[=.\]]", re.M)
    found = pattern.search(text, start, end) if key else None
    if found is None and table is None:
        return None
    return text.count("\n", 0, found.start() if found else start) + 1


def _read_text(path: str, hint: str | None = None) -> str:
    """Return the text of a file. Raises `InputError` when it cannot be read or is not text."""
    try:
        raw = read_whole(path)
        return raw.decode()
    except OSError as fault:
        raise InputError(f"cannot read {path}: {fault.strerror or fault}", hint=hint) from None
    except UnicodeDecodeError as bad:
        if raw.startswith(MAGIC):
            hint = "name the manifest that it was baked from; 'preheat bundle ls' lists its programs"
            raise InputError(f"{path} is a bundle, not text", hint=hint) from None
        line = raw.count(b"\n", 0, bad.start) + 1
        raise InputError(f"{path}:{line}: byte 0x{raw[bad.start]:02x} is not UTF-8 text") from None
