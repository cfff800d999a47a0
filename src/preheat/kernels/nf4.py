"""NF4, the 4-bit format of QLoRA: codes for 16 values, and a scale for every 64 elements.

The layout is bitsandbytes', without double quantisation: elements in row-major order regardless
of row ends, two codes per byte with the first in the upper four bits, scales in float32.
"""

from __future__ import annotations

import math
from numbers import Integral
from typing import TYPE_CHECKING, Any, NamedTuple

from preheat.errors import InputError
from preheat.model.dtypes import dtype_of
from preheat.process.lazy import LazyModule

if TYPE_CHECKING:
    import numpy as np

    from preheat.gpu import Gpu
else:
    np = LazyModule("numpy")

__all__ = ["BLOCK", "VALUES", "Nf4", "dequantize", "quantize"]

#: The number of elements that share a scale.
BLOCK = 64

#: The values of the codes 0 to 15, as in gemm.cu: quantiles of the normal distribution.
VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


class Nf4(NamedTuple):
    """A matrix that is quantised to four bits, on the host or on a device.

    Attributes:
        codes: The codes, two in a byte (uint8), flat.
        scales: The scale of each block of elements (float32), flat.
        shape: The shape of the matrix.

    Examples:
        >>> from preheat.kernels.nf4 import Nf4
        >>> weights = Nf4(np.zeros(64, "uint8"), np.ones(2, "float32"), (8, 16)).on(gpu)
        >>> weights.codes
        <Array uint8[64] on emulator:0>
    """

    codes: Any
    scales: Any
    shape: tuple[int, int]

    def check(self) -> None:
        """Raise unless codes and scales have the shapes and types for a matrix of this shape.

        Raises:
            InputError: The codes, the scales or the shape are wrong.

        Examples:
            >>> from preheat.kernels.nf4 import Nf4
            >>> Nf4(np.zeros(64, "uint8"), np.ones(2, "float32"), (8, 16)).check()
        """
        sizes: tuple[Any, ...] = self.shape if isinstance(self.shape, tuple) else ()
        if len(sizes) != 2 or not all(isinstance(each, Integral) and int(each) > 0 for each in sizes):
            raise InputError(f"shape {self.shape!r} is not the shape of a matrix")
        size = math.prod(self.shape)
        for what, given, kind, wanted in (
            ("codes", self.codes, "uint8", -(-size // 2)),
            ("scales", self.scales, "float32", -(-size // BLOCK)),
        ):
            if tuple(given.shape) != (wanted,) or dtype_of(given.dtype).name != kind:
                raise InputError(
                    f"{what} of a {self.shape} matrix are {kind} of shape {(wanted,)}, "
                    f"not {dtype_of(given.dtype)} of shape {tuple(given.shape)}"
                )

    def on(self, gpu: Gpu) -> Nf4:
        """Return a copy on a device.

        Examples:
            >>> from preheat.kernels.nf4 import Nf4
            >>> weights = Nf4(np.zeros(64, "uint8"), np.ones(2, "float32"), (8, 16)).on(gpu)
        """
        return self._replace(codes=gpu.array(self.codes), scales=gpu.array(self.scales))


def quantize(weight: Any) -> Nf4:
    """Quantize a matrix on the host to NF4.

    Each element is divided by the largest magnitude of its block and rounded to the nearest value;
    halfway between two values, to the lower one.
    """
    matrix = _matrix(weight)
    if matrix.ndim != 2 or not matrix.size:
        raise InputError(f"weight of shape {matrix.shape} is not a matrix with elements")
    if not np.isfinite(matrix).all():
        raise InputError("weight has elements that are infinite or not a number")
    size = matrix.size
    blocks = np.pad(matrix.ravel(), (0, -size % BLOCK)).reshape(-1, BLOCK)
    scales = np.abs(blocks).max(axis=1)
    relative = blocks / np.where(scales > 0, scales, 1)[:, None]
    values = _values()
    codes = np.searchsorted((values[1:] + values[:-1]) / 2, relative).astype("uint8").ravel()
    packed = codes[0::2] << 4 | codes[1::2]
    return Nf4(packed[: -(-size // 2)], scales, (matrix.shape[0], matrix.shape[1]))


def dequantize(quantized: Nf4) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return the matrix that `quantized` represents. Kernels round it to the type of the product."""
    if not isinstance(quantized, Nf4):
        raise InputError(f"quantized is {type(quantized).__name__}, not an Nf4")
    for name in ("codes", "scales"):
        if not isinstance(given := getattr(quantized, name), np.ndarray):
            hint = f"copy it to the host first: {name}.numpy()"
            raise InputError(f"{name} is {type(given).__name__}, not a NumPy array", hint=hint)
    quantized.check()
    codes, scales, shape = quantized
    size = math.prod(shape)
    flat = np.stack([codes >> 4, codes & 15], axis=1).ravel()[:size]
    matrix: np.ndarray[Any, np.dtype[np.float32]] = _values()[flat] * np.repeat(scales, BLOCK)[:size]
    return matrix.reshape(shape)


def _matrix(weight: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return a weight as a float32 array."""
    try:
        matrix = np.asarray(weight)
        if np.iscomplexobj(matrix):
            raise TypeError(f"{matrix.dtype} has an imaginary part")
        with np.errstate(over="ignore"):
            return matrix.astype("float32", copy=False)
    except (
        TypeError,
        ValueError,
        OverflowError,
        RuntimeError,
    ) as error:  # Libraries raise different ones.
        raise InputError(f"weight cannot be read as float32: {error}") from None


def _values() -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.array(VALUES, "float32")
