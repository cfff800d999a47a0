"""Loaded PTX: variables in memory, kernels that can be launched."""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from preheat.artifact import Artifact, EntryPoint
from preheat.device import base
from preheat.device.emulator.decode import Number
from preheat.device.emulator.form import TYPES
from preheat.device.emulator.image import Image, Kernel
from preheat.device.emulator.layout import Layout
from preheat.device.emulator.memory import Buffer, Memory, Violation
from preheat.device.emulator.wave import Program, Wave
from preheat.errors import EmulatorFault, InvalidCodeError
from preheat.toolchain import ptx

__all__ = ["EmulatorFunction", "EmulatorModule", "invalid"]

_LANES = 1 << 15  # threads of a wave: what a few registers of them fit into the cache
_WAVE_BYTES = 64 << 20  # of shared and local memory
_GAP = 16  # between variables, so that a step too far is seen
_ADDRESS = re.compile(
    r"(?:(0[xX][0-9a-fA-F]+)\s*\()?(?:generic\s*\(\s*)?([A-Za-z_$%][\w$]*)[\s)]*(?:\+\s*(-?\w+))?[\s)]*"
)
_THREADS, _REGISTERS, _SHARED, _BLOCKS = 2048, 65536, 228 << 10, 32  # of one processor


def invalid(meaning: str) -> InvalidCodeError:
    """The error for PTX that cannot be loaded."""
    return InvalidCodeError("emulator load", 200, "EMULATOR_INVALID_PTX", meaning)


