"""HTTP servers for tests: one with the same reply always, one without an end, a faulty S3 gateway."""

from __future__ import annotations

import hashlib
import http.server
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["endless", "gateway", "replying"]

_NOT_IMPLEMENTED = (
    b"<Error><Code>NotImplemented</Code>"
    b"<Message>A header implies functionality that is not implemented</Message></Error>"
)


@contextmanager
def replying(status: int, body: bytes = b"") -> Iterator[int]:
    """Run an HTTP server that gives the same reply to every request, and yield its port."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def reply(self) -> None:
            self.rfile.read(int(self.headers.get("content-length") or 0))
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_GET = do_PUT = do_HEAD = do_DELETE = do_PROPFIND = do_MKCOL = reply  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    with _serving(Handler) as port:
        yield port


@contextmanager
def endless() -> Iterator[tuple[int, threading.Event]]:
    """Run an HTTP server whose objects never end; yield its port and when a client has left it."""
    left = threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-length", str(10**11))
            self.end_headers()
            try:
                while True:
                    self.wfile.write(bytes(1 << 18))
                    time.sleep(0.01)
            except OSError:
                left.set()

        def log_message(self, *_: object) -> None:
            pass

    with _serving(Handler) as port:
        yield port, left


@contextmanager
def gateway(ignored: str | None = None, *, refused: str | None = None) -> Iterator[int]:
    """Run a server that stores objects like S3 but ignores a condition, such as `PUT If-Match`.

    It answers 501 to requests with the condition `refused`.
    """
    objects: dict[str, bytes] = {}

    def etag(path: str) -> str | None:
        return f'"{hashlib.md5(objects[path]).hexdigest()}"' if path in objects else None

    class Handler(http.server.BaseHTTPRequestHandler):
        def refuses(self) -> bool:
            command, _, name = (refused or "").partition(" ")
            return self.command == command and name in self.headers

        def unmet(self) -> bool:
            failed = {
                "If-None-Match": self.path in objects,
                "If-Match": self.headers["If-Match"] != etag(self.path),
            }
            kept = [name for name in failed if f"{self.command} {name}" != ignored]
            return any(failed[name] for name in kept if name in self.headers)

        def reply(self, status: int, body: bytes = b"") -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", etag(self.path) or "")
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def do_GET(self) -> None:
            self.reply(200 if self.path in objects else 404, objects.get(self.path, b""))

        def do_PUT(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.refuses():
                return self.reply(501, _NOT_IMPLEMENTED)
            if self.unmet():
                return self.reply(412)
            objects[self.path] = body
            self.reply(200)

        def do_DELETE(self) -> None:
            if self.refuses():
                return self.reply(501, _NOT_IMPLEMENTED)
            if self.unmet():
                return self.reply(412)
            objects.pop(self.path, None)
            self.reply(204)

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    with _serving(Handler) as port:
        yield port


@contextmanager
def _serving(handler: type[http.server.BaseHTTPRequestHandler]) -> Iterator[int]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
        yield int(server.server_address[1])
        server.shutdown()
