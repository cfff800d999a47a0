"""The choice between cuBLAS and the shipped kernels: made once, reported, and correct."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from preheat import Gpu
from preheat.build.builder import Builder
from preheat.errors import CaptureError, DeviceError
from preheat.kernels import blas as module
from preheat.kernels.blas import Blas, Found, find
from preheat.kernels.op import trace_ops
from preheat.kernels.ops import Ops
from tests.conftest import Recorder
from tests.kernels.conftest import exact
from tests.kernels.cublas import Cublas
from tests.kernels.products import op_of, product_agrees
from tests.processes import TIMEOUT_SECONDS

# Without cuBLAS


def test_the_emulator_has_none(emulator: Gpu) -> None:
    assert find(emulator) == "emulator:0 is not a GPU"
    with pytest.raises(DeviceError, match="cuBLAS is not available: emulator:0 is not a GPU"):
        Blas(emulator)


@pytest.fixture
def looking(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any], Found | str]]:
    """Looks for bindings where those given are installed."""

    def look(cublas: Any) -> Found | str:
        package = ModuleType("nvmath.bindings")
        package.cublas = cublas  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "nvmath", ModuleType("nvmath"))
        monkeypatch.setitem(sys.modules, "nvmath.bindings", package if cublas else None)
        module._bindings.cache_clear()
        return module._bindings()

    yield look
    module._bindings.cache_clear()


def test_without_the_bindings_it_says_so(looking: Callable[[Any], Found | str]) -> None:
    assert looking(None) == "nvmath-python is not installed"


def test_without_the_library_it_says_so_once(looking: Callable[[Any], Found | str]) -> None:
    asked = []

    class Broken:
        def get_property(self, part: int) -> int:
            asked.append(part)
            raise RuntimeError('Failure finding "libcublas.so.13"\n  listdir("/usr/lib")')

    assert looking(Broken()) == 'Failure finding "libcublas.so.13"'
    assert module._bindings() == 'Failure finding "libcublas.so.13"'
    assert asked == [0]


def test_with_both_it_has_a_version(looking: Callable[[Any], Found | str]) -> None:
    class Whole:
        def get_property(self, part: int) -> int:
            return (13, 1, 2)[part]

    found = looking(Whole())
    assert isinstance(found, Found)
    assert found.version == "13.1.2"


def test_numbers_are_those_of_the_bindings() -> None:
    nvmath = pytest.importorskip("nvmath")
    for name, number in module._TYPES.items():
        short = {"float32": "32F", "float16": "16F", "bfloat16": "16BF"}[name]
        assert nvmath.CudaDataType[f"CUDA_R_{short}"] == number
    real = nvmath.bindings.cublas
    assert module._ALGORITHM in [int(algorithm) for algorithm in real.GemmAlgo]
    for mine in (Cublas.Operation, Cublas.Math, Cublas.ComputeType):
        theirs = getattr(real, mine.__name__)
        assert all(theirs[each.name] == each for each in mine)


# Which one is used


def test_an_event_says_once_which_makes_products(
    open_device: Callable[..., Gpu], builder: Builder, recorder: Recorder
) -> None:
    gpu = open_device("emulator", builder=builder)
    ops = Ops(gpu)
    a = gpu.zeros((5, 7))
    b = gpu.zeros((7, 3))
    for _ in range(2):
        ops.gemm(a, b)
    (event,) = recorder.named("blas")
    assert event == {
        "device": "emulator:0", "uses": "shipped kernels", "reason": "emulator:0 is not a GPU"
    }  # fmt: skip
    assert ops.blas is None


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, cublas: Cublas) -> None:
    """The emulator finds a cuBLAS."""
    monkeypatch.setattr("preheat.kernels.ops.find", lambda _: Found(cublas, "13.0.0"))


@pytest.mark.usefixtures("installed")
def test_whoever_hears_of_the_choice_may_ask_for_it(
    open_device: Callable[..., Gpu], builder: Builder
) -> None:
    ops = Ops(open_device("emulator", builder=builder))
    heard = list[Blas | None]()
    builder.events.subscribe(lambda name, _: heard.append(ops.blas) if name == "blas" else None)
    asking = threading.Thread(target=lambda: ops.blas, daemon=True)
    asking.start()
    asking.join(TIMEOUT_SECONDS)
    assert not asking.is_alive()
    assert heard == [ops.blas]


@pytest.mark.usefixtures("installed")
def test_a_choice_holds_although_a_sink_failed(
    open_device: Callable[..., Gpu], builder: Builder, recorder: Recorder, cublas: Cublas
) -> None:
    def fail(name: str, _: object) -> None:
        if name == "blas":
            raise OSError("no space left")

    gpu = open_device("emulator", builder=builder)
    ops = Ops(gpu)
    a = gpu.zeros((5, 7))
    b = gpu.zeros((7, 3))
    builder.events.subscribe(fail)
    with pytest.raises(OSError, match="no space left"):
        ops.gemm(a, b)
    ops.gemm(a, b)
    assert len(recorder.named("blas")) == 1
    assert len(cublas.named("gemm_ex")) == 1


@pytest.mark.usefixtures("installed")
def test_a_choice_inside_a_capture_says_what_to_do_before(
    emulator: Gpu, launched: Callable[[], None]
) -> None:
    ops, a, b, out = Ops(emulator), *(emulator.zeros(shape) for shape in ((5, 7), (7, 3), (5, 3)))

    def capture() -> None:
        with emulator.capture():
            launched()
            ops.gemm(a, b, out=out)

    with pytest.raises(CaptureError, match="allocating memory inside a capture") as error:
        capture()
    assert error.value.hint == "compute one product before the capture, or read ops.blas there"
    assert isinstance(ops.blas, Blas)
    capture()


def test_products_go_to_the_blas_that_is_given(blas: Blas, cublas: Cublas, emulator: Gpu) -> None:
    ops = Ops(emulator, blas=blas)
    rng = np.random.default_rng(12)
    a, b = (emulator.array(rng.standard_normal(shape).astype("f4")) for shape in ((5, 7), (7, 3)))
    with trace_ops() as seen:
        c = ops.gemm(a, b)
    assert seen == [op_of("gemm", {"m": 5, "n": 3, "k": 7})._replace(by="cuBLAS")]
    product_agrees("gemm", exact(c), exact(a), exact(b), "float32")
    product_agrees("gemm_backward_a", exact(ops.gemm_backward_a(c, b)), exact(c), exact(b), "float32")
    product_agrees("gemm_backward_b", exact(ops.gemm_backward_b(a, c)), exact(a), exact(c), "float32")
    assert len(cublas.named("gemm_ex")) == 3
    assert ops.blas is blas
