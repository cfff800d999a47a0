"""Arrays and scalars in device memory."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from preheat.devices import base, dlpack
from preheat.devices.active_capture import FROM_HOST, SET_SCALAR, TO_HOST
from preheat.devices.base import ON_HOST
from preheat.devices.context import Context
from preheat.devices.host import convert, element_bytes, host_array, host_bytes, shape_of
from preheat.devices.memory import Buffer
from preheat.devices.order import Section
from preheat.devices.stream import raw_stream
from preheat.devices.uses import Uses
from preheat.errors import InputError, PreheatError, StaleBufferError, short_repr
from preheat.model.dtypes import DType, dtype_of
from preheat.model.tracebacks import short_methods, shorten_traceback
from preheat.process.lazy import LazyModule

if TYPE_CHECKING:
    import numpy as np
else:
    np = LazyModule("numpy")

__all__ = ["NO_RIGHTS", "Array", "Scalar"]

_COPY = "pass the whole array and index it in the kernel, or take a copy: gpu.array(a.numpy()[…])"
_READ = "a.numpy() has its elements on the host"

#: What `uses` is for an array that can no longer be used.
NO_RIGHTS = Uses()


@short_methods(without={"require_usable"})
class Array:
    """A contiguous array in device memory.

    `gpu.array`, `gpu.zeros` and `gpu.empty` make arrays. `close`, the end of a `with` block and
    dropping the last view free the memory. torch, CuPy, NumPy (on the emulator) and others take the
    array without a copy, by DLPack or CUDA's array interface. `a[3]`, `a[2:5]`, `a[3, 2:5]` and
    `a.reshape(…)` are views, which share the memory.

    Attributes:
        shape: The extents.
        dtype: The element type, a `DType`.

    Examples:
        >>> a = gpu.array(np.arange(6, dtype="float32")).reshape(2, 3)
        >>> a[1, 1:].numpy()
        array([4., 5.], dtype=float32)
    """

    __slots__ = ("__weakref__", "address", "buffer", "dtype", "shape", "uses")

    # A fast launch reads only `uses.writer`, `dtype` and `address`. A stream belongs to one device, and
    # `uses.writer` is None once the memory is freed. So one identity test shows that the memory is
    # valid, on this device, and usable in this stream without waiting. `uses` belongs to the buffer,
    # unless the array is scratch memory whose frame has ended.
    uses: Uses

    _RECREATE = "make the array again: gpu.array(…)"

    def __init__(self, buffer: Buffer, dtype: DType, shape: tuple[int, ...], offset: int = 0) -> None:
        self.buffer = buffer
        self.dtype = dtype
        self.shape = shape
        self.address = buffer.address + offset
        self.uses = buffer.uses_for(self)

    @classmethod
    def new(cls, context: Context, shape: tuple[int, ...], dtype: DType, home: base.Stream) -> Array:
        """Allocate an array with undefined contents."""
        size = math.prod(shape) * dtype.size
        if size >= 1 << 48:
            raise InputError(
                f"an array of shape {shape} and {dtype} has {size:,} bytes, more than any device"
            )
        return cls(Buffer(context, size, home), dtype, shape)

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The number of bytes."""
        return self.size * self.dtype.size

    @property
    def device(self) -> str:
        """The name of the device, such as `cuda:0`."""
        return self.buffer.context.device.name

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("an array without axes has no length")
        return self.shape[0]

    def __getitem__(self, index: Any) -> Array:
        """Return a contiguous view: integers for leading axes, then one slice with step 1."""
        try:
            return self._view(index)
        except PreheatError as error:
            shorten_traceback(error)
            raise

    def _view(self, index: Any) -> Array:
        parts = index if isinstance(index, tuple) else (index,)
        parts = parts[:-1] if parts and parts[-1] is ... else parts
        if len(parts) > self.ndim:
            many = f"{len(parts)} {'index' if len(parts) == 1 else 'indices'}"
            raise InputError(f"{self!r} has {self.ndim} axes and cannot take {many}", hint=_READ)
        kept: tuple[int, ...] = ()
        offset = self.address - self.buffer.address
        for axis, part in enumerate(parts):
            if kept and not (isinstance(part, slice) and part == slice(None)):
                raise InputError(
                    f"{self!r}: an index after a slice selects elements that are not contiguous",
                    hint=_COPY,
                )
            start, extent = _axis_span(self.shape, axis, part)
            offset += start * math.prod(self.shape[axis + 1 :]) * self.dtype.size
            kept += extent
        return Array(self.buffer, self.dtype, (*kept, *self.shape[len(parts) :]), offset)

    def reshape(self, *shape: Any) -> Array:
        """Return a view of the same elements with another shape. One extent may be -1.

        Raises:
            InputError: The shape has another number of elements.

        Examples:
            >>> gpu.zeros(6).reshape(2, -1).shape
            (2, 3)
        """
        wanted = shape[0] if len(shape) == 1 else shape
        extents = [wanted] if not isinstance(wanted, Sequence) else list(wanted)
        if extents.count(-1) == 1:
            at = extents.index(-1)
            rest = math.prod(shape_of([n for n in extents if n != -1]))
            extents[at] = self.size // rest if rest else 0
        new_shape = shape_of(extents)
        if math.prod(new_shape) != self.size:
            raise InputError(f"{self!r} has {self.size} elements, and cannot be reshaped to {wanted!r}")
        return Array(self.buffer, self.dtype, new_shape, self.address - self.buffer.address)

    def __repr__(self) -> str:
        state = "" if self.buffer.open else ", freed"
        if self.buffer.open and self.buffer.context.lost is not None:
            state = ", lost"
        shape = list(self.shape) if self.shape else ""
        return f"<{type(self).__name__} {self.dtype}{shape} on {self.device}{state}>"

    # Contents

    def numpy(self, dtype: object = None) -> np.ndarray[Any, Any]:
        """Copy the array to the host after all work on it.

        Args:
            dtype: A type to convert to. Types that NumPy lacks, such as bfloat16, are returned as raw
                bits, or as numbers with a `dtype`.

        Raises:
            StaleBufferError: The memory was freed, or lost in a reset.

        Examples:
            >>> gpu.array([1.5, 2.5], "bfloat16").numpy("float32")
            array([1.5, 2.5], dtype=float32)
        """
        wanted = None if dtype is None else dtype_of(dtype)

        self.require_usable("numpy()")
        self.buffer.context.refuse_in_capture(TO_HOST)
        out = np.empty(self.shape, self.dtype.numpy())
        if out.nbytes:
            flat = host_bytes(out)
            stream = self._stream
            with self._section(stream, write=False):
                self._device.copy_out(flat, self.address, stream)
        return convert(out, self.dtype, wanted)

    def write(self, data: object) -> Array:
        """Copy `data`, which has the same shape, from the host, and return the array.

        Raises:
            InputError: The shape is another one.

        Examples:
            >>> gpu.zeros(2).write([3, 4]).numpy()
            array([3., 4.], dtype=float32)
        """
        self.require_usable("write()")
        self.buffer.context.refuse_in_capture(FROM_HOST)
        host = host_array(data, self.dtype)
        if host.shape != self.shape:
            raise InputError(f"cannot write shape {host.shape} into an array of shape {self.shape}")
        if host.nbytes:
            flat = host_bytes(host)
            stream = self._stream
            with self._section(stream, write=True):
                self._device.copy_in(self.address, flat, stream)
        return self

    def fill(self, value: complex) -> Array:
        """Set every element, and return the array.

        Examples:
            >>> gpu.empty(3, "int32").fill(7).numpy()
            array([7, 7, 7], dtype=int32)
        """
        self.require_usable("fill()")
        capture = self.buffer.context.active_capture()
        if capture is None:
            self._fill(element_bytes(value, self.dtype))
            return self
        with capture.operation(), capture.streams.ordered(capture.stream, {self.buffer.uses: True}):
            pattern = element_bytes(value, self.dtype)
            capture.add_fill(self, pattern, self._fill(pattern, capture.stream))
        return self

    def _fill(self, pattern: bytes, captured: base.Stream | None = None) -> int:
        """Set every element, with or without a capture, and return the number of operations."""
        if not self.size:
            return 0
        if len(pattern) > 8:  # The device has no such fill, so the elements are copied from the host.
            self.write(np.frombuffer(pattern * self.size, self.dtype.numpy()).reshape(self.shape))
            return 0
        if captured is not None:
            return _submit_fill(self, captured, pattern)
        stream = self._stream
        with self._section(stream, write=True):
            return _submit_fill(self, stream, pattern)

    @property
    def _stream(self) -> base.Stream:
        """The default stream for work on this array: one that need not wait, or the home stream."""
        return self.buffer.uses.writer or self.buffer.home

    def _section(self, stream: base.Stream, *, write: bool) -> Section:
        return self.buffer.context.order.section(stream, {self.buffer.uses: write})

    def copy_from(self, other: Array) -> Array:
        """Copy another array of this device with the same shape and type, and return this array.

        Examples:
            >>> x = gpu.array([1, 2, 3], "float32")
            >>> gpu.empty(3).copy_from(x).numpy()
            array([1., 2., 3.], dtype=float32)
        """
        self.require_usable("copy_from()")
        if not isinstance(other, Array):
            raise InputError(
                f"copy_from() takes an array of {self.device}, not {type(other).__name__}",
                hint="write(…) copies from the host, gpu.array(…) from another library",
            )
        other.require_usable("copy_from()")
        context = self.buffer.context
        alike = (other.shape, other.dtype) == (self.shape, self.dtype)
        if not alike or other.buffer.context is not context:
            raise InputError(f"cannot copy {other!r} into {self!r}")
        if not self.nbytes:
            return self
        uses = {other.buffer.uses: False} | {self.buffer.uses: True}
        capture = context.active_capture()
        if capture is not None:
            with capture.operation(), capture.streams.ordered(capture.stream, uses):
                self._device.copy(self.address, other.address, self.nbytes, capture.stream)
                capture.add_copy(self, other)
            return self
        stream = self._stream
        with context.order.section(stream, uses):
            self._device.copy(self.address, other.address, self.nbytes, stream)
        return self

    # Lifetime

    def close(self) -> None:
        """Free the memory of this array and all its views after the queued work.

        A second call does nothing.

        Examples:
            >>> x = gpu.zeros(4)
            >>> x.close()
        """
        self.buffer.close()

    def __enter__(self) -> Array:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _device(self) -> base.Device:
        return self.buffer.context.device

    def require_usable(self, doing: str) -> None:
        """Raise if the memory can no longer be used. `doing` names the operation."""
        if self.buffer.lost is not None:
            raise StaleBufferError(doing, f"{self!r}: {self.buffer.lost}", hint=self.remedy)

    @property
    def remedy(self) -> str | None:
        """The hint for memory that was lost with its context."""
        return self.buffer.context.remedy(self._RECREATE) if self.buffer.open else None

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
            raise BufferError("an array is exported on its own device only, and without a copy")
        self.require_usable("export")
        versioned = max_version is not None and max_version[0] >= 1
        return dlpack.export_array(self, stream, versioned=versioned)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if self._device.dlpack[0] == ON_HOST:
            raise AttributeError("the emulator's arrays are not in CUDA memory")
        self.require_usable("export")
        return dlpack.cuda_interface(self)

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("an array is not copied to the host implicitly: use .numpy()")


