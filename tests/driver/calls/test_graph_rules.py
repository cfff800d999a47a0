"""Graphs refuse what CUDA's documentation refuses, with its statuses, and do what it allows."""

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
)

pytestmark = pytest.mark.cpu_driver

INVALID_VALUE, INVALID_CONTEXT, OPERATING_SYSTEM, LOSSY_QUERY = 1, 201, 304, 402
NOT_SUPPORTED, UNJOINED, UPDATE_FAILURE = 801, 904, 910
RESULTS = cu.CUgraphExecUpdateResult


@pytest.fixture
def address(program: Program) -> Any:
    """Yields memory with four integers."""
    made = program.memory([1, 2, 3, 4])
    yield made
    ok(cu.cuMemFree(made))


@pytest.fixture
def twice(program: Program, kept: Kept, address: Any) -> Any:
    """Returns the parameters of a kernel that doubles the first integer."""
    return kept.kernel(program.function("twice"), address, 1)


def edge(from_port: int = 0, kind: int = 0, to_port: int = 0) -> Any:
    """Return the data of an edge."""
    made = cu.CUgraphEdgeData()
    made.from_port, made.to_port, made.type = from_port, to_port, kind
    return made


def told_edges(graph: Any) -> list[tuple[int, int]]:
    """Return the edges of a graph as pairs of handles."""
    count = ok(cu.cuGraphGetEdges(graph))[-1]
    sources, targets = ok(cu.cuGraphGetEdges(graph, count))[:2]
    return [(int(a), int(b)) for a, b in zip(sources, targets, strict=True)]


def update(executable: Any, graph: Any) -> tuple[int, int, int, int]:
    """Return all that the driver tells about an update, which cuda.bindings does not."""
    told = (ctypes.c_uint64 * 3)()
    function = ctypes.CDLL(None).cuGraphExecUpdate_v2
    function.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_void_p)
    code: int = function(int(executable), int(graph), told)
    return code, told[0] & 0xFFFFFFFF, told[1], told[2]


def without_data(name: str, thing: Any, arrays: int = 1) -> tuple[int, list[int]]:
    """Return the status and the nodes of a question about edges in the version without their data."""
    nodes, count = (ctypes.c_uint64 * 4)(), ctypes.c_size_t(4)
    places = [ctypes.c_void_p(ctypes.addressof(nodes))] * arrays
    handle = ctypes.c_void_p(int(thing))
    code: int = getattr(ctypes.CDLL(None), name)(handle, *places, ctypes.byref(count))
    return code, [] if code else list(nodes[: count.value])


# Wrong handles and null pointers

NO_GRAPH, NO_NODE, NO_EXECUTABLE = cu.CUgraph(0), cu.CUgraphNode(0), cu.CUgraphExec(0)
EVERYWHERE: dict[str, Callable[[], Any]] = {
    "destroy a graph": lambda: cu.cuGraphDestroy(NO_GRAPH),
    "clone": lambda: cu.cuGraphClone(NO_GRAPH),
    "instantiate": lambda: cu.cuGraphInstantiate(NO_GRAPH, 0),
    "instantiate with parameters": lambda: cu.cuGraphInstantiateWithParams(
        NO_GRAPH, cu.CUDA_GRAPH_INSTANTIATE_PARAMS()
    ),
    "create with flags": lambda: cu.cuGraphCreate(1),
    "nodes": lambda: cu.cuGraphGetNodes(NO_GRAPH),
    "roots": lambda: cu.cuGraphGetRootNodes(NO_GRAPH),
    "edges": lambda: cu.cuGraphGetEdges(NO_GRAPH),
    "add empty": lambda: cu.cuGraphAddEmptyNode(NO_GRAPH, None, 0),
    "type": lambda: cu.cuGraphNodeGetType(NO_NODE),
    "destroy a node": lambda: cu.cuGraphDestroyNode(NO_NODE),
    "dependencies": lambda: cu.cuGraphNodeGetDependencies(NO_NODE),
    "dependents": lambda: cu.cuGraphNodeGetDependentNodes(NO_NODE),
    "kernel parameters": lambda: cu.cuGraphKernelNodeGetParams(NO_NODE),
    "any parameters": lambda: cu.cuGraphNodeGetParams(NO_NODE),
    "child": lambda: cu.cuGraphChildGraphNodeGetGraph(NO_NODE),
    "launch": lambda: cu.cuGraphLaunch(NO_EXECUTABLE, 0),
    "upload": lambda: cu.cuGraphUpload(NO_EXECUTABLE, 0),
    "destroy an executable": lambda: cu.cuGraphExecDestroy(NO_EXECUTABLE),
    "flags": lambda: cu.cuGraphExecGetFlags(NO_EXECUTABLE),
    "update": lambda: cu.cuGraphExecUpdate(NO_EXECUTABLE, NO_GRAPH),
    "enabled": lambda: cu.cuGraphNodeGetEnabled(NO_EXECUTABLE, NO_NODE),
    "print": lambda: cu.cuGraphDebugDotPrint(NO_GRAPH, b"/dev/null", 0),
}


