"""Graphs: captured ones, ones that are made of nodes, and changes of executables."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.driver.calls.cuda import Program, cu, ok, status
from tests.driver.calls.graphs import GLOBAL, RELAXED, TYPES, Kept, copy_of, fill_of, run, types_of

pytestmark = pytest.mark.cpu_driver

INVALID_VALUE, UPDATE_FAILURE = 1, 910
# Captures


def test_a_capture_with_two_streams_has_their_edges(program: Program, stream: Any) -> None:
    other, events = ok(cu.cuStreamCreate(1)), [ok(cu.cuEventCreate(0)) for _ in range(2)]
    address = program.memory([1])
    ok(cu.cuStreamBeginCapture(stream, RELAXED))
    ok(program.launch("add", address, 1, 1, stream=stream))
    ok(cu.cuEventRecord(events[0], stream))
    ok(cu.cuStreamWaitEvent(other, events[0], 0))
    ok(program.launch("twice", address, 1, stream=other))
    ok(cu.cuEventRecord(events[1], other))
    ok(cu.cuStreamWaitEvent(stream, events[1], 0))
    state, number, captured, before, edges, count = ok(cu.cuStreamGetCaptureInfo(stream))
    assert (int(state), count, len(before), len(edges)) == (1, 2, 2, 2)
    graph = ok(cu.cuStreamEndCapture(stream))
    assert int(graph) == int(captured)
    assert types_of(graph) == [TYPES.CU_GRAPH_NODE_TYPE_KERNEL] * 2
    assert ok(cu.cuGraphGetEdges(graph))[-1] == 1
    for _ in range(8):
        ok(cu.cuMemsetD32(address, 1, 1))
        ok(cu.cuCtxSynchronize())
        run(graph, stream, times=2)
        assert program.values(address, 1) == [10]
    ok(cu.cuGraphDestroy(graph))
    for event in events:
        ok(cu.cuEventDestroy(event))
    ok(cu.cuStreamDestroy(other))
    ok(cu.cuMemFree(address))
    assert int(number) > 0


def test_a_call_that_a_capture_forbids_invalidates_it(program: Program, stream: Any) -> None:
    del program
    ok(cu.cuStreamBeginCapture(stream, GLOBAL))
    assert status(cu.cuMemAlloc(4)) == 900
    assert int(ok(cu.cuStreamIsCapturing(stream))) == 2
    assert status(cu.cuStreamEndCapture(stream)) == 901
    ok(cu.cuStreamBeginCapture(stream, GLOBAL))
    mode = ok(cu.cuThreadExchangeStreamCaptureMode(RELAXED))
    ok(cu.cuMemFree(ok(cu.cuMemAlloc(4))))
    ok(cu.cuThreadExchangeStreamCaptureMode(mode))
    ok(cu.cuGraphDestroy(ok(cu.cuStreamEndCapture(stream))))


def test_the_id_of_a_stream_that_is_captured_invalidates_the_capture(
    program: Program, stream: Any
) -> None:
    del program
    ok(cu.cuStreamBeginCapture(stream, RELAXED))
    assert status(cu.cuStreamGetId(stream)) == 900
    assert status(cu.cuStreamEndCapture(stream)) == 901


def test_the_legacy_stream_cannot_be_used_while_a_blocking_stream_is_captured(program: Program) -> None:
    del program
    blocking = ok(cu.cuStreamCreate(0))
    ok(cu.cuStreamBeginCapture(blocking, RELAXED))
    assert status(cu.cuStreamQuery(0)) == 906
    assert status(cu.cuStreamEndCapture(blocking)) == 901
    ok(cu.cuStreamDestroy(blocking))


def test_captured_memory_is_allocated_by_each_launch(program: Program, stream: Any) -> None:
    ok(cu.cuStreamBeginCapture(stream, RELAXED))
    address = ok(cu.cuMemAllocAsync(4, stream))
    ok(cu.cuMemsetD32Async(address, 5, 1, stream))
    graph = ok(cu.cuStreamEndCapture(stream))
    made = ok(cu.cuGraphInstantiate(graph, 0))
    ok(cu.cuGraphLaunch(made, stream))
    assert status(cu.cuGraphLaunch(made, stream)) == INVALID_VALUE  # It is allocated still.
    ok(cu.cuStreamSynchronize(stream))
    assert program.values(address, 1) == [5]
    ok(cu.cuMemFreeAsync(address, stream))
    ok(cu.cuGraphLaunch(made, stream))
    ok(cu.cuMemFreeAsync(address, stream))
    ok(cu.cuGraphExecDestroy(made))
    ok(cu.cuGraphDestroy(graph))


def test_nodes_can_be_added_to_a_graph_that_is_being_captured(
    program: Program, stream: Any, kept: Kept
) -> None:
    address = program.memory([1])
    ok(cu.cuStreamBeginCapture(stream, RELAXED))
    ok(program.launch("add", address, 1, 1, stream=stream))
    graph, before = ok(cu.cuStreamGetCaptureInfo(stream))[2:4]
    parameters = kept.kernel(program.function("twice"), address, 1)
    node = ok(cu.cuGraphAddKernelNode(graph, before, 1, parameters))
    flags = cu.CUstreamUpdateCaptureDependencies_flags.CU_STREAM_SET_CAPTURE_DEPENDENCIES
    ok(cu.cuStreamUpdateCaptureDependencies(stream, [node], None, 1, flags))
    ok(program.launch("add", address, 1, 1, stream=stream))
    made = ok(cu.cuStreamEndCapture(stream))
    run(made, stream)
    assert program.values(address, 1) == [5]
    ok(cu.cuGraphDestroy(made))
    ok(cu.cuMemFree(address))


def test_a_graph_keeps_a_user_object_until_its_last_launch_is_over(
    program: Program, stream: Any, graph: Any
) -> None:
    del program
    ended: list[int] = []
    destructor = ctypes.CFUNCTYPE(None, ctypes.c_size_t)(ended.append)
    where = cu.CUhostFn(ctypes.cast(destructor, ctypes.c_void_p).value)
    flags = cu.CUuserObject_flags.CU_USER_OBJECT_NO_DESTRUCTOR_SYNC
    made = ok(cu.cuUserObjectCreate(9, where, 1, flags))
    move = cu.CUuserObjectRetain_flags.CU_GRAPH_USER_OBJECT_MOVE
    ok(cu.cuGraphRetainUserObject(graph, made, 1, move))
    executable = ok(cu.cuGraphInstantiate(graph, 0))
    ok(cu.cuGraphReleaseUserObject(graph, made, 1))
    assert ended == []
    ok(cu.cuGraphExecDestroy(executable))
    assert ended == [9]
    del stream


# Nodes


def test_a_graph_of_each_kind_of_node_does_what_its_nodes_say(
    program: Program, stream: Any, graph: Any, kept: Kept
) -> None:
    address, result = program.memory([0] * 4), np.zeros(4, np.int32)
    seen: list[int] = []
    function = ctypes.CFUNCTYPE(None, ctypes.c_size_t)(lambda _: seen.append(int(result[0])))
    host = cu.CUDA_HOST_NODE_PARAMS()
    host.fn, host.userData = cu.CUhostFn(ctypes.cast(function, ctypes.c_void_p).value), 3
    fill = ok(cu.cuGraphAddMemsetNode(graph, None, 0, fill_of(address, 5, 4), program.context))
    empty = ok(cu.cuGraphAddEmptyNode(graph, [fill], 1))
    parameters = kept.kernel(program.function("add"), address, 4, 2)
    kernel = ok(cu.cuGraphAddKernelNode(graph, [empty], 1, parameters))
    back = copy_of(result.ctypes.data, address, 16)
    copy = ok(cu.cuGraphAddMemcpyNode(graph, [kernel], 1, back, program.context))
    ok(cu.cuGraphAddHostNode(graph, [copy], 1, host))
    names = ("MEMSET", "EMPTY", "KERNEL", "MEMCPY", "HOST")
    assert types_of(graph) == [getattr(TYPES, f"CU_GRAPH_NODE_TYPE_{name}") for name in names]
    run(graph, stream, times=2)
    assert (result.tolist(), seen) == ([7] * 4, [7, 7])
    assert ok(cu.cuGraphMemsetNodeGetParams(fill)).value == 5
    assert ok(cu.cuGraphMemcpyNodeGetParams(copy)).WidthInBytes == 16
    assert int(ok(cu.cuGraphKernelNodeGetParams(kernel)).func) == int(program.function("add"))
    assert int(ok(cu.cuGraphHostNodeGetParams(ok(cu.cuGraphGetNodes(graph, 5))[0][4])).userData) == 3
    ok(cu.cuMemFree(address))


def test_memory_nodes_allocate_and_free_in_each_launch(
    program: Program, stream: Any, graph: Any, kept: Kept
) -> None:
    parameters = cu.CUDA_MEM_ALLOC_NODE_PARAMS()
    parameters.poolProps.allocType = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    parameters.poolProps.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    parameters.bytesize = 128
    made = ok(cu.cuGraphAddMemAllocNode(graph, None, 0, parameters))
    result = program.memory([0] * 32)
    inside = parameters.dptr
    fill = ok(cu.cuGraphAddMemsetNode(graph, [made], 1, fill_of(inside, 4, 32), program.context))
    twice = kept.kernel(program.function("twice"), inside, 32)
    kernel = ok(cu.cuGraphAddKernelNode(graph, [fill], 1, twice))
    out = copy_of(result, inside, 128)
    copy = ok(cu.cuGraphAddMemcpyNode(graph, [kernel], 1, out, program.context))
    ok(cu.cuGraphAddMemFreeNode(graph, [copy], 1, inside))
    assert status(cu.cuGraphAddMemFreeNode(graph, [copy], 1, inside)) == INVALID_VALUE
    run(graph, stream, times=3)
    assert program.values(result, 32) == [8] * 32
    ok(cu.cuMemFree(result))


def test_a_child_graph_is_a_copy(program: Program, stream: Any, graph: Any, kept: Kept) -> None:
    address = program.memory([1])
    child = ok(cu.cuGraphCreate(0))
    twice = kept.kernel(program.function("twice"), address, 1)
    ok(cu.cuGraphAddKernelNode(child, None, 0, twice))
    first = ok(cu.cuGraphAddChildGraphNode(graph, None, 0, child))
    ok(cu.cuGraphAddKernelNode(child, None, 0, twice))
    ok(cu.cuGraphAddChildGraphNode(graph, [first], 1, child))
    assert len(types_of(ok(cu.cuGraphChildGraphNodeGetGraph(first)))) == 1
    ok(cu.cuGraphDestroy(child))
    run(graph, stream)
    assert program.values(address, 1) == [8]
    ok(cu.cuMemFree(address))


def test_event_nodes_order_a_graph_with_other_streams(
    program: Program, stream: Any, graph: Any, kept: Kept
) -> None:
    other, start, end = ok(cu.cuStreamCreate(1)), ok(cu.cuEventCreate(0)), ok(cu.cuEventCreate(0))
    address = program.memory([1])
    wait = ok(cu.cuGraphAddEventWaitNode(graph, None, 0, start))
    twice = kept.kernel(program.function("twice"), address, 1)
    kernel = ok(cu.cuGraphAddKernelNode(graph, [wait], 1, twice))
    record = ok(cu.cuGraphAddEventRecordNode(graph, [kernel], 1, end))
    assert int(ok(cu.cuGraphEventRecordNodeGetEvent(record))) == int(end)
    made = ok(cu.cuGraphInstantiate(graph, 0))
    for _ in range(20):
        ok(cu.cuMemsetD32(address, 1, 1))
        ok(cu.cuCtxSynchronize())
        ok(program.launch("add", address, 1, 1, stream=other))
        ok(cu.cuEventRecord(start, other))
        ok(cu.cuGraphLaunch(made, stream))
        ok(cu.cuStreamWaitEvent(other, end, 0))
        ok(program.launch("add", address, 1, 1, stream=other))
        ok(cu.cuStreamSynchronize(other))
        assert program.values(address, 1) == [5]
    ok(cu.cuGraphExecDestroy(made))
    for event in (start, end):
        ok(cu.cuEventDestroy(event))
    ok(cu.cuStreamDestroy(other))
    ok(cu.cuMemFree(address))


def test_edges_can_be_added_and_removed_and_a_cycle_is_refused(
    program: Program, graph: Any, tmp_path: Path
) -> None:
    del program
    first, second = (ok(cu.cuGraphAddEmptyNode(graph, None, 0)) for _ in range(2))
    ok(cu.cuGraphAddDependencies(graph, [first], [second], None, 1))
    assert int(ok(cu.cuGraphNodeGetDependencies(second, 1))[0][0]) == int(first)
    assert int(ok(cu.cuGraphNodeGetDependentNodes(first, 1))[0][0]) == int(second)
    assert [int(each) for each in ok(cu.cuGraphGetRootNodes(graph, 1))[0]] == [int(first)]
    assert status(cu.cuGraphAddDependencies(graph, [first], [second], None, 1)) == INVALID_VALUE
    ok(cu.cuGraphAddDependencies(graph, [second], [first], None, 1))
    assert status(cu.cuGraphInstantiate(graph, 0)) == INVALID_VALUE
    ok(cu.cuGraphRemoveDependencies(graph, [second], [first], None, 1))
    picture = tmp_path / "graph.dot"
    ok(cu.cuGraphDebugDotPrint(graph, str(picture).encode(), 0))
    assert re.search(r'"\d+\.0" -> "\d+\.1"', picture.read_text())
    copy = ok(cu.cuGraphClone(graph))
    assert int(ok(cu.cuGraphNodeFindInClone(first, copy))) != int(first)
    ok(cu.cuGraphDestroyNode(first))
    assert len(types_of(graph)) == 1
    assert len(types_of(copy)) == 2
    ok(cu.cuGraphDestroy(copy))


# Executables


@pytest.fixture
def adding(program: Program, graph: Any, kept: Kept) -> Callable[[int], Any]:
    """Returns the parameters of a kernel that adds a number to the memory of the test."""
    address = program.memory([0])
    kept.address = address  # type: ignore[attr-defined]
    del graph

    def parameters(more: int) -> Any:
        return kept.kernel(program.function("add"), address, 1, more)

    return parameters


def test_the_nodes_of_an_executable_change_without_the_graph(
    program: Program, stream: Any, graph: Any, kept: Kept, adding: Callable[[int], Any]
) -> None:
    address = kept.address  # type: ignore[attr-defined]
    node = ok(cu.cuGraphAddKernelNode(graph, None, 0, adding(1)))
    made = ok(cu.cuGraphInstantiate(graph, 0))
    ok(cu.cuGraphLaunch(made, stream))  # It is queued with what the nodes are now.
    ok(cu.cuGraphExecKernelNodeSetParams(made, node, adding(10)))
    ok(cu.cuGraphLaunch(made, stream))
    ok(cu.cuGraphNodeSetEnabled(made, node, 0))
    assert ok(cu.cuGraphNodeGetEnabled(made, node)) == 0
    ok(cu.cuGraphLaunch(made, stream))
    ok(cu.cuGraphNodeSetEnabled(made, node, 1))
    ok(cu.cuGraphLaunch(made, stream))
    ok(cu.cuStreamSynchronize(stream))
    assert program.values(address, 1) == [21]
    ok(cu.cuGraphKernelNodeSetParams(node, adding(100)))
    run(graph, stream)
    assert program.values(address, 1) == [121]
    ok(cu.cuGraphExecDestroy(made))


def test_an_executable_takes_the_work_of_a_graph_with_the_same_nodes(
    program: Program, stream: Any, graph: Any, kept: Kept, adding: Callable[[int], Any]
) -> None:
    address = kept.address  # type: ignore[attr-defined]
    node = ok(cu.cuGraphAddKernelNode(graph, None, 0, adding(1)))
    made = ok(cu.cuGraphInstantiate(graph, 0))
    other = ok(cu.cuGraphCreate(0))
    foreign = ok(cu.cuGraphAddKernelNode(other, None, 0, adding(5)))
    ok(cu.cuGraphExecUpdate(made, other))
    ok(cu.cuGraphLaunch(made, stream))
    assert status(cu.cuGraphExecKernelNodeSetParams(made, foreign, adding(7))) == INVALID_VALUE
    ok(cu.cuGraphExecKernelNodeSetParams(made, node, adding(7)))
    ok(cu.cuGraphLaunch(made, stream))
    ok(cu.cuStreamSynchronize(stream))
    assert program.values(address, 1) == [12]
    ok(cu.cuGraphAddEmptyNode(other, None, 0))
    assert status(cu.cuGraphExecUpdate(made, other)) == UPDATE_FAILURE
    ok(cu.cuGraphDestroy(other))
    ok(cu.cuGraphExecDestroy(made))


def test_one_structure_describes_a_node_of_any_kind(program: Program, stream: Any, graph: Any) -> None:
    address = program.memory([0])
    parameters = cu.CUgraphNodeParams()
    parameters.type = TYPES.CU_GRAPH_NODE_TYPE_MEMSET
    fill = parameters.memset
    fill.dst, fill.value, fill.elementSize, fill.width, fill.height = address, 6, 4, 1, 1
    node = ok(cu.cuGraphAddNode(graph, None, None, 0, parameters))
    copy = cu.CUgraphNodeParams()
    copy.type = TYPES.CU_GRAPH_NODE_TYPE_MEMCPY
    result = np.zeros(1, np.int32)
    copy.memcpy.copyParams = copy_of(result.ctypes.data, address, 4)
    ok(cu.cuGraphAddNode(graph, [node], None, 1, copy))
    run(graph, stream)
    assert result.tolist() == [6]
    fill.value = 8
    ok(cu.cuGraphNodeSetParams(node, parameters))
    run(graph, stream)
    assert result.tolist() == [8]
    ok(cu.cuMemFree(address))
