"""Copies and fills.

Memory of the host that the driver does not know is pageable: a copy reads it before the call returns,
and the call waits for a copy to it. Everything else happens in the order of the stream.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from preheat.driver.arrays import CudaArray, array_of
from preheat.driver.calls import CallError, entry
from preheat.driver.raw import read
from preheat.driver.status import INVALID_VALUE
from preheat.driver.streams import Stream, stream_of, submit
from preheat.emulator.allocator import Allocator

if TYPE_CHECKING:
    from preheat.driver.driver import Driver

__all__ = [
    "BOX_2D", "BOX_3D", "IN_ARRAY", "Copy", "Fill", "Side", "box_of", "copy_of", "fill_of",
]  # fmt: skip

_HOST, _DEVICE, IN_ARRAY, _UNIFIED = 1, 2, 3, 4
_LEGACY = 0


class Side(NamedTuple):
    """One side of a copy: its first byte, and how far the next row and the next layer are.

    Attributes:
        allocator: The memory's allocator; None for pageable memory.
        array: The CUDA array that this is a part of, or None.
    """

    address: int
    pitch: int
    layer: int
    allocator: Allocator | None
    array: CudaArray | None = None

    def rows(self, height: int, depth: int) -> Iterator[int]:
        """Yield the address of each row."""
        for z in range(depth):
            for y in range(height):
                yield self.address + z * self.layer + y * self.pitch

    def start_in_array(self) -> tuple[int, int, int]:
        """Return the byte of a row, the row and the layer at which a part of an array begins."""
        assert self.array is not None
        layer, rest = divmod(self.address - self.array.texels.address, self.layer)
        row, byte = divmod(rest, self.pitch)
        return byte, row, layer

    def span(self, width: int, height: int, depth: int) -> int:
        """Return the bytes from the first one to the last one."""
        return (depth - 1) * self.layer + (height - 1) * self.pitch + width


@dataclass(frozen=True)
class Copy:
    """Work that copies rows of `width` bytes.

    Attributes:
        kept: What keeps the memory of the source.
    """

    target: Side
    source: Side
    width: int
    height: int = 1
    depth: int = 1
    kept: object = None

    def __call__(self) -> None:
        self._require(self.source, write=False)
        self._require(self.target, write=True)
        shape = self.height, self.depth
        for to, of in zip(self.target.rows(*shape), self.source.rows(*shape), strict=True):
            ctypes.memmove(to, of, self.width)

    def _require(self, side: Side, *, write: bool) -> None:
        if side.allocator is not None:
            span = side.span(self.width, self.height, self.depth)
            side.allocator.require_valid("copy", side.address, span, write=write)

    def with_bytes_of_now(self) -> Copy:
        """Return the same copy of what its source holds now."""
        held = (ctypes.c_char * (self.width * self.height * self.depth))()
        start = ctypes.addressof(held)
        for at, row in enumerate(self.source.rows(self.height, self.depth)):
            ctypes.memmove(start + at * self.width, row, self.width)
        layer = self.width * self.height
        source = Side(start, self.width, layer, None)
        return replace(self, source=source, kept=held)


@dataclass(frozen=True)
class Fill:
    """Work that writes `value` `count` times into each row."""

    target: Side
    value: bytes
    count: int
    height: int = 1

    def __call__(self) -> None:
        width = len(self.value) * self.count
        if self.target.allocator is not None:
            self.target.allocator.require_valid(
                "fill", self.target.address, self.target.span(width, self.height, 1)
            )
        for row in self.target.rows(self.height, 1):
            ctypes.memmove(row, self.value * self.count, width)


# Copies


def copy_of(
    driver: Driver, target: int, source: int, size: int, *, to_host: bool = False, of_host: bool = False
) -> Copy:
    """Return a copy of bytes. Raises `CallError` if a side that must be known memory is not."""
    return Copy(
        _side(driver, target, size, pageable=to_host),
        _side(driver, source, size, pageable=of_host),
        size,
    )


def _side(
    driver: Driver, address: int, size: int, *, pageable: bool, pitch: int = 0, layer: int = 0
) -> Side:
    """Return a side of a copy, whose span is `size`."""
    found = driver.memory.find(address)
    if found is None:
        if not pageable and size:
            raise CallError(INVALID_VALUE)
        return Side(address, pitch, layer, None)
    if address + size > found.end:
        raise CallError(INVALID_VALUE)
    return Side(address, pitch, layer, found.context.gpu.emulator.allocator)


def submit_copy(stream: Stream, copy: Copy, *, wait: bool = False) -> None:
    """Execute a copy in a stream, or capture it."""
    if not copy.width * copy.height * copy.depth:
        return
    if stream.emulated.branch is None:
        wait = wait or copy.target.allocator is None
        if copy.source.allocator is None and not wait:
            copy = copy.with_bytes_of_now()
    submit("copy", stream, copy, wait=wait)


def _copy_now(
    driver: Driver,
    target: int,
    source: int,
    size: int,
    *,
    to_host: bool = False,
    of_host: bool = False,
    stream: int = _LEGACY,
) -> None:
    where = stream_of(driver, stream)
    copy = copy_of(driver, target, source, size, to_host=to_host, of_host=of_host)
    submit_copy(where, copy, wait=to_host or of_host)


def _copy_async(
    driver: Driver,
    target: int,
    source: int,
    size: int,
    stream: int,
    *,
    to_host: bool = False,
    of_host: bool = False,
) -> None:
    where = stream_of(driver, stream)
    submit_copy(where, copy_of(driver, target, source, size, to_host=to_host, of_host=of_host))


entry("cuMemcpyHtoD", 3020, default_stream=True)(partial(_copy_now, of_host=True))
entry("cuMemcpyDtoH", 3020, default_stream=True)(partial(_copy_now, to_host=True))
entry("cuMemcpyDtoD", 3020, default_stream=True)(_copy_now)
entry("cuMemcpy", default_stream=True)(partial(_copy_now, to_host=True, of_host=True))
entry("cuMemcpyHtoDAsync", 3020, stream=3)(partial(_copy_async, of_host=True))
entry("cuMemcpyDtoHAsync", 3020, stream=3)(partial(_copy_async, to_host=True))
entry("cuMemcpyDtoDAsync", 3020, stream=3)(_copy_async)
entry("cuMemcpyAsync", stream=3)(partial(_copy_async, to_host=True, of_host=True))


@entry("cuMemcpyPeer", default_stream=True)
def _peer(
    driver: Driver, target: int, to: int, source: int, of: int, size: int, *, stream: int = _LEGACY
) -> None:
    driver.context(to)
    driver.context(of)
    _copy_now(driver, target, source, size, stream=stream)


@entry("cuMemcpyPeerAsync", stream=5)
def _peer_async(
    driver: Driver, target: int, to: int, source: int, of: int, size: int, stream: int
) -> None:
    driver.context(to)
    driver.context(of)
    _copy_async(driver, target, source, size, stream)


# Copies of boxes

#: The layout of the structure for two and for three dimensions, and where its fields are.
BOX_2D = struct.Struct("<QQI4xQQQQ QQI4xQQQQ QQ")
BOX_3D = struct.Struct("<QQQQI4xQQQQQQ QQQQI4xQQQQQQ QQQ")


class _Place(NamedTuple):
    """One side of a box, as the structure has it."""

    x: int
    y: int
    z: int
    kind: int
    host: int
    device: int
    array: int
    pitch: int
    height: int

    @classmethod
    def of_2d(cls, fields: tuple[int, ...]) -> _Place:
        x, y, kind, host, device, array, pitch = fields
        return cls(x, y, 0, kind, host, device, array, pitch, 0)

    @classmethod
    def of_3d(cls, fields: tuple[int, ...]) -> _Place:
        x, y, z, _level, kind, host, device, array, _reserved, pitch, height = fields
        return cls(x, y, z, kind, host, device, array, pitch, height)

    def side(self, driver: Driver, width: int, height: int, depth: int) -> Side:
        if self.kind == IN_ARRAY:
            return _array_side(array_of(driver, self.array), self[:3], (width, height, depth))
        if self.kind not in (_HOST, _DEVICE, _UNIFIED):
            raise CallError(INVALID_VALUE)
        pitch = self.pitch or width
        layer = pitch * (self.height or height)
        if pitch < width:
            raise CallError(INVALID_VALUE)
        start = self.host if self.kind == _HOST else self.device
        address = start + self.x + self.y * pitch + self.z * layer
        span = Side(address, pitch, layer, None).span(width, height, depth)
        pageable = self.kind != _DEVICE
        size = span if width and height and depth else 0
        return _side(driver, address, size, pageable=pageable, pitch=pitch, layer=layer)


def _array_side(array: CudaArray, start: tuple[int, int, int], box: tuple[int, int, int]) -> Side:
    """Return the part of an array that begins at a byte of a row, a row and a layer."""
    texels = array.texels
    limits = texels.row, *texels.extents[1:]
    inside = all(at + count <= limit for at, count, limit in zip(start, box, limits, strict=True))
    if not inside or start[0] % texels.texel or box[0] % texels.texel:
        raise CallError(INVALID_VALUE)
    x, y, z = start
    address = texels.address + x + y * texels.pitch + z * texels.layer
    allocator = array.context.gpu.emulator.allocator
    return Side(address, texels.pitch, texels.layer, allocator, array)


def _box(driver: Driver, address: int, *, depth: bool) -> Copy:
    size = BOX_3D.size if depth else BOX_2D.size
    return box_of(driver, read(address, size), depth=depth)


def box_of(driver: Driver, data: bytes, *, depth: bool) -> Copy:
    """Return the copy that a structure describes, with or without a depth."""
    if depth:
        fields = BOX_3D.unpack(data)
        places = [_Place.of_3d(fields[:11]), _Place.of_3d(fields[11:22])]
        width, height, layers = fields[22:]
    else:
        fields = BOX_2D.unpack(data)
        places = [_Place.of_2d(fields[:7]), _Place.of_2d(fields[7:14])]
        width, height, layers = *fields[14:], 1
    of, to = (place.side(driver, width, height, layers) for place in places)
    return Copy(to, of, width, height, layers)


def _box_now(driver: Driver, address: int, *, depth: bool, stream: int = _LEGACY) -> None:
    where = stream_of(driver, stream)
    copy = _box(driver, address, depth=depth)
    submit_copy(where, copy, wait=None in (copy.source.allocator, copy.target.allocator))


def _box_async(driver: Driver, address: int, stream: int, *, depth: bool) -> None:
    submit_copy(stream_of(driver, stream), _box(driver, address, depth=depth))


entry("cuMemcpy2D", 3020, default_stream=True)(partial(_box_now, depth=False))
entry("cuMemcpy2DUnaligned", 3020, default_stream=True)(partial(_box_now, depth=False))
entry("cuMemcpy2DAsync", 3020, stream=1)(partial(_box_async, depth=False))
entry("cuMemcpy3D", 3020, default_stream=True)(partial(_box_now, depth=True))
entry("cuMemcpy3DAsync", 3020, stream=1)(partial(_box_async, depth=True))


# Copies to and from arrays of one row


def _row(driver: Driver, array: int, offset: int, size: int) -> Side:
    found = array_of(driver, array)
    if found.description.height or found.description.depth:
        raise CallError(INVALID_VALUE)
    return _array_side(found, (offset, 0, 0), (size, 1, 1))


def _submit_row(driver: Driver, stream: int, to: Side, of: Side, size: int, *, wait: bool) -> None:
    pageable = None in (to.allocator, of.allocator)
    submit_copy(stream_of(driver, stream), Copy(to, of, size), wait=wait and pageable)


def _to_array(
    driver: Driver,
    array: int,
    offset: int,
    source: int,
    size: int,
    stream: int = _LEGACY,
    *,
    of_host: bool = False,
    wait: bool = True,
) -> None:
    of = _side(driver, source, size, pageable=of_host)
    _submit_row(driver, stream, _row(driver, array, offset, size), of, size, wait=wait)


def _from_array(
    driver: Driver,
    target: int,
    array: int,
    offset: int,
    size: int,
    stream: int = _LEGACY,
    *,
    to_host: bool = False,
    wait: bool = True,
) -> None:
    to = _side(driver, target, size, pageable=to_host)
    _submit_row(driver, stream, to, _row(driver, array, offset, size), size, wait=wait)


entry("cuMemcpyDtoA", 3020, default_stream=True)(_to_array)
entry("cuMemcpyAtoD", 3020, default_stream=True)(_from_array)
entry("cuMemcpyHtoA", 3020, default_stream=True)(partial(_to_array, of_host=True))
entry("cuMemcpyAtoH", 3020, default_stream=True)(partial(_from_array, to_host=True))
entry("cuMemcpyHtoAAsync", 3020, stream=4)(partial(_to_array, of_host=True, wait=False))
entry("cuMemcpyAtoHAsync", 3020, stream=4)(partial(_from_array, to_host=True, wait=False))


@entry("cuMemcpyAtoA", 3020, default_stream=True)
def _between_arrays(
    driver: Driver, to: int, at: int, of: int, start: int, size: int, *, stream: int = _LEGACY
) -> None:
    if array_of(driver, to).texels.texel != array_of(driver, of).texels.texel:
        raise CallError(INVALID_VALUE)
    target, source = _row(driver, to, at, size), _row(driver, of, start, size)
    _submit_row(driver, stream, target, source, size, wait=True)


# Fills


def fill_of(
    driver: Driver, address: int, value: int, size: int, count: int, height: int = 1, pitch: int = 0
) -> Fill:
    """Return a fill with elements of `size` bytes."""
    if address % size or (height > 1 and (pitch % size or pitch < size * count)):
        raise CallError(INVALID_VALUE)
    span = (height - 1) * pitch + size * count if height and count else 0
    target = _side(driver, address, span, pageable=False, pitch=pitch)
    return Fill(target, (value & ((1 << 8 * size) - 1)).to_bytes(size, "little"), count, height)


def _submit_fill(driver: Driver, stream: Stream, fill: Fill, *, asynchronous: bool) -> None:
    """Execute a fill in a stream. One of memory that the host reads waits unless it is asynchronous."""
    if fill.count * fill.height:
        found = driver.memory.find(fill.target.address)
        on_host = found is not None and (found.on_host or found.is_managed)
        submit("fill", stream, fill, wait=on_host and not asynchronous)


def _fill(
    driver: Driver,
    address: int,
    value: int,
    count: int,
    stream: int = _LEGACY,
    *,
    size: int,
    asynchronous: bool = False,
) -> None:
    fill = fill_of(driver, address, value, size, count)
    _submit_fill(driver, stream_of(driver, stream), fill, asynchronous=asynchronous)


def _fill_rows(
    driver: Driver,
    address: int,
    pitch: int,
    value: int,
    count: int,
    height: int,
    stream: int = _LEGACY,
    *,
    size: int,
    asynchronous: bool = False,
) -> None:
    fill = fill_of(driver, address, value, size, count, height, pitch)
    _submit_fill(driver, stream_of(driver, stream), fill, asynchronous=asynchronous)


for _bits in (8, 16, 32):
    for _name, _function, _place in ((f"D{_bits}", _fill, 3), (f"D2D{_bits}", _fill_rows, 5)):
        _sized = partial(_function, size=_bits // 8)
        entry(f"cuMemset{_name}", 3020, default_stream=True)(_sized)
        entry(f"cuMemset{_name}Async", stream=_place)(partial(_sized, asynchronous=True))
