"""The store in the memory of the process, with least-recently-used eviction by bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from preheat.process.locks import Lock

__all__ = ["MemoryStore"]


class MemoryStore:
    """Blobs in memory, at most `limit` bytes of them."""

    name = "memory"
    writable = True

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._bytes = 0
        self._blobs: OrderedDict[str, bytes] = OrderedDict()
        self._lock = Lock()

    def get(self, digest: str) -> bytes | None:
        blob = self._blobs.get(digest)
        if blob is not None:
            try:
                self._blobs.move_to_end(digest)
            except KeyError:  # Another thread evicted it in the meantime.
                return blob
        return blob

    def exists(self, digests: Iterable[str]) -> set[str]:
        return {digest for digest in digests if digest in self._blobs}

    def names(self) -> Iterator[str]:
        return iter(list(self._blobs))

    def put(self, digest: str, blob: bytes) -> None:
        """Store `blob` and evict the least recently used ones; a blob above the limit is not stored."""
        with self._lock as lost:
            if lost:  # The last holder was interrupted, perhaps before it updated the sum.
                self._bytes = sum(map(len, self._blobs.values()))
            if digest in self._blobs:
                self._drop(digest)
            if len(blob) > self._limit:
                return
            self._blobs[digest] = blob
            self._bytes += len(blob)
            while self._blobs and self._bytes > self._limit:
                self._drop(next(iter(self._blobs)))

    def remove(self, digest: str) -> None:
        with self._lock:
            self._drop(digest)

    def clear(self) -> None:
        """Remove all blobs from this store."""
        with self._lock:
            self._blobs.clear()
            self._bytes = 0

    def _drop(self, digest: str) -> None:
        self._bytes -= len(self._blobs.pop(digest, b""))
