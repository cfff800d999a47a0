"""Helpers for the tests of graphed functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Host = np.ndarray[Any, Any]


Wrap = Callable[[Any], Any]


@dataclass
class Batch:
    """Arguments with names, which may change."""

    n: int
    y: Any


@dataclass(frozen=True, slots=True)
class Frozen:
    """Arguments with names, which may not."""

    y: Any


@dataclass
class Late:
    """A dataclass with a field that is no argument of its constructor."""

    y: Any = field(init=False)


def late(y: Any) -> Late:
    made = Late()
    made.y = y
    return made
