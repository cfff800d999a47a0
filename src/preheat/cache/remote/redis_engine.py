"""Objects in Redis or Valkey: one key for each object."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from preheat.cache.remote.engine import MOST_BYTES, ObjectError, RemoteError
from preheat.cache.remote.names import printable
from preheat.cache.remote.resp import Connection, OversizeError, ServerError
from preheat.cache.remote.url import Remote

__all__ = ["RedisEngine"]

_BATCH = 1000  # names in one round trip
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
_PASSING = {"LOADING", "BUSY", "TRYAGAIN", "MASTERDOWN", "CLUSTERDOWN"}
_MEANINGS = {
    "WRONGTYPE": "the key has another kind of value than an object",
    "OOM": "it is full",
    "READONLY": "it is read-only",
    "NOAUTH": "it wants a password",
    "WRONGPASS": "it refuses the credentials",
    "NOPERM": "it refuses the command to this user",
}


class RedisEngine:
    """Objects in one database of Redis, under keys that begin with a prefix."""

    conditional = True  # A command and a script are atomic there.
    closes_after_fork = True  # That closes the sockets of the child alone.

    def __init__(self, remote: Remote, *, timeout: float) -> None:
        self.name = remote.name
        self._remote = remote
        self._timeout = timeout
        self._prefix = f"{remote.option('prefix') or 'preheat'}/"
        self._idle: deque[Connection] = deque()  # Its operations are atomic.

    def read(self, name: str, *, most: int = MOST_BYTES) -> bytes | None:
        (data,) = self._call(["GET", self._key(name)], most=most)
        if data is None or isinstance(data, bytes):
            return data
        raise self._confused()

    def write(self, name: str, data: bytes) -> None:
        self._call(["SET", self._key(name), data])

    def delete(self, name: str) -> None:
        self._call(["DEL", self._key(name)])

    def existing(self, names: Iterable[str]) -> set[str]:
        found: set[str] = set()
        for batch in self.rounds(names):
            replies = self._call(*(["EXISTS", self._key(name)] for name in batch))
            found.update(name for name, exists in zip(batch, replies, strict=True) if exists)
        return found

    def rounds(self, names: Iterable[str]) -> Iterator[list[str]]:
        rest = iter(names)
        while batch := list(islice(rest, _BATCH)):
            yield batch

    def names(self, prefix: str = "") -> Iterator[str]:
        pattern = re.sub(r"([*?\[\]\\^])", r"\\\1", self._key(prefix)) + "*"
        seen: set[bytes] = set()  # A scan may return a key twice.
        cursor = b"0"
        while True:
            (reply,) = self._call(["SCAN", cursor, "MATCH", pattern, "COUNT", str(_BATCH)])
            match reply:
                case [bytes() as cursor, [*keys]] if all(isinstance(key, bytes) for key in keys):
                    pass
                case _:
                    raise self._confused()
            for key in keys:
                if key not in seen:
                    seen.add(key)
                    yield key.decode("utf-8", "replace").removeprefix(self._prefix)
            if cursor == b"0":
                return

    def create(self, name: str, data: bytes, *, seconds: float) -> bool:
        (reply,) = self._call(["SET", self._key(name), data, "NX", "PX", _milliseconds(seconds)])
        return reply is not None

    def swap(self, name: str, old: bytes, new: bytes, *, seconds: float) -> bool:
        (done,) = self._call(["EVAL", _SWAP, "1", self._key(name), old, new, _milliseconds(seconds)])
        return bool(done)

    def discard(self, name: str, old: bytes) -> bool:
        (done,) = self._call(["EVAL", _DISCARD, "1", self._key(name), old])
        return bool(done)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def _key(self, name: str) -> str:
        return f"{self._prefix}{name}"

    def _call(self, *commands: Sequence[str | bytes], most: int = MOST_BYTES) -> list[Any]:
        try:
            connection = self._connection()
            try:
                replies = connection.call(commands, self._timeout, most=most)
            except BaseException:  # Replies of this call may still arrive.
                connection.close()
                raise
        except RemoteError:
            raise
        except ServerError as refusal:
            raise self._refused(refusal) from None
        except OversizeError as oversize:
            raise ObjectError(f"{self.name}: {oversize}") from None
        except TimeoutError:
            raise RemoteError(f"{self.name} did not answer in time") from None
        except OSError as fault:
            self.close()  # The other idle connections have the same fate.
            raise RemoteError(
                f"{self.name}: {_reason(fault)}", retryable=isinstance(fault, ConnectionError)
            ) from None
        except (ValueError, RecursionError):
            raise self._confused() from None
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

    def _confused(self) -> RemoteError:
        return RemoteError(f"{self.name}: the server does not speak the protocol of Redis")

    def _refused(self, refusal: ServerError) -> RemoteError:
        said = str(refusal)
        if self._remote.password:  # A server may repeat the arguments of a command.
            said = said.replace(self._remote.password, "***")
        meaning = _MEANINGS.get(refusal.code, "it refuses the command")
        message = f"{self.name}: {meaning}: {printable(said[:200])}"
        if refusal.code == "WRONGTYPE":
            return ObjectError(message)
        return RemoteError(message, retryable=refusal.code in _PASSING)

    def _refused_login(self, refusal: ServerError) -> RemoteError:
        """Return the error without the text of the server, which may repeat a part of the password."""
        if self._remote.password is None:
            return self._refused(refusal)
        meaning = _MEANINGS.get(refusal.code, "it refuses the credentials or the database number")
        return RemoteError(f"{self.name}: {meaning}", retryable=refusal.code in _PASSING)


def _milliseconds(seconds: float) -> str:
    return str(max(1, round(seconds * 1000)))


def _reason(fault: Exception) -> str:
    return getattr(fault, "strerror", None) or str(fault) or type(fault).__name__
