"""The C functions of DLPack 1.3 that torch offers for its tensors, for a stand-in of torch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from preheat.devices import dlpack

__all__ = ["exchange_api"]

_Describe = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(dlpack._Tensor))
_CurrentStream = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p)
)


class _Table(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("previous", ctypes.c_void_p),
        ("allocate", ctypes.c_void_p),
        ("from_object", ctypes.c_void_p),
        ("to_object", ctypes.c_void_p),
        ("describe", _Describe),
        ("current_stream", _CurrentStream),
    )


_kept: list[object] = []  # Libraries never destroy these tables.


def exchange_api(current: Callable[[], int]) -> Any:
    """Return a capsule for one-dimensional tensors of int32; `current` returns a stream handle."""

    def describe(tensor: Any, out: Any) -> int:
        found = out.contents
        found.data = tensor.data_ptr()
        found.device.type, found.device.index = tensor.__dlpack_device__()
        found.ndim = 1
        found.dtype.code, found.dtype.bits, found.dtype.lanes = 0, 32, 1
        tensor.extent = (ctypes.c_int64 * 1)(tensor.count)  # The tensor keeps both alive.
        tensor.stride_ = (ctypes.c_int64 * 1)(tensor.step)
        found.shape = ctypes.cast(tensor.extent, ctypes.POINTER(ctypes.c_int64))
        found.strides = ctypes.cast(tensor.stride_, ctypes.POINTER(ctypes.c_int64))
        found.byte_offset = 0
        return 0

    def current_stream(device_type: int, device: int, out: Any) -> int:
        del device_type, device
        out[0] = current()
        return 0

    table = _Table(1, 3, None, None, None, None, _Describe(describe), _CurrentStream(current_stream))
    _kept.append(table)
    return dlpack._new(ctypes.addressof(table), b"dlpack_exchange_api", None)
