"""A Dask cluster as an executor."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, ParamSpec, TypeVar

from preheat.errors import InputError, ToolchainError

__all__ = ["DaskExecutor"]

P = ParamSpec("P")
R = TypeVar("R")

_CONNECT = 30  # seconds to wait for an answer of the scheduler


class DaskExecutor(Executor):
    """Runs jobs on the workers of the Dask cluster at `place`, or of a new one for `local`.

    When a worker dies, Dask runs its job again on another worker, up to a limit.
    """

    def __init__(self, place: str) -> None:
        distributed = _distributed()
        self._cluster: Any = None
        if place == "local":
            self._cluster = _local_cluster(distributed)
        address = f"tcp://{place}" if self._cluster is None else self._cluster.scheduler_address
        try:
            self._client = distributed.Client(address, timeout=_CONNECT, set_as_default=False)
        except (OSError, ValueError) as fault:
            if self._cluster is not None:
                self._cluster.close()
            hint = "the address is that of the scheduler, such as dask://scheduler:8786"
            raise ToolchainError(f"cannot reach dask://{place}: {fault}", hint=hint) from None
        # Without `pure=False`, Dask would run equal jobs once, even those of another bake.
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


def _local_cluster(distributed: Any) -> Any:
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


def _distributed() -> Any:
    try:
        import distributed
    except ImportError:
        hint = "pip install 'preheat[dask]'"
        raise InputError(
            "dask:// needs the package distributed, which is not installed", hint=hint
        ) from None
    return distributed
