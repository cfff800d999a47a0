"""Draw the charts of docs/pictures from benchmarks/results: python docs/charts.py

A chart has all rows of one column of a results file, the best first. Peers stand beside preheat also
where they lead. The caption has the machine, the date, the commit and the versions from the same file.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from preheat.graph.pictures import svg

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PICTURES = ROOT / "docs" / "pictures"


@dataclass(frozen=True)
class Chart:
    """One column of one table of a results file, and how it is described."""

    name: str
    title: str
    results: str
    table: str
    column: str
    note: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)  # by the name of a row, where that is short
    ours: tuple[str, ...] = ()  # rows of preheat whose names do not say so
    left_out: tuple[str, ...] = ()  # rows that measure the benchmark itself

    @property
    def path(self) -> Path:
        """Where the chart is committed."""
        return PICTURES / f"chart-{self.name}.svg"


@dataclass(frozen=True)
class Bar:
    """One row: `value` in the base unit, and `text` as it was measured."""

    label: str
    value: float
    text: str
    spread: str
    ours: bool


CHARTS = (
    Chart(
        name="startup",
        title="A new process launches 50 cached kernels: start to the last first launch",
        results="bench_coldstart",
        table="A new process, 50 cached kernels, first launch of each",
        column="to last launch",
        note="Medians.",
        labels={
            "raw": "cubin files by hand",
            "preheat": "preheat, cached",
            "preheat, sealed": "preheat, sealed, from a bundle",
            "preheat, nothing cached": "preheat, nothing cached: compiles",
        },
    ),
    Chart(
        name="together",
        title="50 kernels that no cache has, one process, 16 cores",
        results="bench_together",
        table="50 kernels, nothing cached, one process, 16 cores, cuda:0",
        column="all kernels",
    ),
    Chart(
        name="shared-start",
        title="A process with an empty cache: 50 kernels, from the first request to the last result",
        results="bench_shared_start",
        table="50 kernels, first launch",
        column="together",
        labels={"nothing stored": "nothing stored: 50 compiles"},
        ours=(
            "local disk",
            *(
                f"shared store on {server}{delay}"
                for server in ("Redis", "S3", "WebDAV")
                for delay in ("", ", 5 ms added")
            ),
        ),
        note="On the emulator, with gpu.kernels. The servers are on the same machine.",
    ),
    Chart(
        name="launch",
        title="Host cost of one launch of saxpy",
        results="bench_launch",
        table="Host cost of one launch (15 rounds of 3,000)",
        column="a launch",
        note="* is not like for like: torch has an operator that picks its kernel, and Triton's kernel "
        "is its own. preheat checks the arguments of every launch, and those of bind() once.",
    ),
    Chart(
        name="replay",
        title="Host cost of one replay of a graph of 320 kernels",
        results="bench_replay",
        table="Host cost of one replay of 320 kernels (150 bursts of 20)",
        column="a replay",
        left_out=("native C, process of its own", "cuda.bindings, bursts of 5"),
    ),
    Chart(
        name="replay-end-to-end",
        title="A graph of 320 kernels from end to end, and the same kernels launched one by one",
        results="bench_replay",
        table="End to end, 320 kernels (60 times and one wait)",
        column="a replay",
        left_out=("native C, process of its own",),
        note="This GPU has two states, in which a replay takes different times. Which of them a row "
        "meets is chance.",
    ),
    Chart(
        name="sealed",
        title="An application with Triton, torch.compile, CuPy, cuda.core and preheat: whole process",
        results="bench_sealed",
        table="Start of an application with several compilers",
        column="whole process",
        labels={
            "stock, cold": "stock, empty caches",
            "stock, warm": "stock, warm caches",
            "preheat, sealed": "preheat, sealed, empty caches",
        },
        note="One run each. Warm caches lead: most of a start is spent in torch.compile, also where it "
        "compiles nothing.",
    ),
    Chart(
        name="pools",
        title="GPU memory of 16 graphs of one model",
        results="bench_pool",
        table="graphs of an MLP at 16 batch sizes, 4 blocks of width 4096",
        column="memory",
        labels={
            "separate": "a pool for each graph",
            "shared": "gpu.shared_pool()",
            "torch.cuda.MemPool": "torch.cuda.MemPool, given to preheat",
            "graph_pool_handle": "torch.cuda.graph_pool_handle(), given to preheat",
        },
        ours=("shared", "torch.cuda.MemPool", "graph_pool_handle"),
    ),
)

# Results


def load(chart: Chart) -> dict[str, Any]:
    """Return the results file of a chart."""
    results: dict[str, Any] = json.loads((RESULTS / f"{chart.results}.json").read_text())
    return results


_UNITS = {"µs": 1e-6, "ms": 1e-3, "s": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30}


def value_of(text: str) -> float:
    """Return the seconds or bytes of a measured value, such as `3.40 µs`."""
    amount, unit = text.split()
    return float(amount) * _UNITS[unit]


def bars(chart: Chart) -> list[Bar]:
    """Return the rows of a chart, the lowest value first."""
    table = load(chart)["tables"][chart.table]
    column = table["head"].index(chart.column)
    rows = [row for row in table["rows"] if row[0] not in chart.left_out]
    return sorted((_bar(chart, table["head"], row, column) for row in rows), key=lambda bar: bar.value)


def _bar(chart: Chart, head: Sequence[str], row: Sequence[str], column: int) -> Bar:
    # A spread belongs to the column before it, or before the column of the least value.
    at = column + 2 if head[column + 1] == "least" else column + 1
    spread = row[at] if head[at] == "spread" else "-"
    ours = row[0].startswith("preheat") or row[0] in chart.ours
    return Bar(chart.labels.get(row[0], row[0]), value_of(row[column]), row[column], spread, ours)


# Drawing

_STYLE: svg.Style = {
    "page": ("fill: #ffffff", "fill: #0d1117"),
    "title": ("fill: #1f2328; font-weight: bold", "fill: #e6edf3"),
    "text": ("fill: #1f2328", "fill: #e6edf3"),
    "ours-text": ("fill: #1f2328; font-weight: bold", "fill: #e6edf3"),
    "quiet": ("fill: #59636e", "fill: #9da7b3"),
    "peer": ("fill: #afb8c1", "fill: #57606a"),
    "ours": ("fill: #d4621b", "fill: #f0883e"),
}
_WIDTH = 860.0
_MARGIN = 18.0
_ROW = 24.0
_CAPTION = 11.0  # the size of the font
_LINE = 16.0


def draw(chart: Chart) -> str:
    """Return the chart as an SVG document."""
    rows = bars(chart)
    content = [svg.text(chart.title, _MARGIN, _MARGIN + 14, 14, class_="title")]
    top = _MARGIN + 32
    left = _MARGIN + max(svg.text_width(bar.label, svg.SIZE) for bar in rows) + 12
    right = _WIDTH - _MARGIN - max(svg.text_width(_measured(bar), svg.SIZE) for bar in rows) - 8
    scale = (right - left) / max(bar.value for bar in rows)
    for at, bar in enumerate(rows):
        content += _row(bar, left, top + at * _ROW, scale)
    y = top + len(rows) * _ROW + _LINE
    for line in caption(chart):
        content.append(svg.text(line, _MARGIN, y, _CAPTION, class_="quiet"))
        y += _LINE
    return svg.document(chart.title, _WIDTH, y + _MARGIN - _LINE, _STYLE, content) + "\n"


def _measured(bar: Bar) -> str:
    return bar.text if bar.spread == "-" else f"{bar.text}  spread {bar.spread}"


def _row(bar: Bar, left: float, y: float, scale: float) -> Iterator[str]:
    base = y + 14
    name = "ours-text" if bar.ours else "text"
    width = bar.value * scale
    shape = {"x": left, "y": y + 3, "width": width, "height": _ROW - 8, "rx": 2}
    yield svg.text(bar.label, left - 12, base, svg.SIZE, class_=name, text_anchor="end")
    yield svg.element("rect", **shape, class_="ours" if bar.ours else "peer")
    yield svg.text(bar.text, left + width + 8, base, svg.SIZE, class_=name)
    if bar.spread != "-":
        after = left + width + 8 + svg.text_width(f"{bar.text}  ", svg.SIZE)
        yield svg.text(f"spread {bar.spread}", after, base, svg.SIZE, class_="quiet")


def caption(chart: Chart) -> list[str]:
    """Return the lines below a chart: what is meant, where it was measured, with which versions."""
    machine = load(chart)["machine"]
    gpu = "no GPU" if machine["gpu"] == "-" else machine["gpu"]
    commit = f", commit {machine['commit']}" if "commit" in machine else ""
    spread = any(bar.spread != "-" for bar in bars(chart))
    meaning = "Less is better." + (" Medians; a spread is the interquartile range." if spread else "")
    where = (
        f"{gpu}; {machine['cpu']}, {machine['cores']} cores; {machine['system']}; "
        f"Python {machine['python']}; {machine['date']}{commit}."
    )
    versions = [f"{name} {found}" for name, found in machine["packages"].items() if found != "-"]
    texts = (
        f"{meaning} {chart.note}".strip(),
        where,
        f"{', '.join(versions)}.",
        f"From benchmarks/results/{chart.results}.json.",
    )
    columns = int((_WIDTH - 2 * _MARGIN) / (svg.ADVANCE * _CAPTION))
    return [line for text in texts for line in textwrap.wrap(text, columns)]


def main() -> None:
    """Write all charts."""
    PICTURES.mkdir(exist_ok=True)
    for chart in CHARTS:
        chart.path.write_text(draw(chart))


if __name__ == "__main__":
    main()
