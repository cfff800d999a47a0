"""Loads and stores of many threads at once.

An address operand becomes a `Place`: the address in host memory for each thread, computed once and used
for every access at a constant offset from it. If threads access memory with regular strides, as most
do, an access is one strided copy; otherwise it gathers or scatters.
"""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from preheat.devices.base import Limits
from preheat.devices.emulator.memory import Violation

if TYPE_CHECKING:
    from preheat.devices.emulator.group import Group
    from preheat.devices.emulator.wave import Wave

__all__ = [
    "LOCAL",
    "NO_BLOCK",
    "OF_BLOCK",
    "SHARED",
    "Base",
    "Place",
    "admit",
    "in_space",
    "load",
    "load_bytes",
    "load_vector",
    "peek",
    "place",
    "place_generic",
    "place_shared",
    "poke",
    "span",
    "store",
    "store_vector",
    "view",
    "wrapped",
]

Array = np.ndarray[Any, Any]
DType = np.dtype[Any]

#: Generic addresses from SHARED on are shared memory, from LOCAL on local memory.
SHARED, LOCAL, _END = 1 << 56, 1 << 57, 1 << 63
_WINDOWS = (("global", -_END, SHARED), ("cluster", SHARED, LOCAL), ("local", LOCAL, _END))

#: Shared addresses below this are in the thread's own block. Those of the block with rank r in its
#: cluster begin at (r + 1) * OF_BLOCK.
OF_BLOCK = 1 << 24
NO_BLOCK = 126  # Larger ranks become this one in an address: no cluster has so many blocks.

_STAY = "let all blocks of the cluster meet at a cluster barrier before one of them ends"
_REMOTE = "use the form with .shared::cluster"

# The host's address space as one buffer. It begins below zero, because NumPy rejects a null pointer
# and because a constant offset may be negative.
_ORIGIN = -(1 << 40)
_BIAS = 1 << 36
_SPAN = 1 << 50
_HOST: Any = (ctypes.c_char * _SPAN).from_address(_ORIGIN & ((1 << 64) - 1))
_FLAT: dict[DType, Array] = {}


def view(
    dtype: DType, address: int, shape: tuple[int, ...] = (), strides: tuple[int, ...] | None = None
) -> Array:
    """Return host memory as an array. The caller is responsible for its validity."""
    return np.ndarray(shape, dtype, _HOST, address - _ORIGIN, strides)


