"""Stand-ins for torch and CuPy on the emulator with deferred streams.

Each is a small library with tensors and streams of its own. It speaks the protocols that the real one
speaks, with the names of the real one, so that the code for the real one runs in tests without a GPU.
Its work is queued in streams of the emulator like that of preheat, and it orders nothing with preheat.

    library = FakeTorch(gpu, "faketorch")
    x = library.tensor([1, 2, 3])
    x.fill_(7)                            # in the current stream of the library
    with library.stream(library.new_stream()): ...
"""

from __future__ import annotations

import ctypes
import itertools
import sys
import types
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from preheat.devices import base, dlpack, libraries
from preheat.devices.host import host_bytes
from preheat.gpu import Gpu
from preheat.model.dtypes import DTYPES
from tests.exchange import exchange_api

__all__ = ["FakeCuPy", "FakeTorch", "Storage", "introduce"]

ITEM = 4  # bytes of an int32, the one element type of these libraries


class Storage:
    """Memory that a library allocated. It is freed, in the stream it was allocated in, when dropped."""

    def __init__(self, library: FakeLibrary, count: int) -> None:
        self.library, self.count = library, count
        self.stream = library.current
        self.pool = library.pool
        self.address = library.allocate(count * ITEM, self.stream)

    def __del__(self) -> None:
        self.library.free(self.address, self.count * ITEM, self.stream, self.pool)


class Blocks(dict[tuple[int, int], list[int]]):
    """Memory that was freed and is handed out again, by size and stream, from one pool of a library.

    When a pool ends, anybody may get its memory. `segments` has what the pool took from the device, as
    addresses and sizes.
    """

    def __init__(self, library: FakeLibrary, id: tuple[int, int] = (0, 0)) -> None:
        super().__init__()
        self.library = library
        self.id = id
        self.segments: list[tuple[int, int]] = []

    def __del__(self) -> None:
        for (size, _), addresses in self.items():
            self.library.left.setdefault(size, []).extend(addresses)


class Taken:
    """Memory of preheat that a library took: the capsule or the array keeps it."""

    def __init__(self, owner: object, address: int, release: Any = None) -> None:
        self.owner, self.address, self._release = owner, address, release

    def __del__(self) -> None:
        if self._release is not None:
            self._release()


class FakeLibrary:
    """What the two have in common: a current stream, memory, and work in streams.

    Freed memory goes to a list for its stream and is handed out again there at once, as the caching
    allocators of torch and CuPy do.
    """

    def __init__(self, gpu: Gpu, name: str) -> None:
        self.gpu, self.name = gpu, name
        self.device: base.Device = gpu._device
        self.default = self.device.stream()
        self.current: base.Stream = self.default
        self.left: dict[int, list[int]] = {}  # memory of pools that ended
        self.pool = self._general = Blocks(self)
        self._streams = [self.default]
        self._arena = self.device.stream()  # Memory is taken from the device outside any order.

    # Streams

    def new_stream(self) -> base.Stream:
        """Return a stream of the library's own."""
        self._streams.append(self.device.stream())
        return self._streams[-1]

    def destroy(self, stream: base.Stream) -> None:
        """Destroy a stream: its handle may be used again."""
        self._streams.remove(stream)
        stream.close()

    @contextmanager
    def stream(self, stream: base.Stream) -> Iterator[base.Stream]:
        """Work in another stream for a while."""
        before = self.current
        self.current = stream
        try:
            yield stream
        finally:
            self.current = before

    def order(self, stream: base.Stream) -> None:
        """Let the current stream wait for another one of the library's."""
        self.current.wait(stream.record())

    # Memory

    @contextmanager
    def using(self, pool: Blocks) -> Iterator[None]:
        """Allocate from another pool for a while."""
        before = self.pool
        self.pool = pool
        try:
            yield
        finally:
            self.pool = before

    def allocate(self, size: int, stream: base.Stream) -> int:
        spare = self.pool.get((size, stream.id))
        if not spare and self.pool is self._general:
            spare = self.left.get(size)
        if spare:
            return spare.pop()
        address = self.device.allocate(size, self._arena)
        self.pool.segments.append((address, size))
        return address

    def free(self, address: int, size: int, stream: base.Stream, pool: Any) -> None:
        pool.setdefault((size, stream.id), []).append(address)

    def read(self, address: int, count: int) -> list[int]:
        """Return the numbers at an address, after the work in the current stream."""
        out = np.empty(count, np.int32)
        self.device.copy_out(host_bytes(out), address, self.current)
        return [int(n) for n in out]

    def fill(self, address: int, count: int, value: int) -> None:
        """Set numbers, in the current stream."""
        self.device.fill(address, value.to_bytes(ITEM, "little"), count, self.current)

    def copy(self, target: int, source: int, count: int) -> None:
        """Copy numbers, in the current stream."""
        self.device.copy(target, source, count * ITEM, self.current)


