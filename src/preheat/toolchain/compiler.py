"""Program in, machine code out: the compilers behind one call."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from preheat.arch import Arch, mismatch
from preheat.artifact import EntryPoint
from preheat.errors import (
    CompileError,
    CompilerCrashError,
    InputError,
    TargetError,
    ToolchainError,
    UnknownEntryError,
)
from preheat.events import Events
from preheat.program import Program
from preheat.toolchain import lint, ptx, report, signature
from preheat.toolchain.locate import Located, locate
from preheat.toolchain.pool import WorkerPool

__all__ = ["Compiled", "Toolchain"]

#: Statuses with which a compiler says no. Anything else is its own trouble, not the program's.
_REJECTED = {
    "NVRTC_ERROR_COMPILATION",
    "NVRTC_ERROR_INVALID_OPTION",
    "NVRTC_ERROR_NAME_EXPRESSION_NOT_VALID",
    "ERROR_UNRECOGNIZED_OPTION",
    "ERROR_PTX_COMPILE",
    "ERROR_INVALID_INPUT",
    "ERROR_INCORRECT_INPUT_TYPE",
}


@dataclass(frozen=True, slots=True)
class Compiled:
    """What one compile gave. `opened` is None when the compiler could not tell its headers."""

    cubin: bytes
    ptx: bytes
    entries: tuple[EntryPoint, ...]
    names: Mapping[str, str]
    log: str
    timing: str
    seconds: float
    opened: tuple[str, ...] | None
    started_ns: int


class Toolchain:
    """NVRTC for CUDA C++, nvJitLink for PTX, both in worker processes.

    `memo_dir` is where the place of the compilers is remembered between processes.
    """

    def __init__(self, events: Events, *, timeout: float, memo_dir: Path | None = None) -> None:
        self.pool = WorkerPool(events, timeout=timeout)
        self._memo_dir = memo_dir
        self._located: Located | None = None
        self._lock = threading.Lock()

    @property
    def located(self) -> Located:
        """Where the compilers are; looked up once."""
        if self._located is None:
            with self._lock:
                if self._located is None:
                    self._located = locate(self.pool, self._memo_dir)
        return self._located

    def identity(self, language: str) -> str:
        """What keys say about the compiler of `language`: its name and the build of its library."""
        name = "nvrtc" if language == "cuda" else "nvJitLink"
        return f"{name} {self.located.library(name).build}"

    def version(self, language: str) -> str:
        """The same for people."""
        name = "nvrtc" if language == "cuda" else "nvJitLink"
        return f"{'NVRTC' if name == 'nvrtc' else name} {self.located.library(name).version}"

    def roots(self, program: Program) -> dict[str, str]:
        """Include directories by label, in search order: the program's own, then the toolkit's."""
        own = {str(index): directory for index, directory in enumerate(program.include)}
        return {**own, **self.located.roots}

    def compile(self, program: Program, arch: Arch) -> Compiled:
        """Compile or assemble.

        Raises `CompileError` when the compiler says no, another `ToolchainError` when it fails.
        """
        if program.language == "ptx":
            return self._assemble(program, arch)
        probes = signature.probes(signature.probe_names(program))
        try:
            return self._nvrtc(program, arch, probes)
        except CompileError as error:
            if probes and any(p in error.log for p in ("__preheat_sig", "__nv_name_map")):
                return self._without_probes(program, arch)
            raise

    def after_fork(self) -> None:
        """In a forked child: start with workers and locks of its own."""
        self.pool.after_fork()
        self._lock = threading.Lock()

    def _without_probes(self, program: Program, arch: Arch) -> Compiled:
        """Compile as given; a name expression that names nothing gets the list of what there is."""
        try:
            return self._nvrtc(program, arch, {})
        except CompileError as error:
            bad = report.unknown_name(error.log, program.names)
            if bad is None:
                raise
            known = self._nvrtc(replace(program, names=()), arch, {}).entries
            raise UnknownEntryError(bad, program.label, [e.title for e in known]) from error

    def _nvrtc(self, program: Program, arch: Arch, probes: Mapping[str, str]) -> Compiled:
        roots = self.roots(program)
        self._check_arch(arch)
        for directory in program.include:
            if not Path(directory).is_dir():
                raise InputError(f"{program.label}: include directory {directory} does not exist")
        message = {
            "do": "cuda",
            "label": program.label,
            "arch": str(arch),
            "options": program.options,
            "names": [*program.names, *probes.values()],
            "roots": roots,
            "trace": True,
        }
        source = program.source + (signature.PROBE if probes else "")
        blocks = {"source": source.encode()}
        blocks |= {f"header:{name}": text.encode() for name, text in program.headers}
        started_ns = time.time_ns()
        try:
            reply, made = self.pool.call(message, blocks)
        except CompilerCrashError:
            # An unwritable trace aborts NVRTC. Once more without it tells that from a real crash.
            reply, made = self.pool.call({**message, "trace": False}, blocks)
        log = self._accepted(reply, program, arch, roots)
        demangled, lowered = reply["demangled"], reply["lowered"]
        text = made["ptx"].decode("utf-8", "replace")
        return Compiled(
            cubin=made["cubin"],
            ptx=made["ptx"],
            entries=signature.entry_points(
                ptx.parse(text),
                demangled,
                {
                    lowered.get(name, name): demangled.get(lowered[probe], "")
                    for name, probe in probes.items()
                },
                report.resources(log),
            ),
            names={name: lowered[name] for name in program.names},
            log=report.split_timing(log)[0],
            timing=report.split_timing(log)[1],
            seconds=reply["seconds"],
            opened=None if reply["opened"] is None else tuple(reply["opened"]),
            started_ns=started_ns,
        )

    def _assemble(self, program: Program, arch: Arch) -> Compiled:
        module = lint.check(program.source, program.label)
        target = assembler_target(module, arch, program.label)
        message = {
            "do": "ptx",
            "label": program.label,
            "arch": str(target),
            "options": program.options,
        }
        started_ns = time.time_ns()
        reply, made = self.pool.call(message, {"source": program.source.encode()})
        log = self._accepted(reply, program, arch, {})
        demangled = reply["demangled"]
        return Compiled(
            cubin=made["cubin"],
            ptx=program.source.encode(),
            entries=signature.entry_points(module, demangled, {}, report.resources(log)),
            names={},
            log=report.split_timing(log)[0],
            timing=report.split_timing(log)[1],
            seconds=reply["seconds"],
            opened=(),
            started_ns=started_ns,
        )

    def _check_arch(self, arch: Arch) -> None:
        known = self.located.archs
        if known and arch.major * 10 + arch.minor not in known:
            raise InputError(
                f"{self.version('cuda')} cannot compile for {arch}",
                hint=f"it knows {', '.join(f'sm_{number}' for number in known)}",
            )

    def _accepted(
        self, reply: Mapping[str, Any], program: Program, arch: Arch, roots: Mapping[str, str]
    ) -> str:
        """The log of a compile that succeeded; one that did not raises."""
        status, log = reply["status"], reply["log"]
        if status in ("NVRTC_SUCCESS", "SUCCESS"):
            return str(log)
        log = report.localized(log, roots)
        if status in _REJECTED:
            rows = report.diagnostics(log, program)
            raise CompileError(program.label, str(arch), program.options, log, rows)
        raise ToolchainError(f"{program.label}: the compiler failed with {status}\n{log}".rstrip())


def assembler_target(module: ptx.Module, arch: Arch, label: str, *, strict: bool = False) -> Arch:
    """What to assemble for: the device's architecture, or the PTX's own where that has a suffix."""
    target = Arch.parse(module.target[0])
    if why := mismatch(target, arch, strict=strict):
        raise TargetError(label, str(target), str(arch), why)
    return target if target.suffix else arch

