"""`@gpu.graphed`: which calls share a graph, and what the decorator refuses."""

from __future__ import annotations

import gc
import inspect
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from preheat.errors import CaptureError, GraphError, InputError
from preheat.gpu import Gpu
from preheat.process.callsite import shown_path
from tests.devices.support import import_or_skip
from tests.driver_errors import out_of_memory
from tests.faulty import FaultyGpu
from tests.graph.graphed_support import Batch, Frozen, Host, Wrap, late
from tests.graph.support import KERNELS, axpy_case, line_here, nothing_left_open, runs_without_a_graph
from tests.threads import run_in_thread


def integers(seed: int, n: int = 31) -> Host:
    return np.random.default_rng(seed).integers(-1000, 1000, n, dtype=np.int32)


def test_calls_run_once_each_eager_captured_then_replayed(device: Gpu) -> None:
    made = axpy_case(device)
    entered = list[int]()

    @device.graphed()
    def step(x: Any, y: Any) -> Any:
        """Add thrice x to y."""
        entered.append(1)
        made.axpy[5, 64](3, x, y, made.n)
        return y

    for call in range(1, 7):
        assert step(made.x, made.y) is made.y
        made.check(3 * call)
        assert len(entered) == min(call, 2)
    assert len(step.graphs) == 1


def test_it_looks_like_the_function_it_wraps(device: Gpu) -> None:
    def step(x: int, *, by: int = 3) -> int:
        """Say so."""
        return x + by

    wrapped = device.graphed(capacity=5)(step)
    assert (wrapped.__name__, wrapped.__doc__) == ("step", "Say so.")  # type: ignore[attr-defined]
    assert wrapped.__wrapped__ is step
    assert inspect.signature(wrapped) == inspect.signature(step)
    assert wrapped.graphs.capacity == 5
    assert repr(wrapped) == f"<graphed step: <GraphCache on {device.name}: 0 of 5 graphs>>"
    assert wrapped(4, by=5) == 9


def test_it_needs_no_parentheses(device: Gpu) -> None:
    made = axpy_case(device, 31)

    @device.graphed
    def step(y: Any) -> None:
        made.axpy[1, 32](3, made.x, y, 31)

    for call in range(1, 4):
        step(made.y)
        made.check(3 * call)
    assert len(step.graphs) == 1


async def coroutine() -> None:
    """Work that is not done when it returns."""


async def asynchronous() -> Any:
    """An asynchronous generator function."""
    yield


def generator() -> Any:
    """A generator function."""
    yield


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (coroutine, "coroutine is a coroutine function"),
        (asynchronous, "asynchronous is an asynchronous generator"),
        (generator, "generator is a generator"),
        (partial(generator), "is a generator"),
        (5, "5 is not a function"),
    ],
)
def test_a_value_that_is_no_plain_function_is_refused_as_it_is_decorated(
    function: Any, why: str, device: Gpu
) -> None:
    with pytest.raises(InputError, match=why):
        device.graphed(function)
    with pytest.raises(InputError, match=why):
        device.graphed(key=len)(function)


def test_a_key_is_a_function(device: Gpu) -> None:
    with pytest.raises(InputError, match="key='batch' is not a function") as refused:
        device.graphed(key="batch")(len)  # type: ignore[call-overload]
    assert refused.value.hint is not None
    assert "lambda" in refused.value.hint


# Methods


def test_each_instance_has_graphs_of_its_own_which_go_with_it(device: Gpu) -> None:
    made = axpy_case(device, 31)

    class Model:
        def __init__(self, a: int) -> None:
            self.a = a
            self.y = device.array(made.ys)

        @device.graphed(key=lambda n: n)
        def step(self, n: int) -> Any:
            made.axpy[1, 32](self.a, made.x, self.y, n)
            return self.y

    models = [Model(a) for a in (2, 5)]
    for call in range(1, 5):
        for model in models:
            assert model.step(31) is model.y
            np.testing.assert_array_equal(model.y.numpy(), made.ys + model.a * call * made.xs)
    graphs = Model.step.graphs
    assert len(graphs) == 2
    assert models[0].step.graphs is graphs
    Model.step(models[0], 31)  # as a function of the class
    np.testing.assert_array_equal(models[0].y.numpy(), made.ys + 2 * 5 * made.xs)
    del model, models[0]
    gc.collect()
    assert [cached.owner for cached in graphs.report().graphs] == models


