"""Any value for any parameter is packed as its bytes or refused with a `LaunchError`."""

from __future__ import annotations

import ctypes
import decimal
import fractions
import math
import struct
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preheat.devices.arguments import Signature, new_param_buffer
from preheat.devices.base import Geometry
from preheat.devices.context import Context
from preheat.devices.host import element_bytes, host_array, packer
from preheat.devices.launch import Launch
from preheat.devices.operands import Pointer, Strided, strided
from preheat.emulator.device import EmulatorDevice
from preheat.errors import InputError, LaunchError
from preheat.model.artifact import EntryPoint, Parameter
from preheat.model.dtypes import DTYPES, DType
from preheat.model.events import Events

SIZES = {"8": 1, "16": 2, "32": 4, "64": 8}
WORDS = [Parameter(0, size, size, f"{letter}{bits}")
         for letter in "busf" for bits, size in SIZES.items() if f"{letter}{bits}" != "f8"]  # fmt: skip
BLOCKS = [Parameter(0, size, 1, "b8") for size in (1, 2, 3, 4, 8, 16, 128)]
CPP = {
    "bool": ("u8", 1), "char": ("u8", 1), "signed char": ("s8", 1), "short": ("s16", 2),
    "unsigned short": ("u16", 2), "int": ("u32", 4), "unsigned int": ("u32", 4), "long": ("u64", 8),
    "unsigned long long": ("u64", 8), "float": ("f32", 4), "double": ("f64", 8), "__half": ("b8", 2),
    "__nv_bfloat16": ("b8", 2), "float2": ("b8", 8), "double2": ("b8", 16), "Pair": ("b8", 16),
    "float*": ("u64", 8), "float const*": ("u64", 8), "void*": ("u64", 8), "Pair&": ("u64", 8),
    "Mystery": ("u64", 8),
}  # fmt: skip
TYPED = [Parameter(0, size, size, kind, type=cpp) for cpp, (kind, size) in CPP.items()]
PARAMETERS = [*WORDS, *BLOCKS, *TYPED, Parameter(0, 8, 8, "u64", pointer=True)]


class Odd:
    """Something that cannot even be shown."""

    def __repr__(self) -> str:
        raise ZeroDivisionError


class Pair(ctypes.Structure):
    _fields_ = (("a", ctypes.c_int), ("b", ctypes.c_float), ("c", ctypes.c_double))


EDGES = [1 << bits for bits in (0, 7, 8, 15, 16, 31, 32, 63, 64, 128, 2000)]
NAMES = (
    "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "float32",
    "float64", "longdouble", "complex64", "complex128", "bool", "S3", "U3", "M8[s]", "V16",
)  # fmt: skip
HOST = np.arange(6, dtype=np.float32).reshape(2, 3)
VALUES: list[Any] = [
    *(sign * (edge - less) for edge in EDGES for sign in (1, -1) for less in (0, 1)), 10**5000,
    0.0, 1.5, 1e39, -1e39, 65520.0, 1e308, 5e-324, math.inf, -math.inf, math.nan, True, False, None,
    1j, complex(math.inf, math.nan), 1e39 + 1j, "", "text", "x" * 999, b"", bytes(16), bytes(128),
    *(np.zeros(shape, name) for name in NAMES for shape in ((), (2,), (2, 2))),
    *(np.zeros((), name)[()] for name in NAMES), np.float32(1e38), np.float64(1e39), np.uint64(2**63),
    *(kind() for kind in (ctypes.c_bool, ctypes.c_byte, ctypes.c_int, ctypes.c_uint64, ctypes.c_float,
      ctypes.c_double, ctypes.c_longdouble, ctypes.c_char, ctypes.c_void_p, ctypes.c_char_p, Pair)),
    Odd(), object(), int, [1.0], [[]], {}, (), range(3), fractions.Fraction(1, 3), decimal.Decimal(2),
    memoryview(bytes(16)), memoryview(bytes(16))[::2], bytearray(16), Strided(None), Strided(3),
    HOST.T, HOST[:, ::2], HOST[::-1], strided(HOST.T), strided(HOST),
]  # fmt: skip
NUMBERS = st.integers() | st.floats() | st.complex_numbers()


@pytest.fixture(scope="module")
def context() -> Context:
    return Context(EmulatorDevice(), Events())


