"""The result of a compile: machine code, its description, and the encoding of both as bytes."""

from __future__ import annotations

import json
import marshal
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import product
from operator import attrgetter, itemgetter
from types import NoneType
from typing import TYPE_CHECKING, Any, NamedTuple

from preheat.errors import InputError, UnknownEntryError, short_repr
from preheat.model import codec
from preheat.model.arch import Arch
from preheat.model.codec import parse_json, rows, text
from preheat.model.key import Part
from preheat.process.lazy import lazy

__all__ = [
    "Artifact",
    "EntryPoint",
    "Header",
    "Parameter",
    "Provenance",
    "Resources",
    "check_name",
    "read_provenance",
    "without_types",
]

_MAX_NUMBER = 1 << 48  # A larger size, count or number of seconds means a damaged entry.


class Parameter(NamedTuple):
    """A parameter of a kernel.

    Attributes:
        offset: The offset in the parameter buffer, in bytes.
        size: The size in bytes.
        align: The alignment in bytes.
        kind: The PTX type, such as `u64`.
        pointer: True for a pointer.
        type: The C++ type, or None if it is not known.

    Examples:
        >>> parameter = preheat.compile(SAXPY, "sm_90").entry("saxpy").parameters[1]
        >>> parameter.type, parameter.offset, parameter.size
        ('float const*', 8, 8)
    """

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
    """The resources of a kernel. Sizes are in bytes.

    Attributes:
        registers: Registers of a thread.
        shared: Static shared memory of a block.
        stack: The stack of a thread.
        spill_stores: Bytes of registers that are spilled.
        spill_loads: Bytes of registers that are loaded again.
        barriers: The number of barriers.

    Examples:
        >>> preheat.compile(SAXPY, "sm_90").entry("saxpy").resources.spill_stores
        0
    """

    registers: int = 0
    shared: int = 0
    stack: int = 0
    spill_stores: int = 0
    spill_loads: int = 0
    barriers: int = 0


class EntryPoint(NamedTuple):
    """A kernel in an artifact.

    Attributes:
        name: Its symbol.
        parameters: Its parameters, in order.
        cpp: Its C++ name, or None if it has none.
        resources: The resources that it uses, if known.
        directives: Its performance directives, such as the largest block.
        untyped: Why the C++ types of its parameters are unknown, and what to do. None if they are
            known, and for kernels of PTX and cubins, which have no such types.

    Examples:
        >>> entry = preheat.compile(SAXPY, "sm_90").entry("saxpy")
        >>> [parameter.size for parameter in entry.parameters]
        [4, 8, 8, 4]
    """

    name: str
    parameters: tuple[Parameter, ...]
    cpp: str | None = None
    resources: Resources | None = None
    directives: tuple[str, ...] = ()
    untyped: str | None = None

    @property
    def title(self) -> str:
        """The C++ name, or the symbol if there is none."""
        return self.cpp or self.name

    @property
    def prototype(self) -> str:
        """The name with the types of the parameters: `saxpy(float, float const*, float*, int)`."""
        return f"{self.title}({', '.join(map(str, self.parameters))})"

    @property
    def remark(self) -> str | None:
        """A sentence about C++ types that are unknown, or None."""
        if self.untyped is None:
            return None
        return f"the C++ types of {self.title} are unknown, because {self.untyped}"

    def __str__(self) -> str:
        return f"{self.prototype}: {self.remark}" if self.untyped else self.prototype


class Header(NamedTuple):
    """A file that the compiler opened.

    Attributes:
        root: The include directory, such as `@0` for the first one and `@cuda` for the headers of the
            toolkit.
        name: The name below this directory.
        digest: The digest of the content.

    Examples:
        >>> artifact = preheat.compile("#include <cuda_fp16.h>", "sm_90")
        >>> "cuda_fp16.h" in [header.name for header in artifact.headers]
        True
    """

    root: str
    name: str
    digest: str


class Provenance(NamedTuple):
    """Facts about one compile. They are not compared, and bundles do not have them.

    Attributes:
        seconds: The time of the compile.
        created: The time when it ended.
        timing: The timing lines of the compiler.

    Examples:
        >>> preheat.compile(SAXPY, "sm_90").provenance.seconds > 0
        True
    """

    seconds: float = 0.0
    created: str = ""
    timing: str = ""


