"""Linked programs before a process runs: recorded, listed, baked, checked, and found when sealed."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from preheat.ahead.bake import bake
from preheat.ahead.check import check
from preheat.ahead.manifest import Manifest, ManifestProgram
from preheat.ahead.recorder import Recorder
from preheat.build.builder import Builder
from preheat.build.seal import sealed
from preheat.errors import InputError, SealedError
from preheat.gpu import Gpu
from preheat.model.arch import Arch
from preheat.model.config import Config, SealMode
from preheat.model.events import Events
from preheat.model.key import bundle_key
from preheat.model.linked_program import BinaryPart, LinkedProgram
from preheat.model.program import Program
from tests.ahead.manifest.support import labels, options, programs, shared_directory, written
from tests.command import command_line
from tests.conftest import Recorder as Seen
from tests.linking.support import HELPER, HELPER_PROGRAM, MAIN, expected, linked, on_disk

SM_90, SM_100 = Arch.parse("sm_90"), Arch.parse("sm_100")

# Manifests

binaries = st.builds(
    lambda data, kind, label: BinaryPart(data=data, kind=kind, label=label),
    st.binary(min_size=1, max_size=9),
    st.sampled_from(["cubin", "fatbin", "object", "library"]),
    labels,
)
links = st.builds(
    lambda first, rest, label, lto, given: LinkedProgram.of(
        [first, *rest], label=label, lto=lto, options=given
    ),
    programs,
    st.lists(programs | binaries, max_size=2),
    st.none() | labels,
    st.booleans(),
    st.lists(options.filter(lambda text: not text.startswith(("-p", "--p", "--l", "--a"))), max_size=2),
)


@shared_directory
@given(link=links, other=programs | links)
def test_any_link_comes_back_as_it_was_written(
    link: LinkedProgram, other: Program, tmp_path: Path
) -> None:
    items = (ManifestProgram(link, archs=(SM_90,), entries=("k",)), ManifestProgram(other))
    again = written(Manifest(items), tmp_path / "kernels.toml")
    assert again == Manifest(items).merged()
    assert {bundle_key(item.program, SM_90) for item in again.programs} == {
        bundle_key(item.program, SM_90) for item in items
    }


def test_a_link_reads_like_this(tmp_path: Path) -> None:
    (tmp_path / "a.cu").write_text("__global__ void a() {}\n")
    (tmp_path / "lib.a").write_bytes(b"!<arch>\n")
    parts: list[Any] = [
        Program.from_file(tmp_path / "a.cu", options=["-O3"], names=["t<int>"]),
        Program.of("__device__ int x;", label="x.cu", headers={"h.h": "int h;"}),
        tmp_path / "lib.a",
        b"\x50\xed\x55\xba",
    ]
    link = LinkedProgram.of(parts, label="app", lto=True, options=["-O2"])
    file = tmp_path / "kernels.toml"
    Manifest((ManifestProgram(link, archs=(SM_90,), entries=("a",), requests=2),)).write(file)
    text = re.sub(r"\b[0-9a-f]{16,64}\b", "…", file.read_text().partition("[[link]]")[2])
    assert (
        text
        == """
label = "app"
lto = true
options = ["-O2"]
parts = [
    {file = "a.cu", sha256 = "…", options = ["-O3"], names = ["t<int>"]},
    {label = "x.cu", source = "kernels.sources/….cu", headers = {"h.h" = "kernels.sources/….h"}},
    {file = "lib.a", sha256 = "…", language = "library"},
    {label = "part3.fatbin", source = "kernels.sources/….fatbin", language = "fatbin"},
]
entries = ["a"]
arch = ["sm_90"]
requests = 2
"""
    )
    (again,) = Manifest.read(file).programs
    assert (again.program, again.changed) == (link, False)
    (tmp_path / "a.cu").write_text("__global__ void b() {}\n")
    assert Manifest.read(file).programs[0].changed


def test_comments_of_a_link_stay(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.cu").write_text(f"__global__ void {name}() {{}}\n")
    file = tmp_path / "kernels.toml"
    text = """\
version = 2

