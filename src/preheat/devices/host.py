"""Conversion of values and arrays on the host to and from the bytes of device memory."""

from __future__ import annotations

import functools
import operator
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from preheat.errors import InputError, short_repr
from preheat.model.dtypes import DType
from preheat.process.lazy import LazyModule

if TYPE_CHECKING:
    import numpy as np
else:
    np = LazyModule("numpy")

__all__ = [
    "bfloat16_bytes", "convert", "element_bytes", "host_array", "host_bytes", "integer",
    "number_format", "packer", "shape_of",
]  # fmt: skip

_FORMATS = {
    **{f"int{8 * n}": "bhiq"[n.bit_length() - 1] for n in (1, 2, 4, 8)},
    **{f"uint{8 * n}": "BHIQ"[n.bit_length() - 1] for n in (1, 2, 4, 8)},
    "float16": "e",
    "float32": "f",
    "float64": "d",
    "bool": "?",
}


def number_format(dtype: DType) -> str | None:
    """Return the `struct` format of a type whose elements are C integers or floats, else None."""
    code = _FORMATS.get(dtype.name, "?")
    return None if code in "e?" else code


@functools.cache
def packer(dtype: DType) -> Callable[[Any], bytes]:
    """Return `element_bytes` for one type, with a fast path for Python numbers."""
    if dtype.name not in _FORMATS:
        return partial(element_bytes, dtype=dtype)
    pack = struct.Struct(f"<{_FORMATS[dtype.name]}").pack
    plain = (int, float)

    def pack_number(value: Any) -> bytes:
        if type(value) in plain:
            try:
                return pack(value)
            except (struct.error, OverflowError):
                pass  # The function below raises an error with a message, and without a context.
        return element_bytes(value, dtype)

    return pack_number


def element_bytes(value: Any, dtype: DType) -> bytes:
    """Return the bytes of one element; `InputError` for a value that does not fit the type."""
    if dtype.name in _FORMATS:
        try:
            item = value.item() if hasattr(value, "item") else value
            if not isinstance(item, bool | int | float):
                raise InputError(f"{short_repr(value)} does not fit {dtype}: it is not one real number")
            return struct.pack(f"<{_FORMATS[dtype.name]}", item)
        except (struct.error, OverflowError, TypeError, ValueError):
            raise InputError(f"{short_repr(value)} does not fit {dtype}") from None
    if dtype.name == "bfloat16" and isinstance(value, float | int):
        return bfloat16_bytes(value)
    host = host_array(value, dtype)
    if host.shape:
        raise InputError(f"{short_repr(value)} does not fit {dtype}: it is not one element")
    return host.tobytes()


def bfloat16_bytes(value: float) -> bytes:
    """Return the two bytes of the nearest bfloat16, with ties to even."""
    if value != value:
        return b"\xff\x7f"
    try:
        single = struct.pack("<f", value)
    except (struct.error, OverflowError):
        raise InputError(f"{short_repr(value)} does not fit bfloat16") from None
    (near,) = struct.unpack("<f", single)
    (bits,) = struct.unpack("<I", single)
    if near != value:  # A sticky bit for the lost digits prevents double rounding.
        bits = bits - (abs(near) > abs(value)) | 1
    return struct.pack("<H", (bits + 0x7FFF + (bits >> 16 & 1)) >> 16)


def convert(host: np.ndarray[Any, Any], held: DType, wanted: DType | None) -> np.ndarray[Any, Any]:
    """Convert elements of type `held`, copied from a device, to `wanted` if it is given."""
    if wanted is None or wanted is held:
        return host
    values = _numbers(host, held)
    if values is not host and not np.can_cast(values.dtype, wanted.numpy(), "same_kind"):
        hint = f'.numpy("float32").astype({wanted.host!r}) rounds the numbers'
        raise InputError(f"{held} cannot be converted to {wanted} without loss", hint=hint)
    return host_array(values, wanted)


def _numbers(host: np.ndarray[Any, Any], dtype: DType) -> np.ndarray[Any, Any]:
    """Return elements as numbers; types that NumPy lacks become float32, which is exact."""
    if dtype.name == "bfloat16":
        return (host.astype("uint32") << 16).view("float32")
    if dtype.name == "float8_e5m2":  # It is the upper half of a float16.
        return (host.astype("uint16") << 8).view("float16").astype("float32")
    if dtype.name == "float8_e4m3fn":  # It has no infinities, and all ones mean NaN.
        exponent = (host >> 3 & 15).astype("int32")
        fraction = (host & 7).astype("float32")
        normal = np.ldexp(fraction + 8, exponent - 10)
        value = np.where(exponent == 0, np.ldexp(fraction, -9), normal)
        value = np.where(host & 127 == 127, np.float32(np.nan), value)
        return np.copysign(value, np.where(host & 128, -1, 1)).astype("float32")
    return host


def shape_of(shape: object) -> tuple[int, ...]:
    """Return a shape, given as one integer or several, as a tuple."""
    parts: Any = shape if isinstance(shape, Sequence) else (shape,)
    try:
        extents = tuple(operator.index(n) for n in parts)
    except TypeError:
        raise InputError(
            f"shape {short_repr(shape)} must be an integer or a tuple of integers"
        ) from None
    if any(n < 0 for n in extents):
        raise InputError(f"shape {short_repr(shape)} has a negative extent")
    return extents


