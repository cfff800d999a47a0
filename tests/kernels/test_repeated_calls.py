"""Repeated calls of `Ops`: each gives what a first call gives."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from preheat import Array, Builder, Gpu, InputError
from preheat.kernels.blas import Blas, Found
from preheat.kernels.nf4 import quantize
from preheat.kernels.op import trace_ops
from preheat.kernels.ops import Ops
from tests.conftest import Recorder
from tests.graph.support import replayer
from tests.kernels.conftest import exact
from tests.kernels.cublas import Cublas
from tests.kernels.tensors import FloatCuPy, FloatTorch
from tests.standin import introduce

Make = Callable[..., Any]
OPS: dict[str, Callable[..., Any]] = {
    "silu": lambda ops, x, _, out, **more: ops.silu(x, out=out, **more),
    "silu_backward": lambda ops, x, y, out, **more: ops.silu_backward(x, y, out=out, **more),
    "swiglu": lambda ops, x, y, out, **more: ops.swiglu(x, y, out=out, **more),
    "softmax": lambda ops, x, _, out, **more: ops.softmax(x, out=out, **more),
    "softmax_backward": lambda ops, x, y, out, **more: ops.softmax_backward(x, y, out=out, **more),
    "rms_norm": lambda ops, x, y, out, **more: ops.rms_norm(x, y, out=out, eps=0.5, **more),
    "gemm": lambda ops, x, y, out, **more: ops.gemm(x, y, out=out, **more),
    "gemm_backward_a": lambda ops, x, y, out, **more: ops.gemm_backward_a(x, y, out=out, **more),
    "gemm_backward_b": lambda ops, x, y, out, **more: ops.gemm_backward_b(x, y, out=out, **more),
    "swiglu_backward": lambda ops, x, y, out, **more: ops.swiglu_backward(
        x, y, x, out=(out, None), **more
    ),
}
PRODUCTS = "gemm", "gemm_backward_a", "gemm_backward_b"
#: Every op, and products by cuBLAS as well.
EVERY = [*((name, "shipped") for name in OPS), *((name, "cuBLAS") for name in PRODUCTS)]
every = pytest.mark.parametrize(("name", "new_ops"), EVERY, indirect=["new_ops"])
SINGLE = [name for name in OPS if name != "swiglu_backward"]  # with one result
VALUES = np.cos(np.arange(64, dtype="float32"))


class Arrays:
    """Operands of one device, of preheat or of a stand-in for torch, with the same values each time."""

    def __init__(self, gpu: Gpu, other: Gpu, torch: FloatTorch | None) -> None:
        self.gpu, self.other, self.torch = gpu, other, torch
        self.whole = self.new((64,))

    def new(self, shape: tuple[int, ...], dtype: str = "float32") -> Any:
        values = np.resize(VALUES, shape).astype(dtype)
        return self.gpu.array(values) if self.torch is None else self.torch.tensor(values)

    def part(self, offset: int, shape: tuple[int, ...] = (4, 4)) -> Any:
        """Return a view of memory that all parts share."""
        if self.torch is None:
            return Array(self.whole.buffer, self.whole.dtype, shape, 4 * offset)
        return self.torch.view(self.whole.untyped_storage(), shape, offset=offset)

    def good(self, name: str) -> tuple[Any, Any, Any]:
        second = self.new((4,)) if name == "rms_norm" else self.new((4, 4))
        return self.new((4, 4)), second, self.new((4, 4))


def closed(arrays: Arrays) -> Any:
    made = arrays.new((4, 4))
    if arrays.torch is None:
        made.close()
    else:
        made._storage = SimpleNamespace(address=0)  # As after `untyped_storage().resize_(0)`.
    return made


def strided(arrays: Arrays) -> Any:
    if arrays.torch is None:
        return np.ones((4, 8), "float32")[:, ::2]
    made = arrays.new((4, 4))
    made.step = 2
    return made


def negative(arrays: Arrays) -> Any:
    made = arrays.new((4, 4))
    if arrays.torch is not None:
        made.negative = True
    return made


def read_only(_: Arrays) -> Any:
    made = np.ones((4, 4), "float32")
    made.flags.writeable = False
    return made


#: What is given in place of an operand or the result.
CHANGES: dict[str, Callable[[Arrays], Any]] = {
    "equal": lambda arrays: arrays.new((4, 4)),
    "other shape": lambda arrays: arrays.new((4, 5)),
    "fewer rows": lambda arrays: arrays.new((3, 4)),
    "one axis": lambda arrays: arrays.new((16,)),
    "a row": lambda arrays: arrays.new((4,)),
    "no axes": lambda arrays: arrays.new(()),
    "no elements": lambda arrays: arrays.new((0, 4)),
    "other type": lambda arrays: arrays.new((4, 4), "float16"),
    "unsupported type": lambda arrays: arrays.new((4, 4), "float64"),
    "closed": closed,
    "strided": strided,
    "negative": negative,
    "other device": lambda arrays: arrays.other.zeros((4, 4)),
    "misaligned": lambda arrays: arrays.part(1),
    "aligned part": lambda arrays: arrays.part(4),
    "NumPy": lambda _: np.resize(VALUES, (4, 4)),
    "read-only": read_only,
    "number": lambda _: 3.5,
    "list": lambda _: [[1.0] * 4] * 4,
    "None": lambda _: None,
    "NF4": lambda arrays: quantize(np.ones((4, 4), "float32")).on(arrays.gpu),
    "ours": lambda arrays: arrays.gpu.array(np.resize(VALUES, (4, 4))),
}
#: Views into the same memory, by their offsets: of both operands and of the result.
OVERLAPS = [
    (0, 16, 32),
    (0, 16, 0),
    (0, 16, 16),
    (0, 16, 8),
    (0, 16, 17),
    (8, 0, 1),
    (0, 0, 0),
    (0, 0, 15),
]
#: Streams and other settings.
SETTINGS: dict[str, Callable[[Arrays], dict[str, Any]]] = {
    "stream": lambda arrays: {"stream": arrays.gpu.stream()},
    "stream of another device": lambda arrays: {"stream": arrays.other.stream()},
    "not a stream": lambda _: {"stream": "stream"},
    "unknown": lambda _: {"streams": None},
}


def closed_stream(arrays: Arrays) -> dict[str, Any]:
    stream = arrays.gpu.stream()
    stream.close()
    return {"stream": stream}


SETTINGS["closed stream"] = closed_stream


def outcome(call: Callable[[], Any]) -> Any:
    """Return the values of the results, or everything about the error."""
    try:
        found = call()
    except Exception as error:
        return type(error), str(error), getattr(error, "hint", None)
    parts = found if isinstance(found, tuple) else (found,)
    return [(type(part), np.asarray(part.numpy() if hasattr(part, "numpy") else part).tobytes())
            for part in parts]  # fmt: skip


@pytest.fixture(params=["ours", "torch"])
def arrays(
    request: pytest.FixtureRequest,
    open_device: Callable[..., Gpu],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Arrays]:
    gpu, other = open_device("emulator"), open_device("emulator:1")
    torch = None
    if request.param == "torch":
        torch = FloatTorch(gpu)
        introduce(torch, monkeypatch)
    yield Arrays(gpu, other, torch)
    gpu.synchronize()


@pytest.fixture(params=["shipped", "cuBLAS"])
def new_ops(request: pytest.FixtureRequest, arrays: Arrays) -> Callable[[], Ops]:
    """Return a function that returns a new `Ops`."""
    if request.param == "shipped":
        return lambda: Ops(arrays.gpu, blas=False)
    blas = Blas(arrays.gpu, found=Found(Cublas(), "13.0.0"))
    return lambda: Ops(arrays.gpu, blas=blas)


def used(ops: Ops, name: str, arrays: Arrays, **more: Any) -> Ops:
    """Return `ops` after some calls with good operands."""
    for _ in range(3):
        OPS[name](ops, *arrays.good(name), **more)
    return ops


@every
def test_a_repeated_call_with_other_operands_gives_what_a_first_call_gives(
    arrays: Arrays, new_ops: Callable[[], Ops], name: str
) -> None:
    ready = used(new_ops(), name, arrays)
    for position in range(3):
        for what, change in CHANGES.items():

            def given(position: int = position, change: Make = change) -> list[Any]:
                operands = list(arrays.good(name))
                operands[position] = change(arrays)
                return operands

            first = given()
            wanted = outcome(partial(OPS[name], new_ops(), *first))
            for turn in range(3):
                again = given()
                found = outcome(partial(OPS[name], ready, *again))
                assert found == wanted, (position, what, turn)


@every
def test_a_repeated_call_checks_overlaps(arrays: Arrays, new_ops: Callable[[], Ops], name: str) -> None:
    ready = used(new_ops(), name, arrays)

    def views(offsets: tuple[int, int, int]) -> list[Any]:
        arrays.whole = arrays.new((64,))
        shapes = (4, 4), ((4,) if name == "rms_norm" else (4, 4)), (4, 4)
        return [arrays.part(offset, shape) for offset, shape in zip(offsets, shapes, strict=True)]

    for offsets in OVERLAPS:
        first = views(offsets)
        wanted = outcome(partial(OPS[name], new_ops(), *first))
        for _ in range(3):
            again = views(offsets)
            assert outcome(partial(OPS[name], ready, *again)) == wanted, offsets


@pytest.mark.parametrize("name", ["silu", "rms_norm", "gemm", "swiglu_backward"])
def test_a_repeated_call_with_other_settings_gives_what_a_first_call_gives(
    arrays: Arrays, new_ops: Callable[[], Ops], name: str
) -> None:
    ready = used(new_ops(), name, arrays)
    for what, make in SETTINGS.items():
        settings = make(arrays)
        operands = arrays.good(name)
        wanted = outcome(partial(OPS[name], new_ops(), *operands, **settings))
        for _ in range(3):
            found = outcome(partial(OPS[name], ready, *operands, **settings))
            assert found == wanted, what


@pytest.mark.parametrize("eps", [0, 0.0, 1, True, np.float32(1), -1.0, np.nan, "1", None, [1], 10**400])
def test_a_repeated_call_uses_its_own_eps(emulator: Gpu, eps: Any) -> None:
    x, gamma = emulator.array(np.resize(VALUES, (4, 4))), emulator.array(VALUES[:4])
    ready = Ops(emulator)
    for usual in (0.0, 1.0, 1, 0):
        for _ in range(3):
            ready.rms_norm(x, gamma, eps=usual)
    wanted = outcome(lambda: Ops(emulator).rms_norm(x, gamma, eps=eps))
    for _ in range(3):
        assert outcome(lambda: ready.rms_norm(x, gamma, eps=eps)) == wanted


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("accumulate", [True, False, 2, 0, None, "yes"])
def test_a_repeated_product_accumulates_or_not(
    arrays: Arrays, new_ops: Callable[[], Ops], name: str, accumulate: Any
) -> None:
    ready = used(new_ops(), name, arrays)
    used(ready, name, arrays, accumulate=True)
    for out in (True, False):

        def call(ops: Ops, out: bool = out) -> Any:
            x, y, z = arrays.good(name)
            return OPS[name](ops, x, y, z if out else None, accumulate=accumulate)

        wanted = outcome(lambda: call(new_ops()))
        for _ in range(3):
            assert outcome(lambda: call(ready)) == wanted


@pytest.mark.parametrize("out", ["x", 3, (), (None,), (None, None, None), [None, None], (None, 3)])
def test_a_pair_of_results_is_checked_in_repeated_calls(emulator: Gpu, out: Any) -> None:
    x = emulator.array(np.resize(VALUES, (4, 4)))
    ready = Ops(emulator)
    for _ in range(3):
        ready.swiglu_backward(x, x, x)
        ready.swiglu_backward(x, x, x, out=(emulator.empty((4, 4)), emulator.empty((4, 4))))
    wanted = outcome(lambda: Ops(emulator).swiglu_backward(x, x, x, out=out))
    for _ in range(3):
        assert outcome(lambda: ready.swiglu_backward(x, x, x, out=out)) == wanted


class Backward:
    """Operands, results and the workspace of `rms_norm_backward`, which takes several launches."""

    def __init__(self, arrays: Arrays, rows: int = 40) -> None:
        self.shapes = (rows, 4), (rows, 4), (4,), (rows, 4), (4,), (2000,)
        self.arrays = arrays

    def good(self) -> list[Any]:
        return [self.arrays.new(shape) for shape in self.shapes]

    @staticmethod
    def call(ops: Ops, gy: Any, x: Any, gamma: Any, gx: Any, g_gamma: Any, workspace: Any) -> Any:
        out = (gx, g_gamma)
        return ops.rms_norm_backward(gy, x, gamma, eps=0.5, out=out, workspace=workspace)

    def used(self) -> Ops:
        ops = Ops(self.arrays.gpu, blas=False)
        for _ in range(3):
            self.call(ops, *self.good())
        return ops


@pytest.mark.parametrize("position", range(6))
def test_a_repeated_call_of_several_launches_checks_each_array(arrays: Arrays, position: int) -> None:
    backward = Backward(arrays, rows=4)
    ready = backward.used()
    more: dict[str, Callable[[Arrays], Any]] = {
        "small workspace": lambda arrays: arrays.new((3,)),
        "large workspace": lambda arrays: arrays.new((5000,)),
        "16 bits": lambda arrays: arrays.new((2000,), "float16"),
        "row": lambda arrays: arrays.new((4,)),
    }
    for what, change in (CHANGES | more).items():

        def given(change: Make = change) -> list[Any]:
            operands = backward.good()
            operands[position] = change(arrays)
            return operands

        wanted = outcome(partial(backward.call, Ops(arrays.gpu), *given()))
        for turn in range(3):
            assert outcome(partial(backward.call, ready, *given())) == wanted, (what, turn)


@pytest.mark.parametrize("first", range(6))
@pytest.mark.parametrize("second", range(6))
def test_a_repeated_call_of_several_launches_checks_overlaps(
    arrays: Arrays, first: int, second: int
) -> None:
    backward = Backward(arrays)
    ready = backward.used()
    for offset in (0, 1, 4):

        def given(offset: int = offset) -> list[Any]:
            operands = backward.good()
            arrays.whole = arrays.new((2100,))
            operands[first] = arrays.part(0, backward.shapes[first])
            operands[second] = arrays.part(offset, backward.shapes[second])
            return operands

        wanted = outcome(partial(backward.call, Ops(arrays.gpu), *given()))
        for _ in range(2):
            assert outcome(partial(backward.call, ready, *given())) == wanted, offset


def test_a_repeated_call_of_several_launches_makes_them_all(emulator: Gpu) -> None:
    backward = Backward(Arrays(emulator, emulator, None))
    ready = backward.used()
    fresh = Ops(emulator)
    given = backward.good()
    with trace_ops() as wanted:
        results = [array.numpy() for array in backward.call(fresh, *given)]
    assert len(wanted) == 2
    with emulator.capture() as graph:
        backward.call(ready, *given)
    assert len(graph.nodes) == 2
    given[3].fill(0)
    given[4].fill(0)
    with trace_ops() as found:
        backward.call(ready, *given)
    assert found == wanted
    assert all(map(np.array_equal, [array.numpy() for array in given[3:5]], results))


def test_repeated_calls_of_several_launches_keep_no_module_loaded(emulator: Gpu) -> None:
    backward = Backward(Arrays(emulator, emulator, None))
    ready = backward.used()
    assert emulator.trim() == 2
    assert len(backward.call(ready, *backward.good())) == 2


def test_a_new_workspace_is_as_good_as_a_given_one(emulator: Gpu) -> None:
    backward = Backward(Arrays(emulator, emulator, None))
    ready = Ops(emulator)
    given = backward.good()
    wanted = outcome(lambda: backward.call(Ops(emulator), *given))
    for missing in ((5,), (3, 5), (3, 4, 5), (4,)):
        some = [None if n in missing else array for n, array in enumerate(given)]
        for _ in range(4):
            assert outcome(partial(backward.call, ready, *some)) == wanted


@pytest.mark.parametrize("by_cublas", [False, True])
@pytest.mark.parametrize("name", ["silu", "silu_backward", "gemm"])
def test_repeated_calls_take_arrays_of_cupy(
    emulator: Gpu, blas: Blas, name: str, by_cublas: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cupy = FloatCuPy(emulator)
    introduce(cupy, monkeypatch)
    values = np.resize(VALUES, (4, 4))
    own = Arrays(emulator, emulator, None).good(name)
    wanted = outcome(partial(OPS[name], Ops(emulator, blas=blas if by_cublas else False), *own))
    ready = Ops(emulator, blas=blas if by_cublas else False)
    x, y, out = (cupy.array(values) for _ in range(3))
    for _ in range(3):
        OPS[name](ready, x, y, out)
    cupy.fill(out.data.ptr, 16, 0)
    OPS[name](ready, x, y, out)
    assert out.numpy().tobytes() == wanted[0][1]
    x._c_contiguous = False
    with pytest.raises(InputError, match="is not contiguous"):
        OPS[name](ready, x, y, out)


def test_a_trace_has_repeated_calls(arrays: Arrays, new_ops: Callable[[], Ops]) -> None:
    for name in OPS:
        operands = arrays.good(name)
        with trace_ops() as first:
            OPS[name](new_ops(), *operands)
        ops = used(new_ops(), name, arrays)
        with trace_ops() as again:
            OPS[name](ops, *operands)
        assert again == first


def test_operands_of_a_repeated_call_that_are_not_aligned_are_reported_once(
    open_device: Callable[..., Gpu], builder: Builder, recorder: Recorder
) -> None:
    gpu = open_device("emulator", builder=builder)
    ops = Ops(gpu)
    x, y = gpu.zeros(64), gpu.zeros(65)
    for _ in range(3):
        ops.silu(x, out=y[:64])
    assert recorder.named("slow_path") == []
    for _ in range(2):
        ops.silu(x, out=y[1:])
    assert len(recorder.named("slow_path")) == 1


def test_repeated_calls_keep_no_module_loaded(emulator: Gpu) -> None:
    ops = Ops(emulator)
    x = emulator.zeros((4, 4))
    for _ in range(3):
        ops.silu(x)
    assert emulator.trim() == 1
    for _ in range(3):
        assert exact(ops.silu(x)).shape == (4, 4)
    assert emulator.trim() == 1


def test_repeated_calls_work_after_a_reset(emulator: Gpu) -> None:
    ops = Ops(emulator)
    old = emulator.zeros((4, 4))
    for _ in range(3):
        ops.silu(old)
    emulator.reset()
    fresh = Ops(emulator)
    assert outcome(lambda: ops.silu(old)) == outcome(lambda: fresh.silu(old))
    x = emulator.array(np.resize(VALUES, (4, 4)))
    out = emulator.empty((4, 4))
    for _ in range(3):
        ops.silu(x, out=out)
    assert outcome(lambda: ops.silu(x)) == outcome(lambda: fresh.silu(x))


def test_threads_share_an_ops(emulator: Gpu) -> None:
    ops = Ops(emulator, blas=False)
    together = threading.Barrier(4)

    def work(number: int) -> bool:
        x = emulator.array(np.resize(VALUES, (4, 4)) + number)
        wanted = Ops(emulator, blas=False).silu(x).numpy()
        together.wait()
        return all(np.array_equal(ops.silu(x).numpy(), wanted) for _ in range(30))

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(4)))


# Captures


@pytest.mark.parametrize("name", SINGLE)
def test_a_repeated_call_is_captured_as_a_first_call_is(emulator: Gpu, name: str) -> None:
    arrays = Arrays(emulator, emulator, None)
    ops = used(Ops(emulator, blas=False), name, arrays)
    x, y, out = arrays.good(name)
    with emulator.capture() as graph:
        OPS[name](ops, x, y, out)
    assert [node.kind for node in graph.nodes] == ["kernel"]
    wanted = outcome(lambda: OPS[name](Ops(emulator, blas=False), x, y, arrays.new((4, 4))))
    out.fill(0)
    graph.replay()
    assert out.numpy().tobytes() == wanted[0][1]


def test_a_repeated_call_without_a_result_names_the_argument_in_a_capture(emulator: Gpu) -> None:
    x = emulator.zeros((4, 4))
    ready = Ops(emulator, blas=False)
    for _ in range(3):
        ready.silu(x)
        ready.gemm(x, x)

    def capture(call: Callable[[], object]) -> None:
        with emulator.capture():
            call()

    for call in (lambda: ready.silu(x), lambda: ready.gemm(x, x)):
        with pytest.raises(Exception, match="allocating memory inside a capture") as caught:
            capture(call)
        assert "pass out=…" in str(caught.value.hint)  # type: ignore[attr-defined]


def test_results_of_repeated_calls_come_from_the_pool_of_the_caller_once(emulator: Gpu) -> None:
    ops = Ops(emulator, blas=False)
    x = emulator.zeros((64, 64))
    for _ in range(3):
        ops.silu(x)
    sizes = []
    for _ in range(2):
        pool = emulator.pool()
        pool.measure(lambda: ops.silu(x))
        sizes.append(pool.size)
    pool = emulator.pool()
    pool.measure(lambda: Ops(emulator, blas=False).silu(x))
    assert sizes == [pool.size] * 2


def test_a_repeated_product_of_cublas_uses_the_workspace_of_the_capture(
    emulator: Gpu, blas: Blas, cublas: Cublas, launched: Callable[[], None]
) -> None:
    ops = Ops(emulator, blas=blas)
    a, b, c = (emulator.zeros((4, 4)) for _ in range(3))
    for _ in range(4):
        ops.gemm(a, b, out=c)
    outside = {handle for handle, *_ in cublas.named("gemm_ex")}
    with emulator.capture() as graph:
        launched()
        ops.gemm(a, b, out=c)
    inside = cublas.named("gemm_ex")[-1][0]
    assert inside not in outside
    assert {a.address, b.address, c.address} <= {
        buffer.address for buffer in replayer(graph).work.buffers
    }
    for _ in range(2):
        ops.gemm(a, b, out=c)
    assert cublas.named("gemm_ex")[-1][0] in outside
