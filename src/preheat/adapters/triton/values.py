"""Constants of Triton and Gluon kernels as JSON values, and as text that keeps their types.

Triton joins the constants of a kernel as text in its key, so `1` and `"1"` have one key.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from preheat.adapters.modules import RECORD_AGAIN, NotPortableError, import_object

__all__ = ["NotPortableError", "constants_digest", "decode", "encode", "resolve", "tuples"]


#: The package of Gluon that has the classes of layouts. They are frozen dataclasses.
_LAYOUTS = "triton.experimental.gluon.language."


def encode(value: Any) -> Any:
    """Return a constant as JSON values. Raises `NotPortableError` for a value of an unknown type."""
    import triton.language as tl
    from triton.runtime.jit import JITCallable

    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:  # A number of NumPy is a float as well, and is another constant.
        return {"float": value.hex()}
    match value:
        case tl.constexpr():
            return {"constexpr": encode(value.value)}
        case tl.dtype():
            return {"dtype": value.name}
        case tuple():
            named = type(value) is not tuple
            if named:
                raise NotPortableError(f"a constant is a {type(value).__qualname__}")
            return {"tuple": [encode(each) for each in value]}
        case JITCallable():
            return {"function": name_of(value)}
    if _is_layout(type(value)):
        return {"layout": _encode_layout(value)}
    raise NotPortableError(f"a constant is a {type(value).__qualname__}")


def decode(value: Any) -> Any:
    """Return the constant of JSON values that `encode` made."""
    import triton.language as tl

    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    makers: dict[str, Callable[[Any], Any]] = {
        "constexpr": lambda inner: tl.constexpr(decode(inner)),
        "dtype": tl.dtype,
        "float": float.fromhex,
        "tuple": lambda parts: tuple(map(decode, parts)),
        "function": resolve,
        "layout": _decode_layout,
        "list": lambda parts: list(map(decode, parts)),
    }
    return makers[kind](content)


def _is_layout(kind: Any) -> bool:
    """Return whether a class is one of the layouts of Gluon."""
    return is_dataclass(kind) and kind.__module__.startswith(_LAYOUTS)


def _encode_layout(layout: Any) -> dict[str, Any]:
    values = {each.name: getattr(layout, each.name) for each in fields(layout) if each.init}
    name = f"{type(layout).__module__}:{type(layout).__qualname__}"
    return {"type": name, "fields": {key: _encode_field(value) for key, value in values.items()}}


def _encode_field(value: Any) -> Any:
    """Return a field of a layout as JSON values. Other constants have no lists."""
    return {"list": list(map(_encode_field, value))} if isinstance(value, list) else encode(value)


def _decode_layout(content: dict[str, Any]) -> Any:
    name = str(content["type"])
    kind: Any = import_object(name, noun="layout") if name.startswith(_LAYOUTS) else None
    if not _is_layout(kind):
        raise NotPortableError(f"{name} is not a layout of Gluon")
    return kind(**{name: decode(value) for name, value in content["fields"].items()})


def tuples(value: Any) -> Any:
    """Return JSON lists as tuples, at every depth."""
    return tuple(map(tuples, value)) if isinstance(value, list) else value


def constants_digest(constants: Mapping[Any, Any]) -> str:
    """Return a digest of constants that differs where only their types differ."""
    rows = sorted((str(path), _typed(value)) for path, value in constants.items())
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:32]


def _typed(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [type(value).__name__, *map(_typed, value)]
    key = getattr(value, "cache_key", None)  # of a function that is a constant
    inner = getattr(value, "value", None) if type(value).__name__ == "constexpr" else None
    if inner is not None:
        return ["constexpr", _typed(inner)]
    return [f"{type(value).__module__}.{type(value).__qualname__}", str(value if key is None else key)]


def name_of(function: Any) -> str:
    """Return `module:qualname` of a Triton function. Raises `NotPortableError` without such a name."""
    python = function.fn
    name = f"{python.__module__}:{python.__qualname__}"
    if "<locals>" in name or "<lambda>" in name:
        raise NotPortableError(f"{name} is defined inside a function")
    return name


def resolve(name: str) -> Any:
    """Import the Triton function `module:qualname`. Raises `NotPortableError` when there is none."""
    from triton.runtime.jit import JITCallable, KernelInterface

    found = import_object(name, kind=(JITCallable, KernelInterface))
    while not isinstance(found, JITCallable):  # an autotuner, or heuristics
        if not hasattr(found, "fn"):
            raise NotPortableError(f"{name} is not a function of Triton", hint=RECORD_AGAIN)
        found = found.fn
    return found
