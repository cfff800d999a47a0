"""Whether a server answers, how fast, and what it permits."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from preheat.store.remote.engine import Engine, RemoteError
from preheat.store.remote.engines import probe_conditional
from preheat.store.remote.names import PROBE

__all__ = ["Probe", "probe"]

_READS = 3


class Probe(NamedTuple):
    """What a server does. Each refusal is the reason of an error, and empty without one.

    `seconds` is the time of a request after the first one. `conditional` is whether the server keeps
    the conditions of writes. They are not tried if objects cannot be written and removed.
    """

    seconds: float
    write_refusal: str = ""
    delete_refusal: str = ""
    condition_refusal: str = ""
    conditional: bool = False


def probe(engine: Engine, *, write: bool) -> Probe:
    """Read an object that need not exist. With `write`, write and remove one, and try conditions.

    Raises `RemoteError` when the server cannot be read.
    """
    name = f"{PROBE}/read"
    engine.read(name)  # It also connects.
    seconds = min(_seconds_to_read(engine, name) for _ in range(_READS))
    if not write:
        return Probe(seconds)
    name = f"{PROBE}/write"
    if refusal := _refusal(lambda: engine.write(name, b"")):
        return Probe(seconds, write_refusal=refusal)
    if refusal := _refusal(lambda: engine.delete(name)):
        return Probe(seconds, delete_refusal=refusal)
    try:
        return Probe(seconds, conditional=probe_conditional(engine))
    except RemoteError as error:
        return Probe(seconds, condition_refusal=str(error))


def _refusal(call: Callable[[], None]) -> str:
    """Return the reason why a call fails, or an empty string if it succeeds."""
    try:
        call()
    except RemoteError as error:
        return str(error)
    return ""


def _seconds_to_read(engine: Engine, name: str) -> float:
    started = time.perf_counter()
    engine.read(name)
    return time.perf_counter() - started
