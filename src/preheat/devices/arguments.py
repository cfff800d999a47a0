"""Kernel parameters: what each accepts, how values are converted, and how they lie in memory."""

from __future__ import annotations

import ctypes
import math
import operator
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple, NoReturn

from preheat.devices.host import bfloat16_bytes
from preheat.errors import LaunchError, short_repr
from preheat.model.artifact import EntryPoint, Parameter
from preheat.model.dtypes import DType, pointee_dtypes
from preheat.process.lazy import lazy
from preheat.process.messages import count

__all__ = [
    "ArgumentMismatch",
    "ParamBuffer",
    "ParamSpec",
    "Signature",
    "Value",
    "new_param_buffer",
    "param_specs",
]

_INTEGERS = {
    "char": "b", "signed char": "b", "unsigned char": "B", "short": "h", "unsigned short": "H",
    "int": "i", "unsigned int": "I", "long": "q", "unsigned long": "Q", "long long": "q",
    "unsigned long long": "Q",
}  # fmt: skip
_FLOATS = {"float": "f", "double": "d", "__half": "e"}
_KINDS = {"f16": "e", "f32": "f", "f64": "d", "s8": "b", "s16": "h", "s32": "i", "s64": "q"}
_WORDS = {1: "B", 2: "H", 4: "I", 8: "Q"}  # untyped words accept signed and unsigned values
_BITS = {"b32": "f", "b64": "d"}  # untyped PTX words may also hold a float
_COMPLEX = {8: "f", 16: "d"}  # by the bytes of both parts
_PAIRS = ("float2", "double2")  # cuComplex.h uses these for complex numbers
_NUMPY = {"b": "int8", "B": "uint8", "h": "int16", "H": "uint16", "i": "int32", "I": "uint32",
          "q": "int64", "Q": "uint64", "e": "float16", "f": "float32", "d": "float64"}  # fmt: skip


_CTYPES: Any = ctypes._SimpleCData


