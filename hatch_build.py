"""Builds the native core, `preheat._native`, where there is a C compiler.

The extension makes launches and replays faster. Without it, Python code does the same, so a missing or
failing compiler never fails an installation. `python hatch_build.py` builds it into the source tree.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parent / "src" / "preheat" / "_native.c"
SECONDS = 120  # A compiler that takes longer than this hangs.


def build_native(directory: Path = SOURCE.parent) -> Path | None:
    """Compile the extension into `directory` and return its path; None, with a message, if that fails.

    `CC` and `CFLAGS` have their usual meaning.
    """
    target = directory / f"_native{sysconfig.get_config_var('EXT_SUFFIX') or '.so'}"
    unfinished = target.with_name(f"{target.name}.{os.getpid()}")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _compile(unfinished)
        unfinished.replace(target)  # A process that uses the old file keeps it.
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        sys.stderr.write(f"preheat is used without its native core: {error}\n")
        for file in (unfinished, target):  # An old extension does not fit the source.
            with suppress(OSError):
                file.unlink()
        return None
    return target


def _compile(target: Path) -> None:
    """Run the compiler; an exception says why there is no extension."""
    compiler = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
    command = [
        *shlex.split(compiler), "-std=c11", "-O2", "-fPIC", "-shared", "-Wall", "-Wextra",
        "-Wno-missing-field-initializers", "-Wno-cast-function-type",
        *shlex.split(os.environ.get("CFLAGS", "")),
        f"-I{sysconfig.get_paths()['include']}", str(SOURCE), "-o", str(target),
    ]  # fmt: skip
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=SECONDS,
    )
    if done.returncode:
        raise OSError(f"the compiler exited with {done.returncode}\n{done.stderr}")


try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # `python hatch_build.py` needs no build backend.
    pass
else:

    class NativeBuildHook(BuildHookInterface[Any]):
        """Adds the extension to a wheel, which is then one for this Python and platform."""

        _made: str | None = None  # a directory that exists until the wheel is complete

        def initialize(self, version: str, build_data: dict[str, Any]) -> None:
            """Compile before the wheel is assembled; an editable installation uses the source tree."""
            if version == "editable":
                build_native()
                return
            self._made = tempfile.mkdtemp(prefix="preheat-native-")
            built = build_native(Path(self._made))
            if built is not None:
                build_data["pure_python"] = False
                build_data["infer_tag"] = True
                build_data["force_include"][str(built)] = f"preheat/{built.name}"

        def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
            """Remove what the wheel contains now."""
            del version, build_data, artifact_path
            if self._made is not None:
                shutil.rmtree(self._made, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(build_native() is None)
