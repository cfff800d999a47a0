"""Linked programs as values: what distinguishes two keys, what does not, and what is refused."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preheat.errors import InputError
from preheat.model.arch import Arch
from preheat.model.key import Key, bundle_key, explain, request_key
from preheat.model.linked_program import KINDS, BinaryPart, LinkedProgram, RelocatableProgram
from preheat.model.program import Program
from tests.linking.support import HELPER_PROGRAM, MAIN_PROGRAM

LTO_IR = b"\xed\x43\x4e\x7f some LTO-IR"
CUBIN = b"\x7fELF" + bytes(12) + struct.pack("<HH", 1, 190) + b" some code"
OBJECT = b"\x7fELF" + bytes(12) + struct.pack("<HH", 1, 62) + b" some code"
PTX = ".version 8.0\n.target sm_90\n.address_size 64\n"
BINARY = BinaryPart.of(CUBIN, label="b.cubin")
BASE = LinkedProgram.of([MAIN_PROGRAM, HELPER_PROGRAM, BINARY], label="app", options=["-O3"])


def key(program: Program = BASE, arch: str = "sm_90", toolchain: str = "nvrtc 1, nvJitLink 2") -> Key:
    return request_key(program, Arch.parse(arch), toolchain)


def with_part(index: int, part: Program | BinaryPart) -> LinkedProgram:
    parts = list(BASE.parts)
    parts[index] = part
    return replace(BASE, parts=tuple(parts))


DIFFERENT = {
    "the source of a part": key(with_part(0, replace(MAIN_PROGRAM, source=MAIN_PROGRAM.source + " "))),
    "the label of a part": key(with_part(0, replace(MAIN_PROGRAM, label="m.cu"))),
    "the options of a part": key(with_part(0, replace(MAIN_PROGRAM, options=("-O3",)))),
    "the same options of another part": key(with_part(1, replace(HELPER_PROGRAM, options=("-O3",)))),
    "the names of a part": key(with_part(0, replace(MAIN_PROGRAM, names=()))),
    "the header in memory of a part": key(with_part(0, replace(MAIN_PROGRAM, headers=(("h", "1"),)))),
    "the bytes of a part": key(with_part(2, replace(BINARY, data=CUBIN + b"1"))),
    "the kind of a part": key(with_part(2, replace(BINARY, kind="fatbin"))),
    "the label of a compiled part": key(with_part(2, replace(BINARY, label="c.cubin"))),
    "the order": key(replace(BASE, parts=BASE.parts[::-1])),
    "a part less": key(replace(BASE, parts=BASE.parts[:2])),
    "a part twice": key(replace(BASE, parts=(*BASE.parts, BINARY))),
    "lto": key(replace(BASE, lto=True)),
    "an option": key(replace(BASE, options=())),
    "the label": key(replace(BASE, label="other")),
    "arch": key(arch="sm_100"),
    "either compiler": key(toolchain="nvrtc 1, nvJitLink 3"),
    "a part alone": key(HELPER_PROGRAM),
    "a part as it is compiled": key(RelocatableProgram.part(HELPER_PROGRAM, lto=False)),
    "a part as LTO-IR": key(RelocatableProgram.part(HELPER_PROGRAM, lto=True)),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_key_differs_on(what: str) -> None:
    assert DIFFERENT[what].digest != key().digest


def test_all_of_these_keys_differ_from_one_another() -> None:
    assert len({each.digest for each in DIFFERENT.values()}) == len(DIFFERENT)


def test_key_is_the_same_for_parts_in_other_directories(tmp_path: Path) -> None:
    made = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.cu").write_text('#include "x.h"\n__global__ void k() {}')
        (tmp_path / name / "b.cubin").write_bytes(CUBIN)
        made.append(LinkedProgram.of([tmp_path / name / "a.cu", tmp_path / name / "b.cubin"]))
    assert key(made[0]) == key(made[1])
    assert bundle_key(made[0], Arch.parse("90")) == bundle_key(made[1], Arch.parse("90"))
    assert made[0] != made[1]  # They search other directories.


def including(*include: str) -> Program:
    return Program.of('#include "x.h"\n', label="i.cu", include=include)


def test_bundle_key_says_which_part_searches_a_directory() -> None:
    first = LinkedProgram.of([including("/x"), including()])
    second = LinkedProgram.of([including(), including("/x")])
    assert key(first) == key(second)
    assert bundle_key(first, Arch.parse("90")) != bundle_key(second, Arch.parse("90"))
    assert first.include == second.include == ("/x",)


def test_keys_explain_which_part_differs() -> None:
    changed = with_part(1, replace(HELPER_PROGRAM, options=("-O1",)))
    assert explain(key(), key(changed)) == ("part[1].option[0]: '-O1' is new",)


texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=4)
sources = st.builds(
    lambda text, options: Program.of(f"// {text!r}", label="p.cu", options=options),
    texts,
    st.lists(texts.map(lambda text: f"-D{text}"), max_size=2),
)
links = st.builds(
    lambda parts, lto: LinkedProgram.of(parts, label="app", lto=lto),
    st.lists(sources, min_size=1, max_size=3),
    st.booleans(),
)


@given(a=links, b=links)
def test_two_links_share_a_key_only_when_they_are_equal(a: LinkedProgram, b: LinkedProgram) -> None:
    assert (key(a).digest == key(b).digest) == (a == b)
    assert (a.content == b.content) == (a == b)


# Parts in every form


def test_a_part_is_a_path_a_text_bytes_or_a_value(tmp_path: Path) -> None:
    (tmp_path / "a.cu").write_text("__global__ void a() {}")
    (tmp_path / "b.a").write_bytes(b"!<arch>\n")
    parts: list[Any] = [
        tmp_path / "a.cu",
        str(tmp_path / "b.a"),
        "__device__ int x;",
        PTX,
        CUBIN,
        HELPER_PROGRAM,
    ]
    program = LinkedProgram.of(parts)
    labels = ["a.cu", "b.a", "part2.cu", "part3.ptx", "part4.cubin", "helper.cu"]
    assert [part.label for part in program.parts] == labels
    assert program.label == "a.cu+b.a+part2.cu+part3.ptx+2 more"
    assert program.language == "cuda+link"
    assert sorted(program.sources) == [0, 2, 5]


KIND_OF = {
    "cubin": CUBIN,
    "ltoir": LTO_IR,
    "fatbin": b"\x50\xed\x55\xba rest",
    "object": OBJECT,
    "library": b"!<arch>\nrest",
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_kind_of_a_compiled_part_follows_from_its_bytes(kind: str) -> None:
    assert BinaryPart.of(KIND_OF[kind]).kind == kind


def test_a_link_without_sources_needs_no_compiler_of_sources() -> None:
    assert LinkedProgram.of([PTX, CUBIN]).language == "link"
    assert not LinkedProgram.of([PTX, CUBIN]).may_include


def test_a_part_that_cannot_be_cached_is_the_reason_for_the_link() -> None:
    clock = Program.of("__device__ char c = __TIME__[0];", label="clock.cu")
    reason = "clock.cu: it uses __TIME__, which reads the clock"
    assert LinkedProgram.of([clock, PTX]).uncacheable == reason
    assert LinkedProgram.of([PTX], options=["-time"]).uncacheable == "-time writes a time trace"
    assert BASE.uncacheable is None


# Rejects

REJECTS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no parts": ([], {}, "at least one part"),
    "one part in place of the list": (MAIN_PROGRAM, {}, "the parts of a link are a list"),
    "a text in place of the list": ("a.cu", {}, "the parts of a link are a list"),
    "a number in place of the list": (3, {}, "the parts of a link are a list, not int"),
    "a number": ([3], {}, "source must be a path, source text or a Program"),
    "a link": ([BASE], {}, "a part of a link is a Program or a BinaryPart"),
    "bytes of no kind": ([b"hello"], {}, "part 0 is not a cubin, LTO-IR, a fatbin"),
    "LTO-IR without lto": ([PTX, LTO_IR], {}, "part1.ltoir is LTO-IR, which is linked with lto=True"),
    "compiled parts alone": ([CUBIN], {}, "no part has kernels whose parameters are known"),
    "a missing file": (["no.cu"], {}, "cannot read no.cu: No such file"),
    "a missing compiled file": (["no.cubin"], {}, "cannot read no.cubin: No such file"),
    "an architecture": (
        [PTX],
        {"options": ["-arch=sm_90"]},
        "-arch=sm_90 cannot be an option of a link",
    ),
    "lto among the options": ([PTX], {"options": ["-lto"]}, "-lto cannot be an option of a link"),
    "another output": ([PTX], {"options": ["-ptx"]}, "-ptx cannot be an option of a link"),
    "options as text": ([PTX], {"options": "-O3"}, "options must be a list"),
    "lto as a number": ([PTX], {"lto": 1}, "lto must be True or False"),
    "a path as label": ([PTX], {"label": "a/b"}, "plain name"),
    "a NUL byte": ([PTX], {"options": ["-a\0"]}, "NUL"),
}


@pytest.mark.parametrize("what", REJECTS)
def test_refuses(what: str) -> None:
    parts, more, message = REJECTS[what]
    with pytest.raises(InputError, match=message):
        LinkedProgram.of(parts, **more)


def test_a_linked_program_has_no_source_of_its_own() -> None:
    with pytest.raises(InputError, match="no source, headers or names of its own"):
        replace(BASE, names=("t<int>",))


@pytest.mark.parametrize("given", [{"kind": "zip"}, {"data": b""}, {"label": ""}, {"label": "a/b"}])
def test_a_compiled_part_refuses(given: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        replace(BINARY, **given)


@pytest.mark.parametrize("option", ["-rdc=true", "-dc", "--relocatable-device-code=true", "-dlto"])
def test_a_program_that_has_to_be_linked_is_refused_with_that_hint(option: str) -> None:
    with pytest.raises(InputError, match="has to be linked") as caught:
        Program.of("x", options=[option])
    assert "preheat.link([…], arch)" in (caught.value.hint or "")
