"""The backward step of a transformer block with LoRA: a plan of its launches, and the step itself.

    import preheat

    plan = preheat.lora.backward_plan(
        hidden=2560, q_dim=4096, kv_dim=1024, max_seq=2048, lora_rank=16, intermediate=9728, heads=32
    )
    plan.warm(gpu)                              # or plan.manifest().write("kernels.toml")

The block computes, with `h` for the normalised input, `q = h W + (h A) B`, and `k` and `v` likewise:

    middle = x + softmax(scale q k^T) v o       scale = 1 / sqrt(q_dim / heads), for each head
    y      = middle + swiglu(h gate, h up) down

Masks are contained in the probabilities that the forward pass saved. Rotary embeddings, biases, norms
of single heads, dropout and batches of sequences are not part of the step.
"""

from preheat.kernels.lora.plan import Plan, Request, backward_plan
from preheat.kernels.lora.shape import MODELS, Model, Shape
from preheat.kernels.lora.step import LoraBlock

__all__ = ["MODELS", "LoraBlock", "Model", "Plan", "Request", "Shape", "backward_plan"]
