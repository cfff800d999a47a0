"""Launches of kernels."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from preheat.devices.base import DEFAULT_STREAMS, Geometry
from preheat.driver.calls import CallError, entry
from preheat.driver.configs import read_config
from preheat.driver.devices import PROCESSORS
from preheat.driver.functions import max_dynamic_shared
from preheat.driver.modules import Function, function_of
from preheat.driver.raw import get
from preheat.driver.status import (
    COOPERATIVE_LAUNCH_TOO_LARGE,
    INVALID_CONTEXT,
    INVALID_HANDLE,
    INVALID_VALUE,
)
from preheat.driver.streams import Stream, stream_of
from preheat.errors import EmulatorFault, UnsupportedInstructionError

if TYPE_CHECKING:
    from preheat.driver.driver import Driver
    from preheat.emulator.launch import Launch

__all__ = ["asynchronous", "parameter_pointers", "prepare_launch"]

_SHARED_UNIT = 16  # The allocation of shared memory is larger, and compilers rely on this much.
_MAX_PREPARED = 64  # launches of a function
_END, _BUFFER_POINTER, _BUFFER_SIZE = 0, 1, 2  # of the list `extra`


def prepare_launch(driver: Driver, function: Function, geometry: Geometry, stream: Stream) -> Launch:
    """Return a launch that can be submitted; `CallError` for one that a GPU would refuse."""
    handle = stream.emulated.handle
    found = function.launches.get((geometry, handle))
    if found is None:
        _check(function, geometry)
        if len(function.launches) >= _MAX_PREPARED:
            function.launches.clear()
        found = function.emulated.prepare(geometry, stream.emulated, shared_unit=_SHARED_UNIT)
        function.launches[geometry, handle] = found
        driver.kernels[found] = function
    return found


def _check(function: Function, geometry: Geometry) -> None:
    limits, bounds = function.context.gpu.emulator.limits, function.emulated.bounds
    threads = math.prod(geometry.block)
    if not 0 < threads <= bounds.threads or not all(geometry.grid):
        raise CallError(INVALID_VALUE)
    for size, limit in zip(
        (*geometry.grid, *geometry.block), (*limits.grid, *limits.block), strict=True
    ):
        if size > limit:
            raise CallError(INVALID_VALUE)
    if geometry.shared > max_dynamic_shared(function):
        raise CallError(INVALID_VALUE)
    if geometry.cooperative:
        resident = function.emulated.occupancy(threads, geometry.shared).blocks
        if math.prod(geometry.grid) > resident * PROCESSORS:
            raise CallError(COOPERATIVE_LAUNCH_TOO_LARGE)


def parameter_pointers(function: Function, parameters: int, extra: int) -> tuple[int, object]:
    """Return the address of the pointers to the parameters, and what keeps them.

    With `extra` the program gives one buffer with all of them.
    """
    if parameters or not function.emulated.parameters:
        return parameters, None
    if not extra:
        raise CallError(INVALID_VALUE)
    buffer = 0
    while (what := get(extra)) != _END:
        if what == _BUFFER_POINTER:
            buffer = get(extra + 8)
        elif what != _BUFFER_SIZE:
            raise CallError(INVALID_VALUE)
        extra += 16
    if not buffer:
        raise CallError(INVALID_VALUE)
    offsets = [each.offset for each in function.emulated.parameters]
    pointers = (ctypes.c_uint64 * len(offsets))(*(buffer + offset for offset in offsets))
    return ctypes.addressof(pointers), pointers


@contextmanager
def asynchronous(driver: Driver, stream: Stream) -> Iterator[None]:
    """Let a launch succeed although its kernel fails: later calls of the context fail.

    With CUDA_LAUNCH_BLOCKING=1 the launch waits for its kernels and fails as they do.
    """
    try:
        yield
    except UnsupportedInstructionError:
        raise
    except EmulatorFault as fault:
        if driver.settings.blocking:
            raise
        driver.report_fault(fault)
    else:
        if driver.settings.blocking and stream.emulated.branch is None:
            stream.emulated.synchronize()


def _launch(
    driver: Driver, handle: int, geometry: Geometry, stream: int, parameters: int, extra: int
) -> None:
    function = function_of(driver, handle)
    if stream in DEFAULT_STREAMS and driver.current() is not function.context:
        raise CallError(INVALID_HANDLE)
    where = stream_of(driver, stream)
    if where.context is not function.context:
        raise CallError(INVALID_CONTEXT)
    launch = prepare_launch(driver, function, geometry, where)
    pointers, kept = parameter_pointers(function, parameters, extra)
    with asynchronous(driver, where):
        launch(pointers, 0)
    del kept  # The launch has read them.


@entry("cuLaunchKernel", stream=8)
def _kernel(
    driver: Driver, function: int, gx: int, gy: int, gz: int, bx: int, by: int, bz: int, shared: int,
    stream: int, parameters: int, extra: int,
) -> None:  # fmt: skip
    geometry = Geometry((gx, gy, gz), (bx, by, bz), shared)
    _launch(driver, function, geometry, stream, parameters, extra)


@entry("cuLaunchCooperativeKernel", stream=8)
def _cooperative(
    driver: Driver, function: int, gx: int, gy: int, gz: int, bx: int, by: int, bz: int, shared: int,
    stream: int, parameters: int,
) -> None:  # fmt: skip
    geometry = Geometry((gx, gy, gz), (bx, by, bz), shared, cooperative=True)
    _launch(driver, function, geometry, stream, parameters, 0)


@entry("cuLaunchKernelEx", default_stream=True)
def _with_config(
    driver: Driver, config: int, function: int, parameters: int, extra: int, *, stream: int = 0
) -> None:
    geometry, named = read_config(config)
    _launch(driver, function, geometry, named or stream, parameters, extra)
