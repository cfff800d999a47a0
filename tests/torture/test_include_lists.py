"""One source with several include lists: recorded, baked, checked and sealed with its own code each."""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from preheat.ahead.bake import bake
from preheat.ahead.bundles import faults, merge
from preheat.ahead.check import check
from preheat.ahead.manifest import Manifest, ManifestProgram
from preheat.build.builder import Builder
from preheat.build.bundles import entries_of
from preheat.errors import SealedError
from preheat.gpu import Gpu
from preheat.model.arch import Arch
from preheat.model.artifact import Artifact
from preheat.model.config import Config, SealMode
from preheat.model.events import Events
from preheat.model.program import Program
from preheat.store.bundle import Bundle
from tests.processes import start_process, wait_for_exit
from tests.torture.conftest import Campaign

SM_90 = Arch(9, 0)
SOURCE = '#include "cfg.h"\nextern "C" __global__ void k(int* x) { *x = VALUE; }\n'
CLOCK = '#include "cfg.h"\nextern "C" __global__ void k(int* x) { *x = VALUE + (__TIME__[0] > 99); }\n'
APP = f"""
import json, sys
from pathlib import Path

import preheat

SOURCE, CLOCK = {SOURCE!r}, {CLOCK!r}
home = Path(__file__).parent
ways = {{
    "a file, relative": lambda d: (home / "kernels" / "k.cu", dict(include=[d])),
    "a file, option": lambda d: (
        home / "kernels" / "k.cu", dict(label="option.cu", options=["-I", str(home / d)])
    ),
    "text, absolute": lambda d: (SOURCE, dict(label="text.cu", include=[home / d])),
    "text that no cache keeps, relative": lambda d: (CLOCK, dict(label="clock.cu", include=[d])),
}}
gpu = preheat.device("emulator", arch="sm_90")
given = {{}}
for name, way in ways.items():
    for directory in sys.argv[1:]:
        source, more = way(directory)
        x = gpu.zeros(1, "int32")
        try:
            gpu.kernel(source, "k", **more)[1, 1](x)
            given.setdefault(name, []).append(int(x.numpy()[0]))
        except preheat.SealedError as error:
            given.setdefault(name, []).append(str(error))
print(json.dumps(given))
"""
WAYS = APP.count("lambda d:")


def directories(place: Path, **contents: int) -> list[Path]:
    """Return a directory with a `cfg.h` for each of the values."""
    for name, value in contents.items():
        (place / name).mkdir(parents=True, exist_ok=True)
        (place / name / "cfg.h").write_text(f"#define VALUE {value}\n")
    return [place / name for name in contents]


def stored_value(artifact: Artifact) -> int:
    """Return the number that a kernel of these tests stores, from its PTX."""
    line = next(line for line in artifact.ptx.decode().splitlines() if "st.global" in line)
    register = line.rpartition(", ")[2].rstrip(";")
    moved = [row for row in artifact.ptx.decode().splitlines() if f"mov.u32 \t{register}, " in row]
    moved += [row for row in artifact.ptx.decode().splitlines() if f"mov.b32 \t{register}, " in row]
    return int((moved[0] if moved else line).rpartition(", ")[2].rstrip(";"))


