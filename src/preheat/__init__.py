"""GPU programs that start hot: CUDA kernels compiled once, ever, and found by every later process.

    import preheat

    artifact = preheat.compile(SOURCE, arch="sm_90")      # compiled at most once, ever
    artifact.entry("saxpy").parameters                    # layout and C++ types
    artifact.cubin                                        # verified machine code

Importing this package loads no CUDA library, makes no directory and reads no file but its own code.
"""

from __future__ import annotations

import importlib

from preheat._version import __version__

TYPE_CHECKING = False  # type checkers take it for true; `typing` alone would triple the import time
if TYPE_CHECKING:
    from preheat.api import compile, default_builder
    from preheat.arch import Arch
    from preheat.artifact import Artifact, EntryPoint, Header, Parameter, Provenance, Resources
    from preheat.builder import Builder
    from preheat.config import Config
    from preheat.errors import (
        CompileError,
        CompilerCrashError,
        CompilerTimeoutError,
        ConfigError,
        Diagnostic,
        InputError,
        PreheatError,
        PtxError,
        TargetError,
        ToolchainChangedError,
        ToolchainError,
        ToolchainNotFoundError,
        UnknownEntryError,
    )
    from preheat.events import Events
    from preheat.key import Key, explain
    from preheat.program import Program

# Where each public name lives; loaded when it is first used.
_HOME = {
    "preheat.api": ("compile", "default_builder"),
    "preheat.arch": ("Arch",),
    "preheat.artifact": (
        "Artifact",
        "EntryPoint",
        "Header",
        "Parameter",
        "Provenance",
        "Resources",
    ),
    "preheat.builder": ("Builder",),
    "preheat.config": ("Config",),
    "preheat.errors": (
        "CompileError",
        "CompilerCrashError",
        "CompilerTimeoutError",
        "ConfigError",
        "Diagnostic",
        "InputError",
        "PreheatError",
        "PtxError",
        "TargetError",
        "ToolchainChangedError",
        "ToolchainError",
        "ToolchainNotFoundError",
        "UnknownEntryError",
    ),
    "preheat.events": ("Events",),
    "preheat.key": ("Key", "explain"),
    "preheat.program": ("Program",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "Arch",
    "Artifact",
    "Builder",
    "CompileError",
    "CompilerCrashError",
    "CompilerTimeoutError",
    "Config",
    "ConfigError",
    "Diagnostic",
    "EntryPoint",
    "Events",
    "Header",
    "InputError",
    "Key",
    "Parameter",
    "PreheatError",
    "Program",
    "Provenance",
    "PtxError",
    "Resources",
    "TargetError",
    "ToolchainChangedError",
    "ToolchainError",
    "ToolchainNotFoundError",
    "UnknownEntryError",
    "__version__",
    "compile",
    "default_builder",
    "explain",
]


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'preheat' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
