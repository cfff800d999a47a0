"""Compiles of cuda.core: looked up in the store first, and stored afterwards.

`Program` is a class written in C, so its methods cannot be replaced. But it calls two functions of
Python modules by name: one that computes a key, and one that compiles. Both are replaced here.
"""

from __future__ import annotations

import importlib
import io
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from preheat.adapters.base import Connection, LastKey, NotKeyableError, ThreadState
from preheat.adapters.cuda_core.headers import headers_digest
from preheat.adapters.cuda_core.nvrtc import ptx_of
from preheat.adapters.cuda_core.request import CompileRequest
from preheat.build.foreign_store import ForeignStore
from preheat.model.foreign import ForeignEntry
from preheat.process.lazy import LazyModule
from preheat.process.locks import Lock
from preheat.toolchain.binaries.ptx_section import attach_ptx, detach_ptx, is_executed

if TYPE_CHECKING:
    from preheat.adapters.cuda_core import program_cache
else:
    program_cache = LazyModule("preheat.adapters.cuda_core.program_cache")  # It imports this module.

__all__ = [
    "CODE",
    "Compiled",
    "code_to_load",
    "compile_by_cuda_core",
    "compile_with_ptx",
    "connect",
    "connection_of",
    "obtain_code",
    "request_of_key",
    "use_for_next_compile",
    "use_for_programs",
]  # fmt: skip

#: The files of an entry. NVRTC has made the PTX on the way to machine code.
CODE, NAMES, LOG, PTX = "code", "names.json", "log", "ptx"


class Compiled(NamedTuple):
    """The result of a compile."""

    code: Any  # an `ObjectCode`
    ptx: bytes = b""  # that NVRTC has made on the way to machine code


#: Compiles a program, and writes its log to the argument.
Compile = Callable[[Any], Compiled]

_connecting = Lock()
_stock: dict[str, Callable[..., Any]] = {}  # the functions of cuda.core, by name
_everywhere: ForeignStore | None = None


class _Work(ThreadState):
    """What a thread is doing between the calls that cuda.core makes."""

    probing = False
    store: ForeignStore | None = None  # for the next compile


_work = _Work()
_last: LastKey[CompileRequest] = LastKey()


class _SeenError(Exception):
    """Carries the request of a program out of cuda.core."""

    def __init__(self, request: CompileRequest) -> None:
        self.request = request


class _ChangedError(Exception):
    """A header changed while a program was compiled; `code` is the result."""

    def __init__(self, code: Any) -> None:
        self.code = code


def use_for_programs(store: ForeignStore) -> None:
    """Let every program of this process use `store`."""
    global _everywhere
    connect()
    _everywhere = store


def use_for_next_compile(store: ForeignStore) -> None:
    """Let the next compile of this thread use `store`."""
    _work.store = store


def request_of_key(key: bytes) -> CompileRequest | None:
    """Return the request of a key if it is the last that cuda.core computed in this thread."""
    return _last.request_of(key)


def connect() -> None:
    """Replace the functions of cuda.core. A second call does nothing."""
    # While cuda.core is being imported, it is not an attribute of `cuda` yet.
    keys = importlib.import_module("cuda.core.utils._program_cache")
    programs = importlib.import_module("cuda.core._program")
    with _connecting:
        if _stock:
            return
        _stock["key"] = keys.make_program_cache_key
        _stock["compile"] = programs._program_compile_uncached
        vars(keys)["make_program_cache_key"] = _make_program_cache_key
        vars(programs)["_program_compile_uncached"] = _compile


def connection_of(store: ForeignStore) -> Connection:
    """Return the connection of cuda.core to a store."""
    return Connection(store, importlib.import_module("cuda.core"))


def compile_by_cuda_core(program: Any, target: str, names: Any, logs: Any) -> Any:
    """Compile a program, whatever a store has."""
    return _stock["compile"](program, target, names, logs)


def compile_with_ptx(program: Any, request: CompileRequest, logs: Any) -> Compiled:
    """Compile a program as `compile_by_cuda_core` does. NVRTC has the PTX without another compile."""
    code = compile_by_cuda_core(program, request.target, request.names, logs)
    from_nvrtc = request.code_type == "c++" and request.target == "cubin"
    return Compiled(code, ptx_of(program) if from_nvrtc else b"")


