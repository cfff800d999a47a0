"""A pool of compiler processes, which are reused and replaced after any failure."""

from __future__ import annotations

import _thread
import os
import select
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NoReturn

from preheat.config import environ
from preheat.errors import CompilerCrashError, CompilerTimeoutError, ToolchainError
from preheat.events import Events
from preheat.files import owned
from preheat.locks import Lock, no_fork
from preheat.toolchain import cancel, frames, scratch
from preheat.toolchain.locate import SEARCH_VARIABLES

__all__ = ["WorkerPool"]

# The environment of a worker. NVRTC and nvJitLink read variables that change their output (such as
# NV_NVVM_VERSION, NVVM_IR_VER_CHK, LLVM_OVERRIDE_PRODUCER and CAN_FINALIZE_DEBUG), and no key contains
# their values. So a worker gets only these variables of this process:
_PASSED = (
    # The locations of the compilers and of the toolkit's headers. The key contains the build of the
    # compiler that was found, and the contents of headers are checked on lookup.
    *SEARCH_VARIABLES,
    # The interpreter needs these to start and to import the same modules. The compilers read none.
    "PYTHONHOME",
    "PYTHONPLATLIBDIR",
    "PYTHONDONTWRITEBYTECODE",
    "PYTHONPYCACHEPREFIX",
    # The location of scratch directories. Their names reach neither the compiler nor the binary.
    "TMPDIR",
)
# Deliberately not passed: PATH (no program is started by name), LD_PRELOAD (a preloaded library can
# change the output), LANG and LC_* (fixed below), PREHEAT_* (a request contains all settings).
_FIXED = {
    "LC_ALL": "C",
    # NVRTC writes the current directory into debug information, under this name if it is valid.
    "PWD": "/proc/self/cwd",
    "PYTHONSAFEPATH": "1",
    "PYTHONUTF8": "1",
}

_START = "from preheat.toolchain.worker import main; main()"  # `-m` takes longer.
_RETRIES = 3  # How often a compile is repeated because another process killed the compiler.
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


class WorkerPool:
    """Runs requests in worker processes: in an idle one, or in a new one if none is idle.

    Safe from any thread and after fork. The number of concurrent compiles is limited to the CPU count.
    """

    def __init__(self, events: Events, *, timeout: float) -> None:
        self._events = events
        self._timeout = timeout
        self._idle: list[_Worker] = []
        self._workers: weakref.WeakSet[_Worker] = weakref.WeakSet()  # Idle and busy ones.
        self._lock = Lock()
        self._slots = Lock(holders=os.cpu_count() or 1)
        self._after_start: list[Callable[[], None]] = []
        weakref.finalize(self, _end, self._idle)  # This also runs when the interpreter exits.

    def call(
        self, message: Mapping[str, Any], blocks: Mapping[str, bytes] | None = None
    ) -> frames.Frame:
        """Return the reply to a request.

        If another process kills the worker, the request is repeated in a new one, at most three times.
        A worker that has loaded another NVRTC than the request names is replaced.
        Raises `CompilerCrashError` if the worker crashes or is killed every time, and
        `CompilerTimeoutError` if it takes too long. An exception that ends the wait, such as Ctrl-C or
        `Cancelled`, also ends the worker.
        """
        request = frames.encode(message, blocks)
        # The search for NVRTC returns one that is already loaded, and workers started ahead are busy.
        new = message["do"] == "locate"
        killed = 0
        cancellation = cancel.current()
        with self._slots:
            while True:
                if cancellation is not None:
                    cancellation.check()
                try:
                    reply = self._ask(self._take(new=new), request)
                except CompilerCrashError as error:
                    if not error.killed:
                        raise
                    killed += 1
                    if killed > _RETRIES:
                        raise _killed(error, killed) from None
                else:
                    if reply is not None and reply.message.get("status") != "OTHER_LIBRARY":
                        return reply

    def _ask(self, worker: _Worker, request: bytes) -> frames.Frame | None:
        """Return the reply of one worker, or None if it had exited because it was idle."""
        try:
            reply = worker.call(request, self._timeout)
        except _IdleExitError:
            self._drop(worker, "idle")
            return None
        except BaseException as failure:
            self._drop(worker, f"{type(failure).__name__}: {failure}")
            raise
        status = reply.message.get("status")
        if status in _CLEAN:
            with self._lock:
                # Those that have compiled are used first: they have loaded all that a compile needs.
                self._idle.insert(0 if status is None else len(self._idle), worker)
        else:
            self._drop(worker, str(status))
        return reply

    def close(self) -> None:
        """End the idle workers."""
        with self._lock:
            _end(self._idle)

    def after_fork(self) -> None:
        """Forget the workers in a forked child: they belong to the parent."""
        for worker in list(self._workers):
            worker.abandon()
        self._workers.clear()
        self._idle.clear()

    def _take(self, *, new: bool) -> _Worker:
        """Return a worker that is not idle any more: a new one, or one of the idle ones."""
        while True:
            with self._lock:
                while self._idle and not new:
                    worker = self._idle.pop()
                    if worker.alive():
                        return worker
                    worker.end()  # It had exited because it was idle.
            scratch.sweep()
            worker = self._start()
            with self._lock:
                if worker in self._idle:  # Otherwise another thread has taken it.
                    self._idle.remove(worker)
                    return worker  # Even if it has died already: the request will report how.

    def _start(self) -> _Worker:
        """Start a worker in a thread of its own, add it to the idle ones and return it.

        Interrupts arrive in the main thread, where they could lose the process or its pipes inside
        `subprocess`. If the wait for the thread is interrupted, the worker is still added.
        """
        workers: list[_Worker] = []
        failures: list[BaseException] = []
        started = _thread.allocate_lock()
        started.acquire()

        def start() -> None:
            try:
                workers.append(self._add_worker())
            except BaseException as failure:
                failures.append(failure)
            finally:
                started.release()

        def start_all() -> None:
            start()
            while self._after_start:
                self._after_start.pop()()

        try:
            _thread.start_new_thread(start_all, ())
        except RuntimeError:  # No thread can be started, for example in an exit handler of Python 3.12.
            start()
        started.acquire()
        if failures:
            raise failures.pop()
        return workers[0]

    def _add_worker(self, *, preload: bool = False) -> _Worker:
        """Start a worker, add it to the idle ones and return it."""
        with no_fork:
            worker = _Worker(preload=preload)
            self._workers.add(worker)
            self._idle.append(worker)
        self._events.emit("worker", what="started", reason="")
        return worker

    def start_ahead(self, count: int, meanwhile: Callable[[], object]) -> None:
        """Let the next start of a worker be followed by that of others, which load NVRTC at once.

        All this happens in one thread, which then calls `meanwhile`. No request waits for it.
        """

        def start() -> None:
            with suppress(Exception):  # A request that needs a worker reports why none can be started.
                for _ in range(count):
                    self._add_worker(preload=True)
                meanwhile()

        self._after_start.append(start)

    def _drop(self, worker: _Worker, why: str) -> None:
        worker.end()
        scratch.sweep()
        self._events.emit("worker", what="ended", reason=why)


