"""A backward step on the shipped kernels. It does not use the plan, so tests can compare both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from preheat.devices.array import Array
from preheat.errors import InputError, StaleBufferError, did_you_mean
from preheat.gpu import Gpu
from preheat.kernels import axes
from preheat.kernels.blas import Blas
from preheat.kernels.lora.shape import ADAPTED, INPUT_OF, Shape, require_shape
from preheat.kernels.nf4 import Nf4
from preheat.kernels.operands import ArraySpec, array_argument, foreign_operand, nonnegative, operand
from preheat.kernels.ops import Ops
from preheat.model.dtypes import dtype_of

__all__ = ["LoraBlock"]


class LoraBlock:
    """A backward step of one block on the shipped kernels, with which a plan is compared.

    Inputs are checked and memory is allocated here, so a second step can be captured.

    Args:
        gpu: The device.
        shape: The sizes.
        arrays: The arrays of `shape.input_shapes`, of any library. With `shape.nf4` the weights of the
            base are `Nf4`.
        blas: As for `Ops`.

    Examples:
        >>> shape = preheat.lora.Shape(
        ...     hidden=64, q_dim=64, kv_dim=32, max_seq=8, lora_rank=4, intermediate=128, heads=4
        ... )
        >>> arrays = {name: gpu.zeros(size) for name, size in shape.input_shapes.items()}
        >>> block = preheat.lora.LoraBlock(gpu, shape, arrays)
        >>> block.gradients["q_a"].shape  # `step` computes it
        (64, 4)
    """

    def __init__(
        self,
        gpu: Gpu,
        shape: Shape,
        arrays: Mapping[str, Any],
        *,
        eps: float = 1e-6,
        blas: Blas | bool | Literal["auto"] = "auto",
    ) -> None:
        self.gpu = gpu
        self.shape = s = shape
        self.ops = Ops(gpu, blas=blas)
        self._given = _check_arrays(gpu, shape, arrays)
        self._eps = nonnegative("eps", eps)
        seq = shape.max_seq
        kind = shape.dtype
        self.gradients = {name: gpu.empty(size, kind) for name, size in s.trained.items()}
        self._gx, self._g_middle, self._g_normed = (gpu.empty((seq, s.hidden), kind) for _ in range(3))
        self._g_gated, self._g_lifted = (gpu.empty((seq, s.intermediate), kind) for _ in range(2))
        self._g_heads = gpu.empty((s.heads, seq, s.head), kind)
        self._g_keys, self._g_values = (gpu.empty((s.kv_heads, seq, s.head), kind) for _ in range(2))
        self._g_scores = gpu.empty((s.heads, seq, seq), kind)
        self._g_wide, self._g_narrow = (gpu.empty((seq, size), kind) for size in (s.q_dim, s.kv_dim))
        self._g_low = gpu.empty((seq, s.lora_rank), kind) if s.lora_rank else None
        self._workspace = gpu.empty(self.ops.rms_norm_workspace(seq, s.hidden, kind))

    def step(self, gy: Any) -> Array:
        """Compute the gradient of `x` from the output's, and those in `gradients`.

        The same arrays are used in every step.

        Examples:
            >>> shape = preheat.lora.Shape(
            ...     hidden=64, q_dim=64, kv_dim=32, max_seq=8, lora_rank=4, intermediate=128, heads=4
            ... )
            >>> arrays = {name: gpu.zeros(size) for name, size in shape.input_shapes.items()}
            >>> block = preheat.lora.LoraBlock(gpu, shape, arrays)
            >>> gx = block.step(gpu.zeros((8, 64)))
        """
        s = self.shape
        _check_array(self.gpu, "gy", gy, (s.max_seq, s.hidden), s.dtype)
        self._ffn(gy)
        self._norm_backward("norm2", self._given["middle"], gy, self._g_middle)
        self._attention(self._g_middle)
        self._norm_backward("norm1", self._given["x"], self._g_middle, self._gx)
        return self._gx

    def _ffn(self, gy: Any) -> None:
        given = self._given
        gated, lifted = self._g_gated, self._g_lifted
        self._linear_backward("down", gy, gated)
        self.ops.swiglu_backward(gated, given["gated"], given["lifted"], out=(gated, lifted))
        self._linear_backward("gate", gated, self._g_normed)
        self._linear_backward("up", lifted, self._g_normed, add=True)

    def _attention(self, g: Array) -> None:
        s = self.shape
        scale = s.head**-0.5
        self._linear_backward("o", g, self._g_wide)
        self._swap(self._g_wide, self._g_heads, s.max_seq, s.heads)
        self._probabilities()
        self.ops.softmax_backward(self._g_scores, self._given["probabilities"], out=self._g_scores)
        self._scores()
        self._projection("q", self._g_heads, self._g_wide, scale)
        self._projection("k", self._g_keys, self._g_narrow, scale)
        self._projection("v", self._g_values, self._g_narrow, 1.0)

    def _probabilities(self) -> None:
        """Compute the gradients of probabilities and values from the heads'."""
        values = self._given["values"]
        probabilities = self._given["probabilities"]
        for head, (kv, add) in enumerate(self._heads_of_keys()):
            g = self._g_heads[head]
            self.ops.gemm_backward_a(g, values[kv], out=self._g_scores[head])
            self.ops.gemm_backward_b(probabilities[head], g, out=self._g_values[kv], accumulate=add)

    def _scores(self) -> None:
        """Compute the gradients of queries, in place of the heads', and of keys from the scores."""
        queries, keys = self._given["queries"], self._given["keys"]
        for head, (kv, add) in enumerate(self._heads_of_keys()):
            g = self._g_scores[head]
            self.ops.gemm(g, keys[kv], out=self._g_heads[head])
            self.ops.gemm_backward_b(g, queries[head], out=self._g_keys[kv], accumulate=add)

    def _heads_of_keys(self) -> Iterator[tuple[int, bool]]:
        """Return for each head its head of keys and values, and whether an earlier head shares it."""
        share = self.shape.heads // self.shape.kv_heads
        return ((head // share, head % share > 0) for head in range(self.shape.heads))

    def _projection(self, name: str, heads: Array, g: Array, scale: float) -> None:
        """Compute the gradients of a base weight and its LoRA adapter from the heads'."""
        self._swap(heads, g, len(heads), self.shape.max_seq, scale)
        self._linear_backward(name, g, self._g_normed, add=name != ADAPTED[0])
        if not self.shape.lora_rank:
            return
        given = self._given
        ops = self.ops
        low = self._g_low
        a, b = f"{name}_a", f"{name}_b"
        ops.gemm_backward_b(given[f"{name}_low"], g, out=self.gradients[b])
        ops.gemm_backward_a(g, given[b], out=low)
        ops.gemm_backward_b(given["normed1"], low, out=self.gradients[a])
        ops.gemm_backward_a(low, given[a], out=self._g_normed, accumulate=True)

    def _linear_backward(self, name: str, g: Any, out: Array, *, add: bool = False) -> None:
        """Compute the gradients of the input of a base weight and, unless frozen, of the weight."""
        self.ops.gemm_backward_a(g, self._given[name], out=out, accumulate=add)
        if not self.shape.frozen:
            self.ops.gemm_backward_b(self._given[INPUT_OF[name]], g, out=self.gradients[name])

    def _norm_backward(self, name: str, x: Any, residual: Any, out: Array) -> None:
        """Compute the gradient of the input of a norm, added to the residual branch's."""
        self.ops.rms_norm_backward(
            self._g_normed, x, self._given[name],
            eps=self._eps, out=(out, self.gradients[name]), workspace=self._workspace,
        )  # fmt: skip
        seq, hidden = self.shape.max_seq, self.shape.hidden
        op = axes.add(seq, hidden, self.shape.dtype)
        op.launch(self.gpu, residual, out, 1.0, seq, 1, hidden, True)

    def _swap(self, x: Array, y: Array, rows: int, columns: int, scale: float = 1.0) -> None:
        width = self.shape.head
        op = axes.swap_axes(rows, columns, width, self.shape.dtype)
        op.launch(self.gpu, x, y, scale, rows, columns, width, False)


def _check_arrays(gpu: Gpu, shape: Shape, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arrays that a shape needs. Raises `InputError` for a missing or wrong array."""
    require_shape(shape)
    if not isinstance(arrays, Mapping):
        raise InputError("arrays must be a mapping from name to array", hint="see shape.input_shapes")
    if missing := [name for name in shape.input_shapes if name not in arrays]:
        spare = [str(name) for name in arrays if name not in shape.input_shapes]
        hint = did_you_mean(missing[0], spare) or f"missing: {', '.join(missing)}"
        raise InputError(f"there is no array {missing[0]!r}", hint=hint)
    for name, size in shape.input_shapes.items():
        if shape.nf4 and name in shape.base:
            _check_nf4(gpu, name, arrays[name], size)
        else:
            _check_array(gpu, name, arrays[name], size, shape.dtype)
    return {name: arrays[name] for name in shape.input_shapes}


def _check_array(gpu: Gpu, name: str, array: Any, size: tuple[int, ...], dtype: str) -> None:
    if isinstance(array, Nf4):
        raise InputError(f"{name} is Nf4 of shape {array.shape}, not {dtype} of shape {size}")
    operand(name, array).require(ArraySpec(size, dtype_of(dtype)), "needed")
    _require_here(gpu, name, array)


def _check_nf4(gpu: Gpu, name: str, array: Any, size: tuple[int, ...]) -> None:
    if not isinstance(array, Nf4):
        hint = "with nf4 the base is quantised: preheat.kernels.nf4.quantize(…).on(gpu)"
        raise InputError(f"{name} is {type(array).__name__}, not Nf4", hint=hint)
    if array.shape != size:
        raise InputError(f"{name} is Nf4 of shape {array.shape}, not of {size} as needed")
    for part in ("codes", "scales"):
        memory = getattr(array, part)
        array_argument(f"{name}.{part}", memory).require_contiguous()
        _require_here(gpu, f"{name}.{part}", memory)
    try:
        array.check()
    except InputError as error:
        raise InputError(f"{name}: {error}", hint=error.hint) from None


def _require_here(gpu: Gpu, name: str, array: Any) -> None:
    """Raise for memory that kernels on `gpu` cannot use."""
    context = gpu._context
    hint: str | None = "copy it to the device first: gpu.array(…)"
    if isinstance(array, Array):
        if array.buffer.lost is not None:
            raise StaleBufferError(name, f"{array!r}: {array.buffer.lost}")
        usable = array.buffer.context is context
        what = repr(array)
    else:
        foreign = foreign_operand(name, array)
        usable = foreign.is_usable_on(context.device)
        what = f"in {foreign.place}"
        hint = foreign.remedy(context.device)
    if not usable:
        raise InputError(f"{name} is {what}, which kernels on {gpu.name} cannot use", hint=hint)
