"""The native core keeps and loses no references, and survives threads and interrupts."""

from __future__ import annotations

import gc
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from preheat import native
from preheat.build.builder import Builder
from preheat.devices.arguments import new_param_buffer
from preheat.devices.launch import Launch
from preheat.devices.operands import native_readers
from preheat.emulator.device import EmulatorDevice
from preheat.errors import LaunchError, PreheatError
from preheat.gpu import Gpu
from tests.driver_errors import not_supported
from tests.faulty import FaultyGpu
from tests.processes import TIMEOUT_SECONDS
from tests.standin import FakeCuPy, FakeTorch, introduce

pytestmark = pytest.mark.skipif(native.core is None, reason=f"no native core: {native.reason}")

SOURCE = """
extern "C" __global__ void add(const int* x, int* y, float by, int n) {
    if (threadIdx.x < n) y[threadIdx.x] += x[threadIdx.x] + (int)by;
}
extern "C" __global__ void copy(const int* a, const double* b, int* out, double* real) {
    *out = *a;
    *real = *b;
}
"""


class Case:
    """A device of the emulator with kernels, arrays, and a graph with two scalars."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        module = gpu.module(SOURCE)
        self.add = module["add"]
        copy = module["copy"]
        self.x = gpu.array(np.arange(4, dtype=np.int32))
        self.y = gpu.zeros(4, "int32")
        self.step = gpu.scalar("int32", name="step")
        self.rate = gpu.scalar("float64", name="rate")
        self.out = gpu.zeros(1, "int32")
        self.real = gpu.zeros(1, "float64")
        self.launch = self.add[1, 4]
        with gpu.capture(name="copy") as graph:
            copy[1, 1](self.step, self.rate, self.out, self.real)
        self.graph = graph
        assert graph._replayer is not None
        self.replayer = graph._replayer
        for _ in range(3):
            self.launch(self.x, self.y, 0.0, 4)
            graph.replay(step=0, rate=0.0)
        assert self.replayer.launch is not None
        # The constants that the emulator returns for every replay and every launch that succeed.
        self.status = self.replayer.launch()
        (launch,) = (n for n in gc.get_referents(self.launch) if isinstance(n, Launch))
        buffer = new_param_buffer(launch.signature)
        buffer.pack(self.x.address, self.y.address, 0.0, 0)
        self.launch_status = launch.prepare(gpu._context.stream)(buffer.pointers, 0)
        assert type(self.launch).__name__ == "Launcher"
        assert type(graph.replay).__name__ == "Replay"

    def in_full(self, act: Callable[[], object]) -> Callable[[], None]:
        """Return a function that does `act` and waits, so that no deferred work is left."""

        def do() -> None:
            act()
            self.gpu.synchronize()

        return do


@pytest.fixture
def case(open_device: Callable[..., Gpu]) -> Case:
    return Case(open_device("emulator"))


@pytest.fixture
def deferred_case(shared_builder: Builder) -> Iterator[Case]:
    """A case on deferred streams, where the native core takes tensors of other libraries."""
    case = Case(Gpu(EmulatorDevice(0, "sm_90", schedule=1), shared_builder))
    yield case
    case.gpu.close()


@pytest.fixture
def still() -> Iterator[None]:
    """Keep the garbage collector from changing counts."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def refused(act: Callable[[], object]) -> Callable[[], None]:
    """Return a function that expects an error of `act`."""

    def call() -> None:
        try:
            act()
        except (PreheatError, TypeError, ZeroDivisionError):
            return
        pytest.fail("this is refused")

    return call


def launches(case: Case) -> dict[str, Callable[[], object]]:
    """Return launches of every outcome."""
    x, y, launch = case.x, case.y, case.launch
    other = Gpu(EmulatorDevice(1, "sm_90"), case.gpu.builder).zeros(4, "int32")
    closed = case.gpu.zeros(4, "int32")
    closed.close()
    floats = case.gpu.zeros(4, "float32")
    big = 1 << 70
    return {
        "launch": lambda: launch(x, y, 1.5, 4),
        "launch with an integer for a float": lambda: launch(x, y, 10**20, 4),
        "launch by the kernel": lambda: case.add[1, 4](x, y, 1.5, 4),
        "general launch": lambda: launch(x, None, 1.5, 0),
        "too few": refused(lambda: launch(x, y, 1.5)),
        "too many": refused(lambda: launch(x, y, 1.5, 4, 5)),
        "by name": refused(lambda: launch(x, y, 1.5, n=4)),
        "no number": refused(lambda: launch(x, y, "text", 4)),
        "too large": refused(lambda: launch(x, y, 1.5, big)),
        "wrong type": refused(lambda: launch(x, floats, 1.5, 4)),
        "closed": refused(lambda: launch(x, closed, 1.5, 4)),
        "another device": refused(lambda: launch(x, other, 1.5, 4)),
    }


