"""The device interface for NVIDIA GPUs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeVar, cast

from preheat import native
from preheat.devices import base
from preheat.devices.base import DEFAULT_STREAMS, Event, FindLines, Limits, MemoryInfo, Setter, Stream
from preheat.devices.cuda.driver import (
    NOT_CURRENT,
    call,
    collect,
    devices,
    error_of,
    function_address,
    library,
    relaxed_capture_mode,
    without_gpu,
)
from preheat.devices.cuda.module import CudaModule
from preheat.devices.cuda.staging import Chunk, Staging
from preheat.devices.cuda.stream import CudaStream
from preheat.errors import ContextLostError, DeviceError, NoGpuError
from preheat.model.arch import Arch
from preheat.model.artifact import Artifact

__all__ = ["CudaDevice", "VisibleGpu", "count", "driver_version", "visible"]

_KEEP_ALL = 2**64 - 1  # bytes that a pool caches before it frees memory to the driver
_FILLS = {1: "cuMemsetD8Async", 2: "cuMemsetD16Async", 4: "cuMemsetD32Async"}
T = TypeVar("T")
_Call = TypeVar("_Call", bound=Callable[..., tuple[int, ...]])


def count() -> int:
    """Return how many GPUs this process can see; `NoGpuError` without a driver."""
    return int(call("cuDeviceGetCount"))


def visible() -> list[VisibleGpu]:
    """List the GPUs that this process can see, without creating a context."""
    return [_describe(index) for index in range(count())]


def driver_version() -> str:
    """Return the newest CUDA version that the driver supports, such as 13.0."""
    number = int(call("cuDriverGetVersion"))
    return f"{number // 1000}.{number % 1000 // 10}"


class VisibleGpu(NamedTuple):
    """A GPU as the driver lists it."""

    name: str
    model: str
    arch: Arch


def _describe(index: int) -> VisibleGpu:
    device = call("cuDeviceGet", index)
    model = call("cuDeviceGetName", 256, device).split(b"\0")[0].decode()
    major, minor = (_attribute(device, f"COMPUTE_CAPABILITY_{part}") for part in ("MAJOR", "MINOR"))
    return VisibleGpu(f"cuda:{index}", model, Arch(major, minor))


def _raise_error(status: int) -> NoReturn:
    raise error_of("a change of the current context", status)


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


class _Current:
    """Makes a context current in this thread during a `with` block, also inside another such block.

    It is a class, because the load of a kernel needs it twice and a generator costs four calls more.
    """

    __slots__ = ("_context",)

    def __init__(self, context: Any) -> None:
        self._context = context

    def __enter__(self) -> None:
        call("cuCtxPushCurrent", self._context)

    def __exit__(self, *_: object) -> None:
        call("cuCtxPopCurrent")


class CudaDevice:
    """One GPU, used through its primary context, as torch and CuPy use it.

    Calls that name one of our streams need no current context, so allocations and copies work in any
    thread, whatever context another library made current. Other calls push the context first.
    """

    survives_fork = False
    recovers = False
    host_memory = None

    def __init__(self, index: int = 0) -> None:
        available = count()
        if not 0 <= index < available:
            raise NoGpuError(
                f"there is no GPU {index}: this process can see {available}", hint=without_gpu()
            )
        self.index = index
        self.dlpack = (2, index)
        self.name, self.model, self.arch = _describe(index)
        self._device = call("cuDeviceGet", index)
        self.limits = _limits(self._device)
        self.on_loss: Callable[[DeviceError], None] = lambda _: None
        devices.add(self)
        self.processor_threads = _attribute(self._device, "MAX_THREADS_PER_MULTIPROCESSOR")
        self._open()

    def _open(self) -> None:
        self.context = call("cuDevicePrimaryCtxRetain", self._device)
        self._current = _Current(self.context)
        with self.current():
            self._pool = self._new_pool()
        self._staging = Staging(self._pinned)

    def _new_pool(self) -> Any:
        """Create a memory pool: the default one is shared with every library in the process."""
        cu = library()
        properties = cu.CUmemPoolProps()
        properties.allocType = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = self.index
        pool = call("cuMemPoolCreate", properties)
        keep = cu.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
        call("cuMemPoolSetAttribute", pool, keep, cu.cuuint64_t(_KEEP_ALL))
        return pool

    def current(self) -> AbstractContextManager[None]:
        """Make the context of this device current in this thread for a while."""
        return self._current

    def beside_captures(self, function: Callable[..., T]) -> Callable[..., T]:
        """Return a function of another CUDA library that leaves captures of other threads valid.

        It runs with the context current.
        """

        def beside(*args: Any) -> T:
            with self.current(), relaxed_capture_mode():
                return function(*args)

        return beside

    def native_context(self, stream: Stream) -> tuple[int, int, int] | None:
        """Return what native work in a default stream needs to make the context current, else None."""
        return self.context_calls if stream.handle in DEFAULT_STREAMS else None

    @property
    def context_calls(self) -> tuple[int, int, int]:
        """The context, and the addresses of the calls that make it current and undo that."""
        push = function_address("cuCtxPushCurrent")
        return int(self.context), push, function_address("cuCtxPopCurrent")

    def in_context(self, work: _Call, stream: Stream) -> _Call:
        """Return prepared work that makes the context current when it runs in a default stream.

        Otherwise a replay or a fill would run in the default stream of another context.
        """
        if stream.handle not in DEFAULT_STREAMS:
            return work

        def in_context(*args: Any) -> tuple[int, ...]:
            with self.current():
                return work(*args)

        return cast(_Call, in_context)

    def launch_in_context(self, launch: _Call, stream: Stream) -> _Call:
        """Do the same for a launch, and make the context current only after a failure.

        A kernel belongs to a context, so the driver refuses the launch under another one. The common
        case, in which the context is current, therefore costs nothing.
        """
        if stream.handle not in DEFAULT_STREAMS:
            return launch

        def in_context(*args: Any) -> tuple[int, ...]:
            status = launch(*args)
            if status[0] in NOT_CURRENT:
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
        """Load a verified cubin or, with `jit`, its PTX through the compiler of the driver."""
        for listener in base.before_load:
            listener(artifact, lines)
        return CudaModule(self, artifact, jit=jit)

    def stream(self, *, priority: int = 0) -> CudaStream:
        """Return a new stream, which does not wait for the legacy default stream."""
        with self.current():
            handle = int(call("cuStreamCreateWithPriority", 1, priority))
        return CudaStream(self, handle, owned=True)

    def adopt(self, handle: int) -> CudaStream:
        """Return the stream of another library that has this handle now."""
        return CudaStream(self, handle, owned=False)

    # Memory

    def allocate(self, size: int, stream: Stream) -> int:
        """Allocate memory from the pool of this device and return its address."""
        collect()
        with relaxed_capture_mode():
            return int(call("cuMemAllocFromPoolAsync", size, self._pool, stream.handle))

    def free(self, address: int, stream: Stream) -> None:
        """Return memory to the pool after the work that is now in `stream`."""
        with relaxed_capture_mode():
            call("cuMemFreeAsync", address, stream.handle)

    def copy_in(self, address: int, data: memoryview, stream: Stream) -> None:
        """Copy bytes from the host through pinned memory; the call does not wait for the copy."""
        for start in range(0, len(data), Staging.SIZE):
            piece = data[start : start + Staging.SIZE]
            chunk = self._staging.take()
            chunk.put(piece)
            call("cuMemcpyHtoDAsync", address + start, chunk.address, len(piece), stream.handle)
            self._staging.release(chunk, stream.record())

    def copy_out(self, data: memoryview, address: int, stream: Stream) -> None:
        """Copy bytes to the host through pinned memory, two pieces at a time."""
        copies: deque[tuple[Chunk, memoryview, Event]] = deque()
        for start in range(0, len(data), Staging.SIZE):
            if len(copies) == 2:
                self._finish_copy_out(*copies.popleft())
            chunk = self._staging.take()
            piece = data[start : start + Staging.SIZE]
            call("cuMemcpyDtoHAsync", chunk.address, address + start, len(piece), stream.handle)
            copies.append((chunk, piece, stream.record()))
        while copies:
            self._finish_copy_out(*copies.popleft())

    def _finish_copy_out(self, chunk: Chunk, piece: memoryview, event: Event) -> None:
        event.synchronize()
        event.close()
        chunk.take(piece)
        self._staging.release(chunk)

    def copy(self, target: int, source: int, size: int, stream: Stream) -> None:
        """Copy bytes from device memory to device memory."""
        call("cuMemcpyDtoDAsync", target, source, size, stream.handle)

    def fill(self, address: int, value: bytes, count: int, stream: Stream) -> int:
        """Write `value` `count` times. The driver takes it by value and reads nothing later."""
        if len(value) == 8 and value[:4] == value[4:]:
            value = value[:4]
            count *= 2
        if len(value) in _FILLS:
            call(_FILLS[len(value)], address, int.from_bytes(value, "little"), count, stream.handle)
            return 1
        for half in (0, 4):  # Fill every second word: rows of one word with a pitch of eight bytes.
            word = int.from_bytes(value[half : half + 4], "little")
            call("cuMemsetD2D32Async", address + half, 8, word, 1, count, stream.handle)
        return 2

    def setter(self, places: Sequence[tuple[int, int]], stream: Stream) -> Setter:
        """Prepare a fill for each word. A copy would have to wait until the host memory was read."""
        if (
            native.core is not None
            and len(places) <= native.core.MAX_SCALARS
            and all(n <= 8 for _, n in places)
        ):
            fills = tuple(map(function_address, _FILLS.values()))
            setter: Setter = native.core.WordSetter(
                fills, stream.handle, list(places), self.native_context(stream)
            )
            return setter
        cu = library()
        handle = cu.CUstream(stream.handle)
        words: list[tuple[int, int, Any, Any]] = []  # the bytes of a word, driver function, address
        start = 0
        for address, size in places:
            word = min(size, 4)
            fill = getattr(cu, _FILLS[word])
            for offset in range(0, size, word):
                words.append((start, start + word, fill, cu.CUdeviceptr(address + offset)))
                start += word

        def set_words(data: bytes) -> tuple[int, ...]:
            status: tuple[int, ...] = (0,)
            for start, end, fill, place in words:
                status = fill(place, int.from_bytes(data[start:end], "little"), 1, handle)
                if status[0]:
                    break
            return status

        return self.in_context(set_words, stream)

    def owner(self, address: int) -> object:
        """Return None: device memory belongs to the driver."""
        del address
        return None

    def memory(self) -> MemoryInfo:
        """Return the free and the total memory of the GPU, for all its users."""
        with self.current():
            return MemoryInfo(*map(int, call("cuMemGetInfo")))

    # Lifetime

    def synchronize(self) -> None:
        """Wait for all work on this GPU."""
        with self.current():
            call("cuCtxSynchronize")

    def check(self, status: tuple[int, ...], call: str) -> None:
        """Raise the error that the status of a launch means."""
        if status[0]:
            raise error_of(call, status[0])

    def trim(self) -> None:
        """Free the memory that the pool caches."""
        with self.current():
            call("cuMemPoolTrimTo", self._pool, 0)

    def reset(self) -> None:
        """Reset the GPU for every user in the process, and notify our other devices on it."""
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
        """Do nothing: a forked child cannot use a GPU."""

    def close(self) -> None:
        """Release the context; the driver destroys it when no other library retains it."""
        devices.discard(self)
        with self.current():
            for address in self._staging.close():
                call("cuMemFreeHost", address)
            call("cuMemPoolDestroy", self._pool)
        call("cuDevicePrimaryCtxRelease", self._device)
