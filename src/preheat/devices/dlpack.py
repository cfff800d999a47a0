"""The exchange of tensors between libraries without a copy, by DLPack and the array interface of CUDA.

`export_array` and `cuda_interface` export an array; `open_capsule` reads a tensor of another library.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import math
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from preheat.devices.base import LEGACY_STREAMS, ON_HOST
from preheat.devices.libraries import current_streams, retained_current_streams
from preheat.errors import InputError
from preheat.model.dtypes import DType, dtype_of_dlpack

if TYPE_CHECKING:
    from preheat.devices.array import Array

__all__ = [
    "Tensor",
    "capsule",
    "cuda_interface",
    "end_dropped_exports",
    "export_array",
    "export_numbers",
    "open_capsule",
]


class _Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("index", ctypes.c_int32))


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter))


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", _Deleter),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


_LEGACY_STREAM = LEGACY_STREAMS[-1]  # The meaning of stream=None in DLPack.
_LEGACY = b"dltensor"
_VERSIONED = b"dltensor_versioned"
_READ_ONLY = 1
_MAJOR_VERSION = 1  # the version of the protocol
_api = ctypes.pythonapi
_new = _api.PyCapsule_New
_new.restype = ctypes.py_object
_new.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_is_valid = _api.PyCapsule_IsValid
_is_valid.restype = ctypes.c_int
_is_valid.argtypes = (ctypes.c_void_p, ctypes.c_char_p)
_pointer = _api.PyCapsule_GetPointer
_pointer.restype = ctypes.c_void_p
_pointer.argtypes = (ctypes.c_void_p, ctypes.c_char_p)

export_numbers = itertools.count(1)


class _Export(NamedTuple):
    """What must stay alive while the consumer may use an export, and what ends the export."""

    managed: _Managed | _Versioned
    extents: object
    strides: object
    release: Callable[[], None]


# Exports by number until the consumer calls the deleter.
_exports: dict[int, _Export] = {}
# Capsules with those numbers until they are consumed. They have no destructor: it would run Python
# code, and that would discard an exception that is being raised.
_unconsumed_capsules: deque[tuple[int, Any]] = deque()


class Tensor(NamedTuple):
    """A tensor of another library. It stays valid while `owner` is held."""

    address: int
    device: tuple[int, int]
    dtype: DType | None
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None  # in elements; None for a contiguous tensor
    read_only: bool
    owner: object


def capsule(
    number: int,
    release: Callable[[], None],
    address: int,
    shape: Sequence[int],
    dtype: DType,
    device: tuple[int, int],
    *,
    versioned: bool,
) -> Any:
    """Return a capsule for contiguous memory. `number` is a new one of `export_numbers`.

    `release` is called when the consumer releases the memory, or if the capsule is dropped unconsumed.
    It keeps the memory alive until then.
    """
    extents = (ctypes.c_int64 * max(len(shape), 1))(*shape)
    steps = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    strides = (ctypes.c_int64 * max(len(shape), 1))(*steps)
    tensor = _Tensor(
        address,
        _Device(*device),
        len(shape),
        _DataType(dtype.dlpack, dtype.size * 8, 1),
        extents,
        strides,
        0,
    )
    end_dropped_exports()
    managed: _Managed | _Versioned
    if versioned:
        managed = _Versioned(1, 0, number, _delete_versioned, 0, tensor)
    else:
        managed = _Managed(tensor, number, _delete_legacy)
    _exports[number] = _Export(managed, extents, strides, release)
    if _exiting:
        _keep_forever(_exports[number])
    new_capsule = _new(ctypes.addressof(managed), _VERSIONED if versioned else _LEGACY, None)
    _unconsumed_capsules.append((number, new_capsule))
    return new_capsule


def end_dropped_exports() -> None:
    """End the exports whose capsules were dropped before they were consumed."""
    alone = object()  # An object with one reference, for comparison.
    with suppress(IndexError):  # Another thread is sweeping as well.
        for _ in range(len(_unconsumed_capsules)):
            number, one = _unconsumed_capsules.popleft()
            if _is_consumed(one):
                continue  # The consumer calls the deleter.
            # Both are plain local variables. Python 3.14 counts no reference when it reads one, but it
            # counts one when it reads a variable that a nested function uses.
            if sys.getrefcount(one) > sys.getrefcount(alone):
                _unconsumed_capsules.append((number, one))
            else:
                _end_export(number)


def _is_consumed(given: Any) -> bool:
    """Return True if a consumer has taken the tensor of a capsule, and has renamed the capsule."""
    handle = id(given)
    return not (_is_valid(handle, _VERSIONED) or _is_valid(handle, _LEGACY))


def open_capsule(given: Any) -> Tensor:
    """Return the tensor of a capsule, which stays unconsumed and keeps the memory alive."""
    handle = id(given)
    read_only = False
    if _is_valid(handle, _VERSIONED):
        versioned = _Versioned.from_address(_pointer(handle, _VERSIONED))
        if versioned.major != _MAJOR_VERSION:
            theirs = f"{versioned.major}.{versioned.minor}"
            raise InputError(
                f"the tensor has DLPack version {theirs}, and preheat reads version {_MAJOR_VERSION}",
                hint="update the library that gave it, or preheat",
            )
        tensor = versioned.tensor
        read_only = bool(versioned.flags & _READ_ONLY)
    else:
        tensor = _Managed.from_address(_pointer(handle, _LEGACY)).tensor
    return Tensor(
        address=(tensor.data or 0) + tensor.byte_offset,
        device=(tensor.device.type, tensor.device.index),
        dtype=dtype_of_dlpack(tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes),
        shape=tuple(tensor.shape[: tensor.ndim]),
        strides=tuple(tensor.strides[: tensor.ndim]) if tensor.strides else None,
        read_only=read_only,
        owner=given,
    )


def _end_export(number: int | None, exports: dict[int, _Export] = _exports) -> None:
    export = exports.pop(number or 0, None)
    if export is not None:
        export.release()


def _delete(
    form: type[_Managed] | type[_Versioned], end: Callable[[int | None], None], at: int
) -> None:
    end(form.from_address(at).context)


# Consumers call these from C.
_delete_legacy = _Deleter(partial(_delete, _Managed, _end_export))
_delete_versioned = _Deleter(partial(_delete, _Versioned, _end_export))


def export_array(array: Array, stream: int | None, *, versioned: bool) -> Any:
    """Return the array as a DLPack capsule for a consumer that works in `stream`."""
    device = array.buffer.context.device
    uses = array.buffer.uses
    if device.dlpack[0] == ON_HOST or stream == -1:
        handles = []
    else:
        handles = [_LEGACY_STREAM if stream is None else stream]
    number = next(export_numbers)
    exported = uses.exported
    # From here on, no stream gets a right to the memory.
    uses.dlpack_exports[number] = retained_current_streams(device)
    try:
        _export(array, handles, exported=exported)
    except BaseException:
        del uses.dlpack_exports[number]
        raise

    def release() -> None:
        array.buffer.uses.release_export(number, retained_current_streams(device))

    return capsule(
        number, release, array.address, array.shape, array.dtype, device.dlpack, versioned=versioned
    )


def cuda_interface(array: Array) -> dict[str, Any]:
    """Return the `__cuda_array_interface__` of an array in the memory of a GPU."""
    _export_by_interface(array)
    captured = array.buffer.context.active_capture() is not None
    # Nothing can wait for a captured stream.
    stream = None if captured else array.buffer.home.handle or _LEGACY_STREAM
    return {
        "version": 3,
        "shape": array.shape,
        "typestr": array.dtype.typestr,
        "data": (array.address, False),
        "strides": None,
        "stream": stream,
    }


def _export(array: Array, handles: Iterable[int], *, exported: bool) -> None:
    """Let another library use the memory in the streams with these handles."""
    context = array.buffer.context
    capture = context.active_capture()
    if capture is not None:
        capture.add_export(array)
        handles = ()  # The replay of the graph orders this work.
    context.order.export(array.buffer.uses, handles, exported=exported)
    array.buffer.export()


def _export_by_interface(array: Array) -> None:
    """Share the memory as long as it exists, because an array interface has no release.

    The protocol does not name the library that uses the memory. So the current stream of every loaded
    library waits, and so does the stream that the interface names.
    """
    device = array.buffer.context.device
    uses = array.buffer.uses
    streams = [_LEGACY_STREAM, array.buffer.home.handle, *current_streams(device)]
    before = uses.exported_by_interface
    exported = uses.exported
    uses.exported_by_interface = True
    try:
        _export(array, streams, exported=exported)
    except BaseException:
        uses.exported_by_interface = before
        raise


_exiting = False


def _at_exit() -> None:
    """Give the remaining exports a deleter that outlives the interpreter.

    The deleters above end with the interpreter, but consumers may release memory later. Memory that is
    exported at exit stays allocated until the process ends.
    """
    global _exiting
    _exiting = True
    for export in list(_exports.values()):
        _keep_forever(export)


# Some consumers call the deleter without a test for NULL. This one is a C function that ignores its
# argument, has no effect, and can be called at any time.
_no_deleter = _Deleter(ctypes.cast(_api.Py_IsInitialized, ctypes.c_void_p).value or 0)


def _keep_forever(export: _Export) -> None:
    export.managed.deleter = _no_deleter
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(export))


atexit.register(_at_exit)
