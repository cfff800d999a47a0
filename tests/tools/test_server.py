"""The server for Prometheus: what it answers, whom it does not wait for, and what a fork leaves."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from preheat.build import counters
from preheat.build.counters import serve
from preheat.errors import ConfigError
from preheat.model.config import Address, Config
from preheat.model.events import Events
from preheat.tools.metrics import server as server_module
from preheat.tools.metrics.server import MetricsServer
from tests.conftest import Recorder
from tests.processes import expect_success, read_line, start_python, wait_for, write_line

parser = pytest.importorskip("prometheus_client.parser", reason="prometheus-client is not installed")

BOTH = "# the page\npreheat_loads_total 1\n"


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    served = MetricsServer(Address("127.0.0.1", 0), lambda: BOTH)
    yield served
    served.close()


def get(port: int, path: str = "/metrics", *, method: str = "GET", host: str = "127.0.0.1") -> str:
    request = urllib.request.Request(f"http://{host}:{port}{path}", method=method)
    with urllib.request.urlopen(request, timeout=60) as reply:
        assert int(reply.headers["Content-Length"]) == len(BOTH) or path != "/metrics"
        text: str = reply.read().decode()
        return text


def raw(port: int, request: bytes) -> bytes:
    """Send any bytes and return the whole reply."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        client.sendall(request)
        reply = b""
        while part := client.recv(4096):
            reply += part
        return reply


def free_port(family: socket.AddressFamily = socket.AF_INET) -> int:
    with socket.socket(family) as probe:
        probe.bind(("::1" if family == socket.AF_INET6 else "127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


# Requests


def test_metrics_and_health_are_answered(server: MetricsServer) -> None:
    assert get(server.port) == get(server.port, "/metrics?name=x") == BOTH
    assert get(server.port, "/healthz") == "ok\n"
    assert get(server.port, method="HEAD") == ""


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /secret HTTP/1.1\r\n\r\n", b"404 Not Found"),
        (b"POST /metrics HTTP/1.1\r\nContent-Length: 0\r\n\r\n", b"405 Method Not Allowed"),
        (b"\x16\x03\x01\x02\x00\x01\n\n", b"400 Bad Request"),
        (b"GET /metrics SPDY/3\n\n", b"400 Bad Request"),
        (b"GET /metrics HTTP/1.0\n\n", b"200 OK"),
        (b"G" * 65537, b"414 "),
        (b"GET / HTTP/1.1\r\n" + b"G" * 65537, b"431 Request Header Fields Too Large"),
    ],
)
def test_other_requests_get_an_error(
    server: MetricsServer, request_bytes: bytes, status: bytes
) -> None:
    assert raw(server.port, request_bytes).startswith(b"HTTP/1.1 " + status)
    assert get(server.port) == BOTH


def test_slow_clients_hold_nobody(server: MetricsServer) -> None:
    slow = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(100)]
    for each in slow[::2]:
        each.sendall(b"GET /met")
    assert get(server.port) == BOTH
    for each in slow:
        each.close()
    assert get(server.port) == BOTH


def test_a_client_has_a_limited_time(monkeypatch: pytest.MonkeyPatch, server: MetricsServer) -> None:
    monkeypatch.setattr(server_module._Client, "timeout", 0.05)
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\n")
        assert client.recv(100) == b""  # The server has closed the connection.
    assert get(server.port) == BOTH


def test_clients_that_leave_are_forgotten(server: MetricsServer) -> None:
    for _ in range(50):
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
    assert get(server.port) == BOTH
    wait_for(lambda: not server._server.clients)


def test_a_large_page_is_sent_whole() -> None:
    page = "x" * (4 << 20)
    large = MetricsServer(Address("127.0.0.1", 0), lambda: page)
    reply = raw(large.port, b"GET /metrics HTTP/1.1\r\n\r\n")
    large.close()
    assert reply.partition(b"\r\n\r\n")[2] == page.encode()


def test_a_page_that_cannot_be_made_is_one_error_and_not_the_end_of_the_server() -> None:
    pages = iter([BOTH])
    served = MetricsServer(Address("127.0.0.1", 0), lambda: next(pages))
    assert get(served.port) == BOTH
    for _ in range(2):
        reply = raw(served.port, b"GET /metrics HTTP/1.1\r\n\r\n")
        assert reply.startswith(b"HTTP/1.1 500 Internal Server Error")
        assert b"the counters cannot be read: StopIteration()" in reply
    served.close()


