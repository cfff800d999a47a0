"""An application of Triton is recorded, baked without a driver, checked, and run sealed."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is a large package, which `make test-adapters` installs")

from preheat.ahead.foreign import RECORD_AGAIN
from preheat.ahead.manifest import Manifest
from tests.adapters.triton.world import World

LAUNCHED = ["add", "add", "add", "add", "strided", "mm"]
BOTH = ("--arch", "sm_90", "--arch", "sm_100")


def test_a_recording_lists_what_was_asked_for(baked: World) -> None:
    manifest = Manifest.read(baked.root / "kernels.toml")
    assert manifest.unrecorded == ()  # The adapter covers ptxas, and gcc for host code.
    items = manifest.foreign
    kernels = [item for item in items if item.request]
    assert sorted(item.name.partition(":")[2] for item in kernels) == sorted(LAUNCHED)
    assert {item.root for item in kernels} == {str(baked.app)}
    assert {str(arch) for item in kernels for arch in item.archs} == {"sm_90"}
    assert {item.requests for item in kernels} == {1}
    lines = (baked.app / "app.py").read_text().splitlines()
    for item in kernels:
        (caller,) = item.callers
        file, _, line = caller.partition(":")
        assert file == "app/app.py"  # from the working directory
        assert f"k.{item.name.partition(':')[2]}[" in " ".join(lines[int(line) - 1 : int(line) + 1])
    (strided,) = (item.row for item in kernels if item.name == "kernels:strided")
    constants = {tuple(path): value for path, value in strided["constants"]}
    assert {"function": "kernels:relu"} in constants.values()
    assert {"dtype": "bf16"} in constants.values()
    assert strided["options"]["num_warps"] == 8
    copied = [item for item in items if not item.request]
    assert {item.name.partition(" ")[0] for item in copied} == {"host", "version"}
    assert all(item.name.startswith(("host code", "version of ptxas")) for item in copied)
    assert not any(item.archs for item in copied)


@pytest.mark.parametrize("cc", [90, 100])
def test_a_sealed_run_compiles_nothing(baked: World, cc: int) -> None:
    place = baked.sibling(f"sealed-{cc}")
    ran = place.run("import app; app.main()", cc=cc, sealed=baked.root / "kernels.heat")
    assert ran.misses == 0
    assert "compiles" not in ran.stats
    assert ran.compilers == []
    assert [name for name, *_ in ran.launches] == LAUNCHED
    assert [line.split()[1:] for line in ran.log if " load " in line] == [["load", "cubin"]] * 6


def test_a_run_that_compiles_starts_programs_that_the_test_sees(world: World) -> None:
    ran = world.run("k.fill[(1,)](o, MODE=7)\n")
    assert any(name.startswith("ptxas") for name in ran.compilers)
    assert ran.stats["compiles"] >= 2


def test_an_application_that_does_not_know_preheat_runs_sealed(baked: World) -> None:
    place = baked.sibling("unchanged")
    command = ("run", "--bundle", str(baked.root / "kernels.heat"), "--sealed", "error", "--")
    ran = place.preheat(*command, sys.executable, str(baked.app / "app.py"), cc=90).ok()
    assert [name for name, *_ in ran.launches] == LAUNCHED
    surprise = "import app, kernels; kernels.fill[(1,)](app.Tensor('fp32'), MODE=1)"
    ran = place.preheat(*command, sys.executable, "-c", surprise, cc=90)
    assert ran.code == 1
    assert "SealedError: <string>:1: triton kernels:fill (sm_90)" in ran.err


def check(world: World, *words: str, **env: Any) -> dict[tuple[str, str], str]:
    """Return the reasons of `preheat check` by request and architecture."""
    ran = world.preheat("check", "--json", *words, **env)
    return {(row["title"], row["arch"]): row["reason"] for row in json.loads(ran.out)["missing"]}


def test_a_bundle_is_checked(baked: World) -> None:
    manifest, bundle = str(baked.root / "kernels.toml"), str(baked.root / "kernels.heat")
    place = baked.sibling("check")
    assert check(place, manifest, "--bundle", bundle, *BOTH) == {}
    missing = check(place, manifest, "--bundle", bundle, "--arch", "sm_80", "--arch", "sm_90")
    assert set(missing.values()) == {"not baked for this architecture"}
    assert {arch for _, arch in missing} == {"sm_80"}
    other = check(place, manifest, "--bundle", bundle, "--arch", "sm_90", TRITON_DISABLE_LINE_INFO="1")
    assert len(other) >= 3
    assert set(other.values()) == {"TRITON_DISABLE_LINE_INFO was not set, and is true"}


def test_a_check_reports_moved_and_changed_functions(baked: World, world: World) -> None:
    shutil.copy(baked.root / "kernels.toml", world.root / "kernels.toml")
    file = world.app / "kernels.py"
    text = file.read_text().replace("return x + y * SCALE", "return x - y * SCALE")
    line = text[: text.index("@triton.jit\ndef mm(")].count("\n") + 1
    file.write_text(text.replace("@triton.jit\ndef mm(", "\n@triton.jit\ndef mm("))
    missing = check(
        world,
        *(str(world.root / "kernels.toml"), "--bundle", str(baked.root / "kernels.heat")),
        *("--arch", "sm_90"),
    )
    changed = "its source, or that of a function that it calls, has changed"
    assert missing == {
        ("triton kernels:add", "sm_90"): changed,
        ("triton kernels:mm", "sm_90"): f"moved from line {line} to line {line + 1}",
    }
    # A bake makes the present code, and says so.
    bundle = world.root / "new.heat"
    ran = world.preheat(
        *("bake", str(world.root / "kernels.toml"), "--arch", "sm_90", "-o", str(bundle)),
        PREHEAT_CACHE_DIR=str(baked.cache),
    ).ok()
    assert f"triton kernels:add for sm_90: {changed}" in ran.err
    assert check(world, str(world.root / "kernels.toml"), "--bundle", str(bundle)) == {}


def test_a_check_reports_other_versions(baked: World) -> None:
    place = baked.sibling("versions")
    text = (baked.root / "kernels.toml").read_text()
    facts = json.loads(text.partition("\nrecorded = '")[2].partition("'")[0])
    changes = [("python", "3.8"), ("triton", "3.4.0"), ("build", "0" * 16)]
    parts = text.split("[[foreign]]")
    for number, (name, value) in enumerate(changes):
        index = [i for i, part in enumerate(parts) if "request = " in part][number]
        assert f'"{name}":"{facts[name]}"' in parts[index]
        parts[index] = parts[index].replace(f'"{name}":"{facts[name]}"', f'"{name}":"{value}"')
    # Beside the application, to which the paths are relative.
    manifest = baked.root / "versions.toml"
    manifest.write_text("[[foreign]]".join(parts))
    ran = place.preheat("check", str(manifest), "--json", "--arch", "sm_90")
    reasons = [row["reason"] for row in json.loads(ran.out)["missing"]]
    assert f"recorded with Python 3.8, and this is {facts['python']}" in reasons
    assert f"recorded with Triton 3.4.0, and this is {facts['triton']}: record again" in reasons
    assert "recorded with another build of Triton" in reasons
    assert ran.code == 1


def test_a_recording_of_another_version_is_refused(baked: World) -> None:
    """Its requests have other assumptions, so a bake would make kernels that nobody asks for."""
    text = (baked.root / "kernels.toml").read_text()
    now = json.loads(text.partition("\nrecorded = '")[2].partition("'")[0])["triton"]
    manifest = baked.root / "older.toml"  # beside the application, to which the paths are relative
    manifest.write_text(text.replace(f'"triton":"{now}"', '"triton":"3.4.0"'))
    place = baked.sibling("older")
    reason = f"recorded with Triton 3.4.0, and this is {now}: record again"
    ran = place.preheat("bake", str(manifest), "--arch", "sm_90", "-o", str(place.root / "k.heat"))
    assert ran.code == 1
    assert f"error: triton kernels:mm for sm_90: {reason}\n\nhint: {RECORD_AGAIN}\n" in ran.err
    # The bundle has the kernels for this version, and the check knows that the recording is older.
    bundle = str(baked.root / "kernels.heat")
    ran = place.preheat("check", str(manifest), "--arch", "sm_90", "--bundle", bundle)
    assert ran.code == 1
    assert f"triton kernels:mm sm_90: {reason}" in ran.out
    assert f"\nhint: a bake cannot make what is missing: {RECORD_AGAIN}\n" in ran.err


def test_a_function_with_other_parameters_is_recorded_again(world: World) -> None:
    manifest = str(world.record())
    kernels = world.app / "kernels.py"
    kernels.write_text(kernels.read_text().replace("n, alpha, BLOCK", "n, alpha, beta, BLOCK", 1))
    reason = (
        "recorded with the parameters x_ptr, y_ptr, o_ptr, n, alpha, BLOCK, and it has "
        "x_ptr, y_ptr, o_ptr, n, alpha, beta, BLOCK: record again"
    )
    ran = world.preheat("bake", manifest, "--arch", "sm_90", "-o", str(world.root / "k.heat"))
    assert ran.code == 1
    assert f"error: triton kernels:add for sm_90: {reason}\n\nhint: record again" in ran.err
    ran = world.preheat("check", manifest, "--arch", "sm_90")
    assert f"triton kernels:add sm_90: {reason}" in ran.out


def test_a_renamed_function_is_named_with_the_most_similar_one(world: World) -> None:
    manifest = str(world.record())
    kernels = world.app / "kernels.py"
    kernels.write_text(kernels.read_text().replace("def add(", "def added("))
    reason = f"module kernels has no function add ({kernels})"
    hint = "\nhint: did you mean 'added'? If so, record again with --fresh\n"
    ran = world.preheat("bake", manifest, "--arch", "sm_90", "-o", str(world.root / "k.heat"))
    assert ran.code == 1
    assert f"error: triton kernels:add for sm_90: {reason}\n{hint}" in ran.err
    ran = world.preheat("check", manifest, "--arch", "sm_90")
    assert ran.code == 1
    assert f"triton kernels:add sm_90: {reason}\n" in ran.out
    assert hint in ran.err


def test_a_module_that_is_not_found_is_looked_for_beside_the_manifest(world: World) -> None:
    manifest = world.record()
    build = world.sibling("build")
    shutil.copy(manifest, build.root / "kernels.toml")
    world.app.rename(world.root / "moved")
    words = ("bake", "kernels.toml", "--arch", "sm_90")
    ran = build.preheat(*words)
    assert ran.code == 1
    assert "triton kernels:add for sm_90: kernels:add cannot be imported: No module" in ran.err
    assert f"(searched: PYTHONPATH and {build.root})" in ran.err
    assert "hint: put the module beside the manifest, or its directory on PYTHONPATH" in ran.err
    for file in (world.root / "moved").glob("*.py"):
        shutil.copy(file, build.root)
    build.preheat(*words).ok()


# Functions that another process cannot import

KEPT = """
import sys
import triton, triton.language as tl
from tensors import Tensor

