"""Memory shared with other libraries by DLPack and the CUDA array interface: no copy, kept alive."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from preheat.devices import dlpack
from preheat.devices.operands import strided, tensor_kind
from preheat.errors import InputError, LaunchError, StaleBufferError
from preheat.gpu import Gpu
from preheat.model.dtypes import DTYPES
from tests.devices.support import KERNELS, import_or_skip, saxpy_case
from tests.faulty import FaultyGpu

NUMPY_TYPES = [name for name in DTYPES if DTYPES[name].host == name]


@pytest.fixture
def emulator(open_device: Callable[..., Gpu]) -> Gpu:
    return open_device("emulator")


@pytest.mark.parametrize("name", NUMPY_TYPES)
@pytest.mark.parametrize("shape", [(7,), (3, 5), (), (0, 4)], ids=str)
def test_numpy_shares_memory_through_dlpack(name: str, shape: tuple[int, ...], emulator: Gpu) -> None:
    made = emulator.zeros(shape, name)
    shared = np.from_dlpack(made)
    assert (shared.shape, shared.dtype) == (shape, np.dtype(name))
    if made.size:
        assert shared.ctypes.data == made.address
    made.fill(1)
    assert (shared == 1).all()


def test_exported_memory_outlives_its_array(emulator: Gpu) -> None:
    made = emulator.array(np.arange(1000.0))
    alive = weakref.ref(made.buffer)
    shared = np.from_dlpack(made[500:])
    del made
    gc.collect()
    emulator.array(np.full(1000, -1.0))
    assert alive() is not None
    assert np.array_equal(shared, np.arange(500.0, 1000.0))
    view = shared[1:]
    del shared
    gc.collect()
    assert view[0] == 501
    del view
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("version", [None, (0, 8), (1, 0), (1, 1), (2, 0)])
def test_a_capsule_speaks_the_version_it_was_asked_for(version: Any, device: Gpu) -> None:
    made = device.array(np.arange(12, dtype=np.int16).reshape(3, 4))
    given = made.__dlpack__(
        max_version=version, stream=-1 if made.__dlpack_device__()[0] == 2 else None
    )
    assert ("versioned" in repr(given)) == (version is not None and version >= (1, 0))
    tensor = dlpack.open_capsule(given)
    assert tensor.address == made.address
    assert (tensor.shape, tensor.dtype) == ((3, 4), DTYPES["int16"])
    assert tensor.device == made.__dlpack_device__()
    assert not tensor.read_only


@pytest.mark.parametrize("name", DTYPES)
def test_every_type_is_described_to_other_libraries(name: str, device: Gpu) -> None:
    made = device.zeros((2, 3), name)
    assert dlpack.open_capsule(made.__dlpack__(stream=None)).dtype is DTYPES[name]


@pytest.mark.parametrize("version", [None, (1, 0)])
def test_a_capsule_nobody_takes_holds_its_array_no_longer_than_needed(
    version: Any, device: Gpu
) -> None:
    made = device.array([1, 2, 3])
    alive = weakref.ref(made.buffer)
    given = made.__dlpack__(max_version=version)
    del made
    gc.collect()
    device.synchronize()
    assert alive() is not None  # somebody has the capsule and may take it yet
    del given
    device.synchronize()
    gc.collect()
    assert alive() is None


def test_a_consumer_that_refuses_says_why(emulator: Gpu) -> None:
    for name in ("bfloat16", "float8_e4m3fn"):
        made = emulator.zeros(3, name)
        alive = weakref.ref(made.buffer)
        with pytest.raises((BufferError, RuntimeError), match=r"(?i)unsupported"):
            np.from_dlpack(made)
        del made
        gc.collect()
        emulator.synchronize()
        assert alive() is None


def test_a_copy_or_another_device_is_not_what_an_export_is(device: Gpu) -> None:
    made = device.zeros(3)
    for asked in ({"copy": True}, {"dl_device": (2, 7)}):
        with pytest.raises(BufferError, match="without a copy"):
            made.__dlpack__(**asked)
    made.__dlpack__(copy=False, dl_device=made.__dlpack_device__())
    made.close()
    with pytest.raises(StaleBufferError, match="its memory was freed"):
        made.__dlpack__()


def test_memory_that_others_hold_is_freed_when_they_release_it_without_a_wait(
    faulty: FaultyGpu,
) -> None:
    made, other = faulty.gpu.array([1.0, 2.0]), faulty.gpu.array([3.0])
    given = made.__dlpack__()
    with faulty.count_calls("synchronize", "free") as calls:
        other.close()
    assert calls == {"free": 1}
    with faulty.count_calls("synchronize", "free") as calls:
        made.close()
    assert calls == {}  # whoever took it may still be using it
    assert dlpack.open_capsule(given).address == made.address
    del given, made
    gc.collect()
    with faulty.count_calls("synchronize", "free") as calls:
        dlpack.end_dropped_exports()
        faulty.gpu.empty(1)
    assert calls == {"free": 1}


@pytest.mark.parametrize("how", ["close", "reset", "drop"])
def test_numpy_can_continue_with_memory_that_was_closed(how: str, emulator: Gpu) -> None:
    made = emulator.array(np.arange(100_000, dtype=np.float32))
    views = [np.from_dlpack(made), np.from_dlpack(made[:])]
    if how == "close":
        made.close()
    del made
    gc.collect()
    if how == "reset":
        emulator.reset()
    others = [emulator.zeros(100_000) for _ in range(8)]  # would lie where it was
    for view in views:
        assert view.sum(dtype=np.float64) == sum(range(100_000))
    del others


@pytest.mark.parametrize("convert", [np.asarray, np.array, np.sum, lambda x: np.zeros(3) + x])
def test_numpy_copies_no_array_to_the_host_in_passing(
    convert: Callable[[Any], Any], device: Gpu
) -> None:
    made = device.zeros(3)
    with pytest.raises(TypeError, match=r"use \.numpy\(\)"):
        convert(made)
    assert not hasattr(made, "__array_interface__")


def test_memory_of_the_emulator_is_shared_with_numpy_by_dlpack_alone(emulator: Gpu) -> None:
    made = emulator.array(np.arange(6, dtype=np.float32).reshape(2, 3))
    shared = np.from_dlpack(made)
    shared[1, 2] = 77
    assert made.numpy()[1, 2] == 77
    assert not hasattr(made, "__cuda_array_interface__")


@pytest.mark.gpu
def test_the_cuda_array_interface_is_there_on_a_gpu_only(open_device: Callable[..., Gpu]) -> None:
    made = open_device("cuda").zeros((2, 3), "int16")
    face = made.__cuda_array_interface__
    assert (face["shape"], face["typestr"], face["version"]) == ((2, 3), "<i2", 3)
    assert face["data"] == (made.address, False)
    assert face["stream"] == made.buffer.home.handle


# Arrays of other libraries as arguments


class Tensor:
    """A tensor of some library that speaks DLPack and nothing else."""

    def __init__(self, data: np.ndarray[Any, Any]) -> None:
        self.data = data
        self.asked: list[dict[str, Any]] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def __dlpack__(self, **more: Any) -> Any:
        self.asked.append(more)
        return self.data.__dlpack__()


class OnGpu(Tensor):
    """One that says it is in a GPU's memory."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 3)


