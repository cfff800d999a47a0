"""The state that the parts of the adapter share in a process, and the errors of a sealed process."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from preheat.adapters.base import directory_of
from preheat.adapters.triton.identity import KIND
from preheat.adapters.triton.request import variant_text
from preheat.arch import Arch
from preheat.build.foreign_store import UNMEASURED, ForeignStore
from preheat.callsite import call_site, format_site
from preheat.config import Config
from preheat.foreign import ForeignEntry, ForeignRequest
from preheat.locks import Lock
from preheat.store.trust import DistrustedError

if TYPE_CHECKING:
    from preheat.adapters.triton.request import CompileRequest

__all__ = ["MissedError", "State", "Tuning", "set_state", "state", "tuned_label"]


_TUNED_FOR = " tuned for "
_MOST_KEYS = 8  # that an error lists


class MissedError(Exception):
    """A kernel is not stored, and the caller may use one that assumes less."""


class Tuning(NamedTuple):
    """The function that is being tuned, the values that its choice depends on, and the target.

    `configs` are the configurations to choose from, as Triton writes them.
    """

    function: str
    key: str
    arch: Arch
    autotuner: Any
    configs: tuple[str, ...]


def tuned_label(function: str, key: str) -> str:
    """Return the label of the result of tuning a function for the values of a key."""
    return f"{function}{_TUNED_FOR}{key}"


class State:
    """The store of the process, and what its threads are doing.

    `trust` is True if directories of Triton are used although other users can write there.
    """

    def __init__(self, store: ForeignStore) -> None:
        self.store = store
        self.trust = Config.from_env().trust_cache_dir
        self._thread = threading.local()
        self._lock = Lock()
        self._private: tuple[int, str] | None = None

    @property
    def private_directory(self) -> str | None:
        """The temporary directory of this process, or None while Triton's own one is used."""
        process, directory = self._private or (None, None)
        return directory if process == os.getpid() else None  # A fork makes its own.

    def use_private_directory(self, instead_of: str, fault: OSError) -> str:
        """Return the temporary directory for what could not be written, made and reported once.

        It is also used where another user could change the files: a `DistrustedError` says why.
        """
        with self._lock:
            if found := self.private_directory:
                return found
            if isinstance(fault, DistrustedError):
                self.store.events.emit("refused", path=instead_of, reason=str(fault))
            else:
                self.store.events.fault(instead_of, "write", fault)
            made = tempfile.mkdtemp(prefix="preheat-triton-")
            self._private = (os.getpid(), made)
            atexit.register(self._remove_private_directory)
            return made

    def _remove_private_directory(self) -> None:
        if found := self.private_directory:
            shutil.rmtree(found, ignore_errors=True)

    @property
    def tuning(self) -> Tuning | None:
        """What this thread is tuning, or None."""
        return getattr(self._thread, "tuning", None)

    @contextmanager
    def tuning_of(self, tuning: Tuning | None) -> Iterator[None]:
        """Name what this thread is tuning."""
        before, self._thread.tuning = self.tuning, tuning
        try:
            yield
        finally:
            self._thread.tuning = before

    @property
    def weak_allowed(self) -> bool:
        """Whether a miss of this thread raises `MissedError`; see `allowing_weak`."""
        return getattr(self._thread, "weak_allowed", False)

    @contextmanager
    def allowing_weak(self) -> Iterator[None]:
        """Let a miss of this thread raise `MissedError`: the caller looks for a weaker kernel."""
        self._thread.weak_allowed = True
        try:
            yield
        finally:
            self._thread.weak_allowed = False

    @property
    def collected(self) -> list[ForeignRequest] | None:
        """The entries that this thread used since `collecting`."""
        return getattr(self._thread, "collected", None)

    @contextmanager
    def collecting(self) -> Iterator[list[ForeignRequest]]:
        """Yield a list to which the entries that this thread uses are added."""
        found: list[ForeignRequest] = []
        self._thread.collected = found
        try:
            yield found
        finally:
            self._thread.collected = None

    def report_kernel(self, request: CompileRequest, entry: ForeignEntry) -> None:
        """Report that a compiled kernel was found or made."""
        self._collect(entry)
        if self.store.events.has_sink("foreign_request"):
            from preheat.adapters.triton.rows import row_of

            self._emit(entry, row_of(request))

    def report_entry(self, entry: ForeignEntry) -> None:
        """Report that an entry was used that cannot be made from a description."""
        self._collect(entry)
        if self.store.events.has_sink("foreign_request"):
            self._emit(entry, None)

    def report_tuning(self, tuning: Tuning, entry: ForeignEntry) -> None:
        """Report that a result of tuning was found or measured."""
        if self.store.events.has_sink("foreign_request"):
            from preheat.adapters.triton.tuning import row_of

            self._emit(entry, row_of(tuning, entry.key))

    def _collect(self, entry: ForeignEntry) -> None:
        if self.collected is not None:
            self.collected.append(entry.request)

    def _emit(self, entry: ForeignEntry, row: Mapping[str, Any] | None) -> None:
        self.store.events.emit("foreign_request", entry=entry, row=row, site=call_site(_library()))

    def caller(self) -> str:
        """Return the line of the program that made the request, outside of Triton."""
        return format_site(call_site(_library()))

    def refuse(self, identity: ForeignRequest, request: CompileRequest | None, reason: str) -> None:
        """Raise `SealedError` for a missing entry, with the most similar stored one."""
        nearest, differences = (None, ()) if request is None else self._nearest(request)
        self.store.permit(
            identity, reason, called_by=self.caller, nearest=nearest, differences=differences
        )

    def refuse_tuning(self, request: ForeignRequest, tuning: Tuning) -> None:
        """Raise `SealedError` for a missing tuning result, with the results that are stored."""
        self.store.permit(
            request, f"{UNMEASURED}; {self._known_results(request, tuning)}", called_by=self.caller
        )

    def _known_results(self, request: ForeignRequest, tuning: Tuning) -> str:
        """Return for which keys of a function there are results."""
        start = f"{tuning.function}{_TUNED_FOR}"
        found = {
            f"{entry.label.removeprefix(start)}{_difference(request, entry)}"
            for entry in self.store.all(KIND)
            if entry.label.startswith(start)
        }
        if not found:
            return f"there is no result of {tuning.function}"
        more = f" and {len(found) - _MOST_KEYS} more" if len(found) > _MOST_KEYS else ""
        return f"there are results for {', '.join(sorted(found)[:_MOST_KEYS])}{more}"

    def _nearest(self, request: CompileRequest) -> tuple[str | None, tuple[str, ...]]:
        """Return the stored variant of the function that differs least, and how it differs."""
        wanted = {"arch": str(request.arch), **request.properties}
        best: tuple[int, str, tuple[str, ...]] | None = None
        for entry in self.store.all(KIND):
            if entry.label != request.label or not entry.properties:
                continue
            there = {"arch": entry.target, **entry.properties}
            differences = tuple(_differences(there, wanted))
            text = f"{variant_text(there)} ({entry.digest[:12]})"
            if best is None or (len(differences), text) < best[:2]:
                best = (len(differences), text, differences)
        if best is None:
            return None, ()
        return best[1], best[2] or (
            "nothing that the entry lists: another build of Triton, or the line of the function",
        )


def _difference(request: ForeignRequest, entry: ForeignEntry) -> str:
    """Return how a result differs from the requested one, except for the values of its key."""
    if entry.target != request.target:
        return f" on {entry.target}"
    other = "of another source, other configurations or another build of Triton"
    return f" ({other})" if entry.label == request.label else ""


def _differences(there: Mapping[str, str], wanted: Mapping[str, str]) -> Iterator[str]:
    for name in {**there, **wanted}:
        if there.get(name) != wanted.get(name):
            yield f"{name}: {there.get(name, 'not set')} became {wanted.get(name, 'not set')}"


def _library() -> str:
    """Return the directory of Triton, whose lines are not those of the program."""
    import triton

    return directory_of(triton)


_state: State | None = None


def set_state(new: State) -> None:
    """Make `new` the state of this process."""
    global _state
    _state = new


def state() -> State:
    """Return the state of this process. The adapter is installed."""
    assert _state is not None
    return _state
