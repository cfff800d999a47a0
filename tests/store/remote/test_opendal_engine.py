"""What is special about servers that speak HTTP: statuses, buckets, plain HTTP, and gateways."""

from __future__ import annotations

import base64
import socket
import ssl
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import pytest

from preheat.errors import InputError
from preheat.model.events import Events
from preheat.store.remote.checks import probe_conditional
from preheat.store.remote.engine import Engine, ObjectError, open_engine
from preheat.store.remote.lease import Leases
from preheat.store.remote.lease_request import LeaseRequest
from preheat.store.remote.url import entry_name, parse_remote
from tests.processes import TIMEOUT_SECONDS
from tests.store.entries import blob_of, digest_of
from tests.store.remote.faults import NAME, fault
from tests.store.remote.http_servers import endless, gateway, replying
from tests.store.remote.proxy import Proxy
from tests.store.remote.remote_stores import store_on
from tests.store.remote.servers import Server, certificate
from tests.store.remote.stores import Store

Open = Callable[..., Engine]


@pytest.mark.parametrize("kind", ["s3", "webdav"])
@pytest.mark.parametrize(
    ("status", "retryable"), [(500, True), (503, True), (507, False), (403, False), (301, False)]
)
def test_a_status_of_http_is_an_error(open_url: Open, kind: str, status: int, retryable: bool) -> None:
    with replying(status, b"<html>no</html>") as port:
        endpoint = f"s3://u:p@bucket?endpoint=http://127.0.0.1:{port}"
        url = endpoint if kind == "s3" else f"dav://127.0.0.1:{port}/x"
        engine = open_url(url)
        assert fault(lambda: engine.put(NAME, b"content")).retryable is retryable
        assert fault(lambda: engine.get(NAME)).retryable is retryable
        assert fault(lambda: engine.exists([NAME])).retryable is retryable


def test_a_webdav_server_refuses_objects_above_its_limit(
    open_store: Callable[[str], Store],
) -> None:
    engine = open_store("webdav").open()
    error = fault(lambda: engine.put(NAME, bytes(9 << 20)))
    assert "too large: HTTP status 413" in str(error)
    assert isinstance(error, ObjectError)
    assert engine.get(NAME) is None


@pytest.mark.parametrize("kind", ["s3", "webdav"])
def test_an_object_that_is_too_large_concerns_that_object(open_url: Open, kind: str) -> None:
    too_large = b"<Error><Code>EntityTooLarge</Code><Message>too large</Message></Error>"
    replies = [(413, b"")] if kind == "webdav" else [(413, b""), (400, too_large)]
    for status, body in replies:
        with replying(status, body) as port:
            s3 = f"s3://u:p@bucket?endpoint=http://127.0.0.1:{port}&region=r"
            engine = open_url(s3 if kind == "s3" else f"dav://127.0.0.1:{port}/x")
            assert isinstance(fault(lambda: engine.put(NAME, b"content")), ObjectError)  # noqa: B023


@pytest.mark.parametrize("shown", [None, 12])
def test_a_server_that_repeats_the_credentials_of_a_request(open_url: Open, shown: int | None) -> None:
    token = base64.b64encode(b"tester:open-sesame!").decode()
    assert token.endswith("=")
    for text in (f"Authorization: Basic {token[:shown]}", f"token {token}", f"[{token.rstrip('=')}]"):
        with replying(400, text.encode()) as port:
            engine = open_url(f"dav://tester:open-sesame!@127.0.0.1:{port}/k")
            for call in (lambda: engine.get(NAME), lambda: engine.put(NAME, b"1")):  # noqa: B023
                message = str(fault(call))
                assert token[:10] not in message
                assert "***" in message


def test_a_bucket_that_does_not_exist_is_an_error(s3: Server, open_url: Open) -> None:
    engine = open_url(s3.url("x").replace("@kernels/", "@elsewhere/"))
    for call in (lambda: engine.get(NAME), lambda: list(engine.names())):
        assert "bucket does not exist" in str(fault(call))


