"""Tracebacks of compile errors show the call of the user and hide the frames of preheat."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

import preheat
from preheat.errors import CompileError, PreheatError, SealedError, UnknownEntryError
from preheat.gpu import Gpu

BAD = 'extern "C" __global__ void k(int* x) { *x = nowhere; }'
GOOD = 'extern "C" __global__ void k(int* x) { *x = 1; }'
HERE = str(Path(preheat.__file__).parent)

DOORS: dict[str, Callable[[Gpu, str], object]] = {
    "kernel": lambda gpu, source: gpu.kernel(source, "k"),
    "module": lambda gpu, source: gpu.module(source),
    "build": lambda gpu, source: gpu.builder.build(preheat.Program.of(source), gpu.arch),
    "compile": lambda gpu, source: preheat.compile(source, gpu.arch),
}


def own_frames(error: PreheatError) -> list[str]:
    """Return the functions of preheat in the traceback of `error`."""
    frames = traceback.extract_tb(error.__traceback__)
    return [frame.name for frame in frames if frame.filename.startswith(HERE)]


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
    assert {"kernel", "obtain", "_obtain"} < set(own_frames(caught.value))
