"""The objects of the native core that call the driver, here functions in Python at real addresses."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from preheat import native
from preheat.devices.array import Array
from preheat.devices.base import NOT_SUBMITTED
from preheat.devices.context import Context
from preheat.devices.memory import Buffer
from preheat.devices.uses import Uses

pytestmark = pytest.mark.skipif(native.core is None, reason=f"no native core: {native.reason}")


def native_limit(name: str) -> int:
    """Return a limit of the native core; any number where there is none."""
    return getattr(native.core, name, 1)


_POINTER = ctypes.c_void_p
_UNSIGNED = ctypes.c_uint
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "launch": (_POINTER, *[_UNSIGNED] * 7, _POINTER, ctypes.POINTER(_POINTER), _POINTER),
    "replay": (_POINTER, _POINTER),
    "push": (_POINTER,),
    "pop": (ctypes.POINTER(_POINTER),),
    "fill8": (ctypes.c_uint64, ctypes.c_ubyte, ctypes.c_size_t, _POINTER),
    "fill16": (ctypes.c_uint64, ctypes.c_ushort, ctypes.c_size_t, _POINTER),
    "fill32": (ctypes.c_uint64, _UNSIGNED, ctypes.c_size_t, _POINTER),
}
FUNCTION, STREAM, GRAPH, CONTEXT = (
    0xF00D_0000_0001,
    0x5EED_0000_0002,
    0x6EAF_0000_0003,
    0xC0DE_0000_0004,
)
GRID, BLOCK, SHARED = (2**31 - 1, 65535, 3), (4, 5, 6), 227 * 1024


class Driver:
    """Notes every call in `calls`. `fail` gives the status of the next calls of a function."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.statuses: dict[str, list[int]] = {}
        self.parameters: list[int] = []  # values at the pointers that a launch got
        self._kept: dict[str, Any] = {}
        self.addresses: dict[str, int] = {}
        for name, types in _SIGNATURES.items():
            made = ctypes.CFUNCTYPE(ctypes.c_int, *types)(self._noting(name))
            self._kept[name] = made
            self.addresses[name] = ctypes.cast(made, _POINTER).value or 0

    def _noting(self, name: str) -> Callable[..., int]:
        def call(*args: Any) -> int:
            if name == "launch":
                pointers, extra = args[-2:]
                assert extra is None
                if pointers:
                    self.parameters = [ctypes.c_int.from_address(pointers[n]).value for n in range(2)]
                args = args[:-2]
            self.calls.append((name, *(args if name != "pop" else ())))
            waiting = self.statuses.get(name)
            return waiting.pop(0) if waiting else 0

        return call

    def fail(self, name: str, *statuses: int) -> None:
        """Let the next calls of a function return these statuses."""
        self.statuses[name] = list(statuses)

    def taken(self) -> list[tuple[Any, ...]]:
        """Return the calls since the last time."""
        calls, self.calls = self.calls, []
        return calls

    @property
    def in_context(self) -> tuple[int, int, int]:
        return (CONTEXT, self.addresses["push"], self.addresses["pop"])


@pytest.fixture
def driver() -> Driver:
    return Driver()


# KernelLaunch


@pytest.fixture
def pointers() -> Iterator[int]:
    """The address of an array of pointers to 7 and 8."""
    numbers = (ctypes.c_int * 2)(7, 8)
    made = (ctypes.c_void_p * 2)(ctypes.addressof(numbers), ctypes.addressof(numbers) + 4)
    yield ctypes.addressof(made)
    del numbers, made


def kernel_launch(driver: Driver, *retry: Any) -> Any:
    launch = driver.addresses["launch"]
    return native.core.KernelLaunch(launch, FUNCTION, GRID, BLOCK, SHARED, STREAM, *retry)


LAUNCHED = ("launch", FUNCTION, *GRID, *BLOCK, SHARED, STREAM)


def test_a_launch_passes_everything_to_the_driver(driver: Driver, pointers: int) -> None:
    launch = kernel_launch(driver)
    assert launch(pointers, 0) == (0,)
    assert driver.taken() == [LAUNCHED]
    assert driver.parameters == [7, 8]


