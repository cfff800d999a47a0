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
    "fill_of",
    "run",
    "types_of",
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