@dataclass(frozen=True, repr=False)
class Artifact:
    """Verified machine code. It is immutable, and two artifacts of one key are interchangeable.

    `preheat.compile` and `Builder.build` return it.

    Attributes:
        digest: The digest of the key under which the artifact is stored.
        label: The name of the program.
        arch: The architecture of the code.
        toolchain: The identity of the compiler.
        parts: The rows of the key, for `preheat.explain`.
        entries: The kernels, as `EntryPoint` objects.
        cubin: The machine code. It is empty for a program that was compiled to PTX.
        ptx: The PTX. It is empty for a program that was compiled to machine code.
        names: The symbols of name expressions such as `tk<float>`.
        headers: The header files that the compiler opened.
        log: The messages of the compiler.
        templates: The kernel templates of the program.
        sources: Source texts for debuggers, by name.
        provenance: Facts about the compile that made the artifact.

    Examples:
        >>> artifact = preheat.compile(SAXPY, "sm_90", label="saxpy.cu")
        >>> artifact.label, str(artifact.arch), [entry.name for entry in artifact.entries]
        ('saxpy.cu', 'sm_90', ['saxpy'])
    """

    digest: str
    label: str
    arch: Arch
    toolchain: str
    parts: tuple[Part, ...]
    entries: tuple[EntryPoint, ...]
    cubin: bytes
    ptx: bytes
    names: Mapping[str, str] = field(default_factory=dict)  # expression -> entry name
    headers: tuple[Header, ...] = ()
    log: str = field(default_factory=str)  # No default: see `__getattr__`.
    templates: tuple[str, ...] = field(default=(), compare=False)  # kernel templates, for messages
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)  # for debuggers
    provenance: Provenance = field(default_factory=Provenance, compare=False)

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        kernels = ", ".join(entry.prototype for entry in self.entries) or "no kernels"
        return f"<Artifact {self.label} for {self.arch}, {self.digest[:12]}: {kernels}>"

    if not TYPE_CHECKING:  # A type checker would accept every name.

        def __getattr__(self, name: str) -> Any:
            """Return a field that `stored` has left in the bytes of the entry."""
            if name not in _LEFT_IN_ENTRY or (entry := self.__dict__.get("_entry")) is None:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            blob, places = entry
            if name in ("cubin", "ptx"):
                return blob[places[name]]  # It is not kept, because it may be large.
            if name == "parts":
                value: Any = tuple(map(_part, codec.layout(blob)[0]["parts"]))
            elif name == "log":
                value = blob[places["log"]].decode()
            else:
                value = _sources(blob[places["sources"]]) if "sources" in places else {}
            return self.__dict__.setdefault(name, value)

    @lazy
    def size(self) -> int:
        """The size of the code, cubin and PTX, in bytes."""
        return len(self.cubin) + len(self.ptx)

    def entry(self, name: str) -> EntryPoint:
        """Return the kernel called `name`.

        Args:
            name: The name of a kernel, `extern "C"` or C++, qualified or not, or an instance such as
                `tk<float>`. Parameter types distinguish overloads: `f(const float*, int)`.

        Raises:
            UnknownEntryError: There is no such kernel. The error lists the kernels that exist.
            InputError: Several kernels have this name.

        Examples:
            >>> preheat.compile(SAXPY, "sm_90").entry("saxpy").parameters[0].size
            4
        """
        if type(name) is not str:
            check_name("a kernel", name)
        if len(self.entries) == 1 and self.entries[0].name == name:  # Most programs have one kernel.
            return self.entries[0]
        entry = self._by_name.get(self.names.get(name, name))
        if entry is not None:
            return entry
        meant = self._by_cpp.get(_fold(name), [])
        if len(meant) > 1:
            prototypes = ", ".join(each.prototype for each in meant)
            raise InputError(
                f"{self.label} has {len(meant)} kernels {name!r}: {prototypes}",
                hint=f"use one of the names {', '.join(repr(self.name_of(each)) for each in meant)}",
            )
        if not meant:
            known = map(self.name_of, self.entries)
            raise UnknownEntryError(name, self.label, known, templates=self.templates)
        return meant[0]

    def name_of(self, entry: EntryPoint) -> str:
        """Return the shortest name by which `entry(name)` finds `entry`.

        That is its C++ name, its C++ name with parameter types, or its mangled name.

        Examples:
            >>> artifact = preheat.compile("__global__ void k(int* x) { *x = 1; }", "sm_90")
            >>> artifact.entries[0].name, artifact.name_of(artifact.entries[0])
            ('_Z1kPi', 'k')
        """
        title = entry.title
        if self._by_name.get(title) == entry:
            return title
        for name in (title, entry.prototype):
            if (self._by_name.get(name) or self._by_cpp.get(_fold(name))) in (entry, [entry]):
                return name
        return entry.name

    @lazy
    def _by_name(self) -> dict[str, EntryPoint]:
        return {e.name: e for e in self.entries}

    @lazy
    def _by_cpp(self) -> dict[str, list[EntryPoint]]:
        """Return entries by C++ name, with and without qualifiers and parameter types.

        A name without qualifiers is left out if it is the full name of another entry.
        """
        full: dict[str, list[EntryPoint]] = {}
        short: dict[str, list[EntryPoint]] = {}
        for entry in self.entries:
            for name in map(_fold, filter(None, (entry.cpp, entry.prototype))):
                full.setdefault(name, []).append(entry)
                short.setdefault(_strip_qualifier(name), []).append(entry)
        return {**short, **full}

    def encode(self) -> bytes:
        """Encode this artifact as one entry; see `preheat.model.codec`."""
        meta = {
            "kind": "artifact",
            "label": self.label,
            "arch": self.arch.name,
            "toolchain": self.toolchain,
            "parts": self.parts,
            "entries": [*map(_STORED_FIELDS, self.entries)],
            "names": dict(self.names),
            "headers": self.headers,
            "templates": self.templates,
        }
        if any(map(_REASON, self.entries)):
            meta["untyped"] = {entry.name: entry.untyped for entry in self.entries if entry.untyped}
        sections = {
            "cubin": self.cubin,
            "ptx": self.ptx,
            "log": self.log.encode(),
            "provenance": json.dumps(self.provenance).encode(),
        }
        if self.sources:
            sections["sources"] = json.dumps(dict(self.sources), sort_keys=True).encode()
        return codec.pack(self.digest, meta, sections)

    @classmethod
    def stored(cls, digest: str, blob: bytes) -> Artifact:
        """Return the artifact of an entry that a tier has verified; `DamagedEntryError` as in `decode`.

        Every field is checked here, also those that are decoded later.
        """
        meta, places = codec.layout(blob)
        try:
            cubin, ptx, log = _CODE(places)
            row = blob[places["provenance"]] if "provenance" in places else b"[]"
            sources = blob[places["sources"]] if "sources" in places else None
            fields = _fields(digest, meta, row, blob[log], sources)
        except _NOT_AN_ARTIFACT as bad:
            raise codec.DamagedEntryError(f"not an artifact: {bad!r:.200}") from None
        fields["size"] = cubin.stop - cubin.start + ptx.stop - ptx.start
        fields["_entry"] = blob, places
        artifact = object.__new__(cls)
        # All fields at once: the constructor of a frozen class sets them one by one, which takes longer
        # than decoding most of them.
        artifact.__dict__.update(fields)
        return artifact

    @classmethod
    def decode(cls, digest: str, meta: Mapping[str, Any], sections: Mapping[str, bytes]) -> Artifact:
        """Decode an unpacked entry. Raises `DamagedEntryError` when it is not an artifact."""
        try:
            cubin, ptx, log = _CODE(sections)
            row, sources = sections.get("provenance", b"[]"), sections.get("sources")
            fields = _fields(digest, meta, row, log, sources)
            return cls(
                **fields, cubin=cubin, ptx=ptx, log=log.decode(),
                parts=tuple(map(_part, meta["parts"])),
                sources={} if sources is None else _sources(sources),
            )  # fmt: skip
        except _NOT_AN_ARTIFACT as bad:
            raise codec.DamagedEntryError(f"not an artifact: {bad!r:.200}") from None


