"""How two captures differ: which nodes are gone, new or changed.

`CaptureMemory` lets two captures of one step be compared although they use different memory.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from typing import TYPE_CHECKING, Any, NamedTuple

from preheat.devices import base
from preheat.graph import trees
from preheat.graph.nodes import Argument, Node

if TYPE_CHECKING:
    from preheat.graph.graph import Graph

__all__ = [
    "CaptureMemory",
    "Match",
    "MemoryNames",
    "Returned",
    "diff",
    "generations",
    "match",
    "written_arguments",
]


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
            rows[at] = [f"{head}: after {_list_nodes(was)} became after {_list_nodes(after[there])}"]
    return rows


def _known_dependencies(nodes: Sequence[Node], known: set[int]) -> list[set[int]]:
    """Return, for each node, the nearest nodes before it that are `known`."""
    nearest: list[set[int]] = []
    for node in nodes:
        nearest_of_each = [{at} if at in known else nearest[at] for at in node.after]
        nearest.append(set().union(*nearest_of_each))
    return nearest


def _list_nodes(positions: set[int]) -> str:
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


_PLAIN = (int, float, complex, str, bytes, type(None))


class Returned(NamedTuple):
    """Something that a body returned: its description and, for an array, which memory it is."""

    text: str
    memory: object = None

    def became(self, other: Returned) -> str:
        """Describe the difference."""
        same = self.text == other.text
        return f"{self.text} became {'another array of that shape' if same else other.text}"


class MemoryNames(NamedTuple):
    """Names for memory that was handed out inside two captures, common to both.

    `names` has a name for each order of appearance and description. Memory in `common` needs no name:
    both captures use it.
    """

    names: dict[tuple[int, str], int]
    common: set[int | None]


class CaptureMemory:
    """Names memory from inside a capture by its order, since each capture gets other memory.

    Memory with a generation after `generation_limit` was handed out inside.
    """

    def __init__(self, generation_limit: int | None, names: MemoryNames) -> None:
        self._generation_limit = generation_limit
        self._names = names
        self._order: dict[int, int] = {}

    def _name(self, generation: int, text: str) -> int:
        if (
            self._generation_limit is None
            or generation <= self._generation_limit
            or generation in self._names.common
        ):
            return generation
        order = self._order.setdefault(generation, len(self._order))
        names = self._names.names
        return names.setdefault((order, text), -1 - len(names))

    def node(self, node: Node) -> Node:
        """Return a node with names in place of the generations of such memory."""
        copied = copy.copy(node)
        copied._arguments = tuple(map(self._argument, node.arguments))
        return copied

    def _argument(self, argument: Argument) -> Argument:
        if argument.generation is None:
            return argument
        return replace(argument, generation=self._name(argument.generation, str(argument)))

    def describe_returned(self, item: Any, memory: trees.Memory | None, *, foreign: bool) -> Returned:
        """Describe a returned item in the same way.

        With `foreign` nodes, any memory of a library matches.
        """
        if memory is None:
            return Returned(repr(item) if isinstance(item, _PLAIN) else type(item).__name__)
        text = f"{memory.dtype}{list(memory.shape)}"
        generation, *offset = memory.place
        if isinstance(generation, int):
            return Returned(text, (self._name(generation, text), *offset))
        return Returned(text, (memory.strides, None if foreign else generation))


def generations(graph: Graph) -> set[int | None]:
    """Return the generations of the memory that a graph uses."""
    return {argument.generation for node in graph.nodes for argument in node.arguments}


def written_arguments(node: Node) -> Iterator[tuple[int, Argument]]:
    """Yield the arguments that a node may write according to their types, by position."""
    if node.kind in ("fill", "copy") and not node.foreign:
        yield 0, node.arguments[0]
    for position, argument in enumerate(node.arguments if node.entry else ()):
        pointee = argument.type.removesuffix("*")
        if pointee != argument.type and not pointee.endswith("const"):
            yield position, argument
