"""Compiler processes: a failure of a worker is an error of its compile only."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from preheat.errors import (
    CompileError,
    CompilerCrashError,
    CompilerTimeoutError,
    PtxError,
    ToolchainError,
)
from preheat.model.arch import Arch
from preheat.model.events import Events
from preheat.model.program import Program
from preheat.toolchain import process, scratch
from preheat.toolchain.compiler import Toolchain
from preheat.toolchain.translate import Compiled
from tests import processes
from tests.conftest import SAXPY, Recorder
from tests.processes import TIMEOUT_SECONDS
from tests.toolchain import support

SM_90 = Arch.parse("sm_90")
GOOD = Program.of(SAXPY, label="saxpy.cu")
BROKEN = Program.of("__global__ void k() { oops(); }")
ENDLESS = Program.of(support.slow(30_000))  # hours


@pytest.fixture
def own(events: Events) -> Iterator[Toolchain]:
    """Yield a toolchain of the test's own, whose workers start and end with it."""
    made = Toolchain(events, timeout=TIMEOUT_SECONDS)
    yield made
    made.close()


def reported(recorder: Recorder) -> list[str]:
    return [event["what"] for event in recorder.named("worker")]


# Time


@pytest.fixture
def hasty(tmp_path: Path, events: Events, recorder: Recorder) -> Iterator[Toolchain]:
    """Return a toolchain with located compilers and a limit of three seconds for a compile."""
    patient = Toolchain(events, timeout=TIMEOUT_SECONDS, memo_dir=tmp_path)
    _ = patient.located
    patient.close()
    recorder.seen.clear()
    made = Toolchain(events, timeout=3.0, memo_dir=tmp_path)
    yield made
    made.close()


def test_a_compile_that_hangs_is_ended_and_the_next_one_works(
    hasty: Toolchain, recorder: Recorder, tmp_path: Path
) -> None:
    with pytest.raises(CompilerTimeoutError, match="did not finish within 3 s") as caught:
        hasty.compile(Program.of(ENDLESS.source, include=[tmp_path]), SM_90)
    assert caught.value.hint is not None
    assert "PREHEAT_COMPILE_TIMEOUT" in caught.value.hint
    assert left_behind(tmp_path) == []
    hasty.pool._timeout = TIMEOUT_SECONDS  # this one has as long as it needs
    assert hasty.compile(GOOD, SM_90).cubin
    assert reported(recorder) == ["started", "ended", "started"]
    assert "CompilerTimeoutError" in recorder.named("worker")[1]["reason"]


@pytest.mark.parametrize("seconds", [2.0**31 / 1000 + 1, 1e9, 1e300, float("inf")])
def test_a_time_out_may_be_as_long_as_one_likes(events: Events, seconds: float) -> None:
    own = Toolchain(events, timeout=seconds)
    assert own.compile(GOOD, SM_90).cubin
    own.close()


