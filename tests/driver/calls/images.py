"""CUDA arrays, textures and surfaces as a program makes them, and copies of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.driver.calls.cuda import cu, ok

__all__ = [
    "FORMATS",
    "LAYERED",
    "SURFACE",
    "copied",
    "described",
    "new_array",
    "of_array",
    "pitched",
    "texture",
]

LAYERED, SURFACE = 1, 2
KIND = cu.CUmemorytype
FORMATS = {
    "uint8": cu.CUarray_format.CU_AD_FORMAT_UNSIGNED_INT8,
    "uint16": cu.CUarray_format.CU_AD_FORMAT_UNSIGNED_INT16,
    "uint32": cu.CUarray_format.CU_AD_FORMAT_UNSIGNED_INT32,
    "int8": cu.CUarray_format.CU_AD_FORMAT_SIGNED_INT8,
    "int16": cu.CUarray_format.CU_AD_FORMAT_SIGNED_INT16,
    "int32": cu.CUarray_format.CU_AD_FORMAT_SIGNED_INT32,
    "float16": cu.CUarray_format.CU_AD_FORMAT_HALF,
    "float32": cu.CUarray_format.CU_AD_FORMAT_FLOAT,
}


def described(extents: Sequence[int], kind: str = "float32", channels: int = 1, flags: int = 0) -> Any:
    """Return the description of an array with a width, a height and a depth; 0 for none."""
    made = cu.CUDA_ARRAY3D_DESCRIPTOR()
    made.Width, made.Height, made.Depth = extents
    made.Format, made.NumChannels, made.Flags = FORMATS[kind], channels, flags
    return made


def new_array(values: np.ndarray[Any, Any], flags: int = 0) -> Any:
    """Return a CUDA array with values by layer, row, column and channel."""
    depth, height, width, channels = values.shape
    if flags & LAYERED:
        extents = width, height if height > 1 else 0, depth
    elif depth > 1:
        extents = width, height, depth
    else:
        extents = width, height if height > 1 else 0, 0
    made = ok(cu.cuArray3DCreate(described(extents, str(values.dtype), channels, flags)))
    copied(values, to_array=made)
    return made


def copied(
    values: np.ndarray[Any, Any], *, to_array: Any = None, of_array: Any = None, stream: Any = None
) -> Any:
    """Copy all values into an array or out of it. Return them."""
    values = np.ascontiguousarray(values)
    box = cu.CUDA_MEMCPY3D()
    box.Depth, box.Height = values.shape[:2]
    box.WidthInBytes = pitch = values[0, 0].nbytes
    host = values.ctypes.data
    if to_array is not None:
        box.srcMemoryType, box.srcHost = KIND.CU_MEMORYTYPE_HOST, host
        box.srcPitch, box.srcHeight = pitch, values.shape[1]
        box.dstMemoryType, box.dstArray = KIND.CU_MEMORYTYPE_ARRAY, to_array
    else:
        box.dstMemoryType, box.dstHost = KIND.CU_MEMORYTYPE_HOST, host
        box.dstPitch, box.dstHeight = pitch, values.shape[1]
        box.srcMemoryType, box.srcArray = KIND.CU_MEMORYTYPE_ARRAY, of_array
    ok(cu.cuMemcpy3D(box) if stream is None else cu.cuMemcpy3DAsync(box, stream))
    return values


def of_array(array: Any, *, mipmapped: bool = False) -> Any:
    """Return the resource that is an array."""
    made = cu.CUDA_RESOURCE_DESC()
    if mipmapped:
        made.resType = cu.CUresourcetype.CU_RESOURCE_TYPE_MIPMAPPED_ARRAY
        made.res.mipmap.hMipmappedArray = array
    else:
        made.resType = cu.CUresourcetype.CU_RESOURCE_TYPE_ARRAY
        made.res.array.hArray = array
    return made


def pitched(address: Any, kind: str, channels: int, width: int, height: int, pitch: int) -> Any:
    """Return the resource of rows in memory; with a height of 0, of all texels in `pitch` bytes."""
    made = cu.CUDA_RESOURCE_DESC()
    if height:
        made.resType, part = cu.CUresourcetype.CU_RESOURCE_TYPE_PITCH2D, made.res.pitch2D
        part.width, part.height, part.pitchInBytes = width, height, pitch
    else:
        made.resType, part = cu.CUresourcetype.CU_RESOURCE_TYPE_LINEAR, made.res.linear
        part.sizeInBytes = pitch
    part.devPtr, part.format, part.numChannels = address, FORMATS[kind], channels
    return made


def texture(
    resource: Any,
    *,
    modes: Sequence[int] = (1, 1, 1),
    linear: bool = False,
    normalized: bool = False,
    as_integers: bool = False,
    border: Sequence[float] = (0, 0, 0, 0),
    levels: tuple[float, float] = (0, 0),
    linear_levels: bool = False,
    bias: float = 0,
    flags: int = 0,
) -> Any:
    """Create a texture object; return what the driver returns."""
    made = cu.CUDA_TEXTURE_DESC()
    made.addressMode = [cu.CUaddress_mode(mode) for mode in modes]
    made.filterMode = cu.CUfilter_mode(linear)
    made.flags = flags | as_integers | normalized << 1
    made.mipmapFilterMode = cu.CUfilter_mode(linear_levels)
    made.mipmapLevelBias = bias
    made.minMipmapLevelClamp, made.maxMipmapLevelClamp = levels
    made.borderColor = list(border)
    return cu.cuTexObjectCreate(resource, made, None)
