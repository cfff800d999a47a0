"""More variants than were recorded: all of a closure, or four that serve every launch."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is a large package, which `make test-adapters` installs")

from tests.adapters.triton.world import World

ALIGNED = 0x7F0000000000


def only(manifest: Path, target: Path, name: str, coverage: str) -> Path:
    """Write a manifest with the first request of a function, and the entries that any launch needs."""
    intro, *tables = manifest.read_text().split("[[foreign]]")
    requests = [each for each in tables if f'name = "{name}"' in each]
    rest = [each for each in tables if "request = " not in each]
    changed = requests[0].replace("\nrequest = ", f'\ncoverage = "{coverage}"\nrequest = ', 1)
    target.write_text("[[foreign]]".join([intro, changed, *rest]))
    return target


def bake(world: World, baked: World, name: str, coverage: str) -> Path:
    """Bake one function of the application for sm_90, and return the bundle."""
    manifest = only(baked.root / "kernels.toml", baked.root / f"{coverage}.toml", name, coverage)
    bundle = world.root / "kernels.heat"
    # The cache has the host code, which is kept as it was made.
    world.preheat(
        *("bake", str(manifest), "--arch", "sm_90", "-o", str(bundle)),
        PREHEAT_CACHE_DIR=str(baked.cache),
    ).ok()
    return bundle


MM = """
for addresses, values in json.load(open("launches.json")):
    tensors = [T("bf16", offset=address) for address in addresses]
    k.mm[(8, 8)](*tensors, *values, BM=32, BN=32, BK=32, num_stages=2)
"""


def kind(value: int) -> object:
    """Return the variant of an integer argument."""
    wide = not -(2**31) <= value < 2**31
    return 1 if value == 1 else (wide, value % 16 == 0)


def test_weak_kernels_serve_every_launch(world: World, baked: World) -> None:
    bundle = bake(world, baked, "kernels:mm", "weak")
    choose = random.Random(1)
    numbers = (1, 3, 16, 1024, 1_000_003, 2**31 - 1, 2**31, 2**31 + 1, 2**40, -16, -1, 0)
    launches = [
        ([choose.choice((0, 8)) for _ in range(3)], [choose.choice(numbers) for _ in range(6)])
        for _ in range(400)
    ]
    (world.root / "launches.json").write_text(json.dumps(launches))
    ran = world.run(MM, sealed=bundle)

    assert ran.misses == 0
    assert "compiles" not in ran.stats
    assert "sealed" not in ran.stats
    assert ran.compilers == []
    variants = {(*offsets, *map(kind, values)) for offsets, values in launches}
    assert len(variants) > 390
    assert ran.stats["weak"] == len(variants)  # The variant that was recorded is none of them.
    assert len([line for line in ran.log if " load " in line]) == len(variants)

    assert len(ran.launches) == len(launches)
    for (name, *seen), (offsets, values) in zip(ran.launches, launches, strict=True):
        assert name == "mm"
        pointers = [f"8:{ALIGNED + offset:016x}" for offset in offsets]
        assert seen[:3] == pointers
        for text, value in zip(seen[3:9], values, strict=True):
            size, _, bits = text.partition(":")
            assert int(bits, 16) == value % 2 ** (8 * int(size))
            assert int(size) == 8 or kind(value) in (1, (False, False), (False, True))


def test_weak_kernels_can_be_switched_off(world: World, baked: World) -> None:
    bundle = bake(world, baked, "kernels:mm", "weak")
    (world.root / "launches.json").write_text(json.dumps([[[0, 0, 8], [64] * 6]]))
    ran = world.attempt(MM, sealed=bundle, PREHEAT_WEAK_KERNELS="0")
    assert ran.code == 1
    assert "SealedError" in ran.err
    assert "c_ptr: *bf16, divisible by 16 became *bf16" in ran.err


def test_a_check_asks_for_the_host_code_of_every_variant(world: World, baked: World) -> None:
    bundle = bake(world, baked, "kernels:mm", "weak")
    words = (str(baked.root / "weak.toml"), "--arch", "sm_90", "--json")
    place = world.sibling("check")
    assert json.loads(place.preheat("check", *words, "--bundle", str(bundle)).ok().out)["missing"] == []
    shutil.copytree(baked.cache, place.cache)
    entries = [path for path in place.cache.rglob("*") if path.is_file()]
    host_code = [path for path in entries if b'"label":"host code' in path.read_bytes()]
    assert host_code
    for path in host_code:
        path.unlink()
    ran = place.preheat("check", *words)
    reasons = {row["title"]: row["reason"] for row in json.loads(ran.out)["missing"]}
    assert reasons["triton kernels:mm"].endswith("not baked")


def test_the_exact_variant_is_used_where_it_is_there(world: World, baked: World) -> None:
    bundle = bake(world, baked, "kernels:mm", "weak")
    (world.root / "launches.json").write_text(
        json.dumps([[[0, 0, 0], [64] * 6], [[0, 0, 8], [64] * 6]])
    )
    events = world.root / "events.jsonl"
    ran = world.run(MM, sealed=bundle, PREHEAT_EVENTS=str(events))
    assert ran.stats["weak"] == 1
    (weak,) = (
        row for row in map(json.loads, events.read_text().splitlines()) if row["event"] == "weak"
    )
    # The variant of the launch: the third pointer is not aligned.
    assert "b_ptr: *bf16, divisible by 16, c_ptr: *bf16, M: i32, divisible by 16" in weak["variant"]
    missing = MM.replace("BM=32", "BM=64")
    ran = world.attempt(missing, sealed=bundle)
    assert ran.code == 1
    assert "SealedError" in ran.err
    assert "BM: constant 32 became constant 64" in ran.err


ADD = """
import itertools
values = (0, 1, 2, 15, 16, 17, 2**31 - 1, 2**31, 2**31 + 1, 2**40, 2**63 - 1, -1, -16, -(2**63))
for offsets in itertools.product((0, 4), repeat=3):
    for value in values:
        k.add[(1,)](*(T("fp32", offset=each) for each in offsets), value, 0.5, BLOCK=1024)
"""


def test_a_closure_has_every_variant(world: World, baked: World) -> None:
    bundle = bake(world, baked, "kernels:add", "closure")
    ran = world.run(ADD, sealed=bundle)
    assert ran.misses == 0
    assert "weak" not in ran.stats
    assert "compiles" not in ran.stats
    assert len(ran.launches) == 8 * 14
    listed = json.loads(world.preheat("bundle", "ls", str(bundle), "--json").ok().out)
    assert sum(row["program"] == "kernels:add" for row in listed["foreign"]) == 40


def test_a_closure_that_is_too_large_is_refused_with_its_size(world: World, baked: World) -> None:
    manifest = only(baked.root / "kernels.toml", baked.root / "large.toml", "kernels:mm", "closure")
    bundle = world.root / "kernels.heat"
    ran = world.preheat("bake", str(manifest), "--arch", "sm_90", "-o", str(bundle))
    assert ran.code == 1
    assert (
        "triton kernels:mm for sm_90: the closure of kernels:mm has 125,000 variants, of at most 4,096"
        in ran.err
    )
    assert 'use coverage = "weak" for this function: four kernels serve every launch' in ran.err
