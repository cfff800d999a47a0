"""Audits see every module that the CPU driver loads, without CUPTI."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from preheat.audit.events import read_events
from preheat.audit.library import LIBRARY as AUDIT
from preheat.driver.library import LIBRARY as DRIVER
from preheat.driver.library import driver_environment
from tests.processes import TIMEOUT_SECONDS, import_path

pytestmark = [
    pytest.mark.skipif(not DRIVER.is_file(), reason="the CPU driver was not built"),
    pytest.mark.skipif(not AUDIT.is_file(), reason="the audit library was not built"),
]

ROOT = Path(__file__).parents[2]
LOADS = """
from tests.driver.calls.cuda import Program, compiled, cu, ok
program = Program()
ok(cu.cuModuleUnload(ok(cu.cuModuleLoadData(compiled(kind="PTX")))))
"""


def test_an_audit_sees_the_modules_and_knows_that_these_are_all(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": import_path(), "LD_PRELOAD": str(AUDIT)}
    env |= {"PREHEAT_AUDIT": str(tmp_path), "PREHEAT_AUDIT_LIBRARY": str(AUDIT)}
    done = subprocess.run(
        [sys.executable, "-c", LOADS],
        env=driver_environment(env, beside_gpu=1),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    events = read_events(tmp_path)
    assert [event.fields["result"] for event in events.named("load")] == [0, 0]
    assert (
        list(events.named("driver")) == []
    )  # It would mean that modules of the CUDA runtime may be missing.
