"""Entries of other libraries on the command line: every command knows their kinds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from preheat.build.builder import Builder
from preheat.model.arch import Arch
from preheat.model.foreign import ForeignEntry
from preheat.store.bundle import Bundle, write
from tests.command import Cli
from tests.conftest import SAXPY


@pytest.fixture
def stored(cli: Cli, tmp_path: Path) -> ForeignEntry:
    """Two entries: a program that preheat compiled, and a foreign entry."""
    (tmp_path / "saxpy.cu").write_text(SAXPY)
    assert cli("compile", "saxpy.cu", "--arch", "sm_90").code == 0
    files = {"add.cubin": b"\x7fELF\x00", "add.ptx": b".version 8.0\n"}
    return put(ForeignEntry("triton", "K" * 52, files, label="kernels:add", arch=Arch.parse("sm_90")))


def put(entry: ForeignEntry) -> ForeignEntry:
    Builder.open().foreign.put(entry)
    return entry


def test_ls_shows_kinds(cli: Cli, stored: ForeignEntry) -> None:
    listed = cli("cache", "ls").out.splitlines()
    assert listed[0].split()[:3] == ["KEY", "KIND", "PROGRAM"]
    rows = {line.split()[1]: line.split() for line in listed[1:]}
    assert rows["triton"][0] == stored.digest[:12]
    assert rows["triton"][2:4] == ["kernels:add", "sm_90"]
    assert rows["cuda"][2] == "saxpy.cu"
    only = cli("cache", "ls", "--kind", "triton", "--json")
    (row,) = json.loads(only.out)
    assert (row["kind"], row["foreign_key"]) == ("triton", "K" * 52)
    assert row["files"] == ["add.cubin", "add.ptx"]


@pytest.mark.usefixtures("stored")
def test_an_unknown_kind_is_an_error_that_names_the_kinds(cli: Cli) -> None:
    for command in ("ls", "verify", "prune"):
        ran = cli("cache", command, "--kind", "cupy")
        assert ran.code == 2
        assert "no entry of kind 'cupy'" in ran.err
        assert "cuda, triton" in ran.err


def test_show_prints_the_files(cli: Cli, stored: ForeignEntry) -> None:
    shown = cli("cache", "show", stored.digest[:12]).out
    assert "K" * 52 in shown
    assert "add.cubin" in shown
    assert cli("cache", "show", stored.digest[:12], "--ptx").out.startswith(".version 8.0")
    assert cli("cache", "show", stored.digest[:12], "--file", "add.ptx").out == ".version 8.0\n"
    wrong = cli("cache", "show", stored.digest[:12], "--file", "sub.ptx")
    assert (wrong.code, "it has add.cubin, add.ptx" in wrong.err) == (2, True)
    details = json.loads(cli("cache", "show", stored.digest[:12], "--json").out)
    assert details["files"] == {"add.cubin": 5, "add.ptx": 13}


def test_why_compares_programs_of_preheat_alone(cli: Cli, stored: ForeignEntry) -> None:
    ran = cli("cache", "why", stored.digest[:12], stored.digest[:12])
    assert ran.code == 2
    assert "holds files of triton" in ran.err


def test_stats_count_by_kind(cli: Cli, stored: ForeignEntry) -> None:
    assert "2 (cuda 1, triton 1)" in cli("cache", "stats").out
    kinds = json.loads(cli("cache", "stats", "--json").out)["kinds"]
    assert kinds["triton"]["entries"] == 1
    assert kinds["triton"]["bytes"] > stored.size


def test_verify_finds_damage_by_kind(cli: Cli, stored: ForeignEntry, tmp_path: Path) -> None:
    (path,) = (tmp_path / "cache").rglob(f"{stored.digest}.heat")
    path.write_bytes(path.read_bytes()[:-1])
    assert cli("cache", "verify", "--kind", "cuda").code == 0
    found = cli("cache", "verify", "--kind", "triton")
    assert (found.code, stored.digest in found.out) == (1, True)
    assert cli("cache", "verify", "--repair").code == 0
    assert cli("cache", "verify").code == 0


@pytest.mark.usefixtures("stored")
def test_prune_removes_one_kind(cli: Cli) -> None:
    assert "Nothing was removed" in cli("cache", "prune", "--kind", "triton").err
    assert "Removed 1 file" in cli("cache", "prune", "--kind", "triton", "--limit", "100").err
    assert "saxpy.cu" in cli("cache", "ls").out
    assert "triton" not in cli("cache", "ls").out


def test_prune_keeps_as_many_entries_as_it_is_told(cli: Cli) -> None:
    for number in range(4):
        put(ForeignEntry("test", str(number), {"file": bytes(100)}))
    assert "Removed 3 files" in cli("cache", "prune", "--kind", "test", "--files", "1").err
    assert len(json.loads(cli("cache", "ls", "--json").out)) == 1


def bundle_of(path: Path, *entries: ForeignEntry) -> Path:
    write(path, {entry.digest: entry.encode(provenance=False) for entry in entries}, {})
    return path


def entry(files: dict[str, bytes], key: str = "key") -> ForeignEntry:
    return ForeignEntry("triton", key, files, label="kernels:add")


def test_bundle_commands_know_foreign_entries(cli: Cli, tmp_path: Path) -> None:
    one = bundle_of(tmp_path / "one.heat", entry({"a": b"1"}))
    two = bundle_of(tmp_path / "two.heat", entry({"a": b"1"}), entry({"b": b"2"}, "other"))
    assert cli("bundle", "verify", str(one), str(two)).code == 0
    assert cli("bundle", "merge", str(one), str(two), "-o", "all.heat").code == 0
    table = cli("bundle", "ls", "all.heat").out.partition("\n\n")[0]
    assert [line.split()[1:3] for line in table.splitlines()[1:]] == [["triton", "kernels:add"]] * 2
    foreign = json.loads(cli("bundle", "ls", "all.heat", "--json").out)["foreign"]
    assert [row["foreign_key"] for row in foreign] in (["key", "other"], ["other", "key"])


def test_bundles_with_different_files_for_one_key_are_an_error(cli: Cli, tmp_path: Path) -> None:
    one = bundle_of(tmp_path / "one.heat", entry({"a": b"1"}))
    two = bundle_of(tmp_path / "two.heat", entry({"a": b"2"}))
    failed = cli("bundle", "merge", str(one), str(two), "-o", "all.heat")
    assert failed.code != 0
    assert "file a differs" in failed.err
    assert cli("bundle", "merge", str(one), str(two), "--prefer", "last", "-o", "all.heat").code == 0
    with Bundle.open(tmp_path / "all.heat") as bundle:
        assert bundle.get(entry({}).digest) == entry({"a": b"2"}).encode(provenance=False)
