"""Memory of other libraries, as a kernel argument: torch, CuPy, Numba, JAX, NumPy, without a copy."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from preheat.devices.base import ON_GPU, ON_HOST
from preheat.dtypes import DTYPES, DType, dtype_of, dtype_of_typestr
from preheat.errors import InputError
from preheat.runtime import dlpack

__all__ = ["LIBRARIES", "Kind", "Library", "Operand", "Pointer", "introduce", "kind_of"]

_MANAGED = {3, 13}  # pinned host memory and managed memory: every GPU reaches them


class Pointer(NamedTuple):
    """A bare device address, for memory preheat knows nothing about and so cannot check."""

    address: int


class Operand(NamedTuple):
    """Memory as one launch sees it.

    `nbytes` reach from its first element to the end of the last. `ready` is the stream whose work must
    come first, if any.
    """

    address: int
    nbytes: int
    dtype: DType | None
    device: tuple[int, int]
    owner: object
    contiguous: bool = True
    ready: int | None = None
    writable: bool = True

    def reaches(self, device: tuple[int, int]) -> bool:
        """Whether kernels on `device`, in DLPack's terms, can use it."""
        return self.device == device or (device[0] == ON_GPU and self.device[0] in _MANAGED)


class Library:
    """A library that works in streams of its own, and what it calls element types.

    Known only once a tensor of it was seen: until then `current` raises and `elements` are empty.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.elements: dict[DType, set[object]] = {dtype: set() for dtype in DTYPES.values()}
        self.current: Callable[[int], int] = self._unknown  # the stream it works in now, by GPU

    def _unknown(self, index: int) -> int:
        raise LookupError(f"no tensor of {self.name} was seen yet, on GPU {index} or any other")

    def learn(self, current: Callable[[Any], Callable[[int], int]]) -> Callable[[int], int]:
        """Find out how it is asked; returns what `current` is from now on."""
        module = sys.modules[self.name]
        for dtype, names in self.elements.items():
            named = getattr(module, dtype.name, None)
            if named is not None:
                names.add(named if self.name == "torch" else dtype.numpy())
        self.current = current(module)
        return self.current


#: The libraries whose tensors go to the stream that they themselves work in.
LIBRARIES = {name: Library(name) for name in ("torch", "cupy")}


def _torch_stream(torch: Any) -> Callable[[int], int]:
    quick: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return quick or (lambda index: torch.cuda.current_stream(index).cuda_stream)


def _cupy_stream(cupy: Any) -> Callable[[int], int]:
    current = cupy.cuda.get_current_stream
    return lambda index: current(index).ptr


def introduce(name: str) -> Callable[[int], int]:
    """Get to know a library that is imported; returns how it is asked for its stream on a GPU."""
    return LIBRARIES[name].learn({"torch": _torch_stream, "cupy": _cupy_stream}[name])


class Kind(NamedTuple):
    """How to read tensors of one type; `current` gives the stream its library works in on a GPU."""

    library: str
    read: Callable[[Any, int], Operand]
    current: Callable[[int], int] | None = None


def kind_of(value: object) -> Kind | None:
    """The kind of tensor `value` is, or None when it is none of another library."""
    return kind_of_type(type(value))


def kind_of_type(kind: type) -> Kind | None:
    """The same for all values of a type; found out once."""
    try:
        return _kinds[kind]
    except KeyError:
        return _kinds.setdefault(kind, _find(kind))


def _from_torch(value: Any, stream: int) -> Operand:
    del stream  # launched in torch's own stream, or ordered behind it by the launch
    index = value.get_device()
    if index >= 0:
        place, dtype = (ON_GPU, index), _torch_dtype(value.dtype)
        return Operand(value.data_ptr(), value.nbytes, dtype, place, value, value.is_contiguous())
    host = value.detach()
    dtype = _torch_dtype(value.dtype)
    if dtype is not None and dtype.host != dtype.name:  # NumPy has no such type
        host = host.view(getattr(sys.modules["torch"], dtype.host))
    return _from_host(host.numpy(), 0)._replace(dtype=dtype, owner=value)


def _from_cupy(value: Any, stream: int) -> Operand:
    del stream
    dtype = dtype_of_typestr(value.dtype.str)
    place, dense = (ON_GPU, value.device.id), bool(value.flags.c_contiguous)
    return Operand(value.data.ptr, value.nbytes, dtype, place, value, dense)


def _from_cuda_interface(value: Any, stream: int) -> Operand:
    del stream
    face = value.__cuda_array_interface__
    address, read_only = face["data"]
    index = getattr(getattr(value, "device", None), "id", 0)
    nbytes, dense = _span(face["shape"], face.get("strides"), _itemsize(face))
    return Operand(
        address=address,
        nbytes=nbytes,
        contiguous=dense,
        dtype=dtype_of_typestr(face["typestr"]),
        device=(ON_GPU, index if isinstance(index, int) else 0),
        owner=value,
        ready=face.get("stream"),
        writable=not read_only,
    )


def _from_host(value: Any, stream: int) -> Operand:
    del stream
    face = value.__array_interface__
    address, read_only = face["data"]
    if face["typestr"].startswith(">"):
        raise InputError("an array of big-endian numbers means other numbers to a kernel")
    dtype = dtype_of_typestr(face["typestr"])
    nbytes, dense = _span(face["shape"], face.get("strides"), _itemsize(face))
    return Operand(address, nbytes, dtype, (ON_HOST, 0), value, dense, writable=not read_only)


def _from_dlpack(value: Any, stream: int) -> Operand:
    on_host = value.__dlpack_device__()[0] == ON_HOST
    asked = {} if on_host else {"stream": stream}
    try:
        try:
            given = value.__dlpack__(**asked, max_version=(1, 0))
        except TypeError:  # a producer from before there were versions
            given = value.__dlpack__(**asked)
    except BufferError as bad:
        raise InputError(f"{type(value).__name__} does not give its memory away: {bad}") from None
    tensor = dlpack.open_capsule(given)
    size = tensor.dtype.size if tensor.dtype is not None else 1
    strides = None if tensor.strides is None else tuple(step * size for step in tensor.strides)
    nbytes, dense = _span(tensor.shape, strides, size)
    return Operand(
        address=tensor.address,
        nbytes=nbytes,
        dtype=tensor.dtype,
        device=tensor.device,
        owner=(tensor.owner, value),
        contiguous=dense,
        writable=not tensor.read_only,
    )


def _itemsize(face: dict[str, Any]) -> int:
    if face["typestr"].startswith(">"):
        raise InputError("an array of big-endian numbers means other numbers to a kernel")
    return int(face["typestr"][2:])


def _span(shape: Sequence[int], strides: Sequence[int] | None, size: int) -> tuple[int, bool]:
    """Bytes from the first element to the end of the last, and whether there are no gaps."""
    if 0 in shape or strides is None:
        return size * math.prod(shape), True
    if any(step < 0 for step in strides):
        raise InputError("an array with negative strides has no plain address")
    usual = [size * math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    dense = all(n == 1 or step == plain for n, step, plain in zip(shape, strides, usual, strict=True))
    return sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) + size, dense


_kinds: dict[type, Kind | None] = {}


def _find(kind: type) -> Kind | None:
    """Found out once for each type."""
    library = kind.__module__.partition(".")[0]
    if library == "torch" and hasattr(kind, "data_ptr"):
        return Kind(library, _from_torch, introduce(library))
    if library == "cupy" and hasattr(kind, "data"):
        return Kind(library, _from_cupy, introduce(library))
    if any((base.__module__, base.__name__) == ("numpy", "ndarray") for base in kind.__mro__):
        return Kind(library, _from_host)
    if library in ("numpy", "preheat"):  # scalars, and arrays of our own
        return None
    if hasattr(kind, "__dlpack__"):
        return Kind(library, _from_dlpack)
    if hasattr(kind, "__cuda_array_interface__"):
        return Kind(library, _from_cuda_interface)
    return None


@functools.cache
def _torch_dtype(dtype: object) -> DType | None:
    try:
        return dtype_of(dtype)
    except InputError:
        return None
