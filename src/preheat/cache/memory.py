"""The tier inside the process: least recently used goes first, by bytes."""

from __future__ import annotations

from collections import OrderedDict

from preheat.locks import Lock

__all__ = ["MemoryStore"]


class MemoryStore:
    """Blobs in memory, at most `limit` bytes of them."""

    name = "memory"

    def __init__(self, limit: int) -> None:
        self._limit, self._bytes = limit, 0
        self._blobs: OrderedDict[str, bytes] = OrderedDict()
        self._lock = Lock()

    def get(self, digest: str) -> bytes | None:
        with self._lock:
            blob = self._blobs.get(digest)
            if blob is not None:
                self._blobs.move_to_end(digest)
            return blob

    def put(self, digest: str, blob: bytes) -> None:
        """Keep `blob`, dropping the longest unused until it fits; one larger than all is not kept."""
        with self._lock as lost:
            if lost:  # the sum may miss a change that was begun
                self._bytes = sum(map(len, self._blobs.values()))
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
        """Forget everything; other tiers keep theirs."""
        with self._lock:
            self._blobs.clear()
            self._bytes = 0

    def _drop(self, digest: str) -> None:
        self._bytes -= len(self._blobs.pop(digest, b""))
