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

from preheat.errors import BundleError, InputError, PreheatError
from preheat.model.events import Events
from preheat.model.setting_values import shown_url
from preheat.store.bundle import Bundle
from preheat.store.publish import publish
from preheat.store.remote.checks import permissions_of
from preheat.store.remote.engine import MAX_OBJECT_BYTES, ObjectError, RemoteError, open_engine
from preheat.store.remote.server import Server
from preheat.store.remote.url import BUNDLES, PROBE, Remote, parse_remote, require_writable_kind

__all__ = ["pull", "push"]

_SECONDS = 120.0  # for one request: a bundle may have hundreds of megabytes


def push(path: Path, url: str) -> tuple[str, bool]:
    """Write a bundle to a server, unless it is there; return its SHA-256 and whether it was written.

    An object with other bytes under the name of the bundle is replaced. A store that is read-only, or
    that refuses an empty object, is an error before the bundle is sent.
    """
    remote = parse_remote(url)
    require_writable_kind(remote)
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
    name = f"{BUNDLES}{digest}"
    with _open(remote) as server:
        with suppress(ObjectError):  # For example one that is too large. It is replaced.
            if server.get(name) == data:
                return digest, False
        _require_writable(server, remote)
        server.put(name, data)
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
    digest = match[1].lower()
    remote = parse_remote(url)
    with _open(remote) as server:
        data = server.get(f"{BUNDLES}{digest}")
    if data is None:
        raise BundleError(f"{remote.name} has no bundle sha256:{digest}")
    if (found := hashlib.sha256(data).hexdigest()) != digest:
        raise BundleError(f"{remote.name} has sha256:{found} in the place of sha256:{digest}")
    try:
        return publish(output, [data])
    except OSError as fault:
        raise BundleError(f"bundle {output} cannot be written: {fault.strerror or fault}") from fault


@contextmanager
def _open(remote: Remote) -> Iterator[Server]:
    """Open a server, whose requests are repeated. A fault is a `PreheatError` that names it."""
    server = Server("remote", lambda: open_engine(remote, timeout=_SECONDS), Events(), timeout=_SECONDS)
    try:
        yield server
    except RemoteError as error:
        raise PreheatError(str(error)) from error
    finally:
        server.close()


def _require_writable(server: Server, remote: Remote) -> None:
    """Write an empty object and remove it. `PreheatError` if the server refuses the write."""
    name = f"{PROBE}/{os.urandom(16).hex()}"
    try:
        server.put(name, b"")
    except RemoteError as error:
        permissions = permissions_of(remote)
        hint = f"if it refuses writes, {permissions.write}" if permissions else None
        raise PreheatError(f"nothing was pushed: {error}", hint=hint) from error
    # Where objects may be written and not removed, the empty object stays, and does no harm.
    with suppress(RemoteError):
        server.remove(name)
