"""Fixtures of real servers, and of a server in memory with a clock.

One real server of each kind runs for a whole session, or for a whole worker of xdist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from preheat.store.remote.engine import Engine, open_engine
from preheat.store.remote.url import parse_remote
from tests.store.remote.memory_engine import MemoryEngine
from tests.store.remote.proxy import Proxy
from tests.store.remote.remote_stores import Clock
from tests.store.remote.servers import Server, redis_server, s3_server, webdav_server
from tests.store.remote.stores import KINDS, SERVERS, Store, store_of


@pytest.fixture
def engine() -> MemoryEngine:
    """Return a server in memory."""
    return MemoryEngine()


@pytest.fixture
def clock() -> Clock:
    """Return a clock that the test sets."""
    return Clock()


@pytest.fixture(scope="session")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Yield a Redis server that all tests of the session share."""
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Yield an S3 server that all tests of the session share."""
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(scope="session")
def webdav(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Yield a WebDAV server that all tests of the session share."""
    with webdav_server(tmp_path_factory.mktemp("webdav")) as server:
        yield server


@pytest.fixture
def open_proxy() -> Iterator[Callable[..., Proxy]]:
    """Put proxies in front of ports, and close them afterwards."""
    with ExitStack() as opened:
        yield lambda target, delay=0.0: opened.enter_context(Proxy(target, delay=delay))


@pytest.fixture
def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[str], Store]]:
    """Make empty stores of a kind, and close their engines afterwards."""
    with ExitStack() as opened:

        def open_one(kind: str) -> Store:
            server = request.getfixturevalue(kind) if kind in SERVERS else None
            store = store_of(kind, server, tmp_path)
            opened.callback(store.close)
            return store

        yield open_one


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, open_store: Callable[[str], Store]) -> Store:
    """Return an empty store of each kind."""
    return open_store(request.param)


@pytest.fixture(params=SERVERS)
def served(request: pytest.FixtureRequest, open_store: Callable[[str], Store]) -> Store:
    """Return an empty store on each kind of server."""
    return open_store(request.param)


@pytest.fixture
def open_url() -> Iterator[Callable[..., Engine]]:
    """Open engines for URLs, and close them afterwards."""
    with ExitStack() as opened:

        def open_one(url: str, timeout: float = 60.0) -> Engine:
            engine = open_engine(parse_remote(url), timeout=timeout)
            opened.callback(engine.close)
            return engine

        yield open_one
