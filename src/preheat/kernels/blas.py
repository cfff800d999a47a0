"""cuBLAS, where it is installed: a handle with a workspace for each stream and each captured graph."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

from preheat.devices import base
from preheat.devices.active_capture import ALLOCATE, ActiveCapture
from preheat.devices.arguments import Signature
from preheat.devices.array import Array
from preheat.devices.base import LEGACY_STREAMS, ON_GPU
from preheat.devices.context import Context
from preheat.devices.launch import LaunchArguments, Operation
from preheat.devices.stream import raw_stream
from preheat.errors import CaptureError, DeviceError, InputError, did_you_mean
from preheat.gpu import Gpu
from preheat.kernels.op import Op, add_to_traces, cpp_of, dimension
from preheat.model.artifact import EntryPoint, Parameter
from preheat.model.dtypes import DTYPES, DType
from preheat.process.callsite import caller
from preheat.process.locks import no_fork

__all__ = ["MATH", "Blas", "CuBlas", "Found", "Handle", "RawHandle", "by_cublas", "find"]


class _Math(NamedTuple):
    """The math modes of a cuBLAS handle, and the compute types for float32 and for shorter types."""

    modes: tuple[str, ...]
    float32: str
    shorter: str


# Sums of shorter types stay in fp32, even when several blocks contribute to one sum.
_WHOLE = "DISALLOW_REDUCED_PRECISION_REDUCTION"

#: The math modes by name.
MATH = {
    "fp32": _Math(("PEDANTIC_MATH",), "COMPUTE_32F_PEDANTIC", "COMPUTE_32F_PEDANTIC"),
    "tf32": _Math(("TF32_TENSOR_OP_MATH", _WHOLE), "COMPUTE_32F_FAST_TF32", "COMPUTE_32F"),
    "default": _Math(("DEFAULT_MATH", _WHOLE), "COMPUTE_32F", "COMPUTE_32F"),
}
_TYPES = {"float32": 0, "float16": 2, "bfloat16": 14}  # CUDA_R_32F, CUDA_R_16F, CUDA_R_16BF
_RECREATE = "create it again: preheat.Blas(gpu)"
_FACTORS = (ctypes.c_float * 2)(0, 1)
_ZERO, _ONE = (ctypes.addressof(_FACTORS) + n * ctypes.sizeof(ctypes.c_float) for n in range(2))
_ALGORITHM = -1  # CUBLAS_GEMM_DEFAULT: cuBLAS selects the algorithm.
_FOREIGN_HANDLES = 4  # handles kept for streams of other libraries, whose end is not reported


class Found(NamedTuple):
    """The Python bindings of cuBLAS, and its version."""

    cublas: Any
    version: str


def find(gpu: Gpu) -> Found | str:
    """Return cuBLAS for a device, or the reason why it cannot be used."""
    on_gpu = gpu._context.device.dlpack[0] == ON_GPU
    return _bindings() if on_gpu else f"{gpu.name} is not a GPU"


@cache
def _bindings() -> Found | str:
    try:
        with no_fork:
            from nvmath.bindings import cublas
    except ImportError:
        return "nvmath-python is not installed"
    try:
        return Found(cublas, ".".join(str(cublas.get_property(part)) for part in range(3)))
    except RuntimeError as error:  # The library or the driver may be missing.
        return str(error).splitlines()[0]


class CuBlas(NamedTuple):
    """cuBLAS in one session of a GPU."""

    context: Context
    cublas: Any

    def call(self, name: str, *args: Any) -> Any:
        """Call a function of cuBLAS on this GPU; its errors become `DeviceError`."""
        function = _beside_captures(self.context.device, getattr(self.cublas, name))
        try:
            return function(*args)
        except self.cublas.cuBLASError as error:
            raise DeviceError(f"{name} of cuBLAS failed: {error}") from None


def _beside_captures(device: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` so that it leaves captures valid. The emulator has no context to change."""
    return device.beside_captures(function) if device.dlpack[0] == ON_GPU else function


class RawHandle:
    """A cuBLAS handle by its number; it is destroyed when the object is dropped."""

    def __init__(self, library: CuBlas) -> None:
        self._library = library
        self.number: int = library.call("create")
        library.context.resources.add(self)

    def release(self) -> None:
        """Destroy the handle now, because the device is closed."""
        self._library.call("destroy", self.number)

    def __del__(self) -> None:
        context = self._library.context
        call = self._library.call
        if hasattr(self, "number") and context.lost is None:
            number = self.number
            context.deferred_cleanups.append(lambda: call("destroy", number))


