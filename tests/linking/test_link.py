"""Links through a builder: what is stored, what is a miss, and what is wrong with the parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import preheat
from preheat.build.builder import Builder
from preheat.build.lookup import Hit, Miss
from preheat.errors import CompileError, CompilerCrashError, LinkError, PtxError, TargetError
from preheat.model.arch import Arch
from preheat.model.artifact import Artifact
from preheat.model.config import Config
from preheat.model.linked_program import BinaryPart, LinkedProgram
from preheat.model.program import Program
from preheat.toolchain import nvjitlink, signature
from preheat.toolchain.nvjitlink import Input
from tests.conftest import Recorder
from tests.linking.support import HELPER, HELPER_PROGRAM, MAIN, MAIN_PROGRAM, linked, on_disk
from tests.processes import TIMEOUT_SECONDS, expect_success, start_python

SM_90 = Arch.parse("sm_90")
both = pytest.mark.parametrize("lto", [False, True], ids=["rdc", "lto"])


def compiled(recorder: Recorder) -> list[str]:
    """Return the labels of what was compiled or linked, in order."""
    return [fields["program"] for fields in recorder.named("compile")]


@both
def test_a_link_is_stored_with_its_parts(
    builder: Builder, open_builder: Callable[..., Builder], recorder: Recorder, lto: bool
) -> None:
    made = builder.build(linked(lto=lto), SM_90)
    assert compiled(recorder) == ["main.cu", "helper.cu", "main.cu+helper.cu"]
    assert made.toolchain.startswith("NVRTC ")
    assert ", nvJitLink " in made.toolchain
    assert [str(entry) for entry in made.entries] == ["apply(float*, int)", "count<int>(int*)"]
    assert all(entry.resources is not None and entry.resources.registers for entry in made.entries)
    hit = open_builder().obtain(linked(lto=lto), SM_90)
    assert (hit.artifact, hit.tier) == (made, "disk")
    assert len(compiled(recorder)) == 3


CLASHES = """
template <class T> __device__ T apply(T x) { return x; }
extern "C" __global__ void apply(float* x, int n) { *x = n; }
#define SCALAR float
template <class T> __device__ void hidden(T x) {}
extern "C" __global__ void hidden(SCALAR x, float* y) { *y = x; }
#undef SCALAR
"""


@both
def test_a_part_with_clashing_names_has_types_or_a_reason(builder: Builder, lto: bool) -> None:
    main = Program.of(CLASHES, label="main.cu")
    made = builder.build(LinkedProgram.of([main, HELPER_PROGRAM], lto=lto), SM_90)
    assert str(made.entry("apply")) == "apply(float*, int)"
    assert "are unknown, because its name is also the name of other functions" in str(
        made.entry("hidden")
    )


def test_a_part_that_was_stored_with_an_earlier_probe_has_its_types(
    builder: Builder, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Versions before `__preheat_kernel` stored parts under the same keys."""
    earlier = {"apply": "&__preheat_sig<decltype(apply)>"}
    with monkeypatch.context() as patch:
        patch.setattr(signature, "probes", lambda part: earlier if "apply" in part.source else {})
        builder.build(linked(), SM_90)
        builder.clear_memory()
    recorder.seen.clear()
    other = Program.of(HELPER + "\n", label="other.cu")  # The stored part is linked again.
    made = builder.build(LinkedProgram.of([MAIN_PROGRAM, other]), SM_90)
    assert compiled(recorder) == ["other.cu", "main.cu+other.cu"]
    assert str(made.entry("apply")) == "apply(float*, int)"


@both
def test_a_change_of_one_part_compiles_that_part_alone(
    builder: Builder, recorder: Recorder, lto: bool
) -> None:
    builder.build(linked(lto=lto), SM_90)
    recorder.seen.clear()
    edited = replace(MAIN_PROGRAM, source=MAIN + "\n")
    builder.build(linked(lto=lto, main=edited), SM_90)
    assert compiled(recorder) == ["main.cu", "main.cu+helper.cu"]


