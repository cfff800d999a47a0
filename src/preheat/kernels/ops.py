"""The shipped kernels as functions over arrays, ours and those of other libraries."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from numbers import Real
from typing import Any, Literal, NamedTuple

from preheat.dtypes import DType, dtype_of
from preheat.errors import InputError
from preheat.gpu import Gpu
from preheat.kernels import elementwise, gemm, rms_norm, softmax
from preheat.kernels.blas import Blas, find
from preheat.kernels.nf4 import Nf4
from preheat.kernels.op import Op, cpp_of
from preheat.runtime.array import Array
from preheat.runtime.context import Context
from preheat.runtime.launch import UNORDERED
from preheat.runtime.operands import Operand, kind_of

__all__ = ["Ops"]

_Named = Mapping[str, Any]


class Ops:
    """Forward and backward kernels on one device.

        ops = preheat.Ops(gpu)
        gx = ops.silu_backward(gy, x)
        ops.softmax_backward(gy, y, out=gy)      # in place

    Operands are contiguous float32, float16 or bfloat16, of any size and alignment; arithmetic is in
    float32. `out` is the memory for the result: an operand of the same shape, or memory that overlaps
    none; with it (and a `workspace`) nothing is allocated. Results depend on shapes and values alone:
    every run gives the same bits.

    Products of matrices go to cuBLAS where there is one, else to the shipped kernels; `blas` is the one
    to use, with the math mode it has, or None for none. Their `out` is never an operand.
    """

    def __init__(self, gpu: Gpu, *, blas: Blas | Literal["auto"] | None = "auto") -> None:
        if not isinstance(gpu, Gpu):
            raise InputError(f"{gpu!r} is not a device", hint="Ops(preheat.device(…))")
        if isinstance(blas, Blas) and blas.gpu is not gpu:
            raise InputError(f"blas is of {blas.gpu!r}, not of {gpu!r}")
        if not (blas is None or blas == "auto" or isinstance(blas, Blas)):
            raise InputError(f"blas {blas!r} is neither a preheat.Blas, nor 'auto', nor None")
        self.gpu, self._blas = gpu, blas
        self._choosing = threading.Lock()
        self._chosen: tuple[Context, Blas | None] | None = None  # for one life of the device

    # Elements

    def silu(self, x: Any, *, out: Any = None, stream: object = None) -> Any:
        """`x / (1 + exp(-x))`"""
        like = _form("x", x)
        y, n = self._result("out", out, like, stream, {"x": x}), like.size
        elementwise.silu(n, like.dtype).launch(self.gpu, x, y, n, stream=stream)
        return y

    def silu_backward(self, gy: Any, x: Any, *, out: Any = None, stream: object = None) -> Any:
        """The gradient for `x`: `gy s (1 + x - x s)` with `s = 1 / (1 + exp(-x))`."""
        like = _alike(gy=gy, x=x)
        gx, n = self._result("out", out, like, stream, {"gy": gy, "x": x}), like.size
        elementwise.silu_backward(n, like.dtype).launch(self.gpu, gy, x, gx, n, stream=stream)
        return gx

    def swiglu(self, gate: Any, up: Any, *, out: Any = None, stream: object = None) -> Any:
        """`silu(gate) up`"""
        like = _alike(gate=gate, up=up)
        y, n = self._result("out", out, like, stream, {"gate": gate, "up": up}), like.size
        elementwise.swiglu(n, like.dtype).launch(self.gpu, gate, up, y, n, stream=stream)
        return y

    def swiglu_backward(
        self, gy: Any, gate: Any, up: Any, *, out: Any = None, stream: object = None
    ) -> tuple[Any, Any]:
        """The gradients for `gate` and `up`; `out` is a pair of them."""
        like = _alike(gy=gy, gate=gate, up=up)
        (first, second), operands = _pair(out), {"gy": gy, "gate": gate, "up": up}
        g_gate = self._result("out[0]", first, like, stream, operands)
        g_up = self._result("out[1]", second, like, stream, operands)
        _keep_apart("out[1]", g_up, {"out[0]": g_gate})
        op = elementwise.swiglu_backward(like.size, like.dtype)
        op.launch(self.gpu, gy, gate, up, g_gate, g_up, like.size, stream=stream)
        return g_gate, g_up

    # Rows: the last axis

    def softmax(self, x: Any, *, out: Any = None, stream: object = None) -> Any:
        """The softmax of each row."""
        like = _form("x", x)
        (rows, width), y = like.matrix("x"), self._result("out", out, like, stream, {"x": x})
        softmax.softmax(rows, width, like.dtype).launch(self.gpu, x, y, rows, width, stream=stream)
        return y

    def softmax_backward(self, gy: Any, y: Any, *, out: Any = None, stream: object = None) -> Any:
        """The gradient for what `y` is the softmax of: `y (gy - sum_j gy_j y_j)`."""
        like = _alike(gy=gy, y=y)
        (rows, width), operands = like.matrix("gy"), {"gy": gy, "y": y}
        gx = self._result("out", out, like, stream, operands)
        op = softmax.softmax_backward(rows, width, like.dtype)
        op.launch(self.gpu, gy, y, gx, rows, width, stream=stream)
        return gx

    def rms_norm(
        self, x: Any, gamma: Any, *, eps: float, out: Any = None, stream: object = None
    ) -> Any:
        """Each row of `x` over the root of its mean square and `eps`, times `gamma`."""
        like = _form("x", x)
        rows, width = like.matrix("x")
        _check("gamma", gamma, like.row, "a row of x")
        y = self._result("out", out, like, stream, {"x": x, "gamma": gamma})
        eps = _not_negative("eps", eps)
        op = rms_norm.rms_norm(rows, width, like.dtype)
        op.launch(self.gpu, x, gamma, y, eps, rows, width, stream=stream)
        return y

    def rms_norm_backward(
        self,
        gy: Any,
        x: Any,
        gamma: Any,
        *,
        eps: float,
        out: Any = None,
        workspace: Any = None,
        stream: object = None,
    ) -> tuple[Any, Any]:
        """The gradients for `x` and `gamma`; `out` is a pair of them.

        `workspace` is float32 and at least as large as `rms_norm_workspace` says.
        """
        like = _alike(gy=gy, x=x)
        rows, width = like.matrix("gy")
        _check("gamma", gamma, like.row, "a row of x")
        (first, second), operands = _pair(out), {"gy": gy, "x": x, "gamma": gamma}
        gx = self._result("out[0]", first, like, stream, operands)
        g_gamma = self._result("out[1]", second, like.row, stream, operands)
        room = _Form(self.rms_norm_workspace(rows, width, like.dtype), dtype_of("float32"))
        _keep_apart("out[1]", g_gamma, {"out[0]": gx})
        others = operands | {"out[0]": gx, "out[1]": g_gamma}
        partial = self._workspace(workspace, room, stream, others)
        eps, (number, share) = _not_negative("eps", eps), rms_norm.groups(rows, width, like.dtype)
        main, over_groups = rms_norm.rms_norm_backward(rows, width, like.dtype)
        sizes = (eps, rows, width, share)
        main.launch(self.gpu, gy, x, gamma, gx, partial, *sizes, stream=stream)
        over_groups.launch(self.gpu, partial, g_gamma, number, width, stream=stream)
        return gx, g_gamma

    def rms_norm_workspace(self, rows: int, width: int, dtype: object) -> tuple[int, int]:
        """The shape of a workspace for `rms_norm_backward` with such an `x`."""
        return rms_norm.groups(rows, width, dtype).number, width

    # Matrices

    @property
    def blas(self) -> Blas | None:
        """cuBLAS, or None where the shipped kernels make products; an event says which, and why."""
        if self._blas != "auto":
            return self._blas
        context = self.gpu._context
        with self._choosing:
            if self._chosen is None or self._chosen[0] is not context:
                self._chosen = context, self._choose()
            return self._chosen[1]

    def _choose(self) -> Blas | None:
        found = find(self.gpu)
        blas = None if isinstance(found, str) else Blas(self.gpu, found=found)
        uses = "shipped kernels" if blas is None else f"cuBLAS {blas.version}"
        reason = found if isinstance(found, str) else "it is installed"
        self.gpu.builder.events.emit("blas", device=self.gpu.name, uses=uses, reason=reason)
        return blas

    def gemm(
        self, a: Any, b: Any, *, out: Any = None, accumulate: bool = False, stream: object = None
    ) -> Any:
        """`a b` for `a[m, k]` and `b[k, n]`; to `accumulate` is to add it to what `out` holds."""
        dtype, dims = _dims(a=(a, "mk"), b=(b, "kn"))
        operands, like = {"a": a, "b": b}, _Form((dims["m"], dims["n"]), dtype)
        c = self._sum(out, like, operands, accumulate, stream)
        return self._product(gemm.gemm(**dims, dtype=dtype), dtype, a, b, c, accumulate, stream)

    def gemm_backward_a(
        self, gc: Any, b: Any, *, out: Any = None, accumulate: bool = False, stream: object = None
    ) -> Any:
        """The gradient for `a` of `a b`: `gc b^T` for `gc[m, n]` and `b[k, n]`, or `b` as an `Nf4`."""
        dtype, dims = _dims(gc=(gc, "mn"), b=(b, "kn"))
        parts = {"codes": b.codes, "scales": b.scales} if isinstance(b, Nf4) else {"b": b}
        like = _Form((dims["m"], dims["k"]), dtype)
        ga = self._sum(out, like, {"gc": gc, **parts}, accumulate, stream)
        if not isinstance(b, Nf4):
            op = gemm.gemm_backward_a(**dims, dtype=dtype)
            return self._product(op, dtype, gc, b, ga, accumulate, stream)
        op, sizes = gemm.gemm_backward_a_nf4(**dims, dtype=dtype), (dims["m"], dims["n"], dims["k"])
        op.launch(self.gpu, gc, b.codes, b.scales, ga, *sizes, bool(accumulate), stream=stream)
        return ga

    def gemm_backward_b(
        self, a: Any, gc: Any, *, out: Any = None, accumulate: bool = False, stream: object = None
    ) -> Any:
        """The gradient for `b` of `a b`: `a^T gc` for `a[m, k]` and `gc[m, n]`."""
        dtype, dims = _dims(a=(a, "mk"), gc=(gc, "mn"))
        operands, like = {"a": a, "gc": gc}, _Form((dims["k"], dims["n"]), dtype)
        gb = self._sum(out, like, operands, accumulate, stream)
        op = gemm.gemm_backward_b(**dims, dtype=dtype)
        return self._product(op, dtype, a, gc, gb, accumulate, stream)

    def _product(
        self, op: Op, dtype: DType, a: Any, b: Any, c: Any, accumulate: bool, stream: object
    ) -> Any:
        blas, sizes = self.blas, [size for _, size in op.dims]
        if blas is not None:
            blas.multiply(op, dtype, a, b, c, add=bool(accumulate), stream=stream)
        else:
            op.launch(self.gpu, a, b, c, *sizes, bool(accumulate), stream=stream)
        return c

    def _sum(self, out: Any, like: _Form, operands: _Named, accumulate: bool, stream: object) -> Any:
        """Memory for a product, which is made while its operands are still read."""
        if accumulate and out is None:
            raise InputError("to accumulate is to add to out, and there is none")
        made = self._result("out", out, like, stream, {})
        _keep_apart("out", made, operands)
        return made

    def _result(self, name: str, given: Any, like: _Form, stream: object, operands: _Named) -> Any:
        """Memory for a result: what was given, if it fits, or new. It may take an operand's place."""
        if given is None:
            return self.gpu.empty(like.shape, like.dtype, stream=stream)
        _check(name, given, like, "needed")
        if not isinstance(given, Array) and not _foreign(name, given).writable:
            raise InputError(f"{name} is read-only")
        _keep_apart(name, given, operands, in_place=True)
        return given

    def _workspace(self, given: Any, room: _Form, stream: object, others: _Named) -> Any:
        """The same for memory whose shape does not matter, and which nothing else may share."""
        if given is None:
            return self.gpu.empty(room.shape, room.dtype, stream=stream)
        found = _form("workspace", given)
        if found.dtype is not room.dtype or found.size < room.size:
            raise InputError(f"workspace is {found}, not at least {room}")
        _keep_apart("workspace", given, others)
        return given


