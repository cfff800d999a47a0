"""DLPack export and import: the exchange of tensors between libraries without a copy."""

from __future__ import annotations

import atexit
import ctypes
import itertools
import math
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from preheat.errors import InputError
from preheat.model.dtypes import DType, dtype_of_dlpack

__all__ = ["Tensor", "capsule", "end_dropped_exports", "export_numbers", "open_capsule"]


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


_LEGACY = b"dltensor"
_VERSIONED = b"dltensor_versioned"
_READ_ONLY = 1
_MAJOR = 1  # the version of the protocol
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
        if versioned.major != _MAJOR:
            theirs = f"{versioned.major}.{versioned.minor}"
            raise InputError(
                f"the tensor has DLPack version {theirs}, and preheat reads version {_MAJOR}",
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
