"""Updates of executables: a whole graph, or a graph in a node.

The nodes of an executable and of the other graph are compared in the order in which they were made.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

from preheat.driver.calls import CallError, entry
from preheat.driver.graphs.copy_nodes import COPY, FILL
from preheat.driver.graphs.graph import Graph, Node, executable_of, graph_of
from preheat.driver.graphs.kernel_nodes import KERNEL
from preheat.driver.graphs.memory_nodes import ALLOCATION, FREE
from preheat.driver.graphs.node_kinds import Described, NodeKind
from preheat.driver.graphs.other_nodes import CHILD, EMPTY, HOST, RECORD, WAIT
from preheat.driver.raw import I32, put, write
from preheat.driver.status import EXEC_UPDATE_FAILURE, INVALID_VALUE

if TYPE_CHECKING:
    from preheat.driver.driver import Driver

__all__ = ["KINDS", "update_child"]

#: The kinds of nodes by the name that captured work has.
KINDS: dict[str, NodeKind] = {
    "kernel": KERNEL, "copy": COPY, "fill": FILL, "host": HOST, "graph": CHILD, "empty": EMPTY,
    "wait": WAIT, "record": RECORD, "allocation": ALLOCATION, "free": FREE,
}  # fmt: skip

_FAILED, _TOPOLOGY_CHANGED, _TYPE_CHANGED = 1, 2, 3
_RESULT = struct.Struct("<I4xQQ")


class _Difference(NamedTuple):
    """Why an executable cannot take a graph, the node that differs, and where a wrong edge begins."""

    why: int
    node: int = 0
    source: int = 0


def _difference(driver: Driver, mine: Graph, other: Graph) -> _Difference | None:
    old, new = mine.nodes(driver), other.nodes(driver)
    if len(old) != len(new):
        return _Difference(_TOPOLOGY_CHANGED)
    pair = dict(zip(old, new, strict=True))
    for before, after in pair.items():
        if before.kind != after.kind:
            return _Difference(_TYPE_CHANGED, after.handle)
        if len(before.before) != len(after.before):
            return _Difference(_TOPOLOGY_CHANGED, after.handle)
        expected = {pair[each] for each in before.before}
        for each in after.before:
            if each not in expected:
                return _Difference(_TOPOLOGY_CHANGED, after.handle, each.handle)
        found = _node_difference(driver, before, after)
        if found is not None:
            return found
    return None


def _node_difference(driver: Driver, old: Node, new: Node) -> _Difference | None:
    if old.child is not None and new.child is not None:
        return _difference(driver, old.child, new.child)
    described = Described(new.work, new.name, new.parameters)
    why = KINDS[old.kind].refusal(driver, old, described)
    return _Difference(why, new.handle) if why else None


def _take(driver: Driver, mine: Graph, other: Graph) -> None:
    """Give the nodes of an executable the parameters of another graph."""
    for old, new in zip(mine.nodes(driver), other.nodes(driver), strict=True):
        if old.child is not None and new.child is not None:
            _take(driver, old.child, new.child)
        else:
            old.take(new)
    mine.holders = list(other.holders)


def update_child(driver: Driver, node: Node, new: Described) -> None:
    """Give the graph in a node of an executable the parameters of another graph."""
    other = getattr(new.work, "owner", None)
    if node.child is None or not isinstance(other, Graph):
        raise CallError(INVALID_VALUE)
    if _difference(driver, node.child, other) is not None:
        raise CallError(INVALID_VALUE)
    _take(driver, node.child, other)


def _update(driver: Driver, handle: int, graph: int) -> _Difference | None:
    made, other = executable_of(driver, handle), graph_of(driver, graph)
    if other.moved or other.capture is not None:
        return _Difference(_FAILED)
    found = _difference(driver, made.template, other)
    if found is None:
        _take(driver, made.template, other)
        made.change()
        made.emulated(driver)  # What the graph before it has kept is released now.
    return found


@entry("cuGraphExecUpdate", 12000)
def _update_with_info(driver: Driver, handle: int, graph: int, out: int) -> int:
    if not out:
        raise CallError(INVALID_VALUE)
    found = _update(driver, handle, graph)
    write(out, _RESULT.pack(*(found or (0, 0, 0))))
    return EXEC_UPDATE_FAILURE if found else 0


@entry("cuGraphExecUpdate", 10020)
def _update_with_node(driver: Driver, handle: int, graph: int, node: int, result: int) -> int:
    found = _update(driver, handle, graph)
    put(result, found.why if found else 0, I32)
    put(node, found.node if found else 0)
    return EXEC_UPDATE_FAILURE if found else 0
