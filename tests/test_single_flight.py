"""Many processes, one compile: who compiles, who waits, and what happens when the one is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest

from preheat.store.lock import FileLock
from tests.processes import finish, start

# Waits until every process is there, then builds one program and says how often it compiled.
BUILD = """
import os, pathlib, sys, time
import preheat
from preheat.events import Events

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

# A program whose compile takes seconds: long enough to be killed in the middle.
SLOW = """
import os, sys
import preheat

if len(sys.argv) > 1:
    from preheat.toolchain import translate
    compile_cuda = translate.compile_cuda
    def slowly(*args):
        print("compiling", flush=True)
        import time; time.sleep(float(sys.argv[1]))
        return compile_cuda(*args)
    translate.compile_cuda = slowly
source = 'extern "C" __global__ void slow(float* x) { x[threadIdx.x] += 1; }'
artifact = preheat.compile(source, "sm_90", label="slow.cu")
print(int(preheat.default_builder().stats()["process"].get("compiles", 0)), flush=True)
"""


# A program the compiler chews on for minutes.
ENDLESS = """
import preheat

terms = "".join(f"a=={i}?{i}:" for i in range(30000))
print("compiling", flush=True)
preheat.compile("__global__ void k(int* x, int a) { x[0] = " + terms + "0; }", "sm_90")
"""


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return {
        "PREHEAT_CACHE_DIR": str(tmp_path / "cache"),
        "PREHEAT_LOCK_DIR": str(tmp_path / "locks"),
        "PREHEAT_LOCK_WAIT": "60",
    }


def crowd(tmp_path: Path, env: dict[str, str], labels: list[str]) -> list[tuple[int, int, str]]:
    """Run one process per label, all starting together; compiles, waits and digest of each."""
    gate = tmp_path / "gate"
    gate.mkdir()
    running = [start(BUILD, label, str(gate), str(len(labels)), env=env) for label in labels]
    rows = [finish(process).split() for process in running]
    return [(int(compiles), int(waits), digest) for compiles, waits, digest in rows]


@pytest.mark.parametrize("count", [8, 32])
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


def test_a_killed_compiling_process_is_replaced_within_seconds(env: dict[str, str]) -> None:
    first = start(SLOW, "60", env=env)
    assert first.stdout is not None
    assert first.stdout.readline() == "compiling\n"
    second = start(SLOW, env=env)
    with pytest.raises(subprocess.TimeoutExpired):  # it waits for the first
        second.wait(1.0)
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    killed = time.monotonic()
    assert finish(second) == "1\n"
    assert time.monotonic() - killed < 5.0


def test_a_waiter_takes_what_the_first_made(env: dict[str, str]) -> None:
    first = start(SLOW, "2", env=env)
    assert first.stdout is not None
    assert first.stdout.readline() == "compiling\n"
    second = start(SLOW, env=env)
    assert finish(second) == "0\n"
    assert finish(first) == "1\n"


def test_a_waiter_compiles_for_itself_after_its_bound(env: dict[str, str]) -> None:
    first = start(SLOW, "60", env=env)
    assert first.stdout is not None
    assert first.stdout.readline() == "compiling\n"
    started = time.monotonic()
    assert finish(start(SLOW, env={**env, "PREHEAT_LOCK_WAIT": "1"})) == "1\n"
    assert time.monotonic() - started < 10.0
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()


def test_a_lock_file_left_behind_by_a_dead_process_stops_nobody(
    tmp_path: Path, env: dict[str, str]
) -> None:
    (tmp_path / "locks").mkdir(mode=0o700)
    digest = crowd(tmp_path, env, ["one.cu"])[0][2]
    for file in (tmp_path / "cache").rglob(f"{digest}.heat"):
        file.unlink()
    (tmp_path / "locks" / digest).touch()
    assert finish(start(BUILD, "one.cu", str(tmp_path / "gate"), "1", env=env)).split()[0] == "1"


def test_a_fully_cached_process_loads_no_compiler_library(env: dict[str, str]) -> None:
    finish(start(SLOW, env=env))
    probe = SLOW + 'print("libnvrtc" in open("/proc/self/maps").read(), "cuda" in sys.modules)'
    assert finish(start(probe, env=env)).split() == ["0", "False", "False"]


def test_ctrl_c_during_a_compile_ends_the_process_and_its_worker(env: dict[str, str]) -> None:
    process = start(ENDLESS, env=env)
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(2.0)  # well inside the compile
    workers = children(process.pid)
    started = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=10)
    assert time.monotonic() - started < 3.0
    assert "KeyboardInterrupt" in err
    assert workers
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
