"""The PTX of several parts as one text: shared symbols, private ones, weak ones, and line numbers."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preheat.build.builder import Builder
from preheat.model import ptx
from preheat.model.arch import Arch
from preheat.model.lines import Lines
from preheat.model.program import Program
from preheat.toolchain.ptx_merge import PtxPart, definitions, merge

HEAD = ".version {}\n.target {}\n.address_size 64\n"
CALLER = """\
.extern .func (.param .b32 r) twice (.param .b32 a);
.extern .global .align 4 .u32 total;
.extern .shared .align 4 .b8 dynamic[];
.global .align 4 .u32 own = 3;
.weak .func (.param .b32 r) common (.param .b32 a) { ret; }
.visible .entry k(.param .u64 k_0) {
	.reg .b32 %r<4>;
	.param .b32 p;
	.param .b32 q;
	ld.global.u32 %r1, [own];
	st.param.b32 [p], %r1;
	call (q), twice, (p);
	ld.param.b32 %r2, [q];
	st.global.u32 [total], %r2;
	ret;
}
"""
CALLEE = """\
.global .align 4 .u32 own = 4;
.visible .global .align 4 .u32 total;
.extern .shared .align 4 .b8 dynamic[];
.weak .func (.param .b32 r) common (.param .b32 a) { ret; }
.func (.param .b32 r) help (.param .b32 a) { ret; }
.visible .func (.param .b32 r) twice (.param .b32 a) {
	.reg .b32 %r<4>;
	ld.global.u32 %r1, [own];
	st.param.b32 [r], %r1;
	ret;
}
"""


def part(label: str, body: str, version: str = "8.0", target: str = "sm_90") -> PtxPart:
    return PtxPart.of(label, HEAD.format(version, target) + body)


def merged(*parts: PtxPart) -> ptx.Module:
    return ptx.parse(merge(parts))


def test_one_part_stays_as_it_is() -> None:
    alone = part("a", CALLER)
    assert merge([alone]) == alone.text


def test_the_newest_version_and_target_count() -> None:
    parts = part("a", "", "8.0", "sm_80"), part("b", "", "9.4", "sm_90a"), part("c", "", "7.8", "sm_90")
    module = merged(*parts)
    assert (module.version, module.target) == ((9, 4), ("sm_90a",))
    assert merge(parts).startswith(".version 9.4\n.target sm_90a\n.address_size 64\n")


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_function_and_a_variable_of_another_part_are_found(order: tuple[int, int]) -> None:
    parts = part("caller", CALLER), part("callee", CALLEE)
    module = merged(*(parts[index] for index in order))
    assert {"k", "twice", "common"} <= set(module.bodies)
    assert ".extern" not in module.variables["total"].linkage
    linkages = {f.linkage for f in module.functions if f.name == "twice"}
    assert linkages == {(".visible",)}  # The declaration became a forward declaration.


def test_symbols_without_linkage_belong_to_their_part() -> None:
    module = merged(part("caller", CALLER), part("callee", CALLEE))
    assert module.variables["own$part0"].initial == ("3",)
    assert module.variables["own$part1"].initial == ("4",)
    assert "[own$part0]" in (module.bodies["k"].body or "")
    assert "[own$part1]" in (module.bodies["twice"].body or "")
    assert "help" in module.bodies  # No other part has this name, so it stays.


def test_one_of_several_weak_definitions_stays_and_dynamic_memory_is_declared_once() -> None:
    text = merge([part("caller", CALLER), part("callee", CALLEE)])
    assert len(re.findall(r"common", text)) == 1
    assert len(re.findall(r"dynamic", text)) == 1


def test_a_definition_with_full_linkage_replaces_a_weak_one() -> None:
    weak = part("a", ".weak .global .align 4 .u32 v = 1;\n")
    strong = part("b", ".visible .global .align 4 .u32 v = 2;\n")
    for parts in ((weak, strong), (strong, weak)):
        assert merged(*parts).variables["v"].initial == ("2",)


def test_what_no_part_defines_stays_external() -> None:
    declaration = ".extern .func (.param .b32 r) vprintf (.param .b64 a, .param .b64 b);\n"
    text = merge([part("a", declaration), part("b", declaration)])
    assert text.count("vprintf") == 1
    assert ".extern .func" in text


def test_definitions_of_a_part_have_their_linkage() -> None:
    found = {symbol.name: symbol.linkage for symbol in definitions(part("callee", CALLEE))}
    assert found == {"own": "", "total": "visible", "common": "weak", "help": "", "twice": "visible"}


def test_files_of_line_information_are_numbered_anew() -> None:
    body = """\
.visible .func {0}()
{{
	.loc	1 7 3, function_name $L__info_string0, inlined_at 1 9 2
	ret;
}}
	.file	1 "/preheat/{0}.cu"
	.section	.debug_str
	{{
$L__info_string0:
.b8 95,90,0
	}}
"""
    text = merge([part("a", body.format("f")), part("b", body.format("g"))])
    assert "debug_str" not in text
    assert "function_name" not in text  # It names a place in the section.
    lines = Lines(text, {"/preheat/g.cu": "\n" * 6 + "seventh\n\nninth\n"})
    function = ptx.parse(text).bodies["g"]
    ret = next(each for each in function.statements if each.is_instruction)
    shown = [(str(line), line.text) for line in lines.of(function, ret.line)]
    assert shown == [("g.cu:7", "seventh"), ("g.cu:9", "ninth")]


def test_merged_text_is_valid_for_the_assembler(shared_builder: Builder) -> None:
    text = merge([part("caller", CALLER), part("callee", CALLEE)])
    artifact = shared_builder.build(Program.of(text, label="merged.ptx"), Arch.parse("sm_90"))
    assert [entry.name for entry in artifact.entries] == ["k"]


names = st.sampled_from(["a", "b", "c", "d"])
linkages = st.sampled_from(["", ".weak "])
definition = st.builds(
    lambda name, linkage, value: (name, linkage, value), names, linkages, st.integers(0, 9)
)
modules = st.lists(definition, max_size=4, unique_by=lambda row: row[0])


@given(rows=st.lists(modules, min_size=2, max_size=3))
def test_every_variable_keeps_its_value(rows: list[list[tuple[str, str, int]]]) -> None:
    parts = [
        part(str(index), "".join(f"{kind}.global .u32 {name} = {n};\n" for name, kind, n in module))
        for index, module in enumerate(rows)
    ]
    found = merged(*parts).variables
    owner: dict[str, int] = {}
    for index, module in enumerate(rows):
        for name, kind, value in module:
            if kind:
                assert found[name].initial == (str(owner.setdefault(name, value)),)
            else:
                private = found.get(f"{name}$part{index}", found.get(name))
                assert private is not None
                assert private.initial == (str(value),)