def test_a_program_on_its_own_and_as_a_part_are_two_entries(
    builder: Builder, recorder: Recorder
) -> None:
    builder.build(HELPER_PROGRAM, SM_90)
    for lto in (False, True):
        builder.build(linked(lto=lto), SM_90)
    assert compiled(recorder).count("helper.cu") == 3


@both
def test_code_is_the_same_in_every_process(tmp_path: Path, events: preheat.Events, lto: bool) -> None:
    made = []
    for name in ("one", "two"):
        config = Config(cache_dirs=(tmp_path / name,), lock_dir=tmp_path / "locks")
        with_own_cache = Builder.open(config, events=events)
        artifact = with_own_cache.build(linked(lto=lto), SM_90)
        made.append((artifact.digest, artifact.cubin, artifact.ptx, artifact.log))
        with_own_cache.close()
    assert made[0] == made[1]


@both
def test_a_changed_header_is_a_miss_that_names_it(builder: Builder, tmp_path: Path, lto: bool) -> None:
    program = on_disk(tmp_path / "src", lto=lto)
    first = builder.build(program, SM_90)
    assert {header.root for header in first.headers} == {"0.0", "1.0"}
    header = tmp_path / "src" / "both.h"
    original = header.read_text()
    header.write_text(original.replace("BY 2", "BY 7"))
    builder.clear_memory()
    found = builder.lookup(program, SM_90)
    assert found == Miss("headers: header both.h changed")
    second = builder.build(program, SM_90)
    assert second.cubin != first.cubin
    header.write_text(original)
    builder.clear_memory()
    again = builder.lookup(program, SM_90)
    assert isinstance(again, Hit)
    assert again.artifact == first  # Both header states are stored.


def test_a_file_that_would_hide_a_header_of_a_part_is_a_miss(builder: Builder, tmp_path: Path) -> None:
    inner, outer = tmp_path / "inner", tmp_path / "outer"
    inner.mkdir()
    outer.mkdir()
    (outer / "v.h").write_text("#define V 1\n")
    kernel = Program.of(
        '#include <v.h>\nextern "C" __global__ void k(int* x) { *x = V; }', include=[inner, outer]
    )
    program = LinkedProgram.of([kernel, HELPER])
    builder.build(program, SM_90)
    (inner / "v.h").write_text("#define V 2\n")
    builder.clear_memory()
    found = builder.lookup(program, SM_90)
    assert isinstance(found, Miss)
    assert "a new v.h in" in found.reason


def test_a_damaged_link_is_made_again_from_its_stored_parts(
    builder: Builder, open_builder: Callable[..., Builder], recorder: Recorder, config: Config
) -> None:
    made = builder.build(linked(), SM_90)
    (file,) = (config.cache_dirs[0]).rglob(f"{made.digest}.heat")
    file.write_bytes(file.read_bytes()[:-40])
    recorder.seen.clear()
    recorder.forgive = True
    assert open_builder().build(linked(), SM_90) == made
    assert len(recorder.named("damaged")) == 1
    assert compiled(recorder) == ["main.cu+helper.cu"]


def test_a_part_that_reads_the_clock_keeps_the_link_out_of_the_cache(
    builder: Builder, recorder: Recorder
) -> None:
    clock = Program.of("__device__ char now = __TIME__[0];", label="clock.cu")
    program = LinkedProgram.of([MAIN_PROGRAM, HELPER_PROGRAM, clock])
    builder.build(program, SM_90)
    reasons = {fields["program"]: fields["reason"] for fields in recorder.named("uncached")}
    assert reasons[program.label] == "clock.cu: it uses __TIME__, which reads the clock"
    assert isinstance(builder.lookup(program, SM_90), Miss)


CROWD = """
import os, pathlib, sys, time
import preheat
from tests.linking.support import linked

gate, count = pathlib.Path(sys.argv[1]), int(sys.argv[2])
(gate / str(os.getpid())).touch()
while len(list(gate.iterdir())) < count:
    time.sleep(0.005)
artifact = preheat.compile(linked(), "sm_90")
print(int(preheat.default_builder().stats()["process"].get("compiles", 0)), artifact.digest)
"""