class FakeTensor:
    """A tensor as torch makes it, of int32."""

    def __init__(self, library: FakeTorch, storage: Any, count: int, offset: int = 0) -> None:
        self.library = library
        self._storage = storage
        self.count = count
        self._offset = offset
        self.step, self.negative, self.conjugate = 1, False, False

    # What preheat asks of a tensor of torch

    itemsize, is_cuda, layout = ITEM, False, "torch.strided"

    @property
    def dtype(self) -> object:
        return self.library.module.int32

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.count,)

    @property
    def nbytes(self) -> int:
        return self.count * ITEM

    @property
    def device(self) -> Any:
        return types.SimpleNamespace(type="fake")

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.library.device.dlpack

    def get_device(self) -> int:
        return self.library.device.dlpack[1]

    def data_ptr(self) -> int:
        return int(self._storage.address) + self._offset * ITEM

    def stride(self) -> tuple[int, ...]:
        return (self.step,)

    def is_contiguous(self) -> bool:
        return self.step == 1

    def is_neg(self) -> bool:
        return self.negative

    def is_conj(self) -> bool:
        return self.conjugate

    def untyped_storage(self) -> object:
        return self._storage

    # What programs do with one

    def __getitem__(self, part: slice) -> FakeTensor:
        start, stop, step = part.indices(self.count)
        made = type(self)(
            self.library, self._storage, len(range(start, stop, step)), self._offset + start
        )
        made.step = step
        return made

    def set_data(self, other: FakeTensor) -> None:
        """`x.data = other`: the tensor gets other memory, and its own may be freed."""
        self._storage, self.count, self._offset = other._storage, other.count, other._offset

    def fill_(self, value: int) -> FakeTensor:
        self.library.fill(self.data_ptr(), self.count, value)
        return self

    def copy_(self, other: FakeTensor) -> FakeTensor:
        self.library.copy(self.data_ptr(), other.data_ptr(), self.count)
        return self

    def clone(self) -> FakeTensor:
        made: FakeTensor = self.library.empty(self.count)
        return made.copy_(self)

    def tolist(self) -> list[int]:
        return self.library.read(self.data_ptr(), self.count)


class FakePools:
    """The memory pools of torch by id, with the number of their users, as torch counts them."""

    def __init__(self, library: FakeLibrary) -> None:
        self._library = library
        self._numbers = itertools.count(1)
        self._known: weakref.WeakValueDictionary[tuple[int, int], Blocks] = (
            weakref.WeakValueDictionary()
        )
        self._held: dict[tuple[int, int], Blocks] = {}  # those without a `MemPool`
        self.users: dict[tuple[int, int], int] = {}

    def new_id(self) -> tuple[int, int]:
        return (0, next(self._numbers))

    def new(self) -> Blocks:
        """Return a `MemPool`, which is a user of itself."""
        pool = Blocks(self._library, self.new_id())
        self._known[pool.id] = pool
        self.users[pool.id] = 1
        return pool

    def begin(self, _: int, id: tuple[int, int]) -> None:
        """Count one more user; an id that had users and has none any more is refused."""
        if id not in self.users:
            self._known[id] = self._held[id] = Blocks(self._library, id)
            self.users[id] = 0
        elif not self.users[id]:
            raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")
        self.users[id] += 1

    def end(self, _: int, id: tuple[int, int]) -> None:
        """End the allocations from a pool."""
        assert self.users[id] > 0

    def release(self, _: int, id: tuple[int, int]) -> None:
        """Count one user less; the memory goes with the last one."""
        self.users[id] -= 1
        assert self.users[id] >= 0
        if not self.users[id]:
            self._held.pop(id, None)

    @contextmanager
    def use(self, pool: Any, **_: Any) -> Iterator[None]:
        """Allocate from a pool for a while: anything that has the id of one."""
        self.begin(0, pool.id)
        try:
            with self._library.using(self._known[pool.id]):
                yield
        finally:
            self.end(0, pool.id)
            self.release(0, pool.id)

    def snapshot(self) -> list[dict[str, Any]]:
        """Describe the memory of all pools."""
        return [
            {"device": 0, "segment_pool_id": id, "address": address, "total_size": size}
            for id, pool in self._known.items()
            for address, size in pool.segments
        ]


