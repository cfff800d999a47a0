"""Devices by name: the kinds that are registered, and how a name such as `emulator:1[sm_100]` is read.

A kind of device is registered with a factory, or with the name of a module that is the factory. Such a
module is imported when a device of that kind is first requested. `cuda` and `emulator` are registered
here. A program adds its own kind with `register`.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, cast

from preheat.devices.base import Device
from preheat.errors import InputError, did_you_mean
from preheat.model.config import Config

__all__ = ["DeviceDescription", "DeviceFactory", "find", "register"]

AUTO = "auto"
_BY_NUMBER = "cuda"  # what a bare number means


class DeviceDescription(NamedTuple):
    """A device that can be opened. Equal names mean the same device, which is opened once."""

    name: str
    open: Callable[[], Device]


class DeviceFactory(Protocol):
    """Opens devices of one kind. A module with these functions is also a factory."""

    def available(self) -> bool:
        """Return True when this process can open a device of this kind. `auto` asks for that."""

    def parse_setting(self, text: str) -> tuple[str, Any] | None:
        """Return name and value of a setting in the brackets of a device's name, such as `sm_100`.

        None means that devices of this kind have no such setting.
        """

    def describe(self, index: int, settings: Mapping[str, Any], config: Config) -> DeviceDescription:
        """Describe the device with this number; `InputError` for a setting that it does not have.

        `settings` are those in the name of the device and the keyword arguments of `preheat.device`.
        `config` is what the environment says.
        """


# In the order in which `auto` tries them.
_factories: dict[str, DeviceFactory | str] = {
    "cuda": "preheat.devices.cuda.factory",
    "emulator": "preheat.emulator.factory",
}


def register(kind: str, factory: DeviceFactory | str) -> None:
    """Let `preheat.device(kind)` open devices of a factory, or of the module with this name."""
    if not _KIND.fullmatch(kind) or kind == AUTO:
        raise InputError(
            f"{kind!r} cannot name a kind of device", hint="use a plain word, such as cuda"
        )
    _factories[kind] = factory


def find(which: str | int | None, settings: Mapping[str, Any], config: Config) -> DeviceDescription:
    """Return the device that `which` means. `settings` count more than those in its name.

    None and `auto` mean the device that `config` names. If it names none, None means the GPU.
    """
    shown = repr(which)
    if config.device is not None and _environment_chooses(which):
        which, shown = config.device, f"PREHEAT_DEVICE={config.device!r}"
    kind, index, texts = _parse(_BY_NUMBER if which is None else which, shown)
    if kind == AUTO:
        kind = next(kind for kind in _factories if _factory(kind).available())
    factory = _factory(kind)
    named: dict[str, Any] = {}
    for text in texts:
        setting = factory.parse_setting(text)
        if setting is None:
            raise _no_device(which, shown)
        named[setting[0]] = setting[1]
    return factory.describe(index, {**named, **settings}, config)


def _environment_chooses(which: str | int | None) -> bool:
    return which is None or (isinstance(which, str) and which.strip() == AUTO)


def _factory(kind: str) -> DeviceFactory:
    factory = _factories[kind]
    if isinstance(factory, str):
        return cast(DeviceFactory, importlib.import_module(factory))
    return factory


_KIND = re.compile(r"[A-Za-z_]\w*")
_NAME = re.compile(rf"(?P<kind>{_KIND.pattern})(:(?P<number>\d+))?(\[(?P<settings>[^\[\]]*)\])?")


def _parse(which: str | int, shown: str) -> tuple[str, int, list[str]]:
    """Split the name of a device into its kind, its number and the settings in brackets.

    The error for a name of no device has `shown` in it.
    """
    if isinstance(which, int) and not isinstance(which, bool):
        return _BY_NUMBER, which, []
    match = _NAME.fullmatch(str(which).strip())
    if match is None or match["kind"] not in (*_factories, AUTO):
        raise _no_device(which, shown)
    if match["kind"] == AUTO and match["number"] is not None:
        raise _no_device(which, shown)
    texts = (match["settings"] or "").split(",")
    return match["kind"], int(match["number"] or 0), [text for text in texts if text]


def _no_device(which: object, shown: str) -> InputError:
    kind = str(which).partition(":")[0].strip()
    examples = ", ".join(f"{name}, {name}:1" for name in _factories)
    hint = did_you_mean(kind, (*_factories, AUTO)) or f"use {examples} or {AUTO}"
    return InputError(f"{shown} is not a device", hint=hint)
