"""Many compiles at once: outcomes, cancelling, and processes that share the work on equal requests."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from preheat.build.builder import Builder
from preheat.build.compile_lock import Attempt, WouldWait, parallel_compiles
from preheat.build.parallel import Runner, Task, run_all
from preheat.model.config import Config
from preheat.model.program import Program
from preheat.process import callsite
from preheat.process.callsite import call_site, file_and_line
from preheat.store.lock import FileLock
from tests.conftest import Recorder
from tests.processes import (
    TIMEOUT_SECONDS,
    expect_success,
    kill,
    read_line,
    run_in_fork,
    start_python,
    wait_for,
    wait_for_exit,
)
from tests.toolchain.support import compiling

ENDLESS = "__global__ void k(int* x, int a) { x[0] = " + "".join(f"a=={i}?{i}:" for i in range(30000))
ENDLESS += "0; }"


def text(number: int) -> str:
    return f'extern "C" __global__ void k(float* x) {{ x[threadIdx.x] += {number}; }}'


def program(number: int) -> Program:
    return Program.of(text(number), label=f"k{number}.cu")


# Threads


def test_outcomes_come_in_order_and_reports_in_this_thread() -> None:
    seen: list[tuple[str, int]] = []
    here = threading.get_ident()

    def run(job: int, _: Attempt) -> int:
        assert threading.get_ident() != here
        if job == 2:
            raise ValueError("two")
        return job * 10

    def ended(index: int, task: Task[int]) -> None:
        assert threading.get_ident() == here
        assert task.done
        seen.append(("end", index))

    tasks = run_all(
        [0, 1, 2, 3],
        run,
        threads=2,
        on_start=lambda index: seen.append(("start", index)),
        on_done=ended,
    )
    assert [task.outcome() for task in tasks if task.error is None] == [0, 10, 30]
    with pytest.raises(ValueError, match="two"):
        tasks[2].outcome()
    assert Counter(seen) == Counter((what, index) for what in ("start", "end") for index in range(4))
    assert all(seen.index(("start", index)) < seen.index(("end", index)) for index in range(4))


def test_no_more_threads_run_than_were_asked_for() -> None:
    running, most = 0, 0
    lock = threading.Lock()

    def run(_: int, __: Attempt) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.01)
        with lock:
            running -= 1

    run_all(range(12), run, threads=3)
    assert most == 3


def test_a_task_that_has_to_wait_comes_after_all_others() -> None:
    free = threading.Event()
    order: list[int] = []
    attempts: Counter[int] = Counter()

    def run(job: int, _: Attempt) -> None:
        attempts[job] += 1
        if job < 2 and not free.is_set():
            raise WouldWait
        order.append(job)
        if job == 5:
            free.set()

    run_all(range(6), run, threads=1)
    assert order[:4] == [2, 3, 4, 5]
    assert sorted(order[4:]) == [0, 1]
    assert attempts[5] == 1


def test_a_thread_acts_for_the_line_that_asked() -> None:
    names: dict[str, Any] = {"call_site": call_site}
    exec(compile("def inside(*_): return call_site()", callsite.__file__, "exec"), names)
    line = file_and_line(call_site())[1] + 1
    (task,) = run_all([0], names["inside"])
    assert file_and_line(task.outcome()) == (__file__, line)


def test_an_error_of_a_callback_cancels_the_rest() -> None:
    begun: list[int] = []

    def run(job: int, _: Attempt) -> None:
        begun.append(job)
        time.sleep(0.01)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_all(range(1000), run, threads=1, on_done=stop)
    assert len(begun) < 1000


def test_a_cancelled_runner_ends_its_compilers_and_leaves_no_lock(
    builder: Builder, config: Config, recorder: Recorder
) -> None:
    endless = Program.of(ENDLESS, label="endless.cu")
    runner = Runner(1)
    running = runner.submit(lambda attempt: builder.obtain(endless, "sm_90", attempt=attempt))
    queued = runner.submit(lambda attempt: builder.obtain(program(1), "sm_90", attempt=attempt))
    lock = config.lock_dir / builder.key(endless, "sm_90").digest
    compiling(os.getpid())
    assert lock.exists()
    runner.cancel()
    assert (running.cancelled, queued.cancelled) == (True, True)
    assert not lock.exists()
    assert recorder.named("worker")[-1]["what"] == "ended"
    assert recorder.named("compile") == recorder.named("reject") == []


def test_a_thread_that_waits_goes_on_when_the_first_is_cancelled(builder: Builder) -> None:
    wanted = program(1)
    compile_program = builder.toolchain.compile
    inside, go_on = threading.Event(), threading.Event()

    def slowly(*args: object) -> object:
        if not inside.is_set():
            inside.set()
            assert go_on.wait(TIMEOUT_SECONDS)
        return compile_program(*args)  # type: ignore[arg-type]

    builder.toolchain.compile = slowly  # type: ignore[method-assign, assignment]
    runner = Runner(1)
    first = runner.submit(lambda attempt: builder.obtain(wanted, "sm_90", attempt=attempt))
    assert inside.wait(TIMEOUT_SECONDS)
    results: list[object] = []
    second = threading.Thread(target=lambda: results.append(builder.build(wanted, "sm_90")))
    second.start()
    runner._cancellation.cancel()
    go_on.set()
    second.join(TIMEOUT_SECONDS)
    first.wait()
    assert first.cancelled
    assert len(results) == 1


def test_the_threads_end_with_the_work() -> None:
    before = threading.active_count()
    runner = Runner(4)
    tasks = [runner.submit(lambda _: None) for _ in range(20)]
    for task in tasks:
        task.wait()
    wait_for(lambda: runner._threads == 0)
    assert threading.active_count() == before


def test_a_task_of_the_parent_is_cancelled_in_a_forked_child(builder: Builder) -> None:
    go_on = threading.Event()
    task = builder.background.submit(lambda _: go_on.wait(TIMEOUT_SECONDS))

    def child() -> None:
        task.wait()
        assert task.cancelled
        mine = builder.background.submit(lambda _: 5)
        mine.wait()
        assert mine.outcome() == 5

    run_in_fork(child)
    go_on.set()
    task.wait()
    assert not task.cancelled


# Processes

#: Waits until all processes have started, compiles the same programs, and prints how many it compiled
#: itself. With a delay, each compile takes that long.
TOGETHER = """
import os, pathlib, sys, time
import preheat
from preheat.toolchain import translate

