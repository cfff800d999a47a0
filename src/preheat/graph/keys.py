"""Keys of cached graphs: which values are allowed, and how messages and recordings show them."""

from __future__ import annotations

import operator
import re
from collections.abc import Hashable
from numbers import Number
from typing import Any

from preheat.device.operands import tensor_kind
from preheat.errors import InputError
from preheat.graph import trees

__all__ = ["hashable", "key_of", "key_text", "stable_repr"]

_NO_ARRAYS = "use a property of the array instead, such as x.shape"
_PLAIN = frozenset((str, int, bool, bytes, type(None)))  # types whose values can all be keys
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
    if kind in _PLAIN:
        return True
    hashed: object = kind.__hash__  # The shapes of torch are a subclass of tuple.
    if kind is not tuple and (hashed is not tuple.__hash__ or tensor_kind(value) is not None):
        return False
    for item in value:  # noqa: SIM110  (a generator costs as much as the tests)
        if type(item) not in _PLAIN:
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
