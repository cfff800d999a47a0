"""cuBLAS, where there is one: a handle for each stream, each with its workspace, fit for captures."""

from __future__ import annotations

import ctypes
import operator
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any, NamedTuple, cast

from preheat.artifact import EntryPoint, Parameter
from preheat.callers import caller
from preheat.devices import base
from preheat.devices.base import ON_GPU
from preheat.dtypes import DTYPES, DType
from preheat.errors import CaptureError, DeviceError, InputError, did_you_mean
from preheat.gpu import Gpu
from preheat.kernels.op import Op, cpp_of, tell
from preheat.runtime.arguments import Signature
from preheat.runtime.array import Array
from preheat.runtime.context import Context
from preheat.runtime.launch import UNORDERED, Launch, order, settle
from preheat.runtime.memory import Buffer
from preheat.runtime.stream import raw_stream
from preheat.runtime.window import ALLOCATE, Window

__all__ = ["MATH", "Blas", "Found", "by_cublas", "find"]


class _Math(NamedTuple):
    """A math mode as cuBLAS knows it; how it computes is said for float32, and for shorter types."""

    modes: tuple[str, ...]
    compute: tuple[str, str]


# Sums of shorter types stay in fp32 to the end, also where several blocks share one.
_WHOLE = "DISALLOW_REDUCED_PRECISION_REDUCTION"

#: The math modes there are.
MATH = {
    "fp32": _Math(("PEDANTIC_MATH",), ("COMPUTE_32F_PEDANTIC", "COMPUTE_32F_PEDANTIC")),
    "tf32": _Math(("TF32_TENSOR_OP_MATH", _WHOLE), ("COMPUTE_32F_FAST_TF32", "COMPUTE_32F")),
    "default": _Math(("DEFAULT_MATH", _WHOLE), ("COMPUTE_32F", "COMPUTE_32F")),
}
_TYPES = {"float32": 0, "float16": 2, "bfloat16": 14}  # CUDA_R_32F, CUDA_R_16F, CUDA_R_16BF
_ALGORITHM = -1  # CUBLAS_GEMM_DEFAULT: cuBLAS chooses


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
    Every stream has its handle and every handle its workspace: results have the same bits every time.
    The workspace of a stream that was closed is given back at the next product, behind its work.

    A captured graph keeps a workspace to itself, and inside a capture none can be made: one is ready
    from the beginning and after every product outside of captures, and `reserve` has more ready.
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
        self.gpu, self.math, self.context = gpu, MATH[math], gpu._context
        self.cublas, self.version = found
        self._making = threading.RLock()
        self._seats: dict[int, _Seat] = {}  # by the number of the stream
        self._lent: list[tuple[weakref.ref[Window], _Seat]] = []  # to captures
        self._ready: list[_Seat] = []
        self._spare: list[_Handle] = []  # left by seats that are gone
        self.reserve()

    def multiply(
        self, op: Op, dtype: DType, a: Any, b: Any, c: Any, *, add: bool = False, stream: object = None
    ) -> None:
        """Do what `op` describes, with matrices of `dtype`; `add` leaves in `c` what it held.

        Everyone who is watching sees it.
        """
        _Product(self, op, dtype, add, stream).run(a, b, c)
        tell(by_cublas(op))

    def reserve(self, captures: int = 1) -> None:
        """Have workspaces ready for so many captures."""
        count = operator.index(captures) if hasattr(captures, "__index__") else -1
        if count < 0 or isinstance(captures, bool):
            raise InputError(f"captures {captures!r} is not a count of captures")
        self.context.require()
        self.context.forbid(ALLOCATE)
        with self._making:
            under_way = self.context.captures()
            self._lent = [each for each in self._lent if each[0]() in under_way]
            self._prune()
            while len(self._ready) < count:
                handle = self._spare.pop() if self._spare else _Handle(self)
                room = _Room(self.context, self._workspace, self.context.stream)
                self._ready.append(_Seat(self, handle, room))

    def _prune(self) -> None:
        """Drop the seats of streams that nobody holds any more."""
        for _, stream in list(self.context.idle):
            self._seats.pop(stream.handle, None)

    @property
    def _workspace(self) -> int:
        """Bytes of a workspace, as NVIDIA recommends."""
        return (32 if self.gpu.arch.major >= 9 else 4) << 20

    def seat(self, stream: base.Stream) -> _Seat:
        """Handle and workspace of a stream."""
        with self._making:
            if not self.context.windows:
                self._prune()
            found = self._seats.get(stream.handle)
            if found is None:
                if not self._ready:
                    self.reserve()
                found = self._seats[stream.handle] = self._ready.pop().bind(stream)
            if not self._ready and not self.context.windows:
                self.reserve()
            return found

    def seat_within(self, window: Window) -> _Seat:
        """Handle and workspace of a capture."""
        with self._making:
            for lent, seat in self._lent:
                if lent() is window:
                    return seat
            if not self._ready:
                raise CaptureError(
                    "cuBLAS has no workspace ready for this capture: every graph keeps one",
                    where=caller(),
                    hint="multiply once before each capture, or blas.reserve(n) before n of them",
                )
            seat = self._ready.pop().bind(window.stream)
            self._lent.append((weakref.ref(window), seat))
            return seat

    def call(self, name: str, *args: Any) -> Any:
        """Call a function of cuBLAS on this GPU; its error becomes one of ours."""
        with _current(self.context.device):
            try:
                return getattr(self.cublas, name)(*args)
            except self.cublas.cuBLASError as error:
                raise DeviceError(f"{name} of cuBLAS failed: {error}") from None


