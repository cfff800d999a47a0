"""Reads every object of a server, and says which of them cannot be used and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from preheat.model import codec
from preheat.process.locks import no_fork, wait_before_logging
from preheat.process.messages import printable
from preheat.store.base import UntrustedError
from preheat.store.remote.engine import Engine, ObjectError
from preheat.store.remote.names import BUNDLES, LEASES, PROBE, digest_of
from preheat.store.signing import entries
from preheat.store.signing.keys import Keyring

__all__ = ["PROBLEMS", "Verified", "listed", "verify"]

#: What may be wrong with an object.
PROBLEMS = ("unsigned", "wrongly signed", "damaged", "foreign")
_THREADS = 8  # They read objects at the same time.


class Verified(NamedTuple):
    """An object and its verdict: "ok", or one of `PROBLEMS` with the reason.

    An unsigned object is "ok" where no key is trusted.
    """

    name: str
    verdict: str
    reason: str = ""

    @property
    def ok(self) -> bool:
        """Whether the object can be used."""
        return self.verdict == "ok"


def listed(engine: Engine) -> list[str]:
    """Return the names of all objects but leases, bundles and probes. Raises `RemoteError`."""
    others = (LEASES, BUNDLES, PROBE)
    return sorted(name for name in engine.names() if not name.startswith(others))


def verify(
    read: Callable[[str], bytes | None], names: Sequence[str], trusted: Keyring | None
) -> Iterator[Verified]:
    """Read and check objects, and yield the results in order.

    `read` returns an object by its name, or None if it was removed in the meantime. Such an object is
    left out. An `ObjectError` of `read` is a result, and every other exception ends the check.
    """
    with no_fork:
        wait_before_logging()
        from concurrent.futures import ThreadPoolExecutor  # It takes milliseconds to import.

    with ThreadPoolExecutor(_THREADS) as threads:
        found = threads.map(partial(_verify, read, trusted), names)
        yield from (each for each in found if each is not None)


def _verify(read: Callable[[str], bytes | None], trusted: Keyring | None, name: str) -> Verified | None:
    digest = digest_of(name)
    if digest is None:
        return Verified(printable(name), "foreign", "its name is not that of an entry")
    try:
        data = read(name)
    except ObjectError as error:
        return Verified(name, "foreign", str(error))
    return None if data is None else Verified(name, *_verdict(digest, data, trusted))


def _verdict(digest: str, data: bytes, trusted: Keyring | None) -> tuple[str, str]:
    try:
        signed = entries.key_id(data) is not None
    except UntrustedError as bad:
        return "damaged" if data.startswith(entries.MAGIC) else "foreign", str(bad)
    if trusted is not None and not signed:
        return "unsigned", "it is not signed"
    try:
        blob = entries.unwrap(digest, data, trusted)
    except UntrustedError as bad:
        return "wrongly signed" if trusted is not None else "damaged", str(bad)
    if why := codec.damage(digest, blob):
        return "damaged", why
    return "ok", ""
