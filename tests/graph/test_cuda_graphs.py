"""Graphs on a GPU: work of other libraries inside captures, and replays beside their work."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from preheat.devices.kernel import Kernel
from preheat.errors import CaptureError
from preheat.gpu import Gpu
from preheat.graph.graph import Graph
from tests.devices.support import import_or_skip
from tests.graph.support import axpy_case, line_here, scalar_log
from tests.threads import run_in_thread

pytestmark = pytest.mark.gpu

N = 1 << 18
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
extern "C" __global__ void blend(const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = y[i] * 0.75f + sinf(x[i]);
}
"""
GRID = (N // 256, 256)


@pytest.fixture
def gpu(open_device: Callable[..., Gpu]) -> Gpu:
    return open_device("cuda")


@pytest.fixture
def torch() -> Any:
    found = import_or_skip("torch")
    found.ones(1, device="cuda")
    return found


@pytest.fixture
def copy(gpu: Gpu) -> Kernel:
    return gpu.kernel(SOURCE, "copy")


def linger(gpu: Gpu, stream: object = None) -> None:
    """Keep a stream busy for a while."""
    gpu.kernel(SOURCE, "spin").launch(SLOW, grid=1, block=1, stream=stream)


def usable(gpu: Gpu, torch: Any) -> None:
    """Check that preheat and torch work as before."""
    made = axpy_case(gpu)
    with gpu.capture() as graph:
        made.launch()
    graph.replay()
    made.check_launches(1)
    torch.cuda.synchronize()
    assert torch.ones(3, device="cuda").sum().item() == 3


# torch inside a capture


def test_work_of_torch_is_captured_in_order_with_work_of_preheat(
    gpu: Gpu, torch: Any, copy: Kernel
) -> None:
    x = torch.full((N,), 3.0, device="cuda")
    y = torch.zeros(N, device="cuda")
    own, other = gpu.zeros(N), gpu.zeros(N)
    torch.mul(x, 2.0, out=y).add_(1.0)  # The call loads torch's kernels.
    y.fill_(-1.0)
    before = torch.cuda.current_stream()
    with gpu.capture() as graph:
        assert torch.cuda.current_stream().cuda_stream == graph.stream.__cuda_stream__()[1]
        other.fill(8.0)
        torch.mul(x, 2.0, out=y)
        copy[GRID](y, own, N)
        y.add_(1.0)
        copy[GRID](y, other, N)
    assert torch.cuda.current_stream() == before
    assert [node.foreign for node in graph.nodes] == [False, True, False, True, False]
    assert [node.name for node in graph.nodes if not node.foreign] == ["fill", "copy", "copy"]
    assert all(node.kind == "kernel" and node.name for node in graph.foreign)
    assert repr(graph).endswith("5 nodes, 2 of other libraries on cuda:0>")
    assert torch.equal(y, torch.full_like(y, -1.0))  # nothing ran yet
    for value in (3.0, 5.0):
        x.fill_(value)
        graph.replay()
        assert torch.equal(y, torch.full_like(y, 2 * value + 1))
        assert np.array_equal(own.numpy(), np.full(N, 2 * value, np.float32))
        assert np.array_equal(other.numpy(), np.full(N, 2 * value + 1, np.float32))


def test_copies_of_torch_and_of_preheat_are_distinguished(gpu: Gpu, torch: Any) -> None:
    x = torch.full((N,), 3.0, device="cuda")
    y = torch.zeros(N, device="cuda")
    own = gpu.array(np.full(N, 4, np.float32))
    other = gpu.zeros(N)
    with gpu.capture() as graph:
        y.copy_(x)
        own.copy_from(other)
        mine = line_here(-1)
        y.zero_()
        other.fill(1.0)
        y.copy_(x)
    assert [node.foreign for node in graph.nodes] == [True, False, True, False, True]
    assert graph.nodes[1].where == mine
    assert graph.nodes[1].kind == "copy"
    assert graph.nodes[3].kind == "fill"


def test_tensors_allocated_inside_live_as_long_as_the_graph(gpu: Gpu, torch: Any) -> None:
    x = torch.full((N,), 2.0, device="cuda")
    y = torch.zeros(N, device="cuda")
    torch.add(x * 3.0 + 1.0, x, out=y)
    with gpu.capture() as graph:
        middle = x * 3.0 + 1.0
        torch.add(middle, middle, out=y)
    del middle
    gc.collect()
    torch.cuda.empty_cache()
    junk = [torch.full((N,), -7.0, device="cuda") for _ in range(100)]
    own = [gpu.array(np.full(N, -9, np.float32)) for _ in range(20)]
    for value in (5.0, 6.0):
        x.fill_(value)
        graph.replay()
        assert torch.equal(y, torch.full_like(y, 2 * (value * 3 + 1)))
    assert all(bool((each == -7.0).all()) for each in junk)  # nor does it write over others
    assert all((each.numpy() == -9).all() for each in own)


def test_an_output_allocated_inside_is_refreshed_by_every_replay(gpu: Gpu, torch: Any) -> None:
    x = torch.full((N,), 2.0, device="cuda")
    _ = x * x
    with gpu.capture() as graph:
        y = x * x
    for value in (3.0, 4.0):
        x.fill_(value)
        graph.replay()
        assert torch.equal(y, torch.full_like(y, value * value))


def test_a_synchronisation_of_torch_inside_comes_out_with_its_own_message(
    gpu: Gpu, torch: Any, copy: Kernel
) -> None:
    x = torch.full((N,), 2.0, device="cuda")
    y = torch.zeros(N, device="cuda")
    before = torch.cuda.current_stream()

    def body() -> None:
        with gpu.capture():
            copy[GRID](x, y, N)
            y[0].item()

    for _ in range(3):
        with pytest.raises(RuntimeError, match="captur"):
            body()
        assert torch.cuda.current_stream() == before
        usable(gpu, torch)
    assert torch.equal(y, torch.zeros_like(y))


def test_a_synchronisation_that_was_swallowed_is_placed_behind_the_last_good_line(
    gpu: Gpu, torch: Any, copy: Kernel
) -> None:
    x = torch.full((N,), 2.0, device="cuda")
    y = torch.zeros(N, device="cuda")
    graph = gpu.capture().begin()
    copy[GRID](x, y, N)
    good = line_here(-1)
    with suppress(RuntimeError):
        y[0].item()
    assert graph.status == "invalidated"
    with pytest.raises(CaptureError, match="a call of another library invalidated the capture") as bad:
        graph.end()
    assert bad.value.where == good
    usable(gpu, torch)


def test_arrays_of_preheat_are_used_by_torch_inside(gpu: Gpu, torch: Any) -> None:
    own = gpu.array(np.full(N, 2, np.float32))
    out = torch.zeros(N, device="cuda")
    torch.mul(out, 2.0, out=out)
    with gpu.capture() as graph:
        torch.mul(torch.from_dlpack(own), 10.0, out=out)
    own.fill(3.0)
    graph.replay()
    assert torch.equal(out, torch.full_like(out, 30.0))
    own.fill(4.0)  # The copy is on preheat's stream; the replay in torch's stream waits for it.
    graph.replay()
    assert torch.equal(out, torch.full_like(out, 40.0))
    del own  # the graph holds it
    gc.collect()
    gpu.synchronize()
    others = [gpu.array(np.full(N, -1, np.float32)) for _ in range(8)]
    graph.replay()
    assert torch.equal(out, torch.full_like(out, 40.0))
    del others


# Replays among torch's work


@pytest.mark.parametrize("side", [False, True], ids=["default stream", "side stream"])
def test_a_replay_is_ordered_with_what_torch_does_before_and_after(
    side: bool, gpu: Gpu, torch: Any, copy: Kernel
) -> None:
    x, y = torch.zeros(N, device="cuda"), torch.zeros(N, device="cuda")
    with gpu.capture() as graph:
        copy[GRID](x, y, N)
    assert graph.foreign == ()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream() if side else torch.cuda.default_stream()):
        for value in (3.0, 4.0, 5.0):
            torch.cuda._sleep(SLOW)
            x.fill_(value)
            graph.replay()
            got = y.clone()
            x.fill_(-1.0)
            assert torch.equal(got, torch.full_like(got, value))
    torch.cuda.synchronize()


