"""The backward step of a transformer block with LoRA. Its code is in `kernels/lora`."""

from preheat.kernels.lora import MODELS, LoraBlock, Model, Plan, Request, Shape, backward_plan

__all__ = ["MODELS", "LoraBlock", "Model", "Plan", "Request", "Shape", "backward_plan"]
