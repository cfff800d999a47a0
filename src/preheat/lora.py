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
heads, which some models have besides, are not part of it.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

from preheat.devices.base import ON_HOST
from preheat.dtypes import dtype_of
from preheat.errors import InputError, StaleBufferError, did_you_mean
from preheat.gpu import Gpu
from preheat.kernels import axes, elementwise, gemm, rms_norm, softmax
from preheat.kernels.blas import Blas, by_cublas, find
from preheat.kernels.forms import Form, foreign, not_negative, require_like, require_no_gaps
from preheat.kernels.nf4 import Nf4
from preheat.kernels.op import Op, cpp_of, dimension
from preheat.kernels.ops import Ops
from preheat.kernels.rows import WIDEST
from preheat.program import Program
from preheat.runtime.array import Array
from preheat.warm.manifest import Manifest, Wanted
from preheat.warm.report import WarmReport

__all__ = ["MODELS", "LoraBlock", "Model", "Plan", "Request", "Shape", "backward_plan"]

_PRODUCTS = {  # what becomes one number in a launch, and the most that it can be
    ("heads", "max_seq"): axes.LINES,
    ("heads", "max_seq", "max_seq"): elementwise.MOST,
    ("max_seq", "hidden"): elementwise.MOST,
    ("max_seq", "q_dim"): elementwise.MOST,
    ("max_seq", "intermediate"): elementwise.MOST,
    ("hidden", "q_dim"): elementwise.MOST,
    ("hidden", "intermediate"): elementwise.MOST,
}

# The weights of the base, and what each is multiplied with; LoRA is on the first three.
_INPUT = {
    "q": "normed1", "k": "normed1", "v": "normed1", "o": "attended",
    "gate": "normed2", "up": "normed2", "down": "activated",
}  # fmt: skip
_ADAPTED = ("q", "k", "v")


class Model(NamedTuple):
    """The sizes of a model's blocks, as `config.json` of its `repository` at Hugging Face has them."""

    repository: str
    hidden: int
    q_dim: int
    kv_dim: int
    intermediate: int
    heads: int

    @property
    def sizes(self) -> dict[str, Any]:
        """What `backward_plan` takes of it."""
        return {name: size for name, size in self._asdict().items() if name != "repository"}


