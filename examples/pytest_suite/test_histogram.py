"""Tests of a kernel, on the emulator in CI and on a GPU where there is one.

    pytest --preheat-device=emulator examples/pytest_suite
    pytest --preheat-device=all examples/pytest_suite

`preheat_device` comes from the plugin that preheat brings. While a test uses it, `preheat.device()`
returns the same device, so the code under test needs no change.
"""

import numpy as np
import pytest
from histogram import SOURCE, histogram

import preheat


@pytest.mark.usefixtures("preheat_device")
@pytest.mark.parametrize("n", [0, 1, 255, 256, 5000])
def test_every_byte_is_counted(n: int) -> None:
    values = np.random.default_rng(n).integers(0, 256, n, dtype="uint8")
    assert (histogram(values) == np.bincount(values, minlength=256)).all()


def test_it_needs_no_more_shared_memory_than_it_says(preheat_device: preheat.Gpu) -> None:
    kernel = preheat_device.kernel(SOURCE, "histogram")
    assert kernel.attributes.shared == 256 * 4


# The emulator stops at the first access outside an array, with the line and the thread. A fault
# would end a GPU for the whole process, so this test asks for the emulator.
@pytest.mark.preheat_emulator
def test_a_length_that_is_too_large_is_found(preheat_device: preheat.Gpu) -> None:
    kernel = preheat_device.kernel(SOURCE, "histogram")
    values, counts = preheat_device.zeros(100, "uint8"), preheat_device.zeros(256, "uint32")
    with pytest.raises(preheat.EmulatorFault, match=r"histogram\.cu:7.* past the end"):
        kernel[1, 128](values, counts, 101)


@pytest.mark.preheat_gpu
def test_a_gpu_counts_many_at_once(preheat_device: preheat.Gpu) -> None:
    values = np.zeros(100_000_000, dtype="uint8")
    assert histogram(values)[0] == values.size
    assert preheat_device.name.startswith("cuda")