class FakeTorch(FakeLibrary):
    """torch, under another name."""

    def __init__(self, gpu: Gpu, name: str = "faketorch") -> None:
        super().__init__(gpu, name)
        exchange = exchange_api(lambda: self.current.handle)
        fields = {"__module__": name, "__dlpack_c_exchange_api__": exchange}
        tensor = type("Tensor", (FakeTensor,), fields)
        self.Tensor: Any = tensor
        self.pools = FakePools(self)
        self.module: Any = types.ModuleType(name)
        self.module.__dict__.update(
            Tensor=tensor,
            int32=object(),
            _C=types.SimpleNamespace(
                _cuda_getCurrentRawStream=lambda _: self.current.handle,
                _cuda_beginAllocateCurrentThreadToPool=self.pools.begin,
                _cuda_endAllocateToPool=self.pools.end,
                _cuda_releasePool=self.pools.release,
            ),
            cuda=types.SimpleNamespace(
                is_initialized=lambda: True,
                device=lambda _: contextmanager(_nothing)(),
                MemPool=self.pools.new,
                graph_pool_handle=self.pools.new_id,
                memory_snapshot=self.pools.snapshot,
                ExternalStream=lambda handle, **_: self.device.adopt(handle),
                stream=self.stream,
                current_stream=lambda _: types.SimpleNamespace(
                    cuda_stream=self.current.handle, stream_id=2 * self.current.handle + 1
                ),
                use_mem_pool=self.pools.use,
            ),
        )
        self.library: libraries.Library = libraries.Torch(name, device_type=self.device.dlpack[0])

    def empty(self, count: int) -> Any:
        """Return a new tensor, holding anything."""
        return self.Tensor(self, Storage(self, count), count)

    def full(self, count: int, value: int) -> Any:
        """Return a new tensor of one number."""
        return self.empty(count).fill_(value)

    def from_dlpack(self, array: Any) -> Any:
        """Return a tensor over memory of preheat, for use in the current stream."""
        capsule = array.__dlpack__(stream=self.current.handle, max_version=(1, 0))
        found = dlpack.open_capsule(capsule)
        (count,) = found.shape or (1,)
        return self.Tensor(self, Taken(capsule, found.address, _consumed(capsule)), count)


class FakeArray:
    """An array as CuPy makes it, of int32."""

    def __init__(self, library: FakeCuPy, memory: Any, count: int, offset: int = 0) -> None:
        self.library, self.count = library, count
        address = int(memory.address) + offset * ITEM
        index = library.device.dlpack[1]
        self.data = types.SimpleNamespace(ptr=address, device_id=index, memory=memory)
        self.device = types.SimpleNamespace(id=index)
        self._c_contiguous = True
        self.kind = DTYPES["int32"].numpy()

    @property
    def dtype(self) -> Any:
        return self.kind

    @property
    def flags(self) -> Any:
        return types.SimpleNamespace(c_contiguous=self._c_contiguous)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.count,)

    @property
    def strides(self) -> tuple[int, ...]:
        return (ITEM if self._c_contiguous else 2 * ITEM,)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.library.device.dlpack

    def fill(self, value: int) -> FakeArray:
        self.library.fill(self.data.ptr, self.count, value)
        return self

    def copy_from(self, other: FakeArray) -> FakeArray:
        self.library.copy(self.data.ptr, other.data.ptr, self.count)
        return self

    def tolist(self) -> list[int]:
        return self.library.read(self.data.ptr, self.count)


class FakeCuPy(FakeLibrary):
    """CuPy, under another name."""

    def __init__(self, gpu: Gpu, name: str = "fakecupy") -> None:
        super().__init__(gpu, name)
        self.ndarray: Any = type("ndarray", (FakeArray,), {"__module__": name})
        self.module: Any = types.ModuleType(name)
        self.module.__dict__.update(
            ndarray=self.ndarray,
            int32=np.int32,
            float32=np.float32,
            cuda=types.SimpleNamespace(
                get_current_stream=lambda _=0: types.SimpleNamespace(
                    ptr=self.current.handle, stream=self.current
                ),
                MemoryPool=self._new_pool,
                Device=lambda _: contextmanager(_nothing)(),
                Stream=types.SimpleNamespace(
                    from_external=lambda given: self.stream(self.device.adopt(given.handle))
                ),
                using_allocator=self.using,
            ),
        )
        self.library: libraries.Library = libraries.CuPy(name, device_type=self.device.dlpack[0])

    def _new_pool(self) -> Any:
        return types.SimpleNamespace(malloc=Blocks(self))

    def empty(self, count: int) -> Any:
        """Return a new array, holding anything."""
        return self.ndarray(self, Storage(self, count), count)

    def full(self, count: int, value: int) -> Any:
        """Return a new array of one number."""
        return self.empty(count).fill(value)

    def asarray(self, array: Any) -> Any:
        """Return an array over memory of preheat, by the array interface."""
        face = array.__cuda_array_interface__
        (count,) = face["shape"] or (1,)
        if face["stream"] is not None:
            self.current.wait(self.device.adopt(face["stream"]).record())
        return self.ndarray(self, Taken(array, face["data"][0]), count)


def _nothing() -> Iterator[None]:
    yield


def _consumed(capsule: Any) -> Any:
    """Consume a capsule, as a consumer in C does; returns what releases it."""
    rename = ctypes.pythonapi.PyCapsule_SetName
    rename.argtypes = (ctypes.py_object, ctypes.c_char_p)
    address = dlpack._pointer(id(capsule), b"dltensor_versioned")
    rename(capsule, _USED)
    managed = dlpack._Versioned.from_address(address)
    return lambda: managed.deleter(address)


_USED = b"used_dltensor_versioned"


def introduce(library: Any, patch: pytest.MonkeyPatch) -> None:
    """Let preheat know a stand-in, as if the program had imported it."""
    # Unused pools may be those of an earlier stand-in with this name.
    libraries._unused_pools.pop((library.name, library.device.dlpack[1]), None)
    patch.setitem(sys.modules, library.name, library.module)
    patch.setitem(libraries.LIBRARIES, library.name, library.library)