# The application.
[[link]]
parts = [
    {file = "a.cu"},  # kernels
    {file = "b.cu"},
]
arch = ["sm_90"]
"""
    file.write_text(text)
    manifest = Manifest.read(file)
    (item,) = manifest.programs
    more = ManifestProgram(item.program, archs=(SM_100,), entries=("a",))
    manifest.merged(Manifest((more,))).write(file)
    assert "# The application." in file.read_text()
    (again,) = Manifest.read(file).programs
    assert (again.archs, again.entries) == ((SM_90, SM_100), ("a",))


LINK = "version = 2\n[[link]]\n"
REJECTS = {
    "no parts": (LINK, ":2: link 1: a [[link]] needs parts"),
    "parts as texts": (f'{LINK}parts = ["a.cu"]\n', ":3: link 1: parts must be a list of tables"),
    "a part without origin": (f"{LINK}parts = [{{}}]\n", "it has neither `file` nor `source`"),
    "an unknown key": (f'{LINK}parts = [{{fil = "a"}}]\n', "link 1: unknown key 'fil'"),
    "what belongs to the link": (
        f'{LINK}parts = [{{file = "a", arch = ["sm_90"]}}]\n',
        "unknown key 'arch'",
    ),
    "one table": ("version = 2\n[link]\nlto = true\n", ":2: link must be written as [[link]]"),
    "lto as text": (f'{LINK}lto = "yes"\n', ":3: link 1: lto must be true or false, not 'yes'"),
}


@pytest.mark.parametrize("what", REJECTS)
def test_rejects(what: str, tmp_path: Path) -> None:
    text, message = REJECTS[what]
    file = tmp_path / "kernels.toml"
    file.write_text(text)
    with pytest.raises(InputError) as caught:
        Manifest.read(file)
    assert message in str(caught.value)


UNREADABLE = {
    "a missing file": ('{file = "no.cu"}', "cannot read"),
    "a missing library": ('{file = "no.a", language = "library"}', "cannot read"),
    "LTO-IR without lto": ('{file = "x.ltoir", language = "ltoir"}', "is linked with lto=True"),
    "a stored part that was edited": (
        '{source = "0123456789abcdef.a", language = "library"}',
        "does not match its digest",
    ),
}


@pytest.mark.parametrize("what", UNREADABLE)
def test_a_part_that_cannot_be_read_fails_its_link_alone(what: str, tmp_path: Path) -> None:
    part, message = UNREADABLE[what]
    (tmp_path / "a.cu").write_text("__global__ void a() {}\n")
    (tmp_path / "x.ltoir").write_bytes(b"\xed\x43\x4e\x7f")
    (tmp_path / "0123456789abcdef.a").write_bytes(b"!<arch>\n")
    file = tmp_path / "kernels.toml"
    file.write_text(
        f'version = 2\n[[program]]\nfile = "a.cu"\n[[link]]\nparts = [{{file = "a.cu"}}, {part}]\n'
    )
    manifest = Manifest.read(file)
    assert len(manifest.programs) == 1
    ((title, error),) = manifest.unreadable
    assert title == "link 1"
    assert message in str(error)
    assert f"{file}:4" in str(error)


# Recorded, baked, sealed


def recorded(builder: Builder, manifest: Path, *programs: Program) -> None:
    """Record requests for programs, as a process that ends."""
    recorder = Recorder(manifest, builder.events)
    builder.events.subscribe(recorder.on_event, "request")
    for program in programs:
        builder.build(program, SM_90)
    recorder.close()


def test_a_recorded_link_is_baked_for_other_architectures_and_found_sealed(
    tmp_path: Path, heard_builder: Builder, open_builder: Callable[..., Builder], config: Config
) -> None:
    programs = [linked(), linked(lto=True), on_disk(tmp_path / "src")]
    recorded(heard_builder, tmp_path / "kernels.toml", *programs)
    manifest = Manifest.read(tmp_path / "kernels.toml")
    assert {item.program.label for item in manifest.programs} == {each.label for each in programs}
    bundle = tmp_path / "kernels.heat"
    result = bake(manifest, [SM_90, SM_100], output=bundle, builder=heard_builder)
    assert result.ok
    assert len(result.rows) == 6
    for file in (tmp_path / "src").iterdir():  # The application is elsewhere.
        file.unlink()

    alone = replace(config, cache=False, bundles=(bundle,), sealed=SealMode.ERROR)
    assert check(manifest, [SM_90, SM_100], builder=open_builder(alone)).ok
    seen = Seen()
    runner = open_builder(alone, Events(seen))
    for program in programs:
        for arch in (SM_90, SM_100):
            assert runner.obtain(program, arch).tier == "bundle"
    assert seen.named("worker") == []
    with pytest.raises(SealedError) as caught:
        runner.build(replace(linked(), options=("-O1",)), SM_90)
    assert caught.value.program == "main.cu+helper.cu"
    assert caught.value.differences == ("option[0]: '-O1' is new",)


def test_the_same_link_bakes_to_the_same_bytes(tmp_path: Path, shared_builder: Builder) -> None:
    manifest = Manifest((ManifestProgram(linked(lto=True), archs=(SM_90,)),))
    for name in ("one.heat", "two.heat"):
        bake(manifest, output=tmp_path / name, builder=shared_builder)
    assert (tmp_path / "one.heat").read_bytes() == (tmp_path / "two.heat").read_bytes()


def test_a_bundle_that_was_baked_from_another_header_is_not_used_unsealed(
    tmp_path: Path, builder: Builder
) -> None:
    program = on_disk(tmp_path / "src")
    manifest = Manifest((ManifestProgram(program, archs=(SM_90,)),))
    bake(manifest, output=tmp_path / "k.heat", builder=builder)
    builder.mount(tmp_path / "k.heat")
    assert builder.obtain(program, SM_90).tier == "bundle"
    (tmp_path / "src" / "both.h").write_text("#define BY 3\n__device__ int times(int x);\n")
    builder.clear_memory()
    assert builder.obtain(program, SM_90).tier == "compiler"
    with sealed():
        assert builder.obtain(program, SM_90).tier == "memory"


def test_a_link_of_compiled_parts_is_recorded(tmp_path: Path, heard_builder: Builder) -> None:
    helper = next(iter(LinkedProgram.of([HELPER_PROGRAM]).sources.values()))
    code = heard_builder.build(helper, SM_90, record=False).cubin
    program = LinkedProgram.of([MAIN, code])
    recorded(heard_builder, tmp_path / "kernels.toml", program)
    (item,) = Manifest.read(tmp_path / "kernels.toml").programs
    assert item.program == program
    (stored,) = (tmp_path / "kernels.sources").glob("*.cubin")
    assert stored.read_bytes() == code


def test_a_warm_up_loads_linked_programs(open_device: Callable[..., Gpu]) -> None:
    gpu = open_device("emulator")
    report = gpu.warm(Manifest((ManifestProgram(linked(), archs=(SM_90,), entries=("apply",)),)))
    assert (report.programs, report.modules) == (1, 1)
    x = gpu.array(np.ones(1, np.float32))
    gpu.kernel(linked(), "apply")[1, 1](x, 1)
    assert x.numpy().tolist() == [expected(1.0)]


# The command line


def test_the_command_line_links_and_explains(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cli = command_line(capsys, monkeypatch, tmp_path, tmp_path / "cache")
    (tmp_path / "main.cu").write_text(MAIN)
    (tmp_path / "helper.cu").write_text(HELPER)
    files = ("main.cu", "helper.cu", "--arch", "sm_90", "--name", "count<int>")
    ran = cli("compile", *files, "--link", "-o", "out", "--json")
    assert ran.code == 0, ran.err
    (row,) = ran.json()["compiled"]
    assert row["kernels"] == ["apply(float*, int)", "count<int>(int*)"]
    assert row["written"] == ["out/main.sm_90.cubin", "out/main.sm_90.ptx"]
    assert "found on disk" in cli("compile", *files, "--link").out
    assert "main.cu+helper.cu for sm_90 is cached" in cli("cache", "why", *files, "--link").out
    assert "lto: 'no' became 'yes'" in cli("cache", "why", *files, "--lto").out
    assert cli("cache", "ls").out.count("(part of a link)") == 2
    assert "part[1].label" in cli("cache", "show", row["key"][:12]).out
    failed = cli("compile", "main.cu", "--link", "--arch", "sm_90")
    assert failed.code == 1
    assert "undefined: helper(float)" in failed.err
