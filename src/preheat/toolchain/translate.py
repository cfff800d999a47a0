"""One compile: make the request to a worker and interpret its reply."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from preheat.errors import (
    CompileError,
    CompilerCrashError,
    Diagnostic,
    InputError,
    TargetError,
    ToolchainChangedError,
    ToolchainError,
    UnknownEntryError,
)
from preheat.model import ptx
from preheat.model.arch import Arch, mismatch
from preheat.model.artifact import EntryPoint
from preheat.model.program import Program
from preheat.toolchain import frames, lint, report, signature
from preheat.toolchain.advice import advice, advice_about_path
from preheat.toolchain.pool import WorkerPool

__all__ = [
    "Compiled",
    "accept",
    "assemble",
    "assembler_target",
    "compile_cuda",
    "require_loadable",
]

#: The statuses with which a compiler rejects a program. Any other one is a failure of the compiler.
_REJECTED = {
    "NVRTC_ERROR_COMPILATION",
    "NVRTC_ERROR_INVALID_OPTION",
    "NVRTC_ERROR_NAME_EXPRESSION_NOT_VALID",
    "ERROR_UNRECOGNIZED_OPTION",
    "ERROR_PTX_COMPILE",
    "ERROR_INVALID_INPUT",
    "ERROR_INCORRECT_INPUT_TYPE",
}
_EXECUTABLE = 2  # The type of a linked ELF file.
_UNKNOWN_ARCH = {"ERROR_UNSUPPORTED_ARCH", "ERROR_UNRECOGNIZED_ARCH"}


@dataclass(frozen=True, slots=True)
class Compiled:
    """The result of a compile. `opened` is None if the headers are unknown."""

    cubin: bytes
    ptx: bytes
    entries: tuple[EntryPoint, ...]
    names: Mapping[str, str]
    log: str
    timing: str
    seconds: float
    build: str  # Of the compiler that ran.
    opened: tuple[str, ...] | None
    templates: tuple[str, ...] = ()  # The kernel templates that the source declares.
    parts_seconds: float = 0.0  # The compiles of linked parts, which may have run earlier.


def compile_cuda(
    pool: WorkerPool, library: str, program: Program, arch: Arch, roots: Mapping[str, str]
) -> Compiled:
    """Compile CUDA C++ with the NVRTC in the file `library`.

    Raises `CompileError` if the compiler rejects the program, `ToolchainError` if it fails itself.
    """
    for directory in program.include:
        if not Path(directory).is_dir():
            raise InputError(f"{program.label}: include directory {directory} does not exist")
    probes = signature.probes(program)
    unknown: dict[str, str] = {}  # Why kernels have no probe.
    others: dict[str, str] | None = None
    while True:
        message, blocks = _request(library, program, arch, roots, probes)
        try:
            reply = pool.call(message, blocks)
        except CompilerCrashError as error:
            reply = _call_without_trace(pool, message, blocks, error)
        try:
            return _interpret(reply, program, arch, roots, probes, unknown)
        except CompileError as error:
            _require_names(program, probes, error.rows)
            # Probes are derived by scanning the source, and may be wrong.
            if not probes or not any(p in error.log for p in ("__preheat_", "__nv_name_map")):
                raise
            messages = report.rejected_expressions(error.rows)
            rejected = {name: messages[p] for name, p in probes.items() if p in messages}
            if not rejected:
                unknown = dict.fromkeys(probes, _why_no_probe(error))
                probes = {}
                continue
        for name, why in rejected.items():
            unknown.setdefault(name, signature.explain_unknown(name, why))
        others = signature.cast_probes(program) if others is None else {}
        replaced = {name: others[name] for name in rejected if name in others}
        probes = {name: p for name, p in probes.items() if name not in rejected} | replaced


def _why_no_probe(error: CompileError) -> str:
    """Return why no kernel of a program can be probed, for the error of a compile with probes."""
    rows = [row.message for row in error.rows if row.severity != "warning"]
    if any("__preheat_sig" in row for row in rows):
        return "C++11 has no templates of variables; compile the program as C++14 or newer"
    why = rows[0] if rows else "its name expressions are not in the code"
    return f"the compiler rejects the code that finds them: {why}"


def _require_names(program: Program, probes: Mapping[str, str], rows: Iterable[Diagnostic]) -> None:
    """Raise `UnknownEntryError` if name expressions are the only errors."""
    faults = report.rejected_names(rows, program.names, probes)
    kernels, templates = signature.declared_kernels(program) if faults else ([], [])
    for name, reason in faults.items():
        if name not in kernels:  # Otherwise it is overloaded, and the compiler's message is better.
            raise UnknownEntryError(
                name, program.label, kernels, templates=templates, reason=reason
            ) from None


def _request(
    library: str, program: Program, arch: Arch, roots: Mapping[str, str], probes: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return the message and the blocks of a request, with a trace of the headers."""
    message = {
        "do": "cuda",
        "library": library,
        "label": program.label,
        "arch": str(arch),
        "options": [*program.form_options, *program.options],
        "names": [*program.names, *probes.values()],
        "roots": roots,
        "trace": True,
    }
    source = program.source + (signature.PROBE if probes else "")
    blocks = {"source": source.encode()}
    blocks |= {f"header:{name}": text.encode() for name, text in program.headers}
    return message, blocks