def test_a_wait_longer_than_the_kernel_takes_is_made_of_shorter_ones(
    hasty: Toolchain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_LONGEST_WAIT", 0.001)
    hasty.pool._timeout = 0.5
    with pytest.raises(CompilerTimeoutError, match=r"did not finish within 0\.5 s"):
        hasty.compile(ENDLESS, SM_90)
    hasty.pool._timeout = TIMEOUT_SECONDS
    assert hasty.compile(GOOD, SM_90).cubin


def pids(toolchain: Toolchain) -> list[int]:
    """Return the processes of the idle workers."""
    return [worker._process.pid for worker in toolchain.pool._idle]


def left_behind(include: Path) -> list[Path]:
    """Directories of compiles that looked for headers in `include`."""
    places = [*Path("/dev/shm").glob("preheat-*/@0"), *Path("/tmp").glob("preheat-*/@0")]
    return [place.parent for place in places if place.is_symlink() and place.readlink() == include]


# Death


def in_background(work: Callable[[], Compiled]) -> tuple[threading.Thread, list[object]]:
    """Start `work` in a thread; its result or exception is appended to the list."""
    result: list[object] = []

    def run() -> None:
        try:
            result.append(work())
        except Exception as error:
            result.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, result


def test_a_worker_killed_during_a_compile_is_replaced_and_the_compile_done_again(
    own: Toolchain, recorder: Recorder, tmp_path: Path
) -> None:
    _ = own.located
    others = support.workers_of(os.getpid()) - set(pids(own))
    (tmp_path / "k.h").write_text(ENDLESS.source)
    program = Program.of('#include "k.h"\n', include=[tmp_path])
    thread, result = in_background(lambda: own.compile(program, SM_90))
    worker, scratch = support.compiling(os.getpid(), others)
    os.kill(worker, signal.SIGSTOP)
    (tmp_path / "k.h").write_text(support.slow(1))  # so that the next one comes to its end
    os.kill(worker, signal.SIGKILL)
    thread.join()
    (compiled,) = result
    assert isinstance(compiled, Compiled)
    assert [e.name for e in compiled.entries] == ["k"]
    assert compiled.opened == ("@0/k.h",)  # done with a trace, so that it can be kept
    assert reported(recorder) == ["started", "ended", "started"]
    assert "SIGKILL" in recorder.named("worker")[1]["reason"]
    assert not scratch.exists()


def test_a_worker_that_dies_every_time_is_an_error_of_that_compile_only(own: Toolchain) -> None:
    _ = own.located
    others = support.workers_of(os.getpid()) - set(pids(own))
    thread, result = in_background(lambda: own.compile(ENDLESS, SM_90))
    while thread.is_alive():
        for worker in support.workers_of(os.getpid()) - others:
            with suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)
        thread.join(0.01)
    (error,) = result
    assert isinstance(error, CompilerCrashError)
    assert error.killed
    assert str(error).startswith("the compiler was started 4 times and killed each time: ")
    assert "SIGKILL" in str(error)
    assert own.compile(GOOD, SM_90).cubin


def test_a_worker_killed_while_idle_is_replaced_unnoticed(own: Toolchain, recorder: Recorder) -> None:
    first = own.compile(GOOD, SM_90)
    (worker,) = own.pool._idle
    os.kill(worker._process.pid, signal.SIGKILL)
    processes.wait_for(lambda: not worker.alive())
    again = own.compile(GOOD, SM_90)
    assert (again.cubin, again.opened) == (first.cubin, first.opened)
    assert reported(recorder) == ["started", "started"]


