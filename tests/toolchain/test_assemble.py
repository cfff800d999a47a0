"""PTX is assembled to machine code for an architecture, or the error says why it cannot be."""

from __future__ import annotations

import pytest

from preheat.errors import CompileError, InputError, TargetError
from preheat.model import ptx
from preheat.model.arch import Arch
from preheat.model.program import Program
from preheat.toolchain.compiler import Toolchain
from preheat.toolchain.translate import assembler_target
from tests.conftest import SAXPY
from tests.toolchain import support

TEXT = """\
.version 8.0
.target sm_80
.address_size 64
.visible .entry k(.param .u64 p, .param .u32 n)
{
    .reg .b32 %r<3>;
    .reg .b64 %rd<3>;
    ld.param.u64 %rd1, [p];
    ld.param.u32 %r1, [n];
    cvta.to.global.u64 %rd2, %rd1;
    st.global.u32 [%rd2], %r1;
    ret;
}
"""


def program(target: str = "sm_80", version: str = "8.0", text: str = TEXT) -> Program:
    changed = text.replace("sm_80", target).replace(".version 8.0", f".version {version}")
    return Program.of(changed, label="k.ptx")


# What comes out


def test_ptx_is_assembled_to_machine_code(toolchain: Toolchain) -> None:
    compiled = toolchain.compile(program(), Arch.parse("sm_90"))
    assert compiled.cubin.startswith(b"\x7fELF")
    assert compiled.ptx.decode() == TEXT
    (entry,) = compiled.entries
    assert str(entry) == "k(u64, u32)"
    assert entry.resources is not None
    assert entry.resources.registers > 0
    assert [(p.offset, p.size) for p in entry.parameters] == support.parameters(compiled.cubin)["k"]


def test_assembling_twice_gives_the_same_bytes(toolchain: Toolchain) -> None:
    one, two = (toolchain.compile(program(), Arch.parse("sm_90")) for _ in range(2))
    assert one.cubin == two.cubin
    assert one.log == two.log


@pytest.mark.parametrize("arch", support.ARCHS)
def test_what_the_compiler_emits_can_be_assembled(toolchain: Toolchain, arch: str) -> None:
    source = Program.of(support.KERNELS, names=support.NAMES)
    compiled = toolchain.compile(source, Arch.parse(arch))
    assembled = toolchain.compile(Program.of(compiled.ptx.decode()), Arch.parse(arch))
    layout = {e.name: [(p.offset, p.size) for p in e.parameters] for e in compiled.entries}
    assert {e.name: [(p.offset, p.size) for p in e.parameters] for e in assembled.entries} == layout
    truth = support.parameters(assembled.cubin)
    assert {name: truth[name] for name in layout} == support.parameters(compiled.cubin)


def test_mangled_entries_have_their_cpp_names_and_types(toolchain: Toolchain) -> None:
    source = SAXPY.replace('extern "C"', "namespace math {") + "}"
    compiled = toolchain.compile(Program.of(source), Arch.parse("sm_80"))
    (entry,) = toolchain.compile(Program.of(compiled.ptx.decode()), Arch.parse("sm_90")).entries
    assert str(entry) == "math::saxpy(float, float const*, float*, int)"


@pytest.mark.parametrize("head", [".weak .entry", ".entry"])
def test_entries_of_any_linkage_are_assembled(toolchain: Toolchain, head: str) -> None:
    text = TEXT.replace(".visible .entry", head)
    (entry,) = toolchain.compile(program(text=text), Arch.parse("sm_90")).entries
    assert entry.name == "k"


def test_options_reach_the_assembler(toolchain: Toolchain) -> None:
    fast = toolchain.compile(Program.of(TEXT), Arch.parse("sm_90"))
    slow = toolchain.compile(Program.of(TEXT, options=["-O0"]), Arch.parse("sm_90"))
    assert fast.cubin != slow.cubin


# For which architecture


