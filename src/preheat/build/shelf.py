"""The bundles that a builder asks, by path, in the order they were mounted."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from preheat.artifact import Artifact
from preheat.build.promise import Promise, promised
from preheat.cache import codec
from preheat.cache.bundle import Bundle
from preheat.errors import BundleError
from preheat.events import Events

__all__ = ["Shelf"]


class Shelf:
    """Mounted bundles. `passed_over` says which of those in the settings cannot be used, and why."""

    def __init__(self, events: Events, *, trust: bool) -> None:
        self._events, self._trust = events, trust
        self._mounted: dict[Path, Bundle] = {}
        self.passed_over: list[str] = []

    @property
    def bundles(self) -> tuple[Bundle, ...]:
        """All of them, the first asked first."""
        return tuple(self._mounted.values())

    def mount(self, path: str | os.PathLike[str]) -> Bundle:
        """Take up the bundle at `path`; `BundleError` when it cannot be used.

        Again is fine, and takes up the file that has meanwhile replaced it.
        """
        path = Path(os.path.abspath(path))
        made = Bundle.open(path, trust=self._trust)
        known = self._mounted.get(path)
        if known is not None and known.stamp == made.stamp:
            return known
        self._mounted[path] = made
        return made

    def try_mount(self, path: Path) -> None:
        """A bundle that the settings name; one that cannot be used stops nothing here."""
        try:
            self.mount(path)
        except BundleError as error:
            self._events.emit("refused", path=str(path), reason=str(error))
            self.passed_over.append(str(error))

    def answers(self, key: str, held: Mapping[str, Artifact]) -> Iterator[Promise | str]:
        """What each bundle that has the request `key` says to it, or why that cannot be read."""
        for bundle in self.bundles:
            try:
                promise = promised(bundle, key, held)
            except OSError as fault:
                self._events.fault("bundle", "read", fault)
            except codec.DamagedEntryError as bad:
                self._events.emit("damaged", tier="bundle", key=key, reason=str(bad))
                yield "damaged: the entry failed its check"
            else:
                if promise is not None:
                    yield promise
