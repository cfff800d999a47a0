"""Opens emulators for `preheat.devices.registry`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from preheat.devices.registry import DeviceDescription
from preheat.model.config import Config
from preheat.process.lazy import LazyModule

if TYPE_CHECKING:
    from preheat.emulator import device, module
    from preheat.emulator.device import EmulatorDevice
else:
    # They need NumPy, and a program may want a GPU.
    device = LazyModule("preheat.emulator.device")
    module = LazyModule("preheat.emulator.module")

__all__ = ["available", "describe", "parse_setting"]

_SETTING = re.compile(
    r"(?P<arch>sm_\w+)|(?P<name>patience|schedule)=(?P<value>-?\d+)|sanitize|host_arrays"
)


def available() -> bool:
    """Return True: the emulator needs a CPU alone."""
    return True


def parse_setting(text: str) -> tuple[str, Any] | None:
    """Parse one setting in the name of an emulator, as in `emulator[sm_100,patience=7,sanitize]`."""
    match = _SETTING.fullmatch(text)
    if match is None:
        return None
    if match["arch"]:
        return "arch", text
    return (match["name"], int(match["value"])) if match["name"] else (text, True)


def describe(index: int, settings: Mapping[str, Any], config: Config) -> DeviceDescription:
    """Describe an emulator. Emulators with other settings are other devices, and have other names."""
    settings = {"sanitize": config.emulator_sanitize, **settings}
    name = device.device_name(index, **settings)
    return DeviceDescription(name, partial(_open, index, **settings))


def _open(index: int, **settings: Any) -> EmulatorDevice:
    """Open an emulator, and import what loads kernels, so that the first kernel need not wait."""
    module.EmulatorModule  # noqa: B018
    return device.EmulatorDevice(index, **settings)
