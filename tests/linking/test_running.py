"""Linked kernels run, on the emulator and on a GPU: functions, variables and templates across parts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from preheat.build.builder import Builder
from preheat.driver.devices import MODEL
from preheat.errors import (
    DriverError,
    EmulatorFault,
    LaunchError,
    UnknownEntryError,
    UnsupportedInstructionError,
)
from preheat.gpu import Gpu
from preheat.model.config import Config
from preheat.model.linked_program import BinaryPart, LinkedProgram
from preheat.model.program import Program
from tests.linking.support import HELPER_PROGRAM, MAIN_PROGRAM, expected, linked, on_disk

both = pytest.mark.parametrize("lto", [False, True], ids=["rdc", "lto"])


@both
def test_device_functions_of_another_part_are_called(device: Gpu, lto: bool) -> None:
    apply = device.kernel(linked(lto=lto), "apply")
    x = device.array(np.arange(100, dtype=np.float32))
    apply[4, 32](x, 100)
    assert x.numpy().tolist() == [expected(value) for value in range(100)]


@both
def test_variables_are_shared_by_the_parts(device: Gpu, lto: bool) -> None:
    module = device.module(linked(lto=lto))
    out = device.zeros(1, "int32")
    module["count<int>"][1, 1](out)
    module["count<int>"][1, 1](out)
    assert out.numpy().tolist() == [7]  # `helper.cu` starts at five.
    assert module.symbol("calls", "int32").numpy().tolist() == [7]


@both
def test_arguments_are_checked_by_their_types(device: Gpu, lto: bool) -> None:
    apply = device.kernel(linked(lto=lto), "apply")
    assert str(apply.entry) == "apply(float*, int)"
    with pytest.raises(LaunchError):
        apply[1, 1](device.zeros(1, "int32"), 1)


def test_a_part_may_be_ptx(device: Gpu, shared_builder: Builder) -> None:
    """The PTX of a relocatable part is given in its place."""
    helper = next(iter(LinkedProgram.of([HELPER_PROGRAM]).sources.values()))
    text = shared_builder.build(helper, device.arch).ptx.decode()
    program = LinkedProgram.of([MAIN_PROGRAM, Program.of(text, label="helper.ptx")])
    x = device.array(np.ones(4, np.float32))
    device.kernel(program, "apply")[1, 4](x, 4)
    assert x.numpy().tolist() == [expected(1.0)] * 4


@both
def test_a_part_may_be_compiled(device: Gpu, shared_builder: Builder, lto: bool) -> None:
    """LTO-IR runs anywhere. Machine code has no PTX for the emulator and for the CPU driver."""
    helper = next(iter(LinkedProgram.of([HELPER_PROGRAM], lto=lto).sources.values()))
    code = shared_builder.build(helper, device.arch).cubin
    program = LinkedProgram.of([MAIN_PROGRAM, code], lto=lto)
    if not lto and device.name.startswith("emulator"):
        with pytest.raises(UnsupportedInstructionError, match="_Z6helperf, which this PTX does not"):
            device.kernel(program, "apply")
        return
    if not lto and device.model == MODEL:
        with pytest.raises(DriverError, match="NOT_SUPPORTED"):
            device.kernel(program, "apply")
        return
    x = device.array(np.ones(4, np.float32))
    device.kernel(program, "apply")[1, 4](x, 4)
    assert x.numpy().tolist() == [expected(1.0)] * 4


def test_kernels_of_linked_programs_can_be_asked_for_together_and_without_waiting(device: Gpu) -> None:
    first, second = device.kernels([(linked(), "apply"), (linked(lto=True), "apply")])
    third = device.kernel(linked(), "apply", wait=False)
    for kernel in (first, second, third):
        x = device.array(np.ones(1, np.float32))
        kernel[1, 1](x, 1)
        assert x.numpy().tolist() == [expected(1.0)]


def test_an_unknown_kernel_names_those_of_all_parts(device: Gpu) -> None:
    with pytest.raises(UnknownEntryError) as caught:
        device.kernel(linked(), "helper")
    assert set(caught.value.known) == {"apply", "count<int>"}


@both
def test_a_fault_names_the_lines_of_both_parts(open_device: Callable[..., Gpu], lto: bool) -> None:
    gpu = open_device("emulator")
    caller = '__device__ void put(int* p);\nextern "C" __global__ void k(int* p) {\n  put(p + 999);\n}'
    callee = "__device__ __noinline__ void put(int* p) {\n  *p = 1;\n}"
    program = LinkedProgram.of(
        [Program.of(caller, label="k.cu"), Program.of(callee, label="put.cu")], lto=lto
    )
    with pytest.raises(EmulatorFault) as caught:
        gpu.kernel(program, "k")[1, 1](gpu.zeros(1, "int32"))
    assert "put.cu:2" in str(caught.value)
    assert "k.cu:3" in str(caught.value)


def test_parts_of_one_label_keep_their_own_static_symbols(device: Gpu) -> None:
    same = [Program.of(each.source, label="same.cu") for each in (MAIN_PROGRAM, HELPER_PROGRAM)]
    x = device.array(np.ones(4, np.float32))
    device.kernel(LinkedProgram.of(same), "apply")[1, 4](x, 4)
    assert x.numpy().tolist() == [expected(1.0)] * 4


def test_an_edited_header_is_compiled_again(
    tmp_path: Path,
    open_device: Callable[..., Gpu],
    open_builder: Callable[..., Builder],
    config: Config,
) -> None:
    program = on_disk(tmp_path / "src")
    for by, result in ((2, 8), (5, 20)):
        (tmp_path / "src" / "both.h").write_text(f"#define BY {by}\n__device__ int times(int x);\n")
        gpu = open_device("emulator", builder=open_builder(config))
        x = gpu.array(np.array([3], np.int32))
        gpu.kernel(program, "k")[1, 1](x)
        assert x.numpy().tolist() == [result]


@pytest.mark.gpu
def test_machine_code_of_a_gpu_is_that_of_the_parts(open_device: Callable[..., Gpu]) -> None:
    """The emulator and the GPU agree, with and without link-time optimisation."""
    results = []
    for name in ("cuda", "emulator"):
        gpu = open_device(name)
        for lto in (False, True):
            x = gpu.array(np.linspace(-4, 4, 64, dtype=np.float32))
            gpu.kernel(linked(lto=lto), "apply")[2, 32](x, 64)
            results.append(x.numpy())
    for other in results[1:]:
        np.testing.assert_allclose(other, results[0], rtol=1e-6)


@pytest.mark.hardware("it links machine code")
@pytest.mark.gpu
def test_a_library_gives_functions_to_a_gpu(open_device: Callable[..., Gpu]) -> None:
    """A fatbin is what `nvcc -fatbin` makes; here a cubin has the same functions."""
    gpu = open_device("cuda")
    helper = next(iter(LinkedProgram.of([HELPER_PROGRAM]).sources.values()))
    code = gpu.builder.build(helper, gpu.arch).cubin
    part = BinaryPart.of(code, label="helper.cubin")
    module = gpu.module(LinkedProgram.of([MAIN_PROGRAM, part]))
    assert module.symbol("calls", "int32").numpy().tolist() == [5]