@pytest.mark.parametrize("call", EVERYWHERE)
def test_wrong_handles_are_invalid_values(program: Program, call: str) -> None:
    del program
    assert status(EVERYWHERE[call]()) == INVALID_VALUE


def test_destroyed_objects_are_invalid_values(program: Program, graph: Any) -> None:
    del program
    node, other = (ok(cu.cuGraphAddEmptyNode(graph, None, 0)) for _ in range(2))
    ok(cu.cuGraphDestroyNode(node))
    assert status(cu.cuGraphNodeGetType(node)) == INVALID_VALUE
    assert status(cu.cuGraphAddEmptyNode(graph, [node], 1)) == INVALID_VALUE
    made = ok(cu.cuGraphInstantiate(graph, 0))
    ok(cu.cuGraphExecDestroy(made))
    assert status(cu.cuGraphLaunch(made, 0)) == INVALID_VALUE
    gone = ok(cu.cuGraphCreate(0))
    inside = ok(cu.cuGraphAddEmptyNode(gone, None, 0))
    ok(cu.cuGraphDestroy(gone))
    assert status(cu.cuGraphNodeGetType(inside)) == INVALID_VALUE
    assert status(cu.cuGraphAddDependencies(graph, [other], [inside], None, 1)) == INVALID_VALUE


# Parameters


def test_kernel_nodes_with_wrong_parameters_are_refused(graph: Any, twice: Any) -> None:
    def refused(**changes: int) -> int:
        before = {name: getattr(twice, name) for name in changes}
        for name, value in changes.items():
            setattr(twice, name, value)
        found = status(cu.cuGraphAddKernelNode(graph, None, 0, twice))
        for name, value in before.items():
            setattr(twice, name, value)
        return found

    assert refused(gridDimX=0) == INVALID_VALUE
    assert refused(blockDimX=1025) == INVALID_VALUE
    assert refused(blockDimZ=65) == INVALID_VALUE
    assert refused(sharedMemBytes=1 << 20) == INVALID_VALUE
    assert refused(kernelParams=0) == INVALID_VALUE
    assert refused(func=0) == INVALID_VALUE
    assert types_of(graph) == []


def test_a_kernel_node_takes_its_arguments_from_one_buffer_too(
    program: Program, stream: Any, graph: Any, address: Any, twice: Any
) -> None:
    arguments = np.zeros(1, np.dtype([("x", np.uint64), ("n", np.int32)], align=True))
    arguments[0] = int(address), 3
    size = ctypes.c_size_t(12)
    end, buffer, buffer_size = 0, 1, 2
    extra = (ctypes.c_void_p * 5)(
        buffer, arguments.ctypes.data, buffer_size, ctypes.addressof(size), end
    )
    plain, twice.kernelParams = twice.kernelParams, 0
    twice.extra = ctypes.addressof(extra)
    ok(cu.cuGraphAddKernelNode(graph, None, 0, twice))
    arguments[0] = 0, 0  # It was read.
    run(graph, stream)
    assert program.values(address, 4) == [2, 4, 6, 4]
    twice.kernelParams = plain
    assert status(cu.cuGraphAddKernelNode(graph, None, 0, twice)) == INVALID_VALUE


