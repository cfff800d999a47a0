"""Code on its way to a device."""

from __future__ import annotations

from typing import NamedTuple

from preheat.artifact import Artifact
from preheat.program import Program

__all__ = ["Code"]


class Code(NamedTuple):
    """Code to load, and the program it was made from, where that is known; `jit`: by the driver."""

    artifact: Artifact
    program: Program | None = None
    jit: bool = False
