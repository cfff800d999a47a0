"""A prepared launch: it reads the parameters and runs the grid in waves of blocks."""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

import numpy as np

from preheat.devices.base import Dim3, Geometry, Limits
from preheat.emulator.allocator import Heap
from preheat.emulator.capture import Captures
from preheat.emulator.generate import CompiledFunction
from preheat.emulator.graph_work import KernelWork
from preheat.emulator.group import Frame
from preheat.emulator.layout import Layout, coordinates
from preheat.emulator.limits import Multiprocessor
from preheat.emulator.memory import Buffer, Violation, align_up
from preheat.emulator.schedule import Scheduler
from preheat.emulator.stream import Streams
from preheat.emulator.surfaces import Surface
from preheat.emulator.textures import Texture
from preheat.emulator.wave import Program, Wave
from preheat.errors import DeviceError, EmulatorFault, UnsupportedInstructionError
from preheat.model.ptx import Param

__all__ = ["Launch", "LaunchDevice"]

# The most threads of a wave: enough to amortise Python's overhead, few enough for the cache. There are
# fewer if the depth of calls is unknown, because each call has registers and memory.
_MAX_THREADS = 1 << 15
_MAX_RECURSIVE_THREADS = 1 << 12
_MAX_WAVE_BYTES = 64 << 20  # The most shared and local memory of a wave.


class LaunchDevice(Protocol):
    """The device of a launch: its lock, streams, captures, queues, heap, textures and limits."""

    lock: threading.RLock
    captures: Captures
    streams: Streams
    scheduler: Scheduler | None
    heap: Heap
    textures: dict[int, Texture | Surface]
    patience: int
    limits: Limits
    multiprocessor: Multiprocessor
    executed: int  # kernels

    def report_fault(self, fault: DeviceError) -> None:
        """Record a fault of work that runs now."""


