"""Opening devices by name: defaults, reuse, errors, and registered factories."""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest

from preheat import gpu as module
from preheat.build.builder import Builder
from preheat.devices import registry
from preheat.devices.cuda import device as cuda
from preheat.devices.cuda import driver
from preheat.devices.cuda import factory as cuda_factory
from preheat.devices.registry import DeviceDescription
from preheat.emulator.device import EmulatorDevice
from preheat.emulator.factory import parse_setting
from preheat.errors import (
    ConfigError,
    ContextLostError,
    DeviceError,
    InputError,
    LaunchError,
    NoGpuError,
    StaleBufferError,
)
from preheat.gpu import Gpu, device, find_open
from preheat.model.config import Config
from tests.conftest import SAXPY
from tests.devices.support import PTX, saxpy_case
from tests.processes import expect_success, start_python


@pytest.fixture(autouse=True)
def own_devices(monkeypatch: pytest.MonkeyPatch, shared_builder: Builder) -> Iterator[None]:
    """Devices of the test alone, on the cache of the session."""
    monkeypatch.setattr(module, "default_builder", lambda _=None: shared_builder)
    monkeypatch.setattr(module, "_open", {})
    yield
    for each in list(module._open.values()):
        each.close()


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without an NVIDIA driver, wherever the test runs."""
    from cuda.bindings import driver as bindings

    def missing(_: int) -> Any:
        raise RuntimeError("libcuda.so.1 cannot be found")

    monkeypatch.setattr(bindings, "cuInit", missing)
    driver.library.cache_clear()
    monkeypatch.setattr(driver, "library", driver.library.__wrapped__)


def found_by(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a machine with a driver and `count` GPUs."""
    monkeypatch.setattr(cuda, "count", lambda: count)


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_the_error_says_what_was_searched_and_which_devices_exist() -> None:
    for which in (None, "cuda", "cuda:1", 0, 3):
        with pytest.raises(
            NoGpuError, match=r"no GPU: the NVIDIA driver \(libcuda.so.1\) was not found"
        ) as e:
            device(which)
        assert "preheat.device('emulator')" in str(e.value.hint)
        assert "PREHEAT_DEVICE=emulator" in str(e.value.hint)
        assert "device('auto')" in str(e.value.hint)
    assert module._open == {}


def test_a_gpu_that_is_not_there_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    found_by(1, monkeypatch)
    with pytest.raises(NoGpuError, match="there is no GPU 1: this process can see 1"):
        device("cuda:1")


@pytest.mark.usefixtures("no_gpu")
def test_auto_takes_the_emulator_without_a_gpu() -> None:
    gpu = device("auto")
    assert gpu.name == "emulator:0"
    assert device("auto") is gpu
    assert device("emulator") is gpu


def test_auto_takes_the_emulator_where_a_driver_sees_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    found_by(0, monkeypatch)
    assert device("auto").name == "emulator:0"


def test_auto_takes_the_gpu_where_one_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    found_by(1, monkeypatch)
    made = []

    def describe(index: int, settings: Any, config: Any) -> DeviceDescription:
        made.append((index, settings, config))
        return DeviceDescription(f"cuda:{index}", partial(EmulatorDevice, index))

    monkeypatch.setattr(cuda_factory, "describe", describe)
    device("auto")
    assert made == [(0, {}, Config.from_env())]


