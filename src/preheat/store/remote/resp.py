"""The protocol of Redis and Valkey (RESP, version 2) on one socket: commands out, replies in.

The usual client package takes long to import. preheat needs
eight commands, and the protocol has five kinds of replies.
"""

from __future__ import annotations

import select
import socket
import ssl
import time
from collections.abc import Sequence
from typing import Any

from preheat.store.remote.engine import MAX_OBJECT_BYTES

__all__ = ["Connection", "OversizeError", "ServerError"]

_CHUNK = 1 << 16
_MAX_LIST_BYTES = 16 << 20  # A page of a scan has about a thousand keys.


class ServerError(Exception):
    """The server refused a command. The message is the reply, such as `OOM command not allowed`."""

    @property
    def code(self) -> str:
        """The first word of the reply, such as `OOM`."""
        return str(self).partition(" ")[0]


class OversizeError(Exception):
    """The server announces a value that is longer than any object may be."""


class Connection:
    """One connection, for one call at a time. After any exception it must be closed.

    Raises `OSError`, of which `TimeoutError` is one, `ServerError` for a refused command,
    `OversizeError`, and `ValueError` or `RecursionError` for an invalid reply.
    """

    def __init__(self, open_socket: socket.socket) -> None:
        self._socket = open_socket
        self._unread = bytearray()
        self._limit = MAX_OBJECT_BYTES  # of a value in a reply
        self._budget = 0  # bytes that the replies of the current call may still have

    @classmethod
    def open(cls, host: str, port: int, *, secure: bool, timeout: float) -> Connection:
        """Connect to a server, with TLS if `secure`."""
        try:
            plain = socket.create_connection((host, port), timeout)
        except UnicodeError:  # A part of the name is empty, or longer than 63 characters.
            raise socket.gaierror(socket.EAI_NONAME, "its host name is invalid") from None
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if not secure:
                return cls(plain)
            return cls(ssl.create_default_context().wrap_socket(plain, server_hostname=host))
        except BaseException:
            plain.close()
            raise

    def call(
        self,
        commands: Sequence[Sequence[bytes | str]],
        timeout: float,
        *,
        limit: int = MAX_OBJECT_BYTES,
        lists: bool = False,
    ) -> list[Any]:
        """Send commands at once and return their replies, all within `timeout` seconds.

        A value of more than `limit` bytes is refused. Only with `lists` may a reply be an array. It is
        then limited to `_MAX_LIST_BYTES`. Other replies are together limited to about `limit` bytes.
        """
        self._limit = limit
        deadline = time.monotonic() + timeout
        self._budget = (_MAX_LIST_BYTES if lists else limit) + _CHUNK
        self._socket.settimeout(timeout)
        self._socket.sendall(b"".join(map(_encode, commands)))
        replies = [self._reply(deadline, lists=lists) for _ in commands]
        for reply in replies:
            if isinstance(reply, ServerError):
                raise reply
        return replies

    def usable(self) -> bool:
        """Return whether an idle connection is open and has nothing left to read.

        A server that closed it made it readable.
        """
        if self._unread:
            return False
        if isinstance(self._socket, ssl.SSLSocket):  # Records of the TLS session make it readable, too.
            return True
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return not poll.poll(0)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    __del__ = close

    def _reply(self, deadline: float, *, lists: bool) -> Any:
        kind, rest = (line := self._line(deadline))[:1], line[1:]
        match kind:
            case b"+":
                return rest
            case b"-":
                return ServerError(rest.decode("utf-8", "replace"))
            case b":":
                return int(rest)
            case b"$":
                return self._bytes(int(rest), deadline)
            case b"*" if lists:  # Items are read one by one, so that the budget limits their number.
                return [self._reply(deadline, lists=lists) for _ in range(int(rest))]
        raise ValueError("the line is not a valid reply")

    def _line(self, deadline: float) -> bytes:
        while (end := self._unread.find(b"\r\n")) < 0:
            if len(self._unread) > _CHUNK:
                raise ValueError("the line is not a valid reply")
            self._receive(deadline)
        self._spend(end + 2)
        line = bytes(self._unread[:end])
        del self._unread[: end + 2]
        return line

    def _bytes(self, size: int, deadline: float) -> bytes | None:
        if size < 0:  # the reply for a key that does not exist
            return None
        if size > self._limit:
            raise OversizeError(
                f"the object has {size:,} bytes; objects of more than {self._limit:,} are not read"
            )
        self._spend(size)
        while len(self._unread) < size + 2:
            self._receive(deadline)
        data = bytes(memoryview(self._unread)[:size])
        del self._unread[: size + 2]
        return data

    def _spend(self, size: int) -> None:
        self._budget -= size
        if self._budget < 0:
            raise ValueError("the reply is too long")

    def _receive(self, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        self._socket.settimeout(left)
        received = self._socket.recv(_CHUNK)
        if not received:
            raise ConnectionResetError("the server closed the connection")
        self._unread += received


def _encode(command: Sequence[bytes | str]) -> bytes:
    words = [word.encode() if isinstance(word, str) else word for word in command]
    parts = [b"*%d\r\n" % len(words)]
    for word in words:
        parts += (b"$%d\r\n" % len(word), word, b"\r\n")
    return b"".join(parts)
