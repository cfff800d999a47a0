"""A wheel contains the whole package: every module of the source tree can be imported from it."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "preheat"

BUILD = """
import os, sys
os.chdir(sys.argv[1])
from hatchling.build import build_wheel
build_wheel(sys.argv[2])
"""

IMPORT = """
import importlib, os, sys
for name in sys.argv[2:]:
    module = importlib.import_module(name)
    assert module.__file__.startswith(sys.argv[1] + os.sep), module.__file__
"""


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the content of a wheel that the build backend of the project makes, without a network."""
    pytest.importorskip("hatchling", reason="the build backend is not installed")
    home = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-c", BUILD, ROOT, home], check=True, capture_output=True)
    (wheel,) = home.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(home / "site")
    return home / "site"


def modules() -> list[str]:
    """Return the names of all modules in the source tree."""
    files = (file.relative_to(SOURCE.parent).with_suffix("") for file in SOURCE.rglob("*.py"))
    names = (".".join(file.parts).removesuffix(".__init__") for file in files)
    return sorted(name for name in names if not name.endswith("__main__"))


def test_every_module_is_imported_from_the_wheel(unpacked: Path, tmp_path: Path) -> None:
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": str(unpacked)}
    ran = subprocess.run(
        [sys.executable, "-c", IMPORT, unpacked, *modules()],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr


def test_the_wheel_has_every_file_of_the_package(unpacked: Path) -> None:
    """Also those that are not Python, such as the source of the shipped kernels."""

    def files(package: Path) -> set[str]:
        found = (file for file in package.rglob("*") if file.is_file())
        return {str(file.relative_to(package)) for file in found if file.suffix != ".pyc"}

    assert files(unpacked / "preheat") == files(SOURCE)
