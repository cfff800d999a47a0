"""Check the operands of the shipped kernels. Errors contain the name of the argument."""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Real
from typing import Any, NamedTuple

from preheat.devices.array import Array
from preheat.devices.launch import UNORDERED
from preheat.devices.operands import Operand, tensor_kind
from preheat.errors import InputError
from preheat.kernels.nf4 import Nf4
from preheat.kernels.op import cpp_of
from preheat.model.dtypes import DType, dtype_of

__all__ = [
    "ArrayArgument", "ArraySpec", "GemmOperands", "aligned", "array_argument", "foreign_operand",
    "gemm_operands", "matching_operands", "nonnegative", "operand", "reject_overlap", "spec_of",
]  # fmt: skip

_FLOAT_MAX = (2 - 2.0**-23) * 2.0**127  # Of float32.


class ArraySpec(NamedTuple):
    """Shape and element type of an array."""

    shape: tuple[int, ...]
    dtype: DType

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def row(self) -> ArraySpec:
        """The spec of one row."""
        return self._replace(shape=self.shape[-1:])

    def matrix(self, name: str) -> tuple[int, int]:
        """Return the number of rows, over all axes but the last, and their width."""
        if not self.shape:
            raise InputError(f"{name} has no axes, so it has no rows")
        return math.prod(self.shape[:-1]), self.shape[-1]

    def __str__(self) -> str:
        return f"{self.dtype} of shape {self.shape}"


class ArrayArgument(NamedTuple):
    """An array passed as the argument `name`: its spec, and the addresses where it starts and ends."""

    name: str
    array: Any
    spec: ArraySpec
    start: int
    end: int
    contiguous: bool = True
    writable: bool = True

    def require_contiguous(self) -> ArrayArgument:
        """Return self, or raise if the strides skip elements."""
        if not self.contiguous:
            raise InputError(f"{self.name} is not contiguous", hint="pass a contiguous copy of it")
        return self

    def require(self, spec: ArraySpec, as_what: str) -> ArrayArgument:
        """Return self, or raise if shape or element type differ from `spec`."""
        if self.spec != spec:
            raise InputError(f"{self.name} is {self.spec}, not {spec} as {as_what}")
        return self


def array_argument(name: str, array: Any) -> ArrayArgument:
    """Describe an array of any element type, of preheat or of another library."""
    if isinstance(array, Array):
        start = array.address
        return ArrayArgument(
            name, array, ArraySpec(array.shape, array.dtype), start, start + array.nbytes
        )
    foreign = foreign_operand(name, array)
    spec = _spec(name, array, foreign.dtype)
    start = foreign.address
    end = start + foreign.nbytes
    return ArrayArgument(name, array, spec, start, end, foreign.contiguous, foreign.writable)


def operand(name: str, array: Any) -> ArrayArgument:
    """Describe an array that kernels can take as it is, or raise an `InputError` with its name."""
    argument = array_argument(name, array)
    _require_supported(name, argument.spec)
    return argument.require_contiguous()


def spec_of(name: str, array: Any) -> ArraySpec:
    """Return the spec of an array if kernels can take it or a contiguous copy; read no address."""
    spec = _spec(name, array, None)
    _require_supported(name, spec)
    return spec


def _spec(name: str, array: Any, dtype: DType | None) -> ArraySpec:
    try:
        return ArraySpec(tuple(array.shape), dtype or dtype_of(array.dtype))
    except AttributeError:
        raise _not_an_array(name, array) from None
    except InputError as error:
        raise _with_name(name, error) from None


def _require_supported(name: str, spec: ArraySpec) -> None:
    """Raise for an element type that no kernel takes, and for an array without elements."""
    try:
        cpp_of(spec.dtype)
    except InputError as error:
        raise _with_name(name, error) from None
    if 0 in spec.shape:
        raise InputError(f"{name} is empty: its shape is {spec.shape}")


