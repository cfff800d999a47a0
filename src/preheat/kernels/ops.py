"""The shipped kernels as functions over arrays, ours and those of other libraries."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from preheat.dtypes import DTYPES
from preheat.errors import CaptureError, InputError
from preheat.gpu import Gpu
from preheat.kernels import elementwise, gemm, rms_norm, softmax
from preheat.kernels.blas import Blas, Found, find
from preheat.kernels.forms import (
    Form,
    Given,
    Matrices,
    aligned,
    alike,
    given,
    keep_apart,
    matrices,
    not_negative,
    operand,
)
from preheat.kernels.nf4 import Nf4
from preheat.kernels.op import Op
from preheat.kernels.rows import sizes
from preheat.locks import Lock
from preheat.runtime.array import Array
from preheat.runtime.context import Context

__all__ = ["Ops"]


class Ops:
    """Forward and backward kernels on one device.

        ops = preheat.Ops(gpu)
        gx = ops.silu_backward(gy, x)
        ops.softmax_backward(gy, y, out=gy)      # in place

    Operands are contiguous float32, float16 or bfloat16, of any size and alignment; arithmetic is in
    float32. `out` is the memory for the result: an operand of the same shape, or memory that overlaps
    none; with it (and a `workspace`) nothing is allocated. Results of the shipped kernels depend on
    shapes and values alone: every run gives the same bits. Those of cuBLAS also depend on alignment.

    Products of matrices go to cuBLAS where there is one, else to the shipped kernels. `blas` is True to
    insist on cuBLAS, False to do without, or the one to use, with the math mode it has. The `out` of a
    product is never an operand.
    """

    def __init__(self, gpu: Gpu, *, blas: Blas | bool | Literal["auto"] = "auto") -> None:
        if not isinstance(gpu, Gpu):
            raise InputError(f"{gpu!r} is not a device", hint="Ops(preheat.device(…))")
        if isinstance(blas, Blas) and blas.gpu is not gpu:
            raise InputError(f"blas is of {blas.gpu!r}, not of {gpu!r}")
        if not isinstance(blas, Blas | bool | str) or (isinstance(blas, str) and blas != "auto"):
            raise InputError(f"blas {blas!r} is neither 'auto', nor True or False, nor a preheat.Blas")
        self.gpu, self._blas = gpu, blas
        self._choosing = Lock()
        self._chosen: tuple[Context, Blas | None] | None = None  # for one life of the device
        if blas is True:
            self._choice()

    # Elements

    def silu(self, x: Any, *, out: Any = None, stream: object = None) -> Any:
        """`x / (1 + exp(-x))`"""
        like, operands = alike(x=x)
        y, n = self._result("out", out, like, stream, operands), like.size
        op = elementwise.silu(n, like.dtype)
        op.launch(self.gpu, x, y.array, n, stream=stream, aligned=aligned(y, *operands))
        return y.array

    def silu_backward(self, gy: Any, x: Any, *, out: Any = None, stream: object = None) -> Any:
        """The gradient for `x`: `gy s (1 + x - x s)` with `s = 1 / (1 + exp(-x))`."""
        like, operands = alike(gy=gy, x=x)
        gx, n = self._result("out", out, like, stream, operands), like.size
        op = elementwise.silu_backward(n, like.dtype)
        op.launch(self.gpu, gy, x, gx.array, n, stream=stream, aligned=aligned(gx, *operands))
        return gx.array

    def swiglu(self, gate: Any, up: Any, *, out: Any = None, stream: object = None) -> Any:
        """`silu(gate) up`"""
        like, operands = alike(gate=gate, up=up)
        y, n = self._result("out", out, like, stream, operands), like.size
        op = elementwise.swiglu(n, like.dtype)
        op.launch(self.gpu, gate, up, y.array, n, stream=stream, aligned=aligned(y, *operands))
        return y.array

    def swiglu_backward(
        self, gy: Any, gate: Any, up: Any, *, out: Any = None, stream: object = None
    ) -> tuple[Any, Any]:
        """The gradients for `gate` and `up`; `out` is a pair of them."""
        like, operands = alike(gy=gy, gate=gate, up=up)
        g_gate, g_up = self._results(out, (like, like), stream, operands)
        op = elementwise.swiglu_backward(like.size, like.dtype)
        whole = aligned(g_gate, g_up, *operands)
        results = g_gate.array, g_up.array
        op.launch(self.gpu, gy, gate, up, *results, like.size, stream=stream, aligned=whole)
        return results

    # Rows: the last axis

    def softmax(self, x: Any, *, out: Any = None, stream: object = None) -> Any:
        """The softmax of each row."""
        like, operands = alike(x=x)
        (rows, width), y = like.matrix("x"), self._result("out", out, like, stream, operands)
        op = softmax.softmax(rows, width, like.dtype)
        op.launch(self.gpu, x, y.array, rows, width, stream=stream, aligned=aligned(y, *operands))
        return y.array

    def softmax_backward(self, gy: Any, y: Any, *, out: Any = None, stream: object = None) -> Any:
        """The gradient for what `y` is the softmax of: `y (gy - sum_j gy_j y_j)`."""
        like, operands = alike(gy=gy, y=y)
        (rows, width), gx = like.matrix("gy"), self._result("out", out, like, stream, operands)
        op = softmax.softmax_backward(rows, width, like.dtype)
        whole = aligned(gx, *operands)
        op.launch(self.gpu, gy, y, gx.array, rows, width, stream=stream, aligned=whole)
        return gx.array

    def rms_norm(
        self, x: Any, gamma: Any, *, eps: float, out: Any = None, stream: object = None
    ) -> Any:
        """Each row of `x` over the root of its mean square and `eps`, times `gamma`."""
        like, operands = alike(x=x)
        rows, width = like.matrix("x")
        operands += (operand("gamma", gamma).require(like.row, "a row of x"),)
        y = self._result("out", out, like, stream, operands)
        eps = not_negative("eps", eps)
        op, whole = rms_norm.rms_norm(rows, width, like.dtype), aligned(y, *operands)
        op.launch(self.gpu, x, gamma, y.array, eps, rows, width, stream=stream, aligned=whole)
        return y.array

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
        like, operands = alike(gy=gy, x=x)
        rows, width = like.matrix("gy")
        operands += (operand("gamma", gamma).require(like.row, "a row of x"),)
        results = self._results(out, (like, like.row), stream, operands)
        room = Form(self.rms_norm_workspace(rows, width, like.dtype), DTYPES["float32"])
        partial = self._workspace(workspace, room, stream, (*operands, *results))
        eps, gx, g_gamma = not_negative("eps", eps), results[0].array, results[1].array
        groups, whole = rms_norm.groups(rows, width, like.dtype), aligned(*results, *operands)
        arguments = {
            "rms_norm_strips": (gy, x, gamma, partial, rows, width, groups),
            "rms_norm_backward": (gy, x, gamma, gx, partial, g_gamma, eps, rows, width, groups),
            "rms_norm_gamma": (partial, g_gamma, groups, width),
        }
        for op in rms_norm.rms_norm_backward(rows, width, like.dtype):
            known = whole or op.name == "rms_norm_gamma"  # whose operands are the workspace's
            op.launch(self.gpu, *arguments[op.name], stream=stream, aligned=known)
        return gx, g_gamma

    def rms_norm_workspace(self, rows: int, width: int, dtype: object) -> tuple[int]:
        """The shape of a workspace for `rms_norm_backward` with such an `x`."""
        rows, width = sizes(rows, width)
        return (rms_norm.workspace(rows, width, dtype),)

    # Matrices

    @property
    def blas(self) -> Blas | None:
        """cuBLAS, or None where the shipped kernels make products; an event says which, and why."""
        if isinstance(self._blas, Blas):
            return self._blas
        return self._choice() if self._blas else None

    def _choice(self) -> Blas | None:
        context = self.gpu._context
        if (known := self._chosen) and known[0] is context:  # every product asks: without the lock
            return known[1]
        with self._choosing:
            if (known := self._chosen) and known[0] is context:
                return known[1]
            found = find(self.gpu)
            blas = self._choose(found)
            self._chosen = context, blas
        uses = "shipped kernels" if blas is None else f"cuBLAS {blas.version}"
        reason = found if isinstance(found, str) else "it is installed"
        self.gpu.builder.events.emit("blas", device=self.gpu.name, uses=uses, reason=reason)
        return blas

    def _choose(self, found: Found | str) -> Blas | None:
        if isinstance(found, str) and self._blas == "auto":
            return None
        try:
            return Blas(self.gpu, found=found)
        except CaptureError as error:
            error.hint = "multiply once before the capture, or ask for ops.blas there"
            raise

    def gemm(
        self, a: Any, b: Any, *, out: Any = None, accumulate: bool = False, stream: object = None
    ) -> Any:
        """`a b` for `a[m, k]` and `b[k, n]`; to `accumulate` is to add it to what `out` holds."""
        found = matrices(a=(a, "mk"), b=(b, "kn"))
        c = self._sum(out, "mn", found, accumulate, stream)
        op = gemm.gemm(**found.dims, dtype=found.dtype)
        return self._product(op, found, a, b, c, accumulate, stream)

    def gemm_backward_a(
        self, gc: Any, b: Any, *, out: Any = None, accumulate: bool = False, stream: object = None
    ) -> Any:
        """The gradient for `a` of `a b`: `gc b^T` for `gc[m, n]` and `b[k, n]`, or `b` as an `Nf4`."""
        found = matrices(nf4="b", gc=(gc, "mn"), b=(b, "kn"))
        dims, ga = found.dims, self._sum(out, "mk", found, accumulate, stream)
        if not isinstance(b, Nf4):
            op = gemm.gemm_backward_a(**dims, dtype=found.dtype)
            return self._product(op, found, gc, b, ga, accumulate, stream)
        op, mnk = gemm.gemm_backward_a_nf4(**dims, dtype=found.dtype), (dims[each] for each in "mnk")
        operands, whole = (gc, b.codes, b.scales, ga.array), aligned(ga, found.operands[0])
        op.launch(self.gpu, *operands, *mnk, bool(accumulate), stream=stream, aligned=whole)
        return ga.array

    def gemm_backward_b(
        self, a: Any, gc: Any, *, out: Any = None, accumulate: bool = False, stream: object = None
    ) -> Any:
        """The gradient for `b` of `a b`: `a^T gc` for `a[m, k]` and `gc[m, n]`."""
        found = matrices(a=(a, "mk"), gc=(gc, "mn"))
        gb = self._sum(out, "kn", found, accumulate, stream)
        op = gemm.gemm_backward_b(**found.dims, dtype=found.dtype)
        return self._product(op, found, a, gc, gb, accumulate, stream)

    def _product(
        self, op: Op, of: Matrices, a: Any, b: Any, c: Given, accumulate: bool, stream: object
    ) -> Any:
        blas, mnk, add = self.blas, (size for _, size in op.dims), bool(accumulate)
        if blas is not None:
            blas._multiply(op, of.dtype, a, b, c.array, add=add, stream=stream)
        else:
            whole = aligned(c, *of.operands)
            op.launch(self.gpu, a, b, c.array, *mnk, add, stream=stream, aligned=whole)
        return c.array

    def _sum(self, out: Any, axes: str, of: Matrices, accumulate: bool, stream: object) -> Given:
        """Memory for a product, which is made while its operands are still read."""
        if accumulate and out is None:
            raise InputError("to accumulate is to add to out, and there is none")
        like = Form(tuple(of.dims[axis] for axis in axes), of.dtype)
        made = self._result("out", out, like, stream)
        keep_apart(made, of.operands)
        return made

    def _results(
        self, out: Any, forms: tuple[Form, Form], stream: object, operands: Iterable[Given]
    ) -> tuple[Given, Given]:
        """Memory for two results, as `_result` finds it, which have nothing in common."""
        (one, two), (form, other) = _pair(out), forms
        first = self._result("out[0]", one, form, stream, operands)
        second = self._result("out[1]", two, other, stream, operands)
        keep_apart(second, (first,))
        return first, second

    def _result(
        self, name: str, out: Any, like: Form, stream: object, operands: Iterable[Given] = ()
    ) -> Given:
        """Memory for a result: what was given, if it fits, or new. It may take an operand's place."""
        if out is None:
            return given(name, self._new(name, like, stream))
        found = operand(name, out).require(like, "needed")
        if not found.writable:
            raise InputError(f"{name} is read-only")
        keep_apart(found, operands, in_place=True)
        return found

    def _workspace(self, out: Any, room: Form, stream: object, others: Iterable[Given]) -> Any:
        """The same for memory whose shape does not matter, and which nothing else may share."""
        if out is None:
            return self._new("workspace", room, stream)
        found = given("workspace", out).require_packed()
        if found.form.dtype is not room.dtype or found.form.size < room.size:
            hint = "ops.rms_norm_workspace(rows, width, dtype) is its shape, in float32"
            raise InputError(f"workspace is {found.form}, not at least {room}", hint=hint)
        if not found.writable:
            raise InputError("workspace is read-only")
        keep_apart(found, others)
        return out

    def _new(self, name: str, like: Form, stream: object) -> Array:
        try:
            return self.gpu.empty(like.shape, like.dtype, stream=stream)
        except CaptureError as error:
            argument = name.partition("[")[0]
            error.hint = f"give {argument}=…, made before the capture or taken from a gpu.pool()"
            raise


def _pair(out: Any) -> tuple[Any, Any]:
    """The two parts of an `out`, either of which may be missing."""
    if out is None:
        return None, None
    if not isinstance(out, tuple | list) or len(out) != 2:
        raise InputError("out is a pair here: one result for each gradient")
    return out[0], out[1]