class EmulatorModule:
    """PTX with its variables in memory."""

    def __init__(
        self, image: Image, artifact: Artifact, memory: Memory, lock: threading.RLock, patience: int
    ) -> None:
        self.image, self.artifact, self.memory, self.lock, self.patience = (
            image,
            artifact,
            memory,
            lock,
            patience,
        )
        self._symbols: dict[str, base.Symbol] = {}
        self._buffers: list[Buffer] = []
        variables = [v for v in image.module.variables.values() if v.space in ("global", "const")]
        defined = [v for v in variables if ".extern" not in v.linkage]
        self.constants: tuple[tuple[int, int], ...] = ()
        self._arena = self._placed(defined)
        self.addresses = {
            name: symbol.address for name, symbol in self._symbols.items()
        } | image.handles
        for variable in defined:
            self._initialise(variable)

    def _placed(self, variables: list[ptx.Variable]) -> np.ndarray[Any, Any]:
        """Memory with room for all variables, and each at its place."""
        offsets, top = [], 0
        for variable in variables:
            step = max(variable.align, _GAP)
            top = -(-top // step) * step
            offsets.append(top)
            top += variable.size + _GAP
        widest = max((v.align for v in variables), default=1)
        arena = np.zeros(top + widest, np.uint8)
        start = -(-arena.ctypes.data // widest) * widest
        constants = []
        for variable, offset in zip(variables, offsets, strict=True):
            self._symbols[variable.name] = base.Symbol(start + offset, variable.size)
            writable = variable.space != "const"
            self._buffers.append(self.memory.add(start + offset, variable.size, writable=writable))
            if not writable:
                constants.append((start + offset, variable.size))
        self.constants = tuple(constants)
        return arena

    def _initialise(self, variable: ptx.Variable) -> None:
        if variable.initial:
            values = b"".join(self._values(variable))
            if len(values) > variable.size:
                raise invalid(f"{variable.name} has more values than room, line {variable.line}")
            ctypes.memmove(self._symbols[variable.name].address, values, len(values))

    def _values(self, variable: ptx.Variable) -> Iterator[bytes]:
        dtype = TYPES[variable.kind]
        for item in variable.initial:
            named = _ADDRESS.fullmatch(item)
            if named is None:
                yield Number(item).value(dtype).tobytes()
                continue
            mask, name, offset = named.groups()
            if name not in self.addresses:
                raise invalid(
                    f"{variable.name} points to {name}, which is not defined, line {variable.line}"
                )
            address = self.addresses[name] + int(offset or "0", 0)
            if mask:
                chosen = int(mask, 16)
                address = (address & chosen) >> (chosen & -chosen).bit_length() - 1
            yield (address & ((1 << 8 * dtype.itemsize) - 1)).to_bytes(dtype.itemsize, "little")

    def function(self, name: str) -> EmulatorFunction:
        """The kernel with this entry name."""
        if name not in self.image.module.entries:
            raise invalid(f"there is no kernel {name!r}")
        try:
            kernel = self.image.kernel(name)
        except ptx.SyntaxFault as bad:
            raise invalid(f"{bad}, line {bad.line}") from None
        for code in kernel.functions.values():
            known = {*code.offsets, *code.parameters, *self.addresses, *kernel.shared}
            for _, symbol in code.symbols:
                if symbol not in known and f"{code.name}.{symbol}" not in kernel.shared:
                    raise invalid(f"{code.name} uses {symbol}, which is not defined")
        entry = next((e for e in self.artifact.entries if e.name == name), None)
        return EmulatorFunction(self, name, kernel, entry)

    def symbol(self, name: str) -> base.Symbol | None:
        """The variable with this name, or None."""
        return self._symbols.get(name)

    def unload(self) -> None:
        """Forget the variables."""
        for buffer in self._buffers:
            self.memory.remove(buffer)
        self._buffers.clear()


class EmulatorFunction:
    """A kernel that can be launched."""

    def __init__(
        self, module: EmulatorModule, name: str, kernel: Kernel, entry: EntryPoint | None
    ) -> None:
        self.module, self.name, self.kernel = module, name, kernel
        self.title = entry.title if entry else name
        self.parameters = module.image.module.entries[name].params
        used = entry.resources if entry else None
        frame = max(code.frame_bytes for code in kernel.functions.values())
        constant = sum(size for _, size in module.constants)
        bounds = module.image.module.entries[name].directives
        self.attributes = base.Attributes(
            registers=used.registers if used else 0,
            shared=used.shared if used else kernel.shared_bytes,
            local=used.stack if used else frame,
            constant=constant,
            threads=_most_threads(bounds),
        )

    def prepare(self, geometry: base.Geometry, stream: base.Stream) -> base.Submit:
        """Make a launch ready."""
        del stream  # work is done when it is submitted
        return _Prepared(self, geometry)

    def occupancy(self, threads: int, shared: int = 0) -> base.Occupancy:
        """How many blocks fit the threads, registers and shared memory of a processor."""
        warps = -(-max(threads, 1) // 32)
        registers = max(self.attributes.registers, 1) * warps * 32
        each = self.attributes.shared + shared
        blocks = min(
            _THREADS // (warps * 32),
            _REGISTERS // registers,
            _BLOCKS,
            _SHARED // each if each else _BLOCKS,
        )
        return base.Occupancy(blocks, blocks * warps * 32 / _THREADS)


class _Prepared:
    """A launch: called with the address of an array of pointers to parameters, it runs the kernel."""

    def __init__(self, function: EmulatorFunction, geometry: base.Geometry) -> None:
        self.function, self.geometry = function, geometry
        module, kernel = function.module, function.kernel
        block = geometry.block
        self.total = geometry.grid[0] * geometry.grid[1] * geometry.grid[2]
        self.threads = block[0] * block[1] * block[2]
        self.shared = kernel.shared_bytes + geometry.shared
        self._layouts: dict[int, Layout] = {}
        size = max((p.offset + p.size for p in function.parameters), default=0)
        self._parameters = np.zeros(-(-size // 16) * 16 + 128, np.uint8)
        self._at = -(-self._parameters.ctypes.data // 64) * 64
        self._size = size
        self._grid = np.zeros(8, np.uint64)  # counts the blocks of a cooperative grid
        addresses = module.addresses
        if geometry.cooperative:
            addresses = {**addresses, "%grid": self._grid.ctypes.data}
        self.program = Program(
            function.name,
            kernel.functions,
            kernel.shared,
            addresses,
            module.constants,
            module.memory,
            module.patience,
        )

    def __call__(self, pointers: int, _: int = 0) -> tuple[int, ...]:
        with self.function.module.lock, np.errstate(all="ignore"):
            for i, parameter in enumerate(self.function.parameters):
                source = ctypes.c_uint64.from_address(pointers + 8 * i).value
                ctypes.memmove(self._at + parameter.offset, source, parameter.size)
            lent = list(self._lent())
            try:
                self._run()
            finally:
                for buffer in lent:
                    self.program.memory.remove(buffer)
        return (0,)

    def _lent(self) -> Iterator[Buffer]:
        """Memory of the launch itself that kernels can point at."""
        memory = self.program.memory
        if self.function.kernel.functions[self.function.name].takes_parameter_address:
            yield memory.add(self._at, self._size, writable=False)
        if self.geometry.cooperative:
            self._grid[:] = 0
            yield memory.add(self._grid.ctypes.data, self._grid.nbytes)

    def _run(self) -> None:
        step = self._blocks_per_wave()
        for first in range(0, self.total if self.threads else 0, step):
            blocks = min(step, self.total - first)
            layout = self._layouts.get(blocks)
            if layout is None:
                layout = self._layouts[blocks] = Layout(self.geometry.block, blocks)
            wave = Wave(
                self.program,
                self.geometry,
                layout,
                first=first,
                parameters=self._at,
                shared=self.shared,
            )
            try:
                wave.run()
            except Violation as bad:
                raise _fault(self.function.title, wave, bad) from None

    def _blocks_per_wave(self) -> int:
        if self.geometry.cooperative:
            return max(self.total, 1)
        local = max(code.frame_bytes for code in self.program.functions.values())
        bytes_each = self.shared + local * self.threads
        fits = _LANES // max(self.threads, 1)
        if bytes_each:
            fits = min(fits, _WAVE_BYTES // bytes_each)
        return max(min(fits, self.total), 1)


def _fault(kernel: str, wave: Wave, bad: Violation) -> EmulatorFault:
    group = wave.running
    assert group is not None
    op = group.frame.code.sites[bad.site]
    lane = int(group.all_lanes[bad.position])
    return EmulatorFault(
        kernel,
        str(bad),
        line=op.line,
        text=op.text,
        block=wave.block_of(lane),
        thread=wave.thread_of(lane),
        address=bad.address,
        hint=bad.hint,
    )


def _most_threads(directives: tuple[str, ...]) -> int:
    """What `.maxntid` or `.reqntid` allows in a block."""
    for directive in directives:
        word, _, numbers = directive.partition(" ")
        if word in (".maxntid", ".reqntid"):
            return min(int(np.prod([int(n) for n in numbers.split(",")])), 1024)
    return 1024
