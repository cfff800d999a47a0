"""One launch of a shipped kernel, described before it happens."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, lru_cache, wraps
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

from preheat.dtypes import DType, dtype_of
from preheat.errors import InputError
from preheat.gpu import Gpu
from preheat.program import Program

__all__ = ["BLOCKS", "Op", "cpp_of", "dimension", "remembered", "tell", "watching"]

P = ParamSpec("P")
R = TypeVar("R")

#: Blocks that a grid has at most.
BLOCKS = 2**31 - 1

_COMMON = Path(__file__).with_name("common.cuh")
_LARGEST = 2**31 - 1  # of an int, which is how kernels take dimensions
_CPP = {"float32": "float", "float16": "__half", "bfloat16": "__nv_bfloat16"}


class Op(NamedTuple):
    """What one launch compiles and how it runs, as one value: a plan cannot differ from what runs.

    The functions that make one know shape and element type alone, neither the device nor the memory,
    so results depend on nothing else. `dims` are for people and plans; `entry` is a name expression.
    `by` is the library that does it instead, such as cuBLAS: then nothing is compiled for it. `slower`
    says why this is not the quick way to do it, where it is not.
    """

    name: str
    dims: tuple[tuple[str, int], ...]
    source: Path
    entry: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared: int = 0
    by: str | None = None
    slower: str = ""

    @property
    def program(self) -> Program:
        """What has to be compiled."""
        return _program(self.source, self.entry)

    def launch(self, gpu: Gpu, *args: Any, stream: object = None) -> None:
        """Launch it on `gpu`; everyone who is watching sees it, and a slower way is an event, once."""
        kernel = gpu.kernel(self.program, self.entry)
        shared = min(self.shared, gpu.limits.shared_optin - _OWN) if self.shared else 0
        kernel.launch(*args, grid=self.grid, block=self.block, shared=shared, stream=stream)
        tell(self)
        if self.slower and self.entry not in (told := _slower.setdefault(gpu, set())):
            told.add(self.entry)
            gpu.builder.events.emit("slower", device=gpu.name, op=str(self), reason=self.slower)

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{name}={size}' for name, size in self.dims)})"


_OWN = 2048  # bytes of shared memory that a kernel may have besides

_slower: weakref.WeakKeyDictionary[Gpu, set[str]] = weakref.WeakKeyDictionary()
_watching: ContextVar[tuple[list[Op], ...]] = ContextVar("watching", default=())


@contextmanager
def watching() -> Iterator[list[Op]]:
    """Collect what this thread launches meanwhile, or has other libraries do, in order."""
    seen: list[Op] = []
    token = _watching.set((*_watching.get(), seen))
    try:
        yield seen
    finally:
        _watching.reset(token)


def tell(op: Op) -> None:
    """Let everyone who is watching know that it was done."""
    for seen in _watching.get():
        seen.append(op)


def remembered(make: Callable[P, R]) -> Callable[P, R]:
    """A pure function of shape and type that remembers its results: steps launch the same again."""
    cached: Callable[..., Any] = lru_cache(maxsize=4096, typed=True)(make)

    @wraps(make)
    def made(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            known: R = cached(*args, **kwargs)
            return known
        except TypeError:  # cannot be hashed, and will be refused by its name
            return make(*args, **kwargs)

    return made


@cache
def _program(source: Path, entry: str) -> Program:
    """What all families share stands in front of the source's own text: a program opens no file."""
    text = "".join(f'#line 1 "{part.name}"\n{part.read_text()}' for part in (_COMMON, source))
    return Program.of(text, label=source.name, names=(entry,))


def dimension(name: str, size: Any, most: int = _LARGEST, *, least: int = 1) -> int:
    """`size` as a dimension that kernels can take; `InputError` with its `name` when it is none."""
    try:
        number = operator.index(size)
    except TypeError:
        number = None
    if number is None or isinstance(size, bool):
        raise InputError(f"{name} {size!r} is not an integer")
    if not least <= number <= most:
        raise InputError(f"{name} {number} is outside {least} to {most}")
    return number


def cpp_of(dtype: object) -> tuple[DType, str]:
    """An element type that the shipped kernels know, and what C++ calls it."""
    found = dtype_of(dtype)
    if found.name not in _CPP:
        hint = f"they take {', '.join(_CPP)}"
        raise InputError(f"the shipped kernels do not take {found}", hint=hint)
    return found, _CPP[found.name]