class _Form(NamedTuple):
    """What memory has to be like."""

    shape: tuple[int, ...]
    dtype: DType

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def row(self) -> _Form:
        return self._replace(shape=self.shape[-1:])

    def matrix(self, name: str) -> tuple[int, int]:
        """Rows, of all axes but the last, and width."""
        if not self.shape:
            raise InputError(f"{name} has no axes, and so no rows")
        return math.prod(self.shape[:-1]), self.shape[-1]

    def __str__(self) -> str:
        return f"{self.dtype} of shape {self.shape}"


def _form(name: str, given: Any) -> _Form:
    """What an operand is like; `InputError` with its name for one that no kernel takes."""
    try:
        shape, (dtype, _) = tuple(given.shape), cpp_of(given.dtype)
    except AttributeError:
        raise _no_array(name, given) from None
    except InputError as error:
        raise InputError(f"{name}: {error}", hint=error.hint) from None
    if 0 in shape:
        raise InputError(f"{name} is empty: its shape is {shape}")
    _require_no_gaps(name, given)
    return _Form(shape, dtype)


def _require_no_gaps(name: str, given: Any) -> None:
    if not isinstance(given, Array) and not _foreign(name, given).contiguous:
        raise InputError(f"{name} is not contiguous", hint="make a copy of it that is")


