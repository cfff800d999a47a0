"""Handles, parameters and attributes of nodes: what CUDA refuses, and what a program reads again."""

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
    copy_of,
    fill_of,
    run,
    types_of,
)

pytestmark = pytest.mark.cpu_driver

INVALID_VALUE, INVALID_CONTEXT, OPERATING_SYSTEM, NOT_SUPPORTED = 1, 201, 304, 801


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


# Pictures


def test_a_picture_names_kernels_and_a_path_that_cannot_be_written_is_an_error(
    graph: Any, twice: Any, tmp_path: Any
) -> None:
    ok(cu.cuGraphAddKernelNode(graph, None, 0, twice))
    picture = tmp_path / "graph.dot"
    ok(cu.cuGraphDebugDotPrint(graph, str(picture).encode(), 0))
    assert "kernel twice" in picture.read_text()
    wrong = str(tmp_path / "none" / "graph.dot").encode()
    assert status(cu.cuGraphDebugDotPrint(graph, wrong, 0)) == OPERATING_SYSTEM