def test_copies_and_fills_with_wrong_parameters_are_refused(
    program: Program, graph: Any, address: Any
) -> None:
    def fill(context: Any = program.context, **changes: Any) -> int:
        made = fill_of(address, 1, 4)
        for name, value in changes.items():
            setattr(made, name, value)
        return status(cu.cuGraphAddMemsetNode(graph, None, 0, made, context))

    assert fill(elementSize=3) == INVALID_VALUE
    assert fill(elementSize=8) == INVALID_VALUE
    assert fill(width=5) == INVALID_VALUE
    assert fill(width=0) == INVALID_VALUE
    assert fill(dst=0) == INVALID_VALUE
    assert fill(dst=cu.CUdeviceptr(int(address) + 1)) == INVALID_VALUE
    assert fill(height=2, pitch=4) == INVALID_VALUE
    assert fill(context=cu.CUcontext(12345)) == INVALID_CONTEXT
    copy = copy_of(address, address, 0)
    assert status(cu.cuGraphAddMemcpyNode(graph, None, 0, copy, program.context)) == INVALID_VALUE
    copy = copy_of(address, address, 4)
    copy.srcMemoryType = cu.CUmemorytype.CU_MEMORYTYPE_ARRAY
    assert status(cu.cuGraphAddMemcpyNode(graph, None, 0, copy, program.context)) == INVALID_VALUE
    assert types_of(graph) == []


def test_host_nodes_need_a_function_and_event_nodes_an_event(program: Program, graph: Any) -> None:
    del program
    assert status(cu.cuGraphAddHostNode(graph, None, 0, cu.CUDA_HOST_NODE_PARAMS())) == INVALID_VALUE
    gone = ok(cu.cuEventCreate(0))
    ok(cu.cuEventDestroy(gone))
    for add in (cu.cuGraphAddEventRecordNode, cu.cuGraphAddEventWaitNode):
        assert status(add(graph, None, 0, gone)) == INVALID_VALUE
        assert status(add(graph, None, 0, cu.CUevent(0))) == INVALID_VALUE


def test_a_node_has_the_parameters_that_it_was_given(
    program: Program, graph: Any, address: Any, kept: Kept
) -> None:
    result = np.zeros(4, np.int32)
    kernel = ok(
        cu.cuGraphAddKernelNode(graph, None, 0, kept.kernel(program.function("add"), address, 3, 8))
    )
    told = ok(cu.cuGraphKernelNodeGetParams(kernel))
    values = ctypes.cast(int(told.kernelParams), ctypes.POINTER(ctypes.c_void_p))
    assert ctypes.c_uint64.from_address(values[0]).value == int(address)
    assert ctypes.c_int.from_address(values[2]).value == 8
    rows = fill_of(address, 7, 1)
    rows.pitch, rows.height = 8, 2
    fill = ok(cu.cuGraphAddMemsetNode(graph, None, 0, rows, program.context))
    told = ok(cu.cuGraphMemsetNodeGetParams(fill))
    assert (int(told.dst), told.pitch, told.height, told.width) == (int(address), 8, 2, 1)
    given = copy_of(result.ctypes.data, address, 12)
    copy = ok(cu.cuGraphAddMemcpyNode(graph, None, 0, given, program.context))
    told = ok(cu.cuGraphMemcpyNodeGetParams(copy))
    assert (int(told.dstDevice), told.WidthInBytes) == (result.ctypes.data, 12)
    assert told.srcMemoryType == cu.CUmemorytype.CU_MEMORYTYPE_UNIFIED
    assert status(cu.cuGraphMemsetNodeGetParams(copy)) == INVALID_VALUE
    whole = ok(cu.cuGraphNodeGetParams(fill))
    assert whole.type == TYPES.CU_GRAPH_NODE_TYPE_MEMSET
    assert (whole.memset.value, int(whole.memset.dst)) == (7, int(address))