def test_plain_http_reads_what_others_wrote(
    webdav: Server, open_store: Callable[[str], Store], open_url: Open
) -> None:
    store = open_store("webdav")
    store.open().put(NAME, b"content")
    name = store.url().rpartition("/")[2]
    engine = open_url(f"http://127.0.0.1:{webdav.port}/plain/{name}")
    assert engine.get(NAME) == b"content"
    assert engine.get("v1/ab/absent") is None
    names = [f"v1/ab/{each}" for each in range(9)]
    assert engine.exists([*names, NAME]) == {NAME}
    for call in (
        lambda: engine.put(NAME, b""),
        lambda: engine.remove(NAME),
        lambda: [*engine.names()],
    ):
        assert "read-only" in str(fault(call))
    assert not engine.conditional


def test_an_endless_object_is_not_read_after_the_time_limit(open_url: Open) -> None:
    with endless() as (port, ended):
        engine = open_url(f"http://127.0.0.1:{port}/store", timeout=0.5)
        assert "not answer in time" in str(fault(lambda: engine.get(NAME)))
        assert ended.wait(TIMEOUT_SECONDS)  # The client has closed the connection.


def test_an_object_above_the_limit_is_not_received(open_url: Open) -> None:
    with endless() as (port, ended):
        error = fault(lambda: open_url(f"http://127.0.0.1:{port}/store").get(NAME, limit=1 << 20))
        assert ended.wait(TIMEOUT_SECONDS)
    assert isinstance(error, ObjectError)
    assert "more than 1,048,576 bytes" in str(error)


@pytest.mark.parametrize("names", [500, 10_000])
def test_names_are_asked_for_in_groups_of_few_requests(
    open_url: Open, webdav: Server, names: int
) -> None:
    asked = [entry_name(digest_of(number)) for number in range(names)]
    for url in ("http://127.0.0.1:1/store", webdav.url("rounds")):
        groups = list(open_url(url)._groups(asked))
        assert sorted(name for group in groups for name in group) == sorted(asked)
        for group in groups:
            folders = Counter(name.rpartition("/")[0] for name in group)
            lists = url.startswith("dav") and all(each >= 8 for each in folders.values())
            assert len(folders if lists else group) <= 16


@pytest.mark.parametrize("ignored", [None, "PUT If-None-Match", "PUT If-Match", "DELETE If-Match"])
def test_a_probe_finds_a_gateway_that_ignores_a_condition(open_url: Open, ignored: str | None) -> None:
    with gateway(ignored) as port:
        engine = open_url(f"s3://bucket?endpoint=http://127.0.0.1:{port}&anonymous=1")
        assert engine.conditional
        assert probe_conditional(engine) == (ignored is None)


CONDITIONS = ["PUT If-None-Match", "PUT If-Match", "DELETE If-Match"]


@pytest.mark.parametrize("refused", CONDITIONS)
def test_a_gateway_without_conditions_is_best_effort(open_url: Open, refused: str) -> None:
    with gateway(refused=refused) as port:
        engine = open_url(f"s3://bucket?endpoint=http://127.0.0.1:{port}&anonymous=1")
        assert engine.create("v1/leases/a", b"1", seconds=60)
        assert not engine.create("v1/leases/a", b"2", seconds=60)
        assert not engine.swap("v1/leases/a", b"2", b"3", seconds=60)
        assert engine.swap("v1/leases/a", b"1", b"2", seconds=60)
        assert not engine.discard("v1/leases/a", b"1")
        assert engine.discard("v1/leases/a", b"2")
        assert not engine.conditional
        assert engine.get("v1/leases/a") is None


@pytest.mark.parametrize("refused", CONDITIONS)
def test_a_probe_finds_a_gateway_without_conditions(open_url: Open, refused: str) -> None:
    with gateway(refused=refused) as port:
        engine = open_url(f"s3://bucket?endpoint=http://127.0.0.1:{port}&anonymous=1")
        assert not probe_conditional(engine)


@pytest.mark.parametrize("refused", CONDITIONS)
def test_a_gateway_without_conditions_gets_all_entries(
    open_url: Open, refused: str, events: Events
) -> None:
    """The events fail the test at a fault and at a dropped entry."""
    with gateway(refused=refused) as port:
        url = f"s3://bucket?endpoint=http://127.0.0.1:{port}&anonymous=1"
        tier = store_on(lambda: open_url(url), events)
        leases = Leases(tier.server, tier.when_written, events, start=lambda _: None)
        for number in range(4):
            request: LeaseRequest[str] = LeaseRequest(leases, digest_of(number), lambda: None, limit=60)
            assert request.poll() is None
            leases.renew()
            tier.put(digest_of(number), blob_of(number))
            if request.lease is not None:
                request.lease.release()
            assert tier.flush(TIMEOUT_SECONDS)
        names = {entry_name(digest_of(number)) for number in range(4)}
        assert open_url(url).exists(names) == names


