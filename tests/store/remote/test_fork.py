"""Forked children of a process that uses a shared store, on real servers."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from preheat.model.events import Events
from preheat.store.remote.redis_engine import RedisEngine
from preheat.store.remote.server import Server
from preheat.store.remote.url import entry_name
from preheat.store.signing import entries as envelope
from tests.processes import SOURCE, TIMEOUT_SECONDS, expect_success, start_process, start_python
from tests.store.entries import blob_of, digest_of
from tests.store.remote.memory_engine import MemoryEngine
from tests.store.remote.remote_stores import entry, store_on
from tests.store.remote.stores import Store
from tests.store.remote.test_worker import Gate


def in_child(act: Callable[[], bool]) -> bool:
    """Return what `act` returns in a forked child, or False when it fails there."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if act() else 1
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_child_opens_an_engine_of_its_own_and_leaves_that_of_the_parent_alone(
    events: Events,
) -> None:
    opened: list[MemoryEngine] = []

    def open_engine() -> MemoryEngine:
        opened.append(MemoryEngine())
        opened[-1].objects[entry_name(digest_of(1))] = envelope.wrap(digest_of(1), blob_of(1), None)
        return opened[-1]

    tier = store_on(open_engine, events)
    assert entry(tier, digest_of(1)) == blob_of(1)

    def child() -> bool:
        found = entry(tier, digest_of(1))
        return found == blob_of(1) and len(opened) == 2 and not opened[0].closed

    assert in_child(child)
    assert len(opened) == 1


def test_a_child_closes_the_engine_of_its_parent_if_the_engine_permits_it(events: Events) -> None:
    class Closable(MemoryEngine):
        closes_after_fork = True

    opened: list[Closable] = []

    def open_engine() -> Closable:
        opened.append(Closable())
        return opened[-1]

    tier = store_on(open_engine, events)
    entry(tier, digest_of(1))
    assert in_child(lambda: opened[0].closed and entry(tier, digest_of(1)) is None and len(opened) == 2)
    assert not opened[0].closed


def test_a_child_does_not_keep_the_sockets_of_its_parent(open_store: Callable[[str], Store]) -> None:
    engine = open_store("redis").open()
    server = Server("remote", lambda: engine, Events(), timeout=60.0)
    server.call("read", lambda engine: engine.get("v1/ab/name"))
    (connection,) = cast(RedisEngine, engine)._idle
    assert in_child(lambda: connection._socket.fileno() == -1)
    assert connection.usable()


def test_a_child_leaves_the_queue_to_the_parent(events: Events) -> None:
    engine, gate = MemoryEngine(), Gate()
    engine.before = lambda _, __: gate()
    tier = store_on(engine, events)
    for number in range(5):
        tier.put_later(digest_of(number), blob_of(number))
    assert gate.entered.wait(TIMEOUT_SECONDS)

    def child() -> bool:
        engine.before = None
        flushed = tier.flush(TIMEOUT_SECONDS) and not engine.objects
        tier.put_later(digest_of(9), blob_of(9))
        return (
            flushed
            and tier.flush(TIMEOUT_SECONDS)
            and list(engine.objects) == [entry_name(digest_of(9))]
        )

    assert in_child(child)
    gate.opened.set()
    assert tier.flush(TIMEOUT_SECONDS)
    assert len(engine.objects) == 5


FORKS = """
import os, sys, threading
from preheat.model.config import Config
from preheat.build.remotes import open_remotes
from preheat.model.events import Events
from tests.store.entries import blob_of, digest_of
from tests.store.remote.remote_stores import entry
from pathlib import Path

url, children = sys.argv[1], int(sys.argv[2])
config = Config(
    cache_dirs=(), lock_dir=Path(), remote=(url,), remote_unsigned=True, remote_timeout=60.0
)
(tier,) = open_remotes(config, Events())
for number in range(20):
    tier.put_later(digest_of(number), blob_of(number))
assert tier.flush(60)
stop = threading.Event()

def traffic():
    number = 0
    while not stop.is_set():
        number += 1
        assert entry(tier, digest_of(number % 20)) == blob_of(number % 20)
        tier.put_later(digest_of(number % 20), blob_of(number % 20))

threads = [threading.Thread(target=traffic) for _ in range(3)]
for thread in threads:
    thread.start()
results = []
for child in range(children):
    pid = os.fork()
    if pid == 0:  # The child has a part of the traffic of its parent, in any state.
        status = 9
        try:
            found = [entry(tier, digest_of(number)) for number in range(20)]
            right = [blob == blob_of(number) for number, blob in enumerate(found)]
            tier.put_later(digest_of(100 + child), blob_of(100 + child))
            written = tier.flush(60)
            status = 0 if all(right) and written else 1 if not any(right) else 2
        finally:
            os._exit(status)
    results.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
stop.set()
for thread in threads:
    thread.join()
stored = [entry(tier, digest_of(100 + child)) == blob_of(100 + child) for child in range(children)]
tier.close()
print(sorted(set(results)), all(stored), any(stored))
"""


def forks(url: str, children: int = 4) -> list[str]:
    """Return the exit statuses of children that were forked in the middle of traffic."""
    env = {"PYTHONPATH": f"{SOURCE}{os.pathsep}{SOURCE.parent}"}
    return expect_success(start_python(FORKS, url, str(children), env=env)).split()


