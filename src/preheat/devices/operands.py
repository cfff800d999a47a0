"""Tensors of other libraries as kernel arguments without a copy: torch, CuPy, Numba, JAX, NumPy."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from preheat.devices import dlpack
from preheat.devices.base import LEGACY_STREAMS, ON_GPU, ON_HOST, Device
from preheat.devices.libraries import LIBRARIES, Library
from preheat.errors import InputError
from preheat.model.dtypes import DType, dtype_of, dtype_of_typestr
from preheat.process.lazy import LazyModule

if TYPE_CHECKING:
    import numpy as np
else:
    np = LazyModule("numpy")

__all__ = [
    "Operand", "Pointer", "Strided", "TensorKind", "is_plain_tensor", "native_readers", "strided",
    "tensor_kind",
]  # fmt: skip

_MANAGED = {3, 13}  # pinned host memory and managed memory: every GPU reaches them
_COPY = "pass a copy on the device: gpu.array(x)"
_PERMIT = (
    '; for tests, preheat.device("emulator", host_arrays=True) or PREHEAT_DEVICE='
    "'emulator[host_arrays]' accepts host memory"
)
_text = functools.cache(str)  # of the layouts of torch, which are few


class Pointer(NamedTuple):
    """A bare device address, for memory that preheat does not know and cannot check.

    Examples:
        >>> SET = 'extern "C" __global__ void set(int* x) { *x = 1; }'
        >>> x = gpu.zeros(1, "int32")
        >>> gpu.kernel(SET, "set")[1, 1](preheat.Pointer(x.address))  # or tensor.data_ptr()
        >>> x.numpy()
        array([1], dtype=int32)
    """

    address: int


class Strided(NamedTuple):
    """A tensor that is passed although it is not contiguous: see `strided`.

    With `any_dtype`, its elements need not have the type that the parameter points at.
    """

    array: Any
    any_dtype: bool = False

    def __repr__(self) -> str:
        return f"strided({type(self.array).__name__})"  # An address would differ in each run.


def strided(array: Any) -> Strided:
    """Pass a tensor that is not contiguous to a kernel that takes its strides as arguments.

    The kernel gets the address of the first element. Without this, a launch refuses such a tensor,
    because most kernels would read the wrong elements.

    Args:
        array: A tensor of any library on the device.

    Raises:
        InputError: The argument is not a tensor.

    Examples:
        >>> preheat.strided(np.zeros((4, 4), "float32")[:, 0])
        strided(ndarray)
    """
    if not hasattr(array, "shape") or not hasattr(array, "dtype"):
        raise InputError(f"strided takes an array or a tensor, not {type(array).__name__}")
    return Strided(array)


class Operand(NamedTuple):
    """Memory of a tensor in one launch.

    `nbytes` extend from the lowest element to the end of the highest one. `address` is where the first
    element begins, which is `offset` bytes above the lowest. `ready` is the stream whose work must
    complete first, if any. `owner` keeps the memory alive, independently of the tensor.
    """

    address: int
    nbytes: int
    dtype: DType | None
    device: tuple[int, int]
    owner: object
    contiguous: bool = True
    ready: int | None = None
    writable: bool = True
    offset: int = 0

    def is_usable_on(self, device: Device) -> bool:
        """Return True when kernels on a device can use the memory."""
        if self.device[0] == ON_HOST:
            host = device.host_memory
            return host is not None and host.accepts(self.start, self.nbytes)
        on_gpu = device.dlpack[0] == ON_GPU
        return self.device == device.dlpack or (on_gpu and self.device[0] in _MANAGED)

    def remedy(self, device: Device) -> str | None:
        """Return the hint for memory that kernels on a device cannot use."""
        if self.device[0] != ON_HOST:
            return None
        return _COPY + (_PERMIT if device.dlpack[0] == ON_HOST else "")

    @property
    def place(self) -> str:
        """The location of the memory, for messages."""
        return "host memory" if self.device[0] == ON_HOST else f"the memory of GPU {self.device[1]}"

    @property
    def start(self) -> int:
        """The address of the lowest element."""
        return self.address - self.offset


class TensorKind(NamedTuple):
    """How to read tensors of one type. `source` is their library, if it has its own streams."""

    library: str
    read: Callable[[Any, int], Operand]
    source: Library | None = None


def tensor_kind(value: object) -> TensorKind | None:
    """Return how to read `value`, or None if it is not a tensor of another library."""
    kind = type(value)
    try:
        return _kinds[kind]
    except KeyError:
        pass
    return _kinds.setdefault(kind, _find(kind))


def _from_torch(value: Any, stream: int) -> Operand:
    del stream  # The launch itself orders its work with torch's current stream.
    fault = _memory_fault(value)
    if fault is not None:
        raise InputError(fault[0], hint=fault[1])
    place = value.get_device()
    dtype = _torch_dtype(value.dtype)
    if place < 0:
        return _from_torch_on_host(value, dtype)
    address, nbytes = value.data_ptr(), value.nbytes
    if nbytes and not address:
        raise InputError(f"{type(value).__name__} has no memory of its own", hint="pass what it wraps")
    dense = value.is_contiguous()
    offset = 0
    if not dense:
        steps = [step * value.itemsize for step in value.stride()]
        offset, nbytes, _ = _span(value.shape, steps, value.itemsize)
    device = (_place_of(value), place)
    owner = value.untyped_storage()  # `value.data = other` does not change it.
    return Operand(address, nbytes, dtype, device, owner, dense, offset=offset)


def _place_of(value: Any) -> int:
    """Return DLPack's number for the kind of device a tensor is on."""
    return ON_GPU if getattr(value, "is_cuda", False) else int(value.__dlpack_device__()[0])


