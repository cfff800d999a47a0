"""The page for users of `torch.cuda._compile_kernel`: what it shows runs."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="a CPU build of torch is installed by `make test-torch`")

from tests.adapters.torch.applications import Application
from tests.shown_output import compare
from tests.test_docs import ALL, ROOT

pytestmark = pytest.mark.torch

PAGE = ROOT / "docs" / "guides" / "coming-from" / "torch-compile-kernel.md"
# The modules of the page need a GPU to load code. This one prints what they would load.
STANDIN = """\
import torch
from torch.cuda import _utils
from types import SimpleNamespace

torch.cuda.current_device = lambda: 0
torch.cuda.get_device_properties = lambda _: SimpleNamespace(major=9, minor=0)
_utils._cuda_load_module = lambda code, names: dict.fromkeys(names, code[:4])
import preheat.adapters
preheat.adapters.install("torch")
import before
print(before.swish)
"""


@pytest.fixture
def pages(tmp_path: Path) -> Application:
    """Return an application with the modules of the page."""
    made = Application(tmp_path / "app")
    for snippet in ALL:
        if snippet.page == PAGE and snippet.kind == "python":
            name = re.match(r"# (\w+\.py)\n", snippet.text)
            assert name is not None, snippet
            (made.root / name[1]).write_text(snippet.text)
    return made


def commands() -> list[tuple[str, str]]:
    """Return the commands of the page, each with its output."""
    blocks = [snippet.text for snippet in ALL if snippet.page == PAGE and snippet.kind == "console"]
    parts = [part for block in blocks for part in re.split(r"^\$ ", block, flags=re.M)[1:]]
    return [(command, shown) for command, _, shown in (part.partition("\n") for part in parts)]


def test_the_module_before_compiles(pages: Application) -> None:
    (pages.root / "standin.py").write_text(STANDIN)
    assert pages.python("standin.py").ok().out == repr(b"\x7fELF") + "\n"


def test_the_module_after_runs_on_the_emulator(pages: Application) -> None:
    ((_, shown),) = (row for row in commands() if row[0].startswith("PREHEAT_DEVICE=emulator"))
    ran = pages.python("after.py", PREHEAT_DEVICE="emulator").ok()
    compare(shown, ran.out)


@pytest.mark.gpu
def test_the_commands_do_what_the_page_shows(pages: Application) -> None:
    for command, shown in commands():
        _, tool, rest = command.rpartition("preheat ")
        words = rest.replace("-- python ", f"-- {sys.executable} ").split()
        # The last command runs the module alone, here on the GPU.
        words = ["-m", "preheat", *words] if tool else ["after.py"]
        ran = pages.python(*words, CUDA_VISIBLE_DEVICES="0").ok()
        compare(shown, ran.out)