def make():
    @triton.jit
    def local(o_ptr):
        tl.store(o_ptr, 1.0)
    return local

@triton.jit
def script(o_ptr):
    tl.store(o_ptr, 2.0)

make()[(1,)](Tensor("fp32"))
script[(1,)](Tensor("fp32"))
"""


def test_what_cannot_be_imported_is_kept_for_its_architecture(world: World) -> None:
    program = world.root / "script.py"
    program.write_text(textwrap.dedent(KEPT))
    manifest = world.record(str(program))
    items = {item.name: item for item in Manifest.read(manifest).foreign if item.archs}
    assert sorted(items) == ["script:make.<locals>.local", "script:script"]
    assert all(not item.request and item.entries for item in items.values())

    bundle = world.root / "kept.heat"
    # Another machine, which has nothing in its cache: the code is beside the manifest.
    ran = world.sibling("bake").preheat("bake", str(manifest), "-o", str(bundle)).ok()
    kept = "it cannot be compiled again; the recorded entry was copied"
    assert f"triton script:script for sm_90: {kept}" in ran.err
    assert f"triton script:make.<locals>.local for sm_90: {kept}" in ran.err
    assert check(world.sibling("check"), str(manifest), "--bundle", str(bundle)) == {}
    sealed = world.sibling("sealed")
    command = ("run", "--bundle", str(bundle), "--sealed", "error", "--")
    ran = sealed.preheat(*command, sys.executable, str(program), cc=90).ok()
    assert [name for name, *_ in ran.launches] == ["local", "script"]

    ran = world.preheat("bake", str(manifest), "--arch", "sm_100", "-o", str(world.root / "no.heat"))
    assert ran.code == 1
    assert (
        "triton script:script for sm_100 cannot be made: it was recorded for sm_90, and only a run on "
        "a GPU makes it for another architecture" in ran.err
    )
    assert (
        "record on a GPU of sm_100, and add that recording: preheat record -o MANIFEST --merge OTHER"
        in ran.err
    )
    missing = check(world.sibling("other"), str(manifest), "--bundle", str(bundle), "--arch", "sm_100")
    assert missing["triton script:script", "sm_100"] == (
        "it was recorded for sm_90, and only a run on a GPU makes it for another architecture"
    )


def test_a_script_that_only_defines_functions_is_imported(world: World) -> None:
    program = world.root / "definitions.py"
    program.write_text(
        textwrap.dedent(KEPT)
        .replace("make()[", "if __name__ == '__main__': script[")
        .rsplit("script[", 1)[0]
    )
    manifest = world.record(str(program))
    (item,) = (item for item in Manifest.read(manifest).foreign if item.archs)
    assert item.row["function"] == "definitions:script"
    assert item.root == str(world.root)


KNOBS = """
import triton
triton.knobs.language.default_fp_fusion = False
import app
app.main()
"""


def test_a_knob_that_the_program_sets_is_recorded(world: World) -> None:
    program = world.root / "knobs.py"
    program.write_text(textwrap.dedent(KNOBS))
    manifest = world.record(str(program))
    bundle = world.root / "knobs.heat"
    ran = (
        world.sibling("bake")
        .preheat("bake", str(manifest), "-o", str(bundle), PREHEAT_CACHE_DIR=str(world.cache))
        .ok()
    )
    assert "its key is not the recorded one" not in ran.err
    command = ("run", "--bundle", str(bundle), "--sealed", "error", "--")
    sealed = world.sibling("sealed").preheat(*command, sys.executable, str(program), cc=90).ok()
    assert [name for name, *_ in sealed.launches] == LAUNCHED
