"""Servers that are dead, slow or refuse, and uploads that end early, on every engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from preheat.store.remote.engine import Engine, RemoteError
from tests.processes import TIMEOUT_SECONDS, expect_success, kill, read_line, start_python, wait_for
from tests.store.remote.faults import LARGE, NAME, every_call, fault
from tests.store.remote.proxy import Proxy
from tests.store.remote.servers import ESCAPED_PASSWORD, free_ports
from tests.store.remote.stores import KINDS, Store

SHORT = 0.5  # seconds, for calls that are expected to take all of it


def test_every_call_to_a_dead_server_fails(served: Store) -> None:
    engine = served.open(port=free_ports(1)[0])
    for call in every_call(engine):
        assert "refused" in str(fault(call))


def test_every_call_to_a_silent_server_ends_in_time(
    served: Store, open_proxy: Callable[..., Proxy]
) -> None:
    assert served.server is not None
    proxy = open_proxy(served.server.port)
    proxy.stall()
    began = time.monotonic()
    errors: list[RemoteError] = []
    calls = every_call(served.open(port=proxy.port, timeout=SHORT))
    threads = [threading.Thread(target=lambda c=call: errors.append(fault(c))) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - began < TIMEOUT_SECONDS / 10
    assert [str(error).rpartition(" did ")[2] for error in errors] == ["not answer in time"] * len(
        calls
    )


def test_a_reply_that_arrives_byte_by_byte_ends_in_time(
    served: Store, open_proxy: Callable[..., Proxy]
) -> None:
    """No pause is as long as the time limit. The whole reply would take half an hour."""
    assert served.server is not None
    served.open().put(NAME, LARGE)
    proxy = open_proxy(served.server.port)
    engine = served.open(port=proxy.port, timeout=SHORT)
    proxy.drip(SHORT / 500)
    assert "not answer in time" in str(fault(lambda: engine.get(NAME)))


def test_a_delayed_server_answers(served: Store, open_proxy: Callable[..., Proxy]) -> None:
    assert served.server is not None
    engine = served.open(port=open_proxy(served.server.port, delay=0.005).port)
    engine.put(NAME, LARGE)
    assert engine.get(NAME) == LARGE


def test_an_upload_that_is_cut_leaves_the_old_object(
    served: Store, open_proxy: Callable[..., Proxy]
) -> None:
    assert served.server is not None
    served.open().put(NAME, b"old")
    proxy = open_proxy(served.server.port)
    engine = served.open(port=proxy.port)
    for uploaded in (0, 300, 10_000, len(LARGE) // 2):
        proxy.heal()
        proxy.cut_after(uploaded)
        assert fault(lambda: engine.put(NAME, LARGE)).retryable
        assert served.open().get(NAME) == b"old"
    proxy.heal()
    engine.put(NAME, LARGE)
    assert engine.get(NAME) == LARGE


def test_connections_that_were_closed_while_idle_are_replaced(
    served: Store, open_proxy: Callable[..., Proxy]
) -> None:
    assert served.server is not None
    proxy = open_proxy(served.server.port)
    engine = served.open(port=proxy.port)
    engine.put(NAME, b"content")
    proxy.cut()
    assert wait_for(lambda: _content(engine)) == b"content"


def _content(engine: Engine) -> bytes | None:
    """Read an object. The first attempt may meet the connection that was closed."""
    try:
        return engine.get(NAME)
    except RemoteError as error:
        if not error.retryable:
            raise
        return None


WRITE_FOREVER = """
import sys, threading
from preheat.store.remote.engine import open_engine
from preheat.store.remote.url import parse_remote

def work(url):
    engine = open_engine(parse_remote(url), timeout=60)
    for letter in b"ab" * 1_000_000:
        engine.put("v1/ab/name", bytes([letter]) * (4 << 20))
        sys.stdout.write(url + "\\n")
        sys.stdout.flush()

for url in sys.argv[1:]:
    threading.Thread(target=work, args=[url]).start()
"""


def test_a_writer_that_is_killed_leaves_whole_objects(open_store: Callable[[str], Store]) -> None:
    stores = [open_store(kind) for kind in KINDS if kind != "memory"]
    writer = start_python(WRITE_FOREVER, *(store.url() for store in stores))
    written: set[str] = set()
    while not written.issuperset(store.url() for store in stores):
        written.add(read_line(writer))
    kill(writer)
    for store in stores:
        content = store.open().get(NAME)
        assert content is not None, store.kind
        assert len(content) == 4 << 20
        assert len(set(content)) == 1
        assert list(store.open().names()) == [NAME]


def test_wrong_credentials_are_refused(served: Store, open_url: Callable[[str], Engine]) -> None:
    engine = open_url(served.url().replace(ESCAPED_PASSWORD, "wrong-word"))
    for call in every_call(engine):
        error = fault(call)
        assert "refuses the credentials" in str(error)
        assert "wrong-word" not in str(error)
        assert not error.retryable


EXIT_IN_A_CALL = """
import sys, threading, time
from preheat.store.remote.engine import Engine
from preheat.store.remote.engine import open_engine
from preheat.store.remote.url import parse_remote

engine = open_engine(parse_remote(sys.argv[1]), timeout=600)
for call in (lambda: engine.get("v1/ab/name"), lambda: list(engine.names())):
    threading.Thread(target=call, daemon=True).start()
while sum(t.name == "preheat-remote-call" for t in threading.enumerate()) < 2:
    time.sleep(0.001)
time.sleep(0.05)  # Both have sent their request, or are about to.
"""


def test_a_process_exits_while_a_call_hangs(served: Store, open_proxy: Callable[..., Proxy]) -> None:
    assert served.server is not None
    proxy = open_proxy(served.server.port)
    proxy.stall()
    began = time.monotonic()
    expect_success(start_python(EXIT_IN_A_CALL, served.url(port=proxy.port)))
    assert time.monotonic() - began < TIMEOUT_SECONDS