@pytest.mark.parametrize(
    ("target", "version", "arch", "assembled"),
    [
        ("sm_80", "8.0", "sm_80", "sm_80"),
        ("sm_80", "8.0", "sm_90", "sm_90"),
        ("sm_80", "8.0", "sm_120", "sm_120"),
        ("sm_90a", "8.0", "sm_90", "sm_90a"),
        ("sm_90a", "8.0", "sm_90a", "sm_90a"),
        ("sm_100f", "8.8", "sm_103", "sm_100f"),
        ("sm_80, texmode_unified", "8.0", "sm_90", "sm_90"),
    ],
)
def test_a_suffixed_target_is_assembled_as_itself(
    toolchain: Toolchain, target: str, version: str, arch: str, assembled: str
) -> None:
    compiled = toolchain.compile(program(target, version), Arch.parse(arch))
    assert f"Compiling entry function 'k' for '{assembled}'" in compiled.log


@pytest.mark.parametrize(
    ("target", "arch"),
    [
        ("sm_90", "sm_80"),
        ("sm_90a", "sm_100"),
        ("sm_90a", "sm_89"),
        ("sm_103f", "sm_100"),
        ("sm_100f", "sm_120"),
    ],
)
def test_a_target_that_cannot_run_there_is_refused_with_both_names(
    toolchain: Toolchain, target: str, arch: str
) -> None:
    with pytest.raises(TargetError) as caught:
        toolchain.compile(program(target, "8.8"), Arch.parse(arch))
    error = caught.value
    assert (error.program, error.target, error.arch) == ("k.ptx", target, arch)
    assert f"k.ptx targets {target} and cannot run on {arch}" in str(error)


def test_ptx_without_a_suffix_is_assembled_for_the_device() -> None:
    module = ptx.parse(TEXT)
    for arch in map(Arch.parse, ("sm_80", "sm_86")):
        assert assembler_target(module, arch, "k.ptx") == arch


@pytest.mark.parametrize("arch", ["sm_70", "sm_130"])
def test_an_architecture_the_assembler_does_not_know_is_refused_by_name(
    toolchain: Toolchain, arch: str
) -> None:
    with pytest.raises(InputError, match=f"nvJitLink cannot assemble for {arch}"):
        toolchain.compile(program("sm_70", "7.0"), Arch.parse(arch))


def test_a_target_that_is_no_architecture_is_refused(toolchain: Toolchain) -> None:
    with pytest.raises(InputError, match="'debug' is not a GPU architecture"):
        toolchain.compile(program("debug"), Arch.parse("sm_90"))


# What the assembler says


def test_ptx_newer_than_the_assembler_says_what_to_do(toolchain: Toolchain) -> None:
    with pytest.raises(CompileError, match=r"Unsupported \.version 99\.9") as caught:
        toolchain.compile(program(version="99.9"), Arch.parse("sm_90"))
    (row,) = caught.value.rows
    assert (row.file, row.line, row.source) == ("k.ptx", 1, ".version 99.9")
    assert caught.value.hint is not None
    assert "nvidia-nvjitlink" in caught.value.hint


def test_every_error_is_a_row_with_the_text_of_its_line(toolchain: Toolchain) -> None:
    text = TEXT.replace("ret;", "add.u32 %r1, %r9, 1;\n    bogus;\n    ret;")
    with pytest.raises(CompileError) as caught:
        toolchain.compile(program(text=text), Arch.parse("sm_90"))
    found = {(row.line, row.source) for row in caught.value.rows if row.line}
    assert found == {(12, "add.u32 %r1, %r9, 1;"), (13, "bogus;")}
    assert "k.ptx:13: error: " in str(caught.value)
    assert (caught.value.program, caught.value.arch) == ("k.ptx", "sm_90")


@pytest.mark.parametrize("option", ["--bogus", "-Xptxas=--bogus"])
def test_an_option_the_assembler_does_not_know_is_named(toolchain: Toolchain, option: str) -> None:
    with pytest.raises(CompileError, match="-bogus"):
        toolchain.compile(Program.of(TEXT, options=[option]), Arch.parse("sm_90"))
