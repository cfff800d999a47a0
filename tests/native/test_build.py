"""Native libraries that were built from other sources: none is used, and a message says what to do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from preheat import native
from preheat.audit.library import LIBRARY as AUDIT
from preheat.native.build import BUILD_AGAIN, hash_of, is_stale, sources_in

PACKAGE = Path(native.__file__).parents[1]
DRIVER = PACKAGE / "driver" / "libcuda.so.1"
WARNING = f"preheat does not use its native core, because {native.STALE}: {BUILD_AGAIN}\n"

needs_core = pytest.mark.skipif(native.core is None, reason=f"no native core: {native.reason}")
needs_audit = pytest.mark.skipif(not AUDIT.is_file(), reason="the audit library was not built")
needs_driver = pytest.mark.skipif(not DRIVER.is_file(), reason="the CPU driver was not built")

LAUNCHES = """
import preheat
from preheat import native
gpu = preheat.device("emulator")
kernel = gpu.kernel('extern "C" __global__ void k(int* x) { x[threadIdx.x] += 1; }', "k")
x = gpu.zeros(4, "int32")
for _ in range(4):
    kernel[1, 4](x)
with gpu.capture() as graph:
    kernel[1, 4](x)
graph.replay()
print(x.numpy().tolist(), type(kernel[1, 4]).__module__)
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Return a package that has the files of this one, as links.

    A package inside without native sources is one link, so that its bytecode is used.
    """
    copy = tmp_path / "site" / "preheat"
    copy.mkdir(parents=True)
    leave_out = shutil.ignore_patterns("__pycache__")
    for place in PACKAGE.iterdir():
        if place.name in ("audit", "driver", "native"):
            shutil.copytree(place, copy / place.name, ignore=leave_out, copy_function=os.symlink)
        elif place.name != "__pycache__":
            (copy / place.name).symlink_to(place)
    return copy


def change(file: Path, old: str, new: str) -> None:
    """Replace a link by a copy with another text."""
    text = file.read_text()
    assert old in text
    file.unlink()
    file.write_text(text.replace(old, new))


def run(package: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run Python with a package, and check that nothing but preheat wrote to stderr."""
    return subprocess.run(
        [sys.executable, *words],
        env={**os.environ, **env, "PYTHONPATH": str(package.parent)},
        capture_output=True,
        text=True,
        timeout=300,
    )


def launches(package: Path, **env: str) -> tuple[str, str]:
    """Launch and replay; return the result with the kind of launcher, and stderr."""
    done = run(package, "-c", LAUNCHES, **env)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr


# The native core


@needs_core
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("return !none || slot(uses, self->uses_interface) != Py_False;", "return 0;"),  # a meaning
        ("unsigned offset; ", "unsigned offset, unused; "),  # a layout
        ('{"file_times", file_times,', '{"times", file_times,'),  # a name
    ],
)
def test_a_core_that_was_built_from_another_source_is_not_used_and_a_warning_says_so(
    package: Path, old: str, new: str
) -> None:
    change(package / "native" / "core.c", old, new)
    assert launches(package) == ("[5, 5, 5, 5] preheat.devices.launch", WARNING)


@needs_core
def test_a_core_without_a_hash_of_its_source_is_not_used(package: Path) -> None:
    (extension,) = (package / "native").glob("_core.*.so")
    content = extension.read_bytes()
    extension.unlink()
    extension.write_bytes(content.replace(b"\0SOURCES\0", b"\0VERSION\0"))
    assert b"\0SOURCES\0" in content
    shown, messages = launches(package)
    assert (shown, messages) == ("[5, 5, 5, 5] preheat.devices.launch", WARNING)


@needs_core
def test_a_core_is_used_with_its_source_and_without_any(package: Path) -> None:
    expected = ("[5, 5, 5, 5] preheat.native._core", "")
    assert launches(package) == expected
    (package / "native" / "core.c").unlink()  # as in a wheel
    assert launches(package) == expected


@needs_core
def test_a_core_that_is_switched_off_is_not_compared(package: Path) -> None:
    change(package / "native" / "core.c", "return 0;", "return 1;")
    assert launches(package, PREHEAT_NATIVE="0") == ("[5, 5, 5, 5] preheat.devices.launch", "")


# The other libraries


@needs_audit
@pytest.mark.parametrize("command", ["audit", "run"])
def test_a_command_does_not_start_with_an_audit_library_of_other_sources(
    package: Path, command: str, tmp_path: Path
) -> None:
    options = {"audit": (), "run": ("--sealed",)}[command]
    change(package / "audit" / "native" / "events.c", "return", "return ")
    done = run(package, "-m", "preheat", command, *options, "--", "touch", str(tmp_path / "ran"))
    assert done.returncode != 0
    assert "the audit library was built from other sources" in done.stderr
    assert f"hint: {BUILD_AGAIN}" in done.stderr
    assert not (tmp_path / "ran").exists()


@needs_driver
@pytest.mark.parametrize("file", ["table.c", "driver.h", "entry_points.def"])
def test_a_program_gets_no_device_from_a_driver_of_other_sources(package: Path, file: str) -> None:
    driver = str(package / "driver" / "libcuda.so.1")
    program = f"import ctypes; print(ctypes.CDLL({driver!r}).cuInit(0))"
    assert run(package, "-c", program).stdout == "0\n"
    change(package / "driver" / "native" / file, "\n", "\n\n")
    done = run(package, "-c", program)
    assert done.stdout == "100\n"  # CUDA_ERROR_NO_DEVICE
    assert f"{driver} was built from other sources: {BUILD_AGAIN}" in done.stderr


# The hash


def test_the_hash_differs_with_the_content_and_the_names_of_the_files(tmp_path: Path) -> None:
    a, b = tmp_path / "a.c", tmp_path / "b.c"
    hashes = set()
    for first, second in [("1", "2"), ("12", ""), ("", "12"), ("1", "2\n")]:
        a.write_text(first)
        b.write_text(second)
        hashes.add(hash_of([a, b]))
    hashes.add(hash_of([a]))
    a.rename(tmp_path / "c.c")
    hashes.add(hash_of([tmp_path / "c.c"]))
    assert len(hashes) == 6


def test_a_library_is_compared_with_the_c_sources_of_its_directory(tmp_path: Path) -> None:
    (tmp_path / "a.c").write_text("int a;")
    (tmp_path / "a.h").write_text("")
    library = tmp_path / "library.so"
    library.write_bytes(b"ELF preheat sources " + hash_of(sources_in(tmp_path)).encode() + b"\0")
    (tmp_path / "a.o").write_text("of an editor or a compiler")
    assert not is_stale(library, tmp_path)
    (tmp_path / "b.def").write_text("")
    assert is_stale(library, tmp_path)
