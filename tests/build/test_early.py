"""Compiles that begin before the compilers are located: what is sent early, and what becomes of it."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from preheat.arch import Arch
from preheat.build.builder import Builder
from preheat.build.key_locks import Deferral
from preheat.build.together import build_all
from preheat.config import Config, SealMode
from preheat.errors import CompileError, SealedError
from preheat.program import Program
from preheat.store.lock import FileLock
from preheat.store.usage import Additions, Usage
from preheat.toolchain import packages
from preheat.toolchain.early import EarlyRequests
from preheat.toolchain.frames import Frame
from preheat.toolchain.locate import _Memo
from preheat.toolchain.pool import WorkerPool
from preheat.toolchain.process import WorkerProcess
from tests.conftest import Recorder
from tests.processes import TIMEOUT_SECONDS, run_in_fork, wait_for
from tests.toolchain.support import gone, slow

SM_90 = Arch.parse("sm_90")


@pytest.fixture(autouse=True)
def compilers_located_once() -> None:
    """Each test searches for the compilers."""


def program(number: int, **more: Any) -> Program:
    text = f'extern "C" __global__ void k(float* x) {{ x[threadIdx.x] += {number}; }}'
    return Program.of(text, label=f"k{number}.cu", **more)


PROGRAMS = [program(number) for number in range(4)]


def pairs(programs: Sequence[Program]) -> list[tuple[Program, Arch]]:
    return [(each, SM_90) for each in programs]


class Watch:
    """What is sent to workers, and a search that ends when the test allows it."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.early: list[dict[str, Any]] | None = None  # What had been sent when the search ended.
        self.search_ends: Callable[[WorkerPool], object] = lambda _: True
        #: Called with each worker that got a program, right after it was sent.
        self.after_send: Callable[[WorkerProcess], object] = lambda _: None

    def start(self, search_ends: Callable[[WorkerPool], object] = lambda _: True) -> None:
        """Forget what was sent, and let the next search end at this condition."""
        self.sent.clear()
        self.early = None
        self.search_ends = search_ends

    def compiled(self) -> Counter[str]:
        """Return how often each program was sent to a compiler."""
        return Counter(each["label"] for each in self.sent if each["do"] == "cuda")

    def compiled_early(self) -> set[str]:
        assert self.early is not None
        return {each["label"] for each in self.early if each["do"] == "cuda"}


def replies(count: int) -> Callable[[WorkerPool], object]:
    """Let a search end when this number of programs has been compiled."""

    def enough(pool: WorkerPool) -> bool:
        assert pool._early is not None
        return len([reply for reply in pool._early._replies.values() if reply.blocks]) >= count

    return enough


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    made = Watch()
    call = WorkerPool.call
    send = WorkerProcess.send

    def watched_call(self: WorkerPool, message: Any, blocks: Any = None) -> Frame:
        reply = call(self, message, blocks)
        if message["do"] == "locate":
            wait_for(lambda: made.search_ends(self))
            made.search_ends = lambda _: True  # A second search does not wait.
            if made.early is None:
                made.early = list(made.sent)
        return reply

    def watched_send(self: WorkerProcess, request: bytes) -> bool:
        length = int.from_bytes(request[:4], "little")
        message = json.loads(request[12 : 12 + length])["message"]
        made.sent.append(message)
        complete = send(self, request)
        if message["do"] == "cuda":
            made.after_send(self)
        return complete

    monkeypatch.setattr(WorkerPool, "call", watched_call)
    monkeypatch.setattr(WorkerProcess, "send", watched_send)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    return made


def locks(config: Config) -> set[str]:
    return {file.name for file in config.lock_dir.iterdir() if len(file.name) == 64}


# What is compiled early


def test_programs_are_compiled_once_while_the_compilers_are_located(
    open_builder: Callable[..., Builder], shared_builder: Builder, watch: Watch, recorder: Recorder
) -> None:
    watch.start(replies(4))
    builder = open_builder()
    artifacts = build_all(builder, pairs(PROGRAMS))
    assert watch.compiled_early() == {each.label for each in PROGRAMS}
    assert watch.compiled() == {each.label: 1 for each in PROGRAMS}
    for each, artifact in zip(PROGRAMS, artifacts, strict=True):
        assert artifact.digest == builder.key(each, SM_90).digest
        usual = shared_builder.build(each, SM_90)
        assert (artifact.digest, artifact.cubin, artifact.ptx) == (
            usual.digest,
            usual.cubin,
            usual.ptx,
        )
        assert (artifact.entries, artifact.log) == (usual.entries, usual.log)
    assert len(recorder.named("compile")) == 4
    later = open_builder()
    assert [later.lookup(each, SM_90).artifact for each in PROGRAMS] == artifacts
    assert builder.toolchain.pool._early is None


