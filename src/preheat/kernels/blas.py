"""cuBLAS, where there is one: a handle for each stream, each with its workspace, fit for captures."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache
from typing import Any, NamedTuple

from preheat.artifact import EntryPoint, Parameter
from preheat.callsite import caller
from preheat.devices import base
from preheat.devices.base import ON_GPU
from preheat.dtypes import DTYPES, DType
from preheat.errors import CaptureError, DeviceError, InputError, did_you_mean
from preheat.gpu import Gpu
from preheat.kernels.op import Op, cpp_of, dimension, tell
from preheat.runtime.active_capture import ALLOCATE, ActiveCapture
from preheat.runtime.arguments import Signature
from preheat.runtime.array import Array
from preheat.runtime.context import Context
from preheat.runtime.launch import Call, Gathered
from preheat.runtime.stream import raw_stream

__all__ = ["MATH", "Blas", "Found", "by_cublas", "find"]


class _Math(NamedTuple):
    """A math mode as cuBLAS knows it, and how it then computes with float32 and with shorter types."""

    modes: tuple[str, ...]
    float32: str
    shorter: str


# Sums of shorter types stay in fp32 to the end, also where several blocks share one.
_WHOLE = "DISALLOW_REDUCED_PRECISION_REDUCTION"

#: The math modes there are.
MATH = {
    "fp32": _Math(("PEDANTIC_MATH",), "COMPUTE_32F_PEDANTIC", "COMPUTE_32F_PEDANTIC"),
    "tf32": _Math(("TF32_TENSOR_OP_MATH", _WHOLE), "COMPUTE_32F_FAST_TF32", "COMPUTE_32F"),
    "default": _Math(("DEFAULT_MATH", _WHOLE), "COMPUTE_32F", "COMPUTE_32F"),
}
_TYPES = {"float32": 0, "float16": 2, "bfloat16": 14}  # CUDA_R_32F, CUDA_R_16F, CUDA_R_16BF
_AGAIN = "make it again: preheat.Blas(gpu)"
_ALGORITHM = -1  # CUBLAS_GEMM_DEFAULT: cuBLAS chooses
_FOREIGN_SEATS = 4  # workspaces kept for streams of other libraries, which do not report their end


class Found(NamedTuple):
    """The bindings of cuBLAS, and its version."""

    cublas: Any
    version: str


def find(gpu: Gpu) -> Found | str:
    """cuBLAS for a device, or why there is none."""
    on_gpu = gpu._context.device.dlpack[0] == ON_GPU
    return _bindings() if on_gpu else f"{gpu.name} is no GPU"


@cache
def _bindings() -> Found | str:
    try:
        from nvmath.bindings import cublas
    except ImportError:
        return "nvmath-python is not installed"
    try:
        return Found(cublas, ".".join(str(cublas.get_property(part)) for part in range(3)))
    except RuntimeError as error:  # neither the library nor the driver may be there
        return str(error).splitlines()[0]


class Blas:
    """Products of matrices by cuBLAS on one GPU, summed in fp32.

    `math` is "fp32" (nothing less precise, for any type), "tf32" (float32 rounded to 10 bits before it
    is multiplied, on tensor cores) or "default" (fp32 for float32, tensor cores for shorter types).
    Every stream has its handle and every handle its workspace. Results have the same bits every time
    for operands with the same alignment, by which cuBLAS chooses its kernels. The workspace of a stream
    that was closed, or of a graph that is gone, is freed at the next product, after its work. Of the
    streams of other libraries, the ones used last keep a workspace.

    A captured graph, of preheat or another library, keeps a workspace to itself, and inside a capture
    none can be made: one is ready from the beginning and after every product outside of captures, and
    `reserve` makes more.
    """

    def __init__(self, gpu: Gpu, math: str = "default", *, found: Found | str | None = None) -> None:
        if not isinstance(gpu, Gpu):
            raise InputError(f"{gpu!r} is not a device", hint="Blas(preheat.device(…))")
        if not isinstance(math, str) or math not in MATH:
            hint = did_you_mean(str(math), MATH) or f"use {', '.join(MATH)}"
            raise InputError(f"math {math!r} is not a math mode", hint=hint)
        found = find(gpu) if found is None else found
        if isinstance(found, str):
            hint = "on a GPU: pip install 'preheat[blas]'"
            raise DeviceError(f"there is no cuBLAS: {found}", hint=hint)
        self.gpu, self.math, self.version = gpu, math, found.version
        self._library = _Library(gpu._context, found.cublas)
        self._making = threading.RLock()
        self._seats: dict[int, _Seat] = {}  # by the id of the stream, those used last at the end
        self._lent: list[tuple[weakref.ref[ActiveCapture], _Seat]] = []  # to captures
        # Those that graphs of other libraries keep, by the id of the stream while it is captured.
        self._retained: weakref.WeakValueDictionary[int, _Seat] = weakref.WeakValueDictionary()
        self._ready: list[_Seat] = []
        self._spare: list[_Handle] = []  # left by seats that are gone
        self.reserve()

    def reserve(self, captures: int = 1) -> None:
        """Have workspaces ready for so many captures."""
        count, context = dimension("captures", captures, least=0), self._library.context
        context.require(_AGAIN)
        context.forbid(ALLOCATE)
        with self._making:
            self._prune()
            while len(self._ready) < count:
                room = Array.new(context, (self._room_size,), DTYPES["uint8"], context.stream)
                handle = self._spare.pop() if self._spare else _Handle(self._library)
                self._ready.append(_Seat(self._library, handle, room, self._spare))

    def _prune(self) -> None:
        """Drop the seats of streams that nobody holds any more, and of captures that are over."""
        context = self._library.context
        for _, stream in list(context.idle):
            self._seats.pop(stream.id, None)
        own = {stream.id for stream in context.order.streams()}
        foreign = [key for key in self._seats if key not in own]
        for key in foreign[: max(len(foreign) - _FOREIGN_SEATS, 0)]:
            del self._seats[key]
        under_way = context.active_captures()
        self._lent = [each for each in self._lent if each[0]() in under_way]

    @property
    def _room_size(self) -> int:
        """Bytes of a workspace, as NVIDIA recommends."""
        return (32 if self.gpu.arch.major >= 9 else 4) << 20

    def _seat(self, stream: base.Stream) -> _Seat:
        """Handle and workspace of a stream."""
        with self._making:
            found = self._seats.pop(stream.id, None)
            if found is None:
                if not self._ready:
                    self.reserve()
                found = self._bound(stream)
            self._seats[stream.id] = found
            self._prune()
            if not self._ready:
                with suppress(CaptureError):  # another thread's, which no allocation may disturb
                    self.reserve()
            return found

    def _seat_for_capture(self, stream: base.Stream) -> _Seat:
        """Handle and workspace for products in another library's capture, whose graph keeps them."""
        with self._making:
            found = self._retained.get(stream.id)
            if found is None:
                if not self._ready:
                    raise _no_workspace()
                found = self._retained[stream.id] = self._bound(stream)
                stream.retain(found)
            return found

    def _seat_within(self, capture: ActiveCapture) -> _Seat:
        """Handle and workspace of a capture."""
        with self._making:
            for lent, seat in self._lent:
                if lent() is capture:
                    return seat
            if not self._ready:
                raise _no_workspace()
            seat = self._bound(capture.stream)
            self._lent.append((weakref.ref(capture), seat))
            return seat

    def _bound(self, stream: base.Stream) -> _Seat:
        seat, modes = self._ready.pop(), self._library.cublas.Math
        return seat.bind(stream, sum(getattr(modes, name) for name in MATH[self.math].modes))

    def _multiply(
        self, op: Op, dtype: DType, a: Any, b: Any, c: Any, *, add: bool = False, stream: object = None
    ) -> None:
        """Do what `op` describes, with matrices of `dtype`; `add` leaves in `c` what it held.

        Everyone who is watching sees it.
        """
        _Product(self, op, dtype, add, stream).run(a, b, c)
        tell(by_cublas(op))


