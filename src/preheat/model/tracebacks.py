"""Tracebacks that end at the call of the user."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from types import FunctionType, TracebackType
from typing import Any, TypeVar, cast

from preheat.errors import PreheatError
from preheat.model.config import environ
from preheat.process.callsite import is_user_file

__all__ = ["hide_frames", "short_errors", "short_methods", "shorten_traceback"]

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)


def shorten_traceback(error: PreheatError) -> None:
    """Remove the frames of preheat below the function that has caught `error`.

    The error is about the program of the user, and frames in preheat do not help to find it.
    Frames of the program, such as a function that preheat has called, stay. With
    `PREHEAT_TRACEBACK=full`, all frames stay.
    """
    last = error.__traceback__
    if last is not None and not _all_frames_stay():
        last.tb_next = _without_preheat(last.tb_next)


def hide_frames(error: PreheatError) -> None:
    """Remove the frames of preheat, also the frame of the function that has caught `error`.

    This is for a function that replaces a function of another library. The caller raises the
    error again by a bare `raise`, which adds no frame. With `PREHEAT_TRACEBACK=full`, all frames stay.
    """
    if not _all_frames_stay():
        error.__traceback__ = _without_preheat(error.__traceback__)


def _all_frames_stay() -> bool:
    return environ().get("PREHEAT_TRACEBACK", "").strip().lower() == "full"


def _without_preheat(first: TracebackType | None) -> TracebackType | None:
    """Return a traceback without its frames of preheat. The other frames are linked to each other."""
    kept = []
    frame = first
    while frame is not None:
        if is_user_file[frame.tb_frame.f_code.co_filename]:
            kept.append(frame)
        frame = frame.tb_next
    below: TracebackType | None = None
    for frame in reversed(kept):
        frame.tb_next = below
        below = frame
    return below


def short_errors(function: F) -> F:
    """Decorate a public function: the tracebacks of its errors have no other frame of preheat.

    A call of the function costs one more Python call. A function for which that is too slow has a `try`
    statement with `shorten_traceback` instead, which costs nothing without an error.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except PreheatError as error:
            shorten_traceback(error)
            raise

    # The frame is shown under the name that the user has called.
    call.__code__ = call.__code__.replace(co_name=function.__name__, co_qualname=function.__qualname__)
    return cast(F, functools.update_wrapper(call, function))


def short_methods(*, without: Collection[str] = ()) -> Callable[[C], C]:
    """Decorate a class: `short_errors` for its public methods, except those in `without`."""

    def decorate(kind: C) -> C:
        for name, method in list(vars(kind).items()):
            if not name.startswith("_") and name not in without and type(method) is FunctionType:
                setattr(kind, name, short_errors(method))
        return kind

    return decorate
