"""CUDA arrays, with mipmap levels or without. A program has no address of their memory."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from preheat.driver.allocations import Allocation, Kind
from preheat.driver.calls import CallError, entry
from preheat.driver.contexts import Context
from preheat.driver.devices import ATTRIBUTES
from preheat.driver.raw import U64, put, read_structure, write
from preheat.driver.status import INVALID_VALUE, NOT_SUPPORTED
from preheat.emulator.texels import Texels

if TYPE_CHECKING:
    from preheat.driver.driver import Driver

__all__ = ["FORMATS", "SURFACE", "CudaArray", "MipmappedArray", "array_of"]

#: The type of a number in each format. Formats of images and of compressed blocks are not supported.
FORMATS: dict[int, np.dtype[Any]] = {
    1: np.dtype(np.uint8), 2: np.dtype(np.uint16), 3: np.dtype(np.uint32), 8: np.dtype(np.int8),
    9: np.dtype(np.int16), 10: np.dtype(np.int32), 16: np.dtype(np.float16), 32: np.dtype(np.float32),
}  # fmt: skip
_LAYERED, SURFACE, _CUBE, _GATHER = 1, 2, 4, 8
_FACES = 6  # of a cube
_PLAIN = struct.Struct("<QQII")
_WITH_DEPTH = struct.Struct("<QQQIII4x")


class _Description(NamedTuple):
    """What a program says of an array. The height and the depth are 0 where it has none."""

    width: int
    height: int
    depth: int
    format: int
    channels: int
    flags: int = 0

    def require_valid(self) -> None:
        """Raise `CallError` unless an array can be like this."""
        layered, cube = self.flags & _LAYERED, self.flags & _CUBE
        wrong = (
            not self.width,
            self.channels not in (1, 2, 4),
            self.depth and not (self.height or layered),
            layered and not self.depth,
            cube and (self.width != self.height or self.depth % _FACES or not self.depth),
            cube and not layered and self.depth != _FACES,
            self.flags & _GATHER and (not self.height or self.depth),
        )
        if any(wrong):
            raise CallError(INVALID_VALUE)
        if self.format not in FORMATS or self.flags & ~(_LAYERED | SURFACE | _CUBE | _GATHER):
            raise CallError(NOT_SUPPORTED)

    def require_room(self, attributes: dict[int, int]) -> None:
        """Raise `CallError` if an array is larger than the attributes of a device allow."""
        layered = bool(self.flags & (_LAYERED | _CUBE))
        axes = 1 + bool(self.height) + (bool(self.depth) and not layered)
        kind = f"{'SURFACE' if self.flags & SURFACE else 'TEXTURE'}{axes}D{'_LAYERED' * layered}"
        names = ("WIDTH", "HEIGHT", "LAYERS" if layered else "DEPTH")
        for extent, name in zip(self[:3], names, strict=True):
            if extent and extent > attributes[ATTRIBUTES[f"MAXIMUM_{kind}_{name}"]]:
                raise CallError(INVALID_VALUE)

    @property
    def levels(self) -> int:
        """The most mipmap levels: each has half of the size, down to 1."""
        layered = self.flags & (_LAYERED | _CUBE)
        return max(self.width, self.height, 0 if layered else self.depth).bit_length()

    def level(self, number: int) -> _Description:
        """Return the description of a mipmap level."""
        halved = [max(extent >> number, 1) if extent else 0 for extent in self[:3]]
        if self.flags & (_LAYERED | _CUBE):
            halved[2] = self.depth
        return self._replace(width=halved[0], height=halved[1], depth=halved[2])

    def texels(self, address: int) -> Texels:
        """Return the texels at an address, row after row."""
        dtype = FORMATS[self.format]
        extents = self.width, max(self.height, 1), max(self.depth, 1)
        pitch = self.width * self.channels * dtype.itemsize
        return Texels(address, dtype, self.channels, extents, pitch, pitch * extents[1])


@dataclass(eq=False)
class CudaArray:
    """A CUDA array.

    Attributes:
        parent: The array of which this is a mipmap level, or None.
    """

    context: Context
    description: _Description
    texels: Texels
    handle: int = 0
    parent: MipmappedArray | None = None


@dataclass(eq=False)
class MipmappedArray:
    """A CUDA array with mipmap levels."""

    context: Context
    levels: tuple[CudaArray, ...] = ()


def array_of(driver: Driver, handle: int) -> CudaArray:
    """Return the array that a copy or an object is made of. `CallError` if there is none."""
    found = driver.handles.find(handle, CudaArray)
    if found is None:
        raise CallError(INVALID_VALUE)
    return found


def _new(driver: Driver, description: _Description) -> CudaArray:
    """Return a new array of the current context."""
    context = driver.current()
    context.gpu.emulator.captures.reject("allocate", watched=True)
    description.require_room(context.gpu.attributes)
    size = description.texels(0).span
    start = context.gpu.emulator.allocator.allocate_now(size)
    driver.memory.add(Allocation(start, size, Kind.ARRAY, context))
    made = CudaArray(context, description, description.texels(start))
    made.handle = driver.handles.add(made)
    return made


def _free(driver: Driver, array: CudaArray) -> None:
    array.context.gpu.emulator.allocator.free_now(array.texels.address)
    driver.memory.remove(array.texels.address)
    driver.handles.remove(array.handle)


def _create(driver: Driver, out: int, description: _Description) -> None:
    if not out:
        raise CallError(INVALID_VALUE)
    description.require_valid()
    put(out, _new(driver, description).handle, U64)


@entry("cuArrayCreate", 3020)
def _create_plain(driver: Driver, out: int, address: int) -> None:
    width, height, form, channels = _PLAIN.unpack(read_structure(address, _PLAIN.size))
    _create(driver, out, _Description(width, height, 0, form, channels))


@entry("cuArray3DCreate", 3020)
def _create_with_depth(driver: Driver, out: int, address: int) -> None:
    _create(driver, out, _Description(*_WITH_DEPTH.unpack(read_structure(address, _WITH_DEPTH.size))))


@entry("cuArrayGetDescriptor", 3020)
def _describe_plain(driver: Driver, out: int, handle: int) -> None:
    found = driver.handles.get(handle, CudaArray).description
    write(out, _PLAIN.pack(found.width, found.height, found.format, found.channels))


@entry("cuArray3DGetDescriptor", 3020)
def _describe_with_depth(driver: Driver, out: int, handle: int) -> None:
    write(out, _WITH_DEPTH.pack(*driver.handles.get(handle, CudaArray).description))


@entry("cuArrayDestroy")
def _destroy(driver: Driver, handle: int) -> None:
    found = driver.handles.get(handle, CudaArray)
    if found.parent is not None:  # It ends with the other levels.
        raise CallError(INVALID_VALUE)
    found.context.gpu.emulator.captures.reject("free", watched=True)
    _free(driver, found)


# What only arrays of other kinds have: arrays of planes, and arrays without memory of their own


@entry("cuArrayGetPlane")
def _plane(driver: Driver, out: int, handle: int, number: int) -> None:
    del out, number
    driver.handles.get(handle, CudaArray)
    raise CallError(INVALID_VALUE)


@entry("cuArrayGetSparseProperties")
def _sparse_properties(driver: Driver, out: int, handle: int) -> None:
    del out
    driver.handles.get(handle, CudaArray)
    raise CallError(INVALID_VALUE)


@entry("cuArrayGetMemoryRequirements")
def _requirements(driver: Driver, out: int, handle: int, device: int) -> None:
    del out, device
    driver.handles.get(handle, CudaArray)
    raise CallError(INVALID_VALUE)


# Mipmaps


@entry("cuMipmappedArrayCreate")
def _create_mipmaps(driver: Driver, out: int, address: int, levels: int) -> None:
    description = _Description(*_WITH_DEPTH.unpack(read_structure(address, _WITH_DEPTH.size)))
    if not out:
        raise CallError(INVALID_VALUE)
    description.require_valid()
    made = MipmappedArray(driver.current())
    count = min(max(levels, 1), description.levels)
    for number in range(count):
        level = _new(driver, description.level(number))
        level.parent = made
        made.levels += (level,)
    put(out, driver.handles.add(made), U64)


@entry("cuMipmappedArrayGetLevel")
def _level(driver: Driver, out: int, handle: int, number: int) -> None:
    found = driver.handles.get(handle, MipmappedArray)
    if number >= len(found.levels):
        raise CallError(INVALID_VALUE)
    put(out, found.levels[number].handle, U64)


@entry("cuMipmappedArrayDestroy")
def _destroy_mipmaps(driver: Driver, handle: int) -> None:
    found = driver.handles.get(handle, MipmappedArray)
    found.context.gpu.emulator.captures.reject("free", watched=True)
    driver.handles.remove(handle)
    for level in found.levels:
        _free(driver, level)
