"""A manifest that is rewritten keeps the comments, the order and the layout of its file."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from preheat.ahead.manifest import GraphKeys, Manifest, ManifestProgram
from preheat.ahead.recorder import merge_into
from preheat.model.arch import Arch
from preheat.model.program import Program
from preheat.tools.cli import main

SM_80, SM_90 = Arch.parse("sm_80"), Arch.parse("sm_90")
COMMENTED = """\
# Owned by the inference team.
version = 2  # the format

# Hot path: review before a release.
[[program]]  # second in the order of labels
file = "softmax.cu"
arch = [
    "sm_90",  # production
]
# Measured on the build machine.
seconds = 0.5  # without a warm compiler

# Used by the demo alone.
[[program]]
label = "add.cu"   # its usual name
file = "add.cu"

# Captured at start.

[[graph]]
name = "decode"
keys = ["1"]
# The last line.
"""


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    for name in ("softmax", "add", "b"):
        (tmp_path / f"{name}.cu").write_text(f'extern "C" __global__ void {name}() {{}}\n')
    (tmp_path / "kernels.toml").write_text(COMMENTED)
    return tmp_path / "kernels.toml"


def program(manifest: Path, name: str) -> Program:
    return Program.from_file(manifest.parent / f"{name}.cu")


def test_values_change_and_everything_else_stays(manifest: Path) -> None:
    softmax = ManifestProgram(program(manifest, "softmax"), (SM_80,), ("softmax",), 0.75, 2)
    merge_into(manifest, Manifest((softmax,), (GraphKeys("decode", ("2",)),)))
    first, second = (
        line.split('"')[1] for line in manifest.read_text().splitlines() if line.startswith("sha256")
    )
    assert manifest.read_text() == textwrap.dedent(
        f"""\
        # Owned by the inference team.
        version = 2  # the format

        # Hot path: review before a release.
        [[program]]  # second in the order of labels
        file = "softmax.cu"
        arch = [
            "sm_90",  # production
            "sm_80",
        ]
        # Measured on the build machine.
        seconds = 0.75  # without a warm compiler
        sha256 = "{first}"
        entries = ["softmax"]
        requests = 2

        # Used by the demo alone.
        [[program]]
        file = "add.cu"
        sha256 = "{second}"

        # Captured at start.

        [[graph]]
        name = "decode"
        keys = ["1", "2"]
        # The last line.
        """
    )


def test_new_programs_are_added_and_comments_stay_with_their_tables(manifest: Path) -> None:
    before = Manifest.read(manifest)
    added = Manifest((ManifestProgram(Program.of("text", label="zeta.cu"), (SM_90,)),))
    merge_into(manifest, added)
    assert Manifest.read(manifest) == before.merged(added)
    lines = manifest.read_text().splitlines()
    for comment, table in (
        ("# Hot path: review before a release.", "[[program]]  # second in the order of labels"),
        ("# Used by the demo alone.", "[[program]]"),
    ):
        assert lines[lines.index(comment) + 1] == table
    assert lines.index('label = "zeta.cu"') < lines.index("# Captured at start.")
    assert lines[lines.index("# Captured at start.") + 2] == "[[graph]]"


def test_a_manifest_that_says_the_same_is_not_touched(manifest: Path) -> None:
    merge_into(manifest, Manifest())
    text = manifest.read_text()
    inode = manifest.stat().st_ino
    Manifest.read(manifest).write(manifest)
    assert (manifest.read_text(), manifest.stat().st_ino) == (text, inode)


def test_a_program_that_was_removed_leaves_the_comments_above_it(manifest: Path) -> None:
    found = Manifest.read(manifest)
    add = next(item for item in found.programs if item.program.label == "add.cu")
    Manifest((add,), found.graphs).write(manifest)
    text = manifest.read_text()
    assert "softmax" not in text
    assert text.index("# Hot path") < text.index("# Used by the demo alone.") < text.index("add.cu")
    assert Manifest.read(manifest) == Manifest((add,), found.graphs)


@pytest.mark.parametrize("fresh", [False, True])
def test_record_merge_keeps_comments_unless_the_manifest_is_to_be_fresh(
    fresh: bool, manifest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(manifest.parent)
    Manifest((ManifestProgram(Program.of("other"), requests=1),)).write("other.toml")
    with pytest.raises(SystemExit) as ended:
        main(["record", "--merge", "other.toml", *["--fresh"] * fresh])
    assert ended.value.code == 0
    found = {item.program.source: item.requests for item in Manifest.read(manifest).programs}
    assert (found["other"], len(found)) == (1, 1 if fresh else 3)
    assert ("# Hot path: review before a release." in manifest.read_text()) is not fresh


def test_plan_keeps_comments(manifest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(manifest.parent)
    with pytest.raises(SystemExit) as ended:
        main(["plan", "lora", "--model", "qwen2-0.5b", "-o", "kernels.toml"])
    assert ended.value.code == 0
    comments = [line for line in COMMENTED.splitlines() if line.startswith("#")]
    assert [line for line in manifest.read_text().splitlines() if line in comments] == comments
    assert len(Manifest.read(manifest).programs) > 2


@pytest.mark.parametrize(
    "text",
    [
        'version = 2\nprogram = [{ file = "add.cu" }]  # inline\n',
        'version = 2\n[[program]]\nfile = "add.cu"',
        'version = 2\r\n# note\r\n[[program]]\r\nfile = "add.cu"\r\n',
        'version = 2\n[[program]]\nfile = "add.cu"\n[[graph]]\nname = "g"\n[[program]]\nfile="b.cu"\n',
        'version = 2\n[[program]]\nfile = "add.cu"\n# twice\n[[program]]\nfile = "./add.cu"\n',
        'version = 2\n[[program]]\nfile = "add.cu"\nnames = ["""\n[[program]]\n"""]\n',
        '[[program]]\nfile = "add.cu"\nprogram.x = 1\n',
        "",
    ],
)
def test_no_content_is_lost_in_any_layout(text: str, manifest: Path) -> None:
    manifest.write_text(text)
    known = Manifest()
    if text.startswith("version"):
        known = Manifest.read(manifest)
    made = known.merged(Manifest((ManifestProgram(Program.of("new"), (SM_90,)),)))
    made.write(manifest)
    assert Manifest.read(manifest) == made


# A `#` in a text is taken for a comment, and what has comments is edited with more care.
texts = st.text(st.characters(exclude_characters="\0#", exclude_categories=["Cs"]), max_size=12)
items = st.builds(
    ManifestProgram,
    st.builds(
        lambda source, headers: Program.of(source, headers=headers),
        st.sampled_from(["a", "b", "c"]),
        st.dictionaries(st.sampled_from(["x.h", "y z.h"]), st.sampled_from("12"), max_size=2),
    ),
    archs=st.lists(st.sampled_from([SM_80, SM_90]), max_size=2).map(tuple),
    entries=st.lists(texts, max_size=2).map(tuple),
    requests=st.integers(0, 9),
    callers=st.lists(texts, max_size=2).map(tuple),
)
manifests = st.builds(
    Manifest,
    st.lists(items, max_size=4).map(tuple),
    st.lists(
        st.builds(
            GraphKeys, st.sampled_from("gh"), st.lists(st.sampled_from("123"), max_size=3).map(tuple)
        ),
        max_size=2,
    ).map(tuple),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
@given(old=manifests, new=manifests)
def test_any_manifest_can_be_edited_into_any_other(
    old: Manifest, new: Manifest, tmp_path: Path
) -> None:
    file = tmp_path / "kernels.toml"
    old.write(file, fresh=True)
    commented = file.read_text().replace("\n[[", "\n# above\n[[").replace("]]\n", "]]  # beside\n")
    file.write_text("# mine\n" + commented)
    new.write(file)
    assert Manifest.read(file) == new.merged()
    assert file.read_text().startswith("# mine\n")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=20)
@given(old=manifests, new=manifests)
def test_a_manifest_that_is_written_anew_depends_on_nothing_before(
    old: Manifest, new: Manifest, tmp_path: Path
) -> None:
    file = tmp_path / "kernels.toml"
    file.unlink(missing_ok=True)
    new.write(file)
    first = file.read_bytes()
    old.write(file)
    new.write(file, fresh=True)
    assert file.read_bytes() == first


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=20)
@given(a=manifests, b=manifests)
def test_a_file_nobody_edited_has_the_same_bytes_however_it_grew(
    a: Manifest, b: Manifest, tmp_path: Path
) -> None:
    once, grown = tmp_path / "once" / "k.toml", tmp_path / "grown" / "k.toml"
    a.merged(b).write(once, fresh=True)
    a.write(grown, fresh=True)
    a.merged(b).write(grown)
    assert grown.read_bytes() == once.read_bytes()
