"""What a manifest lists: programs, requests of other libraries, and graph keys."""

from __future__ import annotations

import ast
import json
import os
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from preheat.errors import InputError
from preheat.model.arch import Arch
from preheat.model.linked_program import LinkedProgram
from preheat.model.portable_paths import format_spellings
from preheat.model.program import Program

__all__ = [
    "COVERAGES",
    "ForeignProgram",
    "GraphKeys",
    "ManifestProgram",
    "UnreadableProgram",
    "Unrecorded",
    "key_literal",
]

#: Which variants of a recorded request of another library are baked: the recorded one, all that other
#: values of its arguments lead to, or four that assume less and serve every launch.
COVERAGES = ("recorded", "closure", "weak")

_MAX_CALLERS = 8  # Enough to find the calling code; a kernel may have hundreds of callers.


@dataclass(frozen=True)
class ManifestProgram:
    """A program, the architectures to compile it for, and what recordings observed.

    `entries` are the kernels that were used, `seconds` is the longest compile, and `requests` is the
    number of requests. `changed` is True when the file of the program is no longer the recorded one.
    `ambiguous_title` is True when the manifest has a program of the same title with other include
    directories.
    """

    program: Program
    archs: tuple[Arch, ...] = ()
    entries: tuple[str, ...] = ()
    seconds: float = 0.0
    requests: int = 0
    callers: tuple[str, ...] = ()
    changed: bool = False
    ambiguous_title: bool = field(default=False, compare=False)

    @property
    def title(self) -> str:
        """The label of the program, followed by its template instances.

        Include directories are added where they are what distinguishes two programs.
        """
        details = [", ".join(self.program.names)]
        if self.ambiguous_title:
            details.append(f"include {format_spellings(self.program.include_spellings) or '-'}")
        suffix = "; ".join(filter(None, details))
        return f"{self.program.label} ({suffix})" if suffix else self.program.label

    @property
    def identity(self) -> tuple[Any, ...]:
        """A sortable value that is equal for two entries of the same program.

        It holds everything that is part of the cache key. The include directories count where a file
        may be included, because two directories with the same spelling may hold different headers.
        """
        p = self.program
        directories = p.include if p.may_include else ()
        content = p.content if isinstance(p, LinkedProgram) else p.source
        text = (p.label, p.language, content, p.options, p.headers, p.names)
        return *text, p.include_spellings, directories

    def merged(self, other: ManifestProgram) -> ManifestProgram:
        """Return the union of two entries of equal identity."""
        return ManifestProgram(
            _merge_programs(self.program, other.program),
            archs=tuple(sorted({*self.archs, *other.archs})),
            entries=tuple(sorted({*self.entries, *other.entries})),
            seconds=max(self.seconds, other.seconds),
            requests=self.requests + other.requests,
            callers=tuple(sorted({*self.callers, *other.callers})[:_MAX_CALLERS]),
            changed=self.changed or other.changed,
        )


def _merge_programs(mine: Program, theirs: Program) -> Program:
    """Return one of two programs of equal identity, with the facts that are known of either."""
    if isinstance(mine, LinkedProgram):
        return mine
    directories = tuple(dict.fromkeys((*mine.include, *theirs.include)))
    return replace(
        mine,
        include=mine.include if mine.may_include else directories,
        path=mine.path or theirs.path,
        spellings=(*mine.spellings, *theirs.spellings),
    )


