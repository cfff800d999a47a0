"""One compiler process, and the pipes to it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import NoReturn

from preheat.errors import CompilerCrashError, CompilerTimeoutError, ToolchainError
from preheat.process.files import adopt_fd
from preheat.process.threads import current_cancellation, released
from preheat.toolchain import frames

__all__ = ["IdleExitError", "WorkerProcess"]

_START = "from preheat.toolchain.worker import main; main()"  # `-m` takes longer.
# Signals that a process causes itself. A retry would end in the same way.
_OWN_SIGNALS = {
    signal.SIGABRT,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGILL,
    signal.SIGSEGV,
    signal.SIGSYS,
    signal.SIGTRAP,
    signal.SIGXCPU,
    signal.SIGXFSZ,
}
_LONGEST_WAIT = 3600.0  # Seconds of a single wait: the kernel accepts at most 2**31 milliseconds.


class IdleExitError(Exception):
    """A worker exited because it was idle, just before it was used again."""


class WorkerProcess:
    """One process and the pipes to it."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._served = False
        self._unsent = memoryview(b"")
        self._sent_at = 0.0
        # The worker writes stderr to memory: a pipe that no one reads would block it.
        self._stderr = adopt_fd(os.memfd_create, "preheat-worker", os.MFD_CLOEXEC)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                cwd="/",
                env=env,
                start_new_session=True,  # Only this process handles Ctrl-C of the terminal.
            )
        except OSError as fault:
            self._stderr.close()
            raise ToolchainError(
                f"cannot start a compiler process with {sys.executable or 'no Python'}: {fault}"
            ) from fault
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in = self._process.stdin
        self._out = self._process.stdout
        os.set_blocking(self._in.fileno(), False)
        os.set_blocking(self._out.fileno(), False)

    def __del__(self) -> None:
        if hasattr(self, "_out"):  # The process was started. An interrupt may have lost it.
            self.end()

    def alive(self) -> bool:
        return self._process.poll() is None

    def send(self, request: bytes) -> bool:
        """Send what the pipe takes of a request, and return whether that is all.

        `receive` sends the rest, and reports that the process has died.
        """
        self._unsent = memoryview(request)
        self._sent_at = time.monotonic()
        try:
            self._unsent = self._unsent[os.write(self._in.fileno(), self._unsent) :]
        except (BlockingIOError, BrokenPipeError):
            return False
        return not self._unsent

    def receive(self, allowed: float) -> frames.Frame:
        """Return the reply to the last request. It may take `allowed` seconds after the request.

        Raises `Cancelled` when the compiles of this thread are cancelled meanwhile.
        """
        deadline = self._sent_at + allowed
        cancellation = current_cancellation()
        ready = select.poll()
        if cancellation is not None:
            ready.register(cancellation.descriptor, select.POLLIN)

        def wait(pipe: int, event: int) -> None:
            ready.register(pipe, event)
            try:
                with released():
                    while not ready.poll(_milliseconds(deadline)):
                        if time.monotonic() >= deadline:
                            raise CompilerTimeoutError(
                                f"the compiler did not finish within {allowed:g} s",
                                hint="raise PREHEAT_COMPILE_TIMEOUT if the program needs longer",
                            )
            finally:
                ready.unregister(pipe)
            if cancellation is not None:
                cancellation.check()

        requests = self._in.fileno()
        replies = self._out.fileno()
        while self._unsent:
            try:
                self._unsent = self._unsent[os.write(requests, self._unsent) :]
            except BlockingIOError:
                wait(requests, select.POLLOUT)
            except BrokenPipeError:
                self._died()

        def read_some(size: int) -> bytes:
            while True:
                try:
                    return os.read(replies, size)
                except BlockingIOError:
                    wait(replies, select.POLLIN)

        try:
            reply = frames.read(read_some)
        except EOFError:
            self._died()
        self._served = True
        return reply

    def end(self) -> None:
        """Kill the process if it runs, and reap it."""
        if self.alive():
            self._process.kill()
        self._process.wait()
        self._close()

    def abandon(self) -> None:
        """Close the pipes to a process that is not a child of this process, and leave it running."""
        self._process.returncode = 0  # Otherwise Popen warns that the child was never reaped.
        self._close()

    def _close(self) -> None:
        with suppress(OSError):
            self._in.close()
        with suppress(OSError):
            self._out.close()
        self._stderr.close()

    def _died(self) -> NoReturn:
        code = self._process.wait()
        if code == 0 and self._served:
            raise IdleExitError
        how = f"exit status {code}"
        if code < 0:
            how = f"signal {-code}"
            with suppress(ValueError):
                how = signal.Signals(-code).name
        killed = code < 0 and -code not in _OWN_SIGNALS
        size = os.fstat(self._stderr).st_size
        last = os.pread(self._stderr, 2000, max(size - 2000, 0))
        output = last.decode("utf-8", "replace").strip()
        message = f"the compiler process died ({how})" + (f": {output}" if output else "")
        raise CompilerCrashError(message, killed=killed)


def _milliseconds(deadline: float) -> float:
    """Return the milliseconds until `deadline`, or as many as the kernel accepts."""
    return min(max(deadline - time.monotonic(), 0), _LONGEST_WAIT) * 1000
