"""The variables that `preheat run` sets for a command and the reason for each, and the GPUs it sees."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from preheat.adapters.imports import VARIABLE
from preheat.ahead.manifest import Manifest
from preheat.build.seal import SEALED_BY
from preheat.errors import InputError
from preheat.model.arch import Arch
from preheat.model.config import Config, SealMode
from preheat.model.setting_values import split_pin

__all__ = ["Setting", "gpu_archs", "run_settings"]


class Setting(NamedTuple):
    """A variable, its value, and why it has it."""

    name: str
    value: str
    why: str

    def __str__(self) -> str:
        return f"{self.name}={self.value}\n    {self.why}"


_SEALED = (
    Setting(
        "CUDA_DISABLE_PTX_JIT",
        "1",
        "the driver does not compile PTX, and a load that needs it fails with error 223",
    ),
    Setting(
        "CUDA_CACHE_DISABLE",
        "1",
        "the driver does not answer from its own cache of compiled PTX, which would hide such a load",
    ),
    Setting(
        "JAX_RAISE_PERSISTENT_CACHE_ERRORS",
        "1",
        "JAX does not compile when its cache fails, which it otherwise does with a warning",
    ),
    Setting(
        "TRITON_CACHE_AUTOTUNING",
        "1",
        "Triton takes the results of autotuning from the cache, and measures nothing again",
    ),
)


def run_settings(
    env: Mapping[str, str],
    *,
    bundles: Sequence[Path],
    sealed: SealMode | None,
    manifest: Manifest | None,
    empty_cache: Path | None = None,
) -> Iterator[Setting]:
    """Yield what is set for a command. Adapters and recorded values that the user has set stay.

    With `empty_cache`, that directory is the only cache of the command.
    """
    if not env.get(VARIABLE):
        yield Setting(VARIABLE, "auto", "every library that has an adapter uses the cache of preheat")
    if bundles:
        yield Setting("PREHEAT_BUNDLE", _join(bundles), "these bundles are searched before the cache")
    if empty_cache is not None:
        yield from _only_cache(env, empty_cache)
    if sealed is not None:
        value = "1" if sealed is SealMode.ERROR else "warn"
        why = "what no bundle and no cache has is not compiled; the option wins over the variable"
        yield Setting("PREHEAT_SEALED", value, why)
        yield Setting(SEALED_BY, "run", "errors name the option, and not the variable")
    if (sealed or Config.from_env(env).sealed) is SealMode.ERROR:
        yield from _SEALED
    for name, value in sorted(_recorded(manifest).items() if manifest is not None else ()):
        if name not in env:
            yield Setting(
                name, value, "it was set when the manifest was recorded, and is part of its keys"
            )


def _only_cache(env: Mapping[str, str], directory: Path) -> Iterator[Setting]:
    yield Setting(
        "PREHEAT_CACHE_DIR", str(directory), "the cache is empty, and is removed after the command"
    )
    for name in ("PREHEAT_LAYERS", "PREHEAT_REMOTE"):
        if env.get(name):
            yield Setting(name, "", "no other cache is searched")


def _join(bundles: Sequence[Path]) -> str:
    for path in bundles:
        if os.pathsep in str(split_pin(path)[0]):
            raise InputError(f"{path} has {os.pathsep!r} in its name", hint="rename the bundle")
    return os.pathsep.join(os.path.abspath(path) for path in bundles)


def _recorded(manifest: Manifest) -> dict[str, str]:
    """Return the variables that had the same value in all requests that are keyed by variables.

    A request lists the variables that were set. A variable that it does not list was not set.
    """
    rows = [item.row["env"] for item in manifest.foreign if item.request and "env" in item.row]
    first = rows[0] if rows else {}
    return {
        name: str(value)
        for name, value in first.items()
        if all(name in row and row[name] == value for row in rows)
    }


_SECONDS = 60.0  # The first start of a driver takes long on a machine with many GPUs.
_LIST = "from preheat.devices.cuda.device import visible\nprint(*[gpu.arch for gpu in visible()])"


def gpu_archs(env: Mapping[str, str]) -> list[Arch]:
    """Return the architectures of the GPUs that a process with this environment sees, each once.

    The driver is queried in another process, because it would keep files and memory in this one.
    The result is empty if there is no GPU, or if the driver does not answer.
    """
    try:
        ran = subprocess.run(
            [sys.executable, "-c", _LIST], env=env, capture_output=True, text=True, timeout=_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return sorted({Arch.parse(text) for text in ran.stdout.split()}) if ran.returncode == 0 else []