def _submit_fill(array: Array, stream: base.Stream, pattern: bytes) -> int:
    """Set every element in `stream`; return the number of operations that it took."""
    context = array.buffer.context
    by_kernel = context.kernel_fill
    if by_kernel is not None and by_kernel(array.address, pattern, array.size, stream):
        return 1
    return context.device.fill(array.address, pattern, array.size, stream)


def _axis_span(shape: tuple[int, ...], axis: int, part: Any) -> tuple[int, tuple[int, ...]]:
    """Return where an index of one axis begins, and the extent that remains of the axis."""
    extent = shape[axis]
    which = "the first axis" if axis == 0 else f"axis {axis}"
    if isinstance(part, slice):
        try:
            start, stop, step = part.indices(extent)
        except TypeError:
            raise InputError(f"a slice of {which} takes integers, not {short_repr(part)}") from None
        if step != 1:
            raise InputError(f"a slice of {which} has step 1, not {step}", hint=_COPY)
        return start, (max(stop - start, 0),)
    try:
        if isinstance(part, bool):
            raise TypeError
        at = operator.index(part)
    except TypeError:
        why = f"an array is indexed by integers and slices, not by {short_repr(part)}"
        raise InputError(why, hint=_COPY) from None
    if not -extent <= at < extent:
        raise IndexError(f"index {at} is outside {which} of {shape}")
    return at % extent, ()


