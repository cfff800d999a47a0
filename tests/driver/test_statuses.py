"""The statuses of driver calls are recorded by test, and compared."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from preheat.driver.library import LIBRARY, driver_environment
from tests.driver.statuses import differences
from tests.processes import TIMEOUT_SECONDS, import_path

ROOT = Path(__file__).parents[2]


def test_a_difference_names_test_function_and_both_statuses() -> None:
    gpu = {"a": {"cuInit": [0], "cuMemAlloc": [0, 2], "cuEventQuery": [0, 600]}, "only there": {}}
    cpu = {"a": {"cuInit": [0], "cuMemAlloc": [0], "cuEventQuery": [0]}, "only here": {}}
    assert differences(gpu, cpu) == ["a: cuMemAlloc: GPU [0, 2], CPU driver [0]"]
    assert differences(gpu, gpu) == []


@pytest.mark.skipif(not LIBRARY.is_file(), reason="the CPU driver was not built")
def test_a_run_of_tests_writes_the_statuses_of_its_calls(tmp_path: Path) -> None:
    test = "tests/driver/calls/test_modules.py::test_a_module_is_loaded_from_a_file"
    file = tmp_path / "statuses.json"
    options = ["-p", "tests.driver.statuses", "--statuses", str(file), "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, test],
        env=driver_environment({**os.environ, "PYTHONPATH": import_path()}, beside_gpu=1),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    assert done.returncode == 0, done.stdout
    assert json.loads(file.read_text())[test]["cuModuleLoad"] == [0, 301]
