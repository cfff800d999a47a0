"""A manifest that is written and read again: every program comes back; changed files are noticed."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preheat.ahead.manifest import GraphKeys, Manifest, ManifestProgram
from preheat.model.program import Program
from tests.ahead.manifest.support import (
    KERNEL,
    SM_90,
    SM_100,
    digest,
    digests,
    manifests,
    shared_directory,
    written,
)

# Round trip


@shared_directory
@given(manifest=manifests)
def test_any_manifest_comes_back_as_it_was_written(manifest: Manifest, tmp_path: Path) -> None:
    again = written(manifest, tmp_path / "kernels.toml")
    assert again == manifest.merged()
    assert sorted(set(digests(again))) == sorted({digest(w.program) for w in manifest.programs})


@shared_directory
@given(
    source=st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])).filter(str.strip)
)
def test_a_file_of_any_text_comes_back_by_name(source: str, kernel: Path, manifest_file: Path) -> None:
    kernel.write_bytes(source.encode())
    program = Program.from_file(kernel)
    again = written(Manifest((ManifestProgram(program),)), manifest_file)
    assert 'file = "kernels/k.cu"' in manifest_file.read_text()
    assert digests(again) == [digest(program)]
    assert (again.programs[0].program.path, again.programs[0].changed) == (str(kernel), False)
    assert not (manifest_file.parent / "kernels.sources").exists()


def test_a_manifest_reads_like_this(kernel: Path, manifest_file: Path) -> None:
    from_file = Program.from_file(
        kernel,
        options=["-use_fast_math"],
        include=[kernel.parents[1] / "include"],
        headers={"util.h": "int u;"},
        names=["tk<float>"],
    )
    manifest = Manifest(
        (
            ManifestProgram(from_file, (SM_100, SM_90), ("k",), 0.3141, 3, ("app.py:12",)),
            ManifestProgram(Program.of(KERNEL), (SM_90,), requests=1),
        ),
        (GraphKeys("decode", ("(1, 128)", "32")),),
    )
    manifest.write(manifest_file)
    assert manifest_file.read_text().partition("version")[2] == textwrap.dedent(
        """\
         = 2

        [[program]]
        file = "kernels/k.cu"
        sha256 = "e57c1ca38c24008c4e675d052640d5238a8218b754bf60b60b7fd52744578289"
        options = ["-use_fast_math"]
        include = ["include"]
        names = ["tk<float>"]
        entries = ["k"]
        arch = ["sm_90", "sm_100"]
        seconds = 0.314
        requests = 3
        callers = ["app.py:12"]
        [program.headers]
        "util.h" = "kernels.sources/1d200718ab164070.h"

        [[program]]
        label = "program.cu"
        source = "kernels.sources/e57c1ca38c24008c.cu"
        arch = ["sm_90"]
        requests = 1

        [[graph]]
        name = "decode"
        keys = ["(1, 128)", "32"]
        """
    )


def test_a_long_list_gets_a_line_for_each_item(manifest_file: Path) -> None:
    keys = tuple(str(n) for n in range(100))
    assert written(Manifest(graphs=(GraphKeys("g", keys),)), manifest_file).graphs[0].keys == keys
    assert '\n    "42",\n' in manifest_file.read_text()


def test_a_hand_written_line_is_enough(read: Callable[[str], Manifest], kernel: Path) -> None:
    manifest = read('[[program]]\nfile = "kernels/k.cu"\n')
    assert manifest == Manifest((ManifestProgram(Program.from_file(kernel)),))


def test_an_empty_manifest_is_one(manifest_file: Path) -> None:
    assert written(Manifest(), manifest_file) == Manifest()


def test_a_program_is_complete_when_it_was_read(kernel: Path, manifest_file: Path) -> None:
    given = Program.from_file(kernel, label="other.cu", language="ptx", include=["/usr/include", "/"])
    again = written(Manifest((ManifestProgram(given),)), manifest_file).programs[0].program
    assert again == given
    assert (again.path, again.include) == (str(kernel), (str(kernel.parent), "/usr/include", "/"))


def test_two_recordings_in_another_order_give_the_same_bytes(tmp_path: Path) -> None:
    rows = [
        ManifestProgram(Program.of(f"{KERNEL}// {n}", label=f"{n % 3}.cu"), (SM_90,)) for n in range(9)
    ]
    for name, order in (("a", rows), ("b", rows[::-1])):
        (tmp_path / name).mkdir()
        Manifest(tuple(order)).write(tmp_path / name / "kernels.toml")
    assert (tmp_path / "a/kernels.toml").read_bytes() == (tmp_path / "b/kernels.toml").read_bytes()


def test_writing_the_same_again_touches_nothing(manifest_file: Path) -> None:
    manifest = Manifest((ManifestProgram(Program.of(KERNEL)),))
    manifest.write(manifest_file)
    files = [manifest_file, *manifest_file.parent.glob("kernels.sources/*")]
    before = [file.stat().st_ino for file in files]
    manifest.write(manifest_file)
    assert [file.stat().st_ino for file in files] == before
    assert len(files) == 2


# Files that change and sources that do not


def test_a_file_that_changed_is_read_as_it_is_and_said_so(kernel: Path, manifest_file: Path) -> None:
    Manifest((ManifestProgram(Program.from_file(kernel)),)).write(manifest_file)
    kernel.write_text(KERNEL + "// new\n")
    (wanted,) = Manifest.read(manifest_file).programs
    assert wanted.changed
    assert wanted.program == Program.from_file(kernel)
    Manifest((wanted,)).write(manifest_file)
    assert not Manifest.read(manifest_file).programs[0].changed


def test_a_file_that_changed_before_it_was_written_is_stored(kernel: Path, manifest_file: Path) -> None:
    program = Program.from_file(kernel)
    kernel.write_text("something else")
    (wanted,) = written(Manifest((ManifestProgram(program),)), manifest_file).programs
    assert digest(wanted.program) == digest(program)
    assert (wanted.program.path, wanted.program.include) == (None, (str(kernel.parent),))


def test_a_file_whose_own_directory_is_not_searched_first_is_stored(
    kernel: Path, manifest_file: Path
) -> None:
    program = replace(Program.from_file(kernel), include=("/usr/include", str(kernel.parent)))
    (wanted,) = written(Manifest((ManifestProgram(program),)), manifest_file).programs
    assert (wanted.program, wanted.program.path) == (program, None)


@pytest.mark.parametrize("suffix", [".cu", ".h"])
def test_a_damaged_source_stops_its_own_program_only(suffix: str, manifest_file: Path) -> None:
    good, bad = (
        Program.of(KERNEL, label="good.cu"),
        Program.of("// x", label="b.cu", headers={"h": "1"}),
    )
    Manifest((ManifestProgram(good), ManifestProgram(bad))).write(manifest_file)
    for stored in manifest_file.parent.glob(f"kernels.sources/*{suffix}"):
        if stored.read_text() != KERNEL:
            stored.write_text("tampered")
    manifest = Manifest.read(manifest_file)
    assert digests(manifest) == [digest(good)]
    ((title, error),) = manifest.unreadable
    assert title == "b.cu"
    assert f"{suffix} does not match its digest: SHA-256 " in str(error)


UNREADABLE = {
    "missing": ('file = "gone.cu"', "cannot read {home}/gone.cu: No such file"),
    "a directory": ('file = "."', "cannot read {home}: Is a directory"),
    "not text": ('file = "binary.cu"', "binary.cu:2: byte 0xff is not UTF-8 text"),
    "empty": ('file = "empty.cu"', "empty.cu: the source is empty"),
    "NUL in a path": (r'file = "a\u0000b"', r"'a\x00b' is not a path"),
    "missing source": ('source = "kernels.sources/0123456789abcdef.cu"', "cannot read"),
    "a source without digest": ('source = "k.cu"', "k.cu does not match its digest"),
    "too little of a digest": (
        'source = "2d71.cu"',
        "2d71.cu does not match its digest: SHA-256 2d71",
    ),
    "other sha256": ('source = "{stored}"\nsha256 = "00"', "does not match its digest"),
    "binary source": ('source = "binary.cu"', "binary.cu:2: byte 0xff is not UTF-8 text"),
    "a header that is a file": (
        'file = "k.cu"\nheaders = {{ h = "k.cu" }}',
        "k.cu does not match its digest",
    ),
    "label": ('file = "k.cu"\nlabel = "a/b"', "'a/b' must be a plain name"),
    "language": ('file = "k.cu"\nlanguage = "hip"', "language must be 'cuda' or 'ptx', not 'hip'"),
    "arch option": (
        'file = "k.cu"\noptions = ["-arch=sm_90"]',
        "-arch=sm_90 cannot be an option of a program",
    ),
    "include option": ('file = "k.cu"\noptions = ["-Iinc"]', "option -Iinc does not belong here"),
    "PTX with names": ('file = "k.cu"\nlanguage = "ptx"\nnames = ["a"]', "PTX takes no names"),
}


@pytest.mark.parametrize("what", UNREADABLE)
def test_a_program_that_cannot_be_read_does_not_stop_the_others(
    what: str, read: Callable[[str], Manifest], manifest_file: Path
) -> None:
    home = manifest_file.parent
    for name, content in (
        ("k.cu", b"x"),
        ("2d71.cu", b"x"),
        ("binary.cu", b"\n\xff"),
        ("empty.cu", b""),
    ):
        (home / name).write_bytes(content)
    Manifest((ManifestProgram(Program.of("stored")),)).write(manifest_file)
    (stored,) = (str(path.relative_to(home)) for path in home.glob("kernels.sources/*"))
    row, message = (text.format(home=home, stored=stored) for text in UNREADABLE[what])
    manifest = read(f'[[program]]\n{row}\n[[program]]\nfile = "k.cu"\n')
    assert [wanted.program.source for wanted in manifest.programs] == ["x"]
    ((_, error),) = manifest.unreadable
    assert message in str(error)
    assert str(error).endswith(f"({manifest_file}:2)")
    assert manifest.merged(Manifest()).unreadable == manifest.unreadable