def test_a_captured_copy_has_parameters(program: Program, stream: Any, address: Any) -> None:
    pinned = ok(cu.cuMemAllocHost(16))
    ok(cu.cuStreamBeginCapture(stream, RELAXED))
    ok(cu.cuMemcpyDtoHAsync(pinned, address, 16, stream))
    graph = ok(cu.cuStreamEndCapture(stream))
    told = ok(cu.cuGraphMemcpyNodeGetParams(ok(cu.cuGraphGetNodes(graph, 1))[0][0]))
    assert (int(told.srcDevice), int(told.dstHost)) == (int(address), int(pinned))
    assert told.dstMemoryType == cu.CUmemorytype.CU_MEMORYTYPE_HOST
    ok(cu.cuGraphDestroy(graph))
    ok(cu.cuMemFreeHost(pinned))
    del program


def test_the_structure_of_all_kinds_must_be_zero_where_it_has_no_meaning(
    program: Program, graph: Any, address: Any
) -> None:
    del program
    parameters = cu.CUgraphNodeParams()
    parameters.type = TYPES.CU_GRAPH_NODE_TYPE_MEMSET
    parameters.memset = _second_version(fill_of(address, 6, 1))
    node = ok(cu.cuGraphAddNode(graph, None, None, 0, parameters))
    where = int(parameters.getPtr())
    for at in (4, 15, 16 + 48, 247, 248):
        byte = ctypes.c_uint8.from_address(where + at)
        byte.value = 1
        assert status(cu.cuGraphAddNode(graph, None, None, 0, parameters)) == INVALID_VALUE
        assert status(cu.cuGraphNodeSetParams(node, parameters)) == INVALID_VALUE
        byte.value = 0
    kind = ctypes.c_int.from_address(where)
    for number in (8, 12, 13):  # a semaphore, operations on words, and a condition
        kind.value = number
        assert status(cu.cuGraphAddNode(graph, None, None, 0, parameters)) == NOT_SUPPORTED
    kind.value = 99
    assert status(cu.cuGraphAddNode(graph, None, None, 0, parameters)) == INVALID_VALUE


def _second_version(fill: Any) -> Any:
    made = cu.CUDA_MEMSET_NODE_PARAMS_v2()
    for name in ("dst", "pitch", "value", "elementSize", "width", "height"):
        setattr(made, name, getattr(fill, name))
    return made


# Edges


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


# Memory


def test_a_graph_with_memory_of_its_own_keeps_its_nodes(
    program: Program, stream: Any, graph: Any
) -> None:
    del stream
    parameters = allocation_of(64)
    made = ok(cu.cuGraphAddMemAllocNode(graph, None, 0, parameters))
    empty = ok(cu.cuGraphAddEmptyNode(graph, [made], 1))
    ok(cu.cuGraphAddMemFreeNode(graph, [empty], 1, parameters.dptr))
    assert int(ok(cu.cuGraphMemAllocNodeGetParams(made)).dptr) == int(parameters.dptr)
    assert status(cu.cuGraphDestroyNode(empty)) == INVALID_VALUE
    assert status(cu.cuGraphRemoveDependencies(graph, [made], [empty], None, 1)) == INVALID_VALUE
    assert status(cu.cuGraphClone(graph)) == INVALID_VALUE
    parent = ok(cu.cuGraphCreate(0))
    assert status(cu.cuGraphAddChildGraphNode(parent, None, 0, graph)) == INVALID_VALUE
    executable = ok(cu.cuGraphInstantiate(graph, 0))
    assert status(cu.cuGraphInstantiate(graph, 0)) == INVALID_VALUE
    ok(cu.cuGraphExecDestroy(executable))
    ok(cu.cuGraphExecDestroy(ok(cu.cuGraphInstantiate(graph, 0))))
    any_kind = cu.CUgraphNodeParams()
    any_kind.type = TYPES.CU_GRAPH_NODE_TYPE_MEM_FREE
    any_kind.free.dptr = parameters.dptr
    node = ok(cu.cuGraphGetNodes(graph, 3))[0][2]
    assert status(cu.cuGraphNodeSetParams(node, any_kind)) == NOT_SUPPORTED
    ok(cu.cuGraphDestroy(parent))
    del program


