"""`preheat bake`, `check` and `bundle`: their output, their refusals, and their exit status."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from preheat.ahead import fleets
from preheat.ahead.bake import BakeResult
from preheat.ahead.bundles import meta
from preheat.ahead.manifest import GraphKeys
from preheat.build.builder import Builder
from preheat.build.bundles import BundleEntry, entries_of
from preheat.build.refusal import find_nearest
from preheat.model.arch import Arch
from preheat.model.artifact import Artifact, EntryPoint, Header
from preheat.model.key import bundle_key, request_key
from preheat.model.program import Program
from preheat.store.bundle import Bundle, write
from preheat.store.lock import FileLock
from preheat.toolchain.headers.states import HeaderState
from preheat.tools.cli import bake as bake_command
from tests.command import Cli, Ran
from tests.processes import expect_success, start_process, wait_for, wait_for_exit

SM_90 = Arch(9, 0)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return one cache for all tests here: each kernel is compiled once."""
    return tmp_path_factory.mktemp("cli") / "cache"


def manifest(*rows: str, more: str = "") -> None:
    """`k.toml` with these rows, and a file for every program they could name."""
    for name in ("a", "b"):
        text = f'#include "v.h"\nextern "C" __global__ void {name}(int* x) {{ *x = V; }}\n'
        Path(f"{name}.cu").write_text(text)
    Path("v.h").write_text("#define V 1\n")
    Path("bad.cu").write_text("__global__ void k(int* x) {\n  *x = missing;\n}\n")
    Path("k.toml").write_text("version = 1\n" + "".join(f"[[program]]\n{r}\n" for r in rows) + more)


ONE, TWO, BAD = 'file = "a.cu"', 'file = "b.cu"', 'file = "bad.cu"'


# bake


def test_bake_writes_the_bundle_beside_the_manifest_and_sums_up(cli: Cli) -> None:
    manifest(ONE, TWO)
    os.mkdir("elsewhere")
    os.chdir("elsewhere")
    ran = cli("bake", "../k.toml", "--arch", "sm_80", "--arch", "sm_90")
    assert ran.code == 0
    head, *rows = [line.split() for line in ran.out.splitlines()]
    assert head == ["ARCH", "PROGRAMS", "COMPILED", "FOUND", "COMPILING", "SIZE"]
    assert [row[:4] for row in rows] == [["sm_80", "2", "2", "0"], ["sm_90", "2", "2", "0"]]
    assert ran.err.startswith("../k.heat: 4 baked, ")
    again = cli("bake", "../k.toml", "--arch", "sm_80", "--json", "-j1", "-o", "again.heat")
    assert {row["source"] for row in again.json()["baked"]} == {"disk"}
    assert again.json()["bundle"] == "again.heat"
    assert again.json()["bytes"] == Path("again.heat").stat().st_size


def test_a_bundle_loses_no_architecture_without_replace(cli: Cli) -> None:
    manifest(ONE)
    assert cli("bake", "k.toml", "--arch", "sm_80", "--arch", "sm_90").code == 0
    ran = cli("bake", "k.toml", "--arch", "sm_90")
    assert ran == Ran(
        2,
        "",
        "error: k.heat has code for sm_80, which this bake does not make: it would be lost\n\n"
        "hint: bake for sm_80 as well, name another file, or pass --replace (replace=True)\n",
    )
    assert cli("bake", "k.toml", "--arch", "sm_90", "--replace").code == 0
    assert cli("bundle", "ls", "k.heat", "--json").json()["archs"] == ["sm_90"]


def test_every_column_of_the_table_is_explained_by_the_help_and_the_page(cli: Cli) -> None:
    page = (Path(__file__).parents[2] / "docs" / "bake.md").read_text()
    help_text = cli("bake", "--help").out
    for column in next(bake_command._summary(BakeResult(()))):
        assert f"| `{column}` |" in page
        assert re.search(rf"\b{column}\b", help_text.partition("Examples:")[2])


