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

from preheat._version import __version__ as __version__
from preheat.process.locks import no_fork

# The public names of each module, which is imported when one of them is first used. `__init__.pyi` has
# them for type checkers.
_NAMES_OF = {
    "ahead.bake": "BakeResult bake",
    "ahead.check": "CheckResult check",
    "ahead.manifest": "Manifest",
    "ahead.report": "WarmReport",
    "model.arch": "Arch",
    "model.artifact": "Artifact EntryPoint Header Parameter Provenance Resources",
    "build.builder": "Builder",
    "build.seal": "seal sealed unseal",
    "store.bundle": "Bundle",
    "model.config": "Config",
    "build.default": "compile compile_all default_builder get_entry link obtain_entry put_entry",
    "devices.base": "Attributes BlockSize Limits MemoryInfo Occupancy",
    "model.dtypes": "DType",
    "errors": (
        "AdapterError BakedError BundleError CaptureError CaptureWarning CompileError "
        "CompilerCrashError CompilerTimeoutError ConfigError ContextLostError DeviceError "
        "Diagnostic DriverError EmulatorFault GraphError InputError InvalidCodeError "
        "KeyFileError LaunchError LinkedSymbol LinkError LostJobError NoGpuError OutOfMemoryError "
        "PoolSealedError PreheatError PtxError SealedError StaleBufferError StaleGraphError "
        "TargetError ToolchainChangedError ToolchainError ToolchainNotFoundError UnknownEntryError "
        "UnsupportedInstructionError WarmError"
    ),
    "model.events": "Events",
    "model.foreign": "ForeignEntry",
    "gpu": "Gpu device",
    "graph.buckets": "bucket buckets padded",
    "graph.cache": "GraphCache",
    "graph.graph": "Graph",
    "graph.pool": "Pool",
    "graph.libraries": "SharedPool",
    "kernels.blas": "Blas",
    "kernels.decode": "DecodeKernel DecodeState",
    "kernels.ops": "Ops",
    "model.key": "Key explain",
    "model.linked_program": "BinaryPart LinkedProgram",
    "model.program": "Program",
    "devices.array": "Array Scalar",
    "devices.kernel": "Kernel",
    "devices.launch": "Bound",
    "devices.module": "Module SymbolView",
    "devices.operands": "Pointer strided",
    "devices.stream": "Event Stream",
}
_MODULE_OF = {name: f"preheat.{module}" for module in _NAMES_OF for name in _NAMES_OF[module].split()}
_MODULES = ("lora",)  # used by their own names: preheat.lora.backward_plan

__all__ = sorted(["__version__", *_MODULE_OF])

if os.environ.get("PREHEAT_ADAPTERS"):
    from preheat.adapters.imports import activate as _activate

    _activate()
elif any(name.startswith("PREHEAT_") for name in os.environ):
    from preheat.model.misspelled import warn_of_misspelled as _warn_of_misspelled

    # The other variables are read, and compared, when a builder is opened.
    _warn_of_misspelled(os.environ, ("PREHEAT_ADAPTERS",))


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
