"""Machine code for a device: stored, or compiled for it."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from preheat.build.build import Build
from preheat.build.builder import Builder
from preheat.build.lookup import Hit
from preheat.device import base
from preheat.errors import DeviceError, TargetError
from preheat.model.arch import Arch, mismatch
from preheat.model.artifact import Artifact
from preheat.model.program import Program
from preheat.process.locks import no_fork

__all__ = ["Code", "compiled_code", "find_code"]


class Code(NamedTuple):
    """Code to load, and the program that it was compiled from, if that is known.

    `jit` says that the driver has to compile its PTX.
    """

    artifact: Artifact
    program: Program | None = None
    jit: bool = False


def find_code(
    device: base.Device,
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
        with no_fork:
            from preheat.toolchain import lint

        target = Arch.parse(lint.check(program.source, program.label).target[0])
    why = None if target is device.arch else mismatch(target, device.arch, strict=strict)
    if why is not None:
        raise TargetError(program.label, str(target), f"{device.name} ({device.arch})", why)
    exact = strict or arch is not None
    choose = None
    if "cuda" in program.language:  # Otherwise NVRTC is not needed.
        choose = partial(_newest_arch, device, builder, program, jit)
    found = builder.find(program, target, exact=exact, choose_arch=choose)
    return Code(found.artifact, program) if isinstance(found, Hit) else found


def _newest_arch(
    device: base.Device, builder: Builder, program: Program, jit: bool, target: Arch
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
