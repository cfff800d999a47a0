"""Launches by the native core: what `Launch.run` does for most arguments, as one C function."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from preheat import native
from preheat.devices.arguments import ParamSpec, param_specs
from preheat.devices.array import Array
from preheat.devices.base import ON_HOST
from preheat.devices.context import Context
from preheat.devices.launch import Launch
from preheat.devices.memory import Buffer
from preheat.devices.operands import native_readers
from preheat.devices.uses import Uses
from preheat.model.artifact import Parameter
from preheat.model.dtypes import DType
from preheat.process.callsite import call_site, is_user_file

__all__ = ["make_launcher"]


_FORMATS = "bBhHiIqQfd"  # the `struct` formats of parameters that the native core stores


def make_launcher(launch: Launch) -> Callable[..., None]:
    """Return the native function for a launch; without one, the launch itself.

    The function takes arrays of preheat, Python numbers, tensors of torch since 2.10, which offers the
    C functions of DLPack 1.3, and arrays of CuPy. It passes all other calls to the launch.
    """
    if native.core is None or not _is_supported(launch):
        return launch
    signature = launch.signature
    context = launch.context
    stream = launch.stream or context.stream
    takes_tensors = launch.stream is None and context.device.dlpack[0] != ON_HOST
    references = (  # in the order of the fields of `Launcher` in `native/core.c`
        launch, launch.prepare, launch.raise_for_status, launch.raise_in_capture,
        context, context.thread_state, launch.submits,
        stream, stream.id, stream.handle,
        native_readers if takes_tensors else {},
        call_site, is_user_file,
        Context, Array, Uses, Buffer,
    )  # fmt: skip
    params, untyped = _describe_params(signature.parameters)
    records = launch.stream is None and not untyped
    launcher: Callable[..., None] = native.core.Launcher(
        references, context.device.dlpack, records, signature.layout.size, params
    )
    return launcher


def _is_supported(launch: Launch) -> bool:
    """Return True if the native core can make such a launch with arguments that fit."""
    # In a stream of another library, a mark must follow every use of an array: see `Timeline`.
    in_own_stream = launch.stream is None or launch.context.order.owns(launch.stream)
    signature = launch.signature
    few = len(signature.params) <= native.core.MAX_PARAMS
    small = signature.layout.size <= native.core.MAX_BYTES
    plain = in_own_stream and not launch.blocking and few and small
    return plain and _can_store(signature.parameters)


@lru_cache(maxsize=1024)
def _can_store(parameters: tuple[Parameter, ...]) -> bool:
    return all(param.format in _FORMATS for param in param_specs(parameters))


@lru_cache(maxsize=1024)
def _describe_params(parameters: tuple[Parameter, ...]) -> tuple[tuple[tuple[Any, ...], ...], bool]:
    """Return the parameters as the native core takes them, and True if one of them is untyped."""
    params = param_specs(parameters)
    return tuple(map(_describe, params)), any(param.untyped for param in params)


def _describe(param: ParamSpec) -> tuple[Any, ...]:
    """Return a parameter in the order of the fields of `Param` in `native/core.c`."""
    dtypes = param.dtypes or ()
    return (
        param.parameter.offset,
        "" if param.value is None else param.value.code,
        param.value is not None and param.value.boolean,
        param.pointer,
        param.writes,
        not dtypes or any(dtype.complex for dtype in dtypes),
        tuple((dtype, _dlpack_type(dtype)) for dtype in dtypes),
    )


def _dlpack_type(dtype: DType) -> int:
    """Return a `DLDataType` as a number: the code, the bits and the lanes, from the lowest byte."""
    return dtype.dlpack | dtype.size * 8 << 8 | 1 << 16