def _no_workspace() -> CaptureError:
    return CaptureError(
        "cuBLAS has no workspace ready for this capture: every graph keeps one",
        where=caller(),
        hint="multiply once before each capture, or blas.reserve(n) before n of them",
    )


class _Library(NamedTuple):
    """cuBLAS in one life of a GPU."""

    context: Context
    cublas: Any

    def call(self, name: str, *args: Any) -> Any:
        """Call a function of it on this GPU; its error becomes one of ours."""
        with _current(self.context.device):
            try:
                return getattr(self.cublas, name)(*args)
            except self.cublas.cuBLASError as error:
                raise DeviceError(f"{name} of cuBLAS failed: {error}") from None


def _current(device: base.Device) -> AbstractContextManager[object]:
    """cuBLAS works in the current context; the emulator, where tests stand in for it, has none."""
    current: Callable[[], AbstractContextManager[object]]
    current = getattr(device, "beside_captures", nullcontext)
    return current()


class _Handle:
    """A handle of cuBLAS. Dropping it gives it back."""

    def __init__(self, library: _Library) -> None:
        self._library = library
        self.number: int = library.call("create")
        library.context.holders.add(self)

    def release(self) -> None:
        """Give it back at once: the device is closed."""
        self._library.call("destroy", self.number)

    def __del__(self) -> None:
        context, call = self._library.context, self._library.call
        if hasattr(self, "number") and context.lost is None:
            number = self.number
            context.garbage.append(lambda: call("destroy", number))


