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

    The functions that make one know shape and element type alone, neither the device nor the memory.
    `dims` are for people and plans; `entry` is a name expression.
    `cluster` is the number of blocks that share a row, where the device has clusters, and `shared` the
    bytes of shared memory of each. `by` is the library that does it instead, such as cuBLAS: then
    nothing is compiled for it. `slower` says why this is not the quick way to do it, where it is not;
    `overflow` says the same of a device that has less shared memory.
    """

    name: str
    dims: tuple[tuple[str, int], ...]
    source: Path
    entry: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared: int = 0
    cluster: int = 1
    by: str | None = None
    slower: str = ""
    overflow: str = ""

    @property
    def program(self) -> Program:
        """What has to be compiled."""
        return _program(self.source, self.entry)

    def launch(self, gpu: Gpu, *args: Any, stream: object = None, aligned: bool = True) -> None:
        """Launch it on `gpu`; everyone who is watching sees it, and a slower way is an event, once.

        `aligned` says whether all operands begin at a multiple of 16 bytes.
        """
        kernel = gpu.kernel(self.program, self.entry)
        if self.shared:
            kernel.launch(*args, block=self.block, stream=stream, **self._fitted(gpu))
        else:
            kernel.launch(*args, grid=self.grid, block=self.block, stream=stream)
        tell(self)
        if self.slower:
            self._tell_slower(gpu, self.slower)
        elif not aligned:
            self._tell_slower(gpu, _MISALIGNED)

    def _fitted(self, gpu: Gpu) -> dict[str, Any]:
        """The launch with what `gpu` has: clusters or none, and as much shared memory."""
        limits = gpu.limits
        blocks = self.cluster if limits.cluster >= self.cluster else 1
        merged = self.cluster // blocks
        wanted, most = merged * self.shared, limits.shared_optin - _OWN
        if wanted > most and self.overflow:
            self._tell_slower(gpu, self.overflow)
        grid = (self.grid[0] // merged,)
        return {"grid": grid, "shared": min(wanted, most), "cluster": blocks if blocks > 1 else None}

    def _tell_slower(self, gpu: Gpu, reason: str) -> None:
        told = _slower.setdefault(gpu, set())
        if (self.entry, reason) not in told:
            told.add((self.entry, reason))
            gpu.builder.events.emit("slower", device=gpu.name, op=str(self), reason=reason)

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{name}={size}' for name, size in self.dims)})"


_MISALIGNED = "an operand does not begin at a multiple of 16 bytes"
_OWN = 2048  # bytes of shared memory that a kernel may have besides

_slower: weakref.WeakKeyDictionary[Gpu, set[tuple[str, str]]] = weakref.WeakKeyDictionary()
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