def test_events_of_a_request_keep_their_order(
    open_builder: Callable[..., Builder], watch: Watch, recorder: Recorder
) -> None:
    watch.start(replies(4))
    builder = open_builder()
    build_all(builder, pairs(PROGRAMS))
    for each in PROGRAMS:
        digest = builder.key(each, SM_90).digest
        names = [name for name, fields in recorder.seen if fields.get("key") == digest]
        assert names == ["miss", "put", "put", "compile"]


def test_a_compile_that_runs_when_the_search_ends_is_taken_over(
    open_builder: Callable[..., Builder], watch: Watch
) -> None:
    stopped: list[int] = []

    def stop_first(worker: WorkerProcess) -> None:
        if not stopped:
            os.kill(worker._process.pid, signal.SIGSTOP)
            stopped.append(worker._process.pid)

    def still_runs(_: WorkerPool) -> bool:
        if stopped:  # It continues after the search has ended.
            threading.Timer(0.2, os.kill, (stopped[0], signal.SIGCONT)).start()
        return bool(stopped)

    watch.after_send = stop_first
    watch.start(still_runs)
    build_all(open_builder(), pairs(PROGRAMS))
    assert watch.compiled_early()
    assert watch.compiled() == {each.label: 1 for each in PROGRAMS}


@pytest.mark.parametrize(
    "including",
    [
        program(1, include=["INCLUDE"], options=["--pre-include=v.h"]),
        program(1, include=["INCLUDE"], options=["-include", "v.h"]),
        replace(
            program(1, include=["INCLUDE"]),
            source='#define NAME "v.h"\n#include NAME\n' + program(1).source,
        ),
        replace(program(1, include=["INCLUDE"]), source='#inc\\\nlude "v.h"\n' + program(1).source),
        replace(program(1, include=["INCLUDE"]), source='%:include "v.h"\n' + program(1).source),
    ],
    ids=["pre-include", "include option", "macro", "two lines", "digraph"],
)
def test_a_program_that_may_include_a_file_is_not_compiled_early(
    including: Program, open_builder: Callable[..., Builder], watch: Watch, tmp_path: Path
) -> None:
    tmp_path.joinpath("v.h").write_text("#define V 1\n")
    options = including.options
    wanted = replace(including, include=(str(tmp_path),), spellings=(), options=options)
    watch.start(replies(1))
    found, _ = build_all(open_builder(), pairs([wanted, program(2)]))
    assert watch.compiled_early() == {"k2.cu"}
    assert [header.name for header in found.headers] == ["v.h"]


def test_ptx_and_programs_that_no_cache_can_store_are_not_compiled_early(
    open_builder: Callable[..., Builder], shared_builder: Builder, watch: Watch
) -> None:
    ptx = Program.of(shared_builder.build(program(1), SM_90).ptx.decode(), label="k.ptx")
    clock = Program.of("__global__ void k(const char** x) { *x = __TIME__; }", label="clock.cu")
    watch.start(replies(1))
    build_all(open_builder(), pairs([ptx, clock, program(2)]))
    assert watch.compiled_early() == {"k2.cu"}


def test_nothing_is_compiled_early_where_a_cache_may_have_it(
    open_builder: Callable[..., Builder], config: Config, watch: Watch
) -> None:
    build_all(open_builder(), pairs(PROGRAMS[:2]))
    for memo in config.cache_dirs[0].glob("toolchain-*"):
        memo.unlink()
    watch.start()
    build_all(open_builder(), pairs(PROGRAMS))
    assert watch.compiled_early() == set()
    assert watch.compiled() == {each.label: 1 for each in PROGRAMS[2:]}


def test_a_sealed_process_starts_no_compiler(
    open_builder: Callable[..., Builder], config: Config, watch: Watch, recorder: Recorder
) -> None:
    builder = open_builder(replace(config, sealed=SealMode.ERROR))
    builder.toolchain._located = open_builder().toolchain.located
    recorder.seen.clear()
    watch.start()
    with pytest.raises(SealedError, match=r"k0\.cu"):
        build_all(builder, pairs(PROGRAMS))
    assert recorder.named("worker") == []
    assert watch.sent == []


# Another compiler than expected