def _memory_fault(value: Any) -> tuple[str, str] | None:
    """Return why the memory of a torch tensor does not hold its values, and a hint; None if it does."""
    if value.is_conj():
        return "the tensor is conjugated, and its memory is not", "x.resolve_conj()"
    if value.is_neg():
        return "the tensor is negated, and its memory is not", "x.resolve_neg()"
    layout = _text(value.layout)
    if layout != "torch.strided":
        return f"a tensor of layout {layout} has no plain address", "x.to_dense()"
    return None


def is_plain_tensor(value: Any, device: tuple[int, int]) -> bool:
    """Return True for a plain tensor of torch on `device`, which needs no `Operand`."""
    return bool(
        _memory_fault(value) is None
        and value.get_device() == device[1]
        and _place_of(value) == device[0]
        and value.data_ptr()
    )


def _from_torch_on_host(value: Any, dtype: DType | None) -> Operand:
    if value.device.type != "cpu":
        raise InputError(f"a tensor on {value.device} has no memory that a kernel can use")
    host = value.detach()
    if dtype is not None and dtype.host != dtype.name:  # NumPy lacks the type.
        host = host.view(getattr(sys.modules["torch"], dtype.host))
    return _from_host(host.numpy(), 0)._replace(dtype=dtype, owner=value.untyped_storage())


def _from_cupy(value: Any, stream: int) -> Operand:
    del stream
    dtype = dtype_of_typestr(value.dtype.str)
    device = (_place_of(value), value.device.id)
    dense = bool(value.flags.c_contiguous)
    offset, nbytes, _ = _span(value.shape, None if dense else value.strides, value.dtype.itemsize)
    return Operand(value.data.ptr, nbytes, dtype, device, value.data, dense, offset=offset)


def _from_cuda_interface(value: Any, stream: int) -> Operand:
    del stream
    face = value.__cuda_array_interface__
    address, read_only = face["data"]
    index = getattr(getattr(value, "device", None), "id", 0)
    offset, nbytes, dense = _span(face["shape"], face.get("strides"), _itemsize(face))
    return Operand(
        address=address,
        nbytes=nbytes,
        contiguous=dense,
        dtype=dtype_of_typestr(face["typestr"]),
        device=(ON_GPU, index if isinstance(index, int) else 0),
        owner=(value, getattr(value, "gpu_data", None)),  # the memory of an array of Numba
        ready=face.get("stream"),
        writable=not read_only,
        offset=offset,
    )