def _alike(**operands: Any) -> _Form:
    """What all these operands are like."""
    (first, given), *others = operands.items()
    like = _form(first, given)
    for name, other in others:
        _check(name, other, like, first)
    return like


def _check(name: str, given: Any, like: _Form, as_what: str) -> None:
    """Refuse memory that is not like `like`."""
    found = _form(name, given)
    if found != like:
        raise InputError(f"{name} is {found}, not {like} as {as_what}")


def _dims(**operands: tuple[Any, str]) -> tuple[DType, dict[str, int]]:
    """The element type that matrices share, and their dimensions by the names of their axes."""
    dtype, dims = None, dict[str, int]()
    for name, (given, axes) in operands.items():
        shape: tuple[int, ...]
        if isinstance(given, Nf4):
            _require_no_gaps("codes", given.codes)
            _require_no_gaps("scales", given.scales)
            given.check()
            shape = given.shape
        else:
            shape, found = _form(name, given)
            if found is not (dtype := dtype or found):
                raise InputError(f"{name} is {found}, not {dtype} as the other matrix")
        if len(shape) != 2:
            raise InputError(f"{name} is a matrix, and cannot have the shape {shape}")
        for axis, size in zip(axes, shape, strict=True):
            if dims.setdefault(axis, size) != size:
                text = f"{name}[{', '.join(axes)}] has {axis}={size}"
                raise InputError(f"{text}, where the other matrix has {axis}={dims[axis]}")
    assert dtype is not None
    return dtype, dims


