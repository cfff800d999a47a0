"""A graph on the device: the captured definition, and the executable made from it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from preheat.devices import base
from preheat.devices.active_capture import INSTANTIATE
from preheat.devices.base import ON_HOST
from preheat.devices.context import Context
from preheat.devices.stream import Event, record_event
from preheat.errors import GraphError

__all__ = ["GraphExecutable"]


class GraphExecutable:
    """A graph at the device: a `CUgraph` after the capture, a `CUgraphExec` once instantiated.

    `keep` is memory of other libraries. It is kept alive until `last_replay`, the stream or event of
    the last replay, has completed. `title` names the graph in errors.
    """

    def __init__(
        self,
        context: Context,
        definition: base.Graph,
        *,
        title: str,
        free_on_launch: bool,
        keep: tuple[object, ...],
    ) -> None:
        self._context = context
        self._definition: base.Graph | None = definition
        self._executable: base.Executable | None = None
        self._title = title
        self._free_on_launch = free_on_launch
        self._keep = keep
        self.uploaded = False
        self.closed = False
        self.last_replay: base.Stream | Event | None = None
        context.resources.add(self)

    @property
    def instantiated(self) -> bool:
        """Return True between the instantiation and `close`."""
        return self._executable is not None

    def require_open(self) -> None:
        """Raise after `close`."""
        if self.closed:
            raise GraphError(f"{self._title} cannot be replayed: it was closed")

    def instantiate(self) -> base.Executable:
        """Make the definition executable, once, and return the executable."""
        if self._executable is None:
            self.require_open()
            self._context.refuse_in_capture(INSTANTIATE)
            definition = self._definition
            assert definition is not None
            self._executable = definition.instantiate(free_on_launch=self._free_on_launch)
            self._definition = None
            definition.close()
        return self._executable

    def upload(self, stream: base.Stream) -> None:
        """Copy the executable to the device, in `stream`."""
        self.instantiate().upload(stream)
        self.uploaded = True

    def close(self) -> None:
        """Destroy the graph at the next safe point. Closing it twice is allowed."""
        if not self.closed and self._context.lost is None:
            self._context.deferred_cleanups.append(self._destroyer())
        self.closed = True
        self._definition = None
        self._executable = None
        self._keep = ()

    def release(self) -> None:
        """Destroy the graph at once, because the device is closed."""
        _destroy(self._context, self._executable, self._definition, last_replay=None, keep=())

    def _destroyer(self) -> Callable[[], None]:
        """Return a function that destroys the graph and has no reference to this object."""
        context = self._context
        parts = (self._executable, self._definition)
        last_replay = self.last_replay
        keep = self._keep
        return lambda: _destroy(context, *parts, last_replay=last_replay, keep=keep)

    def __del__(self) -> None:
        if self._executable is not None or self._definition is not None:
            self._context.deferred_cleanups.append(self._destroyer())


def _destroy(
    context: Context,
    *parts: base.Executable | base.Graph | None,
    last_replay: base.Stream | Event | None,
    keep: tuple[object, ...],
) -> None:
    """Destroy the parts of a graph, and hold `keep` until the last replay has completed."""
    if last_replay is not None and any(keep) and context.device.dlpack[0] != ON_HOST:
        if not isinstance(last_replay, Event) and context.order.is_capturing(last_replay):
            # An event would become part of the capture of another library.
            again = partial(_destroy, context, *parts, last_replay=last_replay, keep=keep)
            context.deferred_cleanups.append(again)
            return
        event = last_replay if isinstance(last_replay, Event) else record_event(context, last_replay)
        context.hold_until(event, keep)
    for part in parts:
        if part is not None:
            part.close()
