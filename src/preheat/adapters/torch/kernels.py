"""The shipped kernels as functions of torch, with gradients that are shipped kernels as well.

    from preheat.adapters import torch as kernels

    y = kernels.rms_norm(x, gamma, eps=1e-6)
    y.sum().backward()

Tensors are float32, float16 or bfloat16, all of one type and on one GPU; those that are not contiguous
are copied first. Work goes to torch's current stream and memory comes from torch. Gradients cannot be
differentiated again.
"""

from __future__ import annotations

import importlib.util
import math
import types
from functools import cache
from typing import Any

from preheat.devices.libraries import LIBRARIES
from preheat.errors import InputError
from preheat.gpu import device
from preheat.kernels.operands import spec_of
from preheat.kernels.ops import Ops

__all__ = ["linear", "matmul", "rms_norm", "silu", "softmax", "swiglu"]

Tensor = Any  # torch is imported by the caller
_OPS = "preheat.Ops(gpu) has these kernels for arrays of preheat, also on the emulator"


def silu(x: Tensor) -> Tensor:
    """Return `x / (1 + exp(-x))`.

    Examples:
        >>> import torch
        >>> from preheat.adapters import torch as kernels
        >>> kernels.silu(torch.zeros(2, device="cuda")).tolist()
        [0.0, 0.0]
    """
    return _apply(_Silu, x=x)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return `silu(gate) up`.

    Examples:
        >>> import torch
        >>> from preheat.adapters import torch as kernels
        >>> kernels.swiglu(torch.zeros(2, device="cuda"), torch.ones(2, device="cuda")).tolist()
        [0.0, 0.0]
    """
    return _apply(_Swiglu, gate=gate, up=up)


def softmax(x: Tensor) -> Tensor:
    """Return the softmax of each row, which is the last axis.

    Examples:
        >>> import torch
        >>> from preheat.adapters import torch as kernels
        >>> kernels.softmax(torch.zeros(1, 2, device="cuda")).tolist()
        [[0.5, 0.5]]
    """
    return _apply(_Softmax, x=x)


def rms_norm(x: Tensor, gamma: Tensor, *, eps: float) -> Tensor:
    """Return each row of `x` divided by its root mean square with `eps`, times `gamma`.

    Examples:
        >>> import torch
        >>> from preheat.adapters import torch as kernels
        >>> x = torch.ones(4, 64, device="cuda", requires_grad=True)
        >>> y = kernels.rms_norm(x, torch.ones(64, device="cuda"), eps=1e-6)
        >>> y.sum().backward()
        >>> x.grad.shape
        torch.Size([4, 64])
    """
    return _apply(_RmsNorm, eps, x=x, gamma=gamma)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return `a b` for `a[…, k]` and `b[k, n]`.

    Examples:
        >>> import torch
        >>> from preheat.adapters import torch as kernels
        >>> kernels.matmul(torch.ones(1, 2, device="cuda"), torch.ones(2, 1, device="cuda")).tolist()
        [[2.0]]
    """
    return _multiply(_Matmul, 0, a=a, b=b)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return `x weight^T` for `x[…, k]` and `weight[n, k]`, like `torch.nn.Linear` without a bias.

    Examples:
        >>> import torch
        >>> from preheat.adapters import torch as kernels
        >>> kernels.linear(torch.ones(1, 2, device="cuda"), torch.ones(3, 2, device="cuda")).tolist()
        [[2.0, 2.0, 2.0]]
    """
    return _multiply(_Linear, 1, x=x, weight=weight)


# The forward and backward passes, from which `_function` makes functions of torch.


class _Silu:
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _ops(x).silu(x, out=_new(x))

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return _ops(x).silu_backward(gy.contiguous(), x, out=_new(x))


class _Swiglu:
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _ops(gate).swiglu(gate, up, out=_new(gate))

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        out = _new(gate), _new(up)
        return _ops(gate).swiglu_backward(gy.contiguous(), gate, up, out=out)


class _Softmax:
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = _ops(x).softmax(x, out=_new(x))
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return _ops(y).softmax_backward(gy.contiguous(), y, out=_new(y))


class _RmsNorm:
    @staticmethod
    def forward(ctx: Any, x: Tensor, gamma: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, gamma)
        ctx.eps = eps
        return _ops(x).rms_norm(x, gamma, eps=eps, out=_new(x))

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, gamma = ctx.saved_tensors
        width = gy.shape[-1]
        ops = _ops(x)
        shape = ops.rms_norm_workspace(gy.numel() // width, width, x.dtype)
        workspace = x.new_empty(shape, dtype=_torch().float32)
        out = (_new(x), _new(gamma))
        gx, g_gamma = ops.rms_norm_backward(
            gy.contiguous(), x, gamma, eps=ctx.eps, out=out, workspace=workspace
        )
        return gx, g_gamma, None


class _Matmul:
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return _ops(a).gemm(a, b, out=a.new_empty((a.shape[0], b.shape[1])))

    @staticmethod
    def backward(ctx: Any, gc: Tensor) -> tuple[Tensor | None, Tensor | None]:
        a, b = ctx.saved_tensors
        gc = gc.contiguous()
        ops = _ops(a)
        for_a, for_b = ctx.needs_input_grad
        return (
            ops.gemm_backward_a(gc, b, out=_new(a)) if for_a else None,
            ops.gemm_backward_b(a, gc, out=_new(b)) if for_b else None,
        )


class _Linear:
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        y = x.new_empty((x.shape[0], weight.shape[0]))
        return _ops(x).gemm_backward_a(x, weight, out=y)

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        gy = gy.contiguous()
        ops = _ops(x)
        for_x, for_weight = ctx.needs_input_grad
        return (
            ops.gemm(gy, weight, out=_new(x)) if for_x else None,
            ops.gemm_backward_b(gy, x, out=_new(weight)) if for_weight else None,
        )


def _apply(kernels: type, /, *more: Any, **tensors: Tensor) -> Tensor:
    """Apply a function of torch to tensors. Errors use the given names."""
    _check(tensors)
    return _function(kernels).apply(*(each.contiguous() for each in tensors.values()), *more)


def _multiply(kernels: type, axis: int, /, **matrices: Tensor) -> Tensor:
    """Apply a product of rows of any shape and a matrix, which is summed over its `axis`."""
    _check(matrices)
    (first, rows), (second, matrix) = matrices.items()
    if rows.dim() == 0 or matrix.dim() != 2 or rows.shape[-1] != matrix.shape[axis]:
        shapes = f"{first} of shape {tuple(rows.shape)} and {second} of shape {tuple(matrix.shape)}"
        raise InputError(f"{shapes} cannot be multiplied")
    flat = rows.reshape(math.prod(rows.shape[:-1]), rows.shape[-1])
    result = _function(kernels).apply(flat.contiguous(), matrix.contiguous())
    return result.reshape(*rows.shape[:-1], result.shape[-1])


@cache
def _function(kernels: type) -> Any:
    """Return a `torch.autograd.Function` that runs these kernels."""
    autograd = _torch().autograd
    backward = autograd.function.once_differentiable(kernels.backward)  # type: ignore[attr-defined]
    bases = (kernels, autograd.Function)
    name = kernels.__name__.removeprefix("_")
    return types.new_class(
        name, bases, exec_body=lambda body: body.update(backward=staticmethod(backward))
    )


def _torch() -> Any:
    return importlib.import_module("torch")


def _new(like: Tensor) -> Tensor:
    return like.new_empty(like.shape)


def _check(tensors: dict[str, Tensor]) -> None:
    """Raise unless all are tensors on one GPU, of one type that the kernels support."""
    first, like = next(iter(tensors.items()))
    for name, given in tensors.items():
        if not _on_gpu(given):
            raise _refusal(name, given)
        for found, wanted in ((given.device, like.device), (given.dtype, like.dtype)):
            if found != wanted:
                raise InputError(f"{name} is {found}, not {wanted} as {first}")
        spec_of(name, given)


def _refusal(name: str, given: Any) -> InputError:
    """Return the error for a value that is not a tensor of torch on a GPU."""
    if LIBRARIES["torch"].is_tensor_type(type(given)):
        hint = (
            f"move it: {name}.cuda()" if _torch().cuda.is_available() else f"torch sees no GPU; {_OPS}"
        )
        return InputError(f"{name} is a tensor on {given.device}, not on a GPU", hint=hint)
    missing = "" if importlib.util.find_spec("torch") else ", and torch is not installed"
    what = type(given).__name__
    return InputError(f"{name} is {what}, not a tensor of torch{missing}", hint=_OPS)


def _on_gpu(given: Any) -> bool:
    return getattr(given, "is_cuda", False) is True


_known: dict[int, Ops] = {}  # by the index of the GPU


def _ops(tensor: Tensor) -> Ops:
    """Return the kernels on the GPU of a tensor."""
    index = tensor.get_device()
    ops = _known.get(index)
    if ops is None or ops.gpu._closed:
        ops = _known[index] = Ops(device(f"cuda:{index}"))
    return ops
