"""Arrays and scalars: round trips, views that share memory, and conversions that are refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from preheat.errors import InputError, StaleBufferError
from preheat.gpu import Gpu
from preheat.model.dtypes import DTYPES

SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (31,), (0,), (3, 0, 5), (7, 33), (2, 3, 5, 7))


def sample(name: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Random elements of a type, as the host holds them."""
    random = np.random.default_rng(len(name) * 100 + len(shape))
    if name == "bool":
        return random.integers(0, 2, shape).astype(bool)
    dtype = DTYPES[name].numpy()
    if dtype.kind in "fc":
        return np.asarray(random.standard_normal(shape) * (1 if dtype.kind == "f" else 1 + 2j), dtype)
    top = np.iinfo(dtype)
    return random.integers(top.min, top.max, shape, dtype, endpoint=True)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", DTYPES)
def test_every_type_and_shape_comes_back_as_it_went_in(
    name: str, shape: tuple[int, ...], device: Gpu
) -> None:
    data = sample(name, shape)
    made = device.array(data, dtype=name)
    assert (made.shape, made.dtype.name, made.ndim, made.size) == (shape, name, len(shape), data.size)
    assert made.nbytes == data.nbytes
    back = made.numpy()
    assert back.shape == shape
    assert back.dtype == DTYPES[name].numpy()
    assert back.tobytes() == data.tobytes()


@pytest.mark.parametrize("name", [n for n in DTYPES if DTYPES[n].host == n])
def test_the_type_is_taken_from_the_data_where_none_is_given(name: str, device: Gpu) -> None:
    assert device.array(sample(name, (5,))).dtype is DTYPES[name]


def test_lists_numbers_and_strided_arrays_become_contiguous_copies(device: Gpu) -> None:
    assert device.array([[1, 2], [3, 4]]).numpy().tolist() == [[1, 2], [3, 4]]
    assert device.array(2.5).shape == ()
    table = np.arange(60, dtype=np.int32).reshape(5, 12)
    for view in (table.T, table[::2, 1::3], table[::-1]):
        assert np.array_equal(device.array(view).numpy(), view)
    swapped = table.astype(">i4")
    assert np.array_equal(device.array(swapped, dtype="int32").numpy(), table)


def test_an_array_of_arrays_is_a_copy(device: Gpu) -> None:
    first = device.array(np.arange(33, dtype=np.float32))
    copy = device.array(first)
    first.fill(-1)
    assert np.array_equal(copy.numpy(), np.arange(33))
    with pytest.raises(InputError, match="cannot be copied as float64"):
        device.array(first, dtype="float64")


@pytest.mark.parametrize("name", DTYPES)
def test_fill_sets_every_element(name: str, device: Gpu) -> None:
    value: Any = sample(name, ())[()]
    for shape in ((37,), (), (0,), (3, 11)):
        made = device.empty(shape, name)
        assert made.fill(value) is made
        assert made.numpy().tobytes() == np.full(shape, value).tobytes()


@pytest.mark.parametrize("name", DTYPES)
def test_fill_takes_one_element_only(name: str, device: Gpu) -> None:
    made = device.zeros(4, name)
    for wrong in (sample(name, (3,)), [1, 2], "a", None, object()):
        with pytest.raises(InputError):
            made.fill(wrong)  # type: ignore[arg-type]
    assert not made.numpy().any()


@pytest.mark.parametrize("name", DTYPES)
def test_zeros_are_zeros_in_reused_memory(name: str, device: Gpu) -> None:
    for _ in range(3):  # Freed memory is reused.
        device.array(sample(name, (501,)), dtype=name).close()
        assert not device.zeros((501,), name).numpy().any()