@dataclass(frozen=True)
class ForeignProgram:
    """A request of another library, its architectures, and what recordings observed.

    `kind` is the name of the adapter. `request` describes the request as JSON, so that the adapter can
    make it again; it is empty for an entry that can only be copied from the recording. `recorded` has
    the facts of the recording, also as JSON. `root` is the directory from which modules are imported.
    `entries` are those that were used: the key of the library, and a variant after a space. `directory`
    is the manifest's, where modules are looked for if there is no `root`.
    """

    kind: str
    name: str
    request: str = ""
    recorded: str = ""
    root: str = ""
    archs: tuple[Arch, ...] = ()
    entries: tuple[str, ...] = ()
    coverage: str = "recorded"
    seconds: float = 0.0
    requests: int = 0
    callers: tuple[str, ...] = ()
    directory: str = field(default="", compare=False)

    @property
    def title(self) -> str:
        """The library and the name of the function."""
        return f"{self.kind} {self.name}"

    @property
    def identity(self) -> tuple[str, ...]:
        """A sortable value that is equal for two recordings of the same request."""
        return self.kind, self.name, self.request

    @property
    def row(self) -> dict[str, Any]:
        """The request as its adapter takes it. `request` is not empty."""
        facts = json.loads(self.recorded or "{}")
        return {**json.loads(self.request), "root": self.root, "recorded": facts}

    @property
    def import_root(self) -> str:
        """The directory from which modules are imported on this machine."""
        if self.root and self.directory and not os.path.isdir(self.root):
            return self.directory
        return self.root

    @property
    def kept(self) -> bool:
        """True for an entry that is copied from the recording, because it cannot be made again."""
        return not self.request or bool(json.loads(self.request).get("kept"))

    def merged(self, other: ForeignProgram) -> ForeignProgram:
        """Return the union of two recordings of one request. The later one's facts count."""
        same = not other.recorded or other.recorded == self.recorded or not self.request
        return ForeignProgram(
            *(self.kind, self.name, self.request, other.recorded or self.recorded),
            root=other.root or self.root,
            archs=tuple(sorted({*self.archs, *other.archs})),
            entries=tuple(sorted({*(self.entries if same else ()), *other.entries})),
            coverage=max(self.coverage, other.coverage, key=lambda each: each != COVERAGES[0]),
            seconds=max(self.seconds, other.seconds),
            requests=self.requests + other.requests,
            callers=tuple(sorted({*self.callers, *other.callers})[:_MAX_CALLERS]),
            directory=other.directory or self.directory,
        )


@dataclass(frozen=True)
class Unrecorded:
    """What a library compiled during a recording with a compiler that no adapter covers.

    `callers` are the lines that led to it, and `seconds` is the time of one recording. `compiler` is
    empty for a library or a program that may have compiled, which nobody saw.
    """

    library: str
    compiler: str = ""
    seconds: float = 0.0
    callers: tuple[str, ...] = ()

    @property
    def identity(self) -> tuple[str, ...]:
        """A sortable value that is equal for two recordings of the same compiler."""
        return self.library, self.compiler

    def merged(self, other: Unrecorded) -> Unrecorded:
        """Return the union of two of equal identity."""
        callers = tuple(sorted({*self.callers, *other.callers})[:_MAX_CALLERS])
        return replace(self, seconds=max(self.seconds, other.seconds), callers=callers)

    def __str__(self) -> str:
        if not self.compiler:
            return f"what {self.library} may have compiled, which is not seen"
        lines = f" ({', '.join(self.callers)})" if self.callers else ""
        return f"what {self.library} compiled with {self.compiler}{lines}"


class GraphKeys(NamedTuple):
    """The keys under which the graphs called `name` were captured, each as a Python literal."""

    name: str
    keys: tuple[str, ...]

    @property
    def values(self) -> tuple[Any, ...]:
        """The keys as Python values."""
        return tuple(ast.literal_eval(key) for key in self.keys)


class UnreadableProgram(NamedTuple):
    """A program of a manifest whose source is missing or damaged, and the error."""

    title: str
    error: InputError


def key_literal(text: str) -> str | None:
    """Return the canonical literal of the graph key `text`, or None when it cannot be a key."""
    try:
        key = ast.literal_eval(text)
        hash(key)
        canonical = repr(key)
        ast.literal_eval(canonical)  # 1e999 is a literal for infinity, and its repr is not.
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
    return canonical
