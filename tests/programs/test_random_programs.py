"""Random programs on deferred streams, and on a GPU beside the real torch and CuPy.

`make random-programs` runs 2,000 of them; `PREHEAT_TEST_PROGRAMS` sets the number.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from preheat.build.builder import Builder
from preheat.emulator.device import EmulatorDevice
from preheat.gpu import Gpu
from tests.devices.support import import_or_skip
from tests.programs.libraries import Library, RealCuPy, RealTorch, Standin
from tests.programs.machine import Programs
from tests.standin import FakeCuPy, FakeTorch, introduce

PROGRAMS = int(os.environ.get("PREHEAT_TEST_PROGRAMS", "40"))
ON_GPU = int(os.environ.get("PREHEAT_TEST_PROGRAMS", "300"))


def run(programs: type[Programs], count: int) -> None:
    """Run `count` programs. A failing program is shrunk, unless `PREHEAT_TEST_SHRINK` is 0."""
    shrink = os.environ.get("PREHEAT_TEST_SHRINK") != "0"
    run_state_machine_as_test(
        programs,
        settings=settings(
            max_examples=count,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.generate, Phase.shrink) if shrink else (Phase.generate,),
            print_blob=True,
            database=None,
        ),
    )


@pytest.fixture
def deferred(shared_builder: Builder) -> Iterator[type[Programs]]:
    """Programs on an emulator with deferred streams, beside two stand-ins."""
    patch = pytest.MonkeyPatch()

    class Deferred(Programs):
        def open(self, schedule: int) -> tuple[Gpu, list[Library]]:
            gpu = Gpu(EmulatorDevice(0, "sm_90", schedule=schedule), shared_builder)
            torch = FakeTorch(gpu)
            cupy = FakeCuPy(gpu)
            introduce(torch, patch)
            introduce(cupy, patch)
            return gpu, [Standin(torch), Standin(cupy)]

        def shut(self) -> None:
            self.gpu.close()
            patch.undo()

    yield Deferred
    patch.undo()


def test_programs_on_deferred_streams_do_what_they_do_in_sequence(deferred: type[Programs]) -> None:
    run(deferred, PROGRAMS)


@pytest.mark.gpu
def test_programs_on_a_gpu_do_what_they_do_in_sequence(shared_builder: Builder) -> None:
    from preheat.devices.cuda.device import CudaDevice

    torch, cupy = import_or_skip("torch"), import_or_skip("cupy")
    gpu = Gpu(CudaDevice(0), shared_builder)
    beside: list[Any] = [RealTorch(gpu, torch), RealCuPy(gpu, cupy)]

    class OnGpu(Programs):
        spins = True

        def open(self, schedule: int) -> tuple[Gpu, list[Library]]:
            del schedule  # The GPU has its own.
            for each in beside:
                each.switch(0)
            return gpu, beside

    try:
        run(OnGpu, ON_GPU)
    finally:
        gpu.close()
