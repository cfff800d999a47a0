"""Arrays that fit a block, for the tests that take one away or spoil it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from preheat import Gpu
from tests.lora.block import GQA


@pytest.fixture
def given(open_device: Callable[..., Gpu]) -> tuple[Gpu, dict[str, Any]]:
    gpu = open_device("emulator")
    return gpu, {name: gpu.zeros(size) for name, size in GQA.given.items()}
