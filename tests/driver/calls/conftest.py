"""These tests call the CPU driver of their own process: `make test-driver` runs them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.driver.calls.cuda import Program


@pytest.fixture
def program() -> Iterator[Program]:
    """Yield a program, whose context is current in this thread."""
    made = Program()
    yield made
    made.close()