def test_allocation_nodes_with_wrong_parameters_are_refused(program: Program, graph: Any) -> None:
    def refused(change: Callable[[Any], None]) -> int:
        parameters = allocation_of(64)
        change(parameters)
        return status(cu.cuGraphAddMemAllocNode(graph, None, 0, parameters))

    assert refused(lambda p: setattr(p, "bytesize", 0)) == INVALID_VALUE
    assert refused(lambda p: setattr(p.poolProps, "allocType", _no_type())) == INVALID_VALUE
    nowhere = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_INVALID
    assert refused(lambda p: setattr(p.poolProps.location, "type", nowhere)) == INVALID_VALUE
    handle = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    assert refused(lambda p: setattr(p.poolProps, "handleTypes", handle)) == NOT_SUPPORTED
    assert refused(lambda p: setattr(p.poolProps.location, "id", 99)) == 101
    ordinary = program.memory([1])
    for wrong in (ordinary, cu.CUdeviceptr(0), cu.CUdeviceptr(64)):
        assert status(cu.cuGraphAddMemFreeNode(graph, None, 0, wrong)) == INVALID_VALUE
    ok(cu.cuMemFree(ordinary))


@pytest.mark.parametrize("kind", ["device", "host", "managed"])
def test_graphs_allocate_memory_of_each_kind(
    program: Program, stream: Any, graph: Any, kind: str
) -> None:
    parameters = allocation_of(16)
    if kind == "host":
        parameters.poolProps.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_HOST
    elif kind == "managed":
        parameters.poolProps.allocType = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_MANAGED
    made = ok(cu.cuGraphAddMemAllocNode(graph, None, 0, parameters))
    told = ok(cu.cuGraphMemAllocNodeGetParams(made)).poolProps
    assert told.allocType == parameters.poolProps.allocType
    assert told.location.type == parameters.poolProps.location.type
    address = parameters.dptr
    ok(cu.cuGraphAddMemsetNode(graph, [made], 1, fill_of(address, 3, 4), program.context))
    run(graph, stream)
    attributes = cu.CUpointer_attribute
    where = ok(cu.cuPointerGetAttribute(attributes.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address))
    managed = ok(cu.cuPointerGetAttribute(attributes.CU_POINTER_ATTRIBUTE_IS_MANAGED, address))
    assert (int(where), bool(managed)) == (1 if kind == "host" else 2, kind == "managed")
    assert program.values(address, 4) == [3] * 4
    ok(cu.cuMemFreeAsync(address, stream))
    ok(cu.cuStreamSynchronize(stream))


def _no_type() -> Any:
    return cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_INVALID


