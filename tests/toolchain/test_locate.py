"""The compilers are searched once and remembered between processes; a missing one has a hint."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from preheat.errors import InputError, ToolchainChangedError, ToolchainNotFoundError
from preheat.model import codec
from preheat.model.arch import Arch
from preheat.model.events import Events
from preheat.model.program import Program
from preheat.toolchain import frames
from preheat.toolchain.binaries.elf import build_id
from preheat.toolchain.compiler import Toolchain
from preheat.toolchain.headers.states import TOOLKIT
from preheat.toolchain.locate import SEARCH_VARIABLES, Library, Located
from tests import processes
from tests.conftest import Recorder
from tests.processes import TIMEOUT_SECONDS


@pytest.fixture(autouse=True)
def compilers_located_once() -> None:
    """Each test searches for the compilers."""


@pytest.fixture
def first(tmp_path: Path, events: Events, recorder: Recorder) -> Located:
    """Return what a first process finds; the result is remembered in the directory of the test."""
    located = look(tmp_path, events)
    assert [e["what"] for e in recorder.named("worker")] == ["started"]
    recorder.seen.clear()
    return located


def look(memo_dir: Path | None, events: Events) -> Located:
    """Return what another process finds."""
    toolchain = Toolchain(events, timeout=TIMEOUT_SECONDS, memo_dir=memo_dir)
    located = toolchain.located
    toolchain.close()
    return located


def memo(tmp_path: Path) -> Path:
    (path,) = tmp_path.glob("toolchain-*.json")
    return path


def row_of(path: Path) -> dict[str, Any]:
    """Return the row of a memo."""
    row: dict[str, Any] = json.loads(codec.unpack_checked(path.read_bytes()).sections["memo"])
    return row


def rewrite(path: Path, row: dict[str, Any]) -> None:
    """Let a memo say something else, with the checksum that belongs to it."""
    sections = {"memo": json.dumps(row).encode()}
    path.write_bytes(codec.pack(path.read_bytes()[10:42].hex(), {}, sections))


def test_both_compilers_and_the_headers_are_found(first: Located) -> None:
    assert first.library("nvrtc").title == "NVRTC"
    assert first.library("nvJitLink").title == "nvJitLink"
    for library in first.libraries.values():
        assert Path(library.path).is_file()
        assert library.version.split(".")[0].isdecimal()
    assert list(first.roots) == ["cuda", "cccl"]
    assert Path(first.roots["cuda"], "cuda_fp16.h").is_file()
    assert Path(first.roots["cccl"], "cub").is_dir()
    assert {80, 90, 100} <= set(first.archs)
    assert first.missing == {}


def test_identity_and_version_name_the_compiler_of_the_language(toolchain: Toolchain) -> None:
    located = toolchain.located
    assert toolchain.identity("cuda") == f"nvrtc {located.library('nvrtc').build}"
    assert toolchain.identity("ptx") == f"nvJitLink {located.library('nvJitLink').build}"
    assert toolchain.version("cuda") == f"NVRTC {located.library('nvrtc').version}"


def test_own_include_directories_come_before_the_toolkits(toolchain: Toolchain) -> None:
    program = Program.of("//", include=["/one", "/two"])
    assert list(toolchain.roots(program)) == ["0", "1", "cuda", "cccl"]


@pytest.mark.usefixtures("first")
def test_a_second_process_starts_no_worker(tmp_path: Path, events: Events, recorder: Recorder) -> None:
    found = look(tmp_path, events)
    assert recorder.named("worker") == []
    assert {80, 90} <= set(found.archs)


def test_a_second_process_finds_the_same(tmp_path: Path, events: Events, first: Located) -> None:
    assert look(tmp_path, events) == first


def test_without_a_directory_nothing_is_remembered(events: Events, recorder: Recorder) -> None:
    assert look(None, events) == look(None, events)
    assert len(recorder.named("worker")) == 2


@pytest.mark.usefixtures("first")
def test_one_toolchain_looks_once(tmp_path: Path, events: Events) -> None:
    toolchain = Toolchain(events, timeout=TIMEOUT_SECONDS, memo_dir=tmp_path)
    found = toolchain.located
    memo(tmp_path).unlink()
    assert toolchain.located is found


@pytest.mark.usefixtures("first")
def test_the_memo_is_private(tmp_path: Path) -> None:
    assert memo(tmp_path).stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.glob("toolchain-*")] == [memo(tmp_path).name]


# What invalidates the memo


@pytest.mark.parametrize("field", [0, 1, 2], ids=["size", "time", "inode"])
@pytest.mark.usefixtures("first")
def test_a_library_with_another_stamp_is_searched_again(
    tmp_path: Path, events: Events, recorder: Recorder, field: int
) -> None:
    row = row_of(memo(tmp_path))
    row["stamps"][0][field] += 1
    rewrite(memo(tmp_path), row)
    look(tmp_path, events)
    assert len(recorder.named("worker")) == 1
    look(tmp_path, events)
    assert len(recorder.named("worker")) == 1  # remembered anew


@pytest.mark.usefixtures("first")
def test_a_library_that_was_removed_is_searched_again(
    tmp_path: Path, events: Events, recorder: Recorder
) -> None:
    row = row_of(memo(tmp_path))
    row["libraries"]["nvrtc"]["files"][0] = str(tmp_path / "gone.so")
    rewrite(memo(tmp_path), row)
    assert look(tmp_path, events).library("nvrtc").path != str(tmp_path / "gone.so")
    assert len(recorder.named("worker")) == 1


@pytest.mark.parametrize("variable", SEARCH_VARIABLES)
@pytest.mark.usefixtures("first")
def test_another_search_variable_is_another_search(
    tmp_path: Path, events: Events, recorder: Recorder, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    with monkeypatch.context() as changed:
        changed.setenv(variable, str(tmp_path / "nothing"))
        look(tmp_path, events)
    assert len(recorder.named("worker")) == 1
    look(tmp_path, events)
    assert len(recorder.named("worker")) == 1  # the first search is still remembered


@pytest.mark.usefixtures("first")
def test_an_installed_package_is_another_search(
    tmp_path: Path, events: Events, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "site-packages"
    place.mkdir()
    monkeypatch.setattr(sys, "path", [*sys.path, str(place)])
    look(tmp_path, events)
    look(tmp_path, events)
    assert len(recorder.named("worker")) == 1
    os.utime(place, (1, 1))
    look(tmp_path, events)
    assert len(recorder.named("worker")) == 2


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"libraries": {}}', '{"libraries": {"nvrtc": {}}}'])
@pytest.mark.usefixtures("first")
def test_a_damaged_memo_is_no_memo(
    tmp_path: Path, events: Events, recorder: Recorder, damage: str
) -> None:
    memo(tmp_path).write_text(damage)
    assert look(tmp_path, events).missing == {}
    assert len(recorder.named("worker")) == 1


def test_a_memo_that_cannot_be_written_costs_nothing_but_the_search(
    tmp_path: Path, events: Events
) -> None:
    assert look(tmp_path / "gone", events).missing == {}
    assert list(tmp_path.glob("**/*.json")) == []


# Upgrades

#: Uses the NVRTC in argv[1] and prints its identity; repeats that after each line that it reads.
LOADED = """
import ctypes, json, sys
from types import SimpleNamespace
import cuda.pathfinder as pathfinder