@pytest.mark.parametrize("named", ["emulator:3", " emulator:3 ", "emulator:3[sm_90]"])
def test_auto_takes_the_device_that_the_environment_names(
    named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found_by(1, monkeypatch)
    monkeypatch.setenv("PREHEAT_DEVICE", named)
    assert device("auto") is device("emulator:3")
    assert find_open(" auto ") is device("auto")
    assert device("auto", arch="sm_100").name == "emulator:3[sm_100]"


@pytest.mark.usefixtures("no_gpu")
def test_auto_takes_no_emulator_where_the_environment_names_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PREHEAT_DEVICE", "cuda:1")
    with pytest.raises(NoGpuError, match="no GPU") as caught:
        device("auto")
    hint = str(caught.value.hint)
    assert "PREHEAT_DEVICE=auto, in the place of cuda:1, uses the GPU if there is one" in hint
    assert "device('auto')" not in hint
    monkeypatch.setenv("PREHEAT_DEVICE", "auto")
    assert device("auto") is device() is device("emulator")


class _FakeFactory:
    """Opens emulators that go by the name of another kind of device."""

    def __init__(self) -> None:
        self.offered: list[tuple[int, dict[str, Any]]] = []

    def available(self) -> bool:
        return False

    def parse_setting(self, text: str) -> tuple[str, Any] | None:
        return ("color", text.removeprefix("color=")) if "color=" in text else parse_setting(text)

    def describe(self, index: int, settings: Mapping[str, Any], config: Config) -> DeviceDescription:
        del config
        self.offered.append((index, dict(settings)))
        return DeviceDescription(f"fake:{index}", partial(EmulatorDevice, index))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> _FakeFactory:
    """Return a third kind of device, which this test registers."""
    monkeypatch.setattr(registry, "_factories", dict(registry._factories))
    factory = _FakeFactory()
    registry.register("fake", factory)
    return factory


def test_a_device_that_is_registered_is_found_by_its_name(
    fake: _FakeFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = saxpy_case(device("fake:1", schedule=3))
    made.launch(3)
    made.check(3)
    assert device("fake:1[sm_100,patience=7]", patience=9) is made.gpu
    monkeypatch.setenv("PREHEAT_DEVICE", "fake")
    assert device() is device("fake:0") is not made.gpu
    named = {"arch": "sm_100", "patience": 9}
    assert fake.offered == [(1, {"schedule": 3}), (1, named), (0, {}), (0, {})]
    with pytest.raises(InputError, match="'fak' is not a device") as caught:
        device("fak")
    assert caught.value.hint == "did you mean 'fake'?"


def test_a_registered_device_has_settings_of_its_own(fake: _FakeFactory) -> None:
    device("fake:1[color=green]")
    assert fake.offered == [(1, {"color": "green"})]
    with pytest.raises(InputError, match=re.escape("'emulator[color=green]' is not a device")):
        device("emulator[color=green]")


@pytest.mark.usefixtures("no_gpu")
def test_auto_passes_over_a_registered_device_that_is_not_available(fake: _FakeFactory) -> None:
    assert device("auto").name == "emulator:0"
    assert fake.offered == []


def test_a_factory_is_imported_when_its_device_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_factories", dict(registry._factories))
    registry.register("late", "preheat.emulator.factory")
    registry.register("absent", "preheat_has_no_such_module")
    assert device("late:1") is device("emulator:1")
    with pytest.raises(ModuleNotFoundError, match="preheat_has_no_such_module"):
        device("absent")


@pytest.mark.parametrize("kind", ["", "auto", "cuda:0", "a b"])
def test_a_kind_of_device_is_a_plain_word(kind: str) -> None:
    with pytest.raises(InputError, match=f"{kind!r} cannot name a kind of device"):
        registry.register(kind, "preheat.emulator.factory")


@pytest.mark.gpu
def test_the_gpu_is_the_default_device() -> None:
    gpu = device()
    assert gpu.name == "cuda:0"
    assert device("auto") is device(0) is device("cuda:0") is gpu
    assert "NVIDIA" in gpu.model
    with pytest.raises(NoGpuError, match="there is no GPU 99: this process can see"):
        device(99)


def test_the_environment_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREHEAT_DEVICE", " emulator:2 ")
    assert device().name == "emulator:2"
    assert device("emulator:1").name == "emulator:1"  # An explicit argument has precedence.
    monkeypatch.setenv("PREHEAT_DEVICE", "emulatr")
    for which in (None, "auto"):
        with pytest.raises(InputError, match="PREHEAT_DEVICE='emulatr' is not a device") as caught:
            device(which)
        assert caught.value.hint == "did you mean 'emulator'?"
    monkeypatch.setenv("PREHEAT_DEVICE", "emulator")
    monkeypatch.setenv("PREHEAT_BLOCKING", "1")
    monkeypatch.setenv("PREHEAT_JIT", "on")
    gpu = device()
    assert (gpu.blocking, gpu.jit) == (True, True)
    with pytest.raises(InputError, match="emulator:0 is open already, with blocking=True"):
        device(blocking=False)
    assert device(blocking=True, jit=True) is gpu
    monkeypatch.setenv("PREHEAT_BLOCKING", "perhaps")
    with pytest.raises(ConfigError, match="PREHEAT_BLOCKING"):
        device()


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("emulatr", "did you mean 'emulator'?"),
        ("cud", "did you mean 'cuda'?"),
        ("Emulator", "did you mean 'emulator'?"),
        ("nvidia", "use cuda, cuda:1, emulator, emulator:1 or auto"),
        ("", "use cuda"),
        ("auto:1", "did you mean 'auto'?"),
        ("cuda:", None),
        ("cuda:-1", None),
        ("cuda:1:2", None),
        (True, None),
    ],
)
def test_a_name_that_is_no_device_is_refused(name: Any, hint: str | None) -> None:
    with pytest.raises(InputError, match=f"{name!r} is not a device") as caught:
        device(name)
    if hint is not None:
        assert hint in str(caught.value.hint)


