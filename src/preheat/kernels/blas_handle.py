"""cuBLAS in one session of a GPU: calls of its functions, and handles with a workspace each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from preheat.device import base
from preheat.device.array import Array
from preheat.device.base import ON_GPU
from preheat.device.context import Context
from preheat.errors import DeviceError

__all__ = ["Handle", "Library", "RawHandle"]


class Library(NamedTuple):
    """cuBLAS in one session of a GPU."""

    context: Context
    cublas: Any

    def call(self, name: str, *args: Any) -> Any:
        """Call a function of cuBLAS on this GPU; its errors become `DeviceError`."""
        function = _beside_captures(self.context.device, getattr(self.cublas, name))
        try:
            return function(*args)
        except self.cublas.cuBLASError as error:
            raise DeviceError(f"{name} of cuBLAS failed: {error}") from None


def _beside_captures(device: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` so that it leaves captures valid. The emulator has no context to change."""
    return device.beside_captures(function) if device.dlpack[0] == ON_GPU else function


class RawHandle:
    """A cuBLAS handle by its number; it is destroyed when the object is dropped."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self.number: int = library.call("create")
        library.context.resources.add(self)

    def release(self) -> None:
        """Destroy the handle now, because the device is closed."""
        self._library.call("destroy", self.number)

    def __del__(self) -> None:
        context = self._library.context
        call = self._library.call
        if hasattr(self, "number") and context.lost is None:
            number = self.number
            context.deferred_cleanups.append(lambda: call("destroy", number))


class Handle:
    """A cuBLAS handle with its own workspace.

    When it is dropped, the raw handle goes to `unused` for the next one. The workspace is freed as any
    memory is: once the work that uses it has completed, and the graphs that use it are gone.
    """

    def __init__(
        self, library: Library, raw: RawHandle, workspace: Array, unused: list[RawHandle]
    ) -> None:
        self._library = library
        self._raw = raw
        self.workspace = workspace
        self._unused = unused
        self.stream: base.Stream | None = None  # where it works

    @property
    def number(self) -> int:
        """The number by which cuBLAS knows the handle."""
        return self._raw.number

    def bind(self, stream: base.Stream, mode: int) -> Handle:
        """Let the handle work in `stream`, in a math mode."""
        call = self._library.call
        call("set_stream", self.number, stream.handle)
        # After the stream, because setting a stream discards the workspace.
        call("set_workspace", self.number, self.workspace.address, self.workspace.nbytes)
        call("set_math_mode", self.number, mode)
        self.stream = stream
        return self

    def __del__(self) -> None:
        self._unused.append(self._raw)
