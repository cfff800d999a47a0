"""Fixtures for all tests. No test uses the user's own cache, and a fault event fails its test."""

from __future__ import annotations

import gc
import itertools
import os
import re
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from preheat import native
from preheat.ahead import check
from preheat.build import builder as builder_module
from preheat.build.builder import Builder
from preheat.gpu import Gpu
from preheat.model.config import VARIABLES, Config
from preheat.model.events import Events
from preheat.toolchain import locate
from preheat.toolchain.binaries.ptx_section import is_executed
from preheat.toolchain.pool import WorkerPool
from tests.faulty import FaultyDevice, FaultyGpu
from tests.processes import TIMEOUT_SECONDS, kill_started_processes

#: Whether the long tests run, which `make torture` does.
LONG = os.environ.get("PREHEAT_TORTURE") == "1"
#: Variables by which pytest and rich know that they run in CI, where they print other output.
_OF_CI = ("CI", "BUILD_NUMBER", "GITHUB_ACTIONS")

# The time of an example depends on the load of the machine, so that it has no deadline.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")

# A shell ignores Ctrl-C for background processes, nohup ignores SIGHUP, and the processes of tests
# inherit that. The tests need the default handlers.
for _signal, _default in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGQUIT, signal.SIG_DFL),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(_signal) is signal.SIG_IGN:
        signal.signal(_signal, _default)

SAXPY = """\
extern "C" __global__ void saxpy(float a, const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = a * x[i] + y[i];
}
"""


_numbers = itertools.count()
_failed = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note which tests fail."""
    report = yield
    item.stash[_failed] = item.stash.get(_failed, False) or report.failed
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Count the skipped tests by reason: a line for each test would hide the failures below it."""
    reports = terminalreporter.getreports("skipped")
    reasons = Counter(_skip_reason(report) for report in reports if hasattr(report, "longrepr"))
    if reasons:
        terminalreporter.section("skipped tests by reason")
    for reason, number in reasons.most_common():
        terminalreporter.write_line(f"{number:6}  {reason}")


def _skip_reason(report: Any) -> str:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return " ".join(reason.removeprefix("Skipped: ").split())


@pytest.fixture
def tmp_path(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """Yield a directory of the test's own, which is kept if the test fails.

    To number a directory, the fixture of pytest lists those of all earlier tests, and keeps them. This
    one counts and removes, so that the time of a test does not depend on the tests before it.
    """
    name = re.sub(r"\W", "_", request.node.name)[:30]
    path = tmp_path_factory.getbasetemp() / f"{name}-{next(_numbers)}"
    path.mkdir(mode=0o700)
    yield path
    if not request.node.stash.get(_failed, False):
        # Without root, a test may leave a directory that cannot be emptied. The run's directory is
        # removed by a later run, which changes permissions.
        shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def library_caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the caches of other libraries during the whole run: they look for the directory once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUPY_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "cupy"))
        yield


@pytest.fixture(autouse=True)
def clean_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting of the machine reaches a test; the home directory is the test's own.

    The patches of a test are undone before its directory is removed.
    """
    for variable in VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    for name in ("XDG_CACHE_HOME", "PYTEST_ADDOPTS", *_OF_CI):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the time limits of optional searches, so that a busy machine does not end them early."""
    monkeypatch.setattr(builder_module, "_SEARCH", TIMEOUT_SECONDS)
    monkeypatch.setattr(check, "_EXPLAIN_SECONDS", TIMEOUT_SECONDS)


_located: dict[str, locate.Located] = {}


@pytest.fixture(autouse=True)
def compilers_located_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Search for the compilers once in this process, and not for the empty cache of each test.

    A test file that tests the search replaces this fixture. Processes that tests start search as usual.
    """

    def search(workers: WorkerPool) -> locate.Located:
        surroundings = locate._surroundings()
        if surroundings not in _located:
            _located[surroundings] = real(workers)
        return _located[surroundings]

    real = locate._search
    monkeypatch.setattr(locate, "_search", search)


@pytest.fixture(autouse=True)
def no_process_left() -> Iterator[None]:
    """No process outlives the test that started it, not even one that fails."""
    yield
    kill_started_processes()


class Recorder:
    """A sink that keeps every event and fails the test at a fault, unless `forgive` is set."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, dict[str, Any]]] = []
        self.forgive = False

    def __call__(self, name: str, fields: Mapping[str, Any]) -> None:
        self.seen.append((name, dict(fields)))
        if name in ("fault", "damaged", "refused", "untrusted", "dropped") and not self.forgive:
            pytest.fail(f"{name}: {dict(fields)}")

    def named(self, name: str) -> list[dict[str, Any]]:
        """Return the fields of every event called `name`, oldest first."""
        return [fields for seen, fields in self.seen if seen == name]


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def events(recorder: Recorder) -> Events:
    return Events(recorder)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(cache_dirs=(tmp_path / "cache",), lock_dir=tmp_path / "locks")


