"""The key of a kernel: what makes it another one, what does not, and what cannot be keyed."""

from __future__ import annotations

import collections
import enum
import linecache
import math
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="Numba-CUDA is installed by `make test-adapters`")

from numba import cuda, njit
from numba.cuda import types as numba_types
from numba.cuda.typing.typeof import typeof

from preheat.adapters.base import NotKeyableError
from preheat.adapters.numba import signature
from preheat.adapters.numba.dependencies import Dependencies
from preheat.adapters.numba.request import KernelRequest
from preheat.model.arch import Arch

SOURCE = """
@cuda.jit(device=True)
def inner(x):
    return x * FACTOR

@cuda.jit(device=True)
def helper(x):
    return inner(x) + 1

@cuda.jit
def kernel(x):
    x[0] = helper(x[0]) + other.VALUE
"""
FLOATS = (numba_types.float32[::1],)


def define(source: str = SOURCE, **names: Any) -> Any:
    """Return the dispatcher `kernel` of a module of its own."""
    other = types.ModuleType("other")
    other.VALUE = names.pop("VALUE", 5)  # type: ignore[attr-defined]
    space: dict[str, Any] = {"cuda": cuda, "math": math, "np": np, "other": other, "FACTOR": 2.0}
    space |= {"__name__": "module_of_a_test", **names}
    exec(compile(source, "<module of a test>", "exec"), space)
    linecache.clearcache()
    return space["kernel"]


def key(dispatcher: Any, kinds: tuple[Any, ...] = FLOATS, arch: str = "sm_90") -> str:
    """Return the key of a kernel."""
    request = KernelRequest(dispatcher.py_func, dispatcher.targetoptions, kinds, Arch.parse(arch))
    return request.identity.key


DIFFERENT: dict[str, Callable[[], Any]] = {
    "a global of a function that it calls": lambda: define(FACTOR=3.0),
    "the type of a global": lambda: define(FACTOR=2),
    "a number of NumPy": lambda: define(FACTOR=np.float32(2)),
    "an attribute of a module": lambda: define(VALUE=6),
    "the code of a function that it calls": lambda: define(SOURCE.replace("(x) + 1", "(x) + 2")),
    "the code two calls away": lambda: define(SOURCE.replace("x * FACTOR", "FACTOR * x")),
    "its own code": lambda: define(SOURCE.replace("x[0] = helper", "x[1] = helper")),
    "an option of it": lambda: define(SOURCE.replace("@cuda.jit\n", "@cuda.jit(fastmath=True)\n")),
    "an option that is 0": lambda: define(
        SOURCE.replace("@cuda.jit\n", "@cuda.jit(shared_memory_carveout=0)\n")
    ),
    "an option of a function that it calls": lambda: define(
        SOURCE.replace("device=True", "device=True, inline='always'", 1)
    ),
}


@pytest.mark.parametrize("change", DIFFERENT)
def test_the_key_differs_for(change: str) -> None:
    assert key(DIFFERENT[change]()) != key(define())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.arange(3), np.arange(1, 4)),
        (np.arange(3), np.arange(3.0)),
        (np.ones((2, 2)), np.ones((2, 2), order="F")),
        ((1, 2), (1, 3)),
        ((1, 2), (1, 2.0)),
        (0.0, -0.0),
        (True, 1),
        (enum.Enum("E", {"A": 1}), enum.Enum("E", {"A": 2})),
        (numba_types.float32, numba_types.float64),
        (np.dtype("f4"), np.dtype("f8")),
        (lambda x: x, lambda x: x + 1),
        (njit(lambda x: x), njit(lambda x: x + 1)),
    ],
)
def test_the_key_differs_for_values_of_a_global(one: Any, other: Any) -> None:
    keys = {key(define(FACTOR=value)) for value in (one, other)}
    assert len(keys) == 2
    assert key(define(FACTOR=one)) in keys


def test_the_key_differs_for_values_of_a_closure() -> None:
    def make(n: int) -> Any:
        def kernel(x: Any) -> None:
            x[0] = n

        return cuda.jit(kernel)

    assert len({key(make(1)), key(make(2)), key(make(1))}) == 2