def test_memory_of_a_graph_is_freed_by_another_graph(program: Program, stream: Any, graph: Any) -> None:
    parameters = allocation_of(16)
    made = ok(cu.cuGraphAddMemAllocNode(graph, None, 0, parameters))
    address = parameters.dptr
    ok(cu.cuGraphAddMemsetNode(graph, [made], 1, fill_of(address, 3, 4), program.context))
    freeing = ok(cu.cuGraphCreate(0))
    ok(cu.cuGraphAddMemFreeNode(freeing, None, 0, address))
    assert status(cu.cuGraphAddMemFreeNode(graph, [made], 1, address)) == INVALID_VALUE
    first, second = (ok(cu.cuGraphInstantiate(each, 0)) for each in (graph, freeing))
    for _ in range(3):
        ok(cu.cuGraphLaunch(first, stream))
        ok(cu.cuStreamSynchronize(stream))
        assert program.values(address, 4) == [3] * 4
        ok(cu.cuGraphLaunch(second, stream))
    assert status(cu.cuGraphLaunch(second, stream)) == INVALID_VALUE  # It is free.
    ok(cu.cuStreamSynchronize(stream))
    for each in (first, second):
        ok(cu.cuGraphExecDestroy(each))
    ok(cu.cuGraphDestroy(freeing))


def test_memory_of_a_graph_outlives_the_graph(program: Program, stream: Any) -> None:
    graph = ok(cu.cuGraphCreate(0))
    parameters = allocation_of(16)
    made = ok(cu.cuGraphAddMemAllocNode(graph, None, 0, parameters))
    address = parameters.dptr
    ok(cu.cuGraphAddMemsetNode(graph, [made], 1, fill_of(address, 3, 4), program.context))
    run(graph, stream)
    ok(cu.cuGraphDestroy(graph))
    assert program.values(address, 4) == [3] * 4
    ok(cu.cuMemFreeAsync(address, stream))
    assert status(cu.cuMemFreeAsync(address, stream)) == INVALID_VALUE


def test_a_device_tells_how_much_memory_graphs_use(program: Program, stream: Any, graph: Any) -> None:
    used, most = (
        cu.CUgraphMem_attribute.CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT,
        cu.CUgraphMem_attribute.CU_GRAPH_MEM_ATTR_USED_MEM_HIGH,
    )

    def told(which: Any) -> int:
        return int(ok(cu.cuDeviceGetGraphMemAttribute(program.device, which)))

    ok(cu.cuDeviceGraphMemTrim(program.device))
    before, nothing = told(used), cu.cuuint64_t(0)
    parameters = allocation_of(4096)
    ok(cu.cuGraphAddMemAllocNode(graph, None, 0, parameters))
    run(graph, stream)
    assert told(used) == before + 4096
    ok(cu.cuDeviceGraphMemTrim(program.device))
    assert told(used) == before + 4096
    ok(cu.cuMemFreeAsync(parameters.dptr, stream))
    ok(cu.cuStreamSynchronize(stream))
    assert (told(used), told(most) >= before + 4096) == (before + 4096, True)
    ok(cu.cuDeviceGraphMemTrim(program.device))
    assert (told(used), told(most) >= before + 4096) == (before, True)
    ok(cu.cuDeviceSetGraphMemAttribute(program.device, most, nothing))
    assert told(most) == before
    assert status(cu.cuDeviceSetGraphMemAttribute(program.device, used, nothing)) == INVALID_VALUE


def test_an_executable_frees_its_memory_before_each_launch_if_it_is_told_to(
    program: Program, stream: Any, graph: Any
) -> None:
    parameters = allocation_of(16)
    ok(cu.cuGraphAddMemAllocNode(graph, None, 0, parameters))
    free = cu.CUgraphInstantiate_flags.CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH
    made = ok(cu.cuGraphInstantiate(graph, int(free)))
    assert int(ok(cu.cuGraphExecGetFlags(made))) == int(free)
    for _ in range(3):
        ok(cu.cuGraphLaunch(made, stream))
    ok(cu.cuStreamSynchronize(stream))
    ok(cu.cuMemFreeAsync(parameters.dptr, stream))
    ok(cu.cuGraphExecDestroy(made))
    device = cu.CUgraphInstantiate_flags.CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH
    assert status(cu.cuGraphInstantiate(graph, int(device))) == NOT_SUPPORTED
    assert status(cu.cuGraphInstantiate(graph, 1 << 40)) == INVALID_VALUE
    del program


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


