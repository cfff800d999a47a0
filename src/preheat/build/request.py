"""Requests: the arguments of a call as one value, and a program for an architecture with its keys."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from preheat.errors import InputError, ToolchainError, short_repr
from preheat.model.arch import Arch
from preheat.model.artifact import without_types
from preheat.model.key import Key, bundle_key, request_digest, request_key
from preheat.model.program import NONE, Program, file_of, header_rows, list_argument
from preheat.process.lazy import lazy
from preheat.store import Chain
from preheat.toolchain.compiler import Toolchain, own_roots

__all__ = [
    "CompiledCode",
    "ModuleRequest",
    "ObjectCode",
    "Request",
    "Source",
    "TargetDevice",
    "look_ahead",
    "read_given",
]

Source = str | Path | Program

_LINK = "link it to a cubin first"
_FORMATS = {
    "ltoir": _LINK,
    "object": _LINK,
    "library": _LINK,
    "fatbin": "extract its cubin: cuobjdump -xelf all FILE",
}


class TargetDevice(Protocol):
    """What a build needs to know of a device."""

    name: str
    arch: Arch


class Request:
    """A program, the architecture it is wanted for, and the toolchain that would compile it."""

    def __init__(self, program: Program, arch: Arch, toolchain: Toolchain) -> None:
        self.program = program
        self.arch = arch
        self.toolchain = toolchain

    @lazy
    def key(self) -> Key:
        """The key in caches, which names the compiler.

        Raises `ToolchainError` if there is no compiler.
        """
        identity = self.toolchain.identity(self.program.language)
        return request_key(self.program, self.arch, identity)

    @lazy
    def digest(self) -> str:
        """The digest of `key`."""
        identity = self.toolchain.identity(self.program.language)
        return request_digest(self.program, self.arch, identity)

    @lazy
    def bundle_key(self) -> Key:
        """The key in bundles, which names no compiler."""
        return bundle_key(self.program, self.arch)

    @property
    def flight_key(self) -> tuple[str, ...]:
        """The key under which threads share one compile.

        Include directories are part of it, because they decide which headers the compiler opens.
        """
        include = self.program.include if self.program.may_include else ()
        return (self.digest, *include)

    @property
    def own_roots(self) -> Mapping[str, str]:
        """The include directories of the program by label, without the toolkit's."""
        return own_roots(self.program) if "cuda" in self.program.language else {}

    @lazy
    def roots(self) -> Mapping[str, str]:
        """The include directories by label; only CUDA C++ includes files."""
        return self.toolchain.roots(self.program) if "cuda" in self.program.language else {}


def look_ahead(
    cache: Chain, toolchain: Toolchain, wanted: Iterable[tuple[Program, Arch]], *, once: bool = True
) -> None:
    """Look up many programs on shared stores with few requests.

    If a store does not have a program, the next lookup of the program makes no request to it. Without
    `once`, this applies to all lookups of the next minute. Without a shared store, do nothing.
    """
    if not cache.shared:
        return
    with suppress(ToolchainError):  # The keys of entries name the compiler, and there is none.
        cache.look_ahead([Request(*each, toolchain).digest for each in wanted], once=once)


# The arguments of a call