@pytest.fixture
def open_builder(config: Config, events: Events) -> Iterator[Callable[..., Builder]]:
    """Opens builders on the test's own cache, as separate processes would, and closes them."""
    opened: list[Builder] = []

    def open_one(config: Config = config, events: Events = events) -> Builder:
        opened.append(Builder.open(config, events=events))
        return opened[-1]

    yield open_one
    for builder in opened:
        builder.close()


@pytest.fixture
def builder(open_builder: Callable[..., Builder]) -> Builder:
    return open_builder()


@pytest.fixture(scope="session", autouse=True)
def one_context(request: pytest.FixtureRequest) -> None:
    """Keep the context of a GPU for the whole test session, not only for one test's device.

    Nor does a test end it: what other libraries loaded into it would be gone, and they crash at exit.
    """
    if any(item.get_closest_marker("gpu") for item in request.session.items) and not _no_gpu():
        from preheat.devices.cuda.device import CudaDevice
        from preheat.devices.cuda.driver import library

        _kept.append(CudaDevice(0))
        library().cuDevicePrimaryCtxReset = _refuse


_kept: list[object] = []


@pytest.fixture(autouse=True)
def schedule_of_the_test() -> None:
    """On the CPU driver, let the order of deferred work not depend on the tests before this one."""
    if is_executed():
        from preheat.driver.bootstrap import driver_of_this_process

        driver = driver_of_this_process()
        if driver is not None:
            driver.restart_schedule()


def _refuse(_: object) -> None:
    pytest.fail("a GPU is reset in a process of its own: it ends for everybody in the process")


@pytest.fixture(scope="session", autouse=True)
def heap_as_usual_at_exit() -> Iterator[None]:
    """Let the last collections of the session see every object again."""
    yield
    gc.unfreeze()


@pytest.fixture(scope="module", autouse=True)
def frozen_heap(heap_as_usual_at_exit: None) -> None:
    """Keep what exists before the tests of a file out of every collection.

    The collected tests and the imported modules are most objects of the process. They make a full
    collection take a tenth of a second, and hundreds of tests collect.
    """
    del heap_as_usual_at_exit
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def shared_config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Return the settings of a cache that all tests of the run share."""
    root = tmp_path_factory.getbasetemp()
    # A worker of xdist has a directory inside that of the run.
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    root = root / "shared"
    return Config(cache_dirs=(root / "cache",), lock_dir=root / "locks")


@pytest.fixture(scope="session")
def shared_builder(shared_config: Config) -> Iterator[Builder]:
    """Yield a builder for all tests that only need kernels, so that each kernel is compiled once."""
    builder = Builder.open(shared_config, events=Events(Recorder()))
    yield builder
    builder.close()


@pytest.fixture
def heard_builder(shared_config: Config, open_builder: Callable[..., Builder]) -> Builder:
    """Return a builder on the shared cache whose events the test's own recorder sees."""
    return open_builder(shared_config)


#: For tests of what only the native core does: it skips checks that nothing has made necessary.
needs_native_core = pytest.mark.skipif(native.core is None, reason=f"no native core: {native.reason}")


@pytest.fixture
def without_native_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets kernels and graphs that the test makes be launched by Python code."""
    monkeypatch.setattr(native, "core", None)


@pytest.fixture
def open_device(shared_builder: Builder) -> Iterator[Callable[..., Gpu]]:
    """Opens devices of the test's own, by name, and closes them."""
    opened: list[Gpu] = []

    def open_one(
        name: str,
        *,
        builder: Builder = shared_builder,
        arch: str = "sm_90",
        schedule: int | None = None,
        host_arrays: bool = False,
        **more: Any,
    ) -> Gpu:
        kind, _, index = name.partition(":")
        made: Any
        if kind == "emulator":
            from preheat.emulator.device import EmulatorDevice

            made = EmulatorDevice(int(index or 0), arch, schedule=schedule, host_arrays=host_arrays)
        else:
            from preheat.devices.cuda.device import CudaDevice

            made = CudaDevice(int(index or 0))
        opened.append(Gpu(made, builder, **more))
        return opened[-1]

    yield open_one
    for gpu in opened:
        gpu.close()


