"""Audits of Triton on the stand-in driver: cold, warm, and sealed with a verdict."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from preheat.audit.library import LIBRARY
from preheat.build.bundles import foreign_of
from preheat.store.bundle import Bundle, write
from tests.adapters.triton.world import World

pytestmark = pytest.mark.skipif(not LIBRARY.is_file(), reason="the audit library was not built")

KERNELS = 6  # that the application launches


def audit(world: World, **more: str) -> dict[str, Any]:
    """Audit the application as it is, with one cache of Triton for all runs."""
    cache = str(world.root / "triton")
    words = ["audit", "--json", "--", sys.executable, str(world.app / "app.py")]
    report: dict[str, Any] = json.loads(
        world.preheat(*words, cc=90, TRITON_CACHE_DIR=cache, **more).ok().out
    )
    return report


def test_a_cold_run_compiles_and_a_warm_run_does_not(world: World) -> None:
    cold, warm = audit(world), audit(world)
    triton = [row for row in cold["compiles"] if row["compiler"] == "Triton"]
    assert len(triton) == KERNELS
    assert all(row["name"] and row["line"].startswith("app.py:") for row in triton)
    (first, *_) = cold["libraries"]
    assert first["library"] == "triton"
    assert first["seconds"] > 0
    assert first["bake"].startswith("preheat record -- ")
    assert [row for row in warm["compiles"] if row["compiler"] == "Triton"] == []
    for report in (cold, warm):
        assert [row["kind"] for row in report["modules"]] == ["cubin"] * KERNELS
        assert {row["library"] for row in report["modules"]} == {"triton"}
        assert {(row["origin"], row["from"]) for row in report["modules"]} == {("cache", "Triton")}
        assert all(row["line"].startswith("app.py:") for row in report["modules"])
    assert {row["sha256"] for row in cold["modules"]} == {row["sha256"] for row in warm["modules"]}
    assert all("--version" in row["argv"] for row in warm["compilers"] if row["probe"])


def sealed(world: World, bundle: Path, *more: str) -> list[str]:
    """Return the words of a sealed run with a verdict."""
    verdict = str(world.root / "verdict.json")
    words = ["run", "--sealed", "--bundle", str(bundle), "--verdict", verdict, *more, "--"]
    return [*words, sys.executable, str(world.app / "app.py")]


def test_a_sealed_run_accounts_for_every_module(baked: World) -> None:
    """The stand-in driver starts no CUPTI, which the verdict says: it is complete on hardware alone."""
    world = baked.sibling("verdict")
    ran = world.preheat(*sealed(world, baked.root / "kernels.heat"), cc=90)
    verdict = json.loads((world.root / "verdict.json").read_text())
    assert verdict["modules"]["by_origin"] == {"bundle": KERNELS}
    assert verdict["modules"]["accounted"] == KERNELS
    assert (verdict["compiled"], verdict["refused"]) == ([], [])
    (unseen,) = verdict["unseen"]
    assert unseen.startswith("modules loaded by the CUDA runtime in process ")
    assert ran.code == 4


def test_without_one_entry_nothing_starts_or_its_kernel_is_named(baked: World) -> None:
    world = baked.sibling("other")
    with Bundle.open(baked.root / "kernels.heat") as bundle:
        (missing, *_) = (
            each.digest
            for each in foreign_of(bundle)
            if each.kind == "triton" and str(each.arch) == "sm_90" and "add" in each.label
        )
        rest = {digest: bundle.get(digest) or b"" for digest in bundle.digests() if digest != missing}
        write(world.root / "b.heat", rest, bundle.meta)
    checked = ["--manifest", str(baked.root / "kernels.toml"), "--arch", "sm_90"]
    ran = world.preheat(*sealed(world, world.root / "b.heat", *checked), cc=90)
    assert (ran.code, ran.launches) == (3, [])
    assert "add" in ran.out
    ran = world.preheat(*sealed(world, world.root / "b.heat"), cc=90, PREHEAT_WEAK_KERNELS="0")
    assert ran.code not in (0, 3, 4)
    assert "SealedError" in ran.err
    assert "add" in ran.err
    assert "app.py:" in ran.err


@pytest.mark.parametrize("seal", [[], ["--sealed"]])
def test_an_audit_of_a_run_shows_the_kernels_of_its_bundle(baked: World, seal: list[str]) -> None:
    world = baked.sibling(f"nested{len(seal)}")
    run = [sys.executable, "-m", "preheat", "run", "--bundle", str(baked.root / "kernels.heat"), *seal]
    words = ["audit", "--json", "--", *run, "--", sys.executable, str(world.app / "app.py")]
    report = json.loads(world.preheat(*words, cc=90).ok().out)
    assert [row["origin"] for row in report["modules"]] == ["bundle"] * KERNELS
    assert (report["compiles"], report["refused"]) == ([], [])


def test_a_manifest_is_checked_for_the_gpu_that_the_driver_has(baked: World) -> None:
    """The bundle has kernels for sm_90. A pod on another GPU does not start."""
    manifest = ["--manifest", str(baked.root / "kernels.toml")]
    bundle = baked.root / "kernels.heat"
    world = baked.sibling("other-gpu")
    ran = world.preheat(*sealed(world, bundle, *manifest), cc=120)
    assert (ran.code, ran.launches) == (3, [])
    assert "sm_120: not baked for this architecture" in ran.out
    assert "checking for sm_120, the GPU of this machine" in ran.err
    world = baked.sibling("same-gpu")
    ran = world.preheat(*sealed(world, bundle, *manifest), cc=90)
    assert "checking for sm_90, the GPU of this machine" in ran.err
    assert len(ran.launches) > 0
