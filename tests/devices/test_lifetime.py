"""The lifetime of memory: finalizers queue it, safe points free it, and freed memory is refused."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from preheat.devices.array import Array
from preheat.errors import ContextLostError, OutOfMemoryError, StaleBufferError
from preheat.gpu import Gpu
from tests.conftest import SAXPY
from tests.devices.support import KERNELS, saxpy_case
from tests.driver_errors import out_of_memory
from tests.faulty import FaultyGpu


def test_dropping_an_array_asks_nothing_of_the_device_until_the_next_allocation(
    faulty: FaultyGpu,
) -> None:
    gpu = faulty.gpu
    made = [gpu.array(np.ones(1000)) for _ in range(3)]
    with faulty.count_calls() as calls:
        del made
        gc.collect()
    assert calls == {}
    with faulty.count_calls("allocate", "free") as calls:
        gpu.empty(1)
    assert calls == {"free": 3, "allocate": 1}


def test_closing_gives_memory_back_at_once_and_only_once(faulty: FaultyGpu) -> None:
    made = faulty.gpu.array(np.ones(10))
    with faulty.count_calls("free") as calls:
        made.close()
        made.close()
        with made:
            pass
        del made
        gc.collect()
        faulty.gpu.synchronize()
    assert calls == {"free": 1}


def test_a_view_keeps_the_memory_it_is_a_part_of(faulty: FaultyGpu) -> None:
    whole = faulty.gpu.array(np.arange(10, dtype=np.int32))
    part = whole[4:]
    with faulty.count_calls("free") as calls:
        del whole
        gc.collect()
        faulty.gpu.synchronize()
        assert part.numpy().tolist() == [4, 5, 6, 7, 8, 9]
    assert calls == {}
    with faulty.count_calls("free") as calls:
        part.close()
    assert calls == {"free": 1}


@pytest.mark.parametrize("safe_point", ["synchronize", "trim", "empty"])
def test_every_safe_point_releases_what_was_dropped(safe_point: str, faulty: FaultyGpu) -> None:
    gpu = faulty.gpu
    gpu.array(np.ones(1000))
    gc.collect()
    with faulty.count_calls("free") as calls:
        gpu.empty(1) if safe_point == "empty" else getattr(gpu, safe_point)()
    assert calls["free"] >= 1


def test_arrays_dropped_in_any_thread_are_released(faulty: FaultyGpu) -> None:
    def work() -> None:
        for _ in range(20):
            faulty.gpu.array(np.arange(5))

    threads = [threading.Thread(target=work) for _ in range(6)]
    with faulty.count_calls("allocate", "free") as calls:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        gc.collect()
        faulty.gpu.synchronize()
    assert calls == {"allocate": 120, "free": 120}


def test_memory_in_use_does_not_grow_with_work(device: Gpu) -> None:
    add = device.kernel(KERNELS, "add")
    free = []
    for _ in range(4):
        for _ in range(25):
            out = device.empty(1 << 18, "int32")
            add[1, 1](out, 1, out, 0)
        device.synchronize()
        free.append(device.memory().free)
    assert min(free[2:]) >= free[1]
    assert device.memory().total >= free[0]


def test_a_full_device_releases_what_was_dropped_before_it_gives_up(faulty: FaultyGpu) -> None:
    full = out_of_memory("cuMemAllocFromPoolAsync")
    faulty.device.fail("allocate", full)
    with faulty.count_calls("allocate", "synchronize", "stream.synchronize") as calls:
        made = faulty.gpu.array([1, 2, 3])
    # A wait for the device would invalidate captures.
    assert calls == {
        "allocate": 2,
        "stream.synchronize": 1,
    }
    assert made.numpy().tolist() == [1, 2, 3]
    faulty.device.fail("allocate", full, full)
    with pytest.raises(MemoryError, match=r"CUDA_ERROR_OUT_OF_MEMORY \(2\)") as caught:
        faulty.gpu.empty(3)
    assert isinstance(caught.value, OutOfMemoryError)
    assert faulty.gpu.empty(3).size == 3  # The context still works.
    assert made.numpy().tolist() == [1, 2, 3]


def test_a_failed_allocation_leaves_nothing_to_free(faulty: FaultyGpu) -> None:
    full = OutOfMemoryError("allocate", 2, "OUT_OF_MEMORY", "out of memory")
    faulty.device.fail("allocate", full, full)
    with faulty.count_calls("free") as calls:
        with pytest.raises(OutOfMemoryError):
            faulty.gpu.empty(3)
        gc.collect()
        faulty.gpu.synchronize()
    assert calls == {}


def test_the_emulator_says_when_its_memory_is_used_up(open_device: Callable[..., Gpu]) -> None:
    gpu = open_device("emulator")
    with pytest.raises(OutOfMemoryError, match="no memory for"):
        gpu.empty(gpu.memory().total + 1, "uint8")
    assert gpu.zeros(3).numpy().tolist() == [0, 0, 0]


# Reset and close


def test_after_a_reset_everything_old_is_refused_and_everything_new_works(
    open_device: Callable[..., Gpu],
) -> None:
    gpu = open_device("emulator")
    made = saxpy_case(gpu)
    made.launch(4)
    module = gpu.module(KERNELS)
    symbol = module.symbol("table", "float32")
    view = made.x[1:]
    step = gpu.scalar("int32")
    bound = made.saxpy.bind(2.0, made.x, made.y, made.n, grid=5, block=64)
    gpu.reset()
    for stale in (
        made.x.numpy,
        view.numpy,
        step.get,
        lambda: step.set(3),
        lambda: made.x.write(made.xs),
    ):
        with pytest.raises(StaleBufferError, match="it was reset"):
            stale()
    for lost in (
        made.launch, bound, symbol.numpy, lambda: symbol.write([1.0] * 3),
        lambda: module.symbol("table"),
        lambda: made.saxpy.bind(2.0, made.x, made.y, made.n, grid=5, block=64),
    ):  # fmt: skip
        with pytest.raises(ContextLostError, match="emulator:0: it was reset") as caught:
            lost()
        assert str(caught.value.hint).startswith("the device was reset already: ")
    assert "lost" in repr(made.x)
    again = saxpy_case(gpu)
    assert again.saxpy is not made.saxpy
    for warm in range(3):
        again.launch(2)
        with pytest.raises(
            StaleBufferError, match=r"saxpy, argument 1: .*, lost>: emulator:0: it was reset"
        ):
            again.saxpy[5, 64](2.0, made.x, again.y, again.n)
        again.check(2 * warm + 2)
    made.x.close()
    made.y.close()
    gpu.synchronize()


def test_arrays_dropped_after_a_reset_free_nothing_of_the_new_session(
    open_faulty: Callable[..., FaultyGpu],
) -> None:
    faulty = open_faulty("emulator")
    old = [faulty.gpu.array([1.0] * 8) for _ in range(4)]
    context = faulty.gpu._context
    faulty.gpu.array([3.0])  # dropped, and not freed yet
    faulty.gpu.stream()
    faulty.gpu.reset()
    assert not context.deferred_cleanups
    assert not context.idle_streams
    new = [faulty.gpu.array([2.0] * 8) for _ in range(4)]
    with faulty.count_calls("free") as calls:
        old[0].close()
        del old
        gc.collect()
        faulty.gpu.synchronize()
    assert calls == {}
    assert all(each.numpy().tolist() == [2.0] * 8 for each in new)


def test_a_closed_device_refuses_everything(device: Gpu) -> None:
    made = saxpy_case(device)
    made.launch(4)
    with device:
        pass
    device.close()  # A second call does nothing.
    for operation in (
        lambda: device.empty(3), lambda: device.array([1]), lambda: device.scalar("int32"),
        device.stream, device.record, device.synchronize, device.trim, device.memory, device.reset,
        made.launch,
        lambda: device.module(SAXPY + "// other"), lambda: device.kernel(KERNELS, "saxpy"),
    ):  # fmt: skip
        with pytest.raises(ContextLostError, match=f"{device.name}: it was closed") as caught:
            operation()
        assert type(caught.value) is ContextLostError
    with pytest.raises(StaleBufferError, match="it was closed"):
        made.x.numpy()
    made.x.close()
    del made
    gc.collect()


def test_closing_a_device_unloads_and_releases(faulty: FaultyGpu) -> None:
    made = saxpy_case(faulty.gpu)
    made.launch()
    x = made.x
    del made
    gc.collect()
    with faulty.count_calls("module.unload", "free", "synchronize", "stream.close", "close") as calls:
        faulty.gpu.close()
    assert calls == {"module.unload": 1, "free": 2, "synchronize": calls["synchronize"],
                     "stream.close": 1, "close": 1}  # fmt: skip
    del x


def test_views_made_while_another_thread_closes_are_closed_too(device: Gpu) -> None:
    for _ in range(60):
        made = device.zeros(64)
        views = list[Array]()
        going = threading.Event()

        def slice_on(
            made: Array = made, views: list[Array] = views, going: threading.Event = going
        ) -> None:
            for start in range(200):
                views.append(made[start % 64 :])
                going.set()

        thread = threading.Thread(target=slice_on)
        thread.start()
        going.wait()
        made.close()
        thread.join()
        assert all(view.uses.writer is None for view in views)


def test_memory_that_one_thread_needs_is_not_released_by_another(device: Gpu) -> None:
    context = device._context
    let_go = list[str]()

    class Point:
        def __init__(self, name: str, done: bool) -> None:
            self.name, self._done = name, done

        def done(self) -> bool:
            time.sleep(0.01)  # A driver call lets other threads run, too.
            return self._done

    class Kept:
        def __init__(self, name: str) -> None:
            self.name = name

        def __del__(self) -> None:
            let_go.append(self.name)

    context.hold_until(Point("ended", True), Kept("ended"))
    context.hold_until(Point("running", False), Kept("running"))
    threads = [threading.Thread(target=context._drop_completed) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert let_go == ["ended"]


def test_a_module_dropped_while_others_are_unloaded_waits_for_the_next_time(faulty: FaultyGpu) -> None:
    context = faulty.gpu._context
    synchronize = faulty.gpu._device.synchronize
    held = [faulty.gpu.module(SAXPY, label=f"{name}.cu") for name in ("first", "late")]
    faulty.gpu._session.modules.clear()
    held.pop(0)

    def drop_meanwhile() -> None:
        synchronize()
        held.clear()

    faulty.device.__dict__["synchronize"] = drop_meanwhile
    with faulty.count_calls("module.unload") as calls:
        context.drain(modules=True)
    del faulty.device.__dict__["synchronize"]
    assert calls == {"module.unload": 1}
    assert len(context.unused_modules) == 1


def test_events_do_not_pile_up_where_nobody_allocates(device: Gpu) -> None:
    for _ in range(2000):
        device.record()
    assert len(device._context.deferred_cleanups) < 1000


def test_a_load_that_outlives_its_device_is_not_found_on_the_next(
    open_faulty: Callable[..., FaultyGpu],
) -> None:
    faulty = open_faulty("emulator")
    gpu = faulty.gpu
    load = faulty.gpu._device.load

    def reset_meanwhile(*args: Any, **more: Any) -> Any:
        made = load(*args, **more)
        gpu.reset()
        return made

    faulty.device.__dict__["load"] = reset_meanwhile
    old = gpu.module(SAXPY, label="slow.cu")
    del faulty.device.__dict__["load"]
    with pytest.raises(ContextLostError, match="it was reset"):
        old["saxpy"]
    assert gpu.module(SAXPY, label="slow.cu") is not old
    assert gpu.kernel(SAXPY, "saxpy", label="slow.cu").attributes.threads == 1024


def test_a_kernel_of_an_earlier_session_asks_the_device_nothing(
    open_faulty: Callable[..., FaultyGpu],
) -> None:
    faulty = open_faulty("emulator")
    made = saxpy_case(faulty.gpu)
    faulty.gpu.reset()
    operations: list[Callable[[], object]] = [
        lambda: made.saxpy[3, 17],
        lambda: made.saxpy.occupancy(64),
        lambda: made.saxpy.attributes,
    ]
    with faulty.count_calls() as calls:
        for operation in operations:
            with pytest.raises(ContextLostError, match="it was reset"):
                operation()
    assert calls == {}


def test_a_device_that_is_closed_takes_back_what_is_still_held(faulty: FaultyGpu) -> None:
    kernel = faulty.gpu.kernel(KERNELS, "count")
    held = [faulty.gpu.zeros(33) for _ in range(3)]
    held[0].close()
    with faulty.gpu.capture() as graph:
        kernel[1, 1]()
    graph.replay()
    faulty.gpu.synchronize()
    with faulty.count_calls("free", "executable.close") as calls:
        faulty.gpu.close()
    assert calls == {"free": 2, "executable.close": 1}
    with pytest.raises(StaleBufferError, match="it was closed"):
        held[1].numpy()
    with faulty.count_calls() as calls:
        held.clear()
        del graph
        gc.collect()
    assert calls == {}
