"""The machine code that a device loads: stored, compiled for it, or given, and its source lines."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from preheat.build.builder import Builder
from preheat.build.lookup import Hit
from preheat.build.obtain import Build
from preheat.build.request import CompiledCode, TargetDevice
from preheat.errors import DeviceError, PreheatError, TargetError
from preheat.model.arch import Arch, mismatch, runnable_archs
from preheat.model.artifact import Artifact
from preheat.model.config import SealMode
from preheat.model.program import Program
from preheat.process.lazy import LazyModule
from preheat.toolchain.sources import own_texts

if TYPE_CHECKING:
    from preheat.model import lines, linked_program
    from preheat.model.lines import Lines
    from preheat.toolchain import lint
    from preheat.toolchain.binaries import cubin as cubins
else:
    linked_program = LazyModule("preheat.model.linked_program")
    lines = LazyModule("preheat.model.lines")  # Only a fault needs it.
    lint = LazyModule("preheat.toolchain.lint")
    cubins = LazyModule("preheat.toolchain.binaries.cubin")  # Few programs have compiled code.

__all__ = [
    "Code",
    "compiled_code",
    "find_code",
    "find_source_lines",
    "obtain_given",
]

_MACHINE_CODE = "machine code runs only on devices of its own major version"
_LINE_OPTION = "-lineinfo"


class Code(NamedTuple):
    """Code to load, and the program that it was compiled from, if that is known.

    `jit` says that the driver has to compile its PTX.
    """

    artifact: Artifact
    program: Program | None = None
    jit: bool = False


def find_code(
    device: TargetDevice,
    builder: Builder,
    program: Program,
    arch: Arch | None = None,
    *,
    strict: bool = False,
    jit: bool = False,
) -> Code | Build:
    """Return the stored code of a program for a device, or the build that compiles it.

    `arch` is the architecture to compile for. Without it that is the device's own, and stored code for
    an architecture that also runs there is accepted, unless `strict`. `jit` allows PTX for a device
    that is newer than the compiler. Raises `TargetError` if the device cannot run the code, and
    `SealedError` if the code is not stored and this process is sealed.
    """
    target = arch or device.arch
    if strict and program.language == "ptx":
        target = Arch.parse(lint.check(program.source, program.label).target[0])
    why = None if target is device.arch else mismatch(target, device.arch, strict=strict)
    if why is not None:
        raise TargetError(program.label, str(target), f"{device.name} ({device.arch})", why)
    exact = strict or arch is not None
    choose = None
    if "cuda" in program.language:  # Otherwise NVRTC is not needed.
        choose = partial(_choose_arch, device, builder, program, jit)
    result = builder.find(program, target, exact=exact, choose_arch=choose)
    return Code(result.artifact, program) if isinstance(result, Hit) else result


def _choose_arch(
    device: TargetDevice, builder: Builder, program: Program, jit: bool, target: Arch
) -> Arch:
    """Return `target`, or the newest architecture that can be compiled for, for the driver's JIT."""
    newest = builder.toolchain.newest(target)
    if newest == target:
        return target
    if newest is None or not jit:
        compiler = builder.toolchain.version(program.language)
        raise DeviceError(
            f"{device.name} is {target}, which {compiler} cannot compile for",
            hint=builder.toolchain.supported_archs
            if newest is None  # The device is older than all of them.
            else "update the compiler: pip install -U 'preheat[cu13]'; or let the driver compile "
            "PTX at every start: PREHEAT_JIT=1",
        )
    return newest


def compiled_code(build: Build, hit: Hit) -> Code:
    """Return the code that a build has compiled."""
    return Code(hit.artifact, build.request.program, jit=build.uses_older_arch)


# Given by the caller


