"""A compile that CuPy requests: a frozen value, its entries in the store, and its manifest row."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from preheat.adapters.base import Row
from preheat.model.arch import Arch
from preheat.model.foreign import ForeignRequest
from preheat.model.key import Key
from preheat.process.lazy import lazy

__all__ = ["KIND", "CompileRequest", "local_options", "portable_options"]

KIND = "cupy"  # of all entries of this adapter
_SCHEMA = "1"  # Raise it whenever equal parts come to mean another compile.
_ENTRY = re.compile(r"__global__[^;{(]*?\b(\w+)\s*\(")
_BOUNDS = re.compile(r"__launch_bounds__\s*\([^)]*\)")
_SHOWN = 3  # kernels that a label names
_RDC = ("--device-c", "-dc", "-rdc=true", "--relocatable-device-code=true")
_JITIFY = "-DCUPY_USE_JITIFY"  # the option by which CuPy itself asks for Jitify

#: Variables that change what CuPy compiles.
_VARIABLES = ("CUPY_COMPILE_WITH_PTX", "CUPY_CUDA_COMPILE_WITH_DEBUG")


@dataclass(frozen=True, kw_only=True)
class CompileRequest:
    """Everything that determines the code of a compile by CuPy, except the compiler.

    `options` are portable: see `portable_options`. `arch` is a compute capability such as "90".
    `headers` is CuPy's own checksum of the headers that it ships. With `lto`, the code is linked later.
    `compiler` and `release`, the version of CuPy, are not part of the key.
    """

    source: str
    options: tuple[str, ...]
    arch: str
    backend: str
    cooperative: bool
    names: tuple[str, ...]
    jitify: bool
    lto: bool
    headers: str
    variables: tuple[tuple[str, str], ...]
    release: str = ""
    compiler: str = ""

    @lazy
    def key(self) -> str:
        """A digest of the fields. It names no compiler and no directory of CuPy or CUDA."""
        return Key(tuple((label, value.encode()) for label, value in self._parts())).digest

    def _parts(self) -> Iterable[tuple[str, str]]:
        yield from (("schema", _SCHEMA), ("headers", self.headers), ("arch", self.arch))
        yield from (("backend", self.backend), ("source", self.source))
        yield from (("cooperative", str(self.cooperative)), ("jitify", str(self.jitify)))
        yield "lto", str(self.lto)
        yield from ((f"variable {name}", value) for name, value in self.variables)
        for label, values in (("option", self.options), ("name", tuple(sorted(self.names)))):
            yield f"{label}s", str(len(values))
            yield from ((label, value) for value in values)

    @property
    def target(self) -> Arch:
        """The architecture of the code."""
        return Arch.parse(f"sm_{self.arch}")

    @property
    def label(self) -> str:
        """The kernels of the source: the requested names, or those that the source defines."""
        found = self.names or tuple(dict.fromkeys(_ENTRY.findall(_BOUNDS.sub("", self.source))))
        more = ", …" if len(found) > _SHOWN else ""
        return ", ".join(found[:_SHOWN]) + more

    @property
    def needs_device(self) -> bool:
        """Whether CuPy needs a GPU to make the code: its linker and Jitify do."""
        linked = self.backend == "nvrtc" and not self.lto and bool({*_RDC} & {*self.options})
        return linked or self.jitify or _JITIFY in self.options

    @property
    def identity(self) -> ForeignRequest:
        """The entry with the code that the compiler made."""
        return self.pointer._replace(variant=self.compiler)

    @property
    def pointer(self) -> ForeignRequest:
        """The entry that names the compiler of the newest code, for processes without a compiler."""
        return ForeignRequest(KIND, self.key, "", self.label, self.target)

    def row(self) -> Row | None:
        """Return what a manifest keeps; None for code that a bake cannot make without a GPU.

        `of_row` makes the request again for any architecture.
        """
        if self.needs_device:
            return None
        return {
            "root": "",
            "env": dict(self.variables),
            "recorded": {"cupy": self.release},
            "source": self.source,
            "options": list(self.options),
            "backend": self.backend,
            "cooperative": self.cooperative,
            "names": list(self.names),
            "jitify": self.jitify,
            "lto": self.lto,
        }

    @classmethod
    def of_row(cls, row: Row, arch: Arch, headers: str) -> CompileRequest:
        """Return the request of a manifest row for an architecture."""
        return cls(
            source=row["source"],
            options=tuple(row["options"]),
            arch=f"{arch.major}{arch.minor}",
            backend=row["backend"],
            cooperative=row["cooperative"],
            names=tuple(row["names"]),
            jitify=row["jitify"],
            lto=row["lto"],
            headers=headers,
            variables=variables_in_force(row["env"]),
        )


def variables_in_force(env: Any = os.environ) -> tuple[tuple[str, str], ...]:
    """Return those variables that are set and change what CuPy compiles."""
    return tuple((name, env[name]) for name in _VARIABLES if env.get(name))


def portable_options(options: Iterable[str], places: dict[str, str]) -> tuple[str, ...]:
    """Replace the include directories in `places` by their names: `-I/opt/cupy/x` by `-I{cupy}/x`.

    CuPy adds its own directories to every compile. They differ from machine to machine.
    """

    def portable(option: str) -> str:
        for name, directory in places.items():
            if option == f"-I{directory}" or option.startswith(f"-I{directory}/"):
                return f"-I{{{name}}}{option.removeprefix(f'-I{directory}')}"
        return option

    return tuple(map(portable, options))


def local_options(options: Iterable[str], places: dict[str, str]) -> tuple[str, ...]:
    """Return options with the directories of this machine: the reverse of `portable_options`."""

    def local(option: str) -> str:
        for name, directory in places.items():
            if option.startswith(f"-I{{{name}}}"):
                return f"-I{directory}{option.removeprefix(f'-I{{{name}}}')}"
        return option

    return tuple(map(local, options))
