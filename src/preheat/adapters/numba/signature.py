"""Types of the arguments of a kernel as JSON values, as types again, and as text for people."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numba.cuda import types
from numba.cuda.np import numpy_support

from preheat.adapters.base import NotKeyableError
from preheat.adapters.modules import NotPortableError, import_object

__all__ = ["decode", "encode", "text"]

_ARRAYS = {"C": "[{more}::1]", "F": "[::1{more}]", "A": "[:{more}]"}


def encode(kind: Any) -> Any:
    """Return a type as JSON values. Raises `NotKeyableError` for a type that these cannot describe."""
    encoded = _encode_known(kind)
    # A type may have a property that the description does not. Then the two types differ.
    try:
        same = encoded is not None and decode(encoded) == kind
    except (NotPortableError, NotImplementedError):
        same = False
    if not same:
        raise NotKeyableError(f"an argument is a {kind}")
    return encoded


def _encode_known(kind: Any) -> Any:
    if name := _simple_types().get(kind):
        return name
    match kind:
        case types.Array():
            return ["array", encode(kind.dtype), kind.ndim, kind.layout, not kind.mutable, kind.aligned]
        case types.NamedTuple() | types.NamedUniTuple():
            return ["named tuple", _class_name(kind.instance_class), [*map(encode, kind.types)]]
        case types.BaseTuple():
            return ["tuple", [*map(encode, kind.types)]]
        case types.Record():
            return ["record", _description(numpy_support.as_dtype(kind))]
        case types.CPointer():
            return ["pointer", encode(kind.dtype)]
        case types.NPDatetime():
            return ["datetime", kind.unit]
        case types.NPTimedelta():
            return ["timedelta", kind.unit]
        case types.EnumMember():
            members = [[each.name, repr(each.value)] for each in kind.instance_class]
            return ["enum", _class_name(kind.instance_class), encode(kind.dtype), members]
    return None


def decode(encoded: Any) -> Any:
    """Return the type of JSON values that `encode` made. Raises `NotPortableError` if it is gone."""
    if isinstance(encoded, str):
        return _simple_types_by_name()[encoded]
    kind, *content = encoded
    return _MAKERS[kind](*content)


def _array(dtype: Any, ndim: int, layout: str, readonly: bool, aligned: bool) -> Any:
    return types.Array(decode(dtype), ndim, layout, readonly=readonly, aligned=aligned)


def _named_tuple(name: str, content: Sequence[Any]) -> Any:
    return types.BaseTuple.from_types(
        [*map(decode, content)], import_object(name, kind=type, noun="class")
    )


def _enum(name: str, dtype: Any, members: Any) -> Any:
    del members  # They are part of the key, and belong to the class.
    found = import_object(name, kind=type, noun="class")
    integer = issubclass(found, int)
    return (types.IntEnumMember if integer else types.EnumMember)(found, decode(dtype))


_MAKERS: dict[str, Callable[..., Any]] = {
    "array": _array,
    "tuple": lambda content: types.BaseTuple.from_types([*map(decode, content)]),
    "named tuple": _named_tuple,
    "record": lambda description: numpy_support.from_dtype(_dtype(description)),
    "pointer": lambda dtype: types.CPointer(decode(dtype)),
    "datetime": types.NPDatetime,
    "timedelta": types.NPTimedelta,
    "enum": _enum,
}


@functools.cache
def _simple_types() -> dict[Any, str]:
    """Return the names of the types that have no parts."""
    simple = (types.Number, types.Boolean, types.NoneType)
    named = {name: kind for name, kind in vars(types).items() if isinstance(kind, simple)}
    found: dict[Any, str] = {}
    for name in sorted(named, key=lambda name: (name != str(named[name]), name)):
        found.setdefault(named[name], name)
    return found


@functools.cache
def _simple_types_by_name() -> dict[str, Any]:
    return {name: kind for kind, name in _simple_types().items()}


def _class_name(found: Any) -> str:
    name = f"{found.__module__}:{found.__qualname__}"
    if found.__module__ not in sys.modules or "<locals>" in name:
        raise NotKeyableError(f"an argument is a {name}, which cannot be imported")
    return name


def _description(dtype: np.dtype[Any]) -> Any:
    """Return a data type of NumPy as JSON values."""
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return [_description(base), list(shape)]
    if dtype.names is None:
        return dtype.str
    assert dtype.fields is not None
    parts = [(name, *dtype.fields[name][:2]) for name in dtype.names]
    fields = [[name, _description(kind), offset] for name, kind, offset in parts]
    return {"fields": fields, "size": dtype.itemsize, "aligned": dtype.isalignedstruct}


def _dtype(description: Any) -> np.dtype[Any]:
    """Return the data type of JSON values that `_description` made."""
    if isinstance(description, str):
        return np.dtype(description)
    if isinstance(description, list):
        base, shape = description
        described: Any = (_dtype(base), tuple(shape))
        array: np.dtype[Any] = np.dtype(described)
        return array
    names, formats, offsets = zip(*description["fields"], strict=True)
    parts: Any = {"names": names, "formats": [*map(_dtype, formats)], "offsets": offsets}
    parts["itemsize"] = description["size"]
    aligned: bool = description["aligned"]
    made: np.dtype[Any] = np.dtype(parts, align=aligned)
    return made


def text(argument_types: Sequence[Any]) -> str:
    """Return types in the notation of `cuda.jit` if it has one: `(float32[::1], int64)`."""
    return f"({', '.join(map(_text, argument_types))})"


def _text(kind: Any) -> str:
    if not isinstance(kind, types.Array) or not kind.ndim:
        return str(kind)
    more = kind.ndim - 1
    inner = {"C": ":, " * more, "F": ", :" * more, "A": ", :" * more}[kind.layout]
    shape = _ARRAYS[kind.layout].format(more=inner)
    return f"{'' if kind.mutable else 'readonly '}{kind.dtype}{shape}"
