"""PTX from NVRTC: of a program of cuda.core, and without a driver as cuda.core makes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from preheat.adapters.cuda_core.request import CompileRequest
from preheat.errors import AdapterError

__all__ = ["compile_to_ptx", "ptx_of"]


def compile_to_ptx(request: CompileRequest, log: Any) -> Any:
    """Compile a C++ program, write the log, and return an `ObjectCode` with its PTX.

    Raises `AdapterError` with the log when the compiler rejects the program.
    """
    import cuda.bindings.nvrtc as nvrtc
    import cuda.core

    options = request.options.as_bytes("nvrtc", "ptx")
    source = request.code.encode() if isinstance(request.code, str) else request.code
    handle = _check(nvrtc.nvrtcCreateProgram(source, request.options.name.encode(), 0, [], []))
    try:
        for name in request.names:
            _check(nvrtc.nvrtcAddNameExpression(handle, _encode(name)))
        (status,) = nvrtc.nvrtcCompileProgram(handle, len(options), options)
        text = _text(handle, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
        written = text.rstrip(b"\0").decode(errors="backslashreplace")
        if status:
            raise AdapterError(f"{request.label} does not compile for {request.arch}\n{written}")
        log.write(written)
        ptx = _text(handle, nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX)
        names = {
            name: _check(nvrtc.nvrtcGetLoweredName(handle, _encode(name))) for name in request.names
        }
    finally:
        nvrtc.nvrtcDestroyProgram(handle)
    return cuda.core.ObjectCode.from_ptx(ptx, name=request.options.name, symbol_mapping=names)


def ptx_of(program: Any) -> bytes:
    """Return the PTX from which NVRTC made the machine code of a program; nothing if it has none."""
    import cuda.bindings.nvrtc as nvrtc

    status, size = nvrtc.nvrtcGetPTXSize(program.handle)
    if status or not size:
        return b""
    return _text(program.handle, nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX).rstrip(b"\0")


def _text(handle: Any, size: Callable[..., Any], get: Callable[..., Any]) -> bytes:
    # NVRTC writes into the buffer. A bytes object of one byte is shared by the whole interpreter.
    buffer = bytearray(int(_check(size(handle))))
    _check(get(handle, buffer))
    return bytes(buffer)


def _encode(name: str | bytes) -> bytes:
    return name.encode() if isinstance(name, str) else name


def _check(answer: tuple[Any, ...]) -> Any:
    """Return the result of a call of NVRTC. Raises `AdapterError` for a status that is not 0."""
    status, *results = answer
    if status:
        raise AdapterError(f"NVRTC failed: {status.name}")
    return results[0] if results else None