def test_slices_are_views_of_the_first_axis(device: Gpu) -> None:
    data = np.arange(7 * 5, dtype=np.int32).reshape(7, 5)
    whole = device.array(data)
    cases: list[Any] = [
        0, 6, -1, -7, slice(2, 5), slice(None), slice(5, 99), slice(-2, None), slice(4, 2), np.int64(3),
    ]  # fmt: skip
    for index in cases:
        assert np.array_equal(whole[index].numpy(), data[index]), index
    assert np.array_equal(whole[2:6][1:][0].numpy(), data[3])
    whole[2:5].fill(-7)
    data[2:5] = -7
    whole[6].write(np.arange(5, dtype=np.int32))
    data[6] = np.arange(5)
    assert np.array_equal(whole.numpy(), data)
    assert [len(whole), len(whole[1])] == [7, 5]


def test_other_axes_are_a_view_of_the_same_elements(device: Gpu) -> None:
    data = np.arange(2 * 3 * 5, dtype=np.int32).reshape(2, 3, 5)
    whole = device.array(data)
    for shape in ((6, 5), (-1, 5), (30,), (-1,), (5, -1, 2), (1, 30, 1), (np.int64(10), 3)):
        assert np.array_equal(whole.reshape(*shape).numpy(), data.reshape(*shape)), shape
        assert np.array_equal(whole.reshape(shape).numpy(), data.reshape(shape)), shape
    whole[1].reshape(15)[3:].fill(-1)
    data[1].reshape(15)[3:] = -1
    assert np.array_equal(whole.numpy(), data)
    assert device.scalar("int32", 3).reshape(1, 1).shape == (1, 1)
    assert device.empty((0, 4)).reshape(-1, 4).shape == (0, 4)
    for wrong in ((7, 5), (-1, 7), (-1, -1), (-2, 15), (1.5, 20), (0, -1)):
        with pytest.raises(InputError, match="shape"):
            whole.reshape(*wrong)


def test_write_and_copy_from_give_the_array_back(device: Gpu) -> None:
    data = np.random.default_rng(3).standard_normal((3, 4)).astype(np.float32)
    first, second = device.empty((3, 4)), device.empty((3, 4))
    assert first.write(data) is first
    assert second.copy_from(first) is second
    assert np.array_equal(second.numpy(), data)
    assert np.array_equal(second[1].copy_from(first[2]).numpy(), data[2])
    device.empty(0).copy_from(device.empty(0))


def test_the_source_of_a_write_may_change_at_once(device: Gpu) -> None:
    data = np.arange(100_003, dtype=np.int64)
    made = device.array(data)
    data[:] = -1
    assert np.array_equal(made.numpy(), np.arange(100_003))


def test_a_large_array_comes_back_whole(device: Gpu) -> None:
    data = np.random.default_rng(4).integers(0, 256, (9 << 20) + 13, np.uint8)  # more than two pieces
    assert np.array_equal(device.array(data).numpy(), data)


@pytest.mark.parametrize(
    ("data", "dtype", "words"),
    [
        ([300], "uint8", "values from 300 to 300 do not fit uint8"),
        ([-1], "uint64", "do not fit uint64"),
        ([2**31], "int32", "do not fit int32"),
        ([1.5], "int32", "float64 cannot be converted to int32 without loss"),
        ([1], "bool", "int64 cannot be converted to bool without loss"),
        ([1j], "float32", "complex128 cannot be converted to float32"),
        (["a"], "float32", "cannot read list as an array: 'a' is not a number"),
        (np.array(["a"]), "float32", "cannot be converted to float32"),
        ([[1], [2, 3]], "int32", "cannot read list as an array: its rows have different lengths"),
        ([1.0], "float8_e5m2", "give float8_e5m2 as raw bits"),
    ],
)
def test_data_that_would_lose_something_is_refused(
    data: Any, dtype: str, words: str, device: Gpu
) -> None:
    with pytest.raises(InputError, match=words):
        device.array(data, dtype=dtype)


