"""Fixtures of the tests of Numba-CUDA: applications on the CPU driver."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from preheat.driver.library import LIBRARY
from tests.adapters.numba.usable import unusable

if TYPE_CHECKING:
    from tests.adapters.numba.world import World


_REASON = unusable()
collect_ignore_glob = [] if _REASON is None else ["test_*.py"]  # NumPy is too new for it, for example.


def pytest_report_header() -> str | None:
    """Say why no test of this folder is collected."""
    return None if _REASON is None else f"tests of Numba-CUDA are left out: {_REASON}"


@pytest.fixture
def world(tmp_path: Path) -> World:
    """Return an application of Numba with caches of its own."""
    from tests.adapters.numba.world import World

    _require_driver()
    return World(tmp_path / "world")


@pytest.fixture(scope="session")
def baked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Return the application, recorded as sm_90 and baked for sm_90 and sm_100 without a driver.

    Tests use it and leave it unchanged. The manifest is `kernels.toml` and the bundle `kernels.heat`.
    """
    from tests.adapters.numba.world import World
    from tests.processes import kill_started_processes

    _require_driver()
    made = World(tmp_path_factory.mktemp("numba-baked") / "world")
    manifest = made.record()
    made.sibling("bake").preheat("bake", str(manifest), "--arch", "sm_90", "--arch", "sm_100").ok()
    yield made
    kill_started_processes()


def _require_driver() -> None:
    if not LIBRARY.is_file():
        pytest.skip("the CPU driver was not built")
