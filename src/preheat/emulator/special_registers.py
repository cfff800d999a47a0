"""Special registers."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from preheat.emulator.layout import WARP

if TYPE_CHECKING:
    from preheat.devices.base import Dim3
    from preheat.emulator.wave import Wave

__all__ = ["DYNAMIC", "RESERVED", "SPECIAL", "value"]

_U32, _U64, _BOOL = (np.dtype(t) for t in (np.uint32, np.uint64, np.bool_))

#: Registers that change at every read. Here they are deterministic counters.
DYNAMIC = frozenset("%clock %clock_hi %clock64 %globaltimer %globaltimer_lo %globaltimer_hi".split())

#: Bytes at the beginning of shared memory that kernels can use through special registers.
RESERVED = 1024

_PER_WAVE = ("%ctaid", "%clusterid")  # The others are the same in every wave of a launch.


def _ctaid(wave: Wave, axis: int) -> Any:
    grid = wave.geometry.grid
    layout = wave.layout
    cluster = wave.geometry.cluster
    # Without clusters, or with clusters along x, blocks are in the order of their indices.
    if cluster is not None and cluster[1:] != (1, 1):
        first = _clusterid(wave, axis) * cluster[axis]
        return (first + _cluster_ctaid(wave, axis)).astype(np.uint32)
    below = math.prod(grid[:axis])
    return _coordinates(wave.first, layout.blocks, layout.threads, below, grid[axis])


def _clusterid(wave: Wave, axis: int) -> Any:
    layout = wave.layout
    clusters = _nclusterid(wave)
    size = layout.cluster_blocks
    below = math.prod(clusters[:axis])
    first = wave.first // size
    count = layout.blocks // size
    return _coordinates(first, count, layout.threads * size, below, clusters[axis])


def _cluster_ctaid(wave: Wave, axis: int) -> Any:
    cluster = _cluster_nctaid(wave)
    if cluster[axis] == 1:
        return np.uint32(0)
    below = math.prod(cluster[:axis])
    return (wave.layout.cluster_rank // below % cluster[axis]).astype(np.uint32)


def _cluster_ctarank(wave: Wave) -> Any:
    return wave.layout.cluster_rank.astype(np.uint32) if wave.layout.cluster_blocks > 1 else 0


def _cluster_nctaid(wave: Wave) -> Dim3:
    return wave.geometry.cluster or (1, 1, 1)


def _nclusterid(wave: Wave) -> list[int]:
    return [b // size for b, size in zip(wave.geometry.grid, _cluster_nctaid(wave), strict=True)]


@functools.lru_cache(maxsize=32)  # Repeated launches of a kernel use the same ones.
def _coordinates(first: int, blocks: int, threads: int, below: int, extent: int) -> Any:
    """Return the block or cluster of each thread along one axis; a scalar if it is the same for all."""
    number = np.arange(first, first + blocks) // below % extent
    if number[0] == number[-1] and (number == number[0]).all():
        return number[0]
    return np.repeat(number.astype(np.uint32), threads)


def _element(vector: Callable[[Wave, int], Any], axis: int) -> Callable[[Wave], Any]:
    return lambda wave: vector(wave, axis)


def _lanemask(bits: Callable[[Any], Any]) -> Callable[[Wave], Any]:
    table = bits(np.uint64(1) << np.arange(WARP, dtype=np.uint64)).astype(np.uint32)
    return lambda wave: table.take(wave.layout.lane)


def _fixed(number: int) -> Callable[[Wave], Any]:
    return lambda _: number


def _shared_size(wave: Wave) -> int:
    """Return the shared memory of a block that the kernel and its launch use."""
    return wave.shared_bytes - wave.program.reserved


#: The registers with an element for each axis.
_VECTORS: dict[str, Callable[[Wave, int], Any]] = {
    "%tid": lambda wave, axis: wave.layout.tid(axis),
    "%ntid": lambda wave, axis: wave.layout.block[axis],
    "%ctaid": _ctaid,
    "%nctaid": lambda wave, axis: wave.geometry.grid[axis],
    "%clusterid": _clusterid,
    "%nclusterid": lambda wave, axis: _nclusterid(wave)[axis],
    "%cluster_ctaid": _cluster_ctaid,
    "%cluster_nctaid": lambda wave, axis: _cluster_nctaid(wave)[axis],
}

_VALUES: dict[str, Callable[[Wave], Any]] = {
    **{
        f"{name}.{letter}": _element(function, axis)
        for name, function in _VECTORS.items()
        for axis, letter in enumerate("xyz")
    },
    "%cluster_ctarank": _cluster_ctarank,
    "%cluster_nctarank": lambda wave: wave.layout.cluster_blocks,
    "%is_explicit_cluster": lambda wave: wave.geometry.cluster is not None,
    "%laneid": lambda wave: wave.layout.lane,
    "%warpid": lambda wave: wave.layout.thread_index // np.uint32(WARP),
    "%nwarpid": lambda wave: wave.layout.warps_per_block,
    "%smid": _fixed(0),
    "%nsmid": _fixed(1),
    "%gridid": _fixed(1),
    "%lanemask_eq": _lanemask(lambda one: one),
    "%lanemask_lt": _lanemask(lambda one: one - 1),
    "%lanemask_le": _lanemask(lambda one: one * 2 - 1),
    "%lanemask_gt": _lanemask(lambda one: ~(one * 2 - 1)),
    "%lanemask_ge": _lanemask(lambda one: ~(one - 1)),
    "%dynamic_smem_size": lambda wave: wave.geometry.shared,
    "%total_smem_size": _shared_size,
    "%aggr_smem_size": lambda wave: _shared_size(wave) + RESERVED,
    "%reserved_smem_offset_begin": _fixed(0),
    "%reserved_smem_offset_0": _fixed(0),
    "%reserved_smem_offset_1": _fixed(RESERVED // 2),
    "%reserved_smem_offset_end": _fixed(RESERVED),
    "%reserved_smem_offset_cap": _fixed(RESERVED),
    **{f"%envreg{i}": _fixed(0) for i in range(32)},
    # Where cooperative groups find the counter of the blocks of a grid.
    "%envreg1": lambda wave: wave.program.addresses.get("%grid", 0) >> 32,
    "%envreg2": lambda wave: wave.program.addresses.get("%grid", 0) & 0xFFFFFFFF,
}

#: Every special register that can be read, and its type.
SPECIAL: dict[str, np.dtype[Any]] = {
    **dict.fromkeys(_VALUES, _U32),
    **dict.fromkeys(DYNAMIC, _U64),
    "%gridid": _U64,
    "%is_explicit_cluster": _BOOL,
}


def value(wave: Wave, name: str) -> Any:
    """Return a special register of all threads of a wave: an array, or a scalar if all are equal."""
    cached = wave.layout.special_registers
    if name not in cached or name.startswith(_PER_WAVE):
        found = _VALUES[name](wave)
        cached[name] = found if isinstance(found, np.ndarray) else SPECIAL[name].type(found)
    return cached[name]