@pytest.mark.parametrize("status", [1, 201, 400, 700, -1])
def test_a_launch_without_a_retry_returns_every_status(
    driver: Driver, pointers: int, status: int
) -> None:
    for retry in ((), (None,)):
        driver.fail("launch", status)
        assert kernel_launch(driver, *retry)(pointers, 0) == (status,)
        assert driver.taken() == [LAUNCHED]


@pytest.mark.parametrize(("status", "retried"), [(201, True), (400, True), (1, False), (700, False)])
def test_a_launch_under_another_context_is_tried_again(
    driver: Driver, pointers: int, status: int, retried: bool
) -> None:
    again: list[tuple[int, ...]] = []

    def retry(*args: int) -> tuple[int, ...]:
        again.append(args)
        return (5,)

    launch = kernel_launch(driver, retry)
    assert launch(pointers, 0) == (0,)
    assert again == []
    driver.fail("launch", status)
    assert launch(pointers, 0) == ((5,) if retried else (status,))
    assert again == ([(pointers, 0)] if retried else [])
    assert driver.taken() == [LAUNCHED, LAUNCHED]


def test_a_retry_that_raises_is_seen(driver: Driver, pointers: int) -> None:
    def retry(*_: int) -> tuple[int, ...]:
        raise ZeroDivisionError("the second attempt")

    driver.fail("launch", 201)
    with pytest.raises(ZeroDivisionError, match="the second attempt"):
        kernel_launch(driver, retry)(pointers, 0)


@pytest.mark.parametrize(
    ("args", "named"),
    [
        *(((), {}), ((1,), {}), ((1, 0, 0), {}), ((1,), {"extra": 0})),
        *((("1", 0), {}), ((1.0, 0), {}), ((-1, 0), {})),
    ],
)
def test_a_launch_refuses_other_arguments(driver: Driver, args: Any, named: Any) -> None:
    with pytest.raises((TypeError, OverflowError)):
        kernel_launch(driver)(*args, **named)
    assert driver.taken() == []


# GraphLaunch


def graph_launch(driver: Driver, in_context: Any) -> Any:
    return native.core.GraphLaunch(driver.addresses["replay"], GRAPH, STREAM, in_context)


REPLAYED = ("replay", GRAPH, STREAM)
PUSHED = ("push", CONTEXT)


def test_a_replay_needs_no_context_in_a_stream_of_its_own(driver: Driver) -> None:
    launch = graph_launch(driver, None)
    assert launch() == (0,)
    driver.fail("replay", 719)
    assert launch() == (719,)
    assert driver.taken() == [REPLAYED, REPLAYED]


def test_a_replay_in_a_default_stream_makes_the_context_current(driver: Driver) -> None:
    launch = graph_launch(driver, driver.in_context)
    assert launch() == (0,)
    assert driver.taken() == [PUSHED, REPLAYED, ("pop",)]
    driver.fail("replay", 719)
    driver.fail("pop", 4)
    assert launch() == (719,)
    assert driver.taken() == [PUSHED, REPLAYED, ("pop",)]
    driver.fail("push", 201)
    assert launch() == (201,)
    assert driver.taken() == [PUSHED]


def test_a_replay_takes_no_arguments(driver: Driver) -> None:
    launch = graph_launch(driver, None)
    for args, named in (((1,), {}), ((), {"step": 1})):
        with pytest.raises(TypeError, match="a prepared replay takes no arguments"):
            launch(*args, **named)
    assert driver.taken() == []


def test_a_replay_does_nothing_in_a_captured_stream(driver: Driver) -> None:
    answers = [(0, 0), (0, 1), (0, 2), (4, 0)]  # status of the query, state of the stream

    def is_capturing(stream: int, out: Any) -> int:
        assert stream == STREAM
        status, out[0] = answers.pop(0)
        return int(status)

    query = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))(is_capturing)
    address = ctypes.cast(query, ctypes.c_void_p).value
    launch = native.core.GraphLaunch(
        driver.addresses["replay"], GRAPH, STREAM, driver.in_context, address, NOT_SUBMITTED
    )
    assert launch() == (0,)
    assert driver.taken() == [PUSHED, REPLAYED, ("pop",)]
    for _ in range(2):
        assert launch() is NOT_SUBMITTED
        assert driver.taken() == [PUSHED, ("pop",)]
    assert launch() == (4,)
    assert driver.taken() == [PUSHED, ("pop",)]


