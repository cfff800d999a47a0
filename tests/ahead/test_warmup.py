"""Warm-ups of programs and bundles: nothing remains to be compiled or loaded; failures are reported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from preheat.ahead.bake import bake as bake_all
from preheat.ahead.manifest import ManifestProgram
from preheat.ahead.report import WarmReport
from preheat.build.builder import Builder
from preheat.build.code import Code
from preheat.build.seal import sealed
from preheat.errors import (
    BundleError,
    CaptureError,
    CompileError,
    ContextLostError,
    DriverError,
    InputError,
    InvalidCodeError,
    OutOfMemoryError,
    SealedError,
    ToolchainNotFoundError,
    UnknownEntryError,
    WarmError,
)
from preheat.gpu import Gpu
from preheat.model.artifact import Artifact
from preheat.model.config import Config
from preheat.model.events import Events
from preheat.model.program import Program
from preheat.store.bundle import Bundle, write
from tests.ahead.warmup_support import (
    ONE,
    THREE,
    TWO,
    VERBS,
    WRONG,
    Opener,
    failures,
    manifest,
    program,
)
from tests.conftest import Recorder
from tests.driver_errors import out_of_memory
from tests.faulty import FaultyGpu
from tests.graph.support import axpy_case
from tests.processes import run_in_fork


@pytest.fixture
def shared_builder(heard_builder: Builder) -> Builder:
    """Return a builder of the test's own: it may mount bundles, which later tests must not meet."""
    return heard_builder


# Programs


def test_after_a_manifest_nothing_is_compiled_loaded_or_resolved(
    kind: str, open_faulty: Opener, builder: Builder, recorder: Recorder
) -> None:
    faulty = open_faulty(kind, builder)
    two = ManifestProgram(program(TWO, names=("many<int>",)), entries=("two", "many<int>"))
    report = faulty.gpu.warm(manifest(program(ONE), two), jobs=2)
    assert (report.programs, report.hits, report.compiles) == (2, 0, 2)
    assert (report.modules, report.entries, report.graphs) == (2, 3, 0)
    assert report.nbytes == sum(one["bytes"] for one in recorder.named("compile"))
    assert report.seconds >= report.compiling + report.loading + report.capturing
    assert report.compiling > 0
    x = faulty.gpu.zeros(1, "int32")
    with faulty.count_calls(*VERBS) as calls:
        faulty.gpu.kernel(ONE, "one")[1, 1](x)
        module = faulty.gpu.module(TWO, names=["many<int>"])
        module["two"][1, 1](x)
        module["many<int>"][1, 1](x)
    assert calls == {}
    assert len(recorder.named("compile")) == 2
    assert x.numpy() == [13]


def test_a_second_warm_up_does_nothing(faulty: FaultyGpu) -> None:
    made = axpy_case(faulty.gpu, 31)
    graphs = faulty.gpu.graphs(name="step")
    graphs.warmer(made.launch)
    wanted = manifest(program(ONE), program(THREE), step=("2", "5"))
    first = faulty.gpu.warm(wanted)
    assert (first.modules, first.entries, first.graphs) == (2, 2, 2)
    made.check(7)
    with faulty.count_calls(*VERBS) as calls:
        second = faulty.gpu.warm(wanted)
    assert calls == {}
    assert (second.programs, second.hits, second.compiles) == (2, 2, 0)
    assert (second.modules, second.nbytes, second.entries, second.graphs) == (0, 0, 2, 0)
    made.check(7)  # nor is anything executed


def test_all_kernels_are_resolved_where_none_is_listed_and_else_those_listed(faulty: FaultyGpu) -> None:
    source = 'extern "C" __global__ void %s(int* x) {}\n'
    whole = program(source % "first" + source % "second")
    with faulty.count_calls("module.function") as calls:
        faulty.gpu.warm(manifest(ManifestProgram(whole, entries=("second",))))
    assert calls == {"module.function": 1}
    with faulty.count_calls("module.function", "load") as calls:
        assert faulty.gpu.warm(manifest(whole)).entries == 2
    assert calls == {"module.function": 1}


