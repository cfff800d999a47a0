"""A plugin for pytest: kernels are tested on the emulator, on a GPU, or on both.

    def test_saxpy(preheat_device):
        kernel = preheat_device.kernel(SOURCE, "saxpy")
        ...

    $ pytest --preheat-device=emulator

Every pytest run of an environment that has preheat loads this module, so it imports almost nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

TYPE_CHECKING = False  # Type checkers assume True.
if TYPE_CHECKING:
    from preheat.build.builder import Builder
    from preheat.gpu import Gpu

__all__ = ["preheat_device"]

_OPTION = "--preheat-device"
_SCOPE = "preheat_device_scope"
_FIXTURE = "preheat_device"
_VARIABLE = "PREHEAT_DEVICE"
_PACKAGE = os.path.dirname(__file__) + os.sep
#: The kinds of devices of a run with `all`, and the marker of tests that run on one of them alone.
_KINDS = {"emulator": "preheat_emulator", "cuda": "preheat_gpu"}

# Options, and what the whole run needs


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that names the device, and the setting that says how long it is kept."""
    group = parser.getgroup("preheat", "kernels of preheat")
    group.addoption(
        _OPTION,
        metavar="DEVICE",
        help="device of the tests: emulator, cuda, cuda:1, auto (a GPU if there is one), or all (the "
        "emulator and, where there is one, a GPU); by default PREHEAT_DEVICE, or else auto",
    )
    scopes = "function, class, module, package or session"
    parser.addini(_SCOPE, f"how long {_FIXTURE} stays open: {scopes}", default="function")


def pytest_configure(config: pytest.Config) -> None:
    """Let `preheat.device()` return the device of the option, also in processes that tests start."""
    config.addinivalue_line("markers", "preheat_gpu: needs an NVIDIA GPU")
    config.addinivalue_line("markers", "preheat_emulator: needs the emulator, for example for faults")
    which = config.getoption(_OPTION)
    if which is not None and which != "all":
        patch = pytest.MonkeyPatch()
        patch.setenv(_VARIABLE, which)
        config.add_cleanup(patch.undo)


def pytest_report_header(config: pytest.Config) -> str | None:
    """Say on which device the tests run, if the option names one."""
    which = config.getoption(_OPTION)
    return None if which is None else f"preheat: device {which}"


def _wanted(config: pytest.Config) -> str:
    """Return the device that the option or the environment names."""
    return str(config.getoption(_OPTION) or os.environ.get(_VARIABLE) or "auto")


# Which tests run


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """With `all`, run a test that uses the fixture on every kind of device."""
    if _FIXTURE in metafunc.fixturenames and _wanted(metafunc.config) == "all":
        marks = {mark.name for mark in metafunc.definition.iter_markers()}
        marked = [kind for kind, marker in _KINDS.items() if marker in marks]
        metafunc.parametrize(_FIXTURE, marked or [*_KINDS], indirect=True)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test whose marker asks for another device than that of this run."""
    which = _wanted(item.config)
    for kind, marker in _KINDS.items():
        if item.get_closest_marker(marker) and (why := _cannot_run_on(kind, which)):
            # The report of a marker names the line of the test.
            needed = "a GPU" if kind == "cuda" else "the emulator"
            item.add_marker(pytest.mark.skip(reason=f"needs {needed}: {why}"))


def _cannot_run_on(kind: str, which: str) -> str | None:
    """Return why a run with the device `which` has no device of this kind, or None if it has one."""
    if which == "all":
        return _no_gpu() if kind == "cuda" else None
    if which == "auto":
        missing = _no_gpu()
        return missing if kind == "cuda" else (None if missing else "this run uses a GPU")
    return None if which.startswith(kind) else f"this run uses {which}"


def _no_gpu() -> str | None:
    """Return why there is no GPU, or None if there is one."""
    from preheat.devices.cuda.device import count
    from preheat.errors import NoGpuError

    try:
        return None if count() else "the driver lists none"
    except NoGpuError as error:
        return str(error).removeprefix("no GPU: ")


# Reports


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> None:
    """Let the report of an error of preheat end at the line of the test or of the code under test."""
    errors = sys.modules.get("preheat.errors")
    if errors is None or call.excinfo is None or call.when != "call":
        return
    if not isinstance(call.excinfo.value, errors.PreheatError):
        return
    last = frame = call.excinfo.value.__traceback__
    while frame is not None:
        if not frame.tb_frame.f_code.co_filename.startswith(_PACKAGE):
            last = frame
        frame = frame.tb_next
    if last is not None and os.environ.get("PREHEAT_TRACEBACK", "").lower() != "full":
        last.tb_next = None


# The fixture


@pytest.fixture(scope="session")
def _preheat_builder() -> Builder:
    """Return the builder of the process, opened before a test changes the home directory."""
    from preheat.default import default_builder

    return default_builder()


@pytest.fixture(scope="session")
def _preheat_contexts() -> dict[str, object]:
    """Return the GPUs that stay open for the whole run: to create a context takes long."""
    return {}


def _scope(fixture_name: str, config: pytest.Config) -> Any:
    del fixture_name
    return config.getini(_SCOPE)


@pytest.fixture(scope=_scope)
def preheat_device(
    request: pytest.FixtureRequest, _preheat_builder: Builder, _preheat_contexts: dict[str, object]
) -> Iterator[Gpu]:
    """Yield a new device, which `preheat.device()` returns as well while the test runs.

    If the code under test has opened the device before, for example when it was imported, it is that
    one, and it stays open. Work that is still running when the test ends is waited for, so that its
    errors belong to this test.
    """
    which = getattr(request, "param", None) or _wanted(request.config)
    if which == "cuda" and _wanted(request.config) == "all" and (why := _no_gpu()):
        pytest.skip(f"no GPU: {why}")
    from preheat.errors import PreheatError
    from preheat.gpu import device, find_open

    try:
        shared = find_open(which)
        gpu = shared or device(which)
    except PreheatError as error:
        pytest.fail(f"the device {which} cannot be opened: {error}", pytrace=False)
    if gpu.name.startswith("cuda:") and gpu.name not in _preheat_contexts:
        _preheat_contexts[gpu.name] = _open_again(gpu.name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(_VARIABLE, gpu.name)
        yield gpu
    _finish(gpu, close=shared is None)


def _open_again(name: str) -> object:
    from preheat.config import Config
    from preheat.devices import registry

    return registry.find(name, {}, Config.from_env()).open()


def _finish(gpu: Gpu, *, close: bool) -> None:
    """Wait for the work of a test and raise its errors, unless the test has seen one already."""
    context = gpu._context
    try:
        if context.lost is None:
            gpu.synchronize()
    finally:
        if close:
            gpu.close()
        elif context.lost is not None and context.recovers:
            gpu.reset()