def test_bake_tells_failures_in_the_message_of_the_compiler_and_bakes_the_rest(cli: Cli) -> None:
    manifest(ONE, BAD, 'file = "gone.cu"')
    ran = cli("bake", "k.toml", "--arch", "sm_90")
    assert ran.code == 1
    assert 'bad.cu:2:8: error: identifier "missing" is undefined' in ran.err
    assert "gone.cu: No such file" in ran.err
    assert ran.err.rstrip().endswith("; 2 failed and are not in the bundle")
    with Bundle.open("k.heat") as bundle:
        assert [promise.artifact.label for promise in entries_of(bundle)] == ["a.cu"]
    as_json = cli("bake", "k.toml", "--arch", "sm_90", "-o", "n.heat", "--json")
    assert [row["program"] for row in as_json.json()["failed"]] == ["bad.cu", "gone.cu"]


def test_a_template_that_no_name_instantiates_comes_with_what_to_write(cli: Cli) -> None:
    manifest('file = "t.cu"\nentries = ["t<int>"]')
    Path("t.cu").write_text("template <class T> __global__ void t(T* x) { *x = 1; }")
    ran = cli("bake", "k.toml", "--arch", "sm_90", "--json")
    (failed,) = ran.json()["failed"]
    assert failed["error"] == "t.cu has no kernel 't<int>'; it has: the template t<class T>"
    assert failed["hint"].endswith("add names = ['t<int>'] to the program")


@pytest.mark.parametrize(
    "words",
    [
        *("bake k.toml", "bake k.toml --check", "check k.toml", "run --manifest k.toml -- true"),
        *("compile a.cu", "cache why a.cu", "demo"),
    ],
)
def test_an_architecture_that_does_not_exist_is_refused_before_anything_else(
    cli: Cli, words: str
) -> None:
    name, *more = words.split()
    ran = cli(*([name, more.pop(0)] if name == "cache" else [name]), "--arch", "sm_91", *more)
    assert ran.code == 2
    message, hint = ran.err.split("\n\n")
    assert message == "error: sm_91 is not a known GPU architecture"
    assert hint.startswith("hint: known architectures: sm_50, ")
    assert ran.out == ""


def test_a_manifest_that_lists_nothing_is_refused(cli: Cli) -> None:
    manifest()
    bundle("k.heat", promise())
    before = Path("k.heat").read_bytes()
    for command in (["bake"], ["bake", "--check"], ["bake", "--json"], ["check"], ["check", "--json"]):
        ran = cli(*command, "k.toml", "--arch", "sm_90")
        assert (ran.code, ran.out) == (2, "")
        assert ran.err.startswith("error: k.toml lists no program\n")
        assert "hint: record what a program needs: preheat record -- python app.py" in ran.err
    assert Path("k.heat").read_bytes() == before


def test_a_manifest_of_graphs_alone_is_baked(cli: Cli) -> None:
    manifest(more='[[graph]]\nname = "decode"\nkeys = ["1"]\n')
    assert cli("bake", "k.toml", "--arch", "sm_90").code == 0


@pytest.mark.parametrize("output", ["k.toml", "a.cu", "."])
def test_a_file_that_is_not_a_bundle_is_never_replaced(cli: Cli, output: str) -> None:
    manifest(ONE)
    before = Path("k.toml").read_text(), Path("a.cu").read_text()
    whole = bundle("whole.heat", promise())
    for args in (["bake", "k.toml", "--arch", "sm_90"], ["bundle", "merge", whole]):
        ran = cli(*args, "-o", output)
        assert (ran.code, ran.out) == (2, "")
        assert f"error: cannot write {output}: it exists and is not a " in ran.err
        assert "hint: name another file for the bundle" in ran.err
    assert (Path("k.toml").read_text(), Path("a.cu").read_text()) == before


def test_a_bundle_that_was_cut_short_is_replaced(cli: Cli) -> None:
    manifest(ONE)
    for left in (b"", Path(bundle("whole.heat", promise())).read_bytes()[:20]):
        Path("k.heat").write_bytes(left)
        assert cli("bake", "k.toml", "--arch", "sm_90").code == 0


