"""Machine code for a device: stored, or compiled for it."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from preheat.arch import Arch, mismatch
from preheat.artifact import Artifact
from preheat.build.build import Build
from preheat.build.builder import Builder
from preheat.build.lookup import Hit
from preheat.devices import base
from preheat.errors import DeviceError, TargetError
from preheat.locks import no_fork
from preheat.program import Program

__all__ = ["Code", "code_of", "prepare_build"]


class Code(NamedTuple):
    """Code to load, and the program that it was compiled from, if that is known.

    `jit` says that the driver has to compile its PTX.
    """

    artifact: Artifact
    program: Program | None = None
    jit: bool = False


def prepare_build(
    device: base.Device,
    builder: Builder,
    program: Program,
    arch: Arch | None = None,
    *,
    strict: bool = False,
    jit: bool = False,
) -> Build:
    """Return the build of a program for a device.

    `arch` is the architecture to compile for. Without it that is the device's own, and stored code for
    an architecture that also runs there is accepted, unless `strict`. `jit` allows PTX for a device
    that is newer than the compiler. Raises `TargetError` if the device cannot run the code.
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
    if "cuda" not in program.language:  # NVRTC is not needed for it.
        return builder.prepare(program, target, exact=exact)
    choose = partial(_newest_arch, device, builder, program, jit)
    return builder.prepare(program, target, exact=exact, choose_arch=choose)


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


def code_of(build: Build, hit: Hit) -> Code:
    """Return the code that a build has found or compiled."""
    return Code(hit.artifact, build.request.program, jit=build.uses_older_arch)