@pytest.mark.parametrize(("replayed", "recorded"), [(0, 0), (0, 5), (6, None)])
def test_a_replay_records_an_event_after_it(
    driver: Driver, replayed: int, recorded: int | None
) -> None:
    event = 0xE
    calls = []

    def record(given: int, stream: int) -> int:
        calls.append((given, stream, driver.taken()))
        return recorded or 0

    function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(record)
    address = ctypes.cast(function, ctypes.c_void_p).value
    launch = native.core.GraphLaunch(
        driver.addresses["replay"], GRAPH, STREAM, driver.in_context, 0, NOT_SUBMITTED, address, event
    )
    driver.fail("replay", replayed)
    assert launch() == (replayed or recorded,)
    assert calls == ([] if recorded is None else [(event, STREAM, [PUSHED, REPLAYED])])
    assert driver.taken() == ([("pop",)] if calls else [PUSHED, REPLAYED, ("pop",)])


# WordSetter


def setter(driver: Driver, places: Any, in_context: Any = None) -> Any:
    fills = tuple(driver.addresses[name] for name in ("fill8", "fill16", "fill32"))
    return native.core.WordSetter(fills, STREAM, places, in_context)


def test_each_value_is_filled_by_its_size(driver: Driver) -> None:
    places = [(0x1000, 1), (0x2000, 2), (0x3000, 4), (0xFFFF_0000_4000, 8)]
    made = setter(driver, places)
    assert made(struct.pack("<BHIQ", 0x81, 0x8182, 0x81828384, 0x8182838485868788)) == (0,)
    assert driver.taken() == [
        ("fill8", 0x1000, 0x81, 1, STREAM),
        ("fill16", 0x2000, 0x8182, 1, STREAM),
        ("fill32", 0x3000, 0x81828384, 1, STREAM),
        ("fill32", 0xFFFF_0000_4000, 0x85868788, 1, STREAM),
        ("fill32", 0xFFFF_0000_4004, 0x81828384, 1, STREAM),
    ]


@pytest.mark.parametrize("in_context", [False, True])
def test_a_setter_stops_at_the_first_error(driver: Driver, in_context: bool) -> None:
    made = setter(driver, [(0x1000, 8), (0x2000, 4)], driver.in_context if in_context else None)
    around = [PUSHED, ("pop",)] if in_context else []
    for fails in range(4):
        driver.fail("fill32", *[0] * fails, 716)
        assert made(bytes(12)) == ((716,) if fails < 3 else (0,))
        calls = driver.taken()
        assert [call for call in calls if call[0] != "fill32"] == around
        assert len(calls) - len(around) == min(fails + 1, 3)
        if in_context:
            assert (calls[0], calls[-1]) == (PUSHED, ("pop",))
    driver.fail("push", 201)
    if in_context:
        assert made(bytes(12)) == (201,)
        assert driver.taken() == [PUSHED]


def test_a_setter_takes_as_many_values_as_it_says(driver: Driver) -> None:
    most = native.core.MAX_SCALARS
    made = setter(driver, [(0x1000 * n, 8) for n in range(most)])
    assert made(bytes(range(8 * most))) == (0,)
    assert len(driver.taken()) == 2 * most
    with pytest.raises(ValueError, match=f"a setter takes up to {most} values"):
        setter(driver, [(0x1000 * n, 1) for n in range(most + 1)])


@pytest.mark.parametrize(
    "given", [(), (b"",), (bytes(3),), (bytes(5),), (bytearray(4),), (bytes(4), 0), (4,)]
)
def test_a_setter_refuses_other_values(driver: Driver, given: Any) -> None:
    with pytest.raises(TypeError, match="this setter takes 4 bytes"):
        setter(driver, [(0x1000, 4)])(*given)
    with pytest.raises(TypeError, match="this setter takes 4 bytes"):
        setter(driver, [(0x1000, 4)])(values=bytes(4))
    assert driver.taken() == []


# Constructors


