"""A device wrapper that counts calls and raises the errors that a test asks for.

    device = FaultyDevice(EmulatorDevice())
    gpu = Gpu(device, builder)
    device.fail("allocate", None, OutOfMemoryError(…))  # the second allocation from now fails
    device.calls["module.unload"]                       # the number of unloaded modules

A method of the device is named as it is. A method of an object that the device creates is named by the
kind of object and the method: `module.function`, `function.prepare`, `stream.record`,
`graph.instantiate`. Calling a prepared launch is named `launch`, a prepared replay `replay`, and a
prepared write of scalars `set`.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from preheat.errors import DeviceError, DriverError
from preheat.gpu import Gpu

__all__ = ["FaultyDevice", "FaultyGpu"]

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
    """An object of a device whose method calls all go through `watch`, under their full names."""

    def __init__(self, part: Any, noun: str, watch: Callable[..., Any]) -> None:
        self._part, self._noun, self._watch = part, noun, watch

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._part, name)
        verb = f"{self._noun}.{name}" if self._noun else name
        return partial(self._watch, verb, found) if callable(found) else found


class FaultyDevice(_Watched):
    """A device that counts its calls in `calls` and raises the errors given to `fail`."""

    def __init__(self, device: Any) -> None:
        super().__init__(device, "", self._call)
        self.calls: Counter[str] = Counter()
        self._faults: defaultdict[str, deque[DeviceError | None]] = defaultdict(deque)

    @property
    def on_loss(self) -> Callable[[DeviceError], None]:
        """Return the callback of the wrapped device for an error that ends its context."""
        callback: Callable[[DeviceError], None] = self._part.on_loss
        return callback

    @on_loss.setter
    def on_loss(self, callback: Callable[[DeviceError], None]) -> None:
        self._part.on_loss = callback

    def fail(self, verb: str, *errors: DeviceError | None) -> None:
        """Let each of the next calls of `verb` raise one of `errors`; None lets a call succeed."""
        self._faults[verb].extend(errors)

    def _call(self, verb: str, do: Callable[..., Any], *args: Any, **more: Any) -> Any:
        self.calls[verb] += 1
        waiting = self._faults[verb]
        error = waiting.popleft() if waiting else None
        if isinstance(error, DriverError) and error.sticky:
            self.on_loss(error)
        try:
            if error is not None:
                raise error
        finally:  # The traceback has this frame, which would keep everything around it in a cycle.
            del error
        made = do(*args, **more)
        if verb in _SUBMITS:
            return partial(self._call, _SUBMITS[verb], made)
        return _Watched(made, _MAKES[verb], self._call) if verb in _MAKES else made


class FaultyGpu(NamedTuple):
    """A device whose calls are counted and can be made to fail."""

    gpu: Gpu
    device: FaultyDevice

    @contextmanager
    def count_calls(self, *verbs: str) -> Iterator[dict[str, int]]:
        """Yield a dict that gets the number of calls of each verb, by default of all."""
        before = self.device.calls.copy()
        counts = dict[str, int]()
        yield counts
        counts |= {
            verb: n for verb, n in (self.device.calls - before).items() if verb in verbs or not verbs
        }
