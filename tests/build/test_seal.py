"""Sealed processes: stored code is used without a compiler or headers; a miss is named and refused."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from preheat.build.builder import Builder
from preheat.build.lookup import Miss
from preheat.build.seal import SEALED_BY, in_force, seal, sealed, unseal
from preheat.emulator.device import EmulatorDevice
from preheat.errors import (
    CompileError,
    ConfigError,
    InputError,
    PreheatError,
    SealedError,
    ToolchainNotFoundError,
)
from preheat.gpu import Gpu
from preheat.model import codec
from preheat.model.arch import Arch
from preheat.model.artifact import Provenance
from preheat.model.config import Config, SealMode
from preheat.model.events import Events, log_events
from preheat.model.foreign import ForeignRequest
from preheat.model.key import bundle_key
from preheat.model.program import Program
from preheat.store.bundle import Bundle, write
from tests.build.sealed import CLOCK, NAMED, PLAIN, TWO, Baked, elsewhere, on_disk, recorded
from tests.conftest import SAXPY
from tests.processes import TIMEOUT_SECONDS


def test_a_sealed_process_needs_no_compiler_no_header_and_no_cache(
    baked: Baked, bare: Callable[..., Builder], tmp_path: Path
) -> None:
    moved = tmp_path / "elsewhere" / "renamed.heat"
    moved.parent.mkdir()
    moved.write_bytes(baked.path.read_bytes())
    builder = bare(bundles=(moved,), sealed=SealMode.ERROR)
    for program in baked.programs.values():
        gone = elsewhere(program, "/nowhere/at/all")
        assert builder.build(gone, "sm_90").cubin
        assert builder.lookup(gone, "sm_90").artifact is not None
    assert builder.toolchain.asked == []  # type: ignore[attr-defined]
    assert builder.stats()["process"] == pytest.approx(
        {"hits.bundle": 10, "bytes_read": builder.stats()["process"]["bytes_read"], "seconds_saved": 0}
    )


def test_a_sealed_kernel_runs_on_a_device(baked: Baked, bare: Callable[..., Builder]) -> None:
    builder = bare(bundles=(baked.path,), sealed=SealMode.ERROR)
    with Gpu(EmulatorDevice(0, "sm_90"), builder) as gpu:
        x = gpu.array([1.0, 2.0, 3.0], "float32")
        gpu.kernel(TWO, "scale<float>", label="scale.cu")[1, 3](x, 2.0)
        assert x.numpy().tolist() == [2.0, 4.0, 6.0]
    assert builder.toolchain.asked == []  # type: ignore[attr-defined]


CHANGES: dict[str, tuple[str, Callable[[Program], Program], str, str]] = {
    "option": (
        "saxpy.cu",
        lambda p: replace(p, options=("-use_fast_math",)),
        "sm_90",
        "option[0]: '-lineinfo' became '-use_fast_math'",
    ),
    "further option": (
        "saxpy.cu",
        lambda p: replace(p, options=(*p.options, "-G")),
        "sm_90",
        "option[1]: '-G' is new",
    ),
    "source": ("saxpy.cu", lambda p: replace(p, source=p.source + "\n"), "sm_90", "source: "),
    "header": (
        "memory.cu",
        lambda p: replace(p, headers=(("by.h", "#define BY 4\n"),)),
        "sm_90",
        "header:by.h: '#define BY 3\\n' became '#define BY 4\\n'",
    ),
    "entry": (
        "scale.cu",
        lambda p: replace(p, names=("scale<double>",)),
        "sm_90",
        "name[0]: 'scale<float>' became 'scale<double>'",
    ),
    "arch": ("saxpy.cu", lambda p: p, "sm_80", "arch: 'sm_90' became 'sm_80'"),
    "include directory": (
        "file.cu",
        lambda p: replace(p, include=(f"{p.include[0]}/sub",)),
        "sm_90",
        "include[0]: '{file}' became '{file}/sub'",
    ),
    "further include directory": (
        "file.cu",
        lambda p: replace(p, include=(*p.include, "/opt/include")),
        "sm_90",
        "include[1]: '/opt/include' is new",
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_seal_names_what_differs_from_the_nearest(
    what: str, baked: Baked, bare: Callable[..., Builder]
) -> None:
    label, change, arch, reported = CHANGES[what]
    builder = bare(bundles=(baked.path,), sealed=SealMode.ERROR)
    with pytest.raises(SealedError) as refused:
        builder.build(change(baked.programs[label]), arch)
    error = refused.value
    assert (error.program, error.arch) == (label, arch)
    assert error.caller.startswith("tests/build/test_seal.py:")
    assert error.nearest is not None
    assert error.nearest.startswith(f"{label} for sm_90 (")
    assert any(line.startswith(reported) for line in error.differences), error.differences
    assert len(error.differences) == 1
    assert error.differences[0] in str(error)
    assert ("bake for sm_80 as well: " if what == "arch" else "record and bake") in str(error.hint)
    assert len(recorded(builder, "sealed")) == 1


def test_the_hint_names_what_lifts_the_seal(
    bare: Callable[..., Builder], monkeypatch: pytest.MonkeyPatch
) -> None:
    def hint(builder: Builder) -> str:
        hints = []
        for build in (
            lambda: builder.build(Program.of(SAXPY), "sm_90"),
            lambda: builder.foreign.obtain(ForeignRequest("mylib", "key"), dict),
        ):
            with pytest.raises(SealedError) as refused:
                build()
            hints += [refused.value.hint, refused.value.naming("k").hint]
        (same,) = set(hints)
        return str(same).partition("or let it compile with ")[2]

    configured = bare(sealed=SealMode.ERROR)
    assert hint(configured) == "PREHEAT_SEALED=warn"
    monkeypatch.setenv(SEALED_BY, "run")
    assert hint(configured) == "'preheat run --sealed warn'"
    with sealed():
        assert hint(bare()) == 'preheat.sealed("warn")'
    seal()
    try:
        assert hint(bare()) == 'preheat.seal("warn")'
    finally:
        unseal()


def test_a_bundle_from_before_include_directories_counted_answers_what_includes_nothing(
    baked: Baked, bare: Callable[..., Builder], tmp_path: Path
) -> None:
    """And says of the rest that it does not know for which directories it was baked."""
    entries: dict[str, bytes] = {}
    with Bundle.open(baked.path) as bundle:
        for digest in bundle.digests():
            meta, sections = codec.unpack_checked(bundle.get(digest) or b"")
            if meta.get("kind") == "promise":
                del meta["include"]
                if meta["label"] == "file.cu":
                    digest = "0" * 64
            entries[digest] = codec.pack(digest, meta, sections)
    write(tmp_path / "old.heat", entries, {})
    builder = bare(bundles=(tmp_path / "old.heat",), sealed=SealMode.ERROR)
    assert builder.build(PLAIN, "sm_90").cubin
    with pytest.raises(SealedError) as refused:
        builder.build(baked.programs["file.cu"], "sm_90")
    (reported,) = refused.value.differences
    assert reported.startswith("include: the bundle does not say for which directories it was baked")


def test_the_error_of_a_kernel_names_it_and_the_line_that_asked(
    baked: Baked, bare: Callable[..., Builder]
) -> None:
    with Gpu(EmulatorDevice(0, "sm_90"), bare(bundles=(baked.path,), sealed=SealMode.ERROR)) as gpu:
        with pytest.raises(SealedError) as refused:
            gpu.kernel(TWO, "scale<double>", label="scale.cu")
        assert refused.value.entry == "scale<double>"
        assert str(refused.value).startswith("tests/build/test_seal.py:")
        assert "scale<double> (scale.cu, sm_90) cannot be compiled in this sealed process" in str(
            refused.value
        )
        with pytest.raises(SealedError):
            gpu.module(SAXPY, arch="sm_90a", label="saxpy.cu", options=["-lineinfo"])


def test_the_search_for_the_nearest_ends_in_time(
    baked: Baked, bare: Callable[..., Builder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("preheat.build.builder._SEARCH", 0.0)
    with pytest.raises(SealedError) as refused:
        bare(bundles=(baked.path,), sealed=SealMode.ERROR).build(replace(PLAIN, options=()), "sm_90")
    assert refused.value.nearest is None


def test_the_nearest_is_sought_in_caches_and_layers_too(
    config: Config, shared_builder: Builder, open_builder: Callable[..., Builder]
) -> None:
    program = replace(PLAIN, label="near.cu")
    shared_builder.build(program, "sm_90")
    assert shared_builder.disk is not None
    builder = open_builder(replace(config, layers=(shared_builder.disk.root,)))
    assert builder.disk is not None
    builder.disk.put_note("ab" * 32, b"{}")  # of an entry that a layer or a bundle has
    near = builder.nearest(replace(program, options=()), "sm_90")
    assert near is not None
    assert near.differences == ("option[0]: '-lineinfo' is gone",)


def test_of_two_with_another_name_the_nearer_is_reported_wherever_it_is(
    baked: Baked, config: Config, shared_builder: Builder, open_builder: Callable[..., Builder]
) -> None:
    far = shared_builder.build(NAMED, "sm_90")
    builder = open_builder(replace(config, bundles=(baked.path,)))
    builder.cache.put(far.digest, far.encode())
    near = builder.nearest(replace(PLAIN, label="other.cu"), "sm_90")
    assert near is not None
    assert near.differences == ("label: 'saxpy.cu' became 'other.cu'",)


def test_an_empty_seal_says_that_nothing_is_stored(bare: Callable[..., Builder]) -> None:
    with pytest.raises(SealedError, match="process: nothing is stored") as refused:
        bare(sealed=SealMode.ERROR).build(PLAIN, "sm_90")
    assert refused.value.nearest is None
    assert refused.value.differences == ()


def test_a_cached_program_needs_no_compile_and_is_used_when_sealed(
    config: Config, shared_builder: Builder, open_builder: Callable[..., Builder]
) -> None:
    open_builder().build(PLAIN, "sm_90")
    builder = open_builder(replace(config, sealed=SealMode.ERROR))
    assert builder.build(PLAIN, "sm_90") == shared_builder.build(PLAIN, "sm_90")
    with pytest.raises(SealedError) as refused:
        builder.build(replace(PLAIN, options=()), "sm_90")
    assert refused.value.differences == ("option[0]: '-lineinfo' is gone",)


def test_a_program_that_no_cache_keeps_is_served_sealed_and_compiled_otherwise(
    baked: Baked, bare: Callable[..., Builder], shared_builder: Builder
) -> None:
    assert bare(bundles=(baked.path,), sealed=SealMode.ERROR).build(CLOCK, "sm_90").label == "clock.cu"
    with pytest.raises(ToolchainNotFoundError):
        bare(bundles=(baked.path,)).build(CLOCK, "sm_90")
    assert shared_builder.bundle_entry(CLOCK, "sm_90")[0].untracked_reason.endswith("reads the clock")


def test_a_program_that_could_not_be_tracked_is_used_only_when_sealed(
    shared_builder: Builder, open_builder: Callable[..., Builder], config: Config, tmp_path: Path
) -> None:
    (tmp_path / "maybe.h").write_text("#define BY 5\n")
    source = '#if __has_include("maybe.h")\n#include "maybe.h"\n#endif\n'
    source += "__global__ void k(int* x) { *x = BY; }"
    program = Program.of(source, label="maybe.cu", include=[tmp_path])
    promise = shared_builder.bundle_entry(program, "sm_90")[0]
    assert (
        promise.untracked_reason
        == "__has_include of maybe.h, which is not a toolkit header, cannot be tracked"
    )
    write(tmp_path / "maybe.heat", promise.encode(), {})
    builder = open_builder(replace(config, bundles=(tmp_path / "maybe.heat",)))
    with sealed():
        assert builder.build(program, "sm_90").cubin == promise.artifact.cubin
        assert builder.bundle_entry(program, "sm_90")[0].untracked_reason == promise.untracked_reason
    (tmp_path / "maybe.h").write_text("#define BY 6\n")
    assert builder.explain_lookup(program, "sm_90") == Miss(f"untracked: {promise.untracked_reason}")
    assert builder.build(program, "sm_90").cubin != promise.artifact.cubin


def test_why_programs_could_not_be_stored_is_not_remembered_without_end(
    builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("preheat.build.compile._UNTRACKED", 1)
    for number in range(2):
        assert builder.bundle_entry(replace(CLOCK, label=f"{number}.cu"), "sm_90")[0].untracked_reason
    assert len(builder._compiler._untracked) == 1


# Header files


def test_knowledge_of_header_files_outlives_the_process(
    baked: Baked,
    config: Config,
    open_builder: Callable[..., Builder],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = on_disk(tmp_path / "include")
    config = replace(config, bundles=(baked.path,))
    monkeypatch.setattr("preheat.toolchain.headers.evidence._SETTLED", 0)  # as if time had passed
    for _ in range(2):  # the second look may settle what the first one saw
        open_builder(config).build(here, "sm_90")
    monkeypatch.setattr(
        "preheat.toolchain.headers.evidence.hashlib", None
    )  # so that hashing one again fails
    assert open_builder(config).build(here, "sm_90").label == "file.cu"


def test_knowledge_of_header_files_is_bounded(
    baked: Baked,
    shared_builder: Builder,
    builder: Builder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    promise = shared_builder.bundle_entry(baked.programs["file.cu"], "sm_90")[0]
    others = [replace(baked.programs["file.cu"], label=f"{number}.cu") for number in range(5)]
    entries: dict[str, bytes] = {}
    for other in others:
        entries |= replace(promise, key=bundle_key(other, Arch.parse("sm_90")).digest).encode()
    write(tmp_path / "many.heat", entries, {})
    builder.mount(tmp_path / "many.heat")
    monkeypatch.setattr("preheat.build.lookup._MEMOS", 3)
    for other in others:
        assert builder.build(other, "sm_90") == replace(promise.artifact, provenance=Provenance())
    assert len(builder._stored.memos) == 3


def test_unsealed_a_changed_header_file_is_noticed_and_a_missing_one_is_not(
    baked: Baked, config: Config, open_builder: Callable[..., Builder], tmp_path: Path
) -> None:
    here = on_disk(tmp_path / "include")
    builder = open_builder(replace(config, bundles=(baked.path,)))
    assert not isinstance(builder.explain_lookup(here, "sm_90"), Miss)
    (tmp_path / "include" / "inner.h").write_text("#define BY 6\n")
    assert builder.explain_lookup(here, "sm_90") == Miss("headers: header inner.h changed")
    for file in (tmp_path / "include").iterdir():
        file.unlink()
    assert not isinstance(builder.explain_lookup(here, "sm_90"), Miss)


# Warning instead


def test_a_warning_seal_counts_logs_and_compiles(
    config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    builder = Builder.open(replace(config, sealed=SealMode.WARN), events=Events(log_events()))
    with caplog.at_level(logging.WARNING, "preheat"):
        builder.build(PLAIN, "sm_90")
        builder.build(PLAIN, "sm_90")
    builder.close()
    (line,) = caplog.messages
    assert line.startswith("tests/build/test_seal.py:")
    assert "saxpy.cu for sm_90 is compiled although this process is sealed: absent" in line
    assert builder.stats()["process"]["sealed"] == 1


def test_a_warning_is_reported_once_per_compile(config: Config) -> None:
    builder = Builder.open(replace(config, sealed=SealMode.WARN), events=Events())
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: builder.build(PLAIN, "sm_90"), range(8)))
    wrong = Program.of("__global__ void k() { nothing }", label="wrong.cu")
    for _ in range(3):
        with pytest.raises(CompileError):
            builder.build(wrong, "sm_90")
    builder.close()
    reported = builder.stats()["process"]
    assert (reported["compiles"], reported["rejections"], reported["sealed"]) == (1, 1, 2)


def test_a_seal_holds_for_every_builder_until_it_is_lifted(builder: Builder) -> None:
    seal()
    with pytest.raises(SealedError):
        builder.build(PLAIN, "sm_90")
    unseal()
    assert builder.build(PLAIN, "sm_90")


def test_of_several_seals_the_strictest_holds() -> None:
    with sealed("warn"):
        assert in_force() is SealMode.WARN
        with sealed():
            assert in_force() is SealMode.ERROR
            with sealed("warn"):
                assert in_force() is SealMode.ERROR
        assert in_force() is SealMode.WARN
        seal()
        assert in_force() is SealMode.ERROR
    assert in_force() is SealMode.ERROR
    unseal()
    assert in_force() is SealMode.OFF


def test_a_block_that_raises_is_no_longer_sealed() -> None:
    with pytest.raises(PreheatError), sealed():
        raise PreheatError("x")
    assert in_force() is SealMode.OFF


def test_blocks_of_two_threads_that_overlap_both_hold_to_their_end() -> None:
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with sealed():
            entered.set()
            leave.wait(TIMEOUT_SECONDS)

    thread = threading.Thread(target=other)
    with sealed():
        thread.start()
        assert entered.wait(TIMEOUT_SECONDS)
    assert in_force() is SealMode.ERROR
    leave.set()
    thread.join(TIMEOUT_SECONDS)
    assert in_force() is SealMode.OFF


@pytest.mark.parametrize("mode", ["", "yes", "Error", None, 3])
def test_an_unknown_seal_mode_is_refused(mode: Any) -> None:
    with pytest.raises(InputError, match="a seal is 'error' or 'warn'"):
        seal(mode)


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        ("1", SealMode.ERROR),
        ("ON", SealMode.ERROR),
        ("0", SealMode.OFF),
        (" Warn ", SealMode.WARN),
        ("", SealMode.OFF),
    ],
)
def test_the_environment_seals(text: str, mode: SealMode) -> None:
    assert Config.from_env({"PREHEAT_SEALED": text}).sealed is mode


def test_a_seal_that_cannot_be_read_is_named() -> None:
    with pytest.raises(ConfigError, match="PREHEAT_SEALED"):
        Config.from_env({"PREHEAT_SEALED": "strict"})
