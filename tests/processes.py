"""Real processes for the tests that need them. None outlives its test, and none is hurried."""

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
#: Seconds after which a test gives up. It keeps a hang from lasting for ever and says nothing of how
#: long anything may take: on a busy machine that is as long as it is.
PATIENCE = 300.0

T = TypeVar("T")
_started: list[subprocess.Popen[str]] = []


def launch(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdin: int = subprocess.PIPE,
) -> subprocess.Popen[str]:
    """A process in a session of its own, input and output piped; `reap` sees to its end."""
    process = subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": str(SOURCE), **(env or {})},
        cwd=cwd,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    _started.append(process)
    return process


def start(code: str, *args: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """A Python process running `code`."""
    return launch([sys.executable, "-c", code, *args], env=env)


def line(process: subprocess.Popen[str]) -> str:
    """The next line it prints; its errors when it ended without one."""
    assert process.stdout is not None
    said = b""
    while not said.endswith(b"\n"):
        byte = os.read(process.stdout.fileno(), 1)  # and no more: the rest is for `ended`
        if not byte:
            _, err = ended(process)
            raise AssertionError(f"it ended after {said!r}: {err}")
        said += byte
    return said.decode().removesuffix("\n")


def tell(process: subprocess.Popen[str], text: str = "") -> None:
    """Give it a line to read."""
    assert process.stdin is not None
    process.stdin.write(f"{text}\n")
    process.stdin.flush()


def ended(process: subprocess.Popen[str], said: str | None = None) -> tuple[str, str]:
    """What it printed and its errors, once it ended; `said` is the last that it gets to read."""
    return process.communicate(said, timeout=PATIENCE)


def finish(process: subprocess.Popen[str]) -> str:
    """Its output, once it ended well; its errors when it did not."""
    out, err = ended(process)
    assert process.returncode == 0, err
    return out


def kill(*processes: subprocess.Popen[str]) -> None:
    """End them and all that they started in their sessions at once, and wait until they are gone."""
    for process in processes:
        if process.returncode is None:  # not reaped, so that the number is still theirs
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        with suppress(BrokenPipeError), process:  # closes the pipes and waits
            pass


def reap() -> None:
    """Kill every process that a test started and did not see to its end."""
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
    deadline = time.monotonic() + PATIENCE
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
    """The first answer of `what` that is true; a failure when none ever comes."""
    deadline = time.monotonic() + PATIENCE
    while not (found := what()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)
    return found


#: Comes before code that builds: it says which key it waits for, and for how long at most.
TELL_WAITS = """
from preheat.cache.lock import FileLock

def telling(lock, timeout, acquire=FileLock.acquire):
    if acquire(lock, 0):
        return True
    if timeout and len(lock.path.name) == 64:
        print("waits for", lock.path.name, timeout, flush=True)
    return acquire(lock, timeout)

FileLock.acquire = telling
"""