def test_data_without_an_element_type_is_refused(device: Gpu) -> None:
    for data in (np.array(["a"]), np.zeros(2, ">f4"), np.zeros(2, "M8[s]")):
        with pytest.raises(InputError, match="is not an element type") as caught:
            device.array(data)
        assert str(caught.value.hint).startswith("use one of int8, uint8, int16")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (["a", "b"], "cannot read list as an array: 'a' is not a number"),
        ([[1, 2], [3, "b"]], "cannot read list as an array: 'b' is not a number"),
        ([1.5, None], "cannot read list as an array: None is not a number"),
        (None, "cannot read NoneType as an array: None is not a number"),
        ({1: 2}, "cannot read dict as an array: {1: 2} is not a number"),
        ("abc", "cannot read str as an array: 'abc' is not a number"),
        ([1, 2**70], "1180591620717411303424 does not fit into 64 bits"),
        ([-(10**5000)], "an integer of 16610 bits does not fit into 64 bits"),
        (
            [[0] * 9, [0]] * 9999,
            "cannot read list as an array: its rows have different lengths: "
            "[[0, 0, 0, 0, 0, 0, …], [0], [0, 0, 0, 0, 0, 0, …], [0], [0, 0, 0, 0, 0, 0, …], [0], …]",
        ),
        (["x" * 9999], f"cannot read list as an array: '{'x' * 27}…{'x' * 28}' is not a number"),
    ],
    ids=range(10),
)
def test_a_value_that_is_no_number_is_named_and_never_at_length(
    data: Any, words: str, open_device: Callable[..., Gpu]
) -> None:
    gpu = open_device("emulator")
    for do in (gpu.array, gpu.zeros(2).write):
        with pytest.raises(InputError) as caught:
            do(data)
        assert str(caught.value) == words


def test_bytes_are_elements_of_uint8(device: Gpu) -> None:
    assert device.array(b"abc").numpy().tolist() == [97, 98, 99]
    assert device.zeros(3, "uint8").write(bytearray(b"abc")).numpy().tolist() == [97, 98, 99]


def test_in_range_integers_of_any_width_are_taken(device: Gpu) -> None:
    assert device.array([0, 255], "uint8").numpy().tolist() == [0, 255]
    assert device.array(np.array([-128, 127], np.int64), "int8").numpy().tolist() == [-128, 127]
    assert device.array([True, False], "int16").numpy().tolist() == [1, 0]
    assert device.array([], "int8").shape == (0,)
    assert device.array([2, 3], "float32").numpy().tolist() == [2.0, 3.0]


@pytest.mark.parametrize("shape", [-1, (3, -1), 2.5, "ab", (2.0,), None])
def test_a_shape_that_is_none_is_refused(shape: Any, device: Gpu) -> None:
    with pytest.raises(InputError, match="shape"):
        device.empty(shape)


def test_an_array_larger_than_any_memory_is_refused(device: Gpu) -> None:
    with pytest.raises(InputError, match="bytes"):
        device.empty((1 << 30, 1 << 30))


def test_scalars_hold_one_value_at_a_fixed_address(device: Gpu) -> None:
    step = device.scalar("int32", 7, name="step")
    address = step.address
    assert step.get() == 7
    for value in (0, -(2**31), 2**31 - 1):
        step.set(value)
        assert step.get() == value
    assert step.address == address
    assert repr(step) == f"<Scalar 'step' int32 on {device.name}>"
    for wrong in (2**31, 1.5, 1j, "a"):
        with pytest.raises(InputError, match="does not fit int32"):
            step.set(wrong)  # type: ignore[arg-type]
    assert step.get() == 2**31 - 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bool", True), ("float16", 1.5), ("float64", math.pi), ("complex64", 1 - 2j),
        ("complex128", 1 - 2j), ("bfloat16", -1.5), ("uint64", 2**64 - 1), ("float32", math.inf),
    ],
)  # fmt: skip
def test_scalars_of_every_kind_give_their_value_back(name: str, value: complex, device: Gpu) -> None:
    assert device.scalar(name, value).get() == value


def nearest_bfloat16(value: float) -> int:
    """Return the bits of the nearest bfloat16, ties to even, in exact arithmetic."""
    exact = Fraction(abs(value))
    sign = int(math.copysign(1, value) < 0)
    candidates = range(0x7F81)

    def number(bits: int) -> Fraction:
        exponent, fraction = bits >> 7, bits & 0x7F
        whole = fraction if exponent == 0 else fraction | 0x80
        return Fraction(whole) * Fraction(2) ** (max(exponent, 1) - 127 - 7)

    at = min(candidates, key=lambda bits: (abs(number(bits) - exact), bits & 1))
    return sign << 15 | at


