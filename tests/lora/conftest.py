"""Arrays of a block, for tests that remove or change one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from preheat import Gpu
from tests.lora.block import GQA


@pytest.fixture
def given(open_device: Callable[..., Gpu]) -> tuple[Gpu, dict[str, Any]]:
    gpu = open_device("emulator")
    return gpu, {name: gpu.zeros(size) for name, size in GQA.input_shapes.items()}
