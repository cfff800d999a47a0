"""Warnings of environment variables whose names resemble settings of preheat: they have no effect."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from preheat.process.locks import no_fork

__all__ = ["meant", "warn_of_misspelled"]

_PREFIX = "PREHEAT_"
_warned: set[str] = set()


def warn_of_misspelled(env: Iterable[str], known: Collection[str]) -> None:
    """Warn of each variable of `env` whose name is one edit away from a `known` one, once a process."""
    unknown = {name for name in env if name.startswith(_PREFIX)}.difference(known, _warned)
    for name in sorted(unknown):
        likely = meant(name, known)
        if likely is None:
            continue
        _warned.add(name)
        with no_fork:
            from preheat.model.events import warn  # Most processes have no such variable.

        warn(f"the environment variable {name} is unknown and has no effect: did you mean {likely}?")


def meant(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is one edit away from `name`, or None.

    An edit adds, removes or replaces a character, or exchanges two neighbours.
    """
    return next((other for other in known if _one_edit_apart(name, other)), None)


def _one_edit_apart(a: str, b: str) -> bool:
    if abs(len(a) - len(b)) > 1 or a == b:
        return False
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    rest, other = a[at:], b[at:]
    if len(a) != len(b):
        return rest[1:] == other or rest == other[1:]
    return rest[1:] == other[1:] or (rest[1::-1] == other[:2] and rest[2:] == other[2:])
