"""Opens GPUs for `preheat.devices.registry`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from preheat.devices.registry import DeviceDescription
from preheat.errors import InputError, NoGpuError
from preheat.model.config import Config
from preheat.process.lazy import LazyModule

if TYPE_CHECKING:
    from preheat.devices.cuda import device as cuda_device
else:
    cuda_device = LazyModule("preheat.devices.cuda.device")  # A process without a GPU does not need it.

__all__ = ["available", "describe", "parse_setting"]


def available() -> bool:
    """Return True when the driver sees a GPU."""
    try:
        return cuda_device.count() > 0
    except NoGpuError:
        return False


def parse_setting(text: str) -> None:
    """Return None: a GPU has no settings."""
    del text


def describe(index: int, settings: Mapping[str, Any], config: Config) -> DeviceDescription:
    """Describe the GPU with this number, which has no settings."""
    del config
    if settings.get("sanitize"):
        raise InputError(
            "sanitize belongs to the emulator", hint="on a GPU, run the program in compute-sanitizer"
        )
    if settings.get("host_arrays"):
        raise InputError(
            "host_arrays belongs to the emulator: kernels on a GPU cannot use arrays of the host",
            hint="pass copies on the device: gpu.array(x)",
        )
    if set(settings) - {"sanitize", "host_arrays"}:
        raise InputError("arch, patience and schedule belong to the emulator: a GPU has its own")
    return DeviceDescription(f"cuda:{index}", partial(cuda_device.CudaDevice, index))
