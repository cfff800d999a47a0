"""Element types of device memory, by the names NumPy and torch use, without loading either."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from preheat.errors import InputError, did_you_mean
from preheat.process.lazy import LazyModule

if TYPE_CHECKING:
    import numpy as np
else:
    np = LazyModule("numpy")

__all__ = ["DTYPES", "DType", "dtype_of", "pointee_dtypes"]


class DType(str):
    """An element type: its name as a string, which compares equal to the same type of other libraries.

    `x.dtype == "float32"`, `x.dtype == np.float32` and `x.dtype == np.dtype("float32")` are all True
    for an array of float32, and so is a comparison with a dtype of torch. There is one object for each
    type, so types can also be compared by identity. The hash is the hash of the name. In a dict or a
    set, a type is therefore found by its name, and not by a NumPy type, as with NumPy's own types.

    Attributes:
        name: The name, such as `float32` or `bfloat16`.
        size: The bytes of one element.
        host: The NumPy type that the bytes are read as on the host.
        typestr: The type in the array interfaces.
        dlpack: The type code of DLPack.

    Examples:
        >>> x = gpu.zeros(2, "bfloat16")
        >>> x.dtype.size
        2
        >>> x.dtype == "bfloat16"
        True
        >>> {"bfloat16": "half the size of float32"}[x.dtype]
        'half the size of float32'
    """

    __slots__ = ("dlpack", "host", "name", "size", "typestr")

    name: str
    size: int
    host: str  # the NumPy type its bytes are read as on the host
    typestr: str  # of the array interfaces
    dlpack: int  # DLPack's type code

    def __new__(cls, name: str, size: int, host: str, typestr: str, dlpack: int) -> DType:
        """Make the one object of a type. Only this module does so."""
        made = super().__new__(cls, name)
        made.name = name
        made.size = size
        made.host = host
        made.typestr = typestr
        made.dlpack = dlpack
        return made

    def __eq__(self, other: object) -> bool:
        """Return whether `other` is this type, its name, or the same type of NumPy, torch or Python."""
        if type(other) is DType:
            return self is other
        if isinstance(other, str):
            return str.__eq__(self, other)
        name = _foreign_name(other)
        return NotImplemented if name is None else self.name == name

    def __ne__(self, other: object) -> bool:
        """Return the opposite of `==`."""
        equal = self.__eq__(other)
        return NotImplemented if equal is NotImplemented else not equal

    # Hashing stays a function in C. Dicts and tuples find the same object without calling `__eq__`.
    __hash__ = str.__hash__

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how a copy or another process gets its object of the type."""
        return dtype_of, (self.name,)

    @property
    def complex(self) -> bool:
        """Return True for complex numbers."""
        return self.name.startswith("complex")

    def numpy(self) -> np.dtype[Any]:
        """Return the NumPy type of the same size: raw bits for types that NumPy lacks.

        Examples:
            >>> gpu.zeros(2, "bfloat16").dtype.numpy()
            dtype('uint16')
        """
        return np.dtype(self.host)


