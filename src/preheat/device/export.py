"""Exports of array memory to other libraries, by DLPack and the array interface of CUDA."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from preheat.device import dlpack
from preheat.device.base import LEGACY_STREAMS, ON_HOST
from preheat.device.libraries import current_streams, retained_current_streams

if TYPE_CHECKING:
    from preheat.device.array import Array

__all__ = ["capsule", "cuda_interface"]

_LEGACY_STREAM = LEGACY_STREAMS[-1]  # The meaning of stream=None in DLPack.


def capsule(array: Array, stream: int | None, *, versioned: bool) -> Any:
    """Return the array as a DLPack capsule for a consumer that works in `stream`."""
    device = array.buffer.context.device
    uses = array.buffer.uses
    if device.dlpack[0] == ON_HOST or stream == -1:
        handles = []
    else:
        handles = [_LEGACY_STREAM if stream is None else stream]
    number = next(dlpack.export_numbers)
    shared = uses.shared
    # From here on, no stream gets a right to the memory.
    uses.dlpack_exports[number] = retained_current_streams(device)
    try:
        _export(array, handles, shared=shared)
    except BaseException:
        del uses.dlpack_exports[number]
        raise

    def release() -> None:
        array.buffer.uses.release_export(number, retained_current_streams(device))

    return dlpack.capsule(
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


def _export(array: Array, handles: Iterable[int], *, shared: bool) -> None:
    """Let another library use the memory in the streams with these handles."""
    context = array.buffer.context
    capture = context.active_capture()
    if capture is not None:
        capture.add_export(array)
        handles = ()  # The replay of the graph orders this work.
    context.order.export(array.buffer.uses, handles, shared=shared)
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
    shared = uses.shared
    uses.exported_by_interface = True
    try:
        _export(array, streams, shared=shared)
    except BaseException:
        uses.exported_by_interface = before
        raise
