"""Opens the engine for a shared store."""

from __future__ import annotations

from importlib.util import find_spec

from preheat.errors import InputError
from preheat.locks import no_fork
from preheat.store.remote.engine import Engine, RemoteError, remote_error
from preheat.store.remote.url import Remote

__all__ = ["missing_package", "open_engine"]


def open_engine(remote: Remote, *, timeout: float, private: bool = False) -> Engine:
    """Open the engine for `remote`, whose calls end within `timeout` seconds. Nothing is sent yet.

    With `private`, a directory is used in which only this user may write; see `FileEngine`.
    Raises `InputError` when a package is missing, and `RemoteError` for settings that are incomplete,
    or for a package that cannot be used.
    """
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


def missing_package(remote: Remote) -> str | None:
    """Return which package `remote` needs and this environment lacks, and how to install it; or None.

    Nothing is imported.
    """
    if remote.service in ("redis", "file") or find_spec("opendal") is not None:
        return None
    return "the package opendal is not installed: pip install 'preheat[remote]'"


def _opendal_engine(remote: Remote, timeout: float) -> Engine:
    with no_fork:
        from preheat.store.remote.opendal_engine import OpendalEngine, S3Engine

    kind = S3Engine if remote.service == "s3" else OpendalEngine
    return kind(remote, timeout=timeout)
