"""The README: short, with figures that were measured, commands that exist, and true links."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
RESULTS = ROOT / "benchmarks" / "results"
#: The pages that have the table of the README, in whole or in part.
PAGES = {name: (ROOT / name).read_text() for name in ("README.md", "docs/measurements.md")}
_UNITS = {"µs": 1e-6, "ms": 1e-3, "s": 1.0, "TFLOP/s": 1.0, "": 1.0}


class Figure(NamedTuple):
    """A figure as the table shows it, and the cell of a results file in which it was measured."""

    title: str  # the beginning of the row
    shown: str
    results: str
    table: str
    row: str
    column: str


START = ("bench_coldstart", "A new process, 50 cached kernels, first launch of each")
TOGETHER = ("bench_together", "50 kernels, nothing cached, one process, 16 cores, cuda:0")
LAUNCH = ("bench_launch", "Host cost of one launch (15 rounds of 3,000)")
CAPTURE = ("bench_replay", "Capture of 320 kernels, for each of them")
REPLAY = ("bench_replay", "Host cost of one replay of 320 kernels (150 bursts of 20)")
WHOLE = ("bench_replay", "End to end, 320 kernels (60 times and one wait)")
PRODUCT = ("bench_kernels", "Products: shipped kernels, torch.mm (TF32 off) and cuBLAS through preheat")
SEALED = ("bench_sealed", "Start of an application with several compilers")
RACE = ("bench_hit", "8 processes, 20 kernels, empty cache")
GEMM = "gemm m=4096 n=4096 k=4096 bfloat16"
LAST = "to last launch"

FIGURES = [
    Figure("new process, 50 cached", "0.30 s", *START, "preheat", LAST),
    Figure("new process, 50 cached", "0.44 s", *START, "cuda.core, compile(cache=)", LAST),
    Figure("new process, 50 cached", "CuPy 0.45", *START, "CuPy RawKernel", LAST),
    Figure("new process, 50 cached", "by hand 0.21", *START, "raw", LAST),
    Figure("the same, sealed", "0.28 s", *START, "preheat, sealed", LAST),
    Figure("the same, sealed", "compile 2.2", *START, "preheat, nothing cached", LAST),
    Figure("50 kernels", "0.54 s", *TOGETHER, "preheat, gpu.kernels", "all kernels"),
    Figure("50 kernels", "1.51 s", *TOGETHER, "cuda.core, compile(cache=)", "all kernels"),
    Figure("50 kernels", "CuPy 1.53", *TOGETHER, "CuPy RawModule", "all kernels"),
    Figure("one launch", "4.0 µs", *LAUNCH, "preheat, kernel[grid, block](…)", "a launch"),
    Figure("one launch", "5.0 µs", *LAUNCH, "cuda.core, scalars made at each call", "a launch"),
    Figure("one launch", "native C 3.4", *LAUNCH, "native C, cuLaunchKernel", "a launch"),
    Figure("one launch", "CuPy 5.2", *LAUNCH, "CuPy RawKernel", "a launch"),
    Figure("one launch", "Triton 11.7", *LAUNCH, "Triton *", "a launch"),
    Figure("capture of a graph", "3.7 µs", *CAPTURE, "preheat", "a node"),
    Figure("capture of a graph", "1.9 µs", *CAPTURE, "cuda.core", "a node"),
    Figure("capture of a graph", "cuda.bindings 1.8", *CAPTURE, "cuda.bindings", "a node"),
    Figure("capture of a graph", "torch 3.4", *CAPTURE, "torch.cuda.CUDAGraph", "a node"),
    Figure("replay of 320", "3.2 µs", *REPLAY, "preheat", "a replay"),
    Figure("replay of 320", "5.4 µs", *REPLAY, "cuda.core", "a replay"),
    Figure("replay of 320", "native C 2.6", *REPLAY, "native C, cuGraphLaunch", "a replay"),
    Figure("replay of 320", "CuPy 3.2", *REPLAY, "CuPy", "a replay"),
    Figure("replay of 320", "torch 5.8", *REPLAY, "torch.cuda.CUDAGraph", "a replay"),
    Figure("the same, end to end", "345 µs", *WHOLE, "preheat", "a replay"),
    Figure("the same, end to end", "290 µs", *WHOLE, "cuda.core", "a replay"),
    Figure("the same, end to end", "CuPy 287", *WHOLE, "CuPy", "a replay"),
    Figure("the same, end to end", "torch 337", *WHOLE, "torch.cuda.CUDAGraph", "a replay"),
    Figure("the same, end to end", "one by one 1580", *WHOLE, "preheat, eager", "a replay"),
    Figure("product of 4096", "490 TFLOP/s", *PRODUCT, GEMM, "rate"),
    Figure("application with", "13.0 s", *SEALED, "preheat, sealed", "whole process"),
    Figure("application with", "caches 18.8", *SEALED, "stock, cold", "whole process"),
    Figure("application with", "ones 11.6", *SEALED, "stock, warm", "whole process"),
    Figure("8 processes", "1.03 s", *RACE, "preheat", "wall"),
    Figure("8 processes", "3.78 s", *RACE, "cuda.core", "wall"),
    Figure("8 processes", "20 compiles", *RACE, "preheat", "compiles"),
    Figure("8 processes", "cuda.core 158", *RACE, "cuda.core", "compiles"),
]


def row_of(title: str) -> str:
    (row,) = (line for line in README.splitlines() if line.startswith(f"| {title}"))
    return row


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: f"{figure.title}: {figure.shown}")
def test_a_figure_of_the_table_was_measured(figure: Figure) -> None:
    row = row_of(figure.title)
    assert figure.shown in row
    table = json.loads((RESULTS / f"{figure.results}.json").read_text())["tables"][figure.table]
    (cells,) = (cells for cells in table["rows"] if cells[0] == figure.row)
    measured, _, unit = str(cells[table["head"].index(figure.column)]).partition(" ")
    (digits,) = re.findall(r"\d[\d.]*", figure.shown)
    shown_unit = (re.findall(r"\d (µs|ms|s|TFLOP/s) \|", row) or [""])[0]  # that of the first figure
    factor = _UNITS[unit] / (_UNITS[shown_unit] if unit else 1)
    places = len(digits.partition(".")[2])
    assert float(measured) * factor == pytest.approx(float(digits), rel=0, abs=0.501 * 10**-places)


def test_every_figure_of_the_table_is_compared() -> None:
    """The last figures of a row are on a CPU, and compared with the page that has all figures."""
    whole = PAGES["docs/measurements.md"]
    table = README.partition("| | | preheat")[2].partition("\n\n")[0]
    for line in table.splitlines()[2:]:
        title, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        shown = {text for cell in cells[1:] for text in re.findall(r"\d[\d.]*", cell)} - {"1.2"}
        compared = {
            text
            for figure in FIGURES
            if title.startswith(figure.title)
            for text in re.findall(r"\d[\d.]*", figure.shown)
        }
        for text in shown - compared:
            assert re.search(rf"(?<![\d.]){re.escape(text)}", whole), f"{title}: {text}"


def test_a_peer_leads_in_some_rows_of_the_table() -> None:
    table = README.partition("| | | preheat")[2].partition("\n\n")[0]
    for leads in (
        "by hand 0.21",
        "cuda.bindings 1.8",
        "native C 2.6",
        "torch 798",
        "ones 11.6",
        "54 µs",
    ):
        assert leads in table


def test_it_is_short_and_its_commands_are_targets() -> None:
    assert len(README.split()) <= 850
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`make ([\w-]+)`", README):
        assert re.search(rf"^{target}:", makefile, re.M), target
