"""The addresses of many threads: in the state spaces of PTX, and in host memory.

An address operand becomes `Addresses`: the host address for each thread, resolved once and used for
every access at a constant offset from it.
"""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from preheat.emulator.group import Group

__all__ = [
    "BLOCK_WINDOW",
    "INVALID_RANK",
    "LOCAL_WINDOW",
    "SHARED_WINDOW",
    "Addresses",
    "StateSpace",
    "host_array",
    "host_view",
    "in_space",
    "resolve",
    "resolve_generic",
    "resolve_shared",
    "to_int64",
]

Array = np.ndarray[Any, Any]
DType = np.dtype[Any]

#: Generic addresses from SHARED_WINDOW on are shared memory, from LOCAL_WINDOW on local memory.
SHARED_WINDOW = 1 << 56
LOCAL_WINDOW = 1 << 57
_END = 1 << 63
_WINDOWS = (
    ("global", -_END, SHARED_WINDOW),
    ("cluster", SHARED_WINDOW, LOCAL_WINDOW),
    ("local", LOCAL_WINDOW, _END),
)

#: Shared addresses below this are in the thread's own block. Addresses in the block with rank r of its
#: cluster begin at (r + 1) * BLOCK_WINDOW.
BLOCK_WINDOW = 1 << 24
INVALID_RANK = 126  # Larger ranks become this one in an address: no cluster has so many blocks.

# The host's address space as one buffer. It begins below zero, because NumPy rejects a null pointer
# and because a constant offset may be negative.
_ORIGIN = -(1 << 40)
_BIAS = 1 << 36
_SPAN = 1 << 50
_HOST: Any = (ctypes.c_char * _SPAN).from_address(_ORIGIN & ((1 << 64) - 1))
_HOST_ARRAYS: dict[DType, Array] = {}

#: Addresses with regular strides, as in a NumPy array: start, shape and strides.
Strided = tuple[int, tuple[int, ...], tuple[int, ...]]


def host_view(
    dtype: DType, address: int, shape: tuple[int, ...] = (), strides: tuple[int, ...] | None = None
) -> Array:
    """Return host memory as an array. The caller is responsible for its validity."""
    return np.ndarray(shape, dtype, _HOST, address - _ORIGIN, strides)


