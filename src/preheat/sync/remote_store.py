"""A server that many machines share, as a store."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from preheat.build.remotes import open_remotes, patient
from preheat.config import Config
from preheat.errors import InputError
from preheat.events import Events
from preheat.store import codec
from preheat.store.codec import DamagedEntryError
from preheat.store.remote.engine import ObjectError, names_of
from preheat.store.remote.names import ROOT, digest_of, entry_name
from preheat.store.remote.tier import DIGESTS_PER_REQUEST, RemoteTier
from preheat.store.remote.url import Remote, parse_remote
from preheat.store.signing import entries as envelope
from preheat.sync.store import Content, merged_list

__all__ = ["RemoteStore", "open_remote", "require_writable_kind"]


class RemoteStore:
    """Entries on a server, in signed envelopes, by the requests of a `RemoteTier`."""

    def __init__(self, tier: RemoteTier, name: str) -> None:
        self.skipped: dict[str, int] = {}
        self.name = name
        self._tier = tier

    def digests(self) -> Iterator[str]:
        """Yield the digest of every entry on the server."""
        names = self._tier.server.call("names", lambda engine: list(names_of(engine, ROOT)))
        return (digest for name in names if (digest := digest_of(name)) is not None)

    def existing(self, digests: Collection[str]) -> set[str]:
        """Return those of `digests` that the server has, with few requests."""
        asked = list(digests)
        starts = range(0, len(asked), DIGESTS_PER_REQUEST)
        batches = (asked[start : start + DIGESTS_PER_REQUEST] for start in starts)
        return {digest for batch in batches for digest in self._tier.existing(batch)}

    def is_header_list(self, digest: str) -> None:
        """Return None: a server knows only names."""
        del digest

    def read(self, digest: str) -> bytes | None:
        """Return an entry after its signature and its checksum were verified."""
        try:
            data = self._tier.server.read(entry_name(digest))
        except ObjectError as error:
            raise DamagedEntryError(str(error)) from None
        if data is None:
            return None
        blob = envelope.unwrap(digest, data, self._tier.keys().trusted)
        if why := codec.damage(digest, blob):
            raise DamagedEntryError(why)
        return blob

    def objection(self, content: Content) -> None:
        """Return None: a server keeps every entry."""
        del content

    def write(self, digest: str, blob: bytes) -> None:
        """Write an entry, which is signed unless this process accepts unsigned ones."""
        data = envelope.wrap(digest, blob, self._tier.keys().signer)
        self._tier.server.write(entry_name(digest), data)

    def merge(self, digest: str, header_list: bytes, *, dry_run: bool) -> bool:
        """Add states to a header list. A machine that does so at the same time may replace them."""
        merged = merged_list(digest, header_list, self.read)
        if merged is not None and not dry_run:
            self.write(digest, merged)
        return merged is not None

    def close(self) -> None:
        """Close the connections."""
        self._tier.close()


def require_writable_kind(remote: Remote) -> None:
    """Raise `InputError` for a store that nobody can write, such as a web server."""
    if remote.read_only:
        raise InputError(
            f"{remote.name} is read-only: preheat does not write to a web server",
            hint="use a URL that can be written, such as dav://, s3:// or file://",
        )


def open_remote(url: str, config: Config, *, write: bool) -> RemoteStore:
    """Open a shared store; `InputError` when it cannot be used. No request is made yet."""
    remote = parse_remote(url)
    name = remote.name
    reasons: list[str] = []
    events = Events()
    events.subscribe(
        lambda _, fields: reasons.append(f"{fields['path']}: {fields['reason']}"), "refused"
    )
    tiers = open_remotes(patient(replace(config, remote=(url,))), events)
    if not tiers:
        raise InputError("; ".join(reasons))
    if write:
        require_writable_kind(remote)
    if write and not tiers[0].writable:
        raise InputError(
            f"{name} cannot be written without a key, because its readers need a signature",
            hint="set PREHEAT_SIGNING_KEY to a key of 'preheat keys new'",
        )
    return RemoteStore(tiers[0], name)
