"""Opens the engine for a shared store."""

from __future__ import annotations

import os
from importlib.util import find_spec

from preheat.errors import InputError
from preheat.locks import no_fork
from preheat.store.remote.bounded import BoundedEngine
from preheat.store.remote.engine import Engine, RemoteError, remote_error
from preheat.store.remote.names import PROBE
from preheat.store.remote.url import Remote

__all__ = ["missing_package", "open_engine", "probe_conditional"]


def open_engine(remote: Remote, *, timeout: float, private: bool = False) -> BoundedEngine:
    """Open the engine for `remote`, whose calls end within `timeout` seconds. Nothing is sent yet.

    With `private`, a directory is used in which only this user may write; see `FileEngine`.
    Raises `InputError` when a package is missing, and `RemoteError` for settings that are incomplete,
    or for a package that cannot be used.
    """
    # The limit of the client comes first: then no thread is left behind.
    return BoundedEngine(_engine(remote, 0.9 * timeout, private=private), timeout=timeout)


def missing_package(remote: Remote) -> str | None:
    """Return which package `remote` needs and this environment lacks, and how to install it; or None.

    Nothing is imported.
    """
    if remote.service in ("redis", "file") or find_spec("opendal") is not None:
        return None
    return "the package opendal is not installed: pip install 'preheat[remote]'"


def probe_conditional(engine: Engine) -> bool:
    """Return whether the server keeps the conditions of `create`, `swap` and `discard`.

    Some gateways to S3 accept a conditional request and ignore the condition. A separate object is
    written and removed. The calls come one after the other, so that this is no proof of atomicity.
    """
    if not engine.conditional:
        return False
    name = f"{PROBE}/{os.urandom(16).hex()}"
    try:
        return _keeps_conditions(engine, name)
    finally:
        engine.delete(name)


def _keeps_conditions(engine: Engine, name: str) -> bool:
    def create(data: bytes) -> bool:
        return engine.create(name, data, seconds=60)

    def swap(old: bytes, new: bytes) -> bool:
        return engine.swap(name, old, new, seconds=60)

    if not create(b"1") or create(b"2") or swap(b"2", b"3") or not swap(b"1", b"2"):
        return False
    if engine.discard(name, b"1") or engine.read(name) != b"2" or not engine.conditional:
        return False
    inner = engine.inner if isinstance(engine, BoundedEngine) else engine
    refuses_stale_etags = getattr(inner, "refuses_stale_etags", None)
    return refuses_stale_etags is None or bool(refuses_stale_etags(name))


def _engine(remote: Remote, timeout: float, *, private: bool) -> Engine:
    if remote.service == "redis":
        with no_fork:
            from preheat.store.remote.redis_engine import RedisEngine

        return RedisEngine(remote, timeout=timeout)
    if remote.service == "file":
        with no_fork:
            from preheat.store.remote.file_engine import FileEngine

        return FileEngine(remote, timeout=timeout, private=private)
    try:
        return _opendal_engine(remote, timeout)
    except ModuleNotFoundError as missing:
        raise InputError(
            f"{remote.name} needs the package {missing.name}, which is not installed",
            hint="pip install 'preheat[remote]'",
        ) from None
    except (RemoteError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as broken:  # For example a build for another system, or another version.
        raise remote_error(f"{remote.name}: the package opendal cannot be used", broken) from broken


def _opendal_engine(remote: Remote, timeout: float) -> Engine:
    with no_fork:
        from preheat.store.remote.opendal_engine import OpendalEngine, S3Engine

    kind = S3Engine if remote.service == "s3" else OpendalEngine
    return kind(remote, timeout=timeout)
