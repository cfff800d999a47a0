"""Python frames of a call: the line of the program, and the library that the line called."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from preheat.audit.events import Event

__all__ = [
    "ADAPTER_OF",
    "STARTS_COVERED",
    "UNKNOWN",
    "Caller",
    "caller_of",
    "caller_of_event",
    "library_of",
    "package_of",
]

_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.M)
_PACKAGE = re.compile(r"/(?:site|dist)-packages/([^/]+)(?:/([^/]+))?")
_STANDARD = re.compile(r"^<frozen |/lib(?:64)?/python3(?:\.\d+)?t?/(?!(?:site|dist)-packages/)")
_PREHEAT = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
#: A module that Inductor has generated, in its cache: `xc/cxcdcc….py`.
_INDUCTOR = re.compile(r"/([a-z2-7]{2})/c\1[a-z2-7]{49}\.py$")
_NAMESPACES = {"cuda", "nvidia", "google"}
#: Packages that have the native part of another one, and bindings, which belong to none.
_NATIVE_PARTS = {"cuda.bindings": "", "cupy_backends": "cupy", "jaxlib": "jax"}
#: Libraries that compile, by the folder of their package, for copies outside site-packages.
_COMPILING = (
    "triton", "torch", "cupy", "numba_cuda", "numba", "jax", "flashinfer", "deep_gemm", "tilelang",
    "cutlass", "warp", "tinygrad",
)  # fmt: skip


#: Adapters by the name of the package that they are for, where the names differ.
ADAPTER_OF = {"cuda.core": "cuda_core", "numba_cuda": "numba", "torch": "inductor"}
#: Libraries whose recordings have the results of the compilers that they start.
STARTS_COVERED = ("preheat", "triton")


@dataclass(frozen=True)
class Caller:
    """Who made a call: `line` of the program, if it is known, and the `library` that it used."""

    library: str
    line: str = ""

    def __str__(self) -> str:
        return self.line or self.library


UNKNOWN = Caller("unknown")


def package_of(path: str) -> str:
    """Return the name of the installed package that a file belongs to; empty if there is none."""
    found = _PACKAGE.search(path)
    if found is None:
        return ""
    name, inner = found[1], found[2] or ""
    if name in _NAMESPACES and inner and not inner.endswith((".py", ".so")):
        return f"{name}.{inner}"
    return re.sub(r"\.(py|so|cpython.*|abi3.*)$", "", name)


def library_of(path: str) -> str:
    """Return the name of the library that a source file belongs to; empty for the program's own."""
    if path.startswith(_PREHEAT):
        return "preheat"
    if package := package_of(path):
        return package
    if _INDUCTOR.search(path):
        return "torch"
    return next((name for name in _COMPILING if f"/{name}/" in path and _is_package(path, name)), "")


def _is_package(path: str, name: str) -> bool:
    """Return False for a folder of a project that has the name of a library, and is no package."""
    folder = path[: path.index(f"/{name}/") + len(name) + 1]
    return not os.path.isdir(folder) or os.path.isfile(f"{folder}/__init__.py")


def _native_library(path: str) -> str:
    """Return the package of a library in C or Cython; empty for bindings, which pass calls on."""
    package = package_of(path)
    return _NATIVE_PARTS.get(package, package)


def caller_of_event(event: Event) -> Caller:
    """Return who made the call that an event reports."""
    return caller_of(event.text("site"), event.text("caller"), event.text("program"))


def caller_of(frames: str, object_path: str = "", program: str = "") -> Caller:
    """Read the frames of a call, innermost first, as `faulthandler` writes them.

    `program` is the innermost frame of the program, for events that have no room for all frames.
    A library in C or Cython, `object_path`, has no frames.
    """
    library = line = innermost = ""
    for path, number, _ in _FRAME.findall(f"{frames}\n  {program}"):
        if _STANDARD.search(path):
            continue
        owner = library_of(path)
        innermost = innermost or f"{os.path.basename(path)}:{number}"
        library = library or owner
        if not owner and not line:
            line = f"{os.path.basename(path)}:{number}"
            library = library or _native_library(object_path) or os.path.basename(path)
    if innermost:
        return Caller(library or "unknown", line or innermost)
    name = package_of(object_path) or library_of(object_path) or os.path.basename(object_path)
    return Caller(name, os.path.basename(object_path)) if name else UNKNOWN
