"""What all adapters are made of: keys that are handed over, states of threads, compiles, rows."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType

import pytest

from preheat.adapters import base
from preheat.adapters.base import Adapter, Compile, Connection, HiddenFrames, LastKey, ThreadState
from preheat.build.builder import Builder
from preheat.build.foreign_store import ABSENT
from preheat.errors import AdapterError, InputError
from preheat.model.arch import Arch
from preheat.model.foreign import ForeignEntry, ForeignRequest
from tests.conftest import Recorder

ARCH = Arch.parse("sm_90")


@dataclass(frozen=True)
class Wanted:
    """A request of a library that compiles nothing."""

    name: str
    properties: dict[str, str] = field(default_factory=dict)

    @property
    def identity(self) -> ForeignRequest:
        return ForeignRequest("fakelib", repr(self.properties), label=self.name, arch=ARCH)

    def row(self) -> dict[str, str]:
        return {"function": self.name}


@pytest.fixture
def connection(builder: Builder) -> Connection:
    return Connection(builder.foreign, threading)


def in_thread(call: Callable[[], object]) -> object:
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    thread.join()
    return results[0]


# Between two calls of a library


def test_the_request_of_the_last_key_is_found_in_its_thread() -> None:
    last = LastKey[str]()
    assert last.request_of("a") is None
    last.remember("a", "request a")
    assert last.request_of("a") == last.request_of("a") == "request a"
    assert in_thread(lambda: last.request_of("a")) is None
    last.remember("b", "request b")
    assert last.request_of("a") is None
    assert last.forget() == "request b"
    assert last.forget() is None
    assert last.request_of("b") is None


class Work(ThreadState):
    depth = 0
    name: str | None = None


def test_the_state_of_a_thread_is_set_for_a_block() -> None:
    work = Work()
    with work.setting(depth=1, name="outer"):
        with work.setting(depth=2):
            assert (work.depth, work.name) == (2, "outer")
            assert in_thread(lambda: work.depth) == 0
        assert work.depth == 1
        with pytest.raises(KeyError), work.setting(depth=3):
            raise KeyError
        assert work.depth == 1
    assert (work.depth, work.name) == (0, None)


# Compiles


def test_a_request_is_made_once_and_reported_at_each_use(
    connection: Connection, recorder: Recorder
) -> None:
    seen: list[tuple[ForeignEntry, object]] = []
    made: list[str] = []

    def make() -> dict[str, bytes]:
        made.append("k")
        return {"code": b"1"}

    wanted = Wanted("k")
    connection.obtain(wanted.identity, make, lambda: pytest.fail("nobody records"))
    connection.store.events.subscribe(
        lambda _, fields: seen.append((fields["entry"], fields["row"])), "foreign_request"
    )
    entry = connection.obtain(wanted.identity, make, wanted.row)
    assert made == ["k"]
    assert seen == [(entry, {"function": "k"})]
    assert len(recorder.named("compile")) == 1


def test_a_compile_in_two_calls_is_waited_for(connection: Connection, recorder: Recorder) -> None:
    """Another thread waits for the end of the compile, and finds its entry."""
    wanted = Wanted("k").identity
    mine, theirs = Compile(connection), Compile(connection)
    with mine.owned_by(sys._getframe()):
        assert mine.lock(wanted) is None
        mine.begin(wanted)
        found: list[ForeignEntry | None] = []

        def wait() -> None:
            with theirs.owned_by(sys._getframe()):
                found.append(theirs.lock(wanted))

        other = threading.Thread(target=wait)
        other.start()
        entry = mine.made(wanted, {"code": b"1"}, {"signature": "int"})
        assert not found
    other.join()
    assert found == [entry]
    assert connection.store.get(wanted) == entry
    assert entry.properties == {"signature": "int"}
    assert [fields["reason"] for fields in recorder.named("miss")] == [ABSENT]
    (compiled,) = recorder.named("compile")
    assert compiled["seconds"] == entry.provenance.seconds


def test_another_call_may_compile_after_an_error(connection: Connection) -> None:
    wanted = Wanted("k").identity
    making = Compile(connection)

    def fail() -> None:
        with making.owned_by(sys._getframe()):
            making.lock(wanted)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    again = Compile(connection)
    with again.owned_by(sys._getframe()):
        assert again.lock(wanted) is None  # at once


# A missing entry


def stored(connection: Connection, *variants: Wanted) -> None:
    for wanted in variants:
        kind, key, variant, label, arch = wanted.identity
        entry = ForeignEntry(kind, key, {"code": b"1"}, variant, label, arch, wanted.properties)
        connection.store.put(entry)


def test_the_nearest_entry_has_the_fewest_differences(connection: Connection) -> None:
    stored(
        connection,
        Wanted("k", {"x": "int", "y": "float", "warps": "8"}),
        Wanted("k", {"x": "int", "y": "int", "fast": "yes"}),
        Wanted("other", {"x": "int", "y": "float", "fast": "yes"}),
        Wanted("k", {}),  # People cannot compare it.
    )

    def describe(entry: ForeignEntry) -> str:
        return f"k({entry.properties['y']})"

    wanted = Wanted("k", {"x": "int", "y": "float", "fast": "yes"})
    assert connection.nearest(wanted, describe, absent="unset") == ("k(int)", ("y: int became float",))
    unlike = Wanted("k", {"x": "int", "y": "float"})
    assert connection.nearest(unlike, describe, absent="unset") == (
        "k(float)",
        ("warps: 8 became unset",),
    )
    assert connection.nearest(Wanted("absent"), describe, absent="unset") == (None, ())


def test_a_distance_decides_between_entries_with_as_many_differences(connection: Connection) -> None:
    stored(connection, Wanted("k", {"x": "1"}), Wanted("k", {"x": "90"}))

    def describe(entry: ForeignEntry) -> str:
        return entry.properties["x"]

    wanted = Wanted("k", {"x": "100"})
    assert connection.nearest(wanted, describe, absent="-")[0] == "1"
    nearest, _ = connection.nearest(
        wanted, describe, absent="-", distance=lambda one, two: abs(int(one["x"]) - int(two["x"]))
    )
    assert nearest == "90"


# Functions of a library


@pytest.fixture
def module() -> Iterator[ModuleType]:
    made = sys.modules["fakelib.sub"] = ModuleType("fakelib.sub")
    yield made
    del sys.modules["fakelib.sub"]


def test_a_function_is_replaced_where_modules_have_a_name_for_it(module: ModuleType) -> None:
    def stock() -> None: ...
    def other() -> None: ...

    vars(module).update(compile=stock, run=stock)
    base.replace_everywhere(("fakelib",), "compile", stock, other)
    base.replace_everywhere(("fakelib",), "run", other, stock)
    assert (module.compile, module.run) == (other, stock)


def test_errors_of_preheat_leave_a_replaced_function_without_its_frames() -> None:
    def refuse(error: Exception) -> None:
        with HiddenFrames():
            Arch.parse("h100") if isinstance(error, InputError) else int("h100")

    with pytest.raises(InputError) as caught:
        refuse(InputError(""))
    assert "arch.py" not in {
        frame.filename.rpartition("/")[2] for frame in traceback.extract_tb(caught.tb)
    }
    with pytest.raises(ValueError, match="h100"):
        refuse(ValueError())


# Rows


def test_changes_since_the_recording_are_named() -> None:
    row = {"env": {"A": "1", "B": "2"}}
    assert base.changed_environment(row, {"B": "2"}) == ["A was 1, and is not set"]
    assert base.changed_environment(row, {"A": "3", "B": "2", "C": "4"}) == [
        "A was 1, and is 3",
        "C was not set, and is 4",
    ]
    assert base.version_note("Triton", "3.6", "3.6") == []
    assert base.version_note("Triton", "3.6", "3.9") == ["recorded with Triton 3.6, and this is 3.9"]


def test_an_adapter_that_bakes_nothing_says_why() -> None:
    class Copied(Adapter):
        name = module = "fakelib"
        not_baked = "results are copied"

        def install(self, builder: Builder) -> None: ...

    adapter = Copied()
    assert adapter.count({}, "recorded") == 0
    for verb in (adapter.bake, adapter.keys):
        with pytest.raises(AdapterError, match="results are copied"):
            verb({}, ARCH, "recorded")
