"""The number of Python calls that something makes, which does not depend on the machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

__all__ = ["Walk", "count_calls", "walk"]

_PREHEAT = f"{os.sep}preheat{os.sep}"
_EMULATOR = f"{_PREHEAT}emulator{os.sep}"
_CUDA = f"{_PREHEAT}devices{os.sep}cuda{os.sep}"


def count_calls(act: Callable[[], object]) -> int:
    """Return the number of Python calls that `act` makes outside the code of one kind of device."""
    calls = 0
    inside = 0

    def see(frame: Any, event: str, _: object) -> None:
        nonlocal calls, inside
        name = frame.f_code.co_filename
        on_device = _EMULATOR in name or _CUDA in name
        if event == "call":
            inside += on_device
            calls += not inside
        elif event == "return":
            inside -= on_device

    _profile(act, see)
    return calls - 1  # without `act` itself


class Walk(NamedTuple):
    """What a reader passes who follows a call through preheat.

    The functions of the emulator do not count, but what they call does. Neither does anything that a
    module does while it is imported.
    """

    calls: int
    files: int
    frames: int  # functions of preheat on the stack when a request is last written to a compiler


def walk(act: Callable[[], object]) -> Walk:
    """Call `act`, and return what it passes in this thread."""
    calls = 0
    files = set()
    frames = 0
    imports = 0

    def see(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls, frames, imports
        name = frame.f_code.co_filename
        is_module = frame.f_code.co_name == "<module>"
        if event == "call":
            imports += is_module
            if _counts(name) and not imports:
                calls += 1
                files.add(name)
        elif event == "return":
            imports -= is_module
        elif event == "c_call" and argument is os.write and name.endswith("toolchain/process.py"):
            frames = _depth(frame)

    _profile(act, see)
    return Walk(calls, len(files), frames)


def _counts(name: str) -> bool:
    return _PREHEAT in name and _EMULATOR not in name


def _depth(frame: FrameType | None) -> int:
    depth = 0
    while frame is not None:
        depth += _counts(frame.f_code.co_filename)
        frame = frame.f_back
    return depth


def _profile(act: Callable[[], object], see: Callable[[Any, str, Any], None]) -> None:
    before = sys.getprofile()
    sys.setprofile(see)
    try:
        act()
    finally:
        sys.setprofile(before)
