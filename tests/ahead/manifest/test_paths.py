"""Paths in manifests: include directories, moved files, links, unusual names, and writing a file."""

from __future__ import annotations

import os
import shutil
import socket
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from preheat.ahead.manifest import Manifest, ManifestProgram
from preheat.errors import InputError
from preheat.model.key import bundle_key
from preheat.model.program import Program
from tests.ahead.manifest.support import (
    INCLUDING,
    KERNEL,
    SM_90,
    digest,
    digests,
    written,
)

# How an application asks for include directories


def test_a_row_says_how_directories_are_asked_for_where_that_does_not_follow(
    kernel: Path, manifest_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel.write_text(INCLUDING)
    monkeypatch.chdir(manifest_file.parent)
    beside, away = manifest_file.parent / "include", "/usr/include"
    programs = [
        Program.from_file(kernel, label="file.cu", include=["include", away]),
        Program.of(INCLUDING, label="relative.cu", include=["include", away]),
        Program.of(INCLUDING, label="absolute.cu", include=[beside]),
    ]
    manifest = Manifest(tuple(map(ManifestProgram, programs)))
    again = written(manifest, manifest_file)
    assert again == manifest.merged()
    assert digests(again) == digests(manifest.merged())
    text = manifest_file.read_text()
    assert text.count("spelled = ") == 1
    (asked,) = programs[2].include_spellings
    row = tomllib.loads(text)["program"][0]
    assert (row["include"], row["spelled"]) == (["include"], [asked])
    moved = manifest_file.parents[1] / "usr" / "else"
    shutil.copytree(manifest_file.parent, moved)
    assert digests(Manifest.read(moved / "kernels.toml")) == digests(again)


def test_a_file_of_a_package_is_asked_for_as_if_it_were_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "lib" / "site-packages" / "theirs"
    (package / "inc").mkdir(parents=True)
    (package / "k.cu").write_text(INCLUDING)
    monkeypatch.syspath_prepend(str(package.parent))
    program = Program.from_file(package / "k.cu", include=[package / "inc"])
    (wanted,) = written(Manifest((ManifestProgram(program),)), tmp_path / "kernels.toml").programs
    assert wanted.program.path is None
    assert wanted.program.include_spellings == ("{file}", "{file}/inc")
    assert (wanted.program, digest(wanted.program)) == (program, digest(program))


def test_a_hand_written_list_is_seen_from_the_file(
    read: Callable[[str], Manifest], kernel: Path
) -> None:
    kernel.write_text(INCLUDING)
    rows = read(
        f"""
        [[program]]
        file = "kernels/k.cu"
        include = ["include", "kernels/./deep", "../lib"]
        [[program]]
        file = "{kernel}"
        label = "absolute.cu"
        include = ["include"]
        """
    ).programs
    assert rows[1].program.include_spellings == (
        *("{file}", "{file}/../include", "{file}/deep", "{file}/../../lib"),
    )
    assert rows[0].program.include_spellings == ("{file}", "{file}/../include")


@pytest.mark.parametrize(
    ("include", "spelled", "reported"),
    [
        (["a"], ["{file}/a", "{file}/b"], "spelled has 2 texts for 1 include directories"),
        ([], ["{file}/a"], "spelled has 1 texts for 0 include directories"),
        (["a"], ["a"], "spelled has 'a', which is not a spelling of a directory"),
        (["a"], ["{here}/a"], "spelled has '{here}/a', which is not"),
        (["a"], ["{file}a"], "spelled has '{file}a', which is not"),
    ],
)
@pytest.mark.usefixtures("kernel")
def test_a_spelling_that_makes_no_sense_fails_its_own_program(
    include: list[str], spelled: list[str], reported: str, read: Callable[[str], Manifest]
) -> None:
    row = f'[[program]]\nfile = "kernels/k.cu"\ninclude = {include}\nspelled = {spelled}\n'
    (bad,) = read(row).unreadable
    assert reported in str(bad.error)


# Places


def test_a_directory_that_moves_as_a_whole_keeps_every_key(kernel: Path, manifest_file: Path) -> None:
    generated = Program.of(KERNEL, headers={"h.h": "1"}, include=[kernel.parent])
    manifest = Manifest((ManifestProgram(generated), ManifestProgram(Program.from_file(kernel))))
    before = written(manifest, manifest_file)
    moved = manifest_file.parents[1] / "else where" / "deep"
    shutil.move(manifest_file.parent, moved)
    after = Manifest.read(moved / "kernels.toml")
    assert digests(after) == digests(before)
    assert not after.unreadable
    places = [place for w in after.programs for place in (*w.program.include, w.program.path) if place]
    assert set(places) == {str(moved / "kernels"), str(moved / "kernels" / "k.cu")}


@pytest.mark.parametrize(
    "name", ["a b.cu", "ä€😀.cu", "q\"u'o`te.cu", "new\nline\t.cu", "-rf", "#x", "a\\b"]
)
def test_files_may_have_any_name(name: str, manifest_file: Path) -> None:
    file = manifest_file.parent / "dir é\n" / name
    file.parent.mkdir()
    file.write_text(KERNEL)
    program = Program.from_file(file)
    (wanted,) = written(Manifest((ManifestProgram(program),)), manifest_file).programs
    assert (wanted.program, wanted.program.path) == (program, str(file))


def test_a_file_whose_name_is_not_text_is_stored(manifest_file: Path) -> None:
    file = manifest_file.parent / os.fsdecode(b"\xff.cu")
    file.write_text(KERNEL)
    program = Program.from_file(file, label="k.cu")
    (wanted,) = written(Manifest((ManifestProgram(program),)), manifest_file).programs
    assert (wanted.program.source, wanted.program.path) == (KERNEL, None)


def test_a_directory_whose_name_is_not_text_is_refused(manifest_file: Path) -> None:
    program = Program.of(KERNEL, include=[os.fsdecode(b"/\xff")])
    with pytest.raises(InputError, match=r"cannot write .*kernels\.toml: .* is not text"):
        Manifest((ManifestProgram(program),)).write(manifest_file)
    assert not manifest_file.exists()


def test_a_caller_whose_name_is_not_text_is_spelled_out(manifest_file: Path) -> None:
    wanted = ManifestProgram(Program.of(KERNEL), callers=(os.fsdecode(b"\xff.py:1"),))
    assert written(Manifest((wanted,)), manifest_file).programs[0].callers == (r"\udcff.py:1",)


def test_files_beside_and_above_are_named_from_the_manifest(tmp_path: Path) -> None:
    file, home = tmp_path / "src" / "k.cu", tmp_path / "out" / "deep"
    for place in (file.parent, home):
        place.mkdir(parents=True)
    file.write_text(KERNEL)
    program = Program.from_file(home / ".." / ".." / "src" / "k.cu", include=["/usr/include"])
    (wanted,) = written(Manifest((ManifestProgram(program),)), home / "kernels.toml").programs
    assert wanted.program.path == str(file)
    text = (home / "kernels.toml").read_text()
    assert 'file = "../../src/k.cu"' in text
    assert 'include = ["/usr/include"]' in text


def test_links_lead_where_they_did(tmp_path: Path) -> None:
    """The manifest's directory is reached through a link: going up from it is not going up the path."""
    real, src = tmp_path / "a" / "b" / "real", tmp_path / "src"
    for place in (real / "inner", src):
        place.mkdir(parents=True)
    link = tmp_path / "link"
    link.symlink_to(real)
    (tmp_path / "current").symlink_to(src)
    for file in (real / "inner" / "in.cu", src / "out.cu"):
        file.write_text(KERNEL)
    given = [
        Program.from_file(link / "inner" / "in.cu"),
        Program.from_file(tmp_path / "current/out.cu"),
    ]
    Manifest(tuple(map(ManifestProgram, given))).write(link / "kernels.toml")
    assert 'file = "inner/in.cu"' in (real / "kernels.toml").read_text()
    for way in (link, real):
        manifest = Manifest.read(way / "kernels.toml")
        assert not manifest.unreadable
        assert digests(manifest) == [digest(program) for program in given]


def test_a_link_inside_the_directory_is_kept(manifest_file: Path, tmp_path: Path) -> None:
    (tmp_path / "v12").mkdir()
    (tmp_path / "v12" / "k.cu").write_text(KERNEL)
    (manifest_file.parent / "current").symlink_to(tmp_path / "v12")
    program = Program.from_file(manifest_file.parent / "current" / "k.cu")
    Manifest((ManifestProgram(program),)).write(manifest_file)
    assert 'file = "current/k.cu"' in manifest_file.read_text()


def test_a_manifest_that_is_a_link_stays_one(manifest_file: Path, tmp_path: Path) -> None:
    target = tmp_path / "shared" / "kernels.toml"
    target.parent.mkdir()
    manifest_file.symlink_to(target)
    program = Program.of(KERNEL)
    again = written(Manifest((ManifestProgram(program),)), manifest_file)
    assert digests(again) == digests(Manifest.read(target)) == [digest(program)]
    assert manifest_file.is_symlink()


# Writing


def test_directories_that_are_missing_are_made(tmp_path: Path) -> None:
    assert written(Manifest(), tmp_path / "a" / "b" / "kernels.toml") == Manifest()


class CutShort:
    """Replaces `os.fsync`: it fails after `good` successful calls, as on a full disk."""

    def __init__(self, good: int, fault: BaseException) -> None:
        self.left, self.fault = good, fault

    def __call__(self, _: int) -> None:
        self.left -= 1
        if self.left < 0:
            raise self.fault


@pytest.mark.parametrize("good", [0, 1, 2])
@pytest.mark.parametrize("fault", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_write_that_fails_in_the_middle_leaves_the_old_manifest_whole(
    good: int, fault: BaseException, manifest_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = Manifest((ManifestProgram(Program.of(KERNEL)),))
    old.write(manifest_file)
    before = manifest_file.read_bytes()
    new = old.merged(Manifest((ManifestProgram(Program.of("// new", headers={"h.h": "1"})),)))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", CutShort(good, fault))
        with pytest.raises((InputError, KeyboardInterrupt)) as caught:
            new.write(manifest_file)
    if isinstance(caught.value, InputError):
        assert str(caught.value) == f"cannot write {manifest_file}: No space left on device"
    assert manifest_file.read_bytes() == before
    assert Manifest.read(manifest_file) == old
    assert not [file for file in manifest_file.parent.rglob("*") if "staged" in file.name]
    assert written(new, manifest_file) == new


def test_a_path_that_is_not_a_file_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket has to be short
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("taken")
        for taken in ("taken", "."):
            with pytest.raises(InputError, match="it exists and is not a file"):
                Manifest().write(taken)
    assert Path("taken").is_socket()


@pytest.mark.parametrize("installed", [True, False])
def test_a_file_of_an_installed_package_is_stored_beside(tmp_path: Path, installed: bool) -> None:
    package = tmp_path / ("lib/site-packages" if installed else "lib/sources") / "theirs"
    package.mkdir(parents=True)
    (package / "k.cu").write_text('extern "C" __global__ void k() {}')
    program = Program.from_file(package / "k.cu")
    Manifest((ManifestProgram(program),)).write(tmp_path / "kernels.toml")
    text = (tmp_path / "kernels.toml").read_text()
    assert ('source = "kernels.sources/' in text) is installed
    assert ("theirs" in text) is not installed
    (again,) = Manifest.read(tmp_path / "kernels.toml").programs
    assert bundle_key(again.program, SM_90) == bundle_key(program, SM_90)