def _end(workers: list[_Worker]) -> None:
    while workers:
        workers.pop().end()


#: The statuses after which a worker can be reused. After a failed compile, header traces of NVRTC are
#: incomplete, so a failure ends its worker.
_CLEAN = (None, "NVRTC_SUCCESS", "SUCCESS")


def _killed(last: CompilerCrashError, tries: int) -> CompilerCrashError:
    return CompilerCrashError(
        f"the compiler was started {tries} times and killed each time: {last}",
        killed=True,
        hint="the kernel kills processes when memory runs out: see the kernel log",
    )


def _environment() -> dict[str, str]:
    """Return the environment of a worker, in which it imports the same modules as this process."""
    ours = environ()
    env = {name: ours[name] for name in _PASSED if name in ours}
    if sys.flags.no_user_site:
        env["PYTHONNOUSERSITE"] = "1"
    path = os.pathsep.join(os.path.abspath(place) for place in sys.path if place)
    return {**env, **_FIXED, "PYTHONPATH": path}


class _IdleExitError(Exception):
    """A worker exited because it was idle, just before it was used again."""


class _Worker:
    """One process and the pipes to it."""

    def __init__(self, *, preload: bool = False) -> None:
        self._served = False
        # The worker writes stderr to memory: a pipe that no one reads would block it.
        self._stderr = owned(os.memfd_create, "preheat-worker", os.MFD_CLOEXEC)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, *(["preload"] if preload else [])],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                cwd="/",
                env=_environment(),
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

    def call(self, request: bytes, allowed: float) -> frames.Frame:
        """Send the request and wait for the reply, for `allowed` seconds.

        Raises `Cancelled` when the compiles of this thread are cancelled meanwhile.
        """
        deadline = time.monotonic() + allowed
        cancellation = cancel.current()
        ready = select.poll()
        if cancellation is not None:
            ready.register(cancellation.descriptor, select.POLLIN)

        def wait(pipe: int, event: int) -> None:
            ready.register(pipe, event)
            try:
                while not ready.poll(min(max(deadline - time.monotonic(), 0), _LONGEST_WAIT) * 1000):
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
        view = memoryview(request)
        while view:
            try:
                view = view[os.write(requests, view) :]
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
            raise _IdleExitError
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
