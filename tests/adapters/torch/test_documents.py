"""The pages for users of torch: what they show runs."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="a CPU build of torch is installed by `make test-torch`")

from tests.adapters.torch.applications import Application, import_path
from tests.adapters.torch.operators import EMULATOR
from tests.shown_output import compare
from tests.stories import blocks, run_page
from tests.test_docs import ROOT

pytestmark = pytest.mark.torch

PAGES = ROOT / "docs" / "guides" / "coming-from"
PAGE = PAGES / "torch-compile-kernel.md"
EXTENSIONS = PAGES / "cpp-extension.md"
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


def application(page: Path, root: Path) -> Application:
    """Return an application with the modules of a page."""
    made = Application(root)
    for block in blocks(page):
        if block.kind == "python":
            assert block.title, block
            (made.root / block.title).write_text(block.text)
    return made


@pytest.fixture
def pages(tmp_path: Path) -> Application:
    """Return an application with the modules of the page on `torch.cuda._compile_kernel`."""
    return application(PAGE, tmp_path / "app")


def commands() -> list[tuple[str, str]]:
    """Return the commands of the page, each with its output."""
    shown = [block.text for block in blocks(PAGE) if block.kind == "console"]
    parts = [part for text in shown for part in re.split(r"^\$ ", text, flags=re.M)[1:]]
    return [(command, out) for command, _, out in (part.partition("\n") for part in parts)]


def test_the_module_before_compiles(pages: Application) -> None:
    (pages.root / "standin.py").write_text(STANDIN)
    assert pages.python("standin.py").ok().out == repr(b"\x7fELF") + "\n"


def test_the_module_after_runs_on_the_emulator(pages: Application) -> None:
    ((_, shown),) = (row for row in commands() if row[0].startswith("PREHEAT_DEVICE="))
    ran = pages.python("after.py", PREHEAT_DEVICE=EMULATOR).ok()
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


def test_the_page_on_extensions_does_what_it_shows(tmp_path: Path) -> None:
    place, scripts = tmp_path / "app", tmp_path / "bin"
    place.mkdir()
    scripts.mkdir()
    for name, words in (("preheat", "-m preheat"), ("python", "")):
        (scripts / name).write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
        (scripts / name).chmod(0o755)
    env = {
        "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": import_path(),
        "PREHEAT_CACHE_DIR": str(tmp_path / "cache"),
        "PREHEAT_LOCK_DIR": str(tmp_path / "locks"),
        "CUDA_VISIBLE_DEVICES": "",
    }
    assert run_page(EXTENSIONS, place, env) > 5


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["before.py", "after.py"])
def test_an_extension_and_the_operator_compute_the_same_on_a_gpu(name: str, tmp_path: Path) -> None:
    if name == "before.py" and not (shutil.which("nvcc") and shutil.which("ninja")):
        pytest.skip("nvcc and ninja are not installed")
    made = application(EXTENSIONS, tmp_path / "app")
    env = {"CUDA_VISIBLE_DEVICES": "0", "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")}
    ran = made.python(name, **env).ok()
    assert ran.out.splitlines()[-2:] == ["[[0.0, 0.5, 0.0], [2.5, 0.0, 2.0]]", "torch.float64"]


@pytest.mark.parametrize("device", [EMULATOR, pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_example_of_an_operator_agrees_with_torch(device: str, tmp_path: Path) -> None:
    made = Application(tmp_path / "app")
    example = ROOT / "examples" / "torch_operator.py"
    hidden = {} if device == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}
    shown = made.python(str(example), PREHEAT_DEVICE=device, **hidden).ok().out
    assert [line.split()[-1] for line in shown.splitlines()] == ["True", "True", "True"]
