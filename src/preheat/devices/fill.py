"""Fills with patterns of eight bytes, which the driver does not have.

The driver fills with one, two or four bytes. Two strided fills make eight, but have a five-hundredth of
the bandwidth. Large fills therefore use a kernel, which is compiled when it is first needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from preheat.devices import base
from preheat.devices.arguments import new_param_buffer
from preheat.devices.context import Context
from preheat.devices.kernel import Kernel
from preheat.errors import PreheatError

__all__ = ["FILL", "KernelFill"]

FILL = """\
extern "C" __global__ void preheat_fill8(
        unsigned long long* x, unsigned long long value, unsigned long long count) {
    unsigned long long step = (unsigned long long)gridDim.x * blockDim.x;
    unsigned long long first = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
    for (unsigned long long i = first; i < count; i += step) x[i] = value;
}
"""
_THREADS = 256
_BLOCKS = 32  # for each processor
_SMALLEST = 1 << 17  # elements; smaller fills do not justify a compile


class KernelFill:
    """Fills memory with a pattern of eight bytes by a kernel.

    `load` returns the kernel, or None when nothing may be compiled. The driver's fills are used then.
    """

    def __init__(
        self, context: Context, load: Callable[[], Kernel | None], *, smallest: int = _SMALLEST
    ) -> None:
        self._context = context
        self._load = load
        self._smallest = smallest
        self._kernel: Kernel | None = None
        self._failed = False

    def __call__(self, address: int, pattern: bytes, count: int, stream: base.Stream) -> bool:
        """Fill memory in `stream` and return True, or return False to let the driver do it."""
        plain = len(pattern) != 8 or pattern[:4] == pattern[4:] or count < self._smallest
        kernel = None if plain else self._load_once()
        if kernel is None:
            return False
        blocks = self._context.device.limits.processors * _BLOCKS
        launch = kernel.prepare(min(-(-count // _THREADS), blocks), _THREADS)
        buffer = new_param_buffer(launch.signature)
        buffer.pack(address, int.from_bytes(pattern, "little"), count)
        status: Any = launch.prepare(stream)(buffer.pointers, 0)
        launch.raise_for_status(status)
        return True

    def _capturing(self) -> bool:
        return (
            bool(self._context.captures_by_thread)
            or self._context.order.capturing_library() is not None
        )

    def _load_once(self) -> Kernel | None:
        # A capture permits no load, and an attempt would count as an error of the capture.
        if self._kernel is None and not self._failed and not self._capturing():
            try:
                self._kernel = self._load()
            except PreheatError:  # There is no compiler.
                self._kernel = None
            self._failed = self._kernel is None
        return self._kernel
