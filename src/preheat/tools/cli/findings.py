"""The results of the checks of `preheat doctor`, and the checks for programs with kernels of Triton."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass

from preheat.model.config import SealMode, environ

__all__ = ["Finding", "triton_findings"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. `verdict` is ok, warn or fail."""

    what: str
    verdict: str
    detail: str
    fix: str = ""


_SECONDS = 60.0  # for the import of Triton
_INSTALL = """\
import json, sys
import preheat.adapters
from preheat.errors import PreheatError
try:
    preheat.adapters.install("triton")
except PreheatError as error:
    sys.exit(json.dumps([str(error), error.hint or ""]))
"""
_HOST_CODE = (
    "Triton compiles host code in C for launches, so a bake needs it; "
    "a sealed run with a bundle does not"
)


def triton_findings(sealed: SealMode) -> Iterator[Finding]:
    """Yield whether the adapter works with the Triton that is installed, and the C compiler."""
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return
    yield _adapter(version, sealed)
    yield _c_compiler()


def _adapter(version: str, sealed: SealMode) -> Finding:
    """Install the adapter in a separate process: the version must be known, and Triton must load."""
    env = {name: value for name, value in environ().items() if not name.startswith("PREHEAT_")}
    path = os.pathsep.join(entry for entry in sys.path if entry)
    env |= {"PREHEAT_CACHE": "off", "PYTHONPATH": path}
    # A sealed process raises the error when it imports Triton. Any other process works without the
    # adapter.
    verdict = "fail" if sealed is SealMode.ERROR else "warn"
    try:
        ran = subprocess.run(
            [sys.executable, "-c", _INSTALL], env=env, capture_output=True, text=True, timeout=_SECONDS
        )
    except subprocess.TimeoutExpired:
        return Finding("Triton", verdict, f"{version}: the import took more than {_SECONDS:.0f} s")
    if ran.returncode == 0:
        return Finding("Triton", "ok", f"{version}, which the adapter knows")
    last = ran.stderr.strip().rpartition("\n")[2]
    try:
        why, hint = json.loads(last)
    except ValueError:
        why, hint = f"{version}: the import fails: {last}", "install Triton again, or remove it"
    return Finding("Triton", verdict, why, hint)


def _c_compiler() -> Finding:
    """Find the compiler as Triton does, and the header files of Python."""
    named = environ().get("CC")
    found = (
        shutil.which(shlex.split(named)[0]) if named else shutil.which("gcc") or shutil.which("clang")
    )
    if found is None:
        missing = f"CC is {named}, which is not a command" if named else "there is no gcc and no clang"
        fix = "install gcc and libc6-dev where you bake, or set CC"
        return Finding("C compiler", "warn", f"{missing}; {_HOST_CODE}", fix)
    include = sysconfig.get_path("include")
    if not os.path.isfile(os.path.join(include, "Python.h")):
        fix = "install the header files of Python where you bake, such as the package python3-dev"
        return Finding("C compiler", "warn", f"{include} has no Python.h; {_HOST_CODE}", fix)
    return Finding("C compiler", "ok", f"{found}, for the host code of Triton")