class ArgumentMismatch(Exception):  # noqa: N818  (becomes a LaunchError, which knows kernel and position)
    """A value does not fit its parameter."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class Value(NamedTuple):
    """A parameter that is a number. `code` is its `struct` format.

    `any_sign` means that the type may be signed or unsigned. `boolean` means that only 0 and 1 may be
    stored, because any other value of a `bool` is undefined in C++.
    """

    code: str
    any_sign: bool = False
    boolean: bool = False

    @property
    def real(self) -> bool:
        """Return True for a floating-point number."""
        return self.code in "efd"


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """What one parameter accepts.

    It accepts memory where `pointer` is set, and a number where `value` is; an untyped 64-bit word
    accepts both. A parameter with neither is a struct, given as bytes. `dtypes` are the element types
    that memory may have; None means any.
    """

    parameter: Parameter
    pointer: bool = False
    value: Value | None = None
    dtypes: tuple[DType, ...] | None = None

    @property
    def title(self) -> str:
        """The type and name of the parameter, for messages."""
        return str(self.parameter)

    @property
    def writes(self) -> bool:
        """Return True unless the parameter is a pointer to something const."""
        return not (self.parameter.type or "").removesuffix("*").removesuffix("&").endswith("const")

    @property
    def untyped(self) -> bool:
        """Return True for a word that takes memory or a number."""
        return self.pointer and self.value is not None

    @property
    def format(self) -> str:
        """The `struct` format of the parameter."""
        if self.value is not None:
            return self.value.code
        return "Q" if self.pointer else f"{self.parameter.size}s"

    def number(self, given: Any) -> float:
        """Convert a Python, NumPy or ctypes number; `ArgumentMismatch` when it does not fit."""
        value = self.value
        assert value is not None
        if type(given).__module__ == "numpy" and hasattr(
            given, "dtype"
        ):  # numpy.float64 is a subclass of float.
            return self._numpy(given, value)
        if isinstance(given, bool | int | float):
            return self._python(given, value)
        if isinstance(given, _CTYPES):
            return self._ctypes(given, value)
        raise ArgumentMismatch(f"{self.title} cannot take {_describe(given)}", self._advice(given))

    def _python(self, given: Any, value: Value) -> float:
        if value.real:
            return self._real(given, value)
        if isinstance(given, float) and self._may_be_real:
            code = _BITS[self.parameter.kind]
            return int.from_bytes(struct.pack(f"<{code}", self._real(given, Value(code))), "little")
        if isinstance(given, float):
            raise ArgumentMismatch(f"{self.title} cannot take {given!r}, a float", "convert it: int(…)")
        if value.boolean:
            return int(bool(given))
        bits = 8 * self.parameter.size
        word = given + (1 << bits) if value.any_sign and -(1 << bits - 1) <= given < 0 else int(given)
        if not _fits(value.code, word):
            raise ArgumentMismatch(f"{self.title} cannot hold {short_repr(given)}")
        return int(word)

    @property
    def _may_be_real(self) -> bool:
        """Return True for a word of PTX or of a cubin whose type is not known: it may be a float."""
        return self.value is not None and self.value.any_sign and self.parameter.kind in _BITS

    def _real(self, number: float, value: Value) -> float:
        """Convert to a float; a number beyond its range becomes infinite, as in any such conversion."""
        if _fits(value.code, number):
            return float(number)
        return math.inf if number > 0 else -math.inf

    def _numpy(self, given: Any, value: Value) -> float:
        wanted = "bool" if value.boolean else _NUMPY[value.code]
        name = str(given.dtype)
        same = name == wanted or (value.any_sign and name.lstrip("u") == wanted.lstrip("u"))
        same = same or (self._may_be_real and name == _NUMPY[_BITS[self.parameter.kind]])
        if given.shape == () and (same or (name == "bool" and value.code == "B")):
            return self._python(given.item(), value)
        hint = f"NumPy scalars must match: numpy.{wanted}(…), or a Python number"
        raise ArgumentMismatch(f"{self.title} cannot take {_describe(given)}", hint)

    def _ctypes(self, given: Any, value: Value) -> float:
        wanted = struct.calcsize(value.code)
        # It can also be bytes or None.
        plain = isinstance(given.value, float if value.real else int) or (
            self._may_be_real and isinstance(given.value, float)
        )
        if ctypes.sizeof(given) != wanted or not plain:
            raise ArgumentMismatch(f"{self.title} cannot take {_describe(given)}")
        return self._python(given.value, value)

    def address(self, given: Any) -> int:
        """Convert a bare address; `ArgumentMismatch` when `given` is not an address."""
        try:
            number = operator.index(given)
        except TypeError:
            number = -1
        if not _fits("Q", number):
            why = f"{self.title} cannot take {short_repr(given)} as an address"
            raise ArgumentMismatch(why, "an address is an integer from 0 to 2**64 - 1")
        return number

    def struct_bytes(self, given: Any) -> bytes:
        """Return the bytes of a struct or tensor map; `ArgumentMismatch` for another size."""
        size = self.parameter.size
        if self.parameter.type == "__nv_bfloat16":
            return self._bfloat16(given)
        if type(given) is complex and self._complex is not None:
            return struct.pack(f"<2{self._complex}", *self._parts(given, self._complex))
        if type(given).__name__ == "CUtensorMap" and size == _TENSOR_MAP:  # of cuda.bindings
            return ctypes.string_at(int(given.getPtr()), size)
        try:
            data = bytes(memoryview(given).cast("B")) if not isinstance(given, bytes) else given
        except (TypeError, ValueError):
            raise ArgumentMismatch(
                f"{self.title} is passed by value: it takes {size} bytes, not {_describe(given)}",
                "pass bytes, a ctypes.Structure or a NumPy record of that size",
            ) from None
        if len(data) != size:
            raise ArgumentMismatch(f"{self.title} has {size} bytes, not {len(data)}")
        return data

    @property
    def _complex(self) -> str | None:
        """The format of each part of a complex number; None when the parameter cannot be one."""
        name = (self.parameter.type or "complex").lower()  # An unknown type may be complex.
        return _COMPLEX.get(self.parameter.size) if "complex" in name or name in _PAIRS else None

    def _parts(self, given: complex, code: str) -> tuple[float, float]:
        return self._real(given.real, Value(code)), self._real(given.imag, Value(code))

    def _bfloat16(self, given: Any) -> bytes:
        if type(given) in (bool, int, float):
            return bfloat16_bytes(self._real(given, Value("f")))
        name = str(getattr(given, "dtype", ""))
        if name in ("uint16", "bfloat16") and given.shape == ():
            return bytes(given.tobytes())
        hint = "pass a Python number, or its bits as numpy.uint16(…)"
        raise ArgumentMismatch(f"{self.title} cannot take {_describe(given)}", hint)

    def _advice(self, given: Any) -> str | None:
        if hasattr(given, "__dlpack__"):
            return f"this parameter is a value; to pass memory, make it a pointer: const {self.title}*"
        return None


class Signature:
    """The parameters of one kernel: what each accepts, and how they lie in memory."""

    def __init__(self, entry: EntryPoint) -> None:
        self.kernel = entry.cpp or entry.name  # its title
        self._entry = entry
        self.parameters = entry.parameters
        self.params, self.layout, self.memory_positions = _shared_parts(entry.parameters)

    @lazy
    def expected(self) -> str:
        """The number and types of the parameters, for messages."""
        return f"{len(self.params)} ({', '.join(param.title for param in self.params)})"

    def hint(self, position: int, hint: str | None) -> str | None:
        """Return the hint of an argument that does not fit, with a remark if its type is unknown."""
        remark = self._entry.remark
        if remark is None or self.params[position].parameter.type is not None:
            return hint
        return remark if hint is None else f"{hint}; {remark}"

    def check_count(self, args: Sequence[object]) -> None:
        """Raise `LaunchError` for too many or too few arguments."""
        if len(args) != len(self.params):
            raise LaunchError(
                self.kernel,
                f"{count(len(args), 'argument')} given, but the kernel takes {self.expected}",
                hint="pass the arguments of a tuple one by one: kernel[grid, block](*args)"
                if len(args) == 1 and isinstance(args[0], tuple)
                else None,
            )

    def refuse_names(self, named: Iterable[str]) -> NoReturn:
        """Raise `LaunchError` for arguments that are given by name."""
        names = " and ".join(f"{name}=" for name in named)
        raise LaunchError(
            self.kernel,
            f"{names} cannot be given by name; arguments are given in order, "
            f"and the kernel takes {self.expected}",
            hint="settings of a launch go by name to kernel.launch(…, grid=, block=, shared=, stream=, "
            "cluster=, cooperative=, programmatic=)",
        )


class ParamBuffer(NamedTuple):
    """Memory for the packed parameters of one launch.

    `pack` writes values into `data`. `pointers` is the address of the array of pointers to the
    parameters, which a launch passes to the driver.
    """

    pack: Callable[..., None]
    pointers: int
    data: memoryview
    owner: object  # keeps the array at `pointers` alive


def new_param_buffer(signature: Signature) -> ParamBuffer:
    """Return a buffer for the parameters of one launch at a time."""
    layout = signature.layout
    memory = ctypes.create_string_buffer(layout.size + 2 * _ALIGN)
    base = ctypes.addressof(memory)
    start = -base % _ALIGN
    addresses = [base + start + param.parameter.offset for param in signature.params]
    pointers = (ctypes.c_void_p * max(len(addresses), 1))(*addresses)
    whole = -(-layout.size // _ALIGN) * _ALIGN  # A view in any format needs a multiple of its size.
    data = memoryview(memory).cast("B")[start : start + whole]
    return ParamBuffer(partial(layout.pack_into, data, 0), ctypes.addressof(pointers), data, pointers)


class _SharedParts(NamedTuple):
    """What the signatures of all kernels with the same parameters have in common.

    `layout` describes the parameters in memory, padding included. `memory_positions` has the positions
    of the parameters that take memory, with True where it may be written.
    """

    params: tuple[ParamSpec, ...]
    layout: struct.Struct
    memory_positions: tuple[tuple[int, bool], ...]


def param_specs(parameters: tuple[Parameter, ...]) -> tuple[ParamSpec, ...]:
    """Return what each parameter accepts. Equal parameters share one object."""
    return _shared_parts(parameters).params


@lru_cache(maxsize=1024)
def _shared_parts(parameters: tuple[Parameter, ...]) -> _SharedParts:
    params = tuple(map(_param_spec, parameters))
    text, end = "<", 0
    for param in params:
        offset, size = param.parameter.offset, param.parameter.size
        text += f"{offset - end}x{param.format}" if offset > end else param.format
        end = offset + size
    memory = tuple((at, param.writes) for at, param in enumerate(params) if param.pointer)
    return _SharedParts(params, struct.Struct(text), memory)


_ALIGN = 128  # the largest alignment of a parameter
_TENSOR_MAP = 128  # bytes of a CUtensorMap


def _param_spec(parameter: Parameter) -> ParamSpec:
    """Return what a parameter accepts, by its C++ type or, if that is unknown, by its PTX type."""
    cpp, kind, size = parameter.type, parameter.kind, parameter.size
    if parameter.pointer or (cpp is not None and cpp.endswith(("*", "&"))):
        return ParamSpec(parameter, pointer=True, dtypes=pointee_dtypes(cpp) if cpp else None)
    if cpp == "bool" and size == 1:
        return ParamSpec(parameter, value=Value("B", boolean=True))
    code = _INTEGERS.get(cpp or "") or _FLOATS.get(cpp or "")
    if code is None and kind in _KINDS:
        code = _KINDS[kind]
    if code is not None and struct.calcsize(f"<{code}") == size:
        return ParamSpec(parameter, value=Value(code))
    if size in _WORDS and kind[0] in "ub" and kind != "b8":
        return ParamSpec(parameter, pointer=size == 8, value=Value(_WORDS[size], any_sign=True))
    return ParamSpec(parameter)


def _fits(code: str, number: float) -> bool:
    try:
        struct.pack(f"<{code}", number)
    except (struct.error, OverflowError):
        return False
    return True


def _describe(given: object) -> str:
    kind = type(given)
    home = kind.__module__.partition(".")[0]
    name = kind.__name__ if home in ("builtins", "preheat") else f"{kind.__module__}.{kind.__name__}"
    return f"{short_repr(given)} ({name})" if isinstance(given, complex | int | float | str) else name
