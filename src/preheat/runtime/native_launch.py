"""Launches by the native core: what `preheat.runtime.fast_launch` generates, as one C function."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from preheat import native
from preheat.artifact import Parameter
from preheat.callsite import call_site, outside_files
from preheat.devices.base import ON_HOST
from preheat.dtypes import DType
from preheat.runtime.arguments import ParamSpec, param_specs
from preheat.runtime.array import Array
from preheat.runtime.context import Context
from preheat.runtime.launch import Launch
from preheat.runtime.memory import Buffer
from preheat.runtime.operands import exchange_apis
from preheat.runtime.uses import Uses

__all__ = ["native_launcher"]


def native_launcher(launch: Launch, fallback: Callable[..., None]) -> Callable[..., None] | None:
    """Return the native function for a launch, or None if the launch has too many parameters.

    It takes arrays of preheat, Python numbers, and tensors of torch since 2.10, which offers the C
    functions of DLPack 1.3. `fallback` gets all other calls, and those with tensors of the host.
    """
    signature = launch.signature
    size = signature.layout.size
    many = len(signature.params) > native.core.MOST_PARAMS
    if many or size > native.core.MOST_BYTES:
        return None
    context = launch.context
    stream = launch.stream or context.stream
    takes_tensors = launch.stream is None and context.device.dlpack[0] != ON_HOST
    references = (  # in the order of the fields of `Launcher` in `_native.c`
        launch, fallback, launch.prepared, launch.raise_for_status, launch.raise_in_capture,
        context, context.thread_state, launch.submits,
        stream, stream.id, stream.handle,
        exchange_apis if takes_tensors else {},
        call_site, outside_files,
        Context, Array, Uses, Buffer,
    )  # fmt: skip
    params, untyped = _described_params(signature.parameters)
    records = launch.stream is None and not untyped
    launcher: Callable[..., None] = native.core.Launcher(
        references, context.device.dlpack, records, size, params
    )
    return launcher


@lru_cache(maxsize=1024)
def _described_params(parameters: tuple[Parameter, ...]) -> tuple[tuple[tuple[Any, ...], ...], bool]:
    """Return the parameters as the native core takes them, and True if one of them is untyped."""
    params = param_specs(parameters)
    return tuple(map(_described, params)), any(param.untyped for param in params)


def _described(param: ParamSpec) -> tuple[Any, ...]:
    """Return a parameter in the order of the fields of `Param` in `_native.c`."""
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
