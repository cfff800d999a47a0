"""Bakes on Dask and Ray, with workers that are killed. `make test-fleet` installs both engines."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from preheat.ahead.bake import bake
from preheat.ahead.manifest import Manifest, ManifestProgram
from preheat.model.arch import Arch
from preheat.model.config import Config
from preheat.model.program import Program
from tests.processes import SOURCE, expect_success, start_python, wait_for_exit

KERNELS = 12
PACKAGES = {"dask": "distributed", "ray": "ray"}
# Nothing of a cluster listens on another address than loopback, and nothing is reported to its makers.
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "PYTHONPATH": os.pathsep.join([str(SOURCE), *filter(None, sys.path)]),  # The engines may be apart.
}

BAKE = """
import json, os, signal, sys
from preheat import bake

def kill_the_worker_of_the_first_job(job, row):
    if not killed:
        killed.append(row.worker)
        os.kill(int(row.worker.rpartition(":")[2]), signal.SIGKILL)

killed = []
manifest, output, address = sys.argv[1:]
baked = bake(manifest, executor=address, output=output, on_done=kill_the_worker_of_the_first_job)
print(json.dumps({
    "failures": [str(failed.error) for failed in baked.failures],
    "workers": [row.worker for row in baked.rows],
    "killed": killed,
}))
"""
POISON = """
import json, os, signal, sys
from preheat.ahead.run_on_executor import run_on_executor
from preheat.ahead.fleets import fleet

def work(job):
    if job == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return job

def submit(executor, job):
    slots.append(executor.slots())
    return executor.submit(work, job)

slots = []
ended = dict(run_on_executor(fleet(sys.argv[1]), range(8), submit))
ended["slots"] = max(slots)
print(json.dumps({job: got if type(got) is int else repr(got) for job, got in ended.items()}))
"""
SCHEDULER = """
import sys
from distributed import LocalCluster
from preheat import bake

loopback = {"host": "127.0.0.1", "dashboard_address": None}
with LocalCluster(n_workers=2, threads_per_worker=2, **loopback) as cluster:
    address = cluster.scheduler_address.replace("tcp://", "dask://")
    print(bake(sys.argv[1], executor=address, output=sys.argv[2]).ok)
"""


NO_WORKERS = """
import json
from distributed import LocalCluster
from preheat.ahead.fleets import fleet

with LocalCluster(n_workers=0, host="127.0.0.1", dashboard_address=None) as cluster:
    executor = fleet(cluster.scheduler_address.replace("tcp://", "dask://"))()
    print(json.dumps(executor.slots()))
    executor.shutdown()
"""


@pytest.fixture(params=PACKAGES)
def engine(request: pytest.FixtureRequest) -> str:
    """Return the name of an engine that is installed."""
    return require(request.param)


def require(engine: str) -> str:
    if find_spec(PACKAGES[engine]) is None:
        pytest.skip(f"{PACKAGES[engine]} is not installed: 'make test-fleet' installs it")
    return engine


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    programs = (
        Program.of(f'extern "C" __global__ void k{n}(int* x) {{ *x = {n}; }}\n', label=f"k{n}.cu")
        for n in range(KERNELS)
    )
    Manifest(tuple(ManifestProgram(each, (Arch(9, 0),)) for each in programs)).write(
        tmp_path / "k.toml"
    )
    return tmp_path / "k.toml"


def environment(tmp_path: Path) -> dict[str, str]:
    return {
        **QUIET,
        "PREHEAT_CACHE_DIR": str(tmp_path / "fleet"),
        "PREHEAT_LOCK_DIR": str(tmp_path / "locks"),
        "PREHEAT_EVENTS": str(tmp_path / "events"),
    }


def expect(code: str, *args: str, env: dict[str, str]) -> Any:
    """Return the JSON in the last line that a process prints. Engines may print more."""
    return json.loads(expect_success(start_python(code, *args, env=env)).splitlines()[-1])


def compiles(log: Path) -> Counter[str]:
    events = map(json.loads, log.read_text().splitlines())
    return Counter(event["program"] for event in events if event["event"] == "compile")


def test_a_worker_that_is_killed_loses_nothing(
    engine: str, manifest: Path, config: Config, tmp_path: Path
) -> None:
    env = environment(tmp_path)
    told = expect(BAKE, str(manifest), str(tmp_path / "there.heat"), f"{engine}://local", env=env)
    assert told["failures"] == []
    assert len(told["workers"]) == KERNELS
    assert {*told["workers"]} - {*told["killed"]}
    assert len(compiles(tmp_path / "events")) == KERNELS
    assert compiles(tmp_path / "events").total() <= KERNELS + 1  # the one that was lost
    assert bake(manifest, config=config, output=tmp_path / "here.heat").ok
    assert (tmp_path / "here.heat").read_bytes() == (tmp_path / "there.heat").read_bytes()


def test_a_cluster_without_workers_can_run_none() -> None:
    require("dask")
    assert expect(NO_WORKERS, env=QUIET) == 0


def test_a_job_that_ends_its_workers_fails_and_the_others_end(engine: str) -> None:
    told = expect(POISON, f"{engine}://local", env=QUIET)
    assert told.pop("slots") > 0
    error = told.pop("3")
    assert told == {str(job): job for job in range(8) if job != 3}
    assert error.startswith("LostJobError('3 was not baked: ")


def test_a_running_cluster_is_found_by_the_address_of_its_scheduler(
    manifest: Path, tmp_path: Path
) -> None:
    require("dask")
    env = environment(tmp_path)
    ran = start_python(SCHEDULER, str(manifest), str(tmp_path / "k.heat"), env=env)
    assert expect_success(ran).splitlines()[-1] == "True"
    assert compiles(tmp_path / "events").total() == KERNELS


def test_a_scheduler_that_does_not_answer_is_reported(manifest: Path, tmp_path: Path) -> None:
    require("dask")
    code = """
import sys
from preheat.ahead import fleets
from preheat.tools.cli import main
fleets._CONNECT = 1
main(["bake", sys.argv[1], "--on", "dask://127.0.0.1:1"])
"""
    process = start_python(code, str(manifest), env=environment(tmp_path))
    _, err = wait_for_exit(process)
    assert process.returncode == 1
    assert "error: cannot reach dask://127.0.0.1:1: " in err
    assert "Traceback" not in err
