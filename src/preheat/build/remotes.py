"""The shared stores that the settings describe, and the leases among the hosts that use them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum
from functools import partial
from pathlib import Path

from preheat.errors import PreheatError
from preheat.model.config import Config
from preheat.model.events import Events
from preheat.store import Chain, DiskStore, Store
from preheat.store.filesystem import retry_transient
from preheat.store.remote import lease
from preheat.store.remote.engine import Engine, RemoteError, missing_package, open_engine
from preheat.store.remote.file_engine import FileEngine
from preheat.store.remote.lease import Leases
from preheat.store.remote.server import Server
from preheat.store.remote.store import RemoteStore
from preheat.store.remote.url import LEASES, Remote, parse_remotes
from preheat.store.signing.keys import Keys
from preheat.store.trust import distrust_reason
from preheat.toolchain.headers.states import HeaderLists

__all__ = [
    "TrustPolicy",
    "for_command",
    "open_directory_leases",
    "open_leases",
    "open_remotes",
    "open_shared_chain",
    "remotes_of",
    "trust_policy",
]

_KEYS = (
    "entries of a shared store must be signed, because they are run: set PREHEAT_TRUSTED_KEYS, and "
    "PREHEAT_SIGNING_KEY to write, or accept unsigned ones by PREHEAT_REMOTE_UNSIGNED=1"
)
_COMMAND_TIMEOUT = 30.0  # seconds for a request of a command, where no program waits
_LEASE_TIMEOUT = 5.0  # seconds for one request to the filesystem


class TrustPolicy(Enum):
    """Why the entries of a shared store are trusted."""

    SIGNED = "signed"  # A trusted key has signed them.
    UNSIGNED = "unsigned"  # The settings accept entries without signatures.
    PRIVATE = "private"  # Only this user and root can write to the directory.


def trust_policy(remote: Remote, config: Config) -> TrustPolicy:
    """Return why the entries of a shared store are trusted."""
    if config.remote_unsigned:
        return TrustPolicy.UNSIGNED
    if config.signing_key is not None or config.trusted_keys or remote.network:
        return TrustPolicy.SIGNED
    return TrustPolicy.UNSIGNED if config.trust_cache_dir else TrustPolicy.PRIVATE


def open_shared_chain(local: Sequence[Store], config: Config, events: Events) -> Chain:
    """Return a chain of this machine's tiers and the shared stores."""
    return Chain(local, events, shared=open_remotes(config, events), merger=HeaderLists())


def remotes_of(config: Config) -> tuple[Remote, ...]:
    """Return the shared stores of the settings. A malformed URL is a `ConfigError`."""
    return parse_remotes("PREHEAT_REMOTE", " ".join(config.remote))


def for_command(config: Config) -> Config:
    """Return settings with a longer time limit for requests, for commands, where no program waits."""
    return replace(config, remote_timeout=max(config.remote_timeout, _COMMAND_TIMEOUT))


def open_remotes(config: Config, events: Events) -> list[RemoteStore]:
    """Open each shared store that can be used. Any other one is a `refused` event.

    No request is made, and no client package is imported.
    """
    stores: list[RemoteStore] = []
    for number, remote in enumerate(remotes_of(config), start=1):
        if why := _explain_refusal(remote, config):
            events.emit("refused", path=remote.name, reason=why)
            continue
        signed = trust_policy(remote, config) is TrustPolicy.SIGNED
        server = Server(
            "remote" if number == 1 else f"remote.{number}",
            partial(_open, remote, config),
            events,
            timeout=config.remote_timeout,
            can_hold_leases=remote.can_hold_leases,
        )
        may_write = not signed or config.signing_key is not None
        stores.append(
            RemoteStore(
                server,
                events,
                read_keys=partial(_read_keys, remote, config),
                writable=may_write and not remote.read_only,
                merger=HeaderLists(),
            )
        )
    return stores


