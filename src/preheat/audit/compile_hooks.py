"""Wraps the functions by which libraries compile inside a process.

The audit library cannot see a compiler that is linked into a library. Here, calls of its functions
are timed and reported, and a sealed process refuses them. Nothing is wrapped in a version that is not
known, and the report then lists the library as not seen.

`sitecustomize` loads this file by its path, into every Python of an audited command. So it uses only
the standard library, and runs in Python 3.8.
"""

from __future__ import annotations

import functools
import os
import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from preheat.audit.in_process import Reporter

__all__ = ["Guard", "SealedCompileError", "waiting"]

Function = Callable[..., Any]


class SealedCompileError(RuntimeError):
    """A sealed process has refused a compile inside a library."""


class _UnknownVersionError(Exception):
    """A package has a version whose functions are not known."""


class _Hook(NamedTuple):
    """A module, and the function that wraps what compiles in it, for some versions of a package."""

    compiler: str  # its name in the table of `compiler_libraries.py`
    module: str
    package: str
    oldest: tuple[int, int]
    newest: tuple[int, int]
    wrap: Callable[[Any, Guard], None]
    hint: str


class Guard:
    """Times the compiles of one compiler, and refuses them in a sealed process."""

    def __init__(self, compiler: str, hint: str, report: Reporter, timed: bool) -> None:
        self._compiler = compiler
        self._hint = hint
        self._report = report
        self._timed = timed

    def __call__(self, function: Function, *, argument: int = -1, name: str = "") -> Function:
        """Return a function that reports or refuses its calls.

        Their name is `name`, or that of the file in a positional argument.
        """

        @functools.wraps(function)
        def compile(*args: Any, **more: Any) -> Any:
            if not self._report.permit(self._compiler):
                raise SealedCompileError(
                    f"this process is sealed, so a compile by {self._compiler} was refused\n"
                    f"hint: {self._hint}"
                )
            started = time.monotonic()
            result = 1  # until it returns
            try:
                returned = function(*args, **more)
                result = 0
                return returned
            finally:
                if self._timed:
                    file = str(args[argument]) if 0 <= argument < len(args) else ""
                    shown = name or os.path.basename(file)
                    self._report.compiled(self._compiler, shown, started, result)

        return compile


def waiting(report: Reporter, *, timed: bool) -> dict[str, Callable[[Any], None]]:
    """Return the functions that wrap modules after their import, by the names of the modules.

    With `timed`, compiles are reported, and not only refusals.
    """

    def installer(hook: _Hook) -> Callable[[Any], None]:
        def install(module: Any) -> None:
            try:
                _require_version(hook)
                hook.wrap(module, Guard(hook.compiler, hook.hint, report, timed))
            except Exception as error:
                why = str(error) if isinstance(error, _UnknownVersionError) else repr(error)
                report({"event": "unhooked", "compiler": hook.compiler, "why": why})
            else:
                report.hooked(hook.compiler)

        return install

    return {hook.module: installer(hook) for hook in _HOOKS}


def _require_version(hook: _Hook) -> None:
    from importlib.metadata import version

    found = version(hook.package)
    numbers = re.match(r"(\d+)\.(\d+)", found)
    known = numbers is not None and hook.oldest <= (int(numbers[1]), int(numbers[2])) <= hook.newest
    if not known:
        between = f"{_dotted(hook.oldest)} to {_dotted(hook.newest)}"
        raise _UnknownVersionError(f"the audit knows {hook.package} {between}, and this is {found}")


def _dotted(numbers: tuple[int, int]) -> str:
    return ".".join(map(str, numbers))


def _wrap_warp(module: Any, guard: Guard) -> None:
    build_lto = module._build_lto_base

    @functools.wraps(build_lto)
    def guarded(symbol: str, compile: Function, *args: Any, **more: Any) -> Any:
        """Guard the compile alone: what is in the cache of Warp is found without it."""
        return build_lto(symbol, guard(compile, name=symbol), *args, **more)

    module.build_cuda = guard(module.build_cuda, argument=0)
    module.build_cpu = guard(module.build_cpu, argument=1)
    module._build_lto_base = guarded


def _wrap_cute(module: Any, guard: Guard) -> None:
    """Wrap both steps: passes that make GPU code, and LLVM, which compiles the host code around it."""
    compiler = module.Compiler
    compiler.compile = guard(compiler.compile, name="GPU code")
    compiler.jit = guard(compiler.jit, name="host code")


def _wrap_cute_compiler(module: Any, guard: Guard) -> None:
    module.Compiler.compile_to = guard(module.Compiler.compile_to, name="GPU and host code")


_EXPORT = "export the function ahead of time with `cute.compile(…).export_to_c`, and load it"
_AOT = "compile ahead of time with `wp.compile_aot_module`, or keep the directory of WARP_CACHE_PATH"
_HOOKS = (
    _Hook("Warp", "warp._src.build", "warp-lang", (1, 10), (1, 19), _wrap_warp, _AOT),
    _Hook(
        "CuTe", "cutlass.base_dsl.compiler", "nvidia-cutlass-dsl", (4, 3), (4, 8), _wrap_cute, _EXPORT
    ),
    _Hook(
        "CuTe", "cutlass.compiler", "nvidia-cutlass-dsl", (4, 6), (4, 8), _wrap_cute_compiler, _EXPORT
    ),
)
