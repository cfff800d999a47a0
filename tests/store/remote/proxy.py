"""A TCP proxy that can stall, delay, refuse, cut and drip."""

from __future__ import annotations

import queue
import socket
import struct
import threading
import time
from contextlib import suppress

__all__ = ["Proxy"]

_CHUNK = 1 << 16
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends a reset


class Proxy:
    """Forwards connections to a port of 127.0.0.1. Its faults also apply to open connections.

    `delay` is added to each request, in seconds, without a limit on the throughput.
    """

    def __init__(self, target: int, *, delay: float = 0.0) -> None:
        self.delay = delay
        self.connections = 0
        self._target = target
        self._flowing = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.port = int(self._listener.getsockname()[1])
        self._sockets: set[socket.socket] = set()
        self.heal()
        threading.Thread(target=self._accept, daemon=True).start()

    def heal(self) -> None:
        """Forward everything again. Connections that were cut stay so."""
        self._refusing = False
        self._uploaded: int | None = None
        self._pause = 0.0
        self._flowing.set()

    def stall(self) -> None:
        """Accept connections and data, and forward nothing."""
        self._flowing.clear()

    def refuse(self) -> None:
        """Reset all connections, those that are open and new ones."""
        self._refusing = True
        self.cut()

    def cut(self) -> None:
        """Reset the connections that are open."""
        for each in list(self._sockets):
            self._reset(each)

    def cut_after(self, uploaded: int) -> None:
        """Reset everything once clients have sent this number of bytes more."""
        self._uploaded = uploaded

    def drip(self, pause: float) -> None:
        """Forward replies byte by byte, with a pause after each."""
        self._pause = pause

    def close(self) -> None:
        """Stop listening and reset all connections."""
        self._listener.close()
        self.refuse()
        self._flowing.set()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self.connections += 1
                if self._keep(client):
                    threading.Thread(target=self._serve, args=[client], daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(("127.0.0.1", self._target), 30)
        except OSError:
            return self._reset(client)
        server.settimeout(None)
        if not self._keep(server):
            return self._reset(client)
        for source, sink in ((client, server), (server, client)):
            with suppress(OSError):  # It was reset in the meantime.
                source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            line: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
            upload = source is client
            threading.Thread(target=self._receive, args=[source, line, upload], daemon=True).start()
            threading.Thread(target=self._send, args=[line, sink, upload], daemon=True).start()

    def _keep(self, connection: socket.socket) -> bool:
        """Note a new connection, unless all are refused, and return whether it was noted."""
        self._sockets.add(connection)
        if self._refusing:  # perhaps since a moment ago, so that this test comes second
            self._reset(connection)
            return False
        return True

    def _receive(
        self, source: socket.socket, line: queue.SimpleQueue[tuple[float, bytes]], upload: bool
    ) -> None:
        data = b"-"
        while data:
            data = b""
            with suppress(OSError):
                data = source.recv(_CHUNK)
            line.put((time.monotonic() + (self.delay if upload else 0.0), data))

    def _send(
        self, line: queue.SimpleQueue[tuple[float, bytes]], sink: socket.socket, upload: bool
    ) -> None:
        with suppress(OSError):
            while True:
                due, data = line.get()
                time.sleep(max(0.0, due - time.monotonic()))
                self._flowing.wait()
                if not data:
                    return sink.shutdown(socket.SHUT_WR)
                self._forward(data, sink, upload)

    def _forward(self, data: bytes, sink: socket.socket, upload: bool) -> None:
        if upload and self._uploaded is not None:
            if len(data) > self._uploaded:
                sink.sendall(data[: self._uploaded])
                return self.refuse()
            self._uploaded -= len(data)
        if upload or not self._pause:
            return sink.sendall(data)
        for byte in data:
            sink.sendall(bytes([byte]))
            time.sleep(self._pause)

    def _reset(self, connection: socket.socket) -> None:
        self._sockets.discard(connection)
        with suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            connection.shutdown(socket.SHUT_RDWR)
        connection.close()
