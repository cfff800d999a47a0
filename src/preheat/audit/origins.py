"""Where a module came from: a bundle, the store, an installed file, or none of them."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from preheat.audit.events import EventLog
from preheat.audit.images import Load, canonical
from preheat.audit.library_caches import LibraryCaches
from preheat.audit.sites import package_of
from preheat.build.builder import Builder
from preheat.model import codec
from preheat.store.bundle import Bundle

__all__ = ["ACCOUNTED", "Origin", "Origins"]

#: Origins that a sealed run may have. The others are code that somebody made at run time.
ACCOUNTED = frozenset({"bundle", "store", "installed"})
_SYSTEM = ("/usr/", "/opt/", "/lib/", "/lib64/", "/nix/store/")
_LIBRARIES = re.compile(
    r"^lib(cublas|cudnn|cufft|cusparse|cusolver|curand|cutensor|nccl|nvjpeg|npp|cudss|nvshmem)"
)


@dataclass(frozen=True)
class Origin:
    """The kind of an origin, and the entry or the file as text.

    The kinds are `bundle`, `store`, `installed`, `cache` (of another library), `built` (a file that is
    newer than the start of the command), `file` (any other file) and `unknown`.
    """

    kind: str
    detail: str = ""

    @property
    def accounted(self) -> bool:
        """Whether a module of a sealed run may come from there."""
        return self.kind in ACCOUNTED

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}" if self.detail else self.kind


class Origins:
    """Finds the origin of modules. `started` is the time of the start of the command, since 1970.

    The digests of all bundles are known. Of the store, only the entries are read that the processes
    of the command have found or made, which their own events name.
    """

    def __init__(
        self,
        bundles: Iterable[Path],
        builder: Builder | None,
        log: EventLog,
        started: float,
        env: Mapping[str, str],
    ) -> None:
        self._started = started
        self._caches = LibraryCaches(env)
        self._by_digest: dict[str, Origin] = {}
        if builder is not None:
            for key in sorted({str(row["key"]) for row in log.preheat if "key" in row}):
                self._add("store", _find_stored(builder, key))
        for path in bundles:  # They come last, because an entry of both is one of the bundle.
            with Bundle.open(path) as bundle:
                for digest in bundle.digests():
                    self._add("bundle", _blob(bundle, digest), bundle.path.name)

    def _add(self, kind: str, blob: bytes | None, place: str = "") -> None:
        if blob is None:
            return
        try:
            meta, sections = codec.unpack_checked(blob)
        except codec.DamagedEntryError:
            return
        detail = " ".join(filter(None, (place, _title(meta))))
        for content in sections.values():
            if content:
                digest = hashlib.sha256(canonical(content)).hexdigest()
                self._by_digest[digest] = Origin(kind, detail)

    def of(self, load: Load) -> Origin:
        """Return where the module of a load came from."""
        known = self._by_digest.get(load.image.digest or "")
        if known is not None:
            return known
        if load.image.file:
            return self._of_file(load.image.file)
        name = os.path.basename(load.library_path)
        if _LIBRARIES.match(name) and load.image.kind not in ("PTX", "LTO-IR"):
            return Origin("installed", f"unpacked by {name}")  # They keep their kernels compressed.
        library = self._caches.find(load.image.digest, load.image.bytes)
        return Origin("unknown") if library is None else Origin("cache", library)

    def _of_file(self, path: str) -> Origin:
        try:
            status = os.stat(path)
        except OSError:
            return Origin("unknown", f"{path}, which is gone")
        if max(status.st_mtime, status.st_ctime) >= self._started:
            return Origin("built", path)
        if package := package_of(path):
            return Origin("installed", f"{package} ({os.path.basename(path)})")
        return Origin("installed" if path.startswith(_SYSTEM) else "file", path)


def _find_stored(builder: Builder, key: str) -> bytes | None:
    found = builder.cache.get(key) if re.fullmatch(r"[0-9a-f]{64}", key) else None
    return None if found is None else found.blob


def _blob(bundle: Bundle, digest: str) -> bytes | None:
    try:
        return bundle.get(digest)
    except (codec.DamagedEntryError, OSError):
        return None


def _title(meta: Mapping[str, Any]) -> str:
    """Return the name of an entry: the library, if it is not preheat, and the label."""
    kind, label = str(meta.get("kind", "")), str(meta.get("label", ""))
    if not kind.startswith("foreign"):
        return label
    library = kind.partition(":")[2] or kind.removeprefix("foreign").strip(" -/")
    return f"{library} {label}"
