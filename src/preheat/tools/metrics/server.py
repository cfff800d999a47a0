"""A small HTTP server that exposes the counters of this process to Prometheus.

A thread accepts the clients, and each client has a thread of its own. A client that does not send its
request, or does not receive the reply, is dropped after a few seconds.
"""

from __future__ import annotations

import atexit
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from preheat._version import __version__
from preheat.model.config import Address
from preheat.model.events import process_counters
from preheat.process import fork
from preheat.tools.metrics.metrics import CONTENT_TYPE, counter_families, exposition, gauge

__all__ = ["MetricsServer", "process_page"]

_STOP_SECONDS = 1.0  # the longest wait for the thread when the process ends
_TEXT = "text/plain; charset=utf-8"


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
        self._server = _HttpServer(address, page)
        self._thread = threading.Thread(target=self._server.run, name="preheat-metrics", daemon=True)
        self._pid = os.getpid()
        try:
            self._thread.start()
        except RuntimeError:
            self._server.server_close()
            raise
        fork.register(self)
        atexit.register(self.close)

    @property
    def port(self) -> int:
        """The port of the server."""
        port: int = self._server.socket.getsockname()[1]
        return port

    def close(self) -> None:
        """Stop listening, and wait a moment for the thread. A second call does nothing."""
        atexit.unregister(self.close)
        if os.getpid() == self._pid:
            self._server.stop()
            self._thread.join(_STOP_SECONDS)

    def after_fork(self) -> None:
        """Close what belongs to the parent, in a forked child."""
        self._server.close_sockets()


class _HttpServer(ThreadingHTTPServer):
    """The listening socket, and the sockets of the clients that are being answered."""

    daemon_threads = True

    def __init__(self, address: Address, page: Callable[[], str]) -> None:
        super().__init__(("", 0), _Client, bind_and_activate=False)
        self.socket.close()  # Its class is for one family of addresses.
        self.socket = _listen(address)
        self.page = page
        self.clients: set[Any] = set()
        self._stopped = False

    def run(self) -> None:
        """Accept clients until `stop`. The base class would look for its end twice a second."""
        while not self._stopped:
            self.handle_request()
        self.server_close()

    def stop(self) -> None:
        """Let `run` end. On Linux, a socket that is shut down no longer waits for clients."""
        self._stopped = True
        with suppress(OSError):  # It is closed already.
            self.socket.shutdown(socket.SHUT_RDWR)

    def close_sockets(self) -> None:
        """Close all sockets, in a process that has no thread for them."""
        for each in (self.socket, *self.clients):
            if (number := each.detach()) >= 0:  # `close` would wait for the files of a client.
                os.close(number)
        self.clients.clear()

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a client. Without a free descriptor, do not try again at once."""
        try:
            client, place = super().get_request()
        except OSError:
            if not self._stopped:
                time.sleep(0.05)
            raise
        self.clients.add(client)
        return client, place

    def close_request(self, request: Any) -> None:
        """Close the socket of a client."""
        self.clients.discard(request)
        super().close_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: the client has left, or there is no thread for it."""


class _Client(BaseHTTPRequestHandler):
    """A request and its reply."""

    server: _HttpServer
    timeout = 5.0  # seconds of each read, and of the reply
    protocol_version = "HTTP/1.1"
    default_request_version = "HTTP/1.0"  # Otherwise, a request that cannot be read gets no status.

    def do_GET(self) -> None:
        match self.path.partition("?")[0]:
            case "/metrics":
                try:
                    page = self.server.page()
                except Exception as error:  # The next request may succeed.
                    self._reply(500, f"the counters cannot be read: {error!r}\n")
                else:
                    self._reply(200, page, CONTENT_TYPE)
            case "/healthz":
                self._reply(200, "ok\n")
            case _:
                self._reply(404, "the pages are /metrics and /healthz\n")

    do_HEAD = do_GET  # noqa: N815

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Reply to a request that has no function here, or that cannot be read."""
        del explain
        if code == 501:  # The base class does not know which methods there are.
            self._reply(405, "only GET and HEAD are answered\n", allow="GET, HEAD")
        else:
            self._reply(code, f"{message or 'this request is not answered'}\n")

    def _reply(self, status: int, text: str, kind: str = _TEXT, *, allow: str = "") -> None:
        content = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        if allow:
            self.send_header("Allow", allow)
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def version_string(self) -> str:
        """Return the name of the server in the header of a reply."""
        return f"preheat/{__version__}"

    def log_message(self, format: str, *arguments: Any) -> None:
        """Print nothing, because stderr belongs to the program."""


def _listen(address: Address) -> socket.socket:
    """Open the socket. An empty host is every address, of IPv6 too where the machine has it."""
    if not address.host:
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        return socket.create_server(("", address.port), family=family, dualstack_ipv6=both)
    rows = socket.getaddrinfo(
        address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    family, _, _, _, place = rows[0]
    return socket.create_server(place, family=family)
