"""A cache of graphs: each key is captured at its second use, and replayed from then on."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

from preheat.devices import base
from preheat.devices.active_capture import WARM_GRAPHS
from preheat.devices.context import Context
from preheat.devices.host import integer
from preheat.errors import (
    CaptureError,
    CaptureWarning,
    ContextLostError,
    DriverError,
    GraphError,
    InputError,
    PreheatError,
)
from preheat.graph import trees
from preheat.graph.cache_entries import CacheReport, Entries, EntryKey
from preheat.graph.cached_graph import CAPTURED, Body, CachedGraph, Step
from preheat.graph.graph import Graph
from preheat.graph.keys import key_of, stable_repr
from preheat.graph.warmers import Warmable, Warmers
from preheat.model.tracebacks import short_methods, shorten_traceback
from preheat.process import fork
from preheat.process.callsite import warn_caller
from preheat.process.messages import count

__all__ = ["NOT_REPLAYED", "GraphCache"]

NOT_REPLAYED = object()  # what `GraphCache.replay_step` returns for a step that it did not replay
R = TypeVar("R")
F = TypeVar("F", bound=Callable[[Any], object])


@short_methods(
    without={
        "after_fork", "install", "register_warmer", "replay", "replay_step", "require_capacity", "run",
        "run_step", "warm_key", "warm_step", "warm_steps",
    }
)  # fmt: skip
class GraphCache:
    """A cache of graphs by key, made by `gpu.graphs`. It is safe from any thread.

    At most `capacity` graphs are kept, and the least recently used one is evicted. Each `owner` has
    its own graphs, which are released with the owner: it is referenced weakly where that is
    possible. Recordings and warm-ups know the cache by `name`. With `checked`, each call of `run` is
    captured again and compared with the cached graph, and `BakedError` is raised if a replay would use
    other values. A reset of the device empties the cache, which then works with the new context.

    Examples:
        >>> saxpy, graphs = gpu.kernel(SAXPY, "saxpy"), gpu.graphs(capacity=8)
        >>> x, y = gpu.array([1, 2], "float32"), gpu.zeros(2)
        >>> for _ in range(3):  # The first call runs, the second captures, and later ones replay.
        ...     graphs.run(2, lambda: saxpy[1, 32](2.0, x, y, 2))
        >>> y.numpy()
        array([ 6., 12.], dtype=float32)
    """

    def __init__(
        self,
        context: Callable[[], Context],
        capture: Callable[..., Graph],
        capacity: int = 64,
        *,
        name: str | None = None,
        checked: bool = False,
        warmers: Warmers,
        key_text: Callable[[Any], str],
    ) -> None:
        self.capacity = integer(capacity, "a number of graphs", least=1, hint="capacity=1 or more")
        self.name = _name(name)
        self.checked = checked
        self.title = "graphs"
        self._context = context
        self._capture = capture
        self._warmers = warmers
        self._key_text = key_text
        self._entries = Entries(context, self.capacity)
        self._warned: set[object] = set()  # kinds of failures
        fork.register(self)

    def after_fork(self) -> None:
        """Renew the locks in a forked child."""
        self._entries.after_fork()

    @property
    def device(self) -> base.Device:
        """The device of the graphs."""
        return self._context().device

    # Running

    def run(
        self, key: Hashable, body: Callable[[], R], *, owner: object = None, copy: bool = False
    ) -> R:
        """Do the work of `body` on the device, exactly once, and return its result.

        The first call with `key` runs the body, the second captures it and replays the graph, and later
        calls replay the graph. Python code inside the body therefore runs in the first two calls only.
        Inside a capture the body becomes part of that capture.

        A body that cannot be captured runs without a graph, and later calls try the capture again: see
        `report`. A `CaptureWarning` says so once for each reason.

        Args:
            key: The key of the graph.
            body: A function without arguments.
            owner: The object that owns the graph.
            copy: Return copies of the arrays.

        Returns:
            What the body returned when it was captured: the same arrays, with new content after every
                call, in new lists and dicts.

        Raises:
            DeviceError: The body failed with an error that the device does not survive.

        Examples:
            >>> graphs, x = gpu.graphs(), gpu.zeros(2)
            >>> graphs.run("ones", lambda: x.fill(1)).numpy()
            array([1., 1.], dtype=float32)
        """
        try:
            result: R = self.replay_step(key, (), owner, copy)
            if result is NOT_REPLAYED:
                result = self.run_step(key_of(key), lambda _: body(), (), owner=owner, copy=copy)
            return result
        except PreheatError as error:
            shorten_traceback(error)
            raise

    def replay_step(self, key: Any, arrays: Sequence[Any], owner: object, copy: bool) -> Any:
        """Replay the graph of a key as `run_step` does, if nothing else has to be done.

        Return `NOT_REPLAYED` otherwise. Instead of the key, an equal tuple can be given.
        """
        cached = None if self.checked else self._entries.find_ready(key, owner)
        if cached is None or (arrays and not cached.usable):  # No input is copied for it.
            return NOT_REPLAYED
        try:
            return cached.run(arrays, copy)
        except GraphError:
            if cached.usable:
                raise
        return NOT_REPLAYED  # `run_step` drops the graph.

    def run_step(
        self, key: Hashable, body: Body[Any], arrays: Sequence[Any], *, owner: object, copy: bool
    ) -> Any:
        """Do what `run` does, for a body whose arrays a cached graph has copies of: see `Step`."""
        if self._context().active_capture() is not None:
            return body(arrays)
        entries = self._entries
        entry = entries.entry_key(key, owner)
        cached = entries.find(entry)
        failure = None
        if cached is None:
            cached, failure = self._try_capture(entry, Step(key, body, arrays))
        elif self.checked:
            cached.check(self._new_graph(key), body)
        if cached is not None:
            try:
                return cached.run(arrays, copy)
            except GraphError:
                if cached.usable:
                    raise
                entries.drop(entry, cached)
        result = body(arrays)
        entries.record_run(entry)
        if failure is not None:  # Warn after the run, which raises errors of the body itself.
            self._warn(entry, failure)
        return trees.copy_arrays(result) if copy else result

    def replay(self, key: Hashable, /, *, owner: object = None, **scalars: Any) -> bool:
        """Replay the graph of `key` with scalars as in `Graph.replay`. Return False without a graph.

        Args:
            key: The key of the graph.
            owner: The object that owns the graph.
            scalars: Values of named scalars.

        Examples:
            >>> gpu.graphs().replay("ones")
            False
        """
        try:
            cached = self._entries.find_ready(key, owner)
            if cached is None:
                cached = self._entries.find(self._entry_key(key, owner))
            if cached is None:
                return False
            try:
                cached.graph.replay(**scalars)
            except GraphError:
                if cached.usable:
                    raise
                self._entries.drop(self._entry_key(key, owner), cached)
                return False
            return True
        except PreheatError as error:
            shorten_traceback(error)
            raise

    # Warming

    def warm(self, keys: Iterable[Any], body: Callable[[Any], object], *, owner: object = None) -> None:
        """Capture `body(key)` for all keys without a graph, the largest key first.

        The body is executed once for each key, which loads its kernels, and then captured, which
        executes nothing.

        Args:
            keys: The keys.
            body: A function of a key.
            owner: The object that owns the graphs.

        Raises:
            GraphError: Some keys could not be captured. The error lists them.

        Examples:
            >>> graphs, x = gpu.graphs(), gpu.zeros(8)
            >>> graphs.warm([2, 4, 8], lambda size: x[:size].fill(1))
            >>> graphs.replay(4)
            True
        """
        steps = [Step(key_of(key), partial(_with_key, body, key)) for key in _largest_first(keys)]
        self.warm_steps(steps, owner)

    def warm_steps(self, steps: Sequence[Step], owner: object) -> None:
        """Capture the steps without a graph, in this order; see `warm`."""
        self._context().refuse_in_capture(WARM_GRAPHS)
        wanted: dict[Hashable, Step] = {}
        for step in steps:
            wanted.setdefault(step.key, step)
        self.require_capacity(len(wanted))
        reasons = {key: self._warm(step, owner) for key, step in wanted.items()}
        failed = [f"{stable_repr(key)}: {reason}" for key, reason in reasons.items() if reason]
        if failed:
            text = f"{len(failed)} of {count(len(wanted), 'key')} could not be captured"
            raise GraphError("\n  ".join((text, *failed)), hint="until then, calls run without a graph")

    def warmer(self, function: F) -> F:
        """Register how `gpu.warm` captures a key: `function(key)` does the step of that key.

        Examples:
            >>> graphs, x = gpu.graphs(name="decode"), gpu.zeros(8)
            >>> @graphs.warmer
            ... def decode(size):
            ...     x[:size].fill(1)
        """
        self.register_warmer(self.name, self)
        self._warmer: Callable[[Any], object] = function
        return function

    def register_warmer(self, name: str | None, warmable: Warmable) -> None:
        """Let `gpu.warm` find `warmable` under `name`, which becomes the name of the cache."""
        self._warmers.add(name, warmable)
        self.name = name

    def warm_key(self, key: Any) -> bool:
        """Capture a key through the warmer; return False if the key has a graph already.

        `GraphError` says why it cannot be captured.
        """
        return self.warm_step(Step(key_of(key), partial(_with_key, self._warmer, key)))

    def warm_step(self, step: Step) -> bool:
        """Capture one step; return False if it has a graph already."""
        if self._entries.find(EntryKey(None, step.key)) is not None:
            return False
        reason = self._warm(step, None)
        if reason is not None:
            raise GraphError(reason)
        return True

    def require_capacity(self, keys: int) -> None:
        """Raise if the cache cannot hold graphs for so many keys."""
        if keys > self.capacity:
            raise InputError(
                f"{keys} keys do not fit into a cache of {count(self.capacity, 'graph')}",
                hint=f"capacity={keys}",
            )

    def _warm(self, step: Step, owner: object) -> str | None:
        """Warm one step; return why it cannot be captured."""
        entry = self._entries.entry_key(step.key, owner)
        if self._entries.find(entry) is not None:
            return None
        step.body(step.arrays)
        self._entries.record_run(entry, ready=True)
        self._try_capture(entry, step)
        return self._entries.failure(entry)

    # Content

    def install(
        self, key: Hashable, graph: Graph, outputs: object = None, *, owner: object = None
    ) -> None:
        """Let `run` replay `graph` for `key` and return `outputs`. The caller can also use the graph.

        Args:
            key: The key.
            graph: A graph that was captured.
            outputs: What `run` returns.
            owner: The object that owns the graph.

        Examples:
            >>> graphs, x = gpu.graphs(), gpu.zeros(2)
            >>> with gpu.capture() as graph:
            ...     x = x.fill(3)
            >>> graphs.install("threes", graph, x)
            >>> graphs.run("threes", lambda: None).numpy()
            array([3., 3.], dtype=float32)
        """
        if not isinstance(graph, Graph):
            raise InputError(f"{graph!r} is not a graph", hint="with gpu.capture() as graph: …")
        if graph.state not in CAPTURED:
            raise GraphError(f"{graph} cannot be installed: it is {graph.state.value}")
        entry = self._entry_key(key, owner)
        if graph.context is not self._context():
            raise InputError(f"{graph} is not of this device, or was captured before its reset")
        self._emit_evicted(self._entries.put(entry, CachedGraph(graph, outputs)))

    def invalidate(self, *keys: Hashable, owner: object = None) -> None:
        """Forget graphs and failures.

        Args:
            keys: The keys to forget. Without keys, everything of `owner` is forgotten, or of all
                owners.
            owner: The object that owns the graphs.

        Examples:
            >>> graphs, x = gpu.graphs(), gpu.zeros(2)
            >>> graphs.warm([1, 2], lambda size: x[:size].fill(1))
            >>> graphs.invalidate(2)
            >>> len(graphs.report().graphs)
            1
        """
        if keys:
            self._entries.forget([self._entry_key(key, owner) for key in keys])
        else:
            self._entries.forget_all(owner)

    def __contains__(self, key: Hashable) -> bool:
        return self._entries.has(self._entry_key(key, None))

    def __len__(self) -> int:
        return len(self.report().graphs)

    def __iter__(self) -> Iterator[Any]:
        return iter([graph.key for graph in self.report().graphs])

    def report(self) -> CacheReport:
        """Describe the cached graphs and the keys that could not be captured.

        Examples:
            >>> print(gpu.graphs().report())
            no graphs
        """
        return self._entries.report()

    def __repr__(self) -> str:
        checked = ", checked" if self.checked else ""
        graphs = len(self._entries.graphs)  # No lock: a debugger may call this at any time.
        return f"<GraphCache on {self.device.name}: {graphs} of {self.capacity} graphs{checked}>"

    def _entry_key(self, key: Hashable, owner: object) -> EntryKey:
        return self._entries.entry_key(key_of(key), owner)

    # Capturing

    def _try_capture(self, entry: EntryKey, step: Step) -> tuple[CachedGraph | None, _Failure | None]:
        """Capture a step if its key allows it; return the graph, or why it cannot be captured.

        A step that can be captured but must not be replayed is an error, and not put in quarantine.
        """
        pending = self._entries.begin_capture(entry)
        if pending is None:
            return None, None
        cached: CachedGraph | None = None
        failure: _Failure | None = None
        try:
            captured = CachedGraph.capture(partial(self._new_graph, entry.key), step)
        except Exception as error:
            if pending.context.lost is not None or _is_fatal(error):
                raise
            where = error.where if isinstance(error, CaptureError) else None
            failure = _Failure(_failure_text(error), type(error), where)
        else:
            captured.require_unwritten()
            cached = captured
        finally:
            reason = None if failure is None else failure.reason
            evicted = self._entries.end_capture(entry, pending, cached, reason)
            if cached is not None:
                self._emit("captured", entry)
            if reason is not None:
                self._emit("quarantined", entry, reason)
            self._emit_evicted(evicted)
        return cached, failure

    def _new_graph(self, key: Hashable) -> Graph:
        return self._capture(name=key if isinstance(key, str) else stable_repr(key))

    def _warn(self, entry: EntryKey, failure: _Failure) -> None:
        """Warn at the caller's line that a step runs without a graph, once for each kind of failure."""
        with self._entries.lock:
            warned = failure.kind in self._warned
            self._warned.add(failure.kind)
        if not warned:
            warn_caller(
                CaptureWarning(
                    f"{stable_repr(entry.key)} cannot be captured and runs without a graph: "
                    f"{failure.reason}\nlater calls try again; {self.title}.report() lists what failed"
                )
            )

    def _emit_evicted(self, entries: Iterable[EntryKey]) -> None:
        for entry in entries:
            self._emit("evicted", entry)

    def _emit(self, what: str, entry: EntryKey, reason: str = "") -> None:
        context = self._entries.context
        key = self._key_text(entry.key)
        # Graphs of an owner have no name, because a warmer cannot know the owner.
        name = self.name if entry.owner is None else None
        context.events.emit(
            "graph", what=what, device=context.device.name, name=name, key=key, reason=reason
        )


