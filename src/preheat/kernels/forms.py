"""What operands of the shipped kernels are like, and errors with the name of the one that is not."""

from __future__ import annotations

import math
from collections.abc import Iterable
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
    "Form", "Given", "Matrices", "aligned", "alike", "foreign", "form_of", "given", "keep_apart",
    "matrices", "not_negative", "operand",
]  # fmt: skip

_LARGEST = (2 - 2.0**-23) * 2.0**127  # that a float32 holds


class Form(NamedTuple):
    """Shape and element type of memory."""

    shape: tuple[int, ...]
    dtype: DType

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def row(self) -> Form:
        """That of one row."""
        return self._replace(shape=self.shape[-1:])

    def matrix(self, name: str) -> tuple[int, int]:
        """Rows, of all axes but the last, and width."""
        if not self.shape:
            raise InputError(f"{name} has no axes, and so no rows")
        return math.prod(self.shape[:-1]), self.shape[-1]

    def __str__(self) -> str:
        return f"{self.dtype} of shape {self.shape}"


class Given(NamedTuple):
    """An array that a function was given under a name, read once: what it is like, and where."""

    name: str
    array: Any
    form: Form
    start: int
    end: int
    packed: bool = True
    writable: bool = True

    def require_packed(self) -> Given:
        """Refuse memory with strides that skip elements."""
        if not self.packed:
            raise InputError(f"{self.name} is not contiguous", hint="make a copy of it that is")
        return self

    def require(self, form: Form, as_what: str) -> Given:
        """Refuse memory that is not like `form`."""
        if self.form != form:
            raise InputError(f"{self.name} is {self.form}, not {form} as {as_what}")
        return self


def given(name: str, array: Any) -> Given:
    """An array of any element type, ours or of another library."""
    if isinstance(array, Array):
        start = array.address
        return Given(name, array, Form(array.shape, array.dtype), start, start + array.nbytes)
    found = foreign(name, array)
    start, form = found.address, _form(name, array, found.dtype)
    end = start + found.nbytes
    return Given(name, array, form, start, end, found.contiguous, found.writable)


def operand(name: str, array: Any) -> Given:
    """One that kernels can take where it is; `InputError` with its name otherwise."""
    found = given(name, array)
    _require_known(name, found.form)
    return found.require_packed()


def form_of(name: str, array: Any) -> Form:
    """What one is like that kernels can take, or a packed copy of it; where it lies is not asked."""
    form = _form(name, array, None)
    _require_known(name, form)
    return form


def _form(name: str, array: Any, dtype: DType | None) -> Form:
    try:
        return Form(tuple(array.shape), dtype or dtype_of(array.dtype))
    except AttributeError:
        raise _no_array(name, array) from None
    except InputError as error:
        raise _named(name, error) from None


def _require_known(name: str, form: Form) -> None:
    """Refuse a type that no kernel takes, and what has no elements."""
    try:
        cpp_of(form.dtype)
    except InputError as error:
        raise _named(name, error) from None
    if 0 in form.shape:
        raise InputError(f"{name} is empty: its shape is {form.shape}")


def alike(**arrays: Any) -> tuple[Form, tuple[Given, ...]]:
    """Operands of the same form, and that form."""
    first, *others = (operand(name, array) for name, array in arrays.items())
    for other in others:
        other.require(first.form, first.name)
    return first.form, (first, *others)


class Matrices(NamedTuple):
    """Operands of a product: the element type that they share, and sizes by the names of their axes."""

    dtype: DType
    dims: dict[str, int]
    operands: tuple[Given, ...]


def matrices(*, nf4: str = "", **arrays: tuple[Any, str]) -> Matrices:
    """The operands of a product, each with the names of its axes; that called `nf4` may be an `Nf4`."""
    dtype, dims, operands = None, dict[str, int](), list[Given]()
    for name, (array, axes) in arrays.items():
        if isinstance(array, Nf4) and name == nf4:
            operands += _parts(array)
            shape: tuple[int, ...] = array.shape
        else:
            operands.append(operand(name, array))
            shape, found = operands[-1].form
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
    return Matrices(dtype, dims, tuple(operands))


def _parts(matrix: Nf4) -> tuple[Given, Given]:
    codes = given("codes", matrix.codes).require_packed()
    scales = given("scales", matrix.scales).require_packed()
    matrix.check()
    return codes, scales


def _named(name: str, error: InputError) -> InputError:
    """An error about an operand, with its name in front."""
    return InputError(f"{name}: {error}", hint=error.hint)


def _no_array(name: str, array: Any) -> InputError:
    hint = "copy it to the device first: gpu.array(…)"
    return InputError(f"{name} is {type(array).__name__}, not an array", hint=hint)


def foreign(name: str, array: Any) -> Operand:
    """What another library says of its memory; nothing waits for the work that fills it."""
    if isinstance(array, Nf4):
        hint = "only b of gemm_backward_a may be; nf4.dequantize gives the matrix"
        raise InputError(f"{name} is in NF4", hint=hint)
    kind = kind_of(array)
    if kind is None:
        raise _no_array(name, array)
    try:
        return kind.read(array, UNORDERED)
    except InputError as error:
        raise _named(name, error) from None


def aligned(*arrays: Given) -> bool:
    """Whether all of them begin where 16 bytes can be accessed at once."""
    return not any(each.start % 16 for each in arrays)


def keep_apart(mine: Given, others: Iterable[Given], *, in_place: bool = False) -> None:
    """Refuse memory that shares a byte with others, unless it shares all of them `in_place`."""
    for other in others:
        same = in_place and (mine.start, mine.end) == (other.start, other.end)
        if mine.start < other.end and other.start < mine.end and not same:
            raise InputError(f"{mine.name} overlaps {other.name}", hint="give it memory of its own")


def not_negative(name: str, value: Any) -> float:
    """A number from 0 up that kernels can take."""
    try:
        number = math.nan if isinstance(value, bool) or not isinstance(value, Real) else float(value)
    except OverflowError:
        number = value = math.inf
    if not 0 <= number <= _LARGEST:
        raise InputError(f"{name} {value!r} is not a number from 0 up that float32 can hold")
    return number
