"""Manifests: the programs an application needs and the graphs it replays, as TOML that people edit.

    version = 1

    [[program]]
    label = "saxpy.cu"             # when it is not the name of the file
    file = "kernels/saxpy.cu"      # or `source`: a generated text, stored beside the manifest
    sha256 = "…"                   # of the file when it was recorded
    language = "cuda"              # when it does not follow from the name of the file
    options = ["-use_fast_math"]
    include = ["include"]          # after the directory of the file itself
    spelled = ["{caller}/include"] # how the application asks for them, when that does not follow
    names = ["tk<float>"]
    entries = ["saxpy"]            # kernels that were used
    arch = ["sm_90"]
    seconds = 0.31                 # the longest compile seen
    asked = 3                      # how often, and by whom
    by = ["app.py:12"]
    [program.headers]              # in memory, so they are stored as `source` is
    "util.h" = "kernels.sources/….h"

    [[graph]]
    name = "decode"
    keys = ["(1, 128)", "32"]      # Python literals

Paths start at the manifest. Generated texts lie in `<manifest>.sources/`, each named by its SHA-256.
A bundle answers an application that asks for the same include directories, spelled as
`preheat.spelling` says. Without `spelled` they are where the row says, seen from the `file`, and seen
from the working directory where there is none. Two rows may have equal texts and other directories.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from preheat.arch import Arch
from preheat.cache.bundle import MAGIC
from preheat.cache.publish import publish
from preheat.errors import InputError, did_you_mean
from preheat.files import read_whole
from preheat.program import Program
from preheat.spelling import FILE, is_spelling, shown, spelled_in_manifest

__all__ = ["GraphKeys", "Manifest", "Unreadable", "Wanted", "listed", "literal"]

_VERSION = 1
_CALLERS = 8  # as many as help a person find who asks; a busy kernel has hundreds
_WIDTH = 100  # a list that would make a line longer than this gets one line an item
_DIGEST = 16  # digits of a SHA-256 in the name of a stored text

_INTRO = """\
# The kernels an application needs; `preheat bake` compiles them.
# Review and edit it as you like: in a [[program]] only `file` or `source` must be there.
# `preheat record` and `preheat plan` add to it, and keep no comments.
"""


@dataclass(frozen=True)
class Wanted:
    """A program, what it is wanted for, and what recordings saw of it.

    `entries` are the kernels that were used, `seconds` the longest compile; `changed` says that the
    program's file is not the recorded one any more. `namesake` says that the manifest has a program of
    the same name and with other include directories.
    """

    program: Program
    archs: tuple[Arch, ...] = ()
    entries: tuple[str, ...] = ()
    seconds: float = 0.0
    asked: int = 0
    callers: tuple[str, ...] = ()
    changed: bool = False
    namesake: bool = field(default=False, compare=False)

    @property
    def title(self) -> str:
        """The program for people: its label and, where those make it another one, what it adds to it.

        That is its instances, and its include directories where they tell it from a namesake.
        """
        more = [", ".join(self.program.names)]
        if self.namesake:
            more.append(f"include {shown(self.program.asked_include) or '-'}")
        told = "; ".join(filter(None, more))
        return f"{self.program.label} ({told})" if told else self.program.label

    @property
    def content(self) -> tuple[Any, ...]:
        """What makes it the same as another: all that is in its key, and its directories. It sorts.

        Directories count where a file may be included: two that are spelled alike need not hold the
        same headers. Where none is included they are not what the program is about.
        """
        p = self.program
        directories = p.include if p.may_include else ()
        text = (p.label, p.language, p.source, p.options, p.headers, p.names)
        return *text, p.asked_include, directories

    def merged(self, other: Wanted) -> Wanted:
        """Return both as one. They have equal content, and differ at most in where they are found."""
        mine, theirs = self.program, other.program
        directories = tuple(dict.fromkeys((*mine.include, *theirs.include)))
        return Wanted(
            replace(
                mine,
                include=mine.include if mine.may_include else directories,
                path=mine.path or theirs.path,
                spellings=(*mine.spellings, *theirs.spellings),
            ),
            archs=tuple(sorted({*self.archs, *other.archs})),
            entries=tuple(sorted({*self.entries, *other.entries})),
            seconds=max(self.seconds, other.seconds),
            asked=self.asked + other.asked,
            callers=tuple(sorted({*self.callers, *other.callers})[:_CALLERS]),
            changed=self.changed or other.changed,
        )


class GraphKeys(NamedTuple):
    """The keys under which the graphs called `name` were captured, each as a Python literal."""

    name: str
    keys: tuple[str, ...]

    @property
    def values(self) -> tuple[Any, ...]:
        """The keys themselves."""
        return tuple(ast.literal_eval(key) for key in self.keys)


class Unreadable(NamedTuple):
    """A program of a manifest that is not there or damaged, and why."""

    title: str
    error: InputError


@dataclass(frozen=True)
class Manifest:
    """What to have ready: programs and graph keys; `unreadable` are programs that could not be read."""

    programs: tuple[Wanted, ...] = ()
    graphs: tuple[GraphKeys, ...] = ()
    unreadable: tuple[Unreadable, ...] = ()

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Manifest:
        """The manifest at `path`, programs and all; `InputError` where it makes no sense.

        A program that cannot be read does not stop the others: it is among the `unreadable`.
        """
        return _Reader(path).manifest().merged()

    def write(self, path: str | os.PathLike[str]) -> None:
        """Make or replace the manifest at `path` in one step, with the generated sources beside it.

        What was `unreadable` is left out. `InputError` when it cannot be written: then what was at
        `path` is still there.
        """
        whole = self.merged()
        try:
            writer = _Writer(path)
            rows = [("program", writer.program(wanted)) for wanted in whole.programs]
            rows += [("graph", {"name": name, "keys": list(keys)}) for name, keys in whole.graphs]
            _publish(writer.path, _toml(rows).encode())
        except OSError as fault:
            raise InputError(f"cannot write {path}: {fault.strerror or fault}") from fault
        except UnicodeEncodeError as bad:
            raise InputError(f"cannot write {path}: {bad.object!r} is not text") from None

    def merged(self, *others: Manifest) -> Manifest:
        """All of them as one: equal programs in one row, in an order that depends on nothing else."""
        rows: dict[tuple[Any, ...], Wanted] = {}
        graphs: dict[str, dict[str, None]] = {}
        for manifest in (self, *others):
            for wanted in manifest.programs:
                content = wanted.content
                rows[content] = rows.get(content, Wanted(wanted.program)).merged(wanted)
            for name, keys in manifest.graphs:
                graphs.setdefault(name, {}).update(dict.fromkeys(keys))
        return Manifest(
            _told_apart([rows[content] for content in sorted(rows)]),
            tuple(GraphKeys(name, tuple(graphs[name])) for name in sorted(graphs)),
            tuple(bad for manifest in (self, *others) for bad in manifest.unreadable),
        )

    def jobs(self, archs: Sequence[Arch] | None = None) -> list[tuple[Wanted, Arch]]:
        """Every program with each architecture to compile it for: those given, else its own."""
        jobs = []
        for wanted in self.merged().programs:
            targets = sorted(set(archs or wanted.archs))
            if not targets:
                raise InputError(
                    f"{_shown(wanted.program.label)}: there is no architecture to compile it for",
                    hint="pass --arch, such as --arch sm_90",
                )
            jobs += [(wanted, arch) for arch in targets]
        return jobs


def literal(text: str) -> str | None:
    """How a manifest spells the graph key `text`, or None when it is no literal that can be a key."""
    try:
        key = ast.literal_eval(text)
        hash(key)
        ast.literal_eval(spelling := repr(key))  # infinity has a literal, 1e999, and repr gives another
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
    return spelling


def _told_apart(rows: Iterable[Wanted]) -> tuple[Wanted, ...]:
    """The rows, each of which knows whether it has a namesake with other include directories."""
    alike: dict[str, set[tuple[str, ...]]] = {}
    plain = [replace(row, namesake=False) for row in rows]
    for row in plain:
        alike.setdefault(row.title, set()).add(row.program.asked_include)
    return tuple(replace(row, namesake=len(alike[row.title]) > 1) for row in plain)


def _shown(text: str) -> str:
    """`text` as a message can hold it."""
    return text if text.isprintable() else repr(text)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _spellings(row: Mapping[str, Any]) -> list[str]:
    """How the application spells the include directories of a row."""
    include: list[str] = row.get("include", [])
    spelled: list[str] = row.get("spelled", [])
    if not spelled:
        return [spelled_in_manifest(directory, row.get("file")) for directory in include]
    if len(spelled) != len(include):
        raise InputError(
            f"spelled has {len(spelled)} texts for {len(include)} include directories",
            hint="it has one for each; without it they are spelled as the row says where they are",
        )
    if bad := [text for text in spelled if not is_spelling(text)]:
        hint = "such as {file}/include, {cwd}/include, {caller}/include, {packages}/x/include or /opt/x"
        raise InputError(f"spelled has {bad[0]!r}, which is not how a directory is spelled", hint=hint)
    return spelled


def _language(path: str) -> str:
    """The language that follows from a file's name, as in `Program.from_file`."""
    return "ptx" if Path(path).suffix == ".ptx" else "cuda"