@dataclass
class Project:
    """An application in a directory of its own, with an empty cache."""

    home: Path

    def run(self, *words: str, **env: str) -> tuple[int, str, str]:
        where = {
            "PREHEAT_CACHE_DIR": str(self.home / "cache"),
            "PREHEAT_LOCK_DIR": str(self.home / "l"),
        }
        process = start_process([sys.executable, *words], cwd=self.home, env={**where, **env})
        out, err = wait_for_exit(process)
        return process.returncode, out, err

    def preheat(self, *words: str) -> str:
        code, out, err = self.run("-m", "preheat", *words)
        assert code == 0, err
        return out + err

    def sealed(self, *words: str) -> dict[str, list[int | str]]:
        code, out, err = self.run(
            *("app.py", *words), PREHEAT_BUNDLE=str(self.home / "kernels.heat"), PREHEAT_SEALED="1"
        )
        assert code == 0, err
        given: dict[str, list[int | str]] = json.loads(out)
        return given


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """Return the application, recorded and baked."""
    home = tmp_path_factory.mktemp("project")
    (home / "app.py").write_text(APP)
    (home / "kernels").mkdir()
    (home / "kernels" / "k.cu").write_text(SOURCE)
    directories(home, a=111, b=222, c=333)
    made = Project(home)
    reported = made.preheat(*("record", "-o", "kernels.toml", "--"), sys.executable, "app.py", "a", "b")
    assert list(json.loads(reported.splitlines()[0]).values()) == [[111, 222]] * WAYS
    made.preheat("bake", "kernels.toml")
    return made


def test_each_include_list_is_a_row_an_entry_and_covered(project: Project) -> None:
    assert (project.home / "kernels.toml").read_text().count("\n[[program]]") == 2 * WAYS
    with Bundle.open(project.home / "kernels.heat") as bundle:
        assert len(list(entries_of(bundle))) == 2 * WAYS
        assert faults(bundle) == []
    reported = project.preheat("check", "kernels.toml", "--bundle", "kernels.heat")
    assert f"{2 * WAYS} programs, 1 architecture: everything is in" in reported


def test_sealed_in_another_place_each_include_list_has_its_own_code(
    project: Project, tmp_path: Path
) -> None:
    """The directories have no headers: only the include list distinguishes the requests."""
    moved = Project(tmp_path / "far" / "away")
    hidden = shutil.ignore_patterns("cache", "l", "a", "b", "c", "kernels.toml", "*.sources")
    shutil.copytree(project.home, moved.home, ignore=hidden)
    given = moved.sealed("b", "a", "c")
    assert len(given) == WAYS
    for way, (b, a, c) in given.items():
        assert (b, a) == (222, 111), way
        assert isinstance(c, str), way
        assert "cannot be compiled in this sealed process: it is in no bundle" in c, way
        assert "/a' became '" in c or "/b' became '" in c, c


def test_a_project_baked_elsewhere_gives_the_same_bytes(project: Project, tmp_path: Path) -> None:
    moved = Project(tmp_path / "else where")
    shutil.copytree(project.home, moved.home, ignore=shutil.ignore_patterns("cache", "l", "*.heat"))
    for home in (project.home, moved.home):
        again = Manifest.read(home / "kernels.toml")
        kept = Manifest(tuple(w for w in again.programs if w.program.label != "clock.cu"))
        config = Config(cache_dirs=(project.home / "cache",), lock_dir=project.home / "l")
        assert len(kept.programs) == 2 * (WAYS - 1)
        assert bake(kept, output=home / "again.heat", builder=Builder.open(config)).ok
    assert (moved.home / "again.heat").read_bytes() == (project.home / "again.heat").read_bytes()


def test_a_listing_distinguishes_namesakes(project: Project) -> None:
    reported = project.preheat("bundle", "ls", "kernels.heat")
    assert "k.cu (include ../a)" in reported
    assert "k.cu (include ../b)" in reported
    assert "clock.cu (include a)" in reported


# Requests that no include list distinguishes


def sealed_builder(bundle: Path, place: Path) -> Builder:
    config = Config(
        cache_dirs=(place / "none",), lock_dir=place / "l", bundles=(bundle,), sealed=SealMode.ERROR
    )
    return Builder.open(config, events=Events())


Ask = Callable[[Path], Program]


def from_its_file(place: Path) -> Program:
    """Return the same file in two projects, the header beside it."""
    (place / "k.cu").write_text(SOURCE)
    return Program.from_file(place / "k.cu")


def from_its_working_directory(place: Path) -> Program:
    """Return the same text and the same list, asked for in two working directories."""
    before = os.getcwd()
    os.chdir(place)
    try:
        return Program.of(SOURCE, label="k.cu", include=["."])
    finally:
        os.chdir(before)


