"""Other libraries that work on the same device: their streams, and their part in a capture.

A library has tensors and, for each device, a current stream that its own work goes to. `LIBRARIES`
lists the libraries that preheat knows. preheat never imports one of them: it uses a library once the
program has imported it.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

from preheat.devices import base
from preheat.devices.base import LEGACY_STREAMS, ON_GPU, PER_THREAD_STREAM
from preheat.errors import InputError
from preheat.model.dtypes import DTYPES

__all__ = [
    "LIBRARIES", "CuPy", "Library", "Numba", "PoolId", "StreamHandle", "Torch", "current_streams",
    "retained_current_streams",
]  # fmt: skip

PoolId = tuple[int, int]  # how torch numbers its memory pools


class StreamHandle:
    """A stream that other libraries accept. `owner` keeps the stream alive."""

    def __init__(self, handle: int, owner: object = None) -> None:
        self.handle = handle
        self.owner = owner

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.handle)

    def __repr__(self) -> str:
        return "<StreamHandle>"


class Library:
    """A library with tensors on devices of one DLPack device type, and with its own streams.

    `current` returns the handle of the current stream on the device with a number, once the library is
    imported and inspected.
    """

    api = ""  # names its reader in `operands`
    can_redirect = True  # Its work can be sent to another stream.

    def __init__(self, name: str, *, device_type: int = ON_GPU) -> None:
        self.name = name
        self.device_type = device_type
        self.current: Callable[[int], int] = self._inspect_and_get_stream

    @property
    def module(self) -> Any:
        """The library itself, or None while the program has not imported it."""
        return sys.modules.get(self.name)

    def is_tensor_type(self, kind: type) -> bool:
        """Return True for the types of its tensors, subclasses defined anywhere included."""
        return any((each.__module__, each.__name__) == (self.name, "Tensor") for each in kind.__mro__)

    def is_initialized(self) -> bool:
        """Return True once the library may have work on a device."""
        return self.module is not None

    def inspect(self) -> None:
        """Find out how to get the current stream of the library."""
        self.current = self._stream_getter()

    def native_reader(self, kind: type) -> object:
        """Return how `native/core.c` reads tensors of a type (its `Reader`), or None."""
        del kind
        return None

    def _inspect_and_get_stream(self, index: int) -> int:
        self.inspect()
        return self.current(index)

    def _stream_getter(self) -> Callable[[int], int]:
        raise NotImplementedError

    def retain_current_stream(self, index: int) -> StreamHandle:
        """Return the current stream, kept alive for a later wait."""
        return StreamHandle(self.current(index))

    def current_is_permanent(self, index: int) -> bool:
        """Return True if the current stream is never destroyed."""
        return self.current(index) in LEGACY_STREAMS

    def redirect(self, stack: ExitStack, stream: StreamHandle, index: int, pool: Any = None) -> object:
        """Send the library's work to `stream` until `stack` closes, and its allocations to a pool.

        Return the pool, which owns the memory: the given one, or a new one.
        """
        del stack, stream, index, pool
        return None

    def pool_ranges(self, pool: Any, index: int) -> list[range]:
        """Return the addresses of the memory in a pool of `redirect`, if the library reports them."""
        del pool, index
        return []


class Torch(Library):
    """torch. It never destroys its streams, but its current stream may belong to another library."""

    api = "torch"

    def __init__(self, name: str, *, device_type: int = ON_GPU) -> None:
        super().__init__(name, device_type=device_type)
        self._ended_pools: set[PoolId] = set()  # ids that torch never accepts again

    def is_initialized(self) -> bool:
        """Return True once torch has a CUDA context; False while another thread imports it."""
        is_initialized = getattr(getattr(self.module, "cuda", None), "is_initialized", None)
        return is_initialized is not None and bool(is_initialized())

    def native_reader(self, kind: type) -> object:
        """Return the C functions of DLPack in a capsule, which torch offers since 2.10."""
        functions = getattr(kind, "__dlpack_c_exchange_api__", None)
        return functions if type(functions).__name__ == "PyCapsule" else None

    def _stream_getter(self) -> Callable[[int], int]:
        torch = self.module
        raw: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        return raw or (lambda index: torch.cuda.current_stream(index).cuda_stream)

    def current_is_permanent(self, index: int) -> bool:
        """Return True unless the current stream is an `ExternalStream`, whose id is its handle."""
        stream = self.module.cuda.current_stream(index)
        return stream.cuda_stream in LEGACY_STREAMS or stream.stream_id != stream.cuda_stream

    def redirect(self, stack: ExitStack, stream: StreamHandle, index: int, pool: Any = None) -> object:
        """Send torch's work to `stream`, and its allocations to a memory pool."""
        cuda = self.module.cuda
        if pool is None:
            unused = _unused_pools.setdefault((self.name, index), [])
            with cuda.device(index):
                pool = unused.pop() if unused else cuda.MemPool()
        stack.enter_context(cuda.stream(cuda.ExternalStream(stream.handle, device=index)))
        stack.enter_context(cuda.use_mem_pool(pool, device=index))
        return pool

    def open_pool(self, given: Any, index: int) -> Any:
        """Return a pool for `redirect`: a `torch.cuda.MemPool`, or the pool with an id."""
        if not isinstance(given, tuple):
            return given
        if given in self._ended_pools:
            raise InputError(
                f"the memory pool {given} of torch has ended with the last graph that used it",
                hint="make a new id: torch.cuda.graph_pool_handle(); or keep gpu.graphs(pool=id)",
            )
        return _TorchPool(self.module, given, index, self._ended_pools.add)

    def pool_ranges(self, pool: Any, index: int) -> list[range]:
        """Return the addresses of the memory in a pool."""
        segments = self.module.cuda.memory_snapshot()
        return [
            range(each["address"], each["address"] + each["total_size"])
            for each in segments
            if each["device"] == index and each.get("segment_pool_id") == pool.id
        ]

    def keep_unused_pool(self, pool: object, index: int) -> None:
        """Keep an unused pool for the next capture: destroying a pool makes torch wait."""
        _unused_pools.setdefault((self.name, index), []).append(pool)


