"""What a cache of graphs holds, as `GraphCache.report` returns it."""

from __future__ import annotations

from typing import NamedTuple

from preheat.graph.keys import stable_repr
from preheat.process.messages import count

__all__ = ["CacheReport", "CachedGraphReport", "QuarantinedKey"]


class CachedGraphReport(NamedTuple):
    """One cached graph. `nbytes` counts the arrays it keeps alive, which other graphs may share."""

    key: object
    owner: object
    nodes: int
    nbytes: int
    replays: int


class QuarantinedKey(NamedTuple):
    """A key that could not be captured: why, how often, and how many calls will not try again."""

    key: object
    owner: object
    reason: str
    failures: int
    waits: int


class CacheReport(NamedTuple):
    """Cached graphs, the least recently used first, and the keys in quarantine."""

    graphs: tuple[CachedGraphReport, ...]
    quarantined: tuple[QuarantinedKey, ...]

    @property
    def nbytes(self) -> int:
        """The sum of `nbytes` of all cached graphs."""
        return sum(graph.nbytes for graph in self.graphs)

    def __str__(self) -> str:
        rows = [
            f"{stable_repr(graph.key)}: {count(graph.nodes, 'node')}, {graph.nbytes:,} bytes, "
            f"{count(graph.replays, 'replay')}"
            for graph in self.graphs
        ]
        rows += [
            f"{stable_repr(one.key)}: failed {count(one.failures, 'time')}, "
            f"tries again in {count(one.waits, 'call')}: {one.reason}"
            for one in self.quarantined
        ]
        return "\n".join(rows) or "no graphs"
