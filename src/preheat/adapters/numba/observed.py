"""Which Python functions a compile has read.

A program can register implementations for methods and functions, which no name in the bytecode of a
kernel leads to. Every function that Numba compiles or inlines is noted, so that a kernel with such code
is not stored under a key that does not describe it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

from numba.cuda import dispatcher
from numba.cuda.core.bytecode import FunctionIdentity

from preheat.adapters.base import ThreadState

__all__ = ["functions_in", "install"]


class _Thread(ThreadState):
    """The sets to which the functions that this thread compiles are added."""

    active: tuple[set[Any], ...] = ()


_thread = _Thread()
# The functions that were read for each library of code, without those of libraries that it links.
_read: WeakKeyDictionary[Any, set[Any]] = WeakKeyDictionary()


def install() -> None:
    """Note the functions of all compiles from now on."""
    _note_functions()
    _note_libraries()


def functions_in(library: Any) -> Iterator[Any]:
    """Yield the Python functions of which a library of code was made."""
    yield from _read.get(library, ())
    for linked in getattr(library, "_linking_libraries", ()):  # Code that was not made here has none.
        yield from functions_in(linked)


def _note_functions() -> None:
    stock: Callable[[Any], Any] = FunctionIdentity.from_function

    def from_function(cls: Any, pyfunc: Any) -> Any:
        del cls
        made = stock(pyfunc)
        for functions in _thread.active:
            functions.add(made.func)
        return made

    FunctionIdentity.from_function = classmethod(from_function)


def _note_libraries() -> None:
    stock: Callable[..., Any] = dispatcher.compile_cuda

    def compile_cuda(*arguments: Any, **options: Any) -> Any:
        functions: set[Any] = set()
        with _thread.setting(active=(*_thread.active, functions)):
            result = stock(*arguments, **options)
        _read[result.library] = functions
        return result

    dispatcher.compile_cuda = compile_cuda