@pytest.fixture(params=["emulator", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, open_device: Callable[..., Gpu]) -> Gpu:
    """Return each kind of device."""
    return open_device(request.param)


@pytest.fixture
def permissive(open_device: Callable[..., Gpu]) -> Gpu:
    """Return an emulator that uses arrays of the host, which stand for tensors of other libraries."""
    return open_device("emulator", host_arrays=True)


@pytest.fixture
def open_faulty(shared_builder: Builder) -> Iterator[Callable[..., FaultyGpu]]:
    """Open devices whose interface can fail, by kind, and close them afterwards."""
    opened: list[Gpu] = []

    def open_one(kind: str, builder: Builder = shared_builder, **more: Any) -> FaultyGpu:
        if kind == "emulator":
            from preheat.emulator.device import EmulatorDevice

            seam = FaultyDevice(EmulatorDevice(0, "sm_90"))
        else:
            from preheat.devices.cuda.device import CudaDevice

            seam = FaultyDevice(CudaDevice(0))
        whole: Any = seam
        opened.append(Gpu(whole, builder, **more))
        return FaultyGpu(opened[-1], seam)

    yield open_one
    for gpu in opened:
        gpu.close()


@pytest.fixture(params=["emulator", pytest.param("cuda", marks=pytest.mark.gpu)])
def kind(request: pytest.FixtureRequest) -> str:
    """Return each kind of device."""
    return str(request.param)


@pytest.fixture
def faulty(kind: str, open_faulty: Callable[..., FaultyGpu]) -> FaultyGpu:
    """Return each kind of device, with an interface that can fail."""
    return open_faulty(kind)


def _no_gpu() -> str | None:
    """Why GPU tests cannot run here, or None when they can."""
    from cuda.bindings import driver

    try:
        (code,) = driver.cuInit(0)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None if code == driver.CUresult.CUDA_SUCCESS else code.name


#: The files whose tests take longest, which run first: at the end of a run no core waits for one.
LONGEST_FILES = [
    "test_stories.py",
    "kernels/test_gemm.py",
    "test_guide_stories.py",
    "corpus/test_corpus.py",
    "kernels/test_rms_norm.py",
    "tools/test_pytest_plugin.py",
    "kernels/test_widths.py",
    "kernels/test_archs.py",
    "kernels/test_repeated_calls.py",
    "test_wheel.py",
    "lora/test_plan.py",
    "tools/test_foreign_adapters.py",
    "tools/test_cli.py",
    "audit/test_seal.py",
    "test_house.py",
    "tools/test_demo.py",
    "build/test_parallel.py",
    "toolchain/test_worker.py",
    "store/test_crash.py",
    "ahead/test_recorder.py",
    "test_docstrings.py",
    "driver/test_processes.py",
    "emulator/test_instructions.py",
    "tools/test_emulate_command.py",
    "tools/test_pytest_driver.py",
    "audit/test_compiler_libraries.py",
    "linking/test_link.py",
    "devices/test_native.py",
    "devices/test_native_memory.py",
    "toolchain/test_headers.py",
    "kernels/test_op.py",
    "store/remote/test_hosts.py",
    "torture/test_remote_faults.py",
]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage meanwhile: twenty thousand tests are made, and all of them are kept."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move the longest files to the front. Skip long tests, and those without their GPU or driver."""
    place = {Path(__file__).parent / name: number for number, name in enumerate(LONGEST_FILES)}
    items.sort(key=lambda item: place.get(item.path, len(place)))
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu and (why := _no_gpu()):
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason=f"no NVIDIA GPU: {why}"))
    cpu_driver = is_executed()
    for item in items:
        # What takes long is to compile for the emulator and to execute there.
        if item.get_closest_marker("long") and not LONG and not item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="make torture runs it"))
        if item.get_closest_marker("cpu_driver") and not cpu_driver:
            item.add_marker(pytest.mark.skip(reason="this process has no CPU driver"))
        if cpu_driver and (marker := item.get_closest_marker("hardware")):
            item.add_marker(pytest.mark.skip(reason=f"not on the CPU driver: {marker.args[0]}"))
