"""Ops: the plan matches the launch; functions over arrays refuse wrong operands, and never allocate."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import numpy as np
import pytest

from preheat import Builder, Gpu, InputError
from preheat.kernels import elementwise, rms_norm, softmax
from preheat.kernels.op import trace_ops
from preheat.kernels.ops import Ops
from tests.conftest import Recorder
from tests.kernels.conftest import DTYPES, ROUNDING, Operand, every_op, exact, same_bits

Random = Callable[..., Operand]


ELSEWHERE = "gemm.cu", "axes.cu"  # which have tests of their own
EVERY = {op.entry: op for op in every_op() if op.source.name not in ELSEWHERE}


# Plans


def test_watching_sees_exactly_what_the_families_plan(ops: Ops, random: Random) -> None:
    gy, x, gamma = random(5, 33).array, random(5, 33).array, random(33).array
    with trace_ops() as seen:
        y = ops.softmax(x)
        ops.softmax_backward(gy, y)
        ops.silu(x)
        ops.silu_backward(gy, x)
        ops.swiglu(x, y)
        ops.swiglu_backward(gy, x, y)
        ops.rms_norm(x, gamma, eps=1e-6)
        ops.rms_norm_backward(gy, x, gamma, eps=1e-6)
    assert seen == [
        softmax.softmax(5, 33, "float32"),
        softmax.softmax_backward(5, 33, "float32"),
        elementwise.silu(165, "float32"),
        elementwise.silu_backward(165, "float32"),
        elementwise.swiglu(165, "float32"),
        elementwise.swiglu_backward(165, "float32"),
        rms_norm.rms_norm(5, 33, "float32"),
        *rms_norm.rms_norm_backward(5, 33, "float32"),
    ]


def test_watching_is_for_its_own_thread_and_nests(ops: Ops, random: Random) -> None:
    x = random(5).array
    op = elementwise.silu(5, "float32")
    with trace_ops() as outer:
        ops.silu(x)
        with trace_ops() as inner:
            ops.silu(x)
        other = threading.Thread(target=ops.silu, args=(x,))
        other.start()
        other.join()
    ops.silu(x)
    assert (outer, inner) == ([op, op], [op])


def test_a_launch_that_was_refused_is_not_seen(device: Gpu) -> None:
    with trace_ops() as seen, pytest.raises(InputError):
        elementwise.silu(5, "float32").launch(device, 1.0, 2.0, 3.0)
    assert seen == []


def test_the_program_holds_one_entry_and_opens_no_file() -> None:
    for op in EVERY.values():
        assert op.program.names == (op.entry,)
        assert op.program is op._replace(dims=(("n", 1),)).program
        assert not op.program.may_include


def test_what_counts_as_an_integer_makes_the_same_op() -> None:
    rows = np.uint32(5)
    width = np.uint16(40)
    for make in (rms_norm.rms_norm, rms_norm.rms_norm_backward, softmax.softmax, rms_norm.groups):
        assert make(cast(int, rows), cast(int, width), "float32") == make(5, 40, "float32")
    assert rms_norm.groups(cast(int, np.uint32(100_000)), cast(int, np.uint16(64)), "float32") == 2112


def test_cached_operand_checks_apply_only_to_operands_of_the_same_kind() -> None:
    assert softmax.softmax(1, 1, "float32") is softmax.softmax(1, 1, "float32")
    for wrong in (True, 1.0, [1], np.ones(2)):
        with pytest.raises(InputError, match=r"^rows .* is not an integer"):
            softmax.softmax(cast(int, wrong), 1, "float32")


def test_the_most_elements_make_no_more_blocks_than_a_grid_has() -> None:
    for dtype in DTYPES:
        assert elementwise.silu(elementwise.MAX_ELEMENTS, dtype).grid[0] < 2**31


def test_an_op_reads_as_a_call() -> None:
    assert str(softmax.softmax(3, 5, "float32")) == "softmax(rows=3, width=5)"


# Operands


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(elementwise.silu, 0), "n 0 is outside 1 to"),
        (partial(elementwise.swiglu, -3), "n -3 is outside 1 to"),
        (partial(elementwise.silu, 2**41), "n 2199023255552 is outside 1 to"),
        (partial(softmax.softmax, 0, 5), "rows 0 is outside 1 to"),
        (partial(softmax.softmax_backward, 5, 2**31), "width 2147483648 is outside 1 to"),
        (partial(rms_norm.rms_norm, 2**31, 5), "rows 2147483648 is outside 1 to"),
        (partial(rms_norm.rms_norm_backward, 5, 0), "width 0 is outside 1 to"),
        (partial(rms_norm.groups, cast(int, 1.5), 5), "rows 1.5 is not an integer"),
        (partial(rms_norm.groups, True, 5), "rows True is not an integer"),
        (partial(rms_norm.groups, cast(int, np.True_), 5), "rows .*True_? is not an integer"),
        (partial(elementwise.silu, elementwise.MAX_ELEMENTS + 1), "n 1099511627265 is outside 1 to"),
    ],
)
def test_dimensions_that_cannot_be_are_named(make: Callable[[str], object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make("float32")


def test_a_type_that_no_kernel_takes_is_refused() -> None:
    with pytest.raises(InputError, match="do not take float64") as caught:
        elementwise.silu(5, "float64")
    assert caught.value.hint == "they take float32, float16, bfloat16"


class Made:
    """Arrays to be refused."""

    def __init__(self, gpu: Gpu) -> None:
        self.a, self.wide = gpu.zeros((3, 4)), gpu.zeros((3, 5))
        self.half = gpu.zeros((3, 4), "float16")
        self.gamma = gpu.zeros(4)
        self.list = [1.0, 2.0]
        self.long = gpu.zeros(4, "int64")
        self.empty = gpu.zeros((0, 4))
        self.one = gpu.scalar("float32")


REFUSED: list[tuple[Callable[[Ops, Made], Any], str]] = [
    (
        lambda o, m: o.silu_backward(m.a, m.wide),
        r"x is .*\(3, 5\), not .*\(3, 4\) as gy",
    ),
    (lambda o, m: o.silu_backward(m.a, m.half), r"x is float16 of shape .*, not float32 .* as gy"),
    (lambda o, m: o.silu(m.long), "x: the shipped kernels do not take int64"),
    (lambda o, m: o.silu(m.empty), r"x is empty: its shape is \(0, 4\)"),
    (lambda o, m: o.silu(m.list), "x is list, not an array"),
    (lambda o, m: o.silu(m.a, out=m.wide), r"out is float32 of shape \(3, 5\), not"),
    (lambda o, m: o.swiglu(m.a, m.wide), "up is"),
    (lambda o, m: o.swiglu_backward(m.a, m.a, m.wide), "up is"),
    (lambda o, m: o.swiglu_backward(m.a, m.a, m.a, out=m.a), "out must be a pair"),
    (lambda o, m: o.swiglu_backward(m.a, m.a, m.a, out=(m.a, m.wide)), r"out\[1\] is"),
    (lambda o, m: o.softmax(m.one), "x has no axes, so it has no rows"),
    (lambda o, m: o.softmax_backward(m.a, m.wide), "y is"),
    (lambda o, m: o.rms_norm(m.wide, m.gamma, eps=0), r"gamma is .*\(4,\), not .*\(5,\) as a row of x"),
    (lambda o, m: o.rms_norm(m.a, m.gamma, eps=-1), "eps -1 is not a non-negative number"),
    (lambda o, m: o.rms_norm(m.a, m.gamma, eps=float("nan")), "eps nan is not"),
    (lambda o, m: o.rms_norm_backward(m.a, m.wide, m.gamma, eps=0), "x is"),
    (
        lambda o, m: o.rms_norm_backward(m.a, m.a, m.gamma, eps=0, workspace=m.gamma),
        r"workspace is float32 of shape \(4,\), not at least float32 of shape \(24,\)",
    ),
]


def test_operands_that_do_not_fit_are_named(device: Gpu, ops: Ops) -> None:
    made = Made(device)
    for call, message in REFUSED:
        with pytest.raises(InputError, match=message):
            call(ops, made)


def test_ops_are_of_a_device() -> None:
    with pytest.raises(InputError, match="'cuda' is not a device"):
        Ops("cuda")  # type: ignore[arg-type]


# Memory


def test_captured_with_everything_given_nothing_is_allocated(
    device: Gpu, ops: Ops, random: Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    gy, x, gamma, y = random(5, 33).array, random(5, 33).array, random(33).array, random(5, 33).array
    gx, g_gamma, rest = device.empty((5, 33)), device.empty(33), device.empty((5, 33))
    room = device.empty(ops.rms_norm_workspace(5, 33, "float32"))

    def step() -> None:
        ops.rms_norm(x, gamma, eps=1e-6, out=y)
        ops.softmax(y, out=y)
        ops.swiglu(y, x, out=y)
        ops.silu(y, out=y)
        ops.silu_backward(gy, y, out=y)
        ops.swiglu_backward(y, x, gy, out=(y, rest))
        ops.softmax_backward(rest, y, out=rest)
        ops.rms_norm_backward(rest, x, gamma, eps=1e-6, out=(gx, g_gamma), workspace=room)

    step()
    monkeypatch.setattr(device, "empty", partial(pytest.fail, "allocated"))
    with device.capture() as graph:
        step()
    assert [node.kind for node in graph.nodes] == ["kernel"] * 8
    x.write(np.cos(np.arange(165, dtype="float32")).reshape(5, 33))
    step()
    wanted = gx.numpy(), g_gamma.numpy()
    gx.fill(0)
    g_gamma.fill(0)
    graph.replay()
    assert np.array_equal(gx.numpy(), wanted[0])
    assert np.array_equal(g_gamma.numpy(), wanted[1])


def test_a_stream_of_the_caller_is_accepted(device: Gpu, ops: Ops, random: Random) -> None:
    gy, x, gamma = random(5, 33).array, random(5, 33).array, random(33).array
    stream = device.stream()
    found = ops.rms_norm_backward(gy, x, gamma, eps=1e-6, stream=stream)
    assert all(map(same_bits, found, ops.rms_norm_backward(gy, x, gamma, eps=1e-6)))


def test_memory_of_numpy_serves_on_an_emulator_that_permits_it(permissive: Gpu) -> None:
    ops = Ops(permissive)
    x = np.linspace(-3, 3, 60, dtype="float32").reshape(6, 10)
    out = np.empty_like(x)
    assert ops.silu(x, out=out) is out
    assert np.allclose(out, x / (1 + np.exp(-x.astype("float64"))), rtol=2e-6)
    with pytest.raises(InputError, match="x is not contiguous") as caught:
        ops.silu(x[:, ::2])
    assert caught.value.hint == "pass a contiguous copy of it"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_of_torch_serve_whatever_their_alignment(
    open_device: Callable[..., Gpu], dtype: str
) -> None:
    torch = pytest.importorskip("torch")
    ops = Ops(open_device("cuda"))
    kind = getattr(torch, dtype)
    flat = torch.randn(2, 7 * 1000 + 1, device="cuda").to(kind)
    gy, x = (row[1:].view(7, 1000) for row in flat)
    found = torch.from_dlpack(ops.silu_backward(gy, x))
    s = torch.sigmoid(x.double())
    wanted = gy.double() * s * (1 + x.double() * (1 - s))
    assert torch.allclose(found.double(), wanted, rtol=1e-2, atol=1e-2)
    ops.softmax_backward(gy, x, out=gy)
    with pytest.raises(InputError, match="gy is not contiguous"):
        ops.silu_backward(gy.T, x.T)


@pytest.mark.gpu
@pytest.mark.parametrize("entry", EVERY)
def test_every_kernel_runs_on_the_gpu(open_device: Callable[..., Gpu], entry: str) -> None:
    """Launch the compiled code on ones, and return the result."""
    op = EVERY[entry]
    gpu = open_device("cuda")
    ops = Ops(gpu)
    sizes = dict(op.dims)
    dtype = {"__half": "float16", "__nv_bfloat16": "bfloat16"}.get(
        re.split("[<,>]", entry)[1].strip(), "float32"
    )
    rows = sizes.get("rows", 100)
    shape = (1000,) if "n" in sizes else (rows, sizes["width"])
    ones = gpu.zeros(shape, dtype).fill(1)
    gamma = gpu.zeros(shape[-1:], dtype).fill(1)
    s = 1 / (1 + np.exp(-1))
    width = shape[-1]
    calls: dict[str, tuple[Callable[[], Any], float]] = {
        "silu": (lambda: ops.silu(ones), s),
        "silu_backward": (lambda: ops.silu_backward(ones, ones), s * (2 - s)),
        "swiglu": (lambda: ops.swiglu(ones, ones), s),
        "swiglu_backward": (lambda: ops.swiglu_backward(ones, ones, ones)[0], s * (2 - s)),
        "softmax": (lambda: ops.softmax(ones), 1 / width),
        "softmax_backward": (lambda: ops.softmax_backward(ones, ones), 1 - width),
        "rms_norm": (lambda: ops.rms_norm(ones, gamma, eps=0), 1),
        "rms_norm_backward": (lambda: ops.rms_norm_backward(ones, ones, gamma, eps=0)[0], 0),
        "rms_norm_strips": (lambda: ops.rms_norm_backward(ones, ones, gamma, eps=0)[0], 0),
        "rms_norm_gamma": (lambda: ops.rms_norm_backward(ones, ones, gamma, eps=0)[1], rows),
    }
    call, wanted = calls[op.name]
    with trace_ops() as seen:
        found = exact(call())
    assert entry in [each.entry for each in seen]
    largest = 65504 if dtype == "float16" else np.inf
    wanted = wanted if abs(wanted) <= largest else np.copysign(np.inf, wanted)
    assert np.allclose(found, wanted, rtol=2 * ROUNDING[dtype] + 2e-6, atol=1e-6)


def test_a_slower_way_is_reported_once_for_each_device_and_entry(
    open_device: Callable[..., Gpu], heard_builder: Builder, recorder: Recorder
) -> None:
    gpu = open_device("emulator", builder=heard_builder)
    ops = Ops(gpu, blas=False)
    odd = gpu.zeros((2, 33))
    whole = gpu.zeros((2, 32))
    for _ in range(2):
        ops.softmax(odd)
        ops.softmax(whole)
    (reported,) = recorder.named("slow_path")
    assert (reported["device"], reported["op"]) == ("emulator:0", "softmax(rows=2, width=33)")
    assert reported["reason"].startswith("rows are not a whole number of 16 bytes")


MISALIGNED = "an operand does not begin at a multiple of 16 bytes"
WHOLE: dict[str, Callable[[Ops, Any, Any], object]] = {
    "silu": lambda ops, x, y: ops.silu(x, out=y),
    "silu_backward": lambda ops, x, y: ops.silu_backward(x, x, out=y),
    "swiglu": lambda ops, x, y: ops.swiglu(x, x, out=y),
    "swiglu_backward": lambda ops, x, y: ops.swiglu_backward(x, x, x, out=(y, None)),
    "softmax": lambda ops, x, y: ops.softmax(x, out=y),
    "softmax_backward": lambda ops, x, y: ops.softmax_backward(x, x, out=y),
    "rms_norm": lambda ops, x, y: ops.rms_norm(x, x[0], eps=1, out=y),
    "rms_norm_backward": lambda ops, x, y: ops.rms_norm_backward(x, x, x[0], eps=1, out=(y, None)),
    "gemm": lambda ops, x, y: ops.gemm(x, ops.gpu.zeros((32, 32)), out=y),
    "gemm_backward_a": lambda ops, x, y: ops.gemm_backward_a(x, ops.gpu.zeros((32, 32)), out=y),
}


@pytest.mark.parametrize("offsets", [(0, 0), (1, 0), (0, 4), (2, 2)])
@pytest.mark.parametrize("name", WHOLE)
def test_operands_that_are_not_aligned_are_reported(
    open_device: Callable[..., Gpu],
    heard_builder: Builder,
    recorder: Recorder,
    name: str,
    offsets: tuple[int, int],
) -> None:
    gpu = open_device("emulator", builder=heard_builder)
    x, y = (gpu.zeros(72)[offset : offset + 64].reshape(2, 32) for offset in offsets)
    for _ in range(2):
        WHOLE[name](Ops(gpu, blas=False), x, y)
    reasons = [
        each["reason"] for each in recorder.named("slow_path") if each["op"].startswith(f"{name}(")
    ]
    assert reasons == [MISALIGNED] * any(offset % 4 for offset in offsets)


@pytest.mark.parametrize(("arch", "width", "twice"), [("sm_90", 60000, False), ("sm_80", 60000, True)])
def test_rows_that_do_not_fit_into_shared_memory_are_reported(
    open_device: Callable[..., Gpu],
    heard_builder: Builder,
    recorder: Recorder,
    arch: str,
    width: int,
    twice: bool,
) -> None:
    gpu = open_device("emulator", builder=heard_builder, arch=arch)
    Ops(gpu).softmax(gpu.zeros((1, width)))
    reported = recorder.named("slow_path")
    assert ["read twice" in each["reason"] for each in reported] == [True] * twice


def test_a_launch_is_seen_although_a_sink_failed(
    open_device: Callable[..., Gpu], heard_builder: Builder
) -> None:
    def fail(name: str, _: object) -> None:
        if name == "slow_path":
            raise OSError("no space left")

    gpu = open_device("emulator", builder=heard_builder)
    heard_builder.events.subscribe(fail)
    with trace_ops() as seen, pytest.raises(OSError, match="no space left"):
        Ops(gpu).softmax(gpu.zeros((1, 20001)))
    assert seen == [softmax.softmax(1, 20001, "float32")]
