"""The input of a link: programs and compiled files, as one frozen value."""

from __future__ import annotations

import hashlib
import os
import re
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from preheat.errors import InputError, short_repr
from preheat.model.key import Key, program_rows
from preheat.model.program import Program, file_of, list_argument, read_input, require_label
from preheat.process.lazy import lazy
from preheat.process.messages import printable

__all__ = ["BinaryPart", "LinkedProgram", "RelocatableProgram"]

#: The kinds of compiled parts, each with the suffixes of its files.
KINDS = {
    "cubin": (".cubin",),
    "ltoir": (".ltoir",),
    "fatbin": (".fatbin",),
    "object": (".o", ".obj"),
    "library": (".a", ".lib"),
}
#: The suffixes of all of them.
BINARY_SUFFIXES = tuple(suffix for suffixes in KINDS.values() for suffix in suffixes)
_EM_CUDA = 190  # The machine of ELF files with GPU code.
_MAX_LABELS = 4  # A longer list of parts is cut short in the label of a link.

# Options of the linker that are separate arguments, and those that make something other than code.
_REFUSED = (
    (r"-{1,2}(?:arch|gpu-architecture)(?:=.*)?", "the architecture is an argument: arch='sm_90'"),
    (r"-{1,2}d?lto(?:=.*)?", "link-time optimisation is an argument: lto=True"),
    (r"-{1,2}ptx", "an artifact has the PTX beside the machine code: artifact.ptx"),
    (r"-r|-{1,2}relocatable(?:=.*)?", "the result of a link is complete; list all parts in one link"),
)


@dataclass(frozen=True, kw_only=True)
class BinaryPart:
    """A compiled part of a link: a cubin, LTO-IR, a fatbin, an object file or a static library.

    It gives device functions and variables to the other parts. Its kernels can be launched if it is
    LTO-IR. The parameters of kernels in the other kinds are not known.

    Attributes:
        data: The bytes of the file.
        kind: `"cubin"`, `"ltoir"`, `"fatbin"`, `"object"` or `"library"`.
        label: The name of the part in messages.

    Examples:
        >>> code = preheat.compile(SAXPY, "sm_90").cubin
        >>> preheat.BinaryPart.of(code).kind
        'cubin'
    """

    data: bytes = field(repr=False)
    kind: str
    label: str
    path: str | None = field(default=None, compare=False)  # the file that `from_file` read

    @classmethod
    def of(cls, data: bytes, *, kind: str | None = None, label: str | None = None) -> BinaryPart:
        """Make a part from bytes.

        Args:
            data: The bytes of a compiled file.
            kind: The kind of file. The default follows from the first bytes.
            label: A name for messages.

        Raises:
            InputError: The bytes are of no known kind.

        Examples:
            >>> preheat.BinaryPart.of(preheat.compile(SAXPY, "sm_90").cubin, label="saxpy").label
            'saxpy'
        """
        actual = kind or _kind_of(data)
        if actual is None:
            raise InputError(
                f"{label or 'a part'} is not a cubin, LTO-IR, a fatbin, an object file or a library",
                hint="a source is given as text, as the path of a .cu or .ptx file, or as a Program",
            )
        return cls(data=data, kind=actual, label=label or f"part{KINDS.get(actual, ('',))[0]}")

    @classmethod
    def from_file(
        cls, path: str | os.PathLike[str], *, kind: str | None = None, label: str | None = None
    ) -> BinaryPart:
        """Read a part from a file. See `of` for the keyword arguments.

        Raises:
            InputError: The file cannot be read, or is of no known kind.

        Examples:
            >>> from pathlib import Path
            >>> size = Path("saxpy.cubin").write_bytes(preheat.compile(SAXPY, "sm_90").cubin)
            >>> preheat.BinaryPart.from_file("saxpy.cubin").kind
            'cubin'
        """
        path = Path(path)
        made = cls.of(read_input(path), kind=kind, label=label or printable(path.name))
        return replace(made, path=os.path.abspath(path))

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InputError(f"{self.kind!r} is not a kind of part; these are: {', '.join(KINDS)}")
        if not self.data:
            raise InputError(f"{self.label}: the part is empty")
        require_label(self.label)

    @lazy
    def digest(self) -> str:
        """The SHA-256 of the data."""
        return hashlib.sha256(self.data).hexdigest()