def _make_program_cache_key(
    *,
    code: str | bytes,
    code_type: str,
    options: Any,
    target_type: str,
    name_expressions: Any = (),
    extra_digest: bytes | None = None,
) -> bytes:
    """Return cuda.core's key, and remember its request."""
    request = CompileRequest(code, code_type, options, target_type, tuple(name_expressions))
    if _work.probing:
        raise _SeenError(request)
    key: bytes = _stock["key"](
        code=code, code_type=code_type, options=options, target_type=target_type,
        name_expressions=name_expressions, extra_digest=extra_digest,
    )  # fmt: skip
    _last.remember(key, request)
    return key


def _compile(program: Any, target_type: str, name_expressions: Any, logs: Any) -> Any:
    """Compile for `Program.compile`, through the store that is in use."""
    store, _work.store = _work.store or _everywhere, None
    if store is None:
        return compile_by_cuda_core(program, target_type, name_expressions, logs)
    request = _request_of(program, target_type, name_expressions)
    return obtain_code(store, request, partial(compile_with_ptx, program, request), logs)


def _request_of(program: Any, target: str, names: Any) -> CompileRequest:
    """Return the request of a program, which it passes only to the function that computes a key."""
    import cuda.core

    try:
        with _work.setting(probing=True):
            cuda.core.Program.compile(program, target, cache=program_cache.Probe())
    except _SeenError as seen:
        return replace(seen.request, names=tuple(names))
    raise AssertionError("cuda.core computed no key")


def obtain_code(
    store: ForeignStore, request: CompileRequest, compile: Compile, logs: Any = None
) -> Any:
    """Return the `ObjectCode` of a request: stored, or compiled and stored.

    A request that no key can describe is compiled but not stored. Raises `SealedError` in a sealed
    process that would have to compile.
    """
    connection = connection_of(store)
    try:
        identity = request.identity
    except NotKeyableError as why:
        return _compile_uncached(connection, request, compile, logs, str(why))
    try:
        entry = connection.obtain(identity, partial(_make_files, request, compile), request.row)
    except _ChangedError as changed:
        connection.uncached(identity, "a header changed while it was compiled")
        return changed.code
    return _object_code(entry, request, logs)


def _make_files(request: CompileRequest, compile: Compile) -> Mapping[str, bytes]:
    log = io.StringIO()
    code, ptx = compile(log)
    if request.headers and headers_digest(request.code, request.options) != request.headers:
        raise _ChangedError(code)
    names = [[_name_row(name), _text(lowered)] for name, lowered in code.symbol_mapping.items()]
    files = {
        CODE: detach_ptx(bytes(code.code)),  # Entries are the same on the CPU driver.
        NAMES: json.dumps(names).encode(),
        LOG: log.getvalue().encode(),
        PTX: ptx,
    }
    return {name: content for name, content in files.items() if content not in (b"", b"[]")}


def _compile_uncached(
    connection: Connection, request: CompileRequest, compile: Compile, logs: Any, why: str
) -> Any:
    reason = f"uncacheable: {why}"
    connection.permit(request.unkeyed, reason)
    connection.missed(request.unkeyed, reason)
    compiled = compile(logs)
    connection.uncached(request.unkeyed, why)
    return compiled.code


def _object_code(entry: ForeignEntry, request: CompileRequest, logs: Any) -> Any:
    """Return the code of an entry as cuda.core would have returned it, with its log."""
    import cuda.core

    names = json.loads(entry.files.get(NAMES, b"[]"))
    symbols = {_name_of(row): lowered.encode() for row, lowered in names}
    if logs is not None and LOG in entry.files:
        logs.write(entry.files[LOG].decode())
    make = getattr(cuda.core.ObjectCode, f"from_{request.target}")
    return make(code_to_load(entry, request), name=request.options.name, symbol_mapping=symbols)


def code_to_load(entry: ForeignEntry, request: CompileRequest | None) -> bytes:
    """Return the code of an entry. On the CPU driver, machine code has its PTX, as after a compile."""
    code = entry.files.get(CODE, b"")
    ptx = entry.files.get(PTX, b"")
    if request is not None and (request.code_type, request.target) == ("ptx", "cubin"):
        ptx = request.code if isinstance(request.code, bytes) else request.code.encode()
    return attach_ptx(code, ptx) if ptx and is_executed() else code


# cuda.core looks a name expression up by the object that it was given: text, or bytes.


def _name_row(name: str | bytes) -> list[str]:
    return ["text", name] if isinstance(name, str) else ["bytes", name.decode()]


def _name_of(row: list[str]) -> str | bytes:
    kind, name = row
    return name if kind == "text" else name.encode()


def _text(lowered: str | bytes) -> str:
    return lowered if isinstance(lowered, str) else lowered.decode()
