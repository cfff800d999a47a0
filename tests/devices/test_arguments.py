"""Arguments by value: numbers are packed in the width of their parameter, or refused."""

from __future__ import annotations

import ctypes
import math
import struct
from typing import Any, NamedTuple

import numpy as np
import pytest

from preheat.devices.arguments import Signature, new_param_buffer
from preheat.devices.operands import Pointer
from preheat.errors import LaunchError
from preheat.gpu import Gpu
from tests.devices.support import KERNELS, PTX


class Kind(NamedTuple):
    """A scalar parameter type: its C++ name, and the NumPy type of the same values."""

    cpp: str
    numpy: str

    @property
    def kernel(self) -> str:
        return f"take_{self.cpp.replace(' ', '_')}"

    @property
    def limits(self) -> tuple[int, int]:
        if self.numpy == "bool":
            return 0, 1
        top = np.iinfo(self.numpy)
        return int(top.min), int(top.max)


INTEGERS = tuple(
    Kind(*row)
    for row in (
        ("bool", "bool"), ("char", "int8"), ("signed char", "int8"), ("unsigned char", "uint8"),
        ("short", "int16"), ("unsigned short", "uint16"), ("int", "int32"), ("unsigned int", "uint32"),
        ("long", "int64"), ("unsigned long", "uint64"), ("long long", "int64"),
        ("unsigned long long", "uint64"),
    )
)  # fmt: skip
REALS = tuple(
    Kind(*row) for row in (("float", "float32"), ("double", "float64"), ("__half", "float16"))
)
KINDS = (*INTEGERS, *REALS)
by_type = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.cpp)

SOURCE = "#include <cuda_fp16.h>\n#include <cuda_bf16.h>\n" + "".join(
    f'extern "C" __global__ void {name}(int before, {cpp} value, {cpp}* out) '
    "{ out[0] = value; if (before != 77) out[0] = 0; }\n"
    for cpp, name in (*((k.cpp, k.kernel) for k in KINDS), ("__nv_bfloat16", "take_bfloat16"))
)
NUMPY = [name for name in np.sctypeDict if isinstance(name, str) and name in (
    "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64",
    "float16", "float32", "float64",
)]  # fmt: skip


def taken(gpu: Gpu, kind: Kind, value: Any) -> Any:
    """Return what a kernel sees of `value` in a parameter of this kind."""
    out = gpu.zeros(1, "uint8" if kind.cpp == "bool" else kind.numpy)
    gpu.kernel(SOURCE, kind.kernel)[1, 1](77, value, out)
    return out.numpy()[0].item()


def taken_quickly(gpu: Gpu, kind: Kind, value: Any) -> Any:
    """Return the same after the launch has become a fast one."""
    for _ in range(3):
        taken(gpu, kind, 1)
    return taken(gpu, kind, value)


both_ways = pytest.mark.parametrize("take", [taken, taken_quickly], ids=["first", "quick"])


