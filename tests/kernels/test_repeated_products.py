"""Repeated products by cuBLAS: their streams, workspaces and errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from preheat import Gpu
from preheat.kernels.blas import Blas, Found
from preheat.kernels.ops import Ops
from tests.kernels.cublas import Cublas
from tests.kernels.tensors import FloatTorch
from tests.standin import introduce

VALUES = np.cos(np.arange(64, dtype="float32"))


def test_a_repeated_product_gives_the_workspaces_of_closed_streams_back(
    emulator: Gpu, blas: Blas
) -> None:
    ops = Ops(emulator, blas=blas)
    a, b, c = (emulator.zeros((4, 4)) for _ in range(3))
    for _ in range(4):
        ops.gemm(a, b, out=c)
    emulator.synchronize()
    free = emulator.memory().free
    stream = emulator.stream()
    x, y, z = (emulator.zeros((4, 4)) for _ in range(3))
    for _ in range(4):
        ops.gemm(x, y, out=z, stream=stream)
    stream.close()
    assert len(blas._handles) == 2
    ops.gemm(a, b, out=c)
    assert len(blas._handles) == 1
    del x, y, z
    emulator.synchronize()
    assert emulator.memory().free == free


def test_a_repeated_product_has_a_workspace_ready_for_the_next_capture(
    emulator: Gpu, blas: Blas, launched: Callable[[], None]
) -> None:
    ops = Ops(emulator, blas=blas)
    a, b, c = (emulator.zeros((4, 4)) for _ in range(3))
    for _ in range(4):
        ops.gemm(a, b, out=c)
    for _ in range(3):
        with emulator.capture():
            launched()
            ops.gemm(a, b, out=c)
        ops.gemm(a, b, out=c)


def test_a_repeated_product_waits_for_a_workspace_that_its_stream_has_not_used(
    emulator: Gpu, blas: Blas
) -> None:
    ops = Ops(emulator, blas=blas)
    stream = emulator.stream()
    a, b, c = (emulator.zeros((4, 4)) for _ in range(3))
    for _ in range(4):
        ops.gemm(a, b, out=c, stream=stream)
    blas._handles.clear()
    handle = blas._handle_of(stream.raw)  # As another thread does before its first product.
    assert handle.workspace.uses.writer is not stream.raw
    ops.gemm(a, b, out=c, stream=stream)
    assert handle.workspace.uses.writer is stream.raw


@pytest.fixture
def torch(emulator: Gpu, monkeypatch: pytest.MonkeyPatch) -> FloatTorch:
    made = FloatTorch(emulator)
    introduce(made, monkeypatch)
    return made


def test_repeated_products_go_to_the_current_stream_of_the_library(
    emulator: Gpu, blas: Blas, torch: FloatTorch, cublas: Cublas
) -> None:
    ops = Ops(emulator, blas=blas)
    a, b, c = (torch.tensor(np.resize(VALUES, (4, 4))) for _ in range(3))
    for _ in range(4):
        ops.gemm(a, b, out=c)
    first = cublas.named("gemm_ex")[-1][0]
    with torch.stream(torch.new_stream()) as other:
        ops.gemm(a, b, out=c)
        ops.gemm(a, b, out=c)
    streams = dict(cublas.named("set_stream"))
    used = [handle for handle, *_ in cublas.named("gemm_ex")]
    assert [streams[handle] for handle in used[-2:]] == [other.handle] * 2
    ops.gemm(a, b, out=c)
    assert cublas.named("gemm_ex")[-1][0] == first
    assert streams[first] == 0


def test_a_repeated_product_in_a_stream_of_a_library_is_recorded_for_its_workspace(
    emulator: Gpu, blas: Blas, torch: FloatTorch
) -> None:
    ops = Ops(emulator, blas=blas)
    a, b, c = (torch.tensor(np.resize(VALUES, (4, 4))) for _ in range(3))
    with torch.stream(torch.new_stream()) as other:
        for _ in range(4):
            ops.gemm(a, b, out=c)
        uses = blas._handles[other.id].workspace.uses
        before = uses._last_writes[other.id][1]
        ops.gemm(a, b, out=c)
    assert uses._last_writes[other.id][1] > before


def test_a_repeated_product_in_a_capture_of_a_library_has_a_workspace_of_its_own(
    emulator: Gpu, blas: Blas, torch: FloatTorch, cublas: Cublas
) -> None:
    ops = Ops(emulator, blas=blas)
    a, b, c = (torch.tensor(np.resize(VALUES, (4, 4))) for _ in range(3))
    with torch.stream(torch.new_stream()) as other:
        for _ in range(4):
            ops.gemm(a, b, out=c)
        outside = {handle for handle, *_ in cublas.named("gemm_ex")}
        other.begin_capture("thread_local")
        ops.gemm(a, b, out=c)
        assert cublas.named("gemm_ex")[-1][0] not in outside
        other.end_capture()


def test_a_repeated_product_in_the_default_stream_is_recorded_for_its_workspace(
    emulator: Gpu, cublas: Cublas, torch: FloatTorch, monkeypatch: pytest.MonkeyPatch
) -> None:
    blas = Blas(emulator, found=Found(cublas, "13.0.0"))
    ops = Ops(emulator, blas=blas)
    a, b, c = (torch.tensor(np.resize(VALUES, (4, 4))) for _ in range(3))
    for _ in range(5):
        ops.gemm(a, b, out=c)
    stream = emulator._context.order.adopt(0)
    recorded = list[int]()
    record = type(stream).record

    def seen(self: Any, **more: Any) -> Any:
        recorded.append(self.id)
        return record(self, **more)

    monkeypatch.setattr(type(stream), "record", seen)
    ops.gemm(a, b, out=c)
    assert recorded == [stream.id]  # The use of the workspace.


def test_an_error_of_a_repeated_product_says_which_call_it_was(
    emulator: Gpu, blas: Blas, cublas: Cublas
) -> None:
    ops = Ops(emulator, blas=blas)
    a, b, c = (emulator.zeros((4, 4)) for _ in range(3))
    for _ in range(4):
        ops.gemm(a, b, out=c)
    cublas.fails = "gemm_ex"
    count = len(cublas.named("gemm_ex"))
    with pytest.raises(Exception, match=r"gemm_ex of cuBLAS failed: INVALID_VALUE \(7\)"):
        ops.gemm(a, b, out=c)
    assert len(cublas.named("gemm_ex")) == count + 1  # It is not tried again.
