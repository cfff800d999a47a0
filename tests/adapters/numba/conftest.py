"""Fixtures of the tests of Numba-CUDA: a stand-in driver, and applications on it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.adapters.numba.usable import unusable

if TYPE_CHECKING:
    from tests.adapters.numba.world import World


_REASON = unusable()
collect_ignore_glob = [] if _REASON is None else ["test_*.py"]  # NumPy is too new for it, for example.


def pytest_report_header() -> str | None:
    """Say why no test of this folder is collected."""
    return None if _REASON is None else f"tests of Numba-CUDA are left out: {_REASON}"


@pytest.fixture(scope="session")
def numba_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a stand-in for the library of the driver, for cuda.core and Numba."""
    from tests.adapters.numba.world import HERE

    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("the stand-in driver needs a C compiler")
    library = tmp_path_factory.mktemp("numba-driver") / "libcuda.so.1"
    options = ["-O1", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-Wl,-soname,libcuda.so.1"]
    subprocess.run([compiler, *options, "-o", library, HERE / "driver.c", "-ldl"], check=True)
    return library.parent


@pytest.fixture
def world(tmp_path: Path, numba_driver: Path) -> World:
    """Return an application of Numba with caches of its own."""
    from tests.adapters.numba.world import World

    return World(tmp_path / "world", numba_driver)


@pytest.fixture(scope="session")
def baked(tmp_path_factory: pytest.TempPathFactory, numba_driver: Path) -> Iterator[World]:
    """Return the application, recorded as sm_90 and baked for sm_90 and sm_100 without a driver.

    Tests use it and leave it unchanged. The manifest is `kernels.toml` and the bundle `kernels.heat`.
    """
    from tests.adapters.numba.world import World
    from tests.processes import kill_started_processes

    made = World(tmp_path_factory.mktemp("numba-baked") / "world", numba_driver)
    manifest = made.record()
    made.sibling("bake").preheat("bake", str(manifest), "--arch", "sm_90", "--arch", "sm_100").ok()
    yield made
    kill_started_processes()
