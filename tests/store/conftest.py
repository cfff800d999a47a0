"""Fixtures: stores in the directory of the test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from preheat.model.events import Events
from preheat.store import DiskStore
from tests.store.support import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def open_disk(tmp_path: Path, events: Events, clock: Clock) -> Callable[..., DiskStore]:
    """Opens the test's cache directory, with limits where they are given."""

    def open_one(limit: int = 8 << 30, max_files: int = 100_000) -> DiskStore:
        root, locks = tmp_path / "cache", tmp_path / "locks"
        return DiskStore(root, events, lock_dir=locks, limit=limit, max_files=max_files, clock=clock)

    return open_one


@pytest.fixture
def disk(open_disk: Callable[..., DiskStore]) -> DiskStore:
    return open_disk()