def test_static_and_inherited_methods_work(device: Gpu) -> None:
    made = axpy_case(device, 31)

    class Base:
        @staticmethod
        @device.graphed()
        def alone(a: int) -> None:
            made.launch(a)

        @device.graphed()
        def step(self, a: int) -> None:
            made.launch(a)

    class Derived(Base):
        def step(self, a: int) -> None:
            super().step(a)

    one = Derived()
    for call in range(1, 4):
        one.alone(2)
        one.step(3)
        made.check(5 * call)
    assert len(Base.step.graphs) == 1


def test_a_function_that_a_class_borrows_stays_what_it_is(device: Gpu) -> None:
    made = axpy_case(device, 62)

    @device.graphed
    def free(y: Any) -> None:
        made.axpy[1, 32](3, made.x, getattr(y, "y", y), 31)

    class Model:
        run = free
        y = made.y

    model = Model()
    for _ in range(3):
        free(made.y[:31])  # a new object each time
        model.run()
    assert [cached.owner for cached in free.graphs.report().graphs] == [None, model]
    want = made.ys.astype(np.int64)
    want[:31] += 18 * made.xs[:31]
    np.testing.assert_array_equal(made.y.numpy(), want)


def test_a_method_looks_like_the_function_it_wraps_and_needs_an_instance(device: Gpu) -> None:
    class Model:
        @device.graphed
        def step(self, n: int) -> int:
            """Say so."""
            return n

    method: Any = Model().step
    assert (method.__name__, method.__doc__, method(3)) == ("step", "Say so.", 3)
    assert str(inspect.signature(method)) == "(n: 'int') -> 'int'"
    assert str(inspect.signature(Model.step)) == "(self, n: 'int') -> 'int'"
    assert repr(method) == f"<graphed {Model.__name__}.step: {method.graphs!r}>"
    with pytest.raises(InputError, match=r"Model.step is a method: it was called without an instance"):
        Model.step()


# Warming


def test_warming_executes_and_captures_each_call_the_largest_first(device: Gpu) -> None:
    made = axpy_case(device, 33)
    entered = list[int]()

    @device.graphed(copy_inputs=True)
    def step(x: Any, n: int) -> Any:
        entered.append(n)
        made.axpy[1, 64](1, x, made.y, n)
        return made.y

    sizes = (1, 33, 31)
    step.warm([(device.array(made.xs[:n]), n) for n in sizes])
    assert entered == [33, 33, 31, 31, 1, 1]  # executed, then captured
    assert [cached.replays for cached in step.graphs.report().graphs] == [0] * 3
    step.warm([{"n": 7, "x": device.array(made.xs[:7])}])
    assert entered[6:] == [7, 7]
    want = made.ys.astype(np.int64)
    for n in (*sizes, 7, *sizes):
        want[:n] += made.xs[:n]
    for n in sizes:
        assert step(device.array(made.xs[:n]), n) is made.y
    np.testing.assert_array_equal(made.y.numpy(), want)
    assert len(entered) == 8
    step.invalidate()
    assert len(step.graphs) == 0


