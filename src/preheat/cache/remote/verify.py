"""Reads every object of a server, and says which of them cannot be used and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

from preheat.cache import codec
from preheat.cache.remote import envelope
from preheat.cache.remote.engine import Engine, ObjectError
from preheat.cache.remote.names import BUNDLES, LEASES, PROBE, digest_of, printable
from preheat.cache.signatures import UntrustedError, Verifier
from preheat.locks import no_fork

__all__ = ["PROBLEMS", "Verified", "listed", "verify"]

#: What may be wrong with an object.
PROBLEMS = ("unsigned", "wrongly signed", "damaged", "foreign")
_TOGETHER = 8  # objects that are read at the same time


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


def verify(engine: Engine, names: Sequence[str], trusted: Verifier | None) -> Iterator[Verified]:
    """Read and check objects, and yield the results in order. Raises `RemoteError`.

    An object that was removed in the meantime is left out.
    """
    with no_fork:
        from concurrent.futures import ThreadPoolExecutor  # It takes milliseconds to import.

    with ThreadPoolExecutor(_TOGETHER) as threads:
        found = threads.map(partial(_verify, engine, trusted), names)
        yield from (each for each in found if each is not None)


def _verify(engine: Engine, trusted: Verifier | None, name: str) -> Verified | None:
    digest = digest_of(name)
    if digest is None:
        return Verified(printable(name), "foreign", "its name is not that of an entry")
    try:
        data = engine.read(name)
    except ObjectError as error:
        return Verified(name, "foreign", str(error))
    return None if data is None else Verified(name, *_verdict(digest, data, trusted))


def _verdict(digest: str, data: bytes, trusted: Verifier | None) -> tuple[str, str]:
    try:
        signed = envelope.key_id(data) is not None
    except UntrustedError as bad:
        return "damaged" if data.startswith(envelope.MAGIC) else "foreign", str(bad)
    if trusted is not None and not signed:
        return "unsigned", "it is not signed"
    try:
        blob = envelope.unwrap(digest, data, trusted)
    except UntrustedError as bad:
        return "wrongly signed" if trusted is not None else "damaged", str(bad)
    if why := codec.damage(digest, blob):
        return "damaged", why
    return "ok", ""
