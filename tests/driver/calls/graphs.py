"""Nodes of graphs for the tests: their parameters, what a graph has, and running it."""

from __future__ import annotations

import ctypes
from typing import Any

from tests.driver.calls.cuda import cu, ok

__all__ = [
    "GLOBAL",
    "RELAXED",
    "TYPES",
    "Kept",
    "allocation_of",
    "copy_of",
    "edge",
    "fill_of",
    "run",
    "told_edges",
    "types_of",
    "update",
    "without_data",
]

RELAXED = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
GLOBAL = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
TYPES = cu.CUgraphNodeType


class Kept:
    """Parameters of nodes, with the memory that they point to."""

    def __init__(self) -> None:
        self._all: list[object] = []

    def kernel(self, function: Any, *arguments: Any, threads: int = 32) -> Any:
        """Return the parameters of a kernel node: addresses and integers."""
        values = [
            ctypes.c_int(each) if isinstance(each, int) else ctypes.c_void_p(int(each))
            for each in arguments
        ]
        pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        self._all += [values, pointers]
        made = cu.CUDA_KERNEL_NODE_PARAMS()
        made.func = function
        made.gridDimX = made.gridDimY = made.gridDimZ = 1
        made.blockDimX, made.blockDimY, made.blockDimZ = threads, 1, 1
        made.kernelParams = ctypes.addressof(pointers)
        return made


def copy_of(target: Any, source: Any, size: int) -> Any:
    """Return the parameters of a copy between addresses of any kind."""
    made = cu.CUDA_MEMCPY3D()
    made.srcMemoryType = made.dstMemoryType = cu.CUmemorytype.CU_MEMORYTYPE_UNIFIED
    made.srcDevice, made.dstDevice = source, target
    made.WidthInBytes, made.Height, made.Depth = size, 1, 1
    return made


def fill_of(target: Any, value: int, count: int) -> Any:
    """Return the parameters of a fill with words."""
    made = cu.CUDA_MEMSET_NODE_PARAMS()
    made.dst, made.value, made.elementSize, made.width, made.height = target, value, 4, count, 1
    return made


def types_of(graph: Any) -> list[Any]:
    """Return the types of all nodes."""
    nodes = ok(cu.cuGraphGetNodes(graph, ok(cu.cuGraphGetNodes(graph))[1]))[0]
    return [ok(cu.cuGraphNodeGetType(node)) for node in nodes]


def run(graph: Any, stream: Any, times: int = 1) -> None:
    """Instantiate a graph, launch it and wait."""
    made = ok(cu.cuGraphInstantiate(graph, 0))
    for _ in range(times):
        ok(cu.cuGraphLaunch(made, stream))
    ok(cu.cuStreamSynchronize(stream))
    ok(cu.cuGraphExecDestroy(made))


def allocation_of(size: int, device: int = 0) -> Any:
    """Return the parameters of an allocation on a device."""
    made = cu.CUDA_MEM_ALLOC_NODE_PARAMS()
    made.poolProps.allocType = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    made.poolProps.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    made.poolProps.location.id = device
    made.bytesize = size
    return made


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
