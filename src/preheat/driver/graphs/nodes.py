"""Functions that add nodes to graphs, and read and write the parameters of nodes.

Each kind has functions of its own, which take a part of its structure or a single value. The functions
for all kinds take the structure of the kind inside another one, whose first number is the kind.
"""

from __future__ import annotations

import ctypes
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from preheat.driver.calls import CallError, entry
from preheat.driver.graphs.copy_nodes import COPY, FILL, is_plain_copy
from preheat.driver.graphs.edges import read_edges
from preheat.driver.graphs.graph import Executable, Node, executable_of, graph_of, node_of
from preheat.driver.graphs.kernel_nodes import KERNEL
from preheat.driver.graphs.memory_nodes import ALLOCATION, ALLOCATION_ADDRESS
from preheat.driver.graphs.updates import KINDS, update_child
from preheat.driver.raw import I32, get, put, read, read_structure, write
from preheat.driver.status import INVALID_VALUE, NOT_SUPPORTED

if TYPE_CHECKING:
    from preheat.driver.driver import Driver

__all__: list[str] = []

_BY_NUMBER = {kind.number: name for name, kind in KINDS.items()}
#: Kinds that a GPU has: semaphores of other APIs, operations on single words, conditions and others.
_NOT_SUPPORTED = (8, 9, 12, 13, 14, 17, 18)


class _Part(NamedTuple):
    """The part of a structure that a function takes, and the place of the context that it takes."""

    kind: str
    size: int
    start: int = 0
    context: int | None = None

    @property
    def structure(self) -> int:
        """The size of the whole structure."""
        return KINDS[self.kind].size

    def fill(self, data: bytes, context: int = 0) -> bytes:
        """Return the structure with a part and a context."""
        whole = bytearray(self.structure)
        whole[self.start : self.start + self.size] = data
        if self.context is not None:
            whole[self.context : self.context + 8] = context.to_bytes(8, "little")
        return bytes(whole)


_KERNEL_1 = _Part("kernel", KERNEL.size - 16)
_KERNEL_2 = _Part("kernel", KERNEL.size)
_COPY = _Part("copy", COPY.size - 16, start=16, context=8)
_FILL = _Part("fill", FILL.size - 8, context=FILL.size - 8)
_HOST = _Part("host", 16)
_ALLOCATION = _Part("allocation", ALLOCATION.size)
_CHILD = _Part("graph", 8)
_WAIT = _Part("wait", 8)
_RECORD = _Part("record", 8)
_FREE = _Part("free", 8)
_EMPTY = _Part("empty", 0)


def _from_structure(part: _Part, address: int, context: int = 0) -> bytes:
    return part.fill(read_structure(address, part.size), context)


def _from_value(part: _Part, value: int) -> bytes:
    return part.fill(value.to_bytes(8, "little"))


# Adding nodes


def _add(
    driver: Driver,
    out: int,
    graph: int,
    before: int,
    edges: int,
    count: int,
    kind: str,
    data: bytes,
) -> Node:
    into = graph_of(driver, graph)
    dependencies = read_edges(driver, into, before, edges, count, kind)
    if not out:
        raise CallError(INVALID_VALUE)
    work, name, parameters = KINDS[kind].read(driver, data, into)
    node = into.add(driver, kind, name, work, list(dependencies))
    node.ports = {other: port for other, port in dependencies.items() if any(port)}
    node.parameters = parameters
    put(out, node.handle)
    return node


def _add_described(
    driver: Driver, out: int, graph: int, before: int, count: int, address: int, context: int = 0,
    *, part: _Part,
) -> None:  # fmt: skip
    data = _from_structure(part, address, context)
    node = _add(driver, out, graph, before, 0, count, part.kind, data)
    if part is _ALLOCATION:
        _tell_address(driver, node, address)


def _tell_address(driver: Driver, node: Node, structure: int) -> None:
    told = ALLOCATION.write(driver, node)[ALLOCATION_ADDRESS:]
    write(structure + ALLOCATION_ADDRESS, told)


def _add_value(
    driver: Driver, out: int, graph: int, before: int, count: int, value: int = 0, *, part: _Part
) -> None:
    data = _from_value(part, value) if part.size else b""
    _add(driver, out, graph, before, 0, count, part.kind, data)


entry("cuGraphAddKernelNode", 10000)(partial(_add_described, part=_KERNEL_1))
entry("cuGraphAddKernelNode", 12000)(partial(_add_described, part=_KERNEL_2))
entry("cuGraphAddMemcpyNode")(partial(_add_described, part=_COPY))
entry("cuGraphAddMemsetNode")(partial(_add_described, part=_FILL))
entry("cuGraphAddHostNode")(partial(_add_described, part=_HOST))
entry("cuGraphAddMemAllocNode")(partial(_add_described, part=_ALLOCATION))
entry("cuGraphAddMemFreeNode")(partial(_add_value, part=_FREE))
entry("cuGraphAddChildGraphNode")(partial(_add_value, part=_CHILD))
entry("cuGraphAddEventRecordNode")(partial(_add_value, part=_RECORD))
entry("cuGraphAddEventWaitNode")(partial(_add_value, part=_WAIT))
entry("cuGraphAddEmptyNode")(partial(_add_value, part=_EMPTY))


# The parameters of nodes, in a graph and in an executable


def _set(driver: Driver, node: Node, part: _Part, data: bytes) -> None:
    _require(node, part.kind)
    if part.kind == "graph":
        raise CallError(NOT_SUPPORTED)
    node.work, node.name, node.parameters = KINDS[part.kind].read(driver, data, node)


def _require(node: Node, kind: str) -> None:
    if node.kind != kind:
        raise CallError(INVALID_VALUE)
    if not KINDS[kind].changes:
        raise CallError(NOT_SUPPORTED)


