"""`Op`: the description of one launch of a shipped kernel, made before the launch."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, lru_cache, wraps
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

from preheat.devices.kernel import Kernel
from preheat.errors import InputError
from preheat.gpu import Gpu
from preheat.model.dtypes import DType, dtype_of
from preheat.model.program import Program

__all__ = [
    "MAX_BLOCKS", "Op", "add_to_traces", "cpp_of", "dimension", "memoize", "trace_ops"
]  # fmt: skip

P = ParamSpec("P")
R = TypeVar("R")

#: The most blocks of a grid.
MAX_BLOCKS = 2**31 - 1

_COMMON = Path(__file__).with_name("common.cuh")
_INT_MAX = 2**31 - 1  # Kernels take dimensions as int.
_CPP = {"float32": "float", "float16": "__half", "bfloat16": "__nv_bfloat16"}


class Op(NamedTuple):
    """What one launch compiles and how it runs. Plans and launches share it, so they cannot disagree.

    The functions that make an `Op` depend only on shape and element type, not on a device or memory.
    `dims` is for messages and plans. `entry` is a name expression.
    `cluster` is the number of blocks that share a row on devices with clusters, and `shared` the bytes
    of dynamic shared memory of each block. `by` names the library that does the work instead, such as
    cuBLAS; then nothing is compiled. `slow_reason` says why this launch is slower than for other
    shapes, or is empty. `overflow_reason` is the reason on devices with less shared memory.
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
    slow_reason: str = ""
    overflow_reason: str = ""

    @property
    def program(self) -> Program:
        """The program to compile."""
        return _program(self.source, self.entry)

    def launch(self, gpu: Gpu, *args: Any, stream: object = None, aligned: bool = True) -> None:
        """Launch the kernel on `gpu`, append this op to all open traces, and report a slow path once.

        `aligned` says whether all operands begin at a multiple of 16 bytes.
        """
        self.kernel(gpu).launch(*args, stream=stream, **self.geometry(gpu))
        add_to_traces(self)
        if self.slow_reason:
            self._report_slow_path(gpu, self.slow_reason)
        elif not aligned:
            self._report_slow_path(gpu, _MISALIGNED)

    def kernel(self, gpu: Gpu) -> Kernel:
        """Return the kernel on `gpu`, compiled and loaded."""
        return gpu.kernel(self.program, self.entry)

    def geometry(self, gpu: Gpu) -> dict[str, Any]:
        """Return the geometry of the launch within the limits of `gpu`, as `Kernel.launch` takes it."""
        if not self.shared:
            return {"grid": self.grid, "block": self.block}
        limits = gpu.limits
        blocks = self.cluster if limits.cluster >= self.cluster else 1
        merged = self.cluster // blocks
        wanted = merged * self.shared
        limit = limits.shared_optin - _STATIC_SHARED
        if wanted > limit and self.overflow_reason:
            self._report_slow_path(gpu, self.overflow_reason)
        grid = (self.grid[0] // merged,)
        cluster = blocks if blocks > 1 else None
        return {
            "grid": grid, "block": self.block, "shared": min(wanted, limit), "cluster": cluster
        }  # fmt: skip

    def _report_slow_path(self, gpu: Gpu, reason: str) -> None:
        reported = _reported.setdefault(gpu, set())
        if (self.entry, reason) not in reported:
            reported.add((self.entry, reason))
            gpu.builder.events.emit("slow_path", device=gpu.name, op=str(self), reason=reason)

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{name}={size}' for name, size in self.dims)})"


_MISALIGNED = "an operand does not begin at a multiple of 16 bytes"
_STATIC_SHARED = 2048  # The most bytes of static shared memory that a kernel has.

_reported: weakref.WeakKeyDictionary[Gpu, set[tuple[str, str]]] = weakref.WeakKeyDictionary()
_traces: ContextVar[tuple[list[Op], ...]] = ContextVar("preheat_traces", default=())


@contextmanager
def trace_ops() -> Iterator[list[Op]]:
    """Collect the ops that this thread launches, or passes to other libraries, inside the block."""
    ops: list[Op] = []
    token = _traces.set((*_traces.get(), ops))
    try:
        yield ops
    finally:
        _traces.reset(token)


def add_to_traces(op: Op) -> None:
    """Append `op` to every trace that is open in this thread."""
    for ops in _traces.get():
        ops.append(op)


def memoize(make: Callable[P, R]) -> Callable[P, R]:
    """Cache the results of a pure function of shape and type: each step launches the same ops again."""
    cached: Callable[..., Any] = lru_cache(maxsize=4096, typed=True)(make)

    @wraps(make)
    def memoized(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            result: R = cached(*args, **kwargs)
            return result
        except TypeError:  # An argument is not hashable. `make` raises an error that names it.
            pass
        return make(*args, **kwargs)

    return memoized


@cache
def _program(source: Path, entry: str) -> Program:
    """Return the program of `common.cuh` and the family's source in one text: it includes no file."""
    text = "".join(f'#line 1 "{part.name}"\n{part.read_text()}' for part in (_COMMON, source))
    return Program.of(text, label=source.name, names=(entry,))


def dimension(name: str, size: Any, limit: int = _INT_MAX, *, least: int = 1) -> int:
    """Return `size` as an int between `least` and `limit`, or raise an `InputError` with its `name`."""
    try:
        number = operator.index(size)
    except TypeError:
        number = None
    if number is None or isinstance(size, bool):
        raise InputError(f"{name} {size!r} is not an integer")
    if not least <= number <= limit:
        raise InputError(f"{name} {number} is outside {least} to {limit}")
    return number


def cpp_of(dtype: object) -> tuple[DType, str]:
    """Return an element type that the shipped kernels support, and its name in their C++."""
    element = dtype_of(dtype)
    if element.name not in _CPP:
        hint = f"they take {', '.join(_CPP)}"
        raise InputError(f"the shipped kernels do not take {element}", hint=hint)
    return element, _CPP[element.name]
