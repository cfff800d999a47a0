"""Keys of cached graphs: values that are allowed, their text, and the keys of calls.

The key of a call says which calls of a graphed function share a graph. Every call makes one, so its
parts are plain tuples, which cost a fraction of what tuples with names cost. The first item of such a
tuple is the class that describes the part:

    step(x, 3)  ->  ("step", None, (_ContainerKey, tuple, (), (
                        (Memory, "float32", (8,), None, (5, 0)),
                        (_ValueKey, int, "3"))), …)

`CallKey` is equal to that tuple. It is made for a call that has no graph yet.
"""

from __future__ import annotations

import operator
import re
import weakref
from collections.abc import Hashable
from enum import Enum
from numbers import Number
from types import BuiltinFunctionType, EllipsisType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from preheat.devices import base
from preheat.devices.array import Array
from preheat.devices.operands import tensor_kind
from preheat.errors import InputError
from preheat.graph import trees
from preheat.graph.trees import Memory

__all__ = ["NO_NAMES", "ArgumentReader", "CallKey", "hashable", "key_of", "key_text", "stable_repr"]

_NO_ARRAYS = "use a property of the array instead, such as x.shape"
_PLAIN_KEYS = frozenset((str, int, bool, bytes, type(None)))  # types whose values can all be keys
_GIVE_A_KEY = (
    "name what distinguishes its calls: @gpu.graphed(key=lambda …: …); then each such object has its "
    "own graphs, and its contents are not compared"
)
_FIXED = (FunctionType, BuiltinFunctionType, type, ModuleType, Enum, type(None), EllipsisType)
_PLAIN_ARGUMENTS = (*_FIXED, Number, str, bytes)
_NUMBERS = frozenset((int, float, bool, complex))
_VALUES = _NUMBERS | {str, bytes, type(None)}  # types of plain values, all of which can be hashed
_DESCRIBES_ARRAYS = ("numpy", "numpy.dtypes", "torch")  # modules of dtypes and the like
_ADDRESS = re.compile(r" at 0x[0-9A-Fa-f]+(?=>)")


def key_of(value: Any) -> Hashable:
    """Return `value` if it can be a key; `InputError` if it cannot be found again or holds memory."""
    if _is_plain(value):
        plain: Hashable = value
        return plain
    key = hashable(value, "a key")
    if not isinstance(value, str | int):
        _check_parts(value)
    return key


def _is_plain(value: Any) -> bool:
    """Return True for the most common kinds of keys, without checking their parts."""
    kind = type(value)
    if kind in _PLAIN_KEYS:
        return True
    hashed: object = kind.__hash__  # The shapes of torch are a subclass of tuple.
    if kind is not tuple and (hashed is not tuple.__hash__ or tensor_kind(value) is not None):
        return False
    for item in value:  # noqa: SIM110  (a generator costs as much as the tests)
        if type(item) not in _PLAIN_KEYS:
            return False
    return True


def hashable(value: Any, what: str) -> Hashable:
    """Return `value` if it can be hashed. Otherwise the `InputError` says that it cannot be `what`."""
    try:
        hash(value)
    except TypeError as bad:
        hint = _NO_ARRAYS if trees.is_array(value) else "use plain values, or a tuple of them"
        raise InputError(f"{value!r} cannot be {what}: {bad}", hint=hint) from None
    checked: Hashable = value
    return checked


def _check_parts(value: Any) -> None:
    for item in value if isinstance(value, frozenset) else (trees.children(value) or {}).values():
        _check_parts(item)
    if trees.is_array(value):
        raise InputError(f"{value!r} cannot be part of a key: it is an array", hint=_NO_ARRAYS)
    if isinstance(value, Number) and value != value:
        raise InputError(f"{value!r} cannot be part of a key: it is not equal to itself")


def stable_repr(value: object) -> str:
    """Return the repr of a value without the addresses of objects, which differ in every run."""
    return _ADDRESS.sub("", repr(value))


def key_text(key: Any) -> str:
    """Return a key as text: the Python literal that is equal to it, if there is one."""
    return repr(_literal(key))


def _literal(key: Any) -> Any:
    """Replace `torch.Size` and NumPy integers by the tuples and numbers that they are equal to."""
    if isinstance(key, tuple) and not hasattr(key, "_fields"):
        return tuple(map(_literal, key))
    whole = isinstance(key, Number) and hasattr(key, "__index__") and not isinstance(key, int)
    return operator.index(key) if whole else key


Part = tuple[Any, ...]  # the class that describes a part of a key, then its fields


class CallKey(NamedTuple):
    """The key of a call: the user's key in a tuple, if the function has one, and the arguments."""

    function: str
    user_key: tuple[Hashable] | None
    positional: Part
    named: Part

    def __repr__(self) -> str:
        if self.user_key is not None:
            return f"{self.function} {self.user_key[0]!r}"
        rows = [row for part in (self.positional, self.named) for row in _describe(part).rows()]
        return f"{self.function}({', '.join(rows)})"


class _ContainerKey(NamedTuple):
    """The arguments in a tuple, a list, a dict or a dataclass."""

    kind: type
    names: tuple[Hashable, ...]
    items: tuple[Hashable, ...]

    def rows(self) -> list[str]:
        """Return each item as text."""
        items = [repr(_describe(item)) for item in self.items]
        if not self.names:
            return items
        return [f"{name}={item}" for name, item in zip(self.names, items, strict=True)]

    def __repr__(self) -> str:
        return f"{self.kind.__name__}({', '.join(self.rows())})"


