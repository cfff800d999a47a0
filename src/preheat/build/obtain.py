"""Obtain an entry: look it up, or make it, once for all threads, processes and hosts that need it."""

from __future__ import annotations

import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

from preheat.build.compile_lock import Attempt, CompileLock, CompileLocks, WouldWait
from preheat.build.lookup import Hit, Miss
from preheat.build.request import Request
from preheat.errors import (
    CompileError,
    PreheatError,
    ToolchainChangedError,
    UnknownEntryError,
    copy_error,
)
from preheat.model.arch import Arch
from preheat.model.config import SealMode
from preheat.model.events import Events
from preheat.process.callsite import caller
from preheat.process.lazy import LazyModule

if TYPE_CHECKING:
    from preheat.build import refusal
    from preheat.build.builder import Builder
else:
    refusal = LazyModule("preheat.build.refusal")  # Only a sealed process needs it.

__all__ = ["Build", "Failure", "Failures", "Obtainer"]

T = TypeVar("T")
_JOURNAL_COMPILES = 0.2  # seconds between writes of the counters; compiles may run on many threads
_MAX_FAILURES = 1024


class Obtainer(Generic[T]):
    """Obtains one entry. A subclass says how to look it up and how to make it.

    Attributes:
        locks: They let only one thread, process and host make the entry.
        digest: The digest of the entry's key.
        flight_key: The key under which threads share what one of them makes. None if nothing may be
            shared, because no key describes the entry.
        missing: The entry was looked up, is not stored, and may be made.
    """

    locks: CompileLocks
    digest: str
    flight_key: Hashable
    missing = False

    def obtain(self, attempt: Attempt | None = None) -> T:
        """Return the stored entry, or make it.

        Of all threads, processes and hosts that need it, one makes it, and the others wait for it. With
        `attempt`, raise `WouldWait` instead of waiting. A later call continues.

        Raises:
            SealedError: The entry is not stored, and this process is sealed.
        """
        if not self.missing:
            entry = self.look()
            if entry is not None:
                self.report(entry)
                return entry
            self.permit()  # Before a compiler is needed: a sealed process may have none.
            self.missing = True
        key = self.flight_key
        if key is None:
            entry = self.make(None)
        else:
            if attempt is not None and self.locks.flights.in_progress(key):
                raise WouldWait
            make = partial(self._make_once, attempt)
            entry = self.locks.flights.run(key, make, title=self.digest)
        self.report(entry)
        return entry

    def _make_once(self, attempt: Attempt | None) -> T:
        """Make the entry, unless another process or host does so first."""
        self.refuse_known()
        lock = self.locks.begin(self.digest, sys._getframe(), attempt)
        try:
            entry = lock.acquire(self.look)
            return self.make(lock) if entry is None else entry
        except Exception:
            lock.expect_no_entry()
            raise
        finally:
            lock.release()

    # What a subclass defines

    def look(self, *, local: bool = False) -> T | None:
        """Return the stored entry, or None. With `local`, search only this machine."""
        raise NotImplementedError

    def permit(self) -> None:
        """Raise `SealedError` if this process is sealed."""
        raise NotImplementedError

    def make(self, lock: CompileLock | None) -> T:
        """Make and store the entry. `lock` is held; it is None if no key describes the entry."""
        raise NotImplementedError

    def refuse_known(self) -> None:
        """Raise the error of an earlier call in this process that would only be repeated."""

    def report(self, entry: T) -> None:
        """Report that the caller has got the entry."""