def test_bake_says_when_nothing_could_be_written(cli: Cli) -> None:
    manifest(BAD)
    ran = cli("bake", "k.toml", "--arch", "sm_90")
    assert (ran.code, ran.out) == (1, "")
    assert "k.heat was not written; 1 failed" in ran.err
    assert not Path("k.heat").exists()


def test_bake_notes_what_changed_and_what_is_never_cached(cli: Cli) -> None:
    manifest(f'{ONE}\nsha256 = "{"0" * 64}"', 'file = "t.cu"')
    Path("t.cu").write_text('extern "C" __global__ void t(char* p) { *p = __TIME__[0]; }')
    ran = cli("bake", "k.toml", "--arch", "sm_90")
    assert ran.code == 0
    assert "a.cu changed since it was recorded; its present content was baked" in ran.err
    assert "t.cu for sm_90 is compiled again by every bake: it uses __TIME__" in ran.err


BAD_CALLS: dict[str, tuple[list[str], str]] = {
    "no manifest": (["bake", "none.toml", "--arch", "sm_90"], "none.toml"),
    "no architecture": (["bake", "k.toml"], "--arch"),
    "a bad architecture": (["bake", "k.toml", "--arch", "hopper"], "'hopper' is not"),
    "no place to write": (["bake", "k.toml", "--arch", "sm_90", "-o", "no/k.heat"], "no is not a dir"),
    "a bundle for a manifest": (["bake", "whole.heat"], "whole.heat is a bundle, not text"),
    "a bundle to check": (["check", "whole.heat"], "hint: name the manifest that it was baked from"),
    "a manifest for a bundle": (["bundle", "ls", "k.toml"], "k.toml is not a valid bundle"),
    "how to come by a manifest": (["bake", "none.toml"], "'preheat record -- COMMAND' writes"),
    "a pipe for a manifest": (["bake", "pipe.toml"], "cannot read pipe.toml: it is a pipe"),
    "a pipe to check": (["check", "pipe.toml"], "cannot read pipe.toml: it is a pipe"),
    "no jobs": (["bake", "k.toml", "--arch", "sm_90", "-j0"], "0 is not in the range"),
    "a bundle that is none": (["check", "k.toml", "--arch", "sm_90", "--bundle", "a.cu"], "a.cu"),
    "a bundle that is not there": (["bundle", "ls", "none.heat"], "does not exist"),
    "nothing to merge into": (["bundle", "merge", "a.cu"], "Missing option '-o'"),
}


@pytest.mark.parametrize(("args", "said"), BAD_CALLS.values(), ids=BAD_CALLS)
def test_calls_that_make_no_sense_are_refused_in_a_line(cli: Cli, args: list[str], said: str) -> None:
    manifest(ONE)
    bundle("whole.heat", promise())
    os.mkfifo("pipe.toml")
    ran = cli(*args)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("error: ")
    assert said in ran.err
    assert not Path("k.heat").exists()


