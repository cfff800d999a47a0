"""Kernels that are compiled in the background. The first use of a kernel waits for its compile."""

from __future__ import annotations

from typing import Any

from preheat.build.code import Code, compiled_code
from preheat.build.compile_lock import Attempt
from preheat.build.obtain import Build
from preheat.build.parallel import Task
from preheat.build.reload import TrackedFiles
from preheat.build.request import ModuleRequest
from preheat.devices.kernel import Kernel
from preheat.devices.launch import Launch
from preheat.devices.module import Module
from preheat.devices.session import Prepared, Session
from preheat.errors import PreheatError, SealedError, copy_error
from preheat.model.artifact import EntryPoint
from preheat.model.program import Program
from preheat.process.callsite import file_and_line

__all__ = ["PendingKernel", "pending_kernel"]


class _PendingRequest:
    """A requested kernel, and the task that finds or compiles its code.

    Wrong arguments and unreadable files raise errors at once.
    """

    def __init__(self, session: Session, request: ModuleRequest, name: str) -> None:
        self.session = session
        self.request = request
        self.name = name
        self.module_request = request.for_kernel(name)
        self.files: TrackedFiles | None = session.track_files(self.module_request)
        self.program: Program = self.module_request.program()
        self._build: Build | None = None
        self.task: Task[Code] = session.builder.background.submit(self._compile)

    def _compile(self, attempt: Attempt) -> Code:
        """Find or compile the code, in a thread of the builder. A later try skips the lookup."""
        if self._build is None:
            wanted = self.module_request
            result = self.session.find_code(self.program, wanted.arch, strict=wanted.strict)
            if isinstance(result, Code):
                return result
            self._build = result
        return compiled_code(self._build, self._build.obtain(attempt))

    def usable(self) -> bool:
        """Return whether an equal request can share this one: no file changed, and it did not fail."""
        changed = self.files is not None and self.files.changed()
        return not changed and self.task.error is None

    def wait(self) -> Prepared | None:
        """Wait for the code, and return it; None when the task was cancelled."""
        self.task.wait()
        if self.task.cancelled:
            return None
        return Prepared(self.program, self.files, self.task.outcome())

    def with_origin(self, error: PreheatError) -> PreheatError:
        """Return the error of a first use, with the line that requested the kernel."""
        error = error.naming(self.name) if isinstance(error, SealedError) else copy_error(error)
        file, line = file_and_line(self.task.site)
        error.add_note(f"the kernel {self.name} was requested with wait=False at {file}:{line}")
        return error


class PendingKernel(Kernel):
    """A kernel that may not be compiled yet. Its first use waits for the code and loads it.

    Until then it has none of the attributes of a kernel, so that the first access to one of them leads
    to `__getattr__`, which waits. Later accesses find the attributes.
    """

    def __init__(self, pending: _PendingRequest) -> None:
        self.__dict__["_pending"] = pending

    @property
    def pending(self) -> _PendingRequest | None:
        """The request, until the kernel is used."""
        return self.__dict__.get("_pending")

    def __getattr__(self, name: str) -> Any:
        pending = self.pending
        if pending is not None and not name.startswith(
            "__"
        ):  # Only Python and libraries look for those.
            self._load(pending)
        return object.__getattribute__(self, name)

    def _load(self, pending: _PendingRequest) -> None:
        """Wait for the code, and load the kernel."""
        session = pending.session
        session.context.require_alive(Launch.RECREATE)
        try:
            shared = session.kernel(pending.request, pending.name, pending.wait, self._fill)
            if shared is not self:
                self._fill(shared.module, shared.entry)
        except PreheatError as error:
            raise pending.with_origin(error) from None

    def _fill(self, module: Module, entry: EntryPoint) -> Kernel:
        Kernel.__init__(self, module, entry)
        self.__dict__.pop("_pending", None)
        return self

    def __repr__(self) -> str:
        pending = self.pending
        if pending is None:
            return super().__repr__()
        state = "being compiled"
        if pending.task.done:
            state = "compiled, not loaded yet" if pending.task.error is None else "cannot be compiled"
        where = f"{pending.program.label} on {pending.session.device.name}"
        return f"<Kernel {pending.name} of {where}: {state}>"


def pending_kernel(session: Session, request: ModuleRequest, name: str) -> Kernel:
    """Return a kernel without waiting for its compile; the same one for equal requests."""
    key = (request, name)
    loaded = session.kernels.get(key)
    if loaded is not None and loaded.current:
        return loaded.value
    session.context.require_alive()
    known = session.pending.get(key)
    if known is not None and known.pending is not None and known.pending.usable():
        return known
    kernel = session.pending[key] = PendingKernel(_PendingRequest(session, request, name))
    return kernel
