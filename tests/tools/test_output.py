"""What commands print: text of files and servers cannot control a terminal."""

from __future__ import annotations

from pathlib import Path

import pytest

from preheat.build.builder import Builder
from preheat.model.arch import Arch
from preheat.model.foreign import ForeignEntry
from preheat.store.bundle import write
from preheat.tools.cli import output
from tests.command import Cli

HOSTILE = "\x1b]0;owned\x07\x1b[31mred\r\x9b2J\u202e"
ESCAPED = r"\x1b]0;owned\x07\x1b[31mred\r\x9b2J\u202e"


def test_lines_and_messages_have_no_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_line(f"{HOSTILE}\tcell\nline é")
    output.print_message(f"{HOSTILE}\nline")
    output.print_error(HOSTILE, HOSTILE)
    shown = capsys.readouterr()
    assert shown.out == f"{ESCAPED}\tcell\nline é\n"
    assert shown.err == f"{ESCAPED}\nline\nerror: {ESCAPED}\n\nhint: {ESCAPED}\n"


def test_data_for_other_programs_is_unchanged(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    output.print_raw(b"\x1b\x00")
    assert capsysbinary.readouterr().out == b"\x1b\x00"


def test_labels_of_a_bundle_cannot_control_a_terminal(cli: Cli, tmp_path: Path) -> None:
    entry = ForeignEntry("triton", "K" * 52, {"a.cubin": b"x"}, label=HOSTILE, arch=Arch.parse("sm_90"))
    write(tmp_path / "k.heat", {entry.digest: entry.encode()}, {})
    Builder.open().foreign.put(entry)
    for command in (["bundle", "ls", "k.heat"], ["cache", "ls"], ["cache", "show", entry.digest[:12]]):
        ran = cli(*command)
        assert ran.code == 0
        assert ESCAPED in ran.out
        assert "\x1b" not in ran.out + ran.err


def test_a_manifest_with_a_hostile_label_is_refused_in_escaped_form(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "k.cu").write_text("__global__ void k() {}")
    row = 'file = "k.cu"\nlabel = "\\u001b[31m"'
    (tmp_path / "m.toml").write_text(f"version = 1\n[[program]]\n{row}\n")
    ran = cli("check", "m.toml", "--arch", "sm_90")
    assert ran.code == 1
    assert r"label '\x1b[31m' must be a plain name without control characters" in ran.out + ran.err
    assert "\x1b" not in ran.out + ran.err