@both_ways
@pytest.mark.parametrize("kind", INTEGERS, ids=lambda kind: kind.cpp)
def test_python_integers_take_the_width_of_the_parameter(kind: Kind, take: Any, device: Gpu) -> None:
    low, high = kind.limits
    for value in {low, high, high // 3, 1, 0}:
        assert take(device, kind, value) == value
    assert take(device, kind, True) == 1
    if kind.cpp == "bool":
        assert [take(device, kind, given) for given in (2, 256, -1, 2**80, False)] == [1, 1, 1, 1, 0]
        return
    for value in (low - 1, high + 1, 2**80, -(2**80)):
        with pytest.raises(LaunchError, match=f"argument 1: {kind.cpp} cannot hold {value}"):
            take(device, kind, value)
    for wrong in (1.0, 1.5, math.nan):
        with pytest.raises(
            LaunchError, match=rf"argument 1: {kind.cpp} cannot take .* a float"
        ) as caught:
            take(device, kind, wrong)
        assert caught.value.hint == "convert it: int(…)"


@both_ways
@pytest.mark.parametrize("kind", REALS, ids=lambda kind: kind.cpp)
def test_python_numbers_become_the_nearest_real_of_the_parameter(
    kind: Kind, take: Any, device: Gpu
) -> None:
    wide = np.dtype(kind.numpy).type
    for value in (0.1, -math.pi, 3, -0.0, 2**-24, math.inf, -math.inf, 65504.0):
        expected = wide(value)
        found = take(device, kind, value)
        assert np.array(found, wide).tobytes() == expected.tobytes(), value
    assert math.isnan(take(device, kind, math.nan))
    assert take(device, kind, 10**400) == math.inf
    assert take(device, kind, -(10**400)) == -math.inf
    if kind.cpp != "double":
        assert take(device, kind, 1e300) == math.inf
        assert take(device, kind, -1e300) == -math.inf


@by_type
@pytest.mark.parametrize("name", NUMPY)
def test_numpy_scalars_must_match(kind: Kind, name: str, device: Gpu) -> None:
    value = np.dtype(name).type(1)
    if name == kind.numpy or (name == "bool" and kind.cpp == "unsigned char"):
        assert taken(device, kind, value) == 1
        assert taken_quickly(device, kind, np.asarray(value)) == 1  # an array without axes
    else:
        with pytest.raises(LaunchError, match=rf"argument 1: {kind.cpp} cannot take") as caught:
            taken(device, kind, value)
        assert "NumPy scalars must match" in str(caught.value.hint)


@both_ways
def test_a_numpy_array_with_axes_is_no_number(take: Any, device: Gpu) -> None:
    with pytest.raises(LaunchError, match=r"argument 1: int cannot take numpy\.ndarray"):
        take(device, Kind("int", "int32"), np.ones(1, np.int32))


@pytest.mark.parametrize(
    ("cpp", "value", "seen"),
    [
        ("int", ctypes.c_int(-5), -5),
        ("int", ctypes.c_uint(5), 5),
        ("unsigned int", ctypes.c_uint(2**32 - 1), 2**32 - 1),
        ("char", ctypes.c_int8(-128), -128),
        ("bool", ctypes.c_bool(True), 1),
        ("long long", ctypes.c_longlong(-(2**63)), -(2**63)),
        ("float", ctypes.c_float(1.5), 1.5),
        ("double", ctypes.c_double(0.1), 0.1),
    ],
)
def test_ctypes_scalars_of_the_right_size_are_taken(
    cpp: str, value: Any, seen: float, device: Gpu
) -> None:
    kind = next(kind for kind in KINDS if kind.cpp == cpp)
    assert taken(device, kind, value) == seen
    assert taken_quickly(device, kind, value) == seen


@pytest.mark.parametrize(
    ("cpp", "value"),
    [
        ("int", ctypes.c_short(1)),
        ("int", ctypes.c_float(1)),
        ("float", ctypes.c_int(1)),
        ("float", ctypes.c_double(1)),
        ("int", ctypes.c_uint(2**31)),
        ("char", ctypes.c_char(b"a")),
        ("unsigned long long", ctypes.c_void_p(None)),
        ("unsigned long long", ctypes.c_char_p(b"abc")),
    ],
    ids=lambda value: getattr(value, "__class__", type(value)).__name__,
)
def test_other_ctypes_scalars_are_refused(cpp: str, value: Any, device: Gpu) -> None:
    kind = next(kind for kind in KINDS if kind.cpp == cpp)
    with pytest.raises(LaunchError, match=f"{kind.kernel}, argument 1: {cpp} cannot"):
        taken(device, kind, value)


@pytest.mark.parametrize(
    ("value", "bits"),
    [
        (1.5, 0x3FC0), (-2, 0xC000), (True, 0x3F80), (1 + 2**-8, 0x3F80), (1 + 3 * 2**-8, 0x3F82),
        (1 + 2**-8 + 2**-40, 0x3F81), (1e39, 0x7F80), (-math.inf, 0xFF80), (np.uint16(0x3FC0), 0x3FC0),
    ],
)  # fmt: skip
def test_bfloat16_takes_python_numbers_and_raw_bits(value: Any, bits: int, device: Gpu) -> None:
    out = device.zeros(1, "bfloat16")
    kernel = device.kernel(SOURCE, "take_bfloat16")
    for _ in range(4):
        kernel[1, 1](77, value, out)
        assert int(out.numpy()[0]) == bits


@pytest.mark.parametrize(
    "value",
    [np.float16(1), np.float32(1), np.float64(1), np.int16(1), np.ones(1, np.uint16), "1", None, b"12"],
)
def test_bfloat16_takes_no_other_numbers(value: Any, device: Gpu) -> None:
    with pytest.raises(LaunchError, match="take_bfloat16, argument 1: __nv_bfloat16 cannot take"):
        device.kernel(SOURCE, "take_bfloat16")[1, 1](77, value, device.zeros(1, "bfloat16"))


# Structs


class Pair(ctypes.Structure):
    _fields_ = (("a", ctypes.c_int), ("b", ctypes.c_float), ("c", ctypes.c_double))


RECORD = np.dtype([("a", "i4"), ("b", "f4"), ("c", "f8")])
PAIR = np.array((-7, 2.5, math.pi), RECORD)


@pytest.mark.parametrize(
    "value",
    [PAIR.tobytes(), bytearray(PAIR.tobytes()), memoryview(PAIR.tobytes()), PAIR, PAIR[()],
     Pair(-7, 2.5, math.pi), np.frombuffer(PAIR.tobytes(), np.uint8)],
    ids=["bytes", "bytearray", "memoryview", "record array", "record", "ctypes", "uint8 array"],
)  # fmt: skip
def test_a_struct_is_passed_by_value(value: Any, device: Gpu) -> None:
    out = device.zeros(3, "float64")
    for _ in range(4):
        out.fill(0)
        device.kernel(KERNELS, "unpack")[1, 1](value, out)
        assert out.numpy().tolist() == [-7, 2.5, math.pi]


def test_a_struct_is_read_when_it_is_launched(device: Gpu) -> None:
    out = device.zeros(3, "float64")
    pair = Pair(1, 2, 3)
    bound = device.kernel(KERNELS, "unpack").bind(pair, out, grid=1, block=1)
    pair.a = 99
    bound()
    assert out.numpy().tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (b"\0" * 15, "Pair has 16 bytes, not 15"),
        (b"\0" * 17, "Pair has 16 bytes, not 17"),
        (ctypes.c_int(3), "Pair has 16 bytes, not 4"),
        (7, r"Pair is passed by value: it takes 16 bytes, not 7 \(int\)"),
        (None, "Pair is passed by value: it takes 16 bytes, not NoneType"),
        (
            np.zeros((4, 4), np.uint8)[:, ::2],
            "Pair is passed by value: it takes 16 bytes, not numpy.ndarray",
        ),
    ],
)
def test_a_struct_of_another_size_is_refused(value: Any, words: str, device: Gpu) -> None:
    with pytest.raises(LaunchError, match=f"unpack, argument 0: {words}"):
        device.kernel(KERNELS, "unpack")[1, 1](value, device.zeros(3, "float64"))