@short_methods()
class Scalar(Array):
    """One value at a fixed device address, made by `gpu.scalar`.

    Kernels take it as a pointer and read its latest value. A graph sets it by its name at each replay.

    Examples:
        >>> factor = gpu.scalar("float32", 2.0, name="factor")
        >>> SCALE = 'extern "C" __global__ void scale(float* x, const float* by) { *x *= *by; }'
        >>> scale, x = gpu.kernel(SCALE, "scale"), gpu.array([1.0], "float32")
        >>> with gpu.capture() as graph:
        ...     scale[1, 1](x, factor)
        >>> graph.replay(factor=5)
        >>> x.numpy()
        array([5.], dtype=float32)
    """

    __slots__ = ("name",)

    _RECREATE = "make the scalar again: gpu.scalar(…)"

    def __init__(self, buffer: Buffer, dtype: DType, name: str | None = None) -> None:
        super().__init__(buffer, dtype, ())
        self.name = name

    def set(self, value: complex, *, stream: object = None) -> None:
        """Set the value for work that is submitted from now on.

        Work in any stream that reads the scalar is ordered with the write: work that was submitted
        before reads the old value.

        Args:
            value: The new value.
            stream: The stream of the write, which happens after the work that is queued there.

        Examples:
            >>> step = gpu.scalar("int32")
            >>> step.set(3)
            >>> step.get()
            3
        """
        self.require_usable("set()")
        context = self.buffer.context
        device = self._device
        target = self._stream if stream is None else raw_stream(context, stream)
        context.refuse_in_capture(SET_SCALAR, target)
        data = element_bytes(value, self.dtype)
        with self._section(target, write=True):
            status = device.setter([(self.address, self.dtype.size)], target)(data)
        if status[0]:
            device.check(status, f"setting {self!r}")

    def fill(self, value: complex) -> Scalar:
        """Set the value, and return the scalar.

        Examples:
            >>> gpu.scalar("int32").fill(4).get()
            4
        """
        self.set(value)
        return self

    def get(self) -> Any:
        """Return the value after all work that was submitted so far.

        Examples:
            >>> gpu.scalar("float64", 0.5).get()
            0.5
        """
        return self.numpy("float32" if self.dtype.name == "bfloat16" else None)[()].item()

    def __repr__(self) -> str:
        plain = super().__repr__()
        return plain.replace("Scalar", f"Scalar {self.name!r}", 1) if self.name else plain
