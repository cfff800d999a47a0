"""The methods of `Gpu` that make graphs: captures, caches of graphs, their memory and their profile."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

from preheat import graph
from preheat.graph.profile import EVERY, Profile, ReplayOptions, RowSink, row_sink
from preheat.graph.warmers import Warmers
from preheat.runtime.context import Context

if TYPE_CHECKING:
    from preheat.graph import Graph, GraphCache, Graphed, Pool, SharedPool
    from preheat.graph.shared_pool import CaptureMemory

__all__ = ["GraphMethods"]

P = ParamSpec("P")
R = TypeVar("R")


class GraphMethods:
    """What a device does with graphs. `Gpu` has the rest."""

    _replay_options: ReplayOptions
    _warmers: Warmers

    @property
    def _context(self) -> Context:
        """The context of the current session."""
        raise NotImplementedError

    def capture(
        self,
        *,
        stream: object = None,
        mode: str = "thread_local",
        name: str | None = None,
        pool: CaptureMemory | None = None,
        free_on_launch: bool = False,
    ) -> Graph:
        """Return a graph to capture into: `with gpu.capture() as graph: …`, then `graph.replay()`.

        Work of this thread becomes part of the graph. That includes work of torch and CuPy, whose
        current stream is the capture's during the block. `stream` is the default stream of replays.
        `mode` says which unsafe calls are refused during the capture: those of this thread
        ("thread_local"), of all threads ("global"), or only those that concern the capture ("relaxed").
        `name` appears in errors. With a `gpu.pool()` as `pool`, new arrays in the block come from it; a
        sealed pool is refused when the capture begins. A `gpu.shared_pool()`, a `torch.cuda.MemPool` or
        the id that `torch.cuda.graph_pool_handle()` returns is the memory of other libraries in the
        block instead, which all graphs captured with it share. With `free_on_launch`, each replay first
        frees the memory that other libraries allocated in the graph and did not free; without it, such
        a graph can be replayed again only after they have freed it.
        """
        return graph.Graph(
            self._context, stream=stream, mode=mode, name=name,
            pool=graph.capture_memory(pool, self._context),
            free_on_launch=free_on_launch, replay_options=self._replay_options,
        )  # fmt: skip

    def pool(self, size: int | None = None) -> Pool:
        """Return memory for captures: `size` bytes, or as much as `pool.measure(body)` finds later."""
        return graph.Pool(self._context, size)

    def shared_pool(self) -> SharedPool:
        """Return memory of torch and CuPy for captures, which the graphs captured with it share.

        Results of such a graph hold until the next replay of any graph of the pool.
        """
        return graph.SharedPool(self._context)

    def graphs(
        self,
        capacity: int = 64,
        *,
        name: str | None = None,
        checked: bool = False,
        pool: CaptureMemory | None = None,
    ) -> GraphCache:
        """Return a cache of graphs by key: `graphs.run(key, body)`. It evicts the least recently used.

        All captures use `pool`, as in `capture`: with a `gpu.shared_pool()`, graphs of one model at
        many sizes need about the memory of the largest.
        With a `name`, keys are recorded and can be warmed: see `GraphCache.warmer`. `checked` captures
        every call again and compares, to find values that a graph has fixed: it is slow, and for tests.
        """
        return self._graphs(capacity, pool, name=name, checked=checked, key_text=graph.key_text)

    def _graphs(self, capacity: int, pool: CaptureMemory | None, **more: Any) -> GraphCache:
        warmers = self._warmers
        capture = partial(self.capture, pool=graph.capture_memory(pool, self._context))
        return graph.GraphCache(lambda: self._context, capture, capacity, warmers=warmers, **more)

    @overload
    def graphed(self, function: Callable[P, R], /) -> Graphed[P, R]: ...
    @overload
    def graphed(
        self,
        function: None = None,
        /,
        *,
        key: Callable[..., Hashable] | None = None,
        capacity: int = 64,
        name: str | None = None,
        copy: bool = False,
        copy_inputs: bool = False,
        checked: bool = False,
        pool: CaptureMemory | None = None,
    ) -> Callable[[Callable[P, R]], Graphed[P, R]]: ...
    def graphed(
        self,
        function: Any = None,
        /,
        *,
        key: Callable[..., Hashable] | None = None,
        capacity: int = 64,
        name: str | None = None,
        copy: bool = False,
        copy_inputs: bool = False,
        checked: bool = False,
        pool: CaptureMemory | None = None,
    ) -> Any:
        """Capture the second call of a function with each key, and replay the graph in later calls.

            @gpu.graphed(key=lambda batch: batch.shape)
            def step(batch): …

        Calls share a graph when `key` returns the same value for their arguments or, without `key`,
        when all values are equal. In addition, arrays must be the same memory, including those in
        tuples, lists, dicts and dataclasses, and any other object must be the same one.

        With `copy_inputs`, arrays only need the same layout: the graph has arrays of its own, into
        which the arguments of each call are copied. A function that writes into its arguments is
        refused then. `copy` returns copies instead of the graph's own results, which the next call
        overwrites. For a method, the instance owns the graphs and is not part of the key: a graph does
        not notice that an attribute of the instance was replaced.

        All captures use `pool`: see `graphs`. With a shared pool, `copy` keeps results until you drop
        them, where otherwise the next call of any key may overwrite them.

        With a `name`, the values of `key` are recorded and can be warmed. A warmer uses the name of the
        function if there is none: see `Graphed.warmer`.
        """
        more: dict[str, Any] = {"key": key, "copy": copy, "copy_inputs": copy_inputs}

        def graphed(function: Callable[P, R]) -> Graphed[P, R]:
            text = graph.call_key_text
            graphs = self._graphs(capacity, pool, name=name, checked=checked, key_text=text)
            return graph.Graphed(function, graphs, **more)

        return graphed if function is None else graphed(function)

    def profile(self, *sinks: str | os.PathLike[str] | RowSink | None, every: int = EVERY) -> None:
        """Sample the host time of replays, for graphs that are captured from now on.

        Every sink gets every row. A path appends JSON lines to a file, a callable gets the row as its
        argument, and None writes to the standard error, which is the default. A sink that raises is
        reported to the log and gets no more rows. The first replay of each graph is sampled, and then
        every `every`th.
        """
        profile = Profile(*map(row_sink, sinks or (None,)), every=every)
        self._replay_options = self._replay_options._replace(profile=profile)
