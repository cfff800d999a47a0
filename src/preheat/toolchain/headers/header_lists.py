"""Lists of header states of several machines, merged into one."""

from __future__ import annotations

from collections.abc import Collection

from preheat.model import codec
from preheat.toolchain.headers.states import HeaderState, decode_states, is_header_list, pack_states

__all__ = ["HeaderLists"]

_MAX_STATES = 32  # states of a merged list


class HeaderLists:
    """Merges lists of header states. No other entries change: each compile adds to such a list."""

    def applies(self, blob: bytes) -> bool:
        """Return whether `blob` is a list of header states."""
        return is_header_list(blob)

    def merge(self, digest: str, mine: bytes, theirs: bytes) -> bytes:
        """Return `mine` with the newest states of `theirs` that it lacks; `mine` itself without any.

        No state of `mine` is lost. A list that cannot be decoded has no states.
        """
        own = _states(mine)
        known = {entry for _, entry in own}
        others = [row for row in _states(theirs) if row[1] not in known]
        room = max(_MAX_STATES - len(own), 0)
        added = others[max(len(others) - room, 0) :]
        if not added:
            return mine
        return pack_states(digest, _label(theirs), [*added, *own])

    def targets(self, blob: bytes) -> set[str]:
        """Return the digests of the code that a list leads to."""
        return {code for _, code in decode_states(codec.unpack_checked(blob).meta)}

    def restrict(self, digest: str, blob: bytes, targets: Collection[str]) -> bytes | None:
        """Return a list with the states that lead to this code only; None without any."""
        kept = [row for row in _states(blob) if row[1] in targets]
        return pack_states(digest, _label(blob), kept) if kept else None


def _label(blob: bytes) -> str:
    return str(codec.unpack_checked(blob).meta.get("label", ""))


def _states(blob: bytes) -> list[tuple[HeaderState, str]]:
    """Return the states of a list, oldest first. Anything else has no states."""
    try:
        return decode_states(codec.unpack_checked(blob).meta) if is_header_list(blob) else []
    except codec.DamagedEntryError:
        return []
