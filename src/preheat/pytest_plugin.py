"""A plugin for pytest: kernels are tested on the emulator, on a GPU, or on both.

    def test_saxpy(preheat_device):
        kernel = preheat_device.kernel(SOURCE, "saxpy")
        ...

    $ pytest --preheat-device=emulator

Every pytest run of an environment that has preheat loads this module, so it imports almost nothing.
Imports are in functions: pytest reads an attribute of every global, which would load a `LazyModule`.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from preheat.tools.testing.run import ALL, AUTO, DRIVER, KINDS, SCHEDULES, Run, Target

TYPE_CHECKING = False  # Type checkers assume True.
if TYPE_CHECKING:
    from preheat.build.builder import Builder
    from preheat.gpu import Gpu

__all__ = ["preheat_device", "preheat_second_device"]

_OPTION = "--preheat-device"
_SETTING = "preheat_device"
_SCOPE = "preheat_device_scope"
_SCOPES = ("function", "class", "module", "package", "session")
_FIXTURE = "preheat_device"
_VARIABLE = "PREHEAT_DEVICE"
_PACKAGE = os.path.dirname(__file__) + os.sep
#: Names that need no check, so that the start of a run does not import the devices.
_COMMON = re.compile(r"auto|all|emulator(:[0-7])?|cuda(:\d+)?")
_SETTINGS = (
    "the settings of an emulator are sanitize, host_arrays, schedule=3, patience=100000 and an "
    "architecture"
)
#: The emulator for pytest that a hint about a setting of `preheat.device` has.
_FOR_PYTEST = {"patience=": "emulator[patience=50000000]", "host_arrays=": "emulator[host_arrays]"}
_RUN = pytest.StashKey[Run]()

# Options, and what the whole run needs


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that names the device, and the settings."""
    group = parser.getgroup("preheat", "kernels of preheat")
    group.addoption(
        _OPTION,
        action="append",
        metavar="DEVICE",
        help="device of the tests: emulator, cuda, cuda:1, auto (a GPU if there is one), or all (the "
        "emulator and, where there is one, a GPU). An emulator can have settings: "
        "'emulator[sm_100,sanitize]'. If the option is repeated, each test runs on each device. By "
        "default PREHEAT_DEVICE, or else the setting preheat_device, or else auto.",
    )
    group.addoption(
        DRIVER,
        action="store_true",
        help="run the tests with a CUDA driver that executes kernels on the CPU, so that tests of "
        "cuda.bindings, cuda.core, numba-cuda and Triton need no GPU. PREHEAT_EMULATE_ARCH, "
        "PREHEAT_EMULATE_DEVICES and PREHEAT_EMULATE_SANITIZE choose its devices.",
    )
    group.addoption(
        SCHEDULES,
        type=int,
        metavar="N",
        help=f"with {DRIVER}, repeat each test function in N orders of the work of streams",
    )
    parser.addini(_SETTING, f"devices of the tests, as for {_OPTION}", type="args")
    scopes = ", ".join(_SCOPES)
    parser.addini(_SCOPE, f"how long {_FIXTURE} stays open: {scopes}", default=_SCOPES[0])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> Generator[None]:
    """Start a run on the CPU driver again, before output is captured and CUDA is imported."""
    if early_config.known_args_namespace.preheat_driver:
        from preheat.tools.testing.driver import start_again

        start_again()
    return (yield)


