"""Kernels in Gluon are audited, recorded, baked with an empty cache, and run sealed."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is a large package, which `make test-adapters` installs")

from preheat.ahead.manifest import Manifest
from preheat.audit.library import LIBRARY
from tests.adapters.triton.world import World
from tests.processes import kill_started_processes

LAUNCHED = ["scale", "scale", "shift"]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, standin_driver: Path) -> Iterator[World]:
    """Return the application in Gluon, recorded as sm_90."""
    made = World(tmp_path_factory.mktemp("gluon") / "world", standin_driver)
    made.record(str(made.app / "gluon_app.py"))
    yield made
    kill_started_processes()


def bake(recorded: World, place: World, *more: str) -> Path:
    """Bake for two architectures with a cache that has none of the kernels, and return the bundle."""
    bundle = place.root / "gluon.heat"
    archs = ("--arch", "sm_90", "--arch", "sm_100")
    manifest = recorded.root / "kernels.toml"
    ran = place.preheat("bake", str(manifest), *archs, *more, "-o", str(bundle)).ok()
    assert "its key is not the recorded one" not in ran.err
    return bundle


def test_a_recording_has_the_kernels_and_their_layouts(recorded: World) -> None:
    items = [item for item in Manifest.read(recorded.root / "kernels.toml").foreign if item.request]
    assert sorted(item.name.partition(":")[2] for item in items) == LAUNCHED
    (shift,) = (item.row for item in items if item.name == "gluon_kernels:shift")
    constants = {tuple(path): value for path, value in shift["constants"]}
    assert constants[4,]["layout"]["type"].endswith(":SliceLayout")


def test_kernels_are_baked_with_an_empty_cache_and_run_sealed(recorded: World) -> None:
    bundle = bake(recorded, recorded.sibling("bake"))
    for cc in (90, 100):
        place = recorded.sibling(f"sealed-{cc}")
        ran = place.run("import gluon_app; gluon_app.main()", cc=cc, sealed=bundle)
        assert (ran.misses, "compiles" in ran.stats) == (0, False)
        assert [name for name, *_ in ran.launches] == LAUNCHED


@pytest.mark.parametrize("coverage", ["weak", "closure"])
def test_more_variants_than_were_recorded_are_baked(recorded: World, coverage: str) -> None:
    bundle = bake(recorded, recorded.sibling(coverage), "--coverage", coverage)
    place = recorded.sibling(f"sealed-{coverage}")
    ran = place.run("import gluon_app; gluon_app.main((1, 2**40, 7))", sealed=bundle)
    assert (ran.misses, ran.stats.get("weak", 0)) == (0, 2 * (coverage == "weak"))
    assert "compiles" not in ran.stats


@pytest.mark.skipif(not LIBRARY.is_file(), reason="the audit library was not built")
def test_an_audit_counts_compiles_of_gluon(world: World) -> None:
    words = ("audit", "--json", "--", sys.executable, str(world.app / "gluon_app.py"))
    cold, warm = (
        json.loads(world.preheat(*words, cc=90, TRITON_CACHE_DIR=str(world.root / "triton")).ok().out)
        for _ in range(2)
    )
    compiles = [row for row in cold["compiles"] if row["compiler"] == "Triton"]
    assert [row["name"] for row in compiles] == LAUNCHED
    assert {row["line"].partition(":")[0] for row in compiles} == {"gluon_app.py"}
    assert [row for row in warm["compiles"] if row["compiler"] == "Triton"] == []