@pytest.mark.parametrize("at", [0, 1, 63, 64, 127])
def test_a_struct_aligned_to_64_bytes_lies_where_the_kernel_looks(at: int, device: Gpu) -> None:
    data = np.random.default_rng(at).integers(1, 256, 128, np.uint8)
    out = device.zeros(2, "int32")
    for _ in range(4):
        device.kernel(KERNELS, "pick")[1, 1](-3, data.tobytes(), at, out)
        assert out.numpy().tolist() == [-3, int(data[at])]


def test_kernels_with_equal_parameters_share_what_describes_them(device: Gpu) -> None:
    entry = device.kernel(KERNELS, "pick").entry
    one, other = Signature(entry), Signature(entry._replace(name="other"))
    assert (one.kernel, other.kernel) == ("pick", "other")
    assert one.params is other.params
    assert one.layout is other.layout


def test_the_parameter_block_has_every_parameter_at_its_offset(device: Gpu) -> None:
    entry = device.kernel(KERNELS, "pick").entry
    signature = Signature(entry)
    block = new_param_buffer(signature)
    block.pack(5, bytes(range(128)), 6, 0x1234)
    offsets = [parameter.offset for parameter in entry.parameters]
    assert offsets == [0, 64, 192, 200]
    pointers = (ctypes.c_void_p * 4).from_address(block.pointers)
    base = int(pointers[0] or 0)
    assert base % 64 == 0
    assert [int(pointer or 0) - base for pointer in pointers] == offsets
    assert ctypes.string_at(base + 64, 128) == bytes(range(128))
    assert ctypes.c_int.from_address(base + 192).value == 6
    assert ctypes.c_uint64.from_address(base + 200).value == 0x1234


