"""Programs of cuda.core are recorded, baked for production, and run sealed on the CPU driver."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

pytest.importorskip("cuda.core", reason="cuda.core is not installed")

from preheat.build.bundles import foreign_of
from preheat.driver.library import LIBRARY
from preheat.store.bundle import Bundle
from tests.adapters.on_cpu_driver import Computed

pytestmark = pytest.mark.skipif(not LIBRARY.is_file(), reason="the CPU driver was not built")

BOTH = ("sm_90", "sm_100")
NAMES = {"scale", "square"}


@pytest.fixture(scope="module")
def computed(tmp_path_factory: pytest.TempPathFactory) -> Computed:
    found = importlib.util.find_spec("cuda.core")
    assert found is not None
    assert found.origin is not None
    root = tmp_path_factory.mktemp("computed")
    return Computed(root, Path(__file__).parent / "computed", [Path(found.origin).parents[2]], {})


@pytest.fixture(scope="module")
def bundle(computed: Computed) -> Path:
    return computed.bake(*BOTH)


@pytest.mark.parametrize("arch", BOTH)
def test_a_bundle_for_production_is_run_sealed(computed: Computed, bundle: Path, arch: str) -> None:
    done = computed.run_sealed(bundle, arch)
    assert done.told.keys() == NAMES
    assert {name for name, error in done.told.items() if not error < 1e-6} == set()
    assert "2 launches, 0 faults" in done.err


def test_baked_programs_are_the_same_with_and_without_the_driver(
    computed: Computed, bundle: Path
) -> None:
    other = computed.root / "other.heat"
    archs = [word for arch in BOTH for word in ("--arch", arch)]
    computed.emulate("bake", str(computed.root / "kernels.toml"), *archs, "-o", str(other))
    assert other.read_bytes() == bundle.read_bytes()


def test_a_cubin_of_nvrtc_is_stored_with_its_ptx(bundle: Path) -> None:
    entries = programs(bundle)
    for arch in BOTH:
        files = entries["cuda_core scale", arch]
        assert f".target {arch}\n".encode() in files["ptx"]
    with_ptx = {key for key, files in entries.items() if "ptx" in files}
    assert with_ptx == {("cuda_core scale", arch) for arch in BOTH}


def test_stored_code_is_loaded_and_linked_as_compiled_code_is(computed: Computed) -> None:
    """A second process finds the code, passes it to a cache of its own, and links it."""
    for expected in ("compiles", "hits.disk"):
        env = {"PREHEAT_CACHE_DIR": str(computed.root / "kept")}
        words = ("emulate", "--", sys.executable, str(computed.app / "linked.py"))
        told = computed.preheat(*words, env=env).told
        assert told == {"loaded": 6.0, "linked": 6.0, "counted": expected}


def programs(path: Path) -> dict[tuple[str, str], Mapping[str, bytes]]:
    """Return the files of the programs in a bundle, by name and architecture."""
    with Bundle.open(path) as bundle:
        return {(each.title, each.target): each.files for each in foreign_of(bundle)}