#: Models by the names that the command line knows.
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

    `q_dim` is that of all `heads`, `kv_dim` that of all heads of keys and values, which may be fewer.
    A `lora_rank` of 0 is no LoRA; with `nf4` the base is frozen, and quantised.
    """

    hidden: int
    q_dim: int
    kv_dim: int
    max_seq: int
    lora_rank: int
    intermediate: int
    heads: int
    nf4: bool = False
    dtype: str = "float32"

    def __post_init__(self) -> None:
        # Integers and types of NumPy become plain ones, which no product overflows.
        for name in ("hidden", "q_dim", "kv_dim", "max_seq", "intermediate", "heads"):
            self._set(name, dimension(name, getattr(self, name), WIDEST))
        self._check_heads()
        self._set("lora_rank", self._checked_rank())
        self._check_products()
        self._set("nf4", _flag("nf4", self.nf4))
        self._set("dtype", cpp_of(self.dtype)[0].name)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_heads(self) -> None:
        if self.q_dim % self.heads:
            raise InputError(f"heads {self.heads} does not divide q_dim {self.q_dim}")
        if self.kv_dim % self.head:
            told = f"kv_dim {self.kv_dim} is not a multiple of the size of a head, {self.head}"
            raise InputError(told, hint="that is q_dim over heads")
        if self.heads % self.kv_heads:
            told = f"kv_dim {self.kv_dim} is that of {self.kv_heads} heads"
            raise InputError(f"{told}, which heads {self.heads} cannot share evenly")

    def _checked_rank(self) -> int:
        most = min(self.hidden, self.q_dim, self.kv_dim)
        try:
            rank = operator.index(self.lora_rank)
        except TypeError:
            rank = None
        if rank is None or isinstance(self.lora_rank, bool):
            raise InputError(f"lora_rank {self.lora_rank!r} is not an integer")
        if not 0 <= rank <= most:
            hint = "0 is no LoRA; a rank is at most hidden, q_dim and kv_dim"
            raise InputError(f"lora_rank {rank} is outside 0 to {most}", hint=hint)
        return rank

    def _check_products(self) -> None:
        """Refuse what kernels cannot count, by the names of the parameters that make it up."""
        for names, most in _PRODUCTS.items():
            sizes = [getattr(self, name) for name in names]
            if math.prod(sizes) > most:
                told = " by ".join(f"{name} {size}" for name, size in zip(names, sizes, strict=True))
                raise InputError(f"{told} is {math.prod(sizes)}, which is more than {most}")

    @property
    def head(self) -> int:
        """Elements of a head."""
        return self.q_dim // self.heads

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.kv_dim // self.head

    @property
    def base(self) -> dict[str, tuple[int, int]]:
        """The weights of the base: matrices from their input to their result."""
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
        """What has a gradient: the norms, the base unless it is frozen, and LoRA's A and B."""
        norms: dict[str, tuple[int, ...]] = {"norm1": (self.hidden,), "norm2": (self.hidden,)}
        return norms | ({} if self.nf4 else self.base) | self._adapters

    @property
    def given(self) -> dict[str, tuple[int, ...]]:
        """What a backward step starts from: weights, and what the forward pass kept, by name."""
        seq, inner = self.max_seq, (self.max_seq, self.intermediate)
        keys = self.kv_heads, seq, self.head
        kept: dict[str, tuple[int, ...]] = {
            "x": (seq, self.hidden), "middle": (seq, self.hidden),
            "queries": (self.heads, seq, self.head), "keys": keys, "values": keys,
            "probabilities": (self.heads, seq, seq), "gated": inner, "lifted": inner,
        }  # fmt: skip
        return self.trained | self.base | kept | self._multiplied

    @property
    def _adapters(self) -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {}
        for name in _ADAPTED if self.lora_rank else ():
            found[f"{name}_a"] = self.hidden, self.lora_rank
            found[f"{name}_b"] = self.lora_rank, self.base[name][1]
        return found

    @property
    def _multiplied(self) -> dict[str, tuple[int, ...]]:
        """What weights that are trained were multiplied with."""
        found: dict[str, tuple[int, ...]] = {}
        if not self.nf4:
            found = {kept: (self.max_seq, self.base[name][0]) for name, kept in _INPUT.items()}
        if self.lora_rank:
            found["normed1"] = self.max_seq, self.hidden
            found |= {f"{name}_low": (self.max_seq, self.lora_rank) for name in _ADAPTED}
        return found


def _flag(name: str, value: Any) -> bool:
    """A truth value, NumPy's too, as a plain one."""
    if isinstance(value, bool):
        return value
    import numpy as np

    if not isinstance(value, np.bool_):
        raise InputError(f"{name} {value!r} is neither True nor False")
    return bool(value)


# The plan


class Request(NamedTuple):
    """What has to be compiled for launches: a program, and the kernel in it."""

    program: Program
    entry: str


@dataclass(frozen=True)
class Plan:
    """What one backward step of a block of some `shape` does.

    With a `blas` of True products of matrices are cuBLAS's, with False the shipped kernels'; "auto"
    leaves that to the device, and plans for the shipped kernels until there is one.
    """

    shape: Shape
    blas: bool | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        if not isinstance(self.shape, Shape):
            raise InputError(f"{self.shape!r} is not a shape", hint="Plan(preheat.lora.Shape(…))")
        if not isinstance(self.blas, bool) and not (isinstance(self.blas, str) and self.blas == "auto"):
            raise InputError(f"blas {self.blas!r} is neither 'auto', nor True, nor False")

    @cached_property
    def operations(self) -> tuple[Op, ...]:
        """All that it does, in order: exactly what `watching` sees of a step."""
        done = _backward(self.shape)
        return tuple(map(by_cublas, done) if self.blas is True else done)

    @property
    def launches(self) -> tuple[Op, ...]:
        """The operations that are launches of shipped kernels."""
        return tuple(op for op in self.operations if op.by is None)

    @property
    def requests(self) -> tuple[Request, ...]:
        """What the launches need compiled: each kernel once."""
        return tuple(dict.fromkeys(Request(op.program, op.entry) for op in self.launches))

    def manifest(self) -> Manifest:
        """The requests as a manifest, to be written, baked or warmed."""
        wanted = (Wanted(program, entries=(entry,)) for program, entry in self.requests)
        return Manifest(tuple(wanted)).merged()

    def on(self, gpu: Gpu) -> Plan:
        """The plan for a device: products are cuBLAS's where it has one, unless that is settled."""
        if not isinstance(gpu, Gpu):
            raise InputError(f"{gpu!r} is not a device", hint="plan.on(preheat.device(…))")
        return self if self.blas != "auto" else replace(self, blas=not isinstance(find(gpu), str))

    def warm(self, gpu: Gpu, *, jobs: int | None = None) -> WarmReport:
        """Have every kernel of the step ready on a device; as `gpu.warm`."""
        here = self.on(gpu)
        return gpu.warm(here.manifest(), jobs=jobs)

    def __str__(self) -> str:
        rows = [("operation", "dimensions", "times", "kernel")]
        for op, times in Counter(self.operations).items():
            dims = " ".join(f"{name}={size}" for name, size in op.dims)
            rows.append((op.name, dims, str(times), op.by or op.entry))
        first, second, third, _ = (max(map(len, column)) for column in zip(*rows, strict=True))
        return "\n".join(f"{a:{first}}  {b:{second}}  {c:>{third}}  {d}" for a, b, c, d in rows)


