"""The driver calls that a GPU's device and its modules make, seen without a GPU.

The driver is replaced by a table of answers, so that only the calls themselves are tested here, with
attributes that no kernel of the CPU driver has; the tests marked `gpu` compare their results on it.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from preheat import native
from preheat.devices.base import Attributes, Bounds, Geometry
from preheat.devices.cuda import device as cuda_device
from preheat.devices.cuda import driver as cuda_driver
from preheat.devices.cuda import module as cuda_module
from preheat.devices.cuda.module import CudaFunction, CudaModule
from preheat.errors import InputError

ANSWERS = {
    "MAX_THREADS_PER_BLOCK": 512,
    "SHARED_SIZE_BYTES": 1024,
    "CLUSTER_SIZE_MUST_BE_SET": 0,
    "REQUIRED_CLUSTER_WIDTH": 4,
    "REQUIRED_CLUSTER_HEIGHT": 2,
    "REQUIRED_CLUSTER_DEPTH": 2,
    "NUM_REGS": 40,
    "LOCAL_SIZE_BYTES": 16,
    "CONST_SIZE_BYTES": 8,
    "BINARY_VERSION": 90,
    "PTX_VERSION": 89,
    "CACHE_MODE_CA": 1,
}


class Driver:
    """Answers the calls of a module, and counts them. A call outside the context fails."""

    def __init__(self, answers: dict[str, int]) -> None:
        self.answers = answers
        self.calls: Counter[str] = Counter()
        self.settings: dict[str, int] = {}
        self._current = False

    def call(self, name: str, *args: Any) -> Any:
        assert self._current, f"{name} needs the context of the device"
        self.calls[name] += 1
        if name == "cuFuncGetAttribute":
            return self.answers[args[0]]
        if name == "cuFuncSetAttribute":
            self.settings[args[1]] = args[2]
        return name

    @contextmanager
    def current(self) -> Iterator[None]:
        assert not self._current
        self.calls["current"] += 1
        self._current = True
        try:
            yield
        finally:
            self._current = False


class Device:
    """What a module uses of its device."""

    processor_threads = 2048

    def __init__(self, driver: Driver, cluster: int = 16) -> None:
        self.current = driver.current
        self.limits = SimpleNamespace(cluster=cluster, shared=48 << 10, shared_optin=227 << 10)

    @staticmethod
    def launch_in_context(submit: Any, stream: Any) -> Any:
        del stream
        return submit


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, without_native_core: None) -> Driver:
    del without_native_core  # Its launch has the same driver calls before it.
    driver = Driver(dict(ANSWERS))
    monkeypatch.setattr(cuda_module, "call", driver.call)
    monkeypatch.setattr(cuda_module, "_attribute", str)
    bindings = SimpleNamespace(CUstream=int, cuLaunchKernel=lambda *_: (0,))
    monkeypatch.setattr(cuda_module, "library", lambda: bindings)
    return driver


def resolve(driver: Driver, cluster: int = 16) -> CudaFunction:
    artifact: Any = SimpleNamespace(cubin=b"code", ptx=b"text")
    device: Any = Device(driver, cluster)
    return CudaModule(device, artifact, jit=False).function("k")


def prepare(function: CudaFunction, shared: int = 0) -> None:
    stream: Any = SimpleNamespace(handle=16)
    function.prepare(Geometry((1, 1, 1), (32, 1, 1), shared), stream)


def test_a_kernel_is_loaded_and_a_launch_prepared_with_few_calls(driver: Driver) -> None:
    prepare(resolve(driver))
    assert driver.calls == {
        "current": 2,
        "cuModuleLoadData": 1,
        "cuModuleGetFunction": 1,
        "cuFuncLoad": 1,
        "cuFuncGetAttribute": 3,
    }


def test_a_device_without_clusters_is_not_asked_for_them(driver: Driver) -> None:
    assert resolve(driver, cluster=0).bounds == Bounds(512, 1024)
    assert driver.calls["cuFuncGetAttribute"] == 2


def test_the_size_of_a_fixed_cluster_is_asked_for(driver: Driver) -> None:
    driver.answers["CLUSTER_SIZE_MUST_BE_SET"] = 1
    function = resolve(driver)
    assert function.bounds == Bounds(512, 1024, (4, 2, 2))
    prepare(function)
    assert driver.settings == {"NON_PORTABLE_CLUSTER_SIZE_ALLOWED": 1}


def test_all_attributes_are_asked_for_once_and_in_one_context(driver: Driver) -> None:
    function = resolve(driver)
    before = driver.calls.copy()
    expected = Attributes(40, 1024, 16, 8, 512, 90, 89, (227 << 10) - 1024, cache_mode_ca=1)
    assert function.attributes == expected
    assert function.attributes == expected
    assert driver.calls - before == {"current": 1, "cuFuncGetAttribute": 6}


def test_a_launch_that_needs_more_shared_memory_opts_in_once(driver: Driver) -> None:
    function = resolve(driver)
    prepare(function, (48 << 10) - 1024)
    assert driver.settings == {}
    for _ in range(2):
        prepare(function, 48 << 10)
    assert driver.settings == {"MAX_DYNAMIC_SHARED_SIZE_BYTES": (227 << 10) - 1024}
    assert driver.calls["cuFuncSetAttribute"] == 1


# Calls of another CUDA library

Status = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
Exchange = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int))
CONTEXT, GLOBAL, RELAXED = 77, 0, 2


class Calls:
    """The driver calls around a call of a library, of which one may fail."""

    def __init__(self, fails: str) -> None:
        self.fails = fails
        self.made: list[Any] = []
        self.callbacks = {
            "cuCtxPushCurrent": Status(lambda context: self.status("push", context)),
            "cuCtxPopCurrent": Status(lambda _: self.status("pop")),
            "cuThreadExchangeStreamCaptureMode": Exchange(self.exchange),
        }

    def status(self, *call: Any) -> int:
        """Note a call and return its status."""
        self.made.append(call)
        return 201 if call[0] == self.fails else 0

    def exchange(self, mode: Any) -> int:
        """Exchange the mode of the thread, which was global."""
        status = self.status("exchange", mode[0])
        mode[0] = GLOBAL
        return status

    def call(self, name: str, *args: Any) -> Any:
        """Call by name, as Python code does."""
        if name == "cuThreadExchangeStreamCaptureMode":
            mode = (ctypes.c_int * 1)(*args)
            status, result = self.exchange(mode), mode[0]
        else:
            status, result = self.status(*(("push", *args) if "Push" in name else ("pop",))), None
        if status:
            raise InputError(name)
        return result


@pytest.mark.parametrize("with_core", [False, True])
@pytest.mark.parametrize("fails", ["", "push", "exchange", "library"])
def test_a_call_of_a_library_leaves_the_thread_as_it_was(
    fails: str, with_core: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if with_core and native.core is None:
        pytest.skip(f"no native core: {native.reason}")
    if not with_core:
        monkeypatch.setattr(native, "core", None)
    calls = Calls(fails)
    monkeypatch.setattr(cuda_driver, "call", calls.call)
    monkeypatch.setattr(cuda_driver, "_relax_capture_mode", lambda: RELAXED)
    monkeypatch.setattr(cuda_device, "call", calls.call)
    monkeypatch.setattr(cuda_device, "error_of", lambda name, _: InputError(name))
    monkeypatch.setattr(
        cuda_device,
        "function_address",
        lambda name: ctypes.cast(calls.callbacks[name], ctypes.c_void_p).value,
    )

    def gemm(*args: Any) -> Any:
        calls.made.append(("gemm", *args))
        if fails == "library":
            raise InputError("the library")
        return args

    device = object.__new__(cuda_device.CudaDevice)
    device.context = CONTEXT
    device._current = cuda_device._Current(CONTEXT)
    call = device.beside_captures(gemm)
    enter: list[Any] = [("push", CONTEXT), ("exchange", RELAXED)]
    leave: list[Any] = [("exchange", GLOBAL), ("pop",)]
    if fails:
        with pytest.raises(InputError):
            call(1, 2)
    else:
        assert call(1, 2) == (1, 2)
    wanted = {"push": enter[:1], "exchange": [*enter, leave[1]]}
    assert calls.made == wanted.get(fails, [*enter, ("gemm", 1, 2), *leave])
