"""Operands of other libraries, and results that overlap operands: correct, or refused by name."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from preheat import Builder, CaptureError, DeviceError, Gpu, InputError, LaunchError
from preheat.devices.array import Array
from preheat.kernels.blas import Blas, Found
from preheat.kernels.nf4 import quantize
from preheat.kernels.ops import Ops
from tests.conftest import Recorder
from tests.kernels.conftest import exact, same_bits
from tests.kernels.cublas import Cublas

# Other libraries


class Lent:
    """An array of a library that offers DLPack and little else."""

    def __init__(self, host: Any) -> None:
        self._host = host
        self.shape = host.shape
        self.dtype = str(host.dtype)

    def __dlpack__(self, **how: Any) -> Any:
        return self._host.__dlpack__(**how)

    def __dlpack_device__(self) -> Any:
        return self._host.__dlpack_device__()


class OnGpu:
    """An array of a library that offers the array interface of CUDA."""

    shape = (4, 6)
    dtype = "float32"

    def __init__(self, strides: tuple[int, int] | None = None) -> None:
        self._strides = strides

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        address = 1 << 20, False
        shape, strides = self.shape, self._strides
        return {"data": address, "shape": shape, "strides": strides, "typestr": "<f4", "version": 3}


def test_memory_lent_by_dlpack_serves(permissive: Gpu) -> None:
    ops = Ops(permissive)
    x = np.linspace(-3, 3, 60, dtype="float32").reshape(6, 10)
    out = np.empty_like(x)
    ops.silu(Lent(x), out=Lent(out))
    assert np.array_equal(out, ops.silu(x).numpy())


@pytest.mark.parametrize(
    "x",
    [
        Lent(np.ones((4, 6), "float32")[:, ::2]),
        Lent(np.ones((4, 6), "float32").T),
        np.ones((4, 6), "float32").T,
        OnGpu((48, 8)),
    ],
    ids=["steps", "transposed", "NumPy", "array interface"],
)
def test_gaps_are_found_whatever_the_library(emulator: Gpu, x: Any) -> None:
    with pytest.raises(InputError, match="x is not contiguous"):
        Ops(emulator).silu(x)


def test_reversed_memory_is_named(emulator: Gpu) -> None:
    with pytest.raises(InputError, match="gy is not contiguous"):
        Ops(emulator).silu_backward(np.ones(5, "float32")[::-1], np.ones(5, "float32"))


def test_a_number_is_no_array(emulator: Gpu) -> None:
    with pytest.raises(InputError, match="x is float32, not an array"):
        Ops(emulator).silu(np.float32(1))


@pytest.mark.parametrize("lend", [lambda x: x, Lent], ids=["NumPy", "DLPack"])
def test_a_result_that_is_read_only_is_refused(emulator: Gpu, lend: Callable[[Any], Any]) -> None:
    x, out = np.ones((4, 6), "float32"), np.ones((4, 6), "float32")
    out.flags.writeable = False
    ops = Ops(emulator)
    with pytest.raises(InputError, match="out is read-only"):
        ops.silu(x, out=lend(out))
    with pytest.raises(InputError, match="out is read-only"):
        ops.gemm(x, np.ones((6, 6), "float32"), out=lend(out))


def test_memory_of_another_device_is_refused(open_device: Callable[..., Gpu]) -> None:
    here, there = open_device("emulator"), open_device("emulator:1")
    ops = Ops(here)
    x = here.zeros((3, 4))
    y = there.zeros((3, 4))
    calls: list[Callable[[], Any]] = [
        lambda: ops.silu(y),
        lambda: ops.silu(x, out=y),
        lambda: ops.softmax_backward(x, y),
        lambda: ops.gemm_backward_b(x, y),
        lambda: ops.silu(OnGpu()),
    ]
    for call in calls:
        with pytest.raises(LaunchError, match=r"not on the device|GPU 0"):
            call()


def test_numbers_of_numpy_will_do_for_eps(emulator: Gpu) -> None:
    ops = Ops(emulator)
    x = emulator.array(np.arange(1, 9, dtype="float32").reshape(2, 4))
    gamma = emulator.zeros(4).fill(1)
    wanted = ops.rms_norm(x, gamma, eps=0.5)
    assert same_bits(ops.rms_norm(x, gamma, eps=np.float32(0.5)), wanted)  # type: ignore[arg-type]
    assert same_bits(ops.rms_norm(x, gamma, eps=3.4e38), ops.rms_norm(x, gamma, eps=34 * 10**37))


@pytest.mark.parametrize(
    "eps",
    ["x", None, True, np.True_, -1e-9, np.nan, np.inf, 1e39, 1e300, 10**400, 10**5000, 1j],
    ids=type,
)
def test_an_eps_that_float32_cannot_hold_is_refused(emulator: Gpu, eps: Any) -> None:
    ops = Ops(emulator)
    x = emulator.zeros((2, 4))
    gamma = emulator.zeros(4)
    with pytest.raises(
        InputError, match=r"eps .* is not a non-negative number in the range of float32"
    ):
        ops.rms_norm(x, gamma, eps=eps)
    with pytest.raises(InputError, match=r"eps .* is not a non-negative number"):
        ops.rms_norm_backward(x, x, gamma, eps=eps)


class Counted:
    """An array that counts how often it is asked where it lies."""

    def __init__(self, *shape: int) -> None:
        self.array = np.ones(shape, "float32")
        self.asked = 0
        self.shape, self.dtype = self.array.shape, self.array.dtype

    def __dlpack__(self, **how: Any) -> Any:
        self.asked += 1
        return self.array.__dlpack__(**how)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


def test_operands_are_asked_once_by_the_checks_and_once_by_the_launch(permissive: Gpu) -> None:
    ops = Ops(permissive, blas=False)
    arrays = [Counted(3, 3) for _ in range(5)]
    a, b, c, d, e = arrays
    calls: list[Callable[[], object]] = [
        lambda: ops.gemm(a, b, out=c),
        lambda: ops.silu_backward(a, b, out=c),
        lambda: ops.swiglu_backward(a, b, c, out=(d, e)),
    ]
    for call in calls:
        for array in arrays:
            array.asked = 0
        call()
        assert {array.asked for array in arrays} <= {0, 2}


# Workspaces


def test_a_workspace_of_another_type_is_refused_with_the_expected_type(emulator: Gpu) -> None:
    ops = Ops(emulator)
    x = emulator.zeros((3, 4))
    gamma = emulator.zeros(4)
    for kind in ("int32", "float16", "float64"):
        wrong = emulator.zeros(ops.rms_norm_workspace(3, 4, "float32"), kind)
        message = rf"workspace is {kind} of shape \(24,\), not at least float32 of shape \(24,\)"
        with pytest.raises(InputError, match=message) as caught:
            ops.rms_norm_backward(x, x, gamma, eps=1, workspace=wrong)
        assert (
            caught.value.hint
            == "allocate ops.rms_norm_workspace(rows, width, dtype) elements of float32"
        )
    with pytest.raises(InputError, match="workspace is not contiguous"):
        ops.rms_norm_backward(x, x, gamma, eps=1, workspace=np.ones((8, 8), "float32")[:, ::2])


@pytest.mark.parametrize("kind", [np.uint16, np.uint32, np.int64])
@pytest.mark.parametrize(("rows", "width"), [(3, 4), (60000, 33), (7, 5000)])
def test_a_workspace_is_as_large_whatever_integers_ask(
    emulator: Gpu, kind: Any, rows: int, width: int
) -> None:
    ops = Ops(emulator)
    for dtype in ("float32", "float16"):
        asked = ops.rms_norm_workspace(kind(rows), kind(width), dtype)
        assert asked == ops.rms_norm_workspace(rows, width, dtype)
        assert [type(size) for size in asked] == [int]
        assert asked[0] >= width


def test_a_capture_that_would_allocate_names_the_arguments_that_help(emulator: Gpu) -> None:
    ops = Ops(emulator)
    x = emulator.zeros((2, 4))
    gamma = emulator.zeros(4)
    y = emulator.zeros((2, 4))

    def step(**more: Any) -> None:
        ops.rms_norm_backward(x, x, gamma, eps=1, **more)

    def capture(**more: Any) -> None:
        with emulator.capture():
            step(**more)

    step()
    for missing, given in (("out", {}), ("workspace", {"out": (y, emulator.zeros(4))})):
        with pytest.raises(CaptureError, match="allocating memory inside a capture") as caught:
            capture(**given)
        assert f"pass {missing}=…" in str(caught.value.hint)


# NF4


NF4: list[tuple[str, Callable[[Ops, Any, Any], Any]]] = [
    ("gc", lambda o, _, q: o.gemm_backward_a(q, q)),
    ("gc", lambda o, x, q: o.gemm_backward_a(q, x)),
    ("b", lambda o, x, q: o.gemm(x, q)),
    ("a", lambda o, x, q: o.gemm(q, x)),
    ("gc", lambda o, x, q: o.gemm_backward_b(x, q)),
    ("out", lambda o, x, q: o.gemm_backward_a(x, x, out=q)),
    ("x", lambda o, _, q: o.silu(q)),
    ("gamma", lambda o, x, q: o.rms_norm(x, q, eps=1)),
]


@pytest.mark.parametrize(("name", "call"), NF4)
def test_nf4_is_refused_where_no_kernel_takes_it(
    emulator: Gpu, name: str, call: Callable[[Ops, Any, Any], Any]
) -> None:
    quantized = quantize(np.ones((4, 4), "float32")).on(emulator)
    x = emulator.zeros((4, 4))
    with pytest.raises(InputError, match=f"^{name} is in NF4") as caught:
        call(Ops(emulator), x, quantized)
    assert "only b of gemm_backward_a" in str(caught.value.hint)


# Memory that is shared


class Shared:
    """Views into one array; those called `at_` begin that many elements after the first."""

    def __init__(self, gpu: Gpu) -> None:
        whole = gpu.array(np.cos(np.arange(400, dtype="float32")))
        self.at_0, self.at_1, self.at_15, self.at_16, self.at_32 = (
            Array(whole.buffer, whole.dtype, (4, 4), 4 * offset) for offset in (0, 1, 15, 16, 32)
        )
        self.row_0, self.row_15 = (Array(whole.buffer, whole.dtype, (4,), 4 * at) for at in (0, 15))
        self.room = whole[15:]
        self.apart = whole[200:]


OVERLAPS: list[tuple[Callable[[Ops, Shared], Any], str]] = [
    (lambda o, s: o.silu(s.at_0, out=s.at_1), "out overlaps x"),
    (lambda o, s: o.silu(s.at_1, out=s.at_0), "out overlaps x"),
    (lambda o, s: o.silu_backward(s.at_0, s.at_32, out=s.at_15), "out overlaps gy"),
    (lambda o, s: o.swiglu(s.at_32, s.at_0, out=s.at_1), "out overlaps up"),
    (lambda o, s: o.softmax(s.at_15, out=s.at_16), "out overlaps x"),
    (lambda o, s: o.softmax_backward(s.at_32, s.at_0, out=s.at_1), "out overlaps y"),
    (lambda o, s: o.rms_norm(s.at_32, s.row_0, eps=0, out=s.at_0), "out overlaps gamma"),
    (
        lambda o, s: o.swiglu_backward(s.at_0, s.at_0, s.at_0, out=(s.at_32, s.at_32)),
        r"out\[1\] overlaps out\[0\]",
    ),
    (
        lambda o, s: o.swiglu_backward(s.at_0, s.at_0, s.at_0, out=(s.at_32, s.at_15)),
        r"out\[1\] overlaps gy",
    ),
    (
        lambda o, s: o.rms_norm_backward(s.at_32, s.at_32, s.row_0, eps=0, out=(s.at_15, s.row_15)),
        r"out\[1\] overlaps out\[0\]",
    ),
    (
        lambda o, s: o.rms_norm_backward(s.at_0, s.at_0, s.row_0, eps=0, workspace=s.room),
        "workspace overlaps gy",
    ),
    (lambda o, s: o.gemm(s.at_0, s.at_16, out=s.at_0), "out overlaps a"),
    (lambda o, s: o.gemm(s.at_0, s.at_16, out=s.at_15), "out overlaps a"),
    (lambda o, s: o.gemm_backward_a(s.at_32, s.at_1, out=s.at_16), "out overlaps b"),
    (lambda o, s: o.gemm_backward_b(s.at_32, s.at_16, out=s.at_15), "out overlaps gc"),
]


@pytest.mark.parametrize(("call", "message"), OVERLAPS, ids=lambda v: v if isinstance(v, str) else "")
def test_a_result_over_part_of_an_operand_is_refused(
    emulator: Gpu, call: Callable[[Ops, Shared], Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        call(Ops(emulator, blas=False), Shared(emulator))


def test_a_product_over_codes_or_scales_is_refused(emulator: Gpu) -> None:
    quantized = quantize(np.ones((4, 4), "float32")).on(emulator)
    x = emulator.zeros((4, 4))
    room = emulator.zeros(16)
    shares = Array(room.buffer, quantized.scales.dtype, (1,), 60)
    with pytest.raises(InputError, match="out overlaps scales"):
        Ops(emulator).gemm_backward_a(
            x, quantized._replace(scales=shares), out=Array(room.buffer, room.dtype, (4, 4))
        )


def test_neighbours_and_whole_operands_are_fine(emulator: Gpu) -> None:
    ops = Ops(emulator, blas=False)
    shared = Shared(emulator)
    wanted = [ops.silu(shared.at_16), ops.gemm(shared.at_0, shared.at_0)]
    ops.gemm(shared.at_0, shared.at_0, out=shared.at_32)
    assert same_bits(shared.at_32, wanted[1])
    ops.silu(shared.at_16, out=shared.at_16)
    assert same_bits(shared.at_16, wanted[0])
    ops.swiglu_backward(shared.at_0, shared.at_16, shared.at_32, out=(shared.at_0, shared.at_16))
    ops.rms_norm_backward(shared.at_0, shared.at_32, shared.row_0, eps=1, workspace=shared.apart)


def test_overlaps_are_seen_in_memory_of_other_libraries(emulator: Gpu) -> None:
    room = np.ones(100, "float32")
    with pytest.raises(InputError, match="out overlaps x"):
        Ops(emulator).silu(room[:50], out=Lent(room[1:51]))


# cuBLAS


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulator finds a cuBLAS."""
    monkeypatch.setattr("preheat.kernels.ops.find", lambda _: Found(Cublas(), "13.0.0"))


