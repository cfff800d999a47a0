"""The runtime on a GPU: concurrent work, streams of other libraries, faults, contexts."""

from __future__ import annotations

import ctypes
import json
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from preheat.build.builder import Builder
from preheat.devices.kernel import Kernel
from preheat.devices.launch import Launch
from preheat.errors import DriverError, InputError, LaunchError
from preheat.gpu import Gpu
from preheat.model.program import Program
from tests.conftest import SAXPY, Recorder
from tests.devices.support import KERNELS, import_or_skip, saxpy_case
from tests.processes import expect_success, start_python
from tests.threads import run_in_thread

pytestmark = pytest.mark.gpu

N = 1 << 20
SLOW = 100_000_000  # cycles: some 50 milliseconds

SOURCE = """
extern "C" __global__ void spin(long long cycles) {
    long long start = clock64();
    while (clock64() - start < cycles) { }
}
extern "C" __global__ void copy(const float* x, float* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = x[i];
}
extern "C" __global__ void ranks(int* out) {
    unsigned rank, count;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(count));
    out[blockIdx.x] = rank * 100 + count;
}
extern "C" __global__ void meet(int* arrived, int* out) {
    atomicAdd(arrived, 1);
    while (atomicAdd(arrived, 0) < gridDim.x) { }
    out[blockIdx.x] = *(volatile int*)arrived;
}
extern "C" __global__ void early(int* data) {
    asm volatile("griddepcontrol.launch_dependents;");
    long long start = clock64();
    while (clock64() - start < 20000000) { }
    data[threadIdx.x] += 1;
}
extern "C" __global__ void late(const int* data, int* out) {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    out[threadIdx.x] = data[threadIdx.x] * 2;
}
"""

TILE = """
struct __align__(64) Map { unsigned long long words[16]; };

extern "C" __global__ void tile(const __grid_constant__ Map map, int x, int y, float* out) {
    __shared__ __align__(128) float room[8 * 16];
    __shared__ __align__(8) unsigned long long barrier;
    unsigned to = (unsigned)__cvta_generic_to_shared(room);
    unsigned at = (unsigned)__cvta_generic_to_shared(&barrier);
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(at));
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 512;" :: "r"(at));
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
            "[%0], [%1, {%2, %3}], [%4];"
            :: "r"(to), "l"(&map), "r"(x), "r"(y), "r"(at) : "memory");
    }
    __syncthreads();
    asm volatile(
        "{ .reg .pred there; again: mbarrier.try_wait.parity.shared::cta.b64 there, [%0], 0; "
        "@!there bra again; }" :: "r"(at) : "memory");
    out[threadIdx.x] = room[threadIdx.x];
}
"""


@pytest.fixture
def gpu(open_device: Callable[..., Gpu]) -> Gpu:
    return open_device("cuda")


def kernel(gpu: Gpu, name: str) -> Kernel:
    return gpu.kernel(SOURCE, name)