# Reading


def _is_list(values: object, of: type) -> bool:
    return isinstance(values, list) and all(isinstance(value, of) for value in values)


# What a value must be, in words that an error can use, and how to tell.
_KINDS: Mapping[str, Callable[[Any], bool]] = {
    "text": lambda v: isinstance(v, str),
    "a list of texts": lambda v: _is_list(v, str),
    "a table from name to file": lambda v: isinstance(v, dict) and _is_list([*v.values()], str),
    "a whole number": lambda v: type(v) is int and v >= 0,
    "a number of seconds": lambda v: type(v) in (int, float) and 0 <= v < 1e9,
    "written as [[program]]": lambda v: _is_list(v, dict),
    "written as [[graph]]": lambda v: _is_list(v, dict),
}
_TOP = {
    "version": "a whole number",
    "program": "written as [[program]]",
    "graph": "written as [[graph]]",
}
_TABLES = {
    "program": {
        **dict.fromkeys(("label", "file", "source", "sha256", "language"), "text"),
        **dict.fromkeys(("options", "include", "spelled", "names"), "a list of texts"),
        **dict.fromkeys(("entries", "arch", "by"), "a list of texts"),
        "headers": "a table from name to file",
        "seconds": "a number of seconds",
        "asked": "a whole number",
    },
    "graph": {"name": "text", "keys": "a list of texts"},
}


