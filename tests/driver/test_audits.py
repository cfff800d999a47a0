"""Audits see every module that the CPU driver loads, without CUPTI."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from preheat.audit.events import EventLog, read_events
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
#: Every function that loads, each once, and a load before `cuInit`, which starts the driver.
ALL_LOADS = """
import pathlib, sys
from tests.driver.calls.cuda import compiled, cu, ok
assert int(cu.cuModuleLoadData(b".version 8.0")[0]) == 3
text, cubin = compiled(kind="PTX"), compiled()
ok(cu.cuInit(0))
ok(cu.cuCtxSetCurrent(ok(cu.cuDevicePrimaryCtxRetain(0))))
file = pathlib.Path(sys.argv[1], "k.cubin")
file.write_bytes(cubin)
path = str(file).encode()
ok(cu.cuModuleLoad(path))
ok(cu.cuModuleLoadDataEx(cubin, 0, [], []))
ok(cu.cuModuleLoadFatBinary(cubin))
ok(cu.cuLibraryLoadData(cubin, [], [], 0, [], [], 0))
ok(cu.cuLibraryLoadFromFile(path, [], [], 0, [], [], 0))
link = ok(cu.cuLinkCreate(0, [], []))
ptx = cu.CUjitInputType.CU_JIT_INPUT_PTX
ok(cu.cuLinkAddData(link, ptx, text, len(text), b"k", 0, [], []))
ok(cu.cuLinkComplete(link))
ok(cu.cuLinkDestroy(link))
link = ok(cu.cuLinkCreate(0, [], []))
file = pathlib.Path(sys.argv[1], "k.ptx")
file.write_bytes(text)
ok(cu.cuLinkAddFile(link, ptx, str(file).encode(), 0, [], []))
"""
EXPECTED = [
    ("cuModuleLoadData", "ptx", 3),
    ("cuModuleLoad", "file", 0),
    ("cuModuleLoadDataEx", "cubin", 0),
    ("cuModuleLoadFatBinary", "cubin", 0),
    ("cuLibraryLoadData", "cubin", 0),
    ("cuLibraryLoadFromFile", "file", 0),
    ("cuLinkAddData_v2", "ptx", 0),
    ("cuLinkComplete", "linked", 0),
    ("cuLinkAddFile_v2", "ptx", 0),
]
#: The audit library is there, although the program has replaced LD_PRELOAD.
LOADED_LATER = "import ctypes, os; ctypes.CDLL(os.environ['PREHEAT_AUDIT_LIBRARY'])"
PRELOADS = {
    "audit first": ([AUDIT, DRIVER], ""),
    "driver first": ([DRIVER, AUDIT], ""),
    "driver alone": ([DRIVER], LOADED_LATER),
}


def run_audited(code: str, place: Path, preload: list[Path], *words: str) -> EventLog:
    """Run code on the CPU driver in an audit, and return the events."""
    env = driver_environment({**os.environ, "PYTHONPATH": import_path()}, beside_gpu=1)
    env |= {"PREHEAT_AUDIT": str(place), "PREHEAT_AUDIT_LIBRARY": str(AUDIT)}
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        env={**env, "LD_PRELOAD": ":".join(map(str, preload))},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    return read_events(place)


def test_an_audit_sees_the_modules_and_knows_that_these_are_all(tmp_path: Path) -> None:
    events = run_audited(LOADS, tmp_path, [AUDIT, DRIVER])
    assert [event.fields["result"] for event in events.named("load")] == [0, 0]
    assert len(list(events.named("cpu_driver"))) == 1
    # It would mean that modules of the CUDA runtime may be missing.
    assert list(events.named("driver")) == []


@pytest.mark.parametrize("order", PRELOADS)
def test_the_driver_reports_each_load_once(order: str, tmp_path: Path) -> None:
    libraries, before = PRELOADS[order]
    place, files = tmp_path / "audit", tmp_path / "files"
    place.mkdir()
    files.mkdir()
    events = run_audited(before + ALL_LOADS, place, libraries, str(files))
    loads = list(events.named("load"))
    assert [(e.text("call"), e.text("kind"), e.fields["result"]) for e in loads] == EXPECTED
    assert {event.text("by") for event in loads} == {"cpu driver"}
    assert all("cuda/bindings" in event.text("caller") for event in loads)
    assert list(events.named("driver")) == []