def grid_of(n: int) -> int:
    return -(-n // 256)


def linger(gpu: Gpu, stream: object = None) -> None:
    """Keep a stream busy for a while."""
    kernel(gpu, "spin").launch(SLOW, grid=1, block=1, stream=stream)


class Foreign:
    """A stream by the protocol that every library speaks."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self._handle)


# torch


@pytest.mark.parametrize("warm", [0, 4])
@pytest.mark.parametrize("side", [False, True], ids=["default stream", "side stream"])
def test_a_launch_comes_after_what_torch_does_to_its_operands(side: bool, warm: int, gpu: Gpu) -> None:
    torch = import_or_skip("torch")
    stream = torch.cuda.Stream() if side else torch.cuda.default_stream()
    copy = kernel(gpu, "copy")
    with torch.cuda.stream(stream):
        x, out = torch.zeros(N, device="cuda"), torch.zeros(N, device="cuda")
        for _ in range(warm):
            copy[grid_of(N), 256](x, out, N)
        torch.cuda._sleep(SLOW)
        x.fill_(3.0)
        copy[grid_of(N), 256](x, out, N)
        assert torch.equal(out, torch.full_like(out, 3.0))


@pytest.mark.parametrize("warm", [0, 4])
def test_own_arrays_among_torch_tensors_are_ordered_both_ways(warm: int, gpu: Gpu) -> None:
    torch = import_or_skip("torch")
    copy = kernel(gpu, "copy")
    with torch.cuda.stream(torch.cuda.Stream()):
        x = torch.zeros(N, device="cuda")
        own = gpu.zeros(N)
        for _ in range(warm):
            copy[grid_of(N), 256](x, own, N)
        torch.cuda._sleep(SLOW)
        x.fill_(5.0)
        copy[grid_of(N), 256](x, own, N)  # in torch's stream
        copy[grid_of(N), 256](own, own, N)  # in preheat's stream, after it
        assert (own.numpy() == 5.0).all()
        linger(gpu)
        own.fill(7.0)  # in preheat's stream, delayed
        copy[grid_of(N), 256](own, x, N)  # in torch's stream, after it
        assert torch.equal(x, torch.full_like(x, 7.0))


def test_an_explicit_stream_waits_for_torchs(gpu: Gpu) -> None:
    torch = import_or_skip("torch")
    out = gpu.zeros(N)
    stream = gpu.stream()
    with torch.cuda.stream(torch.cuda.Stream()):
        x = torch.zeros(N, device="cuda")
        torch.cuda._sleep(SLOW)
        x.fill_(3.0)
        kernel(gpu, "copy").launch(x, out, N, grid=grid_of(N), block=256, stream=stream)
    assert (out.numpy() == 3.0).all()


def test_a_tensor_dropped_after_its_launch_is_not_overwritten_under_it(gpu: Gpu) -> None:
    torch = import_or_skip("torch")
    out = gpu.zeros(N)
    stream = gpu.stream()
    x = torch.full((N,), 3.0, device="cuda")
    torch.cuda.synchronize()
    linger(gpu, stream)
    kernel(gpu, "copy").launch(x, out, N, grid=grid_of(N), block=256, stream=stream)
    del x
    for _ in range(4):  # would get the memory of x, were it free
        torch.full((N,), 9.0, device="cuda")
    torch.cuda.synchronize()
    stream.synchronize()
    assert (out.numpy() == 3.0).all()


def test_torch_streams_are_streams(gpu: Gpu) -> None:
    torch = import_or_skip("torch")
    out = gpu.zeros(N)
    x = torch.zeros(N, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(SLOW)
        x.fill_(4.0)
    copy = kernel(gpu, "copy")
    for stream in (side, Foreign(side.cuda_stream), side):
        copy.launch(x, out.fill(0), N, grid=grid_of(N), block=256, stream=stream)
        assert (out.numpy() == 4.0).all()


@pytest.mark.parametrize("warm", [0, 4])
def test_torch_tensors_are_checked_like_arrays(warm: int, gpu: Gpu) -> None:
    torch = import_or_skip("torch")
    made = saxpy_case(gpu)
    x = torch.from_numpy(made.xs).cuda()
    y = torch.from_numpy(made.ys).cuda()
    for _ in range(warm):
        made.saxpy[5, 64](2.0, x, y, made.n)
    for wrong, words in (
        (x.double(), r"argument 1: float const\* cannot take a Tensor of float64"),
        (x.cpu(), "argument 1: Tensor is in host memory, the kernel is on cuda:0"),
    ):
        with pytest.raises(LaunchError, match=words):
            made.saxpy[5, 64](2.0, wrong, y, made.n)
    made.saxpy[5, 64](2.0, x, y, made.n)
    expected = made.ys + 2.0 * (warm + 1) * made.xs
    np.testing.assert_allclose(y.cpu().numpy(), expected, rtol=1e-5, atol=1e-5)


def test_a_fast_launch_takes_tensors_of_a_library_seen_later(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = import_or_skip("torch")
    kernel = gpu.kernel(SAXPY, "saxpy")
    x = gpu.zeros(33)
    y = gpu.zeros(33)
    for _ in range(4):
        kernel[1, 64](2.0, x, y, 33)
    left, right = torch.rand(33, device="cuda"), torch.rand(33, device="cuda")
    expected = right + 3 * 2.0 * left
    kernel[1, 64](2.0, left, right, 33)  # prepares torch's stream
    monkeypatch.setattr(Launch, "run", None)
    for _ in range(2):
        kernel[1, 64](2.0, left, right, 33)
    torch.testing.assert_close(right, expected)


def test_strided_tensors_are_not_copied_as_if_they_were_dense(gpu: Gpu) -> None:
    torch, cupy = import_or_skip("torch"), import_or_skip("cupy")
    dense = torch.arange(6.0, device="cuda").reshape(2, 3)
    flat = cupy.arange(6, dtype="float32")
    np.testing.assert_array_equal(gpu.array(dense).numpy(), dense.cpu().numpy())
    for strided in (dense.T, flat[::2], flat.reshape(2, 3).T):
        with pytest.raises(InputError, match="is not contiguous"):
            gpu.array(strided)


@pytest.mark.parametrize("bound", [False, True])
def test_two_libraries_in_one_launch_are_ordered_both_ways(bound: bool, gpu: Gpu) -> None:
    torch, cupy = import_or_skip("torch"), import_or_skip("cupy")
    kernel = gpu.kernel(SAXPY, "saxpy")
    for _ in range(5):
        with torch.cuda.stream(torch.cuda.Stream()), cupy.cuda.Stream(non_blocking=True):
            torch.cuda._sleep(20_000_000)
            left = torch.full((33,), 3.0, device="cuda")
            right = cupy.ones(33, dtype="float32")
            if bound:
                kernel.bind(2.0, left, right, 33, grid=1, block=64)()
            else:
                kernel[1, 64](2.0, left, right, 33)
            assert cupy.asnumpy(right).tolist() == [7.0] * 33


def test_a_bound_launch_orders_own_arrays_among_torch_tensors(gpu: Gpu) -> None:
    torch = import_or_skip("torch")
    kernel = gpu.kernel(SAXPY, "saxpy")
    y = gpu.zeros(33)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(50_000_000)
        x = torch.full((33,), 4.0, device="cuda")
        bound = kernel.bind(0.5, x, y, 33, grid=1, block=64)
        bound()
        bound()
    assert y.numpy().tolist() == [4.0] * 33


def test_arrays_allocated_in_a_default_stream_can_be_dropped_anywhere(gpu: Gpu) -> None:
    torch = import_or_skip("torch")
    made = [gpu.array(np.ones(1000, "float32"), stream=torch.cuda.default_stream()) for _ in range(3)]
    assert made[0].numpy().sum() == 1000

    def drop() -> None:
        made.clear()
        gpu.zeros(5).numpy()

    thread = threading.Thread(target=drop)
    thread.start()
    thread.join()
    gpu.synchronize()


def test_torch_tensors_with_gradients_views_and_halves_pass(gpu: Gpu) -> None:
    torch = import_or_skip("torch")
    made = saxpy_case(gpu)
    x = torch.from_numpy(made.xs).cuda().requires_grad_()
    parameter = torch.nn.Parameter(torch.from_numpy(made.xs).cuda())
    for times, given in enumerate((x, parameter, x.detach(), torch.stack([x, x])[1]), start=1):
        made.saxpy[5, 64](2.0, given, made.y, made.n)
        made.check(times)
    source = """
        #include <cuda_bf16.h>
        extern "C" __global__ void twice(__nv_bfloat16* x) {
            x[threadIdx.x] = x[threadIdx.x] + x[threadIdx.x];
        }
    """
    small = torch.arange(32, device="cuda").to(torch.bfloat16)
    for _ in range(4):
        gpu.kernel(source, "twice")[1, 32](small)
    assert torch.equal(small.cpu(), (torch.arange(32) * 16).to(torch.bfloat16))


def test_arrays_and_torch_tensors_share_memory_both_ways(gpu: Gpu) -> None:
    torch = import_or_skip("torch")
    made = gpu.array(np.arange(12, dtype=np.float32).reshape(3, 4))
    for view in (torch.from_dlpack(made), torch.as_tensor(made, device="cuda")):
        assert view.data_ptr() == made.address
        assert tuple(view.shape) == (3, 4)
        view += 1
    torch.cuda.synchronize()
    assert np.array_equal(made.numpy(), np.arange(12).reshape(3, 4) + 2)
    copy = gpu.array(view)
    view.zero_()
    torch.cuda.synchronize()
    assert np.array_equal(copy.numpy(), np.arange(12).reshape(3, 4) + 2)
    with pytest.raises(ValueError, match="not contiguous"):
        gpu.array(view.T)


def test_torch_sees_what_a_slow_kernel_wrote(gpu: Gpu) -> None:
    torch = import_or_skip("torch")
    made = gpu.zeros(N)
    linger(gpu)
    made.fill(6.0)
    assert bool((torch.from_dlpack(made) == 6.0).all())
    linger(gpu)
    made.fill(8.0)
    with torch.cuda.stream(torch.cuda.Stream()):
        assert bool((torch.from_dlpack(made) == 8.0).all())


def test_memory_that_torch_holds_outlives_its_array(gpu: Gpu) -> None:
    torch = import_or_skip("torch")
    made = gpu.array(np.full(N, 3.0, np.float32))
    held = torch.from_dlpack(made)
    del made
    others = [gpu.array(np.full(N, 9.0, np.float32)) for _ in range(4)]
    assert bool((held == 3.0).all())
    torch.cuda._sleep(SLOW)
    seen = held.clone()  # late, in torch's stream
    del held
    others += [gpu.array(np.full(N, 9.0, np.float32)) for _ in range(4)]
    assert bool((seen == 3.0).all())


# CuPy, Numba, JAX


@pytest.mark.parametrize("warm", [0, 4])
@pytest.mark.parametrize("side", [False, True], ids=["default stream", "side stream"])
def test_a_launch_comes_after_what_cupy_does_to_its_operands(side: bool, warm: int, gpu: Gpu) -> None:
    cupy = import_or_skip("cupy")
    stream = cupy.cuda.Stream(non_blocking=True) if side else cupy.cuda.Stream.null
    copy = kernel(gpu, "copy")
    own = gpu.zeros(N)
    with stream:
        x, out = cupy.zeros(N, cupy.float32), cupy.zeros(N, cupy.float32)
        for _ in range(warm):
            copy[grid_of(N), 256](x, out, N)
        linger(gpu, cupy.cuda.get_current_stream())
        x.fill(3.0)
        copy[grid_of(N), 256](x, out, N)
        copy[grid_of(N), 256](x, own, N)
        assert bool((out == 3.0).all())
        assert (own.numpy() == 3.0).all()
        with pytest.raises(
            LaunchError, match=r"argument 0: float const\* cannot take an ndarray of float64"
        ):
            copy[grid_of(N), 256](x.astype(cupy.float64), out, N)


def test_arrays_and_cupy_arrays_share_memory_both_ways(gpu: Gpu) -> None:
    cupy = import_or_skip("cupy")
    made = gpu.array(np.arange(12, dtype=np.int32).reshape(3, 4))
    for view in (cupy.asarray(made), cupy.from_dlpack(made)):
        assert view.data.ptr == made.address
        view += 1
    cupy.cuda.runtime.deviceSynchronize()
    assert np.array_equal(made.numpy(), np.arange(12).reshape(3, 4) + 2)
    assert np.array_equal(gpu.array(view).numpy(), np.arange(12).reshape(3, 4) + 2)
    linger(gpu)
    made.fill(6)
    with cupy.cuda.Stream(non_blocking=True):
        assert bool((cupy.asarray(made) == 6).all())


def test_numba_arrays_pass_without_a_copy(gpu: Gpu) -> None:
    cuda = import_or_skip("numba.cuda")
    made = saxpy_case(gpu)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x, y = cuda.to_device(made.xs), cuda.to_device(made.ys)
        for _ in range(4):
            made.saxpy[5, 64](2.0, x, y, made.n)
        gpu.synchronize()
        found = y.copy_to_host()
    np.testing.assert_allclose(found, made.ys + 8.0 * made.xs, rtol=1e-5, atol=1e-5)


JAX = """
import sys
from pathlib import Path
try:
    import jax
    import jax.numpy as jnp
    jax.devices("gpu")
except (ImportError, RuntimeError) as missing:
    print("skip", missing)
    sys.exit()
import preheat
gpu = preheat.device()
saxpy = gpu.kernel(Path(sys.argv[1]).read_text(), "saxpy")
x = jnp.arange(1009, dtype=jnp.float32) * 3
y = gpu.zeros(1009)
for _ in range(4):
    saxpy[4, 256](2.0, x, y, 1009)
print(bool((y.numpy() == 24.0 * jnp.arange(1009)).all()), jax.dlpack.from_dlpack(y).shape)
"""


def test_jax_arrays_pass_without_a_copy(tmp_path: Path) -> None:
    file = tmp_path / "saxpy.txt"
    file.write_text(SAXPY)
    out = expect_success(start_python(JAX, str(file), env={"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}))
    if out.startswith("skip"):
        pytest.skip(f"JAX has no GPU here: {out}")
    assert out.split("\n")[0] == "True (1009,)"


# Memory and streams


def test_memory_used_in_a_second_stream_is_not_overwritten_under_it(gpu: Gpu) -> None:
    out = gpu.zeros(N)
    stream = gpu.stream()
    for close in (True, False):
        x = gpu.array(np.full(N, 3.0, np.float32))
        linger(gpu, stream)
        kernel(gpu, "copy").launch(x, out, N, grid=grid_of(N), block=256, stream=stream)
        if close:
            x.close()
        del x
        others = [gpu.array(np.full(N, 9.0, np.float32)) for _ in range(4)]
        assert (out.numpy() == 3.0).all()
        del others


@pytest.mark.parametrize("warm", [0, 5])
def test_memory_used_in_a_foreign_stream_is_not_overwritten_under_it(warm: int, gpu: Gpu) -> None:
    torch = import_or_skip("torch")
    out = gpu.zeros(N)
    stream = torch.cuda.Stream()
    copy = kernel(gpu, "copy")
    x = gpu.array(np.full(N, 3.0, np.float32))
    for _ in range(warm):
        copy.launch(x, out, N, grid=grid_of(N), block=256, stream=stream)
    linger(gpu, stream)
    copy.launch(x, out, N, grid=grid_of(N), block=256, stream=stream)
    x.close()
    others = [gpu.array(np.full(N, 9.0, np.float32)) for _ in range(4)]
    assert (out.numpy() == 3.0).all()
    del others


def test_a_second_stream_waits_for_what_was_written(gpu: Gpu) -> None:
    x = gpu.zeros(N)
    out = gpu.zeros(N)
    stream = gpu.stream()
    copy = kernel(gpu, "copy")
    for value in (3.0, 4.0, 5.0, 6.0):
        linger(gpu)
        x.fill(value)  # late, in the device's own stream
        copy.launch(x, out, N, grid=grid_of(N), block=256, stream=stream)
        assert (out.numpy() == value).all()


def test_a_stream_of_another_library_may_be_gone_when_memory_is_freed(gpu: Gpu) -> None:
    from cuda.bindings import driver

    with gpu._device.current():  # type: ignore[attr-defined]
        code, handle = driver.cuStreamCreate(1)
    assert code == 0
    x = gpu.array(np.full(N, 3.0, np.float32))
    out = gpu.zeros(N)
    copy = kernel(gpu, "copy")
    copy.launch(x, out, N, grid=grid_of(N), block=256, stream=Foreign(int(handle)))
    assert driver.cuStreamDestroy(handle)[0] == 0
    x.close()
    assert (out.numpy() == 3.0).all()
    gpu.synchronize()


@pytest.mark.hardware("it needs a kernel that runs for long beside the host")
def test_events_measure_what_the_gpu_did(gpu: Gpu) -> None:
    started = time.perf_counter()
    linger(gpu)
    before = gpu.record(timing=True)
    linger(gpu)
    after = gpu.record(timing=True)
    assert not after.done()
    after.synchronize()
    assert before.done()
    assert 0.02 < after.elapsed(before) < time.perf_counter() - started


# Launches with attributes


@pytest.mark.parametrize("size", [1, 2, 8, 16])
def test_blocks_of_a_cluster_know_one_another(size: int, gpu: Gpu) -> None:
    out = gpu.zeros(32, "int32")
    for _ in range(3):
        kernel(gpu, "ranks").launch(out.fill(0), grid=32, block=1, cluster=size)
        assert np.array_equal(out.numpy(), np.arange(32) % size * 100 + size)


def test_a_cooperative_grid_can_meet(gpu: Gpu) -> None:
    blocks = gpu.limits.processors
    out = gpu.zeros(blocks, "int32")
    for _ in range(3):
        arrived = gpu.zeros(1, "int32")
        kernel(gpu, "meet").launch(arrived, out, grid=blocks, block=1, cooperative=True)
        assert (out.numpy() == blocks).all()
    with pytest.raises(
        DriverError, match="launch of meet failed: CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE"
    ):
        kernel(gpu, "meet").launch(arrived, out, grid=1_000_000, block=1024, cooperative=True)
    assert (out.numpy() == blocks).all()  # nothing is lost


def test_a_programmatic_launch_starts_early_and_waits_where_it_says(gpu: Gpu) -> None:
    data, out = gpu.zeros(32, "int32"), gpu.zeros(32, "int32")
    for times in range(1, 5):
        kernel(gpu, "early")[1, 32](data)
        kernel(gpu, "late").launch(data, out, grid=1, block=32, programmatic=True)
        assert (out.numpy() == 2 * times).all()


@pytest.mark.hardware("it needs cuTensorMapEncodeTiled")
def test_a_tensor_map_is_passed_by_value(gpu: Gpu) -> None:
    from cuda.bindings import driver

    data = np.arange(64 * 48, dtype=np.float32).reshape(48, 64)
    source = gpu.array(data)
    wide, narrow = driver.cuuint64_t, driver.cuuint32_t
    code, tensor_map = driver.cuTensorMapEncodeTiled(
        driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
        2,
        source.address,
        [wide(64), wide(48)],
        [wide(64 * 4)],
        [narrow(16), narrow(8)],
        [narrow(1), narrow(1)],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_NONE,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_NONE,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    assert code == 0
    raw = ctypes.string_at(int(tensor_map.getPtr()), 128)
    tile = gpu.kernel(TILE, "tile")
    out = gpu.zeros(128)
    for given in (tensor_map, raw, tensor_map, raw):
        for x, y in ((0, 0), (16, 8), (48, 40)):
            tile[1, 128](given, x, y, out.fill(0))
            assert np.array_equal(out.numpy().reshape(8, 16), data[y : y + 8, x : x + 16])


# Threads and contexts


def test_another_context_may_be_current(gpu: Gpu) -> None:
    from cuda.bindings import driver

    made = saxpy_case(gpu)

    def work() -> None:
        code, context = driver.cuCtxCreate(None, 0, driver.cuDeviceGet(0)[1])
        assert code == 0
        made.launch(4)
        made.check(4)
        default = Foreign(0)  # the default stream of whichever context is current
        for _ in range(4):
            made.saxpy.launch(2.0, made.x, made.y, made.n, grid=5, block=64, stream=default)
        made.check(8)
        other = saxpy_case(gpu, 33)
        other.launch(4)
        other.check(4)
        gpu.synchronize()
        assert int(driver.cuCtxGetCurrent()[1]) == int(context)  # as it was
        assert driver.cuCtxDestroy(context)[0] == 0

    run_in_thread(work)
    made.launch()
    made.check(9)


# Faults, each in its own process, because the driver does not recover within a process

FAULT = """
import json
import sys
import preheat
gpu = preheat.device()
kernel = gpu.kernel('extern "C" __global__ void wild(int* x) { *x = 1; }', "wild")
array, bound = gpu.zeros(3), kernel.bind(preheat.Pointer(8), grid=1, block=1)

def said(do):
    try:
        do()
    except preheat.PreheatError as error:
        return [type(error).__name__, str(error)]

wild = lambda: kernel[1, 1](preheat.Pointer(8))
doors = [wild, gpu.synchronize, array.numpy, lambda: gpu.empty(3), bound]
print(json.dumps([said(door) for door in doors]))
"""


def test_an_illegal_address_loses_the_context_with_its_name() -> None:
    launch, synchronize, *later = json.loads(expect_success(start_python(FAULT)))
    assert launch is None  # the launch itself was fine
    assert synchronize[0] == "DriverError"
    assert "CUDA_ERROR_ILLEGAL_ADDRESS (700)" in synchronize[1]
    assert [name for name, _ in later] == ["StaleBufferError", "ContextLostError", "ContextLostError"]
    assert all("cuda:0 is lost after an error: cuCtxSynchronize failed" in words for _, words in later)


def test_a_blocking_process_names_the_kernel() -> None:
    launch, *later = json.loads(expect_success(start_python(FAULT, env={"PREHEAT_BLOCKING": "1"})))
    assert launch[0] == "DriverError"
    assert launch[1].startswith("wild: ")
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in launch[1]
    assert all("cuda:0 is lost after an error: wild: " in words for _, words in later)


FORK = """
import os
import preheat
gpu = preheat.device()
array = gpu.zeros(3)
child = os.fork()
if child == 0:
    try:
        gpu.empty(3)
    except preheat.ContextLostError as error:
        print(error, "|", error.hint, flush=True)
    array.close()
    os._exit(0)
os.waitpid(child, 0)
print(array.numpy().tolist())
"""


def test_a_fork_after_use_is_named_in_the_child_and_harmless_in_the_parent() -> None:
    child, parent = expect_success(start_python(FORK, env={"PYTHONWARNINGS": "ignore"})).splitlines()
    assert child.startswith("cuda:0: this process was forked from one that was using the GPU")
    assert "'spawn' or 'forkserver'" in child
    assert parent == "[0.0, 0.0, 0.0]"


# Code the driver does not take


def test_code_of_another_gpu_in_the_cache_is_purged_and_rebuilt(
    open_builder: Callable[..., Builder], open_device: Callable[..., Gpu], recorder: Recorder
) -> None:
    program = Program.of(SAXPY)
    builder = open_builder()
    right, other = builder.build(program, "sm_90"), builder.build(program, "sm_100")
    builder.cache.put(right.digest, replace(right, cubin=other.cubin).encode())
    del right, builder
    recorder.forgive = True
    gpu = open_device("cuda", builder=open_builder())
    made = saxpy_case(gpu)
    again = gpu.kernel(program, "saxpy")
    (damaged,) = recorder.named("damaged")
    assert "CUDA_ERROR_" in damaged["reason"]
    again[5, 64](2.0, made.x, made.y, made.n)
    made.check(1)
    assert again.module.artifact.cubin == open_builder().build(program, "sm_90").cubin


def test_the_driver_compiles_ptx_where_it_may(
    open_device: Callable[..., Gpu], shared_builder: Builder
) -> None:
    """The road for a GPU newer than the compiler, taken on purpose."""
    gpu = open_device("cuda", jit=True)
    artifact = shared_builder.build(Program.of(KERNELS), "sm_80")
    try:
        module = gpu._device.load(artifact, jit=True)
    except DriverError as error:
        if error.code != 222:
            raise
        pytest.skip(f"the compiler is newer than the driver: {error}")
    assert module.function("saxpy").attributes.registers > 0
    module.unload()
