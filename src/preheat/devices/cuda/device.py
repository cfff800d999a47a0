"""An NVIDIA GPU behind the seam."""

from __future__ import annotations

import ctypes
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

from preheat.arch import Arch
from preheat.artifact import Artifact
from preheat.devices.base import (
    LEGACY_STREAMS,
    PER_THREAD_STREAM,
    Event,
    FindLines,
    Limits,
    MemoryInfo,
    Setter,
    Stream,
)
from preheat.devices.cuda.driver import (
    WITHOUT_GPU,
    call,
    devices,
    error_of,
    library,
    relaxed_capture_mode,
)
from preheat.devices.cuda.module import CudaModule
from preheat.devices.cuda.retain import collect
from preheat.devices.cuda.staging import Chunk, Staging
from preheat.devices.cuda.stream import CudaStream
from preheat.errors import ContextLostError, DeviceError, NoGpuError

__all__ = ["CudaDevice", "Visible", "count", "driver_version", "visible"]

_KEEP = 2**64 - 1  # bytes a pool keeps before it gives memory back to the driver by itself
_FILLS = {1: "cuMemsetD8Async", 2: "cuMemsetD16Async", 4: "cuMemsetD32Async"}
_NOT_CURRENT = (201, 400)  # how a launch in a default stream fails under another context
_DEFAULT_STREAMS = (*LEGACY_STREAMS, PER_THREAD_STREAM)  # of whichever context is current
_Call = TypeVar("_Call", bound=Callable[..., tuple[int, ...]])


def count() -> int:
    """How many GPUs this process can see; `NoGpuError` when there is no driver."""
    return int(call("cuDeviceGetCount"))


def visible() -> list[Visible]:
    """The GPUs this process can see, without a context on any of them."""
    return [_look(index) for index in range(count())]


def driver_version() -> str:
    """The newest CUDA version the driver supports, such as 13.0."""
    number = int(call("cuDriverGetVersion"))
    return f"{number // 1000}.{number % 1000 // 10}"


class Visible(NamedTuple):
    """A GPU as the driver lists it."""

    name: str
    model: str
    arch: Arch


def _look(index: int) -> Visible:
    device = call("cuDeviceGet", index)
    model = call("cuDeviceGetName", 256, device).split(b"\0")[0].decode()
    major, minor = (_attribute(device, f"COMPUTE_CAPABILITY_{part}") for part in ("MAJOR", "MINOR"))
    return Visible(f"cuda:{index}", model, Arch(major, minor))


