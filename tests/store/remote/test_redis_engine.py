"""What is special about Redis: its memory, users, replicas, expiry, and its protocol."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from preheat.store.remote import redis_engine, resp
from preheat.store.remote.checks import verify
from preheat.store.remote.engine import Engine, ObjectError, RemoteError
from preheat.store.remote.redis_engine import RedisEngine
from preheat.store.remote.resp import Connection
from preheat.store.remote.url import entry_name
from tests.processes import TIMEOUT_SECONDS, wait_for
from tests.store.remote.faults import LARGE, NAME, every_call, fault
from tests.store.remote.memory_engine import MemoryEngine
from tests.store.remote.servers import (
    ESCAPED_PASSWORD,
    PASSWORD,
    Server,
    certificate,
    free_ports,
    redis_server,
)

Open = Callable[[str], Engine]


def test_a_redis_that_is_full_says_so(tmp_path: Path, open_url: Open) -> None:
    options = ("--maxmemory", "4mb", "--maxmemory-policy", "noeviction")
    with redis_server(tmp_path, *options) as server:
        engine = open_url(server.url("full"))

        def fill() -> None:
            for each in range(8):
                engine.put(f"v1/ab/{each}", LARGE[: 1 << 20])

        error = fault(fill)
        assert "it is full" in str(error)
        assert not error.retryable
        assert engine.get("v1/ab/0") == LARGE[: 1 << 20]


def test_a_user_of_redis_who_may_only_read(redis: Server, open_url: Open) -> None:
    administrator = Connection.open("127.0.0.1", redis.port, secure=False, timeout=60)
    rights = ["reset", "on", ">reads", "~*", "+@read"]
    administrator.call([["AUTH", PASSWORD], ["ACL", "SETUSER", "reader", *rights]], 60)
    administrator.close()
    url = redis.url("readers").replace(f":{ESCAPED_PASSWORD}", "reader:reads")
    engine = open_url(url)
    assert engine.get(NAME) is None
    error = fault(lambda: engine.put(NAME, b"content"))
    assert "this user may not run the command" in str(error)
    assert not error.retryable


def test_a_redis_that_is_a_replica_is_read_only(redis: Server, tmp_path: Path, open_url: Open) -> None:
    with redis_server(tmp_path, "--replicaof", "127.0.0.1", str(redis.port)) as server:
        engine = open_url(server.url("replica"))
        assert "it is read-only" in str(fault(lambda: engine.put(NAME, b"content")))


def test_redis_removes_leases_that_were_not_renewed(redis: Server, open_url: Open) -> None:
    engine = open_url(redis.url("expiry"))
    assert engine.create(NAME, b"old", seconds=0.01)
    wait_for(lambda: engine.get(NAME) is None)
    assert engine.create(NAME, b"old", seconds=600)
    assert engine.swap(NAME, b"old", b"new", seconds=0.01)
    wait_for(lambda: engine.get(NAME) is None)


def test_a_server_that_speaks_something_else_than_redis(webdav: Server, open_url: Open) -> None:
    engine = open_url(f"redis://127.0.0.1:{webdav.port}")
    assert "not valid Redis protocol" in str(fault(lambda: engine.get(NAME)))


@pytest.mark.parametrize(
    "reply",
    [
        b":1",
        b"*2\r\n:1\r\n:2",
        b"*2\r\n$1\r\n0\r\n*1\r\n:7",
        b"$x",
        b"*1\r\n" * 5000,
        b"hello",
        b"-",
        b"",
    ],
    ids=["integer", "pair", "key", "size", "deep", "word", "error", "nothing"],
)
def test_a_reply_that_makes_no_sense_is_an_error(open_url: Open, reply: bytes) -> None:
    """Each call returns or raises `RemoteError`, and a read never returns anything but bytes."""
    with saying((reply + b"\r\n") * 9) as port:  # as many as the commands that are sent at once
        engine = open_url(f"redis://127.0.0.1:{port}")
        fault(lambda: engine.get(NAME))
        fault(lambda: list(engine.names()))
        for call in every_call(engine):
            with suppress(RemoteError):
                call()


def test_a_reply_that_is_too_long_is_not_received(open_url: Open) -> None:
    with saying(b"$2000000000\r\nbegin") as port:
        error = fault(lambda: open_url(f"redis://127.0.0.1:{port}").get(NAME))
    assert "2,000,000,000 bytes" in str(error)
    assert isinstance(error, ObjectError)


def test_an_array_in_the_place_of_an_object_is_not_received(open_url: Open) -> None:
    """The connection stays open after the header, so only an answer to it ends the call in time."""
    with saying(b"*60\r\n") as port:
        error = fault(lambda: open_url(f"redis://127.0.0.1:{port}").get(NAME))
    assert "not valid Redis protocol" in str(error)
    assert not isinstance(error, ObjectError)


@pytest.mark.parametrize("reply", [b"*9\r\n" + b"$600\r\n%b\r\n" % bytes(600) * 9, b"*1\r\n" * 500])
def test_a_list_is_limited_in_total(
    open_url: Open, monkeypatch: pytest.MonkeyPatch, reply: bytes
) -> None:
    monkeypatch.setattr(resp, "_MAX_LIST_BYTES", 1000)
    monkeypatch.setattr(resp, "_CHUNK", 16)
    with saying(reply) as port:
        error = fault(lambda: list(open_url(f"redis://127.0.0.1:{port}").names()))
    assert "not valid Redis protocol" in str(error)


def test_a_scan_that_does_not_advance_is_an_error(open_url: Open) -> None:
    with saying(b"*2\r\n$1\r\n1\r\n*0\r\n") as port:
        error = fault(lambda: list(open_url(f"redis://127.0.0.1:{port}").names()))
    assert "not valid Redis protocol" in str(error)


def test_a_write_that_is_not_confirmed_is_an_error(open_url: Open) -> None:
    """A proxy may swallow writes, and answer that there is no value."""
    with saying(b"$-1\r\n") as port:
        error = fault(lambda: open_url(f"redis://127.0.0.1:{port}").put(NAME, b"content"))
    assert "not valid Redis protocol" in str(error)


def test_replies_are_limited_together() -> None:
    with saying(b"$100000\r\n%b\r\n" % bytes(100_000) * 9) as port:
        connection = Connection.open("127.0.0.1", port, secure=False, timeout=TIMEOUT_SECONDS)
        get = ["GET", NAME]
        assert connection.call([get], TIMEOUT_SECONDS, limit=1 << 17) == [bytes(100_000)]
        with pytest.raises(ValueError, match="too long"):
            connection.call([get] * 8, TIMEOUT_SECONDS, limit=1 << 17)
        connection.close()


def test_a_list_has_a_page_for_each_part_of_a_database(
    redis: Server, open_url: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys of other programs do not make a page longer, so each page takes the time of a request."""
    monkeypatch.setattr(redis_engine, "_BATCH", 10)
    engine = open_url(redis.url("pages"))
    others = [f"v1/ab/{each}" for each in range(500)]
    foreign = open_url(redis.url("foreign"))
    for name in others:
        foreign.put(name, b"")
    engine.put(NAME, b"content")
    pages = list(engine._pages(""))
    assert [name for page in pages for name in page] == [NAME]
    assert len(pages) > 10