class Launch:
    """Runs or queues the kernel when called with the address of an array of pointers to parameters.

    Like the driver, it uses the stream that has the handle at the time of the call.
    """

    def __init__(
        self,
        program: Program,
        parameters: tuple[Param, ...],
        geometry: Geometry,
        device: LaunchDevice,
        title: str,
        stream: int,
        shared_unit: int = 1,
    ) -> None:
        self._stream = stream
        self.parameters = parameters
        self.geometry = geometry
        self.title = title
        self._device = device
        self.blocks = math.prod(geometry.grid)
        self.threads = math.prod(geometry.block)
        self.shared = program.shared_bytes + align_up(geometry.shared, shared_unit)
        self._cluster_blocks = math.prod(geometry.cluster or (1, 1, 1))
        recurses = _may_recurse(program.functions)
        self._max_threads = _MAX_RECURSIVE_THREADS if recurses else _MAX_THREADS
        self._layouts: dict[int, Layout] = {}
        self._parameters_size = max((p.offset + p.size for p in parameters), default=0)
        self._buffer = np.zeros(self._parameters_size + 128, np.uint8)
        self._parameters_at = align_up(self._buffer.ctypes.data, 64)
        self._grid = np.zeros(8, np.uint64)  # Where a cooperative grid counts its blocks.
        if geometry.cooperative:
            program = replace(program, addresses={**program.addresses, "%grid": self._grid.ctypes.data})
        self.program = program

    def __call__(self, pointers: int, _: int = 0) -> tuple[int, ...]:
        values = [
            ctypes.string_at(ctypes.c_uint64.from_address(pointers + 8 * i).value, parameter.size)
            for i, parameter in enumerate(self.parameters)
        ]
        stream = self._device.streams.id_of(self._stream)
        branch = self._device.captures.find(stream)
        if branch is not None:
            branch.add("kernel", self.program.kernel, KernelWork(self, values))
        elif self._device.scheduler is None:
            self.run(values)
        else:
            self._device.scheduler.submit(stream, lambda: self.run(values))
        return (0,)

    def run(self, values: list[bytes]) -> None:
        """Run the kernel with these parameters."""
        try:
            with self._device.lock, np.errstate(all="ignore"):
                self._device.executed += 1
                for parameter, value in zip(self.parameters, values, strict=True):
                    ctypes.memmove(self._parameters_at + parameter.offset, value, parameter.size)
                exposed = list(self._expose_memory())
                try:
                    self._run()
                finally:
                    for buffer in exposed:
                        self.program.memory.remove(buffer)
        except _KernelStopped as stopped:  # Finding lines may compile, which must not hold the lock.
            fault = self.program.locate(stopped.fault, stopped.calls, stopped.other)
            if stopped.calls:
                self._device.report_fault(fault)
            raise fault from None

    def _expose_memory(self) -> Iterator[Buffer]:
        """Let kernels access memory of the launch itself, and yield its buffers."""
        memory = self.program.memory
        if self.program.functions[self.program.kernel].takes_parameter_address:
            yield memory.add(self._parameters_at, self._parameters_size, writable=False)
        if self.geometry.cooperative:
            self._grid[:] = 0
            yield memory.add(self._grid.ctypes.data, self._grid.nbytes)

    def _run(self) -> None:
        step = self._blocks_per_wave()
        for first in range(0, self.blocks if self.threads else 0, step):
            count = min(step, self.blocks - first)
            layout = self._layouts.get(count)
            if layout is None:
                layout = self._layouts[count] = Layout(self.geometry.block, count, self._cluster_blocks)
            wave = Wave(
                self.program,
                self.geometry,
                layout,
                first=first,
                parameters=self._parameters_at,
                shared=self.shared,
            )
            try:
                wave.run()
            except Violation as bad:
                stopped = self._describe_stop(wave, bad)
                self._device.report_fault(stopped.fault)
                raise stopped from None
            except UnsupportedInstructionError as error:
                # The instruction is in a function that was called through a pointer.
                raise _KernelStopped(error, ()) from None

    def _blocks_per_wave(self) -> int:
        if self.geometry.cooperative:  # Its blocks wait for one another.
            return max(self.blocks, 1)
        local = max(code.frame_bytes for code in self.program.functions.values())
        shadow = self.shared if self.program.sanitize else 0
        each = self.shared + shadow + local * self.threads
        by_threads = self._max_threads // max(self.threads, 1)
        fits = min(by_threads, _MAX_WAVE_BYTES // max(each, 1), self.blocks)
        return max(fits // self._cluster_blocks, 1) * self._cluster_blocks  # In whole clusters.

    def _describe_stop(self, wave: Wave, bad: Violation) -> _KernelStopped:
        group = wave.running
        assert group is not None
        op = group.frame.code.ops[bad.site]
        lane = int(group.all_lanes[bad.position])
        other = None
        message = str(bad)
        if bad.other is not None:
            other = next(_call_stack(*bad.other))
            message = f"{message} at PTX line {other[1]}"
        fault = EmulatorFault(
            self.title,
            message,
            line=op.line,
            text=op.text,
            block=_block_of(wave, lane),
            thread=coordinates(lane % wave.layout.threads, wave.layout.block),
            address=bad.address,
            hint=bad.hint,
        )
        return _KernelStopped(fault, tuple(_call_stack(group.frame, bad.site)), other)


class _KernelStopped(Exception):  # noqa: N818  (It never leaves a launch.)
    """A fault, with its function and PTX line and the function and line of every call around it.

    `other` are the function and PTX line that the message ends with, if it does.
    """

    def __init__(
        self,
        fault: EmulatorFault,
        calls: tuple[tuple[str, int], ...],
        other: tuple[str, int] | None = None,
    ) -> None:
        self.fault = fault
        self.calls = calls
        self.other = other


def _call_stack(frame: Frame | None, site: int) -> Iterator[tuple[str, int]]:
    """Yield function and PTX line of an operation, then of each call around it."""
    while frame is not None:
        yield frame.code.name, frame.code.ops[site].line
        site = frame.call.site if frame.call is not None else 0
        frame = frame.parent


def _may_recurse(functions: dict[str, CompiledFunction]) -> bool:
    """Return whether functions may call one another in a cycle, directly or through pointers."""
    remaining = dict(functions)
    while leaves := [name for name, code in remaining.items() if not code.callees & remaining.keys()]:
        for name in leaves:
            del remaining[name]
    return bool(remaining) or any(code.has_indirect_calls for code in functions.values())


def _block_of(wave: Wave, lane: int) -> Dim3:
    """Return the coordinates of a thread's block in the grid."""
    cx, cy, cz = wave.geometry.cluster or (1, 1, 1)
    cluster, rank = divmod(wave.first + lane // wave.layout.threads, wave.layout.cluster_blocks)
    width, height, depth = wave.geometry.grid
    x, y, z = coordinates(cluster, (width // cx, height // cy, depth // cz))
    inner = coordinates(rank, (cx, cy, cz))
    return x * cx + inner[0], y * cy + inner[1], z * cz + inner[2]
