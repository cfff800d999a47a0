"""Autotuned functions: their results travel with the manifest, and belong to a source and a GPU."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is a large package, which `make test-adapters` installs")

from preheat.ahead.foreign import RECORD_AGAIN
from preheat.ahead.manifest import Manifest
from tests.adapters.triton.world import World

SERVE = """\
import sys
import kernels as k
from tensors import Tensor

def main():
    for n in map(int, sys.argv[1:] or ["8192"]):
        k.tuned[(8,)](Tensor("fp32"), n)
    print("benchmarks", len(k.benchmarks))

if __name__ == "__main__":
    main()
"""
TITLE = "triton kernels:tuned tuned for (8192, 'fp32')"


@pytest.fixture
def serve(world: World) -> str:
    program = world.app / "serve.py"
    program.write_text(SERVE)
    return str(program)


def elsewhere(world: World, name: str) -> World:
    """Return another machine with the manifest, what is beside it, and the application."""
    other = World(world.root / name, world.driver)
    shutil.rmtree(other.app)
    shutil.copytree(world.app, other.app)
    for file in world.root.glob("kernels.*"):
        shutil.copy(file, other.root)
    return other


def run_sealed(world: World, serve: str, bundle: Path, *words: str, cc: int = 90) -> str:
    """Return the output of the application, sealed, with the cache of `world`."""
    command = ("run", "--sealed", "error", "--bundle", str(bundle), "--", sys.executable, serve, *words)
    return world.preheat(*command, cc=cc).ok().out


def test_a_result_travels_with_the_manifest_to_a_machine_with_an_empty_cache(
    world: World, serve: str
) -> None:
    manifest = world.record(serve)
    recorded = world.root / "kernels.recorded.heat"
    assert f'recorded = "{recorded.name}@sha256:' in manifest.read_text()
    (item,) = (item for item in Manifest.read(manifest).foreign if "tuned for" in item.name)
    assert item.title == TITLE
    assert item.kept
    other = elsewhere(world, "build")
    bundle = other.root / "tuned.heat"
    manifest = other.root / "kernels.toml"
    ran = other.preheat("bake", str(manifest), "-o", str(bundle)).ok()
    assert f"{TITLE} for sm_90: the measured result of the recording was copied" in ran.err
    other.preheat("check", str(manifest), "--bundle", str(bundle)).ok()
    out = run_sealed(other.sibling("pod"), str(other.app / "serve.py"), bundle)
    assert out.splitlines()[-1] == "benchmarks 0"


def test_a_missing_bundle_of_the_recording_is_named(world: World, serve: str) -> None:
    world.record(serve)
    other = elsewhere(world, "build")
    recorded = other.root / "kernels.recorded.heat"
    recorded.unlink()
    ran = other.preheat("bake", str(other.root / "kernels.toml"))
    assert ran.code == 1
    assert (
        f"{TITLE} for sm_90: its measured result is neither beside the manifest nor in the cache\n\n"
        f"hint: copy {recorded} from the machine that recorded, or record again on a GPU of sm_90"
    ) in ran.err


def test_a_recording_without_tuned_functions_has_no_bundle(baked: World) -> None:
    assert not (baked.root / "kernels.recorded.heat").exists()
    assert 'recorded = "' not in (baked.root / "kernels.toml").read_text()


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        ("@triton.autotune(", "# A comment.\n@triton.autotune(", "moved from line {0} to line {1}"),
        ("(256, 512)", "(256, 512, 1024)", "its configurations have changed"),
        ("mask=offs < n) * 2", "mask=offs < n) * 3", "its source, or that of a function that it calls"),
    ],
)
def test_a_result_of_another_source_is_reported_by_bake_check_and_run(
    world: World, serve: str, before: str, after: str, reason: str
) -> None:
    manifest = world.record(serve)
    world.preheat("bake", str(manifest)).ok()
    file = world.app / "kernels.py"
    text = file.read_text()
    assert before in text
    file.write_text(text.replace(before, after))
    line = text[: text.index("@triton.autotune(")].count("\n") + 1
    why = reason.format(line, line + 1)
    measured = "its result was measured before a change, and must be measured again"
    ran = world.preheat("bake", str(manifest))
    assert ran.code == 1
    assert f"error: {TITLE} for sm_90: {measured}: {why}" in ran.err
    assert f"\nhint: {RECORD_AGAIN}\n" in ran.err
    bundle = str(world.root / "kernels.heat")
    for place, words in (
        ("check", ("check", str(manifest), "--bundle", bundle)),
        ("run", ("run", "--sealed", "--bundle", bundle, "--manifest", str(manifest), "--", "true")),
    ):
        ran = world.sibling(place).preheat(*words)
        assert ran.code == (1 if place == "check" else 3), ran.err
        assert f"{TITLE} sm_90: {measured}: {why}" in ran.out
        assert f"\nhint: a bake cannot make what is missing: {RECORD_AGAIN}\n" in ran.err


@pytest.mark.parametrize(
    ("before", "after", "reason", "hint"),
    [
        (
            "def tuned(",
            "def retuned(",
            "module kernels has no function tuned",
            "did you mean 'retuned'? If so, record again with --fresh",
        ),
        (
            "def tuned(",
            "def other(x_ptr, n):\n    pass\n\n\n@triton.jit\ndef tuned(",
            "kernels:tuned is not autotuned",
            "record again with --fresh",
        ),
    ],
)
def test_a_function_that_was_renamed_or_is_no_longer_tuned_is_reported(
    world: World, serve: str, before: str, after: str, reason: str, hint: str
) -> None:
    manifest = world.record(serve)
    file = world.app / "kernels.py"
    file.write_text(file.read_text().replace(before, after))
    for command, place in (("bake", "err"), ("check", "out")):
        ran = world.preheat(command, str(manifest))
        assert ran.code == 1
        assert reason in getattr(ran, place)
        assert f"\nhint: {hint}\n" in ran.err


def test_a_result_is_needed_for_each_architecture(world: World, serve: str) -> None:
    manifest = world.record(serve)
    bundle = str(world.root / "two.heat")
    ran = world.preheat("bake", str(manifest), "--arch", "sm_90", "--arch", "sm_100", "-o", bundle)
    assert ran.code == 1
    only = "a result is measured on a GPU, and there is one for sm_90 only"
    assert f"error: {TITLE} for sm_100: {only}" in ran.err
    assert (
        "hint: record on a GPU of sm_100, and add that recording: "
        "preheat record -o MANIFEST --merge OTHER" in ran.err
    )
    ran = world.sibling("check").preheat("check", str(manifest), "--arch", "sm_100", "--bundle", bundle)
    assert ran.code == 1
    assert f"{TITLE} sm_100: {only}\n" in ran.out
    assert "a bake cannot make what is missing" in ran.err


def test_recordings_of_two_gpus_are_merged_and_baked_once(world: World, serve: str) -> None:
    for cc in (90, 100):
        world.sibling(str(cc)).record(serve, cc=cc)
    build = world.sibling("build")
    merged = str(build.root / "all.toml")
    others = [str(world.root / name / "kernels.toml") for name in ("90", "100")]
    build.preheat("record", "-o", merged, "--merge", others[0], "--merge", others[1]).ok()
    (item,) = (item for item in Manifest.read(merged).foreign if "tuned for" in item.name)
    assert [str(arch) for arch in item.archs] == ["sm_90", "sm_100"]
    both = ("--arch", "sm_90", "--arch", "sm_100")
    bundle = build.root / "all.heat"
    build.preheat("bake", merged, *both, "-o", str(bundle)).ok()
    build.preheat("check", merged, *both, "--bundle", str(bundle)).ok()
    for cc in (90, 100):
        out = run_sealed(build.sibling(f"pod-{cc}"), serve, bundle, cc=cc)
        assert out.splitlines()[-1] == "benchmarks 0"


def test_a_recorded_bundle_that_was_changed_is_refused(world: World, serve: str) -> None:
    manifest = world.record(serve)
    recorded = world.root / "kernels.recorded.heat"
    recorded.write_bytes(recorded.read_bytes() + b"x")
    ran = world.preheat("bake", str(manifest))
    assert ran.code == 2
    assert "kernels.recorded.heat" in ran.err
    recorded.write_bytes(recorded.read_bytes()[:-1])
    recorded.chmod(0o666)
    ran = world.preheat("bake", str(manifest))
    assert ran.code == 2
    assert "others can write to it (mode 0666)" in ran.err


def test_a_new_recording_replaces_results_of_an_earlier_source(world: World, serve: str) -> None:
    world.record(serve)
    file = world.app / "kernels.py"
    file.write_text("# A comment.\n" + file.read_text().replace("(256, 512)", "(256, 512, 1024)"))
    manifest = world.record(serve)
    (item,) = (item for item in Manifest.read(manifest).foreign if "tuned for" in item.name)
    assert len(item.entries) == 1
    world.preheat("bake", str(manifest)).ok()
    world.preheat("check", str(manifest), "--bundle", str(world.root / "kernels.heat")).ok()


# The adapter is installed after the functions were decorated

LATE = """\
import sys
import kernels as k
from tensors import Tensor
import preheat, preheat.adapters
preheat.adapters.install("triton")
k.tuned[(8,)](Tensor("fp32"), int(sys.argv[1]))
print("benchmarks", len(k.benchmarks))
"""


def test_a_function_that_was_decorated_before_the_install_is_not_measured(
    world: World, serve: str
) -> None:
    manifest = world.record(serve)
    world.preheat("bake", str(manifest)).ok()
    program = world.root / "late.py"
    program.write_text(LATE)
    bundle = world.root / "kernels.heat"
    place = world.sibling("late")
    ran = place.python(str(program), "8192", sealed=bundle).ok()
    assert ran.out == "benchmarks 0\n"
    ran = place.python(str(program), "4096", sealed=bundle)
    assert ran.code == 1
    assert (
        "late.py:6: triton kernels:tuned tuned for (4096, 'fp32') (sm_90) cannot be measured" in ran.err
    )


def test_a_warning_names_the_line_of_the_program(world: World) -> None:
    events = world.root / "events.jsonl"
    world.run("k.tuned[(8,)](x, 8192)\n", PREHEAT_SEALED="warn", PREHEAT_EVENTS=str(events))
    rows = [json.loads(line) for line in events.read_text().splitlines()]
    sealed = [row for row in rows if row["event"] == "sealed"]
    assert any("tuned for" in row["program"] for row in sealed)
    assert {row["caller"].rpartition(":")[0] for row in sealed} == {"program0.py", "app/kernels.py"}