def test_the_key_differs_for_types_and_architectures() -> None:
    kernel = define()
    arrays = [numba_types.float32[::1], numba_types.float32[:], numba_types.float64[::1]]
    readonly = numba_types.Array(numba_types.float32, 1, "C", readonly=True)
    keys = [key(kernel, (kind,)) for kind in (*arrays, readonly)]
    assert len({*keys, key(kernel, arch="sm_100")}) == 5


def test_the_key_is_the_same_on_another_line_and_in_another_module() -> None:
    assert key(define("\n\n# a comment\n" + SOURCE, __name__="another_module")) == key(define())


def test_the_key_has_lines_where_the_code_has_them() -> None:
    lines = SOURCE.replace("@cuda.jit\n", "@cuda.jit(lineinfo=True)\n")
    assert key(define(lines)) != key(define("\n" + lines))
    assert key(define(lines)) == key(define(lines))


def test_a_global_that_the_code_does_not_read_is_not_in_the_key() -> None:
    assert key(define(UNUSED=object())) == key(define())


def test_a_function_that_calls_itself_has_a_key() -> None:
    source = (
        "@cuda.jit(device=True)\ndef count(n):\n    return 0 if n == 0 else count(n - 1)\n"
        "@cuda.jit\ndef kernel(x):\n    x[0] = count(x[0])\n"
    )
    assert key(define(source)) == key(define(source))
    assert key(define(source)) != key(define(source.replace("return 0", "return 1")))


class Handle:
    value = 1

    @property
    def py_func(self) -> Any:
        raise RuntimeError("not now")


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (object(), "inner uses FACTOR, which is a builtins.object"),
        (np.array([object()]), "inner uses FACTOR, which is a numpy.ndarray"),
        (types.ModuleType("bare"), "inner uses module bare as a value"),
        (Handle(), "what it uses cannot be read: RuntimeError"),
    ],
)
def test_what_cannot_be_keyed_is_named(value: Any, reason: str) -> None:
    with pytest.raises(NotKeyableError) as caught:
        key(define(FACTOR=value))
    assert str(caught.value).startswith(reason)


def test_known_names_stand_for_their_code() -> None:
    source = (
        "from numba.cuda import threadIdx as place\nfrom math import sin\n"
        "@cuda.jit\ndef kernel(x):\n"
        "    s = cuda.shared.array(4, np.float32)\n"
        "    x[place.x] = sin(np.cos(x[0])) + len(x) + s[0]\n"
    )
    kernel = define(source)
    parts = Dependencies(kernel.py_func, kernel.targetoptions).parts
    assert parts["cuda.shared.array of kernel"] == "numba.cuda.shared.array"
    assert parts["sin of kernel"] == "name math.sin"
    assert parts["np.cos of kernel"] == "numpy.cos"
    assert parts["len of kernel"] == "name builtins.len"
    assert parts["place of kernel"].startswith("name numba.cuda")


# Types


class Color(enum.IntEnum):
    RED = 1


class Weight(enum.Enum):
    HEAVY = 1.5


Point = collections.namedtuple("Point", "x y")
RECORD = np.dtype([("a", "i1"), ("b", "f8", (2, 2))], align=True)
VALUES = [
    *(1, 2.0, True, 1j, np.int8(1), np.float16(2), np.complex64(1), None),
    *((1, 2), (1, 2.0), ((1,), 2.0), Point(1, 2), Point(1, 2.0), Color.RED, Weight.HEAVY),
    *(np.ones(3, "f4"), np.ones((2, 3), order="F"), np.ones((4, 4))[::2, ::2], np.zeros(2, RECORD)),
    *(np.zeros(1, RECORD)[0], np.datetime64("2020", "D"), np.timedelta64(1, "ns")),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_types_survive_json(value: Any) -> None:
    import json

    kind = typeof(value)
    assert signature.decode(json.loads(json.dumps(signature.encode(kind)))) == kind


def test_a_type_without_a_description_is_named() -> None:
    with pytest.raises(NotKeyableError, match="an argument is a "):
        signature.encode(typeof(np.zeros(2, "S3")))


def test_signatures_are_written_as_people_write_them() -> None:
    kinds = [typeof(each) for each in (*VALUES[15:18], 1, np.float32(2))]
    text = "(float32[::1], float64[::1, :], float64[:, :], int64, float32)"
    assert signature.text(kinds) == text
    assert signature.text([typeof(np.ones((2, 3, 4)))]) == "(float64[:, :, ::1])"
