"""Whether a server answers, how fast, and what it permits."""

from __future__ import annotations

import time
from typing import NamedTuple

from preheat.cache.remote.engine import Engine, RemoteError
from preheat.cache.remote.engines import probe_conditional
from preheat.cache.remote.names import PROBE

__all__ = ["Probe", "probe"]

_READS = 3


class Probe(NamedTuple):
    """What a server does. `refusal` is why it cannot be written; empty when it can or was not asked.

    `seconds` is the time of a request after the first one, and `conditional` whether the server keeps
    conditions of writes.
    """

    seconds: float
    refusal: str = ""
    conditional: bool = False


def probe(engine: Engine, *, write: bool) -> Probe:
    """Read an object that need not exist and, with `write`, write and remove one.

    Raises `RemoteError` when the server cannot be read.
    """
    name = f"{PROBE}/read"
    engine.read(name)  # It also connects.
    seconds = min(_seconds_to_read(engine, name) for _ in range(_READS))
    if not write:
        return Probe(seconds)
    try:
        engine.write(f"{PROBE}/write", b"")
        engine.delete(f"{PROBE}/write")
        return Probe(seconds, conditional=probe_conditional(engine))
    except RemoteError as error:
        return Probe(seconds, refusal=str(error))


def _seconds_to_read(engine: Engine, name: str) -> float:
    started = time.perf_counter()
    engine.read(name)
    return time.perf_counter() - started
