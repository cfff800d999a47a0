"""Bake and check: every program is baked once, bundles are reproducible, and each gap is reported."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from preheat.ahead.bake import BakedProgram, FailedProgram, Job, bake, plan
from preheat.ahead.check import check
from preheat.ahead.foreign import ForeignJob
from preheat.ahead.manifest import GraphKeys, Manifest, ManifestProgram, UnreadableProgram
from preheat.build.builder import Builder
from preheat.build.bundles import BundleEntry, entries_of
from preheat.errors import (
    CompileError,
    InputError,
    SealedError,
    ToolchainError,
    UnknownEntryError,
    copy_error,
)
from preheat.model.arch import Arch
from preheat.model.config import Config, SealMode
from preheat.model.events import Events
from preheat.model.program import Program
from preheat.store.bundle import Bundle, write
from preheat.store.lock import FileLock
from preheat.toolchain.locate import Located
from tests.conftest import Recorder
from tests.driver_errors import out_of_memory
from tests.processes import TIMEOUT_SECONDS, expect_success, kill, start_python, wait_for

SM_80, SM_90 = Arch(8, 0), Arch(9, 0)


def text(name: str) -> str:
    return f'extern "C" __global__ void {name}(int* x) {{ *x = {len(name)}; }}\n'


def program(name: str, **more: Any) -> Program:
    return Program.of(more.pop("source", text(name)), label=f"{name}.cu", **more)


def listed(*programs: Program, **more: Any) -> Manifest:
    return Manifest(tuple(ManifestProgram(each, (SM_90,), **more) for each in programs))


A, B = program("a"), program("bb")
BAD = program("bad", source='extern "C" __global__ void bad(int* x) {\n  *x = missing;\n}\n')
CLOCK = program("clock", source='extern "C" __global__ void clock(char* p) { *p = __TIME__[0]; }')


def context() -> Any:
    return multiprocessing.get_context("spawn")


# Baking


def test_everything_is_compiled_once_and_then_found(
    open_builder: Callable[..., Builder], tmp_path: Path
) -> None:
    manifest = replace(listed(A, B), graphs=(GraphKeys("decode", ("(1, 2)",)),))
    first = bake(manifest, ["sm_80", "sm_90"], output=tmp_path / "k.heat", builder=open_builder())
    again = bake(manifest, ["sm_80", "sm_90"], builder=open_builder())
    assert first.ok
    assert [(row.label, row.arch) for row in first.rows] == [
        *(("a.cu", SM_80), ("a.cu", SM_90), ("bb.cu", SM_80), ("bb.cu", SM_90))
    ]
    assert {row.source for row in first.rows} == {"compiler"}
    assert {row.source for row in again.rows} == {"disk"}
    assert [row.key for row in again.rows] == [row.key for row in first.rows]
    assert (again.path, again.nbytes) == (None, 0)
    with Bundle.open(tmp_path / "k.heat") as bundle:
        assert (first.path, first.nbytes) == (bundle.path, bundle.nbytes)
        assert {promise.artifact.digest for promise in entries_of(bundle)} == {
            row.key for row in first.rows
        }
        version = next(entries_of(bundle)).artifact.toolchain
        assert bundle.meta == {
            "format": "preheat bundle",
            "toolchains": [version],
            "archs": ["sm_80", "sm_90"],
            "graphs": [{"name": "decode", "keys": ["(1, 2)"]}],
        }


def test_bundles_are_the_same_bytes_wherever_and_however_they_are_baked(tmp_path: Path) -> None:
    rows = ['file = "one.cu"\nentries = ["one", "also"]', 'file = "two.cu"\nseconds = 3.5']
    made = []
    for name, order, jobs in (("here", rows, 1), ("there", rows[::-1], 3)):
        place = tmp_path / name / "deep"
        (place / "include").mkdir(parents=True)
        (place / "include" / "v.h").write_text("#define V 7\n")
        extra = 'extern "C" __global__ void also(int* x) { *x = V; }\n'
        (place / "one.cu").write_text('#include "include/v.h"\n' + text("one") + extra)
        (place / "two.cu").write_text(text("two"))
        tables = "".join(f'[[program]]\n{row}\narch = ["sm_90"]\n' for row in order)
        (place / "k.toml").write_text(f"version = 1\n{tables}")
        config = Config(cache_dirs=(tmp_path / name / "cache",), lock_dir=tmp_path / "locks")
        for _ in ("cold", "from the cache"):
            baked = bake(
                Manifest.read(place / "k.toml"), output=place / "k.heat", config=config, jobs=jobs
            )
            assert baked.ok
            made.append((place / "k.heat").read_bytes())
    assert len(set(made)) == 1


def test_failures_are_listed_and_the_rest_is_baked(shared_builder: Builder, tmp_path: Path) -> None:
    lost = UnreadableProgram("lost.cu", InputError("cannot read lost.cu"))
    wanted = (ManifestProgram(A), ManifestProgram(BAD), ManifestProgram(B, entries=("nope",)))
    baked = bake(
        Manifest(wanted, unreadable=(lost,)),
        ["sm_90"],
        output=tmp_path / "k.heat",
        builder=shared_builder,
    )
    assert not baked.ok
    assert [row.label for row in baked.rows] == ["a.cu"]
    assert [(f.title, f.arch, type(f.error)) for f in baked.failures] == [
        ("bad.cu", SM_90, CompileError),
        ("bb.cu", SM_90, UnknownEntryError),
        ("lost.cu", None, InputError),
    ]
    with Bundle.open(tmp_path / "k.heat") as bundle:
        assert [promise.artifact.label for promise in entries_of(bundle)] == ["a.cu"]


def test_nothing_is_written_when_nothing_could_be_baked(
    shared_builder: Builder, tmp_path: Path
) -> None:
    write(tmp_path / "k.heat", {}, {})
    before = (tmp_path / "k.heat").read_bytes()
    baked = bake(listed(BAD), output=tmp_path / "k.heat", builder=shared_builder)
    assert baked.path is None
    assert (tmp_path / "k.heat").read_bytes() == before


def test_a_place_that_cannot_be_written_is_reported_before_anything_is_compiled(
    builder: Builder, recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match="nowhere is not a directory"):
        bake(listed(A), output=tmp_path / "nowhere" / "k.heat", builder=builder)
    with pytest.raises(InputError, match="it exists and is not a file"):
        bake(listed(A), output=tmp_path, builder=builder)
    (tmp_path / "mine").write_text("text")
    with pytest.raises(InputError, match="it exists and is not a bundle"):
        bake(listed(A), output=tmp_path / "mine", builder=builder)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(InputError, match="is not writable"):
        bake(listed(A), output=tmp_path / "k.heat", builder=builder)
    assert recorder.named("compile") == []


def test_the_longest_compile_comes_first() -> None:
    heavy = program("heavy", source="#include <cuda_fp16.h>\n" + text("heavy"))
    timed = [ManifestProgram(program(f"t{seconds}"), seconds=seconds) for seconds in (1, 9, 3)]
    manifest = Manifest((ManifestProgram(A), *timed, ManifestProgram(heavy)))
    labels = [job.item.program.label for job in plan(manifest, ["sm_90"])]
    assert labels == ["t9.cu", "t3.cu", "heavy.cu", "t1.cu", "a.cu"]


def test_each_job_is_reported_when_it_begins_and_when_it_ends(shared_builder: Builder) -> None:
    seen: list[tuple[str, str, int]] = []

    def started(job: Job | ForeignJob) -> None:
        seen.append(("start", str(job), threading.get_ident()))

    def ended(job: Job | ForeignJob, result: BakedProgram | FailedProgram) -> None:
        seen.append((type(result).__name__, str(job), threading.get_ident()))

    bake(listed(A, B, BAD), builder=shared_builder, jobs=2, on_start=started, on_done=ended)
    order = {what[:2]: index for index, what in enumerate(seen)}
    assert len(order) == len(seen) == 6
    for job, how in (("a.cu", "BakedProgram"), ("bb.cu", "BakedProgram"), ("bad.cu", "FailedProgram")):
        assert order["start", f"{job} for sm_90"] < order[how, f"{job} for sm_90"]
    assert {thread for *_, thread in seen} == {threading.get_ident()}


def test_a_program_that_no_cache_keeps_is_baked_with_a_note(builder: Builder, tmp_path: Path) -> None:
    baked = bake(listed(CLOCK), output=tmp_path / "k.heat", builder=builder)
    assert "__TIME__" in baked.rows[0].note
    with Bundle.open(tmp_path / "k.heat") as bundle:
        assert [promise.untracked_reason for promise in entries_of(bundle)] == [baked.rows[0].note]


def test_settings_of_a_sealed_run_do_not_keep_a_bake_from_compiling(
    config: Config, tmp_path: Path
) -> None:
    old = tmp_path / "old.heat"
    assert bake(listed(A), output=old, config=config).ok
    sealed = replace(config, sealed=SealMode.ERROR, bundles=(old,), cache_dirs=(tmp_path / "other",))
    assert [row.source for row in bake(listed(A), config=sealed).rows] == ["compiler"]


def test_a_builder_is_left_as_it_was(shared_builder: Builder) -> None:
    sinks = {name: list(each) for name, each in shared_builder.events._sinks.items()}
    bake(listed(A), builder=shared_builder)
    assert shared_builder.events._sinks == sinks


# Executors


def test_processes_of_an_executor_bake_the_same_bundle_and_send_their_errors_whole(
    config: Config, shared_builder: Builder, tmp_path: Path
) -> None:
    files = ("cuda_fp16.h", "cuda_bf16.h", "cuda_fp8.h", "cuda_fp6.h", "cuda_fp4.h", "mma.h")
    probes = "".join(f"#if __has_include(<{name}>)\n#endif\n" for name in files)
    manifest = listed(A, BAD, program("probing", source=probes + text("probing")))
    here = bake(manifest, output=tmp_path / "here.heat", builder=shared_builder)
    with ProcessPoolExecutor(
        1, mp_context=context()
    ) as executor:  # hashes differ: sets have another order
        there = bake(manifest, output=tmp_path / "there.heat", config=config, executor=executor)
    assert (tmp_path / "here.heat").read_bytes() == (tmp_path / "there.heat").read_bytes()
    assert [row.source for row in there.rows] == ["compiler", "compiler"]
    (mine,), (theirs,) = here.failures, there.failures
    assert isinstance(mine.error, CompileError)
    assert isinstance(theirs.error, CompileError)
    assert str(theirs.error) == str(mine.error)
    assert (theirs.error.rows, theirs.error.log) == (mine.error.rows, mine.error.log)


def test_an_executor_that_breaks_fails_its_jobs_and_not_the_bake(config: Config) -> None:
    dying = ProcessPoolExecutor(1, mp_context=context(), initializer=os._exit, initargs=(1,))
    with dying:
        baked = bake(listed(A, B), config=config, executor=dying)
        late = bake(listed(A), config=config, executor=dying)  # it does not even take jobs by now
    assert [(type(failed.error), failed.title) for failed in (*baked.failures, *late.failures)] == [
        *((ToolchainError, "a.cu"), (ToolchainError, "bb.cu"), (ToolchainError, "a.cu"))
    ]
    assert "its executor failed" in str(baked.failures[0].error)


@pytest.mark.parametrize(
    "error",
    [
        CompileError("a.cu", "sm_90", ["-G"], "log"),
        UnknownEntryError("f", "a.cu", ["g"]),
        out_of_memory("cuMemAlloc"),
        SealedError(program="a.cu", arch="sm_90", reason="absent", caller="app.py:1", entry="f"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_pickle(error: Exception) -> None:
    for copy in (pickle.loads(pickle.dumps(error)), copy_error(error)):
        assert type(copy) is type(error)
        assert (copy.args, vars(copy)) == (error.args, vars(error))


# Ending early


def test_an_interrupt_calls_off_what_has_not_begun(
    builder: Builder, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = listed(*(program(f"k{index}") for index in range(6)))
    begun: list[str] = []
    go_on = threading.Event()
    bundle_entry = builder.bundle_entry

    def one_and_then_wait(program: Program, *args: Any) -> tuple[BundleEntry, str]:
        begun.append(program.label)
        if len(begun) > 1:
            assert go_on.wait(TIMEOUT_SECONDS)
        return bundle_entry(program, *args)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(builder, "bundle_entry", one_and_then_wait)
        with pytest.raises(KeyboardInterrupt):
            bake(manifest, builder=builder, jobs=1, on_done=stop)
        go_on.set()
    rest = bake(manifest, builder=builder, jobs=1)
    assert rest.ok
    sources = Counter(row.source for row in rest.rows)
    assert sources["compiler"] >= 4  # those that were called off
    assert begun in (["k0.cu"], ["k0.cu", "k1.cu"])
    assert len(recorder.named("compile")) == 6


def test_a_bake_that_is_killed_continues_where_it_was(
    builder: Builder, config: Config, tmp_path: Path
) -> None:
    code = """
