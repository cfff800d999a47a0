"""Memory of the host as an argument: every device refuses it, unless an emulator was told to use it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from preheat.devices.operands import native_readers, strided
from preheat.errors import LaunchError
from preheat.gpu import Gpu
from preheat.kernels.ops import Ops
from tests.devices.support import KERNELS, PTX, SaxpyCase, import_or_skip, saxpy_case
from tests.exchange import exchange_api

COPY = "pass a copy on the device: gpu.array(x)"
PERMIT = (
    'for tests, preheat.device("emulator", host_arrays=True) or PREHEAT_DEVICE='
    "'emulator[host_arrays]' accepts host memory"
)


class Tensor:
    """A tensor on the CPU of some library that speaks DLPack and nothing else."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def __dlpack__(self, **_: object) -> Any:
        return self.data.__dlpack__()


class Subclass(np.ndarray[Any, Any]):
    """An array of NumPy by another name."""


def refused(gpu: Gpu, name: str = "ndarray", kernel: str = "saxpy", at: int = 1) -> Any:
    """Expect the refusal of an argument in host memory, as every device words it."""
    text = f"{kernel}, argument {at}: {name} is in host memory, the kernel is on {gpu.name}"
    return pytest.raises(LaunchError, match=f"^{re.escape(text)}\nhint: ")


def hint(gpu: Gpu) -> str:
    """Return the hint of that refusal."""
    return f"{COPY}; {PERMIT}" if gpu.name.startswith("emulator") else COPY


GIVEN: dict[str, Callable[[np.ndarray[Any, Any]], Any]] = {
    "ndarray": lambda x: x,
    "Subclass": lambda x: x.view(Subclass),
    "Tensor": Tensor,
    "a view": lambda x: x[::2],
    "strided": lambda x: strided(x[::2]),
    "of another type": lambda x: x.astype("float64"),
    "empty": lambda x: x[:0],
    "without axes": lambda x: x[0, ...],
}


@pytest.mark.parametrize("warm", [0, 4])
@pytest.mark.parametrize("given", GIVEN)
def test_memory_of_the_host_is_refused_on_every_device(given: str, warm: int, setup: SaxpyCase) -> None:
    setup.launch(warm)
    name = given if given in ("Subclass", "Tensor") else "ndarray"
    with refused(setup.gpu, name) as caught:
        setup.saxpy[5, 64](2.0, GIVEN[given](setup.xs), setup.y, setup.n)
    assert caught.value.hint == hint(setup.gpu)
    setup.check(warm)


def captured(case: SaxpyCase) -> None:
    with case.gpu.capture():
        case.saxpy[5, 64](2.0, case.xs, case.y, case.n)


def graphed(case: SaxpyCase) -> None:
    @case.gpu.graphed(key=len)
    def step(x: Any) -> None:
        case.saxpy[5, 64](2.0, x, case.y, case.n)

    step(case.xs)


ROADS: dict[str, Callable[[SaxpyCase], object]] = {
    "a call": lambda c: c.saxpy[5, 64](2.0, c.xs, c.y, c.n),
    "launch": lambda c: c.saxpy.launch(2.0, c.xs, c.y, c.n, grid=5, block=64),
    "a launch in a stream": lambda c: c.saxpy.launch(
        2.0, c.xs, c.y, c.n, grid=5, block=64, stream=c.gpu.stream()
    ),
    "bind": lambda c: c.saxpy.bind(2.0, c.xs, c.y, c.n, grid=5, block=64),
    "a capture": captured,
    "a graphed call": graphed,
}


@pytest.mark.parametrize("warm", [0, 4])
@pytest.mark.parametrize("core", ["native", "python"])
@pytest.mark.parametrize("road", ROADS)
def test_every_road_to_a_launch_refuses_it_in_the_same_words(
    road: str, core: str, warm: int, setup: SaxpyCase, request: pytest.FixtureRequest
) -> None:
    if core == "python":
        request.getfixturevalue("without_native_core")
    setup.launch(warm)
    with refused(setup.gpu) as caught:
        ROADS[road](setup)
    assert caught.value.hint == hint(setup.gpu)
    setup.check(warm)


