"""The entries of a recording that a bake cannot make again, in a bundle beside the manifest.

Such an entry is a measurement, or code of a function that cannot be imported. The manifest names the
bundle with the SHA-256 of its file. While a process records, its entries are files in the directory of
the recording.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from preheat.ahead.manifest.items import ForeignProgram
from preheat.errors import BundleError, InputError
from preheat.model import codec
from preheat.model.arch import Arch
from preheat.model.config import Config
from preheat.model.foreign import ForeignEntry, ForeignRequest
from preheat.model.setting_values import split_pin
from preheat.store.bundle import Bundle, write

__all__ = ["ENTRY_SUFFIX", "RecordedEntries", "recorded_name", "write_recorded"]

#: Of the file of one entry in the directory of a recording.
ENTRY_SUFFIX = ".entry"


def recorded_name(manifest: str | os.PathLike[str]) -> str:
    """Return the name of the bundle beside a manifest, such as `kernels.recorded.heat`."""
    return f"{Path(manifest).stem}.recorded.heat"


class RecordedEntries:
    """Finds entries in the bundles of manifests, and in directories of recordings.

    A bundle must pass the checks of every bundle: its pin, its owner and its permissions. Raises
    `BundleError` for one that does not. A bundle that does not exist is listed in `absent`.
    """

    def __init__(self, sources: Iterable[str], *, trust: bool | None = None) -> None:
        self._trust = Config.from_env().trust_cache_dir if trust is None else trust
        self._sources: list[Bundle | Path] = []
        self.absent: list[str] = []
        for source in sources:
            place, _ = split_pin(source)
            if place.is_dir():
                self._sources.append(place)
            elif place.exists():
                self._sources.append(Bundle.open(source, trust=self._trust))
            else:
                self.absent.append(str(place))

    def get(self, request: ForeignRequest) -> ForeignEntry | None:
        """Return a recorded entry, or None. The entry of the latest recording counts.

        Raises `BundleError` for an entry that is damaged.
        """
        for source in reversed(self._sources):
            blob = _read_blob(source, request.digest)
            if blob is not None:
                try:
                    return ForeignEntry.decode(request.digest, *codec.unpack_checked(blob))
                except codec.DamagedEntryError as bad:
                    raise _explain_damage(source, bad) from None
        return None

    def close(self) -> None:
        """Close the bundles."""
        for source in self._sources:
            if isinstance(source, Bundle):
                source.close()


def _read_blob(source: Bundle | Path, digest: str) -> bytes | None:
    if isinstance(source, Bundle):
        try:
            return source.get(digest)
        except (codec.DamagedEntryError, OSError) as bad:
            raise _explain_damage(source, bad) from None
    with suppress(FileNotFoundError):
        return Path(source, digest + ENTRY_SUFFIX).read_bytes()
    return None


def _explain_damage(source: Bundle | Path, why: Exception) -> BundleError:
    place = source.path if isinstance(source, Bundle) else source
    return BundleError(f"{place} is damaged: {why}", hint="copy it again, or record again")


def write_recorded(
    manifest: str | os.PathLike[str], foreign: Sequence[ForeignProgram], sources: Iterable[str]
) -> str:
    """Write the entries of `foreign` that cannot be made again to the bundle beside a manifest.

    Returns the name of the bundle with its pin, or an empty text if there are no such entries.
    Raises `InputError` when one of the `sources` is missing: its entries would be lost.
    """
    wanted = _select_requests(foreign)
    recorded = RecordedEntries(sources if wanted else ())
    try:
        if recorded.absent:
            raise InputError(
                f"{recorded.absent[0]} is missing: it has the entries that cannot be made again",
                hint="copy it to the place of its manifest, or remove `recorded` from the manifest",
            )
        entries = {digest: recorded.get(request) for digest, request in wanted.items()}
        found = {digest: entry for digest, entry in entries.items() if entry is not None}
        if not found:
            return ""
        place = Path(manifest).with_name(recorded_name(manifest))
        archs = {entry.arch for entry in found.values() if entry.arch is not None}
        blobs = {digest: entry.encode(provenance=False) for digest, entry in found.items()}
        write(place, blobs, _make_meta(archs))
    finally:
        recorded.close()
    return f"{place.name}@sha256:{hashlib.sha256(place.read_bytes()).hexdigest()}"


def _select_requests(foreign: Sequence[ForeignProgram]) -> dict[str, ForeignRequest]:
    """Return the entries to write by digest.

    Entries without an architecture, such as host code, are made by the bake of any kernel that needs
    them. They are written where code is copied, because no kernel may be baked then, and where nothing
    else of their kind is requested, because no bake makes them.
    """
    copied = {item.kind for item in foreign if item.archs and not item.request}
    made = {item.kind for item in foreign if item.request}
    kept = [
        item
        for item in foreign
        if item.kept and (item.archs or item.kind in copied or item.kind not in made)
    ]
    requests = (ForeignRequest.referenced(each.kind, text) for each in kept for text in each.entries)
    return {request.digest: request for request in requests}


def _make_meta(archs: Iterable[Arch]) -> Mapping[str, object]:
    return {
        "format": "preheat bundle",
        "toolchains": [],
        "archs": [str(arch) for arch in sorted(archs)],
        "graphs": [],
    }
