"""Fleets: engines that run jobs on many machines, each as an executor of `concurrent.futures`.

dask://HOST:PORT    the scheduler of a Dask cluster
dask://local        a Dask cluster on this machine, for as long as the bake runs
ray://HOST:PORT     the client server of a Ray cluster, which listens on port 10001 by default
ray://auto          the Ray cluster that this machine belongs to
ray://local         a Ray instance on this machine, for as long as the bake runs
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from preheat.errors import InputError

if TYPE_CHECKING:
    from concurrent.futures import Executor

__all__ = ["fleet"]

_HINT = "the addresses are dask://HOST:PORT, dask://local, ray://HOST:PORT, ray://auto and ray://local"


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
        from preheat.ahead.fleets.dask_executor import DaskExecutor

        return partial(DaskExecutor, place)
    from preheat.ahead.fleets.ray_executor import RayExecutor

    return partial(RayExecutor, place)


def _is_host_and_port(place: str) -> bool:
    host, _, port = place.rpartition(":")
    return bool(host) and port.isdecimal() and "/" not in place
