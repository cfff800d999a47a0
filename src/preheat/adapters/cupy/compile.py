"""CuPy's compiler: which one it is, and its code as files."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import subprocess
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from cupy._core import core
from cupy.cuda import compiler, function, get_nvcc_path
from cupy.cuda._compiler_cache import KernelCacheBackend

from preheat.adapters.base import ThreadState
from preheat.adapters.cupy.request import CompileRequest, local_options
from preheat.errors import AdapterError, ToolchainNotFoundError
from preheat.toolchain.loaded import loaded_builds

__all__ = ["compile_files", "compiler_identity", "forgo_device", "load", "places", "shipped_headers"]

_CODE, _NAMES = "code", "names"  # files of an entry
_VERSION_LINE = re.compile(rb"#\s*define\s+CUDART_VERSION\s+(\d+)")
_VERSION_WITHIN = 1 << 16  # bytes of the header that are searched for the line


def shipped_headers() -> str:
    """Return CuPy's checksum of the headers that it ships."""
    return str(compiler._get_cupy_cache_key())


@functools.cache
def places() -> dict[str, str]:
    """Return the include directories of this machine that CuPy adds to compiles, by name."""
    *_, shipped, cuda = core.assemble_cupy_compiler_options(())
    return {"cupy": shipped.removeprefix("-I"), "cuda": cuda.removeprefix("-I")}


# Which compiler


@functools.cache
def compiler_identity(backend: str) -> str:
    """Return a digest of the compiler of a backend and of the CUDA headers. It loads NVRTC."""
    text = _nvrtc() if backend == "nvrtc" else _nvcc()
    return hashlib.sha256(f"{text} headers {_headers_version()}".encode()).hexdigest()[:32]


def _nvrtc() -> str:
    version = ".".join(map(str, compiler._get_nvrtc_version()))
    builds = loaded_builds()
    names = {path: os.path.basename(path) for path in builds}
    loaded = sorted(builds[path] for path, name in names.items() if name.startswith("libnvrtc.so"))
    return f"nvrtc {version} {' '.join(loaded)}"


def _nvcc() -> str:
    path = _require_nvcc()
    ran = subprocess.run([*path.split(), "--version"], capture_output=True, text=True, check=True)
    return f"nvcc {ran.stdout}"


def _require_nvcc() -> str:
    path: str | None = get_nvcc_path()
    if path is None:
        raise ToolchainNotFoundError(
            "backend='nvcc' needs nvcc, which CuPy does not find", hint="set CUDA_PATH or NVCC"
        )
    return path


def _headers_version() -> str:
    """Return the version of the CUDA headers; an empty text if it is not known."""
    try:
        with open(os.path.join(places()["cuda"], "cuda_runtime_api.h"), "rb") as file:
            match = _VERSION_LINE.search(file.read(_VERSION_WITHIN))
    except OSError:
        return ""
    return match[1].decode() if match else ""


# The code of a compile


class _Work(ThreadState):
    """The code that this thread has compiled since `compile_files` was called."""

    saved: list[bytes] | None = None


_work = _Work()


class _Harvest(KernelCacheBackend):  # type: ignore[misc]
    """A cache backend for CuPy that is always empty, and keeps compiled code for `compile_files`."""

    def load(self, name: str) -> bytes | None:
        """Return None, because the store was searched before."""
        del name
        return None

    def save(self, name: str, cubin: bytes, source: str) -> None:
        """Keep the code that this thread has compiled."""
        del name, source
        assert _work.saved is not None
        _work.saved.append(cubin)


_harvest = _Harvest()


def compile_files(
    stock: Callable[..., Any], request: CompileRequest, log_stream: Any = None
) -> Mapping[str, bytes]:
    """Let CuPy compile a request, by its own function `stock`, and return the files of an entry."""
    compiler._set_kernel_cache_backend(_harvest)
    if request.backend == "nvcc":
        _require_nvcc()
    saved: list[bytes] = []
    with _work.setting(saved=saved):
        made = stock(
            request.source,
            local_options(request.options, places()),
            request.arch,
            backend=request.backend,
            enable_cooperative_groups=request.cooperative,
            name_expressions=request.names or None,
            log_stream=log_stream,
            cache_in_memory=False,
            jitify=request.jitify,
            to_ltoir=request.lto,
        )
    names = {name: made.mapping[name] for name in request.names} if not request.lto else {}
    return {_CODE: _code(saved[-1], len(names)), _NAMES: json.dumps(names, sort_keys=True).encode()}


def _code(payload: bytes, names: int) -> bytes:
    """Return the code from the payload that CuPy stores. Since CuPy 14.2, names may come before it."""
    decode = getattr(compiler, "_decode_cache_payload", None)
    decoded = decode(payload, names) if decode is not None and names else None
    return payload if decoded is None else decoded[1]


def load(request: CompileRequest, files: Mapping[str, bytes]) -> Any:
    """Return what CuPy's own function returns: a loaded module, or code that is linked later."""
    if request.lto:
        return files[_CODE]
    module = compiler.function.Module()
    module.load(files[_CODE])
    if names := json.loads(files[_NAMES]):
        module._set_mapping(names)
    return module


# Without a device


class _Unloaded:
    """Takes the place of a module where nothing can be loaded."""

    def __init__(self) -> None:
        self.mapping: dict[str, str] | None = None

    def load(self, code: bytes) -> None:
        """Load nothing: the code is kept by the cache backend."""

    def _set_mapping(self, mapping: dict[str, str] | None) -> None:
        self.mapping = mapping


def _refuse_link() -> None:
    raise AdapterError("CuPy links relocatable code with the driver, which needs a GPU")


def forgo_device() -> None:
    """Let this process compile without a device. It cannot load anything from then on."""
    if compiler.function is function:
        compiler.function = SimpleNamespace(Module=_Unloaded, LinkState=_refuse_link)
        # These functions have a result for each device, and would query the current device.
        plain = compiler._get_arch_for_options_for_nvrtc.__wrapped__
        compiler._get_arch_for_options_for_nvrtc = plain
