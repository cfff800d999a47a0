"""What a sealed process does with an entry of a bundle whose header files differ on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from preheat.build.bundle_entries import BundleEntry
from preheat.build.request import Request
from preheat.model.events import Events
from preheat.process.callsite import caller
from preheat.process.lazy import lazy
from preheat.process.locks import no_fork
from preheat.toolchain.headers.states import HeaderState

if TYPE_CHECKING:  # Imported only when a header file is compared.
    from preheat.toolchain.headers.own_headers import HeaderChange, OwnHeaders

__all__ = ["SealedHeaders"]


class SealedHeaders:
    """Compares the header files of entries in a sealed process, each file once.

    `policy` is that of `PREHEAT_SEALED_HEADERS`: with "error", an entry whose headers differ is not
    used. With "warn", it is used and an event says so. With "ignore", no file is looked at. The first
    use of an entry with headers reports a policy that is not "error".
    """

    def __init__(self, policy: str, events: Events) -> None:
        self._policy = policy
        self._events = events
        self._results: dict[tuple[object, ...], tuple[HeaderState, HeaderChange | None]] = {}
        self._reported = policy == "error"

    @lazy
    def _files(self) -> OwnHeaders:
        with no_fork:
            from preheat.toolchain.headers.own_headers import OwnHeaders

        return OwnHeaders()

    def rejection(self, request: Request, entry: BundleEntry) -> str | None:
        """Return why `entry` must not be used for `request`, or None if it can be used."""
        state = entry.state
        if not (state.headers or state.absent):
            return None
        if not self._reported:
            self._reported = True
            self._events.emit("headers", policy=self._policy)
        if self._policy == "ignore":
            return None
        roots = request.own_roots
        key = (entry.key, entry.artifact.digest, *roots.values())
        known = self._results.get(key)
        if known is None:
            change = self._files.change(request.program, state, roots, entry.toolkit)
            known = self._results[key] = (state, change)
            if change is not None and self._policy == "warn":
                self._events.emit(
                    "stale", program=request.program.label, arch=str(request.arch), caller=caller(),
                    header=change.path, reason=change.reason,
                )  # fmt: skip
        change = known[1]
        return None if change is None or self._policy == "warn" else change.reason

    def evidence(self, request: Request) -> tuple[str, ...]:
        """Return lines about the change for which an entry was rejected."""
        with no_fork:
            from preheat.toolchain.headers.own_headers import line_that_includes

        roots = request.own_roots
        for (entry, _, *places), (state, change) in self._results.items():
            if change is None or entry != request.bundle_key.digest or places != [*roots.values()]:
                continue
            line = line_that_includes(request.program, state, roots, change.header)
            return () if line is None else (f"included by {line}",)
        return ()

    def clear(self) -> None:
        """Compare all files again."""
        self.__dict__.pop("_files", None)
        self._results.clear()
