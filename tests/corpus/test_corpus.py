"""Every kernel of the corpus, on every device, against its reference in NumPy.

The themes are modules beside this one. In each, a kernel stands right above the function that makes
its arguments and computes, in float64 or exactly, what it must write. Outputs hold nothing right before
the launch, so an element that was not written is wrong; inputs must come back as they were.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from preheat import Builder, ContextLostError, Gpu, Kernel, SymbolView
from preheat.devices.cuda.device import CudaDevice
from preheat.emulator.device import EmulatorDevice
from tests.corpus import (
    control,
    elementwise,
    grids,
    integers,
    matrices,
    networks,
    reductions,
    simulation,
    sorting,
)
from tests.corpus.case import Array, Brain, Case, Result, unbrain, wide

THEMES = elementwise, integers, control, reductions, sorting, matrices, grids, networks, simulation
CASES = [case for theme in THEMES for case in vars(theme).values() if isinstance(case, Case)]
RUNS = [pytest.param(case, size, id=f"{case.name}-{size}") for case in CASES for size in case.sizes]
DEVICES = "sm_80", "sm_90", "sm_100", "sm_90 sanitized", "cuda"


def launches() -> Iterator[Any]:
    """Yield each case with its sizes for each device.

    The dialects of PTX differ in instructions and not in sizes: those but for the largest are long.
    """
    for device in DEVICES:
        for case in CASES:
            for size in case.sizes:
                marks = [pytest.mark.gpu] if device == "cuda" else []
                if device in ("sm_80", "sm_100") and size != max(case.sizes):
                    marks.append(pytest.mark.long)
                yield pytest.param(device, case, size, id=f"{device}-{case.name}-{size}", marks=marks)


@pytest.fixture(scope="session")
def opened(request: pytest.FixtureRequest, corpus_builder: Builder) -> Iterator[Gpu]:
    """Open the emulator for each dialect of PTX, one that sanitizes, and the GPU."""
    arch, _, sanitized = request.param.partition(" ")
    emulated = arch != "cuda"
    device = EmulatorDevice(0, arch, sanitize=bool(sanitized)) if emulated else CudaDevice(0)
    with Gpu(device, corpus_builder) as gpu:
        yield gpu


@pytest.fixture
def gpu(opened: Gpu) -> Iterator[Gpu]:
    """Return a device that no earlier kernel has broken."""
    yield opened
    try:
        opened.synchronize()
    except ContextLostError:
        opened.reset()


@pytest.mark.parametrize(("opened", "case", "size"), list(launches()), indirect=["opened"])
def test_kernel_computes_what_its_reference_does(gpu: Gpu, case: Case, size: int) -> None:
    rng = np.random.default_rng(zlib.crc32(f"{case.name} {size}".encode()))
    launch = case.prepare(rng, size)
    kernel = gpu.kernel(case.source, case.entry, options=case.options)
    args = [on_device(gpu, arg) for arg in launch.args]
    symbols = {name: on_symbol(kernel, name, arg) for name, arg in launch.symbols.items()}
    kernel.launch(*args, grid=launch.grid, block=launch.block, shared=launch.shared)
    for position, (arg, held) in enumerate(zip(launch.args, args, strict=True)):
        check(case, f"argument {position}", arg, held)
    for name, arg in launch.symbols.items():
        check(case, name, arg, symbols[name])


def on_device(gpu: Gpu, arg: Any) -> Any:
    """Return what to launch with: arrays of the device for arrays, anything else as it is."""
    match arg:
        case Result():
            return gpu.array(arg.before, dtype=arg.dtype)
        case Brain():
            return gpu.array(arg.bits, dtype="bfloat16")
        case np.ndarray():
            return gpu.array(arg)
    return arg


def on_symbol(kernel: Kernel, name: str, arg: Array | Result) -> SymbolView:
    """Set a variable of the kernel's module to its content before the launch, and return it."""
    before = arg.before if isinstance(arg, Result) else arg
    symbol = kernel.module.symbol(name, before.dtype)
    symbol.write(before)
    return symbol


def check(case: Case, what: str, arg: Any, held: Any) -> None:
    """Results are as expected, inputs as they were given."""
    match arg:
        case Result():
            compare(case, what, held.numpy(), arg)
        case Brain():
            np.testing.assert_array_equal(held.numpy(), arg.bits, f"{what} was changed")
        case np.ndarray():
            np.testing.assert_array_equal(held.numpy(), arg, f"{what} was changed")


def compare(case: Case, what: str, got: Array, result: Result) -> None:
    """Integers exactly, floats within what the case allows."""
    if got.dtype.kind == "f" or result.dtype == "bfloat16":
        values = unbrain(got) if result.dtype == "bfloat16" else wide(got)
        np.testing.assert_allclose(values, result.expected, case.rtol, case.atol, err_msg=what)
    else:
        np.testing.assert_array_equal(got, result.expected, what)
