"""The number of Python calls that something makes, which does not depend on the machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

__all__ = ["count_calls"]


def count_calls(act: Callable[[], object]) -> int:
    """Return the number of Python calls that `act` makes outside `devices/`."""
    calls = 0
    inside = 0

    def see(frame: Any, event: str, _: object) -> None:
        nonlocal calls, inside
        on_device = "/devices/" in frame.f_code.co_filename
        if event == "call":
            inside += on_device
            calls += not inside
        elif event == "return":
            inside -= on_device

    before = sys.getprofile()
    sys.setprofile(see)
    try:
        act()
    finally:
        sys.setprofile(before)
    return calls - 1  # without `act` itself
