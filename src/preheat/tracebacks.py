"""Tracebacks that end at the call of the user."""

from __future__ import annotations

from preheat.config import environ
from preheat.errors import PreheatError

__all__ = ["short_traceback", "shorten_traceback"]


def shorten_traceback(error: PreheatError) -> None:
    """Remove the frames of preheat from the traceback, unless `PREHEAT_TRACEBACK` is `full`.

    The error is about the program of the user, and frames inside of preheat do not help to find it.
    """
    below = error.__traceback__
    if below is not None and environ().get("PREHEAT_TRACEBACK", "").strip().lower() != "full":
        below.tb_next = None


class _ShortTraceback:
    """A block whose errors end at the function that has it."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, PreheatError):
            shorten_traceback(error)


#: Does what `shorten_traceback` does for the errors of a `with` block.
short_traceback = _ShortTraceback()
