"""Faults at the seam, on purpose: a device that fails when a test says so, and counts its calls.

    flaky = Faulty(EmulatorDevice())
    gpu = Gpu(flaky, builder)
    flaky.fail("allocate", None, OutOfMemoryError(…))   # the next allocation works, the one after fails
    flaky.calls["module.unload"]                        # how often a module was unloaded so far

Verbs of the device go by their name, those of what it makes by noun and name: `module.function`,
`function.prepare`, `stream.record`, `graph.instantiate`. What is prepared goes by what it does: a
launch is `launch`, a graph's is `replay`, a write of scalars `set`.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable
from functools import partial
from typing import Any

from preheat.errors import DeviceError, DriverError

__all__ = ["Faulty"]

_MAKES = {
    "load": "module",
    "stream": "stream",
    "adopt": "stream",
    "module.function": "function",
    "stream.end_capture": "graph",
    "graph.instantiate": "executable",
}
_SUBMITS = {"function.prepare": "launch", "executable.prepare": "replay", "setter": "set"}


class _Watched:
    """A part of a device; what it can do is handed on to `watch` under its full name."""

    def __init__(self, part: Any, noun: str, watch: Callable[..., Any]) -> None:
        self._part, self._noun, self._watch = part, noun, watch

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._part, name)
        verb = f"{self._noun}.{name}" if self._noun else name
        return partial(self._watch, verb, found) if callable(found) else found


class Faulty(_Watched):
    """Any device, with every call counted in `calls` and failing once where `fail` said so."""

    def __init__(self, device: Any) -> None:
        super().__init__(device, "", self._call)
        self.calls: Counter[str] = Counter()
        self._faults: defaultdict[str, deque[DeviceError | None]] = defaultdict(deque)

    @property
    def on_loss(self) -> Callable[[DeviceError], None]:
        """The device's own: who is told of an error that it does not survive."""
        told: Callable[[DeviceError], None] = self._part.on_loss
        return told

    @on_loss.setter
    def on_loss(self, told: Callable[[DeviceError], None]) -> None:
        self._part.on_loss = told

    def fail(self, verb: str, *errors: DeviceError | None) -> None:
        """Let the next calls of `verb` raise these, one each; None lets a call through."""
        self._faults[verb].extend(errors)

    def _call(self, verb: str, do: Callable[..., Any], *args: Any, **more: Any) -> Any:
        self.calls[verb] += 1
        waiting = self._faults[verb]
        error = waiting.popleft() if waiting else None
        if isinstance(error, DriverError) and error.sticky:
            self.on_loss(error)
        if error is not None:
            raise error
        made = do(*args, **more)
        if verb in _SUBMITS:
            return partial(self._call, _SUBMITS[verb], made)
        return _Watched(made, _MAKES[verb], self._call) if verb in _MAKES else made