gate, processes, kernels, delay = pathlib.Path(sys.argv[1]), *map(float, sys.argv[2:5])
compile_cuda = translate.compile_cuda
def slowly(*args):
    time.sleep(delay)
    return compile_cuda(*args)
translate.compile_cuda = slowly
texts = [
    'extern "C" __global__ void k(float* x) { x[threadIdx.x] += %d; }' % number
    for number in range(int(kernels))
]
(gate / str(os.getpid())).touch()
print("ready", flush=True)
while len(list(gate.iterdir())) < processes:
    time.sleep(0.005)
GET
stats = preheat.default_builder().stats()["process"]
print(int(stats.get("compiles", 0)), int(stats.get("waits", 0)), len(made), flush=True)
"""
COMPILE = TOGETHER.replace("GET", 'made = preheat.compile_all([(text, "sm_90") for text in texts])')
KERNELS = TOGETHER.replace(
    "GET", 'made = preheat.device("emulator").kernels([(text, "k") for text in texts])'
)


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "gate").mkdir()
    return {
        "PREHEAT_CACHE_DIR": str(tmp_path / "cache"),
        "PREHEAT_LOCK_DIR": str(tmp_path / "locks"),
        "PREHEAT_LOCK_WAIT": str(10 * TIMEOUT_SECONDS),  # so that no wait ends by its limit
    }


def locks(tmp_path: Path) -> list[str]:
    return [file.name for file in (tmp_path / "locks").iterdir() if len(file.name) == 64]


@pytest.mark.parametrize("code", [COMPILE, KERNELS], ids=["compile_all", "kernels"])
def test_processes_that_need_the_same_programs_share_the_compiles(
    code: str, tmp_path: Path, env: dict[str, str]
) -> None:
    count, kernels = 4, 20
    arguments = (str(tmp_path / "gate"), str(count), str(kernels), "0.05")
    running = [start_python(code, *arguments, env=env) for _ in range(count)]
    rows = [expect_success(process).split()[1:] for process in running]
    compiles = [int(row[0]) for row in rows]
    assert sum(compiles) == kernels
    assert [int(row[2]) for row in rows] == [kernels] * count
    assert sum(each > 0 for each in compiles) >= 2  # None waits for another while work is open.
    assert locks(tmp_path) == []


def test_the_work_of_a_killed_process_is_done_by_the_others(
    tmp_path: Path, env: dict[str, str]
) -> None:
    kernels = 12
    arguments = (str(tmp_path / "gate"), "3", str(kernels), "0.3")
    running = [start_python(COMPILE, *arguments, env=env) for _ in range(3)]
    for process in running:
        assert read_line(process) == "ready"
    wait_for(lambda: (tmp_path / "locks").exists() and len(locks(tmp_path)) >= 3)
    kill(running[0])
    rows = [expect_success(process).split() for process in running[1:]]
    assert [int(row[2]) for row in rows] == [kernels] * 2
    assert kernels - 8 <= sum(int(row[0]) for row in rows) <= kernels


def test_a_request_that_another_process_holds_is_compiled_after_the_limit_of_the_wait(
    open_builder: Callable[..., Builder], config: Config, recorder: Recorder
) -> None:
    builder = open_builder(replace(config, lock_wait=0.2))
    wanted = program(1)
    config.lock_dir.mkdir(mode=0o700, exist_ok=True)
    other = FileLock(config.lock_dir / builder.key(wanted, "sm_90").digest)
    assert other.acquire(0)
    (task,) = run_all([wanted], lambda job, d: builder.obtain(job, "sm_90", attempt=d))
    other.release()
    assert task.outcome().tier == "compiler"
    assert [row["outcome"] for row in recorder.named("wait")] == ["gave up"]


def test_requests_without_a_slot_are_put_back_and_compiled_without_one_after_a_while(
    builder: Builder, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("preheat.build.compile_lock._SLOT_WAIT", 0.2)
    config.lock_dir.mkdir(mode=0o700, exist_ok=True)
    slots = [FileLock(config.lock_dir / f"slot-{n}", keep=True) for n in range(parallel_compiles())]
    assert all(slot.acquire(0) for slot in slots)
    lock = config.lock_dir / builder.key(program(1), "sm_90").digest
    attempt = Attempt()
    with pytest.raises(WouldWait):
        builder.obtain(program(1), "sm_90", attempt=attempt)
    assert not lock.exists()  # Another process can compile it.
    (task,) = run_all([program(1)], lambda job, d: builder.obtain(job, "sm_90", attempt=d))
    assert task.outcome().tier == "compiler"
    slots[0].release()
    monkeypatch.setattr("preheat.build.compile_lock._SLOT_WAIT", TIMEOUT_SECONDS)
    (task,) = run_all([program(2)], lambda job, d: builder.obtain(job, "sm_90", attempt=d))
    assert task.outcome().tier == "compiler"
    assert slots[0].acquire(0)  # It was given back.
    for slot in slots:
        slot.release()


def test_an_interrupt_ends_the_process_its_compilers_and_its_locks(
    tmp_path: Path, env: dict[str, str]
) -> None:
    code = """
import preheat
terms = "".join(f"a=={i}?{i}:" for i in range(30000))
source = "__global__ void k(int* x, int a) { x[NUMBER] = " + terms + "0; }"
preheat.compile_all([(source.replace("NUMBER", str(number)), "sm_90") for number in range(8)])
"""
    process = start_python(code, env=env)
    compiling(process.pid)
    process.send_signal(signal.SIGINT)
    _, err = wait_for_exit(process)  # which the compiles would not do for a long time
    assert "KeyboardInterrupt" in err
    assert locks(tmp_path) == []


def test_wrong_programs_of_other_processes_are_not_waited_for_in_vain(
    tmp_path: Path, env: dict[str, str]
) -> None:
    code = COMPILE.replace("+= %d; }'", "+= nope%d; }'")
    arguments = (str(tmp_path / "gate"), "2", "4", "0.05")
    running = [start_python(code, *arguments, env=env) for _ in range(2)]
    for process in running:
        _, err = wait_for_exit(process)
        assert "3 other failures" in err
        assert '"nope3" is undefined' in err
