"""The results of the checks of `preheat doctor`."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Finding"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. `verdict` is ok, warn or fail."""

    what: str
    verdict: str
    detail: str
    fix: str = ""
