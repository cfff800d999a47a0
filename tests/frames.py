"""The frames of preheat in a traceback."""

from __future__ import annotations

import traceback
from pathlib import Path

import preheat

HERE = str(Path(preheat.__file__).parent)


def own_frames(error: BaseException) -> list[str]:
    """Return the functions of preheat in the traceback of `error`."""
    frames = traceback.extract_tb(error.__traceback__)
    return [frame.name for frame in frames if frame.filename.startswith(HERE)]
