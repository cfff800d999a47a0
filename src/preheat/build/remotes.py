"""The shared stores that the settings describe."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from functools import partial
from pathlib import Path

from preheat.errors import PreheatError
from preheat.model.config import Config
from preheat.model.events import Events
from preheat.store import Chain, Store
from preheat.store.remote.engine import Engine, RemoteError, missing_package, open_engine
from preheat.store.remote.server import Server
from preheat.store.remote.store import RemoteStore
from preheat.store.remote.url import Remote, parse_remotes
from preheat.store.signing.keys import Keys
from preheat.store.transient import retried
from preheat.store.trust import distrust_reason
from preheat.toolchain.headers.states import HeaderLists

__all__ = ["TrustPolicy", "open_remotes", "patient", "remotes_of", "shared_chain", "trust_policy"]

_KEYS = (
    "entries of a shared store must be signed, because they are run: set PREHEAT_TRUSTED_KEYS, and "
    "PREHEAT_SIGNING_KEY to write, or accept unsigned ones by PREHEAT_REMOTE_UNSIGNED=1"
)
_PATIENCE = 30.0  # seconds for a request of a command, where no program waits and objects may be large


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


def shared_chain(local: Sequence[Store], config: Config, events: Events) -> Chain:
    """Return a chain of the tiers of this machine and those of the shared stores."""
    return Chain(local, events, shared=open_remotes(config, events), merger=HeaderLists())


def remotes_of(config: Config) -> tuple[Remote, ...]:
    """Return the shared stores of the settings. A malformed URL is a `ConfigError`."""
    return parse_remotes("PREHEAT_REMOTE", " ".join(config.remote))


def patient(config: Config) -> Config:
    """Return settings with a longer time limit for requests, for commands, where no program waits."""
    return replace(config, remote_timeout=max(config.remote_timeout, _PATIENCE))


def open_remotes(config: Config, events: Events) -> list[RemoteStore]:
    """Open each shared store that can be used. Any other one is a `refused` event.

    No request is made, and no client package is imported.
    """
    stores: list[RemoteStore] = []
    for number, remote in enumerate(remotes_of(config), start=1):
        if why := _refusal_reason(remote, config):
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


def _refusal_reason(remote: Remote, config: Config) -> str | None:
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
        why = retried(distrust_reason, path)
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
