"""Hosts with caches of their own compile each kernel once, on real servers with atomic operations."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from preheat.store.remote.lease import LEASE_SECONDS
from tests.processes import SOURCE, expect_success, start_process
from tests.store.remote.hosts import HOSTS
from tests.store.remote.stores import Store

PROCESSES = 2
KERNELS = 4


def run_hosts(
    store: Store, folder: Path, *, lease: float = LEASE_SECONDS, doomed: bool = False
) -> tuple[Counter[str], list[dict[str, Any]]]:
    """Return how often each kernel was compiled, and the counters of the processes that ended."""
    arguments = [store.url(), str(folder), str(PROCESSES), str(KERNELS), str(lease)]
    path = f"{SOURCE}:{SOURCE.parent}"
    running = start_process(
        [sys.executable, "-m", "tests.store.remote.hosts", *arguments, *(["doomed"] if doomed else [])],
        env={"PYTHONPATH": path},
    )
    rows = [json.loads(line) for line in expect_success(running).splitlines()]
    return Counter((folder / "compiles").read_text().split()), rows


def total(rows: list[dict[str, Any]], counter: str) -> int:
    return int(sum(row.get(counter, 0) for row in rows))


@pytest.mark.parametrize("kind", ["redis", "s3"])
def test_hosts_that_miss_together_compile_each_kernel_exactly_once(
    kind: str, open_store: Callable[[str], Store], tmp_path: Path
) -> None:
    store = open_store(kind)
    compiles, rows = run_hosts(store, tmp_path)
    assert compiles == {f"k{number}.cu": 1 for number in range(KERNELS)}
    assert total(rows, "compiles") == total(rows, "puts.remote") == KERNELS
    assert len(rows) == HOSTS * PROCESSES
    assert {row["host"] for row in rows if row.get("hits.remote")} > set()
    assert total(rows, "faults") == 0
    assert list(store.open().names("v1/leases/")) == []  # All were given back.


@pytest.mark.parametrize("kind", ["redis", "s3"])
def test_a_killed_holder_costs_at_most_one_more_compile(
    kind: str, open_store: Callable[[str], Store], tmp_path: Path
) -> None:
    compiles, rows = run_hosts(open_store(kind), tmp_path, lease=3.0, doomed=True)
    assert sorted(compiles) == [f"k{number}.cu" for number in range(KERNELS)]
    assert compiles.total() <= KERNELS + 1
    assert len(rows) == HOSTS * PROCESSES - 1
    assert total(rows, "compiles") == KERNELS
    assert total(rows, "faults") == 0


def test_without_atomic_operations_no_host_waits_for_another(
    open_store: Callable[[str], Store], tmp_path: Path
) -> None:
    compiles, rows = run_hosts(open_store("webdav"), tmp_path)
    assert KERNELS <= compiles.total() <= HOSTS * KERNELS
    assert total(rows, "lease_requests") == 0
    assert total(rows, "faults") == 0
