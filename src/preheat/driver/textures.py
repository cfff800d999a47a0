"""Texture and surface objects, by which kernels read and write images."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

from preheat.driver.arrays import FORMATS, SURFACE, MipmappedArray, array_of
from preheat.driver.calls import CallError, entry
from preheat.driver.contexts import Context
from preheat.driver.devices import ATTRIBUTES
from preheat.driver.raw import U64, put, read_structure, write
from preheat.driver.status import INVALID_VALUE, NOT_SUPPORTED
from preheat.emulator.texels import Texels
from preheat.process.lazy import LazyModule

if TYPE_CHECKING:
    from preheat.driver.driver import Driver
    from preheat.emulator import surfaces, textures
else:  # The first texture or surface needs them.
    surfaces = LazyModule("preheat.emulator.surfaces")
    textures = LazyModule("preheat.emulator.textures")

__all__: list[str] = []

_ARRAY, _MIPMAPS, _LINEAR, _PITCHED = range(4)  # kinds of resources
_RESOURCE = struct.Struct("<I4x128sI4x")
_OF_HANDLE = struct.Struct("<Q120x")
_OF_LINEAR = struct.Struct("<QIIQ104x")
_OF_PITCHED = struct.Struct("<QIIQQQ88x")
_SAMPLING = struct.Struct("<3IIIIIfff4f48x")
_AS_INTEGERS, _NORMALIZED, _SRGB, _EXACT_LEVELS, _SEAMLESS = 1, 2, 16, 32, 64
_BORDER = 3  # the last of the address modes


class _Object(NamedTuple):
    """A texture or surface object, and what the program gave for it."""

    context: Context
    resource: bytes
    sampling: bytes = b""


def _add(
    driver: Driver, out: int, made: _Object, for_kernels: textures.Texture | surfaces.Surface
) -> None:
    handle = driver.handles.add(made)
    made.context.gpu.emulator.textures[handle] = for_kernels
    put(out, handle, U64)


def _object(driver: Driver, handle: int, *, texture: bool) -> _Object:
    found = driver.handles.find(handle, _Object)
    if found is None or bool(found.sampling) is not texture:
        raise CallError(INVALID_VALUE)
    return found


def _remove(driver: Driver, handle: int, *, texture: bool) -> None:
    """Forget an object, which kernels that were launched before may use."""
    found = _object(driver, handle, texture=texture)
    emulator = found.context.gpu.emulator
    if emulator.scheduler is not None:
        emulator.scheduler.run_all()
    driver.handles.remove(handle)
    emulator.textures.pop(handle, None)


# Textures


def _read_levels(driver: Driver, data: bytes) -> tuple[int, tuple[Texels, ...]]:
    """Return the kind of a resource, and its texels."""
    kind, resource, flags = _RESOURCE.unpack(data)
    if flags:
        raise CallError(INVALID_VALUE)
    if kind == _ARRAY:
        return kind, (array_of(driver, _OF_HANDLE.unpack(resource)[0]).texels,)
    if kind == _MIPMAPS:
        mipmaps = driver.handles.find(_OF_HANDLE.unpack(resource)[0], MipmappedArray)
        if mipmaps is None:
            raise CallError(INVALID_VALUE)
        return kind, tuple(level.texels for level in mipmaps.levels)
    if kind == _LINEAR:
        address, form, channels, size = _OF_LINEAR.unpack(resource)
        return kind, (_read_linear(driver, address, form, channels, size),)
    if kind == _PITCHED:
        return kind, (_read_pitched(driver, *_OF_PITCHED.unpack(resource)),)
    raise CallError(INVALID_VALUE)


def _read_linear(driver: Driver, address: int, form: int, channels: int, size: int) -> Texels:
    width = size // (_texel(form, channels))
    return _find_texels(driver, address, form, channels, (width, 1, 1), size)


def _read_pitched(
    driver: Driver, address: int, form: int, channels: int, width: int, height: int, pitch: int
) -> Texels:
    step = driver.current().gpu.attributes[ATTRIBUTES["TEXTURE_PITCH_ALIGNMENT"]]
    if pitch % step or pitch < width * _texel(form, channels):
        raise CallError(INVALID_VALUE)
    return _find_texels(driver, address, form, channels, (width, height, 1), pitch)


def _texel(form: int, channels: int) -> int:
    """Return the bytes of a texel."""
    if channels not in (1, 2, 4):
        raise CallError(INVALID_VALUE)
    if form not in FORMATS:
        raise CallError(NOT_SUPPORTED)
    return FORMATS[form].itemsize * channels


def _find_texels(
    driver: Driver, address: int, form: int, channels: int, extents: tuple[int, int, int], pitch: int
) -> Texels:
    """Return texels in memory of the program."""
    step = driver.current().gpu.attributes[ATTRIBUTES["TEXTURE_ALIGNMENT"]]
    made = Texels(address, FORMATS[form], channels, extents, pitch, pitch * extents[1])
    if address % step or not all(extents) or not driver.memory.contains(address, made.span):
        raise CallError(INVALID_VALUE)
    return made


def _texture(kind: int, levels: tuple[Texels, ...], data: bytes) -> textures.Texture:
    fields = _SAMPLING.unpack(data)
    modes, linear, flags = fields[:3], fields[3], fields[4]
    linear_levels, bias, lowest, highest = fields[6:10]
    border = fields[10:14]
    known = _AS_INTEGERS | _NORMALIZED | _SRGB | _EXACT_LEVELS | _SEAMLESS
    if flags & ~known or linear > 1 or linear_levels > 1 or max(modes) > _BORDER:
        raise CallError(INVALID_VALUE)
    if flags & (_SRGB | _SEAMLESS):
        raise CallError(NOT_SUPPORTED)
    if kind == _LINEAR:  # Fetches outside give zeros, whatever the program asks for.
        modes, linear, border = (_BORDER,) * 3, 0, (0.0,) * 4
    if kind == _MIPMAPS and not flags & _NORMALIZED:
        raise CallError(INVALID_VALUE)
    known_modes = textures.ADDRESS_MODES
    made = textures.Texture(
        levels,
        modes=(known_modes[modes[0]], known_modes[modes[1]], known_modes[modes[2]]),
        linear=bool(linear),
        normalized=bool(flags & _NORMALIZED),
        as_integers=bool(flags & _AS_INTEGERS),
        border=border,
        linear_levels=bool(linear_levels),
        bias=bias,
        level_range=(lowest, highest),
    )
    if made.linear and made.dtype.kind != "f":  # Only floats can be interpolated.
        raise CallError(INVALID_VALUE)
    return made


@entry("cuTexObjectCreate")
def _create_texture(driver: Driver, out: int, resource: int, sampling: int, view: int) -> None:
    if not out:
        raise CallError(INVALID_VALUE)
    context = driver.current()
    made = _Object(
        context, read_structure(resource, _RESOURCE.size), read_structure(sampling, _SAMPLING.size)
    )
    texture = _texture(*_read_levels(driver, made.resource), made.sampling)
    if view:
        raise CallError(NOT_SUPPORTED)
    _add(driver, out, made, texture)


@entry("cuTexObjectDestroy")
def _destroy_texture(driver: Driver, handle: int) -> None:
    _remove(driver, handle, texture=True)


@entry("cuTexObjectGetResourceDesc")
def _texture_resource(driver: Driver, out: int, handle: int) -> None:
    write(out, _object(driver, handle, texture=True).resource)


@entry("cuTexObjectGetTextureDesc")
def _texture_sampling(driver: Driver, out: int, handle: int) -> None:
    write(out, _object(driver, handle, texture=True).sampling)


@entry("cuTexObjectGetResourceViewDesc")
def _texture_view(driver: Driver, out: int, handle: int) -> None:
    del out
    _object(driver, handle, texture=True)
    raise CallError(INVALID_VALUE)  # There is none.


# Surfaces


@entry("cuSurfObjectCreate")
def _create_surface(driver: Driver, out: int, resource: int) -> None:
    made = _Object(driver.current(), read_structure(resource, _RESOURCE.size))
    kind, data, flags = _RESOURCE.unpack(made.resource)
    if not out or kind != _ARRAY or flags:
        raise CallError(INVALID_VALUE)
    array = array_of(driver, _OF_HANDLE.unpack(data)[0])
    if not array.description.flags & SURFACE:
        raise CallError(INVALID_VALUE)
    _add(driver, out, made, surfaces.Surface(array.texels))


@entry("cuSurfObjectDestroy")
def _destroy_surface(driver: Driver, handle: int) -> None:
    _remove(driver, handle, texture=False)


@entry("cuSurfObjectGetResourceDesc")
def _surface_resource(driver: Driver, out: int, handle: int) -> None:
    write(out, _object(driver, handle, texture=False).resource)
