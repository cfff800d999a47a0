"""The shipped kernels as functions over arrays of preheat and of other libraries."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal

from preheat.dtypes import DTYPES
from preheat.errors import CaptureError, InputError
from preheat.gpu import Gpu
from preheat.kernels import elementwise, gemm, rms_norm, softmax
from preheat.kernels.blas import Blas, Found, by_cublas, find
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
from preheat.kernels.plan import (
    Launcher,
    Plan,
    Plans,
    Step,
    add_plan,
    address_getter,
    functions,
    kernel_launcher,
    new_result,
)
from preheat.kernels.rows import row_dimensions
from preheat.locks import Lock
from preheat.runtime.context import Context

__all__ = ["Ops"]

_NO_ARRAY = object()
# Functions that launch by a plan, and functions that return the key of one.
_planned_silu, _key_of_silu = functions(1, 1, values=1)
_planned_elements, _key_of_elements = functions(2, 1, values=1)
_planned_pair, _key_of_pair = functions(3, 2, values=1)
_planned_softmax, _key_of_softmax = functions(1, 1, values=2)
_planned_softmax_backward, _key_of_softmax_backward = functions(2, 1, values=2)
_planned_rms_norm, _key_of_rms_norm = functions(2, 1, values=3, choice=True)
_planned_rms_norm_backward, _key_of_rms_norm_backward = functions(
    3, 2, values=4, choice=True, workspace=True
)
_planned_product, _key_of_product = functions(2, 1, values=4, choice=True)


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
        self._plans: Plans = {}
        if blas is True:
            self._choice()

    def _launch(
        self,
        steps: tuple[Step, ...],
        operands: tuple[ArrayArgument, ...],
        results: tuple[ArrayArgument, ...],
        values: tuple[Any, ...],
        stream: object,
        key: object,
        *,
        workspace: tuple[ArrayArgument, ...] = (),
        in_place: bool = True,
    ) -> None:
        """Make the launches of a call, and have a plan for later calls with the same key.

        `values` are the arguments after the arrays. A result may be an operand if `in_place`.
        """
        arguments = (*operands, *results, *workspace)
        args = (*(each.array for each in arguments), *values)
        is_aligned = aligned(*results, *operands)
        for step in steps:
            no_report = is_aligned or not step.reports_alignment
            step.op.launch(self.gpu, *step.pick(args), stream=stream, aligned=no_report)

        def launcher() -> Callable[[], Launcher | None] | None:
            found = kernel_launcher(self.gpu, steps, stream, args)
            return None if found is None else weakref.ref(found)

        ops = tuple(step.op for step in steps)
        reporting = tuple(
            each.op for each in steps if each.reports_alignment and not each.op.slow_reason
        )
        results += workspace
        self._plan(key, ops, operands, results, values, launcher, reporting, in_place=in_place)

    def _plan(
        self,
        key: object,
        ops: tuple[Op, ...],
        operands: tuple[ArrayArgument, ...],
        results: tuple[ArrayArgument, ...],
        values: tuple[Any, ...],
        launcher: Callable[[], Callable[[], Launcher | None] | None],
        reporting: tuple[Op, ...] = (),
        *,
        in_place: bool = False,
    ) -> None:
        """Have a plan for calls with this key, if there is a launcher for their arrays."""

        def make() -> Plan | None:
            address = address_getter([each.array for each in (*operands, *results)])
            found = None if address is None else launcher()
            if address is None or found is None:
                return None
            sizes = tuple(each.end - each.start for each in (*results, *operands))
            specs = tuple(each.spec for each in results)
            context = self.gpu._context
            return Plan(
                found, context, self.gpu, ops, reporting, values, address, sizes, in_place, specs
            )

        add_plan(self._plans, key, make)

    # Elements

    def silu(self, x: Any, *, out: Any = None, stream: object = None) -> Any:
        """Compute `x / (1 + exp(-x))`.

        Examples:
            >>> preheat.Ops(gpu).silu(gpu.zeros(2)).numpy()
            array([0., 0.], dtype=float32)
        """
        done = _planned_silu(self._plans, "silu", x, out, stream)
        if done is not None:
            return done
        spec, operands = matching_operands(x=x)
        y = self._result("out", out, spec, stream, operands)
        op = elementwise.silu(spec.size, spec.dtype)
        key = _key_of_silu(self._plans, "silu", x, out, stream)
        self._launch((Step(op),), operands, (y,), (spec.size,), stream, key)
        return y.array

    def silu_backward(self, gy: Any, x: Any, *, out: Any = None, stream: object = None) -> Any:
        """Compute the gradient for `x`: `gy s (1 + x - x s)` with `s = 1 / (1 + exp(-x))`.

        Examples:
            >>> preheat.Ops(gpu).silu_backward(gpu.zeros(2).fill(1), gpu.zeros(2)).numpy()
            array([0.5, 0.5], dtype=float32)
        """
        done = _planned_elements(self._plans, "silu_backward", gy, x, out, stream)
        if done is not None:
            return done
        spec, operands = matching_operands(gy=gy, x=x)
        gx = self._result("out", out, spec, stream, operands)
        op = elementwise.silu_backward(spec.size, spec.dtype)
        key = _key_of_elements(self._plans, "silu_backward", gy, x, out, stream)
        self._launch((Step(op),), operands, (gx,), (spec.size,), stream, key)
        return gx.array

    def swiglu(self, gate: Any, up: Any, *, out: Any = None, stream: object = None) -> Any:
        """Compute `silu(gate) up`.

        Examples:
            >>> preheat.Ops(gpu).swiglu(gpu.zeros(2), gpu.zeros(2).fill(3)).numpy()
            array([0., 0.], dtype=float32)
        """
        done = _planned_elements(self._plans, "swiglu", gate, up, out, stream)
        if done is not None:
            return done
        spec, operands = matching_operands(gate=gate, up=up)
        y = self._result("out", out, spec, stream, operands)
        op = elementwise.swiglu(spec.size, spec.dtype)
        key = _key_of_elements(self._plans, "swiglu", gate, up, out, stream)
        self._launch((Step(op),), operands, (y,), (spec.size,), stream, key)
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
        done: tuple[Any, Any] | None = _planned_pair(
            self._plans, "swiglu_backward", gy, gate, up, *_unchecked_pair(out), stream
        )
        if done is not None:
            return done
        spec, operands = matching_operands(gy=gy, gate=gate, up=up)
        results = self._results(out, (spec, spec), stream, operands)
        op = elementwise.swiglu_backward(spec.size, spec.dtype)
        key = _key_of_pair(self._plans, "swiglu_backward", gy, gate, up, *_unchecked_pair(out), stream)
        self._launch((Step(op),), operands, results, (spec.size,), stream, key)
        return results[0].array, results[1].array

    # Rows: the last axis

    def softmax(self, x: Any, *, out: Any = None, stream: object = None) -> Any:
        """Compute the softmax of each row.

        Examples:
            >>> preheat.Ops(gpu).softmax(gpu.zeros((1, 4))).numpy()
            array([[0.25, 0.25, 0.25, 0.25]], dtype=float32)
        """
        done = _planned_softmax(self._plans, "softmax", x, out, stream)
        if done is not None:
            return done
        spec, operands = matching_operands(x=x)
        rows, width = spec.matrix("x")
        y = self._result("out", out, spec, stream, operands)
        op = softmax.softmax(rows, width, spec.dtype)
        key = _key_of_softmax(self._plans, "softmax", x, out, stream)
        self._launch((Step(op),), operands, (y,), (rows, width), stream, key)
        return y.array

    def softmax_backward(self, gy: Any, y: Any, *, out: Any = None, stream: object = None) -> Any:
        """Compute the gradient for the operand whose softmax is `y`: `y (gy - sum_j gy_j y_j)`.

        Examples:
            >>> gy, y = gpu.array([[1.0, 0.0]], "float32"), gpu.array([[0.5, 0.5]], "float32")
            >>> preheat.Ops(gpu).softmax_backward(gy, y).numpy()
            array([[ 0.25, -0.25]], dtype=float32)
        """
        done = _planned_softmax_backward(self._plans, "softmax_backward", gy, y, out, stream)
        if done is not None:
            return done
        spec, operands = matching_operands(gy=gy, y=y)
        rows, width = spec.matrix("gy")
        gx = self._result("out", out, spec, stream, operands)
        op = softmax.softmax_backward(rows, width, spec.dtype)
        key = _key_of_softmax_backward(self._plans, "softmax_backward", gy, y, out, stream)
        self._launch((Step(op),), operands, (gx,), (rows, width), stream, key)
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
        done = _planned_rms_norm(self._plans, "rms_norm", x, gamma, out, stream, eps)
        if done is not None:
            return done
        spec, operands = matching_operands(x=x)
        rows, width = spec.matrix("x")
        operands += (operand("gamma", gamma).require(spec.row, "a row of x"),)
        y = self._result("out", out, spec, stream, operands)
        number = nonnegative("eps", eps)
        op = rms_norm.rms_norm(rows, width, spec.dtype)
        key = _key_of_rms_norm(self._plans, "rms_norm", x, gamma, out, stream, eps)
        self._launch((Step(op),), operands, (y,), (number, rows, width), stream, key)
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
        arrays = (gy, x, gamma, *_unchecked_pair(out), workspace)
        call = self._plans, "rms_norm_backward", *arrays, stream, eps
        done: tuple[Any, Any] | None = _planned_rms_norm_backward(*call)
        if done is not None:
            return done
        spec, operands = matching_operands(gy=gy, x=x)
        rows, width = spec.matrix("gy")
        operands += (operand("gamma", gamma).require(spec.row, "a row of x"),)
        results = self._results(out, (spec, spec.row), stream, operands)
        needed = ArraySpec(self.rms_norm_workspace(rows, width, spec.dtype), DTYPES["float32"])
        room = self._workspace(workspace, needed, stream, (*operands, *results))
        groups = rms_norm.groups(rows, width, spec.dtype)
        values = (nonnegative("eps", eps), rows, width, groups)
        steps = tuple(
            # rms_norm_gamma reads only the workspace, whose alignment is not reported.
            Step(op, partial(rms_norm.backward_arguments, op.name), op.name != "rms_norm_gamma")
            for op in rms_norm.rms_norm_backward(rows, width, spec.dtype)
        )
        key = _key_of_rms_norm_backward(*call)
        self._launch(steps, operands, results, values, stream, key, workspace=(room,))
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
        done = _planned_product(self._plans, "gemm", a, b, out, stream, accumulate)
        if done is not None:
            return done
        operands = gemm_operands(a=(a, "mk"), b=(b, "kn"))
        c = self._product_result(out, "mn", operands, accumulate, stream)
        op = gemm.gemm(**operands.dims, dtype=operands.dtype)
        key = _key_of_product(self._plans, "gemm", a, b, out, stream, accumulate)
        return self._product(op, operands, c, accumulate, stream, key)

    def gemm_backward_a(
        self, gc: Any, b: Any, *, out: Any = None, accumulate: bool = False, stream: object = None
    ) -> Any:
        """Compute the gradient for `a` of `a b`: `gc b^T` for `gc[m, n]` and `b[k, n]` or an `Nf4`.

        Examples:
            >>> gc, b = gpu.array([[1.0]], "float32"), gpu.array([[2.0], [3.0]], "float32")
            >>> preheat.Ops(gpu).gemm_backward_a(gc, b).numpy()
            array([[2., 3.]], dtype=float32)
        """
        done = _planned_product(self._plans, "gemm_backward_a", gc, b, out, stream, accumulate)
        if done is not None:
            return done
        operands = gemm_operands(nf4="b", gc=(gc, "mn"), b=(b, "kn"))
        dims = operands.dims
        ga = self._product_result(out, "mk", operands, accumulate, stream)
        if not isinstance(b, Nf4):
            op = gemm.gemm_backward_a(**dims, dtype=operands.dtype)
            key = _key_of_product(self._plans, "gemm_backward_a", gc, b, out, stream, accumulate)
            return self._product(op, operands, ga, accumulate, stream, key)
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
        done = _planned_product(self._plans, "gemm_backward_b", a, gc, out, stream, accumulate)
        if done is not None:
            return done
        operands = gemm_operands(a=(a, "mk"), gc=(gc, "mn"))
        gb = self._product_result(out, "kn", operands, accumulate, stream)
        op = gemm.gemm_backward_b(**operands.dims, dtype=operands.dtype)
        key = _key_of_product(self._plans, "gemm_backward_b", a, gc, out, stream, accumulate)
        return self._product(op, operands, gb, accumulate, stream, key)

    def _product(
        self,
        op: Op,
        of: GemmOperands,
        c: ArrayArgument,
        accumulate: bool,
        stream: object,
        key: object,
    ) -> Any:
        blas = self.blas
        add = bool(accumulate)
        values = (*(size for _, size in op.dims), add)
        if blas is None:
            self._launch((Step(op),), of.operands, (c,), values, stream, key, in_place=False)
            return c.array
        arrays = tuple(each.array for each in (*of.operands, c))
        blas._multiply(op, of.dtype, *arrays, add=add, stream=stream)

        def launcher() -> Callable[[], Launcher | None] | None:
            found = blas._launcher(op, of.dtype, arrays, add=add, stream=stream)
            return None if found is None else lambda: found

        self._plan(key, (by_cublas(op),), of.operands, (c,), values, launcher)
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
            return array_argument(name, new_result(self.gpu, name, spec, stream))
        found = operand(name, out).require(spec, "needed")
        if not found.writable:
            raise InputError(f"{name} is read-only")
        reject_overlap(found, operands, in_place=True)
        return found

    def _workspace(
        self, out: Any, spec: ArraySpec, stream: object, others: Iterable[ArrayArgument]
    ) -> ArrayArgument:
        """Return `out` if it is large enough and overlaps no other array, or new memory if None."""
        if out is None:
            return array_argument("workspace", new_result(self.gpu, "workspace", spec, stream))
        workspace = array_argument("workspace", out).require_contiguous()
        if workspace.spec.dtype is not spec.dtype or workspace.spec.size < spec.size:
            hint = "allocate ops.rms_norm_workspace(rows, width, dtype) elements of float32"
            raise InputError(f"workspace is {workspace.spec}, not at least {spec}", hint=hint)
        if not workspace.writable:
            raise InputError("workspace is read-only")
        reject_overlap(workspace, others)
        return workspace


def _unchecked_pair(out: Any) -> tuple[Any, Any]:
    """Return the two parts of `out`, or parts that fit no plan if `out` is not a pair."""
    if type(out) is tuple and len(out) == 2:
        return out
    return (None, None) if out is None else (out, _NO_ARRAY)


def _pair(out: Any) -> tuple[Any, Any]:
    """Return the two parts of `out`, each of which may be None."""
    if out is None:
        return None, None
    if not isinstance(out, tuple | list) or len(out) != 2:
        raise InputError("out must be a pair: one array for each gradient")
    return out[0], out[1]
