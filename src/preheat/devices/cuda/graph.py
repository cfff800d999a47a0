"""Graphs of a GPU."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from preheat import native
from preheat.devices.base import LEGACY_STREAMS, NOT_SUBMITTED, Event, GraphNode, Replay, Stream
from preheat.devices.cuda.driver import call, function_address, library

if TYPE_CHECKING:
    from preheat.devices.cuda.device import CudaDevice

__all__ = ["CudaExecutable", "CudaGraph"]

_KINDS = {"MEMCPY": "copy", "MEMSET": "fill", "MEM_ALLOC": "allocation", "MEM_FREE": "free"}


class CudaGraph:
    """A graph that was captured from a stream."""

    def __init__(self, device: CudaDevice, graph: Any) -> None:
        self._device = device
        self._graph = graph

    def num_nodes(self) -> int:
        """Return the number of nodes."""
        return int(call("cuGraphGetNodes", self._graph, 0)[1])

    def nodes(self) -> list[GraphNode]:
        """Return the nodes in the order of their capture."""
        count = self.num_nodes()
        nodes = call("cuGraphGetNodes", self._graph, count)[0] if count else []
        return [_described(node) for node in nodes]

    def dependencies(self) -> list[tuple[int, ...]]:
        """Return, for each node, the positions of the nodes that it waits for directly."""
        count = self.num_nodes()
        nodes = call("cuGraphGetNodes", self._graph, count)[0] if count else []
        position = {int(node): at for at, node in enumerate(nodes)}
        before: list[set[int]] = [set() for _ in nodes]
        edges = int(call("cuGraphGetEdges", self._graph, 0)[-1])
        if edges:
            sources, targets, *_ = call("cuGraphGetEdges", self._graph, edges)
            for source, target in zip(sources, targets, strict=True):
                before[position[int(target)]].add(position[int(source)])
        return [tuple(sorted(each)) for each in before]

    def instantiate(self, *, free_on_launch: bool = False) -> CudaExecutable:
        """Make the graph executable; a flag lets each launch free what the last one allocated."""
        flags = library().CUgraphInstantiate_flags
        flag = int(flags.CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH) if free_on_launch else 0
        with self._device.current():
            return CudaExecutable(self._device, call("cuGraphInstantiate", self._graph, flag))

    def close(self) -> None:
        """Destroy the graph."""
        call("cuGraphDestroy", self._graph)


class CudaExecutable:
    """An instantiated graph."""

    def __init__(self, device: CudaDevice, handle: Any) -> None:
        self._device = device
        self._handle = handle

    def upload(self, stream: Stream) -> None:
        """Upload the graph to the GPU."""
        with self._device.current():
            call("cuGraphUpload", self._handle, stream.handle)

    def prepare(
        self, stream: Stream, *, unless_captured: bool = False, mark: Event | None = None
    ) -> Replay:
        """Prepare launches in one stream, with all arguments converted."""
        unless_captured = unless_captured and stream.handle not in LEGACY_STREAMS
        if native.core is not None:
            context = self._device.native_context(stream)
            query = function_address("cuStreamIsCapturing") if unless_captured else 0
            record = () if mark is None else (function_address("cuEventRecord"), mark.handle)
            native_replay: Replay = native.core.GraphLaunch(
                function_address("cuGraphLaunch"), int(self._handle), stream.handle, context, query,
                NOT_SUBMITTED, *record,
            )  # fmt: skip
            return native_replay
        cu = library()
        launch = partial(cu.cuGraphLaunch, self._handle, cu.CUstream(stream.handle))

        def launch_and_mark() -> tuple[int, ...]:
            status: tuple[int, ...] = launch()
            if not status[0]:
                stream.record(reuse=mark)
            return status

        replay = self._device.in_context(launch if mark is None else launch_and_mark, stream)
        if unless_captured:
            return lambda: replay() if stream.capture_status() == "none" else NOT_SUBMITTED
        return replay

    def close(self) -> None:
        """Destroy the executable; the driver keeps it for running launches."""
        call("cuGraphExecDestroy", self._handle)


def _described(node: Any) -> GraphNode:
    word = call("cuGraphNodeGetType", node).name.removeprefix("CU_GRAPH_NODE_TYPE_")
    kind = _KINDS.get(word, word.lower().replace("_", " "))
    return GraphNode(kind, _name(node) if kind == "kernel" else "")


def _name(node: Any) -> str:
    used = call("cuGraphKernelNodeGetParams", node)
    by_library = int(used.kern) != 0  # It was loaded by cuLibrary and has no CUfunction.
    name = call("cuKernelGetName", used.kern) if by_library else call("cuFuncGetName", used.func)
    return str(name.decode())
