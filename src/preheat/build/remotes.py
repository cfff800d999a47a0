"""The shared stores that the settings describe, as tiers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from preheat.cache import Chain, Tier
from preheat.cache.remote.engine import Engine, RemoteError
from preheat.cache.remote.engines import missing_package, open_engine
from preheat.cache.remote.server import Server
from preheat.cache.remote.tier import Keys, RemoteTier
from preheat.cache.remote.url import Remote, parse_remotes
from preheat.cache.trust import make_private
from preheat.config import Config
from preheat.errors import PreheatError
from preheat.events import Events
from preheat.locks import no_fork
from preheat.toolchain.header_lists import HeaderLists

__all__ = ["open_remotes", "remotes_of", "shared_chain", "unsigned_accepted"]

_KEYS = (
    "entries of a shared store must be signed, because they are run: set PREHEAT_TRUSTED_KEYS, and "
    "PREHEAT_SIGNING_KEY to write, or accept unsigned ones by PREHEAT_REMOTE_UNSIGNED=1"
)


def shared_chain(local: Sequence[Tier], config: Config, events: Events) -> Chain:
    """Return a chain of the tiers of this machine and those of the shared stores."""
    remotes = open_remotes(config, events)
    return Chain([*local, *remotes], events, local=len(local), merger=HeaderLists())


def remotes_of(config: Config) -> tuple[Remote, ...]:
    """Return the shared stores of the settings. A malformed URL is a `ConfigError`."""
    return parse_remotes("PREHEAT_REMOTE", " ".join(config.remote))


def open_remotes(config: Config, events: Events) -> list[RemoteTier]:
    """Return a tier for each shared store that can be used. Another one is a `refused` event.

    No request is made, and no package of a store is imported.
    """
    tiers: list[RemoteTier] = []
    for number, remote in enumerate(remotes_of(config), start=1):
        if why := _objection(remote, config):
            events.emit("refused", path=remote.name, reason=why)
            continue
        keyless = config.signing_key is None and not config.trusted_keys
        server = Server(
            "remote" if number == 1 else f"remote.{number}",
            partial(_open, remote, config),
            events,
            timeout=config.remote_timeout,
            can_hold_leases=remote.can_hold_leases,
        )
        may_write = config.signing_key is not None or config.remote_unsigned or keyless
        tiers.append(
            RemoteTier(
                server,
                events,
                read_keys=partial(_read_keys, remote, config),
                writable=may_write and not remote.read_only,
                merger=HeaderLists(),
            )
        )
    return tiers


def _objection(remote: Remote, config: Config) -> str | None:
    """Return why a shared store cannot be used, with a hint; None when nothing speaks against it."""
    if why := missing_package(remote):
        return why
    if config.remote_unsigned:
        return None
    files = [*config.trusted_keys, *([config.signing_key] if config.signing_key else [])]
    if not files and remote.network:
        return _KEYS
    missing = [str(file) for file in files if not file.is_file()]
    return f"there is no key file {missing[0]}" if missing else None


def unsigned_accepted(remote: Remote, config: Config) -> bool:
    """Return whether entries of a shared store need no signature."""
    keyless = config.signing_key is None and not config.trusted_keys
    return config.remote_unsigned or (keyless and not remote.network)


def _needs_privacy(remote: Remote, config: Config) -> bool:
    """Return whether entries are trusted because only this user can write the store."""
    accepted = unsigned_accepted(remote, config) and not config.remote_unsigned
    return accepted and not config.trust_cache_dir


def _open(remote: Remote, config: Config) -> Engine:
    private = _needs_privacy(remote, config)
    try:
        return open_engine(remote, timeout=config.remote_timeout, private=private)
    except PreheatError as error:
        raise RemoteError(_with_hint(error)) from None


def _read_keys(remote: Remote, config: Config) -> Keys:
    """Read the keys. Without any, a directory that only this user can write needs none.

    A process that accepts unsigned entries signs none. Its signature would make others trust what
    nobody has verified: it copies entries between stores, and it merges header lists.
    """
    if config.remote_unsigned:
        return Keys()
    with no_fork:
        from preheat import signing

    try:
        keys = signing.Keys.of(config)
        if not unsigned_accepted(remote, config):
            return Keys(keys.trusted, keys.signing)
        _require_private(Path(remote.path), trust=config.trust_cache_dir)
        return Keys()
    except PreheatError as error:
        raise RemoteError(_with_hint(error)) from None


def _require_private(path: Path, *, trust: bool) -> None:
    try:
        make_private(path, trust=trust)
    except OSError as fault:
        raise RemoteError(f"{path}: {fault}; {_KEYS}") from None


def _with_hint(error: PreheatError) -> str:
    return f"{error}; {error.hint}" if error.hint else str(error)