def replays(case: Case) -> dict[str, Callable[[], object]]:
    """Return replays of every outcome."""
    replay: Any = case.graph.replay
    number = 1 << 40
    return {
        "replay": lambda: replay(),
        "with a scalar": lambda: replay(step=1000),
        "with scalars": lambda: replay(step=1000, rate=2.5),
        "in a stream": lambda: replay(stream=None, step=1000),
        "unknown": refused(lambda: replay(steps=1)),
        "too large": refused(lambda: replay(step=number, rate=1.5)),
        "no number": refused(lambda: replay(rate="text")),
        "positional": refused(lambda: replay(1, 2, 3, 4)),
    }


def counts(objects: dict[str, Any]) -> dict[str, int]:
    return {name: sys.getrefcount(each) for name, each in objects.items()}


def involved(case: Case) -> dict[str, Any]:
    """Return what launches and replays refer to."""
    context = case.gpu._context
    launcher = case.launch
    (launch,) = (each for each in gc.get_referents(launcher) if isinstance(each, Launch))
    replayer = case.replayer
    return {
        "x": case.x, "y": case.y, "step": case.step, "rate": case.rate, "buffer": case.y.buffer,
        "uses": case.y.uses, "address": case.y.address, "context": context,
        "thread state": context.thread_state, "stream": context.stream, "launcher": launcher,
        "launch": launch, "submits": launch.submits, "prepared": next(iter(launch.submits.values())),
        "replayer": replayer, "replay": case.graph.replay, "lock": replayer.lock,
        "number setters": replayer.number_setters, "int32": case.x.dtype, "none": None, "true": True,
        "status": case.status, "launch status": case.launch_status,
    }  # fmt: skip


NAMES = (
    "launch", "launch with an integer for a float", "launch by the kernel", "general launch", "too few",
    "too many", "by name", "no number", "too large", "wrong type", "closed", "another device",
)  # fmt: skip
REPLAY_NAMES = (
    "replay", "with a scalar", "with scalars", "in a stream", "unknown", "too large", "no number",
    "positional",
)  # fmt: skip
#: Objects of which the interpreter itself may create and drop references meanwhile.
EVERYWHERE = {"none", "true"}


def check_growth(act: Callable[[], object], times: int) -> None:
    """Check that `act` leaves no memory allocated.

    A leak grows in every round by a block for each call or more. The caches of the interpreter and of
    the emulator fill in the first rounds, and grow and shrink by some blocks later on.
    """
    grown = 0
    for _ in range(20):
        gc.collect()
        before = sys.getallocatedblocks()
        for _ in range(times):
            act()
        gc.collect()
        grown = sys.getallocatedblocks() - before
        if grown < min(0.9 * times, 100):
            return
    pytest.fail(f"{times} calls leave {grown} blocks of memory allocated, every time")


def check_counts(case: Case, act: Callable[[], object], times: int = 300) -> None:
    """Call `act` many times, and check that nothing has got or lost references."""
    check_growth(act, times)
    objects = involved(case)
    gc.collect()
    before = counts(objects)
    for _ in range(times):
        act()
    gc.collect()
    after = counts(objects)
    for name in objects:
        if name in EVERYWHERE:
            assert abs(after[name] - before[name]) < times, name
        else:
            assert after[name] == before[name], name


@pytest.mark.usefixtures("still")
@pytest.mark.parametrize("name", NAMES)
def test_a_launch_changes_no_reference_count(case: Case, name: str) -> None:
    check_counts(case, launches(case)[name])


@pytest.mark.usefixtures("still")
@pytest.mark.parametrize("name", REPLAY_NAMES)
def test_a_replay_changes_no_reference_count(case: Case, name: str) -> None:
    check_counts(case, replays(case)[name])


