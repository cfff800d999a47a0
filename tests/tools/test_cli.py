"""The command line: data on stdout, messages on stderr, and one line for every kind of bad input."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from preheat import native
from preheat.build.builder import Builder
from preheat.devices.cuda import device as cuda_device
from preheat.errors import CompileError, Diagnostic, NoGpuError
from preheat.model import codec
from preheat.model.arch import Arch
from preheat.model.artifact import Artifact, Header
from preheat.model.events import Events, Stats
from preheat.model.program import Program
from preheat.store import DiskStore, filesystem
from preheat.store.bundle import write
from preheat.store.filesystem import Mount
from preheat.store.journal import Journal
from preheat.store.lock import FileLock
from preheat.toolchain.compiler import Toolchain
from preheat.toolchain.locate import Located
from preheat.tools.cli import doctor
from preheat.tools.cli.output import columns, count, duration, print_error, size
from tests.command import Cli, Ran
from tests.conftest import SAXPY
from tests.processes import (
    REPORT_WAITS,
    SOURCE,
    read_line,
    start_process,
    start_python,
    wait_for,
    wait_for_exit,
)
from tests.toolchain.support import compiling, gone

PTX = ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry empty()\n{\n  ret;\n}\n"


@pytest.fixture
def saxpy(tmp_path: Path) -> str:
    (tmp_path / "saxpy.cu").write_text(SAXPY)
    return "saxpy.cu"


# compile


def test_the_caller_of_a_sealed_compile_is_the_command(
    cli: Cli, saxpy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREHEAT_SEALED", "1")
    ran = cli("compile", saxpy, "--arch", "sm_90")
    assert ran.code == 1
    assert ran.err.startswith("error: preheat compile: saxpy.cu (sm_90) cannot be compiled")


def test_compile_says_what_it_made_and_then_what_it_found(cli: Cli, saxpy: str) -> None:
    first, second = (cli("compile", saxpy, "--arch", "sm_90") for _ in range(2))
    assert (first.code, second.code) == (0, 0)
    assert first.out.startswith("saxpy.cu  sm_90  ")
    assert "compiled in" in first.out
    assert "found on disk" in second.out
    assert second.err.strip() == "0 programs compiled, 1 found in the cache"


def test_compile_writes_cubin_and_ptx_where_asked(cli: Cli, saxpy: str, tmp_path: Path) -> None:
    ran = cli("compile", saxpy, "--arch", "sm_90", "--arch", "sm_100", "-o", "build/deep", "--json")
    assert ran.code == 0
    assert sorted(p.name for p in (tmp_path / "build" / "deep").iterdir()) == [
        *("saxpy.sm_100.cubin", "saxpy.sm_100.ptx", "saxpy.sm_90.cubin", "saxpy.sm_90.ptx")
    ]
    rows = ran.json()["compiled"]
    assert [row["arch"] for row in rows] == ["sm_90", "sm_100"]
    assert rows[0]["kernels"] == ["saxpy(float, float const*, float*, int)"]
    assert (tmp_path / "build/deep/saxpy.sm_90.cubin").stat().st_size == rows[0]["bytes"]


def test_a_files_own_directory_is_an_include_root(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "v.h").write_text("#define V 1")
    (tmp_path / "sub" / "k.cu").write_text('#include "v.h"\n__global__ void k(int* x) { *x = V; }')
    assert cli("compile", "sub/k.cu", "--arch", "sm_90").code == 0


def test_options_defines_and_names_reach_the_compiler(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "t.cu").write_text("template <class T> __global__ void tk(T* p) { *p = V; }")
    ran = cli(
        *("compile", "t.cu", "--arch", "sm_90", "-D", "V=3", "-X=-use_fast_math"),
        *("--name", "tk<float>", "--json"),
    )
    assert ran.json()["compiled"][0]["kernels"] == ["tk<float>(float*)"]


def test_ptx_needs_no_architecture(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "e.ptx").write_text(PTX)
    assert cli("compile", "e.ptx", "--json").json()["compiled"][0]["arch"] == "sm_80"


TEMPLATES = """
template <class T> __global__ void block_reduce(T* x) { *x = 1; }
namespace ns { template <class T, int N> __global__ void warp_reduce(T* x) { *x = N; } }
"""


@pytest.mark.parametrize(
    ("source", "warning"),
    [
        (TEMPLATES, ": its templates block_reduce<…>, ns::warp_reduce<…> need --name"),
        (TEMPLATES.partition("namespace")[0], ": its template block_reduce<…> needs --name"),
        ("__device__ int x;", ""),
    ],
)
def test_a_file_without_kernels_is_a_warning(cli: Cli, source: str, warning: str) -> None:
    Path("reduce.cu").write_text(source)
    for _ in range(2):  # compiled, and found
        ran = cli("compile", "reduce.cu", "--arch", "sm_80", "--arch", "sm_90", "--json")
        assert ran.code == 0
        assert [row["kernels"] for row in ran.json()["compiled"]] == [[], []]
        assert ran.err.count("warning:") == 1
        assert f"warning: reduce.cu has no kernels{warning}\n" in ran.err


def test_a_file_with_an_instance_of_a_template_is_no_warning(cli: Cli) -> None:
    Path("reduce.cu").write_text(TEMPLATES)
    ran = cli("compile", "reduce.cu", "--arch", "sm_80", "--name", "block_reduce<int>", "--json")
    assert ran.json()["compiled"][0]["kernels"] == ["block_reduce<int>(int*)"]
    assert "warning" not in ran.err


def test_one_bad_file_does_not_stop_the_others(cli: Cli, saxpy: str, tmp_path: Path) -> None:
    (tmp_path / "bad.cu").write_text("__global__ void k(int* x) {\n  *x = missing;\n}\n")
    ran = cli("compile", "bad.cu", saxpy, "--arch", "sm_90")
    assert ran.code == 1
    assert ran.out.startswith("saxpy.cu")
    assert 'bad.cu:2:8: error: identifier "missing" is undefined' in ran.err
    assert "1 program compiled, 0 found in the cache, 1 failed" in ran.err


def test_a_program_that_is_not_cached_is_reported_with_its_reason(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "t.cu").write_text('extern "C" __global__ void k(char* p) { *p = __TIME__[0]; }')
    ran = cli("compile", "t.cu", "--arch", "sm_90")
    assert "t.cu was not cached: it uses __TIME__, which reads the clock" in ran.err


BAD: dict[str, tuple[list[str], str, str]] = {
    "no command": (["frobnicate"], "no such command: frobnicate", "see 'preheat --help'"),
    "a misspelt command": (["compil"], "did you mean 'compile'?", ""),
    "no file": (["compile"], "Missing argument", "preheat compile --help"),
    "a missing file": (["compile", "no.cu", "--arch", "sm_90"], "cannot read no.cu", ""),
    "a directory": (["compile", ".", "--arch", "sm_90"], ". is a directory", "name the files"),
    "an empty name": (["compile", "", "--arch", "sm_90"], "a file name is empty", ""),
    "CUDA to emulate": (
        ["emulate", "--coverage", "saxpy.cu"],
        "saxpy.cu:1: no .version directive",
        "preheat compile saxpy.cu",
    ),
    "no architecture": (["compile", "saxpy.cu"], "no architecture was given", "--arch sm_90"),
    "a bad architecture": (["compile", "saxpy.cu", "--arch", "hopper"], "'hopper' is not", "sm_90"),
    "an unknown option": (["compile", "saxpy.cu", "--frob"], "No such option", "--help"),
    "an empty file": (["compile", "empty.cu", "--arch", "sm_90"], "empty.cu: the source is empty", ""),
    "a binary": (["compile", "bin.cu", "--arch", "sm_90"], "not UTF-8", "not a compiled file"),
    "text that is no PTX": (["compile", "bad.ptx"], "bad.ptx:1: no .version", ""),
    "a pipe": (["compile", "pipe.cu", "--arch", "sm_90"], "cannot read pipe.cu: it is a pipe", ""),
    "a pipe to emulate": (
        ["emulate", "--coverage", "pipe.cu"],
        "cannot read pipe.cu: it is a pipe",
        "",
    ),
    "an unwritable output": (
        ["compile", "saxpy.cu", "--arch", "sm_90", "-o", "saxpy.cu/out"],
        "cannot write to saxpy.cu/out",
        "",
    ),
    "an architecture among the options": (
        ["compile", "saxpy.cu", "--arch", "sm_90", "-X=-arch=sm_80"],
        "-arch=sm_80 cannot be an option of a program",
        "arch",
    ),
    "a key that is none": (["cache", "show", "zz"], "'zz' is not a key", "cache ls"),
    "a key nobody has": (["cache", "show", "abcdef"], "no entry has the key abcdef", "cache ls"),
    "a bad size": (["cache", "prune", "--limit", "lots"], "--limit='lots' is not a size", ""),
    "an option that is none": (["compile", "saxpy.cu", "-X3"], "'3' is not a", "-X=-use"),
    "a missing include directory": (
        ["compile", "saxpy.cu", "--arch", "sm_90", "-I", "nowhere"],
        "include directory nowhere does not exist",
        "",
    ),
    "two files with one name": (
        ["compile", "saxpy.cu", "sub/saxpy.cu", "--arch", "sm_90", "-o", "out"],
        "two files would be written as out/saxpy.*",
        "",
    ),
    "three things to compare": (["cache", "why", "a", "b", "c"], "one file or two keys", ""),
    "why without architecture": (["cache", "why", "saxpy.cu"], "no architecture", "--arch"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_one_clear_line_and_exit_status_2(
    what: str, cli: Cli, saxpy: str, tmp_path: Path
) -> None:
    del saxpy
    (tmp_path / "empty.cu").write_text("\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "saxpy.cu").write_text(SAXPY)
    (tmp_path / "bin.cu").write_bytes(b"\x7fELF\xff\xff")
    (tmp_path / "bad.ptx").write_text("hello")
    os.mkfifo(tmp_path / "pipe.cu")
    args, message, hint = BAD[what]
    ran = cli(*args)
    assert ran.code == 2
    assert ran.out == ""
    first = ran.err.splitlines()[0]
    assert first.startswith("error: ")
    assert message in first
    assert hint in ran.err
    assert "Traceback" not in ran.err


def test_a_bad_setting_is_named(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREHEAT_CACHE_LIMIT", "lots")
    ran = cli("cache", "stats")
    assert (ran.code, ran.err.splitlines()[0]) == (
        2,
        "error: PREHEAT_CACHE_LIMIT='lots' is not a size: use bytes or a unit, such as 512MiB or 2G",
    )


# cache


@pytest.fixture
def key(cli: Cli, saxpy: str) -> str:
    """Return the key of the one program in the cache."""
    digest: str = cli("compile", saxpy, "--arch", "sm_90", "--json").json()["compiled"][0]["key"]
    return digest


def test_cache_dir_prints_the_path_and_nothing_else(cli: Cli, tmp_path: Path) -> None:
    assert cli("cache", "dir") == Ran(0, f"{tmp_path / 'cache'}\n", "")


def test_cache_ls_lists_programs_and_kernels(cli: Cli, key: str) -> None:
    ran = cli("cache", "ls")
    head, row = ran.out.splitlines()
    assert head.split() == ["KEY", "KIND", "PROGRAM", "ARCH", "SIZE", "USED", "KERNELS"]
    assert row.split()[:4] == [key[:12], "cuda", "saxpy.cu", "sm_90"]
    assert row.endswith("saxpy")
    assert ran.err.startswith("1 entry, ")
    (only,) = cli("cache", "ls", "--json").json()
    assert only["key"] == key


def test_an_empty_cache_is_said_plainly(cli: Cli) -> None:
    assert cli("cache", "ls") == Ran(0, "", "The cache is empty\n")
    assert cli("cache", "prune").err == "Nothing was removed\n"


def test_cache_show_prints_all_that_is_known(cli: Cli, key: str) -> None:
    reported = cli("cache", "show", key[:8]).out
    for expected in (
        *(key, "saxpy.cu", "sm_90", "NVRTC 13", "saxpy(float, float const*, float*, int)"),
        *("offset 8, 8 bytes, u64", "registers", "spills", "toolchain", "ptxas info"),
    ):
        assert expected in reported
    assert "Compile time" not in reported  # This value varies by run and is not compared.
    seen = cli("cache", "show", key, "--json").json()
    assert seen["kernels"][0]["resources"]["registers"] > 0
    assert ".entry saxpy" in cli("cache", "show", key, "--ptx").out


def test_cache_show_counts_the_headers_of_the_toolkit_and_lists_them_where_asked(
    cli: Cli, tmp_path: Path
) -> None:
    toolkit = [Header("cccl", f"cuda/std/{number}.h", "2" * 64) for number in range(422)]
    headers = (Header("0", "v.h", "1" * 64), *toolkit)
    code = Artifact("ab" * 32, "k.cu", Arch(9, 0), "NVRTC", (), (), b"", b"", headers=headers)
    DiskStore(tmp_path / "cache", Events(), lock_dir=tmp_path / "locks").put(code.digest, code.encode())
    reported = cli("cache", "show", "abab").out.splitlines()
    at = reported.index("headers (423)")
    assert reported[at + 1 :] == [
        "  0  v.h  111111111111",
        "  422 of the CUDA toolkit; --headers lists them",
    ]
    assert "  cccl  cuda/std/421.h  222222222222" in cli("cache", "show", "abab", "--headers").out
    assert len(cli("cache", "show", "abab", "--json").json()["headers"]) == 423


def test_cache_why_explains_a_miss_by_the_nearest_entry(cli: Cli, key: str, saxpy: str) -> None:
    reported = cli("cache", "why", saxpy, "--arch", "sm_100", "-X=-use_fast_math").out
    assert "not cached: absent" in reported
    assert f"nearest entry: saxpy.cu for sm_90 ({key[:12]})" in reported
    assert "arch: 'sm_90' became 'sm_100'" in reported
    assert "option[0]: '-use_fast_math' is new" in reported
    assert "is cached" in cli("cache", "why", saxpy, "--arch", "sm_90").out


def test_cache_why_names_the_header_that_changed(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "v.h").write_text("#define V 1")
    (tmp_path / "k.cu").write_text('#include "v.h"\n__global__ void k(int* x) { *x = V; }')
    cli("compile", "k.cu", "--arch", "sm_90")
    (tmp_path / "v.h").write_text("#define V 22")
    row = cli("cache", "why", "k.cu", "--arch", "sm_90", "--json").json()
    assert row["reason"] == "headers: header v.h changed"


def test_cache_why_compares_two_keys(cli: Cli, key: str, saxpy: str) -> None:
    other = cli("compile", saxpy, "--arch", "sm_100", "--json").json()["compiled"][0]["key"]
    assert cli("cache", "why", key, other).out == "arch: 'sm_90' became 'sm_100'\n"


def test_cache_verify_finds_and_repairs_damage(cli: Cli, key: str, tmp_path: Path) -> None:
    assert cli("cache", "verify").code == 0
    (file,) = (tmp_path / "cache").rglob("*.heat")
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    ran = cli("cache", "verify")
    assert (ran.code, ran.out) == (1, f"{key}  checksum mismatch\n")
    assert file.exists()
    assert cli("cache", "verify", "--repair").code == 0
    assert not file.exists()


def test_cache_stats_count_in_json_as_in_python(cli: Cli, key: str, saxpy: str) -> None:
    del key
    cli("compile", saxpy, "--arch", "sm_90")
    seen = cli("cache", "stats", "--json").json()
    assert seen["entries"] == 1
    assert seen["counters"]["compiles"] == 1
    assert seen["counters"]["hits.disk"] == 1
    assert "hits               1 (disk 1)" in cli("cache", "stats").out


def test_cache_prune_and_clear_count_what_they_remove(cli: Cli, key: str) -> None:
    assert cli("cache", "pin", key[:8]).code == 0
    assert cli("cache", "prune", "--files", "0").err == "Nothing was removed\n"
    assert cli("cache", "unpin", key[:8]).code == 0
    assert cli("cache", "prune", "--files", "0").err.startswith("Removed 1 file (")
    assert cli("cache", "clear").err == "The cache is empty\n"


def test_a_program_with_headers_is_one_entry_with_one_key_and_a_pin_holds_the_way_to_it(
    cli: Cli, tmp_path: Path
) -> None:
    (tmp_path / "v.h").write_text("#define V 1")
    (tmp_path / "k.cu").write_text('#include "v.h"\n__global__ void k(int* x) { *x = V; }')
    key = cli("compile", "k.cu", "--arch", "sm_90", "--json").json()["compiled"][0]["key"]
    assert [row["key"] for row in cli("cache", "ls", "--json").json()] == [key]
    seen = cli("cache", "stats", "--json").json()
    assert (seen["entries"], seen["files"], seen["limits"]["files"]) == (1, 2, 100_000)
    assert cli("cache", "verify").err == "Checked 2 files: 0 damaged\n"
    assert cli("cache", "pin", key[:8], "--json").json() == {"pinned": [key]}
    assert cli("cache", "prune", "--files", "0").err == "Nothing was removed\n"
    assert "found on disk" in cli("compile", "k.cu", "--arch", "sm_90").out
    (header_list,) = {file.stem for file in (tmp_path / "cache").rglob("*.heat")} - {key}
    for command in ("show", "pin", "clear"):  # It is no entry, so no key names it.
        assert f"no entry has the key {header_list}" in cli("cache", command, header_list).err
    assert cli("cache", "unpin", key[:8]).err == "Unpinned 1 entry\n"
    assert cli("cache", "clear", key[:8]).err.startswith("Removed 1 entry (")
    assert cli("cache", "stats", "--json").json()["files"] == 0


def test_the_time_of_rejected_programs_is_reported_separately(
    cli: Cli, key: str, tmp_path: Path
) -> None:
    del key
    stats = Stats(compiles=1, seconds_compiling=2, rejections=1, seconds_rejecting=0.5)
    Journal(tmp_path / "cache" / "stats", lock_dir=tmp_path / "locks").write(stats)
    reported = cli("cache", "stats").out
    assert re.search(r"^time compiling +2\.\d s$", reported, re.M)
    assert re.search(r"^rejected programs +1 in 500 ms$", reported, re.M)


def test_cache_clear_of_one_key_leaves_the_others(cli: Cli, key: str, saxpy: str) -> None:
    cli("compile", saxpy, "--arch", "sm_100")
    cli("cache", "pin", key[:10])
    assert cli("cache", "clear", key[:10]).err.startswith("Removed 1 entry (")
    assert [row["arch"] for row in cli("cache", "ls", "--json").json()] == ["sm_100"]
    cli("compile", saxpy, "--arch", "sm_90")
    assert not any(row["pinned"] for row in cli("cache", "ls", "--json").json())


def test_cache_commands_pass_over_entries_of_another_layout(cli: Cli, key: str, tmp_path: Path) -> None:
    (file,) = (tmp_path / "cache").rglob("*.heat")
    file.write_bytes(codec.pack(key, {"kind": "artifact", "label": "older"}, {}))
    assert cli("cache", "ls") == Ran(0, "", "The cache is empty\n")
    assert cli("cache", "why", "saxpy.cu", "--arch", "sm_100").code == 0
    assert cli("cache", "verify").code == 1


def test_a_fault_of_the_system_is_one_line(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "cache" / "v1").mkdir(parents=True)
    (tmp_path / "cache").chmod(0o700)
    (tmp_path / "cache" / "v1" / "pins").symlink_to("pins")
    ran = cli("cache", "ls")
    assert ran.code == 1
    assert ran.err.startswith("error: [Errno 40]")


def test_cache_stats_can_be_reset(cli: Cli, key: str) -> None:
    del key
    assert cli("cache", "stats", "--json").json()["counters"]["compiles"] == 1
    assert cli("cache", "stats", "--reset", "--json").json()["counters"] == {}


def test_cache_why_of_ptx_needs_no_architecture(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "e.ptx").write_text(PTX)
    cli("compile", "e.ptx")
    assert "for sm_80 is cached" in cli("cache", "why", "e.ptx").out


# doctor


def test_doctor_compiles_with_every_header_that_programs_include(cli: Cli, tmp_path: Path) -> None:
    ran = cli("doctor", "--json")
    rows = {row["what"]: row for row in ran.json()}
    assert ran.code == 0
    for what in ("NVRTC", "nvJitLink", "cuda headers", "cccl headers", "test compile"):
        assert rows[what]["verdict"] == "ok"
    for header in doctor._HEADERS:
        assert (rows[header]["verdict"], rows[header]["detail"][:12]) == ("ok", "compiled in ")
    assert doctor._HEADERS.keys() >= {"cuda_fp16.h", "mma.h", "cooperative_groups.h"}
    assert rows["PREHEAT_CACHE_DIR"]["verdict"] == "ok"
    # The compiler ran: nothing came from a cache.
    assert not list((tmp_path / "cache").rglob("*.heat"))


@pytest.fixture
def quick_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out the compiles of `preheat doctor` for tests about something else."""
    monkeypatch.setattr(doctor, "_test_compiles", lambda _: [])


