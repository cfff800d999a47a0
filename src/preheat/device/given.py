"""Code that others compiled: cubins as bytes, and objects like the `ObjectCode` of cuda.core."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from preheat.device import base
from preheat.errors import InputError, TargetError, short_repr
from preheat.model.arch import mismatch, runnable_archs
from preheat.model.artifact import Artifact
from preheat.model.program import Program
from preheat.process.locks import no_fork

__all__ = ["CompiledCode", "ObjectCode", "cubin_artifact", "given_code", "ptx_program", "with_names"]

_MACHINE_CODE = "machine code runs only on devices of its own major version"
_LINK = "link it to a cubin first"
_FORMATS = {
    "ltoir": _LINK,
    "object": _LINK,
    "library": _LINK,
    "fatbin": "extract its cubin: cuobjdump -xelf all FILE",
}


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


def given_code(source: Any, **unusable: object) -> CompiledCode:
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
    return CompiledCode(content, format == "ptx", str(source.name or ""), _names(source.symbol_mapping))


def _names(mapping: Mapping[Any, Any]) -> tuple[tuple[str, str], ...]:
    pairs = [(_text(name), _text(lowered)) for name, lowered in mapping.items() if lowered is not None]
    return tuple(sorted(pairs))


def _text(name: str | bytes) -> str:
    return name if isinstance(name, str) else name.decode()


def cubin_artifact(
    given: CompiledCode, device: base.Device, label: str | None, *, strict: bool
) -> Artifact:
    """Return the artifact of a cubin. Raises `TargetError` if the device cannot run it."""
    with no_fork:
        from preheat.toolchain.binaries.cubin import read_cubin  # Few programs have compiled code.

    digest = _digest(given.code, given.names)
    title = label or given.name or f"code {digest[:12]}"
    cubin = read_cubin(given.code, title)
    why = mismatch(cubin.arch, device.arch, strict=strict)
    if why is None and cubin.arch not in runnable_archs(device.arch):
        why = _MACHINE_CODE
    if why is not None:
        raise TargetError(title, str(cubin.arch), f"{device.name} ({device.arch})", why)
    return Artifact(
        digest=digest, label=title, arch=cubin.arch, toolchain="unknown", parts=(),
        entries=cubin.entries, cubin=given.code, ptx=b"", names=dict(given.names),
    )  # fmt: skip


def ptx_program(given: CompiledCode, label: str | None) -> Program:
    """Return PTX as a program, which is assembled, or found in a cache."""
    text = given.code.rstrip(b"\0").decode(errors="surrogateescape")
    return Program.of(text, label=label or given.name or None, language="ptx")


def with_names(artifact: Artifact, given: CompiledCode) -> Artifact:
    """Return an artifact whose kernels also have the additional names of `given`.

    Modules are found by the digests of their artifacts, so this one gets its own digest.
    """
    with no_fork:
        from dataclasses import replace

    digest = _digest(artifact.digest.encode(), given.names)
    return replace(artifact, digest=digest, names={**artifact.names, **dict(given.names)})


def _digest(code: bytes, names: tuple[tuple[str, str], ...]) -> str:
    found = hashlib.sha256(b"preheat given code\0" + code)
    for pair in names:
        found.update("\0".join(("", *pair)).encode(errors="surrogateescape"))
    return found.hexdigest()
