"""The adapter for Numba-CUDA: it stores kernels, and bakes them without a GPU."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from preheat.adapters.base import Adapter, RequiredEntries, Row, not_importable, require_version
from preheat.adapters.modules import NotPortableError
from preheat.arch import Arch
from preheat.build.builder import Builder
from preheat.build.foreign_store import ForeignStore
from preheat.errors import AdapterError

if TYPE_CHECKING:
    from preheat.adapters.numba.request import KernelRequest

__all__ = ["NumbaAdapter"]

_OLDEST, _NEWEST = (0, 22), (0, 30)  # of the versions that are accepted; tests run with the newest
_store: ForeignStore | None = None


class NumbaAdapter(Adapter):
    """Gives every function of `cuda.jit` a cache on the store."""

    name = "numba"
    module = "numba.cuda"

    def install(self, builder: Builder) -> None:
        """Connect Numba-CUDA. Its simulator compiles nothing, and is left as it is."""
        global _store
        from numba import cuda

        if cuda.config.ENABLE_CUDASIM:
            return
        _require_package()
        from preheat.adapters.numba import cache, observed

        _store = builder.foreign
        observed.install()
        cache.install(builder.foreign)

    def bake(self, row: Row, arch: Arch, coverage: str) -> RequiredEntries:
        """Compile a recorded kernel for `arch` into the store."""
        del coverage  # Types of arguments are the only variants of a kernel.
        from preheat.adapters.numba.rows import changes
        from preheat.adapters.numba.target import compiling_for

        for name in _variables() - set(row["env"]):
            os.environ.pop(name, None)  # It would enter the key, and was not set in the recording.
        with compiling_for(arch):
            request = _imported(row, arch)
            _compile(request)
            return RequiredEntries((request.identity,), tuple(changes(row, request)))

    def count(self, row: Row, coverage: str) -> int:
        """Return 1: a row is one kernel."""
        del row, coverage
        return 1

    def keys(self, row: Row, arch: Arch, coverage: str) -> RequiredEntries:
        """Return the entry of the kernel that `bake` compiles. Nothing is compiled."""
        del coverage
        from preheat.adapters.numba.rows import changed_environment, changes
        from preheat.adapters.numba.target import compiling_for

        with compiling_for(arch):
            request = _imported(row, arch)
            notes = (*changes(row, request), *changed_environment(row))
            return RequiredEntries((_identity(request),), notes)


def _require_package() -> None:
    """Raise `AdapterError` unless `numba.cuda` is a known version of Numba-CUDA."""
    try:
        import numba_cuda
    except ImportError:
        raise AdapterError(
            "numba.cuda is the target that Numba ships, and not Numba-CUDA",
            hint="pip install numba-cuda",
        ) from None
    require_version("Numba-CUDA", numba_cuda.__version__, _OLDEST, _NEWEST)


def _variables() -> set[str]:
    from preheat.adapters.numba.toolchain import VARIABLES

    return set(VARIABLES)


def _imported(row: Row, arch: Arch) -> KernelRequest:
    from preheat.adapters.numba.rows import request_of

    try:
        request = request_of(row, arch)
    except NotPortableError as error:
        raise not_importable(error, row) from error
    _identity(request)
    return request


def _identity(request: KernelRequest) -> Any:
    from preheat.adapters.numba.signature import UnkeyableError

    try:
        return request.identity
    except UnkeyableError as error:
        raise AdapterError(f"it cannot be stored: {error}") from None


def _compile(request: KernelRequest) -> None:
    """Compile the kernel of a request for the device that `compiling_for` imitates, and store it."""
    from numba.cuda.dispatcher import _Kernel

    from preheat.adapters.numba.cache import StoreCache
    from preheat.adapters.numba.signature import UnkeyableError

    assert _store is not None
    cache = StoreCache(_store, request.function, request.options)
    cache.begin(sys._getframe())
    try:
        if cache.find(request) is None:
            kernel = _Kernel(request.function, request.argument_types, **request.options)
            kernel.library.get_cubin()
            cache.keep(request, kernel)
    except UnkeyableError as error:
        raise AdapterError(f"it cannot be stored: {error}") from None
    finally:
        cache.end()