class Interface:
    """An array of some library that has the CUDA array interface and nothing else."""

    def __init__(self, address: int = 4096) -> None:
        self.__cuda_array_interface__ = {
            "version": 3, "shape": (8,), "typestr": "<f4", "data": (address, False), "stream": 1,
        }  # fmt: skip

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self._face

    @__cuda_array_interface__.setter
    def __cuda_array_interface__(self, face: dict[str, Any]) -> None:
        self._face = face


@pytest.mark.parametrize("warm", [0, 4])
def test_any_tensor_with_dlpack_is_used_in_place(warm: int, permissive: Gpu) -> None:
    made = saxpy_case(permissive)
    made.launch(warm)
    x, y = Tensor(made.xs), Tensor(made.ys.copy())
    made.saxpy[5, 64](2.0, x, y, made.n)
    np.testing.assert_allclose(y.data, made.ys + 2.0 * made.xs, rtol=1e-5, atol=1e-5)
    assert x.asked == [{"max_version": (1, 0)}]  # no stream is named for memory of the host
    with pytest.raises(
        LaunchError, match=r"saxpy, argument 1: float const\* cannot take a Tensor of int32"
    ):
        made.saxpy[5, 64](2.0, Tensor(made.xs.view(np.int32)), y, made.n)
    with pytest.raises(LaunchError, match="cannot take an ndarray of float64") as caught:
        made.saxpy[5, 64](2.0, made.xs.astype("float64"), y, made.n)
    assert caught.value.hint == "convert it: x = x.astype('float32')"


