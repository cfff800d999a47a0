"""The end of a session by fault, reset, close or fork: the error of every object of that session."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest

from preheat.devices.array import Array, Scalar
from preheat.devices.kernel import Kernel
from preheat.devices.launch import Bound
from preheat.devices.module import Module, SymbolView
from preheat.devices.stream import Event, Stream
from preheat.errors import ContextLostError, EmulatorFault, StaleBufferError
from preheat.gpu import Gpu
from preheat.graph.graph import Graph
from preheat.graph.pool import Pool
from tests.devices.support import KERNELS
from tests.faulty import FaultyGpu


class Things(NamedTuple):
    """One thing of each kind on a device."""

    gpu: Gpu
    kernel: Kernel
    module: Module
    symbol: SymbolView
    bound: Bound
    array: Array
    scalar: Scalar
    stream: Stream
    event: Event
    graph: Graph
    pool: Pool


def things(gpu: Gpu) -> Things:
    """Return one object of each kind, all of which were used."""
    module = gpu.module(KERNELS)
    array = gpu.zeros(4, "int32")
    scalar = gpu.scalar("int32")
    with gpu.capture() as graph:
        array.fill(1)
    graph.replay()
    kernel = module["narrow"]
    stream = gpu.stream()
    pool = gpu.pool(1024)
    for _ in range(3):
        kernel[1, 4](array)
    bound = kernel.bind(array, grid=1, block=4)
    bound()
    pool.empty(1)
    symbol = module.symbol("table")
    return Things(
        gpu, kernel, module, symbol, bound, array, scalar, stream, stream.record(), graph, pool
    )


KERNEL, ARRAY = "ask for the kernel again: gpu.kernel(…)", "make the array again: gpu.array(…)"
STREAM, EVENT = "make the stream again: gpu.stream()", "record the event again: gpu.record()"
VARIABLE = "look the variable up again: gpu.module(…).symbol(…)"
#: What a user does with an old thing, and how to replace it.
USES: dict[str, tuple[Callable[[Things], object], str]] = {
    "kernel[…]": (lambda t: t.kernel[1, 4](t.array), KERNEL),
    "kernel.launch": (lambda t: t.kernel.launch(t.array, grid=1, block=4), KERNEL),
    "kernel.bind": (lambda t: t.kernel.bind(t.array, grid=1, block=4), KERNEL),
    "kernel.attributes": (lambda t: t.kernel.attributes, KERNEL),
    "bound": (lambda t: t.bound(), KERNEL),
    "module": (lambda t: t.module["add"], "load the module again: gpu.module(…)"),
    "module.symbol": (lambda t: t.module.symbol("table"), "load the module again: gpu.module(…)"),
    "symbol.numpy": (lambda t: t.symbol.numpy(), VARIABLE),
    "symbol.write": (lambda t: t.symbol.write(bytes(12)), VARIABLE),
    "array.numpy": (lambda t: t.array.numpy(), ARRAY),
    "view.write": (lambda t: t.array[1:].write([1, 2, 3]), ARRAY),
    "scalar.get": (lambda t: t.scalar.get(), "make the scalar again: gpu.scalar(…)"),
    "scalar.set": (lambda t: t.scalar.set(3), "make the scalar again: gpu.scalar(…)"),
    "stream": (lambda t: t.stream.synchronize(), STREAM),
    "event": (lambda t: t.event.done(), EVENT),
    "graph": (lambda t: t.graph.replay(), "capture the graph again: gpu.capture()"),
    "pool": (lambda t: t.pool.empty(1), "make the pool again: gpu.pool(…)"),
}
#: What a user does with an old thing and the device that began anew.
MIXED: dict[str, tuple[Callable[[Gpu, Things], object], str]] = {
    "array of an old array": (lambda gpu, t: gpu.array(t.array), ARRAY),
    "copy from an old array": (lambda gpu, t: gpu.zeros(4, "int32").copy_from(t.array), ARRAY),
    "launch with an old array": (
        lambda gpu, t: gpu.kernel(KERNELS, "narrow")[1, 4](t.array), ARRAY
    ),
    "launch in an old stream": (
        lambda gpu, t: gpu.kernel(KERNELS, "narrow").launch(
            gpu.zeros(4, "int32"), grid=1, block=4, stream=t.stream
        ),
        STREAM,
    ),
    "array in an old stream": (lambda gpu, t: gpu.zeros(4, stream=t.stream), STREAM),
    "capture in an old stream": (lambda gpu, t: gpu.capture(stream=t.stream), STREAM),
    "wait for an old event": (lambda gpu, t: gpu.stream().wait(t.event), EVENT),
}  # fmt: skip


def hint_of(do: Callable[[], object]) -> str | None:
    with pytest.raises((ContextLostError, StaleBufferError)) as caught:
        do()
    return caught.value.hint


def fault(gpu: Gpu) -> None:
    gpu._context.handle_loss(EmulatorFault("narrow", "something no kernel survives"))


def fault_and(then: Callable[[Gpu], None], gpu: Gpu) -> None:
    fault(gpu)
    then(gpu)


def reset_elsewhere(gpu: Gpu) -> None:
    gpu._context.handle_loss(ContextLostError("it was reset", hint="open it again"))


RESET = "the device was reset already: {again}"
CLOSE = "open the device again: preheat.device('emulator:0'); then {again}"
ENDS: dict[str, tuple[Callable[[Gpu], None], str]] = {
    "fault": (fault, "call gpu.reset(); then {again}"),
    "reset": (Gpu.reset, RESET),
    "reset after a fault": (partial(fault_and, Gpu.reset), RESET),
    "close": (Gpu.close, CLOSE),
    "close after a fault": (partial(fault_and, Gpu.close), CLOSE),
    "elsewhere": (reset_elsewhere, "open it again"),
}


@pytest.mark.parametrize("end", ENDS)
def test_every_end_of_a_session_says_what_to_do_about_each_old_thing(
    end: str, open_device: Callable[..., Gpu]
) -> None:
    act, hint = ENDS[end]
    old = things(open_device("emulator"))
    act(old.gpu)
    for use, again in USES.values():
        assert hint_of(partial(use, old)) == hint.format(again=again)
    if hint == RESET:
        for mix, again in MIXED.values():
            said = hint_of(partial(mix, old.gpu, old))
            assert said == hint.format(again=again)
        things(old.gpu)  # which work as ever
    else:
        assert hint_of(lambda: old.gpu.empty(3)) == hint.format(again="make what you need again")


@pytest.mark.parametrize("end", ["fault", "fork", "fork after a fault"])
def test_a_gpu_that_does_not_recover_is_not_reset(
    end: str, open_faulty: Callable[..., FaultyGpu]
) -> None:
    faulty = open_faulty("emulator")
    faulty.device._part.recovers = False
    old = things(faulty.gpu)
    hint = "start a new process: the GPU does not recover in this one"
    if "fault" in end:
        fault(faulty.gpu)
    if "fork" in end:
        faulty.gpu._context.mark_forked()
        hint = "start workers with multiprocessing's 'spawn' or 'forkserver' method"
    with faulty.count_calls() as calls:
        for use, _ in USES.values():
            assert hint_of(partial(use, old)) == hint
        assert hint_of(faulty.gpu.reset) == hint
        assert hint_of(lambda: faulty.gpu.empty(3)) == hint
    assert calls == {}  # A lost device gets no calls.
