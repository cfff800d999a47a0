"""Measure the engines of shared stores: single calls, and 10,000 objects, on real servers on loopback.

The servers are those of the tests: Redis, SeaweedFS (S3) and nginx (WebDAV), where they are installed.
The engine of a directory is measured beside them. A second table has 5 ms added to each request.
Nothing is compiled or verified here.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from common import median_us, options, report, us
from preheat.store.remote.engine import Engine

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.store.remote.proxy import Proxy
from tests.store.remote.servers import redis_server, s3_server, webdav_server
from tests.store.remote.stores import Store, store_of

ENTRY = os.urandom(20_000)
MANY = 10_000
ASKED = 2_000
DELAY = 0.005


@contextmanager
def stores(root: Path) -> Iterator[list[Store]]:
    """Yield an empty store of each kind that can run here."""
    with ExitStack() as running:
        found = [store_of("file", None, root)]
        for kind, start in (("redis", redis_server), ("s3", s3_server), ("webdav", webdav_server)):
            folder = root / kind
            folder.mkdir()
            try:
                server = running.enter_context(start(folder))
            except pytest.skip.Exception as missing:
                print(f"{kind} is left out: {missing}")
                continue
            found.append(store_of(kind, server, root))
        yield found


def single_calls(engine: Engine, number: int) -> list[str]:
    """Return the times of one call each."""
    engine.put("v1/aa/entry", ENTRY)

    def lease() -> None:
        engine.create("v1/leases/one", b"me", seconds=60)
        engine.swap("v1/leases/one", b"me", b"me again", seconds=60)
        engine.discard("v1/leases/one", b"me again")

    acts: list[Callable[[], object]] = [
        lambda: engine.put("v1/aa/entry", ENTRY),
        lambda: engine.get("v1/aa/entry"),
        lambda: engine.get("v1/aa/absent"),
        lambda: engine.exists(["v1/aa/entry"]),
        lease,
    ]
    return [us(median_us(act, repeat=5, number=number)) for act in acts]


def many_objects(engine: Engine) -> list[str]:
    """Return the times of writing 10,000 objects, listing them, asking for 2,000, and reading all."""
    names = [f"v1/{digest[:2]}/{digest}" for digest in (os.urandom(32).hex() for _ in range(MANY))]

    def write(name: str) -> None:
        engine.put(name, name.encode() * 20)

    def check(name: str) -> None:
        assert engine.get(name) == name.encode() * 20

    def each(work: Callable[[str], None]) -> None:
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(work, names))

    def listed() -> None:
        assert set(engine.names("v1/")) >= set(names)

    def asked() -> None:
        half = [name if number % 2 else f"{name}0" for number, name in enumerate(names[:ASKED])]
        assert len(engine.exists(half)) == ASKED // 2

    return [seconds(act) for act in (lambda: each(write), listed, asked, lambda: each(check))]


def seconds(act: Callable[[], None]) -> str:
    began = time.perf_counter()
    act()
    return f"{time.perf_counter() - began:.2f} s"


def main() -> None:
    """Print and store the three tables."""
    parser = options(__doc__)
    parser.add_argument("--quick", action="store_true", help="leave out the 10,000 objects")
    arguments = parser.parse_args()
    head = ("engine", "put 20 kB", "get 20 kB", "miss", "exists", "lease: create, swap, discard")
    with tempfile.TemporaryDirectory() as folder, stores(Path(folder)) as found:
        near = [(store.kind, *single_calls(store.open(), 50)) for store in found]
        report("bench_remote", "A call, on loopback", head, near, into=arguments.json)
        far = []
        for store in found:
            if store.server is not None:
                with Proxy(store.server.port, delay=DELAY) as proxy:
                    far.append((store.kind, *single_calls(store.open(port=proxy.port), 5)))
        report("bench_remote", "A call, with 5 ms added", head, far, into=arguments.json)
        if not arguments.quick:
            rows = [(store.kind, *many_objects(store.open())) for store in found]
            columns = ("engine", f"put {MANY:,}", "list them", f"ask for {ASKED:,}", "get all")
            report("bench_remote", "10,000 objects, by 16 threads", columns, rows, into=arguments.json)
        for store in found:
            store.close()


if __name__ == "__main__":
    main()
