"""Manifests: what is written is read again, what is wrong is named, and nothing is lost on the way."""

from __future__ import annotations

import os
import shutil
import socket
import textwrap
import tomllib
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from preheat.ahead.manifest import GraphKeys, Manifest, ManifestProgram, key_literal
from preheat.arch import Arch
from preheat.errors import InputError
from preheat.key import bundle_key
from preheat.program import Program

INCLUDING = '#include "cfg.h"\n'
KERNEL = 'extern "C" __global__ void k() {}\n'
SM_80, SM_90, SM_90A, SM_100 = (Arch.parse(a) for a in ("sm_80", "sm_90", "sm_90a", "sm_100"))

# The test's directory serves every example: they write manifests of the same name over and over.
shared_directory = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    deadline=None,
    max_examples=40,
)
unhurried = settings(deadline=None)


@pytest.fixture
def kernel(tmp_path: Path) -> Path:
    file = tmp_path / "app" / "kernels" / "k.cu"
    file.parent.mkdir(parents=True)
    file.write_text(KERNEL)
    return file


@pytest.fixture
def manifest_file(tmp_path: Path) -> Path:
    (tmp_path / "app").mkdir(exist_ok=True)
    return tmp_path / "app" / "kernels.toml"


@pytest.fixture
def read(manifest_file: Path) -> Callable[[str], Manifest]:
    """Reads a manifest with this text after its version."""

    def read_text(text: str) -> Manifest:
        manifest_file.write_text("version = 1\n" + textwrap.dedent(text))
        return Manifest.read(manifest_file)

    return read_text


def digest(program: Program) -> str:
    return bundle_key(program, SM_90).digest


def digests(manifest: Manifest) -> list[str]:
    return [digest(wanted.program) for wanted in manifest.programs]


def written(manifest: Manifest, file: Path) -> Manifest:
    """The manifest after a round trip."""
    manifest.write(file)
    return Manifest.read(file)


# Anything a program, a label or an entry may hold: every character but NUL and halves of pairs.
texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=30)
labels = texts.filter(lambda text: text and "/" not in text)
_REFUSED = (
    "-I",
    "--include-path",
    "-arch",
    "--gpu",
    "-d",
    "--d",
    "-gen",
    "-r",
    "--relocatable",
    "-lto",
)
options = texts.filter(lambda text: not text.startswith(_REFUSED))
programs = st.builds(
    lambda source, language, headers, names, **more: Program.of(
        source,
        language=language,
        headers=headers if language == "cuda" else None,
        names=names if language == "cuda" else (),
        **more,
    ),
    source=texts.filter(str.strip),
    language=st.sampled_from(["cuda", "ptx"]),
    label=labels,
    options=st.lists(options, max_size=3),
    include=st.lists(
        st.sampled_from(["/usr/include", "/", "/opt/ä b/include"]), max_size=2, unique=True
    ),
    headers=st.dictionaries(texts.filter(lambda name: "@" not in name), texts, max_size=3),
    names=st.lists(texts, max_size=3),
)
wanteds = st.builds(
    ManifestProgram,
    programs,
    archs=st.lists(st.sampled_from([SM_80, SM_90, SM_90A, SM_100]), max_size=3).map(tuple),
    entries=st.lists(texts, max_size=3).map(tuple),
    seconds=st.integers(0, 10_000_000).map(lambda ms: ms / 1000),
    asked=st.integers(0, 1000),
    callers=st.lists(texts, max_size=3).map(tuple),
)
keys = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False) | st.binary(),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=5,
)
graphs = st.builds(
    GraphKeys, texts.filter(bool), st.lists(keys.map(repr).filter(key_literal), max_size=3).map(tuple)
)
manifests = st.builds(
    Manifest, st.lists(wanteds, max_size=3).map(tuple), st.lists(graphs, max_size=2).map(tuple)
)