def _from_host(value: Any, stream: int) -> Operand:
    del stream
    face = value.__array_interface__
    address, read_only = face["data"]
    dtype = dtype_of_typestr(face["typestr"])
    offset, nbytes, dense = _span(face["shape"], face.get("strides"), _itemsize(face))
    return Operand(
        address, nbytes, dtype, (ON_HOST, 0), value, dense, writable=not read_only, offset=offset
    )


def _from_dlpack(value: Any, stream: int) -> Operand:
    on_host = value.__dlpack_device__()[0] == ON_HOST
    arguments = {} if on_host else {"stream": stream or LEGACY_STREAMS[-1]}  # DLPack has no stream 0
    try:
        try:
            capsule = value.__dlpack__(**arguments, max_version=(1, 0))
        except TypeError:  # The producer is older than the versions of the protocol.
            capsule = value.__dlpack__(**arguments)
    except BufferError as bad:
        raise InputError(f"{type(value).__name__} cannot be exported: {bad}") from None
    tensor = dlpack.open_capsule(capsule)
    size = tensor.dtype.size if tensor.dtype is not None else 1
    strides = None if tensor.strides is None else tuple(step * size for step in tensor.strides)
    offset, nbytes, dense = _span(tensor.shape, strides, size)
    return Operand(
        address=tensor.address,
        nbytes=nbytes,
        dtype=tensor.dtype,
        device=tensor.device,
        owner=(tensor.owner, value),
        contiguous=dense,
        writable=not tensor.read_only,
        offset=offset,
    )


def _itemsize(face: dict[str, Any]) -> int:
    if face["typestr"].startswith(">"):
        raise InputError("an array of big-endian numbers would have wrong values in a kernel")
    return int(np.dtype(face["typestr"]).itemsize)


def _span(shape: Sequence[int], strides: Sequence[int] | None, size: int) -> tuple[int, int, bool]:
    """Return the bytes below the first element, the bytes of all, and True if contiguous."""
    if 0 in shape or strides is None:
        return 0, size * math.prod(shape), True
    usual = [size * math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    dense = all(n == 1 or step == plain for n, step, plain in zip(shape, strides, usual, strict=True))
    reach = [(n - 1) * step for n, step in zip(shape, strides, strict=True)]
    below = -sum(step for step in reach if step < 0)
    return below, below + sum(step for step in reach if step > 0) + size, dense


_kinds: dict[type, TensorKind | None] = {}

#: How the native core reads tensors of torch and CuPy, by their type: see `Library.native_reader`.
native_readers: dict[type, object] = {}
_READERS: dict[str, Callable[[Any, int], Operand]] = {"torch": _from_torch, "cupy": _from_cupy}


def _find(kind: type) -> TensorKind | None:
    """Return how to read a type. It is called once for each type."""
    for library in LIBRARIES.values():
        if library.is_tensor_type(kind):
            library.inspect()
            reader = library.native_reader(kind)
            if reader is not None:
                native_readers[kind] = reader
            return TensorKind(library.name, _READERS[library.api], library)
    library_name = kind.__module__.partition(".")[0]
    if any((each.__module__, each.__name__) == ("numpy", "ndarray") for each in kind.__mro__):
        return TensorKind(library_name, _from_host)
    if library_name in ("numpy", "preheat"):  # scalars of NumPy, and our arrays
        return None
    if hasattr(kind, "__dlpack__"):
        return TensorKind(library_name, _from_dlpack)
    if hasattr(kind, "__cuda_array_interface__"):
        return TensorKind(library_name, _from_cuda_interface, LIBRARIES.get(library_name))
    return None


@functools.cache
def _torch_dtype(dtype: object) -> DType | None:
    try:
        return dtype_of(dtype)
    except InputError:
        return None