def host_array(dtype: DType, offset: int = 0) -> Array:
    """Return host memory as an array, for `Addresses.index` and accesses at `offset`."""
    if dtype not in _HOST_ARRAYS:
        _HOST_ARRAYS[dtype] = np.ndarray((_SPAN // dtype.itemsize,), dtype, _HOST)
    return _HOST_ARRAYS[dtype][(_BIAS + offset) // dtype.itemsize :]


class StateSpace(NamedTuple):
    """Where a state space begins in host memory, its stride along each axis of a wave, and its size."""

    start: int
    strides: tuple[int, ...] = ()  # Empty if all threads share the space.
    limit: int | None = None  # None for global memory, where buffers decide what is valid.


class Addresses:
    """The address of each thread of a group.

    `values` are the addresses in the kernel, `lo` and `hi` their bounds, `bits` the bitwise or of them.
    In host memory there is one address for all threads (`shape` is empty), a grid with regular strides
    from `start`, or, if `strides` is None, `addresses`. If addresses name blocks of a cluster, `blocks`
    are the indices of those blocks in the wave, or -1 for a block that does not exist, and `lo` and
    `hi` are relative to the beginning of a block. Generic addresses in several state spaces have
    `parts`: the positions of the threads in each space, and their addresses there.
    """

    __slots__ = (
        "_index",
        "addresses",
        "bits",
        "blocks",
        "hi",
        "limit",
        "lo",
        "parts",
        "shape",
        "space",
        "start",
        "strides",
        "values",
    )

    def __init__(self, space: str, values: Any, lo: int, hi: int, bits: int, limit: int | None) -> None:
        self.space = space
        self.values = values
        self.lo = lo
        self.hi = hi
        self.bits = bits
        self.limit = limit  # The size of the space in bytes; None for global memory.
        self.start = 0
        self.shape: tuple[int, ...] = ()
        self.strides: tuple[int, ...] | None = ()
        self.addresses: Array | None = None
        self.blocks: Array | None = None
        self.parts: list[tuple[Array, Addresses]] = []
        self._index: dict[int, Array] = {}

    def index(self, dtype: DType) -> Array:
        """Return the index of each thread's element in `host_array(dtype, offset)`."""
        size = dtype.itemsize
        if size not in self._index:
            index = self.host_addresses() >> (size.bit_length() - 1)
            index -= (_ORIGIN + _BIAS) // size
            self._index[size] = index
        return self._index[size]

    def host_addresses(self) -> Array:
        """Return the host address of each thread, or a single address if all threads share it."""
        if self.addresses is None:
            self.addresses = _strided_addresses(self.start, self.shape, self.strides or ())
        return self.addresses

    def move_by(self, offset: int) -> Addresses:
        """Return the addresses that are `offset` bytes further."""
        bits = int(np.bitwise_or.reduce(np.atleast_1d(self.values + offset)))
        other = Addresses(
            self.space, self.values + offset, self.lo + offset, self.hi + offset, bits, self.limit
        )
        other.start = self.start + offset
        other.shape = self.shape
        other.strides = self.strides
        other.addresses = None if self.addresses is None else self.addresses + offset
        other.blocks = self.blocks
        other.parts = [(chosen, part.move_by(offset)) for chosen, part in self.parts]
        return other

    def describe(self, position: int, offset: int) -> str:
        """Return how a message names the address of one thread, plus `offset`."""
        values = np.atleast_1d(self.values)
        address = int(values[position if len(values) > 1 else 0])
        if self.blocks is None or address < BLOCK_WINDOW:
            return f"{self.space.replace('cluster', 'shared')} address {address + offset:#x}"
        window, within = divmod(address, BLOCK_WINDOW)
        rank = f"{window - 1} or above" if window > INVALID_RANK else window - 1
        return f"shared address {within + offset:#x} of block {rank} of its cluster"


def resolve(group: Group, values: Any, space: str) -> Addresses:
    """Resolve addresses that are relative to the beginning of a state space."""
    if values.dtype.itemsize < 8:
        values = values.astype(np.int64)
    base = group.wave.state_space(space)
    own = any(base.strides)  # Each thread has its own memory in this space.
    if group.lanes is None or not own:
        shape = group.wave.shape if group.lanes is None else (group.count,)
        if values.ndim:
            strided = _regular_strides(values, shape)
        else:
            extents = shape if own else ()
            strided = int(values), extents, (0,) * len(extents)
        if strided is not None:
            return _strided(space, values, base, strided)
    start = group.host_origins(space) if own else base.start
    return _gathered(space, values, base, values + start if own or start else values)


def resolve_shared(group: Group, values: Any, space: str) -> Addresses:
    """Resolve shared addresses: of the whole cluster or, if `space` is "shared", of the thread's own
    block, whether or not they name it.
    """
    found = resolve(group, values, "shared")
    return found if found.hi < BLOCK_WINDOW else _resolve_cluster(group, found, space)


def _resolve_cluster(group: Group, plain: Addresses, space: str) -> Addresses:
    """Resolve shared addresses, some of which are in other blocks of the cluster."""
    values = np.broadcast_to(plain.values, (group.count,))
    base = group.wave.state_space("shared")
    own_block = group.per_thread("block_index")
    count = group.wave.layout.cluster_blocks
    # A window of 0 or less is the thread's own block.
    window = values >> (BLOCK_WINDOW.bit_length() - 1)
    within = np.where(window > 0, values & (BLOCK_WINDOW - 1), values)
    blocks = np.where(window > 0, own_block - group.per_thread("cluster_rank") + window - 1, own_block)
    blocks = np.where(window > count, -1, blocks)
    if space == "shared" and (blocks < 0).any():
        return plain  # An address beyond the shared memory of the block.
    step = base.strides[0] if base.strides else 0
    found = _gathered(space, within, base, base.start + np.maximum(blocks, 0) * step + within)
    found.values = values
    found.blocks = blocks
    return found


def _strided(space: str, values: Any, base: StateSpace, strided: Strided) -> Addresses:
    start, shape, strides = strided
    lo = hi = bits = start
    for extent, stride in zip(shape, strides, strict=True):
        reach = stride * (extent - 1)
        lo += min(reach, 0)
        hi += max(reach, 0)
        bits |= stride
    found = Addresses(space, values, lo, hi, bits, base.limit)
    found.start = base.start + start
    found.shape = shape
    found.strides = strides
    if any(base.strides):
        found.strides = tuple(a + b for a, b in zip(strides, base.strides, strict=True))
    return found


def _gathered(space: str, values: Any, base: StateSpace, addresses: Array) -> Addresses:
    lo, hi = int(values.min()), int(values.max())
    bits = int(np.bitwise_or.reduce(values)) if values.ndim else lo
    found = Addresses(space, values, lo, hi, bits, base.limit)
    found.strides = None
    found.addresses = addresses
    return found


def resolve_generic(group: Group, values: Any) -> Addresses:
    """Resolve generic addresses: in global memory, or in the shared or local window."""
    lo, hi = int(values.min()), int(values.max())
    for space, first, end in _WINDOWS:
        if first <= lo and hi < end:
            function = resolve_shared if space == "cluster" else resolve
            return function(group, values if first < 0 else values - first, space)
    mixed = Addresses("mixed", values, lo, hi, int(np.bitwise_or.reduce(values)), None)
    mixed.strides = None
    mixed.addresses = values.copy()
    for space, first, end in _WINDOWS:
        chosen = np.flatnonzero((values >= first) & (values <= end - 1))
        if len(chosen):
            function = resolve_shared if space == "cluster" else resolve
            part = function(group.subgroup(chosen), values[chosen] - max(first, 0), space)
            mixed.addresses[chosen] = part.host_addresses()
            mixed.parts.append((chosen, part))
    return mixed


def in_space(group: Group, values: Any, space: str) -> Any:
    """Return whether generic addresses lie in a state space."""
    if space in ("shared", "cluster", "local"):
        first, end = (LOCAL_WINDOW, _END) if space == "local" else (SHARED_WINDOW, LOCAL_WINDOW)
        inside = (values >= first) & (values <= end - 1)
        if space == "shared" and (inside & (values >= SHARED_WINDOW + BLOCK_WINDOW)).any():
            # The address may name the thread's own block or not.
            window = (values - SHARED_WINDOW) // BLOCK_WINDOW
            inside = inside & ((window == 0) | (window == group.per_thread("cluster_rank") + 1))
        return inside
    constant = values != values
    for start, size in group.wave.program.constants:
        constant = constant | ((values >= start) & (values < start + size))
    return constant if space == "const" else (values >= 0) & (values < SHARED_WINDOW) & ~constant


def _regular_strides(values: Array, shape: tuple[int, ...]) -> Strided | None:
    """Return addresses with regular strides as start, shape and strides, or None for others.

    Strides that wrap around at 64 bits are not regular: their memory is not contiguous.
    """
    start = int(values[0])
    inner = len(values)
    strides = []
    last = lo = hi = start
    for extent in shape:
        inner //= extent
        stride = int(values[inner]) - start if extent > 1 else 0
        strides.append(stride)
        reach = stride * (extent - 1)
        last += reach
        lo += min(reach, 0)
        hi += max(reach, 0)
    if int(values[-1]) != last or lo < -_END or hi >= _END:
        return None
    if len(values) > 2:
        expected = _differences(shape, tuple(strides))
        if not (values[1:] - values[:-1] == expected).all():
            return None
    return start, shape, tuple(strides)


@functools.lru_cache(maxsize=32)
def _differences(shape: tuple[int, ...], strides: tuple[int, ...]) -> Array:
    """Return the distance of each thread's address from the previous thread's."""
    return np.diff(_strided_addresses(0, shape, strides))


def _strided_addresses(start: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Array:
    """Return addresses with regular strides, one for each thread. They wrap around, as on a GPU."""
    addresses = np.full(shape, to_int64(start), np.int64)
    for axis, (extent, stride) in enumerate(zip(shape, strides, strict=True)):
        steps = np.arange(extent, dtype=np.int64) * to_int64(stride)
        addresses += steps.reshape([-1 if i == axis else 1 for i in range(len(shape))])
    return addresses.reshape(-1)


def to_int64(number: int) -> int:
    """Return the signed 64-bit integer with the same low bits, which represents an address."""
    return (number + _END) % (2 * _END) - _END
