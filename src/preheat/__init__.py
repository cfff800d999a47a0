"""GPU programs that start hot: CUDA kernels compiled once, ever, and found by every later process.

    import preheat

    gpu = preheat.device()                        # the GPU, or device("emulator") without one
    saxpy = gpu.kernel(SOURCE, "saxpy")           # compiled at most once, ever
    x, y = gpu.array(xs), gpu.array(ys)           # or tensors of torch, CuPy, …
    saxpy[4, 256](2.0, x, y, 1024)                # checked before the driver sees it
    artifact = preheat.compile(SOURCE, "sm_90")   # machine code without a device

Importing this package loads no CUDA library, makes no directory and reads no file but its own code.

PYTEST_DONT_REWRITE: pytest would warn about a package with a plugin that was imported before it.
"""

from __future__ import annotations

import importlib
import os

from preheat._version import __version__
from preheat.locks import no_fork

TYPE_CHECKING = False  # Type checkers assume True. An import of `typing` would triple the import time.
if TYPE_CHECKING:
    from preheat import lora as lora
    from preheat.ahead.bake import BakeResult, bake
    from preheat.ahead.check import CheckResult, check
    from preheat.ahead.manifest import Manifest
    from preheat.ahead.report import WarmReport
    from preheat.arch import Arch
    from preheat.artifact import Artifact, EntryPoint, Header, Parameter, Provenance, Resources
    from preheat.build.builder import Builder
    from preheat.build.seal import seal, sealed, unseal
    from preheat.config import Config
    from preheat.default import (
        compile,
        compile_all,
        default_builder,
        get_entry,
        link,
        obtain_entry,
        put_entry,
    )
    from preheat.devices.base import Attributes, BlockSize, Limits, MemoryInfo, Occupancy
    from preheat.dtypes import DType
    from preheat.errors import (
        AdapterError,
        BakedError,
        BundleError,
        CaptureError,
        CaptureWarning,
        CompileError,
        CompilerCrashError,
        CompilerTimeoutError,
        ConfigError,
        ContextLostError,
        DeviceError,
        Diagnostic,
        DriverError,
        EmulatorFault,
        GraphError,
        InputError,
        InvalidCodeError,
        KeyFileError,
        LaunchError,
        LostJobError,
        NoGpuError,
        OutOfMemoryError,
        PoolSealedError,
        PreheatError,
        PtxError,
        SealedError,
        StaleBufferError,
        StaleGraphError,
        TargetError,
        ToolchainChangedError,
        ToolchainError,
        ToolchainNotFoundError,
        UnknownEntryError,
        UnsupportedInstructionError,
        WarmError,
    )
    from preheat.events import Events
    from preheat.foreign import ForeignEntry
    from preheat.gpu import Gpu, device
    from preheat.graph.buckets import bucket, buckets, padded
    from preheat.graph.cache import GraphCache
    from preheat.graph.graph import Graph
    from preheat.graph.pool import Pool
    from preheat.graph.shared_pool import SharedPool
    from preheat.kernels.blas import Blas
    from preheat.kernels.decode import DecodeKernel, DecodeState
    from preheat.kernels.ops import Ops
    from preheat.key import Key, explain
    from preheat.link_errors import LinkedSymbol, LinkError
    from preheat.linked_program import BinaryPart, LinkedProgram
    from preheat.program import Program
    from preheat.runtime.array import Array, Scalar
    from preheat.runtime.bound import Bound
    from preheat.runtime.kernel import Kernel
    from preheat.runtime.module import Module, SymbolView
    from preheat.runtime.operands import Pointer, strided
    from preheat.runtime.stream import Event, Stream
    from preheat.store.bundle import Bundle

