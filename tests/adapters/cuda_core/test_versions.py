"""Releases of cuda.core that the adapter does not know are left alone."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.processes import SOURCE, start_process, wait_for_exit

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs a program that imports a release of cuda.core which is its version alone."""

    def run(version: str, **env: str) -> tuple[int, str, str]:
        package = tmp_path / "other" / "cuda" / "core"
        package.mkdir(parents=True, exist_ok=True)
        (package / "__init__.py").write_text(f"__version__ = {version!r}\n")
        code = "import preheat, cuda.core, importlib; importlib.reload(cuda.core); print('runs')"
        base = {
            "PYTHONPATH": os.pathsep.join([str(package.parents[1]), str(SOURCE)]),
            "PREHEAT_CACHE_DIR": str(tmp_path / "cache"),
            "PREHEAT_ADAPTERS": "cuda_core",
        }
        process = start_process([sys.executable, "-c", code], env={**base, **env})
        out, err = wait_for_exit(process)
        return process.returncode, out.strip(), err

    return run


@pytest.mark.parametrize("version", ["0.7.0", "1.3.0", "2.0.0.dev1"])
def test_an_unknown_release_is_left_alone_with_one_warning(run: Run, version: str) -> None:
    assert run(version) == (
        0,
        "runs",
        f"the adapter for cuda_core is not installed: cuda.core {version} is not known: the adapter "
        "accepts 1.0 to 1.2\n",
    )


def test_an_unknown_release_is_an_error_of_a_sealed_process(run: Run) -> None:
    status, out, err = run("1.3.0", PREHEAT_SEALED="1")
    assert (status, out) == (1, "")
    assert "AdapterError: cuda.core 1.3.0 is not known: the adapter accepts 1.0 to 1.2" in err