class _Failure(NamedTuple):
    """Why a step could not be captured."""

    reason: str
    error: type[Exception]
    where: str | None  # the line of an operation that cannot be captured

    @property
    def kind(self) -> tuple[object, ...]:
        """What distinguishes one kind of failure from another."""
        return (self.error, self.where)


def _name(given: Any) -> str | None:
    if given is not None and (not isinstance(given, str) or not given.strip()):
        raise InputError(f"{given!r} cannot be a name of graphs", hint='name="decode"')
    name: str | None = given
    return name


def _with_key(body: Callable[[Any], R], key: Any, arrays: Sequence[Any]) -> R:
    del arrays
    return body(key)


def _largest_first(keys: Iterable[Any]) -> list[Any]:
    if not isinstance(keys, Iterable):
        raise InputError(f"{keys!r} is not a collection of keys", hint=f"use [{keys!r}]")
    unique = dict.fromkeys(map(key_of, keys))
    try:
        return sorted(unique, reverse=True)
    except TypeError as bad:
        raise InputError(f"keys to warm must have an order: {bad}") from None


def _is_fatal(error: BaseException | None) -> bool:
    """Return True if the error, or a cause of it, is one that a device does not survive."""
    while error is not None:
        if isinstance(error, ContextLostError) or (isinstance(error, DriverError) and error.sticky):
            return True
        error = error.__cause__
    return False


def _failure_text(error: Exception) -> str:
    hint = getattr(error, "hint", None)
    text = f"{type(error).__name__}: {error}" + (f" (hint: {hint})" if hint else "")
    others = (note for note in getattr(error, "__notes__", ()) if note != f"hint: {hint}")
    return "\n".join((text, *others))
