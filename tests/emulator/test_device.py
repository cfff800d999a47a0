"""The emulator implements the device interface."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np
import pytest

import preheat
from preheat.build.builder import Builder
from preheat.devices import base
from preheat.emulator.device import COUNT, EmulatorDevice
from preheat.errors import (
    DeviceError,
    DriverError,
    InputError,
    InvalidCodeError,
    LaunchError,
    OutOfMemoryError,
)
from preheat.model.arch import Arch
from preheat.model.program import Program
from tests.emulator.conftest import Cuda
from tests.emulator.support import HEAD, Machine, artifact, entry, fault

RNG = np.random.default_rng(24)


@pytest.fixture
def device() -> EmulatorDevice:
    return EmulatorDevice()


def contents(device: base.Device, address: int, size: int) -> bytes:
    out = bytearray(size)
    device.copy_out(memoryview(out), address, device.stream())
    return bytes(out)


def test_it_has_everything_a_device_has(device: EmulatorDevice) -> None:
    seam: base.Device = device
    assert (seam.name, seam.model, seam.dlpack) == ("emulator:0", "PTX emulator", (1, 0))
    assert seam.arch == Arch(9, 0)
    assert seam.limits == base.Limits(processors=1, cluster=16)
    assert [EmulatorDevice(0, arch).limits.cluster for arch in ("sm_89", "sm_120")] == [0, 16]
    assert EmulatorDevice(3, "sm_100a").arch == Arch(10, 0, "a")
    assert EmulatorDevice(COUNT - 1).name == "emulator:7"


# The columns of the table in the CUDA programming guide: shared memory of a block and of a
# multiprocessor in KiB, and resident threads and blocks of a multiprocessor.
LIMITS = {
    "sm_60": (48, 64, 2048, 32),
    "sm_75": (64, 64, 1024, 16),
    "sm_80": (163, 164, 2048, 32),
    "sm_86": (99, 100, 1536, 16),
    "sm_87": (163, 164, 1536, 16),
    "sm_88": (99, 100, 1536, 16),
    "sm_89": (99, 100, 1536, 24),
    "sm_90a": (227, 228, 2048, 32),
    "sm_100f": (227, 228, 2048, 32),
    "sm_101": (227, 228, 1536, 24),
    "sm_103": (227, 228, 2048, 32),
    "sm_110": (227, 228, 1536, 24),
    "sm_120": (99, 100, 1536, 24),
    "sm_121": (99, 100, 1536, 24),
}


@pytest.mark.parametrize("arch", LIMITS)
def test_limits_are_those_of_the_architecture(arch: str) -> None:
    block, shared, threads, blocks = LIMITS[arch]
    machine = Machine(artifact(entry("", "ret;"), arch))
    assert machine.device.limits.shared == 48 << 10
    assert machine.device.limits.shared_optin == block << 10
    function = machine.module.function("k")
    assert function.attributes.dynamic_shared == block << 10
    assert function.occupancy(32) == base.Occupancy(blocks, blocks * 32 / threads)
    assert function.occupancy(threads // 2 // 32 * 32).blocks == 2
    assert function.occupancy(32, block << 10).blocks == 1
    # Since sm_80, CUDA uses 1 KiB of each block, so two halves of the shared memory do not fit.
    assert function.occupancy(32, shared << 9).blocks == (2 if arch in ("sm_60", "sm_75") else 1)


def test_a_launch_cannot_have_more_shared_memory_than_its_architecture() -> None:
    source = (
        'extern "C" __global__ void k(int* x) { extern __shared__ int s[]; s[0] = 1; x[0] = s[0]; }'
    )
    gpu = preheat.device("emulator", arch="sm_75")
    kernel = gpu.kernel(source, "k")
    out = gpu.zeros(1, "int32")
    kernel.launch(out, grid=1, block=1, shared=64 << 10)
    with pytest.raises(LaunchError, match="a block can have 65536"):
        kernel.launch(out, grid=1, block=1, shared=(64 << 10) + 4)


def test_the_hint_about_dynamic_shared_memory_knows_the_limit_of_the_architecture(
    compiler: Builder,
) -> None:
    source = 'extern "C" __global__ void k(int n) { extern __shared__ int s[]; s[n] = 1; }'
    for arch, possible in (("sm_75", False), ("sm_90", True)):
        machine = Machine(compiler.build(Program.of(source), arch))
        hint = str(fault(machine, 1, 1, np.int32(100 << 8), shared=16).hint)
        assert ("shared=102404" in hint) == possible


@pytest.mark.parametrize("index", [-1, COUNT])
def test_a_device_that_is_not_there_cannot_be_had(index: int) -> None:
    with pytest.raises(InputError, match=f"no emulator:{index}"):
        EmulatorDevice(index)


# Memory


@pytest.mark.parametrize("size", [1, 255, 256, 1 << 20])
def test_memory_is_aligned_and_holds_what_is_copied(device: EmulatorDevice, size: int) -> None:
    stream = device.stream()
    data = RNG.bytes(size)
    first, second = device.allocate(size, stream), device.allocate(size, stream)
    assert first % 256 == second % 256 == 0
    device.copy_in(first, memoryview(data), stream)
    device.copy(second, first, size, stream)
    assert contents(device, second, size) == data
    device.free(first, stream)
    assert contents(device, second, size) == data


@pytest.mark.parametrize("value", [b"\x07", b"\x01\x02", b"\x01\x02\x03\x04", bytes(range(8))])
def test_fill_repeats_a_value(device: EmulatorDevice, value: bytes) -> None:
    address = device.allocate(64, device.stream())
    before = contents(device, address, 64)
    device.fill(address + 8, value, 3, device.stream())
    expected = before[:8] + value * 3 + before[8 + 3 * len(value) :]
    assert contents(device, address, 64) == expected


def test_nothing_can_be_copied_too(device: EmulatorDevice) -> None:
    address = device.allocate(0, device.stream())
    device.copy_in(address, memoryview(b""), device.stream())
    assert contents(device, address, 0) == b""


def test_memory_is_counted_and_runs_out(device: EmulatorDevice) -> None:
    stream = device.stream()
    free, total = device.memory()
    address = device.allocate(1000, stream)
    assert device.memory() == (free - 1000, total)
    with pytest.raises(OutOfMemoryError, match="no memory"):
        device.allocate(total, stream)
    device.free(address, stream)
    assert device.memory() == (free, total)
    with pytest.raises(DeviceError, match="no buffer"):
        device.free(address, stream)


def test_reset_takes_everything_away() -> None:
    machine = Machine(entry(".param .u64 p", "ld.param.u64 %d1, [p]; st.global.u32 [%d1], 1; ret;"))
    address = machine.device.allocate(16, machine.stream)
    machine(1, 1, np.uint64(address))
    machine.device.reset()
    assert machine.device.memory().free == machine.device.memory().total
    machine = Machine(machine.artifact)
    with pytest.raises(DeviceError):
        machine(1, 1, np.uint64(address))


# Streams and events


def test_streams_have_numbers_and_work_in_them_is_done(device: EmulatorDevice) -> None:
    first, second = device.stream(), device.stream(priority=-1)
    assert first.handle != second.handle
    assert device.adopt(77).handle == 77
    assert first.done()
    first.synchronize()
    device.synchronize()
    event = first.record(timing=True)
    second.wait(event)
    later = first.record(timing=True)
    assert event.done()
    assert later.elapsed(event) >= 0
    assert event.elapsed(later) <= 0


def test_a_status_that_is_not_zero_is_an_error(device: EmulatorDevice) -> None:
    device.check((0,), "launch")
    with pytest.raises(DriverError):
        device.check((1,), "launch")


# Modules


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no .version directive"),
        (f"{HEAD}.entry k() {{ ret;", "never closed"),
        (f"{HEAD}.entry k() {{ frobnicate %r1; }}", "no kernel"),
        (f"{HEAD}.global .u64 a = missing;", "missing, not defined"),
        (f"{HEAD}.global .u8 a[2] = {{1, 2, 3}};", "more values than elements"),
        (f"{HEAD}.global .nonsense a;", "no known type"),
    ],
)
def test_text_that_cannot_be_loaded_is_invalid_code(
    device: EmulatorDevice, text: str, said: str
) -> None:
    with pytest.raises(InvalidCodeError, match="EMULATOR_INVALID_PTX") as caught:
        device.load(artifact(text)).function("other")
    assert said in str(caught.value)
    assert (caught.value.call, caught.value.code) == ("emulator load", 200)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("bra nowhere;", "no label nowhere"),
        ("mov.u32 %r1, elsewhere; st.shared.u32 [%r1], 1;", "elsewhere, not defined"),
        ("add.u32 %r1, %r2, ?;", "is no operand"),
    ],
)
def test_a_kernel_that_makes_no_sense_is_invalid_code(
    device: EmulatorDevice, body: str, said: str
) -> None:
    with pytest.raises(InvalidCodeError) as caught:
        device.load(artifact(entry("", f"{body} ret;"))).function("k")
    assert said in str(caught.value)


def test_text_that_is_no_text_is_invalid_code(device: EmulatorDevice) -> None:
    broken = artifact("x")
    object.__setattr__(broken, "ptx", b"\xff\xfe")
    with pytest.raises(InvalidCodeError, match="not a text"):
        device.load(broken)


def test_variables_have_their_first_values_and_can_be_set(cuda: Cuda) -> None:
    machine = cuda("""
    __device__ int table[6] = {1, -2, 3};
    __device__ double x = 3.25;
    __device__ short* middle = nullptr;
    __device__ int* third = &table[2];
    __device__ const char* word = "hello";
    __constant__ float factors[3] = {1.5f, -2.5f};
    __device__ unsigned long long big = 0x123456789abcdef0ull;
    struct Pair { char c; float f; }; __device__ Pair pairs[2] = {{1, 0.5f}, {2, 0.25f}};
    extern "C" __global__ void k(double* out) {
        out[0] = table[1] + table[5]; out[1] = x; out[2] = *third; out[3] = word[4];
        out[4] = factors[1];
        out[5] = (double)(big >> 32); out[6] = pairs[1].f + pairs[0].c; out[7] = middle == nullptr;
        table[5] = 9;
    }""")
    out = np.full(8, np.nan)
    machine(1, 1, out)
    assert out.tolist() == [-2, 3.25, 3, ord("o"), -2.5, 0x12345678, 1.25, 1]
    machine(1, 1, out)
    assert out[0] == 7
    symbol = machine.module.symbol("factors")
    assert symbol is not None
    assert symbol.size == 12
    machine.device.copy_in(symbol.address + 4, memoryview(np.float32(8).tobytes()), machine.stream)
    machine(1, 1, out)
    assert out[4] == 8
    assert machine.module.symbol("nothing") is None
    assert machine.device.load(machine.artifact).symbol("table") != machine.module.symbol("table")


@pytest.mark.parametrize(
    ("declared", "values"),
    [
        (".u32 t[2][3] = {{1}, {2, 3}}", [1, 0, 0, 2, 3, 0]),
        (".u32 t[3][2] = {{1, 2}, {}, {5}}", [1, 2, 0, 0, 5, 0]),
        (".u32 t[6] = {1, 2, 3}", [1, 2, 3, 0, 0, 0]),
        (".u32 t[2][3] = {1, 2, 3, 4}", [1, 2, 3, 4, 0, 0]),
        (".v2 .u32 t[3] = {{1}, {2, 3}, {4}}", [1, 0, 2, 3, 4, 0]),
        (
            ".f32 t[2][3] = {{0f3F800000}, {0f40000000, 0f3F800000}}",
            [0x3F800000, 0, 0, 2**30, 0x3F800000, 0],
        ),
        (".u32 t[1][2][3] = {{{1}, {2, 3}}}", [1, 0, 0, 2, 3, 0]),
    ],
)
def test_rows_of_first_values_may_be_short(declared: str, values: list[int]) -> None:
    words = "".join(
        f"ld.global.u32 %r1, [t+{4 * i}]; st.global.u32 [%d1+{4 * i}], %r1;" for i in range(6)
    )
    text = entry(
        ".param .u64 out", f"ld.param.u64 %d1, [out]; {words} ret;", outside=f".global {declared};"
    )
    out = np.full(6, 77, np.uint32)
    Machine(text)(1, 1, out)
    assert out.tolist() == values


def test_addresses_can_be_given_byte_by_byte() -> None:
    outside = """
    .global .align 4 .u32 value = 77;
    .global .align 8 .u8 at[8] = {0xFF(value), 0xFF00(value), 0xFF0000(value), 0xFF000000(value),
        0xFF00000000(value), 0xFF0000000000(value), 0xFF000000000000(value), 0xFF00000000000000(value)};
    """
    body = """
    ld.param.u64 %d1, [p]; ld.global.u64 %d2, [at]; ld.u32 %r1, [%d2]; st.global.u32 [%d1], %r1; ret;"""
    out = np.zeros(1, np.uint32)
    Machine(entry(".param .u64 p", body, outside=outside))(1, 1, out)
    assert out[0] == 77


def test_variables_go_with_their_module(cuda: Cuda) -> None:
    machine = cuda('__device__ int v; extern "C" __global__ void k(int* p) { *p = 1; v = 2; }')
    symbol = machine.module.symbol("v")
    assert symbol is not None
    machine(1, 1, np.uint64(symbol.address))
    machine.module.unload()
    with pytest.raises(DeviceError, match="freed 4-byte buffer"):
        machine(1, 1, np.uint64(symbol.address))


# Functions


def test_attributes_and_occupancy_come_from_what_the_kernel_uses(cuda: Cuda) -> None:
    machine = cuda("""
    __constant__ int c[4];
    extern "C" __global__ void __launch_bounds__(128) k(float* x) {
        __shared__ float s[1024]; s[threadIdx.x] = x[threadIdx.x]; __syncthreads();
        x[threadIdx.x] = s[c[0] & 63];
    }""")
    function = machine.module.function("k")
    assert function.name == "k"
    used = function.attributes
    (entry_point,) = machine.artifact.entries
    assert entry_point.resources is not None
    assert used.registers == entry_point.resources.registers > 0
    assert (used.shared, used.constant, used.threads) == (4096, 16, 128)
    assert function.occupancy(128).blocks == min(2048 // 128, 65536 // (used.registers * 128), 32)
    assert function.occupancy(128, 150 << 10) == base.Occupancy(1, 128 / 2048)
    assert function.occupancy(1024).blocks == 2
    assert function.occupancy(33).fraction == pytest.approx(function.occupancy(33).blocks * 64 / 2048)


def test_parameters_of_every_size_lie_where_the_layout_says(cuda: Cuda) -> None:
    machine = cuda("""
    struct Wide { char tag; double value; short tail; };
    extern "C" __global__ void k(bool a, char b, short c, int d, long long e, float f, double g, Wide w,
                                 double* out) {
        const Wide* p = &w; double v[] = {(double)a, (double)b, (double)c, (double)d, (double)e, f, g,
                          (double)p[threadIdx.x].tag, p[threadIdx.x].value, (double)w.tail};
        for (int i = 0; i < 10; i++) out[i] = v[i];
    }""")
    wide = np.zeros((), np.dtype([("tag", "i1"), ("value", "f8"), ("tail", "i2")], align=True))
    wide["tag"] = -5
    wide["value"] = 2.5
    wide["tail"] = -300
    out = np.zeros(10)
    given: tuple[Any, ...] = (
        np.bool_(True), np.int8(-3), np.int16(-1000), np.int32(10**9), np.int64(-(2**50)),
        np.float32(0.5), np.float64(0.1), wide[()], out,
    )  # fmt: skip
    machine(1, 1, *given)
    assert out.tolist() == [1, -3, -1000, 10**9, -(2**50), 0.5, 0.1, -5, 2.5, -300]


def test_arrays_that_the_launch_sizes_begin_at_one_address() -> None:
    text = entry(
        ".param .u64 out",
        """
        ld.param.u64 %d1, [out]; mov.u32 %r1, a; mov.u32 %r2, b; mov.u32 %r3, %total_smem_size;
        st.shared.u8 [s], 1; st.global.v2.u32 [%d1], {%r1, %r2}; st.global.u32 [%d1+8], %r3; ret;""",
        outside="""
        .extern .shared .align 1 .b8 a[]; .extern .shared .align 16 .b8 b[]; .shared .b8 s[3];""",
    )
    out = np.zeros(3, np.uint32)
    Machine(text)(1, 1, out, shared=32)
    assert out.tolist() == [16, 16, 48]


def test_more_shared_memory_than_the_usual_limit_can_be_had(cuda: Cuda) -> None:
    machine = cuda("""
    extern "C" __global__ void k(int* out, int last) {
        extern __shared__ int s[]; s[last - threadIdx.x] = threadIdx.x; __syncthreads();
        out[threadIdx.x] = s[last - 31 + threadIdx.x]; }""")
    out = np.zeros(32, np.int32)
    size = machine.device.limits.shared_optin
    machine(1, 32, out, np.int32(size // 4 - 1), shared=size)
    assert out.tolist() == list(range(31, -1, -1))


def test_parameters_are_read_before_a_launch_returns(compiler: Builder) -> None:
    source = 'extern "C" __global__ void k(int* out, int v) { out[threadIdx.x] = v; }'
    machine = Machine(compiler.build(Program.of(source), "sm_90"))
    out = np.zeros(4, np.int32)
    submit = machine.module.function("k").prepare(base.Geometry((1, 1, 1), (4, 1, 1)), machine.stream)
    value = ctypes.c_int(5)
    address = ctypes.c_uint64(out.ctypes.data)
    pointers = (ctypes.c_void_p * 2)(ctypes.addressof(address), ctypes.addressof(value))
    with machine.device.host_memory.register(out.ctypes.data, out.nbytes, True):
        for number in (5, 6):
            value.value = number
            assert submit(ctypes.addressof(pointers), 0)[0] == 0
            value.value = 0
            assert out.tolist() == [number] * 4


def test_threads_of_the_host_can_launch_at_once(compiler: Builder) -> None:
    source = 'extern "C" __global__ void k(int* out, int v) { atomicAdd(out, v); }'
    machine = Machine(compiler.build(Program.of(source), "sm_90"))
    out = np.zeros(1, np.int32)
    errors = []

    def work() -> None:
        try:
            for _ in range(20):
                machine(2, 40, out, np.int32(3))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert out[0] == 4 * 20 * 80 * 3


def test_a_fault_leaves_the_device_usable(cuda: Cuda) -> None:
    machine = cuda('extern "C" __global__ void k(int* out, int i) { out[i] = 1; }')
    out = np.zeros(4, np.int32)
    with pytest.raises(DeviceError):
        machine(1, 1, out, np.int32(4))
    machine(1, 1, out, np.int32(3))
    assert out.tolist() == [0, 0, 0, 1]