# The public names of each module, which is imported when one of them is first used. All other names in
# `__all__` are those of `preheat.errors`.
_NAMES_OF = {
    "preheat.default": (
        *("compile", "compile_all", "default_builder", "link"),
        *("get_entry", "obtain_entry", "put_entry"),
    ),
    "preheat.arch": ("Arch",),
    "preheat.artifact": ("Artifact", "EntryPoint", "Header", "Parameter", "Provenance", "Resources"),
    "preheat.build.builder": ("Builder",),
    "preheat.config": ("Config",),
    "preheat.devices.base": ("Attributes", "BlockSize", "Limits", "MemoryInfo", "Occupancy"),
    "preheat.dtypes": ("DType",),
    "preheat.events": ("Events",),
    "preheat.foreign": ("ForeignEntry",),
    "preheat.gpu": ("Gpu", "device"),
    "preheat.graph.buckets": ("bucket", "buckets", "padded"),
    "preheat.graph.graph": ("Graph",),
    "preheat.graph.pool": ("Pool",),
    "preheat.graph.shared_pool": ("SharedPool",),
    "preheat.graph.cache": ("GraphCache",),
    "preheat.kernels.blas": ("Blas",),
    "preheat.kernels.decode": ("DecodeKernel", "DecodeState"),
    "preheat.kernels.ops": ("Ops",),
    "preheat.key": ("Key", "explain"),
    "preheat.link_errors": ("LinkError", "LinkedSymbol"),
    "preheat.linked_program": ("BinaryPart", "LinkedProgram"),
    "preheat.program": ("Program",),
    "preheat.runtime.array": ("Array", "Scalar"),
    "preheat.runtime.bound": ("Bound",),
    "preheat.runtime.kernel": ("Kernel",),
    "preheat.runtime.module": ("Module", "SymbolView"),
    "preheat.runtime.operands": ("Pointer", "strided"),
    "preheat.runtime.stream": ("Event", "Stream"),
    "preheat.build.seal": ("seal", "sealed", "unseal"),
    "preheat.store.bundle": ("Bundle",),
    "preheat.ahead.bake": ("BakeResult", "bake"),
    "preheat.ahead.check": ("CheckResult", "check"),
    "preheat.ahead.manifest": ("Manifest",),
    "preheat.ahead.report": ("WarmReport",),
}
_MODULES = ("lora",)  # used by their own names: preheat.lora.backward_plan

__all__ = [
    "AdapterError",
    "Arch",
    "Array",
    "Artifact",
    "Attributes",
    "BakeResult",
    "BakedError",
    "BinaryPart",
    "Blas",
    "BlockSize",
    "Bound",
    "Builder",
    "Bundle",
    "BundleError",
    "CaptureError",
    "CaptureWarning",
    "CheckResult",
    "CompileError",
    "CompilerCrashError",
    "CompilerTimeoutError",
    "Config",
    "ConfigError",
    "ContextLostError",
    "DType",
    "DecodeKernel",
    "DecodeState",
    "DeviceError",
    "Diagnostic",
    "DriverError",
    "EmulatorFault",
    "EntryPoint",
    "Event",
    "Events",
    "ForeignEntry",
    "Gpu",
    "Graph",
    "GraphCache",
    "GraphError",
    "Header",
    "InputError",
    "InvalidCodeError",
    "Kernel",
    "Key",
    "KeyFileError",
    "LaunchError",
    "Limits",
    "LinkError",
    "LinkedProgram",
    "LinkedSymbol",
    "LostJobError",
    "Manifest",
    "MemoryInfo",
    "Module",
    "NoGpuError",
    "Occupancy",
    "Ops",
    "OutOfMemoryError",
    "Parameter",
    "Pointer",
    "Pool",
    "PoolSealedError",
    "PreheatError",
    "Program",
    "Provenance",
    "PtxError",
    "Resources",
    "Scalar",
    "SealedError",
    "SharedPool",
    "StaleBufferError",
    "StaleGraphError",
    "Stream",
    "SymbolView",
    "TargetError",
    "ToolchainChangedError",
    "ToolchainError",
    "ToolchainNotFoundError",
    "UnknownEntryError",
    "UnsupportedInstructionError",
    "WarmError",
    "WarmReport",
    "__version__",
    "bake",
    "bucket",
    "buckets",
    "check",
    "compile",
    "compile_all",
    "default_builder",
    "device",
    "explain",
    "get_entry",
    "link",
    "obtain_entry",
    "padded",
    "put_entry",
    "seal",
    "sealed",
    "strided",
    "unseal",
]

if os.environ.get("PREHEAT_ADAPTERS"):
    from preheat.adapters.imports import activate as _activate

    _activate()
elif any(name.startswith("PREHEAT_") for name in os.environ):
    from preheat.misspelled import warn_of_misspelled as _warn_of_misspelled

    # The other variables are read, and compared, when a builder is opened.
    _warn_of_misspelled(os.environ, ("PREHEAT_ADAPTERS",))

_MODULE_OF = dict.fromkeys(__all__, "preheat.errors")
_MODULE_OF |= {name: module for module, names in _NAMES_OF.items() for name in names}


def __getattr__(name: str) -> object:
    if name in _MODULES:
        with no_fork:
            return importlib.import_module(f"preheat.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'preheat' has no attribute {name!r}")
    with no_fork:
        module = importlib.import_module(_MODULE_OF[name])
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, *_MODULES]
