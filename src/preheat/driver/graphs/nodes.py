"""Functions that add nodes to graphs, and read and write their parameters.

Each kind has functions of its own, and `cuGraphAddNode` takes one structure for all of them, in which
the parameters of the kind begin at byte 16.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from preheat.devices.emulator.launch import KernelWork
from preheat.driver.calls import CallError, entry
from preheat.driver.graphs import parameters as of
from preheat.driver.graphs.captures import read_nodes
from preheat.driver.graphs.graph import CHILD, Executable, Graph, Node, Work, graph_of, node_of
from preheat.driver.graphs.structure import NODE_TYPES, clone
from preheat.driver.raw import I32, U64, get, put
from preheat.driver.status import INVALID_VALUE, NOT_SUPPORTED

if TYPE_CHECKING:
    from preheat.driver.driver import Driver

__all__: list[str] = []

_UNION = 16  # where the parameters of the kind begin in the structure of all kinds
_COPY_IN_UNION = 16  # where the copy begins in its own part of that
_KINDS = {number: kind for kind, number in NODE_TYPES.items()}

Reader = Callable[["Driver", Graph, int], Work]

#: By kind, how the work of a node is read from its structure: that of its own function, second version.
_READERS: dict[str, Reader] = {
    "kernel": lambda driver, _, at: of.kernel_work(driver, at, second=True),
    "copy": lambda driver, _, at: of.copy_work(driver, at),
    "fill": lambda driver, _, at: of.fill_work(driver, at),
    "host": lambda _, __, at: of.host_work(at),
    "empty": lambda *_: of.empty_work,
    "wait": lambda driver, _, at: of.event_work(driver, get(at)),
    "record": lambda driver, _, at: of.event_work(driver, get(at)),
    "allocation": lambda driver, _, at: of.allocation_work(driver, at),
    "free": lambda driver, graph, at: of.free_work(driver, graph, get(at)),
}


def _add(
    driver: Driver,
    out: int,
    handle: int,
    before: int,
    count: int,
    kind: str,
    read: Callable[[Graph], Work],
) -> Node:
    """Add a node, whose work is read after its place in the graph was checked."""
    graph = graph_of(driver, handle)
    nodes = read_nodes(driver, before, count)
    if not out:
        raise CallError(INVALID_VALUE)
    work = read(graph)
    name = work.launch.program.kernel if isinstance(work, KernelWork) else ""
    node = graph.add(driver, kind, name, work, nodes)
    put(out, node.handle)
    return node


def _add_kind(
    driver: Driver, out: int, graph: int, before: int, count: int, address: int, *, kind: str
) -> None:
    _add(driver, out, graph, before, count, kind, lambda into: _READERS[kind](driver, into, address))


def _add_kernel_1(driver: Driver, out: int, graph: int, before: int, count: int, address: int) -> None:
    _add(
        driver, out, graph, before, count, "kernel",
        lambda _: of.kernel_work(driver, address, second=False),
    )  # fmt: skip


entry("cuGraphAddKernelNode", 10000)(_add_kernel_1)
entry("cuGraphAddKernelNode", 12000)(partial(_add_kind, kind="kernel"))
entry("cuGraphAddHostNode")(partial(_add_kind, kind="host"))
entry("cuGraphAddMemAllocNode")(partial(_add_kind, kind="allocation"))


def _add_with_context(
    driver: Driver,
    out: int,
    graph: int,
    before: int,
    count: int,
    address: int,
    context: int,
    *,
    kind: str,
) -> None:
    driver.context(context)
    _add_kind(driver, out, graph, before, count, address, kind=kind)


entry("cuGraphAddMemcpyNode")(partial(_add_with_context, kind="copy"))
entry("cuGraphAddMemsetNode")(partial(_add_with_context, kind="fill"))


@entry("cuGraphAddEmptyNode")
def _add_empty(driver: Driver, out: int, graph: int, before: int, count: int) -> None:
    _add(driver, out, graph, before, count, "empty", lambda _: of.empty_work)


@entry("cuGraphAddMemFreeNode")
def _add_free(driver: Driver, out: int, graph: int, before: int, count: int, address: int) -> None:
    _add(driver, out, graph, before, count, "free", lambda into: of.free_work(driver, into, address))


def _add_event(
    driver: Driver, out: int, graph: int, before: int, count: int, event: int, *, kind: str
) -> None:
    _add(driver, out, graph, before, count, kind, lambda _: of.event_work(driver, event))


entry("cuGraphAddEventRecordNode")(partial(_add_event, kind="record"))
entry("cuGraphAddEventWaitNode")(partial(_add_event, kind="wait"))


@entry("cuGraphAddChildGraphNode")
def _add_child(driver: Driver, out: int, graph: int, before: int, count: int, child: int) -> None:
    inner = graph_of(driver, child)
    if inner is graph_of(driver, graph):
        raise CallError(INVALID_VALUE)
    node = _add(driver, out, graph, before, count, CHILD, lambda _: of.empty_work)
    node.child = clone(driver, inner)


@entry("cuGraphChildGraphNodeGetGraph")
def _child(driver: Driver, handle: int, out: int) -> None:
    node = node_of(driver, handle)
    if node.child is None:
        raise CallError(INVALID_VALUE)
    put(out, node.child.handle)


# One structure for all kinds


def _kind_of(address: int) -> tuple[str, int]:
    """Return the kind that a structure is for, and where the parameters of the kind begin."""
    kind = _KINDS.get(get(address, I32))
    if kind is None:
        raise CallError(NOT_SUPPORTED)
    return kind, address + _UNION + (_COPY_IN_UNION if kind == "copy" else 0)


@entry("cuGraphAddNode", 12020)
def _add_any(driver: Driver, out: int, graph: int, before: int, count: int, address: int) -> None:
    kind, at = _kind_of(address)
    if kind == CHILD:
        _add_child(driver, out, graph, before, count, get(at))
    else:
        _add_kind(driver, out, graph, before, count, at, kind=kind)


def _add_any_with_edges(
    driver: Driver, out: int, graph: int, before: int, edges: int, count: int, address: int
) -> None:
    del edges  # Every edge waits for the whole node before it.
    _add_any(driver, out, graph, before, count, address)


entry("cuGraphAddNode", 12030)(_add_any_with_edges)
entry("cuGraphAddNode", 13040)(_add_any_with_edges)


# The parameters of nodes of a graph


def _set(driver: Driver, handle: int, kind: str, read: Callable[[Graph], Work]) -> None:
    node = node_of(driver, handle)
    if node.kind != kind:
        raise CallError(INVALID_VALUE)
    node.work = read(node.graph)
    if isinstance(node.work, KernelWork):
        node.name = node.work.launch.program.kernel


def _set_kind(driver: Driver, handle: int, address: int, *, kind: str) -> None:
    _set(driver, handle, kind, lambda graph: _READERS[kind](driver, graph, address))


def _set_kernel_1(driver: Driver, handle: int, address: int) -> None:
    _set(driver, handle, "kernel", lambda _: of.kernel_work(driver, address, second=False))


def _set_event(driver: Driver, handle: int, event: int, *, kind: str) -> None:
    _set(driver, handle, kind, lambda _: of.event_work(driver, event))


def _set_any(driver: Driver, handle: int, address: int) -> None:
    kind, at = _kind_of(address)
    if kind not in _UPDATED:
        raise CallError(NOT_SUPPORTED)
    _set_kind(driver, handle, at, kind=kind)


#: The kinds whose parameters can change.
_UPDATED = ("kernel", "copy", "fill", "host", "wait", "record")

entry("cuGraphKernelNodeSetParams", 10000)(_set_kernel_1)
entry("cuGraphKernelNodeSetParams", 12000)(partial(_set_kind, kind="kernel"))
entry("cuGraphMemcpyNodeSetParams")(partial(_set_kind, kind="copy"))
entry("cuGraphMemsetNodeSetParams")(partial(_set_kind, kind="fill"))
entry("cuGraphHostNodeSetParams")(partial(_set_kind, kind="host"))
entry("cuGraphEventRecordNodeSetEvent")(partial(_set_event, kind="record"))
entry("cuGraphEventWaitNodeSetEvent")(partial(_set_event, kind="wait"))
entry("cuGraphNodeSetParams")(_set_any)


@entry("cuGraphKernelNodeGetParams", 10000)
def _kernel_1(driver: Driver, handle: int, out: int) -> None:
    of.write_kernel(driver, node_of(driver, handle), out, second=False)


@entry("cuGraphKernelNodeGetParams", 12000)
def _kernel(driver: Driver, handle: int, out: int) -> None:
    of.write_kernel(driver, node_of(driver, handle), out, second=True)


@entry("cuGraphMemAllocNodeGetParams")
def _allocation(driver: Driver, handle: int, out: int) -> None:
    of.write_allocation(driver, node_of(driver, handle), out)


def _get(driver: Driver, handle: int, out: int, *, told: Callable[[Node, int], None]) -> None:
    told(node_of(driver, handle), out)


entry("cuGraphMemcpyNodeGetParams")(partial(_get, told=of.write_copy))
entry("cuGraphMemsetNodeGetParams")(partial(_get, told=of.write_fill))
entry("cuGraphHostNodeGetParams")(partial(_get, told=of.write_host))
entry("cuGraphMemFreeNodeGetParams")(partial(_get, told=of.write_free))


def _event(driver: Driver, handle: int, out: int) -> None:
    work = node_of(driver, handle).work
    if not isinstance(work, of.EventWork):
        raise CallError(INVALID_VALUE)
    put(out, work.event.handle, U64)


entry("cuGraphEventRecordNodeGetEvent")(_event)
entry("cuGraphEventWaitNodeGetEvent")(_event)


# The parameters of nodes of an executable


def _update(driver: Driver, handle: int, node: int, kind: str, read: Callable[[Graph], Work]) -> None:
    made, found = driver.handles.get(handle, Executable), node_of(driver, node)
    if found.kind != kind or found not in made.places:
        raise CallError(INVALID_VALUE)
    made.set_work(made.places[found], read(found.graph))


def _update_kind(driver: Driver, handle: int, node: int, address: int, *, kind: str) -> None:
    _update(driver, handle, node, kind, lambda graph: _READERS[kind](driver, graph, address))


def _update_kernel_1(driver: Driver, handle: int, node: int, address: int) -> None:
    _update(driver, handle, node, "kernel", lambda _: of.kernel_work(driver, address, second=False))


def _update_with_context(
    driver: Driver, handle: int, node: int, address: int, context: int, *, kind: str
) -> None:
    driver.context(context)
    _update_kind(driver, handle, node, address, kind=kind)


def _update_event(driver: Driver, handle: int, node: int, event: int, *, kind: str) -> None:
    _update(driver, handle, node, kind, lambda _: of.event_work(driver, event))


def _update_any(driver: Driver, handle: int, node: int, address: int) -> None:
    kind, at = _kind_of(address)
    if kind not in _UPDATED:
        raise CallError(NOT_SUPPORTED)
    _update_kind(driver, handle, node, at, kind=kind)


entry("cuGraphExecKernelNodeSetParams", 10010)(_update_kernel_1)
entry("cuGraphExecKernelNodeSetParams", 12000)(partial(_update_kind, kind="kernel"))
entry("cuGraphExecMemcpyNodeSetParams")(partial(_update_with_context, kind="copy"))
entry("cuGraphExecMemsetNodeSetParams")(partial(_update_with_context, kind="fill"))
entry("cuGraphExecHostNodeSetParams")(partial(_update_kind, kind="host"))
entry("cuGraphExecEventRecordNodeSetEvent")(partial(_update_event, kind="record"))
entry("cuGraphExecEventWaitNodeSetEvent")(partial(_update_event, kind="wait"))
entry("cuGraphExecNodeSetParams")(_update_any)


def _enabled(driver: Driver, handle: int, node: int) -> tuple[Executable, int]:
    made, found = driver.handles.get(handle, Executable), node_of(driver, node)
    if found not in made.places or found.kind not in ("kernel", "copy", "fill"):
        raise CallError(INVALID_VALUE)
    return made, made.places[found]


@entry("cuGraphNodeSetEnabled")
def _set_enabled(driver: Driver, handle: int, node: int, enabled: int) -> None:
    made, place = _enabled(driver, handle, node)
    made.set_enabled(place, enabled=bool(enabled))


@entry("cuGraphNodeGetEnabled")
def _is_enabled(driver: Driver, handle: int, node: int, out: int) -> None:
    made, place = _enabled(driver, handle, node)
    put(out, int(place not in made.disabled), I32)
