"""Tracebacks show the call of the user and hide the frames of preheat below it."""

from __future__ import annotations

import subprocess
import sys
import traceback
from collections.abc import Callable

import pytest

import preheat
from preheat.errors import CompileError, PreheatError, SealedError, UnknownEntryError
from preheat.gpu import Gpu
from tests.frames import own_frames

BAD = 'extern "C" __global__ void k(int* x) { *x = nowhere; }'
GOOD = 'extern "C" __global__ void k(int* x) { *x = 1; }'

DOORS: dict[str, Callable[[Gpu, str], object]] = {
    "kernel": lambda gpu, source: gpu.kernel(source, "k"),
    "module": lambda gpu, source: gpu.module(source),
    "build": lambda gpu, source: gpu.builder.build(preheat.Program.of(source), gpu.arch),
    "compile": lambda gpu, source: preheat.compile(source, gpu.arch),
    "kernels": lambda gpu, source: gpu.kernels([(source, "k")]),
}


@pytest.mark.parametrize("operation", DOORS)
def test_a_compile_error_shows_the_call_only(open_device: Callable[..., Gpu], operation: str) -> None:
    gpu = open_device("emulator")
    for _ in range(2):  # the second error is remembered
        with pytest.raises(CompileError) as caught:
            DOORS[operation](gpu, BAD)
        assert own_frames(caught.value) == [operation]
        assert caught.value.__context__ is None


def test_an_unknown_kernel_and_a_seal_show_the_call_only(open_device: Callable[..., Gpu]) -> None:
    gpu = open_device("emulator")
    with pytest.raises(UnknownEntryError) as unknown:
        gpu.kernel(GOOD, "nothing")
    with preheat.sealed(), pytest.raises(SealedError) as sealed:
        gpu.kernel(GOOD, "k", options=["-DNOT_BAKED"])
    assert own_frames(unknown.value) == own_frames(sealed.value) == ["kernel"]


def test_the_whole_traceback_is_there_for_those_who_ask(
    open_device: Callable[..., Gpu], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREHEAT_TRACEBACK", "full")
    with pytest.raises(CompileError) as caught:
        open_device("emulator").kernel(BAD, "k")
    assert {"kernel", "obtain", "_make_once"} < set(own_frames(caught.value))


def names(error: BaseException) -> list[str]:
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


METHODS: dict[str, Callable[[Gpu], object]] = {
    "zeros": lambda gpu: gpu.zeros(4, "float31"),
    "array": lambda gpu: gpu.array(object()),
    "numpy": lambda gpu: gpu.zeros(4).numpy("nothing"),
    "set": lambda gpu: gpu.scalar("uint8").set(256),
    "wait": lambda gpu: gpu.stream().wait(7),
    "symbol": lambda gpu: gpu.module(GOOD).symbol("nothing"),
    "bind": lambda gpu: gpu.kernel(GOOD, "k").bind(grid=1, block=1),
    "launch": lambda gpu: gpu.kernel(GOOD, "k").launch(grid=1, block=1),
    "__getitem__": lambda gpu: gpu.kernel(GOOD, "k")[0, 1],
    "__call__": lambda gpu: gpu.kernel(GOOD, "k")[1, 1](),
    "graphs": lambda gpu: gpu.graphs(capacity=-1),
    "reserve": lambda gpu: gpu.pool().reserve(-1),
    "device": lambda _: preheat.device("emulater"),
}


@pytest.mark.parametrize("method", METHODS)
def test_an_error_of_a_method_shows_the_method_that_was_called(
    open_device: Callable[..., Gpu], monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    gpu = open_device("emulator")
    with pytest.raises(PreheatError) as caught:
        METHODS[method](gpu)
    assert own_frames(caught.value) == [method]
    assert caught.value.__context__ is None or caught.value.__suppress_context__
    monkeypatch.setenv("PREHEAT_TRACEBACK", "full")
    with pytest.raises(PreheatError) as caught:
        METHODS[method](gpu)
    assert len(own_frames(caught.value)) > 1


def test_frames_of_the_program_that_preheat_calls_are_shown(open_device: Callable[..., Gpu]) -> None:
    gpu = open_device("emulator")

    def step() -> None:
        gpu.kernel(GOOD, "k")[1, 1]("wrong")

    graphed: Callable[[], object] = gpu.graphed(step)
    calls: dict[str, Callable[[], object]] = {
        "__call__": graphed,
        "run": lambda: gpu.graphs().run("key", step),
    }
    for frame, call in calls.items():
        with pytest.raises(PreheatError) as caught:
            call()
        assert own_frames(caught.value) == [frame]
        assert names(caught.value)[-2:] == [frame, "step"]


def test_a_stale_graph_and_a_wrong_capture_show_the_call_only(open_device: Callable[..., Gpu]) -> None:
    gpu = open_device("emulator")
    x, kernel = gpu.zeros(4, "int32"), gpu.kernel(GOOD, "k")
    with gpu.capture() as graph:
        kernel[1, 1](x)
    graph.replay()
    x.close()
    with pytest.raises(PreheatError) as caught:
        graph.replay()
    assert own_frames(caught.value) == ["replay"]
    y = gpu.zeros(3)
    with pytest.raises(PreheatError) as caught, gpu.capture():
        y.numpy()
    assert own_frames(caught.value) == ["numpy"]


def test_an_uncaught_error_prints_the_line_of_the_program_last_but_one() -> None:
    program = "import preheat\ngpu = preheat.device('emulator')\ngpu.zeros(4, 'float31')\n"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    frames = [line for line in done.stderr.splitlines() if line.startswith("  File ")]
    assert len(frames) == 2
    assert frames[0].endswith("line 3, in <module>")
    assert frames[1].endswith(", in zeros")
    assert "During handling" not in done.stderr