def obtain_given(
    device: TargetDevice,
    builder: Builder,
    given: CompiledCode,
    label: str | None = None,
    *,
    strict: bool = False,
    jit: bool = False,
) -> Code:
    """Return given code for a device: a cubin as it is, and PTX compiled, or found in a cache.

    See `find_code` for the arguments and errors.
    """
    if not given.is_ptx:
        return Code(_read_cubin(given, device, label, strict=strict))
    result = find_code(device, builder, _read_ptx(given, label), strict=strict, jit=jit)
    code = result if isinstance(result, Code) else compiled_code(result, result.obtain())
    return Code(_add_names(code.artifact, given), jit=code.jit) if given.names else code


def _read_cubin(
    given: CompiledCode, device: TargetDevice, label: str | None, *, strict: bool
) -> Artifact:
    """Return the artifact of a cubin. Raises `TargetError` if the device cannot run it."""
    digest = _digest(given.code, given.names)
    title = label or given.name or f"code {digest[:12]}"
    cubin = cubins.read_cubin(given.code, title)
    why = mismatch(cubin.arch, device.arch, strict=strict)
    if why is None and cubin.arch not in runnable_archs(device.arch):
        why = _MACHINE_CODE
    if why is not None:
        raise TargetError(title, str(cubin.arch), f"{device.name} ({device.arch})", why)
    return Artifact(
        digest=digest, label=title, arch=cubin.arch, toolchain="unknown", parts=(),
        entries=cubin.entries, cubin=given.code, ptx=b"", names=dict(given.names),
    )  # fmt: skip


def _read_ptx(given: CompiledCode, label: str | None) -> Program:
    """Return PTX as a program, which is assembled, or found in a cache."""
    text = given.code.rstrip(b"\0").decode(errors="surrogateescape")
    return Program.of(text, label=label or given.name or None, language="ptx")


def _add_names(artifact: Artifact, given: CompiledCode) -> Artifact:
    """Return an artifact whose kernels also have the additional names of `given`.

    Modules are found by the digests of their artifacts, so this one gets its own digest.
    """
    digest = _digest(artifact.digest.encode(), given.names)
    return replace(artifact, digest=digest, names={**artifact.names, **dict(given.names)})


def _digest(code: bytes, names: tuple[tuple[str, str], ...]) -> str:
    digest = hashlib.sha256(b"preheat given code\0" + code)
    for pair in names:
        digest.update("\0".join(("", *pair)).encode(errors="surrogateescape"))
    return digest.hexdigest()


# Source lines


def find_source_lines(builder: Builder, program: Program | None, artifact: Artifact) -> Lines | None:
    """Return the source lines of `artifact`, which was made from `program`; None if they are unknown.

    Code without line information is built once more with it, unless the process is sealed. That
    artifact has its own key, and it is not recorded, because no manifest should list it.
    """
    try:
        lined: Artifact | None = artifact
        if not lines.has_lines(artifact.ptx):
            lined = _build_with_lines(builder, program, artifact.arch)
        if lined is None:
            return None
        own = {} if program is None else own_texts(program)  # Bundles contain no sources.
        return lines.Lines(lined.ptx.decode(), {**lined.sources, **own})
    except (PreheatError, ValueError):  # The fault is reported without its source line.
        return None


def _build_with_lines(builder: Builder, program: Program | None, arch: Arch) -> Artifact | None:
    """Return the artifact of `program` with line information."""
    if program is None or "cuda" not in program.language:
        return None
    program = _with_lines(program)
    if builder.sealed is SealMode.OFF:
        return builder.build(program, arch, record=False)
    return builder.lookup(program, arch, exact=True, record=False).artifact


def _with_lines(program: Program) -> Program:
    """Return a program that is compiled to the same code with line information."""
    if not isinstance(program, linked_program.LinkedProgram):
        return replace(program, options=(*program.options, _LINE_OPTION))
    parts = [
        _with_lines(part) if isinstance(part, Program) and part.language == "cuda" else part
        for part in program.parts
    ]
    options = (*program.options, _LINE_OPTION) if program.lto else program.options
    return replace(program, parts=tuple(parts), options=options)
