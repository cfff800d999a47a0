"""A device for Numba to compile for, in a process that has none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakSet

from numba.cuda.core.sigutils import normalize_signature
from numba.cuda.cudadrv import devices
from numba.cuda.dispatcher import CUDADispatcher

from preheat.model.arch import Arch

__all__ = ["compiling_for"]


class _Device(NamedTuple):
    compute_capability: tuple[int, int]
    id: int = 0


class _Context(NamedTuple):
    device: _Device


class _Postponed(NamedTuple):
    """Stands in for a kernel that the decorator of a dispatcher would compile."""

    entry_point: None = None
    objectmode: bool = False


class _Compiled:
    """The device functions that this process has compiled, and for which architecture."""

    def __init__(self) -> None:
        self.arch: Arch | None = None
        self.dispatchers: WeakSet[Any] = WeakSet()

    def begin(self, arch: Arch) -> None:
        """Forget code that was compiled for another architecture: Numba would use it again."""
        before, self.arch = self.arch, arch
        if before in (None, arch):
            return
        for dispatcher in [*self.dispatchers]:
            made = [*dispatcher.overloads.items()]
            dispatcher.overloads.clear()
            if not dispatcher._can_compile:  # Its signatures were given to the decorator.
                for types, result in made:
                    dispatcher.compile_device(types, result.signature.return_type)


_compiled = _Compiled()


@contextmanager
def compiling_for(arch: Arch) -> Iterator[None]:
    """Let Numba compile for `arch` without a device. Nothing can be loaded meanwhile.

    Kernels with signatures in their decorators are not compiled when their module is imported.
    """
    runtime = devices._runtime
    stock_device: Callable[..., Any] = CUDADispatcher.compile_device
    stock_compile: Callable[..., Any] = CUDADispatcher.compile

    def compile_device(self: Any, *arguments: Any, **options: Any) -> Any:
        _compiled.dispatchers.add(self)
        return stock_device(self, *arguments, **options)

    def compile(self: Any, sig: Any) -> None:
        argument_types, _ = normalize_signature(sig)
        self.overloads[argument_types] = _Postponed()

    runtime.get_or_create_context = lambda _=None: _Context(_Device((arch.major, arch.minor)))
    CUDADispatcher.compile_device = compile_device
    CUDADispatcher.compile = compile
    try:
        _compiled.begin(arch)
        yield
    finally:
        CUDADispatcher.compile = stock_compile
        CUDADispatcher.compile_device = stock_device
        del runtime.get_or_create_context