path = f"{sys.argv[1]}/libnvrtc.so.13"
ours = SimpleNamespace(abs_path=path, _handle_uint=ctypes.CDLL(path)._handle)
real = pathfinder.load_nvidia_dynamic_lib
pathfinder.load_nvidia_dynamic_lib = lambda name: ours if name == "nvrtc" else real(name)
from preheat.toolchain import worker

print(json.dumps(worker._locate({}, {})[0]["libraries"]["nvrtc"]), flush=True)
for _ in sys.stdin:
    print(json.dumps(worker._files_and_build("nvrtc")), flush=True)
"""


@pytest.fixture
def lib(tmp_path: Path, toolchain: Toolchain) -> Path:
    """Return a directory with an NVRTC of the test's own."""
    directory = tmp_path / "lib"
    directory.mkdir()
    for file in map(Path, toolchain.located.library("nvrtc").files):
        try:
            (directory / file.name).hardlink_to(file)
        except OSError:
            shutil.copy(file, directory)
    return directory


def upgrade(source: Path, target: Path, change: int) -> str:
    """Put a copy of `source` with another build id in the place of `target`; its build id."""
    content = source.read_bytes()
    known = bytes.fromhex(build_id(source))
    changed = bytes([known[0] ^ change]) + known[1:]
    staged = target.with_suffix(".staged")
    staged.write_bytes(content.replace(known, changed, 1))
    staged.replace(target)
    return build_id(target)


