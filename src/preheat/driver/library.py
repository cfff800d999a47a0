"""The library of the CPU driver, and the environment in which programs load it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from preheat.errors import InputError

__all__ = ["LIBRARY", "driver_environment", "require_library"]

LIBRARY = Path(__file__).with_name("libcuda.so.1")
_PRELOAD = "LD_PRELOAD"
_OWN = "on-cpu-driver"  # at the end of the name of a cache
_LINKED_BY_TRITON = "TRITON_LIBCUDA_PATH"  # where it finds the library that its host code is linked to
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

    Preheat and other libraries have caches of their own in it. Code that is compiled on the CPU driver
    has its PTX beside it, and must not reach a GPU. `settings` are the driver's settings: `schedule=3`
    sets `PREHEAT_EMULATE_SCHEDULE`.
    """
    others = [path for path in env.get(_PRELOAD, "").split(":") if path and path != str(LIBRARY)]
    variables = {f"PREHEAT_EMULATE_{name.upper()}": str(value) for name, value in settings.items()}
    library = require_library()
    preload = ":".join([*others, str(library)])
    linked = {_LINKED_BY_TRITON: str(library.parent)}
    return {**env, **_own_caches(env), **linked, **variables, _PRELOAD: preload}


def _own_caches(env: Mapping[str, str]) -> dict[str, str]:
    """Return the directories of caches: each is beside the one that the library has otherwise."""
    home = Path(env.get("HOME") or Path.home())
    user = Path(env.get("XDG_CACHE_HOME") or home / ".cache")
    defaults = {
        "PREHEAT_CACHE_DIR": user / "preheat",
        "CUDA_CACHE_PATH": home / ".nv" / "ComputeCache",
        "CUPY_CACHE_DIR": home / ".cupy" / "kernel_cache",
        "NUMBA_CACHE_DIR": user / "numba",
        "TORCHINDUCTOR_CACHE_DIR": user / "torchinductor",
        "TRITON_CACHE_DIR": home / ".triton" / "cache",
    }
    return {name: str(_own(Path(env.get(name) or place))) for name, place in defaults.items()}


def _own(path: Path) -> Path:
    return path if path.name.endswith(_OWN) else path.with_name(f"{path.name}-{_OWN}")
