"""Compares two captures of one step, although they use different memory."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from preheat.graph import trees
from preheat.graph.graph import Graph
from preheat.graph.nodes import Argument, Node

__all__ = ["CaptureMemory", "MemoryNames", "Returned", "generations", "written_arguments"]

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

    `names` has a name for each order of appearance and description. Memory in `shared` needs no name:
    both captures use it.
    """

    names: dict[tuple[int, str], int]
    shared: set[int | None]


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
            or generation in self._names.shared
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

    def returned(self, item: Any, memory: trees.Memory | None, *, foreign: bool) -> Returned:
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