def test_the_built_ins_that_nvrtc_loads_are_part_of_its_build(lib: Path) -> None:
    (real,) = lib.glob("libnvrtc-builtins.so.*")
    older = upgrade(real, lib / "libnvrtc-builtins.so.12.9", 1)
    first = build_id(real)
    process = processes.start_python(LOADED, str(lib))
    found = json.loads(processes.read_line(process))
    assert [Path(file).name for file in found["files"]] == ["libnvrtc.so.13", real.name]
    assert found["build"] == f"{build_id(lib / 'libnvrtc.so.13')}+{first}"
    second = upgrade(real, real, 2)
    assert len({older, first, second}) == 3
    processes.write_line(process)
    assert (
        json.loads(processes.read_line(process))["build"] == found["build"]
    )  # The loaded library is the same.
    processes.wait_for_exit(process)
    again = json.loads(processes.read_line(processes.start_python(LOADED, str(lib))))
    assert again["build"] == f"{build_id(lib / 'libnvrtc.so.13')}+{second}"


WITHOUT_RPATH = """
import sys
from preheat.toolchain import nvrtc

nvrtc.load(sys.argv[1])
done = nvrtc.compile_program(b"", "empty.cu", ["--no-cache"], names=(), headers={})
print(done.status, done.log)
"""


def test_the_built_ins_beside_a_library_without_an_rpath_are_found(lib: Path) -> None:
    """The wheel of NVRTC 13.0 has no RPATH, and torch pins that version."""
    library = lib / "libnvrtc.so.13"
    content = library.read_bytes()
    library.unlink()  # It may be a link to the installed file.
    library.write_bytes(content.replace(b"$ORIGIN", b"/absent"))
    process = processes.start_python(WITHOUT_RPATH, str(library))
    assert processes.read_line(process).split() == ["NVRTC_SUCCESS"]


def test_a_library_replaced_since_it_was_loaded_is_not_remembered(
    tmp_path: Path, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    toolchain = Toolchain(events, timeout=TIMEOUT_SECONDS, memo_dir=tmp_path)
    found = toolchain.pool.call({"do": "locate"}).message
    found["libraries"]["nvrtc"]["build"] = "an older one"
    monkeypatch.setattr(toolchain.pool, "call", lambda _: frames.Frame(found, {}))
    assert toolchain.identity("cuda") == "nvrtc an older one"  # it is what compiles
    assert list(tmp_path.glob("toolchain-*")) == []
    toolchain.close()


def test_a_worker_that_has_loaded_another_library_is_replaced(
    lib: Path, toolchain: Toolchain, events: Events, recorder: Recorder
) -> None:
    true = toolchain.located
    recorder.seen.clear()
    own = Toolchain(events, timeout=TIMEOUT_SECONDS)
    own.pool.call({"do": "locate"})
    files = tuple(str(lib / Path(file).name) for file in true.library("nvrtc").files)
    copied = true.library("nvrtc")._replace(files=files)
    own._located = true._replace(libraries={**true.libraries, "nvrtc": copied})
    compiled = own.compile(Program.of("__global__ void k() {}"), Arch.parse("sm_90"))
    assert compiled.build == true.library("nvrtc").build
    assert [e["what"] for e in recorder.named("worker")] == ["started", "ended", "started"]
    assert recorder.named("worker")[1]["reason"] == "OTHER_LIBRARY"
    own.close()


def test_a_library_that_is_gone_is_a_changed_toolchain(
    toolchain: Toolchain, events: Events, tmp_path: Path
) -> None:
    true = toolchain.located
    gone = true.library("nvrtc")._replace(files=(str(tmp_path / "libnvrtc.so.13"),))
    own = Toolchain(events, timeout=TIMEOUT_SECONDS)
    own._located = true._replace(libraries={**true.libraries, "nvrtc": gone})
    program = Program.of("__global__ void k() {}")
    with pytest.raises(ToolchainChangedError, match="NVRTC cannot be loaded any more") as caught:
        own.compile(program, Arch.parse("sm_90"))
    assert str(tmp_path) in str(caught.value)
    assert caught.value.hint is not None
    own.relocate()
    assert own.compile(program, Arch.parse("sm_90")).build == true.library("nvrtc").build
    own.close()


# Missing libraries

NOTHING = Located({}, {"nvrtc": "Failure finding libnvrtc.so"}, {})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nvrtc", "NVRTC was not found: Failure finding libnvrtc.so"),
        ("nvJitLink", "nvJitLink was not found: not installed"),
    ],
)
def test_a_missing_library_is_an_error_that_says_how_to_get_it(name: str, message: str) -> None:
    with pytest.raises(ToolchainNotFoundError) as caught:
        NOTHING.library(name)
    assert str(caught.value) == message
    assert caught.value.hint is not None
    assert "preheat[cu13]" in caught.value.hint


