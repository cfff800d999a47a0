"""A device for Numba to compile for, in a process that has none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableSet
from contextlib import contextmanager
from typing import Any, NamedTuple

from numba.cuda.codegen import CUDACodeLibrary
from numba.cuda.core.sigutils import normalize_signature
from numba.cuda.cudadrv import devices
from numba.cuda.dispatcher import CUDADispatcher

from preheat.errors import AdapterError
from preheat.model.arch import Arch

__all__ = ["compiling_for"]

_SETS = ("_linking_libraries", "_linking_files")  # of a code library


class _Device(NamedTuple):
    compute_capability: tuple[int, int]
    id: int = 0


class _Context(NamedTuple):
    device: _Device


class _Postponed(NamedTuple):
    """Stands in for a kernel that the decorator of a dispatcher would compile."""

    entry_point: None = None
    objectmode: bool = False


class _OrderedSet(MutableSet[Any]):
    """A set that yields its members in the order in which they were added."""

    def __init__(self) -> None:
        self._members: dict[Any, None] = {}

    def __contains__(self, member: object) -> bool:
        return member in self._members

    def __iter__(self) -> Iterator[Any]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)

    def add(self, member: Any) -> None:
        """Add a member after the others, unless the set has it."""
        self._members.setdefault(member)

    def discard(self, member: Any) -> None:
        """Remove a member if the set has it."""
        self._members.pop(member, None)

    def update(self, members: Iterable[Any]) -> None:
        """Add members in their order."""
        self._members.update(dict.fromkeys(members))


def _link_in_order(stock: Callable[..., None]) -> Callable[..., None]:
    """Return an initializer of code libraries that link others in the order of the program.

    Numba has them in sets, whose order differs from process to process.
    """

    def initialize(self: Any, *arguments: Any, **options: Any) -> None:
        stock(self, *arguments, **options)
        for name in _SETS:
            if vars(self).get(name) != set():
                raise AdapterError(
                    f"a code library of this Numba-CUDA has no set {name}, which orders what is linked",
                    hint="install a version of Numba-CUDA that the adapter knows, or a newer preheat",
                )
            setattr(self, name, _OrderedSet())

    return initialize


@contextmanager
def compiling_for(arch: Arch) -> Iterator[None]:
    """Let Numba compile for `arch` without a device. Nothing can be loaded meanwhile.

    Device functions that were compiled for another architecture are used again: see `bakes_apart`.
    Kernels with signatures in their decorators are not compiled when their module is imported.
    """
    runtime = devices._runtime
    stock_init: Callable[..., None] = CUDACodeLibrary.__init__
    stock_compile: Callable[..., Any] = CUDADispatcher.compile

    def compile(self: Any, sig: Any) -> None:
        argument_types, _ = normalize_signature(sig)
        self.overloads[argument_types] = _Postponed()

    runtime.get_or_create_context = lambda _=None: _Context(_Device((arch.major, arch.minor)))
    CUDACodeLibrary.__init__ = _link_in_order(stock_init)
    CUDADispatcher.compile = compile
    try:
        yield
    finally:
        CUDADispatcher.compile = stock_compile
        CUDACodeLibrary.__init__ = stock_init
        del runtime.get_or_create_context