@pytest.mark.usefixtures("still")
@pytest.mark.parametrize("name", NAMES)
def test_recorded_launches_change_no_reference_count(case: Case, name: str) -> None:
    act = launches(case)[name]

    def capture() -> None:
        try:
            with case.gpu.capture() as graph:
                case.launch(case.x, case.y, 1.5, 4)
                for _ in range(10):
                    act()
        except PreheatError:
            assert name not in ("launch", "launch by the kernel")
        else:
            graph.close()

    check_counts(case, capture, times=50)


@pytest.mark.usefixtures("still")
@pytest.mark.parametrize("verb", ["launch", "recorded launch", "replay", "set"])
@pytest.mark.parametrize("interrupted", [False, True])
def test_errors_of_the_device_change_no_reference_count(
    verb: str, interrupted: bool, open_faulty: Callable[..., FaultyGpu]
) -> None:
    faulty = open_faulty("emulator")
    case = Case(faulty.gpu)

    def launch() -> None:
        case.launch(case.x, case.y, 1.5, 4)

    def record() -> None:
        with case.gpu.capture() as graph:
            launch()
        graph.close()

    def replay() -> None:
        case.graph.replay(step=1000, rate=2.5)

    act = {"launch": launch, "recorded launch": record}.get(verb, replay)
    act()

    def fail() -> None:
        error: Any = KeyboardInterrupt() if interrupted else not_supported(verb)
        faulty.device.fail(verb.removeprefix("recorded "), error)
        try:
            act()
        except (PreheatError, KeyboardInterrupt):
            return
        pytest.fail("this fails")

    check_counts(case, fail, times=30 if act is record else 300)
    for _ in range(3):
        act()
    assert case.replayer.lock == {0: True}


# Lifetimes


def test_nothing_is_left_of_launchers_and_graphs_that_were_dropped(shared_builder: Builder) -> None:
    gpu = Gpu(EmulatorDevice(0, "sm_90"), shared_builder)
    case = Case(gpu)
    for act in (*launches(case).values(), *replays(case).values()):
        act()
        act()
    kinds = (native.core.Launcher, native.core.Replay)
    watched = [
        weakref.ref(each)
        for each in (case.x, case.y, case.step, case.out, case.graph, case.add, gpu._context)
    ]
    case.graph.close()
    gpu.close()
    before = [each for each in gc.get_objects() if isinstance(each, kinds)]
    assert before
    numbers = {id(each) for each in before if each in (case.launch, case.graph.replay)}
    assert len(numbers) == 2
    del case, gpu, act, before
    gc.collect()
    assert [each() for each in watched] == [None] * len(watched)
    assert not [each for each in gc.get_objects() if isinstance(each, kinds) and id(each) in numbers]


def test_a_recorded_launch_keeps_its_arrays_as_long_as_the_graph(case: Case) -> None:
    kept = case.gpu.zeros(4, "int32")
    case.launch(case.x, kept, 1.0, 4)
    with case.gpu.capture() as graph:
        case.launch(case.x, kept, 1.0, 4)
    alive = weakref.ref(kept.buffer)
    del kept
    gc.collect()
    graph.replay()
    assert alive() is not None
    graph.close()
    del graph
    gc.collect()
    assert alive() is None


def test_ten_thousand_launches_and_replays_leave_nothing(case: Case) -> None:
    check_growth(lambda: case.launch(case.x, case.y, 1.5, 4), 10_000)
    check_growth(lambda: case.graph.replay(step=1 << 20, rate=3.5), 10_000)
    case.gpu.synchronize()
    assert case.out.numpy().tolist() == [1 << 20]


def test_a_hundred_captures_leave_nothing(case: Case) -> None:
    def capture() -> None:
        with case.gpu.capture() as graph:
            for n in range(20):
                case.launch(case.x, case.y, 1.5, n)
        graph.replay()
        graph.close()

    check_growth(capture, 100)