def pytest_configure(config: pytest.Config) -> None:
    """Let `preheat.device()` return the device of the run, also in processes that tests start."""
    config.addinivalue_line("markers", "preheat_gpu: needs an NVIDIA GPU")
    config.addinivalue_line("markers", "preheat_emulator: needs the emulator, for example for faults")
    config.addinivalue_line("markers", "preheat_faults: has kernels with faults, on the CPU driver")
    if config.getoption(DRIVER):
        from preheat.tools.testing.driver import DriverRun

        config.pluginmanager.register(DriverRun(config), "preheat_driver")
    elif config.getoption(SCHEDULES) is not None:
        raise pytest.UsageError(f"{SCHEDULES} needs {DRIVER}")
    if (scope := config.getini(_SCOPE)) not in _SCOPES:
        raise pytest.UsageError(f"{_SCOPE}: {scope!r} is not one of {', '.join(_SCOPES)}")
    run = config.stash[_RUN] = _find_devices(config)
    if run.source == _VARIABLE:  # Perhaps no test of this run uses preheat.
        return
    for name in run.names:
        if (error := _check_name(name)) is not None:
            raise pytest.UsageError(f"{run.source}: {error}")
    if run.source != AUTO and run.names[0] != ALL:
        patch = pytest.MonkeyPatch()
        patch.setenv(_VARIABLE, run.names[0])
        config.add_cleanup(patch.undo)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Pass the devices to a worker of xdist. The environment of this process has only the first one."""
    run = node.config.stash[_RUN]
    node.workerinput["preheat"] = [run.names, run.source]


def _find_devices(config: pytest.Config) -> Run:
    """Return a run on the devices of the option, the environment or the settings."""
    if found := getattr(config, "workerinput", {}).get("preheat"):
        return Run(*found)
    if given := config.getoption(_OPTION):
        return Run(given, _OPTION)
    if named := os.environ.get(_VARIABLE):
        return Run([named], _VARIABLE)
    if settings := config.getini(_SETTING):
        return Run(settings, _SETTING)
    return Run([AUTO], AUTO)


def _check_name(name: str) -> str | None:
    """Return why a name is not that of a device, or None if it is one."""
    if _COMMON.fullmatch(name):
        return None
    from preheat.devices import registry
    from preheat.errors import PreheatError
    from preheat.model.config import Config
    from preheat.process.messages import did_you_mean

    try:
        registry.find(name, {}, Config.from_env())
    except PreheatError as error:
        has_settings = re.match(r"emulator(:\d+)?\[", name)
        hint = _SETTINGS if has_settings else did_you_mean(name, [ALL]) or error.hint
        return f"{error}" + (f"\nhint: {hint}" if hint else "")
    return None


# What the terminal shows


def pytest_report_header(config: pytest.Config) -> str | None:
    """Say on which devices the tests run, if something has named them."""
    run = config.stash[_RUN]
    if run.source == AUTO:
        return None
    return _device_line(run.names, "" if run.source == _OPTION else f" ({run.source})")


def pytest_report_collectionfinish(config: pytest.Config, items: list[pytest.Item]) -> str | None:
    """Say which device `auto` has chosen, if a test uses it."""
    if config.stash[_RUN].source != AUTO or config.get_verbosity() < 0 or not _uses_device(items):
        return None
    if _no_gpu():
        return _device_line(["emulator"], " (auto: no GPU)")
    return _device_line(["cuda"], " (auto)")


def _device_line(names: list[str], why: str) -> str:
    return f"preheat: device{'' if len(names) == 1 else 's'} {', '.join(names)}{why}"


def _uses_device(items: Iterable[pytest.Item]) -> bool:
    return any(_FIXTURE in getattr(item, "fixturenames", ()) for item in items)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Count the programs of the run, if a test uses a device."""
    if _uses_device(session.items):
        session.config.stash[_RUN].count_programs()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send the counts of a worker of xdist."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["preheat"] = session.config.stash[_RUN].results()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Add the counts of a worker of xdist. A worker that has crashed has none."""
    if results := getattr(node, "workeroutput", {}).get("preheat"):
        node.config.stash[_RUN].add(results)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many programs were found, and how many had to be compiled."""
    config = terminalreporter.config
    if config.get_verbosity() >= 0 and (line := config.stash[_RUN].summary()):
        terminalreporter.ensure_newline()
        terminalreporter.write_line(line)


# Which tests run


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """With several devices, run a test that uses the fixture on each of them."""
    targets = metafunc.config.stash[_RUN].targets
    if _FIXTURE not in metafunc.fixturenames or len(targets) == 1:
        return
    for mark in metafunc.definition.iter_markers("parametrize"):
        if _FIXTURE in str(mark.args[:1]):  # The test chooses its devices.
            return
    marks = {mark.name for mark in metafunc.definition.iter_markers()}
    if kinds := [kind for kind, marker in KINDS.items() if marker in marks]:
        fitting = [target for target in targets if target.kind in (*kinds, AUTO)]
        targets = fitting or targets[:1]  # This one is skipped.
    metafunc.parametrize(_FIXTURE, targets, ids=[target.id for target in targets], indirect=True)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test whose marker requires a device that this run does not have."""
    run = item.config.stash[_RUN]
    for kind, marker in KINDS.items():
        if not item.get_closest_marker(marker):
            continue
        reasons = [_cannot_run_on(kind, target) for target in _targets_of(item, run)]
        if all(reasons):
            # The report of a marker names the line of the test.
            needed = "a GPU" if kind == "cuda" else "the emulator"
            why = "; ".join(dict.fromkeys(filter(None, reasons)))
            item.add_marker(pytest.mark.skip(reason=f"needs {needed}: {why}"))


def _targets_of(item: pytest.Item, run: Run) -> list[Target]:
    """Return the devices that a test may use, after a check of a name from the environment."""
    if run.source == _VARIABLE and (error := _check_name(run.names[0])) is not None:
        pytest.fail(f"{_VARIABLE}: {error}", pytrace=False)
    chosen = getattr(getattr(item, "callspec", None), "params", {}).get(_FIXTURE)
    return [chosen] if isinstance(chosen, Target) else run.targets


def _cannot_run_on(kind: str, target: Target) -> str | None:
    """Return why a device is not one of this kind, or None if it is."""
    if target.kind == AUTO:
        missing = _no_gpu()
        return missing if kind == "cuda" else (None if missing else "this run uses a GPU")
    if target.kind != kind:
        return f"this run uses {target.name}"
    return None if target.required else _no_gpu()


def _no_gpu() -> str | None:
    """Return why there is no GPU, or None if there is one."""
    from preheat.devices.cuda.device import count
    from preheat.errors import NoGpuError

    try:
        return None if count() else "the driver lists none"
    except NoGpuError as error:
        return str(error).removeprefix("no GPU: ")