@pytest.mark.torch
@pytest.mark.parametrize("warm", [0, 4])
def test_torch_tensors_of_the_host_are_used_in_place(warm: int, permissive: Gpu) -> None:
    torch = import_or_skip("torch")
    made = saxpy_case(permissive)
    made.launch(warm)
    x, y = torch.from_numpy(made.xs), torch.from_numpy(made.ys.copy())
    for given in (x, x.clone().requires_grad_()):
        made.saxpy[5, 64](2.0, given, y, made.n)
    np.testing.assert_allclose(y.numpy(), made.ys + 4.0 * made.xs, rtol=1e-5, atol=1e-5)
    source = """
        #include <cuda_bf16.h>
        extern "C" __global__ void twice(__nv_bfloat16* x) {
            x[threadIdx.x] = x[threadIdx.x] + x[threadIdx.x];
        }
    """
    small = torch.arange(32).to(torch.bfloat16)
    permissive.kernel(source, "twice")[1, 32](small)
    assert torch.equal(small, (torch.arange(32) * 2).to(torch.bfloat16))
    with pytest.raises(LaunchError, match=r"cannot take a Tensor of float64") as caught:
        made.saxpy[5, 64](2.0, x.double(), y, made.n)
    assert caught.value.hint == "convert it: x = x.to(torch.float32)"


@pytest.mark.torch
def test_torch_shares_the_emulators_memory(emulator: Gpu) -> None:
    torch = import_or_skip("torch")
    for name in ("float32", "int64", "bool", "bfloat16"):
        made = emulator.zeros((3, 5), name)
        shared = torch.from_dlpack(made)
        assert (shared.data_ptr(), tuple(shared.shape)) == (made.address, (3, 5))
        made.fill(1)
        assert bool((shared == 1).all())
    assert emulator.array(torch.arange(5)).numpy().tolist() == [0, 1, 2, 3, 4]


def test_memory_of_a_gpu_is_refused_on_the_emulator(emulator: Gpu) -> None:
    made = saxpy_case(emulator)
    for foreign in (Interface(), Interface(0)):
        with pytest.raises(
            LaunchError,
            match="1: Interface is in the memory of GPU 0, the kernel is on emulator:0",
        ):
            made.saxpy[5, 64](2.0, foreign, made.y, made.n)


def test_a_type_is_looked_at_once() -> None:
    first, second = tensor_kind(Tensor(np.zeros(1))), tensor_kind(Tensor(np.zeros(2)))
    assert first is not None
    assert first is second
    assert tensor_kind(np.zeros(1)) is not None
    for plain in (1, 1.5, "a", None, np.float32(1), object(), b""):
        assert tensor_kind(plain) is None


def test_our_own_arrays_are_no_other_librarys(device: Gpu) -> None:
    assert tensor_kind(device.zeros(1)) is None
    assert tensor_kind(device.scalar("int32")) is None


