"""Kernels for the emulator, compiled from CUDA or written in PTX."""

from __future__ import annotations

import ctypes
import textwrap
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from preheat.devices.base import Dim3, Geometry
from preheat.emulator.device import EmulatorDevice
from preheat.errors import EmulatorFault
from preheat.model.arch import Arch
from preheat.model.artifact import Artifact

ARCHS = ("sm_80", "sm_90", "sm_100")
HEAD = ".version 8.5\n.target sm_90\n.address_size 64\n"


def artifact(ptx: str, arch: str = "sm_90") -> Artifact:
    """Return an artifact that is PTX and nothing else."""
    return Artifact("0" * 64, "test.ptx", Arch.parse(arch), "none", (), (), b"", ptx.encode())


def entry(params: str, body: str, *, outside: str = "", directives: str = "") -> str:
    """Return a PTX text with one kernel, `k`; registers of every kind are declared."""
    registers = """
    .reg .pred %p<16>;
    .reg .b16 %h<16>;
    .reg .b32 %r<32>;
    .reg .f32 %f<16>;
    .reg .b64 %d<32>;
    .reg .f64 %e<16>;
    """
    head = f"{HEAD}{outside}\n.visible .entry k({params}) {directives}".rstrip()
    return f"{head}\n{{{registers}{textwrap.dedent(body)}\n}}\n"


class Machine:
    """A loaded program and launches of it with NumPy arrays as memory."""

    def __init__(self, program: Artifact | str, **settings: Any) -> None:
        self.artifact = artifact(program) if isinstance(program, str) else program
        self.device = EmulatorDevice(0, self.artifact.arch, **settings)
        self.module = self.device.load(self.artifact)
        self.stream = self.device.stream()

    def __call__(
        self,
        grid: int | tuple[int, ...],
        block: int | tuple[int, ...],
        *args: np.ndarray[Any, Any] | np.generic,
        name: str = "k",
        shared: int = 0,
        cooperative: bool = False,
        cluster: int | tuple[int, ...] | None = None,
    ) -> None:
        """Launch; arrays are shared with the emulator during it, and scalars are passed by value."""
        blocks = None if cluster is None else dim3(cluster)
        geometry = Geometry(dim3(grid), dim3(block), shared, blocks, cooperative)
        submit = self.module.function(name).prepare(geometry, self.stream)
        with ExitStack() as lent:
            values = []
            for arg in args:
                if isinstance(arg, np.ndarray):
                    lend = self.device.host_memory.register(
                        arg.ctypes.data, arg.nbytes, bool(arg.flags.writeable)
                    )
                    lent.enter_context(lend)
                    values.append(np.array(arg.ctypes.data, np.uint64))
                else:
                    values.append(np.array(arg))
            pointers = (ctypes.c_void_p * max(len(values), 1))(*(v.ctypes.data for v in values))
            status = submit(ctypes.addressof(pointers), 0)
        self.device.check(status, "launch")


def dim3(extent: int | tuple[int, ...]) -> Dim3:
    """Return a geometry with ones where nothing was given."""
    x, y, z = (*((extent,) if isinstance(extent, int) else extent), 1, 1)[:3]
    return x, y, z


def fault(machine: Machine, *args: Any, **launch: Any) -> EmulatorFault:
    """Return the fault that a launch raises."""
    with pytest.raises(EmulatorFault) as caught:
        machine(*args, **launch)
    return caught.value
