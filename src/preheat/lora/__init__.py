"""The backward step of a transformer block with LoRA: all that it launches, and a step that does it.

    import preheat

    plan = preheat.lora.backward_plan(
        hidden=2560, q_dim=4096, kv_dim=1024, max_seq=2048, lora_rank=16, intermediate=9728, heads=32
    )
    plan.warm(gpu)                              # or plan.manifest().write("kernels.toml")

The block is, with `h` for what is normalised and `q = h W + (h A) B`, and `k` and `v` alike:

    middle = x + softmax(scale q k^T) v o       scale = 1 / sqrt(q_dim / heads), for each head
    y      = middle + swiglu(h gate, h up) down

Masks are in the probabilities that the forward pass kept. Rotary embeddings, biases and norms of single
heads, which some models have besides, are not part of it; nor are dropout and batches of sequences.
"""

from preheat.lora.plan import Plan, Request, backward_plan
from preheat.lora.shape import MODELS, Model, Shape
from preheat.lora.step import LoraBlock

__all__ = ["MODELS", "LoraBlock", "Model", "Plan", "Request", "Shape", "backward_plan"]
