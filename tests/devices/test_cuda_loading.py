"""How a kernel is loaded on a GPU, by the native core and by Python code, with a driver in Python.

The driver is a set of Python functions at real addresses. The native core calls the addresses, and the
stand-in of the bindings calls the same functions, so both see the same driver. It shows what the CPU
driver cannot: any call fails with any status, once or always, or does not exist, and calls are counted.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from preheat import native
from preheat.devices.base import Bounds
from preheat.devices.cuda import device as cuda_device
from preheat.devices.cuda import driver as cuda_driver
from preheat.devices.cuda import module as cuda_module
from preheat.devices.cuda.module import CudaFunction, CudaModule
from preheat.errors import DriverError, InvalidCodeError, OutOfMemoryError

CONTEXT, MODULE, FUNCTION = 0xC0DE_0000_0001, 0x30D0_0000_0002, 0xF00D_0000_0003
CUBIN, PTX = b"\x7fELF\0code", b".version 9.0"
ATTRIBUTES = {
    "MAX_THREADS_PER_BLOCK": 0, "SHARED_SIZE_BYTES": 1, "CLUSTER_SIZE_MUST_BE_SET": 10,
    "REQUIRED_CLUSTER_WIDTH": 11, "REQUIRED_CLUSTER_HEIGHT": 12, "REQUIRED_CLUSTER_DEPTH": 13,
}  # fmt: skip
_POINTER = ctypes.c_void_p
_OUT = ctypes.POINTER(_POINTER)
_NUMBER = ctypes.POINTER(ctypes.c_int)
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuCtxPushCurrent": (_POINTER,),
    "cuCtxPopCurrent": (_OUT,),
    "cuModuleLoadData": (_OUT, _POINTER),
    "cuModuleGetFunction": (_OUT, _POINTER, ctypes.c_char_p),
    "cuFuncLoad": (_POINTER,),
    "cuFuncGetAttribute": (_NUMBER, ctypes.c_int, _POINTER),
}
STATUSES = {2: "OUT_OF_MEMORY", 200: "INVALID_IMAGE", 500: "NOT_FOUND", 700: "ILLEGAL_ADDRESS"}


class Driver:
    """Notes its calls. The calls named in `failing` return a status, `times` times."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.failing: dict[str, int] = {}
        self.times = 1000
        self.size = len(CUBIN)  # of the code that is loaded
        self.values = {0: 512, 1: 1024, 10: 0, 11: 4, 12: 2, 13: 1}
        self.current: list[int] = []
        self.addresses: dict[str, int] = {}
        self._kept: list[Any] = []
        for name, types in SIGNATURES.items():
            made = ctypes.CFUNCTYPE(ctypes.c_int, *types)(self._function(name))
            self._kept.append(made)
            self.addresses[name] = ctypes.cast(made, _POINTER).value or 0

    def _function(self, name: str) -> Callable[..., int]:
        def call(*args: Any) -> int:
            return self.answer(name, *args)

        return call

    def answer(self, name: str, *args: Any) -> int:
        """Note a call, store its result, and return its status."""
        key = f"{name}:{args[1]}" if name == "cuFuncGetAttribute" else name
        self.calls.append((key,))
        if key in self.failing and self.times:
            self.times -= 1
            return self.failing[key]
        match name:
            case "cuCtxPushCurrent":
                self.current.append(args[0])
            case "cuCtxPopCurrent":
                args[0][0] = self.current.pop()
            case "cuModuleLoadData":
                code = args[1] if isinstance(args[1], bytes) else ctypes.string_at(args[1], self.size)
                self.calls.append((code,))
                args[0][0] = MODULE
            case "cuModuleGetFunction":
                self.calls.append(args[1:])
                args[0][0] = FUNCTION
            case "cuFuncLoad":
                self.calls.append(args)
            case "cuFuncGetAttribute":
                self.calls.append(args[2:])
                args[0][0] = self.values[args[1]]
        if name not in ("cuCtxPushCurrent", "cuCtxPopCurrent"):
            assert self.current[-1:] == [CONTEXT], f"{name} needs the context of the device"
        return 0

    def bindings(self) -> SimpleNamespace:
        """Return what Python code uses of the bindings."""

        def with_pointer(name: str) -> Callable[..., tuple[int, int | None]]:
            def call(*args: Any) -> tuple[int, int | None]:
                out = (_POINTER * 1)()
                return self.answer(name, out, *args), out[0]

            return call

        def get_attribute(attribute: int, function: int) -> tuple[int, int]:
            out = (ctypes.c_int * 1)()
            return self.answer("cuFuncGetAttribute", out, attribute, function), out[0]

        return SimpleNamespace(
            CUmodule=int, CUfunction=int, CUresult=int,
            cuGetErrorName=lambda status: (0, f"CUDA_ERROR_{STATUSES[status]}".encode()),
            cuGetErrorString=lambda status: (0, STATUSES[status].lower().encode()),
            cuCtxPushCurrent=lambda context: (self.answer("cuCtxPushCurrent", context),),
            cuFuncLoad=lambda function: (self.answer("cuFuncLoad", function),),
            cuFuncGetAttribute=get_attribute,
            **{name: with_pointer(name) for name, types in SIGNATURES.items() if types[0] is _OUT},
        )  # fmt: skip


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    bindings = driver.bindings()
    for module in (cuda_driver, cuda_module, cuda_device):
        monkeypatch.setattr(module, "library", lambda: bindings)
    for module in (cuda_module, cuda_device):
        monkeypatch.setattr(module, "function_address", lambda name, *_: driver.addresses[name])
    # Both keep their results, which would be those of this driver in other tests.
    monkeypatch.setattr(cuda_module, "_attribute", ATTRIBUTES.__getitem__)
    monkeypatch.setattr(cuda_module, "_resolve_calls", cuda_module._resolve_calls.__wrapped__)
    return driver


