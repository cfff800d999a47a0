"""These tests call the CPU driver of their own process: `make test-driver` runs them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.driver.calls.cuda import Program, cu, ok
from tests.driver.calls.graphs import Kept


@pytest.fixture
def program() -> Iterator[Program]:
    """Yield a program, whose context is current in this thread."""
    made = Program()
    yield made
    made.close()


@pytest.fixture
def stream(program: Program) -> Iterator[Any]:
    """Yield a stream that does not wait for the legacy default stream."""
    del program
    made = ok(cu.cuStreamCreate(1))
    yield made
    ok(cu.cuStreamDestroy(made))


@pytest.fixture
def graph(program: Program) -> Iterator[Any]:
    """Yield an empty graph."""
    del program
    made = ok(cu.cuGraphCreate(0))
    yield made
    ok(cu.cuGraphDestroy(made))


@pytest.fixture
def kept() -> Kept:
    """Return what keeps the parameters of nodes."""
    return Kept()


@pytest.fixture
def address(program: Program) -> Iterator[Any]:
    """Yield memory with four integers."""
    made = program.memory([1, 2, 3, 4])
    yield made
    ok(cu.cuMemFree(made))


@pytest.fixture
def twice(program: Program, kept: Kept, address: Any) -> Any:
    """Return the parameters of a kernel that doubles the first integer."""
    return kept.kernel(program.function("twice"), address, 1)
