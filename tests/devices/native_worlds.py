"""Two devices in the same state: one launches by the native core, the other by Python code."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import pytest

from preheat import native
from preheat.build.builder import Builder
from preheat.devices.array import Array
from preheat.devices.kernel import Kernel
from preheat.devices.operands import Pointer, Strided
from preheat.emulator.device import EmulatorDevice
from preheat.gpu import Gpu
from preheat.graph.graph import Graph
from tests.devices.support import PTX
from tests.standin import FakeCuPy, FakeTorch, introduce

N = 32  # Any kernel may write to any array, whatever the type.
THREADS = 4  # Views have at least this number of elements.
SCALARS = (
    "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "bfloat16",
    "float32", "float64", "bool", "complex64",
)  # fmt: skip

SOURCE = f"""
extern "C" __global__ void numbers(signed char b, unsigned char ub, short h, unsigned short uh, int i,
        unsigned ui, long long q, unsigned long long uq, bool t, float f, double d, long long* out) {{
    if (!out) return;
    out[0] = b; out[1] = ub; out[2] = h; out[3] = uh; out[4] = i; out[5] = ui; out[6] = q; out[7] = uq;
    out[8] = t; out[9] = __float_as_uint(f); out[10] = __double_as_longlong(d); out[11] += 1;
}}
extern "C" __global__ void memory(const float* x, float* y, const int* z, void* any, int n) {{
    int i = threadIdx.x;
    if (y) y[i] = (x ? x[i] : 1) + (z ? z[i] : 2) + n;
    if (any && i == 0) *(int*)any += n;
}}
extern "C" __global__ void add(const int* x, int* y, int n) {{
    if (x && y) y[threadIdx.x] += x[threadIdx.x] + n;
}}
extern "C" __global__ void touch(void* any, int n) {{ if (any) *(int*)any += n; }}
extern "C" __global__ void watch({"const void*, " * len(SCALARS)}int* out) {{ *out += 1; }}
"""


class Operand(NamedTuple):
    """An argument that each world has its own of, by name."""

    name: str


class Outcome(NamedTuple):
    """The error of a step, or None."""

    kind: type[BaseException] | None
    message: str = ""
    hint: str | None = None
    where: object = None


class World:
    """A device with kernels, memory of every kind, and stand-ins of torch and CuPy.

    `core` is the native core, or None for launches by Python code.
    """

    def __init__(self, builder: Builder, core: Any, *, schedule: int | None = None) -> None:
        self.core = core
        # Arrays of the host, which stand for tensors of a library without streams, need work at once.
        device = EmulatorDevice(0, "sm_90", schedule=schedule, host_arrays=schedule is None)
        self.gpu = gpu = Gpu(device, builder)
        self.elsewhere = Gpu(EmulatorDevice(1, "sm_90"), builder)
        self.torch, self.cupy = FakeTorch(gpu), FakeCuPy(gpu)
        self.streams = [self.torch.default, self.torch.new_stream(), self.torch.new_stream()]
        self.cupy_streams = [self.cupy.default, self.cupy.new_stream(), self.cupy.new_stream()]
        self.side = gpu.stream()
        module = gpu.module(SOURCE)
        self.kernels: dict[str, Kernel] = {each: module[each] for each in module}
        self.kernels["keep"] = gpu.kernel(PTX, "keep")
        self.scalars = {each: gpu.scalar(each, name=each) for each in SCALARS}
        with self.active():
            self.operands: dict[str, Any] = self._operands()

    def _operands(self) -> dict[str, Any]:
        gpu = self.gpu
        x = gpu.array(np.arange(N, dtype=np.float32))
        made: dict[str, Any] = {
            "x": x, "y": gpu.zeros(N, "float32"), "z": gpu.array(np.arange(N, dtype=np.int32)),
            "d": gpu.zeros(N, "float64"), "c": gpu.zeros(N, "complex64"),
            "out": gpu.zeros(N, "int64"), "kept": gpu.zeros(N, "int64"),
            "owned": gpu.zeros(N, "int32"),  # sometimes by another stream
            "exported": gpu.zeros(N, "int32"),  # to the stand-in
            "view": x[2:6], "whole": x[:], "reshaped": x.reshape(4, 8), "strided": Strided(x),
            "pointer": Pointer(x.address), "elsewhere": self.elsewhere.zeros(N, "float32"),
            "host": np.zeros(N, np.float32), "host integers": np.ones(N, np.int32),
        }  # fmt: skip
        made["tensor of exported"] = self.torch.from_dlpack(made["exported"])
        made["closed"] = gpu.zeros(N, "float32")
        made["closed"].close()
        pool = gpu.pool()
        with pool.frame():
            made["ended"] = pool.zeros(N, "float32")
        made["tensor"] = self.torch.full(2 * N, 3)
        made["tensor 2"] = self.torch.full(N, 5)
        made["part"] = made["tensor"][4 : 4 + N]
        made["every other"] = made["tensor"][::2]
        made["negative"] = made["tensor"][:]
        made["negative"].negative = True
        made["conjugate"] = made["tensor"][:]
        made["conjugate"].conjugate = True
        made["strided tensor"] = Strided(made["every other"])
        return made | self._arrays_of_cupy()

    def _arrays_of_cupy(self) -> dict[str, Any]:
        cupy = self.cupy
        array = cupy.full(2 * N, 3)
        every_other, elsewhere, real = (cupy.full(N, 4) for _ in range(3))
        every_other._c_contiguous = False
        elsewhere.data.device_id = elsewhere.device.id = 7
        real.kind = np.dtype("float32")
        return {
            "cupy": array, "cupy 2": cupy.full(N, 5),
            "cupy part": cupy.ndarray(cupy, array.data.memory, N, 4),
            "cupy subclass": type("Sub", (cupy.ndarray,), {})(cupy, array.data.memory, N),
            "strided cupy": every_other, "cupy elsewhere": elsewhere, "real cupy": real,
            "cupy to Strided": Strided(every_other),
        }  # fmt: skip

    @contextmanager
    def active(self) -> Iterator[None]:
        """Let preheat use this world's core, and know its stand-ins alone."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(native, "core", self.core)
            introduce(self.torch, patch)
            introduce(self.cupy, patch)
            yield

    def resolve(self, given: Any) -> Any:
        """Return the argument as this world has it."""
        return self.operands[given.name] if isinstance(given, Operand) else given

    def launch(self, kernel: str, args: Sequence[Any], named: Mapping[str, Any]) -> None:
        """Launch a kernel with arguments by name."""
        threads = THREADS if kernel in ("memory", "add") else 1
        self.kernels[kernel][1, threads](*map(self.resolve, args), **named)

    def use_in_side_stream(self) -> None:
        """Let another stream own an array."""
        owned = self.operands["owned"]
        self.kernels["add"].launch(owned, owned, 1, grid=1, block=THREADS, stream=self.side)

    def contents(self) -> dict[str, Any]:
        """Return everything that a kernel may have written."""
        own = [(n, a) for n, a in self.operands.items() if isinstance(a, Array) and a.buffer.open]
        self.gpu.synchronize()
        found: dict[str, Any] = {}
        for name, array in own:
            if name not in ("elsewhere", "ended"):
                found[name] = [self._plain_number(n) for n in array.numpy().reshape(-1).tolist()]
        for name in ("tensor", "tensor 2", "cupy", "cupy 2", "host", "host integers"):
            found[name] = repr(self.operands[name].tolist())
        found["scalars"] = {n: repr(each.get()) for n, each in self.scalars.items()}
        return found

    def _plain_number(self, number: Any) -> Any:
        """Return a number, or the name of the array whose address it is."""
        is_address = isinstance(number, int) and number > 1000
        return repr(self.names().get(number, number) if is_address else number)

    def names(self) -> dict[int, str]:
        """Return the names of operands by their addresses."""
        found: dict[int, str] = {}
        for name, each in self.operands.items():
            if isinstance(each, Array):
                found[each.address] = name
            elif isinstance(each, np.ndarray):
                found[each.ctypes.data] = name
            elif hasattr(each, "data_ptr"):
                found[each.data_ptr()] = name
            elif hasattr(each, "_c_contiguous"):
                found[each.data.ptr] = name
        return found

    def watched(self) -> Graph:
        """Return a graph that has all scalars."""
        out = self.gpu.zeros(1, "int32")
        with self.gpu.capture(name="watched") as graph:
            self.kernels["watch"][1, 1](*self.scalars.values(), out)
        return graph

    def close(self) -> None:
        """Close both devices."""
        with self.active():
            self.gpu.synchronize()
            self.operands.clear()
            self.gpu.close()
        self.elsewhere.close()


def plain(text: str) -> str:
    """Return a message without what differs between equal objects of two devices."""
    return re.sub(r"(0x|address=)[0-9a-f]+", r"\1…", text)


def outcome(act: Callable[[], object]) -> Outcome:
    """Call `act` and return what became of it."""
    try:
        act()
    except Exception as error:
        hint = getattr(error, "hint", None)
        where = getattr(error, "where", None)
        return Outcome(type(error), plain(str(error)), hint and plain(hint), where)
    return Outcome(None)


@contextmanager
def open_worlds(builder: Builder, *, schedule: int | None = None) -> Iterator[tuple[World, World]]:
    """Open a world with the native core and one without, in the same state."""
    worlds = World(builder, native.core, schedule=schedule), World(builder, None, schedule=schedule)
    try:
        yield worlds
    finally:
        for world in worlds:
            world.close()
