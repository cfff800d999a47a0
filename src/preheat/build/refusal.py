"""What a `SealedError` says of the bundles: what the searched ones have, and how to bake again."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from preheat.build import seal
from preheat.build.bundle_archs import bake_command
from preheat.build.bundle_entries import entry_meta, read_foreign
from preheat.model import codec
from preheat.model.arch import Arch
from preheat.process.callsite import shown_path
from preheat.process.messages import count

if TYPE_CHECKING:
    from preheat.store.bundle import Bundle

__all__ = ["Searched", "search_bundles"]

_SEARCH = 0.5  # seconds to look for the architectures of a program
_SHOWN = 4  # bundles with a line of their own


class Searched(NamedTuple):
    """The bundles that were searched for a program, and the architectures that each has of it.

    `complete` is False if there was no time to read all of them.
    """

    title: str
    archs: dict[Bundle, set[str]]
    complete: bool

    def evidence(self) -> tuple[str, ...]:
        """Return a line for each bundle; those that have the program come first."""
        rows = sorted(self.archs.items(), key=lambda row: not row[1])
        lines = [self._line(bundle, archs) for bundle, archs in rows[:_SHOWN]]
        if len(rows) > _SHOWN:
            lines.append(f"searched {count(len(rows) - _SHOWN, 'bundle')} more")
        return tuple(lines)

    def _line(self, bundle: Bundle, archs: Iterable[str]) -> str:
        *first, last = sorted(archs, key=lambda arch: (len(arch), arch)) or [""]
        named = f"{', '.join(first)} and {last}" if first else last
        has = f", which has {self.title} for {named}" if last else ""
        if not has and self.complete:
            has = f", which does not have {self.title}"
        return f"searched {shown_path(str(bundle.path))}{has}"

    def hint(self, reason: str, differences: Sequence[str], arch: Arch | None, *, file: bool) -> str:
        """Return what to do about a miss. `file` says that a bake reads the present source file."""
        lifted_by = seal.lifted_by()
        if not self.archs:
            return (
                "no bundle is mounted: record and bake what the process needs, and name the bundle "
                f"with PREHEAT_BUNDLE or 'preheat run --bundle'; or let it compile with {lifted_by}"
            )
        bundle = max(self.archs, key=lambda each: bool(self.archs[each]))
        command = bake_command(bundle, arch)
        if reason.startswith("headers: "):
            return f"bake again: {command}; or use the bundle as it is with PREHEAT_SEALED_HEADERS=warn"
        changed = {line.partition(": ")[0] for line in differences}
        if changed == {"arch"}:
            advice = f"bake for {arch} as well"
        elif file and changed and changed <= {"arch", "source"}:
            advice = "bake again"
        else:
            advice = "record and bake what the process needs"
        return f"{advice}: {command}; or let it compile with {lifted_by}"


def search_bundles(bundles: Iterable[Bundle], title: str) -> Searched:
    """Return the architectures for which bundles have a program, or an entry of another library."""
    until = time.monotonic() + _SEARCH
    found: dict[Bundle, set[str]] = {bundle: set() for bundle in bundles}
    for bundle, archs in found.items():
        for digest in bundle.digests():
            if time.monotonic() >= until:
                return Searched(title, found, complete=False)
            with suppress(codec.DamagedEntryError, OSError):
                if (entry := read_foreign(bundle, digest)) is not None:
                    archs |= {entry.target} if entry.title == title else set()
                elif (meta := entry_meta(bundle, digest)) is not None and meta.get("label") == title:
                    archs.add(str(meta.get("arch")))
    return Searched(title, found, complete=True)
