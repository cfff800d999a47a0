"""Text that is slow for careless patterns: double the length takes at most three times as long."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from preheat.ahead.manifest import Manifest
from preheat.errors import PreheatError
from preheat.model import ptx
from preheat.model.program import Program
from preheat.toolchain import report, signature
from preheat.toolchain.headers.includes import has_include_macros, has_include_queries, includes
from tests.conftest import LONG
from tests.torture.conftest import Campaign

#: Seconds of processor time below which nothing can be said about a ratio. A reader whose time grows
#: with the square of the size takes minutes for the long texts.
SHORT = 0.1 if LONG else 0.02


def cuda(text: str) -> None:
    program = Program.of(text, language="cuda", headers={"a.h": text})
    assert isinstance(program.may_include, bool)
    assert program.uncacheable is None or "clock" in program.uncacheable


def language(text: str) -> None:
    assert Program.of(f" {text}").language in ("cuda", "ptx")


def kernels(text: str) -> None:
    program = Program.of(f'"C" __global__ {text}', language="cuda")
    assert isinstance(signature.probes(program), dict)
    assert isinstance(signature.cast_probes(program), dict)


def headers(text: str) -> None:
    assert all(name is None or name for name, _ in includes(text))
    assert all(name is None or name for name in has_include_queries(text))
    assert all(has_include_macros(text))


def assembly(text: str) -> None:
    with suppress(ptx.SyntaxFault):
        module = ptx.parse(f".version 8.0\n.target sm_90\n{text}")
        assert isinstance(module.variables, dict)
        assert all(isinstance(function.statements, tuple) for function in module.functions)


def body(text: str) -> None:
    assembly(f".entry k() {{ {text} }}")


def log(text: str) -> None:
    program = Program.of("x")
    assert isinstance(report.diagnostics(text, program), tuple)
    assert isinstance(report.resources(text), dict)


READERS = {f.__name__: f for f in (cuda, language, kernels, headers, assembly, body, log)}

#: What a text of one kind repeats.
SHAPES = {
    "block comments": "/* a row of a table */\n",
    "comments in a row": "/**/",
    "openings of comments": "/*",
    "slashes": "/",
    "stars": "*",
    "quotes": '"',
    "quotes on lines": '"a\n',
    "apostrophes": "'",
    "raw strings": 'R"x(',
    "backslashes": "\\",
    "joined lines": "\\\n",
    "joined lines with carriage returns": "\\\r\n",
    "spaces": " ",
    "line breaks": "\n",
    "words": "void ",
    "attributes": "__global__ ",
    "kernels": '__global__ void k(int* x) { *x = 1; }\nextern "C" ',
    "linkage blocks": 'extern "C" {',
    "names with parentheses": "a(",
    "closing parentheses": ")",
    "digits": "1",
    "separated digits": "1'",
    "dots and digits": ".1",
    "trigraphs": "??/",
    "hashes": "#",
    "directives": "#include <",
    "computed directives": "#include A\n",
    "probes": "__has_include(",
    "questions": "defined ",
    "underscores": "_",
    "pieces of a macro": "__TI ME__ ",
    "linkage": ".visible ",
    "functions": ".func (",
    "entries": ".entry k(",
    "variables": ".global .align 4 .b8 a[4];",
    "attributes of variables": ".global .b8 ",
    "brackets": "[ ",
    "braces": "{",
    "labels": "a:",
    "diagnostics": "k.cu(1): error: ",
    "entry functions": "Compiling entry function '",
}


def seconds(read: Callable[[str], None], text: str) -> float:
    """Return the processor time of one reading."""
    started = time.process_time()
    with suppress(PreheatError):
        read(text)
    return time.process_time() - started


def in_proportion(read: Callable[[str], None], unit: str, size: int) -> bool:
    """Return True if twice the text takes at most three times as long, by the best of five runs."""
    texts = [unit * (size // len(unit) * factor) for factor in (1, 2)]
    once, twice = (seconds(read, text) for text in texts)
    for _ in range(4):
        if twice < SHORT or twice <= 3 * once:
            return True
        once, twice = (min(a, seconds(read, t)) for a, t in zip((once, twice), texts, strict=True))
    return twice <= 3 * once


@pytest.mark.parametrize("reader", READERS)
def test_reading_takes_time_in_proportion(reader: str, campaign: Campaign) -> None:
    size = 1 << 19 if LONG else 1 << 13
    shapes = dict(SHAPES)
    for nth in range(campaign.rounds(quick=4, long=10)):
        shapes[f"mixture {nth}"] = "".join(campaign.random.choices([*SHAPES.values()], k=6))
    slow = [shape for shape, unit in shapes.items() if not in_proportion(READERS[reader], unit, size)]
    assert not slow


def test_a_spaced_out_text_is_read_at_once(tmp_path: Path) -> None:
    """Two quantifiers for the same blanks would share many of them in every possible way."""
    blanks = " " * (1 << (20 if LONG else 17))
    for text in (f"defined{blanks}x", f"__has_include{blanks}x", f"#{blanks}include{blanks}x"):
        headers(text)
    for text in (
        f".func{blanks}1",
        f".func a({blanks}.param{blanks}.b8{blanks})",
        f".global{blanks}.b8",
    ):
        assembly(text)
    manifest = tmp_path / "m.toml"
    manifest.write_text(f"version = 1\n[[program]]\n{blanks}nothing = 1\n")
    with pytest.raises(PreheatError, match="unknown key 'nothing'"):
        Manifest.read(manifest)
