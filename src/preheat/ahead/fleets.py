"""Fleets: engines that run jobs on many machines, each as an executor of `concurrent.futures`.

dask://HOST:PORT    the scheduler of a Dask cluster
dask://local        a Dask cluster on this machine, for as long as the bake runs
ray://HOST:PORT     the client server of a Ray cluster, which listens on port 10001 by default
ray://auto          the Ray cluster that this machine belongs to
ray://local         a Ray instance on this machine, for as long as the bake runs
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any, ParamSpec, Protocol, TypeVar, runtime_checkable

from preheat.errors import InputError, ToolchainError
from preheat.model.config import set_default_variable
from preheat.model.events import Events
from preheat.process.locks import no_fork

__all__ = ["DaskExecutor", "Fleet", "FleetWatch", "RayExecutor", "fleet"]

P = ParamSpec("P")
R = TypeVar("R")

_HINT = "the addresses are dask://HOST:PORT, dask://local, ray://HOST:PORT, ray://auto and ray://local"
_CONNECT = 30  # seconds to wait for an answer of the scheduler
_INTERVAL = 60.0  # seconds between two questions: workers may take that long to start


def fleet(address: str) -> Callable[[], Executor]:
    """Return a function that connects to the engine at `address` and returns its executor.

    Raises `InputError` for an address of no known form. The function raises `InputError` where the
    package of the engine is not installed, and `ToolchainError` where the engine does not answer.
    """
    engine, _, place = address.partition("://")
    words = {"dask": {"local"}, "ray": {"local", "auto"}}.get(engine)
    if words is None or not (place in words or _is_host_and_port(place)):
        raise InputError(f"{address!r} is not the address of a fleet", hint=_HINT)
    if engine == "dask":
        return partial(DaskExecutor, place)
    return partial(RayExecutor, place)


def _is_host_and_port(place: str) -> bool:
    host, _, port = place.rpartition(":")
    return bool(host) and port.isdecimal() and "/" not in place


# Engines


class DaskExecutor(Executor):
    """Runs jobs on the workers of the Dask cluster at `place`, or of a new one for `local`.

    When a worker dies, Dask runs its job again on another worker, up to a limit.
    """

    def __init__(self, place: str) -> None:
        distributed = _import_distributed()
        self._cluster: Any = None
        if place == "local":
            self._cluster = _start_local_cluster(distributed)
        address = f"tcp://{place}" if self._cluster is None else self._cluster.scheduler_address
        try:
            self._client = distributed.Client(address, timeout=_CONNECT, set_as_default=False)
        except (OSError, ValueError) as fault:
            if self._cluster is not None:
                self._cluster.close()
            hint = "the address is that of the scheduler, such as dask://scheduler:8786"
            raise ToolchainError(f"cannot reach dask://{place}: {fault}", hint=hint) from None
        # Without `pure=False`, Dask would run equal jobs once, even another bake's.
        self._executor = self._client.get_executor(pure=False)

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Hand a call to the scheduler."""
        future: Future[R] = self._executor.submit(fn, *args, **kwargs)
        return future

    def slots(self) -> int:
        """Return how many jobs the workers can run at the same time. Raises `TimeoutError`."""
        workers = self._client.sync(self._client.scheduler.ncores, callback_timeout=_CONNECT)
        return sum(workers.values())

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Leave the cluster.

        With `wait` and without `cancel_futures`, it waits for all calls. Otherwise it cancels them.
        """
        self._executor.shutdown(wait=wait and not cancel_futures)
        self._client.close()
        if self._cluster is not None:
            self._cluster.close()


def _start_local_cluster(distributed: Any) -> Any:
    """Return a cluster with one worker for each processor, whose death loses one job."""
    cluster = distributed.LocalCluster(
        threads_per_worker=1,
        host="127.0.0.1",
        dashboard_address=None,
        silence_logs=logging.CRITICAL,  # Deaths of workers are handled and reported by the bake.
    )
    # A worker that dies while it starts is not started again, unless the cluster has a minimum.
    cluster.adapt(minimum=len(cluster.workers), maximum=len(cluster.workers))
    return cluster


def _import_distributed() -> Any:
    try:
        with no_fork:
            import distributed
    except ImportError:
        hint = "pip install 'preheat[dask]'"
        raise InputError(
            "dask:// needs the package distributed, which is not installed", hint=hint
        ) from None
    return distributed


class RayExecutor(Executor):
    """Runs jobs as tasks of the Ray cluster at `place`; see the addresses above.

    A task uses one CPU. A process that is already connected to Ray uses that connection, whatever
    `place` is, and the connection is left open.
    """

    def __init__(self, place: str) -> None:
        self._ray = _import_ray()
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


def _import_ray() -> Any:
    try:
        with no_fork:
            import ray
    except ImportError:
        hint = "pip install 'preheat[ray]'"
        raise InputError("ray:// needs the package ray, which is not installed", hint=hint) from None
    return ray


# Fleets without workers


@runtime_checkable
class Fleet(Protocol):
    """An executor that knows its workers."""

    def slots(self) -> int:
        """Return how many jobs the workers can run at the same time. Raises `OSError`."""


class FleetWatch:
    """Called periodically during a bake; emits one `fault` event when the fleet has no workers.

    The first question comes after a minute. Executors that are not a `Fleet` are skipped.
    """

    def __init__(
        self, name: str, events: Events, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._name = name
        self._events = events
        self._clock = clock
        self._due = clock() + _INTERVAL
        self._reported = False

    def __call__(self, executor: Executor) -> None:
        """Ask the executor, if that is due."""
        if self._reported or not isinstance(executor, Fleet) or self._clock() < self._due:
            return
        self._due = self._clock() + _INTERVAL
        try:
            slots = executor.slots()
        except OSError:  # The engine reports a lost connection by the jobs.
            return
        if not slots:
            self._reported = True
            why = ToolchainError("the cluster has no workers; the bake continues when one starts")
            self._events.fault(self._name, "start a job", why)
