"""Opens emulators for `preheat.devices.registry`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from preheat.config import Config
from preheat.devices.registry import Offer

__all__ = ["available", "offer"]


def available() -> bool:
    """Return True: the emulator needs a CPU alone."""
    return True


def offer(index: int, settings: Mapping[str, Any], config: Config) -> Offer:
    """Describe an emulator. Emulators with other settings are other devices, and have other names."""
    from preheat.devices.emulator.device import EmulatorDevice, device_name

    settings = {"sanitize": config.emulator_sanitize, **settings}
    return Offer(device_name(index, **settings), partial(EmulatorDevice, index, **settings))