def test_a_probe_accepts_servers_that_keep_conditions(store: Store) -> None:
    engine = store.open()
    assert probe_conditional(engine) == engine.conditional == (store.kind != "webdav")
    assert list(engine.names()) == []


def test_a_missing_package_names_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opendal", None)
    for module in ("engine", "errors"):
        monkeypatch.delitem(sys.modules, f"preheat.store.remote.opendal_{module}", raising=False)
    monkeypatch.setattr(
        "preheat.store.remote.engine.opendal_engine._module", None
    )  # It is imported again.
    with pytest.raises(InputError, match="needs the package opendal") as missing:
        open_engine(parse_remote("s3://bucket"), timeout=60)
    assert missing.value.hint == "pip install 'preheat[remote]'"
    open_engine(parse_remote("redis://host"), timeout=60)


@pytest.mark.parametrize("attributes", [{}, {"exceptions": ModuleType("opendal.exceptions")}])
def test_a_package_that_cannot_be_used_is_a_fault_of_the_store(
    monkeypatch: pytest.MonkeyPatch, attributes: dict[str, object]
) -> None:
    """A build for another system raises `ImportError`, and another version `AttributeError`."""
    broken = ModuleType("opendal")
    vars(broken).update(attributes)
    monkeypatch.setitem(sys.modules, "opendal", broken)
    for module in ("engine", "errors"):
        monkeypatch.delitem(sys.modules, f"preheat.store.remote.opendal_{module}", raising=False)
    monkeypatch.setattr(
        "preheat.store.remote.engine.opendal_engine._module", None
    )  # It is imported again.
    error = fault(lambda: open_engine(parse_remote("s3://bucket?region=r"), timeout=60))
    assert str(error).startswith("s3://bucket?region=r: the package opendal cannot be used: ")


def test_a_region_that_is_missing_is_an_error_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    error = fault(lambda: open_engine(parse_remote("s3://bucket"), timeout=60))
    assert "region is missing: add ?region=NAME to the URL" in str(error)
    assert "detect_region" not in str(error)


@pytest.mark.parametrize(
    "text",
    [
        "Unexpected (permanent) at read => signing http request, source: failed to load signing "
        "credential",
        "Unexpected (permanent) at write => signing http request\n\nContext:\n   service: s3\n\n"
        "Source:\n   failed to load signing credential\n\nBacktrace:\n   0: <unknown>\n",
    ],
)
def test_every_operation_says_alike_that_there_are_no_credentials(text: str) -> None:
    """Otherwise reads and writes would be reported as two faults."""
    exceptions = pytest.importorskip("opendal").exceptions
    from preheat.store.remote import opendal_errors

    error = opendal_errors.translate_error(exceptions.Unexpected(text), parse_remote("s3://b?region=r"))
    assert str(error) == (
        "s3://b?region=r: no credentials were found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
        "or add anonymous=1 to the URL"
    )
    assert not error.retryable


def test_https_needs_a_certificate_that_is_trusted(tmp_path: Path, open_url: Open) -> None:
    file, key = certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file, key)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with suppress(OSError), context.wrap_socket(connection, server_side=True):
                        continue

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        error = fault(lambda: open_url(f"https://127.0.0.1:{server.getsockname()[1]}/x").get(NAME))
        assert "its certificate is not accepted: " in str(error)
        assert str(error).endswith("; SSL_CERT_FILE names a file of trusted certificates")
        server.shutdown(socket.SHUT_RDWR)
        thread.join(TIMEOUT_SECONDS)


def test_other_threads_run_while_a_list_waits(
    open_store: Callable[[str], Store], open_proxy: Callable[..., Proxy]
) -> None:
    store = open_store("s3")
    assert store.server is not None
    proxy = open_proxy(store.server.port)
    proxy.stall()
    engine = store.open(port=proxy.port, timeout=0.5)
    for call in (lambda: list(engine.names()), lambda: engine.exists(map(str, range(9)))):
        thread = threading.Thread(target=fault, args=[call])
        thread.start()
        turns = 0
        while thread.is_alive():
            time.sleep(0.005)
            turns += 1
        assert turns > 10
