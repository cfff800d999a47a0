"""The names of objects on a server.

v1/ab/<digest>         an entry in its envelope (see preheat.store.signing.entries)
v1/leases/<digest>     who compiles it
v1/probe/…             what `preheat doctor` and `preheat bundle push` write and remove
bundles/<digest>       a bundle
"""

from __future__ import annotations

import re

from preheat.store.layer import FORMAT

__all__ = ["BUNDLES", "LEASES", "PROBE", "ROOT", "digest_of", "entry_name"]

ROOT = f"{FORMAT}/"
LEASES = f"{ROOT}leases/"
PROBE = f"{ROOT}probe"
BUNDLES = "bundles/"
_ENTRY = re.compile(f"{ROOT}([0-9a-f]{{2}})/(\\1[0-9a-f]{{62}})")


def entry_name(digest: str) -> str:
    """Return the name of the object that has the entry of `digest`."""
    return f"{ROOT}{digest[:2]}/{digest}"


def digest_of(name: str) -> str | None:
    """Return the digest of the entry in the object `name`; None for an object that is not an entry."""
    match = _ENTRY.fullmatch(name)
    return None if match is None else match[2]
