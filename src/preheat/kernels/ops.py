"""The shipped kernels as functions over arrays of preheat and of other libraries."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from preheat.devices.array import Array
from preheat.devices.context import Context
from preheat.errors import CaptureError, InputError
from preheat.gpu import Gpu
from preheat.kernels import elementwise, gemm, rms_norm, softmax
from preheat.kernels.blas import Blas, Found, find
from preheat.kernels.nf4 import Nf4
from preheat.kernels.op import Op
from preheat.kernels.operands import (
    ArrayArgument,
    ArraySpec,
    GemmOperands,
    aligned,
    array_argument,
    gemm_operands,
    matching_operands,
    nonnegative,
    operand,
    reject_overlap,
)
from preheat.kernels.rows import row_dimensions
from preheat.model.dtypes import DTYPES
from preheat.process.locks import Lock

__all__ = ["Ops"]


class Ops:
    """Forward and backward kernels on one device.

    Operands are contiguous float32, float16 or bfloat16, of any size and alignment. Arithmetic is in
    float32. `out` is the memory for the result: an operand of the same shape, or memory that overlaps
    no operand. With `out` (and a `workspace` where there is one) nothing is allocated. Results of the
    shipped kernels depend only on shapes and values: every run gives the same bits. Results of cuBLAS
    also depend on alignment.

    Args:
        gpu: The device.
        blas: Matrix products use cuBLAS if it is installed, and the shipped kernels otherwise. True
            requires cuBLAS, False never uses it, and a `Blas` is used with its math mode. The `out` of
            a product cannot be an operand.

    Examples:
        >>> ops = preheat.Ops(gpu)
        >>> x = gpu.array([[0.0, 0.0]], "float32")
        >>> ops.softmax(x).numpy()
        array([[0.5, 0.5]], dtype=float32)
        >>> ops.silu(x, out=x) is x  # in place
        True
    """

    def __init__(self, gpu: Gpu, *, blas: Blas | bool | Literal["auto"] = "auto") -> None:
        if not isinstance(gpu, Gpu):
            raise InputError(f"{gpu!r} is not a device", hint="Ops(preheat.device(…))")
        if isinstance(blas, Blas) and blas.gpu is not gpu:
            raise InputError(f"blas belongs to {blas.gpu!r}, not to {gpu!r}")
        if not isinstance(blas, Blas | bool | str) or (isinstance(blas, str) and blas != "auto"):
            raise InputError(f"blas {blas!r} is not 'auto', True, False or a preheat.Blas")
        self.gpu = gpu
        self._blas = blas
        self._choosing = Lock()
        self._chosen: tuple[Context, Blas | None] | None = None  # Valid for this context.
        if blas is True:
            self._choice()

    def _launch(
        self,
        op: Op,
        operands: tuple[ArrayArgument, ...],
        results: tuple[ArrayArgument, ...],
        values: tuple[Any, ...],
        stream: object,
    ) -> None:
        """Launch `op`. `values` are the arguments after the arrays."""
        arrays = (*operands, *results)
        args = (*(each.array for each in arrays), *values)
        op.launch(self.gpu, *args, stream=stream, aligned=aligned(*arrays))

    # Elements

    def silu(self, x: Any, *, out: Any = None, stream: object = None) -> Any:
        """Compute `x / (1 + exp(-x))`.

        Examples:
            >>> preheat.Ops(gpu).silu(gpu.zeros(2)).numpy()
            array([0., 0.], dtype=float32)
        """
        spec, operands = matching_operands(x=x)
        y = self._result("out", out, spec, stream, operands)
        op = elementwise.silu(spec.size, spec.dtype)
        self._launch(op, operands, (y,), (spec.size,), stream)
        return y.array

    def silu_backward(self, gy: Any, x: Any, *, out: Any = None, stream: object = None) -> Any:
        """Compute the gradient for `x`: `gy s (1 + x - x s)` with `s = 1 / (1 + exp(-x))`.

        Examples:
            >>> preheat.Ops(gpu).silu_backward(gpu.zeros(2).fill(1), gpu.zeros(2)).numpy()
            array([0.5, 0.5], dtype=float32)
        """
        spec, operands = matching_operands(gy=gy, x=x)
        gx = self._result("out", out, spec, stream, operands)
        op = elementwise.silu_backward(spec.size, spec.dtype)
        self._launch(op, operands, (gx,), (spec.size,), stream)
        return gx.array

    def swiglu(self, gate: Any, up: Any, *, out: Any = None, stream: object = None) -> Any:
        """Compute `silu(gate) up`.

        Examples:
            >>> preheat.Ops(gpu).swiglu(gpu.zeros(2), gpu.zeros(2).fill(3)).numpy()
            array([0., 0.], dtype=float32)
        """
        spec, operands = matching_operands(gate=gate, up=up)
        y = self._result("out", out, spec, stream, operands)
        op = elementwise.swiglu(spec.size, spec.dtype)
        self._launch(op, operands, (y,), (spec.size,), stream)
        return y.array

    def swiglu_backward(
        self, gy: Any, gate: Any, up: Any, *, out: Any = None, stream: object = None
    ) -> tuple[Any, Any]:
        """Compute the gradients for `gate` and `up`. `out` is a pair.

        Examples:
            >>> one = gpu.zeros(1).fill(1)
            >>> for_gate, for_up = preheat.Ops(gpu).swiglu_backward(one, gpu.zeros(1), one)
            >>> for_gate.numpy()
            array([0.5], dtype=float32)
        """
        spec, operands = matching_operands(gy=gy, gate=gate, up=up)
        results = self._results(out, (spec, spec), stream, operands)
        op = elementwise.swiglu_backward(spec.size, spec.dtype)
        self._launch(op, operands, results, (spec.size,), stream)
        return results[0].array, results[1].array

    # Rows: the last axis

    def softmax(self, x: Any, *, out: Any = None, stream: object = None) -> Any:
        """Compute the softmax of each row.

        Examples:
            >>> preheat.Ops(gpu).softmax(gpu.zeros((1, 4))).numpy()
            array([[0.25, 0.25, 0.25, 0.25]], dtype=float32)
        """
        spec, operands = matching_operands(x=x)
        rows, width = spec.matrix("x")
        y = self._result("out", out, spec, stream, operands)
        op = softmax.softmax(rows, width, spec.dtype)
        self._launch(op, operands, (y,), (rows, width), stream)
        return y.array

    def softmax_backward(self, gy: Any, y: Any, *, out: Any = None, stream: object = None) -> Any:
        """Compute the gradient for the operand whose softmax is `y`: `y (gy - sum_j gy_j y_j)`.

        Examples:
            >>> gy, y = gpu.array([[1.0, 0.0]], "float32"), gpu.array([[0.5, 0.5]], "float32")
            >>> preheat.Ops(gpu).softmax_backward(gy, y).numpy()
            array([[ 0.25, -0.25]], dtype=float32)
        """
        spec, operands = matching_operands(gy=gy, y=y)
        rows, width = spec.matrix("gy")
        gx = self._result("out", out, spec, stream, operands)
        op = softmax.softmax_backward(rows, width, spec.dtype)
        self._launch(op, operands, (gx,), (rows, width), stream)
        return gx.array

    def rms_norm(
        self, x: Any, gamma: Any, *, eps: float, out: Any = None, stream: object = None
    ) -> Any:
        """Compute `gamma x / sqrt(mean(x^2) + eps)` for each row of `x`.

        Examples:
            >>> x = gpu.array([[3.0, -3.0]], "float32")
            >>> preheat.Ops(gpu).rms_norm(x, gpu.zeros(2).fill(2), eps=0.0).numpy()
            array([[ 2., -2.]], dtype=float32)
        """
        spec, operands = matching_operands(x=x)
        rows, width = spec.matrix("x")
        operands += (operand("gamma", gamma).require(spec.row, "a row of x"),)
        y = self._result("out", out, spec, stream, operands)
        number = nonnegative("eps", eps)
        op = rms_norm.rms_norm(rows, width, spec.dtype)
        self._launch(op, operands, (y,), (number, rows, width), stream)
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
        """Compute the gradients for `x` and `gamma`.

        Args:
            gy: The gradient of the result.
            x: The operand of the forward pass.
            gamma: The weights.
            eps: As in `rms_norm`.
            out: A pair of arrays for the results.
            workspace: Float32 memory with at least as many elements as `rms_norm_workspace` returns.
            stream: The stream.

        Examples:
            >>> ops, one = preheat.Ops(gpu), gpu.zeros((1, 2)).fill(1)
            >>> gx, for_gamma = ops.rms_norm_backward(one, one, one.reshape(2), eps=0.0)
            >>> for_gamma.numpy()
            array([1., 1.], dtype=float32)
        """
        spec, operands = matching_operands(gy=gy, x=x)
        rows, width = spec.matrix("gy")
        operands += (operand("gamma", gamma).require(spec.row, "a row of x"),)
        results = self._results(out, (spec, spec.row), stream, operands)
        needed = ArraySpec(self.rms_norm_workspace(rows, width, spec.dtype), DTYPES["float32"])
        room = self._workspace(workspace, needed, stream, (*operands, *results))
        groups = rms_norm.groups(rows, width, spec.dtype)
        values = (nonnegative("eps", eps), rows, width, groups)
        args = (*(each.array for each in (*operands, *results, room)), *values)
        is_aligned = aligned(*results, *operands)
        for op in rms_norm.rms_norm_backward(rows, width, spec.dtype):
            taken = rms_norm.backward_arguments(op.name, *args)
            # rms_norm_gamma reads only the workspace, whose alignment is not reported.
            no_report = is_aligned or op.name == "rms_norm_gamma"
            op.launch(self.gpu, *taken, stream=stream, aligned=no_report)
        return results[0].array, results[1].array

    def rms_norm_workspace(self, rows: int, width: int, dtype: object) -> tuple[int]:
        """Return the shape of a workspace for `rms_norm_backward` with an `x` of these dimensions.

        Examples:
            >>> ops = preheat.Ops(gpu)
            >>> workspace = gpu.empty(ops.rms_norm_workspace(8, 64, "float32"))
        """
        rows, width = row_dimensions(rows, width)
        return (rms_norm.workspace(rows, width, dtype),)

    # Matrix products

    @property
    def blas(self) -> Blas | None:
        """The `Blas` in use, or None if the shipped kernels compute products. An event reports it."""
        if isinstance(self._blas, Blas):
            return self._blas
        return self._choice() if self._blas else None

    def _choice(self) -> Blas | None:
        context = self.gpu._context
        if (known := self._chosen) and known[0] is context:  # Without the lock: every product asks.
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
            error.hint = "compute one product before the capture, or read ops.blas there"
            raise

    def gemm(
        self, a: Any, b: Any, *, out: Any = None, accumulate: bool = False, stream: object = None
    ) -> Any:
        """Compute `a b` for `a[m, k]` and `b[k, n]`.

        Args:
            a: The left operand.
            b: The right operand.
            out: The memory for the result.
            accumulate: Add the product to `out`.
            stream: The stream.

        Examples:
            >>> a = gpu.array([[1.0, 2.0]], "float32")
            >>> preheat.Ops(gpu).gemm(a, gpu.array(np.eye(2, dtype="float32"))).numpy()
            array([[1., 2.]], dtype=float32)
        """
        operands = gemm_operands(a=(a, "mk"), b=(b, "kn"))
        c = self._product_result(out, "mn", operands, accumulate, stream)
        op = gemm.gemm(**operands.dims, dtype=operands.dtype)
        return self._product(op, operands, c, accumulate, stream)

    def gemm_backward_a(
        self, gc: Any, b: Any, *, out: Any = None, accumulate: bool = False, stream: object = None
    ) -> Any:
        """Compute the gradient for `a` of `a b`: `gc b^T` for `gc[m, n]` and `b[k, n]` or an `Nf4`.

        Examples:
            >>> gc, b = gpu.array([[1.0]], "float32"), gpu.array([[2.0], [3.0]], "float32")
            >>> preheat.Ops(gpu).gemm_backward_a(gc, b).numpy()
            array([[2., 3.]], dtype=float32)
        """
        operands = gemm_operands(nf4="b", gc=(gc, "mn"), b=(b, "kn"))
        dims = operands.dims
        ga = self._product_result(out, "mk", operands, accumulate, stream)
        if not isinstance(b, Nf4):
            op = gemm.gemm_backward_a(**dims, dtype=operands.dtype)
            return self._product(op, operands, ga, accumulate, stream)
        op = gemm.gemm_backward_a_nf4(**dims, dtype=operands.dtype)
        args = (gc, b.codes, b.scales, ga.array, *(dims[each] for each in "mnk"), bool(accumulate))
        op.launch(self.gpu, *args, stream=stream, aligned=aligned(ga, operands.operands[0]))
        return ga.array

    def gemm_backward_b(
        self, a: Any, gc: Any, *, out: Any = None, accumulate: bool = False, stream: object = None
    ) -> Any:
        """Compute the gradient for `b` of `a b`: `a^T gc` for `a[m, k]` and `gc[m, n]`.

        Examples:
            >>> a, gc = gpu.array([[2.0, 3.0]], "float32"), gpu.array([[1.0]], "float32")
            >>> preheat.Ops(gpu).gemm_backward_b(a, gc).numpy()
            array([[2.],
                   [3.]], dtype=float32)
        """
        operands = gemm_operands(a=(a, "mk"), gc=(gc, "mn"))
        gb = self._product_result(out, "kn", operands, accumulate, stream)
        op = gemm.gemm_backward_b(**operands.dims, dtype=operands.dtype)
        return self._product(op, operands, gb, accumulate, stream)

    def _product(
        self,
        op: Op,
        of: GemmOperands,
        c: ArrayArgument,
        accumulate: bool,
        stream: object,
    ) -> Any:
        blas = self.blas
        add = bool(accumulate)
        if blas is None:
            values = (*(size for _, size in op.dims), add)
            self._launch(op, of.operands, (c,), values, stream)
        else:
            arrays = (each.array for each in (*of.operands, c))
            blas._multiply(op, of.dtype, *arrays, add=add, stream=stream)
        return c.array

    def _product_result(
        self, out: Any, axes: str, of: GemmOperands, accumulate: bool, stream: object
    ) -> ArrayArgument:
        """Return memory for a product, which is written while its operands are still read."""
        if accumulate and out is None:
            raise InputError("accumulate=True adds to out, but no out was given")
        spec = ArraySpec(tuple(of.dims[axis] for axis in axes), of.dtype)
        result = self._result("out", out, spec, stream)
        reject_overlap(result, of.operands)
        return result

    def _results(
        self,
        out: Any,
        specs: tuple[ArraySpec, ArraySpec],
        stream: object,
        operands: Iterable[ArrayArgument],
    ) -> tuple[ArrayArgument, ArrayArgument]:
        """Return memory for two results, each as `_result` does, which do not overlap."""
        outs = _pair(out)
        first = self._result("out[0]", outs[0], specs[0], stream, operands)
        second = self._result("out[1]", outs[1], specs[1], stream, operands)
        reject_overlap(second, (first,))
        return first, second

    def _result(
        self,
        name: str,
        out: Any,
        spec: ArraySpec,
        stream: object,
        operands: Iterable[ArrayArgument] = (),
    ) -> ArrayArgument:
        """Return `out` if it fits, or new memory if it is None. `out` may be one of the operands."""
        if out is None:
            return array_argument(name, self._new_result(name, spec, stream))
        result = operand(name, out).require(spec, "needed")
        if not result.writable:
            raise InputError(f"{name} is read-only")
        reject_overlap(result, operands, in_place=True)
        return result

    def _new_result(self, name: str, spec: ArraySpec, stream: object) -> Array:
        """Allocate the result `name` of an op."""
        try:
            return self.gpu.empty(spec.shape, spec.dtype, stream=stream)
        except CaptureError as error:
            argument = name.partition("[")[0]
            error.hint = f"pass {argument}=…, allocated before the capture or from a gpu.pool()"
            raise

    def _workspace(
        self, out: Any, spec: ArraySpec, stream: object, others: Iterable[ArrayArgument]
    ) -> ArrayArgument:
        """Return `out` if it is large enough and overlaps no other array, or new memory if None."""
        if out is None:
            return array_argument("workspace", self._new_result("workspace", spec, stream))
        workspace = array_argument("workspace", out).require_contiguous()
        if workspace.spec.dtype is not spec.dtype or workspace.spec.size < spec.size:
            hint = "allocate ops.rms_norm_workspace(rows, width, dtype) elements of float32"
            raise InputError(f"workspace is {workspace.spec}, not at least {spec}", hint=hint)
        if not workspace.writable:
            raise InputError("workspace is read-only")
        reject_overlap(workspace, others)
        return workspace


def _pair(out: Any) -> tuple[Any, Any]:
    """Return the two parts of `out`, each of which may be None."""
    if out is None:
        return None, None
    if not isinstance(out, tuple | list) or len(out) != 2:
        raise InputError("out must be a pair: one array for each gradient")
    return out[0], out[1]