def _current(device: base.Device) -> AbstractContextManager[object]:
    """cuBLAS works in the current context; the emulator, where tests stand in for it, has none."""
    current: Callable[[], AbstractContextManager[object]] = getattr(device, "current", nullcontext)
    return current()


class _Room(Buffer):
    """A workspace. With a graph that uses it lives what else its products need: `held`."""

    __slots__ = ("held",)

    def __init__(self, context: Context, size: int, home: base.Stream) -> None:
        super().__init__(context, size, home)
        self.held: list[object] = []


class _Handle:
    """A handle of cuBLAS. Dropping it gives it back."""

    def __init__(self, blas: Blas) -> None:
        self._context, self._call = blas.context, blas.call
        self.number: int = blas.call("create")
        self._context.holders.add(self)

    def release(self) -> None:
        """Give it back at once: the device is closed."""
        self._call("destroy", self.number)

    def __del__(self) -> None:
        if hasattr(self, "number") and self._context.lost is None:
            self._context.garbage.append(partial(self._call, "destroy", self.number))


class _Seat:
    """A handle and its workspace.

    Dropping it leaves the handle to the next one, and gives the workspace back, as memory is: once the
    work that uses it has ended, and not before a graph that does is gone.
    """

    def __init__(self, blas: Blas, handle: _Handle, room: _Room) -> None:
        self._handle, self.room = handle, room
        self._call, self._spare = blas.call, blas._spare
        self._mode = sum(getattr(blas.cublas.Math, name) for name in blas.math.modes)

    @property
    def handle(self) -> int:
        """The number by which cuBLAS knows the handle."""
        return self._handle.number

    def bind(self, stream: base.Stream) -> _Seat:
        """Work in `stream` from now on."""
        self._call("set_stream", self.handle, stream.handle)
        # Not before: setting the stream takes the workspace away.
        self._call("set_workspace", self.handle, self.room.address, self.room.size)
        self._call("set_math_mode", self.handle, self._mode)
        return self

    def __del__(self) -> None:
        self._spare.append(self._handle)


class _Form(NamedTuple):
    """A product: rows and columns of its result, what is summed over, which operands are transposed."""

    rows: str
    columns: str
    length: str
    a: bool = False
    b: bool = False


_FORMS = {
    "gemm": _Form("m", "n", "k"),
    "gemm_backward_a": _Form("m", "k", "n", b=True),
    "gemm_backward_b": _Form("k", "n", "m", a=True),
}


def by_cublas(op: Op) -> Op:
    """The operation as cuBLAS does it; the same `op` for one that it does not know."""
    return op._replace(by="cuBLAS") if op.name in _FORMS else op


class _Product(Launch):
    """A call of cuBLAS: checked and ordered like a launch, submitted by another library."""

    def __init__(self, blas: Blas, op: Op, dtype: DType, add: bool, stream: object) -> None:
        context = blas.context
        context.require()
        raw = None if stream is None else raw_stream(context, stream)
        none = cast(Any, None)  # nothing of ours is launched
        signature, blocking = _signature(dtype), blas.gpu.blocking
        super().__init__(context, none, signature, none, raw, module=none, blocking=blocking)
        self._blas, self._op, self._dtype, self._add = blas, op, dtype, add

    def run(self, *args: Any) -> None:
        """Check, order and call; in a thread that captures, as part of the capture."""
        window = self.context.window(self.stream)
        if window is not None:
            with window.attempt():
                self._capture(window, args)
            return
        stream = self.choose(args)
        seat = self._blas.seat(stream)
        gathered = self.gather(args, stream.handle)
        gathered.buffers.append(seat.room)
        order(self.context, gathered, stream, named=self.stream is not None)
        self._call(seat, *gathered.values)
        settle(self.context, gathered, stream, named=self.stream is not None)
        if self.blocking:
            self._wait(stream)

    def _capture(self, window: Window, args: tuple[Any, ...]) -> None:
        gathered = self.gather(args, UNORDERED)
        seat = self._blas.seat_within(window)
        self._call(seat, *gathered.values)
        seat.room.held += [operand.owner for operand in gathered.foreign]
        for array in (*gathered.arrays.values(), Array(seat.room, DTYPES["uint8"], (seat.room.size,))):
            window.exported(array)

    def _call(self, seat: _Seat, a: int, b: int, c: int) -> None:
        # cuBLAS takes columns for rows, and so sees every matrix of ours transposed: it is asked for
        # the transposed result, which has the operands in reverse order.
        cublas, dims, form = self._blas.cublas, dict(self._op.dims), _FORMS[self._op.name]
        rows, columns, length = dims[form.rows], dims[form.columns], dims[form.length]
        kind, compute = _TYPES[self._dtype.name], self._blas.math.compute[self._dtype.size < 4]
        one, old = ctypes.c_float(1), ctypes.c_float(self._add)
        self._blas.call(
            "gemm_ex", seat.handle, cublas.Operation(int(form.b)), cublas.Operation(int(form.a)),
            columns, rows, length, ctypes.addressof(one),
            b, kind, length if form.b else columns,
            a, kind, rows if form.a else length,
            ctypes.addressof(old), c, kind, columns,
            getattr(cublas.ComputeType, compute), _ALGORITHM,
        )  # fmt: skip


@cache
def _signature(dtype: DType) -> Signature:
    """What a product takes: three matrices."""
    kind = f"{cpp_of(dtype)[1]}*"
    pointers = tuple(Parameter(8 * i, 8, 8, "u64", pointer=True, type=kind) for i in range(3))
    return Signature(EntryPoint("cublasGemmEx", pointers))
