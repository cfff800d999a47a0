"""Arrays among the arguments and results of a step, ours or another library's.

They are looked for in tuples, lists and dicts, inside one another; anything else is left as it is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

from preheat.devices import base
from preheat.devices.base import ON_HOST
from preheat.runtime.array import Array
from preheat.runtime.launch import UNORDERED
from preheat.runtime.operands import kind_of

__all__ = ["Memory", "copies", "each", "fillable", "memory", "own", "private", "refill"]

_CLONES = {"torch": "clone", "cupy": "copy", "numpy": "copy"}  # by library: what makes a copy


class Memory(NamedTuple):
    """An array as a graph sees it: which memory, and how it is laid out."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    place: tuple[object, ...]

    def __repr__(self) -> str:
        return f"{self.dtype}{list(self.shape)}@{'+'.join(map(str, self.place))}"


def memory(value: Any, device: base.Device) -> Memory | None:
    """What `value` is to a graph on `device`; None where it is nothing that kernels there can use."""
    if isinstance(value, Array):
        place = (value.buffer.generation, value.address - value.buffer.address)
        return Memory(value.dtype.name, value.shape, None, place)
    kind = kind_of(value)
    if kind is None or (kind.library == "numpy" and device.dlpack[0] != ON_HOST):
        return None
    found = kind.read(value, UNORDERED)
    if not found.reaches(device.dlpack):
        return None
    return Memory(str(value.dtype), tuple(value.shape), _strides(value), (hex(found.address),))


def _strides(value: Any) -> tuple[int, ...] | None:
    told = value.stride() if hasattr(value, "stride") else getattr(value, "strides", None)
    return None if told is None else tuple(told)


def each(value: Any, do: Callable[[Any], Any]) -> Any:
    """The same tuples, lists and dicts with `do` done to what they hold; the very same if equal."""
    if isinstance(value, dict):
        made = {key: each(item, do) for key, item in value.items()}
        if all(made[key] is item for key, item in value.items()):
            return value
        out = copy.copy(value)
        out.update(made)
        return out
    if not isinstance(value, tuple | list):
        return do(value)
    items = [each(item, do) for item in value]
    if all(new is old for new, old in zip(items, value, strict=True)):
        return value
    if isinstance(value, list):
        return items
    return type(value)(*items) if hasattr(value, "_fields") else tuple(items)


def own(array: Any) -> Any:
    """A copy of an array, made by the library it is of; anything else is itself."""
    if isinstance(array, Array):
        made = Array.new(array.buffer.context, array.shape, array.dtype, array.buffer.home)
        return made.copy_from(array)
    clone = _clone(array)
    return array if clone is None else getattr(array, clone)()


def _clone(array: Any) -> str | None:
    kind = kind_of(array)
    return None if kind is None else _CLONES.get(kind.library)


def copies(value: Any) -> Any:
    """The same with copies of all arrays in it."""
    return each(value, own)


def fillable(array: Any) -> bool:
    """Whether copies of it can be made and filled anew."""
    return isinstance(array, Array) or _clone(array) is not None


def private(array: Any) -> Any:
    """A copy for `refill` to fill: of a torch tensor, without its gradient."""
    return own(array.detach() if hasattr(array, "detach") else array)


def refill(array: Any, other: Any) -> None:
    """Copy the content of `other`, which is laid out in the same way, into a `private` array."""
    if isinstance(array, Array):
        array.copy_from(other)
    elif hasattr(array, "copy_"):
        array.copy_(other.detach())
    else:
        array[...] = other
