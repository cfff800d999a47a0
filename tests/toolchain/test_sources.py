"""Sources for debuggers are kept for programs with line information, and never in bundles."""

from __future__ import annotations

from pathlib import Path

import pytest

from preheat.build.builder import Builder
from preheat.model import codec
from preheat.model.artifact import Artifact
from preheat.model.program import Program
from preheat.toolchain.sources import sources_of

INCLUDES = '#include "v.h"\n#include "m.h"\n__global__ void k(int* x) { *x = v(*x) + m(*x); }\n'
HEADER = "__device__ inline int v(int x) { return x * 3; }  // \xfc\n"


@pytest.fixture
def program(tmp_path: Path) -> Program:
    (tmp_path / "v.h").write_bytes(HEADER.encode("latin-1"))  # which is not valid UTF-8
    headers = {"m.h": "__device__ inline int m(int x) { return x / 7; }\n"}
    return Program.of(
        INCLUDES, include=[tmp_path], headers=headers, options=["-lineinfo"], label="k.cu"
    )


def test_source_and_headers_survive_the_bytes_of_an_entry(program: Program, builder: Builder) -> None:
    made = builder.build(program, "sm_90")
    assert set(made.sources) == {"/preheat/k.cu", "/proc/self/cwd/@0/v.h", "/proc/self/cwd/m.h"}
    assert made.sources["/preheat/k.cu"] == INCLUDES
    kept = made.sources["/proc/self/cwd/@0/v.h"].encode("utf-8", "surrogateescape")
    assert kept == HEADER.encode("latin-1")
    again = Artifact.decode(made.digest, *codec.unpack(made.digest, made.encode()))
    assert again.sources == made.sources


@pytest.mark.parametrize("option", ["-G", "--device-debug", "-lineinfo", "--generate-line-info"])
def test_any_kind_of_line_information_will_do(option: str) -> None:
    assert sources_of(Program.of("//", options=[option]), (), {}, ()) == {"/preheat/program.cu": "//"}


def test_without_line_information_nothing_is_kept(builder: Builder) -> None:
    made = builder.build(Program.of("__global__ void k() {}"), "sm_90")
    assert made.sources == {}
    assert "sources" not in codec.unpack(made.digest, made.encode()).sections


def test_a_header_that_changed_since_the_compile_is_left_out(
    program: Program, builder: Builder, tmp_path: Path
) -> None:
    made = builder.build(program, "sm_90")
    roots = {"0": str(tmp_path)}
    (tmp_path / "v.h").write_text("// another\n")
    assert set(sources_of(program, made.headers, roots, ())) == {"/preheat/k.cu", "/proc/self/cwd/m.h"}


def test_bundles_have_no_sources(program: Program, builder: Builder) -> None:
    for digest, blob in builder.bundle_entry(program, "sm_90")[0].encode().items():
        assert "sources" not in codec.unpack(digest, blob).sections


@pytest.mark.parametrize("text", [b"[]", b'{"a": 1}', b"{"])
def test_sources_that_are_no_texts_are_damage(program: Program, builder: Builder, text: bytes) -> None:
    made = builder.build(program, "sm_90")
    meta, sections = codec.unpack(made.digest, made.encode())
    with pytest.raises(codec.DamagedEntryError):
        Artifact.decode(made.digest, meta, {**sections, "sources": text})
