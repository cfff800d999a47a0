"""Sealed: what is stored is used, without a compiler or headers; what is not is named and refused."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from preheat.arch import Arch
from preheat.artifact import Provenance
from preheat.build.builder import Builder
from preheat.build.lookup import Miss
from preheat.build.seal import in_force, seal, sealed, unseal
from preheat.cache import codec
from preheat.cache.bundle import Bundle, write
from preheat.cache.trust import open_file
from preheat.config import Config, SealMode
from preheat.devices.emulator.device import EmulatorDevice
from preheat.errors import (
    BundleError,
    CompileError,
    ConfigError,
    InputError,
    PreheatError,
    SealedError,
    ToolchainNotFoundError,
    WarmError,
)
from preheat.events import Events, log_events
from preheat.gpu import Gpu
from preheat.key import bundle_key
from preheat.program import Program
from tests.conftest import SAXPY, Recorder
from tests.processes import PATIENCE

PLAIN = Program.of(SAXPY, label="saxpy.cu", options=("-lineinfo",))
TWO = """
template <typename T> __global__ void scale(T* x, T by) { x[threadIdx.x] *= by; }
"""
NAMED = Program.of(TWO, label="scale.cu", names=("scale<float>",))
IN_MEMORY = Program.of(
    '#include "by.h"\nextern "C" __global__ void k(int* x) { x[0] *= BY; }',
    label="memory.cu",
    headers={"by.h": "#define BY 3\n"},
)
CLOCK = Program.of('extern "C" __global__ void when(char* x) { x[0] = __TIME__[0]; }', label="clock.cu")


def on_disk(place: Path) -> Program:
    """A program in `place` that includes files beside it, two steps away."""
    place.mkdir(exist_ok=True)
    (place / "outer.h").write_text('#include "inner.h"\n')
    (place / "inner.h").write_text("#define BY 5\n")
    source = '#include "outer.h"\nextern "C" __global__ void k(int* x) { x[0] *= BY; }'
    (place / "file.cu").write_text(source)
    return Program.from_file(place / "file.cu")


def elsewhere(program: Program, place: str) -> Program:
    """The same in a project that has moved: its file and the directory of that are in `place`."""
    if program.path is None:
        return program
    return replace(program, include=(place,), path=f"{place}/{program.label}")


class _NoCompiler:
    """A toolchain of a machine that has none: whatever it is asked fails, and is remembered."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name in ("close", "after_fork"):
            return lambda: None

        def refuse(*_: object) -> Any:
            self.asked.append(name)
            raise ToolchainNotFoundError("NVRTC was not found: not installed")

        return refuse


@dataclass
class Baked:
    """A bundle of a few programs, and what was put into it."""

    path: Path
    include: Path
    programs: dict[str, Program]


@pytest.fixture(scope="module")
def baked(shared_builder: Builder, tmp_path_factory: pytest.TempPathFactory) -> Baked:
    place = tmp_path_factory.mktemp("baked")
    file = on_disk(place / "include")
    entries: dict[str, bytes] = {}
    programs = {p.label: p for p in (PLAIN, NAMED, IN_MEMORY, CLOCK, file)}
    for program in programs.values():
        entries |= shared_builder.bundle_entry(program, "sm_90")[0].encode()
    write(place / "kernels.heat", entries, {})
    return Baked(place / "kernels.heat", place / "include", programs)


@pytest.fixture
def bare(tmp_path: Path, recorder: Recorder) -> Callable[..., Builder]:
    """Opens builders with an empty cache and no compiler."""

    def open_one(**settings: Any) -> Builder:
        config = Config(cache_dirs=(tmp_path / "empty",), lock_dir=tmp_path / "locks", **settings)
        builder = Builder.open(config, events=Events(recorder))
        builder.toolchain = _NoCompiler()  # type: ignore[assignment]
        return builder

    recorder.forgive = True
    return open_one


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
    label, change, arch, told = CHANGES[what]
    builder = bare(bundles=(baked.path,), sealed=SealMode.ERROR)
    with pytest.raises(SealedError) as refused:
        builder.build(change(baked.programs[label]), arch)
    error = refused.value
    assert (error.program, error.arch) == (label, arch)
    assert error.caller.startswith("test_seal.py:")
    assert error.nearest is not None
    assert error.nearest.startswith(f"{label} for sm_90 (")
    assert any(line.startswith(told) for line in error.differences), error.differences
    assert len(error.differences) == 1
    assert error.differences[0] in str(error)
    assert "record and bake" in str(error.hint)
    assert len(recorded(builder, "sealed")) == 1


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
    (told,) = refused.value.differences
    assert told.startswith("include: the bundle does not say for which directories it was baked")