def backward_plan(
    *,
    hidden: int,
    q_dim: int,
    kv_dim: int,
    max_seq: int,
    lora_rank: int,
    intermediate: int,
    heads: int,
    nf4: bool = False,
    dtype: str = "float32",
    blas: bool | Literal["auto"] = "auto",
) -> Plan:
    """The plan of a backward step; `InputError` with the parameter's name for one that cannot be.

    A `lora_rank` of 0 leaves out LoRA alone; `nf4` the gradients of the base's weights alone.
    """
    shape = Shape(
        hidden=hidden, q_dim=q_dim, kv_dim=kv_dim, max_seq=max_seq, lora_rank=lora_rank,
        intermediate=intermediate, heads=heads, nf4=nf4, dtype=dtype,
    )  # fmt: skip
    return Plan(shape, blas)


def _backward(s: Shape) -> Iterator[Op]:
    """What `LoraBlock.step` does."""
    yield from _through(s, "down")
    yield elementwise.swiglu_backward(s.max_seq * s.intermediate, s.dtype)
    yield from _through(s, "gate")
    yield from _through(s, "up")
    yield from _norm(s)
    yield from _through(s, "o")
    yield from _attention(s)
    for name in _ADAPTED:
        yield axes.swap_axes(s.base[name][1] // s.head, s.max_seq, s.head, s.dtype)
        yield from _through(s, name)
        yield from _lora(s, name)
    yield from _norm(s)


def _through(s: Shape, name: str) -> Iterator[Op]:
    """The gradients of a base weight's input and, unless it is frozen, of the weight."""
    (k, n), m = s.base[name], s.max_seq
    yield (gemm.gemm_backward_a_nf4 if s.nf4 else gemm.gemm_backward_a)(m, n, k, s.dtype)
    if not s.nf4:
        yield gemm.gemm_backward_b(m, n, k, s.dtype)


def _lora(s: Shape, name: str) -> Iterator[Op]:
    """The gradients of B, of its input, of A, and of A's input."""
    if not s.lora_rank:
        return
    (k, n), m, rank = s.base[name], s.max_seq, s.lora_rank
    yield gemm.gemm_backward_b(m, n, rank, s.dtype)
    yield gemm.gemm_backward_a(m, n, rank, s.dtype)
    yield gemm.gemm_backward_b(m, rank, k, s.dtype)
    yield gemm.gemm_backward_a(m, rank, k, s.dtype)


def _attention(s: Shape) -> Iterator[Op]:
    """The gradients of probabilities and values, of scores, of queries and keys; head by head."""
    seq, sizes = s.max_seq, (s.max_seq, s.head, s.max_seq, s.dtype)
    yield axes.swap_axes(seq, s.heads, s.head, s.dtype)
    yield from (gemm.gemm_backward_a(*sizes), gemm.gemm_backward_b(*sizes)) * s.heads
    yield softmax.softmax_backward(s.heads * seq, seq, s.dtype)
    yield from (gemm.gemm(*sizes), gemm.gemm_backward_b(*sizes)) * s.heads


def _norm(s: Shape) -> Iterator[Op]:
    """The gradient of what was normalised, which meets that of the branch around it."""
    yield from rms_norm.rms_norm_backward(s.max_seq, s.hidden, s.dtype)
    yield axes.add(s.max_seq, s.hidden, s.dtype)


# The step


class LoraBlock:
    """A backward step of one block, on the shipped kernels: what a plan is compared with.

        block = LoraBlock(gpu, shape, arrays)
        gx = block.step(gy)                     # and block.gradients["q_a"], …

    `arrays` are those of `shape.given`, of any library; with `shape.nf4` the weights of the base are
    `Nf4`. All that a step needs is checked and allocated here, so after a first one it can be captured.
    `blas` is as for `Ops`.
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
        self.gpu, self.shape, self.ops = gpu, shape, Ops(gpu, blas=blas)
        self._given, self._eps = _checked(gpu, shape, arrays), not_negative("eps", eps)
        s, seq, kind = shape, shape.max_seq, shape.dtype
        self.gradients = {name: gpu.empty(size, kind) for name, size in s.trained.items()}
        self._gx, self._g_middle, self._g_normed = (gpu.empty((seq, s.hidden), kind) for _ in range(3))
        self._g_gated, self._g_lifted = (gpu.empty((seq, s.intermediate), kind) for _ in range(2))
        self._g_heads = gpu.empty((s.heads, seq, s.head), kind)
        self._g_keys, self._g_values = (gpu.empty((s.kv_heads, seq, s.head), kind) for _ in range(2))
        self._g_scores = gpu.empty((s.heads, seq, seq), kind)
        self._g_wide, self._g_narrow = (gpu.empty((seq, size), kind) for size in (s.q_dim, s.kv_dim))
        self._g_low = gpu.empty((seq, s.lora_rank), kind) if s.lora_rank else None
        self._room = gpu.empty(self.ops.rms_norm_workspace(seq, s.hidden, kind))

    def step(self, gy: Any) -> Array:
        """From the gradient of the block's result that of `x`, and those in `gradients`.

        They are the same arrays every time.
        """
        s = self.shape
        _check_array(self.gpu, "gy", gy, (s.max_seq, s.hidden), s.dtype)
        self._ffn(gy)
        self._norm("norm2", self._given["middle"], gy, self._g_middle)
        self._attention(self._g_middle)
        self._norm("norm1", self._given["x"], self._g_middle, self._gx)
        return self._gx

    def _ffn(self, gy: Any) -> None:
        given, gated, lifted = self._given, self._g_gated, self._g_lifted
        self._through("down", gy, gated)
        self.ops.swiglu_backward(gated, given["gated"], given["lifted"], out=(gated, lifted))
        self._through("gate", gated, self._g_normed)
        self._through("up", lifted, self._g_normed, add=True)

    def _attention(self, g: Array) -> None:
        s, scale = self.shape, self.shape.head**-0.5
        self._through("o", g, self._g_wide)
        self._swap(self._g_wide, self._g_heads, s.max_seq, s.heads)
        self._probabilities()
        self.ops.softmax_backward(self._g_scores, self._given["probabilities"], out=self._g_scores)
        self._scores()
        self._projection("q", self._g_heads, self._g_wide, scale)
        self._projection("k", self._g_keys, self._g_narrow, scale)
        self._projection("v", self._g_values, self._g_narrow, 1.0)

    def _probabilities(self) -> None:
        """From the gradients of heads those of probabilities and values."""
        values, probabilities = self._given["values"], self._given["probabilities"]
        for head, (kv, add) in enumerate(self._shared()):
            g = self._g_heads[head]
            self.ops.gemm_backward_a(g, values[kv], out=self._g_scores[head])
            self.ops.gemm_backward_b(probabilities[head], g, out=self._g_values[kv], accumulate=add)

    def _scores(self) -> None:
        """From the gradients of scores those of queries, in the place of the heads', and keys."""
        queries, keys = self._given["queries"], self._given["keys"]
        for head, (kv, add) in enumerate(self._shared()):
            g = self._g_scores[head]
            self.ops.gemm(g, keys[kv], out=self._g_heads[head])
            self.ops.gemm_backward_b(g, queries[head], out=self._g_keys[kv], accumulate=add)

    def _shared(self) -> Iterator[tuple[int, bool]]:
        """For each head that of its keys and values, and whether one before it has that, too."""
        share = self.shape.heads // self.shape.kv_heads
        return ((head // share, head % share > 0) for head in range(self.shape.heads))

    def _projection(self, name: str, heads: Array, g: Array, scale: float) -> None:
        """Through a weight of the base and its LoRA, from the gradients of heads."""
        self._swap(heads, g, len(heads), self.shape.max_seq, scale)
        self._through(name, g, self._g_normed, add=name != _ADAPTED[0])
        if not self.shape.lora_rank:
            return
        given, ops, low = self._given, self.ops, self._g_low
        a, b = f"{name}_a", f"{name}_b"
        ops.gemm_backward_b(given[f"{name}_low"], g, out=self.gradients[b])
        ops.gemm_backward_a(g, given[b], out=low)
        ops.gemm_backward_b(given["normed1"], low, out=self.gradients[a])
        ops.gemm_backward_a(low, given[a], out=self._g_normed, accumulate=True)

    def _through(self, name: str, g: Any, out: Array, *, add: bool = False) -> None:
        """The gradients of a base weight's input and, unless it is frozen, of the weight."""
        self.ops.gemm_backward_a(g, self._given[name], out=out, accumulate=add)
        if not self.shape.nf4:
            self.ops.gemm_backward_b(self._given[_INPUT[name]], g, out=self.gradients[name])

    def _norm(self, name: str, x: Any, around: Any, out: Array) -> None:
        """The gradient of what was normalised, added to that of the branch `around` it."""
        to, seq, hidden = (out, self.gradients[name]), self.shape.max_seq, self.shape.hidden
        gamma, eps, room = self._given[name], self._eps, self._room
        self.ops.rms_norm_backward(self._g_normed, x, gamma, eps=eps, out=to, workspace=room)
        op = axes.add(seq, hidden, self.shape.dtype)
        op.launch(self.gpu, around, out, 1.0, seq, 1, hidden, True)

    def _swap(self, x: Array, y: Array, rows: int, columns: int, scale: float = 1.0) -> None:
        width = self.shape.head
        op = axes.swap_axes(rows, columns, width, self.shape.dtype)
        op.launch(self.gpu, x, y, scale, rows, columns, width, False)


def _checked(gpu: Gpu, shape: Shape, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """What a shape asks for, of what was given; `InputError` names what is not there or not like it."""
    if not isinstance(shape, Shape):
        raise InputError(f"{shape!r} is not a shape", hint="LoraBlock(gpu, preheat.lora.Shape(…), …)")
    if not isinstance(arrays, Mapping):
        raise InputError("arrays must be a mapping from name to array", hint="see shape.given")
    if missing := [name for name in shape.given if name not in arrays]:
        spare = [str(name) for name in arrays if name not in shape.given]
        hint = did_you_mean(missing[0], spare) or f"missing: {', '.join(missing)}"
        raise InputError(f"there is no array {missing[0]!r}", hint=hint)
    for name, size in shape.given.items():
        if shape.nf4 and name in shape.base:
            _check_nf4(gpu, name, arrays[name], size)
        else:
            _check_array(gpu, name, arrays[name], size, shape.dtype)
    return {name: arrays[name] for name in shape.given}


def _check_array(gpu: Gpu, name: str, given: Any, size: tuple[int, ...], dtype: str) -> None:
    if isinstance(given, Nf4):
        raise InputError(f"{name} is Nf4 of shape {given.shape}, not {dtype} of shape {size}")
    require_like(name, given, Form(size, dtype_of(dtype)), "needed")
    _require_here(gpu, name, given)


def _check_nf4(gpu: Gpu, name: str, given: Any, size: tuple[int, ...]) -> None:
    if not isinstance(given, Nf4):
        hint = "with nf4 the base is quantised: preheat.kernels.nf4.quantize(…).on(gpu)"
        raise InputError(f"{name} is {type(given).__name__}, not Nf4", hint=hint)
    if given.shape != size:
        raise InputError(f"{name} is Nf4 of shape {given.shape}, not of {size} as needed")
    for part, array in (("codes", given.codes), ("scales", given.scales)):
        require_no_gaps(f"{name}.{part}", array)
        _require_here(gpu, f"{name}.{part}", array)
    try:
        given.check()
    except InputError as error:
        raise InputError(f"{name}: {error}", hint=error.hint) from None


def _require_here(gpu: Gpu, name: str, given: Any) -> None:
    """Refuse memory that kernels on `gpu` cannot use."""
    context = gpu._context
    if isinstance(given, Array):
        if given.buffer.lost is not None:
            raise StaleBufferError(name, f"{given!r}: {given.buffer.lost}")
        usable, what = given.buffer.context is context, repr(given)
    else:
        found = foreign(name, given)
        usable = found.reaches(context.device.dlpack)
        what = "in host memory" if found.device[0] == ON_HOST else f"on GPU {found.device[1]}"
    if not usable:
        hint = "copy it to the device first: gpu.array(…)"
        raise InputError(f"{name} is {what}, which kernels on {gpu.name} cannot use", hint=hint)