def _rows() -> Iterable[DType]:
    for bits in (8, 16, 32, 64):
        yield DType(f"int{bits}", bits // 8, f"int{bits}", f"<i{bits // 8}", 0)
        yield DType(f"uint{bits}", bits // 8, f"uint{bits}", f"<u{bits // 8}", 1)
    for bits in (16, 32, 64):
        yield DType(f"float{bits}", bits // 8, f"float{bits}", f"<f{bits // 8}", 2)
    for bits in (64, 128):
        yield DType(f"complex{bits}", bits // 8, f"complex{bits}", f"<c{bits // 8}", 5)
    yield DType("bool", 1, "bool", "|b1", 6)
    yield DType("bfloat16", 2, "uint16", "<V2", 4)
    yield DType("float8_e4m3fn", 1, "uint8", "|V1", 10)
    yield DType("float8_e5m2", 1, "uint8", "|V1", 12)


#: Every element type, by name.
DTYPES = {row.name: row for row in _rows()}
_BY_DLPACK = {(row.dlpack, row.size * 8): row for row in DTYPES.values()}
_BY_TYPESTR = {row.typestr.lstrip("<|"): row for row in DTYPES.values() if "V" not in row.typestr}

# What `T*` may point at, by the C++ name of T. The sign of integers is not compared, because several
# libraries have no unsigned types. Raw 16-bit words are accepted as halves, and elements as pairs or
# quads of them.
_INTEGERS = {
    1: ("int8", "uint8", "bool", "float8_e4m3fn", "float8_e5m2"),
    2: ("int16", "uint16"),
    4: ("int32", "uint32"),
    8: ("int64", "uint64"),
}
_POINTEES: dict[str, tuple[str, ...]] = {
    "float": ("float32",),
    "double": ("float64",),
    "half": ("float16", "uint16"),
    "__half": ("float16", "uint16"),
    "__nv_bfloat16": ("bfloat16", "uint16"),
    "bool": ("bool", "uint8", "int8"),
    **dict.fromkeys(("char", "signed char", "unsigned char"), _INTEGERS[1]),
    **dict.fromkeys(("short", "unsigned short"), _INTEGERS[2]),
    **dict.fromkeys(("int", "unsigned int"), _INTEGERS[4]),
    **dict.fromkeys(("long", "unsigned long", "long long", "unsigned long long"), _INTEGERS[8]),
}
for _element, _vectors in {
    "char": ("char", "uchar"),
    "short": ("short", "ushort"),
    "int": ("int", "uint"),
    "long": ("long", "ulong", "longlong", "ulonglong"),
    **{name: (name,) for name in ("float", "double", "__half", "__nv_bfloat16")},
}.items():
    for _vector in _vectors:
        _POINTEES |= {f"{_vector}{lanes}": _POINTEES[_element] for lanes in "1234"}
_POINTEES["float2"] += ("complex64",)
_POINTEES["double2"] += ("complex128",)


_PYTHON_TYPES = {"int": "int64", "float": "float64", "complex": "complex128"}


def _foreign_name(what: object) -> str | None:
    """Return the name of a type of NumPy, torch or Python; None for any other object.

    No module is imported: an object of a module that is not loaded does not exist.
    """
    if isinstance(what, type):
        if what.__module__ not in ("builtins", "numpy", "ml_dtypes"):
            return None
        return _PYTHON_TYPES.get(what.__name__, what.__name__)
    for module in ("numpy", "torch"):
        if isinstance(what, getattr(sys.modules.get(module), "dtype", ())):
            return str(what).removeprefix("torch.")
    return None


def dtype_of(what: object) -> DType:
    """Return the element type that `what` names: `"float32"`, a NumPy, CuPy or torch dtype, `float`."""
    if isinstance(what, DType):
        return what
    name = str(what).removeprefix("torch.") if not isinstance(what, type) else what.__name__
    dtype = DTYPES.get(name) or dtype_of_typestr(name)
    if dtype is None:
        dtype = DTYPES.get(_PYTHON_TYPES.get(name, ""))
    if dtype is None:
        hint = did_you_mean(name, DTYPES) or f"use one of {', '.join(DTYPES)}"
        if getattr(what, "names", None):  # a NumPy record
            hint = "pass the bytes of records: gpu.array(records.view('uint8'))"
        raise InputError(f"{name!r} is not an element type", hint=hint)
    return dtype


def dtype_of_dlpack(code: int, bits: int, lanes: int) -> DType | None:
    """Return the element type of a DLPack type, or None for a type that preheat does not have."""
    return _BY_DLPACK.get((code, bits)) if lanes == 1 else None


def dtype_of_typestr(typestr: str) -> DType | None:
    """Return the element type of a `typestr`, or None for a type that preheat does not have."""
    return None if typestr.startswith(">") else _BY_TYPESTR.get(typestr.lstrip("<|="))


@functools.lru_cache(maxsize=256)
def pointee_dtypes(cpp: str) -> tuple[DType, ...] | None:
    """Return the element types that a parameter of the C++ type `cpp` may point at; None for any."""
    words = [word for word in cpp.replace("*", " * ").split() if word not in ("const", "volatile")]
    names = _POINTEES.get(" ".join(words[:-1])) if words[-1:] == ["*"] else None
    return None if names is None else tuple(DTYPES[name] for name in names)
