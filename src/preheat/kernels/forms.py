"""What operands of the shipped kernels are like, and errors with the name of the one that is not."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any, NamedTuple

from preheat.dtypes import DType, dtype_of
from preheat.errors import InputError
from preheat.kernels.nf4 import Nf4
from preheat.kernels.op import cpp_of
from preheat.runtime.array import Array
from preheat.runtime.launch import UNORDERED
from preheat.runtime.operands import Operand, kind_of

__all__ = [
    "Form", "Named", "alike", "any_form", "dims_of", "foreign", "form_of", "keep_apart", "not_negative",
    "packed_form", "require_like", "require_no_gaps",
]  # fmt: skip

Named = Mapping[str, Any]
_LARGEST = (2 - 2.0**-23) * 2.0**127  # that a float32 holds


class Form(NamedTuple):
    """What memory has to be like."""

    shape: tuple[int, ...]
    dtype: DType

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def row(self) -> Form:
        return self._replace(shape=self.shape[-1:])

    def matrix(self, name: str) -> tuple[int, int]:
        """Rows, of all axes but the last, and width."""
        if not self.shape:
            raise InputError(f"{name} has no axes, and so no rows")
        return math.prod(self.shape[:-1]), self.shape[-1]

    def __str__(self) -> str:
        return f"{self.dtype} of shape {self.shape}"


def form_of(name: str, given: Any) -> Form:
    """What an operand is like; `InputError` with its name for one that no kernel takes."""
    found = any_form(name, given)
    try:
        cpp_of(found.dtype)
    except InputError as error:
        raise _named(name, error) from None
    if 0 in found.shape:
        raise InputError(f"{name} is empty: its shape is {found.shape}")
    return found


def any_form(name: str, given: Any) -> Form:
    """What an array of any type is like."""
    if isinstance(given, Nf4):
        hint = "only b of gemm_backward_a may be; nf4.dequantize gives the matrix"
        raise InputError(f"{name} is in NF4", hint=hint)
    try:
        return Form(tuple(given.shape), dtype_of(given.dtype))
    except AttributeError:
        raise _no_array(name, given) from None
    except InputError as error:
        raise _named(name, error) from None


def packed_form(name: str, given: Any) -> Form:
    """The same for one that kernels can take where it is: without gaps."""
    found = form_of(name, given)
    require_no_gaps(name, given)
    return found


def require_no_gaps(name: str, given: Any) -> None:
    """Refuse memory with strides that skip elements."""
    if not isinstance(given, Array) and not foreign(name, given).contiguous:
        raise InputError(f"{name} is not contiguous", hint="make a copy of it that is")


def alike(**operands: Any) -> Form:
    """What all these operands are like."""
    (first, given), *others = operands.items()
    like = packed_form(first, given)
    for name, other in others:
        require_like(name, other, like, first)
    return like


def require_like(name: str, given: Any, like: Form, as_what: str) -> None:
    """Refuse memory that is not like `like`."""
    found = packed_form(name, given)
    if found != like:
        raise InputError(f"{name} is {found}, not {like} as {as_what}")


def dims_of(nf4: str = "", /, **operands: tuple[Any, str]) -> tuple[DType, dict[str, int]]:
    """The element type that matrices share, and their dimensions by the names of their axes.

    The one called `nf4` may be an `Nf4`.
    """
    dtype, dims = None, dict[str, int]()
    for name, (given, axes) in operands.items():
        shape: tuple[int, ...]
        if isinstance(given, Nf4) and name == nf4:
            require_no_gaps("codes", given.codes)
            require_no_gaps("scales", given.scales)
            given.check()
            shape = given.shape
        else:
            shape, found = packed_form(name, given)
            if found is not (dtype := dtype or found):
                raise InputError(f"{name} is {found}, not {dtype} as the other matrix")
        if len(shape) != 2:
            hint = f"{name}.reshape(-1, {shape[-1]}) has all rows in one axis" if shape else None
            raise InputError(f"{name} is a matrix, and cannot have the shape {shape}", hint=hint)
        for axis, size in zip(axes, shape, strict=True):
            if dims.setdefault(axis, size) != size:
                text = f"{name}[{', '.join(axes)}] has {axis}={size}"
                raise InputError(f"{text}, where the other matrix has {axis}={dims[axis]}")
    assert dtype is not None  # the other matrix has one
    return dtype, dims


def _named(name: str, error: InputError) -> InputError:
    """An error about an operand, with its name in front."""
    return InputError(f"{name}: {error}", hint=error.hint)


def _no_array(name: str, given: Any) -> InputError:
    hint = "copy it to the device first: gpu.array(…)"
    return InputError(f"{name} is {type(given).__name__}, not an array", hint=hint)


def foreign(name: str, given: Any) -> Operand:
    """What another library says of its memory; nothing waits for the work that fills it."""
    kind = kind_of(given)
    if kind is None:
        raise _no_array(name, given)
    try:
        return kind.read(given, UNORDERED)
    except InputError as error:
        raise _named(name, error) from None


def _span(name: str, given: Any) -> tuple[int, int]:
    """Where memory begins and ends."""
    found = given if isinstance(given, Array) else foreign(name, given)
    return found.address, found.address + found.nbytes


def keep_apart(name: str, given: Any, others: Named, *, in_place: bool = False) -> None:
    """Refuse memory that shares a byte with others, unless it shares all of them `in_place`."""
    start, end = mine = _span(name, given)
    for other, array in others.items():
        first, last = span = _span(other, array)
        if start < last and first < end and not (in_place and span == mine):
            raise InputError(f"{name} overlaps {other}", hint="give it memory of its own")


def not_negative(name: str, value: Any) -> float:
    """A number from 0 up that kernels can take."""
    try:
        number = math.nan if isinstance(value, bool) or not isinstance(value, Real) else float(value)
    except OverflowError:
        number = value = math.inf
    if not 0 <= number <= _LARGEST:
        raise InputError(f"{name} {value!r} is not a number from 0 up that float32 can hold")
    return number