def test_eight_processes_compile_each_part_and_the_link_once(tmp_path: Path) -> None:
    (tmp_path / "gate").mkdir()
    root = Path(__file__).parents[2]
    env = {
        "PREHEAT_CACHE_DIR": str(tmp_path / "cache"),
        "PREHEAT_LOCK_DIR": str(tmp_path / "locks"),
        "PREHEAT_LOCK_WAIT": str(10 * TIMEOUT_SECONDS),
        "PYTHONPATH": f"{root / 'src'}:{root}",
    }
    started = [start_python(CROWD, str(tmp_path / "gate"), "8", env=env) for _ in range(8)]
    rows = [expect_success(process).split() for process in started]
    assert sum(int(compiles) for compiles, _ in rows) == 3
    assert len({digest for _, digest in rows}) == 1


# Wrong parts


def failure(
    builder: Builder, *parts: str | bytes | Program | BinaryPart, lto: bool = False
) -> LinkError:
    with pytest.raises(LinkError) as caught:
        builder.build(LinkedProgram.of(parts, label="app", lto=lto), SM_90)
    return caught.value


@both
def test_undefined_symbols_are_named_with_the_parts_that_use_them(
    shared_builder: Builder, lto: bool
) -> None:
    error = failure(shared_builder, MAIN_PROGRAM, "__device__ int other;", lto=lto)
    found = {symbol.title: symbol for symbol in error.undefined}
    assert set(found) == {"helper(float)", "calls"}
    helper = found["helper(float)"]
    assert helper.name == "_Z6helperf"
    assert (helper.mentioned if lto else helper.parts) == ("main.cu",)
    where = "mentioned in" if lto else "used by"
    assert str(error).startswith("app does not link for sm_90\n  undefined: ")
    assert f"undefined: helper(float) [_Z6helperf], {where} main.cu" in str(error)
    assert error.hint == "add the part that defines it"


def test_a_symbol_of_another_signature_is_shown_beside_the_undefined_one(
    shared_builder: Builder,
) -> None:
    other = HELPER.replace("helper(float x)", "helper(double x)")
    (undefined,) = failure(shared_builder, MAIN_PROGRAM, other).undefined
    assert undefined.similar == ("part1.cu defines helper(double)",)
    other = HELPER.replace("__device__ float helper", 'extern "C" __device__ float helper')
    error = failure(shared_builder, MAIN_PROGRAM, other)
    assert "part1.cu defines helper" in str(error)
    assert 'whether both are extern "C"' in (error.hint or "")


@both
def test_symbols_that_two_parts_define_are_named(shared_builder: Builder, lto: bool) -> None:
    again = Program.of("__device__ int calls = 1;", label="again.cu")
    error = failure(shared_builder, MAIN_PROGRAM, HELPER_PROGRAM, again, lto=lto)
    (symbol,) = error.multiple
    assert symbol.name == "calls"
    if lto:
        assert symbol.mentioned == ("main.cu", "helper.cu", "again.cu")
    else:
        assert "defined in helper.cu and again.cu: calls" in str(error)
    assert "define it in one part" in (error.hint or "")


def test_an_error_in_a_part_is_that_of_its_compiler(shared_builder: Builder) -> None:
    wrong = Program.of("__global__ void k() { missing(); }", label="wrong.cu")
    with pytest.raises(CompileError, match=r"wrong\.cu does not compile") as caught:
        shared_builder.build(LinkedProgram.of([wrong, HELPER]), SM_90)
    assert not isinstance(caught.value, LinkError)


def test_a_wrong_ptx_part_is_found_before_the_link(shared_builder: Builder) -> None:
    head = ".version 8.0\n.target {}\n.address_size 64\n"
    with pytest.raises(PtxError, match=r"no \.version"):
        shared_builder.build(LinkedProgram.of([HELPER, ".target sm_90\n"]), SM_90)
    for target in ("sm_100", "sm_90a"):
        with pytest.raises(TargetError, match=target):
            shared_builder.build(LinkedProgram.of([HELPER, head.format(target)]), SM_90)