@pytest.mark.usefixtures("still")
def test_arrays_of_cupy_change_no_reference_count(
    deferred_case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = deferred_case
    cupy = FakeCuPy(case.gpu)
    introduce(cupy, monkeypatch)
    x, y, strided, elsewhere = (cupy.full(4, n) for n in range(4))
    strided._c_contiguous = False
    elsewhere.data.device_id = elsewhere.device.id = 7
    real = cupy.full(4, 1)
    real.kind = np.dtype("float32")
    acts: list[Callable[[], object]] = [
        lambda: case.launch(x, y, 1.5, 4),
        lambda: case.launch(x, case.y, 1.5, 4),
        refused(lambda: case.launch(x, y, 1.5, 1 << 40)),
        refused(lambda: case.launch(x, strided, 1.5, 2)),
        refused(lambda: case.launch(elsewhere, y, 1.5, 4)),
        refused(lambda: case.launch(real, y, 1.5, 4)),
    ]
    acts[0]()
    reader = native_readers[cupy.ndarray]
    objects = (x, y, strided, elsewhere, real, cupy.ndarray, reader, x.kind, real.kind)
    for act in map(case.in_full, acts):
        act()
        before = [sys.getrefcount(each) for each in objects]
        check_counts(case, act)
        assert [sys.getrefcount(each) for each in objects] == before


@pytest.mark.usefixtures("still")
def test_tensors_of_torch_change_no_reference_count(
    deferred_case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = deferred_case
    torch = FakeTorch(case.gpu)
    introduce(torch, monkeypatch)
    x, y = torch.full(4, 1), torch.full(4, 2)
    negative = torch.full(4, 3)
    negative.negative = True
    failing = torch.full(4, 4)
    failing.is_neg = lambda: 1 // 0
    acts: list[Callable[[], object]] = [
        lambda: case.launch(x, y, 1.5, 4),
        lambda: case.launch(x, case.y, 1.5, 4),
        refused(lambda: case.launch(x, y, 1.5, 1 << 40)),
        refused(lambda: case.launch(x, y[::2], 1.5, 2)),
        refused(lambda: case.launch(negative, y, 1.5, 4)),
        refused(lambda: case.launch(failing, y, 1.5, 4)),
    ]
    for act in map(case.in_full, acts):
        act()
        before = [sys.getrefcount(each) for each in (x, y, negative, failing, torch.Tensor)]
        check_counts(case, act)
        after = [sys.getrefcount(each) for each in (x, y, negative, failing, torch.Tensor)]
        assert after == before


# Threads and interrupts


def test_threads_launch_and_replay_at_once(case: Case) -> None:
    num_threads, times = 4, 200
    case.y.fill(0)
    seen: list[BaseException] = []
    start = threading.Barrier(num_threads)

    def work(number: int) -> None:
        try:
            start.wait(TIMEOUT_SECONDS)
            for n in range(times):
                case.launch(case.x, case.y, 0.0, 4)
                case.graph.replay(step=number, rate=float(number))
                case.graph.replay()
                if n % 50 == 0:
                    with pytest.raises(LaunchError):
                        case.launch(case.x, case.y, 0.0, 1 << 40)
        except BaseException as error:
            seen.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_SECONDS)
            assert not thread.is_alive(), "a thread hangs"
    finally:
        sys.setswitchinterval(interval)
    assert seen == []
    assert case.graph.num_replays == 3 + 2 * num_threads * times
    assert case.y.numpy().tolist() == [n * num_threads * times for n in range(4)]
    assert case.out.numpy().tolist() == [int(n) for n in case.real.numpy()]


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # in callbacks of weakrefs
def test_interrupts_leave_launchers_and_graphs_usable(case: Case) -> None:
    """A signal arrives while the native core calls Python code, such as that of the emulator."""

    armed = False  # True while an interrupt is caught below

    def interrupt(*_: object) -> None:
        nonlocal armed
        if armed:
            armed = False
            raise KeyboardInterrupt

    def send() -> None:
        while not done.wait(0.002):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    interrupts = 0
    until = time.monotonic() + TIMEOUT_SECONDS
    done = threading.Event()
    thread = threading.Thread(target=send, daemon=True)
    before = signal.signal(signal.SIGUSR1, interrupt)
    thread.start()
    while interrupts < 60 and time.monotonic() < until:
        try:
            armed = True
            while armed:  # An interrupt in the callback of a weakref is not raised here.
                case.launch(case.x, case.y, 1.5, 4)
                case.graph.replay()
                case.graph.replay(step=7, rate=7.5)
        except KeyboardInterrupt:
            interrupts += 1
    done.set()
    thread.join()
    signal.signal(signal.SIGUSR1, before)
    assert interrupts == 60
    assert case.replayer.lock == {0: True}
    case.y.fill(0)
    case.launch(case.x, case.y, 1.5, 4)
    assert case.y.numpy().tolist() == [1, 2, 3, 4]
    case.graph.replay(step=9, rate=9.5)
    assert (case.out.numpy().tolist(), case.real.numpy().tolist()) == ([9], [9.5])