import sys
from pathlib import Path
from preheat.ahead.bake import bake
from preheat.ahead.manifest import Manifest
baked = bake(Manifest.read(sys.argv[1]), output=Path(sys.argv[1]).with_suffix(".heat"), jobs=1)
print(*(row.source for row in baked.rows))
"""
    manifest, log = tmp_path / "k.toml", tmp_path / "events"
    programs = [program(f"k{index}") for index in range(8)]
    listed(*programs).write(manifest)
    env = {
        "PREHEAT_CACHE_DIR": str(config.cache_dirs[0]),
        "PREHEAT_LOCK_DIR": str(config.lock_dir),
        "PREHEAT_EVENTS": str(log),
    }
    last = FileLock(config.lock_dir / builder.key(programs[-1], SM_90).digest)
    last.path.parent.mkdir(mode=0o700, exist_ok=True)
    assert last.acquire(0)  # it waits for this one at the latest
    process = start_python(code, str(manifest), env=env)
    wait_for(lambda: len(compiles(log)) >= 2 or process.poll() is not None)
    kill(process)
    last.release()
    assert process.returncode == -signal.SIGKILL
    before = compiles(log)
    assert len(before) >= 2
    assert not (tmp_path / "k.heat").exists()
    sources = expect_success(start_python(code, str(manifest), env=env)).split()
    assert len(sources) == 8
    assert sources.count("disk") >= len(before)
    assert max(Counter(compiles(log)).values()) == 1


def compiles(log: Path) -> list[str]:
    """Return the programs that were compiled, one for each time."""
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    events = [json.loads(line) for line in lines if line.endswith("\n")]
    return [event["program"] for event in events if event["event"] == "compile"]


# Checking


@pytest.fixture
def mounted(shared_builder: Builder, tmp_path: Path) -> Callable[..., Builder]:
    """Return a builder that has only a bundle of these programs."""

    def mount(manifest: Manifest, archs: Iterable[str] = ("sm_90",)) -> Builder:
        path = tmp_path / "mounted.heat"
        assert bake(manifest, list(archs), output=path, builder=shared_builder).ok
        config = Config(cache_dirs=(), lock_dir=tmp_path / "locks", cache=False)
        builder = Builder.open(config, events=Events(Recorder()))
        builder.mount(path)
        return builder

    return mount


def test_baked_programs_are_covered(mounted: Callable[..., Builder]) -> None:
    builder = mounted(listed(A, B), ["sm_80", "sm_90"])
    checked = check(listed(A, B, entries=()), ["sm_80", "sm_90"], builder=builder)
    assert checked.ok
    assert (checked.programs, checked.archs, checked.unchecked_headers) == (2, (SM_80, SM_90), ())
    builder.close()


def holes(checked: Any) -> list[str]:
    return [f"{title} {arch}: {reason}" for title, arch, reason in checked.missing]


def test_holes_say_what_differs(mounted: Callable[..., Builder]) -> None:
    builder = mounted(listed(program("a", options=["-use_fast_math"]), B))
    other = program("a", options=["-G"])
    lost = UnreadableProgram("lost.cu", InputError("cannot read lost.cu"))
    wanted = (
        ManifestProgram(other),
        ManifestProgram(B, entries=("bb", "cc")),
        ManifestProgram(CLOCK),
        ManifestProgram(program("new")),
    )
    checked = check(Manifest(wanted, unreadable=(lost,)), ["sm_90"], builder=builder)
    assert (checked.ok, checked.programs) == (False, 5)
    assert holes(checked) == [
        "lost.cu None: cannot read lost.cu",
        "a.cu sm_90: option[0]: '-use_fast_math' became '-G'",
        "bb.cu sm_90: bb.cu has no kernel 'cc'; it has: bb",
        f"clock.cu sm_90: not baked, and not cacheable: {CLOCK.uncacheable}",
        "new.cu sm_90: not baked",
    ]
    builder.close()


def test_instances_of_one_file_are_distinguished(mounted: Callable[..., Builder]) -> None:
    source = "template <class T> __global__ void t(T* x) { *x = 1; }"
    builder = mounted(listed(A))
    both = (Program.of(source, label="t.cu", names=(f"t<{kind}>",)) for kind in ("int", "float"))
    assert holes(check(Manifest(tuple(map(ManifestProgram, both))), ["sm_90"], builder=builder)) == [
        "t.cu (t<float>) sm_90: not baked",
        "t.cu (t<int>) sm_90: not baked",
    ]
    builder.close()


def test_code_counts_on_every_architecture_that_runs_it(mounted: Callable[..., Builder]) -> None:
    builder = mounted(listed(A), ["sm_80", "sm_90a"])
    assert check(listed(A), ["sm_80", "sm_89", "sm_90", "sm_90a"], builder=builder).ok
    assert holes(check(listed(A), ["sm_100", "sm_75", "sm_80a"], builder=builder)) == [
        f"a.cu {arch}: not baked for this architecture" for arch in ("sm_75", "sm_80a", "sm_100")
    ]
    builder.close()


def test_a_changed_header_is_named(mounted: Callable[..., Builder], tmp_path: Path) -> None:
    (tmp_path / "v.h").write_text("#define V 7\n")
    (tmp_path / "k.cu").write_text('#include "v.h"\n' + text("k"))
    manifest = listed(Program.from_file(tmp_path / "k.cu"))
    builder = mounted(manifest)
    assert check(manifest, builder=builder).ok
    (tmp_path / "v.h").write_text("#define V 8\n")
    assert holes(check(manifest, builder=builder)) == ["k.cu sm_90: header v.h changed"]
    os.unlink(tmp_path / "v.h")
    gone = check(manifest, builder=builder)
    assert (gone.ok, gone.unchecked_headers) == (True, ("v.h",))
    builder.close()


def test_a_check_needs_no_compiler_where_bundles_have_it_all(mounted: Callable[..., Builder]) -> None:
    fp16 = program("h", source="#include <cuda_fp16.h>\n" + text("h"))
    builder = mounted(listed(A, fp16))
    builder.toolchain._located = Located({}, {"nvrtc": "not installed"}, {})
    builder.toolchain._relocated = True
    checked = check(listed(A, fp16), builder=builder)
    assert checked.ok
    assert "cuda_fp16.h" in checked.unchecked_headers
    assert holes(check(listed(B), builder=builder)) == ["bb.cu sm_90: not baked"]


def test_without_bundles_the_cache_is_what_counts(builder: Builder, recorder: Recorder) -> None:
    bake(listed(A), builder=builder)
    assert check(listed(A), builder=builder).ok
    assert holes(check(listed(A), ["sm_80"], builder=builder)) == [
        "a.cu sm_80: not baked for this architecture"
    ]
    assert len(recorder.named("compile")) == 1


def test_a_check_searches_for_what_is_like_the_missing_for_a_bounded_time(
    mounted: Callable[..., Builder], monkeypatch: pytest.MonkeyPatch
) -> None:
    builder = mounted(listed(*(program(name, options=["-G"]) for name in ("a", "bb", "cc"))))
    clock = [0.0]
    search = builder.nearest

    def slow(*args: Any, **more: Any) -> Any:
        clock[0] += 0.6
        return search(*args, **more)

    monkeypatch.setattr(builder, "nearest", slow)
    monkeypatch.setattr("preheat.ahead.check._EXPLAIN_SECONDS", 1.0)
    monkeypatch.setattr("preheat.ahead.check.time", SimpleNamespace(monotonic=lambda: clock[0]))
    told = [each.reason for each in check(listed(A, B, program("cc")), builder=builder).missing]
    assert told == ["option[0]: '-G' is gone"] * 2 + ["not baked"]
    builder.close()


def test_a_manifest_is_named_by_its_path_and_one_architecture_by_itself(
    shared_builder: Builder, tmp_path: Path
) -> None:
    listed(A).write(tmp_path / "k.toml")
    for path in (tmp_path / "k.toml", str(tmp_path / "k.toml")):
        for arch in ("sm_90", SM_90, ["sm_90"]):
            (row,) = bake(path, arch, builder=shared_builder).rows
            assert (row.label, row.arch) == ("a.cu", SM_90)
            assert check(path, arch, builder=shared_builder).ok


@pytest.mark.parametrize("jobs", [0, -1])
def test_fewer_jobs_than_one_are_refused(shared_builder: Builder, jobs: int) -> None:
    with pytest.raises(InputError, match=f"jobs must be at least 1, not {jobs}"):
        bake(listed(A), jobs=jobs, builder=shared_builder)


@pytest.mark.parametrize("given", [Manifest(()), "empty.toml"], ids=["a manifest", "a file"])
def test_a_manifest_that_lists_nothing_is_refused_by_every_call(
    given: Manifest | str, builder: Builder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.toml").write_text("version = 1\n")
    name = "empty.toml" if isinstance(given, str) else "the manifest"
    calls: tuple[Callable[[], object], ...] = (
        lambda: bake(given, "sm_90", builder=builder, output="b.heat"),
        lambda: check(given, "sm_90", builder=builder),
    )
    for call in calls:
        with pytest.raises(InputError, match=f"{name} lists no program") as caught:
            call()
        assert "preheat record" in str(caught.value.hint)
    assert not Path("b.heat").exists()