def test_a_replay_can_be_sent_to_a_stream_of_torch(gpu: Gpu, torch: Any) -> None:
    made = axpy_case(gpu)
    stream = torch.cuda.Stream()
    with gpu.capture() as graph:
        made.launch()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLOW)
        graph.replay(stream=stream)
        event = stream.record_event()
    assert not event.query()  # it waits its turn there
    stream.synchronize()
    graph.replay(stream=torch.cuda.current_stream(), synchronize=True)
    made.check_launches(2)


def test_tensors_are_kept_alive_by_the_graph(gpu: Gpu, torch: Any, copy: Kernel) -> None:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    own = gpu.zeros(N)
    x = torch.full((N,), 2.0, device="cuda")
    with gpu.capture() as graph:
        copy[GRID](x, own, N)
    del x
    gc.collect()
    torch.cuda.empty_cache()
    junk = [torch.full((N,), -7.0, device="cuda") for _ in range(50)]
    graph.replay()
    assert (own.numpy() == 2).all()
    del junk
    graph.close()
    gpu.synchronize()
    gc.collect()
    assert torch.cuda.memory_allocated() == before


def test_a_graph_dropped_behind_a_slow_kernel_keeps_its_tensors_until_it_ran(
    gpu: Gpu, torch: Any, copy: Kernel
) -> None:
    own = gpu.zeros(N)
    x = torch.full((N,), 2.0, device="cuda")
    with gpu.capture() as graph:
        copy[GRID](x, own, N)
    torch.cuda._sleep(SLOW)
    graph.replay()
    del graph, x
    gc.collect()
    with torch.cuda.stream(torch.cuda.Stream()):
        junk = [torch.full((N,), -7.0, device="cuda") for _ in range(20)]
    assert (own.numpy() == 2).all()
    del junk