# Decoding: a correct checksum does not prove that the content is an artifact. All texts are checked
# together, and all numbers of a kernel, because a program that starts decodes hundreds of them.
# Joining texts raises an error for anything but text.

# `_make` of named tuples, as functions in C.
_part: Callable[[Sequence[str]], Part] = partial(tuple.__new__, Part)
_header: Callable[[Sequence[str]], Header] = partial(tuple.__new__, Header)
_parameter: Callable[[Sequence[Any]], Parameter] = partial(tuple.__new__, Parameter)
_entry: Callable[[Sequence[Any]], EntryPoint] = partial(tuple.__new__, EntryPoint)

_made: Callable[[Sequence[Any]], Provenance] = partial(tuple.__new__, Provenance)
_resources: Callable[[Sequence[int]], Resources] = partial(tuple.__new__, Resources)

#: The fields that `Artifact.stored` leaves in the bytes of an entry.
_LEFT_IN_ENTRY = {"cubin", "ptx", "parts", "log", "sources"}
_META = itemgetter("label", "arch", "toolchain", "names", "entries", "parts", "headers")
_CODE = itemgetter("cubin", "ptx", "log")
#: What decoding something that is not an artifact raises.
_NOT_AN_ARTIFACT = (KeyError, TypeError, ValueError, AttributeError, RecursionError, InputError)

