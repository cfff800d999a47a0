"""Arrays, of preheat or another library, among the arguments and results of a step.

They are searched in nested tuples, lists, dicts and dataclasses. Any other object is not searched.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from preheat.devices import base
from preheat.devices.array import Array
from preheat.devices.base import ON_HOST
from preheat.devices.launch import UNORDERED
from preheat.devices.operands import Pointer, is_plain_tensor, tensor_kind

__all__ = [
    "Memory", "address_range", "can_clone", "children", "clone", "clone_detached", "copy_arrays",
    "copy_containers", "copy_into", "is_array", "leaves", "map_leaves", "memory_of",
]  # fmt: skip

_text = functools.cache(str)  # of the element types of torch, which are few
_CLONES = {"torch": "clone", "cupy": "copy", "numpy": "copy"}  # the method that copies an array


class Memory(NamedTuple):
    """An array as a graph sees it: which memory, and its layout."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    place: tuple[object, ...]

    def __repr__(self) -> str:
        text = f"{self.dtype}{list(self.shape)}"
        place = "+".join(map(str, self.place))
        # The address of another library's memory differs from one run to the next.
        return text if place.startswith("0x") and self.shape else f"{text}@{place}"


def is_array(value: Any) -> bool:
    """Return True for an array of preheat or of any other library."""
    return isinstance(value, Array) or tensor_kind(value) is not None


def memory_of(value: Any, device: base.Device) -> Memory | None:
    """Return the memory of `value`, or None if kernels on `device` cannot use it."""
    if isinstance(value, Array):
        place = (value.buffer.generation, value.address - value.buffer.address)
        return Memory(value.dtype.name, value.shape, None, place)
    if isinstance(value, Pointer):
        return Memory("pointer", (), None, (hex(value.address),))
    kind = tensor_kind(value)
    if kind is None or (kind.library == "numpy" and device.dlpack[0] != ON_HOST):
        return None
    if kind.source is not None and kind.source.api == "torch" and is_plain_tensor(value, device.dlpack):
        address = value.data_ptr()
        return Memory(_text(value.dtype), tuple(value.shape), tuple(value.stride()), (hex(address),))
    operand = kind.read(value, UNORDERED)
    if not operand.is_usable_on(device):
        return None
    return Memory(str(value.dtype), tuple(value.shape), _strides(value), (hex(operand.address),))


def address_range(array: Any) -> range:
    """Return the addresses of an array."""
    if isinstance(array, Array):
        return range(array.address, array.address + array.nbytes)
    kind = tensor_kind(array)
    if kind is None:
        return range(0)
    operand = kind.read(array, UNORDERED)
    return range(operand.address, operand.address + operand.nbytes)


def _strides(value: Any) -> tuple[int, ...] | None:
    strides = value.stride() if hasattr(value, "stride") else getattr(value, "strides", None)
    return None if strides is None else tuple(strides)


def children(value: Any) -> dict[Any, Any] | None:
    """Return the items of a tuple, list, dict or dataclass, by index, key or name; None otherwise."""
    if isinstance(value, dict):
        return value
    if isinstance(value, tuple | list):
        return None if isinstance(value, Pointer) else dict(enumerate(value))
    if not dataclasses.is_dataclass(value) or isinstance(value, type) or is_array(value):
        return None
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return fields | getattr(value, "__dict__", {})


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield all items that are not containers, with their paths: `[0]`, `['row']`, `.first`."""
    items = children(value)
    if items is None:
        yield path, value
        return
    for name, item in items.items():
        plain = isinstance(value, tuple | list | dict)
        yield from leaves(item, f"{path}[{name!r}]" if plain else f"{path}.{name}")


def map_leaves(value: Any, do: Callable[[Any], Any], *, copy_containers: bool = False) -> Any:
    """Apply `do` to all items that are not containers, and return their results in the same structure.

    A container whose items stay the same is returned itself. With `copy_containers`, lists and dicts
    are new in any case.
    """
    items = children(value)
    if items is None:
        return do(value)
    mapped = {
        name: map_leaves(item, do, copy_containers=copy_containers) for name, item in items.items()
    }
    changed = {name: item for name, item in mapped.items() if item is not items[name]}
    if changed or (copy_containers and isinstance(value, list | dict)):
        return _rebuilt(value, mapped, changed)
    return value


def _rebuilt(value: Any, mapped: dict[Any, Any], changed: dict[Any, Any]) -> Any:
    if isinstance(value, dict):
        out = copy.copy(value)
        out.update(mapped)
        return out
    if isinstance(value, list):
        return list(mapped.values())
    if isinstance(value, tuple):
        return getattr(type(value), "_make", tuple)(mapped.values())
    init_fields = {field.name for field in dataclasses.fields(value) if field.init}
    out = dataclasses.replace(value, **{name: changed[name] for name in init_fields & changed.keys()})
    for name in changed.keys() - init_fields:
        object.__setattr__(out, name, changed[name])
    return out


def clone(array: Any) -> Any:
    """Return a copy of an array, made by its library; any other object is returned itself."""
    if isinstance(array, Array):
        new = Array.new(array.buffer.context, array.shape, array.dtype, array.buffer.home)
        return new.copy_from(array)
    method = _clone_method(array)
    return array if method is None else getattr(array, method)()


def _clone_method(array: Any) -> str | None:
    kind = tensor_kind(array)
    return None if kind is None else _CLONES.get(kind.library)


def copy_arrays(value: Any) -> Any:
    """Return a copy of the structure with copies of all arrays."""
    return map_leaves(value, clone, copy_containers=True)


def copy_containers(value: Any) -> Any:
    """Return a copy of the structure with the same arrays."""
    return map_leaves(value, lambda item: item, copy_containers=True)


def can_clone(array: Any) -> bool:
    """Return True if `clone` can copy the array and `copy_into` can fill the copy."""
    return isinstance(array, Array) or _clone_method(array) is not None


def clone_detached(array: Any) -> Any:
    """Return a copy for `copy_into` to fill; the copy of a torch tensor has no gradient."""
    return clone(array.detach() if hasattr(array, "detach") else array)


def copy_into(array: Any, other: Any) -> None:
    """Copy the content of `other`, which has the same layout, into a copy by `clone_detached`."""
    if isinstance(array, Array):
        array.copy_from(other)
    elif hasattr(array, "copy_"):
        array.copy_(other.detach())
    else:
        array[...] = other
