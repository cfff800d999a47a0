"""Fixtures of the tests of the runtime."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from preheat.build.builder import Builder
from preheat.emulator.device import EmulatorDevice
from preheat.gpu import Gpu
from tests.devices.ordering import SOURCE, World
from tests.devices.support import SaxpyCase, saxpy_case
from tests.standin import FakeCuPy, FakeTorch, introduce


@pytest.fixture
def setup(device: Gpu) -> SaxpyCase:
    """saxpy and its operands on every device."""
    return saxpy_case(device)


@pytest.fixture
def world(
    request: pytest.FixtureRequest, shared_builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> Iterator[World]:
    gpu = Gpu(EmulatorDevice(0, "sm_90", schedule=request.param), shared_builder)
    torch = FakeTorch(gpu)
    cupy = FakeCuPy(gpu)
    introduce(torch, monkeypatch)
    introduce(cupy, monkeypatch)
    kernels = (gpu.kernel(SOURCE, name) for name in ("put", "copy", "spread"))
    yield World(gpu, torch, cupy, *kernels)
    gpu.synchronize()
    gpu.close()