def test_a_trailing_colon_is_no_index() -> None:
    with pytest.raises(InputError, match="'emulator:' is not a device"):
        device("emulator:")


def test_there_are_eight_emulators() -> None:
    assert {device(f"emulator:{n}").name for n in range(8)} == {f"emulator:{n}" for n in range(8)}
    with pytest.raises(InputError, match="there is no emulator:8") as caught:
        device("emulator:8")
    assert caught.value.hint == "they are numbered 0 to 7"


def test_the_emulator_has_the_architecture_it_was_given() -> None:
    assert str(device("emulator").arch) == "sm_90"
    other = device("emulator", arch="sm_100")
    assert str(other.arch) == "sm_100"
    assert device("emulator", arch="10.0") is other
    assert device("emulator") is not other
    assert device("emulator", arch="sm_90") is device("emulator")
    with pytest.raises(InputError, match="arch, patience and schedule belong to the emulator"):
        device("cuda", arch="sm_90")
    with pytest.raises(InputError, match="'sm_9' is not a GPU architecture"):
        device("emulator", arch="sm_9")


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({}, "emulator:2"),
        ({"arch": "9.0", "patience": 5_000_000}, "emulator:2"),
        ({"arch": "sm_100"}, "emulator:2[sm_100]"),
        ({"patience": 7, "arch": "sm_120f"}, "emulator:2[sm_120f,patience=7]"),
        ({"schedule": -3}, "emulator:2[schedule=-3]"),
        ({"sanitize": True, "arch": "sm_100"}, "emulator:2[sm_100,sanitize]"),
        ({"host_arrays": True, "sanitize": True}, "emulator:2[sanitize,host_arrays]"),
    ],
)
def test_an_emulator_has_a_name_of_its_own_that_finds_it_again(
    settings: dict[str, Any], name: str
) -> None:
    gpu, plain = device("emulator:2", **settings), device("emulator:2")
    assert gpu.name == name
    assert device(name) is device("emulator:2", **settings) is gpu
    assert (gpu is plain) == (name == "emulator:2")
    if gpu is plain:
        return
    far = gpu.zeros(3)
    with pytest.raises(InputError) as caught:
        plain.array(far)
    assert str(caught.value) == f"<Array float32[3] on {name}> is not on emulator:2"
    with pytest.raises(LaunchError) as refused:
        plain.kernel(PTX, "keep")[1, 1](far, 1, 2, 3.0)
    assert f"on {name}> is not on the device of the kernel, emulator:2" in str(refused.value)
    gpu.close()
    with pytest.raises(ContextLostError) as lost:
        gpu.empty(3)
    assert f"preheat.device({name!r})" in str(lost.value.hint)


def test_an_emulator_with_host_arrays_is_a_device_of_its_own() -> None:
    plain, permissive = device("emulator"), device("emulator", host_arrays=True)
    assert permissive.name == "emulator:0[host_arrays]"
    assert device("emulator[host_arrays]") is permissive is not plain
    assert device("emulator", host_arrays=False) is plain
    x = np.ones(4, "float32")
    source = 'extern "C" __global__ void twice(float* x) { x[threadIdx.x] *= 2; }'
    permissive.kernel(source, "twice")[1, 4](x)
    with pytest.raises(LaunchError, match="argument 0: ndarray is in host memory"):
        plain.kernel(source, "twice")[1, 4](x)
    assert x.tolist() == [2] * 4


