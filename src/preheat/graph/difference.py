"""How two captures differ: which nodes are gone, new or changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from typing import NamedTuple

from preheat.device import base
from preheat.graph.nodes import Argument, Node

__all__ = ["Match", "diff", "match"]


class Match(NamedTuple):
    """A node of two captures: its positions, and one line for each difference.

    A node that only one of them has lacks a position in the other.
    """

    old: int | None
    new: int | None
    rows: tuple[str, ...] = ()


def diff(old: Sequence[Node], new: Sequence[Node]) -> list[str]:
    """Describe how `new` differs from `old`, one line each; an empty list means no difference."""
    return [row for each in match(old, new) for row in each.rows]


def match(old: Sequence[Node], new: Sequence[Node]) -> Iterator[Match]:
    """Yield all nodes of both captures, so that the nodes of each are in order."""
    matched = SequenceMatcher(None, [_identity(n) for n in old], [_identity(n) for n in new], False)
    moved = _changed_dependencies(old, new, matched)
    for tag, a0, a1, b0, b1 in matched.get_opcodes():
        if tag == "equal":
            for at, there in zip(range(a0, a1), range(b0, b1), strict=True):
                rows = (*_changes(at, old[at], new[there]), *moved.get(at, ()))
                yield Match(at, there, rows)
            continue
        for at in range(a0, a1):
            yield Match(at, None, (f"node {at}: {old[at]} is gone",))
        for at in range(b0, b1):
            yield Match(None, at, (f"node {at}: {new[at]} is new{_location(new[at])}",))


def _changed_dependencies(
    old: Sequence[Node], new: Sequence[Node], matched: SequenceMatcher[tuple[object, ...]]
) -> dict[int, list[str]]:
    """Describe which nodes of both captures wait for other nodes than before, by old position.

    A node that only one of them has is replaced by the nodes that it waits for.
    """
    position = {a + n: b + n for a, b, size in matched.get_matching_blocks() for n in range(size)}
    before = _known_dependencies(old, set(position))
    after = _known_dependencies(new, set(position.values()))
    rows: dict[int, list[str]] = {}
    for at, there in position.items():
        was = {position[each] for each in before[at]}
        if was != after[there]:
            head = f"node {at}, {old[at].name or old[at].kind}{_location(new[there])}"
            rows[at] = [f"{head}: after {_listed(was)} became after {_listed(after[there])}"]
    return rows


def _known_dependencies(nodes: Sequence[Node], known: set[int]) -> list[set[int]]:
    """Return, for each node, the nearest nodes before it that are `known`."""
    nearest: list[set[int]] = []
    for node in nodes:
        found = [{at} if at in known else nearest[at] for at in node.after]
        nearest.append(set().union(*found))
    return nearest


def _listed(positions: set[int]) -> str:
    return f"nodes {', '.join(map(str, sorted(positions)))}" if positions else "nothing"


def _identity(node: Node) -> tuple[object, ...]:
    return (node.kind, node.digest, node.entry or node.name, node.foreign)


def _location(node: Node) -> str:
    return f" ({node.where})" if node.where else ""


def _changes(at: int, was: Node, now: Node) -> Iterator[str]:
    head = f"node {at}, {was.name or was.kind}{_location(now)}"
    for field in base.Geometry._fields if was.geometry and now.geometry else ():
        before = getattr(was.geometry, field)
        after = getattr(now.geometry, field)
        if before != after:
            yield f"{head}: {field} {before} became {after}"
    for position, (before, after) in enumerate(zip(was.arguments, now.arguments, strict=True)):
        if not before.same(after):
            yield f"{head}: argument {position} ({before.type}) {_became(before, after)}"


def _became(before: Argument, after: Argument) -> str:
    if str(before) != str(after):
        return f"{before} became {after}"
    if before.generation is None:  # Tensors of other libraries are known by their address alone.
        return f"{before.number} became {after.number}"
    if before.generation == after.generation:
        return f"{before} at byte {before.offset} became the same at byte {after.offset}"
    return f"{before} became another array of that shape"
