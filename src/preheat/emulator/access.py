"""Loads and stores of many threads at once.

If threads access memory with regular strides, as most do, an access is one strided copy; otherwise it
gathers or scatters.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from preheat.emulator.addresses import BLOCK_WINDOW, Addresses, host_array, host_view
from preheat.emulator.memory import Buffer, Violation, positions_in

if TYPE_CHECKING:
    from preheat.emulator.group import Group
    from preheat.emulator.wave import Wave

__all__ = [
    "ArgumentSpec",
    "check_address",
    "check_atomic",
    "load",
    "load_bytes",
    "load_unchecked",
    "load_vector",
    "pointers_into",
    "store",
    "store_unchecked",
    "store_vector",
]

Array = np.ndarray[Any, Any]
DType = np.dtype[Any]

_POINTER = 8  # bytes
_MAX_ADDRESS = (1 << 63) - 1
_STAY_HINT = "let all blocks of the cluster meet at a cluster barrier before one of them ends"
_REMOTE_HINT = "use the form with .shared::cluster"


def load(group: Group, at: Addresses, offset: int, dtype: DType, site: int) -> Any:
    """Return each thread's value at `offset` from its address; a scalar if all addresses are equal."""
    at, offset = _check_access(group, at, offset, dtype.itemsize, site, write=False)
    return load_unchecked(at, offset, dtype)


def load_vector(
    group: Group, at: Addresses, offset: int, dtype: DType, site: int, count: int
) -> list[Any]:
    """Return `count` consecutive elements of each thread."""
    size = dtype.itemsize
    at, offset = _check_access(group, at, offset, size * count, site, write=False)
    return [load_unchecked(at, offset + i * size, dtype) for i in range(count)]


def load_bytes(
    group: Group, at: Addresses, offset: int, count: int, site: int, *, align: int
) -> list[Any]:
    """Return `count` bytes of each thread, which begin at a multiple of `align`."""
    at, offset = _check_access(group, at, offset, count, site, write=False, align=align)
    return [load_unchecked(at, offset + i, np.dtype(np.uint8)) for i in range(count)]


def check_address(
    one: Group, at: Addresses, offset: int, size: int, site: int, *, write: bool, align: int
) -> int:
    """Return the host address of `size` bytes that one thread accesses, after checking them."""
    at, offset = _check_access(one, at, offset, size, site, write=write, align=align)
    one.wave.writes += write
    return int(at.host_addresses()[0]) + offset


def store(group: Group, at: Addresses, offset: int, dtype: DType, site: int, value: Any) -> None:
    """Write each thread's value. If several threads write to one address, the last thread wins."""
    at, offset = _check_access(group, at, offset, dtype.itemsize, site, write=True)
    group.wave.writes += at.space != "local"
    store_unchecked(at, offset, dtype, value)


def store_vector(
    group: Group, at: Addresses, offset: int, dtype: DType, site: int, *values: Any
) -> None:
    """Write consecutive elements of each thread."""
    size = dtype.itemsize
    at, offset = _check_access(group, at, offset, size * len(values), site, write=True)
    group.wave.writes += at.space != "local"
    for i, value in enumerate(values):
        store_unchecked(at, offset + i * size, dtype, value)


def check_atomic(
    group: Group, at: Addresses, offset: int, dtype: DType, site: int
) -> tuple[Array, Array]:
    """Check an atomic access. Return host memory as an array, and each thread's index in it."""
    at, offset = _check_access(group, at, offset, dtype.itemsize, site, write=True)
    index = at.index(dtype)
    return host_array(dtype, offset), np.broadcast_to(index, (group.count,)) if len(
        index
    ) == 1 else index


def load_unchecked(at: Addresses, offset: int, dtype: DType) -> Any:
    """Return each thread's value at `offset` from its address, without checks."""
    if at.strides is None:
        return host_array(dtype, offset).take(at.index(dtype))
    if not at.shape:
        return host_view(dtype, at.start + offset)[()]
    return host_view(dtype, at.start + offset, at.shape, at.strides).copy().reshape(-1)


def store_unchecked(at: Addresses, offset: int, dtype: DType, value: Any) -> None:
    """Write each thread's value without checks. The last thread wins."""
    if at.strides is None or not _injective(at.shape, at.strides):
        host_array(dtype, offset)[at.index(dtype)] = value
    elif not at.shape:
        host_view(dtype, at.start + offset)[()] = value[-1] if value.ndim else value
    else:
        target = host_view(dtype, at.start + offset, at.shape, at.strides)
        target[...] = value.reshape(at.shape) if value.ndim else value


def _check_access(
    group: Group, at: Addresses, offset: int, size: int, site: int, *, write: bool, align: int = 0
) -> tuple[Addresses, int]:
    """Raise `Violation` for an access to memory that is invalid, read-only or misaligned.

    An access must be aligned to its own size, unless `align` is given. Return addresses and an offset
    of which each is aligned by itself.
    """
    if at.parts:
        _check_parts(group, at, offset, size, site, write=write)
    elif at.limit is not None:
        if at.blocks is not None:
            _check_blocks(group, at, at.blocks, offset, size, site, write=write)
        if at.lo + offset < 0 or at.hi + offset + size > at.limit:
            _raise_outside_space(group, at, offset, size, site, write=write)
    else:
        lo = at.lo + offset
        hi = at.hi + offset + size
        last = group.wave.memory.last_used
        known = last.start <= lo and hi <= last.end and (last.writable or not write)
        if not known and not group.wave.memory.covers(lo, hi, write=write):
            _raise_outside_buffers(group, at, offset, size, site, write=write)
    align = align or size
    if (at.bits | offset) & (align - 1):
        at = at.move_by(offset)
        offset = 0
        if at.bits & (align - 1):
            _raise_misaligned(at, size, align, site, write=write)
    return at, offset


