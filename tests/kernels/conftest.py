"""Fixtures of the tests of shipped kernels: operands with their exact values, and tolerances."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from preheat import Array, Builder, Gpu
from preheat.ahead.manifest import Manifest, ManifestProgram
from preheat.kernels import axes, elementwise, gemm, rms_norm, softmax
from preheat.kernels.blas import Blas, Found
from preheat.kernels.op import Op
from preheat.kernels.ops import Ops
from tests.kernels.cublas import Cublas

DTYPES = "float32", "float16", "bfloat16"
Exact = NDArray[np.float64]

#: Half a unit in the last place: the relative error of rounding a result to its storage type.
ROUNDING = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
#: The error of arithmetic in float32, relative to the magnitude of the added terms.
ARITHMETIC = 2e-6
#: Widths of rows that are not a whole number of 16 bytes, and of others. Each kernel has some.
ODD = 1, 5, 9, 17, 33, 65, 129, 257, 1001, 4099, 9001, 16385, 70001
WHOLE = 16, 32, 64, 128, 256, 512, 1000, 4096, 4608, 8192, 16384, 32000, 70000
_TINY = {"float32": 1e-37, "float16": 2.0**-25, "bfloat16": 1e-37}  # Below normal numbers.


def cases(shapes: Sequence[tuple[int, int]]) -> list[Any]:
    """Return types, rows and widths: all of them in float32 and every other one in 16-bit types.

    The two types of 16 bits take turns. The other halves are long tests, because each is a compile.
    """
    made: list[Any] = [("float32", *shape) for shape in shapes]
    for number, dtype in enumerate(DTYPES[1:]):
        for turn, shape in enumerate(shapes[1::2]):
            marks = () if turn % 2 == number else (pytest.mark.long,)
            made.append(pytest.param(dtype, *shape, marks=marks))
    return made


class Operand(NamedTuple):
    """An array on the device and its exact values."""

    array: Array
    exact: Exact


@pytest.fixture
def ops(device: Gpu) -> Ops:
    return Ops(device)


def every_op() -> Iterator[Op]:
    """Yield the ops that the tests launch: every kernel at widths of every kind."""
    for dtype in DTYPES:
        for elements in (
            elementwise.silu, elementwise.silu_backward, elementwise.swiglu, elementwise.swiglu_backward
        ):  # fmt: skip
            yield elements(1, dtype)
        yield axes.swap_axes(1, 1, 1, dtype)
        yield axes.add(1, 1, dtype)
        for rows, width in itertools.product((1, 100), (*ODD, *WHOLE)):
            yield softmax.softmax(rows, width, dtype)
            yield softmax.softmax_backward(rows, width, dtype)
            yield rms_norm.rms_norm(rows, width, dtype)
            yield from rms_norm.rms_norm_backward(rows, width, dtype)
        for product in (
            gemm.gemm, gemm.gemm_backward_a, gemm.gemm_backward_b, gemm.gemm_backward_a_nf4
        ):  # fmt: skip
            for tile in gemm.tiles(dtype):
                yield product(1, 1, 1, dtype, tile=tile)


@pytest.fixture(scope="session", autouse=True)
def all_compiled(request: pytest.FixtureRequest, shared_builder: Builder) -> None:
    """Compile everything first, on all CPU cores, if there is a GPU."""
    marked = [item for item in request.session.items if item.get_closest_marker("gpu")]
    if any(not item.get_closest_marker("skip") for item in marked):
        from preheat.devices.cuda.device import CudaDevice

        wanted = {op.entry: ManifestProgram(op.program, entries=(op.entry,)) for op in every_op()}
        with Gpu(CudaDevice(0), shared_builder) as gpu:
            gpu.warm(Manifest(tuple(wanted.values())))


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.fixture
def on_gpu(torch: Any, open_device: Callable[..., Gpu]) -> Ops:
    """Return Ops on the GPU, for tests of real sizes whose operands and references are tensors."""
    torch.manual_seed(20261115)
    return Ops(open_device("cuda"))


@pytest.fixture
def random(device: Gpu) -> Callable[..., Operand]:
    """Return a function that makes normally distributed operands, different ones each time."""
    rng = np.random.default_rng(20261115)

    def make(*shape: int, dtype: str = "float32") -> Operand:
        values = rng.standard_normal(shape, dtype=np.float32)
        array = device.array(values.astype("float16") if dtype == "float16" else values, dtype)
        return Operand(array, exact(array))

    return make


def exact(array: Array) -> Exact:
    """Return the values of an array in float64."""
    host = array.numpy()
    if array.dtype.name == "bfloat16":
        host = (host.astype(np.uint32) << 16).view(np.float32)
    return host.astype(np.float64)


def shifted(gpu: Gpu, array: Array) -> Array:
    """Return a copy that begins one element after an aligned address."""
    room = gpu.empty(array.size + 1, array.dtype)
    view = Array(room.buffer, room.dtype, array.shape, room.dtype.size)
    return view.write(array.numpy())


def agree(result: Array, wanted: Exact, magnitude: Exact | None = None) -> None:
    """Check a result against its reference, within rounding and float32 arithmetic."""
    assert result.shape == wanted.shape
    found = exact(result)
    name = result.dtype.name
    terms = np.abs(wanted) if magnitude is None else magnitude
    bound = 1.01 * ROUNDING[name] * np.abs(wanted) + ARITHMETIC * terms + _TINY[name]
    worst = np.max(np.abs(found - wanted) / bound)
    assert worst <= 1, f"{worst:.3g} times the tolerance"


def tensors_agree(found: Any, wanted: Any, terms: Any = None) -> None:
    """Check a tensor on the device against its reference, like `agree`."""
    name = str(found.dtype).removeprefix("torch.")
    terms = wanted.abs() if terms is None else terms
    bound = 1.01 * ROUNDING[name] * wanted.abs() + ARITHMETIC * terms + _TINY[name]
    worst = float(((found.double() - wanted).abs() / bound).max())
    assert worst <= 1, f"{worst:.3g} times the tolerance"


def gradient(function: Callable[[Exact], Exact], at: Exact, gy: Exact) -> Exact:
    """Return the gradient of sum(gy function(x)) by central differences, element by element."""
    slopes = np.empty_like(at)
    step = 1e-5
    for index in np.ndindex(*at.shape):
        nudge = np.zeros_like(at)
        nudge[index] = step
        slopes[index] = np.sum(gy * (function(at + nudge) - function(at - nudge))) / (2 * step)
    return slopes


def same_bits(one: Any, other: Any) -> bool:
    """Return whether two arrays hold the same bits."""
    return bool(one.numpy().tobytes() == other.numpy().tobytes())


@pytest.fixture
def cublas() -> Cublas:
    return Cublas()


@pytest.fixture
def emulator(open_device: Callable[..., Gpu]) -> Gpu:
    return open_device("emulator")


@pytest.fixture
def blas(emulator: Gpu, cublas: Cublas) -> Blas:
    return Blas(emulator, found=Found(cublas, "13.0.0"))


@pytest.fixture
def launched(emulator: Gpu) -> Callable[[], None]:
    """Launch a kernel of preheat, so that no graph is empty."""
    ops = Ops(emulator)
    x = emulator.zeros(5)
    y = emulator.zeros(5)
    ops.silu(x, out=y)
    return partial(ops.silu, x, out=y)
