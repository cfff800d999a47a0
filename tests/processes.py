"""Processes that tests start. Each one ends with its test, and waits have a generous limit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

SOURCE = Path(__file__).parents[1] / "src"
#: Seconds after which a test fails instead of waiting. The limit turns a hang into a failure. It is no
#: expectation of how long an operation takes, because tests also run on busy machines.
TIMEOUT_SECONDS = 300.0

T = TypeVar("T")
_started: list[subprocess.Popen[str]] = []


def import_path() -> str:
    """Return the PYTHONPATH of new processes: the source, and the directories in that of this one."""
    given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return os.pathsep.join([str(SOURCE), *map(os.path.abspath, given)])


def start_process(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdin: int = subprocess.PIPE,
) -> subprocess.Popen[str]:
    """Start a process in its own session, with pipes. It is killed when the test ends."""
    process = subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": import_path(), **(env or {})},
        cwd=cwd,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    _started.append(process)
    return process


def start_python(code: str, *args: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """Start a Python process that runs `code`."""
    return start_process([sys.executable, "-c", code, *args], env=env)


def read_line(process: subprocess.Popen[str]) -> str:
    """Return the next line that a process prints; fail with its stderr if it exits before that."""
    assert process.stdout is not None
    said = b""
    while not said.endswith(b"\n"):
        # Read single bytes: `wait_for_exit` returns the rest of the output.
        byte = os.read(process.stdout.fileno(), 1)
        if not byte:
            _, err = wait_for_exit(process)
            raise AssertionError(f"it ended after {said!r}: {err}")
        said += byte
    return said.decode().removesuffix("\n")


def write_line(process: subprocess.Popen[str], text: str = "") -> None:
    """Write a line to the stdin of a process."""
    assert process.stdin is not None
    process.stdin.write(f"{text}\n")
    process.stdin.flush()


def wait_for_exit(process: subprocess.Popen[str], said: str | None = None) -> tuple[str, str]:
    """Wait until a process exits; return its output and its stderr. `said` is written to its stdin."""
    return process.communicate(said, timeout=TIMEOUT_SECONDS)


def expect_success(process: subprocess.Popen[str]) -> str:
    """Return the output of a process that exits with status 0; fail with its stderr otherwise."""
    out, err = wait_for_exit(process)
    assert process.returncode == 0, err
    return out


def kill(*processes: subprocess.Popen[str]) -> None:
    """Kill processes with everything in their sessions, and wait until they have exited."""
    for process in processes:
        if process.returncode is None:  # Until it is reaped, its process id is not reused.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        with suppress(BrokenPipeError), process:  # The context manager closes the pipes and waits.
            pass


def kill_started_processes() -> None:
    """Kill every process that a test started and that still runs."""
    kill(*_started)
    _started.clear()


def run_in_fork(work: Callable[[], None]) -> None:
    """Call `work` in a forked child, which must return from it without an exception."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python warns of forks beside threads.
        child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        reaped, status = os.waitpid(child, os.WNOHANG)
        if reaped:
            assert os.waitstatus_to_exitcode(status) == 0
            return
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError("the child hangs")


def wait_for(what: Callable[[], T | None]) -> T:
    """Call `what` until it returns a true value, and return that; fail after `TIMEOUT_SECONDS`."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not (found := what()):
        assert time.monotonic() < deadline, "the condition never became true"
        time.sleep(0.01)
    return found


#: Code to run before a build in a process: it prints each key that the build waits for, and the limit.
REPORT_WAITS = """
from preheat.store.lock import FileLock

def report_wait(lock, timeout, acquire=FileLock.acquire):
    if acquire(lock, 0):
        return True
    if timeout and len(lock.path.name) == 64:
        print("waits for", lock.path.name, timeout, flush=True)
    return acquire(lock, timeout)

FileLock.acquire = report_wait

from preheat.build.compile_lock import WouldWait, KeyLocks

reported = set()

def report_wait(locks, lock, attempt=None, acquire=KeyLocks.acquire):
    try:
        acquire(locks, lock, attempt)
    except WouldWait:
        if lock.path.name not in reported:
            reported.add(lock.path.name)
            print("waits for", lock.path.name, locks._wait, flush=True)
        raise

KeyLocks.acquire = report_wait
"""
