"""Arrays and scalars in device memory."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from preheat.devices import base
from preheat.devices.base import ON_HOST
from preheat.dtypes import DType
from preheat.errors import InputError, StaleBufferError
from preheat.runtime import dlpack
from preheat.runtime.context import Context, Tag
from preheat.runtime.host import bfloat16_value, element_bytes, host_array, host_bytes, shape_of
from preheat.runtime.memory import Buffer, use_of
from preheat.runtime.window import FROM_HOST, SET, TO_HOST

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Array", "Scalar"]

_LEGACY_STREAM = 1  # CUDA's number for the stream that DLPack means by none


class Array:
    """A contiguous array in device memory. `close`, `with` or dropping it give the memory back.

    torch, CuPy, NumPy (on the emulator) and others take it without a copy, by DLPack or the array
    interfaces. `a[3]` and `a[2:5]` are views of the first axis that share the memory, and so is
    `a.reshape(…)`.
    """

    __slots__ = ("__weakref__", "address", "buffer", "dtype", "shape", "tag")

    # Launches read `tag` and `address` alone: one identity test says that the memory is alive, where
    # it is and what it holds. `tag` is None from the moment the memory is gone.
    tag: Tag | None

    def __init__(self, buffer: Buffer, dtype: DType, shape: tuple[int, ...], offset: int = 0) -> None:
        self.buffer, self.dtype, self.shape = buffer, dtype, shape
        self.address = buffer.address + offset
        self.tag = buffer.context.tags(buffer.home)[dtype]
        buffer.tell(self)
        if not buffer.open:  # closed before it could tell us
            self.tag = None

    @classmethod
    def new(cls, context: Context, shape: tuple[int, ...], dtype: DType, home: base.Stream) -> Array:
        """Fresh memory, holding nothing in particular."""
        size = math.prod(shape) * dtype.size
        if size >= 1 << 48:
            raise InputError(f"an array of shape {shape} and {dtype} has {size:,} bytes")
        return cls(Buffer(context, size, home), dtype, shape)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.size * self.dtype.size

    @property
    def device(self) -> str:
        """Name of the device it lives on, such as `cuda:0`."""
        return self.buffer.context.device.name

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("an array without axes has no length")
        return self.shape[0]

    def __getitem__(self, index: int | slice) -> Array:
        if not self.shape:
            raise InputError("an array without axes cannot be sliced")
        row = math.prod(self.shape[1:]) * self.dtype.size
        offset = self.address - self.buffer.address
        if isinstance(index, slice):
            start, stop, step = index.indices(self.shape[0])
            if step != 1:
                raise InputError(f"a slice of the first axis has step 1, not {step}")
            shape = (max(stop - start, 0), *self.shape[1:])
            return Array(self.buffer, self.dtype, shape, offset + start * row)
        at = operator.index(index)
        if not -self.shape[0] <= at < self.shape[0]:
            raise IndexError(f"index {at} is outside the first axis of {self.shape}")
        return Array(self.buffer, self.dtype, self.shape[1:], offset + at % self.shape[0] * row)

    def reshape(self, *shape: Any) -> Array:
        """A view of the same elements with other axes; one extent may be -1, for what is left."""
        wanted = shape[0] if len(shape) == 1 else shape
        extents = [wanted] if not isinstance(wanted, Sequence) else list(wanted)
        if extents.count(-1) == 1:
            at, rest = extents.index(-1), math.prod(shape_of([n for n in extents if n != -1]))
            extents[at] = self.size // rest if rest else 0
        made = shape_of(extents)
        if math.prod(made) != self.size:
            raise InputError(f"{self!r} has {self.size} elements, which no shape {wanted!r} holds")
        return Array(self.buffer, self.dtype, made, self.address - self.buffer.address)

    def __repr__(self) -> str:
        state = "" if self.buffer.open else ", freed"
        if self.buffer.open and self.buffer.context.lost is not None:
            state = ", lost"
        shape = list(self.shape) if self.shape else ""
        return f"<{type(self).__name__} {self.dtype}{shape} on {self.device}{state}>"

    # Contents

    def numpy(self) -> np.ndarray[Any, Any]:
        """A copy on the host, after all work on this array. Types NumPy lacks come as raw bits."""
        import numpy

        self._require("numpy()")
        self.buffer.context.forbid(TO_HOST)
        out = numpy.empty(self.shape, self.dtype.numpy())
        if out.nbytes:
            self.buffer.settle()
            home, flat = self.buffer.home, host_bytes(out)
            self._device.copy_out(flat, self.address, home)
        return out

    def write(self, data: object) -> Array:
        """Copy `data`, of this shape, from the host into this array; returns the array."""
        self._require("write()")
        self.buffer.context.forbid(FROM_HOST)
        host = host_array(data, self.dtype)
        if host.shape != self.shape:
            raise InputError(f"cannot write shape {host.shape} into an array of shape {self.shape}")
        if host.nbytes:
            self.buffer.settle()
            home, flat = self.buffer.home, host_bytes(host)
            self._device.copy_in(self.address, flat, home)
        return self

    def fill(self, value: complex) -> Array:
        """Set every element; returns the array."""
        self._require("fill()")
        window = self.buffer.context.window()
        if window is None:
            self._fill(value)
            return self
        with window.attempt():
            pattern, pieces = self._fill(value, window.stream)
            window.filled(self, pattern, pieces)
        return self

    def _fill(self, value: complex, stream: base.Stream | None = None) -> tuple[bytes, int]:
        """Set every element, in a captured stream or at home; the bytes of one, and how many pieces."""
        pattern = element_bytes(value, self.dtype)
        # Sixteen bytes are no pattern the device knows, so go through the host.
        if len(pattern) > 8:
            self.write(host_array(value, self.dtype).repeat(self.size).reshape(self.shape))
            return pattern, 0
        if stream is None:
            self.buffer.settle()
            stream = self.buffer.home
        pieces = self._device.fill(self.address, pattern, self.size, stream) if self.size else 0
        return pattern, pieces

    def copy_from(self, other: Array) -> Array:
        """Copy another array of the same shape and type on this device; returns the array."""
        self._require("copy_from()")
        other._require("copy_from()")
        alike = (other.shape, other.dtype) == (self.shape, self.dtype)
        if not alike or other.buffer.context is not self.buffer.context:
            raise InputError(f"cannot copy {other!r} into {self!r}")
        if not self.nbytes:
            return self
        window, home = self.buffer.context.window(), self.buffer.home
        if window is not None:
            with window.attempt():
                self._device.copy(self.address, other.address, self.nbytes, window.stream)
                window.copied(self, other)
            return self
        self.buffer.settle()
        other.buffer.settle()
        other.buffer.before(home)
        self._device.copy(self.address, other.address, self.nbytes, home)
        other.buffer.after(home, use_of(self.buffer.context, home))
        return self

    # Life

    def close(self) -> None:
        """Give the memory back, for every view of it, after the work now queued. Twice is fine."""
        self.buffer.close()

    def expire(self, reason: str) -> None:
        """Told by the buffer: the memory is gone."""
        del reason
        self.tag = None

    def __enter__(self) -> Array:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _device(self) -> base.Device:
        return self.buffer.context.device

    def _require(self, doing: str) -> None:
        if self.buffer.lost is not None:
            raise StaleBufferError(doing, f"{self!r}: {self.buffer.lost}")

    # Other libraries

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device.dlpack

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        if copy or (dl_device is not None and tuple(dl_device) != self._device.dlpack):
            raise BufferError("an array is exported where it lives, without a copy")
        self._export(stream)
        versioned = max_version is not None and max_version[0] >= 1
        place = self._device.dlpack
        return dlpack.capsule(self, self.address, self.shape, self.dtype, place, versioned=versioned)

    def _export(self, stream: int | None) -> None:
        """Hand the memory to a library that will use it in `stream`; -1 asks for no ordering."""
        self._require("export")
        self.buffer.export()
        window = self.buffer.context.window()
        if window is not None:  # whoever replays puts the graph in its place
            window.exported(self)
            return
        self.buffer.settle()
        if self._device.dlpack[0] != ON_HOST and stream != -1:
            stream = _LEGACY_STREAM if stream is None else stream
            self.buffer.before(self.buffer.context.adopt(stream))

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if self._device.dlpack[0] == ON_HOST:
            raise AttributeError("the emulator's arrays are not in CUDA memory")
        self._export(None)  # for those who do not read which stream it is
        captured = self.buffer.context.window() is not None  # then nobody may wait for it
        stream = None if captured else self.buffer.home.handle or _LEGACY_STREAM
        return {**self._interface(), "stream": stream}

    @property
    def __array_interface__(self) -> dict[str, Any]:
        if self._device.dlpack[0] != ON_HOST:
            raise AttributeError("this array is in CUDA memory: use .numpy()")
        self._export(None)
        return self._interface()

    def __array__(self, *_: Any, **__: Any) -> Any:
        # NumPy asks the interface above first, so this is reached on a GPU alone.
        raise TypeError("a copy to the host is never made in passing: use .numpy()")

    def _interface(self) -> dict[str, Any]:
        return {
            "version": 3,
            "shape": self.shape,
            "typestr": self.dtype.typestr,
            "data": (self.address, False),
            "strides": None,
        }


class Scalar(Array):
    """One value at a fixed device address: kernels take it as a pointer and read its newest value."""

    __slots__ = ("name",)

    def __init__(self, buffer: Buffer, dtype: DType, name: str | None = None) -> None:
        super().__init__(buffer, dtype, ())
        self.name = name

    def set(self, value: complex) -> None:
        """Give it a new value, seen by work submitted from here on; the value travels by value."""
        self.fill(value)

    def fill(self, value: complex) -> Scalar:
        """The same; returns the scalar."""
        self.buffer.context.forbid(SET)
        super().fill(value)
        return self

    def get(self) -> Any:
        """Its value, after all work submitted so far."""
        value = self.numpy()[()].item()
        return bfloat16_value(value) if self.dtype.name == "bfloat16" else value

    def __repr__(self) -> str:
        plain = super().__repr__()
        return plain.replace("Scalar", f"Scalar {self.name!r}", 1) if self.name else plain
