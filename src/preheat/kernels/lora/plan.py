"""The plan of a backward step: what it launches, computed before it runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from preheat.ahead.manifest import Manifest, ManifestProgram
from preheat.ahead.report import WarmReport
from preheat.errors import InputError
from preheat.gpu import Gpu
from preheat.kernels import axes, elementwise, gemm, rms_norm, softmax
from preheat.kernels.blas import by_cublas, find
from preheat.kernels.lora.shape import ADAPTED, Shape, require_shape
from preheat.kernels.op import Op
from preheat.model.program import Program
from preheat.process.lazy import lazy

__all__ = ["Plan", "Request", "backward_plan"]


class Request(NamedTuple):
    """A kernel to compile: its program and its name.

    Examples:
        >>> plan = preheat.lora.backward_plan(
        ...     hidden=64, q_dim=64, kv_dim=32, max_seq=8, lora_rank=4, intermediate=128, heads=4
        ... )
        >>> program, name = plan.requests[0]
    """

    program: Program
    entry: str


@dataclass(frozen=True)
class Plan:
    """The operations of one backward step of a block, for sequences of exactly `max_seq` positions.

    `backward_plan` makes it.

    Attributes:
        shape: The sizes.
        blas: With True, cuBLAS computes matrix products, and with False, shipped kernels do. `"auto"`
            uses cuBLAS where the device has it, and the shipped kernels as long as no device is known.

    Examples:
        >>> plan = preheat.lora.backward_plan(
        ...     hidden=64, q_dim=64, kv_dim=32, max_seq=8, lora_rank=4, intermediate=128, heads=4,
        ...     blas=False,
        ... )
        >>> len(plan.launches) == len(plan.operations)
        True
    """

    shape: Shape
    blas: bool | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        require_shape(self.shape)
        if not isinstance(self.blas, bool) and not (isinstance(self.blas, str) and self.blas == "auto"):
            raise InputError(f"blas {self.blas!r} is not 'auto', True or False")

    @lazy
    def operations(self) -> tuple[Op, ...]:
        """All operations in order, exactly as `trace_ops` collects them in a step."""
        done = _backward(self.shape)
        return tuple(map(by_cublas, done) if self.blas is True else done)

    @property
    def launches(self) -> tuple[Op, ...]:
        """The operations that launch shipped kernels."""
        return tuple(op for op in self.operations if op.by is None)

    @property
    def requests(self) -> tuple[Request, ...]:
        """The kernels to compile for the launches, each once."""
        return tuple(dict.fromkeys(Request(op.program, op.entry) for op in self.launches))

    @lazy
    def requests_up_to_max_seq(self) -> tuple[Request, ...]:
        """The kernels to compile for sequences of every length from 1 to `max_seq`."""
        longest = self.shape.max_seq
        whole = range(8, longest + 1, 8)  # chunks of 16 bytes, of floats and of halves
        floats = range(4, longest + 1, 8)  # of floats alone
        others = [length for length in range(1, longest + 1) if length % 4]
        requests = (request for lengths in (others, floats, whole) for request in self._of(lengths))
        return tuple(dict.fromkeys((*requests, *self.requests)))

    def _of(self, lengths: Sequence[int]) -> Iterator[Request]:
        """Yield the kernels for these lengths, whose rows are all multiples of a chunk, or all are not.

        Tile sizes only grow with such lengths. If the first and the last length launch the same
        kernels, all lengths between them launch these kernels.
        """
        if not lengths:
            return
        first = self._of_length(lengths[0])
        last = self._of_length(lengths[-1])
        yield from first.requests
        if first._entries != last._entries:
            middle = len(lengths) // 2
            yield from self._of(lengths[:middle])
            yield from self._of(lengths[middle:])

    def _of_length(self, length: int) -> Plan:
        return replace(self, shape=replace(self.shape, max_seq=length))

    @lazy
    def _entries(self) -> tuple[str, ...]:
        return tuple(op.entry for op in self.launches)

    def manifest(self, *, shorter: bool = False) -> Manifest:
        """Return the kernels as a manifest, which can be written, baked or warmed.

        Args:
            shorter: Include the kernels for every length up to `max_seq`, and not only for that length.

        Examples:
            >>> model = preheat.lora.MODELS["qwen2-0.5b"]
            >>> plan = preheat.lora.backward_plan(**model.sizes, max_seq=128, lora_rank=16)
            >>> plan.manifest().write("lora.toml")
        """
        requests = self.requests_up_to_max_seq if shorter else self.requests
        items = (ManifestProgram(program, entries=(entry,)) for program, entry in requests)
        return Manifest(tuple(items)).merged()

    def on(self, gpu: Gpu) -> Plan:
        """Return the plan for a device. Products use cuBLAS if it is available, unless `blas` is set.

        Examples:
            >>> model = preheat.lora.MODELS["qwen2-0.5b"]
            >>> plan = preheat.lora.backward_plan(**model.sizes, max_seq=128, lora_rank=16)
            >>> plan.on(gpu).blas
            False
        """
        if not isinstance(gpu, Gpu):
            raise InputError(f"{gpu!r} is not a device", hint="plan.on(preheat.device(…))")
        return self if self.blas != "auto" else replace(self, blas=not isinstance(find(gpu), str))

    def warm(self, gpu: Gpu, *, shorter: bool = False, jobs: int | None = None) -> WarmReport:
        """Warm every kernel of the plan on a device, as `gpu.warm` does.

        Args:
            gpu: The device.
            shorter: Include the kernels for every length up to `max_seq`.
            jobs: As in `gpu.warm`.

        Examples:
            >>> plan = preheat.lora.backward_plan(
            ...     hidden=64, q_dim=64, kv_dim=32, max_seq=8, lora_rank=4, intermediate=128, heads=4
            ... )
            >>> report = plan.warm(gpu)
            >>> report.programs > 0
            True
        """
        here = self.on(gpu)
        return gpu.warm(here.manifest(shorter=shorter), jobs=jobs)

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
    frozen: bool = False,
    nf4: bool = False,
    dtype: str = "float32",
    blas: bool | Literal["auto"] = "auto",
) -> Plan:
    """Return the plan of a backward step.

    The plan is for sequences of exactly `max_seq` positions, and has the kernels of shorter ones on
    request.

    Args:
        hidden: The elements of a position.
        q_dim: The size of all `heads` together.
        kv_dim: The size of all heads of keys and values.
        max_seq: The length of the sequence.
        lora_rank: The rank of LoRA. 0 means no LoRA.
        intermediate: The size of the hidden layer of the feed-forward part.
        heads: The number of heads.
        frozen: Compute no gradients for the weights of the base.
        nf4: The base is frozen and quantised.
        dtype: The element type.
        blas: See `Plan`.

    Raises:
        InputError: A parameter is invalid. The error names it.

    Examples:
        >>> plan = preheat.lora.backward_plan(
        ...     hidden=64, q_dim=64, kv_dim=32, max_seq=8, lora_rank=4, intermediate=128, heads=4
        ... )
        >>> plan.shape.max_seq
        8
    """
    shape = Shape(
        hidden=hidden, q_dim=q_dim, kv_dim=kv_dim, max_seq=max_seq, lora_rank=lora_rank,
        intermediate=intermediate, heads=heads, frozen=frozen, nf4=nf4, dtype=dtype,
    )  # fmt: skip
    return Plan(shape, blas)


def _backward(s: Shape) -> Iterator[Op]:
    """Yield the operations of `LoraBlock.step`."""
    yield from _linear_backward(s, "down")
    yield elementwise.swiglu_backward(s.max_seq * s.intermediate, s.dtype)
    yield from _linear_backward(s, "gate")
    yield from _linear_backward(s, "up")
    yield from _norm_backward(s)
    yield from _linear_backward(s, "o")
    yield from _attention(s)
    for name in ADAPTED:
        yield axes.swap_axes(s.base[name][1] // s.head, s.max_seq, s.head, s.dtype)
        yield from _linear_backward(s, name)
        yield from _lora(s, name)
    yield from _norm_backward(s)


def _linear_backward(s: Shape, name: str) -> Iterator[Op]:
    """Yield the gradients of the input of a base weight and, unless frozen, of the weight."""
    k, n = s.base[name]
    m = s.max_seq
    yield (gemm.gemm_backward_a_nf4 if s.nf4 else gemm.gemm_backward_a)(m, n, k, s.dtype)
    if not s.frozen:
        yield gemm.gemm_backward_b(m, n, k, s.dtype)


def _lora(s: Shape, name: str) -> Iterator[Op]:
    """Yield the gradients of B, of its input, of A, and of its input."""
    if not s.lora_rank:
        return
    k, n = s.base[name]
    m, rank = s.max_seq, s.lora_rank
    yield gemm.gemm_backward_b(m, n, rank, s.dtype)
    yield gemm.gemm_backward_a(m, n, rank, s.dtype)
    yield gemm.gemm_backward_b(m, rank, k, s.dtype)
    yield gemm.gemm_backward_a(m, rank, k, s.dtype)


def _attention(s: Shape) -> Iterator[Op]:
    """Yield the gradients of probabilities, values, scores, queries and keys for each head."""
    seq = s.max_seq
    sizes = (seq, s.head, seq, s.dtype)
    yield axes.swap_axes(seq, s.heads, s.head, s.dtype)
    yield from (gemm.gemm_backward_a(*sizes), gemm.gemm_backward_b(*sizes)) * s.heads
    yield softmax.softmax_backward(s.heads * seq, seq, s.dtype)
    yield from (gemm.gemm(*sizes), gemm.gemm_backward_b(*sizes)) * s.heads


def _norm_backward(s: Shape) -> Iterator[Op]:
    """Yield the gradient of the input of a norm, added to the residual branch's."""
    yield from rms_norm.rms_norm_backward(s.max_seq, s.hidden, s.dtype)
    yield axes.add(s.max_seq, s.hidden, s.dtype)
