"""Totals of a cache directory, which one thread adds for all that wait."""

from __future__ import annotations

import threading

import pytest

from preheat.store.usage import Additions, Usage
from tests.processes import wait_for


def test_one_thread_adds_for_all_that_wait() -> None:
    additions = Additions()
    writes: list[tuple[int, int]] = []
    results: list[Usage | None] = []
    first_writes = threading.Event()
    go_on = threading.Event()

    def write(files: int, size: int) -> Usage:
        writes.append((files, size))
        if len(writes) == 1:
            first_writes.set()
            go_on.wait()
        return Usage(files, size)

    def add(size: int) -> None:
        results.append(additions.add(1, size, write))

    threads = [threading.Thread(target=add, args=(10**place,)) for place in range(4)]
    threads[0].start()
    first_writes.wait()
    for thread in threads[1:]:
        thread.start()
    wait_for(lambda: len(additions._waiting) == 3)
    go_on.set()
    for thread in threads:
        thread.join()
    assert writes == [(1, 1), (3, 1110)]
    assert sorted(each for each in results if each is not None) == [
        Usage(1, 1), *[Usage(3, 1110)] * 3,
    ]  # fmt: skip


def test_every_thread_gets_the_fault_of_the_one_that_adds() -> None:
    additions = Additions()

    def write(files: int, size: int) -> Usage:
        raise OSError(f"{files} {size}")

    with pytest.raises(OSError, match="2 5"):
        additions.add(2, 5, write)
    assert additions.add(1, 1, Usage) == Usage(1, 1)