# Attributes


def test_kernel_nodes_keep_attributes_and_copy_them(
    program: Program, graph: Any, kept: Kept, address: Any, twice: Any
) -> None:
    ids = cu.CUkernelNodeAttrID
    first = ok(cu.cuGraphAddKernelNode(graph, None, 0, twice))
    second = ok(cu.cuGraphAddKernelNode(graph, None, 0, twice))
    empty = ok(cu.cuGraphAddEmptyNode(graph, None, 0))
    value = cu.CUkernelNodeAttrValue()
    value.priority = -3
    ok(cu.cuGraphKernelNodeSetAttribute(first, ids.CU_LAUNCH_ATTRIBUTE_PRIORITY, value))
    value = cu.CUkernelNodeAttrValue()
    value.cooperative = 1
    ok(cu.cuGraphKernelNodeSetAttribute(first, ids.CU_LAUNCH_ATTRIBUTE_COOPERATIVE, value))
    other = kept.kernel(program.function("add"), address, 1, 3)
    ok(cu.cuGraphKernelNodeSetParams(first, other))  # Attributes stay.
    ok(cu.cuGraphKernelNodeCopyAttributes(second, first))

    def told(node: Any, which: Any) -> Any:
        return ok(cu.cuGraphKernelNodeGetAttribute(node, which))

    for node in (first, second):
        assert told(node, ids.CU_LAUNCH_ATTRIBUTE_PRIORITY).priority == -3
        assert told(node, ids.CU_LAUNCH_ATTRIBUTE_COOPERATIVE).cooperative == 1
    assert status(cu.cuGraphKernelNodeCopyAttributes(second, empty)) == INVALID_VALUE
    stream_only = ids.CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY
    assert status(cu.cuGraphKernelNodeGetAttribute(first, stream_only)) == INVALID_VALUE
    value = cu.CUkernelNodeAttrValue()
    value.deviceUpdatableKernelNode.deviceUpdatable = 1
    updatable = ids.CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE
    assert status(cu.cuGraphKernelNodeSetAttribute(first, updatable, value)) == NOT_SUPPORTED


# Captures into graphs, and events


def test_a_capture_adds_nodes_to_a_graph_that_exists(
    program: Program, stream: Any, graph: Any, address: Any, twice: Any
) -> None:
    fill = ok(cu.cuGraphAddMemsetNode(graph, None, 0, fill_of(address, 3, 1), program.context))
    apart = ok(cu.cuGraphAddEmptyNode(graph, None, 0))
    ok(cu.cuStreamBeginCaptureToGraph(stream, graph, [fill], None, 1, RELAXED))
    assert status(cu.cuGraphInstantiate(graph, 0)) == INVALID_VALUE
    ok(program.launch("twice", address, 1, stream=stream))
    made = ok(cu.cuStreamEndCapture(stream))
    assert int(made) == int(graph)
    assert len(types_of(graph)) == 3
    run(graph, stream)
    assert program.values(address, 1) == [6]
    ok(cu.cuStreamBeginCaptureToGraph(stream, graph, [fill], None, 1, RELAXED))
    ok(program.launch("twice", address, 1, stream=stream))
    assert status(cu.cuStreamSynchronize(stream)) == 900
    assert status(cu.cuStreamEndCapture(stream)) == 901
    assert len(types_of(graph)) == 3  # It is what it was.
    del apart, twice


def test_a_capture_need_not_wait_for_nodes_that_were_taken_from_its_dependencies(
    program: Program, stream: Any, address: Any
) -> None:
    flags = cu.CUstreamUpdateCaptureDependencies_flags
    ok(cu.cuStreamBeginCapture(stream, RELAXED))
    ok(program.launch("twice", address, 1, stream=stream))
    graph = ok(cu.cuStreamGetCaptureInfo(stream))[2]
    node = ok(cu.cuGraphAddEmptyNode(graph, None, 0))
    set_them = flags.CU_STREAM_SET_CAPTURE_DEPENDENCIES
    ok(cu.cuStreamUpdateCaptureDependencies(stream, [node], None, 1, set_them))
    made = ok(cu.cuStreamEndCapture(stream))
    assert len(types_of(made)) == 2
    ok(cu.cuGraphDestroy(made))


