"""Recorded requests of cuda.core: a compile as JSON values, and back."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping
from typing import Any

from preheat.adapters.base import Row, version_note
from preheat.adapters.cuda_core.request import CompileRequest, compiler_of
from preheat.adapters.modules import NotPortableError
from preheat.errors import AdapterError, InputError
from preheat.model.arch import Arch, runnable_archs
from preheat.model.portable_paths import spell

__all__ = ["archs_of", "changes", "request_of", "row_of"]

_PACKAGES = "{packages}/"
_PLAIN = (str, int, float, bool, type(None))


def row_of(request: CompileRequest) -> Row | None:
    """Return the row of a request; None when it cannot be made again by another process."""
    import cuda.core

    try:
        return {
            "code": _text(request.code),
            "code_type": request.code_type,
            "target": request.target,
            "names": [_encode(name) for name in request.names],
            "options": _chosen(request.options),
            "prefix": _prefix(request.options.arch),
            # Includes may be relative to the current directory.
            "root": os.getcwd() if request.headers else "",
            "env": {},
            "recorded": {
                "arch": str(request.options.arch),
                "cuda.core": cuda.core.__version__,
                "compiler": compiler_of(request),
                "headers": request.headers,
            },
        }
    except NotPortableError:
        return None


def _text(code: str | bytes) -> str:
    """Return the text of a program. cuda.core gives out NVVM IR as bytes, which may be bitcode."""
    try:
        return code if isinstance(code, str) else code.decode()
    except UnicodeDecodeError:
        raise NotPortableError("bitcode in a request") from None


def _chosen(options: Any) -> dict[str, Any]:
    """Return the options that differ from their defaults, but for the architecture."""
    chosen = {}
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if field.name != "arch" and value != field.default:
            chosen[field.name] = _encode(value)
    if "include_path" in chosen:
        given = options.include_path
        paths = [given] if isinstance(given, str) else list(given)
        chosen["include_path"] = [_spell(path) for path in paths]
    return chosen


def _spell(path: object) -> str:
    """Return an include directory in a form that is valid on other machines, if that is possible."""
    text = str(path)
    return spell(text, None) if os.path.isabs(text) else text


def _find(path: str) -> str:
    """Return the directory that `_spell` wrote."""
    if not path.startswith(_PACKAGES):
        return path
    rest = path.removeprefix(_PACKAGES)
    places = [os.path.join(entry, rest) for entry in sys.path if entry.endswith("-packages")]
    return next(filter(os.path.isdir, places), os.path.join(sys.prefix, rest))


def _prefix(arch: object) -> str:
    """Return `compute_` for a virtual architecture, and `sm_` for a real one."""
    return "compute_" if str(arch).startswith("compute_") else "sm_"


# A tuple and a list are different: define_macro=("A", "1") is one macro, and ["A", "1"] are two.


def _encode(value: Any) -> Any:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, list):
        return [_encode(each) for each in value]
    if isinstance(value, tuple):
        return {"tuple": [_encode(each) for each in value]}
    raise NotPortableError(f"{type(value).__qualname__} in a request")


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(each) for each in value]
    return tuple(map(_decode, value["tuple"])) if isinstance(value, Mapping) else value


def request_of(row: Row, arch: Arch) -> CompileRequest:
    """Return a recorded request for another architecture.

    Raises `AdapterError` when this version of cuda.core does not know an option.
    """
    import cuda.core

    chosen = {name: _decode(value) for name, value in row["options"].items()}
    if "include_path" in chosen:
        chosen["include_path"] = [_find(path) for path in chosen["include_path"]]
    name = f"{row['prefix']}{str(arch).removeprefix('sm_')}"
    try:
        options = cuda.core.ProgramOptions(**chosen, arch=name)
    except TypeError as unknown:
        raise AdapterError(
            f"cuda.core {cuda.core.__version__} cannot make the recorded options: {unknown}",
            hint=f"bake with cuda.core {row['recorded']['cuda.core']}",
        ) from None
    names = tuple(map(_decode, row["names"]))
    return CompileRequest(row["code"], row["code_type"], options, row["target"], names)


def archs_of(row: Row, arch: Arch) -> list[Arch]:
    """Return the architectures that must be compiled for the program to find its code on `arch`.

    A program may name an architecture, such as sm_90a, instead of that of its device. Its code is
    compiled as well if it runs on `arch`.
    """
    try:
        named = Arch.parse(row["recorded"].get("arch", str(arch)))
    except InputError:
        return [arch]
    return [arch] if named == arch or named not in runnable_archs(arch) else [arch, named]


def changes(row: Row, request: CompileRequest) -> list[str]:
    """Return the changes since a request was recorded that also change its key."""
    import cuda.core

    before = row["recorded"]
    notes = version_note("cuda.core", before.get("cuda.core"), cuda.core.__version__)
    if before.get("compiler") != compiler_of(request):
        notes.append("recorded with another build of the compiler")
    if before.get("headers") != request.headers:
        notes.append("a header that it includes has changed")
    return notes
