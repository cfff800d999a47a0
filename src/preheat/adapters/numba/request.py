"""A kernel that Numba compiles: its identity in the store, and its description for people."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import TYPE_CHECKING, Any

import numba_cuda
from numba.cuda.cudadrv import devices
from numba.cuda.memory_management.nrt import NRT_LIBRARY

from preheat.adapters.base import NotKeyableError, Row, directory_of
from preheat.adapters.modules import module_name
from preheat.adapters.numba import observed, signature
from preheat.adapters.numba.dependencies import Dependencies, comes_with_numba
from preheat.adapters.numba.toolchain import settings, versions
from preheat.model.arch import Arch
from preheat.model.foreign import ForeignRequest
from preheat.process.lazy import LazyModule, lazy

if TYPE_CHECKING:
    from preheat.adapters.numba import rows
else:
    rows = LazyModule("preheat.adapters.numba.rows")  # It imports this module.

__all__ = ["KIND", "KernelRequest", "current_arch", "label_of"]

KIND = "numba"


@dataclass(frozen=True)
class KernelRequest:
    """A function that `cuda.jit` was given, its options, and the types of the arguments."""

    function: FunctionType
    options: Mapping[str, Any]
    argument_types: tuple[Any, ...]
    arch: Arch

    @lazy
    def dependencies(self) -> Dependencies:
        """What the code depends on. Raises `NotKeyableError` if that is not known."""
        try:
            return Dependencies(self.function, self.options)
        except NotKeyableError:
            raise
        except Exception as error:  # Reading attributes of objects of the program may raise.
            raise NotKeyableError(f"what it uses cannot be read: {error!r:.200}") from error

    @lazy
    def properties(self) -> dict[str, str]:
        """The parts of the key but for the architecture. Raises `NotKeyableError`."""
        return {
            "signature": signature.text(self.argument_types),
            **self.dependencies.parts,
            **dict(_digest_linked_files(self.options.get("link") or ())),
            **settings(),
            **versions(),
        }

    @lazy
    def identity(self) -> ForeignRequest:
        """The identity of the entry. Raises `NotKeyableError` for a kernel that no key describes."""
        types = [signature.encode(each) for each in self.argument_types]
        parts = [str(self.arch), types, *self.properties.items()]
        key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
        return ForeignRequest(KIND, key, label=label_of(self.function), arch=self.arch)

    @property
    def unkeyed(self) -> ForeignRequest:
        """The identity for errors about a kernel that no key describes."""
        return ForeignRequest(KIND, "none", label=label_of(self.function), arch=self.arch)

    def row(self) -> Row | None:
        """Return what a manifest keeps of the request."""
        return rows.row_of(self)

    def require_described(self, kernel: Any) -> None:
        """Raise `NotKeyableError` when the code was made of something that is not in the key."""
        known = self.dependencies.codes
        for function in observed.functions_in(kernel.library):
            if function.__code__ not in known and not comes_with_numba(function):
                name = f"{module_name(function)}:{function.__qualname__}"
                raise NotKeyableError(f"Numba compiled {name}, which none of its names refers to")
        own = directory_of(numba_cuda)
        declared = {id(each) for each in self.options.get("link") or ()}
        for linked in kernel.library._linking_files:
            of_numba = linked is NRT_LIBRARY or (isinstance(linked, str) and linked.startswith(own))
            if not of_numba and id(linked) not in declared:
                raise NotKeyableError(f"{linked} is linked, but its function does not name it")


def label_of(function: Any) -> str:
    """Return the name of a function with its module."""
    return f"{module_name(function)}:{function.__qualname__}"


def current_arch() -> Arch:
    """Return the architecture that Numba compiles for."""
    major, minor = devices.get_context().device.compute_capability
    return Arch(major, minor)


def _digest_linked_files(link: Any) -> Iterator[tuple[str, str]]:
    """Yield the name and the digest of each file that is linked.

    Raises `NotKeyableError` for CUDA C++ with includes: which files they are is not known here.
    """
    for file in link:
        if not isinstance(file, str):
            raise NotKeyableError(f"it links a {type(file).__qualname__}, which is not a file")
        try:
            with open(file, "rb") as opened:
                content = opened.read()
        except OSError as error:
            raise NotKeyableError(f"it links {file}, which cannot be read: {error}") from None
        if file.endswith(".cu") and b"#" in content:
            raise NotKeyableError(f"it links {file}, which has directives of the preprocessor")
        yield f"file {os.path.basename(file)}", hashlib.sha256(content).hexdigest()[:32]
