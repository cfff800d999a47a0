"""Objects in Redis or Valkey: one key for each object."""

from __future__ import annotations

import re
import ssl
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from preheat.process.messages import printable
from preheat.store.remote.engine import (
    CERTIFICATES_HINT,
    MAX_OBJECT_BYTES,
    Engine,
    ObjectError,
    RemoteError,
)
from preheat.store.remote.resp import Connection, OversizeError, ServerError
from preheat.store.remote.url import Remote

__all__ = ["RedisEngine"]

_BATCH = 1000  # names in one page of a list
_SWAP = """
if redis.call('get', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('set', KEYS[1], ARGV[2], 'px', ARGV[3])
return 1
"""
_DISCARD = """
if redis.call('get', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('del', KEYS[1])
"""
#: Replies after which the same command may succeed soon.
_TRANSIENT = {"LOADING", "BUSY", "TRYAGAIN", "MASTERDOWN", "CLUSTERDOWN"}
_MEANINGS = {
    "WRONGTYPE": "the value of the key is not a string",
    "OOM": "it is full",
    "READONLY": "it is read-only",
    "NOAUTH": "it requires a password",
    "WRONGPASS": "it refuses the credentials",
    "NOPERM": "this user may not run the command",
}


class RedisEngine(Engine):
    """Objects in one database of Redis, under keys that begin with a prefix."""

    conditional = True  # A command and a script are atomic there.
    closes_after_fork = True  # That closes the sockets of the child alone.

    def __init__(self, remote: Remote, *, timeout: float) -> None:
        super().__init__(remote.name, timeout=timeout)
        self._remote = remote
        self._prefix = f"{remote.option('prefix') or 'preheat'}/"
        self._idle: deque[Connection] = deque()  # Its operations are atomic.

    def _get(self, name: str, limit: int) -> bytes | None:
        (data,) = self._call(["GET", self._key(name)], limit=limit)
        if data is None or isinstance(data, bytes):
            return data
        raise self._protocol_error()

    def _put(self, name: str, data: bytes) -> None:
        (reply,) = self._call(["SET", self._key(name), data])
        if reply != b"OK":  # Something between here and Redis has dropped the value.
            raise self._protocol_error()

    def _remove(self, name: str) -> None:
        self._call(["DEL", self._key(name)])

    def _existing(self, names: list[str]) -> set[str]:
        replies = self._call(*(["EXISTS", self._key(name)] for name in names))
        return {name for name, exists in zip(names, replies, strict=True) if exists}

    def _pages(self, prefix: str) -> Iterator[list[str]]:
        # A page of the scan may have no key of this store: the database may have keys of others.
        pattern = re.sub(r"([*?\[\]\\^])", r"\\\1", self._key(prefix)) + "*"
        seen: set[bytes] = set()  # A scan may return a key twice.
        cursor = b"0"
        while True:
            command: list[str | bytes] = ["SCAN", cursor, "MATCH", pattern, "COUNT", str(_BATCH)]
            (reply,) = self._call(command, lists=True)
            match reply:
                case [bytes() as following, [*keys]] if all(isinstance(key, bytes) for key in keys):
                    pass
                case _:
                    raise self._protocol_error()
            if following == cursor != b"0":  # The scan would never end.
                raise self._protocol_error()
            cursor = following
            new = [key for key in dict.fromkeys(keys) if key not in seen]
            seen.update(new)
            yield [key.decode("utf-8", "replace").removeprefix(self._prefix) for key in new]
            if cursor == b"0":
                return

    def _create(self, name: str, data: bytes, seconds: float) -> bool:
        (reply,) = self._call(["SET", self._key(name), data, "NX", "PX", _milliseconds(seconds)])
        return reply is not None

    def _swap(self, name: str, old: bytes, new: bytes, seconds: float) -> bool:
        (done,) = self._call(["EVAL", _SWAP, "1", self._key(name), old, new, _milliseconds(seconds)])
        return bool(done)

    def _discard(self, name: str, old: bytes) -> bool:
        (done,) = self._call(["EVAL", _DISCARD, "1", self._key(name), old])
        return bool(done)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def _key(self, name: str) -> str:
        return f"{self._prefix}{name}"

    def _call(
        self, *commands: Sequence[str | bytes], limit: int = MAX_OBJECT_BYTES, lists: bool = False
    ) -> list[Any]:
        try:
            connection = self._connection()
            try:
                replies = connection.call(commands, self._timeout, limit=limit, lists=lists)
            except BaseException:  # Replies of this call may still arrive.
                connection.close()
                raise
        except RemoteError:
            raise
        except ServerError as refusal:
            raise self._explain_refusal(refusal) from None
        except OversizeError as oversize:
            raise ObjectError(f"{self.name}: {oversize}") from None
        except TimeoutError:
            raise RemoteError(f"{self.name} did not answer in time") from None
        except OSError as fault:
            self.close()  # The other idle connections are probably broken too.
            raise RemoteError(
                f"{self.name}: {_reason(fault)}", retryable=isinstance(fault, ConnectionError)
            ) from None
        except (ValueError, RecursionError):
            raise self._protocol_error() from None
        self._idle.append(connection)
        return replies

    def _connection(self) -> Connection:
        while self._idle:
            try:
                connection = self._idle.pop()
            except IndexError:  # Another thread took it.
                break
            if connection.usable():
                return connection
            connection.close()
        remote = self._remote
        connection = Connection.open(
            remote.host, remote.port or 6379, secure=remote.secure, timeout=self._timeout
        )
        try:
            if hello := self._first_commands():
                connection.call(hello, self._timeout)
        except ServerError as refusal:
            connection.close()
            raise self._refused_login(refusal) from None
        except BaseException:
            connection.close()
            raise
        return connection

    def _first_commands(self) -> list[list[str | bytes]]:
        remote, commands = self._remote, list[list[str | bytes]]()
        if remote.password is not None:
            commands.append(["AUTH", *([remote.user] if remote.user else []), remote.password])
        if remote.path.strip("0"):
            commands.append(["SELECT", remote.path])
        return commands

    def _protocol_error(self) -> RemoteError:
        return RemoteError(f"{self.name}: the reply is not valid Redis protocol")

    def _explain_refusal(self, refusal: ServerError) -> RemoteError:
        reason = str(refusal)
        if self._remote.password:  # A server may repeat the arguments of a command.
            reason = reason.replace(self._remote.password, "***")
        meaning = _MEANINGS.get(refusal.code, "it refuses the command")
        message = f"{self.name}: {meaning}: {printable(reason[:200])}"
        if refusal.code == "WRONGTYPE":
            return ObjectError(message)
        return RemoteError(message, retryable=refusal.code in _TRANSIENT)

    def _refused_login(self, refusal: ServerError) -> RemoteError:
        """Return the error without the text of the server, which may repeat a part of the password."""
        if self._remote.password is None:
            return self._explain_refusal(refusal)
        meaning = _MEANINGS.get(refusal.code, "it refuses the credentials or the database number")
        return RemoteError(f"{self.name}: {meaning}", retryable=refusal.code in _TRANSIENT)


def _milliseconds(seconds: float) -> str:
    return str(max(1, round(seconds * 1000)))


def _reason(fault: Exception) -> str:
    if isinstance(fault, ssl.SSLCertVerificationError):
        return f"its certificate is not accepted: {fault.verify_message}; {CERTIFICATES_HINT}"
    return getattr(fault, "strerror", None) or str(fault) or type(fault).__name__
