"""New arrays: empty ones, and copies of data on the host, on the device or in other libraries."""

from __future__ import annotations

from typing import Any

from preheat.devices import base
from preheat.devices.base import ON_HOST
from preheat.dtypes import DType, dtype_of
from preheat.errors import InputError
from preheat.runtime.array import Array
from preheat.runtime.context import Context
from preheat.runtime.host import host_array
from preheat.runtime.launch import LaunchArguments, ordered
from preheat.runtime.operands import TensorKind, tensor_kind
from preheat.runtime.stream import raw_stream

__all__ = ["copy_of", "new_array"]


def new_array(context: Context, shape: tuple[int, ...], dtype: DType, stream: object) -> Array:
    """Return an array with undefined contents, from the allocator of the thread if it has one."""
    home = _home(context, stream)
    allocator = context.allocator()
    if allocator is not None:
        return allocator.empty(shape, dtype)
    return Array.new(context, shape, dtype, home)


def _home(context: Context, stream: object) -> base.Stream:
    """Return the stream that memory belongs to: one of ours, since others may end before it."""
    context.require_alive()
    raw = context.stream if stream is None else raw_stream(context, stream)
    return raw if context.order.owns(raw) else context.stream


def copy_of(context: Context, data: Any, dtype: object, stream: object) -> Array:
    """Return a copy of `data` as an array of this device."""
    kind = tensor_kind(data)
    if isinstance(data, Array) or (kind is not None and _on_device(data)):
        return _copy_on_device(context, data, kind, dtype, stream)
    wanted = None if dtype is None else dtype_of(dtype)
    host = host_array(_without_gradient(data), wanted)
    made = new_array(context, host.shape, wanted or dtype_of(host.dtype), stream)
    return made.write(host)


def _on_device(tensor: Any) -> bool:
    if hasattr(tensor, "__dlpack_device__"):
        return bool(tensor.__dlpack_device__()[0] != ON_HOST)
    return hasattr(tensor, "__cuda_array_interface__")


def _without_gradient(data: Any) -> object:
    """Detach a torch tensor: NumPy refuses to read one that requires a gradient."""
    return data.detach() if hasattr(data, "detach") else data


def _copy_on_device(
    context: Context, data: Any, kind: TensorKind | None, dtype: object, stream: object
) -> Array:
    """Copy device memory, whose device and element type must be the ones of the new array."""
    device = context.device
    if isinstance(data, Array):
        data.require("array()")
    home = _home(context, stream)
    found = None if kind is None else kind.read(data, home.handle)
    held, place = (data.dtype, data._device.dlpack) if found is None else found[2:4]
    if held is None or (dtype is not None and dtype_of(dtype) is not held):
        hint = "convert it where it is, or on the host: gpu.array(a.numpy(), dtype)"
        what = f"{type(data).__name__} of {data.dtype}"
        raise InputError(f"{what} cannot be copied as {dtype}", hint=hint)
    if place != device.dlpack or (found is None and data.buffer.context is not context):
        what = repr(data) if found is None else type(data).__name__
        raise InputError(f"{what} is on another device than {device.name}")
    if found is not None and not found.contiguous:
        raise InputError(f"{type(data).__name__} of shape {tuple(data.shape)} is not contiguous")
    made = new_array(context, tuple(data.shape), held, stream)
    if found is None or kind is None:
        return made.copy_from(data)
    arguments = LaunchArguments(uses={made.uses: True}, held=[found.owner])
    if kind.source is not None and kind.source.device_type == place[0]:
        arguments.others[kind.source.current(place[1])] = kind.library
    if found.ready is not None:
        arguments.others[found.ready] = kind.library
    with ordered(context, arguments, home):
        device.copy(made.address, found.address, made.nbytes, home)
    return made
