"""Devices whose calls are counted and can be made to fail, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from preheat.build.builder import Builder
from preheat.gpu import Gpu
from tests.faulty import Faulty
from tests.runtime.support import Bench, Flaky, bench


@pytest.fixture
def open_flaky(shared_builder: Builder) -> Iterator[Callable[..., Flaky]]:
    """Opens devices with a seam that can fail, by kind, and closes them."""
    opened: list[Gpu] = []

    def open_one(kind: str, builder: Builder = shared_builder, **more: Any) -> Flaky:
        if kind == "emulator":
            from preheat.devices.emulator.device import EmulatorDevice

            seam = Faulty(EmulatorDevice(0, "sm_90"))
        else:
            from preheat.devices.cuda.device import CudaDevice

            seam = Faulty(CudaDevice(0))
        whole: Any = seam
        opened.append(Gpu(whole, builder, **more))
        return Flaky(opened[-1], seam)

    yield open_one
    for gpu in opened:
        gpu.close()


@pytest.fixture(params=["emulator", pytest.param("cuda", marks=pytest.mark.gpu)])
def kind(request: pytest.FixtureRequest) -> str:
    """The kinds of devices there are."""
    return str(request.param)


@pytest.fixture
def flaky(kind: str, open_flaky: Callable[..., Flaky]) -> Flaky:
    """Every kind of device, with a seam that can fail."""
    return open_flaky(kind)


@pytest.fixture
def setup(device: Gpu) -> Bench:
    """saxpy and its operands on every device."""
    return bench(device)
