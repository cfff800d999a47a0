"""The memory tier."""

from __future__ import annotations

import os
import signal
import threading

from preheat.store import MemoryStore
from tests.processes import TIMEOUT_SECONDS


def test_get_returns_the_stored_blob_or_none() -> None:
    memory = MemoryStore(100)
    memory.put("a", b"blob")
    assert memory.get("a") == b"blob"
    assert memory.get("b") is None


def test_the_least_recently_used_goes_first() -> None:
    memory = MemoryStore(30)
    for name in "abc":
        memory.put(name, bytes(10))
    memory.get("a")
    memory.put("d", bytes(10))
    assert [name for name in "abcd" if memory.get(name) is None] == ["b"]


def test_the_limit_counts_bytes_not_entries() -> None:
    memory = MemoryStore(30)
    for number in range(30):
        memory.put(str(number), b"x")
    memory.put("large", bytes(28))
    assert [str(n) for n in range(30) if memory.get(str(n)) is not None] == ["28", "29"]


def test_a_blob_of_exactly_the_limit_is_kept() -> None:
    memory = MemoryStore(10)
    memory.put("a", bytes(10))
    assert memory.get("a") == bytes(10)


def test_a_blob_larger_than_the_limit_is_not_kept_and_drives_nothing_out() -> None:
    memory = MemoryStore(10)
    memory.put("small", b"x")
    memory.put("large", bytes(11))
    assert memory.get("large") is None
    assert memory.get("small") == b"x"


def test_a_blob_that_became_too_large_does_not_leave_its_old_content_behind() -> None:
    memory = MemoryStore(10)
    memory.put("a", b"old")
    memory.put("a", bytes(11))
    assert memory.get("a") is None


def test_putting_a_key_again_counts_its_bytes_once() -> None:
    memory = MemoryStore(20)
    memory.put("a", bytes(10))
    for _ in range(10):
        memory.put("b", bytes(10))
    assert memory.get("a") is not None


def test_removing_frees_its_bytes() -> None:
    memory = MemoryStore(20)
    memory.put("a", bytes(10))
    memory.put("b", bytes(10))
    memory.remove("b")
    memory.remove("b")
    memory.put("c", bytes(10))
    assert memory.get("a") is not None
    assert memory.get("b") is None


def test_clearing_forgets_everything_and_frees_its_bytes() -> None:
    memory = MemoryStore(20)
    for name in "ab":
        memory.put(name, bytes(10))
    memory.clear()
    assert memory.get("a") is None
    for name in "cd":
        memory.put(name, bytes(10))
    assert memory.get("c") is not None


def test_threads_never_get_a_blob_of_another_key_and_never_pass_the_limit() -> None:
    memory = MemoryStore(200)
    wrong: list[object] = []

    def work(seed: int) -> None:
        for step in range(2000):
            number = (seed * 7 + step) % 40
            memory.put(str(number), bytes([number]) * 10)
            found = memory.get(str((number + seed) % 40))
            if found is not None and found != bytes([(number + seed) % 40]) * 10:
                wrong.append(found)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert sum(memory.get(str(number)) is not None for number in range(40)) == 20


def test_a_lock_that_a_fork_copied_while_held_does_not_block_the_child() -> None:
    memory = MemoryStore(100)
    memory.put("a", b"blob")
    _, status = os.waitpid(fork_holding(memory), 0)
    assert status == 0


def fork_holding(memory: MemoryStore) -> int:
    """Fork while another thread holds the lock; the child reads and writes."""
    held, forked = threading.Event(), threading.Event()

    def hold() -> None:
        with memory._lock:
            held.set()
            forked.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(int(TIMEOUT_SECONDS))
        memory.put("b", b"other")
        os._exit(memory.get("a") != b"blob")
    forked.set()
    holder.join()
    return child