def matching_operands(**arrays: Any) -> tuple[ArraySpec, tuple[ArrayArgument, ...]]:
    """Return the spec that all operands share, and the operands; raise if one differs."""
    first, *others = (operand(name, array) for name, array in arrays.items())
    for other in others:
        other.require(first.spec, first.name)
    return first.spec, (first, *others)


class GemmOperands(NamedTuple):
    """The operands of a matrix product, their common element type, and sizes by the names of axes."""

    dtype: DType
    dims: dict[str, int]
    operands: tuple[ArrayArgument, ...]


def gemm_operands(*, nf4: str = "", **arrays: tuple[Any, str]) -> GemmOperands:
    """Check the operands of a matrix product, each given with the names of its axes.

    The operand called `nf4` may be an `Nf4`.
    """
    dtype: DType | None = None
    dims: dict[str, int] = {}
    operands: list[ArrayArgument] = []
    for name, (array, axes) in arrays.items():
        if isinstance(array, Nf4) and name == nf4:
            operands += _nf4_parts(array)
            shape: tuple[int, ...] = array.shape
        else:
            operands.append(operand(name, array))
            shape, element = operands[-1].spec
            if element is not (dtype := dtype or element):
                raise InputError(f"{name} is {element}, not {dtype} as the other matrix")
        if len(shape) != 2:
            hint = f"{name}.reshape(-1, {shape[-1]}) has all rows in one axis" if shape else None
            raise InputError(f"{name} is a matrix, and cannot have the shape {shape}", hint=hint)
        for axis, size in zip(axes, shape, strict=True):
            if dims.setdefault(axis, size) != size:
                text = f"{name}[{', '.join(axes)}] has {axis}={size}"
                raise InputError(f"{text}, where the other matrix has {axis}={dims[axis]}")
    assert dtype is not None  # At most one operand is an `Nf4`, and the other one has a type.
    return GemmOperands(dtype, dims, tuple(operands))


def _nf4_parts(matrix: Nf4) -> tuple[ArrayArgument, ArrayArgument]:
    codes = array_argument("codes", matrix.codes).require_contiguous()
    scales = array_argument("scales", matrix.scales).require_contiguous()
    matrix.check()
    return codes, scales


def _with_name(name: str, error: InputError) -> InputError:
    """Return the error with the name of the operand in front."""
    return InputError(f"{name}: {error}", hint=error.hint)


def _not_an_array(name: str, array: Any) -> InputError:
    hint = "copy it to the device first: gpu.array(…)"
    return InputError(f"{name} is {type(array).__name__}, not an array", hint=hint)


def foreign_operand(name: str, array: Any) -> Operand:
    """Read the description of another library's array, without waiting for the work that fills it."""
    if isinstance(array, Nf4):
        hint = "only b of gemm_backward_a may be in NF4; nf4.dequantize returns the matrix"
        raise InputError(f"{name} is in NF4", hint=hint)
    kind = tensor_kind(array)
    if kind is None:
        raise _not_an_array(name, array)
    try:
        return kind.read(array, UNORDERED)
    except InputError as error:
        raise _with_name(name, error) from None


def aligned(*arrays: ArrayArgument) -> bool:
    """Return whether all arrays begin at a multiple of 16 bytes."""
    return not any(each.start % 16 for each in arrays)


def reject_overlap(
    mine: ArrayArgument, others: Iterable[ArrayArgument], *, in_place: bool = False
) -> None:
    """Raise if `mine` overlaps one of the others. With `in_place`, it may be one of them."""
    for other in others:
        same = in_place and (mine.start, mine.end) == (other.start, other.end)
        if mine.start < other.end and other.start < mine.end and not same:
            raise InputError(f"{mine.name} overlaps {other.name}", hint="pass separate memory")


def nonnegative(name: str, value: Any) -> float:
    """Return `value` as a float that is finite in float32 and not negative, or raise."""
    try:
        number = math.nan if isinstance(value, bool) or not isinstance(value, Real) else float(value)
    except OverflowError:
        number = value = math.inf
    if not 0 <= number <= _FLOAT_MAX:
        raise InputError(f"{name} {value!r} is not a non-negative number in the range of float32")
    return number
