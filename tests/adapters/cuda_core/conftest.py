"""Fixtures of the tests of cuda.core: its programs on the cache of a test."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from preheat.build.builder import Builder
from preheat.build.foreign_store import ForeignStore


@pytest.fixture(autouse=True)
def programs_end_with_the_test() -> Iterator[None]:
    """Deallocate programs that an error keeps alive, in a cycle, while the test's filters are there."""
    yield
    gc.collect()


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Builder], None]]:
    """Lets every program of cuda.core use a builder, until the test ends."""
    from preheat.adapters.cuda_core import compile as compiling

    before: ForeignStore | None = None
    monkeypatch.setattr(compiling, "_everywhere", before)

    def use(builder: Builder) -> None:
        compiling.use_for_programs(builder.foreign)

    yield use
    vars(compiling._work).clear()
    compiling._last.forget()


@pytest.fixture
def store(builder: Builder, use: Callable[[Builder], None]) -> ForeignStore:
    """Return the store of the test's builder, which every program of cuda.core uses."""
    use(builder)
    return builder.foreign


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory that is the current one."""
    place = tmp_path / "here"
    place.mkdir()
    monkeypatch.chdir(place)
    return place


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list of the programs that cuda.core really compiled."""
    from preheat.adapters.cuda_core import compile as compiling

    compiling.connect()
    seen: list[Any] = []
    stock = compiling._stock["compile"]

    def compile(program: Any, *more: Any) -> Any:
        seen.append(program)
        return stock(program, *more)

    monkeypatch.setitem(compiling._stock, "compile", compile)
    return seen