class Build(Obtainer[Hit]):
    """Compiles one program that is not stored, once.

    Attributes:
        request: The program, and the architecture that it is compiled for.
        uses_older_arch: `choose_arch` has chosen another architecture than the requested one.
    """

    def __init__(
        self,
        builder: Builder,
        request: Request,
        miss: Miss,
        choose_arch: Callable[[Arch], Arch] | None = None,
        *,
        record: bool = True,
    ) -> None:
        """`miss` says why the request has to be compiled.

        `choose_arch` returns the architecture to compile for, if it is another one. It may need a
        compiler, and raises an error if nothing can be compiled. With `record`, emit a `request` event.

        Raises `SealedError` if this process is sealed, and the errors of `choose_arch`.
        """
        self.locks = builder._locks
        self.request = request
        self.missing = True
        self.uses_older_arch = False
        self._builder = builder
        self._record = record
        self._miss = miss
        self._relocated = False
        self.permit()
        arch = request.arch if choose_arch is None else choose_arch(request.arch)
        if arch != request.arch:
            self.request = Request(request.program, arch, builder.toolchain)
            self.uses_older_arch = True
            self.missing = False  # Its code for that architecture may be stored.

    @property
    def digest(self) -> str:  # type: ignore[override]
        """The digest of the request."""
        return self.request.digest

    @property
    def flight_key(self) -> Hashable:  # type: ignore[override]
        """The key under which threads share the compile."""
        return None if self.request.program.uncacheable else self.request.flight_key

    def look(self, *, local: bool = False) -> Hit | None:
        """Return the stored code for exactly the architecture of the request, or None."""
        result = self._builder._find_and_count(self.request, local=local)
        if isinstance(result, Hit):
            return result
        self._miss = result
        return None

    def permit(self) -> None:
        """Raise `SealedError` if this process is sealed and compiles nothing."""
        mode = self._builder.sealed
        if mode is SealMode.ERROR:
            self._report_sealed(mode)

    def refuse_known(self) -> None:
        """Raise the error of a program that the compiler has rejected in this process."""
        self._builder._failures.raise_known(self.request)

    def report(self, entry: Hit) -> None:
        """Emit a `request` event, which recordings use."""
        if self._record:
            self._builder._emit_request(self.request, entry)

    # Compiling

    def make(self, lock: CompileLock | None) -> Hit:
        """Compile the program. `lock` lets other hosts know if there will be no entry to wait for."""
        builder, request = self._builder, self.request
        if lock is not None:
            builder.events.emit("miss", reason=self._miss.reason, **_fields(request))
        mode = builder.sealed
        if mode is not SealMode.OFF:
            self._report_sealed(mode)
        started = time.perf_counter()
        compiler = builder._compiler
        try:
            compiled, state = compiler.run(request)
        except ToolchainChangedError:  # The compiler was upgraded while this process was running.
            if self._relocated:
                raise
            return self._make_with_new_compiler(lock)
        except (CompileError, UnknownEntryError) as error:
            seconds = time.perf_counter() - started
            builder.events.emit("reject", seconds=seconds, **_fields(request))
            builder._failures.remember(request, error)
            raise
        artifact = compiler.keep(request, compiled, state)
        if lock is not None and lock.lease is not None:
            if compiler.untracked(artifact):
                lock.expect_no_entry()
            elif artifact.digest != lock.digest:
                lock.expect_entry(artifact.digest)
        builder._counters.write(_JOURNAL_COMPILES)
        return Hit(artifact, "compiler")

    def _make_with_new_compiler(self, lock: CompileLock | None) -> Hit:
        """Find or compile the program under its new key, which names the new compiler."""
        builder = self._builder
        self._relocated = True
        builder.toolchain.relocate()
        self.request = Request(self.request.program, self.request.arch, builder.toolchain)
        return self.look() or self.make(lock)

    # Sealing

    def _report_sealed(self, mode: SealMode) -> None:
        """Report a program that this sealed process would have to compile.

        Raise `SealedError`, except in mode "warn".
        """
        builder, request = self._builder, self.request
        where = {"program": request.program.label, "arch": str(request.arch), "caller": caller()}
        builder.events.emit("sealed", mode=mode.name.lower(), reason=self._miss.reason, **where)
        if mode is SealMode.WARN:
            return
        builder._counters.write()  # A forked child may end without running exit handlers.
        raise refusal.explain_miss(builder, request, self._miss, where)


def _fields(request: Request) -> dict[str, str]:
    """Return the fields that every event about a request has."""
    return {"key": request.digest, "program": request.program.label, "arch": str(request.arch)}


# Rejected programs


class Failure:
    """A rejected program: the error, how often it was requested, and when it first failed."""

    __slots__ = ("count", "error", "first")

    def __init__(self, error: PreheatError, count: int, first: float) -> None:
        self.error = error
        self.count = count
        self.first = first


class Failures:
    """The rejected programs of this process, by the digest of their request."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self.by_digest: OrderedDict[str, Failure] = OrderedDict()

    def remember(self, request: Request, error: PreheatError) -> None:
        """Remember a rejection, unless something other than the program may have caused it."""
        if request.program.may_include or request.program.uncacheable:
            return
        self.by_digest[request.digest] = Failure(error, 1, time.time())
        while len(self.by_digest) > _MAX_FAILURES:
            self.by_digest.popitem(last=False)

    def raise_known(self, request: Request) -> None:
        """Raise the error of an earlier compile of the same request, if there was one."""
        failure = self.by_digest.get(request.digest)
        if failure is None:
            return
        failure.count += 1
        label = request.program.label
        self._events.emit("recall", key=request.digest, program=label, count=failure.count)
        raise copy_error(failure.error, count=failure.count)