# The end of a test


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Wait for the work of a test. After a fault, let the next test find a device that works."""
    run = item.config.stash[_RUN]
    error = None
    try:
        with _wrap_examples(item, run):
            result = yield
        error = run.finish_work()
    finally:
        run.recover()
    if error is not None:
        pytest.fail(f"a kernel failed after the test function had ended: {error}", pytrace=False)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    """Let the next test find a device that works, also after a fault in a fixture."""
    try:
        return (yield)
    finally:
        item.config.stash[_RUN].recover()


@contextmanager
def _wrap_examples(item: pytest.Item, run: Run) -> Iterator[None]:
    """Let hypothesis run each example on a device that works, so that it can shrink a fault."""
    handle = getattr(getattr(item, "obj", None), "hypothesis", None)
    test: Callable[..., object] | None = getattr(handle, "inner_test", None)
    if handle is None or test is None or not run.open or inspect.iscoroutinefunction(test):
        yield
        return

    @functools.wraps(test)
    def example(*args: Any, **named: Any) -> object:
        __tracebackhide__ = True
        error = None
        try:
            result = test(*args, **named)
            error = run.finish_work()
        finally:
            run.recover()
        if error is not None:
            raise error
        return result

    handle.inner_test = example
    try:
        yield
    finally:
        handle.inner_test = test


# Reports


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> None:
    """Let the report of an error of preheat end at the line of the test or of the code under test."""
    errors = sys.modules.get("preheat.errors")
    if errors is None or call.excinfo is None or call.when != "call":
        return
    error = call.excinfo.value
    if not isinstance(error, errors.PreheatError):
        return
    for setting, name in _FOR_PYTEST.items():
        if setting in (error.hint or ""):
            error.add_note(f"hint: for pytest, {_OPTION}='{name}'")
    last = frame = error.__traceback__
    while frame is not None:
        if not frame.tb_frame.f_code.co_filename.startswith(_PACKAGE):
            last = frame
        frame = frame.tb_next
    if last is not None and os.environ.get("PREHEAT_TRACEBACK", "").lower() != "full":
        last.tb_next = None


# The fixtures


@pytest.fixture(scope="session")
def _preheat_builder() -> Builder:
    """Return the builder of the process, opened before a test changes the home directory."""
    from preheat.build.default import default_builder

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
    run = request.config.stash[_RUN]
    target = getattr(request, "param", None) or run.targets[0]
    if not isinstance(target, Target):  # The test has its own parameters for this fixture.
        target = Target(str(target))
    if not target.required and (why := _no_gpu()):
        pytest.skip(f"no GPU: {why}")
    with _open(run, target.name, _preheat_contexts) as gpu, pytest.MonkeyPatch.context() as patch:
        patch.setenv(_VARIABLE, gpu.name)
        yield gpu


@pytest.fixture(scope=_scope)
def preheat_second_device(
    request: pytest.FixtureRequest, preheat_device: Gpu, _preheat_contexts: dict[str, object]
) -> Iterator[Gpu]:
    """Yield the device after `preheat_device`, of the same kind and with the same settings.

    A test that uses it is skipped on a machine with one GPU.
    """
    kind, number, settings = re.split(r":(\d+)", preheat_device.name, maxsplit=1)
    name = f"{kind}:{int(number) + 1}{settings}"
    with _open(request.config.stash[_RUN], name, _preheat_contexts, skip=True) as gpu:
        yield gpu


@contextmanager
def _open(run: Run, name: str, contexts: dict[str, object], *, skip: bool = False) -> Generator[Gpu]:
    """Open a device for a fixture, and close it unless it was open before."""
    from preheat.errors import NoGpuError, PreheatError
    from preheat.gpu import device, find_open

    failed: PreheatError | None = None
    try:
        shared = find_open(name)
        gpu = shared or device(name)
    except PreheatError as error:
        failed = error  # Python would show it once more below an exception that is raised here.
    if failed is not None:
        if skip and isinstance(failed, NoGpuError):
            pytest.skip(f"needs a second GPU: {failed}")
        hint = f"\nhint: {failed.hint}" if failed.hint else ""
        pytest.fail(f"the device {name} cannot be opened: {failed}{hint}", pytrace=False)
    if gpu.name.startswith("cuda:") and gpu.name not in contexts:
        contexts[gpu.name] = _open_again(gpu.name)
    run.count_programs()
    run.used[gpu.name] = None
    run.open.append(gpu)
    try:
        yield gpu
        _finish(gpu)
    finally:
        run.open.remove(gpu)
        if shared is None:
            gpu.close()


def _open_again(name: str) -> object:
    from preheat.devices import registry
    from preheat.model.config import Config

    return registry.find(name, {}, Config.from_env()).open()


def _finish(gpu: Gpu) -> None:
    """Wait for the work of the fixtures of a test and raise its errors."""
    if gpu._context.lost is None:
        gpu.synchronize()