def test_everything_is_tried_then_all_failures_are_reported(device: Gpu) -> None:
    wanted = manifest(
        program(ONE, "a.cu"),
        program(WRONG, "b.cu"),
        ManifestProgram(program(TWO, "c.cu"), entries=("two", "tow")),
        program(THREE, "d.cu"),
        decode=("8",),
    )
    with pytest.raises(WarmError) as caught:
        device.warm(wanted)
    error = caught.value
    expected = {"b.cu": CompileError, "c.cu, tow": UnknownEntryError, "graph 'decode'": InputError}
    assert failures(error) == expected
    head, b, c, graph = str(error).splitlines()
    assert head == "3 failures in warming up:"
    assert b.startswith(f"  b.cu does not compile for {device.arch}: b.cu:1")
    assert "nonsense" in b
    has = "two and the template many<typename T>"
    assert c == f"  c.cu, tow: c.cu has no kernel 'tow'; it has: {has} (hint: did you mean 'two'?)"
    assert graph.startswith("  graph 'decode': no warmer is registered under this name (hint: ")
    assert error.report[:3] == (4, error.report.hits, 3 - error.report.hits)
    assert (error.report.modules, error.report.entries) == (3, 3)
    assert len(device._session.loaded) == 3


def test_a_program_that_a_manifest_cannot_read_is_a_failure_and_the_rest_is_warmed(
    device: Gpu, tmp_path: Path
) -> None:
    (tmp_path / "one.cu").write_text(ONE)
    path = tmp_path / "kernels.toml"
    rows = "".join(f'[[program]]\nfile = "{name}.cu"\n' for name in ("gone", "one"))
    path.write_text(f"version = 1\n{rows}")
    with pytest.raises(WarmError, match=r"gone\.cu.*cannot read") as caught:
        device.warm(path)
    assert len(caught.value.failures) == 1
    assert caught.value.report.entries == 1


def test_a_program_recorded_for_a_suffix_is_warmed_for_it(faulty: FaultyGpu) -> None:
    own = f"{faulty.gpu.arch}a"
    wanted = ManifestProgram(
        program(ONE), archs=(faulty.gpu.arch.parse(own), faulty.gpu.arch.parse("sm_75"))
    )
    assert (
        faulty.gpu.warm(manifest(wanted)).modules == 2
    )  # The other architecture is the plain one, that of this device.
    with faulty.count_calls("load") as calls:
        faulty.gpu.module(ONE, arch=own)
        faulty.gpu.module(ONE)
    assert calls == {}
    alone = ManifestProgram(program(THREE), archs=(faulty.gpu.arch.parse(own),))
    assert faulty.gpu.warm(manifest(alone)).programs == 1


def test_a_program_that_is_not_stored_is_a_failure_when_sealed(
    kind: str, open_faulty: Opener, builder: Builder
) -> None:
    gpu = open_faulty(kind, builder).gpu
    with sealed(), pytest.raises(WarmError) as caught:
        gpu.warm(manifest(program(ONE, "a.cu"), program(TWO, "b.cu")))
    assert failures(caught.value) == {"a.cu": SealedError, "b.cu": SealedError}
    assert Path(__file__).name in str(caught.value)


def test_equal_programs_share_a_module_and_trim_drops_what_without_references(
    faulty: FaultyGpu,
) -> None:
    gpu = faulty.gpu
    gpu.warm(manifest(program(ONE), program(THREE)))
    assert gpu.kernel(ONE, "one") == gpu.module(program(ONE))["one"]
    held = gpu.kernel(THREE, "three")
    assert gpu.trim() == 1  # under three names
    with faulty.count_calls("load") as calls:
        gpu.kernel(THREE, "three")
        gpu.kernel(ONE, "one")
    assert calls == {"load": 1}
    del held


def test_code_that_no_key_describes_is_not_shared(device: Gpu) -> None:
    first = device.module(ONE).artifact
    other: Artifact = replace(device.module(THREE).artifact, digest=first.digest)
    module = device._session.load(Code(other))
    assert list(module) == ["three"]
    assert device._session.load(Code(first)) is not module


# Bundles


class _NoCompiler:
    """The toolchain of a machine that has none."""

    def __getattr__(self, name: str) -> Any:
        if name in ("close", "after_fork"):
            return lambda: None
        raise ToolchainNotFoundError(f"{name}: there is no compiler")


@pytest.fixture
def bare(tmp_path: Path, recorder: Recorder) -> Builder:
    """Return a builder with an empty cache and no compiler."""
    config = Config(cache_dirs=(tmp_path / "empty",), lock_dir=tmp_path / "locks")
    builder = Builder.open(config, events=Events(recorder))
    builder.toolchain = _NoCompiler()  # type: ignore[assignment]
    return builder


class Baker(NamedTuple):
    """Writes bundles of programs that are compiled once a session."""

    builder: Builder
    place: Path

    def __call__(self, *rows: tuple[Program, str], graphs: Any = (), entries: Any = ()) -> Path:
        held: dict[str, bytes] = {}
        for each, arch in rows:
            held |= self.builder.bundle_entry(each, arch, tuple(entries))[0].encode()
        path = self.place / f"{len(list(self.place.iterdir()))}.heat"
        write(path, held, {"graphs": graphs})
        return path