def from_its_caller(place: Path) -> Program:
    """Return the same text, asked for by two Python files, each with a directory beside it."""
    names: dict[str, Program] = {}
    code = "program = Program.of(SOURCE, label='k.cu', include=[here])"
    given = {"Program": Program, "SOURCE": SOURCE, "here": str(place)}
    exec(compile(code, str(place / "asks.py"), "exec"), given, names)
    return names["program"]


@pytest.mark.parametrize("ask", [from_its_file, from_its_working_directory, from_its_caller])
def test_two_that_are_written_alike_fail_by_name_and_neither_is_served(
    ask: Ask, shared_builder: Builder, tmp_path: Path
) -> None:
    one, other = map(ask, directories(tmp_path, one=111, other=222))
    assert one.include_spellings == other.include_spellings
    plain = Program.of('extern "C" __global__ void p() {}', label="plain.cu")
    Manifest(tuple(ManifestProgram(p, (SM_90,)) for p in (one, other, plain))).write(
        tmp_path / "kernels.toml"
    )
    manifest = Manifest.read(tmp_path / "kernels.toml")
    assert len(manifest.programs) == 3
    baked = bake(manifest, output=tmp_path / "k.heat", builder=shared_builder)
    assert [row.label for row in baked.rows] == ["plain.cu"]
    assert [failed.title for failed in baked.failures] == ["k.cu", "k.cu"]
    reported = str(baked.failures[0].error)
    assert "k.cu for sm_90" in reported
    assert str(tmp_path / "one") in reported
    assert str(tmp_path / "other") in reported
    sealed = sealed_builder(tmp_path / "k.heat", tmp_path)
    assert {program.title for program in check(manifest, builder=sealed).missing} == {"k.cu"}
    for program in (one, other):
        with pytest.raises(SealedError):
            sealed.build(program, "sm_90")


def test_two_that_are_written_alike_and_have_equal_headers_are_one_entry(
    shared_builder: Builder, tmp_path: Path
) -> None:
    one, other = map(from_its_file, directories(tmp_path, one=111, other=111))
    rows = (
        ManifestProgram(one, (SM_90,), entries=("k",)),
        ManifestProgram(other, (SM_90,), entries=("k",)),
    )
    baked = bake(Manifest(rows), output=tmp_path / "k.heat", builder=shared_builder)
    assert baked.ok
    with Bundle.open(tmp_path / "k.heat") as bundle:
        (promise,) = entries_of(bundle)
    assert promise.entries == ("k",)
    assert stored_value(sealed_builder(tmp_path / "k.heat", tmp_path).build(other, "sm_90")) == 111


def test_a_directory_whose_name_is_not_text_is_baked_and_answers(
    shared_builder: Builder, tmp_path: Path
) -> None:
    (place,) = directories(tmp_path, one=111)
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    place.rename(odd)
    program = Program.of(SOURCE, label="k.cu", include=[odd])
    rows = (ManifestProgram(program, (SM_90,)),)
    assert bake(Manifest(rows), output=tmp_path / "k.heat", builder=shared_builder).ok
    sealed = sealed_builder(tmp_path / "k.heat", tmp_path)
    assert stored_value(sealed.build(program, "sm_90")) == 111
    with Bundle.open(tmp_path / "k.heat") as bundle:
        (promise,) = entries_of(bundle)
    assert promise.include is not None
    assert promise.include[0].endswith("/\\udcff")


def test_bundles_that_answer_alike_with_different_headers_do_not_merge(
    shared_builder: Builder, tmp_path: Path
) -> None:
    bundles = []
    for place in directories(tmp_path, one=111, other=222):
        rows = (ManifestProgram(from_its_file(place), (SM_90,)),)
        assert bake(Manifest(rows), output=place / "k.heat", builder=shared_builder).ok
        bundles.append(Bundle.open(place / "k.heat"))
    with pytest.raises(Exception, match=r"header cfg\.h differs"):
        merge(bundles, tmp_path / "both.heat")


