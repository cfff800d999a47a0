"""Edges between nodes, and their data."""

from __future__ import annotations

from typing import Any

import pytest

from tests.driver.calls.cuda import Program, cu, ok, status
from tests.driver.calls.graphs import (
    TYPES,
    Kept,
    edge,
    fill_of,
    run,
    told_edges,
    without_data,
)

pytestmark = pytest.mark.cpu_driver

INVALID_VALUE, LOSSY_QUERY = 1, 402


def test_edges_have_the_data_that_they_were_given(graph: Any, twice: Any) -> None:
    nodes = [ok(cu.cuGraphAddKernelNode(graph, None, 0, twice)) for _ in range(2)]
    parameters = cu.CUgraphNodeParams()
    parameters.type = TYPES.CU_GRAPH_NODE_TYPE_EMPTY
    programmatic = edge(1, 1)
    ok(cu.cuGraphAddDependencies(graph, [nodes[0]], [nodes[1]], [programmatic], 1))
    last = ok(cu.cuGraphAddNode(graph, [nodes[1]], None, 1, parameters))
    sources, targets, data, count = ok(cu.cuGraphGetEdges(graph, 3))
    assert (count, [each.type for each in data], data[0].from_port) == (2, [1, 0, 0], 1)
    assert [int(each) for each in (*sources, *targets)] == [
        *map(int, (*nodes, 0)), int(nodes[1]), int(last), 0,
    ]  # fmt: skip
    assert ok(cu.cuGraphNodeGetDependencies(nodes[1], 1))[1][0].from_port == 1
    assert ok(cu.cuGraphNodeGetDependentNodes(nodes[0], 1))[1][0].type == 1
    clone = ok(cu.cuGraphClone(graph))
    assert [each.type for each in ok(cu.cuGraphGetEdges(clone, 2))[2]] == [1, 0]
    ok(cu.cuGraphDestroy(clone))
    assert without_data("cuGraphGetEdges", graph, arrays=2) == (LOSSY_QUERY, [])
    assert without_data("cuGraphNodeGetDependencies", nodes[1]) == (LOSSY_QUERY, [])
    assert without_data("cuGraphNodeGetDependentNodes", nodes[0]) == (LOSSY_QUERY, [])
    assert without_data("cuGraphNodeGetDependencies", last) == (0, [int(nodes[1])])
    wrong = cu.cuGraphRemoveDependencies(graph, [nodes[0]], [nodes[1]], None, 1)
    assert status(wrong) == INVALID_VALUE  # There is no such edge without data.
    ok(cu.cuGraphRemoveDependencies(graph, [nodes[0]], [nodes[1]], [programmatic], 1))
    assert told_edges(graph) == [(int(nodes[1]), int(last))]


def test_edges_that_nodes_cannot_have_are_refused(program: Program, graph: Any, twice: Any) -> None:
    del program
    kernel = ok(cu.cuGraphAddKernelNode(graph, None, 0, twice))
    empty, other = (ok(cu.cuGraphAddEmptyNode(graph, None, 0)) for _ in range(2))
    foreign = ok(cu.cuGraphCreate(0))
    abroad = ok(cu.cuGraphAddEmptyNode(foreign, None, 0))

    def refused(sources: list[Any], targets: list[Any], data: Any = None) -> int:
        return status(cu.cuGraphAddDependencies(graph, sources, targets, data, len(sources)))

    assert refused([kernel], [empty], [edge(1, 1)]) == INVALID_VALUE  # It is for kernels alone.
    assert refused([kernel], [empty], [edge(1, 0)]) == INVALID_VALUE
    assert refused([kernel], [empty], [edge(0, 0, 1)]) == INVALID_VALUE
    assert refused([empty], [empty]) == INVALID_VALUE
    assert refused([empty], [abroad]) == INVALID_VALUE
    assert refused([empty, empty], [other, other]) == INVALID_VALUE
    assert told_edges(graph) == []
    assert status(cu.cuGraphRemoveDependencies(graph, [empty], [other], None, 1)) == INVALID_VALUE
    assert status(cu.cuGraphAddEmptyNode(graph, [empty, empty], 2)) == INVALID_VALUE
    assert status(cu.cuGraphAddEmptyNode(graph, [abroad], 1)) == INVALID_VALUE
    ok(cu.cuGraphAddDependencies(graph, None, None, None, 0))
    ok(cu.cuGraphDestroy(foreign))


def test_an_edge_to_an_older_node_is_followed(
    program: Program, stream: Any, graph: Any, kept: Kept, address: Any
) -> None:
    add = kept.kernel(program.function("add"), address, 1, 5)
    late = ok(cu.cuGraphAddKernelNode(graph, None, 0, add))
    early = ok(cu.cuGraphAddMemsetNode(graph, None, 0, fill_of(address, 9, 1), program.context))
    ok(cu.cuGraphAddDependencies(graph, [early], [late], None, 1))
    clone = ok(cu.cuGraphClone(graph))
    for each in (graph, clone):
        run(each, stream)
        assert program.values(address, 1) == [14]
    found = ok(cu.cuGraphNodeFindInClone(late, clone))
    assert int(ok(cu.cuGraphNodeGetDependencies(found, 1))[0][0]) == int(
        ok(cu.cuGraphNodeFindInClone(early, clone))
    )
    ok(cu.cuGraphDestroyNode(found))
    assert status(cu.cuGraphNodeFindInClone(late, clone)) == INVALID_VALUE
    ok(cu.cuGraphDestroy(clone))


def test_an_instantiation_names_a_node_of_a_cycle(program: Program, graph: Any) -> None:
    del program
    first, second, apart = (ok(cu.cuGraphAddEmptyNode(graph, None, 0)) for _ in range(3))
    ok(cu.cuGraphAddDependencies(graph, [first, second], [second, first], None, 2))
    parameters = cu.CUDA_GRAPH_INSTANTIATE_PARAMS()
    assert status(cu.cuGraphInstantiateWithParams(graph, parameters)) == INVALID_VALUE
    invalid = cu.CUgraphInstantiateResult.CUDA_GRAPH_INSTANTIATE_INVALID_STRUCTURE
    assert parameters.result_out == invalid
    assert int(parameters.hErrNode_out) in (int(first), int(second))
    ok(cu.cuGraphRemoveDependencies(graph, [second], [first], None, 1))
    made = ok(cu.cuGraphInstantiateWithParams(graph, parameters))
    assert int(parameters.hErrNode_out) == 0
    ok(cu.cuGraphExecDestroy(made))
    del apart