@pytest.fixture
def bake(shared_builder: Builder, tmp_path: Path) -> Baker:
    place = tmp_path / "bundles"
    place.mkdir()
    return Baker(shared_builder, place)


def test_a_bundle_is_warmed_without_a_compiler_in_its_best_architecture(
    kind: str, open_faulty: Opener, bake: Baker, bare: Builder, recorder: Recorder
) -> None:
    faulty = open_faulty(kind, bare)
    own = str(faulty.gpu.arch)
    exact = f"{faulty.gpu.arch}a"
    one, two, far = program(ONE), program(TWO), program(THREE)
    path = bake((one, own), (one, exact), (one, "sm_75"), (two, exact), (far, "sm_75"))
    report = faulty.gpu.warm(path)
    assert (report.programs, report.hits, report.compiles, report.modules) == (2, 2, 0, 2)
    assert report.entries == 2
    loaded = {module.artifact.digest for module in faulty.gpu._session.loaded.values()}
    builder = bake.builder
    assert loaded == {builder.build(one, own).digest, builder.build(two, exact).digest}
    x = faulty.gpu.zeros(1, "int32")
    with sealed(), faulty.count_calls(*VERBS) as calls:
        faulty.gpu.kernel(ONE, "one")[1, 1](x)
        faulty.gpu.kernel(TWO, "two")[1, 1](x)
    assert calls == {}
    assert x.numpy() == [3]
    assert len(recorder.named("load")) == 2
    assert faulty.gpu.warm(Bundle.open(path)).modules == 0
    assert len(bare.bundles) == 1


def test_a_bundle_without_code_for_the_device_is_a_failure(
    builder: Builder, bare: Builder, open_faulty: Opener, tmp_path: Path
) -> None:
    gpu = open_faulty("emulator", bare).gpu
    other, own = tmp_path / "other.heat", tmp_path / "own.heat"
    wanted = manifest(program(ONE, "one.cu"), program(TWO, "two.cu"))
    bake_all(wanted, ["sm_75", "sm_80"], output=other, builder=builder)
    bake_all(manifest(program(ONE, "one.cu")), str(gpu.arch), output=own, builder=builder)
    with pytest.raises(WarmError) as failed:
        gpu.warm(other)
    ((what, error),) = failed.value.failures
    assert what == "other.heat"
    assert isinstance(error, BundleError)
    assert f"other.heat has code for sm_75 and sm_80, and none for {gpu.arch}" in str(error)
    command = f"preheat bake MANIFEST --arch sm_75 --arch sm_80 --arch {gpu.arch} -o "
    assert command in str(error.hint)
    assert failed.value.report.skipped == 2
    with pytest.raises(WarmError):  # The second bundle has code for one of the two programs only.
        gpu.warm(other, own)


def test_bundles_and_programs_for_other_devices_beside_those_for_this_one_are_skipped(
    builder: Builder, bare: Builder, open_faulty: Opener, tmp_path: Path
) -> None:
    gpu = open_faulty("emulator", bare).gpu
    one, two = program(ONE, "one.cu"), program(TWO, "two.cu")
    paths = []
    for arch in ("sm_75", str(gpu.arch)):
        paths.append(tmp_path / f"{arch}.heat")
        bake_all(manifest(one), arch, output=paths[-1], builder=builder)
    assert gpu.warm(*paths).skipped == 0
    assert gpu.warm(paths[0], manifest(one)).skipped == 0
    entries: dict[str, bytes] = {}
    for wanted, arch in ((one, str(gpu.arch)), (two, "sm_120")):
        entries |= builder.bundle_entry(wanted, arch)[0].encode()
    write(tmp_path / "both.heat", entries, {})
    report = gpu.warm(tmp_path / "both.heat")
    assert (report.programs, report.skipped) == (1, 1)
    assert str(report).startswith("1 program: 1 found, 0 compiled (")
    assert "; 1 without code for this device\n" in str(report)


def test_programs_that_differ_in_their_include_directories_are_both_warmed(
    open_faulty: Opener, bake: Baker, bare: Builder, tmp_path: Path
) -> None:
    faulty = open_faulty("emulator", bare)
    rows = []
    for name, value in (("a", 111), ("b", 222)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "cfg.h").write_text(f"#define VALUE {value}\n")
        source = '#include "cfg.h"\nextern "C" __global__ void k(int* x) { *x = VALUE; }'
        rows.append((Program.of(source, include=[tmp_path / name]), str(faulty.gpu.arch)))
    report = faulty.gpu.warm(bake(*rows))
    assert (report.programs, report.modules) == (2, 2)


