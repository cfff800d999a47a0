"""Builds the native core, the audit library and the CPU driver, where there is a C compiler.

The extension, `preheat.native._core`, makes launches and replays faster. Without it, Python code does
the same. `preheat audit` and `preheat emulate` put the other two into processes, and say when they are
missing. A missing or failing compiler never fails an installation. `python hatch_build.py` builds all
of them into the source tree.
"""

from __future__ import annotations

import os
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parent / "src" / "preheat"
NATIVE = PACKAGE / "native"
AUDIT = PACKAGE / "audit"
AUDIT_SOURCES = AUDIT / "native"
DRIVER = PACKAGE / "driver"
DRIVER_SOURCES = DRIVER / "native"
MARK = NATIVE / "mark.c"
SECONDS = 120  # A compiler that takes longer than this hangs.


def build_native(directory: Path = NATIVE) -> Path | None:
    """Compile the extension into `directory` and return its path; None, with a message, if that fails.

    `CC` and `CFLAGS` have their usual meaning.
    """
    target = directory / f"_core{sysconfig.get_config_var('EXT_SUFFIX') or '.so'}"
    options = [
        "-std=c11", "-Wno-missing-field-initializers", "-Wno-cast-function-type",
        *shlex.split(os.environ.get("CFLAGS", "")), f"-I{sysconfig.get_paths()['include']}",
    ]  # fmt: skip
    return _build(target, [*options, str(NATIVE / "core.c")], "its native core", [NATIVE / "core.c"])


def build_audit(directory: Path = AUDIT) -> Path | None:
    """Compile the audit library into `directory` and return its path, as `build_native` does.

    It is loaded into programs of every kind, so that it uses neither Python nor CUDA.
    """
    options = [
        "-std=gnu11", "-fvisibility=hidden", "-Wl,-soname,libpreheat_audit.so",
        f"-Wl,--version-script={AUDIT_SOURCES / 'exports.map'}",
        *shlex.split(os.environ.get("CFLAGS", "")),
    ]  # fmt: skip
    target = directory / "libpreheat_audit.so"
    return _build_from(AUDIT_SOURCES, target, options, "the audit library")


def build_driver(directory: Path = DRIVER) -> Path | None:
    """Compile the CPU driver into `directory` and return its path, as `build_native` does.

    It finds Python in the process that loads it, so that one build serves every version.
    """
    options = [
        "-std=gnu11", "-fvisibility=hidden", "-Wl,-soname,libcuda.so.1",
        *shlex.split(os.environ.get("CFLAGS", "")),
    ]  # fmt: skip
    target = directory / "libcuda.so.1"
    return _build_from(DRIVER_SOURCES, target, options, "the CPU driver")


def _build_from(directory: Path, target: Path, options: list[str], what: str) -> Path | None:
    """Compile all sources of a directory into a shared library, with the mark of this build."""
    sources = _marks()["sources_in"](directory)
    files = [str(file) for file in (*sources, MARK) if file.suffix == ".c"]
    return _build(target, [*options, *files, "-ldl", "-lpthread"], what, sources)


def _build(target: Path, words: list[str], what: str, sources: list[Path]) -> Path | None:
    """Compile a shared library; None, with a message, if that fails.

    It contains the hash of `sources`, so that preheat refuses it once they have changed.
    """
    unfinished = target.with_name(f"{target.name}.{os.getpid()}")
    try:
        marks = _marks()
        target.parent.mkdir(parents=True, exist_ok=True)
        _compile(unfinished, [f'-D{marks["MACRO"]}="{marks["hash_of"](sources)}"', *words])
        unfinished.replace(target)  # A process that uses the old file keeps it.
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        sys.stderr.write(f"preheat is used without {what}: {error}\n")
        for file in (unfinished, target):  # An old library does not fit the source.
            with suppress(OSError):
                file.unlink()
        return None
    return target


def _marks() -> dict[str, Any]:
    """Return what preheat itself uses to recognise an old build. The package cannot be imported yet."""
    return runpy.run_path(str(NATIVE / "build.py"))


def _compile(target: Path, words: list[str]) -> None:
    """Run the compiler; an exception says why there is no library."""
    compiler = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
    command = [
        *shlex.split(compiler), "-O2", "-fPIC", "-shared", "-Wall", "-Wextra",
        *words, "-o", str(target),
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
        """Adds the libraries to a wheel, which is then one for this Python and platform."""

        _made: str | None = None  # a directory that exists until the wheel is complete

        def initialize(self, version: str, build_data: dict[str, Any]) -> None:
            """Compile before the wheel is assembled; an editable installation uses the source tree."""
            if version == "editable":
                build_native()
                build_audit()
                build_driver()
                return
            self._made = tempfile.mkdtemp(prefix="preheat-native-")
            made = {
                "preheat/native": build_native,
                "preheat/audit": build_audit,
                "preheat/driver": build_driver,
            }
            for package, build in made.items():
                built = build(Path(self._made))
                if built is not None:
                    build_data["pure_python"] = False
                    build_data["infer_tag"] = True
                    build_data["force_include"][str(built)] = f"{package}/{built.name}"

        def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
            """Remove what the wheel contains now."""
            del version, build_data, artifact_path
            if self._made is not None:
                shutil.rmtree(self._made, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(None in (build_native(), build_audit(), build_driver()))
