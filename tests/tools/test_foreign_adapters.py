"""`preheat record`, `run`, `bake` and `check` with a library that has an adapter."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from preheat.ahead.manifest import Manifest
from preheat.store.bundle import Bundle
from tests.adapters.fake import write_library
from tests.command import Cli, Ran
from tests.processes import SOURCE, start_process, wait_for_exit

APP = """\
import sys
import fakelib
for function in sys.argv[1:]:
    print(fakelib.compile(function, portable=function != "local"))
"""
APPLICATION = (sys.executable, "app.py")


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """Runs commands in processes of their own, which get the path of the library."""
    library = write_library(tmp_path / "library")
    (tmp_path / "app.py").write_text(APP)
    env = {
        "PYTHONPATH": os.pathsep.join([str(library), str(SOURCE)]),
        "PREHEAT_CACHE_DIR": str(tmp_path / "cache"),
        "PREHEAT_LOCK_DIR": str(tmp_path / "locks"),
        "NO_COLOR": "1",
    }

    def run(*args: str) -> Ran:
        process = start_process([sys.executable, "-m", "preheat", *args], env=env, cwd=tmp_path)
        out, err = wait_for_exit(process)
        return Ran(process.returncode, out, err)

    return run


def test_a_recording_counts_the_requests_of_each_library(cli: Cli, tmp_path: Path) -> None:
    ran = cli("record", "--", *APPLICATION, "add", "mul", "add", "local")
    assert ran == (
        0,
        "add sm_90\nmul sm_90\nadd sm_90\nlocal sm_90\n",
        "recorded 0 programs (0 new), 3 requests of fakelib, for sm_90 → kernels.toml\n"
        "what a bake cannot make again is in kernels.recorded.heat: copy it with the manifest\n",
    )
    items = {item.name: item for item in Manifest.read(tmp_path / "kernels.toml").foreign}
    assert {name: item.requests for name, item in items.items()} == {"add": 2, "local": 1, "mul": 1}
    assert items["add"].callers == ("app.py:4",)
    assert items["add"].root == str(tmp_path)
    again = cli("record", "--", *APPLICATION, "add")
    assert "1 request of fakelib" in again.err


def test_a_recording_as_json(cli: Cli) -> None:
    found = cli("record", "--json", "--", *APPLICATION, "add", "local").json()
    assert found["programs"] == []
    assert found["foreign"] == [
        {
            "kind": "fakelib",
            "name": name,
            "can_be_baked": name == "add",
            "arch": ["sm_90"],
            "coverage": "recorded",
            "seconds": pytest.approx(0.0, abs=60),
            "requests": 1,
            "callers": ["app.py:4"],
        }
        for name in ("add", "local")
    ]


def test_child_processes_of_the_command_are_recorded(cli: Cli, tmp_path: Path) -> None:
    parent = (
        "import subprocess, sys, multiprocessing\n"
        "subprocess.run([sys.executable, 'app.py', 'child'], check=True)\n"
    )
    assert cli("record", "--", sys.executable, "-c", parent).code == 0
    (tmp_path / "pool.py").write_text(
        "import multiprocessing, fakelib\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print(pool.map(fakelib.compile, ['worker']))\n"
        "        pool.close()\n"
        "        pool.join()\n"
    )
    ran = cli("record", "--", sys.executable, "pool.py")
    assert (ran.code, ran.out) == (0, "['worker sm_90']\n"), ran.err
    names = [item.name for item in Manifest.read(tmp_path / "kernels.toml").foreign]
    assert names == ["child", "worker"]


def test_adapters_can_be_switched_off_while_recording(cli: Cli) -> None:
    code = "import os, fakelib; print(len(fakelib.adapters))"
    for value, expected in (("off", "0"), ("fakelib", "1")):
        words = ("env", f"PREHEAT_ADAPTERS={value}", sys.executable, "-c", code)
        assert cli("record", "--", *words).out == f"{expected}\n"


def test_a_bake_and_a_check_report_requests_beside_programs(cli: Cli, tmp_path: Path) -> None:
    assert cli("record", "--", *APPLICATION, "add", "mul", "local").code == 0
    ran = cli("bake", "kernels.toml", "-o", "k.heat")
    assert ran.code == 0
    head, row = ran.out.splitlines()
    assert head.split() == ["ARCH", "PROGRAMS", "COMPILED", "FOUND", "COMPILING", "SIZE"]
    assert row.split()[:4] == ["sm_90", "3", "0", "3"]
    kept = "it cannot be compiled again; the recorded entry was copied"
    assert f"fakelib local for sm_90: {kept}" in ran.err
    assert "k.heat: 3 baked" in ran.out + ran.err

    (tmp_path / "kernels.toml").write_text(
        (tmp_path / "kernels.toml")
        .read_text()
        .replace('name = "mul"', 'name = "mul"\ncoverage = "weak"')
    )
    found = cli("bake", "kernels.toml", "-o", "k.heat", "--json").json()
    sources = {row["label"]: row["source"] for row in found["baked"]}
    assert sources == {"fakelib add": "cache", "fakelib local": "cache", "fakelib mul": "compiler"}

    assert cli("check", "kernels.toml", "--bundle", "k.heat").code == 0
    ran = cli("check", "kernels.toml", "--bundle", "k.heat", "--arch", "sm_80")
    assert ran.code == 1
    assert "fakelib add sm_80: not baked for this architecture" in ran.out.splitlines()


def test_the_coverage_of_a_bake_and_a_check_is_an_option(cli: Cli, tmp_path: Path) -> None:
    assert cli("record", "--", *APPLICATION, "add", "local").code == 0
    manifest = (tmp_path / "kernels.toml").read_text()
    weak = ("--coverage", "weak")
    for _ in range(2):
        assert cli("bake", "kernels.toml", "-o", "weak.heat", *weak).code == 0
    listed = cli("bundle", "ls", "weak.heat", "--json").json()["foreign"]
    assert sorted(row["program"] for row in listed) == ["add", "add", "local"]
    assert cli("bake", "kernels.toml", "-o", "k.heat").code == 0
    assert cli("check", "kernels.toml", "--bundle", "k.heat").code == 0
    ran = cli("check", "kernels.toml", "--bundle", "k.heat", *weak)
    assert (ran.code, ran.out) == (1, "fakelib add sm_90: 1 of 2 not baked\n")
    assert cli("check", "kernels.toml", "--bundle", "weak.heat", *weak).code == 0
    assert cli("bake", "kernels.toml", "--check", "-o", "k.heat", *weak).code == 1
    assert (tmp_path / "kernels.toml").read_text() == manifest
    assert cli("bake", "kernels.toml", "--coverage", "all").code == 2


def test_what_cannot_be_made_again_is_beside_the_manifest(cli: Cli, tmp_path: Path) -> None:
    assert cli("record", "--", *APPLICATION, "add").code == 0
    assert not (tmp_path / "kernels.recorded.heat").exists()
    assert cli("record", "-o", "a.toml", "--", *APPLICATION, "local", "add").code == 0
    assert cli("record", "-o", "b.toml", "--fresh", "--merge", "a.toml").code == 0
    assert cli("record", "-o", "c.toml", "--fresh", "--", *APPLICATION, "local").code == 0
    (tmp_path / "cache").rename(tmp_path / "gone")
    (tmp_path / "elsewhere").mkdir()
    for name in ("a", "b", "c"):
        text = (tmp_path / f"{name}.toml").read_text()
        assert f'\nrecorded = "{name}.recorded.heat@sha256:' in text
        for file in (f"{name}.toml", f"{name}.recorded.heat"):
            (tmp_path / file).rename(tmp_path / "elsewhere" / file)
        ran = cli("bake", f"elsewhere/{name}.toml", "-o", f"{name}.heat")
        assert ran.code == 0, ran.err
    sealed = ("run", "--bundle", "a.heat", "--sealed", "--empty-cache", "--")
    assert cli(*sealed, *APPLICATION, "local", "add").out == "local sm_90\nadd sm_90\n"
    # A new recording without such entries removes the bundle.
    assert cli("record", "-o", "elsewhere/c.toml", "--fresh", "--", *APPLICATION, "add").code == 0
    assert not (tmp_path / "elsewhere" / "c.recorded.heat").exists()
    assert 'recorded = "c.' not in (tmp_path / "elsewhere" / "c.toml").read_text()


def test_a_bundle_beside_the_manifest_that_is_missing_is_not_forgotten(
    cli: Cli, tmp_path: Path
) -> None:
    assert cli("record", "--", *APPLICATION, "local").code == 0
    recorded = tmp_path / "kernels.recorded.heat"
    recorded.rename(tmp_path / "away")
    ran = cli("record", "-o", "all.toml", "--merge", "kernels.toml")
    assert ran.code == 1
    assert f"{recorded} is missing: it has the entries that cannot be made again" in ran.err
    (tmp_path / "cache").rename(tmp_path / "gone")
    ran = cli("bake", "kernels.toml")
    assert ran.code == 1
    assert (
        "fakelib local for sm_90: its recorded entry is neither beside the manifest nor in the cache\n"
        f"\nhint: copy {recorded} from the machine that recorded, or record again on a GPU of sm_90"
    ) in ran.err


def test_a_bake_that_fails_names_the_request(cli: Cli) -> None:
    assert cli("record", "--", *APPLICATION, "add", "raises", "dies").code == 0
    ran = cli("bake", "kernels.toml", "-o", "k.heat")
    assert ran.code == 1
    assert "fakelib raises for sm_90: ZeroDivisionError: division by zero" in ran.err
    assert "the process of the adapter for fakelib ended with status 3" in ran.err


def test_a_sealed_run_uses_the_bundle_alone(cli: Cli, tmp_path: Path) -> None:
    assert cli("record", "--", *APPLICATION, "add").code == 0
    assert cli("bake", "kernels.toml", "-o", "k.heat").code == 0
    (tmp_path / "cache").rename(tmp_path / "gone")
    sealed = ("run", "--bundle", "k.heat", "--sealed", "error", "--")
    ran = cli(*sealed, *APPLICATION, "add")
    assert (ran.code, ran.out) == (0, "add sm_90\n"), ran.err
    ran = cli(*sealed, *APPLICATION, "mul")
    assert ran.code == 1
    assert "SealedError: app.py:4: fakelib mul (sm_90) cannot be compiled" in ran.err


# Hints of a check


def test_a_check_of_a_damaged_bundle_says_so_and_names_no_bake(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "k.cu").write_text('extern "C" __global__ void k() {}')
    assert cli("record", "--", *APPLICATION, "add", "mul").code == 0
    with (tmp_path / "kernels.toml").open("a") as file:
        file.write('\n[[program]]\nfile = "k.cu"\narch = ["sm_90"]\n')
    assert cli("bake", "kernels.toml", "-o", "k.heat").code == 0
    data = bytearray((tmp_path / "k.heat").read_bytes())
    with Bundle.open(tmp_path / "k.heat") as bundle:
        blobs = [bundle.get(digest) or b"" for digest in bundle.digests()]
    for blob in blobs:
        data[data.index(blob) + len(blob) - 1] ^= 1
    (tmp_path / "damaged.heat").write_bytes(data)
    ran = cli("check", "kernels.toml", "--bundle", "damaged.heat")
    assert ran.code == 1
    names = ("k.cu", "fakelib add", "fakelib mul")
    damaged = {f"{name} sm_90: damaged: copy the bundle again" for name in names}
    assert set(ran.out.splitlines()) == damaged
    assert "hint: copy the bundle again, and check it: 'preheat bundle verify FILE'" in ran.err
    assert "preheat bake" not in ran.err


def test_a_check_names_a_bake_only_where_it_helps(cli: Cli, tmp_path: Path) -> None:
    assert cli("record", "--", *APPLICATION, "add", "local").code == 0
    assert cli("bake", "kernels.toml", "-o", "k.heat").code == 0
    ran = cli("check", "kernels.toml", "--bundle", "k.heat", "--arch", "sm_80")
    cannot = "it was recorded for sm_90, and only a run on a GPU makes it for another architecture"
    assert f"fakelib local sm_80: {cannot}" in ran.out.splitlines()
    assert "hint: 'preheat bake kernels.toml' with the same --arch bakes 1 of them" in ran.err
    assert "hint: a bake cannot make 1 of them: record again with --fresh, on a GPU" in ran.err
    library = tmp_path / "library" / "fakelib.py"
    library.write_text(library.read_text() + "version = 2\n")
    ran = cli("check", "kernels.toml", "--bundle", "k.heat")
    assert ran.code == 1
    assert ran.out == "fakelib add sm_90: version 2 is not known\n"
    assert "hint: use version 1" in ran.err
    assert "preheat bake" not in ran.err
    library.write_text("import a_module_that_is_missing")
    ran = cli("check", "kernels.toml", "--bundle", "k.heat")
    assert "a_module_that_is_missing" in ran.out
    assert "preheat bake" not in ran.err


def test_a_check_of_a_source_that_is_gone_names_no_bake(cli: Cli, tmp_path: Path) -> None:
    text = 'version = 1\n\n[[program]]\nfile = "gone.cu"\narch = ["sm_90"]\n'
    (tmp_path / "k.toml").write_text(text)
    ran = cli("check", "k.toml")
    assert ran.code == 1
    assert "gone.cu" in ran.out
    assert "hint: " in ran.err
    assert "preheat bake" not in ran.err
