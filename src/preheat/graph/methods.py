"""The methods of `Gpu` that make graphs: captures, caches of graphs, their memory and their profile."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

from preheat import graph
from preheat.devices.context import Context
from preheat.graph.profile import EVERY, Profile, ReplayOptions, RowSink, row_sink
from preheat.graph.warmers import Warmers
from preheat.model.tracebacks import short_methods

if TYPE_CHECKING:
    from preheat.graph import Graph, GraphCache, Graphed, Pool, SharedPool
    from preheat.graph.libraries import CaptureMemory

__all__ = ["GraphMethods"]

P = ParamSpec("P")
R = TypeVar("R")


@short_methods()
class GraphMethods:
    """The methods of `Gpu` that make graphs."""

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
        """Return a graph to capture into.

        Work of this thread in the `with` block becomes part of the graph. That includes work of torch
        and CuPy, whose current stream is the captured one during the block.

        Args:
            stream: The default stream of replays.
            mode: The unsafe calls that are refused during the capture: those of this thread
                (`"thread_local"`), those of all threads (`"global"`), or only those that concern the
                capture (`"relaxed"`).
            name: A name for errors and pictures.
            pool: With a `gpu.pool()`, new arrays in the block come from it. A sealed pool is refused
                when the capture begins. A `gpu.shared_pool()`, a `torch.cuda.MemPool` or the id that
                `torch.cuda.graph_pool_handle()` returns is the memory of other libraries in the block
                instead, which all graphs captured with it share.
            free_on_launch: Let each replay first free the memory that other libraries allocated in the
                graph and did not free. Without this, such a graph can be replayed again only after they
                have freed it.

        Raises:
            CaptureError: An operation in the block cannot be captured. The error is raised at its line.

        Examples:
            >>> saxpy = gpu.kernel(SAXPY, "saxpy")
            >>> x, y = gpu.zeros(2), gpu.array([1, 2], "float32")
            >>> with gpu.capture(name="add") as graph:
            ...     saxpy[1, 32](1.0, y, x, 2)
            >>> graph.replay()
            >>> graph.replay()
            >>> x.numpy()
            array([2., 4.], dtype=float32)
        """
        return graph.Graph(
            self._context, stream=stream, mode=mode, name=name,
            pool=graph.capture_memory(pool, self._context),
            free_on_launch=free_on_launch, replay_options=self._replay_options,
        )  # fmt: skip

    def pool(self, size: int | None = None) -> Pool:
        """Return memory that captures can allocate from.

        Args:
            size: The size in bytes. Without it, `pool.measure(body)` finds the size later.

        Examples:
            >>> gpu.pool(1 << 20).size
            1048576
        """
        return graph.Pool(self._context, size)

    def shared_pool(self) -> SharedPool:
        """Return memory of torch and CuPy for captures, which all graphs captured with it share.

        The results of such a graph are valid until the next replay of any graph of the pool.

        Examples:
            >>> graphs = gpu.graphs(16, pool=gpu.shared_pool())
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
        """Return a cache of graphs by key, which evicts the least recently used graph.

        Args:
            capacity: The largest number of graphs.
            name: A name under which keys are recorded and can be warmed: see `GraphCache.warmer`.
            checked: Capture every call again and compare, to find values that a graph has fixed. This
                is slow, and meant for tests.
            pool: The memory of all captures, as in `capture`. With a `gpu.shared_pool()`, graphs of one
                model at many sizes need about the memory of the largest one.

        Examples:
            >>> graphs, x = gpu.graphs(capacity=8), gpu.zeros(4)
            >>> for _ in range(3):
            ...     result = graphs.run(4, lambda: x.fill(2))
            >>> print(graphs.report())
            4: 1 node, 16 bytes, 2 replays
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

        Without `key`, calls share a graph if all values are equal. In both cases arrays must be the
        same memory, including those in tuples, lists, dicts and dataclasses, and any other object must
        be the same object. For a method, the instance owns the graphs and is not part of the key: a
        graph does not notice that an attribute of the instance was replaced.

        Args:
            function: The function, if the decorator has no arguments.
            key: A function of the arguments. Calls share a graph if it returns the same value for them.
            capacity: The largest number of graphs.
            name: A name under which the values of `key` are recorded and can be warmed. A warmer uses
                the name of the function if there is none: see `Graphed.warmer`.
            copy: Return copies instead of the graph's own results, which the next call overwrites.
            copy_inputs: Copy the arguments of each call into arrays of the graph, so that arrays only
                need the same layout. A function that writes into its arguments is refused in this case.
            checked: As in `graphs`.
            pool: As in `graphs`. With a shared pool, `copy` keeps results until you drop them.
                Otherwise the next call of any key may overwrite them.

        Examples:
            >>> saxpy = gpu.kernel(SAXPY, "saxpy")
            >>> @gpu.graphed(key=lambda x, y: x.shape)
            ... def step(x, y):
            ...     saxpy[1, 32](2.0, x, y, x.size)
            ...     return y
            >>> x, y = gpu.array([1, 2], "float32"), gpu.zeros(2)
            >>> for _ in range(3):
            ...     result = step(x, y)
            >>> result.numpy()
            array([ 6., 12.], dtype=float32)
        """
        more: dict[str, Any] = {"key": key, "copy": copy, "copy_inputs": copy_inputs}

        def graphed(function: Callable[P, R]) -> Graphed[P, R]:
            text = graph.call_key_text
            graphs = self._graphs(capacity, pool, name=name, checked=checked, key_text=text)
            return graph.Graphed(function, graphs, **more)

        return graphed if function is None else graphed(function)

    def profile(self, *sinks: str | os.PathLike[str] | RowSink | None, every: int = EVERY) -> None:
        """Sample the host time of replays, for graphs that are captured from now on.

        The first replay of each graph is sampled, and then every `every`th.

        Args:
            sinks: The receivers of every row. A path appends JSON lines to a file, a callable gets the
                row as its argument, and None, the default, writes to the standard error. A sink that
                raises is reported to the log and gets no more rows.
            every: The distance between two samples.

        Examples:
            >>> rows = []
            >>> gpu.profile(rows.append)
            >>> x = gpu.zeros(4)
            >>> with gpu.capture() as graph:
            ...     x = x.fill(1)
            >>> graph.replay()
            >>> len(rows)
            1
        """
        profile = Profile(*map(row_sink, sinks or (None,)), every=every)
        self._replay_options = self._replay_options._replace(profile=profile)
