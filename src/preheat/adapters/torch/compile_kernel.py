"""The adapter for `torch.cuda._compile_kernel`, which compiles CUDA C++ again in every process.

Its kernels become programs of preheat: they are compiled by the toolchain of preheat, and are recorded,
baked, checked and sealed like the programs of `gpu.kernel`. A bake therefore needs neither a GPU nor
torch, and headers are tracked.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from preheat.adapters.base import Adapter, directory_of, require_version
from preheat.build.builder import Builder
from preheat.errors import (
    AdapterError,
    CompileError,
    SealedError,
    ToolchainNotFoundError,
    UnknownEntryError,
)
from preheat.model.arch import Arch
from preheat.model.artifact import Artifact
from preheat.model.config import SealMode
from preheat.model.events import warn
from preheat.model.program import Program
from preheat.process.callsite import exclude_library
from preheat.toolchain.headers.includes import includes

__all__ = ["TorchAdapter"]

_OLDEST, _NEWEST = (2, 11), (2, 13)  # of the versions that the adapter accepts; both are tested
_Compiler = Callable[..., tuple[bytes, str]]
# The parameters of torch's function. A precompiled header changes the time of a compile and not its
# result, so these parameters are ignored.
_NEEDED = {"kernel_source", "kernel_name", "compute_capability", "cuda_include_dirs", "nvcc_options"}
_OPTIONAL = {"header_code", "auto_pch", "enable_automatic_pch"}


class TorchAdapter(Adapter):
    """Replaces the function by which torch compiles a kernel: `torch.cuda._utils._nvrtc_compile`."""

    name = "torch"
    module = "torch"
    not_baked = "kernels of torch are recorded as programs, not as requests of an adapter"

    def install(self, builder: Builder) -> None:
        """Connect torch. From now on, lines of torch are not reported as those of the program.

        A version that is not known is an error. In a sealed process, the error is raised at the first
        kernel that torch would compile, because most programs with torch compile none in this way.
        """
        import torch

        if not hasattr(torch, "__version__"):
            return  # It is only a directory of this name, which Python imports as a package.
        exclude_library(directory_of(torch))
        try:
            _require_known(torch)
        except AdapterError as unknown:
            if builder.sealed is not SealMode.ERROR:
                raise
            torch.cuda._utils._nvrtc_compile = _refusing(unknown)
        else:
            utils = torch.cuda._utils
            utils._nvrtc_compile = _compiler(builder, utils._nvrtc_compile)


def _require_known(torch: Any) -> None:
    """Raise `AdapterError` unless the adapter knows how this torch compiles a kernel."""
    require_version("torch", str(torch.__version__), _OLDEST, _NEWEST)
    if torch.version.hip is not None:
        raise AdapterError("this torch is built for ROCm, and the adapter is for CUDA")
    found = list(inspect.signature(torch.cuda._utils._nvrtc_compile).parameters)
    if not _NEEDED <= {*found} <= _NEEDED | _OPTIONAL:
        raise AdapterError(
            f"torch.cuda._utils._nvrtc_compile takes {', '.join(found)}, which is not known",
            hint="use a released version of torch, or a newer preheat",
        )


def _refusing(unknown: AdapterError) -> _Compiler:
    """Return a function that compiles nothing, and raises why this torch is not supported."""

    def _nvrtc_compile(*_: object, **__: object) -> tuple[bytes, str]:
        raise unknown

    return _nvrtc_compile


def _compiler(builder: Builder, stock: _Compiler) -> _Compiler:
    """Return a function that does what `stock` does, through `builder`.

    Where preheat finds no compiler, `stock` is called: torch may have one of another CUDA version.
    """
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def _nvrtc_compile(*given: Any, **named: Any) -> tuple[bytes, str]:
        arguments = signature.bind(*given, **named).arguments
        request = _Request.of(arguments)
        try:
            artifact = request.obtain(builder, arguments.get("compute_capability"))
        except ToolchainNotFoundError as missing:
            _warn_once(f"kernels of torch are compiled by torch, and are not stored: {missing}")
            return stock(*given, **named)
        return artifact.cubin, artifact.entry(request.kernel).name

    return _nvrtc_compile


@functools.cache
def _warn_once(text: str) -> None:
    warn(text)


@dataclass(frozen=True)
class _Request:
    """The arguments of `torch.cuda._compile_kernel`, but for the architecture."""

    source: str
    kernel: str
    options: tuple[str, ...]
    include: tuple[str, ...]

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> _Request:
        """Return the request of a call with these arguments."""
        header = arguments.get("header_code")
        source = arguments["kernel_source"]
        return cls(
            f"{header}\n{source}" if header else source,
            arguments["kernel_name"],
            tuple(arguments.get("nvcc_options") or ()),
            tuple(arguments.get("cuda_include_dirs") or ()),
        )

    @property
    def program(self) -> Program:
        """The program that torch would compile."""
        given = self._program(self.options, self.include)
        if not given.may_include and "__CUDA_NO_" not in self.source:
            # The options of torch are macros for NVIDIA's headers. Computing them takes 0.14 s.
            return given
        include = (*_torch_include(given), *self.include)
        return self._program((*self.options, *_torch_options()), include)

    def _program(self, options: tuple[str, ...], include: tuple[str, ...]) -> Program:
        label = f"{self.kernel.replace('/', '_')}.cu"
        return Program.of(
            self.source, label=label, options=options, include=include, names=(self.kernel,)
        )

    def obtain(self, builder: Builder, capability: str | None) -> Artifact:
        """Return the code for a compute capability such as "90", or for the current GPU.

        The errors are torch's, except for `SealedError`.
        """
        arch = Arch.parse(f"sm_{_current_capability() if capability is None else capability}")
        program = self.program
        try:
            return builder.obtain(program, arch, exact=capability is not None).artifact
        except SealedError as error:
            raise error.naming(self.kernel) from None
        except CompileError as error:
            raise RuntimeError(f"Kernel compilation failed:\n{error.log}") from error
        except UnknownEntryError as error:
            raise RuntimeError(f"Kernel compilation failed:\n{error}") from error


def _torch_options() -> list[str]:
    from torch.cuda import _utils

    options: list[str] = _utils._get_gpu_rtc_compatible_flags()
    return options


def _torch_include(program: Program) -> list[str]:
    """Return the header directories of torch if a program may include a header from them.

    A bake would need them. The headers of CUDA are found with the compiler.
    """
    from torch.utils.cpp_extension import include_paths

    directories: list[str] = include_paths("cpu")
    if program.include:  # The headers there may include torch's.
        return directories
    names = [each.name for each in includes(program.source)]
    paths = [os.path.join(place, name) for place in directories for name in names if name is not None]
    return directories if None in names or any(map(os.path.exists, paths)) else []


def _current_capability() -> str:
    import torch

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return f"{properties.major}{properties.minor}"
