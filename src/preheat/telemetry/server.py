"""A small HTTP server that exposes the counters of this process to Prometheus.

One daemon thread serves all clients. A client has a few seconds for its request and for the reply, and
a new client replaces the oldest one when there are many, so that no client can hold the server.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from preheat import fork
from preheat._version import __version__
from preheat.config import Address
from preheat.events import Events
from preheat.locks import Lock, no_fork
from preheat.process_counters import process_counters
from preheat.telemetry.exposition import CONTENT_TYPE, exposition
from preheat.telemetry.metrics import counter_families, gauge

if TYPE_CHECKING:  # Imported only when a process listens.
    from socket import socket

__all__ = ["MetricsServer", "disable_server", "process_page", "serve"]

_CLIENT_SECONDS = 5.0  # from the connection to the end of the reply
_MOST_CLIENTS = 64
_MOST_REQUEST = 8192  # bytes of a request
_STOP_SECONDS = 1.0  # the longest wait for the thread when the process ends

_STATUS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
}


def process_page() -> str:
    """Return the counters of this process as text for Prometheus."""
    info = gauge("preheat_info", "The release of preheat.", {__version__: 1}, "version")
    return exposition([info, *counter_families(process_counters.stats())])


class MetricsServer:
    """Answers GET and HEAD of `/metrics` and `/healthz` until `close`, or until the process ends.

    `OSError` or `ValueError` when the address cannot be used, and `RuntimeError` when no thread can be
    started. A forked child does not listen: it closes its copies of the sockets, and the parent goes
    on.
    """

    def __init__(self, address: Address, page: Callable[[], str] = process_page) -> None:
        with no_fork:
            import selectors
            import socket
            import threading

        self._page = page
        self._closing = False
        self._listener = _listen(address)
        self._wake, self._woken = socket.socketpair()
        # `poll` has no state in the kernel that a forked child would share with its parent.
        self._selector = selectors.PollSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        self._clients: dict[socket.socket, _Client] = {}
        self._thread = threading.Thread(target=self._run, name="preheat-metrics", daemon=True)
        self._pid = os.getpid()
        try:
            self._thread.start()
        except RuntimeError:
            self._close_sockets()
            raise
        fork.register(self)
        atexit.register(self.close)

    @property
    def port(self) -> int:
        """The port of the server."""
        port: int = self._listener.getsockname()[1]
        return port

    def close(self) -> None:
        """Stop listening, and wait a moment for the thread. A second call does nothing."""
        atexit.unregister(self.close)
        if os.getpid() != self._pid or self._closing:
            return
        self._closing = True
        with suppress(OSError):
            self._wake.send(b"\0")
        self._thread.join(_STOP_SECONDS)

    def after_fork(self) -> None:
        """Close what belongs to the parent, in a forked child."""
        self._closing = True
        self._close_sockets()

    def _close_sockets(self) -> None:
        self._selector.close()
        for each in (self._listener, self._wake, self._woken, *self._clients):
            with suppress(OSError):
                each.close()
        self._clients.clear()

    # In the thread

    def _run(self) -> None:
        try:
            while not self._closing:
                for key, _ in self._selector.select(self._until_deadline()):
                    if key.data is not None:
                        self._serve(key.data)
                    elif key.fileobj is self._listener:
                        self._accept()
                self._drop_late()
        finally:
            self._close_sockets()

    def _until_deadline(self) -> float | None:
        first = next(iter(self._clients.values()), None)  # All have the same time, so it is the first.
        return None if first is None else max(first.deadline - time.monotonic(), 0)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # The client has gone, or this process has no descriptor left.
            time.sleep(0.05)
            return
        if len(self._clients) >= _MOST_CLIENTS:
            self._drop(next(iter(self._clients.values())))
        connection.setblocking(False)
        client = _Client(connection)
        self._clients[connection] = client
        self._selector.register(connection, _READ, client)

    def _serve(self, client: _Client) -> None:
        if client.connection not in self._clients:  # It was dropped in this round.
            return
        try:
            if client.reply is None and client.receive():
                client.reply = memoryview(self._answer(client.request))
                self._selector.modify(client.connection, _WRITE, client)
            if client.reply is not None and client.send():
                self._drop(client)
        except BlockingIOError:
            return
        except OSError:  # The client closed the connection.
            self._drop(client)

    def _drop_late(self) -> None:
        now = time.monotonic()
        for client in [each for each in self._clients.values() if each.deadline <= now]:
            self._drop(client)

    def _drop(self, client: _Client) -> None:
        del self._clients[client.connection]
        self._selector.unregister(client.connection)
        client.connection.close()

    def _answer(self, request: bytes) -> bytes:
        if len(request) > _MOST_REQUEST:
            return _reply(431, "the request is too long\n")
        method, target = _parsed(request)
        if not method:
            return _reply(400, "this is not an HTTP request\n")
        if method not in ("GET", "HEAD"):
            return _reply(405, "only GET and HEAD are answered\n")
        match target.partition("?")[0]:
            case "/metrics":
                try:
                    page = self._page()
                except Exception as error:  # The next request may succeed.
                    return _reply(500, f"the counters cannot be read: {error!r}\n")
                return _reply(200, page, head=method == "HEAD")
            case "/healthz":
                return _reply(200, "ok\n", head=method == "HEAD")
        return _reply(404, "the pages are /metrics and /healthz\n", head=method == "HEAD")


_READ, _WRITE = 1, 2  # as in `selectors`


class _Client:
    """A connection: what it has sent, and what is left of the reply."""

    def __init__(self, connection: socket) -> None:
        self.connection = connection
        self.deadline = time.monotonic() + _CLIENT_SECONDS
        self.request = b""
        self.reply: memoryview | None = None

    def receive(self) -> bool:
        """Receive a part of the request, and return whether it is complete, or too long."""
        part = self.connection.recv(_MOST_REQUEST)
        if not part:
            raise ConnectionResetError
        self.request += part
        ended = b"\r\n\r\n" in self.request or b"\n\n" in self.request
        return ended or len(self.request) > _MOST_REQUEST

    def send(self) -> bool:
        """Send a part of the reply, and return whether it was the last one."""
        assert self.reply is not None
        self.reply = self.reply[self.connection.send(self.reply) :]
        return not self.reply


def _listen(address: Address) -> socket:
    """Open the socket. An empty host is every address, of IPv6 too where the machine has it."""
    import socket

    if not address.host:
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        listener = socket.create_server(("", address.port), family=family, dualstack_ipv6=both)
    else:
        rows = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, _, _, _, place = rows[0]
        listener = socket.create_server(place, family=family)
    listener.setblocking(False)
    return listener


def _parsed(request: bytes) -> tuple[str, str]:
    """Return method and target of a request; empty when it is not a request."""
    line = request.partition(b"\n")[0].decode("ascii", "replace").split()
    if len(line) != 3 or not line[2].startswith("HTTP/1."):
        return "", ""
    return line[0], line[1]


def _reply(status: int, body: str, *, head: bool = False) -> bytes:
    content = body.encode()
    lines = [
        f"HTTP/1.1 {status} {_STATUS[status]}",
        f"Content-Type: {CONTENT_TYPE if status == 200 else 'text/plain; charset=utf-8'}",
        f"Content-Length: {len(content)}",
        *(["Allow: GET, HEAD"] if status == 405 else []),
        "Connection: close",
        "\r\n",
    ]
    return "\r\n".join(lines).encode() + (b"" if head else content)


# Once in a process

_lock = Lock()
# Whether this process, or one that it was forked from, has a server or must not have one.
_served_or_disabled = False


def disable_server() -> None:
    """Disable the server in this process.

    The command line of preheat calls this. A program that it starts may listen.
    """
    global _served_or_disabled
    _served_or_disabled = True


def serve(address: Address, events: Events) -> None:
    """Serve the counters of this process on `address`, once.

    An address that cannot be used is a `fault` event. Children that are forked later do not listen.
    """
    global _served_or_disabled
    with _lock:
        if _served_or_disabled:
            return
        _served_or_disabled = True
    try:
        server = MetricsServer(address)
    except (OSError, ValueError, RuntimeError) as fault:  # ValueError: the host name is invalid.
        events.fault("metrics", f"listen on {address}", fault)
        return
    _servers.append(server)


_servers: list[MetricsServer] = []  # keeps the server for as long as the process
