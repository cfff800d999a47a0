"""Devices: their number, names and attributes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from preheat.driver.calls import CallError, entry
from preheat.driver.raw import I32, U64, put, text, write
from preheat.driver.settings import DriverSettings
from preheat.driver.status import INVALID_DEVICE, INVALID_VALUE
from preheat.emulator.device import EmulatorDevice

if TYPE_CHECKING:
    from preheat.driver.contexts import Context
    from preheat.driver.driver import Driver

__all__ = ["ATTRIBUTES", "MODEL", "PROCESSORS", "VERSION", "Gpu"]

#: The version of the driver API, of the headers from which the table of functions was made.
VERSION = 13050
MODEL = "NVIDIA GPU emulated by preheat"
PROCESSORS = 132  # of an H200, whose other numbers the emulator has by default
_UUID = b"preheat-emulated"[:15]

#: The numbers of the attributes by name. Attributes that are not here are 0 on every device.
ATTRIBUTES = {
    "MAX_THREADS_PER_BLOCK": 1, "MAX_BLOCK_DIM_X": 2, "MAX_BLOCK_DIM_Y": 3, "MAX_BLOCK_DIM_Z": 4,
    "MAX_GRID_DIM_X": 5, "MAX_GRID_DIM_Y": 6, "MAX_GRID_DIM_Z": 7, "MAX_SHARED_MEMORY_PER_BLOCK": 8,
    "TOTAL_CONSTANT_MEMORY": 9, "WARP_SIZE": 10, "MAX_PITCH": 11, "MAX_REGISTERS_PER_BLOCK": 12,
    "CLOCK_RATE": 13, "TEXTURE_ALIGNMENT": 14, "GPU_OVERLAP": 15, "MULTIPROCESSOR_COUNT": 16,
    "CAN_MAP_HOST_MEMORY": 19, "CONCURRENT_KERNELS": 31, "ECC_ENABLED": 32, "PCI_BUS_ID": 33,
    "MEMORY_CLOCK_RATE": 36, "GLOBAL_MEMORY_BUS_WIDTH": 37, "L2_CACHE_SIZE": 38,
    "MAX_THREADS_PER_MULTIPROCESSOR": 39, "ASYNC_ENGINE_COUNT": 40, "UNIFIED_ADDRESSING": 41,
    "TEXTURE_PITCH_ALIGNMENT": 51, "COMPUTE_CAPABILITY_MAJOR": 75, "COMPUTE_CAPABILITY_MINOR": 76,
    "STREAM_PRIORITIES_SUPPORTED": 78, "GLOBAL_L1_CACHE_SUPPORTED": 79, "LOCAL_L1_CACHE_SUPPORTED": 80,
    "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR": 81, "MAX_REGISTERS_PER_MULTIPROCESSOR": 82,
    "MANAGED_MEMORY": 83, "SINGLE_TO_DOUBLE_PRECISION_PERF_RATIO": 87, "CONCURRENT_MANAGED_ACCESS": 89,
    "COMPUTE_PREEMPTION_SUPPORTED": 90, "CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM": 91,
    "COOPERATIVE_LAUNCH": 95, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 97, "HOST_REGISTER_SUPPORTED": 99,
    "MAX_BLOCKS_PER_MULTIPROCESSOR": 106, "RESERVED_SHARED_MEMORY_PER_BLOCK": 111,
    "MEMORY_POOLS_SUPPORTED": 115, "CLUSTER_LAUNCH": 120, "IPC_EVENT_SUPPORTED": 125,
    "UNIFIED_FUNCTION_POINTERS": 129, "NUMA_ID": 131, "HOST_NUMA_ID": 134,
    "MAXIMUM_TEXTURE1D_WIDTH": 21, "MAXIMUM_TEXTURE2D_WIDTH": 22, "MAXIMUM_TEXTURE2D_HEIGHT": 23,
    "MAXIMUM_TEXTURE3D_WIDTH": 24, "MAXIMUM_TEXTURE3D_HEIGHT": 25, "MAXIMUM_TEXTURE3D_DEPTH": 26,
    "MAXIMUM_TEXTURE2D_LAYERED_WIDTH": 27, "MAXIMUM_TEXTURE2D_LAYERED_HEIGHT": 28,
    "MAXIMUM_TEXTURE2D_LAYERED_LAYERS": 29, "MAXIMUM_TEXTURE1D_LAYERED_WIDTH": 42,
    "MAXIMUM_TEXTURE1D_LAYERED_LAYERS": 43, "MAXIMUM_SURFACE1D_WIDTH": 55,
    "MAXIMUM_SURFACE2D_WIDTH": 56, "MAXIMUM_SURFACE2D_HEIGHT": 57, "MAXIMUM_SURFACE3D_WIDTH": 58,
    "MAXIMUM_SURFACE3D_HEIGHT": 59, "MAXIMUM_SURFACE3D_DEPTH": 60,
    "MAXIMUM_SURFACE1D_LAYERED_WIDTH": 61, "MAXIMUM_SURFACE1D_LAYERED_LAYERS": 62,
    "MAXIMUM_SURFACE2D_LAYERED_WIDTH": 63, "MAXIMUM_SURFACE2D_LAYERED_HEIGHT": 64,
    "MAXIMUM_SURFACE2D_LAYERED_LAYERS": 65, "MAXIMUM_TEXTURE1D_LINEAR_WIDTH": 69,
    "MAXIMUM_TEXTURE2D_LINEAR_WIDTH": 70, "MAXIMUM_TEXTURE2D_LINEAR_HEIGHT": 71,
    "MAXIMUM_TEXTURE2D_LINEAR_PITCH": 72, "MAXIMUM_TEXTURE2D_MIPMAPPED_WIDTH": 73,
    "MAXIMUM_TEXTURE2D_MIPMAPPED_HEIGHT": 74, "MAXIMUM_TEXTURE1D_MIPMAPPED_WIDTH": 77,
}  # fmt: skip
#: The largest images by the names of their attributes, which end with an axis.
_LARGEST = {
    "TEXTURE1D": (131072,), "TEXTURE2D": (131072, 65536), "TEXTURE3D": (16384, 16384, 16384),
    "TEXTURE2D_LINEAR": (131072, 65000), "TEXTURE1D_LINEAR": (1 << 28,),
    "TEXTURE1D_MIPMAPPED": (32768,), "TEXTURE2D_MIPMAPPED": (32768, 32768),
    "SURFACE1D": (32768,), "SURFACE2D": (131072, 65536), "SURFACE3D": (16384, 16384, 16384),
    "TEXTURE2D_LAYERED": (32768, 32768), "SURFACE2D_LAYERED": (32768, 32768),
    "TEXTURE1D_LAYERED": (32768,), "SURFACE1D_LAYERED": (32768,),
}  # fmt: skip
_MAX_LAYERS = 2048


class Gpu:
    """One device of the driver: an emulator, and its primary context."""

    def __init__(self, index: int, settings: DriverSettings, thread_mode: Callable[[], str]) -> None:
        self.index = index
        self.emulator = EmulatorDevice(
            index,
            settings.arch,
            schedule=settings.schedule,
            sanitize=settings.sanitize,
            thread_mode=thread_mode,
        )
        self.primary: Context | None = None
        self.retained = 0  # how often the primary context is
        self.flags = 0  # of the primary context
        self.default_pool = 0  # its handle, and the handle of the pool in its place, or 0
        self.pool = 0
        self.managed_pool = 0
        self.attributes = self._attributes()

    def _attributes(self) -> dict[int, int]:
        emulator = self.emulator
        limits, processor = emulator.limits, emulator.multiprocessor
        values = {
            "MAX_THREADS_PER_BLOCK": limits.threads,
            "MAX_BLOCK_DIM_X": limits.block[0],
            "MAX_BLOCK_DIM_Y": limits.block[1],
            "MAX_BLOCK_DIM_Z": limits.block[2],
            "MAX_GRID_DIM_X": limits.grid[0],
            "MAX_GRID_DIM_Y": limits.grid[1],
            "MAX_GRID_DIM_Z": limits.grid[2],
            "MAX_SHARED_MEMORY_PER_BLOCK": limits.shared,
            "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": limits.shared_optin,
            "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR": processor.shared,
            "RESERVED_SHARED_MEMORY_PER_BLOCK": processor.reserved,
            "TOTAL_CONSTANT_MEMORY": 1 << 16,
            "WARP_SIZE": limits.warp,
            "MAX_PITCH": (1 << 31) - 1,
            "MAX_REGISTERS_PER_BLOCK": processor.registers,
            "MAX_REGISTERS_PER_MULTIPROCESSOR": processor.registers,
            "MAX_THREADS_PER_MULTIPROCESSOR": processor.threads,
            "MAX_BLOCKS_PER_MULTIPROCESSOR": processor.blocks,
            "MULTIPROCESSOR_COUNT": PROCESSORS,
            "CLUSTER_LAUNCH": int(limits.cluster > 0),
            "COMPUTE_CAPABILITY_MAJOR": emulator.arch.major,
            "COMPUTE_CAPABILITY_MINOR": emulator.arch.minor,
            "PCI_BUS_ID": self.index + 1,
            "CLOCK_RATE": 1_980_000,
            "MEMORY_CLOCK_RATE": 3_201_000,
            "GLOBAL_MEMORY_BUS_WIDTH": 6144,
            "L2_CACHE_SIZE": 60 << 20,
            "TEXTURE_ALIGNMENT": 512,
            "TEXTURE_PITCH_ALIGNMENT": 32,
            "ASYNC_ENGINE_COUNT": 3,
            "SINGLE_TO_DOUBLE_PRECISION_PERF_RATIO": 2,
            "NUMA_ID": -1,
            "HOST_NUMA_ID": -1,
        }
        values |= _largest_images()
        named = {ATTRIBUTES[name]: value for name, value in values.items()}
        # The others are features that every GPU has.
        return dict.fromkeys(ATTRIBUTES.values(), 1) | named


def _largest_images() -> dict[str, int]:
    """Return the attributes for the sizes of images, in texels."""
    axes = ("WIDTH", "HEIGHT", "DEPTH")
    found = {
        f"MAXIMUM_{kind}_{axis}": extent
        for kind, extents in _LARGEST.items()
        for axis, extent in zip(axes, extents, strict=False)
    }
    layers = {f"MAXIMUM_{kind}_LAYERS": _MAX_LAYERS for kind in _LARGEST if kind.endswith("LAYERED")}
    return found | layers | {"MAXIMUM_TEXTURE2D_LINEAR_PITCH": 2097120}


@entry("cuInit", before_init=True)
def _init(driver: Driver, flags: int) -> None:
    if flags:
        raise CallError(INVALID_VALUE)
    driver.initialize()


@entry("cuDriverGetVersion", before_init=True)
def _driver_version(driver: Driver, out: int) -> None:
    del driver
    put(out, VERSION, I32)


@entry("cuDeviceGetCount", after_fault=True)
def _count(driver: Driver, out: int) -> None:
    put(out, len(driver.gpus), I32)


@entry("cuDeviceGet", after_fault=True)
def _get(driver: Driver, out: int, index: int) -> None:
    put(out, driver.gpu(index).index, I32)


@entry("cuDeviceGetName", after_fault=True)
def _name(driver: Driver, out: int, size: int, number: int) -> None:
    driver.gpu(number)
    write(out, MODEL.encode()[: size - 1] + b"\0")


@entry("cuDeviceGetUuid", after_fault=True)
def _uuid(driver: Driver, out: int, number: int) -> None:
    write(out, _UUID + bytes([driver.gpu(number).index]))


@entry("cuDeviceTotalMem", 3020, after_fault=True)
def _total(driver: Driver, out: int, number: int) -> None:
    put(out, driver.gpu(number).emulator.memory().total, U64)


@entry("cuDeviceGetAttribute", after_fault=True)
def _attribute(driver: Driver, out: int, which: int, number: int) -> None:
    put(out, driver.gpu(number).attributes.get(which, 0), I32)


@entry("cuDeviceComputeCapability", after_fault=True)
def _capability(driver: Driver, major: int, minor: int, number: int) -> None:
    arch = driver.gpu(number).emulator.arch
    put(major, arch.major, I32)
    put(minor, arch.minor, I32)


@entry("cuDeviceGetPCIBusId", after_fault=True)
def _bus(driver: Driver, out: int, size: int, number: int) -> None:
    name = f"0000:{driver.gpu(number).index + 1:02X}:00.0"
    write(out, name.encode()[: size - 1] + b"\0")


@entry("cuDeviceGetByPCIBusId", after_fault=True)
def _by_bus(driver: Driver, out: int, name: int) -> None:
    try:
        number = int(text(name).split(":")[-2], 16) - 1
    except (IndexError, ValueError):
        raise CallError(INVALID_VALUE) from None
    put(out, driver.gpu(number).index, I32)


@entry("cuDeviceCanAccessPeer", after_fault=True)
def _can_access(driver: Driver, out: int, number: int, peer: int) -> None:
    put(out, int(driver.gpu(number) is not driver.gpu(peer)), I32)


@entry("cuDeviceGetP2PAttribute", after_fault=True)
def _peer_attribute(driver: Driver, out: int, which: int, number: int, peer: int) -> None:
    if driver.gpu(number) is driver.gpu(peer):
        raise CallError(INVALID_DEVICE)
    access_supported = 2
    put(out, int(which == access_supported), I32)


@entry("cuDeviceGetExecAffinitySupport", after_fault=True)
def _affinity(driver: Driver, out: int, kind: int, number: int) -> None:
    del kind
    driver.gpu(number)
    put(out, 0, I32)
