"""The settings of the CPU driver, and when it starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from preheat.driver import settings as settings_module
from preheat.driver.calls import CallError
from preheat.driver.driver import Driver
from preheat.driver.library import LIBRARY, driver_environment
from preheat.driver.settings import DriverSettings
from preheat.errors import ConfigError


class Threads:
    """The state of one thread, without the shim."""

    def __init__(self) -> None:
        self.initialized = False

    def new_context(self) -> int:
        return 16

    def set_alive(self, context: int, alive: bool) -> None:
        del context, alive

    def current(self) -> int:
        return 0

    def make_current(self, context: int) -> None:
        del context

    def pop_current(self) -> None:
        return None

    def capture_mode(self) -> int:
        return 0

    def set_initialized(self) -> None:
        self.initialized = True


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Lets the machine have the driver of a GPU, or none."""

    def has(gpu: bool) -> None:
        file = tmp_path / "version"
        if gpu:
            file.touch()
        monkeypatch.setattr(settings_module, "_GPU_DRIVER", file)

    return has


def test_settings_come_from_variables() -> None:
    env = {
        "PREHEAT_EMULATE_ARCH": "sm_80",
        "PREHEAT_EMULATE_DEVICES": "2",
        "PREHEAT_EMULATE_SCHEDULE": "7",
    }
    found = DriverSettings.from_env(env)
    assert (str(found.arch), found.devices, found.schedule, found.sanitize) == ("sm_80", 2, 7, False)
    assert DriverSettings.from_env({"PREHEAT_EMULATE_SCHEDULE": "off"}).schedule is None
    assert DriverSettings.from_env({}).schedule == 0
    assert str(DriverSettings.from_env({"PREHEAT_EMULATE_ARCH": "sm_90a"}).arch) == "sm_90"
    for name, wrong in (("DEVICES", "many"), ("ARCH", "hopper"), ("SCHEDULE", "-1")):
        with pytest.raises(ConfigError, match=f"PREHEAT_EMULATE_{name}"):
            DriverSettings.from_env({f"PREHEAT_EMULATE_{name}": wrong})


def test_it_starts_where_there_is_no_gpu(machine: Callable[[bool], None]) -> None:
    machine(False)
    made = Driver(DriverSettings(devices=2), Threads())
    made.initialize()
    assert len(made.gpus) == 2


def test_it_does_not_take_the_place_of_a_gpu_unless_it_is_told_to(
    machine: Callable[[bool], None], capsys: pytest.CaptureFixture[str]
) -> None:
    machine(True)
    made = Driver(DriverSettings(), Threads())
    with pytest.raises(CallError) as caught:
        made.initialize()
    assert caught.value.status == 100
    assert "PREHEAT_EMULATE_BESIDE_GPU=1" in capsys.readouterr().err
    Driver(DriverSettings.from_env({"PREHEAT_EMULATE_BESIDE_GPU": "1"}), Threads()).initialize()


@pytest.mark.skipif(not LIBRARY.is_file(), reason="the CPU driver was not built")
def test_the_environment_of_a_program_keeps_what_else_is_preloaded() -> None:
    env = driver_environment({"LD_PRELOAD": "/a.so", "HOME": "/root"}, schedule=3, devices=2)
    assert env["LD_PRELOAD"].split(":") == ["/a.so", str(LIBRARY)]
    assert (env["PREHEAT_EMULATE_SCHEDULE"], env["PREHEAT_EMULATE_DEVICES"]) == ("3", "2")
    assert driver_environment(env)["LD_PRELOAD"] == env["LD_PRELOAD"]
    assert env["TRITON_LIBCUDA_PATH"] == str(LIBRARY.parent)  # Its host code is linked to the driver.


@pytest.mark.skipif(not LIBRARY.is_file(), reason="the CPU driver was not built")
def test_caches_on_the_cpu_driver_are_beside_those_of_a_gpu() -> None:
    own = driver_environment({"HOME": "/home/me", "TRITON_CACHE_DIR": "/fast/triton"})
    assert own["TRITON_CACHE_DIR"] == "/fast/triton-on-cpu-driver"
    assert own["PREHEAT_CACHE_DIR"] == "/home/me/.cache/preheat-on-cpu-driver"
    assert own["CUPY_CACHE_DIR"] == "/home/me/.cupy/kernel_cache-on-cpu-driver"
    assert driver_environment(own) == own  # Commands nest.
    moved = driver_environment({"HOME": "/home/me", "XDG_CACHE_HOME": "/caches"})
    assert moved["PREHEAT_CACHE_DIR"] == "/caches/preheat-on-cpu-driver"
