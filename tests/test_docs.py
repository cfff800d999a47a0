"""The documentation: every snippet runs, every list is complete, and every link has a target."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import preheat
from preheat import Gpu
from preheat.emulator.table import VARIANTS
from preheat.model.config import VARIABLES
from tests.processes import import_path
from tests.shown_output import compare, matches
from tests.stories import KINDS, blocks
from tests.test_stories import PAGES as STORIES

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
CODE = re.compile(r"^```.*?^```|<!--.*?-->|`[^`\n]+`", re.M | re.S)
GUIDES = ROOT / "docs" / "guides"
#: Pages that tests/adapters run, where the library is installed.
RUN_WITH_LIBRARIES = ("cpp-extension.md", "cupy.md", "numba.md", "torch-compile-kernel.md")
TRITON_PAGES = (GUIDES / "triton.md", GUIDES / "coming-from" / "triton.md")
# The snippets of this page raise: see test_reference.py.
ERRORS_PAGE = ROOT / "docs" / "reference" / "errors.md"


def test_a_number_in_output_counts_unless_something_is_measured() -> None:
    compare("groups=132  width=2560", "groups=132 width=2560")
    compare("3 kernels in 1.5 s", "4 kernels in 20 ms")
    for real in ("groups=256 width=2560", "groups=132 width=2560 2"):
        with pytest.raises(AssertionError):
            compare("groups=132 width=2560", real)


@pytest.mark.gpu
def test_the_first_example_on_a_gpu(tmp_path: Path) -> None:
    readme = list(blocks(ROOT / "README.md"))
    example = next(block for block in readme if block.kind == "python")
    shown = str(example.output).replace("emulator:0", "cuda:0")
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", example.text],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": import_path()},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    compare(shown, ran.stdout)


def test_misuse_says_what_the_page_on_arguments_shows(
    open_device: Callable[..., Gpu], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (GUIDES / "arguments.md").read_text().partition("\n## What the errors say\n")[2]
    misuses = re.findall(r"^- `(.*?)` raises `(\w+)`:\n  `(.*?)`(?: \(hint: `(.*)`\))?$", page, re.M)
    assert len(misuses) == page.count("\n- ") > 12
    monkeypatch.chdir(tmp_path)
    for shown in blocks(GUIDES / "arguments.md"):
        if shown.kind == "cuda":
            (tmp_path / shown.title).write_text(shown.text)
    gpu, other = open_device("emulator:0"), open_device("emulator:1")
    old = gpu.zeros(1000)
    gpu.reset()
    gone = gpu.zeros(1000)
    gone.close()
    names = {
        "gpu": gpu,
        "saxpy": gpu.kernel("saxpy.cu", "saxpy"),
        "far": other.zeros(1000),
    } | {"gone": gone, "old": old, "np": np, "preheat": preheat}
    names |= {"x": gpu.zeros(1000), "y": gpu.zeros(1000), "longs": gpu.zeros(1000, "int64")}
    for code, kind, message, hint in misuses:
        with pytest.raises(preheat.PreheatError) as caught:
            eval(code, names)
        said = str(caught.value).partition("\n")[0]
        assert type(caught.value).__name__ == kind
        assert matches(message, said), said
        assert not hint or caught.value.hint == hint


def test_no_snippet_has_a_kind_that_nobody_runs() -> None:
    assert {block.kind for page in PAGES for block in blocks(page)} <= KINDS  # See tests/stories.py.


def test_every_page_with_code_is_run_by_a_test() -> None:
    library_pages = [GUIDES / "coming-from" / name for name in RUN_WITH_LIBRARIES]
    others = {*STORIES, *TRITON_PAGES, *library_pages, ERRORS_PAGE}
    pages = {page for page in PAGES if any(b.kind in ("python", "console") for b in blocks(page))}
    assert pages - others == set()


def test_the_page_on_variables_is_what_config_says() -> None:
    page = (ROOT / "docs" / "environment.md").read_text()
    rows = re.findall(r"^\| `(PREHEAT_\w+)` \| (.*?) \| (.*?) \|$", page, re.M)
    assert rows == [(v.name, v.default, v.help) for v in VARIABLES]


def test_the_page_on_the_emulator_lists_every_bound() -> None:
    page = (ROOT / "docs" / "reference" / "emulator.md").read_text()
    listed = re.findall(r"^\| `(.*?)` \| (.*?) \|$", page.partition("| instruction | bound |")[2], re.M)
    assert listed == [(variant.syntax, variant.bound) for variant in VARIANTS if variant.bound]


def test_the_page_on_the_architecture_names_files_that_exist() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    files = set(re.findall(r"`((?:[\w-]+/)*[\w-]+\.(?:py|c|cuh|md))`", page))
    assert len(files) > 40
    places = [ROOT, ROOT / "src" / "preheat", ROOT / "src" / "preheat" / "emulator"]
    assert [name for name in sorted(files) if not any((each / name).is_file() for each in places)] == []


def test_the_page_on_the_architecture_has_a_table_that_one_can_read() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    table = page[page.index("## Where to begin") : page.index("## Walk 1")]
    assert sum(line.startswith("| ") for line in table.splitlines()) - 1 <= 30


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", CODE.sub("", page.read_text())):
        if "://" not in target:
            assert (page.parent / target).exists(), target
