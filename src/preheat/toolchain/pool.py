"""Compiler processes, kept warm and thrown away after any failure."""

from __future__ import annotations

import _thread
import os
import selectors
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NoReturn

from preheat.config import environ
from preheat.errors import CompilerCrashError, CompilerTimeoutError, ToolchainError
from preheat.events import Events
from preheat.files import owned
from preheat.locks import Lock, no_fork
from preheat.toolchain import frames, scratch
from preheat.toolchain.locate import SEARCH_VARIABLES

__all__ = ["WorkerPool"]

# The environment of a worker. NVRTC and nvJitLink read variables that change their output (such as
# NV_NVVM_VERSION, NVVM_IR_VER_CHK, LLVM_OVERRIDE_PRODUCER and CAN_FINALIZE_DEBUG), and no key says
# which values they had. So a worker gets these variables of ours and no others:
_PASSED = (
    # Where the compilers and the toolkit's headers are found. The key has the build of the compiler
    # that was found, and the contents of headers are checked on lookup.
    *SEARCH_VARIABLES,
    # What the interpreter needs to start and to import what it imports here; the compilers read none.
    "PYTHONHOME",
    "PYTHONPLATLIBDIR",
    "PYTHONDONTWRITEBYTECODE",
    "PYTHONPYCACHEPREFIX",
    # Where directories for compiles are made. Their names reach neither the compiler nor the binary.
    "TMPDIR",
)
# Not passed, though many processes have them: PATH (no program is started by name), LD_PRELOAD (a
# preloaded library can change the output), LANG and LC_* (fixed below), PREHEAT_* (a request says all
# that a worker must know).
_FIXED = {
    "LC_ALL": "C",
    # NVRTC writes the current directory into debug information, by this name when it is one for it.
    "PWD": "/proc/self/cwd",
    "PYTHONSAFEPATH": "1",
    "PYTHONUTF8": "1",
}

_RETRIES = 3  # times that a compile is started again because somebody killed the compiler
# Signals by which a process ends because of what it did itself. After these a retry does the same.
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
_LONGEST_WAIT = 3600.0  # seconds of one wait of many: the kernel takes at most 2**31 milliseconds


class WorkerPool:
    """Runs requests in worker processes: an idle one when there is one, else a new one.

    Safe from any thread and after fork. At most as many compile at once as there are processors.
    """

    def __init__(self, events: Events, *, timeout: float) -> None:
        self._events, self._timeout = events, timeout
        self._idle: list[_Worker] = []
        self._workers: weakref.WeakSet[_Worker] = weakref.WeakSet()  # all of them
        self._lock = Lock()
        self._slots = Lock(places=os.cpu_count() or 1)
        weakref.finalize(self, _end, self._idle)  # also when the interpreter exits

    def call(
        self, message: Mapping[str, Any], blocks: Mapping[str, bytes] | None = None
    ) -> frames.Frame:
        """The reply to one request.

        A worker that somebody else kills is replaced, and the request made again, three times at most.
        Raises `CompilerCrashError` when the worker dies of itself or is killed every time, and
        `CompilerTimeoutError` when it takes too long. Whatever ends the wait early, Ctrl-C included,
        ends the worker too.
        """
        request = frames.encode(message, blocks)
        killed = 0
        with self._slots:
            while True:
                try:
                    reply = self._ask(self._take(), request)
                except CompilerCrashError as error:
                    if not error.killed:
                        raise
                    killed += 1
                    if killed > _RETRIES:
                        raise _killed(error, killed) from None
                else:
                    if reply is not None:
                        return reply

    def _ask(self, worker: _Worker, request: bytes) -> frames.Frame | None:
        """The reply of one worker; None when it turns out to have left, idle for long enough."""
        try:
            reply = worker.call(request, time.monotonic() + self._timeout, self._timeout)
        except _LeftError:
            self._drop(worker, "idle")
            return None
        except BaseException as failure:
            self._drop(worker, f"{type(failure).__name__}: {failure}")
            raise
        if reply.message.get("status") in _CLEAN:
            with self._lock:
                self._idle.append(worker)
        else:
            self._drop(worker, str(reply.message["status"]))
        return reply

    def close(self) -> None:
        """End the idle workers."""
        with self._lock:
            _end(self._idle)

    def after_fork(self) -> None:
        """In a forked child: the workers belong to the parent, so let go of them."""
        for worker in list(self._workers):
            worker.abandon()
        self._workers.clear()
        self._idle.clear()

    def _take(self) -> _Worker:
        while True:
            with self._lock:
                while self._idle:
                    worker = self._idle.pop()
                    if worker.alive():
                        return worker
                    worker.end()  # it had been idle for long enough to leave
            scratch.sweep()
            worker = self._start()
            with self._lock:
                if worker in self._idle:  # else another thread was quicker
                    self._idle.remove(worker)
                    return worker  # even one that has died already: the request tells how

    def _start(self) -> _Worker:
        """Add an idle worker and return it, started by a thread of its own.

        Interrupts arrive in the main thread, where they would lose the process, or its pipes, between
        the lines of `subprocess`. Whatever interrupts the wait for the thread, the worker is added.
        """
        made: list[_Worker] = []
        failures: list[BaseException] = []
        started = _thread.allocate_lock()
        started.acquire()

        def start() -> None:
            try:
                with no_fork:
                    worker = _Worker()
                    self._workers.add(worker)
                    made.append(worker)
                    self._idle.append(worker)
                self._events.emit("worker", what="started", reason="")
            except BaseException as failure:
                failures.append(failure)
            finally:
                started.release()

        try:
            _thread.start_new_thread(start, ())
        except RuntimeError:  # no thread can be started, as in an exit handler of Python 3.12
            start()
        started.acquire()
        if failures:
            raise failures.pop()
        return made[0]

    def _drop(self, worker: _Worker, why: str) -> None:
        worker.end()
        scratch.sweep()
        self._events.emit("worker", what="recycled", reason=why)