def _explain_refusal(remote: Remote, config: Config) -> str | None:
    """Return why a shared store cannot be used, with a hint; None if it can be used."""
    if why := missing_package(remote):
        return why
    if trust_policy(remote, config) is not TrustPolicy.SIGNED:
        return None
    files = [*config.trusted_keys, *([config.signing_key] if config.signing_key else [])]
    if not files:
        return _KEYS
    missing = [str(file) for file in files if not file.is_file()]
    return f"there is no key file {missing[0]}" if missing else None


def _open(remote: Remote, config: Config) -> Engine:
    private = trust_policy(remote, config) is TrustPolicy.PRIVATE
    try:
        return open_engine(remote, timeout=config.remote_timeout, private=private)
    except PreheatError as error:
        raise RemoteError(_with_hint(error)) from None


def _read_keys(remote: Remote, config: Config) -> Keys:
    """Read the keys if entries are signed. A private directory needs no keys, and is checked.

    A process that accepts unsigned entries signs none, because it also copies entries between stores
    and merges header lists. Its signature would make others trust entries that were never verified.
    """
    match trust_policy(remote, config):
        case TrustPolicy.UNSIGNED:
            return Keys()
        case TrustPolicy.PRIVATE:
            _require_private(Path(remote.path))
            return Keys()
    try:
        return Keys.load(config.signing_key, config.trusted_keys)
    except PreheatError as error:
        raise RemoteError(_with_hint(error)) from None


def _require_private(path: Path) -> None:
    """Raise `RemoteError` if users other than this one and root can write to a directory.

    It is not created. If it is missing, its parent is checked, and `FileEngine` creates it later. If
    the parent is missing too, the filesystem is probably not mounted.
    """
    try:
        why = retry_transient(distrust_reason, path)
    except FileNotFoundError:
        if os.path.lexists(path) or not path.parent.is_dir():
            raise RemoteError(f"{path} does not exist; its filesystem may not be mounted") from None
        return  # Every directory above it was checked.
    except OSError as fault:
        raise RemoteError(f"{path}: {fault}; {_KEYS}") from None
    if why is not None:
        raise RemoteError(f"{path}: {why}; {_KEYS}")


def _with_hint(error: PreheatError) -> str:
    return f"{error}; {error.hint}" if error.hint else str(error)


# Leases


def open_leases(cache: Chain, events: Events) -> Leases | None:
    """Return the leases of a cache; None if no other host shares it.

    They are on the first server that can hold leases and that this process may write. Other hosts would
    wait for nothing if this process could not store its result. Without such a server, they are in a
    cache directory on a network filesystem. Without one, they are on a server without atomic
    operations, where a host can only look an entry up once more before it compiles.
    """
    writable = [tier for tier in cache.shared if tier.writable]
    for tier in writable:
        if tier.server.can_hold_leases:
            return _open_server_leases(tier, events)
    for local in cache.tiers:
        if isinstance(local, DiskStore) and local.shared:
            return open_directory_leases(local, events)
    return _open_server_leases(writable[0], events) if writable else None


def _open_server_leases(tier: RemoteStore, events: Events) -> Leases:
    return Leases(
        tier.server,
        tier.when_written,
        events,
        was_dropped=tier.was_dropped,
        seconds=lease.LEASE_SECONDS,
    )


def open_directory_leases(disk: DiskStore, events: Events) -> Leases:
    """Return leases in the directory of `disk`, beside its entries. Nothing is written yet."""
    server = Server("lease", partial(_open_engine, disk), events, timeout=_LEASE_TIMEOUT)
    return Leases(
        server,
        _at_once,
        events,
        was_dropped=lambda digest: not disk.exists([digest]),
        seconds=lease.LEASE_SECONDS,
    )


def _at_once(callback: Callable[[], object]) -> None:
    """Call a function now: every entry that was put before is in the directory."""
    callback()


def _open_engine(disk: DiskStore) -> FileEngine:
    try:
        disk.make_directory(f"{disk.root}/{LEASES}".rstrip("/"))
    except OSError as fault:
        raise RemoteError(f"{disk.root}: {fault.strerror or fault}") from None
    remote = Remote(service="file", name=f"file://{disk.root}", host="", path=str(disk.root))
    return FileEngine(remote, timeout=_LEASE_TIMEOUT, mode=0o600)
