"""Calls that end in time although the engine inside hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator

import pytest

from preheat.store.remote import engine as engines
from preheat.store.remote.engine import RemoteError
from tests.processes import TIMEOUT_SECONDS, wait_for
from tests.store.remote.faults import NAME, fault
from tests.store.remote.memory_engine import MemoryEngine, limited


def test_calls_that_never_end_are_left_behind_and_limited() -> None:
    blocked = threading.Event()

    def block(*_: object) -> None:
        blocked.wait(TIMEOUT_SECONDS)

    inner = MemoryEngine(before=block)
    engine = limited(inner, 0.01)
    for _ in range(8):
        assert "not answer in time" in str(fault(lambda: engine.get(NAME)))
    assert "8 earlier calls" in str(fault(lambda: engine.get(NAME)))
    assert inner.calls["read"] == 8
    blocked.set()
    wait_for(lambda: not [t for t in threading.enumerate() if t.name == "preheat-remote-call"])
    assert limited(inner, TIMEOUT_SECONDS).get(NAME) is None


def test_any_other_error_of_an_engine_is_a_fault_of_the_server() -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("division by zero")

    engine = limited(MemoryEngine(before=fail), 60)
    error = fault(lambda: engine.get(NAME))
    assert "ZeroDivisionError: division by zero" in str(error)
    assert isinstance(error.__cause__, ZeroDivisionError)


def test_an_exit_is_not_a_fault_of_the_server() -> None:
    def leave(*_: object) -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        limited(MemoryEngine(before=leave), 60).get(NAME)


def test_each_group_of_names_has_a_time_limit_of_its_own() -> None:
    asked: list[list[str]] = []

    class Slow(MemoryEngine):
        def _groups(self, names: Iterable[str]) -> Iterator[list[str]]:
            return ([name] for name in names)

        def _existing(self, names: list[str]) -> set[str]:
            asked.append(names)
            return super()._existing(names)

    inner = Slow()
    inner.put("b", b"")
    assert limited(inner, 60).exists(["a", "b", "c"]) == {"b"}
    assert asked == [["a"], ["b"], ["c"]]


def waiting_for(event: threading.Event) -> Callable[[str, str], None]:
    def wait(*_: object) -> None:
        event.wait(TIMEOUT_SECONDS)

    return wait


def calls_that_run() -> int:
    return sum(thread.name == "preheat-remote-call" for thread in threading.enumerate())


def test_a_call_that_starts_while_another_one_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = threading.Event()
    inner = MemoryEngine(before=waiting_for(blocked))
    engine = limited(inner, 0.01)
    fault(lambda: engine.get(NAME))
    others: list[threading.Thread] = []

    def is_alive(_: object) -> bool:
        if not others:  # While the abandoned calls are counted, another thread abandons a call.
            others.append(threading.Thread(target=lambda: fault(lambda: engine.put(NAME, b""))))
            others[0].start()
            others[0].join(0.2)
        return True

    monkeypatch.setattr(engines._Thread, "is_alive", is_alive)
    fault(lambda: engine.get(NAME))
    others[0].join()
    for _ in range(5):
        assert "not answer in time" in str(fault(lambda: engine.get(NAME)))
    assert "8 earlier calls" in str(fault(lambda: engine.get(NAME)))
    blocked.set()


def test_many_threads_do_not_add_abandoned_calls_without_end() -> None:
    blocked = threading.Event()
    inner = MemoryEngine(before=waiting_for(blocked))
    engine = limited(inner, 0.05)
    errors: list[BaseException] = []

    def call_often() -> None:
        for _ in range(20):
            try:
                engine.get(NAME)
            except BaseException as error:
                errors.append(error)

    threads = [threading.Thread(target=call_often) for _ in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {type(error) for error in errors} == {RemoteError}
    assert inner.calls["read"] < 8 + 24
    blocked.set()


def test_a_panic_of_a_client_is_a_fault_of_the_server() -> None:
    class PanicError(BaseException):
        """The exception of opendal for a panic is not an `Exception` either."""

    def panic(*_: object) -> None:
        raise PanicError("called `Option::unwrap()` on a `None` value")

    engine = limited(MemoryEngine(before=panic), 60)
    for call in (lambda: engine.get(NAME), lambda: list(engine.names())):
        assert "PanicError: called" in str(fault(call))


class Paged(MemoryEngine):
    """An engine whose list has pages without names before the first name."""

    def __init__(self, empty: int, pause: float) -> None:
        super().__init__()
        self.empty = empty
        self.pause = pause
        self.listed = 0

    def _pages(self, prefix: str) -> Iterator[list[str]]:
        del prefix
        for _ in range(self.empty):
            time.sleep(self.pause)
            self.listed += 1
            yield []
        yield [NAME]


def test_each_page_of_a_list_has_a_time_limit_of_its_own() -> None:
    assert list(limited(Paged(20, 0.05), 0.5).names()) == [NAME]


def test_a_list_that_nobody_reads_any_more_is_not_continued() -> None:
    inner = Paged(10**9, 0.001)
    pages = limited(inner, TIMEOUT_SECONDS).limit.iterate(lambda: inner._pages(""))
    assert next(pages) == []
    pages.close()  # type: ignore[attr-defined]
    wait_for(lambda: calls_that_run() == 0)
    slow = Paged(10**9, 0.2)
    fault(lambda: list(limited(slow, 0.02).names()))
    wait_for(lambda: calls_that_run() == 0)
    assert slow.listed == 1
