"""`preheat emulate`: which instructions the emulator supports."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from preheat.tools.cli import main
from tests.emulator.support import entry

Emulate = Callable[..., tuple[int, str, str]]

KNOWN = entry(
    ".param .u64 out",
    """
    ld.param.u64 %d1, [out];
    mov.u32 %r1, %tid.x;
    add.u32 %r2, %r1, 1;
    @%p1 add.u32 %r2, %r2, %r2;
    st.global.u32 [%d1], %r2;
    ret;""",
)
UNKNOWN = KNOWN.replace(
    "mov.u32 %r1, %tid.x;", "mov.u32 %r1, %pm0;\nwgmma.fence.sync.aligned;\ncall (r), malloc, (p);\n"
)


@pytest.fixture
def emulate(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Emulate:
    """Runs `preheat emulate --coverage` on a text."""
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.chdir(tmp_path)

    def run(text: str, *options: str) -> tuple[int, str, str]:
        Path("k.ptx").write_text(text)
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(["emulate", "--coverage", "k.ptx", *options])
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


def test_every_form_is_listed_with_its_count(emulate: Emulate) -> None:
    code, out, err = emulate(KNOWN)
    assert code == 0
    assert [line.split() for line in out.splitlines()] == [
        ["instruction", "count", "supported"],
        ["add.u32", "2", "yes"],
        ["ld.param.u64", "1", "yes"],
        ["mov.u32", "1", "yes"],
        ["ret", "1", "yes"],
        ["st.global.u32", "1", "yes"],
    ]
    assert err == "5 instructions supported\n"


def test_what_cannot_run_is_named_with_its_line(emulate: Emulate) -> None:
    code, out, err = emulate(UNKNOWN)
    assert code == 1
    missing = [line.split()[0] for line in out.splitlines() if line.endswith("no")]
    assert missing == ["call", "mov.u32", "wgmma.fence.sync.aligned"]
    line = UNKNOWN.split("\n").index("wgmma.fence.sync.aligned;") + 1
    assert f"k.ptx:{line}: wgmma.fence.sync.aligned" in err
    assert "3 not" in err


def test_json_has_the_same_rows(emulate: Emulate) -> None:
    code, out, _ = emulate(UNKNOWN, "--json")
    rows = {row["opcode"]: row for row in json.loads(out)}
    assert code == 1
    assert (rows["add.u32"]["count"], rows["add.u32"]["supported"]) == (2, True)
    assert rows["wgmma.fence.sync.aligned"]["supported"] is False


def test_a_file_that_is_no_ptx_is_bad_input(emulate: Emulate) -> None:
    code, out, err = emulate("nothing")
    assert (code, out) == (2, "")
    assert err.startswith("error: k.ptx:1: no .version directive")


TEXTURES = KNOWN.replace(
    "mov.u32 %r1, %tid.x;",
    "mov.u32 %r1, %tid.x;\n"
    "tex.2d.v4.f32.f32 {%f1, %f2, %f3, %f4}|%p1, [%d1, {%f5, %f6}];\n"
    "sust.b.1d.b32.trap [%d1, {%r3}], {%r4};\n"
    "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%d1, {%r3, %r4}], [%r1];\n"
    "sub.u32 %r3, %r1, ?;\n",
)


@pytest.mark.parametrize("also", ["", ".entry broken() {\nbra nowhere;\nsub.u32 %r3, %r1, ?;\n}\n"])
def test_the_rest_of_a_file_is_listed_whatever_it_contains(emulate: Emulate, also: str) -> None:
    code, out, err = emulate(TEXTURES + also)
    listed = dict(line.split()[::2] for line in out.splitlines()[1:])
    assert code == 1
    assert {form for form, supported in listed.items() if supported == "yes"} == {
        "add.u32", "ld.param.u64", "mov.u32", "ret", "st.global.u32", "sust.b.1d.b32.trap",
    }  # fmt: skip
    assert {form for form, supported in listed.items() if supported == "no"} == {
        "tex.2d.v4.f32.f32", "sub.u32",
        "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group", *["bra"] * bool(also),
    }  # fmt: skip
    line = TEXTURES.split("\n").index("sub.u32 %r3, %r1, ?;") + 1
    assert f"k.ptx:{line}: sub.u32" in err


def test_a_file_that_is_not_there_is_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["emulate", "--coverage", "/nowhere/k.ptx"])
    assert ended.value.code == 2
    assert "cannot read /nowhere/k.ptx" in capsys.readouterr().err
