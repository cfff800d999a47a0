"""Devices by name: the kinds that are registered, and how a name such as `emulator:1[sm_100]` is read.

A kind of device is registered with a factory, or with the name of a module that is one, which is not
imported before a device of that kind is asked for. `cuda` and `emulator` are registered here; a program
adds a kind of its own with `register`.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, cast

from preheat.config import Config
from preheat.devices.base import Device
from preheat.errors import InputError, did_you_mean

__all__ = ["DeviceFactory", "Offer", "find", "register"]

AUTO = "auto"
_BY_NUMBER = "cuda"  # what a bare number means


class Offer(NamedTuple):
    """A device that can be opened. Equal names mean the same device, which is opened once."""

    name: str
    open: Callable[[], Device]


class DeviceFactory(Protocol):
    """Opens devices of one kind. A module that has these functions is a factory, too."""

    def available(self) -> bool:
        """Return True when this process can open a device of this kind. `auto` asks for that."""

    def offer(self, index: int, settings: Mapping[str, Any], config: Config) -> Offer:
        """Describe the device with this number; `InputError` for a setting that it does not have.

        `settings` are what the caller of `preheat.device` asked for beside the name. `config` is what
        the environment says.
        """


# In the order in which `auto` tries them.
_factories: dict[str, DeviceFactory | str] = {
    "cuda": "preheat.devices.cuda.factory",
    "emulator": "preheat.devices.emulator.factory",
}


def register(kind: str, factory: DeviceFactory | str) -> None:
    """Let `preheat.device(kind)` open devices of a factory, or of the module with this name."""
    if not _KIND.fullmatch(kind) or kind == AUTO:
        raise InputError(
            f"{kind!r} cannot name a kind of device", hint="use a plain word, such as cuda"
        )
    _factories[kind] = factory


def find(which: str | int, settings: Mapping[str, Any], config: Config) -> Offer:
    """Return the device that `which` means. `settings` count more than those in its name."""
    kind, index, named = _parse(which)
    if kind == AUTO:
        kind = next(kind for kind in _factories if _factory(kind).available())
    return _factory(kind).offer(index, {**named, **settings}, config)


def _factory(kind: str) -> DeviceFactory:
    found = _factories[kind]
    return cast(DeviceFactory, importlib.import_module(found)) if isinstance(found, str) else found


_KIND = re.compile(r"[A-Za-z_]\w*")
_NAME = re.compile(
    rf"(?P<kind>{_KIND.pattern})(:(?P<number>\d+))?"
    r"(\[(?P<settings>((sm_\w+|patience=\d+|schedule=-?\d+|sanitize)(,|(?=\])))*)\])?"
)


def _parse(which: str | int) -> tuple[str, int, dict[str, Any]]:
    """Split the name of a device into its kind, its number and the settings in brackets."""
    if isinstance(which, int) and not isinstance(which, bool):
        return _BY_NUMBER, which, {}
    found = _NAME.fullmatch(str(which).strip())
    if found is None or not _known(found["kind"], found["number"]):
        kind = str(which).partition(":")[0].strip()
        examples = ", ".join(f"{name}, {name}:1" for name in _factories)
        hint = did_you_mean(kind, (*_factories, AUTO)) or f"use {examples} or {AUTO}"
        raise InputError(f"{which!r} is not a device", hint=hint)
    return found["kind"], int(found["number"] or 0), _settings(found["settings"] or "")


def _known(kind: str, number: str | None) -> bool:
    return kind in _factories or (kind == AUTO and number is None)


def _settings(text: str) -> dict[str, Any]:
    """Read settings as the name of a device has them: `sm_100,patience=7,sanitize`."""
    settings: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        setting, equals, value = part.partition("=")
        if setting.startswith("sm_"):
            settings["arch"] = setting
        else:
            settings[setting] = int(value) if equals else True
    return settings