@pytest.mark.parametrize("host", ["::1", ""])
def test_ipv6(host: str) -> None:
    try:
        free_port(socket.AF_INET6)
    except OSError:
        pytest.skip("this machine has no IPv6")
    served = MetricsServer(Address(host, 0), lambda: BOTH)
    assert get(served.port, host="[::1]") == BOTH
    if not host:
        assert get(served.port) == BOTH
    served.close()


def test_closing_ends_the_thread_and_frees_the_port(server: MetricsServer) -> None:
    port = server.port
    server.close()
    server.close()
    assert not server._thread.is_alive()
    again = MetricsServer(Address("127.0.0.1", port), lambda: BOTH)
    assert get(port) == BOTH
    again.close()


def test_no_descriptor_is_left() -> None:
    before = len(os.listdir("/proc/self/fd"))
    other = MetricsServer(Address("127.0.0.1", 0), lambda: BOTH)
    get(other.port)
    other.close()
    wait_for(lambda: len(os.listdir("/proc/self/fd")) == before)


# Forks


def is_open(number: int) -> bool:
    return os.path.exists(f"/proc/self/fd/{number}")


def test_a_forked_child_does_not_listen(server: MetricsServer) -> None:
    ready_read, ready = os.pipe()
    stay, go = os.pipe()
    waiting = socket.create_connection(("127.0.0.1", server.port))  # A client that never asks.
    wait_for(lambda: len(server._server.clients) == 1)
    time.sleep(0.05)  # Its thread waits for the request.
    sockets = [each.fileno() for each in (server._server.socket, *server._server.clients)]
    if (child := os.fork()) == 0:
        os.close(go)
        os.write(ready, str(sum(map(is_open, sockets))).encode())
        os.read(stay, 1)  # until the parent closes its end
        os._exit(0)
    os.close(stay)
    assert os.read(ready_read, 1) == b"0"
    assert all(map(is_open, sockets))
    waiting.close()
    port = server.port
    assert get(port) == BOTH
    server.close()
    # The child is alive, and the port is free: it holds no copy of the socket.
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    os.close(go)
    assert os.waitpid(child, 0)[1] == 0
    for each in (ready_read, ready):
        os.close(each)


# The setting


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:9464", ("127.0.0.1", 9464)),
        (" :9464 ", ("", 9464)),
        ("[::1]:80", ("::1", 80)),
        ("[fe80::1%eth0]:80", ("fe80::1%eth0", 80)),
        ("localhost:65535", ("localhost", 65535)),
    ],
)
def test_an_address(text: str, address: tuple[str, int]) -> None:
    parsed = Config.from_env({"PREHEAT_METRICS": text}).metrics
    assert parsed == address
    assert str(parsed) == text.strip()


@pytest.mark.parametrize(
    "text",
    [
        "9464",
        "host",
        "host:",
        "host:0",
        "host:65536",
        "host:x",
        "::1:80",
        "[::1]",
        "[]:80",
        "a b:80",
        ":٣",
    ],
)
def test_a_bad_address_is_a_config_error(text: str) -> None:
    with pytest.raises(ConfigError, match=r"PREHEAT_METRICS=.* is not an address: use host:port"):
        Config.from_env({"PREHEAT_METRICS": text})


SERVING = """
import sys, preheat
builder = preheat.Builder.open()
preheat.Builder.open()
builder.events.emit("load")
faults = builder.events.stats().get("faults.metrics", 0)
print(faults, "preheat.tools.metrics.server" in sys.modules, flush=True)
sys.stdin.readline()
"""


def environment(tmp_path: Path, address: str) -> dict[str, str]:
    places = {"PREHEAT_CACHE_DIR": tmp_path / "cache", "PREHEAT_LOCK_DIR": tmp_path / "locks"}
    return {**{name: str(path) for name, path in places.items()}, "PREHEAT_METRICS": address}


def test_a_process_serves_its_counters_and_ends_promptly(tmp_path: Path) -> None:
    port = free_port()
    process = start_python(SERVING, env=environment(tmp_path, f"127.0.0.1:{port}"))
    assert read_line(process) == "0 True"
    text = raw(port, b"GET /metrics HTTP/1.1\r\n\r\n").partition(b"\r\n\r\n")[2].decode()
    values = {f.name: f.samples for f in parser.text_string_to_metric_families(text)}
    assert values["preheat_loads"][0].value == 1
    assert set(values["preheat_info"][0].labels) == {"version"}
    waiting = socket.create_connection(("127.0.0.1", port))  # A client that never asks.
    write_line(process)
    started = time.monotonic()
    assert expect_success(process) == ""
    assert time.monotonic() - started < server_module._Client.timeout
    waiting.close()