def test_a_worker_that_leaves_just_when_it_is_wanted_is_replaced_unnoticed(
    own: Toolchain, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = own.compile(GOOD, SM_90)
    (worker,) = own.pool._idle
    monkeypatch.setattr(worker, "alive", lambda: True)  # as it was a moment ago
    read, write = os.pipe()
    os.dup2(write, worker._in.fileno())  # which closes its stdin, so it ends as when idle for long
    os.close(write)
    os.close(read)
    processes.wait_for(lambda: support.gone(worker._process.pid))
    again = own.compile(GOOD, SM_90)
    assert (again.cubin, again.opened) == (first.cubin, first.opened)
    assert reported(recorder) == ["started", "ended", "started"]


def test_a_request_the_worker_cannot_answer_is_reported_with_its_last_output(own: Toolchain) -> None:
    with pytest.raises(CompilerCrashError, match=r"(?s)died \(exit status 1\).*KeyError: 'nonsense'"):
        own.pool.call({"do": "nonsense"})


def test_a_worker_that_cannot_be_started_is_an_error(
    own: Toolchain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(ToolchainError, match="cannot start a compiler process with /nowhere/python"):
        own.pool.call({"do": "locate"})


def test_a_worker_that_ends_before_its_first_reply_is_a_crash_and_not_asked_again(
    own: Toolchain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("true"))
    with pytest.raises(CompilerCrashError, match=r"died \(exit status 0\)"):
        own.pool.call({"do": "locate"})


@pytest.mark.parametrize("code", [signal.SIGTERM, signal.SIGKILL])
def test_a_compile_survives_three_kills_of_its_worker(
    own: Toolchain, recorder: Recorder, tmp_path: Path, code: signal.Signals
) -> None:
    _ = own.located
    others = support.workers_of(os.getpid()) - set(pids(own))
    (tmp_path / "k.h").write_text(ENDLESS.source)
    program = Program.of('#include "k.h"\n', include=[tmp_path])
    thread, result = in_background(lambda: own.compile(program, SM_90))
    for kills_left in (2, 1, 0):
        worker, _ = support.compiling(os.getpid(), others)
        if not kills_left:
            (tmp_path / "k.h").write_text(support.slow(1))  # so that the next one comes to its end
        os.kill(worker, code)
        others.add(worker)
    thread.join()
    (compiled,) = result
    assert isinstance(compiled, Compiled), compiled
    assert compiled.opened == ("@0/k.h",)
    assert reported(recorder) == ["started", *["ended", "started"] * 3]


def test_a_compiler_that_crashes_is_asked_once_more_and_no_more(
    own: Toolchain, recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _ = own.located
    own.close()
    recorder.seen.clear()
    crashing = tmp_path / "python"
    crashing.write_text("#!/bin/sh\nkill -SEGV $$\n")
    crashing.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(crashing))
    with pytest.raises(CompilerCrashError, match=r"tried twice, .*died \(SIGSEGV\)") as caught:
        own.compile(GOOD, SM_90)
    assert not caught.value.killed
    assert reported(recorder) == ["started", "ended"] * 2


# Recycling


def test_a_worker_serves_one_good_compile_after_the_other(own: Toolchain, recorder: Recorder) -> None:
    for arch in ("sm_80", "sm_90", "sm_100"):
        own.compile(GOOD, Arch.parse(arch))
    assert reported(recorder) == ["started"]


def test_a_worker_ends_with_the_first_program_the_compiler_rejects(
    own: Toolchain, recorder: Recorder
) -> None:
    own.compile(GOOD, SM_90)
    (worker,) = pids(own)
    with pytest.raises(CompileError):
        own.compile(BROKEN, SM_90)
    assert support.gone(worker)
    own.compile(GOOD, SM_90)
    assert reported(recorder) == ["started", "ended", "started"]
    assert recorder.named("worker")[1]["reason"] == "NVRTC_ERROR_COMPILATION"


def test_ptx_the_assembler_rejects_ends_its_worker_too(own: Toolchain, recorder: Recorder) -> None:
    text = ".version 8.0\n.target sm_80\n.address_size 64\n.entry k() { bogus; }\n"
    with pytest.raises(CompileError):
        own.compile(Program.of(text), SM_90)
    assert reported(recorder) == ["started", "ended"]


def test_a_program_that_is_refused_early_starts_no_worker(own: Toolchain, recorder: Recorder) -> None:
    with pytest.raises(PtxError):
        own.compile(Program.of(".version 8.0\n", language="ptx"), SM_90)
    assert reported(recorder) == []


def test_idle_workers_end_at_close_and_others_start_after_it(
    own: Toolchain, recorder: Recorder
) -> None:
    own.compile(GOOD, SM_90)
    (worker,) = pids(own)
    own.close()
    assert support.gone(worker)
    own.close()
    assert own.compile(GOOD, SM_90).cubin
    assert reported(recorder) == ["started", "started"]


def test_where_no_thread_can_be_started_a_worker_is(
    own: Toolchain, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr("preheat.toolchain.pool._thread.start_new_thread", refuse)
    assert own.compile(GOOD, SM_90).cubin


def test_threads_share_as_many_workers_as_there_are_processors(
    own: Toolchain, recorder: Recorder
) -> None:
    _ = own.located
    running = [in_background(lambda: own.compile(GOOD, SM_90)) for _ in range(12)]
    for thread, _ in running:
        thread.join()
    made = [one for _, result in running for one in result if isinstance(one, Compiled)]
    assert len(made) == 12
    assert len({one.cubin for one in made}) == 1
    assert len(recorder.named("worker")) <= (os.cpu_count() or 1)


def test_requests_and_replies_of_many_megabytes_pass(own: Toolchain) -> None:
    text = "x" * 79 + "\n"
    source = f"/*\n{text * 100_000}*/\n__device__ char big[] = {{{'7,' * 300_000}}};\n{SAXPY}"
    compiled = own.compile(Program.of(source, headers={"unused.h": f"/*{text * 50_000}*/"}), SM_90)
    assert len(compiled.cubin) > 300_000
    assert [e.name for e in compiled.entries] == ["saxpy"]


# The environment


def environment(toolchain: Toolchain) -> dict[str, str]:
    """Return the environment with which the idle worker was started."""
    toolchain.pool.call({"do": "locate"})
    (worker,) = pids(toolchain)
    rows = Path(f"/proc/{worker}/environ").read_bytes().decode().split("\0")
    return dict(row.split("=", 1) for row in rows if row)


def test_only_listed_variables_reach_the_worker(
    own: Toolchain, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NV_NVVM_VERSION", "NVVM_IR_VER_CHK", "LLVM_OVERRIDE_PRODUCER", "CAN_FINALIZE_DEBUG"):
        monkeypatch.setenv(name, "nvvm70")
    for name in ("NVRTC_CACHE_DISABLE", "EDG_BASE", "PYTHONOPTIMIZE", "PYTHONWARNINGS", "LD_PRELOAD"):
        monkeypatch.setenv(name, "")
    passed = {
        "CUDA_HOME": "/nowhere",
        "CONDA_PREFIX": "/nowhere",
        "LD_LIBRARY_PATH": "/nowhere",
        "PYTHONUSERBASE": "/nowhere",
        "PYTHONPYCACHEPREFIX": "/tmp/kept",
        "TMPDIR": "/tmp",
    }
    for name, value in {**passed, "INVENTED_TODAY": "1", "LC_ALL": "C.UTF-8", "LANG": "C"}.items():
        monkeypatch.setenv(name, value)
    seen = environment(own)
    assert passed.items() <= seen.items()
    assert seen["HOME"] == os.environ["HOME"]
    assert seen["LC_ALL"] == "C"
    optional = {"CUDA_PATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE"}  # as this process has them
    fixed = {"HOME", "LC_ALL", "PWD", "PYTHONPATH", "PYTHONSAFEPATH", "PYTHONUTF8"}
    assert seen.keys() - optional == passed.keys() | fixed


def test_a_variable_that_chooses_another_compiler_back_end_changes_nothing(
    own: Toolchain, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = Program.of("__global__ void k(float* x) { *x = sinf(*x); }")
    first = own.compile(program, SM_90)
    own.close()
    for version in ("nvvm70", "nvvm-latest"):
        monkeypatch.setenv("NV_NVVM_VERSION", version)
        again = own.compile(program, SM_90)
        own.close()
        assert (again.ptx, again.cubin) == (first.ptx, first.cubin)


def test_a_worker_ignores_the_users_packages_when_this_process_does() -> None:
    code = "from preheat.toolchain import pool; print(pool._environment().get('PYTHONNOUSERSITE'))"
    for flags, expected in ((["-s"], "1"), ([], "None")):
        command = [sys.executable, *flags, "-c", code]
        assert processes.expect_success(processes.start_process(command)).strip() == expected


def test_a_module_beside_the_program_does_not_replace_one_of_the_standard_library(
    tmp_path: Path, own: Toolchain, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("glob.py", "json.py", "struct.py"):
        (tmp_path / name).write_text("raise SystemExit('imported from the directory of the program')")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert own.compile(Program.of("#include <cuda_fp16.h>\n__global__ void k() {}"), SM_90).cubin


def test_a_module_in_the_current_directory_is_not_what_the_worker_imports(
    tmp_path: Path, own: Toolchain, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("json.py", "preheat.py", "cuda.py"):
        (tmp_path / name).write_text("raise SystemExit('imported from the current directory')")
    monkeypatch.chdir(tmp_path)
    assert own.compile(GOOD, SM_90).cubin


def test_ctrl_c_at_the_terminal_does_not_reach_an_idle_worker(own: Toolchain) -> None:
    _ = own.located
    (worker,) = pids(own)
    assert os.getpgid(worker) != os.getpgrp()


def test_a_worker_ends_when_its_stdin_does() -> None:
    command = [sys.executable, "-m", "preheat.toolchain.worker"]
    worker = processes.start_process(command, stdin=subprocess.DEVNULL)
    assert processes.wait_for_exit(worker) == ("", "")
    assert worker.returncode == 0


# Since Python 3.14, ctypes imports threading.
STARTED = """
import ctypes, json, sys
before = set(sys.modules)
import preheat.toolchain.worker
print(json.dumps(sorted(set(sys.modules) - before)))
"""
#: Modules that take milliseconds to import, for which every caller of a new worker would wait.
SLOW_IMPORTS = {
    *("asyncio", "contextlib", "cuda", "dataclasses", "hashlib", "inspect", "logging", "numpy"),
    *("pathlib", "random", "shutil", "subprocess", "tempfile", "threading", "typing"),
    *("preheat.model.config", "preheat.errors", "preheat.model.events"),
}


def test_a_worker_starts_with_few_imports() -> None:
    imported = set(json.loads(processes.expect_success(processes.start_python(STARTED))))
    assert imported & SLOW_IMPORTS == set()


# Other processes

COMPILE = """
import signal, sys
from preheat.model.arch import Arch
from preheat.model.events import Events
from preheat.model.program import Program
from preheat.toolchain.compiler import Toolchain

toolchain = Toolchain(Events(), timeout=3000.0)
toolchain.located
print("ready", flush=True)
try:
    toolchain.compile(Program.of(open(sys.argv[1]).read()), Arch.parse("sm_90"))
except KeyboardInterrupt:
    print("interrupted", flush=True)
    signal.pause()
"""


@pytest.fixture
def interrupted(tmp_path: Path) -> subprocess.Popen[str]:
    """Return a process with a compile that would take hours."""
    (tmp_path / "endless.cu").write_text(ENDLESS.source)
    return processes.start_python(COMPILE, str(tmp_path / "endless.cu"))


def test_ctrl_c_ends_the_compile_at_once_and_leaves_nothing(
    interrupted: subprocess.Popen[str],
) -> None:
    assert processes.read_line(interrupted) == "ready"
    worker, scratch = support.compiling(interrupted.pid)
    interrupted.send_signal(signal.SIGINT)
    assert processes.read_line(interrupted) == "interrupted"  # and not the end of the compile
    assert support.gone(worker)
    assert support.workers_of(interrupted.pid) == set()
    assert not scratch.exists()


def test_a_worker_during_a_compile_ends_with_the_process_that_asked(
    interrupted: subprocess.Popen[str],
) -> None:
    worker, scratch = support.compiling(interrupted.pid)
    interrupted.kill()
    processes.wait_for(lambda: support.gone(worker))
    assert not scratch.exists()


FORK = """
import json, os, sys
from pathlib import Path
from preheat.build.builder import Builder
from preheat.model.config import Config
from preheat.model.events import Events
from preheat.model.program import Program

root = Path(sys.argv[1])
started = []
events = Events(lambda name, fields: started.append(fields) if name == "worker" else None)
builder = Builder.open(Config(cache_dirs=(root / "cache",), lock_dir=root / "locks"), events=events)

def build(value):
    source = f'extern "C" __global__ void k(int* x) {{ *x = {value}; }}'
    cubin = builder.build(Program.of(source), "sm_90").cubin
    return [len(cubin) > 0, len(started), builder.toolchain.pool._idle[0]._process.pid]

before = build(1)
read, write = os.pipe()
child = os.fork()
if child == 0:
    os.write(write, json.dumps([build(2), build(3)]).encode())
    builder.close()
    os._exit(0)
os.close(write)
_, status = os.waitpid(child, 0)
with os.fdopen(read) as pipe:
    print(json.dumps({"before": before, "child": json.load(pipe), "after": build(4), "status": status}))
"""


def test_a_forked_child_compiles_with_a_worker_of_its_own(tmp_path: Path) -> None:
    said = json.loads(processes.expect_success(processes.start_python(FORK, str(tmp_path))))
    assert said["status"] == 0
    assert said["before"][:2] == [True, 1]
    first, second = said["child"]
    assert first[:2] == second[:2] == [True, 2]  # one more worker, used twice
    assert first[2] == second[2] != said["before"][2]
    assert said["after"] == [True, 1, said["before"][2]]  # The parent still has its worker.


# Full file systems

CRAMPED = """
import json, os, subprocess, sys
from pathlib import Path
from preheat.build.builder import Builder
from preheat.model.config import Config
from preheat.model.events import Events
from preheat.model.program import Program

root, options, os.environ["TMPDIR"], name = Path(sys.argv[1]), *sys.argv[2:]
subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", "/dev/shm"], check=True)
if "size" in options:
    with open("/dev/shm/full", "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass
include = root / name
include.mkdir()
include.joinpath("v.h").write_text("#define VALUE 1\\n")
seen = []
events = Events(lambda name, fields: seen.append([name, dict(fields)]))
config = Config(cache_dirs=(root / "cache",), lock_dir=root / "locks")
builder = Builder.open(config, events=events)
source = '#include "v.h"\\nextern "C" __global__ void k(int* x) { *x = VALUE; }'
artifact = builder.build(Program.of(source, include=[include]), "sm_90")
builder.close()
left = [name for name in os.listdir("/dev/shm") if name.startswith("preheat-")]
print(json.dumps({"entries": [e.name for e in artifact.entries], "seen": seen, "left": left}))
"""


def cramped(root: Path, options: str, elsewhere: str, name: str = "long" * 40) -> dict[str, Any]:
    """Build where memory files go to a file system with `options`, and others to `elsewhere`.

    The include directory is called `name`. A link to a long path needs a block of the file system.
    """
    unshare = shutil.which("unshare")
    if unshare is None or os.geteuid() != 0:
        pytest.skip("needs a mount namespace of its own")
    command = [unshare, "--mount", sys.executable, "-c", CRAMPED, str(root), options, elsewhere, name]
    said: dict[str, Any] = json.loads(processes.expect_success(processes.start_process(command)))
    assert said["entries"] == ["k"]
    assert said["left"] == []
    return said


@pytest.mark.parametrize(
    "options",
    ["size=64k", "ro"],
    ids=["no bytes left", "read-only"],
)
def test_with_a_temporary_directory_that_is_of_no_use_the_usual_one_will_do(
    tmp_path: Path, options: str
) -> None:
    seen = cramped(tmp_path, options, elsewhere="/dev/shm")["seen"]
    assert "uncached" not in [name for name, _ in seen]


def test_a_place_where_others_can_rename_our_directory_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o777)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert str(tmp_path) not in scratch._places()
    tmp_path.chmod(0o1777)
    assert str(tmp_path) in scratch._places()
    tmp_path.chmod(0o700)
    assert str(tmp_path) in scratch._places()
    os.chown(tmp_path, 12345, 12345) if os.geteuid() == 0 else pytest.skip("needs root")
    assert str(tmp_path) not in scratch._places()


@pytest.mark.parametrize(
    "options",
    ["nr_inodes=1", "nr_inodes=3"],
    ids=["no directory to be made", "no links to be made"],
)
def test_without_memory_files_the_temporary_directory_will_do(tmp_path: Path, options: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    seen = cramped(tmp_path, options, elsewhere=str(elsewhere))["seen"]
    assert "uncached" not in [name for name, _ in seen]
    assert [fields["what"] for name, fields in seen if name == "worker"] == ["started"]  # nothing died
    assert list(elsewhere.iterdir()) == []


def test_a_trace_needs_no_disk_space(tmp_path: Path) -> None:
    seen = cramped(tmp_path, "size=64k", elsewhere="/dev/shm", name="i")["seen"]
    assert "uncached" not in [name for name, _ in seen]
    assert [fields["what"] for name, fields in seen if name == "worker"] == ["started"]


@pytest.mark.gpu
def test_a_worker_never_loads_the_driver(own: Toolchain) -> None:
    """Its initialization takes time, and hangs in a process that compute-sanitizer follows."""
    assert own.located.archs
    assert own.compile(GOOD, SM_90).cubin
    (worker,) = pids(own)
    mapped = Path(f"/proc/{worker}/maps").read_text()
    assert "libnvrtc" in mapped
    assert "libcuda.so" not in mapped
