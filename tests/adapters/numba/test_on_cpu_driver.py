"""Kernels of Numba-CUDA are recorded, baked for production, and run sealed on the CPU driver."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip(
    "numba_cuda", reason="Numba-CUDA is a large package, which `make test-numba` installs"
)

from preheat.driver.library import LIBRARY
from tests.adapters.on_cpu_driver import Computed

pytestmark = pytest.mark.skipif(not LIBRARY.is_file(), reason="the CPU driver was not built")

BOTH = ("sm_90", "sm_100")
RIGHT = {"scale": True, "polynomial": True, "total": True}


@pytest.fixture(scope="module")
def computed(tmp_path_factory: pytest.TempPathFactory) -> Computed:
    found = importlib.util.find_spec("numba")
    assert found is not None
    assert found.origin is not None
    root = tmp_path_factory.mktemp("computed")
    return Computed(root, Path(__file__).parent / "computed", [Path(found.origin).parents[1]], {})


@pytest.fixture(scope="module")
def bundle(computed: Computed) -> Path:
    return computed.bake(*BOTH)


@pytest.mark.parametrize("arch", BOTH)
def test_a_bundle_for_production_is_run_sealed(computed: Computed, bundle: Path, arch: str) -> None:
    done = computed.run_sealed(bundle, arch)
    assert done.told == RIGHT
    assert "3 launches, 0 faults" in done.err


def test_baked_kernels_are_the_same_with_and_without_the_driver(
    computed: Computed, bundle: Path
) -> None:
    other = computed.root / "other.heat"
    archs = [word for arch in BOTH for word in ("--arch", arch)]
    computed.emulate("bake", str(computed.root / "kernels.toml"), *archs, "-o", str(other))
    assert other.read_bytes() == bundle.read_bytes()


def test_baked_kernels_are_the_same_in_another_order(computed: Computed, bundle: Path) -> None:
    """One process makes them one after the other, and the second architecture first."""
    other = computed.root / "reversed.heat"
    archs = [word for arch in reversed(BOTH) for word in ("--arch", arch)]
    computed.preheat("bake", str(computed.root / "kernels.toml"), *archs, "-j1", "-o", str(other))
    assert other.read_bytes() == bundle.read_bytes()
