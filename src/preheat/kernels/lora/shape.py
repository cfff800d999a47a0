"""The sizes of a block: its weights, the inputs of a step, and what has a gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from preheat.errors import InputError
from preheat.kernels import axes, elementwise
from preheat.kernels.op import cpp_of, dimension
from preheat.kernels.rows import MAX_WIDTH
from preheat.process.lazy import LazyModule

if TYPE_CHECKING:
    import numpy as np
else:
    np = LazyModule("numpy")

__all__ = ["ADAPTED", "INPUT_OF", "MODELS", "Model", "Shape", "require_shape"]

#: The weights of the base, and the activation that each is multiplied with.
INPUT_OF = {
    "q": "normed1", "k": "normed1", "v": "normed1", "o": "attended",
    "gate": "normed2", "up": "normed2", "down": "activated",
}  # fmt: skip

#: The weights that have LoRA adapters.
ADAPTED = ("q", "k", "v")

# Upper limits of products. Kernels take each of the first five products as one int. The last two limit
# the tiles of a weight gradient to those that one launch of `gemm` computes.
_PRODUCTS = {
    ("heads", "max_seq"): axes.MAX_LINES,
    ("heads", "max_seq", "max_seq"): elementwise.MAX_ELEMENTS,
    ("max_seq", "hidden"): elementwise.MAX_ELEMENTS,
    ("max_seq", "q_dim"): elementwise.MAX_ELEMENTS,
    ("max_seq", "intermediate"): elementwise.MAX_ELEMENTS,
    ("hidden", "q_dim"): elementwise.MAX_ELEMENTS,
    ("hidden", "intermediate"): elementwise.MAX_ELEMENTS,
}


class Model(NamedTuple):
    """The sizes of a model's blocks, as `config.json` of its `repository` at Hugging Face has them.

    `preheat.lora.MODELS` has some models by name.

    Examples:
        >>> model = preheat.lora.MODELS["qwen2-0.5b"]
        >>> plan = preheat.lora.backward_plan(**model.sizes, max_seq=128, lora_rank=16)
    """

    repository: str
    hidden: int
    q_dim: int
    kv_dim: int
    intermediate: int
    heads: int

    @property
    def sizes(self) -> dict[str, Any]:
        """The sizes as keyword arguments of `backward_plan`."""
        return {name: size for name, size in self._asdict().items() if name != "repository"}


#: Models by their names on the command line.
MODELS = {
    "qwen2-0.5b": Model("Qwen/Qwen2-0.5B", 896, 896, 128, 4864, 14),
    "qwen2.5-1.5b": Model("Qwen/Qwen2.5-1.5B", 1536, 1536, 256, 8960, 12),
    "qwen3-4b": Model("Qwen/Qwen3-4B", 2560, 4096, 1024, 9728, 32),
    "llama-2-7b": Model("meta-llama/Llama-2-7b-hf", 4096, 4096, 4096, 11008, 32),
    "llama-3-8b": Model("meta-llama/Meta-Llama-3-8B", 4096, 4096, 1024, 14336, 32),
}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of a block and of its input: `max_seq` positions of `hidden` elements.

    Attributes:
        hidden: The elements of a position.
        q_dim: The size of all `heads` together.
        kv_dim: The size of all heads of keys and values, which may be fewer.
        max_seq: The exact length of the sequence. Shorter ones can need other kernels, which a plan has
            on request, as in `plan.warm(gpu, shorter=True)`.
        lora_rank: The rank of LoRA. 0 means no LoRA.
        intermediate: The size of the hidden layer of the feed-forward part.
        heads: The number of heads.
        frozen: True if the weights of the base have no gradients.
        nf4: True if the base is frozen and quantised.
        dtype: The element type.

    Examples:
        >>> shape = preheat.lora.Shape(
        ...     hidden=64, q_dim=64, kv_dim=32, max_seq=8, lora_rank=4, intermediate=128, heads=4
        ... )
        >>> shape.head, shape.kv_heads
        (16, 2)
    """

    hidden: int
    q_dim: int
    kv_dim: int
    max_seq: int
    lora_rank: int
    intermediate: int
    heads: int
    frozen: bool = False
    nf4: bool = False
    dtype: str = "float32"

    def __post_init__(self) -> None:
        # Convert integers and types of NumPy to Python's, which do not overflow.
        for name in ("hidden", "q_dim", "kv_dim", "max_seq", "intermediate", "heads"):
            self._set(name, dimension(name, getattr(self, name), MAX_WIDTH))
        self._check_heads()
        self._set("lora_rank", self._check_rank())
        self._check_products()
        self._set("nf4", _flag("nf4", self.nf4))
        self._set("frozen", _flag("frozen", self.frozen) or self.nf4)
        self._set("dtype", cpp_of(self.dtype)[0].name)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_heads(self) -> None:
        if self.q_dim % self.heads:
            raise InputError(f"heads {self.heads} does not divide q_dim {self.q_dim}")
        if self.kv_dim % self.head:
            message = f"kv_dim {self.kv_dim} is not a multiple of the size of a head, {self.head}"
            raise InputError(message, hint="the size of a head is q_dim / heads")
        if self.heads % self.kv_heads:
            message = f"kv_dim {self.kv_dim} gives {self.kv_heads} heads of keys and values"
            raise InputError(f"{message}, and heads {self.heads} is not a multiple of that")

    def _check_rank(self) -> int:
        limit = min(self.hidden, self.q_dim, self.kv_dim)
        try:
            return dimension("lora_rank", self.lora_rank, limit, least=0)
        except InputError as error:
            error.hint = "0 means no LoRA; a rank is at most hidden, q_dim and kv_dim"
            raise

    def _check_products(self) -> None:
        """Raise for sizes that exceed the limits of the kernels, with the names of the parameters."""
        for names, limit in _PRODUCTS.items():
            sizes = [getattr(self, name) for name in names]
            if math.prod(sizes) > limit:
                product = " by ".join(f"{name} {size}" for name, size in zip(names, sizes, strict=True))
                raise InputError(f"{product} is {math.prod(sizes)}, which is more than {limit}")

    @property
    def head(self) -> int:
        """The number of elements of a head."""
        return self.q_dim // self.heads

    @property
    def kv_heads(self) -> int:
        """The number of heads of keys and values."""
        return self.kv_dim // self.head

    @property
    def base(self) -> dict[str, tuple[int, int]]:
        """The shapes of the base weights, from input to output."""
        hidden, inner = self.hidden, self.intermediate
        return {
            "q": (hidden, self.q_dim),
            "k": (hidden, self.kv_dim),
            "v": (hidden, self.kv_dim),
            "o": (self.q_dim, hidden),
            "gate": (hidden, inner),
            "up": (hidden, inner),
            "down": (inner, hidden),
        }

    @property
    def trained(self) -> dict[str, tuple[int, ...]]:
        """The shapes of what has a gradient: norms, the base unless frozen, and A and B of LoRA."""
        norms: dict[str, tuple[int, ...]] = {"norm1": (self.hidden,), "norm2": (self.hidden,)}
        return norms | ({} if self.frozen else self.base) | self._adapters

    @property
    def input_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the inputs of a backward step by name: weights and saved activations.

        docs/lora.md describes each of them.
        """
        seq = self.max_seq
        inner = (seq, self.intermediate)
        keys = (self.kv_heads, seq, self.head)
        saved: dict[str, tuple[int, ...]] = {
            "x": (seq, self.hidden), "middle": (seq, self.hidden),
            "queries": (self.heads, seq, self.head), "keys": keys, "values": keys,
            "probabilities": (self.heads, seq, seq), "gated": inner, "lifted": inner,
        }  # fmt: skip
        return self.trained | self.base | saved | self._multiplied

    @property
    def _adapters(self) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        for name in ADAPTED if self.lora_rank else ():
            shapes[f"{name}_a"] = self.hidden, self.lora_rank
            shapes[f"{name}_b"] = self.lora_rank, self.base[name][1]
        return shapes

    @property
    def _multiplied(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the activations that trained weights were multiplied with."""
        shapes: dict[str, tuple[int, ...]] = {}
        if not self.frozen:
            shapes = {saved: (self.max_seq, self.base[name][0]) for name, saved in INPUT_OF.items()}
        if self.lora_rank:
            shapes["normed1"] = self.max_seq, self.hidden
            shapes |= {f"{name}_low": (self.max_seq, self.lora_rank) for name in ADAPTED}
        return shapes


def require_shape(shape: Any) -> None:
    """Raise unless `shape` is a `Shape`."""
    if not isinstance(shape, Shape):
        hint = "preheat.lora.Shape(hidden=…, …), or the shape of a plan"
        raise InputError(f"shape is {type(shape).__name__}, not a Shape", hint=hint)


def _flag(name: str, value: Any) -> bool:
    """Convert a truth value, also one of NumPy, to a plain bool."""
    if isinstance(value, bool):
        return value
    if not isinstance(value, np.bool_):
        raise InputError(f"{name} {value!r} is not True or False")
    return bool(value)
