"""preheat for programs of torch: kernels as operators, and the shipped kernels as functions.

    from preheat.adapters import torch as kernels

    scale = kernels.op("my::scale(Tensor(a!) x, float a) -> ()", SOURCE, grid=…, block=256)
    y = kernels.rms_norm(x, gamma, eps=1e-6)

`op` makes an operator of torch from a kernel of CUDA C++; see `preheat.adapters.torch.operator`. The
other functions are shipped kernels, with gradients; see `preheat.adapters.torch.kernels`. The adapter
for `torch.cuda._compile_kernel` is in `preheat.adapters.torch.compile_kernel`.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from preheat.adapters.torch.kernels import linear, matmul, rms_norm, silu, softmax, swiglu
    from preheat.adapters.torch.operator import op

__all__ = ["linear", "matmul", "op", "rms_norm", "silu", "softmax", "swiglu"]


def __getattr__(name: str) -> object:
    # The adapter for `_compile_kernel` is imported with torch, and needs no device.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{'operator' if name == 'op' else 'kernels'}")
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
