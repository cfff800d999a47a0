"""A launch in Python code, until it is replaced by a fast function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from preheat.errors import PreheatError
from preheat.runtime.fast_launch import fast_launch
from preheat.runtime.launch import Launch
from preheat.tracebacks import shorten_traceback

__all__ = ["Launcher"]


class Launcher:
    """A launch whose second call generates the fast function that replaces it in a kernel.

    `kernel` returns the kernel, or None if it no longer exists. `key` finds this object there.
    """

    __slots__ = ("_fast", "_kernel", "_key", "_launch", "_seen")

    def __init__(
        self, launch: Launch, kernel: Callable[[], Any] = lambda: None, key: object = None
    ) -> None:
        self._launch = launch
        self._kernel = kernel
        self._key = key
        self._seen = False
        self._fast: Callable[..., None] | None = None

    def __repr__(self) -> str:
        return f"<launch of {self._launch.signature.kernel}>"

    def __call__(self, *args: Any, **named: Any) -> None:
        try:
            if self._fast is not None:  # The caller kept this object.
                self._fast(*args, **named)
                return
            self._launch.run(*args, **named)
            if self._seen:
                fast = fast_launch(self._launch, args)
                if (kernel := self._kernel()) is not None:
                    kernel.replace(self._key, fast)
                self._fast = fast  # Set last: after an interrupt, the next call tries again.
            self._seen = True
        except PreheatError as error:
            shorten_traceback(error)
            raise
