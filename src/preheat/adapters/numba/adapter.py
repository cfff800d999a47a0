"""The adapter for Numba-CUDA: it stores kernels, and bakes them without a GPU."""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import TYPE_CHECKING

from preheat.adapters.base import (
    Adapter,
    Connection,
    NotKeyableError,
    RequiredEntries,
    Row,
    changed_environment,
    not_importable,
    require_version,
)
from preheat.adapters.modules import NotPortableError
from preheat.build.builder import Builder
from preheat.errors import AdapterError
from preheat.model.arch import Arch
from preheat.process.lazy import LazyModule

if TYPE_CHECKING:
    from preheat.adapters.numba import cache, observed, rows, target, toolchain
    from preheat.adapters.numba.request import KernelRequest
else:  # They import Numba.
    cache = LazyModule("preheat.adapters.numba.cache")
    observed = LazyModule("preheat.adapters.numba.observed")
    rows = LazyModule("preheat.adapters.numba.rows")
    target = LazyModule("preheat.adapters.numba.target")
    toolchain = LazyModule("preheat.adapters.numba.toolchain")

__all__ = ["NumbaAdapter"]

_OLDEST, _NEWEST = (0, 22), (0, 30)  # of the versions that are accepted; tests run with the newest
_connection: Connection | None = None


class NumbaAdapter(Adapter):
    """Gives every function of `cuda.jit` a cache on the store."""

    name = "numba"
    module = "numba.cuda"
    # Symbols have the number of functions that Numba has compiled in the process.
    bakes_apart = True

    def install(self, builder: Builder) -> None:
        """Connect Numba-CUDA. Its simulator compiles nothing, and is left as it is."""
        global _connection
        import numba
        from numba import cuda

        if cuda.config.ENABLE_CUDASIM:
            return
        _connection = Connection(builder.foreign, numba, _require_package())
        observed.install()
        cache.install(_connection)

    def required(self, row: Row, arch: Arch, coverage: str, *, make: bool) -> RequiredEntries:
        """Return the entry of a recorded kernel for `arch`, and compile it. It has no variants."""
        del coverage
        if make:
            for name in toolchain.variables().keys() - {*row["env"]}:
                del os.environ[name]  # It would enter the key, and was not set in the recording.
        with target.compiling_for(arch):
            try:
                request = rows.request_of(row, arch)
                identity = request.identity
                if make:
                    _compile(request)
            except NotPortableError as error:
                raise not_importable(error, row) from error
            except NotKeyableError as error:
                raise AdapterError(f"it cannot be stored: {error}") from None
            notes = (*rows.changes(row, request), *changed_environment(row, toolchain.variables()))
            return RequiredEntries((identity,), notes)


def _require_package() -> ModuleType:
    """Return Numba-CUDA. Raises `AdapterError` if `numba.cuda` is not a known version of it."""
    try:
        import numba_cuda
    except ImportError:
        raise AdapterError(
            "numba.cuda is the target that Numba ships, and not Numba-CUDA",
            hint="pip install numba-cuda",
        ) from None
    require_version("Numba-CUDA", numba_cuda.__version__, _OLDEST, _NEWEST)
    found: ModuleType = numba_cuda
    return found


def _compile(request: KernelRequest) -> None:
    """Compile the kernel of a request for the device that `compiling_for` imitates, and store it."""
    from numba.cuda.dispatcher import _Kernel

    assert _connection is not None
    kernels = cache.StoreCache(_connection, request.function, request.options)
    with kernels.making.owned_by(sys._getframe()):
        if kernels.find(request) is None:
            kernel = _Kernel(request.function, request.argument_types, **request.options)
            kernel.library.get_cubin()
            kernels.keep(request, kernel)