@pytest.mark.parametrize("blas", [None, "tf32", 0, 1, np.True_, np.ones(3), ["auto"]], ids=repr)
def test_a_value_that_is_no_choice_of_blas_is_refused(emulator: Gpu, blas: Any) -> None:
    with pytest.raises(InputError, match=r"blas .* is not 'auto', True, False or a"):
        Ops(emulator, blas=blas)


def test_the_blas_of_another_device_is_refused(open_device: Callable[..., Gpu]) -> None:
    here, there = open_device("emulator"), open_device("emulator:1")
    with pytest.raises(InputError, match=r"blas belongs to <Gpu emulator:1.*, not to <Gpu emulator:0"):
        Ops(here, blas=Blas(there, found=Found(Cublas(), "13.0.0")))


def test_requiring_cublas_fails_at_once_with_the_reason(emulator: Gpu) -> None:
    with pytest.raises(DeviceError, match="cuBLAS is not available: emulator:0 is not a GPU"):
        Ops(emulator, blas=True)


@pytest.mark.usefixtures("installed")
def test_requiring_cublas_holds_for_every_session_of_the_device(
    open_device: Callable[..., Gpu], builder: Builder, recorder: Recorder
) -> None:
    gpu = open_device("emulator", builder=builder)
    ops = Ops(gpu, blas=True)
    first = ops.blas
    assert isinstance(first, Blas)
    assert [event["uses"] for event in recorder.named("blas")] == ["cuBLAS 13.0.0"]
    gpu.reset()
    assert isinstance(ops.blas, Blas)
    assert ops.blas is not first


