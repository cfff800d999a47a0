"""Make sure that a server has given entries: ask for all of them, and write those that are absent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Protocol

from preheat.store.base import Filled, Filling
from preheat.store.remote.engine import RemoteError
from preheat.store.remote.tier import DIGESTS_PER_REQUEST

__all__ = ["FillableTier", "fill"]


class FillableTier(Protocol):
    """What `fill` needs of a `RemoteTier`."""

    name: str

    @property
    def load(self) -> float: ...
    def existing(self, digests: Iterable[str]) -> set[str]: ...
    def settle(self, load: float = 0.5) -> None: ...
    def queue(self, digest: str, blob: bytes, ended: Callable[[str, str], None]) -> None: ...


def fill(tier: FillableTier, entries: Sequence[Filling]) -> Filled:
    """Write the entries that a server does not have, and wait while its queue becomes shorter.

    A list of header states is written after its code. It is always merged with that of the server,
    which may have a list without the state of this machine. An entry that the server could not be asked
    for is written. A fault has the cost and the events of any other write.
    """
    wanted = {each.digest: each for each in entries}
    present = _present(tier, sorted(wanted))
    missing = _write(tier, [each for digest, each in wanted.items() if digest not in present])
    lists = {
        each.header_list.digest: each
        for each in wanted.values()
        if each.header_list is not None and each.digest not in missing
    }
    dropped = _write(tier, [each.header_list for each in lists.values() if each.header_list])
    missing |= {lists[digest].digest: reason for digest, reason in dropped.items()}
    there = len(present - missing.keys())
    return Filled(
        tier=tier.name,
        present=there,
        written=len(wanted) - there - len(missing),
        missing=len(missing),
        reason=next(iter(missing.values()), ""),
    )


def _present(tier: FillableTier, digests: Sequence[str]) -> set[str]:
    """Return the digests that the server certainly has, with few requests."""
    found: set[str] = set()
    for start in range(0, len(digests), DIGESTS_PER_REQUEST):
        with suppress(RemoteError):  # It was reported.
            found |= tier.existing(digests[start : start + DIGESTS_PER_REQUEST])
    return found


def _write(tier: FillableTier, entries: Sequence[Filling]) -> dict[str, str]:
    """Write entries, and return the digests of those that were not written, with the reasons."""
    missing = {each.digest: "the server took too long" for each in entries}

    def ended(digest: str, reason: str) -> None:
        if reason:
            missing[digest] = reason
        else:
            missing.pop(digest, None)

    for each in entries:
        tier.settle()
        tier.queue(each.digest, each.read(), ended)
    before = float("inf")
    while 0 < tier.load < before:
        before = tier.load
        tier.settle(0)
    return dict(missing)
