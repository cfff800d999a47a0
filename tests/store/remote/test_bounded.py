"""Calls that end in time although the engine inside hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator

import pytest

from preheat.store.remote import bounded
from preheat.store.remote.bounded import BoundedEngine
from preheat.store.remote.engine import RemoteError, names_of
from tests.processes import TIMEOUT_SECONDS, wait_for
from tests.store.remote.faults import NAME, fault
from tests.store.remote.memory_engine import MemoryEngine


def test_calls_that_never_end_are_left_behind_and_limited() -> None:
    blocked = threading.Event()

    def block(*_: object) -> None:
        blocked.wait(TIMEOUT_SECONDS)

    inner = MemoryEngine(before=block)
    engine = BoundedEngine(inner, timeout=0.01)
    for _ in range(8):
        assert "not answer in time" in str(fault(lambda: engine.read(NAME)))
    assert "8 earlier calls" in str(fault(lambda: engine.read(NAME)))
    assert inner.calls["read"] == 8
    blocked.set()
    wait_for(lambda: not [t for t in threading.enumerate() if t.name == "preheat-remote-call"])
    assert BoundedEngine(inner, timeout=TIMEOUT_SECONDS).read(NAME) is None


def test_any_other_error_of_an_engine_is_a_fault_of_the_server() -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("division by zero")

    engine = BoundedEngine(MemoryEngine(before=fail), timeout=60)
    error = fault(lambda: engine.read(NAME))
    assert "ZeroDivisionError: division by zero" in str(error)
    assert isinstance(error.__cause__, ZeroDivisionError)


def test_an_exit_is_not_a_fault_of_the_server() -> None:
    def leave(*_: object) -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        BoundedEngine(MemoryEngine(before=leave), timeout=60).read(NAME)


def test_each_group_of_names_has_a_time_limit_of_its_own() -> None:
    asked: list[list[str]] = []

    class Slow(MemoryEngine):
        def rounds(self, names: Iterable[str]) -> Iterator[list[str]]:
            return ([name] for name in names)

        def existing(self, names: Iterable[str]) -> set[str]:
            asked.append(list(names))
            return super().existing(asked[-1])

    inner = Slow()
    inner.write("b", b"")
    assert BoundedEngine(inner, timeout=60).existing(["a", "b", "c"]) == {"b"}
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
    engine = BoundedEngine(inner, timeout=0.01)
    fault(lambda: engine.read(NAME))
    others: list[threading.Thread] = []

    def is_alive(_: object) -> bool:
        if not others:  # While the abandoned calls are counted, another thread abandons a call.
            others.append(threading.Thread(target=lambda: fault(lambda: engine.write(NAME, b""))))
            others[0].start()
            others[0].join(0.2)
        return True

    monkeypatch.setattr(bounded._Thread, "is_alive", is_alive)
    fault(lambda: engine.read(NAME))
    others[0].join()
    for _ in range(5):
        assert "not answer in time" in str(fault(lambda: engine.read(NAME)))
    assert "8 earlier calls" in str(fault(lambda: engine.read(NAME)))
    blocked.set()


def test_many_threads_do_not_add_abandoned_calls_without_end() -> None:
    blocked = threading.Event()
    inner = MemoryEngine(before=waiting_for(blocked))
    engine = BoundedEngine(inner, timeout=0.05)
    errors: list[BaseException] = []

    def call_often() -> None:
        for _ in range(20):
            try:
                engine.read(NAME)
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

    engine = BoundedEngine(MemoryEngine(before=panic), timeout=60)
    for call in (lambda: engine.read(NAME), lambda: list(names_of(engine))):
        assert "PanicError: called" in str(fault(call))


class Paged(MemoryEngine):
    """An engine whose list has pages without names before the first name."""

    def __init__(self, empty: int, pause: float) -> None:
        super().__init__()
        self.empty = empty
        self.pause = pause
        self.listed = 0

    def pages(self, prefix: str = "") -> Iterator[list[str]]:
        del prefix
        for _ in range(self.empty):
            time.sleep(self.pause)
            self.listed += 1
            yield []
        yield [NAME]


def test_each_page_of_a_list_has_a_time_limit_of_its_own() -> None:
    assert list(names_of(BoundedEngine(Paged(20, 0.05), timeout=0.5))) == [NAME]


def test_a_list_that_nobody_reads_any_more_is_not_continued() -> None:
    inner = Paged(10**9, 0.001)
    pages = BoundedEngine(inner, timeout=TIMEOUT_SECONDS).pages()
    assert next(pages) == []
    pages.close()  # type: ignore[attr-defined]
    wait_for(lambda: calls_that_run() == 0)
    slow = Paged(10**9, 0.2)
    fault(lambda: list(names_of(BoundedEngine(slow, timeout=0.02))))
    wait_for(lambda: calls_that_run() == 0)
    assert slow.listed == 1
