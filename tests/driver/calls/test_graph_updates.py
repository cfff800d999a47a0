"""Child graphs, executables, and which updates of executables CUDA allows."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.driver.calls.cuda import Program, cu, ok, status
from tests.driver.calls.graphs import (
    RELAXED,
    TYPES,
    Kept,
    allocation_of,
    copy_of,
    fill_of,
    run,
    types_of,
    update,
)

pytestmark = pytest.mark.cpu_driver

INVALID_VALUE, UPDATE_FAILURE = 1, 910
RESULTS = cu.CUgraphExecUpdateResult


# Graphs in nodes


def test_a_graph_that_was_moved_into_a_node_belongs_to_it(
    program: Program, stream: Any, graph: Any, address: Any
) -> None:
    child = ok(cu.cuGraphCreate(0))
    inside = allocation_of(16)
    made = ok(cu.cuGraphAddMemAllocNode(child, None, 0, inside))
    fill = ok(cu.cuGraphAddMemsetNode(child, [made], 1, fill_of(inside.dptr, 8, 4), program.context))
    back = copy_of(address, inside.dptr, 16)
    copy = ok(cu.cuGraphAddMemcpyNode(child, [fill], 1, back, program.context))
    ok(cu.cuGraphAddMemFreeNode(child, [copy], 1, inside.dptr))
    parameters = cu.CUgraphNodeParams()
    parameters.type = TYPES.CU_GRAPH_NODE_TYPE_GRAPH
    parameters.graph.graph = child
    parameters.graph.ownership = cu.CUgraphChildGraphNodeOwnership.CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE
    node = ok(cu.cuGraphAddNode(graph, None, None, 0, parameters))
    assert int(ok(cu.cuGraphChildGraphNodeGetGraph(node))) == int(child)
    run(graph, stream, times=2)
    assert program.values(address, 4) == [8] * 4
    assert status(cu.cuGraphDestroy(child)) == INVALID_VALUE
    assert status(cu.cuGraphInstantiate(child, 0)) == INVALID_VALUE
    assert status(cu.cuGraphAddNode(graph, None, None, 0, parameters)) == INVALID_VALUE
    assert status(cu.cuGraphAddMemAllocNode(child, None, 0, allocation_of(4))) == INVALID_VALUE


def test_a_graph_cannot_be_moved_into_itself(program: Program, graph: Any) -> None:
    del program
    parameters = cu.CUgraphNodeParams()
    parameters.type = TYPES.CU_GRAPH_NODE_TYPE_GRAPH
    parameters.graph.graph = graph
    parameters.graph.ownership = cu.CUgraphChildGraphNodeOwnership.CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE
    assert status(cu.cuGraphAddNode(graph, None, None, 0, parameters)) == INVALID_VALUE


def test_nodes_of_child_graphs_change_in_the_graph_and_in_executables(
    program: Program, stream: Any, graph: Any, kept: Kept, address: Any
) -> None:
    def add(more: int) -> Any:
        return kept.kernel(program.function("add"), address, 1, more)

    child = ok(cu.cuGraphCreate(0))
    ok(cu.cuGraphAddKernelNode(child, None, 0, add(1)))
    node = ok(cu.cuGraphAddChildGraphNode(graph, None, 0, child))
    inner = ok(cu.cuGraphGetNodes(ok(cu.cuGraphChildGraphNodeGetGraph(node)), 1))[0][0]
    ok(cu.cuGraphKernelNodeSetParams(inner, add(10)))
    made = ok(cu.cuGraphInstantiate(graph, 0))

    def result() -> int:
        ok(cu.cuMemsetD32(address, 0, 1))
        ok(cu.cuCtxSynchronize())
        ok(cu.cuGraphLaunch(made, stream))
        ok(cu.cuStreamSynchronize(stream))
        return program.values(address, 1)[0]

    assert result() == 10
    ok(cu.cuGraphExecKernelNodeSetParams(made, inner, add(100)))
    assert result() == 100
    ok(cu.cuGraphNodeSetEnabled(made, inner, 0))
    assert result() == 0
    ok(cu.cuGraphNodeSetEnabled(made, inner, 1))
    ok(cu.cuGraphExecChildGraphNodeSetParams(made, node, child))
    assert result() == 1
    ok(cu.cuGraphAddEmptyNode(child, None, 0))
    assert status(cu.cuGraphExecChildGraphNodeSetParams(made, node, child)) == INVALID_VALUE
    assert status(cu.cuGraphNodeSetEnabled(made, node, 0)) == INVALID_VALUE
    ok(cu.cuGraphDestroy(child))
    assert result() == 1
    ok(cu.cuGraphExecDestroy(made))


def test_a_captured_launch_of_a_graph_is_a_child_with_its_nodes(
    program: Program, stream: Any, graph: Any, address: Any, twice: Any
) -> None:
    ok(cu.cuGraphAddKernelNode(graph, None, 0, twice))
    made = ok(cu.cuGraphInstantiate(graph, 0))
    ok(cu.cuStreamBeginCapture(stream, RELAXED))
    ok(cu.cuGraphLaunch(made, stream))
    captured = ok(cu.cuStreamEndCapture(stream))
    ok(cu.cuGraphExecDestroy(made))
    node = ok(cu.cuGraphGetNodes(captured, 1))[0][0]
    assert types_of(ok(cu.cuGraphChildGraphNodeGetGraph(node))) == [TYPES.CU_GRAPH_NODE_TYPE_KERNEL]
    run(captured, stream)
    assert program.values(address, 1) == [2]
    ok(cu.cuGraphDestroy(captured))


# Executables


def test_an_executable_takes_only_changes_that_cuda_allows(
    program: Program, graph: Any, address: Any, kept: Kept, twice: Any
) -> None:
    host = np.zeros(4, np.int32)
    context = program.context
    kernel = ok(cu.cuGraphAddKernelNode(graph, None, 0, twice))
    fill = ok(cu.cuGraphAddMemsetNode(graph, None, 0, fill_of(address, 1, 2), context))
    wide = fill_of(address, 1, 1)
    wide.pitch, wide.height = 8, 2
    rows = ok(cu.cuGraphAddMemsetNode(graph, None, 0, wide, context))
    copy = ok(cu.cuGraphAddMemcpyNode(graph, None, 0, copy_of(address, address, 4), context))
    empty = ok(cu.cuGraphAddEmptyNode(graph, None, 0))
    made = ok(cu.cuGraphInstantiate(graph, 0))
    later = ok(cu.cuGraphAddKernelNode(graph, None, 0, twice))

    def fill_status(node: Any, **changes: Any) -> int:
        parameters = fill_of(address, 5, 2)
        for name, value in changes.items():
            setattr(parameters, name, value)
        return status(cu.cuGraphExecMemsetNodeSetParams(made, node, parameters, context))

    def copy_status(parameters: Any) -> int:
        return status(cu.cuGraphExecMemcpyNodeSetParams(made, copy, parameters, context))

    assert fill_status(fill) == 0
    assert fill_status(fill, width=4) == 0
    assert fill_status(fill, width=1, height=2, pitch=8) == INVALID_VALUE
    assert fill_status(rows, width=1, height=2, pitch=8, value=3) == 0
    assert fill_status(rows, width=1, height=1) == INVALID_VALUE
    assert fill_status(copy) == INVALID_VALUE
    assert copy_status(copy_of(address, address, 8)) == 0
    assert copy_status(copy_of(host.ctypes.data, address, 8)) == INVALID_VALUE
    several = copy_of(address, address, 4)
    several.Height = 2
    assert copy_status(several) == INVALID_VALUE
    set_kernel = cu.cuGraphExecKernelNodeSetParams
    other = kept.kernel(program.function("add"), address, 1, 3)
    assert status(set_kernel(made, kernel, other)) == 0
    assert status(set_kernel(made, fill, other)) == INVALID_VALUE
    assert status(set_kernel(made, later, other)) == INVALID_VALUE  # The executable is older.
    assert status(cu.cuGraphNodeSetEnabled(made, empty, 0)) == INVALID_VALUE
    ok(cu.cuGraphExecDestroy(made))


def test_an_update_that_is_refused_says_why_and_changes_nothing(
    program: Program, stream: Any, graph: Any, kept: Kept, address: Any
) -> None:
    def add(more: int) -> Any:
        return kept.kernel(program.function("add"), address, 1, more)

    first = ok(cu.cuGraphAddKernelNode(graph, None, 0, add(1)))
    ok(cu.cuGraphAddEmptyNode(graph, [first], 1))
    made = ok(cu.cuGraphInstantiate(graph, 0))

    def refused(build: Callable[[Any], tuple[Any, Any]]) -> int:
        """Return why a graph is refused; it is built by `build`, which returns the nodes at fault."""
        other = ok(cu.cuGraphCreate(0))
        node, source = build(other)
        code, why, *nodes = update(made, other)
        assert (code, nodes) == (UPDATE_FAILURE, [int(node), int(source)])
        ok(cu.cuGraphDestroy(other))
        return why

    def one_node(other: Any) -> tuple[Any, Any]:
        ok(cu.cuGraphAddKernelNode(other, None, 0, add(50)))
        return 0, 0

    def another_kind(other: Any) -> tuple[Any, Any]:
        kernel = ok(cu.cuGraphAddKernelNode(other, None, 0, add(50)))
        return ok(cu.cuGraphAddKernelNode(other, [kernel], 1, add(50))), 0

    def no_edge(other: Any) -> tuple[Any, Any]:
        ok(cu.cuGraphAddKernelNode(other, None, 0, add(50)))
        return ok(cu.cuGraphAddEmptyNode(other, None, 0)), 0

    assert refused(one_node) == RESULTS.CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED
    assert refused(another_kind) == RESULTS.CU_GRAPH_EXEC_UPDATE_ERROR_NODE_TYPE_CHANGED
    assert refused(no_edge) == RESULTS.CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED
    ok(cu.cuMemsetD32(address, 0, 1))
    ok(cu.cuCtxSynchronize())
    ok(cu.cuGraphLaunch(made, stream))
    ok(cu.cuStreamSynchronize(stream))
    assert program.values(address, 1) == [1]
    ok(cu.cuGraphExecDestroy(made))


def test_an_update_compares_parameters_attributes_and_child_graphs(
    program: Program, graph: Any, kept: Kept, address: Any, twice: Any
) -> None:
    del kept
    host = np.zeros(4, np.int32)
    child = ok(cu.cuGraphCreate(0))
    to_device = copy_of(address, address, 4)
    to_host = copy_of(host.ctypes.data, address, 4)
    ok(cu.cuGraphAddMemcpyNode(child, None, 0, to_device, program.context))
    ok(cu.cuGraphAddChildGraphNode(graph, None, 0, child))
    kernel = ok(cu.cuGraphAddKernelNode(graph, None, 0, twice))
    made = ok(cu.cuGraphInstantiate(graph, 0))
    value = cu.CUkernelNodeAttrValue()
    value.cooperative = 1
    cooperative = cu.CUkernelNodeAttrID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
    ok(cu.cuGraphKernelNodeSetAttribute(kernel, cooperative, value))
    changed = RESULTS.CU_GRAPH_EXEC_UPDATE_ERROR_ATTRIBUTES_CHANGED
    assert update(made, graph) == (UPDATE_FAILURE, changed, int(kernel), 0)
    value.cooperative = 0
    ok(cu.cuGraphKernelNodeSetAttribute(kernel, cooperative, value))
    ok(cu.cuGraphExecUpdate(made, graph))
    inner = ok(
        cu.cuGraphGetNodes(
            ok(cu.cuGraphChildGraphNodeGetGraph(ok(cu.cuGraphGetNodes(graph, 1))[0][0])), 1
        )
    )[0][0]
    ok(cu.cuGraphMemcpyNodeSetParams(inner, to_host))
    changed = RESULTS.CU_GRAPH_EXEC_UPDATE_ERROR_PARAMETERS_CHANGED
    assert update(made, graph) == (UPDATE_FAILURE, changed, int(inner), 0)
    ok(cu.cuGraphExecDestroy(made))
    ok(cu.cuGraphDestroy(child))


def test_an_update_replaces_the_user_objects_that_an_executable_keeps(
    program: Program, stream: Any, graph: Any
) -> None:
    del program
    ended: list[int] = []
    destructor = ctypes.CFUNCTYPE(None, ctypes.c_size_t)(ended.append)
    where = cu.CUhostFn(ctypes.cast(destructor, ctypes.c_void_p).value)
    other = ok(cu.cuGraphCreate(0))
    for number, each in enumerate((graph, other)):
        flags = cu.CUuserObject_flags.CU_USER_OBJECT_NO_DESTRUCTOR_SYNC
        made = ok(cu.cuUserObjectCreate(number, where, 1, flags))
        move = cu.CUuserObjectRetain_flags.CU_GRAPH_USER_OBJECT_MOVE
        ok(cu.cuGraphRetainUserObject(each, made, 1, move))
        if each is graph:
            executable = ok(cu.cuGraphInstantiate(graph, 0))
            ok(cu.cuGraphReleaseUserObject(graph, made, 1))
    ok(cu.cuGraphExecUpdate(executable, other))
    assert ended == [0]
    ok(cu.cuGraphLaunch(executable, stream))
    ok(cu.cuStreamSynchronize(stream))
    ok(cu.cuGraphDestroy(other))
    assert ended == [0]
    ok(cu.cuGraphExecDestroy(executable))
    assert ended == [0, 1]