def test_external_events_are_nodes_of_a_capture(program: Program, stream: Any, address: Any) -> None:
    event = ok(cu.cuEventCreate(0))
    record, wait = (
        cu.CUevent_record_flags.CU_EVENT_RECORD_EXTERNAL,
        cu.CUevent_wait_flags.CU_EVENT_WAIT_EXTERNAL,
    )
    assert status(cu.cuEventRecordWithFlags(event, stream, int(record))) == INVALID_VALUE
    ok(cu.cuStreamBeginCapture(stream, RELAXED))
    ok(cu.cuStreamWaitEvent(stream, event, int(wait)))
    ok(program.launch("twice", address, 1, stream=stream))
    ok(cu.cuEventRecordWithFlags(event, stream, int(record)))
    graph = ok(cu.cuStreamEndCapture(stream))
    assert [int(each) for each in types_of(graph)] == [6, 0, 7]
    node = ok(cu.cuGraphGetNodes(graph, 1))[0][0]
    assert int(ok(cu.cuGraphEventWaitNodeGetEvent(node))) == int(event)
    run(graph, stream)
    ok(cu.cuEventSynchronize(event))
    assert program.values(address, 1) == [2]
    ok(cu.cuGraphDestroy(graph))
    ok(cu.cuEventDestroy(event))


def test_an_event_is_recorded_in_the_midst_of_a_graph(program: Program, graph: Any, kept: Kept) -> None:
    """What comes after the record in the graph is not waited for by who waits for the event."""
    first, other, event = (
        ok(cu.cuStreamCreate(1)),
        ok(cu.cuStreamCreate(1)),
        ok(cu.cuEventCreate(0)),
    )
    address, result = program.memory([1]), program.memory([0])
    add = kept.kernel(program.function("add"), address, 1, 1)
    early = ok(cu.cuGraphAddKernelNode(graph, None, 0, add))
    record = ok(cu.cuGraphAddEventRecordNode(graph, [early], 1, event))
    late = kept.kernel(program.function("twice"), address, 1)
    ok(cu.cuGraphAddKernelNode(graph, [record], 1, late))
    made = ok(cu.cuGraphInstantiate(graph, 0))
    seen = set()
    for _ in range(40):
        ok(cu.cuMemsetD32(address, 1, 1))
        ok(cu.cuCtxSynchronize())
        ok(cu.cuGraphLaunch(made, first))
        ok(cu.cuStreamWaitEvent(other, event, 0))
        ok(cu.cuMemcpyDtoDAsync(result, address, 4, other))
        ok(cu.cuStreamSynchronize(other))
        ok(cu.cuStreamSynchronize(first))
        seen.add(program.values(result, 1)[0])
    assert seen == {2, 4}
    ok(cu.cuGraphExecDestroy(made))
    for each in (first, other):
        ok(cu.cuStreamDestroy(each))
    ok(cu.cuEventDestroy(event))
    for each in (address, result):
        ok(cu.cuMemFree(each))


def test_a_picture_names_kernels_and_a_path_that_cannot_be_written_is_an_error(
    graph: Any, twice: Any, tmp_path: Any
) -> None:
    ok(cu.cuGraphAddKernelNode(graph, None, 0, twice))
    picture = tmp_path / "graph.dot"
    ok(cu.cuGraphDebugDotPrint(graph, str(picture).encode(), 0))
    assert "kernel twice" in picture.read_text()
    wrong = str(tmp_path / "none" / "graph.dot").encode()
    assert status(cu.cuGraphDebugDotPrint(graph, wrong, 0)) == OPERATING_SYSTEM