def test_doctor_says_which_package_brings_a_header_that_is_missing(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reject(_: object, program: Program, arch: Arch) -> None:
        message = "no such type"
        if "mma.h" in program.source:
            message = 'cannot open source file "crt/mma.h"'
        row = Diagnostic("/usr/include/some.h", 7, "error", message)
        raise CompileError(program.label, str(arch), (), "", [row])

    monkeypatch.setattr(Toolchain, "compile", reject)
    ran = cli("doctor", "--json")
    rows = {row["what"]: row for row in ran.json()}
    assert ran.code == 1  # The plain kernel does not compile either.
    assert rows["test compile"]["verdict"] == "fail"
    assert {rows[header]["verdict"] for header in doctor._HEADERS} == {"warn"}
    assert rows["mma.h"]["detail"] == (
        'does not compile: /usr/include/some.h: cannot open source file "crt/mma.h"'
    )
    assert rows["mma.h"]["fix"].startswith("pip install nvidia-cuda-crt, or 'preheat[cu13]'")
    assert "no such type" in rows["cuda_fp16.h"]["detail"]
    assert "of different releases" in rows["cuda_fp16.h"]["fix"]


NO_NVRTC = Located({}, {"nvrtc": "no package has it", "nvJitLink": "no package has it"}, {})


@pytest.mark.usefixtures("quick_doctor")
def test_doctor_warns_without_the_compilers_and_says_when_they_are_needed(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, shared_builder: Builder
) -> None:
    """A server with kernels of Triton alone has neither, and works."""
    library = shared_builder.toolchain.located.library("nvrtc")
    monkeypatch.setattr(Toolchain, "located", NO_NVRTC)
    ran = cli("doctor", "--json")
    rows = {row["what"]: row for row in ran.json()}
    assert ran.code == 0
    for name in ("NVRTC", "nvJitLink"):
        assert rows[name]["verdict"] == "warn"
        assert "only kernels that preheat compiles need it" in rows[name]["detail"]
        assert rows[name]["fix"].startswith("pip install 'preheat[cu13]'")
    # One without the other is not a choice: the installation is broken.
    monkeypatch.setattr(Toolchain, "located", NO_NVRTC._replace(libraries={"nvrtc": library}))
    ran = cli("doctor", "--json")
    rows = {row["what"]: row for row in ran.json()}
    assert (ran.code, rows["NVRTC"]["verdict"], rows["nvJitLink"]["verdict"]) == (1, "ok", "fail")


def fake_triton(place: Path, version: str) -> None:
    (place / "triton").mkdir(parents=True)
    (place / "triton" / "__init__.py").write_text(f"__version__ = {version!r}\n")
    info = place / f"triton-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: triton\nVersion: {version}\n")