def _attribute(device: Any, name: str) -> int:
    which = getattr(library().CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    return int(call("cuDeviceGetAttribute", which, device))


def _limits(device: Any) -> Limits:
    get = partial(_attribute, device)
    return Limits(
        warp=get("WARP_SIZE"),
        threads=get("MAX_THREADS_PER_BLOCK"),
        block=(get("MAX_BLOCK_DIM_X"), get("MAX_BLOCK_DIM_Y"), get("MAX_BLOCK_DIM_Z")),
        grid=(get("MAX_GRID_DIM_X"), get("MAX_GRID_DIM_Y"), get("MAX_GRID_DIM_Z")),
        shared=get("MAX_SHARED_MEMORY_PER_BLOCK"),
        shared_optin=get("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        cluster=16 if get("CLUSTER_LAUNCH") else 0,
        processors=get("MULTIPROCESSOR_COUNT"),
    )


class CudaDevice:
    """One GPU, by its number, used through its primary context as torch and CuPy use it.

    Calls that name a stream of ours need no current context, so allocations and copies work from any
    thread whatever another library made current there; the others push the context for the call.
    """

    forks = recovers = False

    def __init__(self, index: int = 0) -> None:
        there = count()
        if not 0 <= index < there:
            raise NoGpuError(f"there is no GPU {index}: this process can see {there}", hint=WITHOUT_GPU)
        self.index, self.dlpack = index, (2, index)
        self.name, self.model, self.arch = _look(index)
        self._device = call("cuDeviceGet", index)
        self.limits = _limits(self._device)
        self.on_loss: Callable[[DeviceError], None] = lambda _: None
        devices.add(self)
        self.processor_threads = _attribute(self._device, "MAX_THREADS_PER_MULTIPROCESSOR")
        self._open()

    def _open(self) -> None:
        self.context = call("cuDevicePrimaryCtxRetain", self._device)
        with self.current():
            self._pool = self._new_pool()
        self._staging = Staging(self._pinned)

    def _new_pool(self) -> Any:
        """A pool of our own: the device's default one belongs to everybody in the process."""
        cu = library()
        properties = cu.CUmemPoolProps()
        properties.allocType = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = self.index
        pool = call("cuMemPoolCreate", properties)
        keep = cu.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
        call("cuMemPoolSetAttribute", pool, keep, cu.cuuint64_t(_KEEP))
        return pool

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make this device's context the thread's current one for a while."""
        call("cuCtxPushCurrent", self.context)
        try:
            yield
        finally:
            call("cuCtxPopCurrent")

    @contextmanager
    def beside_captures(self) -> Iterator[None]:
        """The same, for calls of another library that would spoil captures in other threads."""
        with self.current(), relaxed_capture_mode():
            yield

    def in_context(self, work: _Call, stream: Stream) -> _Call:
        """Prepared work for any stream: in a default one it runs with its context current.

        Without that a replay and a fill run in the default stream of another context.
        """
        if stream.handle not in _DEFAULT_STREAMS:
            return work

        def in_context(*args: Any) -> tuple[int, ...]:
            with self.current():
                return work(*args)

        return cast(_Call, in_context)

    def launch_in_context(self, launch: _Call, stream: Stream) -> _Call:
        """The same for a kernel, which belongs to a context: the driver refuses to mix the two.

        So the common case, in which the context is current already, costs nothing.
        """
        if stream.handle not in _DEFAULT_STREAMS:
            return launch

        def in_context(*args: Any) -> tuple[int, ...]:
            status = launch(*args)
            if status[0] in _NOT_CURRENT:
                with self.current():
                    return launch(*args)
            return status

        return cast(_Call, in_context)

    def _pinned(self, size: int) -> int:
        with self.current(), relaxed_capture_mode():
            return int(call("cuMemHostAlloc", size, 0))

    # Modules and streams

    def load(
        self, artifact: Artifact, *, jit: bool = False, lines: FindLines | None = None
    ) -> CudaModule:
        """Load a verified cubin or, for `jit`, its PTX through the driver's own compiler."""
        del lines  # the driver's errors name no instruction
        return CudaModule(self, artifact, jit=jit)

    def stream(self, *, priority: int = 0) -> CudaStream:
        """A new stream that does not wait for the legacy default stream."""
        with self.current():
            handle = int(call("cuStreamCreateWithPriority", 1, priority))
        return CudaStream(self, handle, owned=True)

    def adopt(self, handle: int) -> CudaStream:
        """A stream of another library."""
        return CudaStream(self, handle, owned=False)

    # Memory

    def allocate(self, size: int, stream: Stream) -> int:
        """Address of new memory, from this device's own pool."""
        collect()
        with relaxed_capture_mode():
            return int(call("cuMemAllocFromPoolAsync", size, self._pool, stream.handle))

    def free(self, address: int, stream: Stream) -> None:
        """Give memory back to the pool after the work now in `stream`."""
        with relaxed_capture_mode():
            call("cuMemFreeAsync", address, stream.handle)

    def copy_in(self, address: int, data: memoryview, stream: Stream) -> None:
        """Bytes from the host by way of pinned memory; returns before they have arrived."""
        for start in range(0, len(data), Staging.SIZE):
            piece = data[start : start + Staging.SIZE]
            chunk = self._staging.take()
            chunk.put(piece)
            call("cuMemcpyHtoDAsync", address + start, chunk.address, len(piece), stream.handle)
            self._staging.give_back(chunk, stream.record())

    def copy_out(self, data: memoryview, address: int, stream: Stream) -> None:
        """Bytes to the host by way of pinned memory, the next piece under way while one is taken."""
        arriving: deque[tuple[Chunk, memoryview, Event]] = deque()
        for start in range(0, len(data), Staging.SIZE):
            if len(arriving) == 2:
                self._arrive(*arriving.popleft())
            chunk, piece = self._staging.take(), data[start : start + Staging.SIZE]
            call("cuMemcpyDtoHAsync", chunk.address, address + start, len(piece), stream.handle)
            arriving.append((chunk, piece, stream.record()))
        while arriving:
            self._arrive(*arriving.popleft())

    def _arrive(self, chunk: Chunk, piece: memoryview, event: Event) -> None:
        event.synchronize()
        event.close()
        chunk.take(piece)
        self._staging.give_back(chunk)

    def copy(self, target: int, source: int, size: int, stream: Stream) -> None:
        """Bytes from device memory to device memory."""
        call("cuMemcpyDtoDAsync", target, source, size, stream.handle)

    def fill(self, address: int, value: bytes, count: int, stream: Stream) -> int:
        """Write `value` `count` times; it travels by value, so nothing on the host is read later."""
        if len(value) == 8 and value[:4] == value[4:]:
            value, count = value[:4], 2 * count
        if len(value) in _FILLS:
            call(_FILLS[len(value)], address, int.from_bytes(value, "little"), count, stream.handle)
            return 1
        for half in (0, 4):  # every second word: rows of one word, eight bytes apart
            word = int.from_bytes(value[half : half + 4], "little")
            call("cuMemsetD2D32Async", address + half, 8, word, 1, count, stream.handle)
        return 2

    def setter(self, places: Sequence[tuple[int, int]], stream: Stream) -> Setter:
        """One word is filled; several go by one batch of copies, whose sources are read meanwhile."""
        if len(places) == 1 and places[0][1] in _FILLS:
            cu, (address, size) = library(), places[0]
            fill, at = getattr(cu, _FILLS[size]), cu.CUdeviceptr(address)
            handle = cu.CUstream(stream.handle)
            return self.in_context(
                lambda values: fill(at, int.from_bytes(values[0], "little"), 1, handle), stream
            )
        if stream.handle in _DEFAULT_STREAMS:  # which take no batches
            return lambda values: self._fill_all(places, values, stream)
        return _Batch(self.context, places, stream)

    def _fill_all(
        self, places: Sequence[tuple[int, int]], values: Sequence[bytes], stream: Stream
    ) -> tuple[int, ...]:
        with self.current():
            for (address, size), value in zip(places, values, strict=True):
                for start in range(0, size, 8):
                    self.fill(address + start, value[start : start + 8], 1, stream)
        return (0,)

    def lend(self, address: int, size: int, writable: bool) -> AbstractContextManager[object]:
        """Host memory is out of a kernel's reach unless the driver pinned it."""
        del address, size, writable
        return nullcontext()

    def owner(self, address: int) -> object:
        """Nothing: device memory belongs to the driver."""
        del address
        return None

    def memory(self) -> MemoryInfo:
        """How much memory the GPU has, for all its users together."""
        with self.current():
            return MemoryInfo(*map(int, call("cuMemGetInfo")))

    # Life

    def synchronize(self) -> None:
        """Wait for all work on this GPU."""
        with self.current():
            call("cuCtxSynchronize")

    def check(self, status: tuple[int, ...], call: str) -> None:
        """Raise what the status of a launch stands for."""
        if status[0]:
            raise error_of(call, status[0])

    def trim(self) -> None:
        """Give memory that the pool keeps back to the driver."""
        with self.current():
            call("cuMemPoolTrimTo", self._pool, 0)

    def reset(self) -> None:
        """Begin anew, for every user of this GPU in the process: those of ours are told."""
        for other in list(devices):
            if other is not self and getattr(other, "index", None) == self.index:
                other.on_loss(
                    ContextLostError(
                        f"{self.name} was reset by another user in this process",
                        hint="close it and open it again: gpu.close(), then preheat.device(…)",
                    )
                )
        call("cuDevicePrimaryCtxReset", self._device)
        call("cuDevicePrimaryCtxRelease", self._device)
        self._open()

    def after_fork(self) -> None:
        """A GPU cannot be used in a forked child."""

    def close(self) -> None:
        """Let go of the context; the driver ends it when nobody else holds it."""
        devices.discard(self)
        with self.current():
            for address in self._staging.close():
                call("cuMemFreeHost", address)
            call("cuMemPoolDestroy", self._pool)
        call("cuDevicePrimaryCtxRelease", self._device)


class _Batch:
    """Copies from one small piece of host memory, which the driver reads before the call returns.

    Without a current context host memory means nothing to the driver, so it is pushed each time.
    """

    def __init__(self, context: Any, places: Sequence[tuple[int, int]], stream: Stream) -> None:
        cu = library()
        self._enter, self._leave = partial(cu.cuCtxPushCurrent, context), cu.cuCtxPopCurrent
        sizes = [size for _, size in places]
        self._room = ctypes.create_string_buffer(sum(sizes))
        starts = itertools.accumulate(sizes[:-1], initial=ctypes.addressof(self._room))
        order = cu.CUmemcpyAttributes()
        order.srcAccessOrder = cu.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL
        self._copy = partial(
            cu.cuMemcpyBatchAsync,
            [cu.CUdeviceptr(address) for address, _ in places],
            [cu.CUdeviceptr(start) for start in starts],
            sizes,
            len(places),
            [order],
            [0],
            1,
            cu.CUstream(stream.handle),
        )

    def __call__(self, values: Sequence[bytes]) -> tuple[int, ...]:
        self._room.raw = b"".join(values)
        status: tuple[int, ...] = self._enter()
        if status[0]:
            return status
        try:
            status = self._copy()
            return status
        finally:
            self._leave()
