"""The memory that programs allocate on the emulator: at once, in the order of a stream, or in a graph.

On deferred streams, memory is valid from the work that allocates it to the work that frees it. Freed
memory is quarantined there, and reused in the same stream. The heap has the memory of kernels.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from preheat.devices import base
from preheat.emulator.graph_work import GraphAllocation, GraphFree
from preheat.emulator.memory import FREED, POISON, Buffer, Memory, align_up
from preheat.emulator.schedule import Scheduler
from preheat.errors import DeviceError, EmulatorFault, OutOfMemoryError

__all__ = ["TOTAL_BYTES", "Allocation", "Allocator", "Heap", "Quarantine"]

TOTAL_BYTES = 16 << 30
_ALIGN = 512  # The alignment of textures.
_MAX_QUARANTINED_BYTES = 64 << 20
_MAX_QUARANTINED = 512
_HEAP_BYTES = 8 << 20  # Bytes, the default limit of a GPU.
_HEAP_ALIGN = 16


class Allocation(NamedTuple):
    """Allocated memory, and the array that it is part of."""

    buffer: Buffer
    array: np.ndarray[Any, Any]
    of_graph: object = None  # The work that allocates it, at this address in every replay.

    @property
    def size(self) -> int:
        """The size that was requested, in bytes."""
        return self.buffer.end - self.buffer.start


class Quarantine:
    """Memory that deferred streams freed, oldest first, each with the id of its stream.

    A late access to freed memory must not crash, so allocations are kept after their free. Only the
    stream that freed an allocation may reuse it, because only its later work is ordered after the free.
    """

    def __init__(self) -> None:
        self._allocations: deque[tuple[int, Allocation]] = deque()
        self._bytes = 0

    def add(self, allocation: Allocation, stream: int) -> None:
        """Add an allocation, and drop the oldest ones if there are too many."""
        self._allocations.append((stream, allocation))
        self._bytes += allocation.size
        while self._bytes > _MAX_QUARANTINED_BYTES or len(self._allocations) > _MAX_QUARANTINED:
            _, oldest = self._allocations.popleft()
            self._bytes -= oldest.size

    def take(self, size: int, stream: int) -> Allocation | None:
        """Return the allocation of this size that this stream freed last, or None."""
        for at in reversed(range(len(self._allocations))):
            freed_in, allocation = self._allocations[at]
            if freed_in == stream and allocation.size == size:
                del self._allocations[at]
                self._bytes -= size
                return allocation
        return None


class _GraphMemory(NamedTuple):
    """Memory of a graph. The graph is gone when the work that allocates the memory is."""

    size: int
    work: weakref.ref[GraphAllocation]


_READ_AND_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_IN_PLACE = 0x10  # MAP_FIXED: what is mapped there is replaced
_map = ctypes.CDLL(None).mmap
_map.restype = ctypes.c_void_p
_map.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *3 * (ctypes.c_int,), ctypes.c_long)


class Allocator:
    """Allocates memory of one device. `lock` is the lock of the device.

    Attributes:
        used: The bytes that are allocated now.
        max_graph_bytes: The most bytes that graphs have had so far.
    """

    def __init__(self, memory: Memory, scheduler: Scheduler | None, lock: threading.RLock) -> None:
        self.lock = lock
        self.used = 0
        self.max_graph_bytes = 0
        self._of_graphs: dict[int, _GraphMemory] = {}  # By address.
        self._memory = memory
        self._scheduler = scheduler
        self._allocated: dict[int, Allocation] = {}
        self._quarantine = Quarantine()

    # At once

    def allocate_now(self, size: int) -> int:
        """Return the address of `size` new bytes of `POISON`, which work of every stream may use."""
        with self.lock:
            self._require_room(size)
            return self._count(self._valid(size, mmap.PAGESIZE))

    def move_to_file(self, address: int, file: int) -> None:
        """Keep memory of `allocate_now` in a file from now on, which is mapped at the same address."""
        with self.lock:  # No kernel and no copy is executed meanwhile.
            allocation = self._allocated[address]
            size = align_up(allocation.size, mmap.PAGESIZE)
            os.truncate(file, size)
            with mmap.mmap(file, size) as pages:
                pages[:] = ctypes.string_at(address, size)
            if _map(address, size, _READ_AND_WRITE, mmap.MAP_SHARED | _IN_PLACE, file, 0) != address:
                raise _out_of_memory(size)
            # The pages of the array have to be its own again before it gives them back.
            own = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _IN_PLACE
            restore = weakref.finalize(
                allocation.array, _map, address, size, _READ_AND_WRITE, own, -1, 0
            )
            restore.atexit = False

    def free_now(self, address: int) -> None:
        """Free memory after all queued work of the device."""
        with self.lock:
            if self._scheduler is not None:
                self._scheduler.run_all()
                self._scheduler.raise_fault()
            allocation = self._uncount(address)
            self._make_freed(allocation.buffer)

    # In the order of a stream

    def allocate(self, size: int, stream: base.Stream) -> int:
        """Return the address of `size` new bytes of `POISON`, for later work of `stream`."""
        with self.lock:
            self._require_room(size)
            allocation = None
            if self._scheduler is not None:
                allocation = self._reuse_freed(self._scheduler, size, stream)
            return self._count(allocation or self._valid(size))

    def _require_room(self, size: int) -> None:
        if self.used + size > TOTAL_BYTES:
            raise _out_of_memory(size)

    def _valid(self, size: int, align: int = _ALIGN) -> Allocation:
        allocation = _new_allocation(size, align)
        self._memory.add(allocation.buffer.start, size)
        return allocation

    def _count(self, allocation: Allocation) -> int:
        start = allocation.buffer.start
        self._allocated[start] = allocation
        self.used += allocation.size
        return start

    def _uncount(self, address: int) -> Allocation:
        if address not in self._allocated:
            raise DeviceError(f"there is no buffer at {address:#x}")
        allocation = self._allocated.pop(address)
        self.used -= allocation.size
        return allocation

    def _reuse_freed(self, scheduler: Scheduler, size: int, stream: base.Stream) -> Allocation | None:
        """Return memory that the same stream has freed, or None. Its free precedes its next use."""
        scheduler.raise_fault()
        allocation = self._quarantine.take(size, stream.id) if scheduler.chance(1 / 2) else None
        if allocation is not None:
            scheduler.submit(stream.id, lambda: self._make_valid(allocation.buffer))
        return allocation

    def free(self, address: int, stream: base.Stream) -> None:
        """Free memory after the work that is queued in `stream`."""
        with self.lock:
            allocation = self._uncount(address)
            if self._scheduler is None:
                self._memory.free(allocation.buffer)
                return
            self._scheduler.submit(stream.id, lambda: self._make_freed(allocation.buffer))
            if allocation.of_graph is None:  # The replay uses that address again.
                self._quarantine.add(allocation, stream.id)

    def is_allocated(self, address: int) -> bool:
        """Return whether memory that begins at this address can be freed."""
        return address in self._allocated

    def owner(self, address: int) -> object:
        """Return the array that allocated memory is part of."""
        return self._allocated[address].array

    # In a graph

    def graph_allocation(self, size: int) -> GraphAllocation:
        """Return work that allocates memory in each replay, at the same address."""
        return GraphAllocation(_new_allocation(size), self._allocate_in_graph, self.claim)

    def _allocate_in_graph(self, made: GraphAllocation) -> None:
        with self.lock:
            self._make_valid(made.allocation.buffer)
            known = self._of_graphs.get(made.address)
            if known is None or known.work() is not made:
                self._replace_memory_of_graphs(made.allocation.size)
                self._of_graphs[made.address] = _GraphMemory(made.allocation.size, weakref.ref(made))
                self.max_graph_bytes = max(self.max_graph_bytes, self.graph_bytes())

    def _replace_memory_of_graphs(self, size: int) -> None:
        """Forget up to as much memory of graphs that are gone, which a new one uses again."""
        gone = [address for address, memory in self._of_graphs.items() if memory.work() is None]
        for address in gone:
            if size > 0:
                size -= self._of_graphs.pop(address).size

    def graph_bytes(self) -> int:
        """Return the bytes that graphs have. They keep memory that their work frees."""
        return sum(memory.size for memory in self._of_graphs.values())

    def trim_graphs(self) -> None:
        """Return the memory of graphs that is not allocated now."""
        with self.lock:
            self._of_graphs = {
                address: memory
                for address, memory in self._of_graphs.items()
                if memory.work() is not None
                and self._memory.covers(address, address + memory.size, write=True)
            }

    def graph_free(self, made: GraphAllocation) -> GraphFree:
        """Return work that frees in each replay what `made` has allocated."""
        return GraphFree(made, lambda: self._make_freed(made.allocation.buffer))

    def claim(
        self,
        made: Sequence[GraphAllocation],
        freed: Sequence[GraphAllocation],
        stream: base.Stream,
        *,
        free: bool,
    ) -> bool:
        """Count memory that a replay in `stream` allocates, and what it frees of others no longer.

        Return False if the former is still allocated, unless `free` frees it, or if the latter is not.
        """
        with self.lock:
            held = [each.address for each in made if each.address in self._allocated]
            if (held and not free) or any(each.address not in self._allocated for each in freed):
                return False
            for address in held:
                self.free(address, stream)
            for each in freed:
                self._uncount(each.address)
            for each in made:
                self._count(each.allocation._replace(of_graph=each))
            return True

    # The moments at which queued work changes what is valid

    def _make_valid(self, buffer: Buffer) -> None:
        size = buffer.end - buffer.start
        with self.lock:
            self._memory.add(buffer.start, size)
            ctypes.memset(buffer.start, POISON, size)

    def _make_freed(self, buffer: Buffer) -> None:
        size = buffer.end - buffer.start
        with self.lock:
            self.require_valid("free", buffer.start, size)
            ctypes.memset(buffer.start, FREED, size)
            self._memory.free(buffer)

    def require_valid(self, kind: str, address: int, size: int, *, write: bool = True) -> None:
        """Raise for queued work that accesses memory which has been freed.

        Work that is executed at once may use host memory that was not lent, so it is not checked.
        """
        if self._scheduler is None or not size:
            return
        if not self._memory.covers(address, address + size, write=False):
            which = "freed memory" if self._memory.was_freed(address) else "no allocated memory"
            found = self._memory.describe(address, size, write=write)
            raise EmulatorFault(f"{kind} of {which}", found, address=address)


def _new_allocation(size: int, align: int = _ALIGN) -> Allocation:
    """Return memory with an address that kernels may not use yet.

    Nothing else is in the blocks of `align` bytes in which it lies.
    """
    try:
        array = np.full(size + 2 * align, POISON, np.uint8)
    except MemoryError:
        raise _out_of_memory(size) from None
    start = align_up(array.ctypes.data, align)
    return Allocation(Buffer(start, start + size, True), array)


def _out_of_memory(size: int) -> OutOfMemoryError:
    return OutOfMemoryError(
        "emulator allocate", 2, "EMULATOR_OUT_OF_MEMORY", f"no memory for {size} bytes"
    )


class Heap:
    """Memory that kernels allocate with `malloc` and `new`, until a free or a reset of the device."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._buffers: dict[int, tuple[Buffer, np.ndarray[Any, Any]]] = {}
        self._used = 0

    def allocate(self, size: int) -> int:
        """Return the address of `size` new bytes, or 0 if the heap is full."""
        if not 0 < align_up(size, _HEAP_ALIGN) <= _HEAP_BYTES - self._used:
            return 0
        array = np.full(size + _HEAP_ALIGN, POISON, np.uint8)
        address = align_up(array.ctypes.data, _HEAP_ALIGN)
        self._buffers[address] = self._memory.add(address, size), array
        self._used += align_up(size, _HEAP_ALIGN)
        return address

    def free(self, address: int) -> None:
        """Free memory that `allocate` returned, or raise `KeyError` for another address."""
        buffer, _ = self._buffers.pop(address)
        size = buffer.end - buffer.start
        ctypes.memset(address, FREED, size)
        self._memory.free(buffer)
        self._used -= align_up(size, _HEAP_ALIGN)
