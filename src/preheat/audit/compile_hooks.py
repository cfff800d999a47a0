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
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from preheat.process.lazy import LazyModule

if TYPE_CHECKING:
    from preheat.audit.in_process import Reporter

    Function = Callable[..., Any]

if TYPE_CHECKING:
    from importlib import metadata
else:
    metadata = LazyModule("importlib.metadata")  # Its import takes longer than the rest.

__all__ = ["Guard", "SealedCompileError", "waiting"]


class _Call(NamedTuple):
    """The arguments of a call of a wrapped function."""

    args: tuple[Any, ...]
    more: dict[str, Any]

    def argument(self, index: int, name: str) -> Any:
        """Return an argument, which may be given by its name; None if there is none."""
        return self.args[index] if index < len(self.args) else self.more.get(name)


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
    newest: tuple[int, int] | None  # None where `wrap` itself looks at what it wraps
    wrap: Callable[[Any, Guard], None]
    hint: str


class Guard:
    """Times the compiles of one compiler, and refuses them in a sealed process.

    A compile inside another one is a part of it.
    """

    def __init__(self, compiler: str, hint: str, report: Reporter, timed: bool) -> None:
        self._compiler = compiler
        self._hint = hint
        self._report = report
        self._timed = timed
        self._inside = threading.local()

    def __call__(
        self,
        function: Function,
        name_of: Callable[[_Call], str],
        compiles: Callable[[_Call], bool] = lambda _: True,
    ) -> Function:
        """Return a function that reports or refuses its calls.

        `name_of` returns what a call compiles, and `compiles` whether it does.
        """

        @functools.wraps(function)
        def compile(*args: Any, **more: Any) -> Any:
            call = _Call(args, more)
            if hasattr(self._inside, "yes") or not compiles(call):
                return function(*args, **more)
            if not self._report.permit(self._compiler):
                raise SealedCompileError(
                    f"this process is sealed, so a compile by {self._compiler} was refused\n"
                    f"hint: {self._hint}"
                )
            started = time.monotonic()
            result = 1  # until it returns
            self._inside.yes = True
            try:
                returned = function(*args, **more)
                result = 0
                return returned
            finally:
                del self._inside.yes
                if self._timed:
                    self._report.compiled(self._compiler, name_of(call), started, result)

        return compile


def waiting(report: Reporter, *, timed: bool) -> dict[str, Callable[[Any], None]]:
    """Return the functions that wrap modules after their import, by the names of the modules.

    With `timed`, compiles are reported, and not only refusals.
    """

    guards = {hook.compiler: Guard(hook.compiler, hook.hint, report, timed) for hook in _HOOKS}

    def installer(hook: _Hook) -> Callable[[Any], None]:
        def install(module: Any) -> None:
            try:
                _require_version(hook)
                hook.wrap(module, guards[hook.compiler])
            except Exception as error:
                why = str(error) if isinstance(error, _UnknownVersionError) else repr(error)
                report({"event": "unhooked", "compiler": hook.compiler, "why": why})
            else:
                report.hooked(hook.compiler)

        return install

    return {hook.module: installer(hook) for hook in _HOOKS}


def _require_version(hook: _Hook) -> None:
    found = metadata.version(hook.package)
    numbers = re.match(r"(\d+)\.(\d+)", found)
    here = (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
    if here < hook.oldest or here > (hook.newest or here):
        until = f" to {_dotted(hook.newest)}" if hook.newest else " and newer"
        known = f"{hook.package} {_dotted(hook.oldest)}{until}"
        raise _UnknownVersionError(f"the audit knows {known}, and this is {found}")


def _dotted(numbers: tuple[int, int]) -> str:
    return ".".join(map(str, numbers))


def _wrap_warp(module: Any, guard: Guard) -> None:
    build_lto = module._build_lto_base

    @functools.wraps(build_lto)
    def guarded(symbol: str, compile: Function, *args: Any, **more: Any) -> Any:
        """Guard the compile alone: what is in the cache of Warp is found without it."""
        return build_lto(symbol, guard(compile, lambda _: str(symbol)), *args, **more)

    module.build_cuda = guard(module.build_cuda, lambda call: _file_name(call, 0, "cu_path"))
    module.build_cpu = guard(module.build_cpu, lambda call: _file_name(call, 1, "cpp_path"))
    module._build_lto_base = guarded


def _file_name(call: _Call, index: int, name: str) -> str:
    return os.path.basename(str(call.argument(index, name)))


def _wrap_cute(module: Any, guard: Guard) -> None:
    """Wrap both steps: passes that make GPU code, and LLVM, which compiles the host code around it.

    A refusal by the bindings below would reach the program as an error of CuTe about its source.
    """
    compiler = module.Compiler
    compiler.compile = guard(compiler.compile, lambda _: "GPU code")
    compiler.jit = guard(compiler.jit, lambda _: "host code")


def _wrap_cute_passes(module: Any, guard: Guard) -> None:
    module.PassManager.run = guard(module.PassManager.run, lambda _: "GPU code")


def _wrap_cute_engine(module: Any, guard: Guard) -> None:
    """Wrap LLVM, which compiles when an engine is made. The base class of the class does the same."""
    engine = module.ExecutionEngine
    engine.__init__ = guard(engine.__init__, lambda _: "host code")
    module._execution_engine.ExecutionEngine = engine


def _wrap_cute_compiler(module: Any, guard: Guard) -> None:
    module.Compiler.compile_to = guard(module.Compiler.compile_to, lambda _: "GPU and host code")


def _wrap_numba(module: Any, guard: Guard) -> None:
    """Wrap the compilers of functions. What is found in the cache of Numba does not come to them."""
    for name in ("compile_extra", "compile_ir"):
        function = getattr(module, name)
        if function.__code__.co_varnames[:2] != ("typingctx", "targetctx"):
            raise _UnknownVersionError(f"{name} of this Numba has other parameters")
        setattr(module, name, guard(function, _numba_name, _is_for_host))


def _is_for_host(call: _Call) -> bool:
    target = type(call.argument(1, "targetctx"))
    return any(cls.__module__ == "numba.core.cpu" for cls in target.__mro__)


def _numba_name(call: _Call) -> str:
    """Return the name of a function, or of its IR."""
    function = call.argument(2, "func") or call.more.get("func_ir")
    named = getattr(function, "func_id", function)
    return str(getattr(named, "func_name", getattr(named, "__name__", "")))


_EXPORT = "export the function ahead of time with `cute.compile(…).export_to_c`, and load it"
_AOT = "compile ahead of time with `wp.compile_aot_module`, or keep the directory of WARP_CACHE_PATH"
_CACHE = "use `@njit(cache=True)`, and keep the directory of NUMBA_CACHE_DIR"
_CUTE = ("nvidia-cutlass-dsl", (4, 3), (4, 8))
_HOOKS = (
    _Hook("Numba", "numba.core.compiler", "numba", (0, 57), None, _wrap_numba, _CACHE),
    _Hook("Warp", "warp._src.build", "warp-lang", (1, 10), (1, 19), _wrap_warp, _AOT),
    _Hook("CuTe", "cutlass.base_dsl.compiler", *_CUTE, _wrap_cute, _EXPORT),
    _Hook("CuTe", "cutlass._mlir.passmanager", *_CUTE, _wrap_cute_passes, _EXPORT),
    _Hook("CuTe", "cutlass._mlir.execution_engine", *_CUTE, _wrap_cute_engine, _EXPORT),
    _Hook(
        "CuTe", "cutlass.compiler", "nvidia-cutlass-dsl", (4, 6), (4, 8), _wrap_cute_compiler, _EXPORT
    ),
)
