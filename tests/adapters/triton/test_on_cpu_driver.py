"""Kernels of Triton are compiled and launched on the CPU driver, without torch."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is a large package, which `make test-adapters` installs")

from preheat.build.bundles import foreign_of
from preheat.driver.library import LIBRARY
from preheat.store.bundle import Bundle
from tests.adapters.on_cpu_driver import Computed
from tests.adapters.triton.world import STANDIN, triton_version

pytestmark = [
    pytest.mark.skipif(not LIBRARY.is_file(), reason="the CPU driver was not built"),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="Triton compiles its host code with gcc"),
]

BOTH = ("sm_90", "sm_100")
#: The products of float16 are summed in float32, and the exponentials of a GPU have two wrong bits.
TOLERANCES = {"matmul": 1e-5, "softmax": 1e-6, "layer_norm": 1e-6}


@pytest.fixture(scope="module")
def computed(tmp_path_factory: pytest.TempPathFactory) -> Computed:
    found = importlib.util.find_spec("triton")
    assert found is not None
    assert found.origin is not None
    paths = [Path(found.origin).parents[1]]
    if triton_version() <= (3, 7):  # It asks torch about the GPU.
        paths.append(STANDIN / "fake_torch")
    root = tmp_path_factory.mktemp("computed")
    return Computed(root, Path(__file__).parent / "computed", paths, {"TRITON_DEFAULT_FP_FUSION": "1"})


def check(errors: dict[str, float]) -> None:
    assert errors.keys() == TOLERANCES.keys()
    assert {name for name, error in errors.items() if not error < TOLERANCES[name]} == set()


@pytest.mark.parametrize("arch", BOTH)
def test_results_agree_with_numpy(computed: Computed, arch: str) -> None:
    check(computed.preheat("emulate", "--arch", arch, "--", *computed.command).told)


@pytest.fixture(scope="module")
def bundle(computed: Computed) -> Path:
    return computed.bake(*BOTH)


@pytest.mark.parametrize("arch", BOTH)
def test_a_bundle_for_production_is_run_sealed(computed: Computed, bundle: Path, arch: str) -> None:
    check(computed.run_sealed(bundle, arch).told)


def test_baked_kernels_are_the_same_with_and_without_the_driver(
    computed: Computed, bundle: Path
) -> None:
    other = computed.root / "other.heat"
    archs = [word for arch in BOTH for word in ("--arch", arch)]
    computed.emulate("bake", str(computed.root / "kernels.toml"), *archs, "-o", str(other))
    assert kernels(other) == kernels(bundle)
    assert len(kernels(bundle)) == len(BOTH) * len(TOLERANCES)


def kernels(path: Path) -> dict[tuple[str, str], Mapping[str, bytes]]:
    """Return the files of the kernels in a bundle, by name and architecture."""
    with Bundle.open(path) as bundle:
        return {(each.title, each.target): each.files for each in foreign_of(bundle) if each.arch}
