"""The builder in one process: hits and misses, faults, remembered failures, threads, forks."""

from __future__ import annotations

import os
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import preheat
from preheat.build import default
from preheat.build.builder import Builder
from preheat.build.lookup import Hit, Lookup, Miss
from preheat.build.request import Request
from preheat.build.seal import sealed
from preheat.errors import (
    CompileError,
    CompilerCrashError,
    InputError,
    PtxError,
    SealedError,
    UnknownEntryError,
)
from preheat.gpu import Gpu
from preheat.model import codec
from preheat.model.artifact import Artifact, Header
from preheat.model.config import Config
from preheat.model.events import Events
from preheat.model.foreign import ForeignRequest
from preheat.model.program import Program
from preheat.store import DiskStore, MemoryStore
from preheat.store.lock import FileLock
from preheat.toolchain.headers.states import HeaderState, decode_states
from tests.conftest import SAXPY, Recorder
from tests.processes import TIMEOUT_SECONDS, run_in_fork, wait_for

PROGRAM = Program.of(SAXPY, label="saxpy.cu")
BROKEN = Program.of("__global__ void k(int* x) { x[0] = missing; }", label="broken.cu")
Open = Callable[..., Builder]


def disk(builder: Builder) -> DiskStore:
    assert builder.disk is not None
    return builder.disk


def test_a_program_is_compiled_once_and_then_found(builder: Builder, recorder: Recorder) -> None:
    first = builder.build(PROGRAM, "sm_90")
    assert builder.build(PROGRAM, "sm_90") is first  # as long as someone holds it
    assert len(recorder.named("compile")) == 1
    assert [hit["tier"] for hit in recorder.named("hit")] == ["memory"]


def test_a_second_process_finds_it_on_disk_without_any_compiler(
    open_builder: Open, recorder: Recorder
) -> None:
    made = open_builder().build(PROGRAM, "sm_90")
    workers = len(recorder.named("worker"))
    assert open_builder().build(PROGRAM, "sm_90") == made
    assert recorder.named("hit")[-1]["tier"] == "disk"
    assert len(recorder.named("worker")) == workers


def test_every_tier_gives_the_bytes_of_a_fresh_compile(
    open_builder: Open, config: Config, tmp_path: Path
) -> None:
    builder = open_builder()
    compiled = builder.build(PROGRAM, "sm_90")
    from_memory = builder.build(PROGRAM, "sm_90")
    from_disk = open_builder().build(PROGRAM, "sm_90")
    layered = replace(config, cache_dirs=(tmp_path / "other",), layers=config.cache_dirs)
    from_layer = open_builder(layered).build(PROGRAM, "sm_90")
    fresh = open_builder(replace(config, cache_dirs=(tmp_path / "fresh",))).build(PROGRAM, "sm_90")
    for other in (from_memory, from_disk, from_layer, fresh):
        assert (other.cubin, other.ptx) == (compiled.cubin, compiled.ptx)


def test_architectures_are_separate(builder: Builder, recorder: Recorder) -> None:
    for arch in ("sm_90", "sm_90a", "sm_100"):
        assert str(builder.build(PROGRAM, arch).arch) == arch
    assert len(recorder.named("compile")) == 3


def test_ptx_and_cuda_go_through_the_same_call(builder: Builder) -> None:
    made = builder.build(PROGRAM, "sm_80")
    text = Program.of(made.ptx.decode(), label="saxpy.ptx")
    assembled = builder.build(text, "sm_90")
    assert assembled.toolchain.startswith("nvJitLink")
    kinds = [p.kind for p in assembled.entry("saxpy").parameters]
    assert kinds == [p.kind for p in made.entry("saxpy").parameters]
    assert assembled.cubin[:4] == b"\x7fELF"


