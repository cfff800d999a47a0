"""Where a raw kernel runs: the device of its arguments, or CuPy's current device and stream."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from preheat.config import environ
from preheat.devices.base import ON_GPU
from preheat.gpu import Gpu, device
from preheat.runtime.array import Array
from preheat.runtime.context import Context
from preheat.runtime.operands import Strided

__all__ = ["Place", "current_stream", "gpu_at", "place_of"]

#: The context of an array of preheat, the number of CuPy's current device, or None for the default.
Place = Context | int | None


def place_of(args: Iterable[Any] = ()) -> Place:
    """Return where a launch with these arguments runs."""
    for given in args:
        array = given.array if isinstance(given, Strided) else given
        if isinstance(array, Array):
            return array.buffer.context
    cupy = sys.modules.get("cupy")
    # A program that is tried on the emulator may import CuPy where there is no GPU.
    if cupy is None or environ().get("PREHEAT_DEVICE", "").strip().startswith("emulator"):
        return None
    index: int = cupy.cuda.runtime.getDevice()
    return index


def gpu_at(place: Place) -> Gpu:
    """Return the device of a place."""
    if isinstance(place, Context):
        return device(place.device.name)
    return device(place)


def current_stream(gpu: Context) -> Any:
    """Return CuPy's current stream for a launch without tensors of CuPy; None if it has none."""
    cupy = sys.modules.get("cupy")
    on_gpu = gpu.device.dlpack[0] == ON_GPU
    return cupy.cuda.get_current_stream() if cupy is not None and on_gpu else None
