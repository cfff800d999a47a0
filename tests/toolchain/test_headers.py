"""Header files by content, with the real compiler: hits, misses, and their reasons."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from preheat.build.builder import Builder
from preheat.errors import CompileError, InputError
from preheat.model.artifact import Artifact, Header
from preheat.model.config import Config
from preheat.model.events import Events
from preheat.model.program import Program
from preheat.toolchain.compiler import Toolchain
from preheat.toolchain.headers.absent_names import Untrackable
from preheat.toolchain.headers.evidence import FileHasher, Memo
from preheat.toolchain.headers.observe import Unexpected, observe
from preheat.toolchain.headers.states import HeaderState, change, mismatch
from preheat.toolchain.headers.survey import Survey
from tests.conftest import Recorder

KERNEL = 'extern "C" __global__ void k(int* x) { *x = VALUE; }\n'


@dataclass(frozen=True)
class Outcome:
    """What one process got, and what happened on the way."""

    artifact: Artifact
    hit: bool
    miss: str
    uncached: str


class Project:
    """Files of a project, and processes that build kernels from them, one after the other."""

    def __init__(self, root: Path, open_builder: Callable[[], Builder], recorder: Recorder) -> None:
        self.root, self._open, self._recorder = root, open_builder, recorder

    def write(self, files: Mapping[str, str]) -> None:
        for name, text in files.items():
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def build(self, source: str, include: tuple[str, ...] = ("inc",), **more: Any) -> Outcome:
        """Build in a process of its own."""
        program = Program.of(source, include=[self.root / name for name in include], **more)
        before = len(self._recorder.seen)
        artifact = self._open().build(program, "sm_90")
        happened = self._recorder.seen[before:]
        reasons = {name: str(fields.get("reason", "")) for name, fields in happened}
        assert ("hit" in reasons) != ("compile" in reasons)
        return Outcome(artifact, "hit" in reasons, reasons.get("miss", ""), reasons.get("uncached", ""))


@pytest.fixture
def project(
    tmp_path: Path, config: Config, events: Events, recorder: Recorder, toolchain: Toolchain
) -> Project:
    def open_builder() -> Builder:
        builder = Builder.open(config, events=events)
        builder.toolchain = toolchain  # nothing of it is remembered but the workers
        return builder

    return Project(tmp_path / "project", open_builder, recorder)


def names(outcome: Outcome) -> list[tuple[str, str]]:
    return sorted((h.root, h.name) for h in outcome.artifact.headers)


# Tracked files

#: A source, the files it needs, and the one of them that is changed.
TRACKED = {
    "directly": ('#include "v.h"\n', {"inc/v.h": "#define VALUE 1\n"}),
    "in angle brackets": ("#include <v.h>\n", {"inc/v.h": "#define VALUE 1\n"}),
    "nested": (
        '#include "outer.h"\n',
        {
            "inc/v.h": "#define VALUE 1\n",
            "inc/outer.h": "#include <deep/middle.h>\n",
            "inc/deep/middle.h": "#include <v.h>\n",
        },
    ),
    "next to the header that includes it": (
        '#include "sub/outer.h"\n',
        {"inc/sub/v.h": "#define VALUE 1\n", "inc/sub/outer.h": '#include "v.h"\n'},
    ),
    "one directory up": (
        '#include "sub/outer.h"\n',
        {"inc/v.h": "#define VALUE 1\n", "inc/sub/outer.h": '#include "../v.h"\n'},
    ),
    "outside every include directory": (
        '#include "outer.h"\n',
        {"v.h": "#define VALUE 1\n", "inc/outer.h": '#include "../v.h"\n'},
    ),
    "by a macro": (
        '#define NAME "v.h"\n#include NAME\n',
        {"inc/v.h": "#define VALUE 1\n"},
    ),
    "by a digraph": ('%:include "v.h"\n', {"inc/v.h": "#define VALUE 1\n"}),
    "over two lines": ('#inc\\\nlude \\\n"v.h"\n', {"inc/v.h": "#define VALUE 1\n"}),
    "by the next of the same name": (
        "#include <outer.h>\n",
        {
            "inc/outer.h": "#include_next <outer.h>\n",
            "more/outer.h": "#include <v.h>\n",
            "more/v.h": "#define VALUE 1\n",
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", TRACKED)
def test_a_changed_header_is_a_miss_that_names_it(project: Project, how: str) -> None:
    source, files = TRACKED[how]
    changed = next(name for name in files if name.endswith("v.h"))
    project.write(files)
    include = ("inc", "more") if any(name.startswith("more/") for name in files) else ("inc",)
    first = project.build(source + KERNEL, include)
    again = project.build(source + KERNEL, include)
    assert (first.hit, again.hit, first.uncached) == (False, True, "")
    assert again.artifact.cubin == first.artifact.cubin
    assert len(first.artifact.headers) == len(files)
    project.write({changed: "#define VALUE 2\n"})
    after = project.build(source + KERNEL, include)
    assert not after.hit
    assert "v.h changed" in after.miss
    assert after.artifact.cubin != first.artifact.cubin


def test_a_header_included_by_an_option_is_tracked(project: Project) -> None:
    project.write({"pre/v.h": "#define VALUE 1\n"})
    options = [f"-include={project.root}/pre/v.h"]
    assert not project.build(KERNEL, (), options=options).hit
    assert project.build(KERNEL, (), options=options).hit
    project.write({"pre/v.h": "#define VALUE 2\n"})
    assert "v.h changed" in project.build(KERNEL, (), options=options).miss


def test_a_header_included_by_its_absolute_path_is_tracked(project: Project) -> None:
    project.write({"far/v.h": '#include "n.h"\n', "far/n.h": "#define VALUE 1\n"})
    source = f'#include "{project.root}/far/v.h"\n{KERNEL}'
    assert not project.build(source, ()).hit
    assert project.build(source, ()).hit
    project.write({"far/n.h": "#define VALUE 2\n"})
    assert "n.h changed" in project.build(source, ()).miss


def test_a_header_a_header_in_memory_includes_is_tracked(project: Project) -> None:
    project.write({"inc/v.h": "#define VALUE 1\n"})
    headers = {"mine.h": '#include "v.h"\n'}
    source = f'#include "mine.h"\n{KERNEL}'
    first = project.build(source, headers=headers)
    assert names(first) == [("0", "v.h")]
    project.write({"inc/v.h": "#define VALUE 2\n"})
    assert "v.h changed" in project.build(source, headers=headers).miss


def test_headers_are_recorded_by_root_name_and_content(project: Project) -> None:
    project.write({"a/x.h": "#define VALUE Y\n", "b/sub/y.h": "#define Y 3\n"})
    source = f"#include <x.h>\n#include <sub/y.h>\n{KERNEL}"
    assert names(project.build(source, ("a", "b"))) == [("0", "x.h"), ("1", "sub/y.h")]


def test_a_program_that_includes_nothing_depends_on_no_file(project: Project) -> None:
    project.write({"inc/v.h": "#define VALUE 1\n"})
    source = KERNEL.replace("VALUE", "1")
    assert project.build(source).artifact.headers == ()
    project.write({"inc/v.h": "#define VALUE 2\n"})
    assert project.build(source).hit


# Hits


def one_header(project: Project) -> str:
    project.write({"inc/v.h": "#define VALUE 1\n"})
    source = f'#include "v.h"\n{KERNEL}'
    assert not project.build(source).hit
    return source


def test_a_touched_header_is_a_hit(project: Project) -> None:
    source = one_header(project)
    os.utime(project.root / "inc/v.h", (1, 1))
    assert project.build(source).hit


def test_a_header_rewritten_with_the_same_text_is_a_hit(project: Project) -> None:
    source = one_header(project)
    (project.root / "inc/v.h").unlink()
    project.write({"inc/v.h": "#define VALUE 1\n"})
    assert project.build(source).hit


def test_two_states_of_a_header_are_kept_side_by_side(project: Project) -> None:
    source = one_header(project)
    project.write({"inc/v.h": "#define VALUE 2\n"})
    two = project.build(source)
    project.write({"inc/v.h": "#define VALUE 1\n"})
    one_again = project.build(source)
    project.write({"inc/v.h": "#define VALUE 2\n"})
    two_again = project.build(source)
    assert [two.hit, one_again.hit, two_again.hit] == [False, True, True]
    assert two_again.artifact == two.artifact
    assert one_again.artifact.cubin != two.artifact.cubin


def test_an_include_directory_that_moved_is_a_hit(project: Project) -> None:
    source = one_header(project)
    shutil.move(project.root / "inc", project.root / "elsewhere")
    assert project.build(source, ("elsewhere",)).hit


def test_a_new_file_in_a_later_root_is_a_hit(project: Project) -> None:
    project.write({"a/v.h": "#define VALUE 1\n", "b/other.h": ""})
    source = f"#include <v.h>\n{KERNEL}"
    assert not project.build(source, ("a", "b")).hit
    project.write({"b/v.h": "#define VALUE 2\n"})
    assert project.build(source, ("a", "b")).hit


def test_of_two_headers_of_one_name_only_the_one_opened_counts(project: Project) -> None:
    project.write({"a/v.h": "#define VALUE 1\n", "b/v.h": "#define VALUE 2\n"})
    source = f"#include <v.h>\n{KERNEL}"
    first = project.build(source, ("a", "b"))
    project.write({"b/v.h": "#define VALUE 3\n"})
    assert project.build(source, ("a", "b")).hit
    project.write({"a/v.h": "#define VALUE 3\n"})
    assert "v.h changed" in project.build(source, ("a", "b")).miss
    assert names(first) == [("0", "v.h")]


def test_a_header_in_memory_wins_over_one_on_disk(project: Project) -> None:
    project.write({"inc/v.h": "#error the one on disk\n", "inc/outer.h": '#include "v.h"\n'})
    source = f'#include "outer.h"\n{KERNEL}'
    headers = {"v.h": "#define VALUE 1\n"}
    first = project.build(source, headers=headers)
    assert names(first) == [("0", "outer.h")]
    project.write({"inc/v.h": "#error still on disk\n"})
    assert project.build(source, headers=headers).hit


# Misses


@pytest.mark.parametrize("name", ["a/v.h", "a/sub/v.h"])
def test_a_new_file_in_an_earlier_root_is_a_miss(project: Project, name: str) -> None:
    spelled = name.removeprefix("a/")
    project.write({"a/other.h": "", f"b/{spelled}": "#define VALUE 1\n"})
    source = f'#include "{spelled}"\n{KERNEL}'
    first = project.build(source, ("a", "b"))
    assert project.build(source, ("a", "b")).hit
    project.write({name: "#define VALUE 2\n"})
    after = project.build(source, ("a", "b"))
    assert "may hide a tracked header" in after.miss
    assert after.artifact.cubin != first.artifact.cubin


@pytest.mark.parametrize("outer", ['#include "v.h"\n', '#define NAME "v.h"\n#include NAME\n'])
def test_a_new_file_next_to_the_including_header_is_a_miss(project: Project, outer: str) -> None:
    project.write({"inc/v.h": "#define VALUE 1\n", "inc/sub/outer.h": outer})
    source = f'#include "sub/outer.h"\n{KERNEL}'
    first = project.build(source)
    assert project.build(source).hit
    project.write({"inc/sub/v.h": "#define VALUE 2\n"})
    after = project.build(source)
    assert "sub/v.h" in after.miss
    assert after.artifact.cubin != first.artifact.cubin


def test_a_file_of_the_toolkits_name_in_an_own_directory_is_a_miss(project: Project) -> None:
    project.write({"inc/v.h": "#include <cuda_fp16.h>\n#define VALUE 1\n"})
    source = f'#include "v.h"\n{KERNEL}'
    assert not project.build(source).hit
    assert project.build(source).hit
    project.write({"inc/cuda_fp16.h": "#define MINE\n"})
    assert "cuda_fp16.h" in project.build(source).miss


def test_swapped_include_directories_are_a_miss(project: Project) -> None:
    project.write({"a/v.h": "#define VALUE 1\n", "b/v.h": "#define VALUE 2\n"})
    source = f"#include <v.h>\n{KERNEL}"
    assert not project.build(source, ("a", "b")).hit
    assert not project.build(source, ("b", "a")).hit
    assert project.build(source, ("a", "b")).hit


def test_a_deleted_header_is_a_miss_and_then_the_compilers_error(
    project: Project, recorder: Recorder
) -> None:
    source = one_header(project)
    (project.root / "inc/v.h").unlink()
    with pytest.raises(CompileError, match=r'cannot open source file "v\.h"'):
        project.build(source)
    assert "v.h is gone" in recorder.named("miss")[-1]["reason"]
    project.write({"inc/v.h": "#define VALUE 1\n"})
    assert project.build(source).hit


def test_a_changed_header_is_seen_though_its_times_and_size_were_put_back(project: Project) -> None:
    source = one_header(project)
    path = project.root / "inc/v.h"
    before = path.stat()
    path.write_text("#define VALUE 2\n")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    assert "v.h changed" in project.build(source).miss


def test_a_link_to_another_file_is_a_miss(project: Project) -> None:
    project.write({"inc/one.h": "#define VALUE 1\n", "inc/two.h": "#define VALUE 2\n"})
    link = project.root / "inc/v.h"
    link.symlink_to("one.h")
    source = f'#include "v.h"\n{KERNEL}'
    assert not project.build(source).hit
    link.unlink()
    link.symlink_to("two.h")
    assert "v.h changed" in project.build(source).miss


def test_an_include_directory_that_does_not_exist_is_an_error_that_names_it(project: Project) -> None:
    with pytest.raises(InputError, match=r"include directory .*/nowhere does not exist"):
        project.build(KERNEL, ("nowhere",))


# What cannot be tracked


@pytest.mark.parametrize("macro", ["__TIME__", "__DATE__", "__TIMESTAMP__"])
def test_a_header_that_reads_the_clock_is_compiled_and_not_kept(project: Project, macro: str) -> None:
    project.write({"inc/v.h": f"#define STAMP {macro}\n#define VALUE 1\n"})
    source = f'#include "v.h"\n{KERNEL}'
    assert f"header v.h uses {macro}" in project.build(source).uncached
    assert not project.build(source).hit


def test_the_clock_is_found_in_each_of_two_headers_of_one_name(project: Project) -> None:
    project.write({"a/v.h": "#include_next <v.h>\n", "b/v.h": "#define VALUE __TIME__[0]\n"})
    made = project.build("#include <v.h>\n" + KERNEL, ("a", "b"))
    assert "v.h uses __TIME__" in made.uncached


def test_the_clock_in_a_comment_of_a_header_is_harmless(project: Project) -> None:
    project.write({"inc/v.h": "// not __TIME__\n#define VALUE 1\n"})
    source = f'#include "v.h"\n{KERNEL}'
    assert project.build(source).uncached == ""
    assert project.build(source).hit


@pytest.mark.parametrize(
    ("probe", "reason"),
    [
        ('__has_include("maybe.h")', "__has_include of maybe.h"),
        ("__has_include(<v.h>)", "__has_include of v.h"),
        ("__has_include(<cub>)", "__has_include of cub"),  # a directory
        ("__has_include(NAME)", "a name that is not a literal"),
        ("PROBE(<maybe.h>)", "a name that is not a literal"),
    ],
)
def test_a_program_that_looks_for_a_users_file_is_not_kept(
    project: Project, probe: str, reason: str
) -> None:
    project.write({"inc/v.h": "#define VALUE 1\n"})
    source = (
        "#define NAME <maybe.h>\n"
        + ("#define PROBE __has_include\n" if "PROBE" in probe else "")
        + f'#if {probe}\n#endif\n#include "v.h"\n{KERNEL}'
    )
    assert reason in project.build(source).uncached
    assert not project.build(source).hit


def test_a_header_that_looks_for_a_users_file_is_not_kept(project: Project) -> None:
    project.write({"inc/v.h": '#if __has_include("maybe.h")\n#endif\n#define VALUE 1\n'})
    assert "maybe.h" in project.build(f'#include "v.h"\n{KERNEL}').uncached


@pytest.mark.parametrize(
    "probe",
    [
        "#if __has_include(<cuda_fp16.h>)",
        '#if defined(__has_include) && __has_include("cuda_fp16.h")',
        "#ifdef __has_include",
        '#if __has_include("mine.h")',
        "// #if __has_include(<maybe.h>)\n#if 1",
    ],
)
def test_a_program_that_looks_for_the_toolkits_files_or_its_own_is_kept(
    project: Project, probe: str
) -> None:
    source = f"{probe}\n#define VALUE 1\n#endif\n{KERNEL}"
    first = project.build(source, (), headers={"mine.h": ""})
    assert (first.hit, first.uncached) == (False, "")
    assert project.build(source, (), headers={"mine.h": ""}).hit


def test_a_file_that_would_answer_for_the_toolkits_is_a_miss(project: Project) -> None:
    project.write({"inc/v.h": "#define VALUE 1\n"})
    source = f'#if __has_include(<cuda_fp16.h>)\n#include "v.h"\n#endif\n{KERNEL}'
    assert project.build(source).uncached == ""
    project.write({"inc/cuda_fp16.h": ""})
    assert "cuda_fp16.h" in project.build(source).miss


def test_a_toolkit_that_lost_a_file_looked_for_is_another_toolkit(tmp_path: Path) -> None:
    (tmp_path / "tool.h").write_text("")
    program = Program.of("#if __has_include(<tool.h>)\n#endif\n")
    roots = {"cuda": str(tmp_path)}
    state = observe(Survey(program, roots, ("cuda",), Memo()), [], Memo())
    assert change(state, roots, Memo()) is None
    (tmp_path / "tool.h").unlink()
    assert change(state, roots, Memo()) == "header tool.h is gone"


class Compile:
    """Compile a source that includes `v.h` from two directories, with a change during the compile."""

    def __init__(self, root: Path) -> None:
        self.first, self.second = root / "first", root / "second"
        self.first.mkdir()
        self.second.mkdir()
        (self.second / "v.h").write_text("#define VALUE 1\n")
        self.roots = {"0": str(self.first), "1": str(self.second)}
        self.survey = Survey(Program.of('#include "v.h"\n'), self.roots, (), Memo())

    def end(self) -> HeaderState:
        return observe(self.survey, ["@1/v.h"], Memo())


@pytest.fixture
def compile_under_way(tmp_path: Path) -> Compile:
    return Compile(tmp_path)


def test_a_header_that_stays_the_same_during_the_compile_is_trusted(compile_under_way: Compile) -> None:
    assert change(compile_under_way.end(), compile_under_way.roots, Memo()) is None


def edited(files: Compile) -> None:
    (files.second / "v.h").write_text("#define VALUE 2\n")


def replaced_by_an_older_file(files: Compile) -> None:
    other = files.second / "other.h"
    other.write_text("#define VALUE 2\n")
    os.utime(other, (1, 1))
    other.replace(files.second / "v.h")


def directory_replaced(files: Compile) -> None:
    files.second.rename(files.second.with_name("old"))
    files.second.mkdir()
    (files.second / "v.h").write_text("#define VALUE 1\n")


def removed(files: Compile) -> None:
    (files.second / "v.h").unlink()


def hidden(files: Compile) -> None:
    (files.first / "v.h").write_text("#define VALUE 2\n")


@pytest.mark.parametrize(
    "happens", [edited, replaced_by_an_older_file, directory_replaced, removed, hidden]
)
def test_files_that_change_during_the_compile_are_not_trusted(
    compile_under_way: Compile, happens: Callable[[Compile], None]
) -> None:
    happens(compile_under_way)
    with pytest.raises(Untrackable, match=r"v\.h (changed|appeared) while the program was compiled"):
        compile_under_way.end()


def test_a_link_that_leads_elsewhere_during_the_compile_is_not_trusted(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "v.h").write_text("the same text")
    link = tmp_path / "link"
    link.symlink_to("a")
    survey = Survey(Program.of('#include "v.h"\n'), {"0": str(link)}, (), Memo())
    link.unlink()
    link.symlink_to("b")
    with pytest.raises(Untrackable, match=r"v\.h changed while the program was compiled"):
        observe(survey, ["@0/v.h"], Memo())


def test_a_file_that_no_text_names_is_looked_at_for_the_next_compile(tmp_path: Path) -> None:
    (tmp_path / "v.h").write_text("#define VALUE 1\n")
    roots = {"0": str(tmp_path)}
    survey = Survey(Program.of("// nothing\n"), roots, (), Memo())
    with pytest.raises(Unexpected, match=r"v\.h"):
        observe(survey, ["@0/v.h"], Memo())
    state = observe(survey, ["@0/v.h"], Memo())
    assert [header.name for header in state.headers] == ["v.h"]


def test_a_program_whose_macro_names_a_header_compiles_twice_and_is_cached(project: Project) -> None:
    project.write({"inc/v.h": "#define VALUE 1\n"})
    source = f'#define NAME "v.h"\n#include NAME\n{KERNEL}'
    assert project.build(source).uncached == ""
    assert project.build(source).hit


def test_a_name_that_line_made_up_is_no_file(project: Project) -> None:
    project.write({"inc/v.h": '#define VALUE 1\n#line 7 "generated.h"\n'})
    source = f'#include "v.h"\n#line 1 "family.cu"\n{KERNEL}'
    assert project.build(source).uncached == ""
    assert project.build(source).hit


@pytest.mark.parametrize("name", ["made/up.h", "scratch.h"])
def test_a_name_that_nothing_made_up_is_not_trusted(tmp_path: Path, name: str) -> None:
    survey = Survey(Program.of('#line 1 "other.h"\n'), {"0": str(tmp_path)}, (), Memo())
    with pytest.raises(Untrackable, match="in no include directory"):
        observe(survey, [name], Memo())


# What a process that is not sealed takes from a bundle


def test_a_header_that_lies_behind_another_root_now_must_be_the_same(tmp_path: Path) -> None:
    for name, text in {"a": "old", "b": "new"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "v.h").write_text(text)
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    digest = FileHasher(Memo()).evidence(f"{a}/v.h").digest
    state = HeaderState((Header("0", "v.h", digest),), (), ("0",))
    assert mismatch(state, {"0": a}, Memo()) is None
    assert mismatch(state, {"0": str(tmp_path), "1": a}, Memo()) is None
    assert mismatch(state, {"0": str(tmp_path), "1": b}, Memo()) == "header v.h changed"
    assert mismatch(state, {"0": b, "1": a}, Memo()) == "header v.h changed"
    assert mismatch(state, {}, Memo()) is None


@pytest.mark.parametrize(
    ("opened", "reason"),
    [
        ("v.h", "in no include directory"),
        ("@7/v.h", "in no include directory"),
        ("@0/v.h", "read back"),
    ],
)
def test_a_file_that_cannot_be_placed_or_read_is_not_trusted(
    tmp_path: Path, opened: str, reason: str
) -> None:
    with pytest.raises(Untrackable, match=reason):
        observe(Survey(Program.of("//"), {"0": str(tmp_path)}, (), Memo()), [opened], Memo())


# The toolkit's headers


def test_the_toolkits_headers_are_there_without_being_asked_for(project: Project) -> None:
    source = "#include <cuda_fp16.h>\n__global__ void k(__half* x) { *x = __float2half(1.0f); }"
    first = project.build(source, ())
    assert ("cuda", "cuda_fp16.h") in names(first)
    assert project.build(source, ()).hit


def test_the_toolkits_directory_given_as_an_own_one_is_still_the_toolkits(
    project: Project, toolchain: Toolchain
) -> None:
    source = f"#include <cuda/std/cstdint>\n{KERNEL.replace('VALUE', '1')}"
    include = [toolchain.located.roots["cccl"], toolchain.located.roots["cuda"]]
    first = project.build(source, tuple(include))
    assert (first.uncached, names(first)[0][0]) == ("", "0")
    assert project.build(source, tuple(include)).hit


def test_a_program_with_hundreds_of_headers_is_a_hit_in_another_process(
    open_builder: Callable[..., Builder], recorder: Recorder
) -> None:
    source = """
    #include <cub/block/block_reduce.cuh>
    extern "C" __global__ void total(const int* in, int* out) {
        using Reduce = cub::BlockReduce<int, 128>;
        __shared__ typename Reduce::TempStorage scratch;
        int sum = Reduce(scratch).Sum(in[threadIdx.x]);
        if (threadIdx.x == 0) *out = sum;
    }
    """
    first = open_builder().build(Program.of(source), "sm_90")
    assert len(first.headers) > 100
    assert {header.root for header in first.headers} == {"cuda", "cccl"}
    assert open_builder().build(Program.of(source), "sm_90") == first
    assert len(recorder.named("compile")) == len(recorder.named("hit")) == 1
    assert recorder.named("uncached") == []


@pytest.mark.parametrize("failing", ["#include <cub/cub.cuh>\n", '#include "half.h"\n', "#error no\n"])
def test_after_a_compile_that_failed_in_a_header_the_next_is_tracked_whole(
    project: Project, failing: str
) -> None:
    project.write({"inc/half.h": '#include "missing.h"\n', **TRACKED["nested"][1]})
    with pytest.raises(CompileError):
        project.build(failing + KERNEL)
    outcome = project.build(TRACKED["nested"][0] + KERNEL)
    assert outcome.uncached == ""
    assert names(outcome) == [("0", "deep/middle.h"), ("0", "outer.h"), ("0", "v.h")]


# Nothing of the machine


def test_headers_in_the_current_directory_are_not_picked_up(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.write({"here/v.h": "#define VALUE 1\n"})
    monkeypatch.chdir(project.root / "here")
    with pytest.raises(CompileError, match=r'cannot open source file "v\.h"'):
        project.build(f'#include "v.h"\n{KERNEL}', ())


def test_two_machines_make_the_same_key_and_the_same_bytes(project: Project, events: Events) -> None:
    header = """
    __device__ const char* where() { return __FILE__; }
    namespace { struct Own { int a; }; __global__ void hidden(Own o, int* x) { *x = o.a; } }
    """
    made = []
    for machine in ("one", "a/longer/path"):
        project.write({f"{machine}/v.h": header})
        there = Config(
            cache_dirs=(project.root / f"{machine}-cache",), lock_dir=project.root / f"{machine}-locks"
        )
        builder = Builder.open(there, events=events)
        source = f"#include <v.h>\n{KERNEL.replace('VALUE', 'where()[*x]')}"
        program = Program.of(source, include=[project.root / machine])
        made.append(builder.build(program, "sm_90"))
        builder.close()  # and its worker, because the other machine has other processes
    one, two = made
    assert one.digest == two.digest
    assert one.headers == two.headers
    assert one.cubin == two.cubin
    assert one.ptx == two.ptx
    assert str(project.root).encode() not in one.cubin + one.ptx


def test_the_file_name_of_a_header_tells_no_path(project: Project) -> None:
    project.write({"inc/v.h": "__device__ char where[] = __FILE__;\n#define VALUE where[*x]\n"})
    cubin = project.build(f'#include "v.h"\n{KERNEL}').artifact.cubin
    assert b"v.h" in cubin
    assert str(project.root).encode() not in cubin
    assert b"/dev/shm" not in cubin