def _interpret(
    frame: frames.Frame,
    program: Program,
    arch: Arch,
    roots: Mapping[str, str],
    probes: Mapping[str, str],
    unknown: Mapping[str, str],
) -> Compiled:
    """Return what a reply says about a compile with these probes."""
    reply, made = frame
    log = accept(reply, program, arch, roots)
    if program.form_options:  # The link interprets its probes, which are names here.
        return _compiled(program, reply, made, log, entries=(), names=reply["lowered"])
    require_loadable(program, made["cubin"])
    demangled, lowered = reply["demangled"], reply["lowered"]
    signatures = {
        lowered.get(name, name): demangled.get(lowered[probe], "") for name, probe in probes.items()
    }
    module = ptx.parse(made["ptx"].decode("utf-8", "replace"))
    unknown = {**dict.fromkeys(module.entries, signature.UNSEEN), **unknown}
    entries = signature.entry_points(module, demangled, signatures, report.resources(log), unknown)
    names = {name: lowered[name] for name in program.names}
    return _compiled(program, reply, made, log, entries=entries, names=names)


def _compiled(
    program: Program,
    reply: Mapping[str, Any],
    made: Mapping[str, bytes],
    log: str,
    *,
    entries: tuple[EntryPoint, ...],
    names: Mapping[str, str],
) -> Compiled:
    """Return the result of a compile that succeeded."""
    text, timing = report.split_timing(log)
    opened = reply["opened"]
    return Compiled(
        cubin=made["cubin"],
        ptx=made["ptx"],
        entries=entries,
        names=names,
        log=text,
        timing=timing,
        seconds=reply["seconds"],
        build=reply["build"],
        opened=None if opened is None else tuple(opened),
        templates=tuple(signature.declared_kernels(program)[1]),
    )


def _call_without_trace(
    pool: WorkerPool,
    message: Mapping[str, Any],
    blocks: Mapping[str, bytes],
    error: CompilerCrashError,
) -> frames.Frame:
    """Repeat a request after a crash, without a trace of the headers.

    NVRTC aborts if it cannot write the trace. The second try detects a real crash.
    """
    if error.killed:
        raise error
    try:
        return pool.call({**message, "trace": False}, blocks)
    except CompilerCrashError as again:
        if again.killed:
            raise
        raise CompilerCrashError(f"tried twice, with and without a trace of headers: {again}") from None


def assemble(pool: WorkerPool, program: Program, arch: Arch) -> Compiled:
    """Assemble PTX with nvJitLink, after checks for errors that nvJitLink reports badly or not at all.

    Raises `PtxError` or `TargetError` if a check fails, and the errors of `compile_cuda`.
    """
    module = lint.check(program.source, program.label)
    message = {
        "do": "ptx",
        "label": program.label,
        "arch": str(assembler_target(module, arch, program.label)),
        "options": program.options,
    }
    reply, made = pool.call(message, {"source": program.source.encode()})
    log = accept(reply, program, arch, {})
    require_loadable(program, made["cubin"])
    text, timing = report.split_timing(log)
    return Compiled(
        cubin=made["cubin"],
        ptx=program.source.encode(),
        entries=signature.entry_points(module, reply["demangled"], {}, report.resources(log)),
        names={},
        log=text,
        timing=timing,
        seconds=reply["seconds"],
        build=reply["build"],
        opened=(),
    )


def assembler_target(module: ptx.Module, arch: Arch, label: str) -> Arch:
    """Return the target to assemble for: the device's, or the PTX's if it has a suffix."""
    target = Arch.parse(module.target[0])
    if why := mismatch(target, arch):
        raise TargetError(label, str(target), str(arch), why)
    return target if target.suffix else arch


def require_loadable(program: Program, cubin: bytes) -> None:
    """Raise for code that no device can load, which some options of the assembler produce."""
    if cubin[:4] != b"\x7fELF" or struct.unpack_from("<H", cubin, 16)[0] != _EXECUTABLE:
        options = " ".join(program.options)
        raise InputError(
            f"{program.label}: with {options} the compiler produces code that no device can load",
            hint="remove the option that stops before linking or selects another kind of output",
        )


def accept(reply: Mapping[str, Any], program: Program, arch: Arch, roots: Mapping[str, str]) -> str:
    """Return the log of a compile that succeeded, or raise the error of one that did not."""
    status, log = reply["status"], reply["log"]
    if status == "NOT_LOADED":
        raise ToolchainChangedError(
            f"NVRTC cannot be loaded any more: {log}",
            hint="an upgrade was installed while this process was running",
        )
    if status in ("NVRTC_SUCCESS", "SUCCESS"):
        return str(log)
    if status in _UNKNOWN_ARCH:
        raise InputError(f"{program.label}: nvJitLink cannot assemble for {arch}")
    log = report.localize(log, roots)
    if status in _REJECTED:
        rows = report.diagnostics(log, program)
        error = CompileError(program.label, str(arch), program.options, log, rows)
        error.hint = error.hint or advice_about_path(program.source) or advice(rows, roots.values())
        raise error
    raise ToolchainError(f"{program.label}: the compiler failed with {status}\n{log}".rstrip())