def test_torchs_default_stream_cannot_be_captured_but_another_can(
    gpu: Gpu, torch: Any, copy: Kernel
) -> None:
    x = torch.full((N,), 2.0, device="cuda")
    y = torch.zeros(N, device="cuda")
    with pytest.raises(CaptureError, match="the legacy default stream cannot be captured"):
        gpu.capture(stream=torch.cuda.default_stream())
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with gpu.capture(stream=stream) as graph:
        assert torch.cuda.current_stream().cuda_stream == graph.stream.handle
        copy[GRID](x, y, N)
    graph.replay(synchronize=True)
    assert torch.equal(y, x)


def test_a_hundred_steps_are_bit_identical_to_eager_ones(gpu: Gpu, torch: Any) -> None:
    blend = gpu.kernel(SOURCE, "blend")
    random = np.random.default_rng(100)
    start = random.standard_normal((2, N)).astype(np.float32)

    def step(x: Any, y: Any) -> None:
        blend[GRID](x, y, N)
        torch.tanh(y, out=x)
        x.mul_(1.25)
        blend[GRID](y, x, N)

    x, y, a, b = (torch.from_numpy(start[i % 2].copy()).cuda() for i in range(4))
    step(torch.ones(N, device="cuda"), torch.ones(N, device="cuda"))
    for turn in range(100):
        if turn % 10 == 0:  # and the one before is dropped
            with gpu.capture() as graph:
                step(x, y)
        graph.replay()
        noise = torch.randn(N, device="cuda").sum()  # eager work between
        step(a, b)
        x.add_(0.125)
        a.add_(0.125)
        del noise
        if turn % 25 == 24:
            assert torch.equal(x.view(torch.int32), a.view(torch.int32))
            assert torch.equal(y.view(torch.int32), b.view(torch.int32))
    assert bool(torch.isfinite(x).all())


