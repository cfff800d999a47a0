"""The part of the plugin for pytest that lets a run use the CPU driver: `--preheat-driver`.

A driver has to be there when a process starts, so that the run starts its process again with it.
Processes that the run starts, such as workers of xdist, inherit it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from typing import TYPE_CHECKING

import pytest

from preheat.driver.library import driver_environment, require_library
from preheat.driver.settings import DriverSettings, gpu_refusal
from preheat.errors import PreheatError
from preheat.model.config import environ
from preheat.toolchain.binaries.ptx_section import is_executed
from preheat.tools.testing.run import DRIVER, SCHEDULES

if TYPE_CHECKING:
    from preheat.driver.driver import Driver

__all__ = ["DriverRun", "start_again"]

_SEED = "preheat_schedule"
#: A part of the program of a worker of xdist on another machine, which cannot be started again.
_EXECNET = "exec(eval(sys.stdin.readline()))"
_VARIABLE = "PREHEAT_EMULATE_SCHEDULE"


def start_again() -> None:
    """Start this process again with the CPU driver, unless it has it."""
    try:
        why = gpu_refusal(DriverSettings.from_env(environ()))
        library = require_library()
    except PreheatError as error:
        hint = f"\nhint: {error.hint}" if error.hint else ""
        raise pytest.UsageError(f"{DRIVER}: {error}{hint}") from None
    if why is not None:
        raise pytest.UsageError(f"{DRIVER}: {why}")
    if is_executed():
        return
    preloads = environ().get("LD_PRELOAD", "").split(":")
    if str(library) in preloads or _EXECNET in sys.orig_argv[-1]:
        raise pytest.UsageError(f"{DRIVER}: this process did not load {library}")
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], driver_environment(environ()))


class DriverRun:
    """Hooks of a run on the CPU driver: a fault belongs to its test, and the next test finds none."""

    def __init__(self, config: pytest.Config) -> None:
        self._settings = DriverSettings.from_env(environ())
        count: int | None = config.getoption(SCHEDULES)
        first = self._settings.schedule
        if count is not None and count < 1:
            raise pytest.UsageError(f"{SCHEDULES}: {count} is no number of schedules")
        if count is not None and first is None:
            raise pytest.UsageError(f"{SCHEDULES}: there is one order of work with {_VARIABLE}=off")
        self._seeds = range(first or 0, (first or 0) + (count or 1))

    def pytest_report_header(self) -> str:
        """Say what the tests run on."""
        settings = self._settings
        devices = "1 device" if settings.devices == 1 else f"{settings.devices} devices"
        first, last = self._seeds[0], self._seeds[-1]
        order = "no schedule" if settings.schedule is None else f"schedule {first}"
        order = order if first == last else f"schedules {first} to {last}"
        return f"preheat: CPU driver with {devices} of {settings.arch}, {order}"

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Repeat each test function for each schedule."""
        if len(self._seeds) > 1:
            metafunc.fixturenames.append(_SEED)
            metafunc.parametrize(_SEED, self._seeds, ids=[f"schedule{seed}" for seed in self._seeds])

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, None, None]:
        """Let the order of work depend on the test alone."""
        if self._settings.schedule is not None:
            callspec = getattr(item, "callspec", None)
            seed = self._seeds[0] if callspec is None else callspec.params.get(_SEED, self._seeds[0])
            os.environ[_VARIABLE] = str(seed)  # The first call of the test may start the driver.
            if (driver := _driver()) is not None:
                driver.restart_schedule(seed)
        yield from _phase(item)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, None, None]:
        """Let the faults of a test fail it."""
        yield from _phase(item)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, None, None]:
        """Let the faults of its fixtures fail it as well."""
        yield from _phase(item)


def _phase(item: pytest.Item) -> Generator[None, None, None]:
    """Run a part of a test. A test that has not noticed a fault fails."""
    try:
        yield
    finally:
        driver = _driver()
        faults = driver.recover() if driver is not None else []
    if faults and item.get_closest_marker("preheat_faults") is None:
        text = "\n".join(map(str, faults))
        pytest.fail(f"a kernel of this test has a fault: {text}", pytrace=False)


def _driver() -> Driver | None:
    """Return the driver of this process, or None if no test has called it yet."""
    bootstrap = sys.modules.get("preheat.driver.bootstrap")
    found: Driver | None = bootstrap.driver_of_this_process() if bootstrap is not None else None
    return found