@pytest.mark.parametrize(
    ("which", "settings", "message"),
    [
        ("cuda", {"host_arrays": True}, "host_arrays belongs to the emulator"),
        ("emulator", {"host_arrays": 1}, "host_arrays must be True or False, not 1"),
        ("emulator", {"host_arrays": True, "schedule": 3}, "an emulator with a schedule cannot use"),
        ("emulator[schedule=3,host_arrays]", {}, "an emulator with a schedule cannot use"),
    ],
)
def test_host_arrays_are_refused_where_no_kernel_could_use_them(
    which: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        device(which, **settings)


def test_auto_takes_host_arrays_where_it_opens_the_emulator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_factory, "available", lambda: False)
    assert device("auto", host_arrays=True).name == "emulator:0[host_arrays]"
    monkeypatch.setattr(cuda_factory, "available", lambda: True)
    with pytest.raises(InputError, match="host_arrays belongs to the emulator") as caught:
        device("auto", host_arrays=True)
    assert caught.value.hint == "pass copies on the device: gpu.array(x)"
    monkeypatch.setenv("PREHEAT_DEVICE", "emulator[host_arrays]")
    assert device("auto").name == device().name == "emulator:0[host_arrays]"


@pytest.mark.parametrize("patience", ["7", 0, 1.5, True])
def test_a_patience_that_is_none_is_refused(patience: Any) -> None:
    with pytest.raises(InputError, match=f"patience {patience!r} is not a number of basic blocks"):
        device("emulator", patience=patience)


@pytest.mark.parametrize("name", ["emulator[x]", "emulator:0[patience=x]", "emulator[sm_90", "auto:1"])
def test_a_name_with_settings_that_there_are_not_is_refused(name: str) -> None:
    with pytest.raises(InputError, match=f"{re.escape(repr(name))} is not a device"):
        device(name)


def test_the_same_device_is_given_again_until_it_is_closed() -> None:
    gpu = device("emulator")
    assert device("emulator:0") is gpu
    assert device(" emulator ") is gpu
    made = saxpy_case(gpu)
    gpu.close()
    again = device("emulator")
    assert again is not gpu
    with pytest.raises(ContextLostError, match="emulator:0: it was closed"):
        gpu.kernel(SAXPY, "saxpy")
    with pytest.raises(ContextLostError, match="emulator:0: it was closed"):
        made.launch()
    gpu.close()  # of a device that was replaced: nothing happens to the new one
    assert device("emulator") is again
    fresh = saxpy_case(again)
    fresh.launch(2)
    fresh.check(2)
    with device("emulator:1") as one:
        assert one.zeros(1).numpy()[0] == 0
    assert device("emulator:1") is not one


def test_memory_of_a_closed_device_is_stale_on_the_one_that_replaced_it() -> None:
    old = saxpy_case(device("emulator"))
    old.gpu.close()
    new = saxpy_case(device("emulator"))
    with pytest.raises(StaleBufferError, match=r"argument 1: .*: emulator:0: it was closed"):
        new.saxpy[5, 64](2.0, old.x, new.y, new.n)


def test_threads_that_open_a_device_together_get_one() -> None:
    got: list[Gpu] = []
    threads = [threading.Thread(target=lambda: got.append(device("emulator"))) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(gpu) for gpu in got}) == 1


def test_a_device_says_what_it_is() -> None:
    gpu = device("emulator:3")
    assert repr(gpu) == "<Gpu emulator:3: PTX emulator, sm_90>"
    assert gpu.limits.threads == 1024
    assert 0 < gpu.memory().free <= gpu.memory().total


@pytest.mark.parametrize(
    "before",
    [
        "",
        "preheat.Array",
        "preheat.Limits",
        "from preheat import Gpu, device",
        "import preheat.devices.base",
    ],
)
def test_preheat_device_is_the_function_after_any_import(before: str) -> None:
    """The function has the name of a package, which importing would put in its place."""
    code = f"import preheat\n{before}\nprint(preheat.device('emulator'))"
    assert expect_success(start_python(code)) == "<Gpu emulator:0: PTX emulator, sm_90>\n"


def test_a_reset_of_a_gpu_is_reported_to_its_other_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "call", lambda *_: None)
    monkeypatch.setattr(cuda.CudaDevice, "_open", lambda _: None)
    made = [cuda.CudaDevice.__new__(cuda.CudaDevice) for _ in range(3)]
    monkeypatch.setattr(cuda, "devices", weakref.WeakSet(made))
    reported = list[tuple[int, str]]()

    def tell(number: int, error: DeviceError) -> None:
        reported.append((number, str(error)))

    for number, one in enumerate(made):
        one.index = number // 2
        one.name = f"cuda:{number // 2}"
        one._device = None
        one.on_loss = partial(tell, number)
    made[0].reset()
    assert reported == [(1, "cuda:0 was reset by another user in this process")]