# CuPy and others


def test_work_of_cupy_is_captured_where_it_allocates_nothing(gpu: Gpu, copy: Kernel) -> None:
    cupy = import_or_skip("cupy")
    x = cupy.full(N, 3, cupy.float32)
    y = cupy.zeros(N, cupy.float32)
    own = gpu.zeros(N)
    cupy.multiply(x, 2, out=y)
    y.fill(-1)
    cupy.cuda.get_current_stream().synchronize()
    with gpu.capture() as graph:
        cupy.multiply(x, 2, out=y)
        copy[GRID](y, own, N)
    assert [node.foreign for node in graph.nodes] == [True, False]
    assert bool((y == -1).all())
    x.fill(5)
    graph.replay()
    assert bool((y == 10).all())
    assert (own.numpy() == 10).all()


def test_a_replay_follows_the_stream_of_the_library_whose_arrays_it_uses(
    gpu: Gpu, torch: Any, copy: Kernel
) -> None:
    cupy = import_or_skip("cupy")  # torch is in use in this process too
    assert torch.cuda.is_initialized()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        x, y = cupy.zeros(N, cupy.float32), cupy.zeros(N, cupy.float32)
        with gpu.capture() as graph:
            copy[GRID](x, y, N)
        stream.synchronize()
        for value in (3, 4):
            linger(gpu, stream)
            x.fill(value)
            graph.replay()
            assert bool((y == value).all())