@pytest.mark.parametrize("what", ["library", "roots"])
def test_results_of_a_wrong_guess_are_not_used(
    what: str, open_builder: Callable[..., Builder], shared_builder: Builder, watch: Watch,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    located = shared_builder.toolchain.located
    true = located.library("nvrtc")
    for file in true.files:
        tmp_path.joinpath(Path(file).name).symlink_to(file)
    other = str(tmp_path / Path(true.path).name)
    wrong = packages.Guess(other, dict(located.roots))
    if what == "roots":
        wrong = packages.Guess(true.path, {"cuda": str(tmp_path)})
    monkeypatch.setattr(packages, "guess", lambda _: wrong)
    watch.start(replies(4))
    artifacts = build_all(open_builder(), pairs(PROGRAMS))
    assert watch.compiled() == {each.label: 2 for each in PROGRAMS}
    assert watch.early is not None
    rows = [each for each in watch.sent[len(watch.early) :] if each["do"] == "cuda"]
    assert {(row["library"], *row["roots"].values()) for row in rows} == {
        (true.path, *located.roots.values())
    }
    assert artifacts == [shared_builder.build(each, SM_90) for each in PROGRAMS]


def test_a_result_of_a_build_that_was_replaced_meanwhile_is_not_stored(
    open_builder: Callable[..., Builder], watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library had been replaced when the search read it."""
    receive = EarlyRequests._receive

    def from_another_build(self: EarlyRequests, request: bytes, worker: WorkerProcess) -> None:
        receive(self, request, worker)
        for reply in self._replies.values():
            if reply.blocks:
                reply.message["build"] = "another build"

    monkeypatch.setattr(EarlyRequests, "_receive", from_another_build)
    watch.start(replies(2))
    builder = open_builder()
    artifacts = build_all(builder, pairs(PROGRAMS[:2]))
    assert watch.compiled() == {each.label: 2 for each in PROGRAMS[:2]}
    assert [each.digest for each in artifacts] == [
        builder.key(each, SM_90).digest for each in PROGRAMS[:2]
    ]
    assert "another build" not in builder.toolchain.identity("cuda")


# Failures


def test_the_error_of_a_program_that_was_compiled_early_is_the_usual_one(
    open_builder: Callable[..., Builder], shared_builder: Builder, watch: Watch
) -> None:
    wrong = Program.of('extern "C" __global__ void k() {\n  nope = 1;\n}', label="wrong.cu")
    with pytest.raises(CompileError) as usual:
        shared_builder.build(wrong, SM_90)

    def both(pool: WorkerPool) -> bool:
        assert pool._early is not None
        return len(pool._early._replies) == 3  # with the description of NVRTC

    watch.start(both)
    builder = open_builder()
    with pytest.raises(CompileError) as early:
        build_all(builder, pairs([program(1), wrong]))
    assert watch.compiled() == {"wrong.cu": 1, "k1.cu": 1}
    assert str(early.value) == str(usual.value)
    assert early.value.rows == usual.value.rows
    assert builder.lookup(program(1), SM_90).artifact is not None
    assert builder.lookup(wrong, SM_90).artifact is None


def test_a_compiler_that_is_killed_early_is_replaced(
    open_builder: Callable[..., Builder], watch: Watch, recorder: Recorder
) -> None:
    killed: list[int] = []

    def kill_first(worker: WorkerProcess) -> None:
        if not killed:
            os.kill(worker._process.pid, signal.SIGKILL)
            killed.append(worker._process.pid)

    watch.after_send = kill_first
    watch.start(lambda _: bool(killed) and gone(killed[0]))
    artifacts = build_all(open_builder(), pairs(PROGRAMS))
    assert killed
    assert [each.label for each in artifacts] == [each.label for each in PROGRAMS]
    ends = [row["reason"] for row in recorder.named("worker") if row["what"] == "ended"]
    assert len(ends) <= 1  # None, if nobody needed the worker that was killed.
    assert all("SIGKILL" in reason for reason in ends)


def test_an_interrupt_of_the_search_ends_the_compilers_and_frees_the_keys(
    open_builder: Callable[..., Builder], config: Config, watch: Watch
) -> None:
    seen: list[int] = []

    def interrupt(_: WorkerPool) -> bool:
        if seen:
            raise KeyboardInterrupt
        return False

    watch.after_send = lambda worker: seen.append(worker._process.pid)
    watch.start(interrupt)
    builder = open_builder()
    with pytest.raises(KeyboardInterrupt):
        build_all(builder, pairs(PROGRAMS))
    assert builder.toolchain.pool._early is None
    idle = {worker._process.pid for worker in builder.toolchain.pool._idle}
    wait_for(lambda: all(gone(pid) or pid in idle for pid in seen))
    assert locks(config) == set()
    watch.start()
    assert len(build_all(builder, pairs(PROGRAMS))) == 4


def test_an_error_in_the_block_ends_what_nobody_needs(
    open_builder: Callable[..., Builder], config: Config, watch: Watch
) -> None:
    watch.start(replies(1))
    builder = open_builder()

    def fail() -> None:
        with builder.expect(pairs(PROGRAMS)):
            assert locks(config)
            raise ValueError("other")

    with pytest.raises(ValueError, match="other"):
        fail()
    assert locks(config) == set()
    assert builder.toolchain.pool._early is None
    assert builder.build(PROGRAMS[0], SM_90).label == "k0.cu"


def test_a_forked_child_leaves_the_early_compiles_to_its_parent(
    open_builder: Callable[..., Builder], config: Config, watch: Watch
) -> None:
    watch.start(replies(4))
    builder = open_builder()

    def child() -> None:
        assert builder.toolchain.pool._early is None
        assert builder._locks._claimed == {}

    with builder.expect(pairs(PROGRAMS)):
        held = locks(config)
        run_in_fork(child)
        assert locks(config) == held
        assert len(held) == 4


def slow_program(number: int) -> Program:
    return Program.of(slow(2000 + number), label=f"slow{number}.cu")


def waits(pool: WorkerPool) -> bool:
    """Return whether the early workers have got a slow program each."""
    assert pool._early is not None
    return sum(b"slow" in request for request in pool._early._busy) >= 2


def test_no_more_compilers_run_than_there_are_processors(
    open_builder: Callable[..., Builder], watch: Watch, recorder: Recorder
) -> None:
    watch.start(replies(4))
    builder = open_builder()
    including = Program.of(f"#include <cuda_fp16.h>\n{PROGRAMS[0].source}", label="half.cu")
    build_all(builder, pairs([*PROGRAMS, including, program(5)]))
    started = [row for row in recorder.named("worker") if row["what"] == "started"]
    assert len(started) == 3


def test_a_call_that_waits_for_an_early_compiler_can_be_cancelled(
    open_builder: Callable[..., Builder], watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch.start(waits)
    builder = open_builder()
    waiting = threading.Event()
    wait = WorkerPool._wait_for_early

    def noticed() -> None:
        waiting.set()
        wait()

    monkeypatch.setattr(WorkerPool, "_wait_for_early", staticmethod(noticed))
    with builder.expect(pairs([slow_program(number) for number in (1, 2, 3)])):
        # The worker that located the compilers takes the first of these programs.
        others = [builder.background.submit(partial(_build, builder, n)) for n in (4, 5)]
        assert waiting.wait(TIMEOUT_SECONDS)
        builder.background.cancel()
        assert all(task.cancelled for task in others)


def _build(builder: Builder, number: int, deferral: Deferral) -> object:
    return builder.obtain(slow_program(number), SM_90, deferral=deferral)


# Other processes


def test_the_keys_are_locked_before_other_processes_know_the_compilers(
    open_builder: Callable[..., Builder], config: Config, watch: Watch,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    remember = _Memo.remember
    held: list[set[str]] = []

    def watched(self: _Memo, located: Any) -> None:
        held.append(locks(config))
        remember(self, located)

    monkeypatch.setattr(_Memo, "remember", watched)
    watch.start(replies(4))
    builder = open_builder()
    build_all(builder, pairs(PROGRAMS))
    assert held == [{builder.key(each, SM_90).digest for each in PROGRAMS}]
    assert locks(config) == set()


def test_a_program_that_another_process_compiles_is_not_compiled_early(
    open_builder: Callable[..., Builder], config: Config, watch: Watch
) -> None:
    other = open_builder()
    digest = other.key(PROGRAMS[0], SM_90).digest
    for memo in config.cache_dirs[0].glob("toolchain-*"):
        memo.unlink()
    config.lock_dir.mkdir(mode=0o700, exist_ok=True)
    lock = FileLock(config.lock_dir / digest)
    assert lock.acquire(0)
    watch.start(replies(4))
    builder = open_builder()
    with builder.expect(pairs(PROGRAMS)):
        assert digest not in builder._locks._claimed
        assert len(builder._locks._claimed) == 3
    lock.release()


# Totals of a cache directory


def test_one_thread_adds_for_all_that_wait() -> None:
    additions = Additions()
    writes: list[tuple[int, int]] = []
    results: list[Usage | None] = []
    first_writes = threading.Event()
    go_on = threading.Event()

    def write(files: int, size: int) -> Usage:
        writes.append((files, size))
        if len(writes) == 1:
            first_writes.set()
            go_on.wait()
        return Usage(files, size)

    def add(size: int) -> None:
        results.append(additions.add(1, size, write))

    threads = [threading.Thread(target=add, args=(10**place,)) for place in range(4)]
    threads[0].start()
    first_writes.wait()
    for thread in threads[1:]:
        thread.start()
    wait_for(lambda: len(additions._waiting) == 3)
    go_on.set()
    for thread in threads:
        thread.join()
    assert writes == [(1, 1), (3, 1110)]
    assert sorted(each for each in results if each is not None) == [
        Usage(1, 1), *[Usage(3, 1110)] * 3,
    ]  # fmt: skip


def test_every_thread_gets_the_fault_of_the_one_that_adds() -> None:
    additions = Additions()

    def write(files: int, size: int) -> Usage:
        raise OSError(f"{files} {size}")

    with pytest.raises(OSError, match="2 5"):
        additions.add(2, 5, write)
    assert additions.add(1, 1, Usage) == Usage(1, 1)