class _Table(NamedTuple):
    """One [[program]] or [[graph]] as it stands in the file, and which of its kind it is."""

    kind: str
    nth: int  # from 0
    row: Mapping[str, Any]

    @property
    def title(self) -> str:
        """What to call it: the first of its names that is one."""
        names = (self.row.get(key) for key in ("label", "name", "file", "source"))
        found = next((name for name in names if isinstance(name, str) and name), None)
        return _shown(found) if found else f"{self.kind} {self.nth + 1}"


class _Reader:
    """One manifest being read. Its errors name the file and, where there is one, line and title."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path, self.home = os.fspath(path), os.path.dirname(os.path.realpath(path))
        self.text = _text(self.path, hint="'preheat record -- COMMAND' writes a manifest")

    def manifest(self) -> Manifest:
        """All of it: strict about what it says, forgiving about programs that are not there."""
        programs: list[Wanted] = []
        unreadable: list[Unreadable] = []
        top = self._top()
        graphs = tuple(self._graph(table) for table in self._tables(top, "graph"))
        for table in self._tables(top, "program"):
            archs = self._archs(table)
            self._check_origin(table)
            try:
                program = self._program(table.row)
            except InputError as error:
                told = f"{error} ({self._place(table)})"
                unreadable.append(Unreadable(table.title, InputError(told, hint=error.hint)))
            else:
                programs.append(_wanted(program, archs, table.row))
        return Manifest(tuple(programs), graphs, tuple(unreadable))

    def _top(self) -> dict[str, Any]:
        """The file as TOML, of a version that is known."""
        import tomllib

        try:
            top = tomllib.loads(self.text)
        except (ValueError, RecursionError) as bad:  # also for a number of thousands of digits
            why, _, place = str(bad).partition(" (at ")
            line = re.match(r"line (\d+)", place)
            last = len(self.text.splitlines()) if place.startswith("end of document") else None
            raise self._error(f"not TOML: {why}", line=int(line[1]) if line else last) from None
        if "version" not in top:
            raise self._error("there is no version", hint=f"its first line is: version = {_VERSION}")
        version = top["version"]
        self._check({"version": version}, _TOP)  # before the rest: a later one may have other keys
        if version != _VERSION:
            raise self._error(
                f"version {version} is not known",
                key="version",
                hint=f"this preheat reads version {_VERSION}: update it, or record again",
            )
        self._check(top, _TOP)
        return top

    def _tables(self, top: Mapping[str, Any], kind: str) -> list[_Table]:
        tables = [_Table(kind, nth, row) for nth, row in enumerate(top.get(kind, ()))]
        for table in tables:
            self._check(table.row, _TABLES[kind], table)
        return tables

    def _check(
        self, row: Mapping[str, Any], known: Mapping[str, str], at: _Table | None = None
    ) -> None:
        """Raise for the first key that is unknown or has a value of another kind."""
        for key, value in row.items():
            if key not in known:
                hint = did_you_mean(key, known) or f"there are: {', '.join(known)}"
                raise self._error(f"unknown key {key!r}", at, key, hint=hint)
            if not _KINDS[known[key]](value):
                raise self._error(f"{key} must be {known[key]}, not {reprlib.repr(value)}", at, key)

    def _graph(self, table: _Table) -> GraphKeys:
        if not table.row.get("name"):
            raise self._error("a [[graph]] needs a name", table)
        keys = table.row.get("keys", ())
        for key in keys:
            if literal(key) is None:
                hint = 'such as "32" or "(1, \'prefill\')": numbers, texts, None and tuples of them'
                raise self._error(f"key {key!r} is not a Python literal", table, "keys", hint=hint)
        return GraphKeys(table.row["name"], tuple(str(literal(key)) for key in keys))

    def _archs(self, table: _Table) -> tuple[Arch, ...]:
        try:
            return tuple(Arch.parse(text) for text in table.row.get("arch", ()))
        except InputError as bad:
            raise self._error(str(bad), table, "arch", hint=bad.hint) from None

    def _check_origin(self, table: _Table) -> None:
        given = [key for key in ("file", "source") if key in table.row]
        if len(given) != 1:
            wrong = "has both `file` and `source`" if given else "has neither `file` nor `source`"
            raise self._error(f"it {wrong}", table, "source", hint="name one: where its text is")

    def _program(self, row: Mapping[str, Any]) -> Program:
        """The program a row describes, read from where it lies."""
        given: dict[str, Any] = {
            key: row[key] for key in ("label", "language", "options", "names") if key in row
        }
        for option in given.get("options", ()):
            if option.startswith(("-I", "--include-path")):
                raise InputError(f"option {option} does not belong here", hint="list it in `include`")
        given["include"] = [self._found(directory) for directory in row.get("include", ())]
        given["headers"] = {name: self._stored(file) for name, file in row.get("headers", {}).items()}
        if "file" in row:
            program = Program.from_file(self._found(row["file"]), **given)
        else:
            source = self._stored(row["source"], row.get("sha256", ""))
            program = Program.of(source, **{"language": _language(row["source"]), **given})
        return replace(program, spellings=tuple(zip(given["include"], _spellings(row), strict=True)))

    def _found(self, path: str) -> str:
        """The place a path of the manifest means."""
        if "\0" in path:
            raise InputError(f"{path!r} is not a path")
        return os.path.abspath(os.path.join(self.home, path))

    def _stored(self, path: str, sha256: str = "") -> str:
        """The text stored under a name that is its digest."""
        text = _text(self._found(path))
        name, digest = Path(path).stem, _sha256(text)
        if len(name) < _DIGEST or not digest.startswith(name) or not digest.startswith(sha256.lower()):
            raise InputError(
                f"{_shown(path)} is not what was stored: its SHA-256 is {digest[:_DIGEST]}…",
                hint="record again; a text that you edit belongs in `file` or `include`",
            )
        return text

    def _error(
        self,
        message: str,
        at: _Table | None = None,
        key: str = "",
        *,
        line: int | None = None,
        hint: str | None = None,
    ) -> InputError:
        place = self._place(at, key, line)
        return InputError(f"{place}: {at.title + ': ' if at else ''}{message}", hint=hint)

    def _place(self, at: _Table | None, key: str = "", line: int | None = None) -> str:
        line = line or _line(self.text, at, key)
        return self.path if line is None else f"{self.path}:{line}"


_HEAD = re.compile(r"^[ \t]*(\[\[?)[ \t]*([\w-]+)", re.M)


def _line(text: str, at: _Table | None, key: str) -> int | None:
    """The line of `key`, else that of its table, as far as a look at the text can tell."""
    start, end = 0, len(text)
    if at is not None:
        heads = list(_HEAD.finditer(text))
        own = [head.start() for head in heads if (head[1], head[2]) == ("[[", at.kind)]
        if at.nth >= len(own):  # not written as [[…]]
            return None
        start = own[at.nth]
        end = next((head.start() for head in heads if head.start() > start), end)
    pattern = re.compile(rf"^[ \t]*+\[*+[ \t]*+[\"']?{re.escape(key)}[\"']?[ \t]*[=.\]]", re.M)
    found = pattern.search(text, start, end) if key else None
    if found is None and at is None:
        return None
    return text.count("\n", 0, found.start() if found else start) + 1


def _text(path: str, hint: str | None = None) -> str:
    """The text of a file; `InputError` when there is none."""
    try:
        raw = read_whole(path)
        return raw.decode()
    except OSError as fault:
        raise InputError(f"cannot read {path}: {fault.strerror or fault}", hint=hint) from None
    except UnicodeDecodeError as bad:
        if raw.startswith(MAGIC):
            hint = "name the manifest that it was baked from; 'preheat bundle ls' shows what it holds"
            raise InputError(f"{path} is a bundle, not text", hint=hint) from None
        line = raw.count(b"\n", 0, bad.start) + 1
        raise InputError(f"{path}:{line}: byte 0x{raw[bad.start]:02x} is not UTF-8 text") from None


def _wanted(program: Program, archs: tuple[Arch, ...], row: Mapping[str, Any]) -> Wanted:
    return Wanted(
        program,
        archs,
        entries=tuple(row.get("entries", ())),
        seconds=float(row.get("seconds", 0)),
        asked=row.get("asked", 0),
        callers=tuple(row.get("by", ())),
        changed=not _sha256(program.source).startswith(row.get("sha256", "").lower()),
    )


# Writing


class _Writer:
    """One manifest being written: what it names it names from its own directory."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.path.realpath(path)
        self.home = os.path.dirname(self.path)
        self.sources = f"{Path(self.path).stem}.sources"

    def program(self, wanted: Wanted) -> dict[str, Any]:
        """The row of a program, without what follows from the rest; generated texts are stored."""
        program = wanted.program
        origin, include = self._origin(program)
        row = {
            **origin,
            "options": program.options,
            **self._directories(program, include, origin.get("file")),
            "headers": {name: self._stored(text, ".h") for name, text in program.headers},
            "names": program.names,
            "entries": wanted.entries,
            "arch": [str(arch) for arch in wanted.archs],
            "seconds": round(wanted.seconds, 3),
            "asked": wanted.asked,
            "by": [caller.encode(errors="backslashreplace").decode() for caller in wanted.callers],
        }
        return {key: value for key, value in row.items() if value}

    def _origin(self, program: Program) -> tuple[dict[str, str], tuple[str, ...]]:
        """Where the text of a program is, and the include directories that do not follow from that."""
        label, language, path = program.label, program.language, program.path
        if path is None or not self._can_name(path, program):
            suffix = ".ptx" if language == "ptx" else ".cu"
            unneeded = path is not None and self._away(path) and not program.may_include
            include = () if unneeded else program.include
            return {"label": label, "source": self._stored(program.source, suffix)}, include
        origin = {
            "label": label if label != os.path.basename(path) else "",
            "file": self._named(path),
            "sha256": _sha256(program.source),
            "language": language if language != _language(path) else "",
        }
        return origin, program.include[1:]

    def _directories(
        self, program: Program, include: Iterable[str], file: str | None
    ) -> dict[str, list[str]]:
        """Include directories and, unless that follows from the paths, how the program spells them."""
        known = dict(program.spellings)
        places = [self._named(directory) for directory in include]
        spelled = [known[directory] for directory in include]
        follows = spelled == [spelled_in_manifest(place, file) for place in places]
        return {"include": places, "spelled": [] if follows else spelled}

    def _can_name(self, path: str, program: Program) -> bool:
        """Whether `Program.from_file(path)` would find this source and look for headers alike."""
        if self._away(path):
            return False
        try:
            as_is = read_whole(path) == program.source.encode()
            self._named(path).encode()  # a name need not be text
        except (OSError, UnicodeEncodeError):
            return False
        return as_is and program.spellings[:1] == ((os.path.dirname(path), FILE),)

    def _away(self, path: str) -> bool:
        """Whether a bake elsewhere would not find `path`: it is nowhere near, or a package's."""
        return os.path.isabs(self._named(path)) or f"-packages{os.sep}" in path

    def _named(self, path: str) -> str:
        """`path` from the manifest's directory, or itself when they have but the root in common."""
        path = os.path.abspath(path)
        if os.path.commonpath((self.home, path)) == self.home:
            return os.path.relpath(path, self.home)
        parent, name = os.path.split(path)  # a `..` goes up from where a link leads, so links go first
        real = os.path.join(os.path.realpath(parent), name)
        near = os.path.commonpath((self.home, real)) != os.path.sep
        return os.path.relpath(real, self.home) if near else path

    def _stored(self, text: str, suffix: str) -> str:
        """Store a text under its digest; its path from the manifest."""
        name = f"{self.sources}/{_sha256(text)[:_DIGEST]}{suffix}"
        _publish(os.path.join(self.home, name), text.encode())
        return name