class Producer:
    """A tensor of some library that speaks DLPack and nothing else."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor
        self.asked = list[Any]()

    def __dlpack_device__(self) -> tuple[int, int]:
        kind, index = self.tensor.__dlpack_device__()
        return (int(kind), index)

    def __dlpack__(self, *, stream: int | None = None, **more: Any) -> Any:
        self.asked.append(stream)
        return self.tensor.__dlpack__(stream=stream, **more)


def test_tensors_of_any_producer_are_captured_and_kept(gpu: Gpu, torch: Any, copy: Kernel) -> None:
    x = Producer(torch.full((N,), 6.0, device="cuda"))
    own = gpu.zeros(N)
    torch.cuda.synchronize()
    with gpu.capture() as graph:
        copy[GRID](x, own, N)
    assert x.asked == [-1]  # no ordering: a captured stream can wait for nothing outside
    x.tensor.fill_(7.0)
    torch.cuda.synchronize()
    del x
    gc.collect()
    torch.cuda.empty_cache()
    junk = [torch.full((N,), -7.0, device="cuda") for _ in range(20)]
    graph.replay()
    assert (own.numpy() == 7).all()
    del junk


# Threads, contexts, queues


def test_a_replay_works_in_a_thread_that_never_touched_cuda(gpu: Gpu) -> None:
    made = axpy_case(gpu)
    with gpu.capture() as graph:
        made.launch()
    for _ in range(4):
        run_in_thread(graph.replay)
    made.check_launches(4)
    run_in_thread(lambda: graph.replay(synchronize=True))
    run_in_thread(graph.close)
    made.check_launches(5)


def test_a_whole_capture_works_with_another_context_current(gpu: Gpu) -> None:
    from cuda.bindings import driver

    made = axpy_case(gpu)
    step = scalar_log(gpu)
    with gpu.capture() as before:
        made.launch()
    before.replay()

    def work() -> Graph:
        code, context = driver.cuCtxCreate(None, 0, driver.cuDeviceGet(0)[1])
        assert code == 0
        for _ in range(3):
            before.replay()
        with gpu.capture() as inside:
            made.launch()
        inside.replay()
        inside.replay()
        step.captured().replay(step=77)
        made.check_launches(6)
        if not {"torch", "cupy"} & sys.modules.keys():  # which make another one current
            assert int(driver.cuCtxGetCurrent()[1]) == int(context)
        assert driver.cuCtxDestroy(context)[0] == 0
        return inside

    run_in_thread(work).replay()
    made.check_launches(7)
    assert step.seen() == [77]


def test_a_hundred_replays_behind_a_slow_kernel_each_see_their_own_scalar(gpu: Gpu) -> None:
    made = scalar_log(gpu)
    graph = made.captured()
    graph.replay(step=-5)
    gpu.synchronize()
    linger(gpu)
    for turn in range(100):
        graph.replay(step=1000 + turn)
    assert not gpu.record().done()  # all of them were queued ahead
    assert made.seen() == [-5, *range(1000, 1100)]


@pytest.mark.hardware("it needs a kernel that runs for long beside the host")
def test_a_replay_waits_for_nothing_unless_asked(gpu: Gpu) -> None:
    made = axpy_case(gpu)
    with gpu.capture() as graph:
        made.launch()
    graph.replay(synchronize=True)
    assert gpu.record().done()
    linger(gpu)
    for _ in range(10):
        graph.replay()
    assert not gpu.record().done()
    made.check_launches(11)


@pytest.mark.hardware("it needs a kernel that runs for long beside the host")
def test_a_graph_closed_behind_a_slow_kernel_still_runs(gpu: Gpu) -> None:
    made = axpy_case(gpu)
    linger(gpu)  # which loads it
    for how in ("close", "drop"):
        with gpu.capture() as graph:
            linger(gpu)
            made.launch()
        graph.replay()
        if how == "close":
            graph.close()
        del graph
        made.gpu.empty(1)
        assert not gpu.record().done()
    made.check_launches(2)


def test_captures_of_two_threads_do_not_disturb_torch_in_a_third(gpu: Gpu, torch: Any) -> None:
    made = axpy_case(gpu)
    inside = threading.Barrier(3)
    graphs: list[Graph] = []

    def capture() -> None:
        with gpu.capture() as graph:
            made.launch()
            inside.wait(300)
            inside.wait(300)
        graphs.append(graph)

    threads = [threading.Thread(target=capture) for _ in range(2)]
    for thread in threads:
        thread.start()
    inside.wait(300)
    y = torch.full((N,), 2.0, device="cuda") * 3
    assert torch.cuda.current_stream() == torch.cuda.default_stream()  # threads have their own
    made.launch()
    made.check_launches(1)
    inside.wait(300)
    for thread in threads:
        thread.join(300)
    assert torch.equal(y, torch.full_like(y, 6.0))
    for graph in graphs:
        assert len(graph) == 1
        graph.replay()
    made.check_launches(3)


EXIT = """
import sys
import numpy as np
import preheat

if "torch" in sys.argv:
    import torch

    x = torch.ones(33, device="cuda")
gpu = preheat.device("cuda")
kernel = gpu.kernel('extern "C" __global__ void k(float* p) { p[threadIdx.x] += 1; }', "k")
y = gpu.array(np.ones(33, "float32"))
with gpu.capture() as ours:
    kernel[1, 33](y)
ours.replay()
if "torch" in sys.argv:
    with gpu.capture() as theirs:
        z = x * 2
        kernel[1, 33](z)
    theirs.replay()
    print(float(z.sum()))
if "fail" in sys.argv:
    try:
        with gpu.capture():
            kernel[1, 33](y)
            y.numpy()
    except preheat.CaptureError:
        print("refused")
if "close" in sys.argv:
    gpu.close()
if "drop" in sys.argv:
    del ours
print("done")
"""


@pytest.mark.parametrize("other", ["torch", "alone"])
@pytest.mark.parametrize("how", ["hold", "drop", "close", "fail"])
def test_a_process_that_captured_ends_without_errors(how: str, other: str, tmp_path: Path) -> None:
    if other == "torch":
        import_or_skip(other)
    environment = {**os.environ, "PREHEAT_CACHE_DIR": str(tmp_path)}
    ended = subprocess.run(
        [sys.executable, "-c", EXIT, how, other],
        capture_output=True, text=True, timeout=120, env=environment, check=False,
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.endswith("done\n")
