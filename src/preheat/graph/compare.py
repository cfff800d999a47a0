"""Two captures of one step compared: what a replay of the first would get wrong for the second."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from preheat.graph import trees
from preheat.graph.graph import Graph
from preheat.graph.nodes import Argument, Node

__all__ = ["Inside", "Names", "Returned", "generations", "written"]

_PLAIN = (int, float, complex, str, bytes, type(None))


class Returned(NamedTuple):
    """Something that a body returned: in words and, for memory, which."""

    text: str
    memory: object = None

    def became(self, other: Returned) -> str:
        """The difference in words."""
        same = self.text == other.text
        return f"{self.text} became {'another array of that shape' if same else other.text}"


class Names(NamedTuple):
    """What two captures call memory that was handed out inside them.

    `given` are names, by order of appearance and what it is used as; `shared` needs none: it is the
    same memory in both.
    """

    given: dict[tuple[int, str], int]
    shared: set[int | None]


class Inside:
    """Memory that was handed out inside a capture: each gets other pieces, in the same order."""

    def __init__(self, since: int | None, names: Names) -> None:
        self._since, self._names = since, names
        self._order: dict[int, int] = {}

    def _name(self, generation: int, text: str) -> int:
        if self._since is None or generation <= self._since or generation in self._names.shared:
            return generation
        order, given = self._order.setdefault(generation, len(self._order)), self._names.given
        return given.setdefault((order, text), -1 - len(given))

    def node(self, node: Node) -> Node:
        """A node with such memory by its name."""
        made = copy.copy(node)
        made._arguments = tuple(map(self._argument, node.arguments))
        return made

    def _argument(self, given: Argument) -> Argument:
        if given.generation is None:
            return given
        return replace(given, generation=self._name(given.generation, str(given)))

    def returned(self, item: Any, memory: trees.Memory | None, *, foreign: bool) -> Returned:
        """What was returned, likewise; of a library that takes part, which may allocate, any memory."""
        if memory is None:
            return Returned(repr(item) if isinstance(item, _PLAIN) else type(item).__name__)
        text = f"{memory.dtype}{list(memory.shape)}"
        generation, *offset = memory.place
        if isinstance(generation, int):
            return Returned(text, (self._name(generation, text), *offset))
        return Returned(text, (memory.strides, None if foreign else generation))


def generations(graph: Graph) -> set[int | None]:
    """The memory of ours that a graph uses."""
    return {argument.generation for node in graph.nodes for argument in node.arguments}


def written(node: Node) -> Iterator[tuple[int, Argument]]:
    """Arguments, by position, that a node writes as far as anybody can tell."""
    if node.kind in ("fill", "copy") and not node.foreign:
        yield 0, node.arguments[0]
    for position, argument in enumerate(node.arguments if node.entry else ()):
        pointee = argument.type.removesuffix("*")
        if pointee != argument.type and not pointee.endswith("const"):
            yield position, argument
