"""A Ray cluster as an executor."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, ParamSpec, TypeVar

from preheat.errors import InputError, ToolchainError
from preheat.model.config import set_default_variable

__all__ = ["RayExecutor"]

P = ParamSpec("P")
R = TypeVar("R")


class RayExecutor(Executor):
    """Runs jobs as tasks of the Ray cluster at `place`; see `preheat.ahead.fleets`.

    A task uses one CPU. A process that is already connected to Ray uses that connection, whatever
    `place` is, and the connection is left open.
    """

    def __init__(self, place: str) -> None:
        self._ray = _ray()
        self._connected = not self._ray.is_initialized()
        if self._connected:
            _connect(self._ray, place)
        # A bake repeats lost jobs itself, and counts how often a job was lost.
        self._task = self._ray.remote(max_retries=0)(_call)

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Start a task."""
        reference = self._task.remote(fn, args, kwargs)
        ours: Future[R] = Future()

        def cancel(future: Future[R]) -> None:
            if future.cancelled():
                self._ray.cancel(reference)

        def copy(theirs: Future[R]) -> None:
            if theirs.cancelled():
                ours.cancel()
            if not ours.set_running_or_notify_cancel():
                return
            if (error := theirs.exception()) is not None:
                ours.set_exception(error)
            else:
                ours.set_result(theirs.result())

        ours.add_done_callback(cancel)
        reference.future().add_done_callback(copy)
        return ours

    def slots(self) -> int:
        """Return how many jobs the workers can run at the same time."""
        return int(self._ray.cluster_resources().get("CPU", 0))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Leave the cluster, which ends the tasks that still run."""
        del wait, cancel_futures
        if self._connected:
            self._ray.shutdown()


def _call(fn: Callable[..., R], args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
    return fn(*args, **kwargs)


def _connect(ray: Any, place: str) -> None:
    settings: dict[str, Any] = {"log_to_driver": False}
    if place == "local":
        set_default_variable("RAY_USAGE_STATS_ENABLED", "0")
        settings |= {"address": "local", "include_dashboard": False}
    else:
        settings["address"] = place if place == "auto" else f"ray://{place}"
    try:
        ray.init(**settings)
    except (OSError, RuntimeError, ValueError) as fault:
        hint = (
            "ray://HOST:10001 is the client server of the head, which may require RAY_AUTH_MODE=token; "
        )
        hint += "ray://auto needs a node of Ray on this machine"
        raise ToolchainError(f"cannot reach ray://{place}: {fault}", hint=hint) from None


def _ray() -> Any:
    try:
        import ray
    except ImportError:
        hint = "pip install 'preheat[ray]'"
        raise InputError("ray:// needs the package ray, which is not installed", hint=hint) from None
    return ray
