"""Fixtures of the tests of the runtime."""

from __future__ import annotations

import pytest

from preheat.gpu import Gpu
from tests.runtime.support import Bench, bench


@pytest.fixture
def setup(device: Gpu) -> Bench:
    """saxpy and its operands on every device."""
    return bench(device)