class ModuleRequest(NamedTuple):
    """The arguments of a call, each in one form. Equal requests mean the same module.

    `directory` is the current directory where an include directory is relative to it, and empty
    otherwise, so that after a chdir the request is another one.
    """

    source: Source | CompiledCode
    label: str | None
    options: tuple[str, ...]
    include: tuple[str | os.PathLike[str], ...]
    headers: tuple[tuple[str, str], ...] | None
    names: tuple[str, ...]
    arch: Arch | None
    strict: bool
    directory: str = ""

    @classmethod
    def of(
        cls,
        source: Source | bytes | ObjectCode,
        label: str | None = None,
        options: Sequence[str] | None = (),
        include: Iterable[str | os.PathLike[str]] | None = (),
        headers: Mapping[str, str] | None = None,
        names: Iterable[str] | None = (),
        arch: Arch | str | None = None,
        strict: bool = False,
    ) -> ModuleRequest:
        """Check the arguments of a call; `InputError` says which of them is wrong."""
        if not isinstance(label, str | None):
            raise InputError(f"label must be text, not {type(label).__name__}: {label!r}")
        if not isinstance(source, str | os.PathLike | Program):
            given = read_given(
                source, options=options, include=include, headers=headers, names=names, arch=arch
            )
            return cls(given, label, (), (), None, (), None, bool(strict))
        path = file_of(source)
        request = cls(
            # A whole path, so that after a chdir a relative one means another file.
            source if path is None else Path(os.path.abspath(path)),
            label,
            () if options is NONE else list_argument("options", options),
            () if include is NONE else list_argument("include", include),
            None if headers is None else header_rows(headers) or None,
            () if names is NONE else list_argument("names", names),
            None if arch is None else Arch.parse(arch),
            bool(strict),
        )
        if (options or include) and request._has_relative_include():
            return request._replace(directory=os.getcwd())
        return request

    def _has_relative_include(self) -> bool:
        """Return True when an include directory may be relative to the current directory."""
        in_options = any(option.startswith(("-I", "--include-path")) for option in self.options)
        return in_options or not all(map(os.path.isabs, self.include))

    def for_kernel(self, name: str) -> ModuleRequest:
        """Return the request for the module that has the kernel `name`.

        A template instance has to be named when its program is compiled.
        """
        instance = without_types(name)
        if "<" in instance and not isinstance(self.source, Program | CompiledCode):
            return self._replace(names=(instance, *self.names))
        return self

    def program(self) -> Program:
        """Read the program from its source. Raises `InputError` for code that is compiled already."""
        if isinstance(self.source, CompiledCode):
            raise InputError(
                "compiled code is not a program", hint="load it by gpu.module(code), and wait for it"
            )
        headers = None if self.headers is None else dict(self.headers)
        if type(self.source) is str:  # It is source text: `of` has made paths of file names.
            return Program.of(
                self.source, label=self.label, options=self.options, include=self.include,
                headers=headers, names=self.names,
            )  # fmt: skip
        return Program.read(
            self.source, label=self.label, options=self.options, include=self.include,
            headers=headers, names=self.names,
        )  # fmt: skip


class ObjectCode(Protocol):
    """Compiled code of another library, such as the `ObjectCode` of cuda.core."""

    @property
    def name(self) -> str:
        """The name of the code in messages."""

    @property
    def code(self) -> bytes | str:
        """The code, or the path of its file."""

    @property
    def code_type(self) -> str:
        """Its format: `cubin` or `ptx`."""

    @property
    def symbol_mapping(self) -> Mapping[Any, Any]:
        """The names of kernels by name expression."""


class CompiledCode(NamedTuple):
    """Compiled code: a cubin or PTX, its name, and additional names of its kernels."""

    code: bytes
    is_ptx: bool = False
    name: str = ""
    names: tuple[tuple[str, str], ...] = ()  # a name expression, and the name of its kernel


def read_given(source: Any, **unusable: object) -> CompiledCode:
    """Return the code in `source`: the bytes of a cubin, or an `ObjectCode`.

    `unusable` are other arguments of the caller, which make sense only for a compile. Raises
    `InputError` for anything else, and for code that a device cannot load as it is.
    """
    given = _read(source)
    if names := [f"{name}=" for name, value in unusable.items() if value]:
        raise InputError(
            f"{' and '.join(names)} cannot be used: the code is compiled already",
            hint="pass the source instead of compiled code",
        )
    return given


def _read(source: Any) -> CompiledCode:
    if isinstance(source, bytes | bytearray | memoryview):
        return CompiledCode(bytes(source))
    if not all(hasattr(source, name) for name in ("code", "code_type", "symbol_mapping")):
        raise InputError(f"source must be a path, source text or a Program, not {short_repr(source)}")
    format = str(source.code_type)
    if format not in ("cubin", "ptx"):
        raise InputError(
            f"{short_repr(source.name)} is {format}, which cannot be loaded", hint=_FORMATS.get(format)
        )
    code = source.code
    content = Path(code).read_bytes() if isinstance(code, str) else bytes(code)
    return CompiledCode(
        content, format == "ptx", str(source.name or ""), _read_names(source.symbol_mapping)
    )


def _read_names(mapping: Mapping[Any, Any]) -> tuple[tuple[str, str], ...]:
    pairs = [
        (_decode(name), _decode(lowered)) for name, lowered in mapping.items() if lowered is not None
    ]
    return tuple(sorted(pairs))


def _decode(name: str | bytes) -> str:
    return name if isinstance(name, str) else name.decode()