@pytest.mark.usefixtures("installed")
def test_disabling_cublas_holds_where_it_is_installed(emulator: Gpu) -> None:
    assert isinstance(Ops(emulator).blas, Blas)
    assert Ops(emulator, blas=False).blas is None


def test_any_true_value_of_accumulate_accumulates_once(emulator: Gpu) -> None:
    rng = np.random.default_rng(5)
    a, b = (emulator.array(rng.standard_normal((5, 5), dtype=np.float32)) for _ in range(2))
    results = []
    for blas in (False, Blas(emulator, found=Found(Cublas(), "13.0.0"))):
        out = emulator.zeros((5, 5)).fill(1)
        Ops(emulator, blas=blas).gemm(a, b, out=out, accumulate=2)  # type: ignore[arg-type]
        results.append(exact(out))
    assert np.allclose(results[0], results[1], atol=1e-5)


@pytest.mark.usefixtures("installed")
def test_threads_that_start_together_share_one_choice(
    open_device: Callable[..., Gpu],
    builder: Builder,
    recorder: Recorder,
) -> None:
    gpu = open_device("emulator", builder=builder)
    together = threading.Barrier(4)
    ops = Ops(gpu)

    def choose(_: int) -> Blas | None:
        together.wait()
        return ops.blas

    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(choose, range(4)))
    assert len({id(blas) for blas in found}) == 1
    assert len(recorder.named("blas")) == 1
