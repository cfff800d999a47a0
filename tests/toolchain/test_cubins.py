"""Cubins on a GPU: the driver loads them and reports the same resources as the artifact."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from preheat.build.builder import Builder
from preheat.model.arch import Arch
from preheat.model.artifact import Artifact
from preheat.model.program import Program
from preheat.tools.cli.demo import KERNELS
from tests.conftest import SAXPY

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.hardware("it loads machine code without PTX"),
]

SIZES = (1, 31, 33, 127, 1009, 100_003)


def ok(answer: tuple[Any, ...]) -> Any:
    """Return the values of a driver call that succeeded."""
    code, *values = answer
    assert code.value == 0, code
    return values[0] if len(values) == 1 else tuple(values)


@pytest.fixture(scope="module")
def arch() -> Iterator[Arch]:
    """Yield the architecture of the first GPU, whose primary context is current during the module."""
    from cuda.bindings import driver

    ok(driver.cuInit(0))
    device = ok(driver.cuDeviceGet(0))
    kinds = driver.CUdevice_attribute
    major, minor = (
        ok(driver.cuDeviceGetAttribute(kind, device))
        for kind in (
            kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
        )
    )
    ok(driver.cuCtxSetCurrent(ok(driver.cuDevicePrimaryCtxRetain(device))))
    yield Arch(major, minor)
    ok(driver.cuDevicePrimaryCtxRelease(device))


def saxpy_on_gpu(code: Artifact, a: float, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Load the cubin, run saxpy, bring y back."""
    from cuda.bindings import driver

    module = ok(driver.cuModuleLoadData(code.cubin))
    function = ok(driver.cuModuleGetFunction(module, code.entry("saxpy").name.encode()))
    buffers = [ok(driver.cuMemAlloc(array.nbytes)) for array in (x, y)]
    for buffer, array in zip(buffers, (x, y), strict=True):
        ok(driver.cuMemcpyHtoD(buffer, array.ctypes.data, array.nbytes))
    size = code.entry("saxpy").parameters[-1].offset + code.entry("saxpy").parameters[-1].size
    block = np.zeros(size, np.uint8)
    pointers = [np.uint64(int(buffer)) for buffer in buffers]
    values: list[np.generic] = [np.float32(a), *pointers, np.int32(x.size)]
    for parameter, value in zip(code.entry("saxpy").parameters, values, strict=True):
        end = parameter.offset + parameter.size
        block[parameter.offset : end] = np.frombuffer(value.tobytes(), np.uint8)
    places = [block.ctypes.data + p.offset for p in code.entry("saxpy").parameters]
    arguments = np.array(places, np.uint64)
    grid = (x.size + 255) // 256
    ok(driver.cuLaunchKernel(function, grid, 1, 1, 256, 1, 1, 0, 0, arguments.ctypes.data, 0))
    out = np.empty_like(y)
    ok(driver.cuMemcpyDtoH(out.ctypes.data, buffers[1], out.nbytes))
    for buffer in buffers:
        ok(driver.cuMemFree(buffer))
    ok(driver.cuModuleUnload(module))
    return out


@pytest.mark.parametrize("size", SIZES)
def test_saxpy_is_right_and_bit_identical_from_compiler_and_cache(
    size: int, arch: Arch, open_builder: Callable[..., Builder]
) -> None:
    random = np.random.default_rng()
    x, y = (random.standard_normal(size).astype(np.float32) for _ in range(2))
    a = float(np.float32(random.standard_normal()))
    program = Program.of(SAXPY, label="saxpy.cu")
    compiled = open_builder().build(program, arch)
    cached = open_builder().build(program, arch)
    assembled = open_builder().build(Program.of(compiled.ptx.decode(), label="saxpy.ptx"), arch)
    first = saxpy_on_gpu(compiled, a, x, y)
    exact = a * x.astype(np.float64) + y
    np.testing.assert_allclose(first, exact, rtol=1e-6, atol=1e-6)
    for other in (cached, assembled):
        assert saxpy_on_gpu(other, a, x, y).tobytes() == first.tobytes()


@pytest.mark.parametrize("file", sorted(KERNELS.glob("*.cu")), ids=lambda f: f.name)
def test_driver_agrees_with_layout_and_resources(file: Path, arch: Arch, builder: Builder) -> None:
    from cuda.bindings import driver

    artifact = builder.build(Program.from_file(file), arch)
    module = ok(driver.cuModuleLoadData(artifact.cubin))
    kinds = driver.CUfunction_attribute
    for entry in artifact.entries:
        function = ok(driver.cuModuleGetFunction(module, entry.name.encode()))
        for index, parameter in enumerate(entry.parameters):
            assert ok(driver.cuFuncGetParamInfo(function, index)) == (parameter.offset, parameter.size)
        past = driver.cuFuncGetParamInfo(function, len(entry.parameters))[0]
        assert past == driver.CUresult.CUDA_ERROR_INVALID_VALUE
        assert entry.resources is not None
        for kind, used in (
            (kinds.CU_FUNC_ATTRIBUTE_NUM_REGS, entry.resources.registers),
            (kinds.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, entry.resources.shared),
            (kinds.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, entry.resources.stack),
        ):
            assert ok(driver.cuFuncGetAttribute(kind, function)) == used
    ok(driver.cuModuleUnload(module))