def packing(context: Context, parameter: Parameter) -> Callable[[Any], bytes]:
    """Return a function that gives the bytes that a launch hands over for one argument."""
    signature = Signature(EntryPoint("k", (parameter,)))
    nothing = cast(Any, None)
    geometry = Geometry((1, 1, 1), (1, 1, 1))
    launch = Launch(context, nothing, signature, geometry, None, module=nothing)
    block = new_param_buffer(signature)

    def packed(value: Any) -> bytes:
        block.pack(*launch.convert((value,), 0).values)
        return bytes(block.data[: parameter.size])

    return packed


@pytest.mark.parametrize("parameter", PARAMETERS, ids=lambda p: f"{p}-{p.kind}")
def test_any_value_is_packed_or_refused(parameter: Parameter, context: Context) -> None:
    packed = packing(context, parameter)
    for value in (*VALUES, *map(Pointer, VALUES[:40])):
        check(packed, parameter, value)


@settings(max_examples=100)
@given(parameter=st.sampled_from(PARAMETERS), value=NUMBERS | st.builds(Pointer, NUMBERS))
def test_any_number_is_packed_or_refused(context: Context, parameter: Parameter, value: Any) -> None:
    check(packing(context, parameter), parameter, value)


def check(packed: Callable[[Any], bytes], parameter: Parameter, value: Any) -> None:
    try:
        assert len(packed(value)) == parameter.size
    except LaunchError as error:
        refused = error
    else:
        return
    assert refused.argument == 0
    assert len(str(refused)) < 300


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_any_value_is_an_element_or_refused(dtype: DType) -> None:
    for value in VALUES:
        for made in (partial(element_bytes, dtype=dtype), packer(dtype)):
            with suppress(InputError), np.errstate(over="ignore"):
                assert len(made(value)) == dtype.size
        with suppress(InputError), np.errstate(over="ignore"):
            assert host_array(value, dtype).itemsize == dtype.size


@pytest.mark.parametrize("kind", ["b32", "f32", "float"])
@pytest.mark.parametrize(
    ("value", "expected"),
    [(1e39, math.inf), (-1e39, -math.inf), (3.5, 3.5), (math.inf, math.inf)],
)
def test_a_float_too_large_is_infinite_in_every_kind_of_word(
    kind: str, value: float, expected: float, context: Context
) -> None:
    of_cpp = Parameter(0, 4, 4, "f32", type="float")
    parameter = of_cpp if kind == "float" else Parameter(0, 4, 4, kind)
    assert packing(context, parameter)(value) == struct.pack("<f", expected)


@pytest.mark.parametrize(
    ("cpp", "value", "expected"),
    [
        ("double2", 1 + 2j, struct.pack("<2d", 1, 2)),
        ("float2", complex(1e39, -0.0), struct.pack("<2f", math.inf, -0.0)),
        ("thrust::complex<double>", 1j, struct.pack("<2d", 0, 1)),
        ("cuda::std::complex<float>", -1j, struct.pack("<2f", -0.0, -1)),
        (None, 3j, struct.pack("<2d", 0, 3)),
    ],
)
def test_a_complex_number_is_taken_as_numpy_has_it(
    cpp: str | None, value: complex, expected: bytes, context: Context
) -> None:
    packed = packing(context, Parameter(0, len(expected), 8, "b8", type=cpp))
    assert packed(value) == expected
    with np.errstate(over="ignore"):
        assert packed(np.dtype(f"complex{8 * len(expected)}").type(value)) == expected


@pytest.mark.parametrize("cpp", ["Pair", "float", "int", "float*"])
def test_a_complex_number_is_refused_elsewhere(cpp: str, context: Context) -> None:
    kind, size = CPP[cpp]
    with pytest.raises(LaunchError, match=r"cannot take|not 1j \(complex\)"):
        packing(context, Parameter(0, size, size, kind, type=cpp))(1j)


@pytest.mark.parametrize("address", [-1, 1 << 64, 1.5, "x", None, Odd()], ids=range(6))
@pytest.mark.parametrize("parameter", [p for p in PARAMETERS if "*" in str(p)], ids=str)
def test_a_pointer_is_an_address(address: Any, parameter: Parameter, context: Context) -> None:
    with pytest.raises(LaunchError, match=r"k, argument 0: .* cannot take .* as an address") as caught:
        packing(context, parameter)(Pointer(address))
    assert caught.value.hint == "an address is an integer from 0 to 2**64 - 1"


@pytest.mark.parametrize("address", [0, 8, (1 << 64) - 1, np.uint64(8), True])
def test_addresses_of_any_integer_type_are_taken(address: Any, context: Context) -> None:
    pointer = Parameter(0, 8, 8, "u64", type="float*")
    assert packing(context, pointer)(Pointer(address)) == struct.pack("<Q", int(address))
