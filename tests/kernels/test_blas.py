"""cuBLAS: the order of its calls, its handles for each stream, and the lifetime of workspaces."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import numpy as np
import pytest

from preheat import Array, Gpu
from preheat.devices.libraries import StreamHandle
from preheat.emulator.stream import EmulatorStream
from preheat.errors import CaptureError, DeviceError, InputError, LaunchError, StaleBufferError
from preheat.kernels.blas import Blas, Found, find
from preheat.kernels.op import Op
from preheat.kernels.ops import Ops
from preheat.model.arch import Arch
from preheat.model.dtypes import DTYPES
from tests.graph.support import replayer
from tests.kernels.conftest import exact
from tests.kernels.cublas import Cublas
from tests.kernels.products import FORMS, op_of, product_agrees, shape_of
from tests.threads import run_in_thread

DIMS = {"m": 5, "n": 3, "k": 7}
ROOM = 32 << 20  # bytes of a workspace
T = TypeVar("T")
forms = pytest.mark.parametrize("name", FORMS)


class Product:
    """One product of zeros that can be made again and again."""

    def __init__(self, gpu: Gpu, dtype: str = "float32") -> None:
        self.op: Op = op_of("gemm", DIMS, dtype)
        self.dtype = DTYPES[dtype]
        self.arrays = tuple(gpu.zeros(shape_of(axes, DIMS), dtype) for axes in FORMS["gemm"])

    def __call__(self, blas: Blas, **more: Any) -> None:
        blas._multiply(self.op, self.dtype, *self.arrays, **more)


def test_a_handle_gets_its_stream_before_its_workspace_and_then_works(
    blas: Blas, cublas: Cublas, emulator: Gpu
) -> None:
    Product(emulator)(blas)
    mine = [call for call in cublas.calls if call[1] == 1000]
    assert [call[0] for call in mine] == [
        "create", "set_stream", "set_workspace", "set_math_mode", "gemm_ex"
    ]  # fmt: skip
    assert mine[1][2] == emulator._context.stream.handle


def test_a_stream_keeps_its_handle_and_another_has_its_own(
    blas: Blas, cublas: Cublas, emulator: Gpu
) -> None:
    product = Product(emulator)
    other = emulator.stream()
    for stream in (None, other, None, other):
        product(blas, stream=stream)
    used = [handle for handle, *_ in cublas.named("gemm_ex")]
    assert used[0] == used[2] != used[1] == used[3]
    streams = dict(cublas.named("set_stream"))
    assert [streams[handle] for handle in used[:2]] == [emulator._context.stream.handle, other.handle]
    workspaces = [address for _, address, _ in cublas.named("set_workspace")]
    assert len(workspaces) == len(set(workspaces)) == 2


@forms
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("add", [False, True])
def test_rows_are_multiplied_by_a_library_that_knows_columns(
    blas: Blas, emulator: Gpu, name: str, dtype: str, add: bool
) -> None:
    rng = np.random.default_rng(8)
    a, b, c = (
        emulator.array(rng.standard_normal(shape_of(axes, DIMS)).astype(dtype)) for axes in FORMS[name]
    )
    old = exact(c)
    blas._multiply(op_of(name, DIMS, dtype), DTYPES[dtype], a, b, c, add=add)
    product_agrees(name, exact(c), exact(a), exact(b), dtype, old=old if add else None)


@pytest.mark.parametrize(
    ("math", "mode", "of_float32", "of_float16"),
    [("fp32", 2, 69, 69), ("tf32", 3 | 16, 77, 68), ("default", 0 | 16, 68, 68)],
)
def test_the_math_mode_is_always_said(
    emulator: Gpu, cublas: Cublas, math: str, mode: int, of_float32: int, of_float16: int
) -> None:
    blas = Blas(emulator, math, found=Found(cublas, "13.0.0"))
    for dtype in ("float32", "float16"):
        Product(emulator, dtype)(blas)
    assert [given for _, given in cublas.named("set_math_mode")] == [mode]
    assert [how for *_, how, _ in cublas.named("gemm_ex")] == [of_float32, of_float16]


def test_an_unknown_math_mode_is_refused(emulator: Gpu, cublas: Cublas) -> None:
    with pytest.raises(InputError, match="math 'tf23' is not a math mode") as error:
        Blas(emulator, "tf23", found=Found(cublas, "13.0.0"))
    assert "tf32" in str(error.value.hint)
    with pytest.raises(InputError, match=r"math \['fp32'\] is not a math mode"):
        Blas(emulator, ["fp32"])  # type: ignore[arg-type]


@pytest.mark.parametrize("gpu", [None, "cuda", 0])
def test_a_value_that_is_no_device_is_refused(gpu: Any) -> None:
    with pytest.raises(InputError, match=f"{gpu!r} is not a device"):
        Blas(gpu)


@pytest.mark.parametrize("captures", ["x", None, -1, 2.5, 2.0, True, np.arange(2)], ids=repr)
def test_a_value_that_is_no_count_of_captures_is_refused(
    blas: Blas, cublas: Cublas, captures: Any
) -> None:
    with pytest.raises(InputError, match=r"captures .* (is not an integer|is outside 0 to)"):
        blas.reserve(captures)
    assert len(cublas.named("create")) == 1


def test_a_count_of_captures_may_be_zero_or_of_numpy(blas: Blas, cublas: Cublas) -> None:
    blas.reserve(0)
    blas.reserve(np.uint8(3))  # type: ignore[arg-type]
    assert len(cublas.named("create")) == 3


@pytest.mark.parametrize(
    ("arch", "size"), [("sm_80", 4 << 20), ("sm_90", 32 << 20), ("sm_120", 32 << 20)]
)
def test_a_workspace_has_the_recomcorrected_size(
    open_device: Callable[..., Gpu], cublas: Cublas, arch: str, size: int
) -> None:
    gpu = open_device("emulator", arch=arch)
    assert gpu.arch == Arch.parse(arch)
    Product(gpu)(Blas(gpu, found=Found(cublas, "13.0.0")))
    assert [given for *_, given in cublas.named("set_workspace")] == [size]


def test_operands_are_checked_like_those_of_a_kernel(
    blas: Blas, cublas: Cublas, emulator: Gpu, open_device: Callable[..., Gpu]
) -> None:
    product = Product(emulator)
    a, b, c = product.arrays
    run_in_thread = open_device("emulator:1").zeros(a.shape)
    with pytest.raises(LaunchError, match=r"cublasGemmEx.*not on the device"):
        blas._multiply(product.op, product.dtype, run_in_thread, b, c)
    with pytest.raises(LaunchError, match="cannot take an array of float16"):
        blas._multiply(product.op, product.dtype, a, emulator.zeros(b.shape, "float16"), c)
    b.close()
    with pytest.raises(StaleBufferError, match="freed"):
        product(blas)
    assert cublas.named("gemm_ex") == []


def test_a_product_that_is_refused_takes_no_workspace(
    blas: Blas, cublas: Cublas, emulator: Gpu
) -> None:
    product = Product(emulator)
    stream = emulator.stream()
    product.arrays[1].close()
    with pytest.raises(StaleBufferError):
        product(blas, stream=stream)
    assert [name for name, *_ in cublas.calls] == ["create"]


def test_an_error_of_cublas_says_which_call_it_was(blas: Blas, cublas: Cublas, emulator: Gpu) -> None:
    cublas.fails = "gemm_ex"
    with pytest.raises(DeviceError, match=r"gemm_ex of cuBLAS failed: INVALID_VALUE \(7\)"):
        Product(emulator)(blas)


# Lifetime


def test_closing_the_device_releases_every_handle(blas: Blas, cublas: Cublas, emulator: Gpu) -> None:
    Product(emulator)(blas)
    Product(emulator)(blas, stream=emulator.stream())
    emulator.close()
    assert sorted(cublas.named("destroy")) == sorted(cublas.named("create"))


def test_dropping_it_releases_every_handle_at_the_next_safe_point(
    emulator: Gpu, cublas: Cublas
) -> None:
    blas = Blas(emulator, found=Found(cublas, "13.0.0"))
    Product(emulator)(blas)
    dropped = weakref.ref(blas)
    del blas
    assert dropped() is None  # at once: nothing it holds points back to it
    assert cublas.named("destroy") == []  # a finalizer calls nothing
    emulator.synchronize()
    assert sorted(cublas.named("destroy")) == sorted(cublas.named("create"))


def test_streams_that_are_closed_or_dropped_give_their_workspaces_back(
    blas: Blas, cublas: Cublas, emulator: Gpu
) -> None:
    product = Product(emulator)
    product(blas)
    emulator.synchronize()
    free = emulator.memory().free
    streams = [emulator.stream() for _ in range(4)]
    for stream in streams:
        product(blas, stream=stream)
    assert emulator.memory().free <= free - 4 * ROOM
    handles = len(cublas.named("create"))
    streams.pop().close()
    del streams, stream
    product(blas)
    emulator.synchronize()
    assert emulator.memory().free == free
    for _ in range(3):
        with emulator.stream() as again:
            product(blas, stream=again)
        product(blas)
    assert len(cublas.named("create")) == handles  # handles serve the next streams
    assert cublas.named("destroy") == []
    emulator.close()
    assert sorted(cublas.named("destroy")) == sorted(cublas.named("create"))


def test_a_workspace_is_released_behind_the_work_of_its_stream(
    blas: Blas, emulator: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    product = Product(emulator)
    stream = emulator.stream()
    followed = list[Any]()
    product(blas)
    product(blas, stream=stream)
    raw = stream.raw
    stream.close()
    product(blas)
    monkeypatch.setattr(EmulatorStream, "wait", lambda stream, _: followed.append(stream.id))
    emulator.synchronize()
    assert followed == [emulator._context.stream.id]  # The home stream waits, then frees.
    assert raw.id not in blas._handles


def test_a_handle_that_is_in_use_outlives_its_stream(blas: Blas, emulator: Gpu) -> None:
    """As when another thread closes the stream between the choice of a handle and the call."""
    product = Product(emulator)
    stream = emulator.stream()
    handle = blas._handle_of(stream.raw)
    stream.close()
    product(blas)
    blas.reserve(5)
    assert handle.number not in {other.number for other in (*blas._ready, *blas._handles.values())}


def test_products_in_another_librarys_stream_wait_for_the_workspace_once(
    blas: Blas, emulator: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    product = Product(emulator)
    theirs = StreamHandle(emulator._device.stream().handle)
    for _ in range(2):
        product(blas, stream=theirs)
    waits = list[int]()
    monkeypatch.setattr(EmulatorStream, "wait", lambda stream, _: waits.append(stream.handle))
    for _ in range(3):
        product(blas, stream=theirs)
    assert waits == []  # The stream waits for everything that it uses.


def test_workspaces_for_streams_of_other_libraries_are_bounded(blas: Blas, emulator: Gpu) -> None:
    product = Product(emulator)
    product(blas)
    free = None
    for turn in range(40):
        stream = emulator._device.stream()
        product(blas, stream=StreamHandle(stream.handle))
        stream.close()
        emulator.synchronize()
        if turn == 10:
            free = emulator.memory().free
    assert emulator.memory().free == free
    assert len(blas._handles) <= 1 + 4


# Captures


def test_a_capture_has_its_own_workspace_and_makes_no_handle(
    blas: Blas, cublas: Cublas, emulator: Gpu, launched: Callable[[], None]
) -> None:
    product = Product(emulator)
    product(blas)
    before = len(cublas.named("create"))
    with emulator.capture() as graph:
        launched()
        product(blas)
        product(blas)
    inside = cublas.named("gemm_ex")[1:]
    assert len(cublas.named("create")) == before
    assert inside[0][0] == inside[1][0] != cublas.named("gemm_ex")[0][0]
    workspaces = [address for _, address, _ in cublas.named("set_workspace")]
    assert len(workspaces) == len(set(workspaces)) == 2
    assert workspaces[1] in {buffer.address for buffer in replayer(graph).work.buffers}
    assert {array.address for array in product.arrays} <= {
        buffer.address for buffer in replayer(graph).work.buffers
    }


def test_two_graphs_never_share_a_workspace_and_reuse_handles(
    blas: Blas, cublas: Cublas, emulator: Gpu, launched: Callable[[], None]
) -> None:
    product = Product(emulator)
    graphs = []
    for _ in range(3):
        product(blas)
        with emulator.capture() as graph:
            launched()
            product(blas)
        graphs.append(graph)
    workspaces = [address for _, address, _ in cublas.named("set_workspace")]
    assert len(workspaces) == len(set(workspaces)) == 1 + len(graphs)
    assert len(cublas.named("create")) <= 3  # the stream's, a capture's, a spare one


@pytest.mark.parametrize("first", ["captured stream", "branch"])
def test_products_in_two_branches_of_a_capture_are_ordered_by_their_workspace(
    blas: Blas, cublas: Cublas, emulator: Gpu, first: str
) -> None:
    """The stand-in makes no nodes, so that the launches after the products show the order."""
    one, two = Product(emulator), Product(emulator)
    one(blas)
    side = emulator.stream()
    ops, x = Ops(emulator), [emulator.zeros(5) for _ in range(4)]
    ops.silu(x[0], out=x[1])
    with emulator.capture() as graph:
        side.wait(emulator.record())
        streams = [None, side] if first == "captured stream" else [side, None]
        ops.silu(x[0], out=x[1], stream=streams[0])
        one(blas, stream=streams[0])
        two(blas, stream=streams[1])
        ops.silu(x[2], out=x[3], stream=streams[1])
        emulator.wait(side)
    assert [node.after for node in graph.nodes] == [(), (0,)]
    (handle,) = {call[0] for call in cublas.named("gemm_ex")[1:]}
    bound = [stream for each, stream in cublas.named("set_stream") if each == handle][-2:]
    assert len(set(bound)) == 2
    assert len({address for each, address, _ in cublas.named("set_workspace") if each == handle}) == 1


def test_a_capture_without_a_workspace_is_refused_and_reserve_helps(
    blas: Blas, emulator: Gpu, launched: Callable[[], None]
) -> None:
    product = Product(emulator)

    def capture() -> Any:
        with emulator.capture() as graph:
            launched()
            product(blas)
        return graph

    kept = [capture()]
    with pytest.raises(CaptureError, match="cuBLAS has no workspace ready") as error:
        capture()
    assert "reserve" in str(error.value.hint)
    blas.reserve(2)
    kept += [capture(), capture()]
    assert (
        len(
            {
                id(buffer)
                for graph in kept
                for buffer in replayer(graph).work.buffers
                if buffer.size > 1000
            }
        )
        == 3
    )


def test_a_workspace_is_ready_whatever_threads_do_in_a_capture(
    blas: Blas, emulator: Gpu, launched: Callable[[], None]
) -> None:
    product = Product(emulator)
    stream = emulator.stream()
    with emulator.capture():
        launched()
        run_in_thread(partial(product, blas, stream=stream))  # which takes the one that was ready
        product(blas)


def test_products_continue_where_a_capture_forbids_to_have_another_workspace_ready(
    blas: Blas, cublas: Cublas, emulator: Gpu, launched: Callable[[], None]
) -> None:
    product = Product(emulator)
    product(blas)
    with emulator.capture(mode="global"):
        launched()
        product(blas)
        run_in_thread(partial(product, blas))
        assert blas._ready == []
    assert len(cublas.named("gemm_ex")) == 3
    product(blas)
    assert len(blas._ready) == 1


def test_no_workspace_is_released_while_a_thread_captures(
    blas: Blas, emulator: Gpu, launched: Callable[[], None]
) -> None:
    product = Product(emulator)
    stream = emulator.stream()
    product(blas)
    product(blas, stream=stream)
    emulator.synchronize()
    free = emulator.memory().free
    with emulator.capture():
        launched()
        stream.close()
        run_in_thread(partial(product, blas))
        assert emulator.memory().free == free
    emulator.synchronize()
    assert emulator.memory().free == free + ROOM


def test_the_next_product_gives_the_workspaces_of_closed_graphs_back(
    blas: Blas, emulator: Gpu, launched: Callable[[], None]
) -> None:
    product = Product(emulator)
    product(blas)
    blas.reserve(4)
    emulator.synchronize()
    free = emulator.memory().free
    for _ in range(3):
        with emulator.capture() as graph:
            launched()
            product(blas)
        graph.close()
    product(blas)
    emulator.synchronize()
    assert emulator.memory().free == free + 3 * ROOM


def test_a_graph_keeps_operands_of_other_libraries_and_orders_its_replays_with_them(
    permissive: Gpu, cublas: Cublas
) -> None:
    blas = Blas(permissive, found=Found(cublas, "13.0.0"))
    product, filled = Product(permissive), permissive.zeros(5)
    host = np.zeros((5, 7), "float32")
    before = sys.getrefcount(host)
    with permissive.capture() as graph:
        filled.fill(1)  # An empty graph is an error.
        blas._multiply(product.op, product.dtype, host, *product.arrays[1:])
    assert [operand.owner is host for operand in replayer(graph).work.foreign] == [True]
    graph.close()
    assert sys.getrefcount(host) == before


def test_nothing_is_reserved_inside_a_capture(
    blas: Blas, emulator: Gpu, launched: Callable[[], None]
) -> None:
    def capture() -> None:
        with emulator.capture():
            launched()
            blas.reserve(5)

    with pytest.raises(CaptureError, match="allocating memory inside a capture"):
        capture()


# The real one


@pytest.fixture
def real(open_device: Callable[..., Gpu]) -> Gpu:
    gpu = open_device("cuda")
    if isinstance(found := find(gpu), str):
        pytest.skip(found)
    return gpu


@pytest.mark.gpu
@forms
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("math", ["fp32", "default"])
def test_cublas_keeps_the_bound_of_the_shipped_kernels(
    real: Gpu, name: str, dtype: str, math: str
) -> None:
    rng = np.random.default_rng(9)
    dims = {"m": 129, "n": 333, "k": 1000}
    a, b, c = (
        as_stored(real, rng.standard_normal(shape_of(axes, dims), dtype=np.float32), dtype)
        for axes in FORMS[name]
    )
    old = exact(c)
    ops = Ops(real, blas=Blas(real, math))
    product_agrees(name, exact(getattr(ops, name)(a, b)), exact(a), exact(b), dtype)
    getattr(ops, name)(a, b, out=c, accumulate=True)
    product_agrees(name, exact(c), exact(a), exact(b), dtype, old=old)


@pytest.mark.gpu
def test_tf32_is_less_precise_and_only_where_asked_for(real: Gpu) -> None:
    rng = np.random.default_rng(10)
    a, b = (real.array(rng.standard_normal((512, 512), dtype=np.float32)) for _ in range(2))
    wanted = exact(a) @ exact(b)
    errors = {
        math: np.abs(exact(Ops(real, blas=Blas(real, math)).gemm(a, b)) - wanted).max()
        for math in ("fp32", "tf32", "default")
    }
    assert errors["tf32"] > 10 * errors["fp32"]
    assert errors["default"] < 2 * errors["fp32"]


@pytest.mark.gpu
def test_a_captured_product_is_replayed_with_new_data_beside_another_graph(real: Gpu) -> None:
    rng = np.random.default_rng(11)
    ops = Ops(real, blas=Blas(real))
    a, b = (real.array(rng.standard_normal((300, 300), dtype=np.float32)) for _ in range(2))
    results = [real.zeros((300, 300)) for _ in range(2)]
    graphs = []
    for result in results:
        ops.gemm(a, b, out=result)
        with real.capture() as graph:
            ops.gemm(a, b, out=result)
        graphs.append(graph)
    a.write(rng.standard_normal((300, 300), dtype=np.float32))
    for graph in graphs:
        graph.replay()
    for result in results:
        product_agrees("gemm", exact(result), exact(a), exact(b), "float32")


@pytest.mark.gpu
def test_products_in_branches_of_one_graph_do_not_disturb_each_other(real: Gpu) -> None:
    """They share a workspace, in which cuBLAS adds up the parts of such long products."""
    rng = np.random.default_rng(12)
    ops, sides = Ops(real, blas=Blas(real)), [real.stream() for _ in range(3)]
    products = []
    for _ in range(8):
        a, b = (
            real.array(rng.standard_normal(shape, dtype=np.float32))
            for shape in ((64, 16384), (16384, 64))
        )
        products.append((a, b, real.zeros((64, 64))))
    ops.gemm(*products[0][:2], out=products[0][2])
    with real.capture() as graph:
        for side in sides:
            side.wait(real.record())
        for number, (a, b, out) in enumerate(products):
            ops.gemm(a, b, out=out, stream=[None, *sides][number % 4])
        for side in sides:
            real.wait(side)
    for _ in range(20):
        for _, _, out in products:
            out.fill(0)
        graph.replay()
        for a, b, out in products:
            product_agrees("gemm", exact(out), exact(a), exact(b), "float32")


def as_stored(gpu: Gpu, host: Any, dtype: str) -> Array:
    return gpu.array(host.astype("float16") if dtype == "float16" else host, dtype)