class Handle:
    """A cuBLAS handle with its own workspace.

    When it is dropped, the raw handle goes to `unused` for the next one. The workspace is freed as any
    memory is: once the work that uses it has completed, and the graphs that use it are gone.
    """

    def __init__(
        self, library: CuBlas, raw: RawHandle, workspace: Array, unused: list[RawHandle]
    ) -> None:
        self._library = library
        self._raw = raw
        self.workspace = workspace
        self._unused = unused
        self.stream: base.Stream | None = None  # where it works

    @property
    def number(self) -> int:
        """The number by which cuBLAS knows the handle."""
        return self._raw.number

    def bind(self, stream: base.Stream, mode: int) -> Handle:
        """Let the handle work in `stream`, in a math mode."""
        call = self._library.call
        call("set_stream", self.number, stream.handle)
        # After the stream, because setting a stream discards the workspace.
        call("set_workspace", self.number, self.workspace.address, self.workspace.nbytes)
        call("set_math_mode", self.number, mode)
        self.stream = stream
        return self

    def __del__(self) -> None:
        self._unused.append(self._raw)


class Blas:
    """Matrix products by cuBLAS on one GPU, summed in fp32. `Ops` uses it.

    Every stream has its own handle, with a workspace. Results have the same bits every time for
    operands with the same alignment, by which cuBLAS selects its kernels. The workspace of a closed
    stream or a deleted graph is freed at the next product, once its work has completed. Of the streams
    of other libraries, only the default stream and the most recently used ones keep a workspace.

    A captured graph, of preheat or another library, keeps a workspace for itself. No workspace can be
    allocated inside a capture, so one is kept ready: from the start, and after every product outside
    captures. `reserve` allocates more.

    Args:
        gpu: A GPU. The emulator has no cuBLAS.
        math: `"fp32"` is full precision for every type. `"tf32"` rounds float32 to 10 bits of mantissa
            and multiplies on tensor cores. `"default"` is fp32 for float32, and tensor cores for
            shorter types.

    Raises:
        DeviceError: cuBLAS is not installed, or the device is not a GPU.

    Examples:
        >>> try:
        ...     ops = preheat.Ops(gpu, blas=preheat.Blas(gpu, math="tf32"))
        ... except preheat.PreheatError:
        ...     ops = preheat.Ops(gpu, blas=False)  # without cuBLAS
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
            raise DeviceError(f"cuBLAS is not available: {found}", hint=hint)
        self.gpu = gpu
        self.math = math
        self.version = found.version
        self._library = CuBlas(gpu._context, found.cublas)
        self._lock = threading.RLock()  # A forked child cannot use a GPU, so it never takes the lock.
        self._handles: dict[int, Handle] = {}  # by stream id, the most recently used last
        # With the captures that use them.
        self._captured: list[tuple[weakref.ref[ActiveCapture], Handle]] = []
        # Handles that graphs of other libraries keep, by the id of the stream during the capture.
        self._retained: weakref.WeakValueDictionary[int, Handle] = weakref.WeakValueDictionary()
        self._ready: list[Handle] = []
        self._unused: list[RawHandle] = []  # of handles that were dropped
        self.reserve()

    def reserve(self, captures: int = 1) -> None:
        """Keep workspaces ready for this number of captures.

        Examples:
            >>> def prepare(blas: preheat.Blas):
            ...     blas.reserve(16)  # before 16 captures in a row
        """
        count = dimension("captures", captures, least=0)
        context = self._library.context
        context.require_alive(_RECREATE)
        context.refuse_in_capture(ALLOCATE)
        with self._lock:
            self._prune()
            while len(self._ready) < count:
                workspace = Array.new(context, (self._workspace_size,), DTYPES["uint8"], context.stream)
                raw = self._unused.pop() if self._unused else RawHandle(self._library)
                self._ready.append(Handle(self._library, raw, workspace, self._unused))

    def _prune(self) -> None:
        """Drop the handles of streams that nothing holds any more, and of captures that have ended."""
        context = self._library.context
        for _, stream in list(context.idle_streams):
            self._handles.pop(stream.id, None)
        own = {stream.id for stream in context.order.streams()}
        foreign = [
            key
            for key, handle in self._handles.items()
            if key not in own and handle.stream and handle.stream.handle not in LEGACY_STREAMS
        ]
        for key in foreign[: max(len(foreign) - _FOREIGN_HANDLES, 0)]:
            del self._handles[key]
        active = context.active_captures()
        self._captured = [each for each in self._captured if each[0]() in active]

    @property
    def _workspace_size(self) -> int:
        """The size of a workspace in bytes that NVIDIA recommends."""
        return (32 if self.gpu.arch.major >= 9 else 4) << 20

    def _handle_of(self, stream: base.Stream) -> Handle:
        """Return the handle of a stream."""
        with self._lock:
            handle = self._handles.pop(stream.id, None)
            if handle is None:
                if not self._ready:
                    self.reserve()
                handle = self._bind(self._ready.pop(), stream)
            self._handles[stream.id] = handle
            self._tidy()
            return handle

    def _tidy(self) -> None:
        """Drop handles that nothing uses any more, and have one ready for a capture."""
        with self._lock:
            self._prune()
            if not self._ready:
                with suppress(CaptureError):  # A capture of another thread forbids allocations.
                    self.reserve()

    def _handle_in_foreign_capture(self, stream: base.Stream) -> Handle:
        """Return the handle for the capture of another library, whose graph keeps the handle."""
        with self._lock:
            handle = self._retained.get(stream.id)
            if handle is None:
                if not self._ready:
                    raise _no_workspace()
                handle = self._retained[stream.id] = self._bind(self._ready.pop(), stream)
                stream.retain(handle)
            return handle

    def _handle_in_capture(self, capture: ActiveCapture, stream: base.Stream) -> Handle:
        """Return the handle for a capture of preheat, which works in a stream of the capture."""
        with self._lock:
            for owner, handle in self._captured:
                if owner() is capture:
                    return handle if handle.stream is stream else self._bind(handle, stream)
            if not self._ready:
                raise _no_workspace()
            handle = self._bind(self._ready.pop(), stream)
            self._captured.append((weakref.ref(capture), handle))
            return handle

    def _bind(self, handle: Handle, stream: base.Stream) -> Handle:
        """Let a handle work in `stream`."""
        modes = self._library.cublas.Math
        return handle.bind(stream, sum(getattr(modes, name) for name in MATH[self.math].modes))

    def _multiply(
        self, op: Op, dtype: DType, a: Any, b: Any, c: Any, *, add: bool = False, stream: object = None
    ) -> None:
        """Compute what `op` describes, with matrices of `dtype`; `add` adds the product to `c`.

        The op is appended to all open traces.
        """
        _Product(self, op, dtype, add, stream).run(a, b, c)
        add_to_traces(by_cublas(op))

    def _gemm(
        self, handle: Handle, op: Op, dtype: DType, addresses: tuple[int, int, int], *, add: bool
    ) -> None:
        """Let cuBLAS compute what `op` describes, given the addresses of the three matrices."""
        # cuBLAS stores matrices by columns, so it sees each of ours transposed. Therefore it computes
        # the transposed result, which has the operands in reverse order.
        cublas = self._library.cublas
        math = MATH[self.math]
        dims = dict(op.dims)
        axes = _AXES[op.name]
        rows, columns, length = dims[axes.rows], dims[axes.columns], dims[axes.length]
        a, b, c = addresses
        kind = _TYPES[dtype.name]
        compute = getattr(cublas.ComputeType, math.shorter if dtype.size < 4 else math.float32)
        self._library.call(
            "gemm_ex", handle.number,
            cublas.Operation(int(axes.b)), cublas.Operation(int(axes.a)),
            columns, rows, length, _ONE,
            b, kind, length if axes.b else columns,
            a, kind, rows if axes.a else length,
            _ONE if add else _ZERO, c, kind, columns,
            compute, _ALGORITHM,
        )  # fmt: skip


def _no_workspace() -> CaptureError:
    return CaptureError(
        "cuBLAS has no workspace ready for this capture: every graph keeps one",
        where=caller(),
        hint="compute a product before each capture, or call blas.reserve(n) before n captures",
    )


class _Axes(NamedTuple):
    """The dimensions of a product: its rows, columns and summed length, and transposed operands."""

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
    """Return `op` marked as computed by cuBLAS, or `op` itself when cuBLAS does not compute it."""
    return op._replace(by="cuBLAS") if op.name in _AXES else op


class _Product(Operation):
    """A product, which is checked and ordered like a launch and submitted by cuBLAS."""

    RECREATE = _RECREATE

    def __init__(self, blas: Blas, op: Op, dtype: DType, add: bool, stream: object) -> None:
        context = blas._library.context
        context.require_alive(_RECREATE)
        raw = None if stream is None else raw_stream(context, stream)
        super().__init__(context, _signature(dtype), raw, blocking=blas.gpu.blocking)
        self._blas = blas
        self._op = op
        self._dtype = dtype
        self._add = add

    def _submit(self, arguments: LaunchArguments, stream: base.Stream) -> None:
        if self.context.order.is_capturing(stream):
            self._multiply(self._blas._handle_in_foreign_capture(stream), arguments)
            return
        handle = self._blas._handle_of(stream)
        uses = {handle.workspace.buffer.uses: True}
        with self.context.order.section(stream, uses, capturing=False):
            self._multiply(handle, arguments)

    def _capture(self, arguments: LaunchArguments, capture: ActiveCapture, stream: base.Stream) -> None:
        handle = self._blas._handle_in_capture(capture, stream)
        # Products in different streams of the capture share the workspace, so they are ordered.
        with capture.streams.ordered(stream, {handle.workspace.buffer.uses: True}):
            self._multiply(handle, arguments)
        arguments.use(handle.workspace, write=True)
        arguments.arrays[len(arguments.values)] = handle.workspace
        capture.add_uses(arguments)

    def _multiply(self, handle: Handle, arguments: LaunchArguments) -> None:
        a, b, c = arguments.values
        self._blas._gemm(handle, self._op, self._dtype, (a, b, c), add=self._add)


@cache
def _signature(dtype: DType) -> Signature:
    """Return the signature of a product: two matrices to read, and one to write."""
    element = cpp_of(dtype)[1]
    kinds = (f"{element} const*", f"{element} const*", f"{element}*")
    pointers = tuple(
        Parameter(8 * i, 8, 8, "u64", pointer=True, type=kind) for i, kind in enumerate(kinds)
    )
    return Signature(EntryPoint("cublasGemmEx", pointers))
