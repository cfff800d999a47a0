"""Schemas of operators: what is read from them, and what is refused with its reason."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="a CPU build of torch is installed by `make test-torch`")

from preheat.adapters.torch.schema import Argument, Schema
from preheat.errors import InputError

pytestmark = pytest.mark.torch


def test_a_schema_is_read() -> None:
    schema = Schema.parse(
        " my::f(Tensor(a!) x, Tensor? y, float a=1.5, *, bool flag=True) -> (Tensor, Tensor) "
    )
    assert schema.name == "my::f"
    assert schema.signature.startswith("(Tensor(a!) x,")
    assert schema.mutated == ("x",)
    assert schema.returns == 2
    assert schema.arguments == (
        Argument("x", "Tensor", mutated=True),
        Argument("y", "Optional[Tensor]"),
        Argument("a", "float", default=(1.5,)),
        Argument("flag", "bool", keyword=True, default=(True,)),
    )


def test_values_are_bound_in_the_order_of_the_schema() -> None:
    schema = Schema.parse(
        "my::f(Tensor x, int n, float a=1.5, *, bool flag=True, int? k=None) -> Tensor"
    )
    assert schema.bind(("x", 3), {}) == ("x", 3, 1.5, True, None)
    assert schema.bind(("x",), {"k": 7, "n": 3}) == ("x", 3, 1.5, True, 7)
    assert schema.bind(("x", 3, 2.0), {"flag": False}) == ("x", 3, 2.0, False, None)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (7, "a schema is text, not 7"),
        ("", "'' is not a schema: "),
        ("my::f(Tensor x -> ()", "is not a schema: expected ) but found 'arrow'"),
        ("my::f(Tensor x)", "is not a schema: expected arrow but found 'eof'"),
        ("my::f(Matrix x) -> ()", "is not a schema: unknown type specifier"),
        ("a::b::c(Tensor x) -> ()", "is not a schema: expected eof"),
        ("f(Tensor(a!) x) -> ()", "f: the name has no namespace"),
        ("my::f.int(Tensor(a!) x) -> ()", "my::f: the overload name 'int' is not supported"),
        ("my::f(Tensor x, Tensor x) -> Tensor", "two arguments are called 'x'"),
        ("my::f(int n) -> Tensor", "it has no Tensor argument"),
        ("my::f(Tensor? x) -> Tensor", "it has no Tensor argument"),
        ("my::f(Tensor x, *, Tensor y) -> Tensor", "tensor y can be given only by name"),
        ("my::f(Tensor x) -> int", "it returns int, and a kernel can return only tensors"),
        ("my::f(Tensor x) -> Tensor[]", "it returns List[Tensor]"),
        ("my::f(Tensor(a!) x) -> Tensor(a!)", "it returns one of its arguments"),
        ("my::f(Tensor x) -> ()", "it returns nothing and writes to no argument"),
    ],
)
def test_a_schema_that_no_kernel_implements_is_refused(text: object, problem: str) -> None:
    with pytest.raises(InputError) as refused:
        Schema.parse(text)
    assert problem in str(refused.value)


@pytest.mark.parametrize("kind", ["str", "Tensor[]", "int[]", "int?", "Device"])
def test_an_argument_that_no_kernel_takes_is_refused_by_name(kind: str) -> None:
    schema = Schema.parse(f"my::f(Tensor x, {kind} it) -> Tensor")
    with pytest.raises(
        InputError, match=r"my::f: argument it is .*, which a kernel does not take"
    ) as no:
        schema.plain_arguments()
    assert no.value.hint is not None
    assert "args=" in no.value.hint
