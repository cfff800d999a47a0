"""Launches with fixed arguments."""

from __future__ import annotations

from typing import Any

from preheat.device.arguments import new_param_buffer
from preheat.device.launch import UNORDERED, Launch, in_order
from preheat.errors import PreheatError
from preheat.model.tracebacks import shorten_traceback

__all__ = ["Bound"]


class Bound:
    """A launch with fixed arguments, made by `Kernel.bind`. It can be called any number of times.

    It keeps its arguments alive, and raises `StaleBufferError` once memory among them was closed.

    Examples:
        >>> x, y = gpu.array([1, 2], "float32"), gpu.zeros(2)
        >>> bound = gpu.kernel(SAXPY, "saxpy").bind(2.0, x, y, 2, grid=1, block=32)
        >>> bound()
        >>> bound()
        >>> y.numpy()
        array([4., 8.], dtype=float32)
    """

    def __init__(self, launch: Launch, args: tuple[Any, ...], keep: object) -> None:
        launch.context.require_alive(Launch.RECREATE)
        self._stream = launch.choose_stream(args)
        arguments = launch.convert(args, UNORDERED)  # Checked now; each launch is ordered separately.
        self._launch = launch
        self._args = args
        self._context = launch.context
        self._keep = keep  # The stream may belong to another library.
        self._uses = arguments.uses
        self._buffer = new_param_buffer(launch.signature)
        self._buffer.pack(*arguments.values)
        self._pointers = self._buffer.pointers
        self._submit = launch.prepare(self._stream)
        foreign = bool(arguments.foreign) or not launch.context.order.owns(self._stream)
        self._always_checked = launch.blocking or foreign
        self._checked = False  # True while the next launch needs no check

    def __call__(self) -> None:
        """Launch."""
        try:
            if not self._checked or not self._context.unrestricted:
                self._launch_checked()
                return
            status = self._submit(self._pointers, 0)
            if status[0]:
                self._launch.raise_for_status(status)
        except PreheatError as error:
            shorten_traceback(error)
            raise

    def _launch_checked(self) -> None:
        """Launch with all checks and in order, and try to make the next launch a fast one."""
        if self._always_checked or not self._context.unrestricted:
            self._launch.run(*self._args)
            return
        arguments = self._launch.convert(self._args, UNORDERED)  # Raises when memory was freed.
        with in_order(self._context, arguments, self._stream):
            status = self._submit(self._pointers, 0)
        if status[0]:
            self._launch.raise_for_status(status)
        self._context.order.add_dependent(self, self._stream, self._uses, self._skip_checks)

    def _skip_checks(self) -> None:
        self._checked = True

    def invalidate(self) -> None:
        """Check the next launch: another stream has used its memory, or the memory was closed."""
        self._checked = False

    def __repr__(self) -> str:
        geometry = self._launch.geometry
        return f"<Bound {self._launch.signature.kernel} grid={geometry.grid} block={geometry.block}>"