@pytest.mark.parametrize(
    ("kind", "args"),
    [
        ("KernelLaunch", ()),
        ("KernelLaunch", (1, 2, (1, 1), (1, 1, 1), 0, 0)),
        ("KernelLaunch", (1, 2, (1, 1, 1), (1, 1, 1), 0, "stream")),
        ("KernelLaunch", (1, 2, (1, 1, 1), (1, 1, 1.5), 0, 0)),
        ("KernelLaunch", (1, 2, (1, 1, 1), (1, 1, 1), 0, 0, None, None)),
        ("GraphLaunch", ()),
        ("GraphLaunch", (1, 2, 3)),
        ("GraphLaunch", (1, 2, 3, (1, 2))),
        ("GraphLaunch", (1, 2, 3, 4)),
        ("GraphLaunch", (1, None, 3, None)),
        ("WordSetter", ()),
        ("WordSetter", ((1, 2), 3, [], None)),
        ("WordSetter", ((1, 2, 3), 4, (), None)),
        ("WordSetter", ((1, 2, 3), 4, [(1, 3)], None)),
        ("WordSetter", ((1, 2, 3), 4, [(1, 16)], None)),
        ("WordSetter", ((1, 2, 3), 4, [(1, 0)], None)),
        ("WordSetter", ((1, 2, 3), 4, [(1,)], None)),
        ("WordSetter", ((1, 2, 3), 4, [1], None)),
        ("WordSetter", ((1, 2, 3), 4, [], (1,))),
        ("Replay", ()),
        ("Replay", (None,) * 8),
        ("Replay", (None,) * 10),
    ],
)  # fmt: skip
def test_wrong_arguments_make_no_object(kind: str, args: tuple[Any, ...]) -> None:
    with pytest.raises((TypeError, ValueError, SystemError)):
        getattr(native.core, kind)(*args)


REFERENCES = (*(None,) * 13, Context, Array, Uses, Buffer)
NUMBER = (0, "i", False, False, False, False, ())


@pytest.mark.parametrize(
    ("references", "size", "params", "why"),
    [
        ((), 0, (), "17 references are needed"),
        (REFERENCES[1:], 0, (), "17 references are needed"),
        ((*REFERENCES[:-1], None), 0, (), "no attribute 'context'"),
        ((*REFERENCES[:-1], Array), 0, (), "no attribute 'context'|is not a slot"),
        ((*REFERENCES[:-3], int, Uses, Buffer), 0, (), "no attribute 'address'"),
        (REFERENCES, native_limit("MAX_BYTES") + 1, (), "too many parameters"),
        (REFERENCES, 4, (NUMBER,) * (native_limit("MAX_PARAMS") + 1), "too many parameters"),
        (REFERENCES, 4, ((native_limit("MAX_BYTES"), *NUMBER[1:]),), "lies beyond the buffer"),
        (REFERENCES, 4, ((2**32 - 8, *NUMBER[1:]),), "lies beyond the buffer"),
        (REFERENCES, 8, ((*NUMBER[:-1], ((None, 1),) * 9),), "too many types"),
        (REFERENCES, 8, ((*NUMBER[:-1], ((None,),)),), "takes exactly 2 arguments"),
        (REFERENCES, 4, ((0,),), "takes exactly 7 arguments"),
        (REFERENCES, 4, [], "must be tuple, not list"),
    ],
)
def test_wrong_arguments_make_no_launcher(references: Any, size: int, params: Any, why: str) -> None:
    with pytest.raises((TypeError, ValueError, AttributeError), match=why):
        native.core.Launcher(references, (1, 0), True, size, params)
    assert native.core.Launcher(REFERENCES, (1, 0), True, 4, (NUMBER,)) is not None


@pytest.mark.parametrize("kind", ["KernelLaunch", "GraphLaunch", "WordSetter", "Launcher", "Replay"])
def test_no_object_takes_names_or_has_subclasses(kind: str) -> None:
    of = getattr(native.core, kind)
    with pytest.raises(TypeError, match="takes no names"):
        of(name=1)
    with pytest.raises(TypeError, match="not an acceptable base type"):
        type("Sub", (of,), {})


def test_the_limits_are_those_that_python_code_respects() -> None:
    assert (native.core.MAX_PARAMS, native.core.MAX_BYTES, native.core.MAX_SCALARS) == (64, 512, 16)