@dataclass(frozen=True, kw_only=True)
class RelocatableProgram(Program):
    """A CUDA C++ part of a link, which is compiled to code that still has to be linked.

    With `lto` that is LTO-IR, and otherwise relocatable machine code and its PTX.
    """

    lto: bool = False

    @classmethod
    def part(cls, program: Program, *, lto: bool) -> RelocatableProgram:
        """Return `program` as a part of a link."""
        own = {each.name: getattr(program, each.name) for each in fields(Program)}
        return cls(**own, lto=lto)

    @lazy
    def part_rows(self) -> tuple[tuple[str, bytes], ...]:
        """The row of the key that distinguishes the part from the same program on its own."""
        return (("relocatable", b"lto-ir" if self.lto else b"cubin+ptx"),)

    @lazy
    def form_options(self) -> tuple[str, ...]:
        """The option that makes code for a linker."""
        return ("-dlto",) if self.lto else ("-rdc=true",)


@dataclass(frozen=True, kw_only=True)
class LinkedProgram(Program):
    """Programs and compiled parts that are linked into one. It is used wherever a `Program` is.

    CUDA C++ parts are compiled to relocatable code or, with `lto`, to LTO-IR, which the linker
    optimises as a whole. The order of the parts is part of the key. `options` are for nvJitLink,
    and each program has its own options for its compiler. The result has the kernels and variables of
    all parts. `include` has the directories of all parts.

    Attributes:
        parts: The parts, each a `Program` or a `BinaryPart`.
        lto: True if the linker optimises the parts as a whole.

    Examples:
        >>> DOUBLE = "__device__ int twice(int n) { return 2 * n; }"
        >>> KERNEL = '__device__ int twice(int); extern "C" __global__ void k(int* x) {*x = twice(7);}'
        >>> kernel = gpu.kernel(preheat.LinkedProgram.of([DOUBLE, KERNEL]), "k")
        >>> x = gpu.zeros(1, "int32")
        >>> kernel[1, 1](x)
        >>> x.numpy()
        array([14], dtype=int32)
    """

    source: str = ""  # A linked program has no text of its own.
    parts: tuple[Program | BinaryPart, ...] = ()
    lto: bool = False

    @classmethod
    def of(  # type: ignore[override]
        cls,
        parts: Iterable[str | bytes | os.PathLike[str] | Program | BinaryPart],
        *,
        label: str | None = None,
        lto: bool = False,
        options: Sequence[str] | None = (),
    ) -> LinkedProgram:
        """Make a program of parts.

        Args:
            parts: CUDA C++ or PTX texts, paths of sources or of compiled files, bytes of compiled
                files, `Program` and `BinaryPart` objects. A part that needs options, include
                directories, headers in memory or names of template instances is a `Program`.
            label: The name of the result.
            lto: Let the linker optimise the parts as a whole.
            options: Options of nvJitLink.

        Raises:
            InputError: A part or an option is one that no link can use.

        Examples:
            >>> program = preheat.LinkedProgram.of(["saxpy.cu", "__device__ int n;"], lto=True)
            >>> len(program.parts)
            2
        """
        if isinstance(parts, str | bytes | os.PathLike | Program | BinaryPart):
            hint = "write preheat.link([a, b], arch)"
            raise InputError(f"the parts of a link are a list, not {short_repr(parts)}", hint=hint)
        if not isinstance(parts, Iterable):
            raise InputError(f"the parts of a link are a list, not {type(parts).__name__}")
        if not isinstance(lto, bool):
            raise InputError(f"lto must be True or False, not {lto!r}")
        read = tuple(_part(part, index) for index, part in enumerate(parts))
        return cls(
            label=_default_label(read) if label is None else label,
            parts=read,
            lto=lto,
            options=list_argument("options", options),
        )

    def __post_init__(self) -> None:
        if not self.parts:
            raise InputError("a link needs at least one part")
        for part in self.parts:
            if isinstance(part, LinkedProgram) or not isinstance(part, Program | BinaryPart):
                raise InputError(
                    f"a part of a link is a Program or a BinaryPart, not {short_repr(part)}",
                    hint="list the parts of both links in one" if isinstance(part, Program) else None,
                )
            if isinstance(part, BinaryPart) and part.kind == "ltoir" and not self.lto:
                raise InputError(f"{part.label} is LTO-IR, which is linked with lto=True")
        if all(isinstance(part, BinaryPart) and part.kind != "ltoir" for part in self.parts):
            raise InputError(
                f"{self.label}: no part has kernels whose parameters are known",
                hint="add a part with kernels: CUDA C++, PTX or LTO-IR",
            )
        sources = self.sources
        directories = (each for part in sources.values() if part.may_include for each in part.include)
        derived = {
            "language": "cuda+link" if sources else "link",
            "include": tuple(dict.fromkeys(directories)),
            "spellings": (),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)
        self._check_texts()
        self._check_options()

    def _check_texts(self) -> None:
        if self.source or self.headers or self.names:
            raise InputError(
                f"{self.label}: a linked program has no source, headers or names of its own",
                hint="they belong to its parts: Program.of(text, headers={…}, names=[…])",
            )
        super()._check_texts()

    def _check_options(self) -> None:
        for option in self.options:
            for pattern, hint in _REFUSED:
                if re.fullmatch(pattern, option):
                    message = f"{self.label}: {option} cannot be an option of a link"
                    raise InputError(message, hint=hint)

    @lazy
    def sources(self) -> dict[int, RelocatableProgram]:
        """The CUDA C++ parts by their index, as they are compiled."""
        return {
            index: RelocatableProgram.part(part, lto=self.lto)
            for index, part in enumerate(self.parts)
            if isinstance(part, Program) and part.language == "cuda"
        }

    @property
    def include_spellings(self) -> tuple[str, ...]:
        """The spellings of the include directories, each with the index of its part."""
        return tuple(
            f"{index}:{spelling}"
            for index, part in self.sources.items()
            for spelling in part.include_spellings
        )

    @lazy
    def may_include(self) -> bool:
        """Return True if the compile of a part may open a file."""
        return any(part.may_include for part in self.sources.values())

    @lazy
    def uncacheable(self) -> str | None:
        """The reason why the program cannot be cached, or None when it can."""
        for part in self.parts:
            if isinstance(part, Program) and part.uncacheable:
                return f"{part.label}: {part.uncacheable}"
        return super().uncacheable

    @lazy
    def part_rows(self) -> tuple[tuple[str, bytes], ...]:
        """The rows of the key that describe the parts, in their order."""
        rows = [("lto", b"yes" if self.lto else b"no"), ("parts", b"%d" % len(self.parts))]
        for index, part in enumerate(self.parts):
            rows += ((f"part[{index}].{label}", payload) for label, payload in _rows(part))
        return tuple(rows)

    @lazy
    def content(self) -> str:
        """The SHA-256 of what the parts are, without the include directories."""
        return Key(self.part_rows).digest