def integer(value: Any, what: str, *, least: int | None = None, hint: str | None = None) -> int:
    """Return `value` as an int. The error calls it `what`, such as "a number of bytes"."""
    try:
        number = operator.index(value)
    except TypeError:
        raise InputError(f"{value!r} is not {what}: it must be an integer", hint=hint) from None
    if least is not None and number < least:
        raise InputError(f"{number} is not {what}: it must be at least {least}", hint=hint)
    return number


def host_bytes(host: np.ndarray[Any, Any]) -> memoryview:
    """Return the bytes of a contiguous array."""
    flat: Any = host.reshape(-1)
    return memoryview(flat).cast("B")


def host_array(data: object, dtype: DType | None) -> np.ndarray[Any, Any]:
    """Return `data` as a contiguous NumPy array in the byte layout of `dtype`."""
    try:
        host = np.asarray(memoryview(data) if isinstance(data, bytes) else data)
    except (TypeError, ValueError) as bad:
        if "inhomogeneous" in str(bad):
            bad = ValueError(f"its rows have different lengths: {short_repr(data)}")
        raise InputError(f"cannot read {type(data).__name__} as an array: {bad}") from None
    if host.dtype.kind == "O" or (host.dtype.kind in "SU" and not hasattr(data, "dtype")):
        raise _not_numbers_error(host, data)
    if dtype is None or host.dtype == dtype.numpy():
        return np.ascontiguousarray(host).reshape(host.shape)
    if dtype.host.startswith("uint") and not dtype.name.startswith("uint"):
        return _as_bits(host, dtype)
    if dtype.numpy().kind in "iu" and host.dtype.kind in "iub":
        _check_range(host, dtype)
    elif host.size and not np.can_cast(host.dtype, dtype.numpy(), "same_kind"):
        raise _lossy_error(host, dtype)
    with np.errstate(over="ignore"):  # Too large numbers become infinite, as in a launch.
        return np.ascontiguousarray(host, dtype.numpy()).reshape(host.shape)


def _not_numbers_error(host: np.ndarray[Any, Any], data: object) -> InputError:
    """Return the error for data that NumPy reads as text or objects; it names the first one."""
    for item in _non_numbers(data):
        return InputError(
            f"cannot read {type(data).__name__} as an array: {short_repr(item)} is not a number",
            hint="pass numbers, nested lists of numbers, bytes, or an array of another library",
        )
    if not host.size:
        hint = "give it an element type: numpy.empty(0, 'float32')"
        return InputError("an empty array of objects has no element type", hint=hint)
    # NumPy reads integers as objects when one of them is too long.
    return InputError(f"{short_repr(max(host.flat, key=abs))} does not fit into 64 bits")


def _non_numbers(data: object) -> Iterator[object]:
    """Yield everything in nested sequences that is not a number."""
    if isinstance(data, list | tuple | np.ndarray):
        for each in data.flat if isinstance(data, np.ndarray) else data:
            yield from _non_numbers(each)
    elif not isinstance(data, bool | int | float | complex | np.number | np.bool_):
        yield data


def _lossy_error(host: np.ndarray[Any, Any], dtype: DType) -> InputError:
    hint = f"convert it first: numpy.asarray(x).astype({dtype.host!r})"
    return InputError(f"{host.dtype} cannot be converted to {dtype} without loss", hint=hint)


def _check_range(host: np.ndarray[Any, Any], dtype: DType) -> None:
    limits = np.iinfo(dtype.numpy())
    if host.size and (int(host.min()) < limits.min or int(host.max()) > limits.max):
        raise InputError(f"values from {host.min()} to {host.max()} do not fit {dtype}")


def _as_bits(host: np.ndarray[Any, Any], dtype: DType) -> np.ndarray[Any, Any]:
    """Return the bits of a type that NumPy lacks: raw bits as they are, numbers rounded.

    This is `bfloat16_bytes` for arrays. A launch with one number does not import NumPy.
    """
    if host.dtype.kind in "Vu" and host.dtype.itemsize == dtype.size:
        return np.ascontiguousarray(host).view(dtype.numpy())
    if dtype.name != "bfloat16":
        if host.dtype.kind in "biuf" and not host.any():  # Zero has no bits set in any type.
            return np.zeros(host.shape, dtype.numpy())
        raise InputError(f"give {dtype} as raw bits ({dtype.host})")
    if host.dtype.kind not in "biuf":
        raise InputError(f"{host.dtype} cannot be converted to {dtype} without loss")
    exact = np.ascontiguousarray(host, "float64")
    with np.errstate(over="ignore"):
        near = exact.astype("float32")
    bits = near.view("uint32")
    # A sticky bit for the lost digits prevents double rounding.
    bits = np.where(near == exact, bits, bits - (abs(near) > abs(exact)) | 1)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    rounded = np.where(np.isnan(near), 0x7FFF, rounded).astype("uint16")
    return rounded.reshape(host.shape)
