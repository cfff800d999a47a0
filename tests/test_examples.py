"""The examples: each one runs, is short, and is listed."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.emulated import emulated, needs_driver
from tests.test_guides import Image, Stage, clean
from tests.tools.plugin import run_pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
TESTS = Path(__file__).parent
#: The files whose tests run an example, for those that need a library which may not be installed.
ELSEWHERE = {
    "torch_operator.py": "adapters/torch/test_documents.py",
    "triton_server": "adapters/triton/test_documents.py",
    "kubernetes": "kubernetes/test_example.py",
}


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., str]:
    """Return a function that runs a script with an empty cache, and returns what it prints."""

    def run(example: str, **more: str) -> str:
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(os.path.abspath(place) for place in sys.path if place),
            "PREHEAT_CACHE_DIR": str(tmp_path / "cache"),
            "PREHEAT_LOCK_DIR": str(tmp_path / "locks"),
            **more,
        }
        command = [sys.executable, "-W", "error", str(EXAMPLES / example)]
        ran = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    return run


def test_compile_and_launch_compiles_nothing_the_second_time(run: Callable[..., str]) -> None:
    for closing in ("1 compiled, 0 found on disk", "0 compiled, 1 found on disk"):
        *_, result, mistake, counts = run("compile_and_launch.py").splitlines()
        assert result == "[0. 2. 4. 6. 8.]"
        assert mistake == "saxpy, argument 3: int cannot take 1000.5, a float"
        assert counts == closing


def test_header_and_template(run: Callable[..., str]) -> None:
    assert run("header_and_template/main.py").splitlines() == [
        "rms_norm<float, 64>: right to 1e-5",
        "rms_norm<float, 256>: right to 1e-5",
        "rms_norm<__half, 64>: right to 2e-3",
    ]


def test_capture_and_replay(run: Callable[..., str]) -> None:
    first, last = run("capture_and_replay.py").splitlines()
    assert first == "20 launches in one graph"
    assert last == "after 120 steps: middle 0.0755, sum 1.0000"


def test_shared_store(run: Callable[..., str]) -> None:
    shown = re.findall(r"(\d) compiled, (\d) from the store", run("shared_store.py"))
    assert shown == [("1", "0"), ("0", "1"), ("0", "0")]


def test_pytest_suite(tmp_path: Path) -> None:
    suite = tmp_path / "suite"
    shutil.copytree(EXAMPLES / "pytest_suite", suite, ignore=shutil.ignore_patterns("__pycache__"))
    ran = run_pytest(suite, "-q", "-W", "error", "--preheat-device=emulator")
    assert ran.returncode == 0, ran.stdout
    assert re.search(r"^7 passed, 1 skipped in", ran.stdout, re.M), ran.stdout


# The CPU driver, for programs of other libraries; those of Numba and Triton: `tests/adapters`


@needs_driver
def test_cpu_driver_with_cuda_bindings(tmp_path: Path) -> None:
    assert emulated(tmp_path, EXAMPLES / "cpu_driver" / "add_bindings.py") == (
        "right",
        "1 launch, 0 faults",
    )


@needs_driver
def test_cpu_driver_with_cuda_core(tmp_path: Path) -> None:
    pytest.importorskip("cuda.core")
    assert emulated(tmp_path, EXAMPLES / "cpu_driver" / "add_core.py") == (
        "right",
        "1 launch, 0 faults",
    )


# Containers, without an engine


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    """Return the image of the example, recorded by its script."""
    root = tmp_path_factory.mktemp("container")
    context = root / "context"
    shutil.copytree(EXAMPLES / "container", context, ignore=shutil.ignore_patterns("__pycache__"))
    home = Stage(root, clean(root / "another"), context)
    assert home.run(["sh", "record.sh"]) == "width 64: right, 1 compiled\n"
    return Image((context / "Dockerfile").read_text(), context, root / "stages")


def test_the_container_starts_sealed_and_compiles_nothing(image: Image) -> None:
    stage = image.stage
    assert stage.run(stage.command, PREHEAT_DEVICE="emulator") == "width 64: right, 0 compiled\n"
    assert image.installed == {"bake": "preheat[cu13]", "last": "preheat"}
    assert {path.name for path in stage.files()} == {"app", "server.py", "norm.cu", "kernels.heat"}


def test_the_container_refuses_a_width_that_was_not_recorded(image: Image) -> None:
    reported = image.stage.run([*image.stage.command, "96"], status=1, PREHEAT_DEVICE="emulator")
    assert "SealedError: server.py:" in reported
    assert "normalize<96> (norm.cu, sm_90) cannot be compiled in this sealed process" in reported


# All of them


def test_every_example_is_listed_and_has_a_test() -> None:
    listed = re.findall(r"^\| \[(\w+(?:\.py)?)\]\(", (EXAMPLES / "README.md").read_text(), re.M)
    found = {path.name for path in EXAMPLES.glob("*.py")} | {
        path.name for path in EXAMPLES.iterdir() if path.is_dir() and path.name != "__pycache__"
    }
    assert sorted(listed) == sorted(found)
    for name in found:
        assert name in (TESTS / ELSEWHERE.get(name, "test_examples.py")).read_text(), name


def test_every_file_is_short_and_has_comments_that_teach() -> None:
    for path in EXAMPLES.rglob("*"):
        if not path.is_file() or path.suffix in (".pyc", ".md") or "kubernetes" in path.parts:
            continue
        text = path.read_text()
        assert text.count("\n") < 100, path
        assert re.search(r'^("""|#|//)', text, re.M), path


def test_the_links_of_the_list_lead_somewhere() -> None:
    text = (EXAMPLES / "README.md").read_text()
    assert all((EXAMPLES / target).exists() for target in re.findall(r"\]\(([^)]+)\)", text))


def test_the_commands_of_the_list_exist() -> None:
    text = (EXAMPLES / "README.md").read_text()
    for command in re.findall(r"\| `([^`]+)` \|$", text, re.M):
        place = EXAMPLES
        for part in command.split(" && "):
            words = [word for word in shlex.split(part) if "=" not in word]
            if words[0] == "cd":
                place /= words[1]
            elif words[0] in ("python", "sh", "pytest"):
                assert (place / words[-1]).exists(), command