def _rows(part: Program | BinaryPart) -> tuple[tuple[str, bytes], ...]:
    if isinstance(part, Program):
        return (("language", part.language.encode()), *program_rows(part))
    values = {"language": part.kind, "label": part.label, "sha256": part.digest}
    return tuple((label, value.encode()) for label, value in values.items())


def _part(part: Any, index: int) -> Program | BinaryPart:
    """Return a part that is given in any form. Parts without a name get one with their index."""
    if isinstance(part, Program | BinaryPart):
        return part
    if isinstance(part, bytes | bytearray | memoryview):
        made = BinaryPart.of(bytes(part), label=f"part {index}")
        return replace(made, label=f"part{index}{KINDS[made.kind][0]}")
    if isinstance(part, os.PathLike) or (isinstance(part, str) and _names_file(part)):
        return (BinaryPart if os.fspath(part).endswith(BINARY_SUFFIXES) else Program).from_file(part)
    program = Program.of(part)
    return Program.of(part, label=f"part{index}.{'ptx' if program.language == 'ptx' else 'cu'}")


def _names_file(text: str) -> bool:
    return file_of(text) is not None or (text.endswith(BINARY_SUFFIXES) and "\n" not in text)


def _kind_of(data: bytes) -> str | None:
    """Return the kind of a compiled file by its first bytes, or None."""
    if data.startswith(b"!<arch>\n"):
        return "library"
    if data.startswith(b"\xed\x43\x4e\x7f"):
        return "ltoir"
    if data.startswith(b"\x50\xed\x55\xba"):
        return "fatbin"
    if data.startswith(b"\x7fELF") and len(data) >= 20:
        return "cubin" if struct.unpack_from("<H", data, 18)[0] == _EM_CUDA else "object"
    return None


def _default_label(parts: Sequence[Program | BinaryPart]) -> str:
    labels = [part.label for part in parts]
    rest = len(labels) - _MAX_LABELS
    return "+".join(labels) if rest <= 0 else f"{'+'.join(labels[:_MAX_LABELS])}+{rest} more"