def test_a_pinned_bundle_is_warmed_only_if_it_is_the_pinned_one(
    kind: str, open_faulty: Opener, bake: Baker, bare: Builder
) -> None:
    gpu = open_faulty(kind, bare).gpu
    path = bake((program(ONE), str(gpu.arch)))
    pinned = f"{path}@sha256:{Bundle.open(path).digest()}"
    with pytest.raises(BundleError, match="cannot be trusted: its SHA-256 is"):
        gpu.warm(f"{path}@sha256:{'0' * 64}")
    assert bare.bundles == ()
    assert gpu.warm(Bundle.open(pinned)).programs == 1
    assert [str(each.source) for each in gpu.builder.bundles] == [pinned]
    assert gpu.warm(pinned).modules == 0


def test_a_bundle_says_which_kernels_and_which_graph_keys(
    kind: str, open_faulty: Opener, bake: Baker, bare: Builder
) -> None:
    faulty = open_faulty(kind, bare)
    gpu = faulty.gpu
    x = faulty.gpu.zeros(1, "int32")
    graphs = gpu.graphs(name="add")

    @graphs.warmer
    def add(times: int) -> None:
        for _ in range(times):
            gpu.kernel(TWO, "two")[1, 1](x)

    path = bake((program(TWO), str(gpu.arch)), entries=["two"], graphs=[{"name": "add", "keys": ["3"]}])
    assert gpu.warm(path)[5:7] == (1, 1)
    assert 3 in graphs
    assert x.numpy() == [6]


def test_a_damaged_entry_is_a_failure_and_the_rest_is_warmed(
    device: Gpu, bake: Baker, bare: Builder, recorder: Recorder
) -> None:
    recorder.forgive = True
    gpu = Gpu(device._device, bare)
    own = str(gpu.arch)
    path = bake((program(ONE), own), (program(TWO), own))
    blob = path.read_bytes()
    code = bake.builder.build(program(ONE), own).ptx
    at = blob.index(code)
    path.write_bytes(blob[:at] + b"#" + blob[at + 1 :])
    with pytest.raises(WarmError) as caught:
        gpu.warm(path)
    assert all(what.startswith("0.heat, entry ") for what, _ in caught.value.failures)
    assert caught.value.report.modules == 1


def test_code_of_a_bundle_that_the_device_refuses_is_a_failure(
    kind: str, open_faulty: Opener, bake: Baker, bare: Builder
) -> None:
    faulty = open_faulty(kind, bare)
    path = bake((program(ONE, "a.cu"), str(faulty.gpu.arch)))
    invalid = InvalidCodeError("cuLibraryLoadData", 200, "CUDA_ERROR_INVALID_IMAGE", "bad")
    faulty.device.fail("load", invalid)
    with pytest.raises(WarmError, match=r"a\.cu: cuLibraryLoadData failed"):
        faulty.gpu.warm(path)
    assert faulty.gpu.warm(path).modules == 1  # nothing of it was kept


@pytest.mark.parametrize(
    ("graphs", "told"),
    [([{"name": "add"}], "lists graphs that cannot be read"), (7, "lists graphs that cannot be read")],
)
def test_a_bundle_with_invalid_data_for_graphs_is_refused_before_anything_is_done(
    device: Gpu, bake: Baker, bare: Builder, graphs: Any, told: str
) -> None:
    gpu = Gpu(device._device, bare)
    with pytest.raises(BundleError, match=told):
        gpu.warm(bake((program(ONE), str(gpu.arch)), graphs=graphs))
    assert len(gpu._session.loaded) == 0


# Trouble


def test_a_module_that_no_memory_is_left_for_does_not_hide_the_rest(faulty: FaultyGpu) -> None:
    faulty.device.fail("load", None, out_of_memory("cuLibraryLoadData"))
    rows = [program(ONE, f"{name}.cu") for name in "abc"]
    with pytest.raises(WarmError) as caught:
        faulty.gpu.warm(manifest(*rows))
    assert failures(caught.value) == {"b.cu": OutOfMemoryError}
    assert (caught.value.report.modules, caught.value.report.entries) == (2, 2)
    assert faulty.gpu.warm(manifest(*rows)).modules == 1


