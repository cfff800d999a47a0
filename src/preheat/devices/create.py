"""New arrays: empty ones, and copies of data on the host, on the device or in other libraries."""

from __future__ import annotations

from typing import Any

from preheat.devices import base
from preheat.devices.array import Array
from preheat.devices.base import ON_HOST
from preheat.devices.context import Context
from preheat.devices.host import host_array
from preheat.devices.launch import LaunchArguments, in_order
from preheat.devices.operands import TensorKind, tensor_kind
from preheat.devices.stream import raw_stream
from preheat.errors import InputError
from preheat.model.dtypes import DType, dtype_of

__all__ = ["copy_of", "new_array"]


def new_array(context: Context, shape: tuple[int, ...], dtype: DType, stream: object) -> Array:
    """Return an array with undefined contents, from the allocator of the thread if it has one."""
    home = _home(context, stream)
    allocator = context.allocator()
    if allocator is not None:
        return allocator.empty(shape, dtype)
    return Array.new(context, shape, dtype, home)


def _home(context: Context, stream: object) -> base.Stream:
    """Return the home stream of memory. It is a stream of preheat, because others may end before it."""
    context.require_alive()
    raw = context.stream if stream is None else raw_stream(context, stream)
    return raw if context.order.owns(raw) else context.stream


def copy_of(context: Context, data: Any, dtype: object, stream: object) -> Array:
    """Return a copy of `data` as an array of this device."""
    if isinstance(data, Array):
        return _copy_of_array(context, data, dtype, stream)
    kind = tensor_kind(data)
    if kind is not None and _on_device(data):
        return _copy_of_tensor(context, data, kind, dtype, stream)
    wanted = None if dtype is None else dtype_of(dtype)
    # NumPy refuses to read a tensor of torch that requires a gradient.
    host = host_array(data.detach() if hasattr(data, "detach") else data, wanted)
    return new_array(context, host.shape, wanted or dtype_of(host.dtype), stream).write(host)


def _on_device(tensor: Any) -> bool:
    if hasattr(tensor, "__dlpack_device__"):
        return bool(tensor.__dlpack_device__()[0] != ON_HOST)
    return hasattr(tensor, "__cuda_array_interface__")


def _copy_of_array(context: Context, array: Array, dtype: object, stream: object) -> Array:
    array.require_usable("array()")
    context.require_alive()
    _require_dtype(array, array.dtype, dtype)
    if array.buffer.context is not context:
        raise InputError(f"{array!r} is not on {context.device.name}")
    return new_array(context, array.shape, array.dtype, stream).copy_from(array)


def _copy_of_tensor(
    context: Context, tensor: Any, kind: TensorKind, dtype: object, stream: object
) -> Array:
    """Copy a tensor of another library, which is on this device."""
    device = context.device
    name = type(tensor).__name__
    home = _home(context, stream)
    operand = kind.read(tensor, home.handle)
    element = _require_dtype(tensor, operand.dtype, dtype)
    if operand.device != device.dlpack:
        raise InputError(f"{name} is not on {device.name}")
    if not operand.contiguous:
        raise InputError(f"{name} of shape {tuple(tensor.shape)} is not contiguous")
    array = new_array(context, tuple(tensor.shape), element, stream)
    arguments = LaunchArguments(uses={array.uses: True}, keep_alive=[operand.owner])
    arguments.order_with(kind, operand, device)
    with in_order(context, arguments, home):
        device.copy(array.address, operand.address, array.nbytes, home)
    return array


def _require_dtype(data: Any, element: DType | None, wanted: object) -> DType:
    """Return the element type of `data`; raise if it is unknown, or another one is wanted."""
    if element is None or (wanted is not None and dtype_of(wanted) is not element):
        raise InputError(
            f"{type(data).__name__} of {data.dtype} cannot be copied as {wanted}",
            hint="convert it where it is, or on the host: gpu.array(a.numpy(), dtype)",
        )
    return element