def test_strided_host_arrays_can_be_reached_to_their_last_element(permissive: Gpu) -> None:
    table = np.arange(40, dtype=np.int32).reshape(4, 10)
    out = permissive.zeros(31, "int32")
    add = permissive.kernel(KERNELS, "add")
    add[1, 32](strided(table[:, 0]), 1, out, 31)  # spans 31 elements
    assert np.array_equal(out.numpy(), np.arange(31) + 1)


@pytest.mark.parametrize("warm", [0, 4])
@pytest.mark.parametrize(
    "make",
    [
        lambda table: table[:, 0],
        lambda table: table[::2],
        lambda table: table.T,
        lambda table: table[::-1],
        lambda table: np.asfortranarray(table),
        lambda table: np.lib.stride_tricks.as_strided(table, (3, 10), (0, 4)),
    ],
    ids=["column", "every second row", "transposed", "reversed", "Fortran", "broadcast"],
)
def test_arrays_that_are_not_contiguous_are_refused(make: Any, warm: int, permissive: Gpu) -> None:
    table = np.arange(40, dtype=np.int32).reshape(4, 10)
    out = permissive.zeros(40, "int32")
    add = permissive.kernel(KERNELS, "add")
    for _ in range(warm):
        add[1, 32](np.arange(32, dtype=np.int32), 0, out, 32)
    before = out.numpy()
    for given in (make(table), Tensor(make(table))):
        with pytest.raises(LaunchError, match=r"argument 0: .* is not contiguous") as refused:
            add[1, 32](given, 1, out, 8)
        assert "preheat.strided(x)" in str(refused.value.hint)
    assert np.array_equal(out.numpy(), before)


STRIDES = """
extern "C" __global__ void columns(const int* x, long long step, int* out, int n) {
    int i = threadIdx.x;
    if (i < n) out[i] = x[i * step];
}
"""


def test_strided_takes_arrays_of_preheat_as_they_are_and_nothing_else(emulator: Gpu) -> None:
    own = emulator.array(np.arange(40, dtype=np.int32))
    out = emulator.zeros(40, "int32")
    columns = emulator.kernel(STRIDES, "columns")
    side = emulator.stream()
    columns.launch(strided(own), 2, out, 20, grid=1, block=64, stream=side)
    assert np.array_equal(out.numpy()[:20], np.arange(0, 40, 2))
    assert own.buffer.uses.writer is not emulator._context.stream  # The use is on record.
    for wrong in (3, "x", None, [1, 2]):
        with pytest.raises(InputError, match="strided takes an array or a tensor, not"):
            strided(wrong)


@pytest.mark.parametrize("step", [1, 3, -1, -4])
def test_a_strided_array_is_passed_by_its_first_element(step: int, permissive: Gpu) -> None:
    table = np.arange(40, dtype=np.int32)
    out = permissive.zeros(40, "int32")
    part = table[::step]
    columns = permissive.kernel(STRIDES, "columns")
    for _ in range(4):
        columns[1, 64](strided(part), step, out, len(part))
        assert np.array_equal(out.numpy()[: len(part)], part)


def test_exports_of_many_arrays_do_not_pile_up(emulator: Gpu) -> None:
    before = len(dlpack._exports)
    for n in range(50):
        assert np.from_dlpack(emulator.array([n]))[0] == n
        emulator.array([n]).__dlpack__()
    emulator.synchronize()
    assert len(dlpack._exports) <= before
    assert not dlpack._unconsumed_capsules


def test_a_consumer_in_c_gives_the_memory_back_by_the_deleter(device: Gpu) -> None:
    made = device.array([1.0])
    alive = weakref.ref(made.buffer)
    given = made.__dlpack__()
    address = dlpack._pointer(id(given), b"dltensor")
    rename = ctypes.pythonapi.PyCapsule_SetName
    rename.argtypes = (ctypes.py_object, ctypes.c_char_p)
    name = b"used_dltensor"
    rename(given, name)
    del given, made
    device.synchronize()
    gc.collect()
    assert alive() is not None
    dlpack._Managed.from_address(address).deleter(address)
    gc.collect()
    assert alive() is None
