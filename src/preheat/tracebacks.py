"""Tracebacks that end at the call that the user made."""

from __future__ import annotations

from preheat.config import environ
from preheat.errors import PreheatError

__all__ = ["shorten"]


def shorten(error: PreheatError) -> None:
    """Drop the frames below the one that catches `error`, unless `PREHEAT_TRACEBACK` is `full`.

    What such an error says is about the program of the user. The way it took through preheat is not.
    """
    below = error.__traceback__
    if below is not None and environ().get("PREHEAT_TRACEBACK", "").strip().lower() != "full":
        below.tb_next = None
