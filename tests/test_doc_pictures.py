"""The pictures of the documentation are those that the code makes from the committed results."""

from __future__ import annotations

import importlib.util
import re
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

DOCS = Path(__file__).parents[1] / "docs"
PICTURES = DOCS / "pictures"
SVG = "{http://www.w3.org/2000/svg}"


def script(name: str) -> ModuleType:
    """Import a script of the documentation."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Dataclasses look their module up.
    spec.loader.exec_module(module)
    return module


sys.path.append(str(DOCS))  # The scripts of pictures import one another.
terminal = script("terminal")
demo_picture = script("demo_picture")
audit_picture = script("audit_picture")
charts = script("charts")
graph_pictures = script("graph_pictures")


def test_pictures_of_graphs_are_what_the_page_draws(tmp_path: Path) -> None:
    graph_pictures.draw(tmp_path)
    for name in graph_pictures.NAMES:
        committed = (PICTURES / name).read_text()
        assert committed == (tmp_path / name).read_text(), "make pictures"


@pytest.mark.parametrize("chart", charts.CHARTS, ids=lambda chart: chart.name)
def test_a_chart_is_that_of_the_committed_results(chart: Any) -> None:
    assert chart.path.read_text() == charts.draw(chart), "make pictures"


@pytest.mark.parametrize("chart", charts.CHARTS, ids=lambda chart: chart.name)
def test_a_chart_is_true_to_its_values(chart: Any) -> None:
    root = ElementTree.fromstring(chart.path.read_text())
    rects = [each for each in root.iter(f"{SVG}rect") if each.attrib["class"] in ("ours", "peer")]
    table = charts.load(chart)["tables"][chart.table]
    column = table["head"].index(chart.column)
    measured = [row[column] for row in table["rows"] if row[0] not in chart.left_out]
    widths = sorted(float(rect.attrib["width"]) for rect in rects)
    values = sorted(map(charts.value_of, measured))
    assert [width / widths[-1] for width in widths] == pytest.approx(
        [value / values[-1] for value in values], abs=0.001
    )
    shown = [text.text or "" for text in root.iter(f"{SVG}text")]
    assert set(measured) <= set(shown)
    assert {"ours", "peer"} == {rect.attrib["class"] for rect in rects}


@pytest.mark.parametrize("chart", charts.CHARTS, ids=lambda chart: chart.name)
def test_no_text_of_a_chart_leaves_it_or_meets_another(chart: Any) -> None:
    root = ElementTree.fromstring(chart.path.read_text())
    width, height = map(float, root.attrib["viewBox"].split()[2:])
    rows: dict[float, list[tuple[float, float]]] = {}
    for text in root.iter(f"{SVG}text"):
        x, y, length = (float(text.attrib[name]) for name in ("x", "y", "textLength"))
        left = x - length if text.attrib.get("text-anchor") == "end" else x
        rows.setdefault(y, []).append((left, left + length))
        assert left > 0
        assert left + length < width
        assert y < height
    for row in rows.values():
        ends = sorted(row)
        assert all(one[1] < other[0] for one, other in pairwise(ends))


def test_a_caption_has_machine_date_and_versions() -> None:
    for chart in charts.CHARTS:
        machine = charts.load(chart)["machine"]
        said = " ".join(charts.caption(chart))
        assert {machine["date"], machine["gpu"]} <= {
            each for each in machine.values() if str(each) in said
        }
        assert f"preheat {machine['packages']['preheat']}" in said
        assert f"benchmarks/results/{chart.results}.json" in said


def test_a_spread_is_that_of_its_column() -> None:
    by_name = {chart.name: chart for chart in charts.CHARTS}
    # The table of the start has spreads, and those are of other columns.
    assert {bar.spread for bar in charts.bars(by_name["startup"])} == {"-"}
    rows = charts.load(by_name["replay"])["tables"][by_name["replay"].table]["rows"]
    measured = {row[0]: row[3] for row in rows}
    for bar in charts.bars(by_name["replay"]):
        assert bar.spread == measured[bar.label]


def test_every_picture_is_made_by_a_script_and_shown_on_a_page() -> None:
    made = {chart.path.name for chart in charts.CHARTS} | set(graph_pictures.NAMES)
    made.add(demo_picture.TARGET.name)
    shown = {
        name
        for page in (DOCS.parent / "README.md", *DOCS.glob("**/*.md"))
        for name in re.findall(r"!\[.+?\]\((?:\.\./|docs/)*pictures/(.+?)\)", page.read_text())
    }
    assert {path.name for path in PICTURES.iterdir()} == made == shown


def test_a_picture_of_a_terminal_has_the_text_and_loads_nothing() -> None:
    output = "$ preheat demo\n  1.5 s  & <done>\n\n" + 200 * "x"
    picture = terminal.draw(output, "demo", demo_picture.STYLES)
    first, second, long = ("".join(line.split()) for line in terminal.lines(picture))
    assert (first, second) == ("$preheatdemo", "1.5s&<done>")
    assert long == (terminal.WIDTH - 1) * "x" + "…"
    for text in (picture, demo_picture.TARGET.read_text(), (DOCS / "audit.svg").read_text()):
        assert "@font-face" not in text
        assert "url(http" not in text


def test_the_picture_of_an_audit_says_that_its_driver_is_a_stand_in() -> None:
    picture = (DOCS / "audit.svg").read_text()
    shown = list(terminal.lines(picture))
    assert "".join(shown[0].split()).startswith("$preheataudit--")
    assert f">{audit_picture.TITLE}<" in picture.replace("&#160;", " ")
    assert "stand-in" in audit_picture.TITLE
