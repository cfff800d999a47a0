"""A fault names the arguments of the launch that point into the buffer."""

from __future__ import annotations

import ctypes
import re

import numpy as np
import pytest

import preheat
from preheat import EmulatorFault, Gpu
from preheat.emulator.access import ArgumentSpec, pointers_into
from preheat.emulator.memory import Buffer
from tests.emulator.support import Machine, entry, fault

SOURCE = """
struct Pair { long long n; float* p; };
extern "C" __global__ void copy(float* x, const float* y, int to, int from) { x[to] = y[from]; }
extern "C" __global__ void put(int n, Pair pair) { pair.p[n] = 1; }
template <class T> __global__ void one(T* x, int n) { x[n] = 1; }
"""


@pytest.fixture
def gpu() -> Gpu:
    gpu = preheat.device("emulator")
    gpu.reset()
    return gpu


def message(gpu: Gpu, name: str, *args: object) -> str:
    """Return the message of the fault of a launch, without addresses."""
    with pytest.raises(EmulatorFault) as caught:
        gpu.kernel(SOURCE, name)[1, 1](*args)
    gpu.reset()
    return re.sub("0x[0-9a-f]+", "0x…", caught.value.message)


def test_the_argument_is_named_among_arrays_of_one_size(gpu: Gpu) -> None:
    x, y = gpu.zeros(100), gpu.zeros(100)
    assert message(gpu, "copy", x, y, 0, 103) == (
        "reads 4 bytes at 0x…, 12 bytes past the end of the 400-byte buffer at 0x… "
        "(argument 1, float const*)"
    )
    x, y = gpu.zeros(100), gpu.zeros(100)
    assert message(gpu, "copy", x, y, -1, 0) == (
        "writes 4 bytes at 0x…, 4 bytes before the 400-byte buffer at 0x… (argument 0, float*)"
    )


def test_all_arguments_that_share_a_buffer_are_named(gpu: Gpu) -> None:
    x = gpu.zeros(100)
    found = message(gpu, "copy", x[10:20], x, 90, 0)
    assert found.endswith("400-byte buffer at 0x… (argument 0, float* and argument 1, float const*)")


def test_a_pointer_in_a_structure_is_named_by_its_place(gpu: Gpu) -> None:
    x = gpu.zeros(100)
    pair = np.array([(1, x.address)], np.dtype([("n", "i8"), ("p", "u8")]))[0]
    assert message(gpu, "put", 100, pair).endswith("(argument 1, Pair at byte 8)")


def test_the_type_is_that_of_the_template(gpu: Gpu) -> None:
    assert message(gpu, "one<double>", gpu.zeros(4, "float64"), 4).endswith("(argument 0, double*)")


def test_a_numpy_array_and_a_freed_array_are_arguments_too(gpu: Gpu) -> None:
    permissive = preheat.device("emulator", host_arrays=True)
    found = message(permissive, "copy", np.zeros(4, "f4"), np.zeros(4, "f4"), 4, 0)
    assert found.endswith("0 bytes past the end of the 16-byte buffer at 0x… (argument 0, float*)")
    x = gpu.zeros(64)
    address = x.address
    x.close()
    kernel = gpu.kernel('extern "C" __global__ void k(unsigned long long x) { *(int*)x = 1; }', "k")
    with pytest.raises(EmulatorFault, match=r"in a freed .* \(argument 0, unsigned long long\)"):
        kernel[1, 1](address)
    gpu.reset()


def test_a_buffer_that_no_argument_points_to_has_no_argument(gpu: Gpu) -> None:
    x = gpu.zeros(100)
    table = gpu.array(np.array([x.address], "u8"))
    kernel = gpu.kernel('extern "C" __global__ void k(int** table) { table[0][100] = 1; }', "k")
    with pytest.raises(EmulatorFault) as caught:
        kernel[1, 1](table)
    assert caught.value.message.endswith(f"past the end of the 400-byte buffer at {x.address:#x}")
    gpu.reset()


def test_without_types_the_names_of_the_parameters_are_shown() -> None:
    text = entry(
        ".param .u32 n, .param .u64 out", "ld.param.u64 %d1, [out]; st.global.u32 [%d1], 1; ret;"
    )
    out = np.zeros(4, np.int32)
    out.flags.writeable = False
    said = fault(Machine(text), 1, 1, np.int32(0), out).message
    assert said.endswith("in read-only memory (argument 1, out)")


def test_an_empty_buffer_and_a_small_parameter() -> None:
    values = (ctypes.c_uint64 * 2)(0x1000, 0x1000)
    specs = [ArgumentSpec(0, 8, "a"), ArgumentSpec(8, 4, "b")]  # A pointer has 8 bytes.
    at = ctypes.addressof(values)
    assert pointers_into(Buffer(0x1000, 0x1000, True), specs, at) == "argument 0, a"
    assert pointers_into(Buffer(0xF00, 0x1000, True), specs, at) == ""