def test_lowered_names_survive_a_hit_in_another_process(open_builder: Open) -> None:
    source = "template <class T> __global__ void tk(T* p) { p[0] = 1; }"
    program = Program.of(source, names=["tk<float>", "tk<double>"])
    made = open_builder().build(program, "sm_90")
    found = open_builder().build(program, "sm_90")
    assert found.names == made.names == {"tk<float>": "_Z2tkIfEvPT_", "tk<double>": "_Z2tkIdEvPT_"}
    assert found.entry("tk<double>").parameters[0].type == "double*"


def test_a_compiler_upgraded_under_a_running_process_is_noticed(
    open_builder: Open, recorder: Recorder
) -> None:
    """What the new build makes must not be filed under the old one's key."""
    builder = open_builder()
    true = builder.toolchain.located
    nvrtc = true.library("nvrtc")._replace(build="00" * 20)
    builder.toolchain._located = true._replace(libraries={**true.libraries, "nvrtc": nvrtc})
    made = builder.build(PROGRAM, "sm_90")
    assert dict(made.parts)["toolchain"] == f"nvrtc {true.library('nvrtc').build}"
    assert open_builder().build(PROGRAM, "sm_90") == made
    assert len(list(disk(builder).items())) == 1
    assert len(recorder.named("miss")) == 2


