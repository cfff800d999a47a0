"""Launches by the native core: what `preheat.runtime.fast_launch` generates, as one C function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from preheat import native
from preheat.callsite import call_site, outside_files
from preheat.runtime.arguments import ParamSpec
from preheat.runtime.array import Array
from preheat.runtime.launch import Launch
from preheat.runtime.libraries import LIBRARIES, Library
from preheat.runtime.memory import Buffer
from preheat.runtime.uses import Uses

__all__ = ["native_launcher"]


def native_launcher(launch: Launch, fallback: Callable[..., None]) -> Callable[..., None] | None:
    """Return the native function for a launch, or None if the launch has too many parameters.

    It takes arrays of preheat, tensors of torch, and Python numbers. `fallback` gets all other calls.
    """
    signature = launch.signature
    many = len(signature.params) > native.core.MOST_PARAMS
    if many or signature.layout.size > native.core.MOST_BYTES:
        return None
    context = launch.context
    stream = launch.stream or context.stream
    library = _library(launch)
    launcher: Callable[..., None] = native.core.Launcher(
        launch=launch,
        fallback=fallback,
        prepare=launch.prepared,
        raise_for_status=launch.raise_for_status,
        raise_in_capture=launch.raise_in_capture,
        context=context,
        thread_state=context.thread_state,
        submits=launch.submits,
        stream=stream,
        stream_id=stream.id,
        stream_handle=stream.handle,
        library=library,
        index=context.device.dlpack[1],
        call_site=call_site,
        outside_files=outside_files,
        array_type=Array,
        uses_type=Uses,
        buffer_type=Buffer,
        records=launch.stream is None and not any(param.untyped for param in signature.params),
        size=signature.layout.size,
        params=tuple(_described(param, library) for param in signature.params),
    )
    return launcher


def _library(launch: Launch) -> Library | None:
    """Return the library with the interface of torch on this device, unless a stream was named."""
    if launch.stream is not None:
        return None
    where = launch.context.device.dlpack[0]
    fits = (each for each in LIBRARIES.values() if (each.api, each.device_type) == ("torch", where))
    return next(fits, None)


def _described(param: ParamSpec, library: Library | None) -> tuple[Any, ...]:
    """Return a parameter in the order of the fields of `Param` in `_native.c`."""
    dtypes = param.dtypes
    elements = None
    if dtypes is not None and library is not None:
        elements = tuple(library.elements[dtype] for dtype in dtypes)
    return (
        param.parameter.offset,
        "" if param.value is None else param.value.code,
        param.value is not None and param.value.boolean,
        param.pointer,
        param.writes,
        dtypes is None or any(dtype.complex for dtype in dtypes),
        dtypes,
        elements,
    )
