"""The GPUs of this machine, as a command sees them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping

from preheat.model.arch import Arch

__all__ = ["gpu_archs"]

_SECONDS = 60.0  # The first start of a driver takes long on a machine with many GPUs.
_LIST = "from preheat.device.cuda.device import visible\nprint(*[gpu.arch for gpu in visible()])"


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
