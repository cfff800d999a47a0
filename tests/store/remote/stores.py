"""A store of each kind for a test: in memory, in a directory, on Redis, S3 and WebDAV."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from preheat.store.remote.engine import Engine, open_engine
from preheat.store.remote.url import parse_remote
from tests.store.remote.memory_engine import MemoryEngine
from tests.store.remote.servers import Server

__all__ = ["KINDS", "SERVERS", "Store", "store_of"]

SERVERS = ("redis", "s3", "webdav")
KINDS = ("memory", "file", *SERVERS)
_numbers = itertools.count()


@dataclass
class Store:
    """An empty store of a test, and how to open it."""

    kind: str
    server: Server | None
    _url: Callable[[int | None], str]
    _opened: list[Engine] = field(default_factory=list)

    def url(self, *, port: int | None = None) -> str:
        """Return the URL, where wanted with the port of a proxy."""
        return self._url(port)

    def open(self, *, timeout: float = 60.0, port: int | None = None) -> Engine:
        """Open an engine. By default it has much time, because the machine may be busy."""
        engine: Engine
        if self.kind == "memory":
            engine = self._opened[0] if self._opened else MemoryEngine()
        else:
            engine = open_engine(parse_remote(self.url(port=port)), timeout=timeout)
        self._opened.append(engine)
        return engine

    def close(self) -> None:
        """Close every engine that was opened."""
        for engine in self._opened:
            engine.close()


def store_of(kind: str, server: Server | None, folder: Path) -> Store:
    """Return an empty store. `folder` is for one that is a directory."""
    name = f"store-{os.getpid()}-{next(_numbers)}"
    if server is None:
        return Store(kind, None, lambda _: f"file://{folder / name}")
    return Store(kind, server, lambda port: server.url(name, port=port))
