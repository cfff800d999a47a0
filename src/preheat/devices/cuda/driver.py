"""Calls of the CUDA driver by name, and the errors that its status codes mean.

`retain` keeps objects alive as long as a graph of another library, by user objects of the driver. The
driver calls the destructor of a user object at any time, in a thread that may call neither CUDA nor
Python. The destructor is therefore `sem_post` of the C library: it increments a semaphore, and the next
call of `collect` drops the owner.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from preheat.errors import DeviceError, DriverError, InvalidCodeError, NoGpuError, OutOfMemoryError
from preheat.model.config import environ
from preheat.process.locks import no_fork

__all__ = [
    "NOT_CURRENT",
    "call",
    "collect",
    "devices",
    "error_of",
    "function_address",
    "library",
    "relaxed_capture_mode",
    "retain",
    "without_gpu",
]

_PER_THREAD = "CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM"  # a setting of the bindings
_VERSION = 12000  # of CUDA: the functions have the types that they had there
#: The status of work in a default stream while another context than its kernel's is current.
NOT_CURRENT = (201, 400)
_OUT_OF_MEMORY = 2
_INVALID_CODE = {
    200,  # INVALID_IMAGE
    209,  # NO_BINARY_FOR_GPU
    218,  # INVALID_PTX
    300,  # INVALID_SOURCE
}
#: After one of these every later call in the context fails as well.
_STICKY = {
    214,  # ECC_UNCORRECTABLE
    219,  # INVALID_GRAPHICS_CONTEXT
    220,  # NVLINK_UNCORRECTABLE
    226,  # CONTAINED
    700,  # ILLEGAL_ADDRESS
    702,  # LAUNCH_TIMEOUT
    *range(709, 711),  # CONTEXT_IS_DESTROYED, ASSERT
    *range(714, 720),  # HARDWARE_STACK_ERROR … LAUNCH_FAILED
    721,  # TENSOR_MEMORY_LEAK
    999,  # UNKNOWN
}
_HINTS = {
    3: "in a child of a process that used the GPU it cannot be used: start it by 'spawn'",
    100: "is CUDA_VISIBLE_DEVICES set to something that hides the GPU?",
    222: "the PTX is newer than this driver: update the driver, or build a cubin for this GPU",
    700: "run with PREHEAT_BLOCKING=1 to learn which kernel it was, or on the emulator",
    803: "the driver is older than the CUDA libraries: update the driver",
    804: "the driver is older than the CUDA libraries: update the driver",
}


class _LossListener(Protocol):
    on_loss: Callable[[DeviceError], None]


#: Every GPU in use. A sticky error on one ends them all: the driver does not recover within a process.
devices: weakref.WeakSet[_LossListener] = weakref.WeakSet()


def without_gpu() -> str:
    """Return the hint for a machine without a GPU."""
    named = environ().get("PREHEAT_DEVICE", "").strip()
    auto = "preheat.device('auto')"
    if named and not named.startswith(("auto", "emulator")):  # Then 'auto' means this device as well.
        auto = f"PREHEAT_DEVICE=auto, in the place of {named},"
    return (
        "preheat.device('emulator') or PREHEAT_DEVICE=emulator runs kernels on the CPU; "
        f"{auto} uses the GPU if there is one, and otherwise the emulator"
    )


@functools.cache
def library() -> Any:
    """Return the bindings with the driver initialised; `NoGpuError` says what is missing."""
    try:
        with no_fork:
            from cuda.bindings import driver
    except ImportError as missing:
        message = f"no GPU: the Python package cuda-bindings is not usable: {missing}"
        raise NoGpuError(message, hint=without_gpu()) from None
    try:
        (status,) = driver.cuInit(0)
    except RuntimeError as missing:  # The bindings cannot find libcuda.so.1.
        raise NoGpuError(
            f"no GPU: the NVIDIA driver (libcuda.so.1) was not found: {missing}", hint=without_gpu()
        ) from None
    if status:
        error = _error(driver, "cuInit", status)
        raise NoGpuError(f"no GPU: {error}", hint=error.hint or without_gpu())
    return driver


def call(name: str, *args: Any) -> Any:
    """Call the driver and return its result without the status; raise the error of the status."""
    cu = library()
    result = getattr(cu, name)(*args)
    if result[0]:
        raise _error(cu, name, result[0])
    return result[1] if len(result) == 2 else result[1:]


@functools.cache
def function_address(name: str, version: int = _VERSION) -> int:
    """Return the address of a function of the driver, the one that the bindings call as well.

    `version` is the version of CUDA whose types the function has. An older driver may lack it: 0.
    """
    cu = library()
    flags = cu.CUdriverProcAddress_flags
    per_thread = environ().get(_PER_THREAD, "0") not in ("", "0")
    which = (
        "CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM" if per_thread else "CU_GET_PROC_ADDRESS_DEFAULT"
    )
    address, _ = call("cuGetProcAddress", name.encode(), version, int(getattr(flags, which)))
    return int(address)


@contextmanager
def relaxed_capture_mode() -> Iterator[None]:
    """Let this thread make calls that would invalidate captures in "global" mode.

    It is for calls that do not concern those captures: queries, waits and memory of streams that are
    not captured. What preheat's own captures permit is checked before, by `Context.refuse_in_capture`.
    """
    mode = call("cuThreadExchangeStreamCaptureMode", _relax_capture_mode())
    try:
        yield
    finally:
        call("cuThreadExchangeStreamCaptureMode", mode)


@functools.cache
def _relax_capture_mode() -> Any:
    return library().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED


def error_of(name: str, status: int) -> DriverError:
    """Return the error for the status of a call."""
    return _error(library(), name, status)


def _error(cu: Any, name: str, status: int) -> DriverError:
    status = cu.CUresult(status)
    title, meaning = (
        (text.decode() if text else "unknown")
        for text in (cu.cuGetErrorName(status)[1], cu.cuGetErrorString(status)[1])
    )
    code = int(status)
    kind = DriverError
    if code in _INVALID_CODE:
        kind = InvalidCodeError
    elif code == _OUT_OF_MEMORY:
        kind = OutOfMemoryError
    error = kind(name, code, title, meaning, sticky=code in _STICKY, hint=_HINTS.get(code))
    if error.sticky:
        for device in list(devices):
            device.on_loss(error)
    return error


_SEMAPHORE_BYTES = 64  # sem_t has 32 on Linux
_retained: deque[tuple[Any, object]] = deque()  # semaphores, and owners to drop once posted


@functools.cache
def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def retain(graph: Any, owner: object) -> None:
    """Keep `owner` alive as long as `graph`, which may be under capture, or an executable of it."""
    cu = library()
    semaphore = ctypes.create_string_buffer(_SEMAPHORE_BYTES)
    if _libc().sem_init(semaphore, 0, 0):
        raise OSError(ctypes.get_errno(), "sem_init failed")
    post = ctypes.cast(_libc().sem_post, ctypes.c_void_p).value
    asynchronous = cu.CUuserObject_flags.CU_USER_OBJECT_NO_DESTRUCTOR_SYNC
    made = call("cuUserObjectCreate", ctypes.addressof(semaphore), cu.CUhostFn(post), 1, asynchronous)
    # The driver may post it at any time from here on, even after the interpreter has ended.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(semaphore))
    _retained.append((semaphore, owner))
    move = cu.CUuserObjectRetain_flags.CU_GRAPH_USER_OBJECT_MOVE
    call("cuGraphRetainUserObject", graph, made, 1, move)


def collect() -> None:
    """Drop the owners whose graphs are destroyed."""
    for _ in range(len(_retained)):
        semaphore, owner = _retained.popleft()
        if _libc().sem_trywait(semaphore):  # It is not posted yet.
            _retained.append((semaphore, owner))
        else:
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(semaphore))