def test_text_of_a_server_cannot_control_a_terminal(open_url: Open) -> None:
    with saying(b"-ERR \x1b[2J\x07 gone\r\n") as port:  # `fault` requires text that is printable.
        assert "gone" in str(fault(lambda: open_url(f"redis://127.0.0.1:{port}").get(NAME)))


def test_nothing_that_a_server_says_about_a_password_is_shown(open_url: Open) -> None:
    with saying(b"-ERR wrong: hunter\r\n") as port:
        error = fault(lambda: open_url(f"redis://:hunter2@127.0.0.1:{port}").get(NAME))
    assert "hunter" not in str(error)
    assert "refuses the credentials" in str(error)


def test_a_key_of_another_kind_concerns_that_object(redis: Server, open_url: Open) -> None:
    engine = open_url(redis.url("kinds"))
    engine.put(NAME, b"content")
    name = entry_name("ab" * 32)
    assert isinstance(engine, RedisEngine)
    engine._call(["LPUSH", engine._key(name), "a"])
    error = fault(lambda: engine.get(name))
    assert "is not a string" in str(error)
    assert isinstance(error, ObjectError)
    assert engine.get(NAME) == b"content"
    (verified,) = verify(engine.get, [name], None)
    assert verified.verdict == "foreign"


def test_names_of_foreign_objects_are_shown_without_control_characters() -> None:
    (verified,) = verify(MemoryEngine().get, ["v1/\x1b[2J"], None)
    assert (verified.name, verified.verdict) == (r"v1/\x1b[2J", "foreign")


@contextmanager
def saying(reply: bytes) -> Iterator[int]:
    """Run a server that gives the same reply to whatever it receives, and yield its port."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with suppress(ConnectionError):
                while self.request.recv(1 << 16):
                    self.request.sendall(reply)

    class Threaded(socketserver.ThreadingTCPServer):
        daemon_threads = True

    with Threaded(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
        yield int(server.server_address[1])
        server.shutdown()


def test_tls_needs_a_certificate_that_is_trusted(
    tmp_path: Path, open_url: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = certificate(tmp_path)
    (port,) = free_ports(1)
    options = ["--tls-port", str(port), "--tls-auth-clients", "no"]
    options += ("--tls-cert-file", str(files[0]), "--tls-key-file", str(files[1]))
    with redis_server(tmp_path, *options):
        engine = open_url(f"rediss://:{ESCAPED_PASSWORD}@127.0.0.1:{port}")
        error = fault(lambda: engine.get(NAME))
        assert "its certificate is not accepted: " in str(error)
        assert str(error).endswith("; SSL_CERT_FILE names a file of trusted certificates")
        assert not error.retryable
        monkeypatch.setenv("SSL_CERT_FILE", str(files[0]))
        engine.put(NAME, LARGE)
        assert engine.get(NAME) == LARGE


@pytest.mark.parametrize("host", ["a..b", "a" * 64])
def test_a_host_name_that_cannot_exist_is_named_as_the_reason(open_url: Open, host: str) -> None:
    engine = open_url(f"redis://{host}/0")
    error = fault(lambda: engine.get(NAME))
    assert str(error) == f"redis://{host}/0: its host name is invalid"
    assert not error.retryable