def test_a_method_is_warmed_and_forgotten_for_its_instance(device: Gpu) -> None:
    made = axpy_case(device, 31)

    class Model:
        @device.graphed
        def step(self, n: int) -> None:
            made.axpy[1, 32](1, made.x, made.y, n)

    one, two = Model(), Model()
    one.step.warm([(31,), (31,)])
    two.step.warm([(31,)])
    assert [cached.owner for cached in Model.step.graphs.report().graphs] == [one, two]
    one.step(31)
    made.check(3)
    one.step.invalidate()
    assert [cached.owner for cached in Model.step.graphs.report().graphs] == [two]
    with pytest.raises(InputError, match=r"Model.step is a method, and has no instance here"):
        Model.step.warm([(31,)])
    Model.step.invalidate()
    assert len(Model.step.graphs) == 0


@pytest.mark.parametrize(
    ("calls", "why"),
    [(5, "5 is not a collection of calls"), ([5], "5 is not a call to warm"), ([(1,), (2,)], "2 keys")],
)
def test_a_key_that_cannot_be_warmed_is_refused_before_anything_runs(
    calls: Any, why: str, device: Gpu
) -> None:
    step = device.graphed(capacity=1)(lambda n: pytest.fail(f"ran {n}"))
    with pytest.raises(InputError, match=why):
        step.warm(calls)


# Results


def test_results_are_refreshed_or_with_copy_ones_own(device: Gpu) -> None:
    made = axpy_case(device, 31)

    def step() -> dict[str, Any]:
        made.launch()
        return {"y": made.y}

    shared = device.graphed()(step)
    own = device.graphed(copy=True)(step)
    assert [shared()["y"] is made.y for _ in range(3)] == [True] * 3
    got = [own()["y"] for _ in range(3)]
    for call, y in enumerate(got, start=4):
        np.testing.assert_array_equal(y.numpy(), made.ys + 3 * call * made.xs)


# Inputs that change


def test_copied_inputs_let_fresh_arrays_share_one_graph(device: Gpu) -> None:
    made = axpy_case(device, 31)
    entered = list[int]()
    want = np.zeros(31, np.int64)
    y = device.zeros(31, "int32")

    @device.graphed(copy_inputs=True)
    def step(x: Any, more: dict[str, Any], a: int) -> Any:
        entered.append(1)
        made.axpy[1, 32](a, x, y, 31)
        made.axpy[1, 32](1, more["x"], y, 31)
        return y

    for seed in range(6):
        xs, more = integers(seed), integers(100 + seed)
        step(device.array(xs), {"x": device.array(more)}, 7)  # dropped right after the call
        want += 7 * xs + more
        np.testing.assert_array_equal(y.numpy(), want)
    assert len(entered) == 2
    assert len(step.graphs) == 1


@pytest.mark.parametrize(
    ("write", "reported"),
    [
        (
            lambda made, x: made.axpy[1, 32](1, made.y, x, 31),
            r"axpy \(.*\) writes argument 2 \(int\*\)",
        ),
        (lambda made, x: made.axpy[1, 32](1, made.y, x[3:], 9), r"axpy \(.*\) writes argument 2"),
        (lambda _, x: x.fill(3), r"fill \(.*\) writes argument 0"),
        (lambda made, x: x.copy_from(made.y), r"copy \(.*\) writes argument 0"),
    ],
)
def test_a_step_that_writes_an_input_copy_is_refused(
    write: Callable[[Any, Any], object], reported: str, device: Gpu
) -> None:
    made = axpy_case(device, 31)

    @device.graphed(copy_inputs=True)
    def step(given: Batch) -> None:
        made.launch()
        write(made, given.y)

    step(Batch(1, device.array(made.xs)))
    for _ in range(2):
        with pytest.raises(GraphError, match=reported) as refused:
            step(Batch(1, device.array(made.xs)))
        assert refused.value.hint is not None
        assert "without copy_inputs" in refused.value.hint
    with pytest.raises(GraphError, match=reported):
        step.warm([(Batch(1, device.array(made.xs)),)])
    report = step.graphs.report()
    assert (report.graphs, report.quarantined) == ((), ())
    made.check(6)  # once by the first call, once by the warming