def recorded(builder: Builder, name: str) -> list[Any]:
    (sink,) = builder.events._sinks[name]
    assert isinstance(sink, Recorder)
    return sink.named(name)


def test_the_error_of_a_kernel_names_it_and_the_line_that_asked(
    baked: Baked, bare: Callable[..., Builder]
) -> None:
    with Gpu(EmulatorDevice(0, "sm_90"), bare(bundles=(baked.path,), sealed=SealMode.ERROR)) as gpu:
        with pytest.raises(SealedError) as refused:
            gpu.kernel(TWO, "scale<double>", label="scale.cu")
        assert refused.value.entry == "scale<double>"
        assert str(refused.value).startswith("test_seal.py:")
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


def test_of_two_with_another_name_the_nearer_is_told_wherever_it_is(
    baked: Baked, config: Config, shared_builder: Builder, open_builder: Callable[..., Builder]
) -> None:
    far = shared_builder.build(NAMED, "sm_90")
    builder = open_builder(replace(config, bundles=(baked.path,)))
    builder.store.put(far.digest, far.encode())
    near = builder.nearest(replace(PLAIN, label="other.cu"), "sm_90")
    assert near is not None
    assert near.differences == ("label: 'saxpy.cu' became 'other.cu'",)


def test_an_empty_seal_says_that_nothing_is_stored(bare: Callable[..., Builder]) -> None:
    with pytest.raises(SealedError, match="process: nothing is stored") as refused:
        bare(sealed=SealMode.ERROR).build(PLAIN, "sm_90")
    assert refused.value.nearest is None
    assert refused.value.differences == ()


def test_a_seal_says_which_bundle_could_not_be_used(
    bare: Callable[..., Builder], tmp_path: Path
) -> None:
    builder = bare(sealed=SealMode.ERROR, bundles=(tmp_path / "no.heat",))
    with pytest.raises(SealedError, match=r"no\.heat cannot be read"):
        builder.build(PLAIN, "sm_90")