def _update(driver: Driver, made: Executable, node: Node, part: _Part, data: bytes) -> None:
    """Change the parameters of a node for later launches of an executable."""
    mine = made.node(node)
    _require(mine, part.kind)
    new = KINDS[part.kind].read(driver, data, mine)
    if part.kind == "graph":
        update_child(driver, mine, new)
        made.change()
        return
    if KINDS[part.kind].refusal(driver, mine, new):
        raise CallError(INVALID_VALUE)
    if part.kind == "copy" and not (is_plain_copy(mine.work) and is_plain_copy(new.work)):
        raise CallError(INVALID_VALUE)  # Only an update of the whole graph changes other copies.
    mine.work, mine.name, mine.parameters = new
    made.change()


def _set_described(driver: Driver, handle: int, address: int, *, part: _Part) -> None:
    _set(driver, node_of(driver, handle), part, _from_structure(part, address))


def _set_value(driver: Driver, handle: int, value: int, *, part: _Part) -> None:
    _set(driver, node_of(driver, handle), part, _from_value(part, value))


def _update_described(
    driver: Driver, handle: int, node: int, address: int, context: int = 0, *, part: _Part
) -> None:
    made, of = executable_of(driver, handle), node_of(driver, node)
    _update(driver, made, of, part, _from_structure(part, address, context))


def _update_value(driver: Driver, handle: int, node: int, value: int, *, part: _Part) -> None:
    made, of = executable_of(driver, handle), node_of(driver, node)
    _update(driver, made, of, part, _from_value(part, value))


def _get_described(driver: Driver, handle: int, out: int, *, part: _Part) -> None:
    node = node_of(driver, handle)
    if node.kind != part.kind or not out:
        raise CallError(INVALID_VALUE)
    write(out, KINDS[part.kind].write(driver, node)[part.start : part.start + part.size])


for _name, _part in (("Memcpy", _COPY), ("Memset", _FILL), ("Host", _HOST)):
    entry(f"cuGraph{_name}NodeSetParams")(partial(_set_described, part=_part))
    entry(f"cuGraph{_name}NodeGetParams")(partial(_get_described, part=_part))
    entry(f"cuGraphExec{_name}NodeSetParams")(partial(_update_described, part=_part))
for _version, _exec_version, _part in ((10000, 10010, _KERNEL_1), (12000, 12000, _KERNEL_2)):
    entry("cuGraphKernelNodeSetParams", _version)(partial(_set_described, part=_part))
    entry("cuGraphKernelNodeGetParams", _version)(partial(_get_described, part=_part))
    entry("cuGraphExecKernelNodeSetParams", _exec_version)(partial(_update_described, part=_part))
for _name, _part in (("Record", _RECORD), ("Wait", _WAIT)):
    entry(f"cuGraphEvent{_name}NodeSetEvent")(partial(_set_value, part=_part))
    entry(f"cuGraphEvent{_name}NodeGetEvent")(partial(_get_described, part=_part))
    entry(f"cuGraphExecEvent{_name}NodeSetEvent")(partial(_update_value, part=_part))
entry("cuGraphMemAllocNodeGetParams")(partial(_get_described, part=_ALLOCATION))
entry("cuGraphMemFreeNodeGetParams")(partial(_get_described, part=_FREE))
entry("cuGraphChildGraphNodeGetGraph")(partial(_get_described, part=_CHILD))
entry("cuGraphExecChildGraphNodeSetParams")(partial(_update_value, part=_CHILD))


# One structure for all kinds

_UNION, _WHOLE = 16, 256  # where the structure of a kind begins, and the size of all


def _part_of(address: int) -> tuple[_Part, bytes]:
    """Return what a structure for all kinds has. Bytes that have no meaning must be 0."""
    if not address:
        raise CallError(INVALID_VALUE)
    number = get(address, I32)
    if number in _NOT_SUPPORTED:
        raise CallError(NOT_SUPPORTED)
    if number not in _BY_NUMBER:
        raise CallError(INVALID_VALUE)
    part = _Part(_BY_NUMBER[number], KINDS[_BY_NUMBER[number]].size)
    whole = read(address, _WHOLE)
    if any(whole[4:_UNION]) or any(whole[_UNION + part.size :]):
        raise CallError(INVALID_VALUE)
    return part, whole[_UNION : _UNION + part.size]


def _add_any(
    driver: Driver, out: int, graph: int, before: int, edges: int, count: int, address: int
) -> None:
    part, data = _part_of(address)
    node = _add(driver, out, graph, before, edges, count, part.kind, data)
    if part.kind == "allocation":
        _tell_address(driver, node, address + _UNION)


@entry("cuGraphAddNode", 12020)
def _add_any_without_edges(
    driver: Driver, out: int, graph: int, before: int, count: int, address: int
) -> None:
    _add_any(driver, out, graph, before, 0, count, address)


entry("cuGraphAddNode", 12030, 13040)(_add_any)


@entry("cuGraphNodeSetParams")
def _set_any(driver: Driver, handle: int, address: int) -> None:
    _set(driver, node_of(driver, handle), *_part_of(address))


@entry("cuGraphExecNodeSetParams")
def _update_any(driver: Driver, handle: int, node: int, address: int) -> None:
    _update(driver, executable_of(driver, handle), node_of(driver, node), *_part_of(address))


@entry("cuGraphNodeGetParams")
def _get_any(driver: Driver, handle: int, out: int) -> None:
    node = node_of(driver, handle)
    kind = KINDS[node.kind]
    if not out:
        raise CallError(INVALID_VALUE)
    ctypes.memset(out, 0, _WHOLE)
    put(out, kind.number, I32)
    write(out + _UNION, kind.write(driver, node))
