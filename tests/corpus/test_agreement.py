"""The emulator and the GPU give the same bits wherever PTX defines them.

Every kernel of the corpus is compiled without contraction (`-fmad=false`: otherwise the assembler fuses
multiplications and additions as it likes) and run on both devices with the same inputs. Kernels whose
PTX has neither an approximate instruction nor an atomic addition of floats (whose order is up to the
hardware) must agree in every bit, NaN payloads aside; the others within the tolerance of the case.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from preheat import Builder, Gpu
from preheat.devices.cuda.device import CudaDevice
from preheat.emulator.device import EmulatorDevice
from tests.corpus.case import Array, Case, Launch, Result, unbrain
from tests.corpus.test_corpus import RUNS, on_device, on_symbol

INEXACT = re.compile(
    r"\.approx|\bdiv\.full|\b(?:ex2|lg2|sin|cos|tanh|rsqrt)\.|\b(?:atom|red)\.\S*add\S*\.(?:f|bf)\d"
)


@pytest.fixture(scope="module")
def both(corpus_builder: Builder) -> Iterator[tuple[Gpu, Gpu]]:
    """Yield the GPU, and the emulator of its architecture."""
    real = Gpu(CudaDevice(0), corpus_builder)
    emulated = Gpu(EmulatorDevice(0, real.arch), corpus_builder)
    with real, emulated:
        yield real, emulated


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "size"), RUNS)
def test_emulator_and_gpu_agree(both: tuple[Gpu, Gpu], case: Case, size: int) -> None:
    seed = zlib.crc32(f"agreement {case.name} {size}".encode())
    launch = case.prepare(np.random.default_rng(seed), size)
    (real, text), (emulated, _) = (outputs(gpu, case, launch) for gpu in both)
    for position, (expected, got) in enumerate(zip(real, emulated, strict=True)):
        if INEXACT.search(text):
            np.testing.assert_allclose(got, expected, 2 * case.rtol, 2 * case.atol, equal_nan=True)
        else:
            assert_same_bits(got, expected, f"output {position}")


def outputs(gpu: Gpu, case: Case, launch: Launch) -> tuple[list[Array], str]:
    """Everything the kernel wrote, and its PTX."""
    exact = [] if ".version" in case.source else ["-fmad=false"]  # PTX states what is fused.
    kernel = gpu.kernel(case.source, case.entry, options=[*case.options, *exact])
    args = [on_device(gpu, arg) for arg in launch.args]
    symbols = {name: on_symbol(kernel, name, arg) for name, arg in launch.symbols.items()}
    kernel.launch(*args, grid=launch.grid, block=launch.block, shared=launch.shared)
    pairs: list[tuple[Any, Any]] = [*zip(launch.args, args, strict=True)]
    pairs += [(launch.symbols[name], symbol) for name, symbol in symbols.items()]
    written = [read(arg, held) for arg, held in pairs if isinstance(arg, Result)]
    return written, kernel.module.artifact.ptx.decode()


def read(result: Result, held: Any) -> Array:
    """Return the content of a result, as floats for a type that NumPy lacks."""
    bits: Array = held.numpy()
    return unbrain(bits) if result.dtype == "bfloat16" else bits


def assert_same_bits(got: Array, expected: Array, what: str) -> None:
    if expected.dtype.kind == "f":
        numbers = ~np.isnan(expected)
        assert (np.isnan(got) == ~numbers).all(), what
        got, expected = got[numbers], expected[numbers]
    different = np.flatnonzero(got.view(np.uint8) != expected.view(np.uint8))
    assert not different.size, f"{what}: {different.size} of {got.nbytes} bytes differ"