def test_a_library_that_is_there_does_not_suffer_from_one_that_is_not() -> None:
    library = Library("nvJitLink", ("/lib/libnvJitLink.so",), "00", "13.5")
    assert Located({"nvJitLink": library}, {"nvrtc": "no"}, {}).library("nvJitLink") is library


WITHOUT = """
import cuda.pathfinder as pathfinder
from preheat.toolchain import worker

def missing(name):
    raise pathfinder.DynamicLibNotFoundError(f"Failure finding lib{name}.so\\nmore")

pathfinder.load_nvidia_dynamic_lib = missing
pathfinder.find_nvidia_header_directory = lambda name: None
answer, _ = worker._locate({}, {})
assert answer == {
    "libraries": {}, "roots": {}, "archs": [],
    "missing": {n: f"Failure finding lib{n}.so" for n in ("nvrtc", "nvJitLink")},
}, answer
"""


def test_a_machine_without_compilers_is_distinguished_from_a_broken_one() -> None:
    processes.expect_success(processes.start_python(WITHOUT))


GONE = """
import sys
from types import SimpleNamespace
import cuda.pathfinder as pathfinder

real = pathfinder.load_nvidia_dynamic_lib
gone = SimpleNamespace(abs_path=sys.argv[1])
pathfinder.load_nvidia_dynamic_lib = lambda name: gone if name == "nvrtc" else real(name)
from preheat.toolchain import worker

answer, _ = worker._locate({}, {})
assert list(answer["libraries"]) == ["nvJitLink"], answer
assert sys.argv[1] in answer["missing"]["nvrtc"], answer
"""


def test_a_library_that_disappears_during_the_search_is_missing(tmp_path: Path) -> None:
    gone = str(tmp_path / "libnvrtc.so.13")
    processes.expect_success(processes.start_python(GONE, gone))


def test_a_missing_library_is_named_when_it_is_needed_and_not_remembered(
    tmp_path: Path, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    toolchain = Toolchain(events, timeout=TIMEOUT_SECONDS, memo_dir=tmp_path)
    answer = {"libraries": {}, "missing": {"nvrtc": "no"}, "roots": {}, "archs": []}
    monkeypatch.setattr(toolchain.pool, "call", lambda _: frames.Frame(answer, {}))
    with pytest.raises(ToolchainNotFoundError, match="NVRTC was not found: no"):
        toolchain.identity("cuda")
    with pytest.raises(ToolchainNotFoundError, match="NVRTC was not found: no"):
        toolchain.compile(Program.of("//"), Arch.parse("sm_90"))
    assert list(tmp_path.glob("toolchain-*")) == []
    assert look(tmp_path, events).missing == {}  # The library is installed now.


def test_a_compiler_remembered_as_missing_is_searched_again_when_it_is_needed(
    tmp_path: Path, events: Events, recorder: Recorder
) -> None:
    true = look(tmp_path, events)
    (memo,) = tmp_path.glob("toolchain-*")
    row = row_of(memo)
    del row["libraries"]["nvJitLink"]
    row |= {"missing": {"nvJitLink": "not there"}, "stamps": row["stamps"][:2]}
    rewrite(memo, row)
    started = len(recorder.named("worker"))
    toolchain = Toolchain(events, timeout=TIMEOUT_SECONDS, memo_dir=tmp_path)
    assert toolchain.identity("cuda") == f"nvrtc {true.library('nvrtc').build}"
    assert len(recorder.named("worker")) == started  # A library that is not needed costs nothing.
    assert toolchain.identity("ptx") == f"nvJitLink {true.library('nvJitLink').build}"
    toolchain.close()


def test_an_architecture_the_compiler_does_not_know_is_refused_with_those_it_knows(
    toolchain: Toolchain,
) -> None:
    with pytest.raises(InputError, match=r"NVRTC .* cannot compile for sm_52") as caught:
        toolchain.compile(Program.of("//"), Arch.parse("sm_52"))
    assert caught.value.hint is not None
    assert "sm_90" in caught.value.hint


def test_the_roots_of_the_toolkit_are_those_that_the_worker_labels(toolchain: Toolchain) -> None:
    assert set(toolchain.located.roots) == TOOLKIT
