"""Obtain an entry: look it up, or make it, once for all threads, processes and hosts that need it."""

from __future__ import annotations

import sys
from collections.abc import Hashable
from functools import partial
from typing import Generic, TypeVar

from preheat.build.compile_lock import CompileLock, CompileLocks
from preheat.build.key_locks import Attempt, WouldWait

__all__ = ["Obtainer"]

T = TypeVar("T")


class Obtainer(Generic[T]):
    """Obtains one entry. A subclass says how to look it up and how to make it.

    Attributes:
        locks: They let only one thread, process and host make the entry.
        digest: The digest of the entry's key.
        flight_key: The key under which threads share what one of them makes. None if nothing may be
            shared, because no key describes the entry.
        missing: The entry was looked up, is not stored, and may be made.
    """

    locks: CompileLocks
    digest: str
    flight_key: Hashable
    missing = False

    def obtain(self, attempt: Attempt | None = None) -> T:
        """Return the stored entry, or make it.

        Of all threads, processes and hosts that need it, one makes it, and the others wait for it. With
        `attempt`, raise `WouldWait` instead of waiting. A later call continues.

        Raises:
            SealedError: The entry is not stored, and this process is sealed.
        """
        if not self.missing:
            entry = self.look()
            if entry is not None:
                self.report(entry)
                return entry
            self.permit()  # Before a compiler is needed: a sealed process may have none.
            self.missing = True
        key = self.flight_key
        if key is None:
            entry = self.make(None)
        else:
            if attempt is not None and self.locks.flights.in_progress(key):
                raise WouldWait
            make = partial(self._make_once, attempt)
            entry = self.locks.flights.run(key, make, title=self.digest)
        self.report(entry)
        return entry

    def _make_once(self, attempt: Attempt | None) -> T:
        """Make the entry, unless another process or host does so first."""
        self.refuse_known()
        lock = self.locks.begin(self.digest, sys._getframe(), attempt)
        try:
            entry = lock.acquire(self.look)
            return self.make(lock) if entry is None else entry
        except Exception:
            lock.expect_no_entry()
            raise
        finally:
            lock.release()

    # What a subclass defines

    def look(self, *, local: bool = False) -> T | None:
        """Return the stored entry, or None. With `local`, search only this machine."""
        raise NotImplementedError

    def permit(self) -> None:
        """Raise `SealedError` if this process is sealed."""
        raise NotImplementedError

    def make(self, lock: CompileLock | None) -> T:
        """Make and store the entry. `lock` is held; it is None if no key describes the entry."""
        raise NotImplementedError

    def refuse_known(self) -> None:
        """Raise the error of an earlier call in this process that would only be repeated."""

    def report(self, entry: T) -> None:
        """Report that the caller has got the entry."""