def test_the_bar_names_what_is_compiled_and_moves_by_expected_time(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest(ONE + "\nseconds = 3.0", TWO + "\nseconds = 0.5")
    steps: list[tuple[str, int, float]] = []
    totals: list[float] = []

    class Bar:
        def step(self, doing: str, advance: int = 1, work: float = 0) -> None:
            steps.append((doing, advance, work))

    @contextmanager
    def progress(_: str, total: int, *, work: float) -> Iterator[Bar]:
        totals.extend((total, work))
        yield Bar()

    monkeypatch.setattr(bake_command, "progress", progress)
    assert cli("bake", "k.toml", "--arch", "sm_90", "-j1").code == 0
    assert totals == [2, 3.5]
    named, advances, works = zip(*steps, strict=True)
    assert (named[0], named[-1]) == ("a.cu for sm_90", "")
    assert (sum(advances), [work for work in works if work]) == (2, [3.0, 0.5])


def test_ctrl_c_says_how_far_it_came_and_the_next_bake_continues(
    shared_builder: Builder, tmp_path: Path
) -> None:
    rows = []
    for index in range(8):
        (tmp_path / f"k{index}.cu").write_text(f"__global__ void k(int* x) {{ *x = {index}; }}")
        rows.append(f'[[program]]\nfile = "k{index}.cu"\narch = ["sm_90"]\n')
    (tmp_path / "k.toml").write_text("version = 1\n" + "".join(rows))
    env = {
        "PREHEAT_CACHE_DIR": str(tmp_path / "cache"),
        "PREHEAT_LOCK_DIR": str(tmp_path / "locks"),
        "PREHEAT_EVENTS": str(tmp_path / "events"),
    }
    program = Program.from_file(tmp_path / "k7.cu")
    (tmp_path / "locks").mkdir(mode=0o700)
    last = FileLock(tmp_path / "locks" / shared_builder.key(program, SM_90).digest)
    assert last.acquire(0)  # it waits for this one at the latest
    command = [
        sys.executable,
        "-m",
        "preheat",
        "bake",
        str(tmp_path / "k.toml"),
        "-j1",
        "--json",
    ]
    process = start_process(command, env=env)
    wait_for(lambda: _compiles(tmp_path / "events") >= 2 or process.poll() is not None)
    process.send_signal(signal.SIGINT)
    last.release()
    out, err = wait_for_exit(process)
    assert (process.returncode, out) == (130, "")
    assert "error: interrupted: " in err
    assert " of 8 done; run it again to continue" in err
    assert "Traceback" not in err
    done = _compiles(tmp_path / "events")
    again = expect_success(start_process(command, env=env))
    sources = [row["source"] for row in json.loads(again)["baked"]]
    assert len(sources) == 8
    assert sources.count("disk") >= done
    assert _compiles(tmp_path / "events") == done + sources.count("compiler")


def _compiles(log: Path) -> int:
    return log.read_text().count('"event": "compile"') if log.exists() else 0


# check


def test_check_proves_that_a_bundle_only_has_everything(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest(ONE, TWO)
    assert cli("bake", "k.toml", "--arch", "sm_90").code == 0
    whole = cli("check", "k.toml", "--arch", "sm_90", "--bundle", "k.heat")
    assert whole == Ran(0, "", "2 programs, 1 architecture: everything is in k.heat\n")
    assert cli("bake", "k.toml", "--arch", "sm_80", "-o", "other.heat").code == 0
    holes = cli("check", "k.toml", "--arch", "sm_80", "--bundle", "k.heat")  # the cache has them
    assert holes.code == 1
    assert holes.out.splitlines() == [
        f"{name}.cu sm_80: not baked for this architecture" for name in "ab"
    ]
    reported, _, hint = holes.err.splitlines()
    assert reported == "2 programs, 1 architecture: 2 missing from k.heat"
    assert hint == "hint: 'preheat bake k.toml' with the same --arch bakes what is missing"
    monkeypatch.setenv("PREHEAT_BUNDLE", "k.heat")
    assert cli("check", "k.toml", "--arch", "sm_80").code == 1
    monkeypatch.delenv("PREHEAT_BUNDLE")
    cached = cli("check", "k.toml", "--arch", "sm_80")
    assert cached.code == 0
    assert "everything is in the cache (no bundle was named)" in cached.err


def test_check_names_a_changed_header_and_bake_check_says_the_same(cli: Cli) -> None:
    manifest(ONE)
    missing = cli("bake", "k.toml", "--arch", "sm_90", "--check")
    assert (missing.code, missing.err) == (1, "error: k.heat does not exist: nothing is baked yet\n")
    assert cli("bake", "k.toml", "--arch", "sm_90").code == 0
    assert cli("bake", "k.toml", "--arch", "sm_90", "--check").code == 0
    Path("v.h").write_text("#define V 2\n")
    for args in (["bake", "k.toml", "--check"], ["check", "k.toml", "--bundle", "k.heat"]):
        ran = cli(*args, "--arch", "sm_90", "--json")
        assert ran.code == 1
        assert ran.json() == {
            "programs": 1,
            "archs": ["sm_90"],
            "bundles": ["k.heat"],
            "missing": [{"title": "a.cu", "arch": "sm_90", "reason": "header v.h changed"}],
            "to_record": [],
            "unchecked_headers": [],
            "unrecorded": [],
            "hints": [],
        }
    os.unlink("v.h")
    gone = cli("check", "k.toml", "--arch", "sm_90", "--bundle", "k.heat")
    assert gone.code == 0
    assert gone.err.startswith(
        "1 header file not compared, because not on this machine (such as v.h)\n"
    )


# bundle


def promise(
    name: str = "a",
    *,
    arch: Arch = SM_90,
    toolchain: str = "NVRTC 13.0.1",
    cubin: bytes = b"code",
    headers: Sequence[Header] = (),
    entries: tuple[str, ...] = (),
) -> BundleEntry:
    """Return a bundle entry for which no compiler was needed."""
    program = Program.of(f"text of {name}", label=f"{name}.cu")
    key = request_key(program, arch, toolchain)
    state = HeaderState(tuple(headers), (), ("0",) if headers else ())
    made = Artifact(
        digest=key.extended(state.parts()).digest if headers else key.digest,
        label=program.label,
        arch=arch,
        toolchain=toolchain,
        parts=key.table,
        entries=(EntryPoint(name, ()), EntryPoint("also", ())),
        cubin=cubin,
        ptx=b"",
        headers=tuple(headers),
    )
    return BundleEntry(bundle_key(program, arch).digest, made, state, entries)


def bundle(path: str, *held: BundleEntry, keys: Sequence[GraphKeys] = ()) -> str:
    entries = {digest: blob for each in held for digest, blob in each.encode().items()}
    made = [each.artifact for each in held]
    write(path, entries, meta((a.toolchain for a in made), (a.arch for a in made), keys))
    return path


UTIL = Header("0", "util.h", "1" * 64)


def test_bundle_ls_shows_programs_kernels_compiler_and_header_files(cli: Cli) -> None:
    toolkit = Header("cuda", "cuda_fp16.h", "2" * 64)
    file = bundle(
        "k.heat",
        promise("b", entries=("b",)),
        promise("a", headers=[UTIL, toolkit]),
        keys=[GraphKeys("decode", ("(1, 128)", "32"))],
    )
    ran = cli("bundle", "ls", file)
    head, first, second, *rest = ran.out.splitlines()
    assert head.split() == "KEY KIND PROGRAM ARCH SIZE HEADERS COMPILER KERNELS".split()
    assert first.split()[1:] == "cuda a.cu sm_90 4 B 2 NVRTC 13.0.1 a, also".split()
    assert second.split()[1:] == "cuda b.cu sm_90 4 B - NVRTC 13.0.1 b".split()
    assert "  util.h  111111111111" in rest
    assert "  decode  (1, 128) 32" in rest
    assert not any("cuda_fp16.h" in line for line in rest)
    assert ran.err.startswith("2 entries, ")
    assert ran.err.endswith(", made by NVRTC 13.0.1\n")
    reported = cli("bundle", "ls", file, "--json").json()
    assert reported["archs"] == ["sm_90"]
    assert reported["programs"][0]["headers"][1] == toolkit._asdict()
    assert reported["programs"][1]["wanted"] == ["b"]


def test_an_entry_has_one_key_wherever_it_is_shown(cli: Cli) -> None:
    spoilt = promise("a", headers=[UTIL], entries=("nope",))
    file = bundle("k.heat", spoilt)
    key = spoilt.artifact.digest
    assert cli("bundle", "ls", file).out.splitlines()[1].split()[0] == key[:12]
    (row,) = cli("bundle", "ls", file, "--json").json()["programs"]
    assert (row["key"], row["request"]) == (key, spoilt.key)
    assert cli("bundle", "verify", file).out.startswith(f"k.heat: entry {key[:12]}: ")
    wanted = bundle_key(Program.of("text of a", label="a.cu"), Arch(8, 0)).table
    with Bundle.open(file) as opened:
        near = find_nearest(wanted, "a.cu", [opened], [], seconds=60)
        assert find_nearest(wanted, "b.cu", [opened], [], seconds=60, namesake=True) is None
    assert str(near) == f"a.cu for sm_90 ({key[:12]})"


def test_bundle_verify_finds_what_is_damaged_missing_or_left_over(cli: Cli) -> None:
    good = bundle("good.heat", promise())
    whole = promise().encode()
    key = promise().key
    code = promise().artifact.digest
    write("codeless.heat", {key: whole[key]}, {})
    write("orphan.heat", {code: whole[code]}, {})
    bundle("unresolved.heat", promise(entries=("nope",)))
    damaged = bytearray(Path(good).read_bytes())
    damaged[-20] ^= 1
    Path("damaged.heat").write_bytes(damaged)
    Path("none.heat").write_bytes(b"nothing")
    assert cli("bundle", "verify", good) == Ran(0, "", "Checked 1 bundle: 0 damaged\n")
    names = ["codeless", "orphan", "unresolved", "damaged", "none"]
    ran = cli("bundle", "verify", good, *(f"{name}.heat" for name in names))
    assert ran.code == 1
    assert ran.err == "Checked 6 bundles: 5 damaged\n"
    lines = ran.out.splitlines()
    assert [line.partition(".heat")[0] for line in lines] == names
    for line, why in zip(
        lines,
        (
            "is missing",
            "no entry refers to it",
            "no kernel 'nope'",
            "checksum mismatch",
            "not a valid",
        ),
        strict=True,
    ):
        assert why in line
        assert line.count(".heat") == 1
    assert all(f"entry {code[:12]}: " in line for line in lines[:3])
    listed = cli("bundle", "verify", good, "orphan.heat", "--json").json()
    assert (listed["good.heat"], len(listed["orphan.heat"])) == ([], 1)
    assert cli("bundle", "ls", "damaged.heat").err.startswith("error: bundle damaged.heat is damaged")


def test_bundle_merge_unites_what_agrees_into_the_bundle_that_one_bake_makes(cli: Cli) -> None:
    a, b, c = promise("a", entries=("a",)), promise("b"), promise("c", arch=Arch(8, 0))
    bundle("1.heat", a, b, keys=[GraphKeys("g", ("1", "2"))])
    bundle("2.heat", replace(a, entries=("also",)), c, keys=[GraphKeys("g", ("2", "3"))])
    ran = cli("bundle", "merge", "1.heat", "2.heat", "-o", "m.heat")
    assert ran.code == 0
    assert ran.err.startswith("m.heat: 3 entries, ")
    as_json = cli("bundle", "merge", "1.heat", "2.heat", "-o", "m.heat", "--json").json()
    assert as_json == {"bundle": "m.heat", "entries": 3, "bytes": Path("m.heat").stat().st_size}
    united = replace(a, entries=("a", "also"))
    bundle("same.heat", c, united, b, keys=[GraphKeys("g", ("1", "2", "3"))])
    assert Path("m.heat").read_bytes() == Path("same.heat").read_bytes()


def test_bundle_merge_loses_no_architecture_of_the_bundle_that_it_replaces(cli: Cli) -> None:
    bundle("both.heat", promise("a"), promise("c", arch=Arch(8, 0)))
    bundle("one.heat", promise("b"))
    before = Path("both.heat").read_bytes()
    ran = cli("bundle", "merge", "one.heat", "-o", "both.heat")
    assert (ran.code, Path("both.heat").read_bytes()) == (2, before)
    assert "both.heat has code for sm_80, which none of the bundles has: it would be lost" in ran.err
    assert cli("bundle", "merge", "one.heat", "both.heat", "-o", "both.heat").code == 0


def test_bundle_merge_refuses_two_answers_to_one_request_unless_one_is_chosen(cli: Cli) -> None:
    bundle("old.heat", promise(), promise("b"))
    bundle("new.heat", promise(toolchain="NVRTC 13.4.92", headers=[UTIL]))
    ran = cli("bundle", "merge", "old.heat", "new.heat", "-o", "m.heat")
    assert ran.code == 2
    assert ran.err.splitlines()[:3] == [
        "error: a.cu for sm_90 differs between old.heat and new.heat:",
        "  compiler: NVRTC 13.0.1 and NVRTC 13.4.92",
        "  header util.h differs",
    ]
    assert "--prefer" in ran.err
    assert not Path("m.heat").exists()
    for prefer, versions in (("first", ["13.0.1"]), ("last", ["13.0.1", "13.4.92"])):
        assert (
            cli("bundle", "merge", "old.heat", "new.heat", "-o", "m.heat", "--prefer", prefer).code == 0
        )
        with Bundle.open("m.heat") as merged:
            assert merged.meta["toolchains"] == [f"NVRTC {version}" for version in versions]
            assert len(merged) == 4
        assert cli("bundle", "verify", "m.heat").code == 0


def test_bundle_merge_tells_the_same_request_with_other_code(cli: Cli) -> None:
    bundle("1.heat", promise())
    bundle("2.heat", promise(cubin=b"other"))
    ran = cli("bundle", "merge", "1.heat", "2.heat", "-o", "m.heat")
    assert "the same request was compiled to different code" in ran.err


# Fleets and shards


class Threads(ThreadPoolExecutor):
    """A fleet on this machine, whose address is the name of an engine."""

    def __init__(self, place: str) -> None:
        assert place == "scheduler:8786"
        super().__init__(2)


def test_a_bake_on_a_fleet_lists_its_workers(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleets, "DaskExecutor", Threads)
    manifest(ONE, TWO)
    command = ("bake", "k.toml", "--arch", "sm_90", "--on", "dask://scheduler:8786")
    ran = cli(*command)
    assert ran.code == 0
    worker = f"{socket.gethostname()}:{os.getpid()}"
    head, row = ran.out.splitlines()[-2:]
    assert head.split() == ["WORKER", "PROGRAMS", "COMPILED", "FOUND", "COMPILING"]
    assert row.split()[:2] == [worker, "2"]
    assert [each["worker"] for each in cli(*command, "--json").json()["baked"]] == [worker] * 2


def test_shards_write_bundles_of_their_own_which_merge_into_the_whole(cli: Cli) -> None:
    manifest(ONE, TWO)
    assert cli("bake", "k.toml", "--arch", "sm_90", "-o", "whole.heat").code == 0
    for number in (1, 2, 3):
        shard = cli("bake", "k.toml", "--arch", "sm_90", "--shard", f"{number}/3", "--json")
        assert shard.code == 0
        assert {row["source"] for row in shard.json()["baked"]} <= {"disk"}
        assert len(shard.json()["baked"]) == (0 if number == 3 else 1)
    parts = [f"k.{number}-of-3.heat" for number in (1, 2, 3)]
    assert cli("bundle", "merge", *parts, "-o", "merged.heat").code == 0
    assert Path("merged.heat").read_bytes() == Path("whole.heat").read_bytes()


def test_a_shard_that_an_array_does_not_tell_is_refused(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest(ONE, TWO)
    monkeypatch.delenv("SLURM_ARRAY_TASK_ID", raising=False)
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "1")
    ran = cli("bake", "k.toml", "--arch", "sm_90", "--shard", "auto")
    assert ran.code == 2
    assert "hint: add the number of completions of the job: --shard auto/8" in ran.err
    assert cli("bake", "k.toml", "--arch", "sm_90", "--shard", "auto/2").code == 0
    assert Path("k.2-of-2.heat").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--on", "dask://local", "-j2"], "-j is for this machine"),
        (["--on", "dask"], "'dask' is not the address of a fleet"),
        (["--shard", "0/2"], "there is no shard 0 of 2"),
        (["--shard", "1/2", "--check"], "--check reads a whole bundle"),
        (["--on", "ray://auto", "--check"], "--check reads a whole bundle"),
    ],
)
def test_options_of_fleets_that_cannot_be_are_refused(
    cli: Cli, options: list[str], message: str
) -> None:
    manifest(ONE, TWO)
    ran = cli("bake", "k.toml", "--arch", "sm_90", *options)
    assert ran.code == 2
    assert message in ran.err