def flat(dtype: DType, offset: int = 0) -> Array:
    """Return host memory as an array that `Place.index` indexes, for accesses at `offset`."""
    if dtype not in _FLAT:
        _FLAT[dtype] = np.ndarray((_SPAN // dtype.itemsize,), dtype, _HOST)
    return _FLAT[dtype][(_BIAS + offset) // dtype.itemsize :]


Even = tuple[int, tuple[int, ...], tuple[int, ...]]  # Start, shape, strides.


class Base(NamedTuple):
    """Where a space begins in host memory, its stride along each axis of a wave, and its size."""

    start: int
    strides: tuple[int, ...] = ()  # Empty if all threads share the space.
    limit: int | None = None  # None for global memory, where buffers decide what is valid.


class Place:
    """The address of each thread of a group.

    `values` are the addresses in the kernel, `lo` and `hi` their bounds, `bits` the bitwise or of them.
    In host memory the place is one address for all threads (`shape` is empty), a grid with regular
    strides from `start`, or, if `strides` is None, `addresses`. If addresses name blocks of a cluster,
    `blocks` are the indices of those blocks in the wave, or -1 for a block that does not exist, and
    `lo` and `hi` are relative to the beginning of a block.
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
        self.space, self.values, self.lo, self.hi, self.bits = space, values, lo, hi, bits
        self.limit = limit  # The size of this space in bytes; None for global memory.
        self.start = 0
        self.shape: tuple[int, ...] = ()
        self.strides: tuple[int, ...] | None = ()
        self.addresses: Array | None = None
        self.blocks: Array | None = None
        self.parts: list[tuple[Array, Place]] = []
        self._index: dict[int, Array] = {}

    def index(self, dtype: DType) -> Array:
        """Return the index of each thread's element in `flat(dtype, offset)`."""
        size = dtype.itemsize
        if size not in self._index:
            index = self.everywhere() >> (size.bit_length() - 1)
            index -= (_ORIGIN + _BIAS) // size
            self._index[size] = index
        return self._index[size]

    def everywhere(self) -> Array:
        """Return the host address of each thread, or a single one if all threads share it."""
        if self.addresses is None:
            self.addresses = _grid(self.start, self.shape, self.strides or ())
        return self.addresses

    def moved(self, offset: int) -> Place:
        """Return the same place moved by `offset` bytes."""
        bits = int(np.bitwise_or.reduce(np.atleast_1d(self.values + offset)))
        other = Place(
            self.space, self.values + offset, self.lo + offset, self.hi + offset, bits, self.limit
        )
        other.start, other.shape, other.strides = self.start + offset, self.shape, self.strides
        other.addresses = None if self.addresses is None else self.addresses + offset
        other.blocks = self.blocks
        other.parts = [(chosen, part.moved(offset)) for chosen, part in self.parts]
        return other

    def name(self, position: int, offset: int) -> str:
        """Return how a message names the address at `offset` from the place of one thread."""
        values = np.atleast_1d(self.values)
        address = int(values[position if len(values) > 1 else 0])
        if self.blocks is None or address < OF_BLOCK:
            return f"{self.space.replace('cluster', 'shared')} address {address + offset:#x}"
        named, within = divmod(address, OF_BLOCK)
        rank = f"{named - 1} or above" if named > NO_BLOCK else named - 1
        return f"shared address {within + offset:#x} of block {rank} of its cluster"


def place(group: Group, values: Any, space: str) -> Place:
    """Return the place of addresses that are relative to the beginning of `space`."""
    if values.dtype.itemsize < 8:
        values = values.astype(np.int64)
    base = group.wave.base(space)
    own = any(base.strides)  # Each thread has its own memory in this space.
    if group.lanes is None or not own:
        shape = group.wave.shape if group.lanes is None else (group.count,)
        even = _even_steps(values, shape) if values.ndim else _one_address(values, shape if own else ())
        if even is not None:
            return _evenly(space, values, base, even)
    start = group.origin(space) if own else base.start
    return _scattered(space, values, base, values + start if own or start else values)


def place_shared(group: Group, values: Any, space: str) -> Place:
    """Return the place of shared addresses: of the whole cluster or, if `space` is "shared", of the
    thread's own block, whether or not they name it.
    """
    found = place(group, values, "shared")
    return found if found.hi < OF_BLOCK else _in_cluster(group, found, space)


def _in_cluster(group: Group, plain: Place, space: str) -> Place:
    """Return the place of shared addresses of which some name a block."""
    values, base = np.broadcast_to(plain.values, (group.count,)), group.wave.base("shared")
    row, count = group.of("row"), group.wave.layout.cluster_blocks
    named = values >> (OF_BLOCK.bit_length() - 1)  # 0 and negative ranks are the thread's own block.
    within = np.where(named > 0, values & (OF_BLOCK - 1), values)
    blocks = np.where(named > 0, row - group.of("rank") + named - 1, row)
    blocks = np.where(named > count, -1, blocks)
    if space == "shared" and (blocks < 0).any():
        return plain  # An address beyond the shared memory of the block.
    step = base.strides[0] if base.strides else 0
    found = _scattered(space, within, base, base.start + np.maximum(blocks, 0) * step + within)
    found.values, found.blocks = values, blocks
    return found


def _evenly(space: str, values: Any, base: Base, even: Even) -> Place:
    start, shape, strides = even
    lo = hi = bits = start
    for extent, stride in zip(shape, strides, strict=True):
        reach = stride * (extent - 1)
        lo, hi, bits = lo + min(reach, 0), hi + max(reach, 0), bits | stride
    found = Place(space, values, lo, hi, bits, base.limit)
    found.start, found.shape, found.strides = base.start + start, shape, strides
    if any(base.strides):
        found.strides = tuple(a + b for a, b in zip(strides, base.strides, strict=True))
    return found


def _scattered(space: str, values: Any, base: Base, addresses: Array) -> Place:
    lo, hi = int(values.min()), int(values.max())
    bits = int(np.bitwise_or.reduce(values)) if values.ndim else lo
    found = Place(space, values, lo, hi, bits, base.limit)
    found.strides, found.addresses = None, addresses
    return found


def place_generic(group: Group, values: Any) -> Place:
    """Return the place of generic addresses: in global memory, or in the shared or local window."""
    lo, hi = int(values.min()), int(values.max())
    for space, first, end in _WINDOWS:
        if first <= lo and hi < end:
            find = place_shared if space == "cluster" else place
            return find(group, values if first < 0 else values - first, space)
    mixed = Place("mixed", values, lo, hi, int(np.bitwise_or.reduce(values)), None)
    mixed.strides, mixed.addresses = None, values.copy()
    for space, first, end in _WINDOWS:
        chosen = np.flatnonzero((values >= first) & (values <= end - 1))
        if len(chosen):
            find = place_shared if space == "cluster" else place
            part = find(group.part(chosen), values[chosen] - max(first, 0), space)
            mixed.addresses[chosen] = part.everywhere()
            mixed.parts.append((chosen, part))
    return mixed


def load(group: Group, at: Place, offset: int, dtype: DType, site: int) -> Any:
    """Return each thread's value at `offset` from its place; a scalar if all read the same address."""
    at, offset = _admit(group, at, offset, dtype.itemsize, site, write=False)
    return peek(at, offset, dtype)


def load_vector(group: Group, at: Place, offset: int, dtype: DType, site: int, count: int) -> list[Any]:
    """Return `count` consecutive elements of each thread."""
    size = dtype.itemsize
    at, offset = _admit(group, at, offset, size * count, site, write=False)
    return [peek(at, offset + i * size, dtype) for i in range(count)]


def load_bytes(group: Group, at: Place, offset: int, count: int, site: int, *, align: int) -> list[Any]:
    """Return `count` bytes of each thread, which begin at a multiple of `align`."""
    at, offset = _admit(group, at, offset, count, site, write=False, align=align)
    return [peek(at, offset + i, np.dtype(np.uint8)) for i in range(count)]


def span(one: Group, at: Place, offset: int, size: int, site: int, *, write: bool, align: int) -> int:
    """Return the host address of `size` bytes of one thread."""
    at, offset = _admit(one, at, offset, size, site, write=write, align=align)
    one.wave.writes += write
    return int(at.everywhere()[0]) + offset


def store(group: Group, at: Place, offset: int, dtype: DType, site: int, value: Any) -> None:
    """Write each thread's value. If several threads write to one address, the last thread wins."""
    at, offset = _admit(group, at, offset, dtype.itemsize, site, write=True)
    group.wave.writes += at.space != "local"
    poke(at, offset, dtype, value)


def store_vector(group: Group, at: Place, offset: int, dtype: DType, site: int, *values: Any) -> None:
    """Write consecutive elements of each thread."""
    size = dtype.itemsize
    at, offset = _admit(group, at, offset, size * len(values), site, write=True)
    group.wave.writes += at.space != "local"
    for i, value in enumerate(values):
        poke(at, offset + i * size, dtype, value)


def admit(group: Group, at: Place, offset: int, dtype: DType, site: int) -> tuple[Array, Array]:
    """Check an atomic access. Return host memory as an array, and each thread's index in it."""
    at, offset = _admit(group, at, offset, dtype.itemsize, site, write=True)
    index = at.index(dtype)
    return flat(dtype, offset), np.broadcast_to(index, (group.count,)) if len(index) == 1 else index


def in_space(group: Group, values: Any, space: str) -> Any:
    """Return whether generic addresses lie in a space."""
    if space in ("shared", "cluster", "local"):
        first, end = (LOCAL, _END) if space == "local" else (SHARED, LOCAL)
        inside = (values >= first) & (values <= end - 1)
        if space == "shared" and (inside & (values >= SHARED + OF_BLOCK)).any():
            named = (values - SHARED) // OF_BLOCK  # The address may name the thread's own block or not.
            inside = inside & ((named == 0) | (named == group.of("rank") + 1))
        return inside
    constant = values != values
    for start, size in group.wave.program.constants:
        constant = constant | ((values >= start) & (values < start + size))
    return constant if space == "const" else (values >= 0) & (values < SHARED) & ~constant


def peek(at: Place, offset: int, dtype: DType) -> Any:
    """Return each thread's value at `offset` from its place, without checks."""
    if at.strides is None:
        return flat(dtype, offset).take(at.index(dtype))
    if not at.shape:
        return view(dtype, at.start + offset)[()]
    return view(dtype, at.start + offset, at.shape, at.strides).copy().reshape(-1)


def poke(at: Place, offset: int, dtype: DType, value: Any) -> None:
    """Write each thread's value without checks. The last thread wins."""
    if at.strides is None or not _injective(at.shape, at.strides):
        flat(dtype, offset)[at.index(dtype)] = value
    elif not at.shape:
        view(dtype, at.start + offset)[()] = value[-1] if value.ndim else value
    else:
        target = view(dtype, at.start + offset, at.shape, at.strides)
        target[...] = value.reshape(at.shape) if value.ndim else value


def _admit(
    group: Group, at: Place, offset: int, size: int, site: int, *, write: bool, align: int = 0
) -> tuple[Place, int]:
    """Raise `Violation` for an access to memory that is invalid, read-only or misaligned.

    An access must be aligned to its own size, unless `align` is given.
    """
    if at.parts:
        _check_parts(group, at, offset, size, site, write=write)
    elif at.limit is not None:
        if at.blocks is not None:
            _check_blocks(group, at, at.blocks, offset, size, site, write=write)
        if at.lo + offset < 0 or at.hi + offset + size > at.limit:
            _outside_space(group, at, offset, size, site, write=write)
    else:
        lo, hi, hot = at.lo + offset, at.hi + offset + size, group.wave.memory.hot
        known = hot.start <= lo and hi <= hot.end and (hot.writable or not write)
        if not known and not group.wave.memory.covers(lo, hi, write=write):
            _outside_buffers(group, at, offset, size, site, write=write)
    align = align or size
    if (at.bits | offset) & (align - 1):
        at, offset = at.moved(offset), 0
        if at.bits & (align - 1):
            _misaligned(at, size, align, site, write=write)
    return at, offset


def _check_parts(group: Group, at: Place, offset: int, size: int, site: int, *, write: bool) -> None:
    for chosen, part in at.parts:
        try:
            _admit(group.part(chosen), part, offset, size, site, write=write)
        except Violation as bad:
            bad.position = int(chosen[bad.position])
            raise


def _check_blocks(
    group: Group, at: Place, blocks: Array, offset: int, size: int, site: int, *, write: bool
) -> None:
    """Raise `Violation` unless all blocks that addresses name exist, still run, and may be named."""
    count = group.wave.layout.cluster_blocks
    remote = (blocks != group.of("row")) & (at.space == "shared")
    wrongs = (
        (blocks < 0, f"which has {count} blocks" if count > 1 else "which is one block", None),
        (group.wave.alive[blocks] == 0, "which has exited", _STAY),
        (remote, "and the instruction reaches its own block alone", _REMOTE),
    )
    found = [(int(np.argmax(wrong)), why, hint) for wrong, why, hint in wrongs if wrong.any()]
    if found:
        position, why, hint = found[0]
        address, verb = int(at.values[position]) + offset, "writes" if write else "reads"
        message = f"{verb} {size} bytes at {at.name(position, offset)}, {why}"
        raise Violation(message, site, position, address, hint)


def _outside_space(group: Group, at: Place, offset: int, size: int, site: int, *, write: bool) -> None:
    values = within = np.atleast_1d(at.values)
    if at.blocks is not None:
        within = np.where(values >= OF_BLOCK, values % OF_BLOCK, values)
    outside = (within < -offset) | (within > (at.limit or 0) - size - offset)
    position = int(np.argmax(outside))
    address, verb = int(values[position]) + offset, "writes" if write else "reads"
    there = f"there are {at.limit} bytes of it"
    if at.limit == 0:
        there = "there is none"
    message = f"{verb} {size} bytes at {at.name(position, offset)}; {there}"
    hint = _needs_shared(group.wave, at.hi + offset + size) if at.space != "local" else None
    raise Violation(message, site, position, address, hint)


def _needs_shared(wave: Wave, end: int) -> str | None:
    """Return a hint how a launch gets shared memory up to `end`, if its size depends on the launch."""
    fixed, have = wave.program.shared_bytes, wave.shared_bytes
    dynamic = fixed in wave.program.shared.values()  # It begins where static memory ends.
    if not dynamic or not have < end <= Limits().shared_optin:
        return None
    return (
        f"the launch gave {have - fixed} bytes of dynamic shared memory, and this needs {end - fixed}: "
        f"kernel.launch(…, grid=…, block=…, shared={end - fixed})"
    )


def _outside_buffers(
    group: Group, at: Place, offset: int, size: int, site: int, *, write: bool
) -> None:
    # Sums beyond 64 bits saturate, where there is no memory either, instead of wrapping around.
    values = np.atleast_1d(at.values)
    sums = np.clip(values, -_END - min(offset, 0), _END - 1 - max(offset, 0)) + offset
    memory = group.wave.memory
    position = memory.first_outside(sums, size, write=write)
    if position is not None:
        address = (int(values[position]) + offset) & ((1 << 64) - 1)
        raise Violation(memory.describe(address, size, write=write), site, position, address)


def _misaligned(moved: Place, size: int, align: int, site: int, *, write: bool) -> None:
    values = np.atleast_1d(moved.values)
    position = int(np.argmax(values & (align - 1) != 0))
    address, verb = int(values[position]), "writes" if write else "reads"
    raise Violation(
        f"{verb} {size} bytes at {address:#x}, which is not a multiple of {align}",
        site,
        position,
        address,
    )


def _one_address(value: Any, shape: tuple[int, ...]) -> Even:
    return int(value), shape, (0,) * len(shape)


def _even_steps(values: Array, shape: tuple[int, ...]) -> Even | None:
    """Return start, shape and strides of addresses with regular strides, or None.

    Strides that wrap around at 64 bits are not regular: their memory is not contiguous.
    """
    start, inner = int(values[0]), len(values)
    strides, last = [], start
    lo = hi = start
    for extent in shape:
        inner //= extent
        stride = int(values[inner]) - start if extent > 1 else 0
        strides.append(stride)
        reach = stride * (extent - 1)
        last, lo, hi = last + reach, lo + min(reach, 0), hi + max(reach, 0)
    if int(values[-1]) != last or lo < -_END or hi >= _END:
        return None
    if len(values) > 2:
        expected = _differences(shape, tuple(strides))
        if not (values[1:] - values[:-1] == expected).all():
            return None
    return start, shape, tuple(strides)


@functools.lru_cache(maxsize=32)
def _differences(shape: tuple[int, ...], strides: tuple[int, ...]) -> Array:
    """Return the distance of each thread's address from that of the previous thread."""
    return np.diff(_grid(0, shape, strides))


def _grid(start: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Array:
    """Return addresses with regular strides, one for each thread. They wrap around, as on a GPU."""
    addresses = np.full(shape, wrapped(start), np.int64)
    for axis, (extent, stride) in enumerate(zip(shape, strides, strict=True)):
        steps = np.arange(extent, dtype=np.int64) * wrapped(stride)
        addresses += steps.reshape([-1 if i == axis else 1 for i in range(len(shape))])
    return addresses.reshape(-1)


def wrapped(number: int) -> int:
    """Return the signed 64-bit integer with the same low bits, which represents an address."""
    return (number + _END) % (2 * _END) - _END


def _injective(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Return whether no two threads access the same address."""
    reach = 1
    for stride, extent in sorted((abs(s), n) for s, n in zip(strides, shape, strict=True) if n > 1):
        if stride < reach:
            return False
        reach = stride * extent
    return True