@pytest.mark.usefixtures("quick_doctor")
def test_doctor_checks_what_a_triton_server_needs(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def rows() -> dict[str, dict[str, str]]:
        return {row["what"]: row for row in cli("doctor", "--json").json()}

    monkeypatch.delenv("CC", raising=False)
    fake_triton(tmp_path / "packages", "99.1.0")
    monkeypatch.syspath_prepend(tmp_path / "packages")
    triton = rows()["Triton"]
    assert triton["verdict"] == "warn"
    assert triton["detail"].startswith("Triton 99.1.0 is not known: the adapter accepts 3.6 to ")
    assert "install one of these versions" in triton["fix"]
    monkeypatch.setenv("PREHEAT_SEALED", "1")  # The import of Triton will raise.
    assert rows()["Triton"]["verdict"] == "fail"
    assert rows()["C compiler"]["verdict"] == "ok"
    monkeypatch.setattr(shutil, "which", lambda _: None)
    compiler = rows()["C compiler"]
    assert compiler["verdict"] == "warn"
    assert compiler["detail"].startswith("there is no gcc and no clang; Triton compiles host code in C")
    assert "install gcc" in compiler["fix"]


@pytest.mark.usefixtures("quick_doctor")
def test_doctor_says_nothing_of_triton_where_it_is_not_installed(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = importlib.metadata.version

    def version(name: str) -> str:
        if name == "triton":
            raise importlib.metadata.PackageNotFoundError(name)
        return installed(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    names = {row["what"] for row in cli("doctor", "--json").json()}
    assert not names & {"Triton", "C compiler"}


@pytest.mark.usefixtures("quick_doctor")
@pytest.mark.parametrize("driver", [True, False])
def test_doctor_without_a_gpu_mentions_the_emulator(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, driver: bool
) -> None:
    def visible() -> list[object]:
        if driver:
            return []
        raise NoGpuError("no GPU: there is no driver")

    monkeypatch.setattr(cuda_device, "visible", visible)
    monkeypatch.setattr(cuda_device, "driver_version", lambda: "13.0")
    assert "the emulator runs kernels on the CPU: preheat.device('emulator')" in cli("doctor").err


@pytest.mark.usefixtures("quick_doctor")
def test_doctor_tells_what_is_wrong_and_how_to_repair_it(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "cache").mkdir()
    os.chmod(tmp_path / "cache", 0o777)
    ran = cli("doctor")
    assert "others can write to it" in ran.out
    monkeypatch.setenv("PREHEAT_CACHE", "perhaps")
    ran = cli("doctor")
    assert ran.code == 1
    assert "hint: PREHEAT_CACHE: unset PREHEAT_CACHE or correct it" in ran.err
    assert "1 problem" in ran.err


@pytest.mark.usefixtures("quick_doctor")
def test_doctor_shows_a_network_filesystem_and_what_follows_from_it(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PREHEAT_LOCK_DIR", str(tmp_path / "cache" / "locks"))
    rows = {row["what"]: row for row in cli("doctor", "--json").json()}
    assert "other nodes" not in rows["cache directory"]["detail"]
    assert rows["lock directory"]["verdict"] == "ok"
    mounts = [Mount((0, 1), "/", "ext4"), Mount((0, 2), str(tmp_path / "cache"), "nfs4")]
    monkeypatch.setattr(filesystem, "read_mounts", lambda: mounts)
    rows = {row["what"]: row for row in cli("doctor", "--json").json()}
    assert f"{tmp_path / 'cache'} (nfs4), " in rows["cache directory"]["detail"]
    assert "a lease among them decides who compiles" in rows["cache directory"]["detail"]
    assert rows["lock directory"]["verdict"] == "warn"
    assert "it is on nfs4, which other nodes share" in rows["lock directory"]["detail"]
    assert rows["lock directory"]["fix"].startswith("set PREHEAT_LOCK_DIR to a private directory")


@pytest.mark.usefixtures("quick_doctor")
def test_doctor_flags_a_misspelt_variable(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREHEAT_CACHEDIR", "/somewhere")
    ran = cli("doctor")
    assert "this variable is unknown" in ran.out
    assert "did you mean 'PREHEAT_CACHE_DIR'?" in ran.err


@pytest.mark.usefixtures("quick_doctor")
@pytest.mark.parametrize(
    ("core", "reason", "verdict", "detail", "fix"),
    [
        (object(), "", "ok", "in use", ""),
        (None, native.SWITCHED_OFF, "ok", "not in use: PREHEAT_NATIVE is off; launches", ""),
        (None, "it was not built: none", "warn", "not in use: it was not built: none;", "C compiler"),
        (None, native.STALE, "warn", "not in use: it was built from another source;", "run make in"),
    ],
)
def test_doctor_says_whether_the_native_core_is_in_use(
    cli: Cli,
    monkeypatch: pytest.MonkeyPatch,
    core: object,
    reason: str,
    verdict: str,
    detail: str,
    fix: str,
) -> None:
    monkeypatch.setattr(native, "core", core)
    monkeypatch.setattr(native, "reason", reason)
    (row,) = (row for row in cli("doctor", "--json").json() if row["what"] == "native core")
    assert row["verdict"] == verdict
    assert row["detail"].startswith(detail)
    assert fix in row["fix"]
    assert bool(fix) == bool(row["fix"])
    assert f"native core  {row['detail']}" in re.sub(" {2,}", "  ", cli("doctor").out)


@pytest.mark.parametrize(
    ("setting", "expected"),
    [("0", native.SWITCHED_OFF), ("off", native.SWITCHED_OFF), ("1", ""), ("perhaps", "")],
)
def test_the_native_core_is_switched_off_by_the_environment(setting: str, expected: str) -> None:
    """A value that cannot be read is an error when a device is opened, not when preheat is imported."""
    shown = "from preheat import native; print(native.reason)"
    env = {**os.environ, "PREHEAT_NATIVE": setting, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run([sys.executable, "-c", shown], env=env, capture_output=True, text=True)
    assert done.stdout.strip() == (expected or native.reason), done.stderr


@pytest.mark.usefixtures("quick_doctor")
def test_doctor_looks_at_bundles(cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write(tmp_path / "whole.heat", {}, {"archs": ["sm_90"], "toolchains": ["NVRTC 13.4.92"]})
    (tmp_path / "broken.heat").write_bytes(b"nothing")
    monkeypatch.setenv("PREHEAT_BUNDLE", f"{tmp_path}/whole.heat:{tmp_path}/broken.heat")
    ran = cli("doctor", "--json")
    reported = [(row["verdict"], row["detail"]) for row in ran.json() if row["what"] == "bundle"]
    assert ran.code == 1
    assert [verdict for verdict, _ in reported] == ["ok", "fail"]
    assert reported[0][1].endswith("whole.heat, for sm_90, by NVRTC 13.4.92")
    assert "broken.heat" in reported[1][1]


@pytest.mark.usefixtures("quick_doctor")
def test_doctor_warns_of_a_seal_without_a_bundle(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREHEAT_SEALED", "1")
    rows = {row["what"]: row for row in cli("doctor", "--json").json()}
    assert rows["seal"]["verdict"] == "warn"


def test_called_with_nothing_it_shows_help(cli: Cli) -> None:
    for args in ((), ("cache",)):
        ran = cli(*args)
        assert (ran.code, ran.err[:6]) == (2, "Usage:")


# as a process


def test_help_has_examples_and_exit_statuses(cli: Cli) -> None:
    reported = cli("--help").out
    assert "preheat compile kernels/*.cu --arch sm_90" in reported
    assert "Exit status" in reported
    assert "preheat compile saxpy.cu" in cli("compile", "--help").out


def test_version(cli: Cli) -> None:
    assert cli("--version").out.startswith("preheat, version ")


def test_help_is_quick_and_loads_no_compiler_and_no_rich() -> None:
    code = (
        "import sys; from preheat.tools.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: print(sorted({'rich', 'cuda', 'xxhash', 'subprocess'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "[]"


def test_a_reader_that_leaves_is_no_error(cli: Cli, key: str) -> None:
    del cli
    command = f"{sys.executable} -m preheat cache show {key} | head -1"
    ran = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True)
    assert ran.stderr == ""
    assert ran.stdout.startswith("key")


def test_ctrl_c_ends_a_long_compile_at_once(cli: Cli, tmp_path: Path) -> None:
    del cli
    terms = "".join(f"a=={i}?{i}:" for i in range(30000))
    (tmp_path / "long.cu").write_text(f"__global__ void k(int* x, int a) {{ x[0] = {terms}0; }}")
    command = [sys.executable, "-m", "preheat", "compile", "long.cu", "--arch", "sm_90"]
    process = start_process(command)
    worker, _ = compiling(process.pid)
    process.send_signal(signal.SIGINT)
    _, err = wait_for_exit(process)  # which the compile would not do for a long time
    wait_for(lambda: gone(worker))  # The command exits by itself without a terminal.
    assert process.returncode == 130
    assert err.strip() == "error: interrupted"


def test_ctrl_c_ends_the_wait_for_another_process(cli: Cli, saxpy: str, tmp_path: Path) -> None:
    digest = cli("compile", saxpy, "--arch", "sm_90", "--json").json()["compiled"][0]["key"]
    cli("cache", "clear")
    owner = FileLock(tmp_path / "locks" / digest)
    assert owner.acquire(0)
    code = f"{REPORT_WAITS}\nimport sys\nfrom preheat.tools.cli import main\nmain(sys.argv[1:])"
    process = start_python(code, "compile", saxpy, "--arch", "sm_90", env={"PREHEAT_LOCK_WAIT": "3000"})
    assert read_line(process) == f"waits for {digest} 3000.0"
    process.send_signal(signal.SIGINT)
    _, err = wait_for_exit(process)  # while the lock is held
    owner.release()
    assert (process.returncode, err.strip()) == (130, "error: interrupted")


def test_errors_have_no_colour_where_none_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    monkeypatch.setattr("click.echo", lambda *_, color=None, **__: seen.append(color))
    monkeypatch.setenv("NO_COLOR", "1")
    print_error("text", "hint")
    monkeypatch.delenv("NO_COLOR")
    print_error("text")
    assert seen == [False, False, None]


def test_messages_use_plain_words() -> None:
    assert [size(n) for n in (0, 1023, 1024, 1536, 5 << 30, 3 << 40)] == [
        *("0 B", "1023 B", "1.0 KiB", "1.5 KiB", "5.0 GiB", "3.0 TiB")
    ]
    assert [duration(s) for s in (5e-6, 0.035, 1.84, 300)] == ["5 µs", "35 ms", "1.8 s", "5 min"]
    assert [count(1, "entry"), count(2, "entry"), count(1000, "file")] == [
        *("1 entry", "2 entries", "1,000 files")
    ]
    assert list(columns([("a", "bb"), ("ccc", "d")], right=(1,))) == ["a    bb", "ccc   d"]


# debug


@pytest.fixture
def with_header(tmp_path: Path) -> Path:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "v.h").write_text("__device__ inline int v(int x) { return x * 3; }\n")
    program = tmp_path / "k.cu"
    program.write_text('#include "sub/v.h"\n__global__ void k(int* x) { *x = v(*x); }\n')
    return program


def test_debug_sources_writes_what_debug_information_names(
    cli: Cli, with_header: Path, tmp_path: Path
) -> None:
    ran = cli("compile", with_header.name, "--arch", "sm_90", "-X=-lineinfo", "-o", "build", "--json")
    key = ran.json()["compiled"][0]["key"]
    reported = cli("debug", "sources", "out", "--json").json()
    assert reported["directory"] == str(tmp_path / "out")
    (program,) = reported["programs"]
    assert (program["key"], program["skipped"]) == (key, [])
    named = re.findall(r'\.file\s+\d+ "(.*)"', (tmp_path / "build" / "k.sm_90.ptx").read_text())
    assert len(named) == 2
    for name in named:  # by the rules that the command prints for cuda-gdb
        (before, after), *_ = [
            each for each in reported["substitute"].items() if name.startswith(each[0])
        ]
        place = Path(after + name.removeprefix(before))
        assert str(place) in program["files"]
        original = tmp_path / place.relative_to(tmp_path / "out" / place.parts[len(tmp_path.parts) + 1])
        assert place.read_text() == original.read_text()
    shown = cli("debug", "sources", "out", key[:12])
    assert shown.out.split() == [key[:12], "k.cu", "sm_90", "2", "files"]
    assert f"set substitute-path /preheat {tmp_path}/out/preheat" in shown.err


def test_debug_sources_keeps_the_file_that_was_used_last(
    cli: Cli, with_header: Path, tmp_path: Path
) -> None:
    keys = []
    for _ in range(2):
        ran = cli("compile", "k.cu", "--arch", "sm_90", "-X=-G", "--json")
        keys.append(ran.json()["compiled"][0]["key"])
        with_header.write_text(with_header.read_text() + "// changed\n")
    first, second = keys
    reported = cli("debug", "sources", "one", first, "--json").json()
    assert "changed" not in (tmp_path / "one" / "preheat" / "k.cu").read_text()
    both = cli("debug", "sources", "two", second, first, "--json").json()
    assert "changed" in (tmp_path / "two" / "preheat" / "k.cu").read_text()
    assert [len(row["skipped"]) for row in both["programs"]] == [0, 1]
    assert len(reported["programs"]) == 1


def test_debug_sources_without_line_information_is_an_error(cli: Cli, saxpy: str) -> None:
    ran = cli("debug", "sources", "out")
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.startswith("error: no program in the cache has line information")
    key = cli("compile", saxpy, "--arch", "sm_90", "--json").json()["compiled"][0]["key"]
    assert cli("debug", "sources", "out").code == 1
    ran = cli("debug", "sources", "out", key)
    assert ran.code == 2
    assert "(saxpy.cu) has no line information" in ran.err
    assert "-X=-lineinfo" in ran.err
    assert not Path("out").exists()


def test_debug_sources_has_examples(cli: Cli) -> None:
    assert "preheat debug sources ./sources" in cli("debug", "sources", "--help").out
