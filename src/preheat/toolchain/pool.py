"""A pool of compiler processes, which are reused and replaced after any failure."""

from __future__ import annotations

import _thread
import os
import sys
import weakref
from collections.abc import Mapping
from typing import Any

from preheat.errors import CompilerCrashError
from preheat.model.config import environ
from preheat.model.events import Events
from preheat.process.locks import Lock, no_fork
from preheat.process.threads import current_cancellation, released
from preheat.toolchain import frames, scratch
from preheat.toolchain.locate import SEARCH_VARIABLES
from preheat.toolchain.process import IdleExitError, WorkerProcess

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

_RETRIES = 3  # How often a compile is repeated because another process killed the compiler.


class WorkerPool:
    """Runs requests in worker processes: in an idle one, or in a new one if none is idle.

    Safe from any thread and after fork. The number of concurrent compiles is limited to the CPU count.
    """

    def __init__(self, events: Events, *, timeout: float) -> None:
        self._events = events
        self._timeout = timeout
        self._idle: list[WorkerProcess] = []
        self._workers: weakref.WeakSet[WorkerProcess] = weakref.WeakSet()  # Idle and busy ones.
        self._lock = Lock()
        self._max_workers = os.cpu_count() or 1
        self._slots = Lock(holders=self._max_workers)
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
        # The search would return an NVRTC that is already loaded.
        new = message["do"] == "locate"
        killed = 0
        cancellation = current_cancellation()
        with self._slots:
            while True:
                if cancellation is not None:
                    cancellation.check()
                worker = self._take(new=new)
                worker.send(request)
                try:
                    reply = self._receive(worker)
                except CompilerCrashError as error:
                    if not error.killed:
                        raise
                    killed += 1
                    if killed > _RETRIES:
                        raise _kill_error(error, killed) from None
                else:
                    if reply is not None and reply.message.get("status") != "OTHER_LIBRARY":
                        return reply

    def _receive(self, worker: WorkerProcess) -> frames.Frame | None:
        """Return the reply of one worker, or None if it had exited because it was idle."""
        try:
            reply = worker.receive(self._timeout)
        except IdleExitError:
            self._drop(worker, "idle")
            return None
        except BaseException as failure:
            self._drop(worker, f"{type(failure).__name__}: {failure}")
            raise
        if self._is_reusable(worker, reply):
            with self._lock:
                self._idle.append(worker)
        return reply

    def _is_reusable(self, worker: WorkerProcess, reply: frames.Frame) -> bool:
        """Return whether a worker can take another request after this reply. If not, end it."""
        status = reply.message.get("status")
        if status in _CLEAN:
            return True
        self._drop(worker, str(status))
        return False

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

    def _take(self, *, new: bool) -> WorkerProcess:
        """Return a worker, which is then busy: a new one, or one that was idle."""
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
                    return worker  # It may have died already. Then the request reports how.

    def _start(self) -> WorkerProcess:
        """Start a worker in a separate thread, add it to the idle ones and return it.

        Interrupts arrive in the main thread, where they could lose the process or its pipes inside
        `subprocess`. If the wait for the thread is interrupted, the worker is still added.
        """
        workers: list[WorkerProcess] = []
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

        try:
            _thread.start_new_thread(start, ())
        except RuntimeError:  # No thread can be started, for example in an exit handler of Python 3.12.
            start()
        with released():
            started.acquire()
        if failures:
            raise failures.pop()
        return workers[0]

    def _add_worker(self) -> WorkerProcess:
        """Start a worker, add it to the idle ones and return it."""
        with no_fork:
            worker = WorkerProcess(_environment())
            self._workers.add(worker)
            self._idle.append(worker)
        self._events.emit("worker", what="started", reason="")
        return worker

    def _drop(self, worker: WorkerProcess, why: str) -> None:
        worker.end()
        scratch.sweep()
        self._events.emit("worker", what="ended", reason=why)


def _end(workers: list[WorkerProcess]) -> None:
    while workers:
        workers.pop().end()


#: The statuses after which a worker can be reused. After a failed compile, header traces of NVRTC are
#: incomplete, so a failure ends its worker.
_CLEAN = (None, "NVRTC_SUCCESS", "SUCCESS")


def _kill_error(last: CompilerCrashError, tries: int) -> CompilerCrashError:
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
    places = [os.path.abspath(place) for place in sys.path if place]
    # The directory of the program is in the path, and may have a module that is called `glob`.
    places.sort(key=_is_standard, reverse=True)
    return {**env, **_FIXED, "PYTHONPATH": os.pathsep.join(places)}


def _is_standard(place: str) -> bool:
    """Return whether a directory has the standard library of Python, and nothing else."""
    standard = os.path.dirname(os.__file__)
    return place in (standard, os.path.join(standard, "lib-dynload"))
