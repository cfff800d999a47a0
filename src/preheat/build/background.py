"""Work that a builder does in its own threads, while the caller continues."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from preheat.process.locks import Lock, no_fork

if TYPE_CHECKING:  # Imported when something is first compiled in the background.
    from preheat.build.key_locks import Attempt
    from preheat.build.parallel import Runner, Task

__all__ = ["Background"]

T = TypeVar("T")


class Background:
    """Starts threads when there is work for them."""

    def __init__(self) -> None:
        self._runner: Runner | None = None
        self._lock = Lock()

    def submit(self, run: Callable[[Attempt], T]) -> Task[T]:
        """Call `run` in a thread, and return the task at once."""
        with no_fork:
            from preheat.build.parallel import Runner

        with self._lock:
            if self._runner is None:
                self._runner = Runner()
            return self._runner.submit(run)

    def cancel(self) -> None:
        """Cancel the tasks that have not ended."""
        with self._lock:
            runner, self._runner = self._runner, None
        if runner is not None:
            runner.cancel()

    def after_fork(self) -> None:
        """Forget the threads in a forked child, which does not have them."""
        self._runner = None