@pytest.mark.parametrize("kind", ["file", "redis"])
def test_children_that_are_forked_in_the_middle_of_traffic_use_the_store(
    kind: str, open_store: Callable[[str], Store]
) -> None:
    assert forks(open_store(kind).url()) == ["[0]", "True", "True"]


@pytest.mark.parametrize("kind", ["s3", "webdav"])
def test_children_of_a_process_that_used_opendal_go_on_without_the_store(
    kind: str, open_store: Callable[[str], Store]
) -> None:
    """They would wait for ever: opendal has threads that a child does not have."""
    assert forks(open_store(kind).url()) == ["[1]", "False", "False"]


FRESH = """
import os, sys
from pathlib import Path
from preheat.build.remotes import open_remotes
from preheat.model.config import Config
from preheat.model.events import Events
from tests.store.entries import blob_of, digest_of
from tests.store.remote.remote_stores import entry

seen = []
config = Config(
    cache_dirs=(), lock_dir=Path(), remote=(sys.argv[1],), remote_unsigned=True, remote_timeout=60.0
)
(tier,) = open_remotes(config, Events(lambda name, fields: seen.append((name, dict(fields)))))
pid = os.fork()
if pid == 0:
    tier.put_later(digest_of(1), blob_of(1))
    tier.close()
    entry(tier, digest_of(1))
    sys.exit(0)  # The ordinary end of a process, with destructors.
assert os.waitpid(pid, 0)[1] == 0
print(entry(tier, digest_of(1)) == blob_of(1))
pid = os.fork()
if pid == 0:
    entry(tier, digest_of(1))
    print([fields["error"] for name, fields in seen if name == "fault"])
    sys.exit(0)
assert os.waitpid(pid, 0)[1] == 0
"""


def test_a_child_forked_before_the_first_use_has_the_store_and_one_forked_later_says_why_not(
    open_store: Callable[[str], Store],
) -> None:
    env = {"PYTHONPATH": f"{SOURCE}{os.pathsep}{SOURCE.parent}"}
    said = expect_success(start_python(FRESH, open_store("s3").url(), env=env)).splitlines()
    assert said[0] == "True"
    assert "forked after its parent had used opendal" in said[1]
    assert "spawn" in said[1]


IMPORT = """
import os, signal, sys, threading, time
import preheat.store.remote.opendal_engine as opendal_engine
if sys.argv[1] == "logging":
    import logging

assert "asyncio" not in sys.modules
importing = threading.Event()

class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "asyncio.log":
            importing.set()
            time.sleep(0.5)

sys.meta_path.insert(0, Slow())
thread = threading.Thread(target=lambda: opendal_engine.asyncio.Runner)
thread.start()
assert importing.wait(60)
pid = os.fork()
if pid == 0:
    sys.meta_path.pop(0)
    signal.alarm(20)
    import asyncio
    os._exit(0)
status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
thread.join()
print(status)
"""


@pytest.mark.parametrize("before", ["logging", "nothing"])
def test_a_child_that_is_forked_during_an_import_of_a_thread_can_import(before: str) -> None:
    """The import makes a logger, and the fork handler of `logging` holds a lock that it needs."""
    env = {"PYTHONPATH": str(SOURCE)}
    started = time.monotonic()
    assert expect_success(start_python(IMPORT, before, env=env)) == "0\n"
    assert time.monotonic() - started < 10  # The longest wait of a fork, which goes on after it.


MULTIPROCESSING = """
import gc, multiprocessing, sys, time
from pathlib import Path
from preheat.build.builder import Builder
from preheat.store.remote.file_engine import FileEngine
from preheat.model.config import Config
from tests.store.entries import blob_of, digest_of

method, when, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
write = FileEngine._put

def slow(self, name, data):
    time.sleep(0.3)
    write(self, name, data)

def builder():
    FileEngine._put = slow
    return Builder.open(
        Config(cache_dirs=(), lock_dir=folder, remote=(f"file://{folder}/store",), remote_unsigned=True)
    )

def child():
    opened = before or builder()
    for number in range(3):
        opened.cache.put(digest_of(number), blob_of(number))
    del opened
    gc.collect()  # The store outlives its builder until it has written everything.

before = builder() if when == "before" and __name__ == "__main__" else None
if __name__ == "__main__":
    process = multiprocessing.get_context(method).Process(target=child)
    process.start()
    process.join()
    found = builder()
    print(process.exitcode, [found.cache.get(digest_of(n)) is not None for n in range(3)])
"""


@pytest.mark.parametrize(
    ("method", "when"), [("fork", "before"), ("fork", "after"), ("forkserver", "after")]
)
def test_a_child_of_multiprocessing_ends_its_writes(method: str, when: str, tmp_path: Path) -> None:
    """It leaves by `os._exit`, without running the functions that `atexit` knows."""
    script = tmp_path / "script.py"
    script.write_text(MULTIPROCESSING)
    env = {"PYTHONPATH": f"{SOURCE}{os.pathsep}{SOURCE.parent}"}
    command = [sys.executable, str(script), method, when, str(tmp_path)]
    said = expect_success(start_process(command, env=env))
    assert said == "0 [True, True, True]\n"
