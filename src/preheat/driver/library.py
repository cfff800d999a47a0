"""The library of the CPU driver, and the environment in which programs load it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from preheat.errors import InputError

__all__ = ["LIBRARY", "driver_environment", "require_library"]

LIBRARY = Path(__file__).with_name("libcuda.so.1")
_PRELOAD = "LD_PRELOAD"
#: LD_PRELOAD separates paths by colons and white space, and expands names after a dollar sign.
_UNSAFE = frozenset(": \t\n$")


def require_library() -> Path:
    """Return the path of the library. Raises `InputError` where it was not built."""
    if not LIBRARY.is_file():
        raise InputError(
            "the CPU driver was not built when preheat was installed",
            hint="install preheat again where there is a C compiler, such as gcc",
        )
    if not _UNSAFE.isdisjoint(str(LIBRARY)):
        raise InputError(
            f"LD_PRELOAD cannot hold {LIBRARY}",
            hint="install preheat in a directory whose path has no space, colon or dollar sign",
        )
    return LIBRARY


def driver_environment(env: Mapping[str, str], **settings: str | int) -> dict[str, str]:
    """Return an environment in which programs find the CPU driver as libcuda.so.1.

    `settings` are those of the driver: `schedule=3` sets `PREHEAT_EMULATE_SCHEDULE`.
    """
    others = [path for path in env.get(_PRELOAD, "").split(":") if path and path != str(LIBRARY)]
    variables = {f"PREHEAT_EMULATE_{name.upper()}": str(value) for name, value in settings.items()}
    return {**env, **variables, _PRELOAD: ":".join([*others, str(require_library())])}
