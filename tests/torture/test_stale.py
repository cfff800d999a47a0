"""Headers that change during a compile: code is stored only under the content it was compiled from."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from preheat.build.builder import Builder
from preheat.errors import InputError
from preheat.model.arch import Arch
from preheat.model.config import Config
from preheat.model.program import Program
from preheat.toolchain.compiler import Toolchain
from tests.torture.conftest import Campaign
from tests.torture.test_headers import KERNEL, NEW, OLD, value

SOURCE = f'#include "v.h"\n{KERNEL}'


class Project:
    """A directory of headers, and processes that share a cache."""

    def __init__(self, root: Path, toolchain: Toolchain) -> None:
        self.root, self.include = root, root / "i"
        self._config = Config(cache_dirs=(root / "cache",), lock_dir=root / "locks")
        self._toolchain = toolchain
        self.include.mkdir()
        (self.include / "v.h").write_text(OLD)

    @property
    def program(self) -> Program:
        return Program.of(SOURCE, include=[self.include])

    def process(self) -> Builder:
        builder = Builder.open(self._config)
        builder.toolchain = self._toolchain
        return builder

    def build(self) -> int:
        return value(self.process().build(self.program, "sm_90"))

    def build_while(self, happens: Callable[[Project], None]) -> None:
        """Build, and let something happen after the compiler has read the headers."""
        builder = self.process()
        compiler = self._toolchain
        project = self

        class Watched:
            def __getattr__(self, name: str) -> Any:
                return getattr(compiler, name)

            def compile(self, program: Program, arch: Arch) -> Any:
                compiled = compiler.compile(program, arch)
                happens(project)
                return compiled

        builder.toolchain = Watched()  # type: ignore[assignment]
        builder.build(self.program, "sm_90")


@pytest.fixture
def project(tmp_path: Path, toolchain: Toolchain) -> Project:
    return Project(tmp_path, toolchain)


def directory_renamed(project: Project) -> None:
    other = project.root / "other"
    other.mkdir()
    (other / "v.h").write_text(NEW)
    os.utime(other / "v.h", (1, 1))
    project.include.rename(project.root / "old")
    other.rename(project.include)


def link_retargeted(project: Project) -> None:
    link = project.root / "link"
    link.symlink_to("other")
    link.replace(project.include)


def file_renamed(project: Project) -> None:
    (project.root / "new.h").write_text(NEW)
    os.utime(project.root / "new.h", (1, 1))
    (project.root / "new.h").replace(project.include / "v.h")


def hard_link_swapped(project: Project) -> None:
    (project.root / "new.h").write_text(NEW)
    os.link(project.root / "new.h", project.include / "n.h")
    (project.include / "n.h").replace(project.include / "v.h")


def edited_in_place(project: Project) -> None:
    (project.include / "v.h").write_text(NEW)


@pytest.mark.parametrize(
    "happens", [directory_renamed, link_retargeted, file_renamed, hard_link_swapped, edited_in_place]
)
@pytest.mark.parametrize("skew", [0, 3600, -3600], ids=["clock right", "clock ahead", "clock behind"])
def test_a_change_during_a_compile_is_never_mistaken_for_what_was_compiled(
    project: Project, monkeypatch: pytest.MonkeyPatch, happens: Callable[[Project], None], skew: int
) -> None:
    if happens is link_retargeted:
        for name, text in {"first": OLD, "other": NEW}.items():
            (project.root / name).mkdir()
            (project.root / name / "v.h").write_text(text)
        shutil.rmtree(project.include)
        project.include.symlink_to("first")
    now, now_ns = time.time, time.time_ns
    monkeypatch.setattr("time.time", lambda: now() + skew)
    monkeypatch.setattr("time.time_ns", lambda: now_ns() + skew * 10**9)
    project.build_while(happens)
    assert project.build() == 222
    assert project.build() == 222


def test_edits_around_the_start_of_a_compile(project: Project, campaign: Campaign) -> None:
    """Edit in place, keeping the size, at a random moment of a compile that has just begun."""
    header = project.include / "v.h"
    for nth in range(campaign.rounds(quick=8, long=400)):
        old, new = 100 + nth % 400, 500 + nth % 400
        header.write_text(f"#define V {old}\n")
        time.sleep(campaign.random.random() * 0.02)
        program = Program.of(f"// {nth}\n{SOURCE}", include=[project.include])
        builder = project.process()
        thread = threading.Thread(target=builder.build, args=(program, "sm_90"))
        thread.start()
        time.sleep(campaign.random.random() * 0.03)
        with open(header, "r+b", buffering=0) as file:
            file.write(f"#define V {new}\n".encode())
        thread.join()
        assert value(project.process().build(program, "sm_90")) == new
        assert value(builder.build(program, "sm_90")) == new


@contextmanager
def mounted(what: Path, at: Path, *how: str) -> Iterator[None]:
    """Mount an image read-only, or whatever `how` says; skips the test where that is not permitted."""
    command = ["mount", *(how or ("-o", "loop,ro")), str(what), str(at)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount {what.name}: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", at], check=True)


def images(root: Path, *texts: str) -> list[Path]:
    """File system images, each with a header, in which every time is the same."""
    headers = [root / f"{n}.tree" / "v.h" for n in range(len(texts))]
    for header, text in zip(headers, texts, strict=True):
        header.parent.mkdir()
        header.write_text(text)
    seconds: set[int] = set()
    while len(seconds) != 1:  # images count in seconds
        for header in headers:
            os.utime(header, (1, 1))  # sets the time of the change, too
        seconds = {int(header.stat().st_ctime) for header in headers}
    found = []
    for header in headers:
        found.append(root / f"{header.parent.stem}.img")
        make: list[str | Path] = [
            "mke2fs",
            "-q",
            "-t",
            "ext2",
            "-U",
            "clear",
            "-d",
            header.parent,
            found[-1],
            "256k",
        ]
        fixed = {**os.environ, "E2FSPROGS_FAKE_TIME": "7"}
        try:
            subprocess.run(make, check=True, capture_output=True, env=fixed)
        except (OSError, subprocess.CalledProcessError) as fault:
            pytest.skip(f"cannot make an image: {fault}")
    return found


def test_two_images_with_the_same_times_are_two_images(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = images(project.root, OLD, NEW)
    passed, stamps = [0.0], []
    monkeypatch.setattr("preheat.toolchain.headers.evidence._now", lambda: passed[0])
    same = project.process()
    for _ in range(3):  # so that the stamps are believed
        passed[0] += 10
        with mounted(first, project.include):
            stamps.append((project.include / "v.h").stat())
            assert project.build() == 111
            assert value(same.build(project.program, "sm_90")) == 111
    with mounted(second, project.include):
        found = (project.include / "v.h").stat()
        assert (found.st_ino, found.st_ctime_ns) == (stamps[0].st_ino, stamps[0].st_ctime_ns)
        assert project.build() == 222
        assert value(same.build(project.program, "sm_90")) == 222


@pytest.mark.parametrize("days", [1, 10_000])
def test_a_header_dated_in_the_future_is_cached(project: Project, days: int) -> None:
    when = time.time() + days * 86400
    os.utime(project.include / "v.h", (when, when))
    seen: list[str] = []
    for _ in range(2):
        builder = project.process()
        builder.events.subscribe(lambda name, _: seen.append(name))
        builder.build(project.program, "sm_90")
    assert (seen.count("compile"), seen.count("hit"), seen.count("uncached")) == (1, 1, 0)


# Skipped, hidden and generated files


def test_a_file_that_is_away_while_the_program_is_compiled_is_not_forgotten(project: Project) -> None:
    """An editor that saves by renaming takes a header away for a moment."""
    first = project.root / "first"
    first.mkdir()
    (first / "v.h").write_text(NEW)
    program = Program.of(SOURCE, include=[first, project.include])
    builder = project.process()
    compiler = project.process().toolchain

    class Interrupted:
        def __getattr__(self, name: str) -> Any:
            return getattr(compiler, name)

        def compile(self, program: Program, arch: Arch) -> Any:
            (first / "v.h").rename(first / "away")
            compiled = compiler.compile(program, arch)
            (first / "away").rename(first / "v.h")
            return compiled

    builder.toolchain = Interrupted()  # type: ignore[assignment]
    assert value(builder.build(program, "sm_90")) == 111
    assert value(project.process().build(program, "sm_90")) == 222


def test_headers_in_two_mounts_of_one_file_system_are_cached(project: Project) -> None:
    places = [project.root / name for name in ("x", "y", "m1", "m2")]
    for place in places:
        place.mkdir()
    (places[0] / "a.h").write_text('#include "b.h"\n')
    (places[1] / "b.h").write_text(OLD)
    seen: list[str] = []
    x, y, first, second = places
    with mounted(x, first, "--bind"), mounted(y, second, "--bind"):
        program = Program.of(f'#include "a.h"\n{KERNEL}', include=places[2:])
        for _ in range(2):
            builder = project.process()
            builder.events.subscribe(lambda name, _: seen.append(name))
            builder.build(program, "sm_90")
    assert (seen.count("uncached"), seen.count("hit")) == (0, 1)


def test_a_header_in_memory_does_not_hide_the_file_of_that_name(project: Project) -> None:
    (project.include / "b.h").write_text('#include "v.h"\n')
    program = Program.of(
        f'#include "{project.include}/b.h"\n{KERNEL}',
        headers={f"{project.include}/v.h": "#define V 5\n"},
    )
    project.process().build(program, "sm_90")
    (project.include / "v.h").write_text(NEW)
    truth = Config(cache_dirs=(), lock_dir=project.root, cache=False)
    assert value(project.process().build(program, "sm_90")) == value(
        Builder.open(truth).build(program, "sm_90")
    )


def test_a_pipe_on_the_way_to_a_header_is_refused_before_the_compiler_waits(project: Project) -> None:
    first = project.root / "first"
    first.mkdir()
    os.mkfifo(first / "v.h")
    with pytest.raises(InputError, match="which is a pipe: the compiler would wait"):
        project.process().build(Program.of(SOURCE, include=[first, project.include]), "sm_90")


@pytest.mark.parametrize("name", ["/proc/self/pagemap", "/proc/kmsg", "huge.h"])
def test_a_branch_that_is_not_taken_may_name_what_never_ends(project: Project, name: str) -> None:
    with open(project.include / "huge.h", "wb") as huge:
        huge.truncate(3 << 30)
    source = f'#if 0\n#include "{name}"\n#endif\n{SOURCE}'
    assert value(project.process().build(Program.of(source, include=[project.include]), "sm_90")) == 111


@pytest.mark.parametrize(
    "source",
    [
        "namespace cute { struct U {}; __device__ constexpr U _{}; } using cute::_;\n"
        "template <class T, int D, int A, int E> struct Q {};\n#define V 1\n",
        "enum { TIME = 4 };\n__device__ int f() { int _ = TIME; return _; }\n#define V f()\n",
        "#ifndef __has_include\n#define __has_include(x) 0\n#endif\n#define V 1\n",
    ],
    ids=["cute", "time", "guard"],
)
def test_ordinary_programs_are_cached(project: Project, source: str) -> None:
    builder = project.process()
    seen: list[str] = []
    builder.events.subscribe(lambda name, _: seen.append(name))
    program = Program.of(source + KERNEL)
    builder.build(program, "sm_90")
    project.process().build(program, "sm_90")
    assert "uncached" not in seen


@pytest.mark.parametrize(("source", "uncached"), [(KERNEL, 0), (SOURCE, 1)])
def test_without_a_trace_a_program_that_includes_nothing_is_cached_anyway(
    project: Project, monkeypatch: pytest.MonkeyPatch, source: str, uncached: int
) -> None:
    seen: list[str] = []
    builder = project.process()
    builder.events.subscribe(lambda name, _: seen.append(name))
    compile_program = Toolchain.compile
    monkeypatch.setattr(
        Toolchain, "compile", lambda *given: replace(compile_program(*given), opened=None)
    )
    program = Program.of(source, include=[project.include], options=["-DV=1"] * (1 - uncached))
    builder.build(program, "sm_90")
    assert seen.count("uncached") == uncached
