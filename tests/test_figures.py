"""Figures of the documentation come from benchmarks/results, or are settings that are listed here."""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.figures import RESULTS, Quantity, agrees, passages, quantities, tables

ROOT = Path(__file__).parents[1]
PAGES = {
    str(page.relative_to(ROOT)): page
    for page in (
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "examples/README.md")),
        *sorted((ROOT / "docs").glob("**/*.md")),
    )
}
README, MEASUREMENTS = "README.md", "docs/measurements.md"
ON_GPU = {
    path.stem for path in RESULTS.glob("*.json") if tables(path.stem)["machine"].get("gpu", "-") != "-"
}
#: Code in a docstring, and the units in which nobody states a limit there.
CODE = re.compile(r"`[^`]*`|^ *(>>>|\.\.\.) .*$", re.M)
MEASURED = re.compile(r"[nµ]|m(s|illi)|.*/s")
#: Quantities that nobody measures, by page, with what they are.
NOT_MEASURED = {
    "docs/adapters.md": {
        "1 compiles": "the variants of a kernel",
        "5 compiles": "the variants of a kernel",
    },
    "docs/audit.md": {"12 compiles": "the report above it"},
    "docs/bake.md": {
        "1 millisecond": "what an entry that is copied counts in a shard",
        "100 KB": "the size of the results that were measured",
    },
    "docs/cache-format.md": {
        "2 seconds": "from when on a stamp is trusted",
        "10 seconds": "how long a fork waits, and when a lease is taken over",
        "3 times": "how often a worker is replaced",
        "3.3 seconds": "how often a lease is renewed",
        "4 times": "how often a call is repeated",
    },
    "docs/cache.md": {"5 seconds": "how often counters are written"},
    "docs/decisions/0011-header-evidence.md": {"2 seconds": "from when on a stamp is trusted"},
    "docs/decisions/0012-forks-and-interrupts.md": {"10 seconds": "how long a fork waits"},
    "docs/decisions/0013-tensor-cores.md": {"3 times": "a bound that follows from the arithmetic"},
    "docs/emulate-suites.md": {
        "4 seconds": "the time limit of a test of numba-cuda",
        "30 seconds": "the time limit of a test of numba-cuda",
        "900 seconds": "the time limit of the run",
        "99.7 %": "1919 of 1924",
        "99.8 %": "2943 of 2949",
    },
    "docs/emulator.md": {"10 times": "the two limits of an endless loop"},
    "docs/guides/fleet.md": {"10 seconds": "how often the test kills a worker"},
    "docs/guides/programs.md": {
        "50 %": "a setting",
        "2 seconds": "from when on a progress bar is shown",
    },
    "docs/guides/testing.md": {"10 times": "the two limits of an endless loop"},
    "docs/index.md": {"10 minutes": "the tutorial, to a reader"},
    "docs/measurements.md": {"5 ms": "the delay of a proxy"},
    "docs/metrics.md": {"5 seconds": "the time limit of a client"},
    "docs/reference/emulator.md": {"8 MB": "the size of the heap"},
    "docs/shared.md": {
        "1 second": "the pause after a fault",
        "2 seconds": "the longest pause between two looks",
        "3 times": "how many failed leases are a fault",
        "3.3 seconds": "how often a lease is renewed",
        "10 seconds": "when a lease is taken over",
        "50 ms": "the first pause between two looks",
    },
    "docs/start/first-kernel.md": {"10 minutes": "the tutorial, to a reader"},
    "docs/start/tutorial.md": {"10 minutes": "the tutorial, to a reader"},
}


@pytest.mark.parametrize("name", PAGES)
def test_a_figure_is_what_was_measured(name: str) -> None:
    for passage in passages(PAGES[name]):
        for source in passage.sources:
            measured = source.cell()
            assert agrees(source.figure, measured), f"{name}, {source}: measured {measured}"


@pytest.mark.parametrize("name", PAGES)
def test_a_figure_has_a_source(name: str) -> None:
    """Each quantity of a passage is named once in a comment below it, and each named one is shown."""
    for passage in passages(PAGES[name]):
        shown = Counter(quantities(passage.text))
        named = Counter(source.figure for source in passage.sources)
        loose = {str(figure) for figure in shown - named} - set(NOT_MEASURED.get(name, {}))
        if name == README and passage.text.startswith("|"):
            continue  # Its rows are those of the page with all figures.
        assert not loose, f"{name}, line {passage.line}: no source for {sorted(loose)}"
        for figure in named - shown:  # Bare numbers and sizes are not looked for.
            number = rf"(?<![\d.,]){re.escape(figure.number)}(?![\d.]\d)"
            assert re.search(number, passage.text), (
                f"{name}, line {passage.line}: does not show {figure}"
            )


def test_a_listed_exception_is_on_its_page() -> None:
    for name, figures in NOT_MEASURED.items():
        shown = {
            str(figure) for passage in passages(PAGES[name]) for figure in quantities(passage.text)
        }
        assert set(figures) <= shown, name


@pytest.mark.parametrize("name", PAGES)
def test_a_page_with_figures_of_a_gpu_has_their_dates_and_commits(name: str) -> None:
    text = PAGES[name].read_text()
    for passage in passages(PAGES[MEASUREMENTS if name == README else name]):
        for results in {source.results for source in passage.sources} & ON_GPU:
            machine = tables(results)["machine"]
            assert {machine["date"], machine["commit"]} <= set(re.findall(r"[\w-]+", text)), results


def test_the_table_of_the_readme_is_a_part_of_the_one_with_all_figures() -> None:
    every = PAGES[MEASUREMENTS].read_text().splitlines()
    table = [line for line in PAGES[README].read_text().splitlines() if line.startswith("|")]
    assert len(table) > 8
    assert [line for line in table if line not in every] == []


