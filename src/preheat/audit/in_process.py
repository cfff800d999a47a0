"""The Python side of an audit: it runs at the start of every Python of an audited command.

`sitecustomize` loads it by its path, so that it works in a Python that has no preheat. It uses nothing
but the standard library, and two more files that `sitecustomize` loads in the same way: the import hook
and the hooks of compilers. It lets the audit library name Python lines, and reports compiles of Triton
and of other libraries.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import functools
import json
import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import ModuleType

    from preheat.adapters.import_hook import ImportHook

__all__ = ["Reporter", "start"]

# A number that nothing raises. `faulthandler` is registered for it, and its handler is called directly.
_SIGNAL = signal.SIGRTMIN + 13
_TRITON = "triton.compiler.compiler"


def start(env: Mapping[str, str], hook: type[ImportHook], compile_hooks: ModuleType) -> None:
    """Connect this interpreter to the audit that `env` describes.

    `hook` is the class `ImportHook`, and `compile_hooks` is the module with that name. A part that
    fails is left out and reported, and the program continues.
    """
    report = Reporter(env.get("PREHEAT_AUDIT", ""))
    with report.failures("Python lines"):
        # It is loaded already, unless the program has another LD_PRELOAD.
        report.library = ctypes.CDLL(env["PREHEAT_AUDIT_LIBRARY"])
        _name_lines(report.library)
    timed = "PREHEAT_AUDIT_ONLY" not in env
    waiting = compile_hooks.waiting(report, timed=timed) if report.library is not None else {}
    if timed:

        def wrap_triton(module: Any) -> None:
            with report.failures("compiles by Triton"):
                _wrap_triton(module, report)

        waiting[_TRITON] = wrap_triton
    if waiting:
        sys.meta_path.insert(0, hook(waiting))


def _name_lines(library: ctypes.CDLL) -> None:
    """Give the audit library the handler of `faulthandler`, which writes frames without the GIL."""
    file = library.preheat_audit_python_file(_SIGNAL)
    if file >= 0:
        faulthandler.register(_SIGNAL, file=file, all_threads=False, chain=False)
        library.preheat_audit_python(_SIGNAL)
        atexit.register(library.preheat_audit_python_ends)


class Reporter:
    """Appends events to the file of this process, by the audit library if it could be loaded."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self.library: Any = None

    def __call__(self, fields: dict[str, Any]) -> None:
        event = {"time": round(time.monotonic(), 6), "pid": os.getpid(), **fields}
        line = f"\n{json.dumps(event)}\n".encode("utf-8", "backslashreplace")
        if self.library is not None:
            self.library.preheat_audit_append(line, ctypes.c_size_t(len(line)))
            return
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        name = f"{os.getpid()}-{os.geteuid()}.jsonl"
        try:
            file = os.open(os.path.join(self._directory, name), flags, 0o600)
            try:
                os.write(file, line)
            finally:
                os.close(file)
        except OSError:
            self._lose()

    def _lose(self) -> None:
        """Note that events are missing, by an empty file."""
        name = f"{os.getpid()}-{os.geteuid()}.lost"
        with suppress(OSError):  # The audit has ended, and its directory is gone.
            os.mknod(os.path.join(self._directory, name), 0o600 | stat.S_IFREG)

    def hooked(self, compiler: str) -> None:
        """Report that the compiles of a library are seen from now on."""
        self.library.preheat_audit_hooked(compiler.encode())

    def permit(self, compiler: str) -> bool:
        """Return whether a compile may run. A sealed process reports it as refused."""
        return bool(self.library.preheat_audit_permit(compiler.encode(), _frames(3).encode()))

    def compiled(self, compiler: str, name: str, started: float, result: int) -> None:
        """Report a compile that a wrapped function of a library has made."""
        seconds = round(time.monotonic() - started, 6)
        event = {"event": "compile", "compiler": compiler, "seconds": seconds, "result": result}
        self({**event, "name": name, "site": _frames(3)})

    @contextmanager
    def failures(self, what: str) -> Iterator[None]:
        """Report an error of the block: what the audit does not see because of it."""
        try:
            yield
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            self({"event": "unseen", "what": what, "why": why})


# Triton


def _wrap_triton(module: Any, report: Reporter) -> None:
    """Report each call of `compile` that makes IR, which a call that finds a file does not."""
    made = threading.local()
    wrapped: set[type] = set()

    def wrap_source(source: Any) -> None:
        """Wrap the function by which a source makes IR. Gluon has a class of sources of its own."""
        owner: Any = next((cls for cls in type(source).__mro__ if "make_ir" in vars(cls)), None)
        if owner is None or owner in wrapped:
            return
        wrapped.add(owner)
        make_ir = owner.make_ir

        def counted(*args: Any, **more: Any) -> Any:
            made.any = True
            return make_ir(*args, **more)

        owner.make_ir = counted

    original = module.compile

    def compile(src: Any, *args: Any, **more: Any) -> Any:
        wrap_source(src)
        made.any = False
        started = time.monotonic()
        result = 1  # until it returns
        try:
            compiled = original(src, *args, **more)
            result = 0
            return compiled
        finally:
            if made.any:
                seconds = round(time.monotonic() - started, 6)
                event = {"event": "compile", "compiler": "Triton", "seconds": seconds, "result": result}
                report({**event, "name": str(getattr(src, "name", "")), "site": _frames()})

    module.compile = functools.wraps(original)(compile)


def _frames(above: int = 2) -> str:
    """Return the frames above this one, innermost first, in the words of `faulthandler`."""
    lines: list[str] = []
    frame: Any = sys._getframe(above)
    while frame is not None and len(lines) < 60:
        code = frame.f_code
        lines.append(f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}')
        frame = frame.f_back
    return "\n".join(lines)