def test_what_the_cache_has_needs_no_compile_and_is_used_sealed(
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
    assert shared_builder.bundle_entry(CLOCK, "sm_90")[0].note.endswith("reads the clock")


def test_what_could_not_be_tracked_is_served_sealed_alone(
    shared_builder: Builder, open_builder: Callable[..., Builder], config: Config, tmp_path: Path
) -> None:
    (tmp_path / "maybe.h").write_text("#define BY 5\n")
    source = '#if __has_include("maybe.h")\n#include "maybe.h"\n#endif\n'
    source += "__global__ void k(int* x) { *x = BY; }"
    program = Program.of(source, label="maybe.cu", include=[tmp_path])
    promise = shared_builder.bundle_entry(program, "sm_90")[0]
    assert promise.note == "__has_include of maybe.h, which is not a toolkit header, cannot be tracked"
    write(tmp_path / "maybe.heat", promise.encode(), {})
    builder = open_builder(replace(config, bundles=(tmp_path / "maybe.heat",)))
    with sealed():
        assert builder.build(program, "sm_90").cubin == promise.artifact.cubin
        assert builder.bundle_entry(program, "sm_90")[0].note == promise.note
    (tmp_path / "maybe.h").write_text("#define BY 6\n")
    assert builder.why(program, "sm_90") == Miss(f"untracked: {promise.note}")
    assert builder.build(program, "sm_90").cubin != promise.artifact.cubin


def test_why_programs_could_not_be_stored_is_not_remembered_without_end(
    builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("preheat.build.compile._UNTRACKED", 1)
    for number in range(2):
        assert builder.bundle_entry(replace(CLOCK, label=f"{number}.cu"), "sm_90")[0].note
    assert len(builder._compiler._untracked) == 1


# Header files


def test_what_is_known_of_header_files_outlives_the_process(
    baked: Baked,
    config: Config,
    open_builder: Callable[..., Builder],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here, config = on_disk(tmp_path / "include"), replace(config, bundles=(baked.path,))
    monkeypatch.setattr("preheat.toolchain.evidence._SETTLED", 0)  # as if time had passed
    for _ in range(2):  # the second look may settle what the first one saw
        open_builder(config).build(here, "sm_90")
    monkeypatch.setattr("preheat.toolchain.evidence.hashlib", None)  # so that hashing one again fails
    assert open_builder(config).build(here, "sm_90").label == "file.cu"


def test_what_is_known_of_header_files_is_bounded(
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
    assert not isinstance(builder.why(here, "sm_90"), Miss)
    (tmp_path / "include" / "inner.h").write_text("#define BY 6\n")
    assert builder.why(here, "sm_90") == Miss("headers: header inner.h changed")
    for file in (tmp_path / "include").iterdir():
        file.unlink()
    assert not isinstance(builder.why(here, "sm_90"), Miss)


def test_sealed_a_changed_header_file_is_not_looked_at_but_why_tells(
    baked: Baked, config: Config, open_builder: Callable[..., Builder], tmp_path: Path
) -> None:
    here = on_disk(tmp_path / "include")
    (tmp_path / "include" / "inner.h").write_text("#define BY 6\n")
    builder = open_builder(replace(config, bundles=(baked.path,), sealed=SealMode.ERROR))
    assert builder.build(here, "sm_90").label == "file.cu"
    assert builder.why(here, "sm_90") == Miss("headers: header inner.h changed")


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
    assert line.startswith("test_seal.py:")
    assert "saxpy.cu for sm_90 is compiled although this process is sealed: absent" in line
    assert builder.stats()["process"]["sealed"] == 1


def test_a_warning_is_told_once_per_compile(config: Config) -> None:
    builder = Builder.open(replace(config, sealed=SealMode.WARN), events=Events())
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: builder.build(PLAIN, "sm_90"), range(8)))
    wrong = Program.of("__global__ void k() { nothing }", label="wrong.cu")
    for _ in range(3):
        with pytest.raises(CompileError):
            builder.build(wrong, "sm_90")
    builder.close()
    told = builder.stats()["process"]
    assert (told["compiles"], told["rejections"], told["sealed"]) == (1, 1, 2)


# The process


@pytest.fixture(autouse=True)
def unsealed() -> Iterator[None]:
    yield
    unseal()


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
            leave.wait(PATIENCE)

    thread = threading.Thread(target=other)
    with sealed():
        thread.start()
        assert entered.wait(PATIENCE)
    assert in_force() is SealMode.ERROR
    leave.set()
    thread.join(PATIENCE)
    assert in_force() is SealMode.OFF


@pytest.mark.parametrize("mode", ["", "yes", "Error", None, 3])
def test_other_words_are_no_seal(mode: Any) -> None:
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


# Mounting


def test_a_bundle_is_mounted_once_and_its_successor_takes_its_place(
    baked: Baked, builder: Builder, tmp_path: Path
) -> None:
    copy = tmp_path / "copy.heat"
    copy.write_bytes(baked.path.read_bytes())
    first, last = builder.mount(copy), builder.mount(baked.path)
    assert builder.mount(copy) is first
    write(copy, {}, {})
    successor = builder.mount(copy)
    assert builder.bundles == (successor, last)
    assert first.get(next(first.digests()))  # those who hold it can still read it


def test_a_bundle_replaced_between_opening_and_looking_is_mounted_anew(
    baked: Baked, builder: Builder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "copy.heat"
    copy.write_bytes(baked.path.read_bytes())

    def opened_then_replaced(path: Path, *, trust: bool) -> int:
        descriptor = open_file(path, trust=trust)
        write(copy, {}, {})
        return descriptor

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr("preheat.cache.bundle.open_file", opened_then_replaced)
        assert len(builder.mount(copy)) > 0
    assert len(builder.mount(copy)) == 0


def test_a_bundle_that_others_can_write_is_refused(
    baked: Baked, builder: Builder, tmp_path: Path
) -> None:
    open_to_all = tmp_path / "open.heat"
    open_to_all.write_bytes(baked.path.read_bytes())
    open_to_all.chmod(0o666)
    with pytest.raises(BundleError, match=r"cannot be trusted: others can write to it \(mode 0666\)"):
        builder.mount(open_to_all)
    assert builder.bundles == ()


def test_a_bundle_of_the_settings_that_cannot_be_used_is_an_event(
    bare: Callable[..., Builder], tmp_path: Path
) -> None:
    (tmp_path / "bad.heat").write_bytes(b"not a bundle")
    builder = bare(bundles=(tmp_path / "bad.heat", tmp_path / "no.heat"))
    assert [Path(row["path"]).name for row in recorded(builder, "refused")] == ["bad.heat", "no.heat"]


def test_a_damaged_entry_of_a_bundle_is_a_miss(
    baked: Baked, bare: Callable[..., Builder], tmp_path: Path
) -> None:
    whole = bytearray(baked.path.read_bytes())
    found = whole.find(b"saxpy.cu", len(whole) // 4)
    while found > 0:
        whole[found] ^= 1
        found = whole.find(b"saxpy.cu", found)
    (tmp_path / "bad.heat").write_bytes(whole)
    builder = bare(bundles=(tmp_path / "bad.heat",), sealed=SealMode.ERROR)
    with pytest.raises(SealedError, match="process: the entry failed its check"):
        builder.build(PLAIN, "sm_90")
    assert recorded(builder, "damaged")


def with_damage(baked: Baked, label: str, place: Path) -> Path:
    """The bundle, its promise for one program damaged, its code whole."""
    key = bundle_key(baked.programs[label], Arch.parse("sm_90")).digest
    with Bundle.open(baked.path) as bundle:
        promise = bundle.get(key)
    assert promise is not None
    bad = place / "bad.heat"
    bad.write_bytes(baked.path.read_bytes().replace(promise, bytes([*promise[:-1], promise[-1] ^ 1])))
    return bad


@pytest.mark.parametrize("label", ["saxpy.cu", "file.cu"])
def test_a_damaged_promise_hides_no_other(
    label: str, baked: Baked, bare: Callable[..., Builder], tmp_path: Path
) -> None:
    bad = with_damage(baked, label, tmp_path)
    builder = bare(bundles=(bad,), sealed=SealMode.ERROR)
    for program in baked.programs.values():
        with pytest.raises(SealedError) as refused:
            builder.build(replace(program, options=("-G",)), "sm_90")
        near = refused.value.nearest
        assert near is not None
        assert near.startswith(program.label) == (program.label != label)


def test_a_promise_is_made_anew_where_a_bundle_has_a_damaged_one(
    baked: Baked, shared_builder: Builder, config: Config, recorder: Recorder, tmp_path: Path
) -> None:
    recorder.forgive = True
    program = baked.programs["file.cu"]
    bad = with_damage(baked, "file.cu", tmp_path)
    builder = Builder.open(replace(config, bundles=(bad,)), events=Events(recorder))
    assert (
        builder.bundle_entry(program, "sm_90")[0].encode()
        == shared_builder.bundle_entry(program, "sm_90")[0].encode()
    )
    builder.close()


def test_code_of_a_bundle_that_a_device_refuses_is_replaced_once(
    shared_builder: Builder, open_builder: Callable[..., Builder], config: Config, recorder: Recorder
) -> None:
    recorder.forgive = True
    promise = shared_builder.bundle_entry(PLAIN, "sm_90")[0]
    newer = replace(promise.artifact, digest="ab" * 32)  # as another compiler would have made it
    bundle = config.lock_dir.with_name("newer.heat")
    write(bundle, replace(promise, artifact=newer).encode(), {})
    config = replace(config, bundles=(bundle,))
    for process in range(2):
        builder = open_builder(config)
        assert builder.build(PLAIN, "sm_90").digest == newer.digest
        mended = builder.rebuild(PLAIN, "sm_90", reason="too new for this driver")
        assert mended.digest == promise.artifact.digest
        assert builder.build(PLAIN, "sm_90") == mended
        assert len(recorder.named("compile")) == 1, process
    with sealed():
        assert open_builder(config).rebuild(PLAIN, "sm_90", reason="too new") == mended
        with pytest.raises(SealedError, match="process: too new"):
            builder.rebuild(PLAIN, "sm_90", reason="too new")
    assert builder.build(PLAIN, "sm_90") == mended


NONSENSE: list[tuple[str, Callable[[dict[str, Any]], object]]] = [
    ("promise", lambda meta: meta.update(entries="scale")),
    ("promise", lambda meta: meta.update(entries=[{}])),
    ("promise", lambda meta: meta.update(note=["why"])),
    ("promise", lambda meta: meta.update(include="{file}")),
    ("promise", lambda meta: meta.update(include=["{file}", 5])),
    ("promise", lambda meta: meta.update(states=[])),
    ("promise", lambda meta: meta["states"][0].update(entry=5)),
    ("promise", lambda meta: meta["states"][0].update(entry="00" * 32)),
    ("promise", lambda meta: meta["states"][0].update(headers=[[{}, "x.h", ""]])),
    ("promise", lambda meta: meta["states"][0].update(absent=[[[], "x.h"]])),
    ("promise", lambda meta: meta["states"][0].update(roots=[None])),
    ("code", lambda meta: meta.update(label=["file.cu"])),
    ("code", lambda meta: meta.update(toolchain=None)),
    ("code", lambda meta: meta.update(parts=[[{}, "1"]])),
    ("code", lambda meta: meta.update(headers=[["0", [], ""]])),
]


@pytest.mark.parametrize("case", range(len(NONSENSE)))
def test_nonsense_under_a_right_checksum_is_a_damaged_entry(
    case: int,
    baked: Baked,
    shared_builder: Builder,
    open_builder: Callable[..., Builder],
    recorder: Recorder,
    tmp_path: Path,
) -> None:
    recorder.forgive = True
    (of, spoil), program = NONSENSE[case], baked.programs["file.cu"]
    promise = shared_builder.bundle_entry(program, "sm_90")[0]
    entries = promise.encode()
    digest = promise.key if of == "promise" else promise.artifact.digest
    meta, sections = codec.unpack(digest, entries[digest])
    spoil(meta)
    write(tmp_path / "odd.heat", {**entries, digest: codec.pack(digest, meta, sections)}, {})
    builder = open_builder()
    builder.mount(tmp_path / "odd.heat")
    assert builder.why(program, "sm_90") == Miss("damaged: the entry failed its check")
    assert builder.nearest(program, "sm_90") is None
    with Gpu(EmulatorDevice(0, "sm_90"), builder) as gpu, pytest.raises(WarmError):
        gpu.warm(tmp_path / "odd.heat")


def test_a_request_event_tells_of_every_program_that_is_returned(builder: Builder) -> None:
    seen: list[tuple[str, str, str]] = []

    def sink(_: str, fields: Mapping[str, Any]) -> None:
        seen.append((fields["program"].label, str(fields["arch"]), str(fields["artifact"].arch)))

    builder.events.subscribe(sink, "request")
    builder.build(PLAIN, "sm_80")
    builder.lookup(PLAIN, "sm_86")
    assert builder.lookup(PLAIN, "sm_86", exact=True).artifact is None
    assert seen == [("saxpy.cu", "sm_80", "sm_80"), ("saxpy.cu", "sm_86", "sm_80")]