def test_a_sealed_process_never_uses_the_code_of_another_include_list(
    shared_builder: Builder, tmp_path: Path, campaign: Campaign, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some lists are recorded, others are not; relative or absolute, of a file or of text."""
    values = {f"d{n}": 100 + n for n in range(6)}
    directories(tmp_path, **values)
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "k.cu").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)

    def ask() -> tuple[Program, int]:
        names = campaign.random.choices([*values, "empty"], k=campaign.random.randint(1, 3))
        start = campaign.random.choice(["", f"{tmp_path}/", "src/../"])
        include = [start + name for name in names]
        first = next((values[name] for name in names if name in values), 0)
        if campaign.random.random() < 0.5:
            return Program.from_file("src/k.cu", include=include), first
        return Program.of(SOURCE, label="k.cu", include=include), first

    (tmp_path / "empty").mkdir()
    count = campaign.rounds(quick=3, long=200)
    asked = [(program, value) for program, value in (ask() for _ in range(40 * count)) if value]
    recorded = {program for program, _ in asked[:count]}
    Manifest(tuple(ManifestProgram(program, (SM_90,)) for program in recorded)).write(
        tmp_path / "k.toml"
    )
    assert bake(tmp_path / "k.toml", output=tmp_path / "k.heat", builder=shared_builder).ok
    sealed = sealed_builder(tmp_path / "k.heat", tmp_path)
    monkeypatch.setattr("preheat.build.builder._SEARCH", 0)
    refused = 0
    for program, value in asked:
        try:
            assert stored_value(sealed.build(program, "sm_90")) == value, program.include_spellings
        except SealedError:
            assert program not in recorded
            refused += 1
    assert refused < len(asked)


# In one process


def test_threads_that_ask_at_once_with_other_directories_each_get_their_own(
    shared_builder: Builder, tmp_path: Path, campaign: Campaign, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one thread compiles, another that asks for the same text must not be given its code."""
    first, second = directories(tmp_path, a=111, b=222)
    compile_it = shared_builder.toolchain.compile
    began = threading.Barrier(2)
    wrong = []

    def together(program: Program, arch: Arch) -> object:
        began.wait(60)
        return compile_it(program, arch)

    monkeypatch.setattr(shared_builder.toolchain, "compile", together)
    monkeypatch.setattr(shared_builder._locks._locks, "directory", None)  # processes take turns
    for round_ in range(campaign.rounds(quick=1, long=20)):
        got: dict[Path, int] = {}

        def ask(place: Path, label: str = f"k{round_}.cu", got: dict[Path, int] = got) -> None:
            program = Program.of(SOURCE, label=label, include=[place])
            got[place] = stored_value(shared_builder.build(program, "sm_90"))

        threads = [threading.Thread(target=ask, args=(place,)) for place in (first, second)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        if got != {first: 111, second: 222}:
            wrong.append(got)
    assert wrong == []


@pytest.mark.parametrize("more", [{"include": ["inc"]}, {"include": ("inc",)}, {"options": ["-Iinc"]}])
def test_a_relative_directory_is_another_one_after_a_chdir(
    more: dict[str, Any],
    open_device: Callable[..., Gpu],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    emulator = open_device("emulator")
    got = []
    for name, value in (("one", 111), ("other", 222)):
        directories(tmp_path / name, inc=value)
        monkeypatch.chdir(tmp_path / name)
        x = emulator.zeros(1, "int32")
        emulator.kernel(SOURCE, "k", **more)[1, 1](x)
        got.append(int(x.numpy()[0]))
    assert got == [111, 222]


def test_a_program_that_no_cache_keeps_has_a_digest_of_its_own(
    shared_builder: Builder, tmp_path: Path
) -> None:
    places = directories(tmp_path, a=111, b=222)
    made = [shared_builder.build(Program.of(CLOCK, include=[place]), "sm_90") for place in places]
    assert made[0].digest != made[1].digest
