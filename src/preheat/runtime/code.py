"""Machine code for a device: finds the stored code of a program, or what has to be compiled."""

from __future__ import annotations

from typing import NamedTuple

from preheat.arch import Arch, mismatch
from preheat.artifact import Artifact
from preheat.build.builder import Builder
from preheat.build.key_locks import Deferral
from preheat.build.lookup import Hit, Miss
from preheat.devices import base
from preheat.errors import DeviceError, TargetError
from preheat.program import Program

__all__ = ["Code", "MissingCode", "find_code"]


class Code(NamedTuple):
    """Code to load, and the program that it was compiled from, if that is known.

    `jit` says that the driver has to compile its PTX.
    """

    artifact: Artifact
    program: Program | None = None
    jit: bool = False


class MissingCode(NamedTuple):
    """Code that has to be compiled: the program, the architecture, and what the lookup returned."""

    program: Program
    arch: Arch
    jit: bool = False
    missed: Miss | None = None

    def compile(self, builder: Builder, deferral: Deferral | None = None) -> Code:
        """Compile the program; `deferral` is that of `Builder.obtain`."""
        hit = builder.obtain(self.program, self.arch, missed=self.missed, deferral=deferral)
        return Code(hit.artifact, self.program, jit=self.jit)


def find_code(
    device: base.Device,
    builder: Builder,
    program: Program,
    arch: Arch | None = None,
    *,
    strict: bool = False,
    jit: bool = False,
) -> Code | MissingCode:
    """Return the stored code of a program for a device, or what has to be compiled.

    `arch` is the architecture to compile for. Without it that is the device's own, and stored code for
    an architecture that also runs there is accepted, unless `strict`. `jit` allows PTX for a device
    that is newer than the compiler. Raises `SealedError` if the code is not stored and this process is
    sealed.
    """
    target = arch or device.arch
    if strict and program.language == "ptx":
        from preheat.toolchain import lint

        target = Arch.parse(lint.check(program.source, program.label).target[0])
    why = None if target is device.arch else mismatch(target, device.arch, strict=strict)
    if why is not None:
        raise TargetError(program.label, str(target), f"{device.name} ({device.arch})", why)
    result = builder.lookup(program, target, exact=strict or arch is not None)
    if isinstance(result, Hit):
        return Code(result.artifact, program)
    # `obtain` also checks the seal, but the next line needs a compiler, which a sealed process may
    # lack.
    builder.permit(program, target, result)
    newest = builder.toolchain.newest(target)
    if newest == target or "cuda" not in program.language:  # NVRTC is not needed for it.
        return MissingCode(program, target, missed=result)
    if newest is None or not jit:
        compiler = builder.toolchain.version(program.language)
        raise DeviceError(
            f"{device.name} is {target}, which {compiler} cannot compile for",
            hint=builder.toolchain.supported_archs
            if newest is None  # The device is older than all of them.
            else "update the compiler: pip install -U 'preheat[cu13]'; or let the driver compile "
            "PTX at every start: PREHEAT_JIT=1",
        )
    return MissingCode(program, newest, jit=True)