def _check_parts(
    group: Group, at: Addresses, offset: int, size: int, site: int, *, write: bool
) -> None:
    for chosen, part in at.parts:
        with positions_in(chosen):
            _check_access(group.subgroup(chosen), part, offset, size, site, write=write)


def _check_blocks(
    group: Group, at: Addresses, blocks: Array, offset: int, size: int, site: int, *, write: bool
) -> None:
    """Raise `Violation` unless all blocks that addresses name exist, still run, and may be named."""
    count = group.wave.layout.cluster_blocks
    remote = (blocks != group.per_thread("block_index")) & (at.space == "shared")
    checks = (
        (blocks < 0, f"which has {count} blocks" if count > 1 else "which is one block", None),
        (group.wave.alive[blocks] == 0, "which has exited", _STAY_HINT),
        (remote, "and the instruction reaches its own block alone", _REMOTE_HINT),
    )
    found = [(int(np.argmax(wrong)), why, hint) for wrong, why, hint in checks if wrong.any()]
    if found:
        position, why, hint = found[0]
        address = int(at.values[position]) + offset
        message = f"{_verb(write)} {size} bytes at {at.describe(position, offset)}, {why}"
        raise Violation(message, site, position, address, hint)


def _raise_outside_space(
    group: Group, at: Addresses, offset: int, size: int, site: int, *, write: bool
) -> None:
    values = within = np.atleast_1d(at.values)
    if at.blocks is not None:
        within = np.where(values >= BLOCK_WINDOW, values % BLOCK_WINDOW, values)
    outside = (within < -offset) | (within > (at.limit or 0) - size - offset)
    position = int(np.argmax(outside))
    address = int(values[position]) + offset
    there = f"there are {at.limit} bytes of it"
    if at.limit == 0:
        there = "there is none"
    message = f"{_verb(write)} {size} bytes at {at.describe(position, offset)}; {there}"
    hint = _dynamic_shared_hint(group.wave, at.hi + offset + size) if at.space != "local" else None
    raise Violation(message, site, position, address, hint)


def _dynamic_shared_hint(wave: Wave, end: int) -> str | None:
    """Return how a launch gets shared memory up to `end`, or None if its size is fixed."""
    static = wave.program.shared_bytes
    have = wave.shared_bytes
    dynamic = static in wave.program.shared.values()  # It begins where static memory ends.
    if not dynamic or not have < end <= wave.program.limits.shared_optin:
        return None
    need = end - static
    return (
        f"the launch gave {have - static} bytes of dynamic shared memory, and this needs {need}: "
        f"kernel.launch(…, grid=…, block=…, shared={need})"
    )


def _raise_outside_buffers(
    group: Group, at: Addresses, offset: int, size: int, site: int, *, write: bool
) -> None:
    # Sums beyond 64 bits saturate, where there is no memory either, instead of wrapping around.
    values = np.atleast_1d(at.values)
    sums = np.clip(values, -_MAX_ADDRESS - 1 - min(offset, 0), _MAX_ADDRESS - max(offset, 0)) + offset
    memory = group.wave.memory
    position = memory.first_outside(sums, size, write=write)
    if position is not None:
        address = (int(values[position]) + offset) & ((1 << 64) - 1)
        wave = group.wave
        owner_of = partial(pointers_into, arguments=wave.program.arguments, at=wave.parameters_at)
        message = memory.describe(address, size, write=write, owner_of=owner_of)
        raise Violation(message, site, position, address)


def _raise_misaligned(moved: Addresses, size: int, align: int, site: int, *, write: bool) -> None:
    values = np.atleast_1d(moved.values)
    position = int(np.argmax(values & (align - 1) != 0))
    address = int(values[position])
    message = f"{_verb(write)} {size} bytes at {address:#x}, which is not a multiple of {align}"
    raise Violation(message, site, position, address)


def _verb(write: bool) -> str:
    return "writes" if write else "reads"


def _injective(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Return whether no two threads access the same address."""
    reach = 1
    for stride, extent in sorted((abs(s), n) for s, n in zip(strides, shape, strict=True) if n > 1):
        if stride < reach:
            return False
        reach = stride * extent
    return True


# The arguments of a launch that point into a buffer, so that a fault can name them


class ArgumentSpec(NamedTuple):
    """One parameter of a kernel: its place in the parameter buffer, and its C++ type or PTX name.

    The label is empty where the type is unknown and the compiler has made up the name.
    """

    offset: int
    size: int
    label: str


def pointers_into(buffer: Buffer, arguments: Sequence[ArgumentSpec], at: int) -> str:
    """Return the positions and types of the arguments that point into `buffer`, or an empty text.

    `at` is the address of the parameter buffer.
    """
    return " and ".join(_pointers_into(buffer, arguments, at))


def _pointers_into(buffer: Buffer, arguments: Sequence[ArgumentSpec], at: int) -> Iterator[str]:
    for position, (offset, size, label) in enumerate(arguments):
        for start in range(0, size - _POINTER + 1, _POINTER):
            address = ctypes.c_uint64.from_address(at + offset + start).value
            if buffer.start <= address < max(buffer.end, buffer.start + 1):
                member = f" at byte {start}" if size > _POINTER else ""
                yield f"argument {position}{', ' if label else ''}{label}{member}"
