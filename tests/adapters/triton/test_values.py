"""Constants of kernels are written down so that another process gets equal ones of equal types."""

from __future__ import annotations

import json
from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple

import pytest

pytest.importorskip("triton", reason="Triton is a large package, which `make test-adapters` installs")

import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st
from triton.experimental.gluon import language as gl

from preheat.adapters.triton.values import (
    NotPortableError,
    constants_digest,
    decode,
    encode,
    name_of,
    resolve,
    tuples,
)

LAYOUTS = "triton.experimental.gluon.language._layouts"

plain = st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False)
constants = st.recursive(plain, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=6)


def jit(function: Callable[..., Any]) -> Any:
    return triton.jit(function)


@jit
def scale(x: Any) -> Any:
    return x * 2


class Outer:
    @jit
    def inner(x: Any) -> Any:  # noqa: N805
        return x


tuned = triton.autotune(configs=[triton.Config({})], key=[])(scale)


def typed(value: object) -> object:
    """Return a value that differs where types or the signs of zeros differ."""
    if isinstance(value, tuple):
        return [typed(each) for each in value]
    return type(value).__name__, value.hex() if isinstance(value, float) else value


@given(value=constants)
def test_a_constant_survives_a_round_trip(value: object) -> None:
    assert typed(decode(json.loads(json.dumps(encode(value))))) == typed(value)


def test_values_of_triton_survive_a_round_trip() -> None:
    assert decode(encode(tl.bfloat16)) == tl.bfloat16
    assert decode(encode(float("inf"))) == float("inf")
    assert decode(encode(tl.constexpr(3))).value == 3
    assert decode(encode(scale)) is scale
    assert decode(encode((scale, (tl.float32, 1)))) == (scale, (tl.float32, 1))


def test_layouts_of_gluon_survive_a_round_trip() -> None:
    parent = gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0])
    layouts = [
        parent,
        gl.SliceLayout(1, parent),
        gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2),
        gl.DistributedLinearLayout([[1]], [[2]] * 5, [[64], [128]], [], [256]),
    ]
    for layout in layouts:
        again = decode(json.loads(json.dumps(encode(layout))))
        assert (type(again), again, str(again)) == (type(layout), layout, str(layout))


@pytest.mark.parametrize("name", ["os:system", f"{LAYOUTS}:List", f"{LAYOUTS}:missing"])
def test_only_layouts_of_gluon_are_made(name: str) -> None:
    with pytest.raises(NotPortableError, match="layout"):
        decode({"layout": {"type": name, "fields": {}}})


class Color(Enum):
    RED = 1


class Point(NamedTuple):
    x: int


class Number(int):
    pass


@pytest.mark.parametrize(
    "value", [Color.RED, Point(1), Number(1), object(), b"x", [1], {"a": 1}, 1j, (1, Color.RED)]
)
def test_a_value_of_an_unknown_type_is_not_portable(value: object) -> None:
    with pytest.raises(NotPortableError, match="a constant is a "):
        encode(value)


@given(a=constants, b=constants)
def test_digests_differ_where_values_or_types_differ(a: object, b: object) -> None:
    same = typed(a) == typed(b)
    assert (constants_digest({(0,): a}) == constants_digest({(0,): b})) is same


def test_constants_that_triton_confuses_have_different_digests() -> None:
    values: list[Any] = [
        *(1, "1", True, "True", 1.0, "1.0", None, "None", (1,), "(1,)", ("1",)),
        *(("x-y", "z"), ("x", "y-z"), tl.constexpr(1), tl.constexpr("1"), tl.constexpr(None)),
        *(tl.float32, "fp32", scale, str(scale.cache_key)),
    ]
    digests = {constants_digest({(0,): value}) for value in values}
    assert len(digests) == len(values)
    assert constants_digest({(0,): 1, (1,): 2}) == constants_digest({(1,): 2, (0,): 1})
    assert constants_digest({(0,): 1, (1,): 2}) != constants_digest({(0,): 2, (1,): 1})


def test_functions_have_names_by_which_they_are_found() -> None:
    assert name_of(scale) == f"{__name__}:scale"
    assert resolve(name_of(Outer.inner)) is Outer.inner
    assert resolve(f"{__name__}:tuned") is scale  # The tuner is around the function.


def test_a_function_inside_a_function_has_no_such_name() -> None:
    @jit
    def local(x: Any) -> Any:
        return x

    with pytest.raises(NotPortableError, match="local is defined inside a function"):
        name_of(local)
    with pytest.raises(NotPortableError, match="is defined inside a function"):
        encode(local)


def test_a_name_whose_module_cannot_be_imported() -> None:
    with pytest.raises(NotPortableError, match="no_such_module:f cannot be imported") as caught:
        resolve("no_such_module:f")
    assert caught.value.hint is None


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("scaled", "did you mean 'scale'? If so, record again with --fresh"),
        ("Outer.iner", "did you mean 'Outer.inner'? If so, record again with --fresh"),
        ("nothing", "record again with --fresh"),
        ("scale.nothing", "record again with --fresh"),
    ],
)
def test_a_function_that_its_module_does_not_have(path: str, hint: str) -> None:
    with pytest.raises(NotPortableError) as caught:
        resolve(f"{__name__}:{path}")
    assert str(caught.value) == f"module {__name__} has no function {path} ({__file__})"
    assert caught.value.hint == hint


def test_an_object_that_is_no_function_of_triton() -> None:
    with pytest.raises(NotPortableError, match=f"{__name__}:typed is not a function of Triton"):
        resolve(f"{__name__}:typed")


def test_lists_of_json_become_tuples_again() -> None:
    assert tuples(["i32", ["*fp32", ["i64"]]]) == ("i32", ("*fp32", ("i64",)))
