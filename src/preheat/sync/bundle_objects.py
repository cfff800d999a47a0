"""Bundles as objects of a server, each under the SHA-256 of its file: `bundles/<64 digits>`.

The name decides the content, so that a reader needs no key: it compares what it received with the name.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from preheat.ahead.bundles import require_place
from preheat.config import shown_url
from preheat.errors import BundleError, InputError, PreheatError
from preheat.events import Events
from preheat.store.bundle import Bundle
from preheat.store.publish import publish
from preheat.store.remote.engine import MAX_OBJECT_BYTES, ObjectError, RemoteError
from preheat.store.remote.engines import open_engine
from preheat.store.remote.names import PROBE
from preheat.store.remote.permissions import permissions_of
from preheat.store.remote.server import Server
from preheat.store.remote.url import parse_remote
from preheat.sync.remote_store import require_writable_kind

__all__ = ["pull", "push"]

_SECONDS = 120.0  # for one request: a bundle may have hundreds of megabytes


def push(path: Path, url: str) -> tuple[str, bool]:
    """Write a bundle to a server, unless it is there; return its SHA-256 and whether it was written.

    An object with other bytes under the name of the bundle is replaced. A store that is read-only, or
    that refuses an empty object, is an error before the bundle is sent.
    """
    require_writable_kind(parse_remote(url))
    with Bundle.open(path) as bundle:
        if wrong := bundle.verify():
            raise BundleError(f"bundle {path} is damaged: {next(iter(wrong.values()))}")
        if bundle.nbytes > MAX_OBJECT_BYTES:
            raise BundleError(
                f"bundle {path} has {bundle.nbytes:,} bytes; the limit of a shared store is "
                f"{MAX_OBJECT_BYTES:,}",
                hint="bake a bundle for each architecture, or copy the file in another way",
            )
    data = path.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    name = _name(digest)
    with _Connection(url) as server:
        if server.has(name, data):
            return digest, False
        server.require_writable()
        server.write(name, data)
    return digest, True


def pull(url: str, pin: str, output: Path) -> int:
    """Write the bundle with the SHA-256 in `pin` to `output`; return its size.

    `BundleError` when the server does not have it, or has other bytes in its place. An existing file is
    then unchanged.
    """
    match = re.fullmatch(r"(?:sha256:)?([0-9a-fA-F]{64})", pin)
    if match is None:
        given = shown_url(pin) if "://" in pin else repr(pin)
        raise InputError(f"{given} is not a pin", hint="a pin is sha256: and 64 hexadecimal digits")
    require_place(output)
    digest = match[1].lower()
    with _Connection(url) as server:
        data = server.read(_name(digest))
        if data is None:
            raise BundleError(f"{server.name} has no bundle sha256:{digest}")
        if (found := hashlib.sha256(data).hexdigest()) != digest:
            raise BundleError(f"{server.name} has sha256:{found} in the place of sha256:{digest}")
    try:
        return publish(output, [data])
    except OSError as fault:
        raise BundleError(f"bundle {output} cannot be written: {fault.strerror or fault}") from fault


def _name(digest: str) -> str:
    return f"bundles/{digest}"


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except RemoteError as error:
        raise PreheatError(str(error)) from error  # The message of an engine names the server.


class _Connection:
    """Requests to one server, with retries. A fault is a `PreheatError` that names the server."""

    def __init__(self, url: str) -> None:
        remote = parse_remote(url)
        self.name = remote.name
        self._permissions = permissions_of(remote)
        self._server = Server(
            "remote", lambda: open_engine(remote, timeout=_SECONDS), Events(), timeout=_SECONDS
        )

    def has(self, name: str, data: bytes) -> bool:
        """Return whether the server has an object with this content."""
        with _translated():
            try:
                return self._server.read(name) == data
            except ObjectError:  # For example one that is too large. It is replaced.
                return False

    def read(self, name: str) -> bytes | None:
        with _translated():
            return self._server.read(name)

    def require_writable(self) -> None:
        """Write an empty object and delete it. `PreheatError` if the server refuses the write."""
        name = f"{PROBE}/{os.urandom(16).hex()}"
        try:
            self._server.write(name, b"")
        except RemoteError as error:
            hint = f"if it refuses writes, {self._permissions.write}" if self._permissions else None
            raise PreheatError(f"nothing was pushed: {error}", hint=hint) from error
        # Where objects may be written and not deleted, the empty object stays, and does no harm.
        with suppress(RemoteError):
            self._server.call("delete", lambda engine: engine.delete(name))

    def write(self, name: str, data: bytes) -> None:
        with _translated():
            self._server.write(name, data)

    def __enter__(self) -> _Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()