def test_a_lost_device_ends_it_at_once_with_the_report_so_far(open_faulty: Opener) -> None:
    faulty = open_faulty("emulator")
    fault = DriverError("cuLibraryLoadData", 700, "CUDA_ERROR_ILLEGAL_ADDRESS", "wild", sticky=True)
    faulty.device.fail("load", None, fault)
    rows = [program(ONE, f"{name}.cu") for name in "abc"]
    with faulty.count_calls("load") as calls, pytest.raises(WarmError) as caught:
        faulty.gpu.warm(manifest(*rows, decode=("1",)))
    assert calls == {"load": 2}
    assert failures(caught.value) == {"b.cu": DriverError}
    assert caught.value.__cause__ is fault
    assert (caught.value.report.programs, caught.value.report.modules) == (3, 1)
    with pytest.raises(ContextLostError):
        faulty.gpu.warm(manifest(*rows))


def test_a_reset_device_is_warmed_again(open_faulty: Opener) -> None:
    gpu = open_faulty("emulator").gpu
    graphs = gpu.graphs(name="decode")
    arrays = [gpu.zeros(1, "int32")]
    graphs.warmer(lambda _: gpu.kernel(ONE, "one")[1, 1](arrays[-1]))
    for life in range(2):
        report = gpu.warm(manifest(program(ONE), decode=("3",)))
        assert (report.modules, report.graphs) == (1, 1)
        assert arrays[life].numpy() == [1]
        if life == 0:
            gpu.reset()
            arrays.append(gpu.zeros(1, "int32"))


def test_warming_up_inside_a_capture_is_refused(device: Gpu) -> None:
    made = axpy_case(device, 31)
    what = {"thread_local": "loading a program", "relaxed": "warming graphs"}
    for mode, action in what.items():
        with pytest.raises(CaptureError, match=f"{action} inside a capture"), device.capture(mode=mode):
            device.warm(manifest(program(ONE)))
    made.launch()


def test_a_forked_child_warms_what_its_parent_registered(open_faulty: Opener) -> None:
    faulty = open_faulty("emulator")
    made = axpy_case(faulty.gpu, 31)
    graphs = faulty.gpu.graphs(name="decode")
    graphs.warmer(made.launch)
    faulty.gpu.warm(manifest(decode=("2",)))

    def work_there() -> None:
        report = faulty.gpu.warm(manifest(program(ONE), program(THREE), decode=("2", "3")))
        assert (report.modules, report.graphs) == (2, 1)
        made.check(5)

    run_in_fork(work_there)
    made.check(2)


def test_a_value_that_is_no_source_is_refused_before_anything_is_done(
    device: Gpu, tmp_path: Path
) -> None:
    (tmp_path / "bad.toml").write_text("version = ")
    (tmp_path / "bad.heat").write_text("nonsense")
    given: list[tuple[Any, type[Exception]]] = [
        (5, InputError),
        (tmp_path / "bad.toml", InputError),
        (tmp_path / "bad.heat", BundleError),
        (tmp_path / "none.heat", BundleError),
    ]
    for source, error in given:
        with pytest.raises(error):
            device.warm(manifest(program(ONE)), source)
    for jobs in (0, -1, 1.5, "2"):
        with pytest.raises(InputError, match=r"jobs=.* is not a number of compiles at once"):
            device.warm(manifest(program(ONE)), jobs=jobs)  # type: ignore[arg-type]
    assert len(device._session.loaded) == 0
    assert device.warm()[:7] == WarmReport()[:7]


def test_a_report_reads_well() -> None:
    report = WarmReport(3, 2, 1, 1, 12345, 4, 1, 0.5, 0.25, 0.125, 0.0625)
    assert str(report).splitlines() == [
        "3 programs: 2 found, 1 compiled (0.250 s)",
        "1 module loaded: 12,345 bytes, 4 kernels resolved (0.125 s)",
        "1 graph captured (0.062 s)",
        "0.500 s in all",
    ]


@pytest.mark.parametrize("baked", [True, False])
def test_a_warmed_kernel_can_first_be_requested_inside_a_capture(
    device: Gpu, tmp_path: Path, baked: bool
) -> None:
    wanted = manifest(program(ONE, "inside.cu"))
    if baked:
        bake_all(wanted, [device.arch], output=tmp_path / "k.heat", builder=device.builder)
    device.warm(tmp_path / "k.heat" if baked else wanted)
    x = device.zeros(4, "int32")
    with device.capture() as graph:
        device.kernel(ONE, "one", label="inside.cu")[1, 1](x)
    graph.replay()
    assert x.numpy().tolist() == [1, 0, 0, 0]
    with pytest.raises(CaptureError, match="loading a program inside a capture"), device.capture():
        device.kernel(ONE + " ", "one", label="inside.cu")