def test_what_a_kernel_of_unknown_types_does_to_a_copy_is_not_known(device: Gpu) -> None:
    source = """
        .version 7.8
        .target sm_80
        .address_size 64
        .visible .entry first(.param .u64 x, .param .u64 out) {
            .reg .b64 %a, %b;
            .reg .b32 %v;
            ld.param.u64 %a, [x];
            ld.param.u64 %b, [out];
            cvta.to.global.u64 %a, %a;
            cvta.to.global.u64 %b, %b;
            ld.global.u32 %v, [%a];
            st.global.u32 [%b], %v;
            ret;
        }
    """
    first = device.kernel(source, "first")
    out = device.zeros(1, "int32")

    @device.graphed(copy_inputs=True)
    def step(x: Any) -> None:
        first[1, 1](x, out)

    for value in (5, 7, 9):
        step(device.array(np.array([value], np.int32)))
        assert out.numpy() == [value]
    assert len(step.graphs) == 1


@pytest.mark.parametrize("wrap", [lambda y: Batch(7, y), lambda y: Frozen(y), lambda y: late(y)])
def test_copied_inputs_inside_dataclasses_share_one_graph(wrap: Wrap, device: Gpu) -> None:
    made = axpy_case(device, 31)
    want = np.zeros(31, np.int64)
    y = device.zeros(31, "int32")

    @device.graphed(copy_inputs=True)
    def step(given: Any) -> None:
        made.axpy[1, 32](3, given.y, y, 31)

    for seed in range(5):
        step(wrap(device.array(integers(seed))))
        want += 3 * integers(seed)
    np.testing.assert_array_equal(y.numpy(), want)
    assert len(step.graphs) == 1


def test_copied_inputs_of_another_layout_or_shared_are_another_cached_graph(device: Gpu) -> None:
    made = axpy_case(device, 62)
    y = device.zeros(31, "int32")

    @device.graphed(key=lambda *_: "one", copy_inputs=True)
    def step(x: Any, z: Any) -> None:
        made.axpy[1, 32](1, x, y, len(x))
        made.axpy[1, 32](10, z, y, len(z))

    want = np.zeros(31, np.int64)
    for seed in range(4):
        a, b, c = integers(seed), integers(50 + seed), integers(90 + seed, 17)
        step(device.array(a), device.array(b))
        same = device.array(a)
        step(same, same)
        step(device.array(c), device.array(b))
        want += 12 * a + 20 * b
        want[:17] += c
    np.testing.assert_array_equal(y.numpy(), want)
    assert len(step.graphs) == 3


def test_host_inputs_are_copied_too_on_an_emulator_that_permits_them(permissive: Gpu) -> None:
    made = axpy_case(permissive, 31)
    y = permissive.zeros(31, "int32")
    want = np.zeros(31, np.int64)

    @permissive.graphed(copy_inputs=True)
    def step(x: Host) -> None:
        made.axpy[1, 32](3, x, y, 31)

    for seed in range(5):
        xs = integers(seed)
        step(xs.copy())
        want += 3 * xs
    np.testing.assert_array_equal(y.numpy(), want)
    assert len(step.graphs) == 1