def test_one_of_the_threads_that_wait_locates_an_upgraded_compiler(
    open_builder: Open, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    builder = open_builder()
    true = builder.toolchain.located
    nvrtc = true.library("nvrtc")._replace(build="00" * 20)
    builder.toolchain._located = true._replace(libraries={**true.libraries, "nvrtc": nvrtc})
    relocate = builder.toolchain.relocate
    relocated: list[int] = []

    def counted() -> None:
        wait_for(lambda: len(builder._locks.flights._flights) == 1 and len(waiting) == 3)
        relocated.append(threading.get_ident())
        relocate()

    monkeypatch.setattr(builder.toolchain, "relocate", counted)
    waiting: list[str] = []
    made: list[Artifact] = []

    def build() -> None:
        waiting.append("")
        made.append(builder.build(PROGRAM, "sm_90"))

    first = threading.Thread(target=lambda: made.append(builder.build(PROGRAM, "sm_90")))
    first.start()
    wait_for(lambda: len(builder._locks.flights._flights) == 1)
    threads = [threading.Thread(target=build) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in (first, *threads):
        thread.join(TIMEOUT_SECONDS)
    assert relocated == [first.ident]
    assert len(made) == 4
    assert {artifact.digest for artifact in made} == {made[0].digest}
    assert len(recorder.named("compile")) == 1


def test_a_cold_program_is_looked_up_before_and_after_its_lock(
    builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[bool] = []
    requests: list[Request] = []
    find, made = Lookup.find, Request.__init__

    def counted_find(self: Lookup, request: Request, **more: Any) -> Hit | Miss:
        looked.append(more["local"])
        return find(self, request, **more)

    def counted_request(self: Request, *arguments: Any) -> None:
        requests.append(self)
        made(self, *arguments)

    monkeypatch.setattr(Lookup, "find", counted_find)
    monkeypatch.setattr(Request, "__init__", counted_request)
    builder.build(PROGRAM, "sm_90")
    assert looked == [False, True]
    assert len(requests) == 1


def test_the_same_name_with_new_source_is_another_kernel(builder: Builder) -> None:
    other = replace(PROGRAM, source=SAXPY.replace("a * x[i] + y[i]", "a * x[i] - y[i]"))
    one, two = builder.build(PROGRAM, "sm_90"), builder.build(other, "sm_90")
    assert one.digest != two.digest
    assert one.cubin != two.cubin


def test_a_read_only_layer_answers_first_and_is_never_written(
    open_builder: Open, config: Config, tmp_path: Path, recorder: Recorder
) -> None:
    made = open_builder().build(PROGRAM, "sm_90")
    layer = config.cache_dirs[0]
    before = {p: p.stat().st_mtime_ns for p in layer.rglob("*.heat")}
    layered = open_builder(replace(config, cache_dirs=(tmp_path / "own",), layers=(layer,)))
    assert layered.build(PROGRAM, "sm_90") == made
    assert recorder.named("hit")[-1]["tier"] == "layer"
    assert {p: p.stat().st_mtime_ns for p in layer.rglob("*.heat")} == before
    assert list((tmp_path / "own").rglob("*.heat")) == []


def test_header_states_are_found_behind_a_layer_that_has_others(
    open_builder: Open, config: Config, tmp_path: Path, recorder: Recorder
) -> None:
    include = tmp_path / "include"
    include.mkdir()
    program = Program.of('#include "v.h"\n__global__ void k(int* x) { *x = V; }', include=[include])
    (include / "v.h").write_text("#define V 1")
    open_builder().build(program, "sm_90")
    layered = replace(config, cache_dirs=(tmp_path / "own",), layers=config.cache_dirs)
    (include / "v.h").write_text("#define V 22")
    changed = open_builder(layered).build(program, "sm_90")
    assert open_builder(layered).build(program, "sm_90") == changed
    assert len(recorder.named("compile")) == 2


def test_a_process_finds_a_header_state_that_another_one_added(
    open_builder: Open, tmp_path: Path, recorder: Recorder
) -> None:
    header = tmp_path / "v.h"
    program = Program.of('#include "v.h"\n__global__ void k(int* x) { *x = V; }', include=[tmp_path])
    mine, other = open_builder(), open_builder()
    header.write_text("#define V 1")
    mine.build(program, "sm_90")
    header.write_text("#define V 22")
    made = other.build(program, "sm_90")
    assert mine.build(program, "sm_90") == made
    assert len(recorder.named("compile")) == 2


def test_clearing_memory_refills_from_disk(builder: Builder, recorder: Recorder) -> None:
    builder.build(PROGRAM, "sm_90")
    memory = builder.cache.tiers[0]
    assert isinstance(memory, MemoryStore)
    memory.clear()
    builder.build(PROGRAM, "sm_90")
    builder.build(PROGRAM, "sm_90")
    assert [hit["tier"] for hit in recorder.named("hit")] == ["disk", "memory"]


def test_find_takes_the_best_stored_architecture_and_never_compiles(
    builder: Builder, recorder: Recorder
) -> None:
    assert builder.lookup(PROGRAM, "sm_103").artifact is None
    builder.build(PROGRAM, "sm_100")
    found = builder.lookup(PROGRAM, "sm_103").artifact
    assert found is not None
    assert str(found.arch) == "sm_100"
    builder.build(PROGRAM, "sm_100f")
    better = builder.lookup(PROGRAM, "sm_103").artifact
    assert better is not None
    assert str(better.arch) == "sm_100f"
    assert builder.lookup(PROGRAM, "sm_90").artifact is None
    assert len(recorder.named("compile")) == 2


def test_another_include_directory_in_front_is_never_a_stale_hit(
    builder: Builder, tmp_path: Path, recorder: Recorder
) -> None:
    program = Program.of('#include <cuda_fp16.h>\nextern "C" __global__ void k(__half* x) { *x = 1; }')
    builder.build(program, "sm_90")
    text = "struct __half { int v; __device__ void operator=(int i) { v = i; } };"
    (tmp_path / "cuda_fp16.h").write_text(text)
    other = builder.build(replace(program, include=(str(tmp_path),)), "sm_90")
    assert [h.root for h in other.headers] == ["0"]
    assert builder.build(program, "sm_90").headers[0].root == "cuda"
    assert len(recorder.named("compile")) == 2


def test_a_file_where_programs_seem_to_lie_is_watched_for(
    builder: Builder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "v.h").write_text("#define V 1")
    program = Program.of('#include "v.h"\n__global__ void k(int* x) { *x = V; }', include=[tmp_path])
    builder.build(program, "sm_90")
    lexists = os.path.lexists
    monkeypatch.setattr(os.path, "lexists", lambda p: str(p) == "/preheat" or lexists(p))
    missed = builder.explain_lookup(program, "sm_90")
    assert isinstance(missed, Miss)
    assert "preheat/ in / may hide" in missed.reason


# Programs that are never stored


def test_an_uncacheable_program_compiles_every_time_with_its_reason(
    open_builder: Open, config: Config, recorder: Recorder
) -> None:
    source = 'extern "C" __global__ void k(char* p) { *p = __TIME__[0]; }'
    builder = open_builder()
    for _ in range(2):
        builder.build(Program.of(source, label="clock.cu"), "sm_90")
    assert len(recorder.named("compile")) == 2
    assert [u["reason"] for u in recorder.named("uncached")] == [
        "it uses __TIME__, which reads the clock"
    ] * 2
    assert list(config.cache_dirs[0].rglob("*.heat")) == []


# Failures


def test_a_rejected_program_asked_for_1000_times_compiles_once(
    builder: Builder, recorder: Recorder
) -> None:
    errors = []
    for _ in range(1000):
        with pytest.raises(CompileError) as caught:
            builder.build(BROKEN, "sm_90")
        errors.append(caught.value)
    assert len(recorder.named("reject")) == 1
    assert errors[-1].count == 1000
    assert errors[-1].log == errors[0].log
    assert 'identifier "missing" is undefined' in errors[-1].log
    (failure,) = builder.failures.values()
    assert failure.count == 1000
    assert failure.first > 0


def test_a_forgotten_failure_is_tried_again(builder: Builder, recorder: Recorder) -> None:
    for _ in range(2):
        with pytest.raises(CompileError):
            builder.build(BROKEN, "sm_90")
        builder.forget_failures()
    assert len(recorder.named("reject")) == 2


def test_a_rejection_that_a_file_could_change_is_not_remembered(
    builder: Builder, tmp_path: Path
) -> None:
    program = Program.of('#include "v.h"\n__global__ void k(int* x) { *x = V; }', include=[tmp_path])
    with pytest.raises(CompileError):
        builder.build(program, "sm_90")
    (tmp_path / "v.h").write_text("#define V 1")
    assert builder.build(program, "sm_90").cubin


def test_a_compile_error_carries_everything(builder: Builder) -> None:
    source = "__global__ void k(int* x) {\n    x[0] = missing;\n    y[0] = 1;\n}\n"
    with pytest.raises(CompileError) as caught:
        builder.build(Program.of(source, label="bad.cu", options=["-use_fast_math"]), "sm_90")
    error = caught.value
    assert (error.program, error.arch, error.options) == ("bad.cu", "sm_90", ("-use_fast_math",))
    assert "2 errors detected" in error.log
    assert [(r.file, r.line, r.column, r.message) for r in error.rows] == [
        ("bad.cu", 2, 12, 'identifier "missing" is undefined'),
        ("bad.cu", 3, 5, 'identifier "y" is undefined'),
    ]
    assert str(error).startswith("bad.cu does not compile for sm_90 with -use_fast_math\nbad.cu:2:")
    assert "    x[0] = missing;\n               ^" in str(error)


def test_an_unknown_name_expression_lists_the_kernels(builder: Builder) -> None:
    with pytest.raises(UnknownEntryError, match="it has: saxpy") as caught:
        builder.build(replace(PROGRAM, names=("saxpi",)), "sm_90")
    assert caught.value.hint == "did you mean 'saxpy'?"


def test_bad_ptx_is_refused_with_its_line(builder: Builder) -> None:
    text = ".version 8.0\n.target sm_90\n.entry k()\n{\n  .reg .f32 %f<3>;\n  div.f32 %f1, %f2, %f2;\n}"
    with pytest.raises(PtxError, match=r"k\.ptx:6: div\.f32 needs a rounding mode"):
        builder.build(Program.of(text, label="k.ptx"), "sm_90")


def test_an_architecture_the_compiler_does_not_know_is_reported_with_those_it_does(
    builder: Builder,
) -> None:
    with pytest.raises(InputError, match="cannot compile for sm_999") as caught:
        builder.build(PROGRAM, "sm_999")
    assert caught.value.hint
    assert "sm_90" in caught.value.hint


def test_the_header_states_of_pinned_code_are_kept_and_of_the_rest_the_newest(
    builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builder.toolchain, "identity", lambda _: "nvrtc of a test")
    request = builder._request(Program.of('#include "v.h"\n'), "sm_90")

    def store(number: int) -> None:
        content = f"{number:064x}"
        state = HeaderState((Header("0", "v.h", content),), (), ("0",))
        code = Artifact(content, "k.cu", request.arch, "NVRTC", (), (), b"", b"")
        builder._compiler.store(request, code, state)

    store(0)
    store(1)
    disk(builder).pin(f"{1:064x}", request.digest)
    for number in range(2, 30):
        store(number)
    meta = codec.unpack(request.digest, disk(builder).get(request.digest) or b"").meta
    assert [int(digest, 16) for _, digest in decode_states(meta)] == [1, *range(15, 30)]
    assert disk(builder).sweep(max_files=0).files == 29
    assert {item.digest for item in disk(builder).items()} == {request.digest, f"{1:064x}"}


def test_a_missing_include_directory_is_named(builder: Builder, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"include directory .*nowhere does not exist"):
        builder.build(replace(PROGRAM, include=(str(tmp_path / "nowhere"),)), "sm_90")


# Threads and fork


def in_threads(count: int, act: Callable[[int], object]) -> list[BaseException]:
    """Run `act` in threads that start together; what they raised."""
    gate = threading.Barrier(count)
    raised = []

    def run(index: int) -> None:
        gate.wait()
        try:
            act(index)
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_SECONDS)
    return raised


def test_32_threads_missing_one_key_compile_once(builder: Builder, recorder: Recorder) -> None:
    made: list[Artifact] = []
    assert in_threads(32, lambda _: made.append(builder.build(PROGRAM, "sm_90"))) == []
    assert len(recorder.named("compile")) == 1
    assert len({artifact.cubin for artifact in made}) == 1


def test_32_threads_share_one_rejection_with_tracebacks_of_their_own(
    builder: Builder, recorder: Recorder
) -> None:
    raised = in_threads(32, lambda _: builder.build(BROKEN, "sm_90"))
    assert len(raised) == 32
    assert all(isinstance(error, CompileError) for error in raised)
    assert len({id(error) for error in raised}) == 32
    assert len(recorder.named("reject")) == 1


def test_threads_with_different_keys_do_not_wait_for_one_another(
    builder: Builder, recorder: Recorder
) -> None:
    programs = [replace(PROGRAM, label=f"k{i}.cu") for i in range(6)]
    assert in_threads(6, lambda i: builder.build(programs[i], "sm_90")) == []
    assert len(recorder.named("compile")) == 6
    assert recorder.named("wait") == []


def test_a_forked_child_builds_with_workers_and_counters_of_its_own(builder: Builder) -> None:
    builder.build(PROGRAM, "sm_90")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            builder.build(replace(PROGRAM, label="child.cu"), "sm_90")
            os.write(writer, str(int(builder.events.stats()["compiles"])).encode())
            builder.close()
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as reported:
        assert reported.read() == "1"
    os.waitpid(child, 0)
    assert builder.build(replace(PROGRAM, label="parent.cu"), "sm_90").cubin
    assert builder.stats()["process"]["compiles"] == 2
    assert builder.stats()["cache"]["compiles"] == 3


def test_a_sink_that_raises_during_a_wait_leaves_no_lock_behind(
    open_builder: Open, config: Config
) -> None:
    def raising(name: str, fields: object) -> None:
        del fields
        if name == "wait":
            raise RuntimeError("sink")

    builder = open_builder(replace(config, lock_wait=0.05), Events(raising))
    digest = builder.key(PROGRAM, "sm_90").digest
    owner = FileLock(config.lock_dir / digest)
    assert owner.acquire(0)
    with pytest.raises(RuntimeError, match="sink"):
        builder.build(PROGRAM, "sm_90")
    owner.release()
    assert FileLock(config.lock_dir / digest).acquire(0)


def test_threads_that_open_the_default_builder_together_share_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PREHEAT_CACHE_DIR", str(tmp_path / "cache"))
    default._builder.cache_clear()
    seen: list[Builder] = []
    assert in_threads(16, lambda _: seen.append(default.default_builder())) == []
    assert len(set(map(id, seen))) == 1
    assert len({id(builder.toolchain.pool) for builder in seen}) == 1
    default._builder.cache_clear()


def test_options_beside_a_program_are_refused() -> None:
    with pytest.raises(InputError, match="already has its label, options"):
        default.compile(PROGRAM, "sm_90", options=["-use_fast_math"])


def test_a_forked_child_that_just_exits_has_counted_what_its_seal_refused(builder: Builder) -> None:
    def work() -> None:
        with sealed(), pytest.raises(SealedError):
            builder.build(PROGRAM, "sm_90")
        with sealed(), pytest.raises(SealedError):
            builder.foreign.obtain(ForeignRequest("mylib", "key"), dict)

    run_in_fork(work)
    assert builder.stats()["cache"]["sealed"] == 2


def test_a_child_forked_during_a_compile_releases_the_worker(open_builder: Open) -> None:
    """Else the worker would outlive a parent that was killed."""
    terms = "".join(f"a=={i}?{i}:" for i in range(30000))
    program = Program.of(f"__global__ void k(int* x, int a) {{ x[0] = {terms}0; }}")
    builder = open_builder()
    builder.toolchain.located  # noqa: B018  (found before, so that the worker is busy with the program)

    def compile_until_workers_die() -> None:
        with suppress(CompilerCrashError):
            builder.build(program, "sm_90")

    thread = threading.Thread(target=compile_until_workers_die)
    thread.start()
    pool = builder.toolchain.pool
    wait_for(lambda: set(pool._workers) - set(pool._idle))
    (worker,) = set(pool._workers) - set(pool._idle)
    descriptors = (worker._in.fileno(), worker._out.fileno())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads is the point
        child = os.fork()
    if child == 0:
        closed = 0
        for descriptor in descriptors:
            try:
                os.fstat(descriptor)
            except OSError:
                closed += 1
        os._exit(closed)
    _, status = os.waitpid(child, 0)
    while thread.is_alive():  # it starts another worker in place of the first
        for started in tuple(pool._workers):
            started._process.kill()
        thread.join(0.01)
    assert os.waitstatus_to_exitcode(status) == 2


# Counters


def test_stats_tell_this_process_and_the_whole_cache(open_builder: Open, config: Config) -> None:
    first = open_builder(config, Events())
    first.build(PROGRAM, "sm_90")
    first.close()
    second = open_builder(config, Events())
    second.build(PROGRAM, "sm_90")
    stats = second.stats()
    assert stats["process"]["hits.disk"] == 1
    assert "compiles" not in stats["process"]
    assert stats["cache"]["compiles"] == 1
    assert stats["cache"]["hits.disk"] == 1
    assert stats["process"]["seconds_saved"] > 0


def test_why_tells_a_miss_from_a_hit_without_building(builder: Builder, recorder: Recorder) -> None:
    missed = builder.explain_lookup(PROGRAM, "sm_90")
    assert isinstance(missed, Miss)
    assert missed.reason.startswith("absent")
    builder.build(PROGRAM, "sm_90")
    assert isinstance(builder.explain_lookup(PROGRAM, "sm_90"), Artifact)
    assert recorder.named("hit") == []


def test_cleared_memory_is_read_again_from_disk(builder: Builder, recorder: Recorder) -> None:
    program = Program.of(SAXPY)
    made = builder.build(program, "sm_90")
    assert builder.build(program, "sm_90") is made
    builder.clear_memory()
    again = builder.build(program, "sm_90")
    assert again == made
    assert again is not made
    assert [hit["tier"] for hit in recorder.named("hit")] == ["memory", "disk"]
    assert len(recorder.named("compile")) == 1


def test_a_call_chooses_the_cache_directory(tmp_path: Path) -> None:
    place = tmp_path / "chosen"
    builder = Builder.open(cache_dir=place)
    made = builder.build(Program.of(SAXPY), "sm_90")
    builder.close()
    assert builder.disk is not None
    assert builder.disk.root == place
    assert preheat.compile(SAXPY, "sm_90", cache_dir=str(place)).digest == made.digest
    assert preheat.default_builder(place).stats()["process"].get("compiles", 0) == 0
    assert preheat.default_builder(place) is preheat.default_builder(str(place))
    with preheat.device("emulator:6", cache_dir=place) as gpu:
        gpu.kernel(SAXPY, "saxpy")
        assert preheat.device("emulator:6") is gpu
        assert preheat.device("emulator:6", cache_dir=place) is gpu
        with pytest.raises(InputError, match="emulator:6 is open already, with another cache dir"):
            preheat.device("emulator:6", cache_dir=tmp_path / "other")
    assert preheat.default_builder(place).stats()["process"].get("compiles", 0) == 0
    preheat.default_builder(place).close()


def test_the_directory_of_the_environment_is_no_other_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREHEAT_CACHE_DIR", str(tmp_path / "chosen"))
    default._builder.cache_clear()
    try:
        assert preheat.default_builder(tmp_path / "chosen") is preheat.default_builder()
    finally:
        preheat.default_builder().close()
        default._builder.cache_clear()


def test_a_chosen_directory_that_cannot_be_used_is_not_replaced_by_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    builder = Builder.open(cache_dir=tmp_path / "file" / "cache")
    assert builder.disk is None
    assert str(tmp_path / "file") in caplog.text


@pytest.mark.parametrize("wrong", [5, b"/tmp", "", "a\0b"])
def test_a_cache_directory_that_is_no_path_is_refused(wrong: Any) -> None:
    with pytest.raises(InputError, match="cache_dir"):
        Builder.open(cache_dir=wrong)


def test_a_config_and_a_cache_directory_are_not_both_taken(config: Config, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not both"):
        Builder.open(config, cache_dir=tmp_path)


# One lookup


@pytest.mark.parametrize(
    ("arch", "others"), [("sm_90", {"sm_90a"}), ("sm_86", {"sm_86a", "sm_85", "sm_80"})]
)
def test_a_cold_kernel_is_looked_up_once_before_and_once_behind_the_lock(
    builder: Builder,
    open_device: Callable[..., Gpu],
    monkeypatch: pytest.MonkeyPatch,
    arch: str,
    others: set[str],
) -> None:
    looked_up: list[str] = []
    find = Lookup.find

    def counting(self: Lookup, request: Request, **how: Any) -> Hit | Miss:
        looked_up.append(str(request.arch))
        return find(self, request, **how)

    monkeypatch.setattr(Lookup, "find", counting)
    gpu = open_device("emulator", builder=builder, arch=arch)
    gpu.kernel(SAXPY, "saxpy")
    assert looked_up.count(arch) == 2
    assert others <= set(looked_up)
    assert max(Counter(other for other in looked_up if other != arch).values()) == 1
    looked_up.clear()
    open_device("emulator:1", builder=builder, arch=arch).kernel(SAXPY, "saxpy")
    assert looked_up == [arch]


def test_an_artifact_comes_with_the_tier_that_had_it(open_builder: Open, config: Config) -> None:
    first = open_builder(config)
    assert first.obtain(PROGRAM, "sm_90").tier == "compiler"
    assert first.obtain(PROGRAM, "sm_90").tier == "memory"
    assert open_builder(config).obtain(PROGRAM, "sm_90").tier == "disk"
    missing = first.lookup(Program.of("__global__ void other() {}"), "sm_90")
    assert missing == Miss("absent: nothing is stored under this key")