def test_results_of_a_gpu_have_their_commit() -> None:
    for results in ON_GPU:
        assert re.fullmatch(r"[0-9a-f]{8}", tables(results)["machine"]["commit"]), results


def test_the_newest_commit_that_ran_on_a_gpu_is_named() -> None:
    runs = [tables(results)["machine"] for results in ON_GPU]
    newest = max(runs, key=lambda machine: str(machine["date"]))
    section = PAGES[MEASUREMENTS].read_text().partition("## What has not run on a GPU\n")[2]
    assert f"commit `{newest['commit']}` ({newest['date']})" in section
    assert f"`git rev-list --count {newest['commit']}..HEAD`" in section


def test_no_docstring_has_a_measured_time_or_rate() -> None:
    """A docstring is a part of the reference, and could not name a source. Limits are in seconds."""
    for path in sorted((ROOT / "src").glob("**/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = CODE.sub("", ast.get_docstring(node) or "")
                found = [figure for figure in quantities(text) if MEASURED.match(figure.unit)]
                assert not found, f"{path.relative_to(ROOT)}: {found}"


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a page to write, beside a results file."""
    table = {
        "head": ["", "a launch", "rate", "torch", "rate"],
        "rows": [["one", "3.97 µs", "1.5 TB/s", "-", "62%"]],
    }
    runs = {"head": ["", "cores", "seconds"], "rows": [["one", "1", "9  3  4"], ["one", "2", "2"]]}
    content = {"machine": {"gpu": "-"}, "tables": {"Launches, all": table, "Runs": runs}}
    monkeypatch.setattr("tests.figures.RESULTS", tmp_path)
    (tmp_path / "bench_page_of_a_test.json").write_text(json.dumps(content))
    tables.cache_clear()
    return tmp_path / "page.md"


COMMENT = "\n<!-- bench_page_of_a_test: {}\n{}\n-->\n"


@pytest.mark.parametrize(
    ("shown", "place", "row", "true"),
    [
        ("4.0 µs", "Launches > a launch", "one", True),
        ("4 µs", "Launches > a launch", "one", True),
        ("3,970 ns", "Launches > a launch", "one", True),
        ("4.1 µs", "Launches > a launch", "one", False),
        ("4.0 ms", "Launches > a launch", "one", False),
        ("4.0 TB/s", "Launches > a launch", "one", False),
        ("62 %", "Launches", "one > torch > rate", True),
        ("0.62 x", "Launches", "one > torch > rate", True),
        ("1500 GB/s", "Launches", "one > rate", True),
        ("4 s", "Runs > seconds", "one, 1", True),  # the middle one of three runs
        ("2 ms", "Runs > seconds", "one, 2", False),
    ],
)
def test_a_figure_is_compared_as_it_is_printed(
    page: Path, shown: str, place: str, row: str, true: bool
) -> None:
    page.write_text(f"It takes {shown}.\n{COMMENT.format(place, f'{shown} = {row}')}")
    (passage,) = passages(page)
    (source,) = passage.sources
    assert list(quantities(passage.text)) == [source.figure]
    assert agrees(source.figure, source.cell()) is true


@pytest.mark.parametrize(
    ("place", "line", "message"),
    [
        ("Launches", "4.0 µs", "not `figure = row`"),
        ("Launches", "fast = one", "no figure"),
        ("Launches", "4.0 µs = one", "no column"),
        ("Nothing > a launch", "4.0 µs = one", "0 tables begin with 'Nothing'"),
        ("Launches > a launch", "4.0 µs = two", "0 rows have this name"),
        ("Launches", "4.0 µs = one > time", "no column 'time'"),
        ("Runs > seconds", "4 s = one", "2 rows have this name"),
    ],
)
def test_a_source_that_does_not_exist_is_named(page: Path, place: str, line: str, message: str) -> None:
    page.write_text(f"It takes 4.0 µs.\n{COMMENT.format(place, line)}")
    with pytest.raises(AssertionError, match=re.escape(message)):
        [source.cell() for passage in passages(page) for source in passage.sources]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("In 4 µs, 16 x 16 tiles, 1.5 times.", ["4 µs", "1.5 times"]),
        ("104 / 103 % and 9, 8 and 7 ms", ["104 %", "103 %", "9 ms", "8 ms", "7 ms"]),
        ("sm_90 s, 4096³ and 5 minutes in 2026-11-16 s", ["5 minutes"]),
        (
            "after ten seconds, half a millisecond, 1,580 µs",
            ["1,580 µs", "10 seconds", "half a millisecond"],
        ),
        ("| | seconds | name |\n|---|---|---|\n| a | 1.5 | 7 |", ["1.5 seconds"]),
        ("48 KiB, 4 MiB and 1.6 GB", ["1.6 GB"]),
    ],
)
def test_quantities_are_found_in_words_lists_and_columns(text: str, found: list[str]) -> None:
    assert [str(figure) for figure in quantities(text)] == found


def test_a_comment_belongs_to_the_passage_above_it(page: Path) -> None:
    comment = COMMENT.format("Launches > a launch", "4.0 µs = one")
    page.write_text(f"First 5 s.\n\n```text\n6 s\n```\n\nThen 4.0 µs.\n{comment}\nLast 7 s.\n")
    assert [(each.line, len(each.sources)) for each in passages(page)] == [(1, 0), (7, 1), (13, 0)]
    assert Quantity("6", "s") not in {
        figure for each in passages(page) for figure in quantities(each.text)
    }
