"""A compile that cuda.core requests, and the key of its result."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from preheat.adapters.base import NotKeyableError, Row
from preheat.adapters.cuda_core.headers import headers_digest
from preheat.errors import InputError
from preheat.model.arch import Arch
from preheat.model.foreign import ForeignRequest
from preheat.process.lazy import LazyModule, lazy
from preheat.toolchain.binaries.elf import build_id
from preheat.toolchain.signature import kernel_names

if TYPE_CHECKING:
    from preheat.adapters.cuda_core import rows
else:
    rows = LazyModule("preheat.adapters.cuda_core.rows")  # It imports this module.

__all__ = ["KIND", "CompileRequest", "compiler_of"]

KIND = "cuda_core"
_UNNAMED = "default_program"  # the name that cuda.core gives to a program without one
_BUNDLED = "use_bundled_headers"  # an option of newer releases
_SHOWN = 3  # kernels in a label
_COMPILERS = {"c++": "nvrtc", "ptx": "nvJitLink", "nvvm": "nvvm"}
_ENTRY = re.compile(r"\.entry\s+([\w$%]+)")
# Options that make a compile read or write files that no key can describe, and the reason.
_NOT_KEYABLE = {
    "create_pch": "it writes a precompiled header",
    "use_pch": "it uses a precompiled header",
    "pch_dir": "it uses a precompiled header",
    "pch": "it uses a precompiled header",
    "time": "it writes a table of times",
    "fdevice_time_trace": "it writes a time trace",
    "use_libdevice": "it links libdevice, which is not part of the key",
}


@dataclass(frozen=True)
class CompileRequest:
    """The arguments of one `Program.compile`, and of its `Program`."""

    code: str | bytes
    code_type: str
    options: Any  # a `ProgramOptions`
    target: str
    names: tuple[str | bytes, ...] = ()

    @property
    def arch(self) -> Arch | None:
        """The architecture to compile for; None if its name is not known."""
        try:
            return Arch.parse(str(self.options.arch))
        except InputError:
            return None

    @property
    def label(self) -> str:
        """The kernels of the program, and its name if it has one."""
        found = self._kernels()
        more = ", …" if len(found) > _SHOWN else ""
        kernels = ", ".join(found[:_SHOWN]) + more
        name = "" if self.options.name == _UNNAMED else str(self.options.name)
        return f"{kernels} of {name}" if kernels and name else kernels or name or _UNNAMED

    def _kernels(self) -> list[str]:
        if self.code_type == "c++" and isinstance(self.code, str):
            return kernel_names(self.code)
        return _ENTRY.findall(self.code) if isinstance(self.code, str) else []

    @lazy
    def headers(self) -> str:
        """A digest of the headers that are part of the key. Raises `NotKeyableError`."""
        return headers_digest(self.code, self.options) if self.code_type == "c++" else ""

    @lazy
    def identity(self) -> ForeignRequest:
        """The entry of the result. Raises `NotKeyableError` when no key describes it."""
        import cuda.core.utils

        self._require_keyable()
        headers = self.headers
        bundled = bool(getattr(self.options, _BUNDLED, False))
        extra = f"preheat 1\0{compiler_of(self)}\0{headers}\0{bundled}".encode()
        try:
            key: bytes = cuda.core.utils.make_program_cache_key(
                code=self.code,
                code_type=self.code_type,
                options=self._without_paths(),
                target_type=self.target,
                name_expressions=self.names,
                extra_digest=hashlib.sha256(extra).digest(),
            )
        except (TypeError, ValueError) as refused:  # If it is an error, the compile raises it again.
            raise NotKeyableError(f"cuda.core has no key for it: {refused}") from None
        return ForeignRequest(KIND, key.hex(), label=self.label, arch=self.arch)

    @property
    def unkeyed(self) -> ForeignRequest:
        """The identity for errors about a program that no key describes."""
        return ForeignRequest(KIND, "uncached", label=self.label, arch=self.arch)

    def row(self) -> Row | None:
        """Return what a manifest keeps; None when another process cannot make the request again."""
        return rows.row_of(self)

    def _without_paths(self) -> Any:
        """Return the options without directories of this machine: the key has the files in them.

        The headers that NVRTC brings follow from its build.
        """
        paths = {"include_path": None, _BUNDLED: None}
        known = {field.name for field in dataclasses.fields(self.options)}
        return dataclasses.replace(self.options, **{name: paths[name] for name in known & {*paths}})

    def _require_keyable(self) -> None:
        for name, reason in _NOT_KEYABLE.items():
            value = getattr(self.options, name, None)
            if value is not None and value is not False:
                raise NotKeyableError(f"{name} is set: {reason}")
        if self.options.debug and self.options.name == _UNNAMED:
            # Releases of cuda.core write the source of such a program to a temporary file.
            raise NotKeyableError("a program for a debugger needs a name: ProgramOptions(name=…)")


def compiler_of(request: CompileRequest) -> str:
    """Return the library that compiles a program, and its build.

    cuda.core's key holds the major and the minor version of the compiler.
    """
    return _compiler(_COMPILERS.get(request.code_type, ""))


@functools.cache
def _compiler(name: str) -> str:
    import cuda.pathfinder

    try:
        path = cuda.pathfinder.load_nvidia_dynamic_lib(name).abs_path
    except (RuntimeError, ValueError):  # The driver links PTX, and its version is in cuda.core's key.
        return f"{name} of the driver"
    return f"{name} {build_id(path)}" if path else name
