"""NVRTC, called through NVIDIA's bindings. Runs in the worker process only."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cuda.bindings import nvrtc

__all__ = ["CANARY", "Compiled", "compile_program", "opened_headers", "version_and_archs"]

#: NVRTC opens this header first in every compile. A trace without it is incomplete.
CANARY = "__nv_nvrtc_builtin_header.h"


class Compiled(NamedTuple):
    """The result of NVRTC. `cubin` and `ptx` are empty if it failed."""

    status: str
    log: str
    cubin: bytes = b""
    ptx: bytes = b""
    lowered: dict[str, str] = {}  # noqa: RUF012  (A NamedTuple default that is never changed.)


def compile_program(
    source: bytes,
    name: str,
    options: Sequence[str],
    *,
    names: Sequence[str],
    headers: Mapping[str, bytes],
) -> Compiled:
    """Compile one program to cubin and PTX."""
    result, program = nvrtc.nvrtcCreateProgram(
        source, name.encode(), len(headers), list(headers.values()), [h.encode() for h in headers]
    )
    if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        return Compiled(result.name, f"nvrtcCreateProgram failed: {result.name}")
    try:
        for expression in names:
            nvrtc.nvrtcAddNameExpression(program, expression.encode())
        encoded = [option.encode() for option in options]
        (result,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        log = _text(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
        if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            return Compiled(result.name, log)
        return Compiled(
            result.name,
            log,
            _bytes(program, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN),
            _bytes(program, nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX).rstrip(b"\0"),
            _lowered(program, names),
        )
    except LookupError as unknown:
        return Compiled("NVRTC_ERROR_NAME_EXPRESSION_NOT_VALID", f"{log}\n{unknown}".strip())
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _lowered(program: Any, names: Sequence[str]) -> dict[str, str]:
    """Return the mangled name of each expression, or raise `LookupError` if there is none."""
    found = {}
    for expression in names:
        _, lowered = nvrtc.nvrtcGetLoweredName(program, expression.encode())
        if lowered is None:  # The source ends inside a literal, so NVRTC did not read the expression.
            raise LookupError(f"__nv_name_map has no entry for {expression}")
        found[expression] = lowered.decode()
    return found


def version_and_archs() -> tuple[str, list[int]]:
    """Return the exact version, which is only in the banner of its PTX, and the architectures."""
    _, archs = nvrtc.nvrtcGetSupportedArchs()
    # NVRTC's own cache would initialize CUDA in this process, which is slow and hangs under debuggers.
    options = [f"--gpu-architecture=compute_{archs[0]}", "--no-cache"]
    banner = compile_program(b"", "/preheat/version.cu", options, names=(), headers={}).ptx
    found = re.search(rb"release [\d.]+, V([\d.]+)", banner)
    if found:
        return found[1].decode(), list(archs)
    _, major, minor = nvrtc.nvrtcVersion()
    return f"{major}.{minor}", list(archs)


def opened_headers(trace: Path) -> list[str] | None:
    """Return the headers that a compile opened, under its names and once each, or None if unknown."""
    try:
        events = json.loads(trace.read_bytes())["traceEvents"]
        opened = [e["args"]["detail"] for e in events if e.get("name") == "Processing Header File"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if CANARY not in opened:
        return None
    return [name for name in dict.fromkeys(opened) if name != CANARY]


def _bytes(program: Any, size_of: Any, get: Any) -> bytes:
    result, size = size_of(program)
    buffer = b" " * size
    (result,) = get(program, buffer)
    return buffer if result == nvrtc.nvrtcResult.NVRTC_SUCCESS else b""


def _text(program: Any, size_of: Any, get: Any) -> str:
    # The logs of the front end and of the assembler are joined with a NUL byte.
    return _bytes(program, size_of, get).replace(b"\0", b"").decode("utf-8", "replace")