#: The key of the named arguments of a call without any.
NO_NAMES: Part = (_ContainerKey, dict, (), ())


class _ValueKey(NamedTuple):
    """The value of an argument. Numbers are kept as text, because 0.0 and -0.0 are equal."""

    type: type
    value: Hashable

    def __repr__(self) -> str:
        return str(self.value) if issubclass(self.type, Number) else stable_repr(self.value)


class _MethodKey(NamedTuple):
    """A method of an object, which may be an array."""

    function: Any
    instance: Hashable

    def __repr__(self) -> str:
        return f"({self.function!r}, {_describe(self.instance)!r})"


class _ByIdentity(weakref.ref[Any]):
    """An argument compared by identity, referenced weakly."""

    __slots__ = ("_number",)

    _number: int

    def __new__(cls, given: Any) -> _ByIdentity:
        reference = super().__new__(cls, given)
        reference._number = id(given)
        return reference

    def __hash__(self) -> int:
        return self._number

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, _ByIdentity) and self() is other() is not None)

    def __repr__(self) -> str:
        return f"<{type(self()).__name__}>"


class _ByIdentityStrong:
    """An argument compared by identity that does not support weak references."""

    def __init__(self, given: Any) -> None:
        self._given = given

    def __hash__(self) -> int:
        return id(self._given)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByIdentityStrong) and self._given is other._given

    def __repr__(self) -> str:
        return f"<{type(self._given).__name__}>"


class ArgumentReader:
    """Makes the key of a call from its arguments.

    Arrays are compared by their memory or, where they are `copied`, by their layout: each of those is
    appended to `arrays` once. With `values`, other arguments are compared by value. Without `values`,
    the key of the user replaces plain values, and any other object is compared by identity, because it
    may hold memory.
    """

    def __init__(self, device: base.Device, *, values: bool, copied: bool, title: str) -> None:
        self._device = device
        self._values = values
        self._copied = copied
        self._title = title

    def container_key(self, given: Any, arrays: list[Any]) -> Part:
        """Return the key of the arguments in a container.

        The most frequent kinds of arguments are read here, without a call for each.
        """
        kind = type(given)
        names: tuple[Hashable, ...] = ()
        items = given
        if kind is dict:
            names = tuple(given)
            items = given.values()
        elif kind is not tuple and kind is not list:
            children = trees.children(given) or {}
            names = () if isinstance(given, tuple | list) else tuple(children)
            items = children.values()
        values = self._values
        copied = self._copied
        keys: list[Hashable] = []
        place: tuple[int, ...]
        for item in items:
            item_kind = type(item)
            if item_kind is Array:
                if copied:
                    place = (_position(item, arrays),)
                else:
                    buffer = item.buffer
                    place = (buffer.generation, item.address - buffer.address)
                keys.append((Memory, item.dtype.name, item.shape, None, place))
            elif item_kind not in _VALUES:
                keys.append(self._argument_key(item, arrays))
            elif not values:
                keys.append(None)
            else:
                keys.append((_ValueKey, item_kind, repr(item) if item_kind in _NUMBERS else item))
        return (_ContainerKey, kind, names, tuple(keys))

    def _argument_key(self, given: Any, arrays: list[Any]) -> Hashable:
        if trees.children(given) is not None:
            return self.container_key(given, arrays)
        memory = trees.memory_of(given, self._device)
        if memory is None:
            return self._non_array_key(given, arrays)
        if not self._copied or not trees.can_clone(given):
            return (Memory, *memory)
        return (Memory, *memory._replace(place=(_position(given, arrays),)))

    def _non_array_key(self, given: Any, arrays: list[Any]) -> Hashable:
        if isinstance(given, MethodType):
            return (_MethodKey, given.__func__, self._argument_key(given.__self__, arrays))
        if self._values:
            return self._value_key(given)
        if isinstance(given, _PLAIN_ARGUMENTS) or _describes_arrays(given) or trees.is_array(given):
            return None
        try:
            return _ByIdentity(given)
        except TypeError:
            return _ByIdentityStrong(given)

    def _value_key(self, given: Any) -> Part:
        try:
            if tensor_kind(given) is not None:
                raise TypeError("its memory is not on this device")
            if _compares_by_identity(given):
                raise TypeError("it is compared by identity, so changes of its contents go unnoticed")
            hash(given)
        except TypeError as bad:
            what = f"{self._title}: an argument of type {type(given).__name__}"
            raise InputError(f"{what} cannot be part of a key: {bad}", hint=_GIVE_A_KEY) from None
        return (_ValueKey, type(given), repr(given) if isinstance(given, Number) else given)


def _position(array: Any, arrays: list[Any]) -> int:
    """Return where `array` itself is in `arrays`, after appending it if it is not there."""
    for position, other in enumerate(arrays):
        if other is array:
            return position
    arrays.append(array)
    return len(arrays) - 1


def _describe(part: Any) -> Any:
    """Return a part of a key as an object of the class that describes it."""
    return part[0](*part[1:]) if isinstance(part, tuple) else part


def _compares_by_identity(given: Any) -> bool:
    """Return True for an object that equals only itself, and whose contents may change."""
    hashed: object = type(given).__hash__
    return hashed is object.__hash__ and not isinstance(given, _FIXED) and not _describes_arrays(given)


def _describes_arrays(given: Any) -> bool:
    return type(given).__module__ in _DESCRIBES_ARRAYS
