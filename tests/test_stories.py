"""The pages of the documentation run from top to bottom, the guides in a file of their own."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from preheat.audit.library import LIBRARY
from preheat.driver.library import LIBRARY as DRIVER
from tests.stories import run_page
from tests.tools.plugin import load_plugin

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    DOCS / "index.md",
    *sorted((DOCS / "start").glob("*.md")),
    DOCS / "adapters.md",
    DOCS / "audit.md",
    DOCS / "bake.md",
    DOCS / "cache-format.md",
    DOCS / "cache.md",
    DOCS / "emulator.md",
    DOCS / "environment.md",
    DOCS / "faq.md",
    DOCS / "graphs.md",
    DOCS / "guides" / "arguments.md",
    DOCS / "guides" / "coming-from" / "cuda-core.md",
    DOCS / "guides" / "coming-from" / "pycuda.md",
    DOCS / "guides" / "containers.md",
    DOCS / "guides" / "debugging.md",
    DOCS / "guides" / "fleet.md",
    DOCS / "guides" / "graph-rules.md",
    DOCS / "guides" / "headers.md",
    DOCS / "guides" / "kubernetes.md",
    DOCS / "guides" / "programs.md",
    DOCS / "guides" / "ptx.md",
    DOCS / "guides" / "streams.md",
    DOCS / "guides" / "testing.md",
    DOCS / "guides" / "without-gpu.md",
    DOCS / "kernels.md",
    DOCS / "linking.md",
    DOCS / "lora.md",
    DOCS / "metrics.md",
    DOCS / "ordering.md",
    DOCS / "reference" / "emulator.md",
    DOCS / "reference" / "events.md",
    DOCS / "reference" / "index.md",
    DOCS / "security.md",
    DOCS / "shared.md",
]
#: The guides, which tests/test_guide_stories.py runs: a file of tests is the work of one process.
GUIDES = [page for page in PAGES if page.is_relative_to(DOCS / "guides")]
#: Pages that need a library, which may not be installed.
LIBRARIES = {"adapters.md": "cuda.core", "cuda-core.md": "cuda.core", "without-gpu.md": "cuda.core"}
#: Pages that start `preheat audit`, whose library needs a C compiler.
AUDITS = ("audit.md", "pycuda.md")


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """Return the environment of a new user: an empty home, and an empty cache."""
    home = tmp_path / "user"
    home.mkdir()
    return {
        "HOME": str(home),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(os.path.abspath(place) for place in sys.path if place),
        "PREHEAT_LOCK_DIR": str(tmp_path / "locks"),
        "PREHEAT_DEVICE": "emulator",
        **load_plugin(),
    }


def check_page(page: Path, env: dict[str, str], place: Path) -> None:
    """Run a page in a new directory. Skip it if something that it needs is missing."""
    if (library := LIBRARIES.get(page.name)) and importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    if page.name in AUDITS and not LIBRARY.is_file():
        pytest.skip("the audit library needs a C compiler")
    if page.name == "without-gpu.md" and not DRIVER.is_file():
        pytest.skip("the CPU driver needs a C compiler")
    place.mkdir()
    assert run_page(page, place, env) > 0


def name_of(page: Path) -> str:
    """Return the path of a page in the repository."""
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [page for page in PAGES if page not in GUIDES], ids=name_of)
def test_a_page_does_what_it_shows(page: Path, env: dict[str, str], tmp_path: Path) -> None:
    check_page(page, env, tmp_path / "work")