# Manifests that have much in common, as those of several runs do.
alike = st.builds(
    lambda source, include, path: Program.of(source, include=include, path=path),
    st.sampled_from(["a", '#include "b"']),
    st.lists(st.sampled_from(["/a", "/b", "/c"]), max_size=2),
    st.sampled_from([None, "/a/k.cu", "/b/k.cu"]),
)
recordings = st.builds(
    Manifest,
    st.lists(
        st.builds(
            ManifestProgram,
            alike,
            archs=st.lists(st.sampled_from([SM_80, SM_90, SM_90A, SM_100]), max_size=3).map(tuple),
            entries=st.lists(st.sampled_from("xyz"), max_size=2).map(tuple),
            seconds=st.sampled_from([0.0, 0.5, 2.0]),
            asked=st.integers(0, 3),
            callers=st.lists(st.sampled_from("abcdefghijkl"), max_size=9).map(tuple),
            changed=st.booleans(),
        ),
        max_size=3,
    ).map(tuple),
    st.lists(
        st.builds(
            GraphKeys, st.sampled_from("gh"), st.lists(st.sampled_from("123"), max_size=3).map(tuple)
        ),
        max_size=3,
    ).map(tuple),
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
            ManifestProgram(Program.of(KERNEL), (SM_90,), asked=1),
        ),
        (GraphKeys("decode", ("(1, 128)", "32")),),
    )
    manifest.write(manifest_file)
    assert manifest_file.read_text().partition("version")[2] == textwrap.dedent(
        """\
         = 1

        [[program]]
        file = "kernels/k.cu"
        sha256 = "e57c1ca38c24008c4e675d052640d5238a8218b754bf60b60b7fd52744578289"
        options = ["-use_fast_math"]
        include = ["include"]
        names = ["tk<float>"]
        entries = ["k"]
        arch = ["sm_90", "sm_100"]
        seconds = 0.314
        asked = 3
        by = ["app.py:12"]
        [program.headers]
        "util.h" = "kernels.sources/1d200718ab164070.h"

        [[program]]
        label = "program.cu"
        source = "kernels.sources/e57c1ca38c24008c.cu"
        arch = ["sm_90"]
        asked = 1

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
def test_a_damaged_source_stops_its_own_program_alone(suffix: str, manifest_file: Path) -> None:
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
    "arch option": ('file = "k.cu"\noptions = ["-arch=sm_90"]', "-arch=sm_90 does not belong"),
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


# Rejects

K = '[[program]]\nfile = "k.cu"\n'
REJECTS: dict[str, tuple[str, str, str | None]] = {
    "not TOML": ("version = 1\n[[program]\n", ":2: not TOML: ", None),
    "an open text": ('version = 1\n[[program]]\nlabel = "a', ":3: not TOML: Unterminated", None),
    "a key twice": ("version = 1\n\nversion = 1\n", ":3: not TOML: Cannot overwrite a value", None),
    "a long number": (f"version = {'1' * 5000}\n", ": not TOML: ", None),
    "deep": (f"version = {'[' * 5000}\n", ": not TOML: ", None),
    "no version": (K, ": it has no version", "begin the file with: version = 1"),
    "empty": ("", ": it has no version", "begin the file with: version = 1"),
    "newer": ("# x\nversion = 2\nnew = 1\n", ":2: version 2 is not known", "update it"),
    "other version": ("version = 0\n", ":1: version 0 is not known", "this preheat reads version 1"),
    "version of text": ('version = "1"\n', ":1: version must be a whole number, not '1'", None),
    "version true": ("version = true\n", ":1: version must be a whole number, not True", None),
    "unknown table": (
        f"version = 1\n{K}[[programs]]\n",
        ":4: unknown key 'programs'",
        "did you mean 'prog",
    ),
    "one table": (
        'version = 1\n[program]\nfile = "k"\n',
        ":2: program must be written as [[program]]",
        None,
    ),
    "a list": ("version = 1\ngraph = [1]\n", ":2: graph must be written as [[graph]], not [1]", None),
    "unknown key": (
        f'version = 1\n{K}[[program]]\nlabel = "a.cu"\nsource = "x"\noption = ["-a"]\n',
        ":7: a.cu: unknown key 'option'",
        "did you mean 'options'?",
    ),
    "nothing like it": (
        f"version = 1\n{K}zzz = 1\n",
        ":4: k.cu: unknown key 'zzz'",
        "the keys are label, file",
    ),
    "quoted key": (f'version = 1\n{K}"a b" = 1\n', ":4: k.cu: unknown key 'a b'", None),
    "graph key": (
        'version = 1\n[[graph]]\nname = "g"\nkey = "1"\n',
        ":4: g: unknown key 'key'",
        "'keys'",
    ),
    "a text for a list": (
        f'version = 1\n{K}options = "-a"\n',
        ":4: k.cu: options must be a list of texts, not '-a'",
        None,
    ),
    "a number in a list": (
        f"version = 1\n{K}names = [1]\n",
        ":4: k.cu: names must be a list of texts",
        None,
    ),
    "a number for a text": (
        "version = 1\n[[program]]\nfile = 1\n",
        ":3: program 1: file must be text, n",
        None,
    ),
    "headers": (
        f"version = 1\n{K}headers = {{ a = 1 }}\n",
        ":4: k.cu: headers must be a table from",
        None,
    ),
    "headers table": (
        f"version = 1\n{K}[program.headers]\na = 1\n",
        ": k.cu: headers must be a table",
        None,
    ),
    "seconds": (
        f"version = 1\n{K}seconds = nan\n",
        ":4: k.cu: seconds must be a number of seconds",
        None,
    ),
    "endless": (
        f"version = 1\n{K}seconds = inf\n",
        ":4: k.cu: seconds must be a number of seconds",
        None,
    ),
    "asked": (f"version = 1\n{K}asked = -1\n", ":4: k.cu: asked must be a whole number, not -1", None),
    "asked true": (f"version = 1\n{K}asked = true\n", ":4: k.cu: asked must be a whole number", None),
    "arch": (
        f'version = 1\n{K}arch = ["sm_90", "h100"]\n',
        ":4: k.cu: 'h100' is not a GPU architecture",
        "use a name such as sm_90",
    ),
    "neither": (
        'version = 1\n[[program]]\nlabel = "x"\n[[program]]\nsource = "y"\n',
        ":2: x: it has neither `file` nor `source`",
        "name one",
    ),
    "both": (
        f'version = 1\n{K}source = "x"\n',
        ":4: k.cu: it has both `file` and `source`",
        "name one",
    ),
    "inline": (
        'version = 1\nprogram = [{ file = "k.cu", a = 1 }]\n',
        ".toml: k.cu: unknown key 'a'",
        None,
    ),
    "no graph name": (
        'version = 1\n[[graph]]\nkeys = ["1"]\n',
        ":2: graph 1: a [[graph]] needs a n",
        None,
    ),
    "key": (
        'version = 1\n[[graph]]\nname = "g"\nkeys = ["1", "f(x)"]\n',
        ":4: g: key 'f(x)' is not a Python literal",
        "such as",
    ),
    "unhashable key": (
        'version = 1\n[[graph]]\nname = "g"\nkeys = ["[1]"]\n',
        ":4: g: key '[1]' is not",
        None,
    ),
    "hostile title": (
        'version = 1\n[[program]]\nlabel = "a\\nb\\u001b[31m"\nx = 1\n',
        r":4: 'a\nb\x1b[31m': unknown key 'x'",
        None,
    ),
}


@pytest.mark.parametrize("what", REJECTS)
def test_rejects(what: str, manifest_file: Path) -> None:
    text, message, hint = REJECTS[what]
    manifest_file.write_text(text)
    with pytest.raises(InputError) as caught:
        Manifest.read(manifest_file)
    assert str(caught.value).startswith(str(manifest_file))
    assert message in str(caught.value)
    assert hint is None or hint in str(caught.value.hint)


def test_rejects_a_manifest_that_is_not_there_or_not_text(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read .*none\.toml: No such file"):
        Manifest.read(tmp_path / "none.toml")
    (tmp_path / "k.toml").write_bytes(b"version = 1\n\xff")
    with pytest.raises(InputError, match=r"k\.toml:2: byte 0xff is not UTF-8 text"):
        Manifest.read(tmp_path / "k.toml")


@pytest.mark.parametrize(
    "text", ["f(x)", "[1]", "{}", "({1},)", "", "1 +", "1e999", "\0", "(" * 500, "x"]
)
def test_what_cannot_be_a_graph_key_is_no_literal(text: str) -> None:
    assert key_literal(text) is None


@pytest.mark.parametrize("key", [1, True, None, "ä\n", (), (1,), ((1, 2.5), "a"), b"\xff", -3, 1 + 2j])
def test_a_graph_key_comes_back_exactly(key: Any, manifest_file: Path) -> None:
    (graph,) = written(Manifest(graphs=(GraphKeys("g", (repr(key),)),)), manifest_file).graphs
    assert graph.values == (key,)
    assert type(graph.values[0]) is type(key)


def test_a_key_has_one_spelling(read: Callable[[str], Manifest]) -> None:
    (graph,) = read('[[graph]]\nname = "g"\nkeys = ["(1,128)", " (1, 128)", "0x10"]\n').graphs
    assert graph.keys == ("(1, 128)", "16")


# Merging


@unhurried
@given(a=recordings, b=recordings, c=recordings)
def test_merging_is_associative(a: Manifest, b: Manifest, c: Manifest) -> None:
    left, right = a.merged(b).merged(c), a.merged(b.merged(c))
    assert left == right == a.merged(b, c)
    assert [w.program.path for w in left.programs] == [w.program.path for w in right.programs]


@unhurried
@given(a=recordings, b=recordings)
def test_merging_is_idempotent_up_to_how_often(a: Manifest, b: Manifest) -> None:
    once = a.merged(b)
    twice = once.merged(b)
    assert [replace(w, asked=0) for w in twice.programs] == [replace(w, asked=0) for w in once.programs]
    assert twice.graphs == once.graphs
    assert once.merged() == once


@unhurried
@given(a=recordings, b=recordings)
def test_merging_loses_nothing_and_adds_nothing(a: Manifest, b: Manifest) -> None:
    both, rows = a.merged(b), [*a.programs, *b.programs]
    assert len(both.programs) == len({told_apart_by(wanted) for wanted in rows})
    for wanted in both.programs:
        same = [row for row in rows if told_apart_by(row) == told_apart_by(wanted)]
        assert set(wanted.archs) == {arch for row in same for arch in row.archs}
        assert set(wanted.entries) == {entry for row in same for entry in row.entries}
        assert set(wanted.program.include) == {place for row in same for place in row.program.include}
        assert wanted.asked == sum(row.asked for row in same)
        assert wanted.seconds == max(row.seconds for row in same)


def told_apart_by(wanted: ManifestProgram) -> object:
    """What makes a row of the recordings above another one."""
    program = wanted.program
    return program.source, *((program.asked_include, program.include) if program.may_include else ())


def test_equal_programs_are_one_row() -> None:
    one, other = (Program.of(KERNEL, include=[d]) for d in ("/b", "/a"))
    rows = (
        ManifestProgram(one, (SM_100, SM_90), ("k",), 0.5, 2, ("b.py:1",)),
        ManifestProgram(other, (SM_80, SM_90A, SM_90), ("a", "k"), 0.2, 3, ("a.py:1",), changed=True),
    )
    assert Manifest(rows[:1]).merged(Manifest(rows[1:])).programs == (
        ManifestProgram(
            replace(one, include=("/b", "/a")),
            (SM_80, SM_90, SM_90A, SM_100),
            ("a", "k"),
            0.5,
            5,
            ("a.py:1", "b.py:1"),
            changed=True,
        ),
    )


def test_of_equal_files_the_first_is_named() -> None:
    one, other = (replace(Program.of(KERNEL), path=path) for path in ("/b/k.cu", "/a/k.cu"))
    (wanted,) = Manifest((ManifestProgram(one), ManifestProgram(other))).merged().programs
    assert wanted.program.path == "/b/k.cu"


def test_a_program_from_text_and_one_from_its_file_are_one_with_a_file(
    kernel: Path, manifest_file: Path
) -> None:
    rows = (
        ManifestProgram(Program.of(KERNEL, label="k.cu")),
        ManifestProgram(Program.from_file(kernel)),
    )
    (wanted,) = written(Manifest(rows), manifest_file).programs
    assert wanted.program.path == str(kernel)


@pytest.mark.parametrize("other", [["/b"], [], ["/a", "/b"], ["/b", "/a"]])
def test_include_lists_stay_apart_where_a_file_is_included(other: list[str]) -> None:
    rows = tuple(ManifestProgram(Program.of(INCLUDING, include=include)) for include in (["/a"], other))
    assert len(Manifest(rows).merged().programs) == 2


def test_lists_that_are_spelled_alike_stay_apart_too(tmp_path: Path) -> None:
    """Only their headers tell whether they are the same."""
    programs = []
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "k.cu").write_text(INCLUDING)
        programs.append(Program.from_file(tmp_path / name / "k.cu"))
    assert digest(programs[0]) == digest(programs[1])
    again = written(Manifest(tuple(map(ManifestProgram, programs))), tmp_path / "kernels.toml")
    assert [wanted.program for wanted in again.programs] == programs


def test_a_title_has_the_include_list_where_that_tells_it_from_a_namesake() -> None:
    def titles(*programs: Program) -> list[str]:
        return [
            wanted.title for wanted in Manifest(tuple(map(ManifestProgram, programs))).merged().programs
        ]

    one, other, named = (
        Program.of(INCLUDING, label="k.cu", include=include, names=names)
        for include, names in ((["/a"], ()), (["b", "/c"], ()), (["/b"], ["tk<int>"]))
    )
    assert titles(one, named) == ["k.cu", "k.cu (tk<int>)"]
    assert titles(one, other) == ["k.cu (include /a)", "k.cu (include b, /c)"]
    assert titles(named, replace(named, include=())) == [
        "k.cu (tk<int>; include -)",
        "k.cu (tk<int>; include /b)",
    ]


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
    (asked,) = programs[2].asked_include
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
    assert wanted.program.asked_include == ("{file}", "{file}/inc")
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
    assert rows[1].program.asked_include == (
        *("{file}", "{file}/../include", "{file}/deep", "{file}/../../lib"),
    )
    assert rows[0].program.asked_include == ("{file}", "{file}/../include")


@pytest.mark.parametrize(
    ("include", "spelled", "told"),
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
    include: list[str], spelled: list[str], told: str, read: Callable[[str], Manifest]
) -> None:
    row = f'[[program]]\nfile = "kernels/k.cu"\ninclude = {include}\nspelled = {spelled}\n'
    (bad,) = read(row).unreadable
    assert told in str(bad.error)


@pytest.mark.parametrize(
    "change",
    [
        {"source": "x"},
        {"label": "x"},
        {"language": "ptx"},
        {"options": ("x",)},
        {"names": ("x",)},
        {"headers": (("x", ""),)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_programs_that_differ_stay_apart(change: dict[str, Any]) -> None:
    program = Program.of(KERNEL)
    rows = (ManifestProgram(program), ManifestProgram(replace(program, **change)))
    assert len(Manifest(rows).merged().programs) == 2


def test_few_callers_are_kept_and_always_the_same() -> None:
    many = [
        Manifest((ManifestProgram(Program.of(KERNEL), callers=(f"app.py:{n}",)),))
        for n in range(10, 99)
    ]
    kept = [reduce(Manifest.merged, order).programs[0].callers for order in (many, many[::-1])]
    assert kept == [tuple(f"app.py:{n}" for n in range(10, 18))] * 2


def test_graph_keys_stay_in_the_order_they_were_seen() -> None:
    a = Manifest(graphs=(GraphKeys("g", ("9", "1")), GraphKeys("f", ("0",))))
    b = Manifest(graphs=(GraphKeys("g", ("5", "9")),))
    assert a.merged(b).graphs == (GraphKeys("f", ("0",)), GraphKeys("g", ("9", "1", "5")))


# Jobs


def test_jobs_are_for_the_recorded_architectures_unless_others_are_given() -> None:
    a = ManifestProgram(Program.of(KERNEL, label="a.cu"), (SM_90, SM_100))
    b = ManifestProgram(Program.of(KERNEL, label="b.cu"), (SM_80,))
    manifest = Manifest((b, a))
    assert manifest.jobs() == manifest.jobs([]) == [(a, SM_90), (a, SM_100), (b, SM_80)]
    assert manifest.jobs([SM_90A, SM_80, SM_80]) == [
        (wanted, arch) for wanted in (a, b) for arch in (SM_80, SM_90A)
    ]


@unhurried
@given(manifest=recordings)
def test_no_job_is_there_twice(manifest: Manifest) -> None:
    jobs = manifest.jobs([SM_90, SM_80])
    found = [job_of(wanted, arch) for wanted, arch in jobs]
    assert len(set(found)) == len(found)
    assert set(found) == {
        job_of(wanted, arch) for wanted in manifest.programs for arch in (SM_80, SM_90)
    }


def job_of(wanted: ManifestProgram, arch: Arch) -> object:
    """What a job is about: a request, and the directories whose headers may decide it."""
    program = wanted.program
    directories = program.include if program.may_include else ()
    return bundle_key(program, arch).digest, directories


def test_a_program_without_architecture_is_an_error_that_names_it() -> None:
    with pytest.raises(InputError, match=r"k\.cu: there is no architecture") as caught:
        Manifest((ManifestProgram(Program.of(KERNEL, label="k.cu")),)).jobs()
    assert "--arch" in str(caught.value.hint)


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
    """Stands for `os.fsync`: it fails once `good` calls went well, as on a full disk."""

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


def test_what_is_not_a_file_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