class _Seat:
    """A handle and its workspace.

    Dropping it leaves the handle to the next one, in `spare`, and gives the workspace back, as memory
    is: once the work that uses it has ended, and not before a graph that does is gone.
    """

    def __init__(self, library: _Library, handle: _Handle, room: Array, spare: list[_Handle]) -> None:
        self._library, self._handle, self.room, self._spare = library, handle, room, spare

    @property
    def handle(self) -> int:
        """The number by which cuBLAS knows the handle."""
        return self._handle.number

    def bind(self, stream: base.Stream, mode: int) -> _Seat:
        """Work in `stream` from now on, in a math mode."""
        call = self._library.call
        call("set_stream", self.handle, stream.handle)
        # Not before: setting the stream takes the workspace away.
        call("set_workspace", self.handle, self.room.address, self.room.nbytes)
        call("set_math_mode", self.handle, mode)
        return self

    def __del__(self) -> None:
        self._spare.append(self._handle)


class _Axes(NamedTuple):
    """A product: rows and columns of its result, what is summed over, which operands are transposed."""

    rows: str
    columns: str
    length: str
    a: bool = False
    b: bool = False


_AXES = {
    "gemm": _Axes("m", "n", "k"),
    "gemm_backward_a": _Axes("m", "k", "n", b=True),
    "gemm_backward_b": _Axes("k", "n", "m", a=True),
}


def by_cublas(op: Op) -> Op:
    """The operation as cuBLAS does it; the same `op` for one that it does not know."""
    return op._replace(by="cuBLAS") if op.name in _AXES else op


class _Product(Call):
    """A product: checked and ordered like a launch, submitted by another library."""

    AGAIN = _AGAIN

    def __init__(self, blas: Blas, op: Op, dtype: DType, add: bool, stream: object) -> None:
        context = blas._library.context
        context.require(_AGAIN)
        raw = None if stream is None else raw_stream(context, stream)
        super().__init__(context, _signature(dtype), raw, blocking=blas.gpu.blocking)
        self._blas, self._op, self._dtype, self._add = blas, op, dtype, add

    def _submit(self, gathered: Gathered, stream: base.Stream) -> None:
        if self.context.order.captured(stream):
            self._call(self._blas._seat_for_capture(stream), *gathered.values)
            return
        seat = self._blas._seat(stream)
        with self.context.order.section(stream, {seat.room.buffer.uses: True}, captured=False):
            self._call(seat, *gathered.values)

    def _capture(self, gathered: Gathered, capture: ActiveCapture) -> None:
        seat = self._blas._seat_within(capture)
        self._call(seat, *gathered.values)
        capture.add_uses(gathered)
        capture.add_export(seat.room)

    def _call(self, seat: _Seat, a: int, b: int, c: int) -> None:
        # cuBLAS takes columns for rows, and so sees every matrix of ours transposed: it is asked for
        # the transposed result, which has the operands in reverse order.
        library, math = self._blas._library, MATH[self._blas.math]
        operation, dims, axes = library.cublas.Operation, dict(self._op.dims), _AXES[self._op.name]
        rows, columns, length = dims[axes.rows], dims[axes.columns], dims[axes.length]
        kind, compute = _TYPES[self._dtype.name], math.shorter if self._dtype.size < 4 else math.float32
        one, old = ctypes.c_float(1), ctypes.c_float(self._add)
        library.call(
            "gemm_ex", seat.handle, operation(int(axes.b)), operation(int(axes.a)),
            columns, rows, length, ctypes.addressof(one),
            b, kind, length if axes.b else columns,
            a, kind, rows if axes.a else length,
            ctypes.addressof(old), c, kind, columns,
            getattr(library.cublas.ComputeType, compute), _ALGORITHM,
        )  # fmt: skip


@cache
def _signature(dtype: DType) -> Signature:
    """What a product takes: two matrices to read, and one to write."""
    element = cpp_of(dtype)[1]
    kinds = (f"{element} const*", f"{element} const*", f"{element}*")
    pointers = tuple(
        Parameter(8 * i, 8, 8, "u64", pointer=True, type=kind) for i, kind in enumerate(kinds)
    )
    return Signature(EntryPoint("cublasGemmEx", pointers))
