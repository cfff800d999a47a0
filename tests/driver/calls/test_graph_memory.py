"""Nodes that allocate and free memory, in one graph and among graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.driver.calls.cuda import Program, cu, ok, status
from tests.driver.calls.graphs import (
    TYPES,
    allocation_of,
    fill_of,
    run,
)

pytestmark = pytest.mark.cpu_driver

INVALID_VALUE, NOT_SUPPORTED = 1, 801


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