HARD = (
    1 + 2**-8 + 2**-40,
    1 + 2**-8,
    1 + 3 * 2**-8,
    -(1 + 2**-8 - 2**-40),
    1e-41,
    3.3895e38,
    0.1,
    -math.pi,
)


def test_bfloat16_is_rounded_once_to_the_nearest(device: Gpu) -> None:
    expected = [nearest_bfloat16(value) for value in HARD]
    assert device.array(HARD, "bfloat16").numpy().tolist() == expected
    one = device.scalar("bfloat16")
    for value, bits in zip(HARD, expected, strict=True):
        one.set(value)
        assert int(one.numpy()) == bits
    special = device.array([math.inf, -math.inf, math.nan, 1e39], "bfloat16").numpy()
    assert special.tolist() == [0x7F80, 0xFF80, 0x7FFF, 0x7F80]
    with pytest.raises(InputError, match="does not fit bfloat16"):
        one.set(1e39)


def read_float8(bits: int, fraction: int, bias: int) -> float:
    """Return the value of the bits of a float8 with `fraction` bits of fraction."""
    sign = -1.0 if bits >> 7 else 1.0
    exponent, rest = (bits & 127) >> fraction, bits & (1 << fraction) - 1
    top = (127 >> fraction) if fraction == 2 else None  # e5m2 has infinities, e4m3fn one NaN
    if (top is None and bits & 127 == 127) or (exponent == top and rest):
        return math.copysign(math.nan, sign)
    if exponent == top:
        return sign * math.inf
    if exponent == 0:
        return sign * rest * 2.0 ** (1 - bias - fraction)
    return sign * (1 + rest / (1 << fraction)) * 2.0 ** (exponent - bias)


def same(found: Any, expected: Any) -> bool:
    """Return True if the bits are equal, except for those of NaN."""
    found, expected = np.asarray(found), np.asarray(expected, found.dtype)
    signs = np.array_equal(np.signbit(found), np.signbit(expected))
    return signs and np.array_equal(found, expected, equal_nan=True)


def test_bits_that_numpy_lacks_become_numbers(device: Gpu) -> None:
    words = np.arange(1 << 16, dtype=np.uint16)
    found = device.array(words, "bfloat16").numpy("float32")
    assert found.dtype == np.float32
    assert np.array_equal(found.view(np.uint32), words.astype(np.uint32) << 16)
    for name, fraction, bias in (("float8_e4m3fn", 3, 7), ("float8_e5m2", 2, 15)):
        bits = np.arange(256, dtype=np.uint8)
        small = device.array(bits, name).numpy("float32")
        assert small.dtype == np.float32
        assert same(small, [read_float8(int(each), fraction, bias) for each in bits])
    made = device.array([[1.5, -2.0]], "bfloat16")
    assert made.numpy("float64").tolist() == [[1.5, -2.0]]
    assert made.numpy(np.float16).dtype == np.float16
    assert made.numpy("bfloat16").tolist() == made.numpy().tolist() == [[0x3FC0, 0xC000]]
    assert device.scalar("bfloat16", 1.5).numpy("float32") == np.float32(1.5)


def test_a_copy_on_the_host_has_the_type_that_was_asked_for(device: Gpu) -> None:
    made = device.array([1, 2, 300], "int32")
    for name in ("int16", "int64", "float32", "float64", "complex64"):
        found = made.numpy(name)
        assert found.dtype == name
        assert found.tolist() == [1, 2, 300]
    assert made.numpy("bfloat16").tolist() == [0x3F80, 0x4000, 0x4396]
    with pytest.raises(InputError, match="values from 1 to 300 do not fit uint8"):
        made.numpy("uint8")
    with pytest.raises(InputError, match="bfloat16 cannot be converted to int32 without loss"):
        device.array([1.5], "bfloat16").numpy("int32")
    with pytest.raises(InputError, match="'flot' is not an element type"):
        made.numpy("flot")


