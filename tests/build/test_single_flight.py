"""Concurrent processes compile a program once; a killed compiling process is replaced."""

from __future__ import annotations

import signal
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from preheat.store.lock import FileLock
from tests.processes import (
    REPORT_WAITS,
    TIMEOUT_SECONDS,
    expect_success,
    kill,
    read_line,
    start_python,
    wait_for_exit,
    write_line,
)
from tests.toolchain.support import compiling

# Waits until every process has started, builds one program, and prints how often it compiled.
BUILD = """
import os, pathlib, sys, time
import preheat
from preheat.model.events import Events

builder = preheat.Builder.open()
label, gate, count = sys.argv[1], pathlib.Path(sys.argv[2]), int(sys.argv[3])
(gate / str(os.getpid())).touch()
while len(list(gate.iterdir())) < count:
    time.sleep(0.005)
source = 'extern "C" __global__ void k(float* x) { x[threadIdx.x] *= 2; }'
artifact = builder.build(preheat.Program.of(source, label=label), "sm_90")
stats = builder.stats()["process"]
print(int(stats.get("compiles", 0)), int(stats.get("waits", 0)), artifact.digest)
"""

# Builds one program. It says when it waits for another process; the one that is to be `slow` says
# when it compiles and goes on when it is told. In the end it says how often it compiled and waited.
SLOW = f"""
import sys
import preheat
{REPORT_WAITS}
if "slow" in sys.argv:
    from preheat.toolchain import translate
    compile_cuda = translate.compile_cuda
    def slowly(*args):
        print("compiling", flush=True)
        sys.stdin.readline()
        return compile_cuda(*args)
    translate.compile_cuda = slowly
source = 'extern "C" __global__ void slow(float* x) {{ x[threadIdx.x] += 1; }}'
artifact = preheat.compile(source, "sm_90", label="slow.cu")
stats = preheat.default_builder().stats()["process"]
print(int(stats.get("compiles", 0)), int(stats.get("waits", 0)), flush=True)
"""


# A program the compiler chews on for hours.
ENDLESS = """
import preheat

terms = "".join(f"a=={i}?{i}:" for i in range(30000))
preheat.compile("__global__ void k(int* x, int a) { x[0] = " + terms + "0; }", "sm_90")
"""


Process = subprocess.Popen[str]


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return {
        "PREHEAT_CACHE_DIR": str(tmp_path / "cache"),
        "PREHEAT_LOCK_DIR": str(tmp_path / "locks"),
        "PREHEAT_LOCK_WAIT": str(10 * TIMEOUT_SECONDS),  # so that no wait ends by its limit
    }


def crowd(tmp_path: Path, env: dict[str, str], labels: list[str]) -> list[tuple[int, int, str]]:
    """Run one process per label, all starting together; compiles, waits and digest of each."""
    gate = tmp_path / "gate"
    gate.mkdir()
    running = [start_python(BUILD, label, str(gate), str(len(labels)), env=env) for label in labels]
    rows = [expect_success(process).split() for process in running]
    return [(int(compiles), int(waits), digest) for compiles, waits, digest in rows]


@pytest.mark.parametrize("count", [8, pytest.param(32, marks=pytest.mark.long)])
def test_processes_missing_one_key_compile_exactly_once(
    count: int, tmp_path: Path, env: dict[str, str]
) -> None:
    rows = crowd(tmp_path, env, ["one.cu"] * count)
    assert sum(compiles for compiles, _, _ in rows) == 1
    assert len({digest for _, _, digest in rows}) == 1
    assert not any(file.name == rows[0][2] for file in (tmp_path / "locks").iterdir())


def test_processes_with_different_keys_compile_each_their_own_and_never_wait(
    tmp_path: Path, env: dict[str, str]
) -> None:
    rows = crowd(tmp_path, env, ["a.cu", "b.cu", "c.cu", "d.cu"])
    assert [compiles for compiles, _, _ in rows] == [1, 1, 1, 1]
    assert [waits for _, waits, _ in rows] == [0, 0, 0, 0]


def compiling_and_waiting(env: dict[str, str], wait: float) -> tuple[Process, Process]:
    """Return a process that compiles and one that waits for it, for at most `wait` seconds."""
    first = start_python(SLOW, "slow", env=env)
    assert read_line(first) == "compiling"
    second = start_python(SLOW, env={**env, "PREHEAT_LOCK_WAIT": str(wait)})
    said = read_line(second).split()
    assert (said[:2], float(said[-1])) == (["waits", "for"], wait)
    return first, second


def test_a_killed_compiling_process_is_replaced_long_before_the_wait_is_over(
    env: dict[str, str],
) -> None:
    first, second = compiling_and_waiting(env, wait=10 * TIMEOUT_SECONDS)
    kill(first)
    assert expect_success(second) == "1 1\n"


def test_a_waiter_takes_what_the_first_made(env: dict[str, str]) -> None:
    first, second = compiling_and_waiting(env, wait=10 * TIMEOUT_SECONDS)
    write_line(first)
    assert expect_success(second) == "0 1\n"
    assert expect_success(first) == "1 0\n"


def test_a_waiter_compiles_for_itself_after_its_bound(env: dict[str, str]) -> None:
    first, second = compiling_and_waiting(env, wait=1)
    assert expect_success(second) == "1 1\n"
    assert first.poll() is None


def test_a_lock_file_left_behind_by_a_dead_process_stops_nobody(
    tmp_path: Path, env: dict[str, str]
) -> None:
    (tmp_path / "locks").mkdir(mode=0o700)
    digest = crowd(tmp_path, env, ["one.cu"])[0][2]
    for file in (tmp_path / "cache").rglob(f"{digest}.heat"):
        file.unlink()
    (tmp_path / "locks" / digest).touch()
    assert (
        expect_success(start_python(BUILD, "one.cu", str(tmp_path / "gate"), "1", env=env)).split()[0]
        == "1"
    )


def test_a_fully_cached_process_loads_no_compiler_library(env: dict[str, str]) -> None:
    expect_success(start_python(SLOW, env=env))
    probe = SLOW + 'print("libnvrtc" in open("/proc/self/maps").read(), "cuda" in sys.modules)'
    assert expect_success(start_python(probe, env=env)).split() == ["0", "0", "False", "False"]


def test_ctrl_c_during_a_compile_ends_the_process_and_its_worker(env: dict[str, str]) -> None:
    process = start_python(ENDLESS, env=env)
    worker, _ = compiling(process.pid)
    workers = children(process.pid)
    process.send_signal(signal.SIGINT)
    _, err = wait_for_exit(process)  # which the compile would not do for a long time
    assert "KeyboardInterrupt" in err
    assert worker in workers
    assert Counter(alive(pid) for pid in workers) == Counter({False: len(workers)})


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in found]


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_two_locks_in_one_process_exclude_each_other(tmp_path: Path) -> None:
    one, other = FileLock(tmp_path / "lock"), FileLock(tmp_path / "lock")
    assert one.acquire(0)
    assert not other.acquire(0.05)
    one.release()
    assert other.acquire(0)
    other.release()