@pytest.fixture(params=["native", "python"])
def core(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Load by the native core, and by Python code."""
    if request.param == "python":
        monkeypatch.setattr(native, "core", None)
    elif native.core is None:
        pytest.skip(f"no native core: {native.reason}")
    return str(request.param)


def device(cluster: int = 16) -> Any:
    made = object.__new__(cuda_device.CudaDevice)
    made.context = CONTEXT
    made._current = cuda_device._Current(CONTEXT)
    made.limits = SimpleNamespace(cluster=cluster)  # type: ignore[assignment]
    return made


def load(*, jit: bool = False, cluster: int = 16) -> CudaFunction:
    code: Any = SimpleNamespace(cubin=CUBIN, ptx=PTX)
    return CudaModule(device(cluster), code, jit=jit).function("kernel")


def names(driver: Driver) -> list[str]:
    return [call[0] for call in driver.calls if isinstance(call[0], str)]


LOADS = ["cuCtxPushCurrent", "cuModuleLoadData", "cuCtxPopCurrent"]
RESOLVES = [
    "cuCtxPushCurrent", "cuModuleGetFunction", "cuFuncLoad", "cuFuncGetAttribute:0",
    "cuFuncGetAttribute:1", "cuFuncGetAttribute:10", "cuCtxPopCurrent",
]  # fmt: skip


def test_the_attributes_have_the_numbers_of_the_bindings() -> None:
    """The native core has no header of CUDA, and is tested against these numbers."""
    from cuda.bindings.driver import CUfunction_attribute as Attribute

    named = {name: int(getattr(Attribute, f"CU_FUNC_ATTRIBUTE_{name}")) for name in ATTRIBUTES}
    assert named == ATTRIBUTES


@pytest.mark.usefixtures("core")
def test_a_kernel_is_loaded_by_the_same_calls(driver: Driver) -> None:
    function = load()
    assert function.bounds == Bounds(512, 1024)
    assert type(function.bounds) is Bounds
    assert int(function._function) == FUNCTION
    assert names(driver) == [*LOADS, *RESOLVES]
    assert (CUBIN,) in driver.calls
    assert (MODULE, b"kernel") in driver.calls
    assert driver.calls.count((FUNCTION,)) == 4, "it is loaded, and has three attributes"
    assert driver.current == []


@pytest.mark.usefixtures("core")
def test_text_for_the_compiler_of_the_driver_ends_with_a_zero(driver: Driver) -> None:
    driver.size = len(PTX) + 1
    load(jit=True)
    assert (PTX + b"\0",) in driver.calls


@pytest.mark.usefixtures("core")
@pytest.mark.parametrize("sizes", [(4, 2, 1), (0, 0, 0)])
def test_a_cluster_is_asked_for_where_a_launch_has_to_have_one(
    sizes: tuple[int, int, int], driver: Driver
) -> None:
    driver.values |= {10: 1, 11: sizes[0], 12: sizes[1], 13: sizes[2]}
    assert load().bounds == Bounds(512, 1024, sizes)
    before = len(driver.calls)
    assert load(cluster=0).bounds == Bounds(512, 1024)
    asked = {call[0] for call in driver.calls[before:]}
    assert not asked & {f"cuFuncGetAttribute:{number}" for number in (10, 11, 12, 13)}


FAILURES = [
    ("cuCtxPushCurrent", 700), ("cuModuleLoadData", 2), ("cuModuleLoadData", 200),
    ("cuModuleGetFunction", 500), ("cuFuncLoad", 2), ("cuFuncGetAttribute:0", 700),
    ("cuFuncGetAttribute:1", 700), ("cuFuncGetAttribute:10", 700), ("cuFuncGetAttribute:11", 700),
    ("cuFuncGetAttribute:12", 700), ("cuFuncGetAttribute:13", 700),
]  # fmt: skip


@pytest.mark.usefixtures("core")
@pytest.mark.parametrize(("call", "status"), FAILURES)
def test_a_call_that_fails_is_reported_with_its_name_and_status(
    call: str, status: int, driver: Driver
) -> None:
    driver.values[10] = 1
    driver.failing[call] = status
    with pytest.raises(DriverError) as caught:
        load()
    name, title = call.partition(":")[0], STATUSES[status]
    assert str(caught.value) == f"{name} failed: CUDA_ERROR_{title} ({status}): {title.lower()}"
    kinds = {2: OutOfMemoryError, 200: InvalidCodeError}
    assert type(caught.value) is kinds.get(status, DriverError)
    assert caught.value.sticky == (status == 700)
    assert driver.current == [], "no context stays current"


@pytest.mark.skipif(native.core is None, reason=f"no native core: {native.reason}")
@pytest.mark.parametrize(("call", "status"), FAILURES)
def test_a_call_that_fails_once_is_made_again_by_python_code(
    call: str, status: int, driver: Driver
) -> None:
    driver.values[10] = 1
    driver.failing[call] = status
    driver.times = 1
    assert load().bounds == Bounds(512, 1024, (4, 2, 1))
    assert names(driver).count(call) >= 2
    assert driver.current == []


@pytest.mark.skipif(native.core is None, reason=f"no native core: {native.reason}")
def test_a_driver_without_the_call_that_loads_a_kernel_is_called_by_python_code(driver: Driver) -> None:
    driver.addresses["cuFuncLoad"] = 0  # as `cuGetProcAddress` says it
    assert load().bounds == Bounds(512, 1024)
    assert names(driver) == [*LOADS, *RESOLVES]


@pytest.mark.skipif(native.core is None, reason=f"no native core: {native.reason}")
@pytest.mark.parametrize("code", ["text", None, 7])
def test_code_must_be_bytes(code: object, driver: Driver) -> None:
    with pytest.raises(TypeError):
        native.core.load_module(None, driver.addresses["cuModuleLoadData"], code)
    assert driver.calls == []