class _TorchPool:
    """A pool of torch by its id. torch keeps the pool as long as this object lives.

    Once the last user of an id is gone, torch never accepts the id again, so `ended` is called.
    """

    def __init__(self, torch: Any, id: PoolId, index: int, ended: Callable[[PoolId], None]) -> None:
        self.id = id
        calls = torch._C
        begin = getattr(calls, "_cuda_beginAllocateCurrentThreadToPool", None)
        begin = begin or calls._cuda_beginAllocateToPool  # before torch 2.8
        end = calls._cuda_endAllocateToPool
        release = calls._cuda_releasePool
        begin(index, id)  # This counts one more user of the pool.
        end(index, id)

        def release_pool() -> None:
            ended(id)
            release(index, id)

        self._release = release_pool

    def __del__(self) -> None:
        if hasattr(self, "_release"):
            self._release()


class CuPy(Library):
    """CuPy. Its streams are destroyed with their Python objects."""

    api = "cupy"

    def native_reader(self, kind: type) -> object:
        """Return the type of device, our element types by CuPy's, and `get_current_stream`."""
        del kind
        known = (dtype for dtype in DTYPES.values() if hasattr(self.module, dtype.name))
        elements = {dtype.numpy(): dtype for dtype in known}
        return self.device_type, elements, self.module.cuda.get_current_stream

    def is_tensor_type(self, kind: type) -> bool:
        """Return True for the types of its arrays: the base class is in a module of CuPy's core."""
        root = f"{self.name}."
        return any(
            each.__name__ == "ndarray" and f"{each.__module__}.".startswith(root)
            for each in kind.__mro__
        )

    def is_initialized(self) -> bool:
        """Return True once CuPy is imported; False while another thread imports it."""
        return hasattr(getattr(self.module, "cuda", None), "get_current_stream")

    def _stream_getter(self) -> Callable[[int], int]:
        current = self.module.cuda.get_current_stream
        return lambda index: int(current(index).ptr)

    def retain_current_stream(self, index: int) -> StreamHandle:
        """Return the current stream, kept alive for a later wait."""
        stream = self.module.cuda.get_current_stream(index)
        return StreamHandle(int(stream.ptr), stream)

    def redirect(self, stack: ExitStack, stream: StreamHandle, index: int, pool: Any = None) -> object:
        """Send CuPy's work to `stream`, and its allocations to a memory pool."""
        cuda = self.module.cuda
        pool = cuda.MemoryPool() if pool is None else pool
        stack.enter_context(cuda.Device(index))
        take = getattr(cuda.Stream, "from_external", None)  # since 14.0
        there = cuda.ExternalStream(stream.handle, index) if take is None else take(stream)
        stack.enter_context(there)
        stack.enter_context(cuda.using_allocator(pool.malloc))
        return pool


class Numba(Library):
    """numba.cuda. Its work goes to a default stream unless a launch names another one."""

    can_redirect = False

    def is_tensor_type(self, kind: type) -> bool:
        """Return False: its arrays are read by their array interface."""
        del kind
        return False

    @property
    def module(self) -> Any:
        """The CUDA part of Numba, or None while the program has not imported it."""
        return sys.modules.get("numba.cuda")

    def _stream_getter(self) -> Callable[[int], int]:
        config = sys.modules["numba"].config
        each = bool(getattr(config, "CUDA_PER_THREAD_DEFAULT_STREAM", False))
        return lambda _: PER_THREAD_STREAM if each else LEGACY_STREAMS[-1]


_unused_pools: dict[tuple[str, int], list[object]] = {}  # torch's pools, by library and GPU
atexit.register(_unused_pools.clear)  # while torch can still destroy them

#: The libraries that preheat knows, by name.
LIBRARIES: dict[str, Library] = {
    "torch": Torch("torch"), "cupy": CuPy("cupy"), "numba": Numba("numba"),
}  # fmt: skip


def current_streams(device: base.Device) -> Mapping[int, str]:
    """Return the current streams of the other libraries on a device, with their names."""
    return {library.current(device.dlpack[1]): library.name for library in _initialized_on(device)}


def retained_current_streams(device: base.Device) -> list[StreamHandle]:
    """Return the same streams, kept alive."""
    return [library.retain_current_stream(device.dlpack[1]) for library in _initialized_on(device)]


def _initialized_on(device: base.Device) -> Iterator[Library]:
    for library in LIBRARIES.values():
        if library.device_type == device.dlpack[0] and library.is_initialized():
            yield library
