"""The pages of the documentation run from top to bottom."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from preheat.audit.library import LIBRARY
from preheat.driver.library import LIBRARY as DRIVER
from tests.plugin import load_plugin
from tests.stories import run_page

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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_does_what_it_shows(page: Path, env: dict[str, str], tmp_path: Path) -> None:
    if (library := LIBRARIES.get(page.name)) and importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    if page.name in AUDITS and not LIBRARY.is_file():
        pytest.skip("the audit library needs a C compiler")
    if page.name == "without-gpu.md" and not DRIVER.is_file():
        pytest.skip("the CPU driver needs a C compiler")
    place = tmp_path / "work"
    place.mkdir()
    assert run_page(page, place, env) > 0
