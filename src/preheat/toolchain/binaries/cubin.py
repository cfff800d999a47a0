"""Read a cubin: its architecture, its kernels, and where their parameters lie.

A cubin is an ELF file. Its kernels are symbols of type FUNC with a flag of NVIDIA. The section
`.nv.info.NAME` lists attributes of the kernel NAME, among them one for each parameter. The bytes may
come from anywhere, so every offset and size is checked against the data.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

from preheat.errors import InputError
from preheat.model.arch import Arch
from preheat.model.artifact import EntryPoint, Parameter, Resources
from preheat.toolchain.binaries.demangle import demangle
from preheat.toolchain.signature import parameter_types, qualified_name

__all__ = ["Cubin", "read_arch", "read_cubin", "read_resources"]

T = TypeVar("T")

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_PARAMETER = struct.Struct("<IHHI")
_ATTRIBUTE = struct.Struct("<BBH")

_ELF = b"\x7fELF"
_MACHINE = 190  # EM_CUDA
_RELOCATABLE, _EXECUTABLE = 1, 2  # e_type
# Types of sections: SHT_SYMTAB, SHT_NOBITS, SHT_CUDA_INFO.
_SYMBOLS, _NO_BITS, _ATTRIBUTES = 2, 8, 0x70000000
_FUNCTION, _KERNEL = 2, 0x10  # STT_FUNC in the type of a symbol, STO_CUDA_ENTRY in its other byte
_INFO, _TOOLS = ".nv.info.", ".note.nv.tkinfo"
_ALL_INFO, _SHARED = ".nv.info", ".nv.shared."
# Attributes of all kernels, in the section without a name: a symbol, and a number for it.
_FRAME, _REGISTERS = 0x11, 0x2F
_SYMBOL_VALUE = struct.Struct("<II")
_RESERVED = 1024  # bytes of shared memory that belong to the system, from sm_90 on
# Of the attributes (EIATTR_…): parameters in two forms, and the size of all parameters.
_KPARAM, _KPARAM_V2, _PARAM_BYTES = 0x17, 0x45, 0x19
_HAS_SIZE = 4  # the format of an attribute whose value is a size, and that many bytes

_MAX_NAME = 1 << 16  # bytes; mangled names of templates are long
_MAX_PARAMETERS = 1 << 15  # bytes of all parameters; the driver takes a little less

# The first bytes of other formats that libraries and compilers give out, and what to do with them.
_OTHERS = (
    (b"\x50\xed\x55\xba", "a fat binary", "extract its cubin: cuobjdump -xelf all FILE"),
    (b"\xb1\x43\x62\x46", "the header of a fat binary", "pass the cubin itself"),
    (b"\xed\x43\x4e\x7f", "LTO-IR", "link it to a cubin first"),
    (b"BC\xc0\xde", "LLVM bitcode", "compile it to a cubin or PTX first"),
    (b"!<arch>\n", "a library of objects", "link it to a cubin first"),
)
_PTX = re.compile(rb"^[ \t]*\.version\b", re.M)
_ARCH_OPTION = re.compile(rb"-arch[= ](sm_\d+[af]?)\b")

# Untyped words by their size. A word of one byte has a sign or none; `b8` is the element of a struct.
_WORDS = {1: "u8", 2: "b16", 4: "b32", 8: "b64"}
_LARGEST_ENUM = 4  # bytes; a larger value of a named type is taken as a struct
_NUMBERS = frozenset({
    "bool", "char", "signed char", "unsigned char", "short", "unsigned short", "int", "unsigned int",
    "long", "unsigned long", "long long", "unsigned long long", "float", "double", "__half",
})  # fmt: skip
_STRUCTS = frozenset({"__nv_bfloat16"})


class Cubin(NamedTuple):
    """What a cubin says about itself."""

    arch: Arch
    entries: tuple[EntryPoint, ...]


class _Section(NamedTuple):
    name: int  # its offset in the table of names
    type: int
    offset: int
    size: int
    link: int


def read_cubin(data: bytes, title: str) -> Cubin:
    """Return the architecture and the kernels of a cubin, which messages call `title`.

    Raises `InputError` for bytes that are not a complete, linked cubin.
    """
    return _read(data, title, _Reader.read)


def read_arch(data: bytes, title: str) -> Arch:
    """Return the architecture of a cubin, which messages call `title`; `InputError` as `read_cubin`."""
    return _read(data, title, _Reader.arch)


def read_resources(data: bytes, title: str) -> dict[str, Resources]:
    """Return what each kernel of a cubin uses: registers, shared memory and stack.

    Raises `InputError` as `read_cubin` does.
    """
    return _read(data, title, _Reader.resources)


def _read(data: bytes, title: str, part: Callable[[_Reader], T]) -> T:
    _require_cubin(data, title)
    try:
        return part(_Reader(data))
    except (_DamagedError, struct.error, UnicodeDecodeError) as bad:
        raise InputError(f"{title} is not a complete cubin: {bad}") from None


def _require_cubin(data: bytes, title: str) -> None:
    for first, format, hint in _OTHERS:
        if data.startswith(first):
            raise InputError(f"{title} is {format}, not a cubin", hint=hint)
    if not data.startswith(_ELF):
        if _PTX.search(data, 0, _MAX_NAME):
            raise InputError(f"{title} is PTX, not a cubin", hint="pass PTX as text: data.decode()")
        advice = "pass source text as a str: source.decode()" if data.isascii() else None
        raise InputError(f"{title} is not a cubin: it begins with {data[:8]!r}", hint=advice)
    if len(data) < _HEADER.size or data[4:6] != b"\x02\x01":
        raise InputError(f"{title} is not a complete cubin: its header is not one of 64 bits")
    kind, machine = struct.unpack_from("<HH", data, 16)
    if machine != _MACHINE:
        raise InputError(f"{title} is an ELF file for machine {machine}, not for a GPU")
    if kind == _RELOCATABLE:
        raise InputError(
            f"{title} is relocatable, and cannot be loaded", hint="link it to a cubin first"
        )
    if kind != _EXECUTABLE:
        raise InputError(f"{title} is an ELF file of type {kind}, which cannot be loaded")


class _DamagedError(Exception):
    """The bytes contradict themselves."""


class _Reader:
    """Reads one ELF file. Every offset is checked before it is used."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        fields = _HEADER.unpack_from(data)
        self._ident, self._flags = fields[0], fields[7]
        self._sections = list(self._read_sections(fields[6], *fields[11:14]))
        self._names = self._section(self._names_index)
        self._require_whole(fields[5] + fields[9] * fields[10])

    def read(self) -> Cubin:
        """Return what the cubin says about itself."""
        infos = {
            self._text(self._names, section.name): section
            for section in self._sections
            if section.type == _ATTRIBUTES
        }
        entries = [self._entry(name, infos.get(_INFO + name)) for name in self._kernels()]
        return Cubin(self.arch(), tuple(entries))

    def arch(self) -> Arch:
        """Return the architecture. From version 8 on, a note may contain its suffix."""
        tools = b""
        for section in self._sections:
            if section.type != _ATTRIBUTES and self._starts_with(section.name, _TOOLS):
                tools = self._bytes(section)
        if self._ident[8] < 8:
            number, suffix = self._flags & 0xFF, "a" if self._flags & 0x800 else ""
        else:
            number, suffix = self._flags >> 8 & 0xFF, "a" if self._flags & 0x8 else ""
        try:
            arch = Arch.parse(f"sm_{number}{suffix}")
            option = _ARCH_OPTION.search(tools)
            named = arch if option is None else Arch.parse(option[1].decode())
        except InputError as unknown:
            raise _DamagedError(str(unknown)) from None
        return named if not suffix and named.plain == arch.plain else arch

    def resources(self) -> dict[str, Resources]:
        """Return what each kernel uses."""
        numbers: dict[tuple[int, str], int] = {}
        shared: dict[str, int] = {}
        symbols = self._symbols()
        for section in self._sections:
            name = self._text(self._names, section.name)
            if section.type == _ATTRIBUTES and name == _ALL_INFO:
                for kind, _, content in _attributes(self._bytes(section)):
                    if kind in (_FRAME, _REGISTERS):
                        index, value = _SYMBOL_VALUE.unpack_from(content)
                        numbers[kind, symbols.get(index, "")] = value
            elif name.startswith(_SHARED):
                shared[name.removeprefix(_SHARED)] = section.size
        reserved = _RESERVED if self.arch() >= Arch(9, 0) else 0
        return {
            name: Resources(
                registers=numbers.get((_REGISTERS, name), 0),
                shared=max(shared.get(name, 0) - reserved, 0),
                stack=numbers.get((_FRAME, name), 0),
            )
            for name in self._kernels()
        }

    def _require_whole(self, end: int) -> None:
        """Raise unless all sections, and the segments before `end`, are there."""
        kept = (each for each in self._sections if each.type != _NO_BITS)
        last = max((each.offset + each.size for each in kept), default=0)
        if max(last, end) > len(self._data):
            raise _DamagedError(f"it ends at byte {max(last, end)} of {len(self._data)}")

    # Sections

    def _read_sections(self, offset: int, size: int, count: int, names: int) -> Iterator[_Section]:
        if size != _SECTION.size:
            raise _DamagedError(f"its sections have descriptions of {size} bytes")
        first = self._description(offset)
        self._names_index = first.link if names == 0xFFFF else names  # There are many sections.
        count = count or first.size
        if offset + count * size > len(self._data):
            raise _DamagedError(f"{count} sections do not fit into {len(self._data)} bytes")
        for at in range(count):
            yield self._description(offset + at * size)

    def _description(self, offset: int) -> _Section:
        if offset + _SECTION.size > len(self._data):
            raise _DamagedError(f"it describes its sections at byte {offset} of {len(self._data)}")
        fields = _SECTION.unpack_from(self._data, offset)
        return _Section(fields[0], fields[1], fields[4], fields[5], fields[6])

    def _section(self, index: int) -> _Section:
        if index >= len(self._sections):
            raise _DamagedError(f"there is no section {index}")
        return self._sections[index]

    def _bytes(self, section: _Section) -> bytes:
        end = section.offset + section.size
        if end > len(self._data):
            raise _DamagedError(f"a section ends at byte {end} of {len(self._data)}")
        return self._data[section.offset : end]

    def _text(self, table: _Section, at: int) -> str:
        """Return the text at an offset of a table of texts."""
        start, limit = table.offset + at, table.offset + table.size
        end = self._data.find(b"\0", start, min(limit, start + _MAX_NAME))
        if not table.offset <= start < limit or end < 0:
            raise _DamagedError("a name is outside the table of names")
        return self._data[start:end].decode()

    def _starts_with(self, at: int, text: str) -> bool:
        return self._data.startswith(text.encode(), self._names.offset + at)

    # Kernels

    def _kernels(self) -> list[str]:
        """Return the names of the kernels, each once, in the order of the file."""
        kernels: dict[int, str] = {}
        for texts, (name, info, other, place, _, _) in self._symbol_rows():
            if info & 0xF == _FUNCTION and other & _KERNEL and place and name not in kernels:
                kernels[name] = self._text(texts, name)
        return list(dict.fromkeys(kernels.values()))

    def _symbols(self) -> dict[int, str]:
        """Return the names of functions by the number of their symbol."""
        return {
            index: self._text(texts, row[0])
            for index, (texts, row) in enumerate(self._symbol_rows())
            if row[1] & 0xF == _FUNCTION
        }

    def _symbol_rows(self) -> Iterator[tuple[_Section, tuple[int, ...]]]:
        """Yield the symbols, each with the table of its names."""
        for section in self._sections:
            if section.type == _SYMBOLS:
                texts = self._section(section.link)
                table = self._bytes(section)
                whole = len(table) - len(table) % _SYMBOL.size
                for row in _SYMBOL.iter_unpack(table[:whole]):
                    yield texts, row

    def _entry(self, name: str, info: _Section | None) -> EntryPoint:
        spelled = demangle(name)
        places = [] if info is None else self._parameters(name, info)
        types = parameter_types(spelled) if spelled else ()
        known = types if len(types) == len(places) else (None,) * len(places)
        parameters = tuple(
            _parameter(offset, size, type) for (offset, size), type in zip(places, known, strict=True)
        )
        return EntryPoint(name, parameters, cpp=qualified_name(spelled) if spelled else None)

    def _parameters(self, name: str, info: _Section) -> list[tuple[int, int]]:
        """Return the offset and the size of each parameter."""
        by_ordinal: dict[int, tuple[int, int]] = {}
        total = 0
        for kind, value, content in _attributes(self._bytes(info)):
            if kind == _PARAM_BYTES:
                total = value
            elif kind in (_KPARAM, _KPARAM_V2):
                _, ordinal, offset, bits = _PARAMETER.unpack_from(content)
                by_ordinal[ordinal] = (offset, bits >> 18 if kind == _KPARAM else bits & 0xFFFF)
        places = [by_ordinal[ordinal] for ordinal in sorted(by_ordinal)]
        if sorted(by_ordinal) != list(range(len(by_ordinal))) or not _is_layout(places):
            raise _DamagedError(f"the parameters of {name} overlap, or are not complete")
        if total and not places:
            raise _DamagedError(f"the {total} bytes of parameters of {name} are not described")
        return places


def _attributes(table: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yield the kind, the short value and the content of each attribute of a kernel."""
    at = 0
    while at + _ATTRIBUTE.size <= len(table):
        format, kind, value = _ATTRIBUTE.unpack_from(table, at)
        at += _ATTRIBUTE.size
        content = b""
        if format == _HAS_SIZE:
            content = table[at : at + value]
            at += value
        yield kind, value, content


def _is_layout(places: list[tuple[int, int]]) -> bool:
    """Return whether parameters follow one another without overlap, and are not too large."""
    end = 0
    for offset, size in places:
        if offset < end or size < 1:
            return False
        end = offset + size
    return end <= _MAX_PARAMETERS


def _parameter(offset: int, size: int, type: str | None) -> Parameter:
    """Return a parameter. A cubin has no types, but the mangled name of a C++ kernel has."""
    pointer = type is not None and type.endswith(("*", "&")) and size == 8
    align = min((offset | size) & -(offset | size), 16)
    named = type is not None and not pointer and type not in _NUMBERS
    struct_type = type in _STRUCTS or (named and size > _LARGEST_ENUM)
    kind = "b8" if struct_type else _WORDS.get(size, "b8")
    return Parameter(offset, size, align, "u64" if pointer else kind, pointer, type)