def test_a_shipped_kernel_refuses_it_in_the_same_words(device: Gpu) -> None:
    ops = Ops(device)
    for _ in range(3):
        ops.silu(device.zeros(8))
        with pytest.raises(LaunchError, match=f"is in host memory, the kernel is on {device.name}\n"):
            ops.silu(np.zeros(8, "float32"))


def test_an_untyped_word_is_no_way_around(device: Gpu) -> None:
    keep = device.kernel(PTX, "keep")
    out = device.zeros(4)
    for _ in range(4):
        keep[1, 1](out, 1, 2, 3.0)
        with refused(device, kernel="keep", at=2):
            keep[1, 1](out, 1, np.zeros(4), 3.0)


def test_an_array_interface_alone_is_no_memory(device: Gpu) -> None:
    class Interface:
        def __init__(self, data: np.ndarray[Any, Any]) -> None:
            self.__array_interface__ = data.__array_interface__

    made = saxpy_case(device)
    with pytest.raises(LaunchError, match=r"argument 1: float const\* cannot take Interface"):
        made.saxpy[5, 64](2.0, Interface(made.xs), made.y, made.n)


class Described:
    """A tensor of the host that offers the C functions of DLPack, which the native core would call."""

    def __init__(self, data: np.ndarray[Any, Any]) -> None:
        self.data, self.count, self.step = data, data.size, 1

    def data_ptr(self) -> int:
        return self.data.ctypes.data

    def is_neg(self) -> bool:
        return False

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def __dlpack__(self, **_: object) -> Any:
        return self.data.__dlpack__()


def test_the_native_core_takes_no_tensor_of_the_host(
    open_device: Callable[..., Gpu], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = open_device("emulator")
    add, x = gpu.kernel(KERNELS, "add"), gpu.zeros(8, "int32")
    api = exchange_api(lambda: gpu._context.stream.handle)
    monkeypatch.setitem(native_readers, Described, api)
    given = Described(np.ones(8, np.int32))
    for _ in range(5):
        add[1, 8](x, 1, x, 8)
        with refused(gpu, "Described", "add", 0):
            add[1, 8](given, 1, given, 8)
    assert given.data.tolist() == [1] * 8


# What a GPU accepts


@pytest.mark.parametrize("warm", [0, 4])
def test_a_tensor_over_memory_of_the_emulator_is_on_the_device(
    warm: int, open_device: Callable[..., Gpu]
) -> None:
    """On a GPU, a library that imports an array has a tensor in the memory of the GPU."""
    made = saxpy_case(open_device("emulator"))
    made.launch(warm)
    x, y = (Tensor(np.from_dlpack(each)) for each in (made.x, made.y))
    for _ in range(4):
        made.saxpy[5, 64](2.0, x, y, made.n)
    with made.gpu.capture() as graph:
        made.saxpy[5, 64](2.0, x, y, made.n)
    graph.replay()
    made.check(warm + 5)
    part = Tensor(np.from_dlpack(made.y)[100:])
    made.saxpy[5, 64](0.0, made.x, part, 10)
    elsewhere = open_device("emulator:1")
    for gpu, view in ((elsewhere, made.y), (made.gpu, elsewhere.zeros(made.n))):
        case = saxpy_case(gpu)
        with refused(gpu, "Tensor"):
            case.saxpy[5, 64](2.0, Tensor(np.from_dlpack(view)), case.y, made.n)


@pytest.mark.torch
def test_tensors_of_torch_on_the_cpu_are_refused(open_device: Callable[..., Gpu]) -> None:
    torch = import_or_skip("torch")
    made = saxpy_case(open_device("emulator"))
    for warm in (0, 4):
        made.launch(warm)
        for given in (torch.from_numpy(made.xs), torch.nn.Parameter(torch.from_numpy(made.xs))):
            with refused(made.gpu, type(given).__name__):
                made.saxpy[5, 64](2.0, given, made.y, made.n)
    made.saxpy[5, 64](2.0, torch.from_dlpack(made.x), torch.from_dlpack(made.y), made.n)
    made.check(5)


def test_copies_and_variables_take_data_of_the_host(device: Gpu) -> None:
    data = np.arange(4, dtype="int32")
    made = device.array(data)
    assert device.zeros(4, "int32").write(data).copy_from(made).numpy().tolist() == [0, 1, 2, 3]
    table = device.module(KERNELS).symbol("weights", "int32")
    table.write(data)
    assert table.numpy().tolist() == [0, 1, 2, 3]