def _no_array(name: str, given: Any) -> InputError:
    hint = "copy it to the device first: gpu.array(…)"
    return InputError(f"{name} is {type(given).__name__}, not an array", hint=hint)


def _foreign(name: str, given: Any) -> Operand:
    """What another library says of its memory; nothing waits for the work that fills it."""
    kind = kind_of(given)
    if kind is None:
        raise _no_array(name, given)
    try:
        return kind.read(given, UNORDERED)
    except InputError as error:
        raise InputError(f"{name}: {error}", hint=error.hint) from None


def _span(name: str, given: Any) -> tuple[int, int]:
    """Where memory begins and ends."""
    found = given if isinstance(given, Array) else _foreign(name, given)
    return found.address, found.address + found.nbytes


def _keep_apart(name: str, given: Any, others: _Named, *, in_place: bool = False) -> None:
    """Refuse memory that shares a byte with others, unless it shares all of them `in_place`."""
    start, end = mine = _span(name, given)
    for other, array in others.items():
        first, last = span = _span(other, array)
        if start < last and first < end and not (in_place and span == mine):
            raise InputError(f"{name} overlaps {other}", hint="give it memory of its own")


def _pair(out: Any) -> tuple[Any, Any]:
    """The two parts of an `out`, either of which may be missing."""
    if out is None:
        return None, None
    if not isinstance(out, tuple | list) or len(out) != 2:
        raise InputError("out is a pair here: one result for each gradient")
    return out[0], out[1]


def _not_negative(name: str, value: Any) -> float:
    number = float(value) if isinstance(value, Real) else math.nan
    if not 0 <= number < math.inf:
        raise InputError(f"{name} {value!r} is not a number from 0 up")
    return number
