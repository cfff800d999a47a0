"""Element types: the names of every library, and the types that each C++ pointer accepts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from preheat.dtypes import (
    DTYPES,
    dtype_of,
    dtype_of_dlpack,
    dtype_of_typestr,
    pointee_dtypes,
)
from preheat.errors import InputError


@pytest.mark.parametrize("name", DTYPES)
def test_a_type_is_found_by_every_name_it_has(name: str) -> None:
    row = DTYPES[name]
    assert dtype_of(name) is row
    assert dtype_of(row) is row
    assert dtype_of_dlpack(row.dlpack, row.size * 8, 1) is row
    assert row.numpy().itemsize == row.size
    assert str(row) == name
    if row.host == name:
        scalar: Any = getattr(np, "bool" if name == "bool" else name)
        for spelling in (np.dtype(name), scalar, row.typestr[1:]):
            assert dtype_of(spelling) is row
        assert dtype_of_typestr(row.typestr) is row


def test_python_types_mean_what_numpy_makes_of_them() -> None:
    for given, name in ((int, "int64"), (float, "float64"), (complex, "complex128"), (bool, "bool")):
        assert dtype_of(given) is DTYPES[name]
        assert np.dtype(given).name == name


class TorchType:
    """Prints itself as torch's types do."""

    def __str__(self) -> str:
        return "torch.bfloat16"


def test_torch_types_are_known_by_their_printed_name() -> None:
    assert dtype_of(TorchType()) is DTYPES["bfloat16"]


def test_a_value_that_is_no_type_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(InputError, match="'flot32' is not an element type") as caught:
        dtype_of("flot32")
    assert caught.value.hint == "did you mean 'float32'?"
    for wrong in (">f4", "str", None, 4, np.dtype("U3")):
        with pytest.raises(InputError, match="is not an element type"):
            dtype_of(wrong)


def test_types_without_a_name_here_are_none() -> None:
    assert dtype_of_dlpack(2, 32, 4) is None  # float32x4
    assert dtype_of_dlpack(3, 64, 1) is None  # an opaque handle
    assert dtype_of_typestr(">f4") is None
    assert dtype_of_typestr("|V16") is None


@pytest.mark.parametrize(
    ("cpp", "names"),
    [
        ("float const*", {"float32"}),
        ("const float *", {"float32"}),
        ("double*", {"float64"}),
        ("volatile int*", {"int32", "uint32"}),
        ("unsigned long long*", {"int64", "uint64"}),
        ("long*", {"int64", "uint64"}),
        ("short const*", {"int16", "uint16"}),
        ("unsigned char*", {"int8", "uint8", "bool", "float8_e4m3fn", "float8_e5m2"}),
        ("bool*", {"bool", "uint8", "int8"}),
        ("__half*", {"float16", "uint16"}),
        ("__nv_bfloat16 const*", {"bfloat16", "uint16"}),
        ("float4*", {"float32"}),
        ("float2*", {"float32", "complex64"}),
        ("double2*", {"float64", "complex128"}),
        ("uchar4*", {"int8", "uint8", "bool", "float8_e4m3fn", "float8_e5m2"}),
        ("longlong2*", {"int64", "uint64"}),
    ],
)
def test_a_pointer_takes_the_types_of_its_element(cpp: str, names: set[str]) -> None:
    found = pointee_dtypes(cpp)
    assert found is not None
    assert {dtype.name for dtype in found} == names


@pytest.mark.parametrize("cpp", ["void*", "Pair*", "float**", "float", "CUtensorMap const*", ""])
def test_a_pointer_to_something_unknown_takes_anything(cpp: str) -> None:
    assert pointee_dtypes(cpp) is None


@pytest.mark.parametrize("name", ["f4", "<f4", "=f4", "float32"])
def test_every_spelling_of_numpy_is_understood(name: str) -> None:
    assert dtype_of(name) is DTYPES["float32"]