def _toml(tables: Iterable[tuple[str, dict[str, Any]]]) -> str:
    """The text of a manifest with these tables."""
    import tomli_w

    parts = [_INTRO + tomli_w.dumps({"version": _VERSION})]
    for kind, row in tables:
        headers = row.pop("headers", None)
        part = f"[[{kind}]]\n" + re.sub(_LIST, _compact, tomli_w.dumps(row))
        parts.append(part + (tomli_w.dumps({kind: {"headers": headers}}) if headers else ""))
    return "\n".join(parts)


_LIST = re.compile(r"^(\w+ = )\[\n((?: {4}.*,\n)+)\]$", re.M)


def _compact(match: re.Match[str]) -> str:
    """A list on one line where that has room."""
    items = [line[4:-1] for line in match[2].split("\n")[:-1]]
    line = f"{match[1]}[{', '.join(items)}]"
    return line if len(line) <= _WIDTH else match[0]


def _publish(path: str, blob: bytes) -> None:
    """Put a file in place in one step, so that no reader sees a part; an equal one is left alone."""
    if os.path.exists(path):
        if not os.path.isfile(path):  # a rename would replace even a device
            raise InputError(f"cannot write {path}: what is there is not a file")
        if Path(path).read_bytes() == blob:
            return
    os.makedirs(os.path.dirname(path), exist_ok=True)
    publish(Path(path), [blob])


def listed(manifest: Manifest | str | os.PathLike[str]) -> Manifest:
    """The manifest; `InputError` when it lists nothing, which no bake or check can mean."""
    found = manifest if isinstance(manifest, Manifest) else Manifest.read(manifest)
    if not (found.programs or found.unreadable or found.graphs):
        name = "the manifest" if isinstance(manifest, Manifest) else os.fspath(manifest)
        hint = "record what a program needs: preheat record -- python app.py"
        raise InputError(f"{name} lists no program", hint=hint)
    return found
