"""Element types: the names of every library, and the types that each C++ pointer accepts."""

from __future__ import annotations

import ast
import copy
import json
import operator
import pickle
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from preheat.errors import InputError
from preheat.graph.keys import key_text
from preheat.model.dtypes import DTYPES, dtype_of, dtype_of_dlpack, dtype_of_typestr, pointee_dtypes


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


# Comparisons


def compared(one: object, other: object) -> list[object]:
    """Return the results of all comparisons: equal and unequal, from both sides."""
    pairs = (one, other), (other, one)
    return [compare(*pair) for compare in (operator.eq, operator.ne) for pair in pairs]


def same_for(name: str) -> list[Any]:
    """Return what names the type `name`: texts, and types of NumPy and Python."""
    python = {"int64": int, "float64": float, "complex128": complex, "bool": bool}
    spellings: list[Any] = [name, np.str_(name), *([python[name]] if name in python else [])]
    if DTYPES[name].host == name:
        spellings += [np.dtype(name), np.dtype(name).type, np.zeros(1, name).dtype]
    return spellings


@pytest.mark.parametrize("name", DTYPES)
def test_a_type_is_equal_to_everything_that_names_it(name: str) -> None:
    row = DTYPES[name]
    for spelling in same_for(name):
        assert compared(row, spelling) == [True, True, False, False]


@pytest.mark.parametrize("name", DTYPES)
def test_a_type_differs_from_every_other_type(name: str) -> None:
    row = DTYPES[name]
    others = [spelling for other in DTYPES if other != name for spelling in same_for(other)]
    others += [DTYPES[other] for other in DTYPES if other != name]
    for other in others:
        assert compared(row, other) == [False, False, True, True]


@pytest.mark.parametrize(
    "other",
    [None, 4, 4.0, (), ("float32", 4), object(), str, type("float32", (), {}), "f4", "<f4", "Float32",
     np.dtype(">f4"), np.dtype(("f4", (2,))), np.dtype([("x", "f4")]), np.float32(0)],
)  # fmt: skip
def test_a_type_is_not_equal_to_what_is_no_name_of_it(other: object) -> None:
    assert compared(DTYPES["float32"], other) == [False, False, True, True]


def test_a_comparison_with_an_array_is_that_of_numpy() -> None:
    names = np.array(["float32", "int8"])
    assert operator.eq(DTYPES["float32"], names).tolist() == [True, False]


@pytest.mark.parametrize("name", DTYPES)
def test_equal_types_and_names_have_equal_hashes(name: str) -> None:
    row = DTYPES[name]
    assert hash(row) == hash(name)
    by_type: dict[str, int] = {row: 1}
    assert by_type[name] == {name: 1}[row] == 1
    assert len({row, name, pickle.loads(pickle.dumps(row))}) == 1


def test_dicts_and_tuples_find_a_type_without_a_call_of_python() -> None:
    """Keys of launches and graphs have types in them."""
    row, table = DTYPES["float32"], {(DTYPES["float32"], 3): 1}
    calls: list[object] = []
    sys.setprofile(lambda frame, event, _: calls.append(frame) if event == "call" else None)
    try:
        found = (table[row, 3], row in (row, DTYPES["int32"]), hash(row), row.name, row.size)
    finally:
        sys.setprofile(None)
    assert found == (1, True, hash("float32"), "float32", 4)
    assert calls == []


@pytest.mark.parametrize("name", DTYPES)
def test_a_copy_of_a_type_is_the_same_object(name: str) -> None:
    row = DTYPES[name]
    for copied in (copy.copy(row), copy.deepcopy(row), pickle.loads(pickle.dumps(row))):
        assert copied is row


def test_numpy_takes_a_type_as_its_own() -> None:
    for name, row in DTYPES.items():
        if row.host == name:
            assert np.zeros(2, row).dtype == row
    assert json.dumps({"dtype": DTYPES["bfloat16"]}) == '{"dtype": "bfloat16"}'


def test_torch_types_are_compared_by_their_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for torch, whose types have no comparison of their own."""
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(dtype=TorchType))
    assert compared(DTYPES["bfloat16"], TorchType()) == [True, True, False, False]
    assert compared(DTYPES["float16"], TorchType()) == [False, False, True, True]


def test_a_graph_key_with_a_type_is_written_as_its_name() -> None:
    """The key of a recording is read as a literal, which must be equal to the key of the program."""
    key = (3, DTYPES["bfloat16"])
    assert key_text(key) == "(3, 'bfloat16')"
    assert ast.literal_eval(key_text(key)) == key


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