# The types of the fields of a kernel and of a parameter.
_ENTRY_POINTS = set(product((str,), (list,), (str, NoneType), (list, NoneType), (list,)))
_INTEGERS = {int}
_NUM_RESOURCES = len(Resources._fields)
_NUM_FACTS = len(Provenance._fields)
# Versions without the last field can read the rows.
_STORED_FIELDS = itemgetter(slice(EntryPoint._fields.index("untyped")))
_REASON = attrgetter("untyped")
_PARAMETERS = set(product((int,), (int,), (int,), (str,), (bool,), (str, NoneType)))


def _fields(
    digest: str, meta: Mapping[str, Any], provenance: bytes, log: bytes, sources: bytes | None
) -> dict[str, Any]:
    """Check the metadata of an entry, and return the fields that every hit needs."""
    label, arch, toolchain, names, entries, parts, headers = _META(meta)
    templates = meta.get("templates", [])
    if type(names) is not dict or type(entries) is not list or type(templates) is not list:
        raise TypeError(f"{(names, entries, templates)!r} are not a table and two lists")
    made = read_provenance(provenance)
    texts = (label, arch, toolchain, made.created, made.timing)
    joined = "".join((*texts, *names, *names.values(), *templates))
    if not joined.isascii():
        joined.encode()  # as in `codec.text`
    if not label.isprintable():
        raise ValueError(f"{label!r} is not the label of a program")
    rows(parts, 2)
    log.decode()
    if sources is not None:
        _sources(sources)
    found, untyped = tuple(map(_entry_point, entries)), meta.get("untyped")
    return {
        "digest": digest,
        "label": label,
        "arch": Arch.parse(arch),
        "toolchain": toolchain,
        "entries": found if untyped is None else _explain_untyped(found, untyped),
        "names": names,
        "headers": () if headers == [] else tuple(map(_header, rows(headers, 3))),
        "templates": tuple(templates),
        "provenance": made,
    }


def _explain_untyped(entries: tuple[EntryPoint, ...], untyped: object) -> tuple[EntryPoint, ...]:
    """Return kernels with the reasons why their types are unknown, by name."""
    if type(untyped) is not dict:
        raise TypeError(f"{untyped!r} is not a table")
    text("".join((*untyped, *untyped.values())))
    return tuple(each._replace(untyped=untyped.get(each.name)) for each in entries)


def _entry_point(row: Any) -> EntryPoint:
    if tuple(map(type, row)) not in _ENTRY_POINTS:
        raise TypeError(f"{row!r} is not a kernel")
    name, parameters, cpp, resources, directives = row
    joined = "".join((name, cpp or "", *directives))
    if not joined.isascii():
        joined.encode()
    if resources is not None:
        if not set(map(type, resources)) <= _INTEGERS:
            raise TypeError(f"{resources!r} are not integers")
        if resources and (min(resources) < 0 or max(resources) >= _MAX_NUMBER):
            raise ValueError(f"{resources!r} are not numbers of bytes, or counts")
        whole = len(resources) == _NUM_RESOURCES
        resources = _resources(resources) if whole else Resources(*resources)
    # The marshalled bytes of `1` and `True` differ, although the values are equal. Version 2 of the
    # format has one encoding of a text.
    decoded = _parameters(marshal.dumps(parameters, 2))
    return _entry((name, decoded, cpp, resources, tuple(directives), None))