def _end(workers: list[_Worker]) -> None:
    while workers:
        workers.pop().end()


#: Replies after which a worker can be used again. After a failed compile NVRTC's header traces go
#: blind, so a failure ends its worker.
_CLEAN = (None, "NVRTC_SUCCESS", "SUCCESS")


def _killed(last: CompilerCrashError, tries: int) -> CompilerCrashError:
    return CompilerCrashError(
        f"the compiler was tried {tries} times and killed each time: {last}",
        killed=True,
        hint="the kernel kills processes when memory runs out: see the kernel's log",
    )


def _environment() -> dict[str, str]:
    """The environment of a worker: what it imports is what this process would import."""
    ours = environ()
    env = {name: ours[name] for name in _PASSED if name in ours}
    if sys.flags.no_user_site:
        env["PYTHONNOUSERSITE"] = "1"
    path = os.pathsep.join(os.path.abspath(place) for place in sys.path if place)
    return {**env, **_FIXED, "PYTHONPATH": path}


class _LeftError(Exception):
    """A worker that had been idle left just when it was wanted again."""


class _Worker:
    """One process and the pipes to it."""

    def __init__(self) -> None:
        self._served = False
        # The worker writes its last words into memory: a pipe nobody drains would block it.
        self._words = owned(os.memfd_create, "preheat-worker", os.MFD_CLOEXEC)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "preheat.toolchain.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._words,
                cwd="/",
                env=_environment(),
                start_new_session=True,  # Ctrl-C at the terminal is ours to handle
            )
        except OSError as fault:
            self._words.close()
            raise ToolchainError(
                f"cannot start a compiler process with {sys.executable or 'no Python'}: {fault}"
            ) from fault
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        os.set_blocking(self._in.fileno(), False)
        os.set_blocking(self._out.fileno(), False)

    def __del__(self) -> None:
        if hasattr(self, "_out"):  # it was started, and lost to an interrupt or ended already
            self.end()

    def alive(self) -> bool:
        return self._process.poll() is None

    def call(self, request: bytes, deadline: float, allowed: float) -> frames.Frame:
        """Send the request and wait for the reply, both ways bounded by `deadline`."""
        with selectors.DefaultSelector() as ready:

            def wait(pipe: Any, event: int) -> None:
                ready.register(pipe, event)
                try:
                    while not ready.select(min(max(deadline - time.monotonic(), 0), _LONGEST_WAIT)):
                        if time.monotonic() >= deadline:
                            raise CompilerTimeoutError(
                                f"the compiler did not finish within {allowed:g} s",
                                hint="raise PREHEAT_COMPILE_TIMEOUT if the program needs longer",
                            )
                finally:
                    ready.unregister(pipe)

            view = memoryview(request)
            while view:
                wait(self._in, selectors.EVENT_WRITE)
                try:
                    view = view[os.write(self._in.fileno(), view) :]
                except BrokenPipeError:
                    self._died()

            def exactly(size: int) -> bytes:
                parts = []
                while size:
                    wait(self._out, selectors.EVENT_READ)
                    part = os.read(self._out.fileno(), min(size, 1 << 20))
                    if not part:
                        self._died()
                    parts.append(part)
                    size -= len(part)
                return b"".join(parts)

            reply = frames.read(exactly)
            self._served = True
            return reply

    def end(self) -> None:
        """Stop the process whatever it is doing, and reap it."""
        if self.alive():
            self._process.kill()
        self._process.wait()
        self._close()

    def abandon(self) -> None:
        """Forget a process that is not our child: close the pipes, leave it to its parent."""
        self._process.returncode = 0  # keeps Popen from warning that the child was never reaped
        self._close()

    def _close(self) -> None:
        with suppress(OSError):
            self._in.close()
        with suppress(OSError):
            self._out.close()
        self._words.close()

    def _died(self) -> NoReturn:
        code = self._process.wait()
        if code == 0 and self._served:
            raise _LeftError
        how = f"exit status {code}"
        if code < 0:
            how = f"signal {-code}"
            with suppress(ValueError):
                how = signal.Signals(-code).name
        killed = code < 0 and -code not in _OWN_SIGNALS
        size = os.fstat(self._words).st_size
        last = os.pread(self._words, 2000, max(size - 2000, 0))
        words = last.decode("utf-8", "replace").strip()
        message = f"the compiler process died ({how})" + (f": {words}" if words else "")
        raise CompilerCrashError(message, killed=killed)
