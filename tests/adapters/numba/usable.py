"""Whether the installed Numba-CUDA works with the installed NumPy."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

__all__ = ["unusable"]


def unusable() -> str | None:
    """Return why the installed Numba-CUDA cannot compile anything; None when it can, or is not there.

    A version of NumPy that is too new lets its imports fail, also those that come with a first compile.
    """
    if importlib.util.find_spec("numba_cuda") is None:
        return None  # The files of tests say so themselves.
    command = [sys.executable, "-W", "ignore", "-c", "import numba.cuda.np.arrayobj"]
    ran = subprocess.run(command, capture_output=True, text=True)
    return ran.stderr.strip().splitlines()[-1] if ran.returncode else None