@lru_cache(maxsize=1024)
def _parameters(marshalled: bytes) -> tuple[Parameter, ...]:
    """Return the parameters of a kernel. Most kernels share few lists of them."""
    rows = marshal.loads(marshalled)
    for row in rows:
        if type(row) is not list or tuple(map(type, row)) not in _PARAMETERS:
            raise TypeError(f"{row!r} is not a parameter")
    parameters = tuple(map(_parameter, rows))
    text("".join([each.kind + (each.type or "") for each in parameters]))
    numbers = [number for row in rows for number in row[:3]]
    if numbers and (min(numbers) < 0 or max(numbers) >= _MAX_NUMBER):
        raise ValueError(f"{numbers!r} are not numbers of bytes")
    return parameters


def read_provenance(section: bytes) -> Provenance:
    """Return decoded provenance; `TypeError` or `ValueError` when it is invalid."""
    row = parse_json(section.decode())
    if type(row) is not list:
        raise TypeError(f"{row!r} is not a list")
    facts = _made(row) if len(row) == _NUM_FACTS else Provenance(*row)
    if type(facts.seconds) not in (int, float) or not 0 <= facts.seconds < _MAX_NUMBER:
        raise ValueError(f"{facts.seconds!r} is not a number of seconds")
    return facts


def _sources(section: bytes) -> dict[str, str]:
    sources = parse_json(section.decode())
    if type(sources) is not dict:
        raise TypeError(f"{sources!r} is not a table of texts")
    # Not `text`: bytes of a source that are not UTF-8 are stored as surrogates.
    if not set(map(type, sources.values())) <= {str}:
        raise TypeError("a source is not text")
    text("".join(sources))
    return sources


def check_name(what: str, name: object) -> None:
    """Raise `InputError` unless the name of a kernel or variable is text."""
    if not isinstance(name, str):
        raise InputError(
            f"the name of {what} must be text, not {short_repr(name)}",
            hint="pass the name as a string",
        )
    if "__global__" in name:
        raise InputError(
            f"the name of {what} cannot be source text: {short_repr(name)}",
            hint="the source comes first, and then the name",
        )


def without_types(name: str) -> str:
    """Return `tk<float>` for `tk<float>(float*)`. Only the first is a name expression."""
    bare = name.rstrip()
    depth, end = 0, len(bare)
    while bare.endswith(")") and end:
        end -= 1
        depth += (bare[end] == ")") - (bare[end] == "(")
        if depth == 0:
            return bare[:end].rstrip() or name
    return name


# The forms of a demangler for types that C++ allows to write in several ways. The patterns here are
# compiled when they are first used: only C++ names need them.
_SPELLINGS = (
    (r"\(\s*void\s*\)", "()"),
    (r"\b(long|short)(\s+long)?\s+int\b", r"\1\2"),
    (r"\bunsigned\b(?!\s+(?:int|long|short|char)\b)", "unsigned int"),
    (r"\bsigned\s+(?=int|long|short)", ""),
)
_CONST_FIRST = r"\bconst\s+([\w:]+(?:\s+(?!const\b)[\w:]+)*)"
# Of the parameter itself: it is not part of the signature.
_OWN_CONST = r"\bconst\s*(?=[,)]|$)"


def _fold(name: str) -> str:
    """Normalise a name: no spaces, and `const` after its type as demanglers write it."""
    for pattern, spelling in _SPELLINGS:
        name = re.sub(pattern, spelling, name)
    while (match := re.search(_CONST_FIRST, name)) is not None:
        end = _after_arguments(name, match.end())
        name = f"{name[: match.start()]}{match[1]}{name[match.end() : end]} \0{name[end:]}"
    return "".join(re.sub(_OWN_CONST, "", name.replace("\0", "const")).split())


def _after_arguments(name: str, start: int) -> int:
    """Return the end of the template arguments at `start`, or `start` if there are none."""
    depth = 0
    for at in range(start, len(name)):
        depth += (name[at] == "<") - (name[at] == ">")
        if depth == 0:
            return at + 1 if name[at] == ">" else start
    return start


def _strip_qualifier(name: str) -> str:
    """Return `inner` for `ns::inner`. Template arguments and parameter types are not changed."""
    depth = start = 0
    for at, char in enumerate(name):
        depth += (char in "(<") - (char in ")>")
        if depth == 0 and name.startswith("::", at):
            start = at + 2
    return name[start:]