def test_without_the_setting_nothing_is_imported(tmp_path: Path) -> None:
    process = start_python(SERVING, env=environment(tmp_path, ""))
    assert read_line(process) == "0 False"
    write_line(process)
    expect_success(process)


def test_a_taken_port_is_one_event(tmp_path: Path, server: MetricsServer) -> None:
    process = start_python(SERVING, env=environment(tmp_path, f"127.0.0.1:{server.port}"))
    assert read_line(process) == "1 True"
    write_line(process)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert err.count("metrics: cannot listen on 127.0.0.1:") == 1
    assert get(server.port) == BOTH


@pytest.mark.parametrize("host", ["..", "a" * 64])
def test_an_address_that_cannot_be_used_is_one_event(
    host: str, events: Events, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counters, "_served_or_disabled", False)
    recorder.forgive = True
    for _ in range(2):
        serve(Address(host, 9000), events)
    assert [fields["verb"] for fields in recorder.named("fault")] == [f"listen on {host}:9000"]


def test_a_process_that_can_start_no_thread_gets_an_event_and_keeps_no_socket(
    events: Events, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(counters, "_served_or_disabled", False)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    recorder.forgive = True
    port = free_port()
    serve(Address("127.0.0.1", port), events)
    assert len(recorder.named("fault")) == 1
    socket.create_server(("127.0.0.1", port)).close()


FORKING = """
import os, sys, preheat
builder = preheat.Builder.open()
builder.events.emit("load")
stay, go = os.pipe()
children = []
for _ in range(3):
    if (child := os.fork()) == 0:
        os.close(go)
        mine = preheat.Builder.open()
        mine.events.emit("load")
        # One write, so that lines do not mix.
        os.write(1, repr(mine.events.stats()).encode() + bytes([10]))
        os.read(stay, 1)
        os._exit(0)
    children.append(child)
os.close(stay)
sys.stdin.readline()
os.close(go)
sys.exit(max(os.waitpid(child, 0)[1] for child in children))
"""


def test_the_parent_serves_on_while_children_build(tmp_path: Path) -> None:
    port = free_port()
    process = start_python(FORKING, env=environment(tmp_path, f"127.0.0.1:{port}"))
    assert {read_line(process) for _ in range(3)} == {"{'load': 1}"}  # and no fault
    assert b"preheat_loads_total 1\n" in raw(port, b"GET /metrics HTTP/1.1\r\n\r\n")
    write_line(process)
    expect_success(process)


def test_the_port_is_free_once_the_parent_is_killed(tmp_path: Path) -> None:
    port = free_port()
    process = start_python(FORKING, env=environment(tmp_path, f"127.0.0.1:{port}"))
    for _ in range(3):
        read_line(process)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


def test_the_command_line_leaves_the_port_to_its_command(tmp_path: Path) -> None:
    port = free_port()
    env = environment(tmp_path, f"127.0.0.1:{port}")
    code = "import sys, preheat.tools.cli; preheat.tools.cli.main(sys.argv[1:])"
    process = start_python(code, "run", "--", sys.executable, "-c", SERVING, env=env)
    assert read_line(process) == "0 True"
    assert b"preheat_loads_total 1\n" in raw(port, b"GET /metrics HTTP/1.1\r\n\r\n")
    write_line(process)
    expect_success(process)


def test_scrapes_and_events_of_many_threads() -> None:
    from preheat.model.events import process_counters

    served = MetricsServer(Address("127.0.0.1", 0))
    before = process_counters.stats().get("weak", 0)

    def count() -> None:
        for _ in range(50):
            events = Events()
            for _ in range(20):
                events.emit("weak")

    threads = [threading.Thread(target=count) for _ in range(4)]
    last = 0.0
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        now = weak_of(lambda: raw(served.port, b"GET /metrics HTTP/1.1\r\n\r\n"))
        assert now >= last
        last = now
    assert weak_of(lambda: raw(served.port, b"GET /metrics HTTP/1.1\r\n\r\n")) == before + 4000
    served.close()


def weak_of(page: Callable[[], bytes]) -> float:
    line = next(line for line in page().decode().splitlines() if line.startswith("preheat_weak_total"))
    return float(line.split()[1])