def test_float8_and_bfloat16_take_their_bits(device: Gpu) -> None:
    bits = np.arange(256, dtype=np.uint8)
    for name in ("float8_e4m3fn", "float8_e5m2"):
        assert np.array_equal(device.array(bits, name).numpy(), bits)
    words = np.arange(0, 65536, 31, dtype=np.uint16)
    assert np.array_equal(device.array(words, "bfloat16").numpy(), words)
    assert int(device.empty((), "bfloat16").fill(np.uint16(0x3FC0)).numpy()) == 0x3FC0  # type: ignore[arg-type]


def test_a_closed_array_is_refused_by_every_operation(device: Gpu) -> None:
    made = device.array([1.0, 2.0])
    part = made[1:]
    with made:
        pass
    made.close()  # Closing twice is allowed.
    other = device.zeros(2, "float64")
    for operation in (
        made.numpy, part.numpy, lambda: made.write([1.0, 2.0]), lambda: made.fill(1),
        lambda: made.copy_from(other), lambda: other.copy_from(made), lambda: device.array(made),
        lambda: made.__dlpack__(), lambda: made[0].numpy(),
    ):  # fmt: skip
        with pytest.raises(StaleBufferError, match="its memory was freed"):
            operation()
    assert "freed" in repr(made)
    assert made.uses.writer is part.uses.writer is None


def test_memory_at_the_same_address_has_another_generation(device: Gpu) -> None:
    seen = set()
    for _ in range(20):
        made = device.empty(64)
        seen.add(made.buffer.generation)
        made.close()
    assert len(seen) == 20


@pytest.mark.parametrize(
    "index",
    [
        3, -1, slice(1, 4), slice(None), slice(9, 2), (2,), (2, 1), (-4, -2, 3), (1, slice(1, 3)),
        (slice(1, 3), slice(None)), (1, 2, slice(2, None)), (3, slice(None), slice(None)), (), ...,
        (2, ...), (slice(2, 3), ...),
    ],
    ids=str,
)  # fmt: skip
def test_leading_axes_are_indexed_as_in_numpy(index: Any, device: Gpu) -> None:
    data = np.arange(60, dtype=np.int32).reshape(4, 3, 5)
    made = device.array(data)
    view, expected = made[index], data[index]
    assert view.shape == expected.shape
    assert np.array_equal(view.numpy(), expected)
    view.fill(7)
    expected = data.copy()
    expected[index] = 7
    assert np.array_equal(made.numpy(), expected)


@pytest.mark.parametrize("index", [(slice(None), 1), (0, slice(1), 1), (slice(1), slice(1)), (0, None)])
def test_an_index_that_would_leave_gaps_is_refused(index: Any, open_device: Callable[..., Gpu]) -> None:
    made = open_device("emulator").zeros((4, 3, 5))
    with pytest.raises(InputError) as caught:
        made[index]
    assert str(caught.value.hint).endswith("or take a copy: gpu.array(a.numpy()[…])")


def test_arrays_say_what_they_are(device: Gpu) -> None:
    made = device.zeros((2, 3), "int16")
    assert repr(made) == f"<Array int16[2, 3] on {device.name}>"
    assert made.device == device.name
    with pytest.raises(TypeError, match="no length"):
        len(device.empty(()))
    with pytest.raises(InputError, match="has 0 axes and cannot take 1 index"):
        device.empty(())[0]
    with pytest.raises(InputError, match="has 2 axes and cannot take 3 indices"):
        made[0, 0, 0]
    with pytest.raises(InputError, match="step 1"):
        made[::2]
    for index in (2, -3):
        with pytest.raises(IndexError, match=r"outside the first axis of \(2, 3\)"):
            made[index]


def test_raw_bits_are_not_turned_into_integers(device: Gpu) -> None:
    lossy = "bfloat16 cannot be converted to int32 without loss"
    with pytest.raises(InputError, match=lossy) as caught:
        device.array([1.5, 2.5], "bfloat16").numpy("int32")
    assert caught.value.hint == ".numpy(\"float32\").astype('int32') rounds the numbers"
