"""Arguments of raw kernels: CuPy's rules where they are right, and preheat's checks beyond them.

CuPy passes the address of a value, and the driver reads as many bytes as the parameter has. That is
right for an integer that fits, whatever its width, and for memory of any layout and element type.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from preheat.devices.base import Device
from preheat.dtypes import DType, dtype_of_typestr
from preheat.runtime.arguments import ParamSpec
from preheat.runtime.array import Array
from preheat.runtime.operands import Pointer, Strided, tensor_kind

__all__ = ["converted", "has_stream"]

_AS_THEY_ARE = {int, float, bool, complex, type(None), Strided, Pointer}
_Convert = Callable[[ParamSpec, Any], Any]


def converted(params: Sequence[ParamSpec], args: Sequence[Any], device: Device) -> Sequence[Any]:
    """Return arguments of a raw kernel as arguments of a kernel of preheat.

    Arrays of NumPy are memory on a device that accepts them. A wrong number of arguments is left to the
    launch, which knows the message.
    """
    if len(params) != len(args):
        return args
    values = []
    for param, given in zip(params, args, strict=True):
        kind = type(given)
        if kind in _AS_THEY_ARE:
            values.append(given)
        elif param.pointer and issubclass(kind, _numpy_array_type()) and _is_memory(given, device):
            values.append(_cupy_array(param, given))
        else:
            values.append(_converter(kind)(param, given))
    return values


def has_stream(args: Iterable[Any]) -> bool:
    """Return whether an argument is a tensor of a library whose current stream a launch takes."""
    for given in args:
        kind = tensor_kind(given.array if isinstance(given, Strided) else given)
        if kind is not None and kind.source is not None:
            return True
    return False


def _is_memory(array: Any, device: Device) -> bool:
    """Return True for an array of NumPy that kernels on a device use in place."""
    host = device.host_memory
    return host is not None and host.accepts(array.ctypes.data, array.nbytes)


def _numpy_array_type() -> type:
    import numpy

    return numpy.ndarray


def _converter(kind: type) -> _Convert:
    try:
        return _converters[kind]
    except KeyError:
        pass
    return _converters.setdefault(kind, _find(kind))


def _find(kind: type) -> _Convert:
    """Return how values of a type are passed. It is called once for each type."""
    if issubclass(kind, Array):
        return _array
    for each in kind.__mro__:
        found = _NAMED.get((each.__module__, each.__name__))
        if found is not None:
            return found
    return _unchanged


def _unchanged(param: ParamSpec, given: Any) -> Any:
    del param
    return given


def _array(param: ParamSpec, given: Array) -> Any:
    if param.pointer and _reinterpreted(param, given.dtype):
        return Strided(given, any_dtype=True)
    return given


def _cupy_array(param: ParamSpec, given: Any) -> Any:
    """Pass the address of the first element, whatever the strides are: CuPy ignores views."""
    other = _reinterpreted(param, dtype_of_typestr(given.dtype.str))
    if other or not given.flags.c_contiguous:
        return Strided(given, any_dtype=other)
    return given


def _numpy_array(param: ParamSpec, given: Any) -> Any:
    """Pass one element by value, as CuPy does. The launch refuses memory that is not on the device."""
    if param.pointer and param.value is None:
        return given
    if given.size != 1:
        raise TypeError(
            f"{param.title} cannot take a numpy.ndarray of shape {given.shape}: only arrays of one "
            "element are passed by value"
        )
    return _numpy_scalar(param, given.reshape(())[()])


def _numpy_scalar(param: ParamSpec, given: Any) -> Any:
    """Pass integers by their value, and everything else by its exact type."""
    if given.dtype.kind in "iu" and param.value is not None and not param.value.real:
        return int(given)
    if param.value is not None and param.value.any_sign and given.dtype.kind == "f":
        return float(given) if given.dtype.itemsize == param.parameter.size else given
    return given


def _reinterpreted(param: ParamSpec, dtype: DType | None) -> bool:
    """Return whether memory is passed although the parameter points at elements of another type.

    Elements of the same size are, and complex numbers as pairs, and all memory as bytes. Any other
    type is most likely a mistake, which the launch refuses.
    """
    if dtype is None or param.dtypes is None or dtype in param.dtypes:
        return False
    sizes = {each.size for each in param.dtypes}
    parts = {dtype.size, dtype.size // 2} if dtype.complex else {dtype.size}
    return bool(sizes & (parts | {1}))


def _memory_pointer(param: ParamSpec, given: Any) -> Any:
    del param
    return Pointer(given.ptr)


def _handle(param: ParamSpec, given: Any) -> Any:
    """Pass the handle of a texture or surface, which is a 64-bit number."""
    del param
    return int(given.ptr)


def _by_value(param: ParamSpec, given: Any) -> Any:
    """Pass what CuPy has laid out in memory, such as `array.mdspan`, by value."""
    return ctypes.string_at(given.ptr, param.parameter.size)


_NAMED: dict[tuple[str, str], _Convert] = {
    ("cupy._core.core", "_ndarray_base"): _cupy_array,
    ("cupy.cuda.memory", "MemoryPointer"): _memory_pointer,
    ("cupy.cuda.texture", "TextureObject"): _handle,
    ("cupy.cuda.texture", "SurfaceObject"): _handle,
    ("cupy.cuda.function", "CPointer"): _by_value,
    ("numpy", "ndarray"): _numpy_array,
    ("numpy", "generic"): _numpy_scalar,
}
_converters: dict[type, _Convert] = {}
