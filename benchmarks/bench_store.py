"""Measure the cache store beside cuda.core's file cache: hits with and without checks, and puts.

Like for like: both read one file an entry from the same file system, page cache warm. Ours verifies a
checksum over every byte on every read; theirs does not. Both flush a put to disk before the rename.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from common import median_us, program_cache, ratio, report, us
from preheat.model import codec
from preheat.model.events import Events
from preheat.store import DiskStore, MemoryStore

SIZES = (4_096, 20_000, 100_000, 200_000)
COUNTS = (100, 10_000, 100_000)
PUTS = 200


def entry(size: int) -> tuple[str, bytes]:
    digest = os.urandom(32).hex()
    return digest, codec.pack(digest, {"kind": "artifact"}, {"cubin": os.urandom(size)})


def bench_get(root: Path) -> None:
    ours = DiskStore(root / "ours", Events(), lock_dir=root / "locks")
    memory = MemoryStore(1 << 30)
    theirs = program_cache()(root / "theirs")
    rows = []
    for size in SIZES:
        digest, blob = entry(size)
        key = bytes.fromhex(digest)
        ours.put(digest, blob)
        memory.put(digest, blob)
        theirs[key] = blob
        mine = median_us(partial(ours.get, digest))
        plain = median_us(partial(theirs.__getitem__, key))
        hot = median_us(partial(memory.get, digest), number=20_000)
        rows.append((f"{size:,} bytes", us(mine), us(plain), ratio(plain, mine), us(hot)))
    head = ("entry", "preheat disk, verified", "cuda.core, unverified", "ratio", "preheat memory")
    report("bench_store", "A hit", head, rows)


def populate_ours(root: Path, count: int) -> None:
    """Fill the directory as puts would, without flushing: 100,000 flushes take minutes."""
    digest, blob = entry(2_000)
    made = set()
    for _ in range(count):
        digest = os.urandom(32).hex()
        shard = root / "v1" / digest[:2]
        if digest[:2] not in made:
            shard.mkdir(parents=True, exist_ok=True, mode=0o700)
            made.add(digest[:2])
        (shard / f"{digest}.heat").write_bytes(blob)


def populate_theirs(root: Path, count: int) -> None:
    blob = os.urandom(2_000)
    made = set()
    for _ in range(count):
        digest = os.urandom(32).hex()
        shard = root / "entries" / digest[:2]
        if digest[:2] not in made:
            shard.mkdir(parents=True, exist_ok=True)
            made.add(digest[:2])
        (shard / digest[2:]).write_bytes(blob)


def median_put(put: Callable[[str, bytes], None]) -> float:
    times = []
    for _ in range(PUTS):
        digest, blob = entry(2_000)
        started = time.perf_counter()
        put(digest, blob)
        times.append((time.perf_counter() - started) * 1e6)
    return statistics.median(times)


def put_theirs(cache: Any, digest: str, blob: bytes) -> None:
    cache[bytes.fromhex(digest)] = blob


def bench_put(root: Path) -> None:
    rows = []
    for count in COUNTS:
        place = root / f"put-{count}"
        ours = DiskStore(place / "ours", Events(), lock_dir=root / "locks", max_files=1_000_000)
        populate_ours(place / "ours", count)
        ours.put(*entry(2_000))  # The first put counts the existing entries once.
        populate_theirs(place / "theirs", count)
        theirs = program_cache()(place / "theirs", max_size_bytes=8 << 30)
        theirs[os.urandom(32)] = b"warm"
        mine = median_put(ours.put)
        plain = median_put(partial(put_theirs, theirs))
        rows.append((f"{count:,} entries", us(mine), us(plain), ratio(plain, mine)))
    report(
        "bench_store", "A put into", ("cache of", "preheat", "cuda.core, with a limit", "ratio"), rows
    )


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="preheat-bench-") as place:
        bench_get(Path(place))
        bench_put(Path(place))


if __name__ == "__main__":
    main()