WRONG_DATA = {
    "a cubin": BinaryPart(data=b"\x7fELF nonsense", kind="cubin", label="b.cubin"),
    "a fatbin": BinaryPart(data=b"nonsense", kind="fatbin", label="b.fatbin"),
    "a library": BinaryPart(data=b"nonsense", kind="library", label="b.a"),
    "an object file": BinaryPart(data=b"nonsense", kind="object", label="b.o"),
    "LTO-IR": BinaryPart(data=b"nonsense", kind="ltoir", label="b.ltoir"),
}


@pytest.mark.parametrize("what", WRONG_DATA)
def test_data_that_is_not_what_it_says_is_an_error_of_the_link(
    what: str, shared_builder: Builder
) -> None:
    part = WRONG_DATA[what]
    program = LinkedProgram.of([HELPER, part], lto=part.kind == "ltoir")
    with pytest.raises((LinkError, CompilerCrashError)):
        shared_builder.build(program, SM_90)


def test_an_unknown_option_is_named(shared_builder: Builder) -> None:
    with pytest.raises(LinkError, match="with -no-such-option"):
        shared_builder.build(LinkedProgram.of([HELPER], options=["-no-such-option"]), SM_90)


def test_a_linker_that_crashes_fails_its_link_alone(shared_builder: Builder) -> None:
    """nvJitLink crashes at a symbol that two cubins define; their symbols are not checked before."""
    helper = next(iter(LinkedProgram.of([HELPER_PROGRAM]).sources.values()))
    code = shared_builder.build(helper, SM_90).cubin
    program = LinkedProgram.of([MAIN_PROGRAM, code, code])
    with pytest.raises((LinkError, CompilerCrashError)):
        shared_builder.build(program, SM_90)
    assert shared_builder.build(linked(), SM_90).entries


def test_what_the_linker_prints_is_in_its_log(shared_builder: Builder) -> None:
    """It prints a symbol that two PTX texts define, and succeeds. Nothing of it reaches the user."""
    helper = next(iter(LinkedProgram.of([HELPER_PROGRAM]).sources.values()))
    text = shared_builder.build(helper, SM_90).ptx
    twice = [Input("ptx", name, text) for name in ("a", "b")]
    log = nvjitlink.link(twice, ["-arch=sm_90"]).log
    assert "Multiple definition of '_Z6helperf'" in log


def test_a_rejected_link_is_remembered(builder: Builder, recorder: Recorder) -> None:
    for _ in range(2):
        failure(builder, MAIN_PROGRAM)
    assert compiled(recorder) == ["main.cu"]
    assert len(recorder.named("recall")) == 1


# The function of the package


def test_link_returns_the_artifact(tmp_path: Path) -> None:
    (tmp_path / "main.cu").write_text(MAIN)
    (tmp_path / "helper.cu").write_text(HELPER)
    made = preheat.link(
        [tmp_path / "main.cu", str(tmp_path / "helper.cu")],
        "sm_90",
        lto=True,
        options=["-O3"],
        label="app",
        cache_dir=tmp_path / "cache",
    )
    assert isinstance(made, Artifact)
    assert (made.label, [entry.name for entry in made.entries]) == ("app", ["apply"])
    assert made.entry("apply").parameters[0].type == "float*"
    preheat.default_builder(tmp_path / "cache").close()


def test_static_libraries_of_the_toolkit_are_linked(shared_builder: Builder) -> None:
    """The device runtime, which dynamic parallelism needs, is a library of the toolkit."""
    nvidia = pytest.importorskip("nvidia")
    libraries = [file for place in nvidia.__path__ for file in Path(place).rglob("libcudadevrt.a")]
    if not libraries:
        pytest.skip("libcudadevrt.a is not installed")
    parent = """
    __global__ void child(int* x) { *x = 1; }
    extern "C" __global__ void parent(int* x) { child<<<1, 1>>>(x); }
    """
    made = shared_builder.build(LinkedProgram.of([parent, libraries[0]]), SM_90)
    assert "parent" in [entry.name for entry in made.entries]
    (undefined, *_) = failure(shared_builder, parent).undefined
    assert "GetParameterBuffer" in undefined.name
