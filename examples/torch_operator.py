"""Make an operator of torch from a CUDA kernel: with gradients, and in torch.compile.

    python torch_operator.py

With a GPU, it runs there. Without one, set PREHEAT_DEVICE='emulator[host_arrays]': that emulator
computes the operator on tensors of the host, so that a test in CI needs no GPU.
"""

import torch

from preheat.adapters import torch as kernels

SOURCE = r"""
extern "C" __global__ void swish(const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i] / (1.0f + expf(-x[i]));
}

extern "C" __global__ void swish_backward(const float* gy, const float* x, float* gx, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float s = 1.0f / (1.0f + expf(-x[i]));
    gx[i] = gy[i] * s * (1.0f + x[i] * (1.0f - s));
}
"""


def blocks(x, *_):
    """Return the grid. It gets the arguments of the operator, then its new tensors."""
    return -(-x.numel() // 256)


# `out` allocates the result, and tells torch.compile its shape. `args` returns the arguments of the
# kernel. Nothing is compiled before the first call, and then at most once, ever.
swish_backward = kernels.op(
    "examples::swish_backward(Tensor gy, Tensor x) -> Tensor",
    SOURCE,
    out=lambda gy, x: torch.empty_like(x),
    args=lambda gy, x, gx: (gy, x, gx, x.numel()),
    grid=blocks,
    block=256,
)

# `backward` and `setup_context` are those of torch.library.register_autograd.
swish = kernels.op(
    "examples::swish(Tensor x) -> Tensor",
    SOURCE,
    out=lambda x: torch.empty_like(x),
    args=lambda x, y: (x, y, x.numel()),
    grid=blocks,
    block=256,
    backward=lambda ctx, gy: swish_backward(gy.contiguous(), *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)

device = "cuda" if torch.cuda.is_available() else "cpu"
x = torch.linspace(-4, 4, 1001, device=device, requires_grad=True)

# Compare the operator with the one of torch, forward and backward.
swish(x).sum().backward()
gradient, x.grad = x.grad, None
torch.nn.functional.silu(x).sum().backward()
print("forward agrees: ", torch.allclose(swish(x), torch.nn.functional.silu(x), atol=1e-6))
print("backward agrees:", torch.allclose(gradient, x.grad, atol=1e-6))

# torch.compile traces the operator: fullgraph=True refuses everything that it cannot trace.
traced = torch.compile(lambda x: 2 * swish(x), fullgraph=True, backend="aot_eager")
print("compiled agrees:", torch.allclose(traced(x), 2 * swish(x)))
