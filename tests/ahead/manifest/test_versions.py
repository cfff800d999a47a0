"""Manifests of version 1, which have other names of keys, are read, merged and rewritten."""

from __future__ import annotations

from pathlib import Path

import pytest

from preheat.ahead.manifest import ForeignProgram, Manifest, ManifestProgram, Unrecorded
from preheat.ahead.recorder import merge_into
from preheat.errors import InputError
from preheat.model.program import Program

OLD = """\
# Owned by the inference team.
version = 1  # the format

[[program]]
label = "a.cu"
file = "k.cu"
# By a warm server.
asked = 3  # in an hour
by = [
    "app.py:12",  # the hot loop
]

[[foreign]]
kind = "triton"
name = "kernels:add"
request = '{"function":"kernels:add"}'
asked = 2
by = ["app.py:7"]

[[unrecorded]]
library = "torch"
compiler = "c++"
by = ["app.py:1"]
"""
NEW = (
    OLD.replace("version = 1", "version = 2")
    .replace("asked =", "requests =")
    .replace("by =", "callers =")
)


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    (tmp_path / "k.cu").write_text("__global__ void k() {}")
    file = tmp_path / "kernels.toml"
    file.write_text(OLD)
    return file


def test_a_manifest_of_version_1_is_read(manifest: Path) -> None:
    read = Manifest.read(manifest)
    (program,), (foreign,), (unrecorded,) = read.programs, read.foreign, read.unrecorded
    assert (program.requests, program.callers) == (3, ("app.py:12",))
    assert (foreign.requests, foreign.callers) == (2, ("app.py:7",))
    assert unrecorded == Unrecorded("torch", "c++", callers=("app.py:1",))
    manifest.write_text(NEW)
    assert Manifest.read(manifest) == read


def test_a_rewrite_gives_the_keys_new_names_and_keeps_everything_else(manifest: Path) -> None:
    before = Manifest.read(manifest)
    (program,) = before.programs
    merge_into(manifest, Manifest((ManifestProgram(program.program, requests=1, callers=("b.py:1",)),)))
    text = manifest.read_text()
    for line in (
        "# Owned by the inference team.\nversion = 2  # the format\n",
        "# By a warm server.\nrequests = 4  # in an hour\n",
        'callers = [\n    "app.py:12",  # the hot loop\n    "b.py:1",\n]\n',
        'requests = 2\ncallers = ["app.py:7"]\n',
        'compiler = "c++"\ncallers = ["app.py:1"]\n',
    ):
        assert line in text
    assert "asked" not in text
    assert "by =" not in text


def test_manifests_of_both_versions_are_merged(manifest: Path, tmp_path: Path) -> None:
    newer = tmp_path / "newer.toml"
    newer.write_text(NEW)
    merged = Manifest.read(manifest).merged(Manifest.read(newer))
    assert (merged.programs[0].requests, merged.foreign[0].requests) == (6, 4)
    merged.write(manifest)
    assert Manifest.read(manifest) == merged
    merged.write(newer, fresh=True)
    assert Manifest.read(newer) == merged


def test_a_header_may_have_the_name_of_an_old_key(tmp_path: Path) -> None:
    program = Program.of("#include <by>\n", label="a.cu", headers={"by": "1", "asked": "2"})
    file = tmp_path / "kernels.toml"
    Manifest((ManifestProgram(program, requests=1),)).write(file)
    file.write_text(file.read_text().replace("version = 2", "version = 1").replace("requests", "asked"))
    before = Manifest.read(file)
    assert before.programs[0].program.headers == program.headers
    merge_into(file, Manifest(foreign=(ForeignProgram("triton", "add", "{}"),)))
    assert Manifest.read(file).programs == before.programs


@pytest.mark.parametrize(("version", "key"), [(1, "requests"), (1, "callers"), (2, "asked"), (2, "by")])
def test_a_version_has_only_its_own_names(manifest: Path, version: int, key: str) -> None:
    manifest.write_text(f'version = {version}\n[[program]]\nfile = "k.cu"\n{key} = 3\n')
    with pytest.raises(InputError, match=f"4: k.cu: unknown key '{key}'"):
        Manifest.read(manifest)


def test_errors_name_the_keys_as_the_file_has_them(manifest: Path) -> None:
    manifest.write_text(OLD.replace("asked = 3", "asked = -3"))
    with pytest.raises(InputError, match=r"toml:8: a\.cu: asked must be a whole number, not -3"):
        Manifest.read(manifest)