# PTX written by hand, whose parameters have no C++ type


def kept(gpu: Gpu, word: Any, wide: Any, real: Any) -> bytes:
    """Return the three untyped words that a hand-written kernel reads."""
    out = gpu.zeros(16, "uint8")
    kernel = gpu.kernel(PTX, "keep")
    for _ in range(4):
        kernel[1, 1](out, word, wide, real)
    return bytes(out.numpy().data)


@pytest.mark.parametrize(
    ("word", "wide"),
    [
        (5, 6),
        (-1, -1),
        (2**32 - 1, 2**64 - 1),
        (-(2**31), -(2**63)),
        (1.5, 2.5),
        (np.int32(-7), np.uint64(7)),
        (np.uint32(7), np.int64(-7)),
    ],
)
def test_untyped_words_take_integers_of_either_sign_and_floats(
    word: Any, wide: Any, device: Gpu
) -> None:
    def raw(value: Any, size: int) -> bytes:
        if isinstance(value, float):
            return struct.pack("<f" if size == 4 else "<d", value)
        return (int(value) % (1 << 8 * size)).to_bytes(size, "little")

    expected = raw(wide, 8) + raw(word, 4) + np.float32(0.1).tobytes()
    assert kept(device, word, wide, 0.1) == expected


@pytest.mark.parametrize(
    ("word", "wide"), [(2**32, 0), (-(2**31) - 1, 0), (0, 2**64), (0, -(2**63) - 1)]
)
def test_untyped_words_refuse_what_has_more_bits(word: int, wide: int, device: Gpu) -> None:
    with pytest.raises(LaunchError, match=r"keep, argument [12]: b(32|64) cannot hold"):
        kept(device, word, wide, 0.0)


def test_an_untyped_wide_word_takes_memory_too(device: Gpu) -> None:
    other = device.zeros(3, "int16")
    found = int.from_bytes(kept(device, 0, other, 0.0)[:8], "little")
    assert found == other.address
    assert int.from_bytes(kept(device, 0, Pointer(0x1230), 0.0)[:8], "little") == 0x1230
    assert int.from_bytes(kept(device, 0, None, 0.0)[:8], "little") == 0


# Pointers


def test_a_pointer_to_anything_takes_memory_of_any_type(device: Gpu) -> None:
    out = device.zeros(1, "int64")
    kernel = device.kernel(KERNELS, "any_memory")
    for name in ("float32", "uint8", "complex128", "bfloat16"):
        for memory in (device.zeros(7, name), device.zeros((3, 4), name)[1]):
            kernel[1, 1](memory, out)
            assert out.numpy()[0] == memory.address


def test_none_is_the_null_pointer_and_a_bare_address_needs_its_own_word(device: Gpu) -> None:
    out = device.zeros(1, "int32")
    kernel = device.kernel(KERNELS, "follow")
    for given, seen in ((None, -1), (Pointer(0), -1), (Pointer(out.address), 1), (out, 1)):
        kernel[1, 1](given, out)
        assert out.numpy()[0] == seen
    with pytest.raises(
        LaunchError, match=r"follow, argument 0: int\*\* cannot take int 4096"
    ) as caught:
        kernel[1, 1](4096, out)
    assert (
        caught.value.hint
        == "pass an array, such as gpu.array(…); for a bare address, preheat.Pointer(address)"
    )