def test_copied_inputs_of_two_threads_do_not_mix(device: Gpu) -> None:
    double = device.kernel(
        """extern "C" __global__ void twice(const int* x, int* y, int n) {
            int i = threadIdx.x;
            if (i < n) y[i] = 2 * x[i];
        }""",
        "twice",
    )
    y = device.zeros(31, "int32")
    start = threading.Barrier(3)
    wrong = list[str]()

    @device.graphed(copy_inputs=True, copy=True)
    def step(x: Any) -> Any:
        double[1, 32](x, y, 31)
        return y

    for seed in range(3):
        step(device.array(integers(seed)))

    def worker(name: int) -> None:
        start.wait(300)
        for seed in range(name, 60, 3):
            xs = integers(seed)
            if (step(device.array(xs)).numpy() != 2 * xs).any():
                wrong.append(f"{name}: {seed}")

    threads = [threading.Thread(target=worker, args=(name,), daemon=True) for name in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive()
    assert wrong == []


def test_private_inputs_that_do_not_fit_leave_the_call_to_run_as_it_is(faulty: FaultyGpu) -> None:

    made = axpy_case(faulty.gpu, 31)

    @faulty.gpu.graphed(copy_inputs=True)
    def step(x: Any) -> None:
        made.axpy[1, 32](3, x, made.y, 31)

    step(made.x)
    faulty.device.fail("allocate", out_of_memory("cuMemAlloc"), out_of_memory("cuMemAlloc"))
    with runs_without_a_graph("CUDA_ERROR_OUT_OF_MEMORY"):
        step(made.x)
    made.check(6)
    assert len(step.graphs.report().quarantined) == 1


# Other libraries


class Tensors:
    """Tensors of a library on the GPU, from and to NumPy."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.library = import_or_skip(name)

    def of(self, host: Host) -> Any:
        """Return a copy on the GPU."""
        return self.library.asarray(host, **({"device": "cuda"} if self.name == "torch" else {}))

    def host(self, tensor: Any) -> Host:
        """Return a copy on the host."""
        found: Host = tensor.cpu().numpy() if self.name == "torch" else self.library.asnumpy(tensor)
        return found


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["torch", "cupy"])
def test_tensors_of_other_libraries_are_copied_in_and_out(
    name: str, open_device: Callable[..., Gpu]
) -> None:
    gpu = open_device("cuda")
    tensors = Tensors(name)
    made = axpy_case(gpu, 31)
    y = tensors.of(np.zeros(31, np.int32))
    entered = list[int]()

    @gpu.graphed(copy_inputs=True, copy=True)
    def step(x: Any) -> dict[str, Any]:
        entered.append(1)
        made.axpy[1, 32](3, x, y, 31)
        return {"y": y}

    want = np.zeros(31, np.int64)
    got = list[tuple[Any, Host]]()
    for seed in range(6):
        want = want + 3 * integers(seed)
        got.append((step(tensors.of(integers(seed)))["y"], want))
    for tensor, exact in got:
        np.testing.assert_array_equal(tensors.host(tensor), exact)
    assert len(entered) == 2
    assert len(step.graphs) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["torch", "cupy"])
def test_another_tensor_of_the_same_shape_is_another_cached_graph_too(
    name: str, open_device: Callable[..., Gpu]
) -> None:
    gpu = open_device("cuda")
    tensors = Tensors(name)
    made = axpy_case(gpu, 31)
    outs = [tensors.of(made.ys) for _ in range(2)]

    @gpu.graphed(key=lambda y: tuple(y.shape), checked=True)
    def step(y: Any) -> None:
        made.axpy[1, 32](3, made.x, y, 31)

    for call in range(1, 5):
        for y in outs:
            step(y)
            np.testing.assert_array_equal(tensors.host(y), made.ys + 3 * call * made.xs)
    assert len(step.graphs) == 2


@pytest.mark.gpu
def test_a_transposed_tensor_at_the_same_address_is_another_cached_graph(
    open_device: Callable[..., Gpu],
) -> None:
    gpu = open_device("cuda")
    torch = import_or_skip("torch")
    x = torch.arange(1, 26, device="cuda").reshape(5, 5)

    @gpu.graphed()
    def step(x: Any) -> Any:
        return (x * 2).reshape(-1)

    for _ in range(3):
        for given in (x, x.T):
            np.testing.assert_array_equal(step(given).cpu(), (given.cpu() * 2).reshape(-1))
    assert len(step.graphs) == 2


# Together


def test_a_graphed_function_called_from_a_captured_body_becomes_part_of_it(device: Gpu) -> None:
    made = axpy_case(device, 31)

    @device.graphed(copy_inputs=True, copy=True)
    def inner(x: Any) -> Any:
        made.axpy[1, 32](3, x, made.y, 31)
        return made.y

    @device.graphed()
    def outer() -> Any:
        inner(made.x)
        return inner(made.x)

    for call in range(1, 4):
        assert outer() is made.y or call == 1
        made.check(6 * call)
    with device.capture() as graph:
        assert inner(made.x) is made.y  # no copies, which a capture could not hold
    assert len(graph) == 1
    graph.replay()
    made.check(21)


def test_a_function_that_no_capture_can_hold_continues_eagerly(device: Gpu) -> None:
    made = axpy_case(device, 31)

    @device.graphed()
    def step() -> int:
        made.launch()
        return int(made.y.numpy()[0])

    with runs_without_a_graph("copying to the host"):
        for call in range(1, 5):
            assert step() == made.ys[0] + 3 * call * made.xs[0]
    (one,) = step.graphs.report().quarantined
    assert "copying to the host" in one.reason


def test_a_failed_capture_of_a_function_is_reported_once_and_names_it(device: Gpu) -> None:
    made = axpy_case(device, 31)

    @device.graphed(key=lambda size: size)
    def step(size: int) -> Any:
        made.launch()
        return made.y.numpy()[:size]

    class Model:
        """A step as a method."""

        @device.graphed(key=lambda size: size)
        def step(self, size: int) -> Any:
            return step.__wrapped__(size)

    with runs_without_a_graph("copying to the host") as reported:
        for size in (5, 6, 5, 6, 5, 6):
            step(size)
        line = line_here(-1)
        models = [Model(), Model()]
        for model in [*models, *models]:
            model.step(5)
    mine, methods = reported
    assert f"{shown_path(mine.filename)}:{mine.lineno}" == line
    assert str(mine.message).startswith("step 5 cannot be captured and runs without a graph: ")
    assert str(mine.message).endswith("step.graphs.report() lists what failed")
    assert "Model.step.graphs.report()" in str(methods.message)


def test_a_graphed_function_can_be_called_from_any_thread(device: Gpu) -> None:
    made = axpy_case(device, 31)

    @device.graphed()
    def step() -> None:
        made.launch()

    for call in range(1, 5):
        run_in_thread(step)
        made.check(3 * call)
    assert len(step.graphs) == 1


def test_decode_like_steps_are_bit_identical_to_eager(device: Gpu) -> None:
    mix = device.kernel(KERNELS, "mix")
    random = np.random.default_rng(3)
    xs, ys = (random.standard_normal(31).astype(np.float32) for _ in range(2))
    x, eager, y = device.array(xs), device.array(ys), device.array(ys)

    @device.graphed()
    def step(odd: bool) -> None:
        mix[1, 32](0.3, odd, x, y, 31)

    for i in range(24):
        mix[1, 32](0.3, i % 3 == 0, x, eager, 31)
        step(i % 3 == 0)
        assert y.numpy().tobytes() == eager.numpy().tobytes()
    assert len(step.graphs) == 2


def test_nothing_is_left_behind(faulty: FaultyGpu) -> None:
    with nothing_left_open(faulty):
        made = axpy_case(faulty.gpu, 31)

        @faulty.gpu.graphed(capacity=2, copy_inputs=True, copy=True)
        def step(x: Any, a: int) -> Any:
            made.axpy[1, 32](a, x, made.y, 31)
            return made.y

        for a in range(1, 5):
            for _ in range(3):
                step(faulty.gpu.array(made.xs), a)
        made.check(30)
        del step


def test_capture_errors_still_name_the_line(device: Gpu) -> None:
    @device.graphed()
    def step() -> None:
        device.synchronize()

    with (
        pytest.raises(CaptureError, match=r"tests/graph/test_graphed.py:\d+: synchronising"),
        device.capture(),
    ):
        step()
