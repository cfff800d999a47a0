"""Checked caches: a difference is reported with its node, kernel, argument and both values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from preheat.errors import BakedError, CaptureError
from preheat.gpu import Gpu
from tests.devices.support import import_or_skip
from tests.faulty import FaultyGpu
from tests.graph.support import KERNELS, axpy_case, nothing_left_open, scalar_log
from tests.threads import run_in_thread


class Knobs:
    """What a body reads from elsewhere, which its key does not say."""

    def __init__(self, gpu: Gpu, n: int = 31) -> None:
        random = np.random.default_rng(n)
        self.gpu, self.n = gpu, n
        self.mix = gpu.kernel(KERNELS, "mix")
        self.x, self.other, self.y = (
            gpu.array(random.standard_normal(2 * n).astype(np.float32)) for _ in range(3)
        )
        self.by = 0.5
        self.odd = False
        self.grid = 1
        self.block = 32
        self.shared = 0
        self.times = 1
        self.fill: float | None = None

    def __call__(self) -> None:
        for _ in range(self.times):
            given = (self.by, self.odd, self.x, self.y, self.n)
            self.mix.launch(*given, grid=self.grid, block=self.block, shared=self.shared)
        if self.fill is not None:
            self.x.fill(self.fill)


def checked(knobs: Knobs, calls: int = 3) -> Any:
    graphs = knobs.gpu.graphs(checked=True)
    for _ in range(calls):
        graphs.run("k", knobs)
    return graphs


Turn = Callable[[Knobs], object]


def turned(name: str, value: Any) -> Turn:
    return lambda knobs: setattr(knobs, name, value)


CHANGES: dict[str, tuple[Turn, str]] = {
    "int": (
        turned("n", 30),
        r"node 0, mix \(tests/graph/test_checked.py:\d+\): argument 4 \(int\) 31 became 30",
    ),
    "float": (turned("by", 0.25), r"node 0, mix .*: argument 0 \(float\) 0.5 became 0.25"),
    "bool": (turned("odd", True), r"argument 1 \(bool\) False became True"),
    "grid": (turned("grid", 2), r"node 0, mix .*: grid \(1, 1, 1\) became \(2, 1, 1\)"),
    "block": (turned("block", 64), r"node 0, mix .*: block \(32, 1, 1\) became \(64, 1, 1\)"),
    "shared": (turned("shared", 256), r"node 0, mix .*: shared 0 became 256"),
    "more": (turned("times", 2), r"node 1: mix\[.*\]\(.*\) is new"),
    "kind": (turned("fill", 2.0), r"node 1: fill\(.*\) is new"),
    "array": (
        lambda knobs: setattr(knobs, "x", knobs.other),
        r"argument 2 \(float const\*\) Array float32\[62\] became another array of that shape",
    ),
    "view": (
        lambda knobs: setattr(knobs, "x", knobs.x[31:]),
        r"argument 2 \(float const\*\) Array float32\[62\] became Array float32\[31\]",
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_a_replay_would_get_wrong_is_named(what: str, device: Gpu) -> None:
    knobs = Knobs(device)
    graphs = checked(knobs)
    before = knobs.y.numpy()
    turn, told = CHANGES[what]
    turn(knobs)
    with pytest.raises(BakedError, match=told) as refused:
        graphs.run("k", knobs)
    assert len(refused.value.changes) == 1
    assert "graph 'k' was captured for another call" in str(refused.value)
    assert refused.value.hint is not None
    assert "key" in refused.value.hint
    assert "gpu.scalar" in refused.value.hint
    np.testing.assert_array_equal(knobs.y.numpy(), before)  # nothing ran


def test_every_change_is_listed(device: Gpu) -> None:
    knobs = Knobs(device)
    graphs = checked(knobs)
    knobs.n, knobs.grid, knobs.by = 7, 3, 1.5
    with pytest.raises(BakedError) as refused:
        graphs.run("k", knobs)
    assert len(refused.value.changes) == 3
    assert all(change in str(refused.value) for change in refused.value.changes)


def test_an_equal_call_is_replayed_once(device: Gpu) -> None:
    made = axpy_case(device)
    entered = list[int]()
    graphs = device.graphs(checked=True)

    def step() -> Any:
        entered.append(1)
        made.launch()
        return made.y

    for call in range(1, 6):
        assert graphs.run("k", step) is made.y
        made.check(3 * call)
    assert len(entered) == 5  # eager, captured, and looked at three times
    assert graphs.report().graphs[0].replays == 4


def test_the_cached_graph_survives_a_refusal(device: Gpu) -> None:
    made = axpy_case(device)
    factor = [3]
    graphs = device.graphs(checked=True)

    def step() -> None:
        made.launch(factor[0])

    for _ in range(2):
        graphs.run("k", step)
    factor[0] = 4
    with pytest.raises(BakedError, match=r"argument 0 \(int\) 3 became 4"):
        graphs.run("k", step)
    factor[0] = 3
    graphs.run("k", step)
    made.check(9)


def test_a_value_in_the_key_or_in_a_scalar_is_no_difference(device: Gpu) -> None:
    made = axpy_case(device)
    noted = scalar_log(device)
    graphs = device.graphs(checked=True)
    for a in (1, 2, 1, 2, 1, 2):
        graphs.run(a, lambda a=a: made.launch(a))  # type: ignore[misc]
    made.check(9)
    for value in (5, 6, 7):
        noted.step.set(value)
        graphs.run("note", lambda: noted.note[1, 1](noted.step, noted.out, noted.count))
    assert noted.seen() == [5, 6, 7]


def test_unchecked_cached_graphs_replay_what_was_captured(device: Gpu) -> None:
    made = axpy_case(device)
    factor = [3]
    graphs = device.graphs()
    for _ in range(2):
        graphs.run("k", lambda: made.launch(factor[0]))
    factor[0] = 1000
    graphs.run("k", lambda: made.launch(factor[0]))
    made.check(9)


def test_replay_has_no_body_to_check(device: Gpu) -> None:
    made = axpy_case(device)
    graphs = device.graphs(checked=True)
    graphs.install("k", made.captured())
    assert graphs.replay("k")
    made.check(3)
    with pytest.raises(BakedError, match="3 became 5"):
        graphs.run("k", lambda: made.launch(5))


def test_looking_instantiates_nothing_and_leaves_nothing_open(faulty: FaultyGpu) -> None:
    knobs = Knobs(faulty.gpu)
    with nothing_left_open(faulty):
        graphs = checked(knobs, 2)
        with faulty.count_calls("graph.instantiate", "stream.begin_capture") as calls:
            for _ in range(3):
                graphs.run("k", knobs)
            knobs.n = 7
            with pytest.raises(BakedError):
                graphs.run("k", knobs)
        assert calls == {"stream.begin_capture": 4}
        del graphs


def test_a_call_that_could_not_be_captured_says_so(device: Gpu) -> None:
    made = axpy_case(device)
    syncs = list[bool]()
    graphs = device.graphs(checked=True)

    def step() -> None:
        made.launch()
        if syncs:
            device.synchronize()

    for _ in range(2):
        graphs.run("k", step)
    syncs.append(True)
    with pytest.raises(CaptureError, match="synchronising inside a capture"):
        graphs.run("k", step)
    syncs.clear()
    graphs.run("k", step)
    made.check(9)


def test_graphed_functions_are_checked_too(device: Gpu) -> None:
    made = axpy_case(device)
    factor = [3]

    @device.graphed(key=lambda n: n, checked=True)
    def step(n: int) -> None:
        made.axpy[5, 64](factor[0], made.x, made.y, n)

    for _ in range(3):
        step(made.n)
    factor[0] = 7
    with pytest.raises(BakedError, match=r"argument 0 \(int\) 3 became 7"):
        step(made.n)
    made.check(9)


def test_a_key_that_forgets_an_argument_is_detected(device: Gpu) -> None:
    made = axpy_case(device)

    @device.graphed(key=lambda x, *_: x.shape, checked=True)
    def step(x: Any, y: Any, n: int) -> None:
        made.axpy[5, 64](3, x, y, n)

    for _ in range(2):
        step(made.x, made.y, 257)
    with pytest.raises(BakedError, match=r"argument 3 \(int\) 257 became 100"):
        step(made.x, made.y, 100)


def test_copied_inputs_are_no_difference(device: Gpu) -> None:
    made = axpy_case(device, 31)
    want = np.zeros(31, np.int64)
    y = device.zeros(31, "int32")

    @device.graphed(copy_inputs=True, checked=True)
    def step(x: Any) -> None:
        made.axpy[1, 32](2, x, y, 31)

    for seed in range(5):
        xs = np.random.default_rng(seed).integers(-99, 99, 31, dtype=np.int32)
        step(device.array(xs))
        want += 2 * xs
    np.testing.assert_array_equal(y.numpy(), want)


def test_memory_of_other_libraries_is_checked_by_its_address(permissive: Gpu) -> None:
    made = axpy_case(permissive, 31)
    outs = [made.ys.copy(), made.ys.copy()]
    graphs = permissive.graphs(checked=True)

    def step() -> None:
        made.axpy[1, 32](3, made.x, outs[-1], 31)

    for _ in range(3):
        graphs.run("k", step)
    np.testing.assert_array_equal(outs.pop(), made.ys + 9 * made.xs)
    with pytest.raises(BakedError, match=r"argument 2 \(int\*\) 0x[0-9a-f]+ became 0x[0-9a-f]+"):
        graphs.run("k", step)
    np.testing.assert_array_equal(outs[0], made.ys)


def test_checked_cached_graphs_are_safe_from_several_threads(device: Gpu) -> None:
    made = axpy_case(device, 31)
    graphs = device.graphs(checked=True)

    def step() -> None:
        made.launch()

    for _ in range(2):
        graphs.run("k", step)
    for _ in range(3):
        run_in_thread(lambda: graphs.run("k", step))
    made.check(15)


# Results


def test_a_body_that_returns_another_array_is_detected(device: Gpu) -> None:
    made = axpy_case(device)
    graphs = device.graphs(checked=True)
    outs = [device.zeros(31), device.zeros(31)]

    def step() -> dict[str, Any]:
        made.launch()
        return {"row": (made.y, outs[0])}

    for _ in range(3):
        graphs.run("k", step)
    outs.reverse()
    with pytest.raises(BakedError) as refused:
        graphs.run("k", step)
    told = "returned['row'][1]: float32[31] became another array of that shape"
    assert refused.value.changes == (told,)
    made.check(9)


@pytest.mark.parametrize(
    ("after", "told"),
    [
        ((1, [2]), "returned[1][0]: nothing became 2"),
        ((1, []), None),
        ((2, []), "returned[0]: 1 became 2"),
        (1, "returned[0]: 1 became nothing"),
    ],
)
def test_other_results_are_compared_too(after: Any, told: str | None, device: Gpu) -> None:
    made = axpy_case(device)
    graphs = device.graphs(checked=True)
    results: list[Any] = [after, (1, []), (1, [])]

    def step() -> Any:
        made.launch()
        return results.pop()

    for _ in range(2):
        graphs.run("k", step)
    if told is None:
        assert graphs.run("k", step) == (1, [])
        return
    with pytest.raises(BakedError) as refused:
        graphs.run("k", step)
    assert told in refused.value.changes


@pytest.mark.gpu
def test_tensors_that_torch_allocates_inside_are_no_difference(open_device: Callable[..., Gpu]) -> None:
    gpu = open_device("cuda")
    torch = import_or_skip("torch")
    x = torch.arange(1, 32, device="cuda")

    @gpu.graphed(checked=True)
    def step(x: Any) -> Any:
        return x * 2

    for _ in range(4):
        np.testing.assert_array_equal(step(x).cpu(), 2 * np.arange(1, 32))


# Memory from a pool


def test_memory_taken_inside_is_no_difference(device: Gpu) -> None:
    made = axpy_case(device, 31)
    pool = device.pool(1 << 20)

    @device.graphed(checked=True)
    def step(x: Any) -> Any:
        one, two = pool.zeros(31, "int32"), pool.zeros(31, "int32")
        made.axpy[1, 32](3, x, one, 31)
        made.axpy[1, 32](2, one, two, 31)
        return {"two": two}

    for _ in range(5):
        np.testing.assert_array_equal(step(made.x)["two"].numpy(), 6 * made.xs)


def test_memory_taken_inside_is_located_by_its_order_and_size(device: Gpu) -> None:
    made = axpy_case(device, 31)
    pool = device.pool(1 << 20)
    turned = list[str]()
    graphs = device.graphs(checked=True)
    outside = pool.zeros(31, "int32")

    def step() -> None:
        one, two = pool.empty(31, "int32"), pool.empty(40 if "size" in turned else 31, "int32")
        if "order" in turned:
            one, two = two, one
        if "outside" in turned:
            two = outside
        made.axpy[1, 32](3, made.x, one, 31)
        made.axpy[1, 32](3, one, two, 31)
        made.axpy[1, 32](3, two, two if "swapped" in turned else one, 31)

    for _ in range(3):
        graphs.run("k", step)
    for turn, told in {
        "size": "Array int32[31] became Array int32[40]",
        "outside": "Array int32[31] became another array of that shape",
        "swapped": "Array int32[31] became another array of that shape",
    }.items():
        turned[:] = [turn]
        with pytest.raises(BakedError) as refused:
            graphs.run("k", step)
        assert told in str(refused.value)
    turned[:] = ["order"]
    graphs.run("k", step)  # the same with other pieces


def test_scratch_memory_that_was_new_at_the_capture_is_no_difference(device: Gpu) -> None:
    made = axpy_case(device, 31)
    pool = device.pool()
    graphs = device.graphs(checked=True)
    sizes = [31, 1031]

    def step() -> None:
        with pool.frame():
            small, large = (pool.zeros(n, "int32") for n in sizes)
            made.axpy[1, 32](3, made.x, small, 31)
            made.axpy[1, 32](3, small, large, 31)
            made.axpy[1, 32](1, large, made.y, 31)

    graphs.run("k", step)
    sizes.reverse()  # so that both lie where nothing lay before
    for _ in range(4):
        graphs.run("k", step)
    made.check(45)
