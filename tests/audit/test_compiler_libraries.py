"""Libraries with a compiler inside: the verdict is not positive over one that nothing sees."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from preheat.audit.compiler_libraries import (
    COMPILER_LIBRARIES,
    SeenBy,
    file_patterns,
    library_at,
    require_names,
)
from preheat.errors import InputError
from preheat.tools.cli.run import NOT_ACCOUNTED
from tests.audit.conftest import COMPILER, STANDIN, Audited, Cli, Standins

# The fixture `cli` puts stand-ins for compilers into PATH.
PATH = os.environ["PATH"]
HIDDEN = "libHalide.so.21.0"
NOT_PROVEN = "compiles by Halide: process {} loaded " + HIDDEN + ", and there is no hook for it"


# The table


def test_names_are_words_for_a_command_line() -> None:
    names = [row.name for row in COMPILER_LIBRARIES]
    assert len({name.lower() for name in names}) == len(names)
    assert all(name.isalnum() for name in names)


@pytest.mark.parametrize("row", COMPILER_LIBRARIES, ids=lambda row: row.name)
def test_a_row_says_what_compiles_and_what_showed_it(row: Any) -> None:
    assert row.compiles
    assert row.shown_by
    for pattern in row.files:
        assert pattern.count("*") <= 1
        assert ":" not in pattern
        assert library_at("/opt/site-packages/" + pattern.replace("*", "_x")) is row


def test_the_audit_library_has_room_for_the_patterns() -> None:
    """Its limits are MOST_PATTERNS and PATTERN_BYTES."""
    assert len(file_patterns().split(":")) <= 64
    assert len(file_patterns()) < 4096


def test_the_table_is_in_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs" / "audit.md").read_text()
    rows = [
        f"| {row.name} | {', '.join(f'`{file}`' for file in row.files)} | {row.compiles} "
        f"| {row.seen_by.value} | {row.shown_by} |\n"
        for row in COMPILER_LIBRARIES
    ]
    assert "|---|---|---|---|---|\n" + "".join(rows) + "\n" in page


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/v/nvidia_cutlass_dsl/_mlir_libs/_cutlass_ir.cu12.cpython-311-x86_64-linux-gnu.so", "CuTe"),
        ("warp-clang.so", "Warp"),
        ("/v/tilelang/lib/libtvm_compiler.so", "TileLang"),
        ("/v/tvm/lib/libtvm_compiler.so", "TVM"),
        ("/v/jaxlib/libjax_common.so", "XLA"),
        ("/usr/lib/libnvinfer.so.10", "TensorRT"),
        ("/v/torch/lib/libtorch_cpu.so", None),
        ("/v/triton/_C/libtriton.so", None),
        ("/v/llvmlite/binding/libllvmlite.so", "Numba"),
        ("/v/tvm/lib/libtvm_runtime.so", None),
        ("/usr/lib/libdnnl.so.3", None),
        ("/srv/mywarp.so", None),
    ],
)
def test_a_file_is_known_by_its_name(path: str, name: str | None) -> None:
    row = library_at(path)
    assert (row.name if row else None) == name


# What a process maps


Make = Callable[..., Path]


#: What was compiled already, by the code and the options.
_compiled: dict[tuple[str, ...], bytes] = {}


def compile_code(code: str, made: Path, *options: str) -> None:
    """Compile a program or a library to the path `made`, unless another test has compiled the same."""
    if (known := _compiled.get((code, *options))) is not None:
        made.write_bytes(known)
        made.chmod(0o755)
        return
    words = [str(COMPILER), "-Wall", "-Wextra", "-Werror", "-x", "c", "-", "-x", "none", *options]
    env = {**os.environ, "PATH": PATH}
    subprocess.run([*words, "-o", str(made)], input=code.encode(), env=env, check=True)
    _compiled[code, *options] = made.read_bytes()


def linked_against(*paths: Path) -> list[str]:
    return ["-Wl,--no-as-needed", *map(str, paths), *(f"-Wl,-rpath,{path.parent}" for path in paths)]


@pytest.fixture
def make(tmp_path: Path, standins: Standins) -> Make:
    """Makes a stand-in for a library, which needs the libraries in `needs`."""
    del standins  # It skips the test where there is no compiler.

    def build(name: str, *needs: Path) -> Path:
        path = tmp_path / "libraries" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        options = ["-shared", "-fPIC", f"-Wl,-soname,{name}"]
        compile_code("int anything(void) { return 1; }", path, *options, *linked_against(*needs))
        return path

    return build


@pytest.fixture
def hidden(make: Make) -> Path:
    """A stand-in for a library of the table that has no hook."""
    row = library_at(HIDDEN)
    assert row is not None
    assert row.seen_by is SeenBy.NOTHING
    return make(HIDDEN)


@pytest.fixture
def opener(tmp_path: Path, hidden: Path) -> tuple[Path, Path]:
    """A program that loads a library, and the same program linked against one."""
    made = tmp_path / "opener", tmp_path / "linked"
    code = (STANDIN / "opener.c").read_text()
    compile_code(code, made[0], "-ldl", "-lpthread")
    compile_code(code, made[1], "-ldl", "-lpthread", *linked_against(hidden))
    return made


def judged(cli: Cli, *words: str, options: tuple[str, ...] = ()) -> tuple[Audited, dict[str, Any]]:
    """Run a command sealed, and return the verdict."""
    done = cli("run", "--sealed", "--verdict", "v.json", *options, "--", *words)
    verdict: dict[str, Any] = json.loads(Path("v.json").read_text())
    return done, verdict


WAYS = ["linked", "end", "_exit", "exec", "close", "lookup", "fork", "thread", "list"]


@pytest.mark.parametrize("needed", [False, True], ids=["itself", "as a need of another library"])
@pytest.mark.parametrize("way", WAYS)
def test_a_mapped_compiler_is_not_proven(
    cli: Cli, make: Make, hidden: Path, opener: tuple[Path, Path], way: str, needed: bool
) -> None:
    path = make("libharmless.so", hidden) if needed else hidden
    program = opener[1] if way == "linked" else opener[0]
    done, verdict = judged(cli, str(program), way, str(path))
    assert (done.code, verdict["accounted"], verdict["verdict"]) == (NOT_ACCOUNTED, False, "not proven")
    (library,) = verdict["compiler_libraries"]
    (process,) = library["processes"]
    assert (library["name"], library["seen"], library["path"]) == ("Halide", False, str(hidden))
    assert verdict["unseen"] == [NOT_PROVEN.format(process)]
    assert f"not proven: {NOT_PROVEN.format(process)}" in done.err


@pytest.mark.parametrize("other", ["link", "copy"])
@pytest.mark.parametrize("way", ["end", "lookup", "close"])
def test_a_mapped_compiler_with_another_name_is_not_proven(
    cli: Cli, hidden: Path, opener: tuple[Path, Path], way: str, other: str
) -> None:
    """A copy still has the name that it was linked with."""
    path = hidden.with_name("libinnocent.so")
    if other == "link":
        path.symlink_to(hidden)
    else:
        shutil.copy(hidden, path)
    done, verdict = judged(cli, str(opener[0]), way, str(path))
    (library,) = verdict["compiler_libraries"]
    assert (library["name"], library["path"]) == ("Halide", str(path))
    assert (done.code, verdict["verdict"]) == (NOT_ACCOUNTED, "not proven")


def test_a_process_that_is_killed_has_reported_what_it_used(
    cli: Cli, hidden: Path, opener: tuple[Path, Path]
) -> None:
    done, verdict = judged(cli, "sh", "-c", f"{opener[0]} kill {hidden}; true")
    assert (done.code, verdict["verdict"]) == (NOT_ACCOUNTED, "not proven")


def test_the_search_path_of_a_caller_stays(cli: Cli, make: Make, tmp_path: Path) -> None:
    """The loader searches the RUNPATH of the library that calls `dlopen`."""
    place = make("libfound.so").parent
    code = '#include <dlfcn.h>\nint opens(void) { return !!dlopen("libfound.so", RTLD_NOW); }'
    caller = tmp_path / "caller.so"
    runpath = ["-Wl,--enable-new-dtags", f"-Wl,-rpath,{place}"]
    compile_code(code, caller, "-shared", "-fPIC", "-O2", *runpath)
    program = f"import ctypes; print(ctypes.CDLL({str(caller)!r}).opens())"
    done, verdict = judged(cli, sys.executable, "-c", program)
    assert (done.out, verdict["accounted"]) == ("1\n", True)


def test_a_process_without_the_table_is_not_proven(
    cli: Cli, hidden: Path, opener: tuple[Path, Path]
) -> None:
    """A launcher may pass on only some of the variables that the audit sets."""
    program = ["env", "-u", "PREHEAT_AUDIT_COMPILERS", str(opener[0]), "end", str(hidden)]
    done, verdict = judged(cli, *program)
    assert (done.code, verdict["verdict"]) == (NOT_ACCOUNTED, "not proven")
    why = "a program was started without PREHEAT_AUDIT_COMPILERS"
    assert verdict["unseen"] == [f"compilers inside libraries: {why}"]


def test_every_library_of_a_process_is_reported(cli: Cli, make: Make) -> None:
    paths = [make("libHalide.so"), make("libtvm.so"), make("libjax_common.so")]
    code = f"import ctypes\nfor path in {list(map(str, paths))}: ctypes.CDLL(path)\n"
    _, verdict = judged(cli, sys.executable, "-c", code)
    assert [each["name"] for each in verdict["compiler_libraries"]] == ["Halide", "TVM", "XLA"]
    assert len(verdict["unseen"]) == 3


@pytest.mark.parametrize(
    "names",
    [
        ["libtorch_cpu.so", "libdnnl.so.3"],
        ["libtriton.so"],
        ["libtorch_cpu.so", "libcaffe2_nvrtc.so"],
    ],
    ids=["torch", "Triton", "torch with its NVRTC"],
)
def test_a_process_that_compiles_nothing_is_accounted_for(
    cli: Cli, make: Make, names: list[str]
) -> None:
    """LLVM below a compiler with a hook, a JIT of a library's own code and a link to NVRTC are fine."""
    paths = [str(make(name)) for name in names]
    code = f"import ctypes\nfor path in {paths}: ctypes.CDLL(path)\n"
    done, verdict = judged(cli, sys.executable, "-c", code)
    assert (done.code, verdict["verdict"], verdict["unseen"]) == (0, "accounted", [])


def test_a_compiler_that_is_started_is_not_a_hidden_one(cli: Cli, hidden: Path, tmp_path: Path) -> None:
    """clang is linked against its LLVM, and is seen as a program."""
    program = tmp_path / "clang"
    compile_code("int main(void) { return 0; }", program, *linked_against(hidden))
    report = cli("audit", "--json", "--", str(program), "a.c").report
    assert report["compiler_libraries"] == []
    assert [each["name"] for each in report["compiles"]] == ["clang"]


def test_a_program_with_the_name_of_a_build_tool_is_not_a_compiler(
    cli: Cli, opener: tuple[Path, Path]
) -> None:
    for name in ("make", "cmake", "model-make", "prog-ld"):
        program = opener[1].with_name(name)
        program.write_bytes(opener[1].read_bytes())
        program.chmod(0o755)
        done, verdict = judged(cli, str(program), "--version")
        assert (done.code, verdict["verdict"]) == (NOT_ACCOUNTED, "not proven"), name


@pytest.mark.parametrize("first", ["gcc", "nvcc"])
def test_a_program_is_no_compiler_by_its_first_argument(
    cli: Cli, opener: tuple[Path, Path], standins: Standins, first: str
) -> None:
    """What it starts is seen, and its libraries are looked at."""
    words = ["bash", "-c", 'exec -a "$0" "$@"', first]
    _, verdict = judged(cli, *words, str(opener[1]), "linked", "--version")
    assert verdict["verdict"] == "not proven"
    _, verdict = judged(cli, *words, str(standins.loader), "popen", "nvcc a.cu", "--version")
    assert [each["what"] for each in verdict["refused"]] == ["start a compiler"]


def test_a_question_to_a_compiler_does_not_hide_its_libraries(
    cli: Cli, opener: tuple[Path, Path]
) -> None:
    program = shutil.copy(opener[1], opener[1].with_name("gcc"))
    done, verdict = judged(cli, str(program), "linked", "--version")
    assert (done.code, verdict["verdict"]) == (NOT_ACCOUNTED, "not proven")


def test_the_name_of_a_library_does_not_matter_if_its_file_is_known(
    cli: Cli, hidden: Path, opener: tuple[Path, Path]
) -> None:
    """Many of the table have no soname. A link to one is followed."""
    path, link = hidden.with_name("libtvm.so"), hidden.with_name("libinnocent.so")
    link.symlink_to(path.name)
    code = "int anything(void) { return 1; }"
    for options, opened in (([], path), ([], link), (["-Wl,-soname,libnothing.so"], path)):
        compile_code(code, path, "-shared", "-fPIC", *options)
        _, verdict = judged(cli, str(opener[0]), "end", str(opened))
        assert [each["name"] for each in verdict["compiler_libraries"]] == ["TVM"]


# The report, the verdict, and what the user allows


def test_a_report_does_not_say_that_nothing_was_compiled(
    cli: Cli, hidden: Path, opener: tuple[Path, Path]
) -> None:
    words = [str(opener[0]), "end", str(hidden)]
    text = cli("audit", "--", *words).err
    assert "No compile was seen." in text
    assert "Nothing was compiled" not in text
    assert f"loaded {HIDDEN}, and there is no hook for it" in text[text.index("Not seen:") :]
    assert cli("audit", "--json", "--", *words).report["clean"] is False


def test_a_run_without_a_verdict_says_it(cli: Cli, hidden: Path, opener: tuple[Path, Path]) -> None:
    done = cli("run", "--sealed", "--", str(opener[0]), "end", str(hidden))
    assert done.code == 0
    assert "not proven: compiles by Halide" in done.err


def test_what_the_user_allows_is_in_the_verdict(
    cli: Cli, hidden: Path, opener: tuple[Path, Path]
) -> None:
    allow = ("--allow-unseen", "halide", "--allow-unseen", "XLA")
    done, verdict = judged(cli, str(opener[0]), "end", str(hidden), options=allow)
    assert (done.code, verdict["verdict"], verdict["unseen"]) == (0, "accounted", [])
    assert verdict["allowed_unseen"] == ["Halide", "XLA"]
    (library,) = verdict["compiler_libraries"]
    assert (library["seen"], library["allowed"]) == (False, True)
    assert "not proven" not in done.err
    assert "no compile was seen (allowed unseen: Halide), and 0 modules loaded" in done.err


def test_another_library_stays_unseen(cli: Cli, hidden: Path, opener: tuple[Path, Path]) -> None:
    allow = ("--allow-unseen", "XLA")
    done, verdict = judged(cli, str(opener[0]), "end", str(hidden), options=allow)
    assert (done.code, verdict["verdict"]) == (NOT_ACCOUNTED, "not proven")


def test_a_wrong_name_is_an_error_before_the_command(cli: Cli) -> None:
    done = cli("run", "--allow-unseen", "Halid", "--", "touch", "started")
    assert done.code == 2
    assert "did you mean 'Halide'?" in done.err
    assert not Path("started").exists()
    with pytest.raises(InputError, match="'zzz'"):
        require_names(["zzz"])


def test_a_name_is_listed_once() -> None:
    assert require_names(["xla", "XLA", "Warp"]) == ("XLA", "Warp")


# Functions of Python packages that are wrapped

BUILD = """\
import ctypes, os
ctypes.CDLL(os.path.join(os.path.dirname(__file__), "warp.so"))

def build_cpu(obj_path, cpp_path, mode="release"):
    print("built", cpp_path)

def build_cuda(cu_path, arch, output_path, *, pch_dir=None):
    print("built", cu_path)

def _build_lto_base(lto_symbol, compile_func, builder, extra_files=None):
    return (True, b"cached") if lto_symbol == "cached" else compile_func({".lto": "made.lto"})
"""
CALLS = {
    "host": "build.build_cpu('w.o', '/c/w.cpp', mode='debug')",
    "device": "build.build_cuda('/c/w.cu', 90, 'w.cubin')",
    "lto": "build._build_lto_base('dot_16', print, None)",
    "cached": "build._build_lto_base('cached', print, None)",
    "nothing": "pass",
}
NAMES = {"host": "w.cpp", "device": "w.cu", "lto": "dot_16"}


@pytest.fixture
def warp(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Installs a stand-in for Warp, of a version and with a source."""

    def install(version: str = "1.19.0", source: str = BUILD) -> None:
        place = tmp_path / "site-packages"
        package = place / "warp" / "_src"
        package.mkdir(parents=True)
        (package.parent / "__init__.py").write_text("import warp._src.build\n")
        (package / "__init__.py").touch()
        (package / "build.py").write_text(source)
        shutil.copy(make("warp.so"), package)
        about = place / f"warp_lang-{version}.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: warp-lang\nVersion: {version}\n")
        monkeypatch.setenv("PYTHONPATH", str(place) + os.pathsep + os.environ["PYTHONPATH"])

    return install


Script = Callable[[str], list[str]]


def program(call: str) -> str:
    return f"import warp\nfrom warp._src import build\n{CALLS[call]}\n"


@pytest.mark.parametrize("call", ["host", "device", "lto"])
def test_a_compile_inside_a_library_is_reported(
    cli: Cli, warp: Callable[..., None], script: Script, call: str
) -> None:
    warp()
    report = cli("audit", "--json", "--", *script(program(call))).report
    (compile,) = report["compiles"]
    assert (compile["compiler"], compile["name"]) == ("Warp", NAMES[call])
    assert (compile["line"], compile["rejected"]) == ("app.py:3", False)
    assert report["unseen"] == []


@pytest.mark.parametrize("call", ["host", "device", "lto"])
@pytest.mark.parametrize("verdict", [True, False])
def test_a_sealed_process_refuses_a_compile_inside_a_library(
    cli: Cli, warp: Callable[..., None], script: Script, call: str, verdict: bool
) -> None:
    warp()
    options = ["--verdict", "v.json"] if verdict else []
    done = cli("run", "--sealed", *options, "--", *script(program(call)))
    assert done.code == 1
    assert "built" not in done.out
    assert "SealedCompileError: this process is sealed, so a compile by Warp was refused" in done.err
    assert "error: the run is sealed: app.py:3 tried to compile: Warp" in done.err
    if verdict:
        made = json.loads(Path("v.json").read_text())
        (refused,) = made["refused"]
        assert (refused["what"], refused["name"], refused["line"]) == ("compile", "Warp", "app.py:3")
        assert made["verdict"] == "not accounted"


def test_a_seal_that_only_warns_lets_it_compile(
    cli: Cli, warp: Callable[..., None], script: Script
) -> None:
    warp()
    done = cli("run", "--sealed", "warn", "--verdict", "v.json", "--", *script(program("host")))
    verdict = json.loads(Path("v.json").read_text())
    assert (done.code, done.out) == (NOT_ACCOUNTED, "built /c/w.cpp\n")
    assert [each["compiler"] for each in verdict["compiled"]] == ["Warp"]


@pytest.mark.parametrize("call", ["cached", "nothing"])
def test_a_process_whose_hook_saw_nothing_is_accounted_for(
    cli: Cli, warp: Callable[..., None], script: Script, call: str
) -> None:
    warp()
    done, verdict = judged(cli, *script(program(call)))
    assert (done.code, verdict["verdict"]) == (0, "accounted")
    (library,) = verdict["compiler_libraries"]
    assert (library["name"], library["seen"]) == ("Warp", True)


@pytest.mark.parametrize(
    ("version", "source", "why"),
    [
        ("1.20.0", BUILD, "the audit knows warp-lang 1.10 to 1.19, and this is 1.20.0"),
        ("1.9.1", BUILD, "the audit knows warp-lang 1.10 to 1.19, and this is 1.9.1"),
        ("1.19.0", BUILD.replace("build_cuda", "make_cuda"), "has no attribute 'build_cuda'"),
    ],
    ids=["newer", "older", "changed"],
)
def test_functions_that_are_not_known_are_not_wrapped(
    cli: Cli, warp: Callable[..., None], script: Script, version: str, source: str, why: str
) -> None:
    warp(version, source)
    done, verdict = judged(cli, *script(program("host")))
    assert (done.code, done.out, verdict["verdict"]) == (
        NOT_ACCOUNTED,
        "built /c/w.cpp\n",
        "not proven",
    )
    assert why in verdict["unseen"][0]
    assert judged(cli, *script(program("host")), options=("--allow-unseen", "Warp"))[0].code == 0


def test_a_library_that_is_loaded_without_its_package_is_not_seen(
    cli: Cli, warp: Callable[..., None], make: Make, script: Script
) -> None:
    """A hook in one process is no hook in another one, nor in a program that the process executes."""
    warp()
    opens = f"import ctypes; ctypes.CDLL({str(make('warp.so'))!r})"
    code = f"import os, sys, warp\nos.execv(sys.executable, [sys.executable, '-c', {opens!r}])\n"
    _, verdict = judged(cli, *script(code))
    why = "its functions were not wrapped in that process"
    assert [each["why"] for each in verdict["compiler_libraries"]] == [why, ""]
    assert verdict["verdict"] == "not proven"


def test_a_python_that_ignores_its_environment_has_no_hooks(
    cli: Cli, warp: Callable[..., None], script: Script, tmp_path: Path
) -> None:
    warp()
    python, path = script(
        f"import sys; sys.path.append({str(tmp_path / 'site-packages')!r})\nimport warp"
    )
    done, verdict = judged(cli, python, "-I", path)
    assert (done.code, verdict["verdict"]) == (NOT_ACCOUNTED, "not proven")
    assert verdict["unseen"][0].endswith("its functions were not wrapped in that process")


def test_a_fork_has_the_hooks_of_its_parent(
    cli: Cli, warp: Callable[..., None], make: Make, script: Script
) -> None:
    """The functions are wrapped in the parent, and the child loads the library."""
    warp(source=BUILD.replace('ctypes.CDLL(os.path.join(os.path.dirname(__file__), "warp.so"))', ""))
    code = (
        f"import ctypes, os, warp\nfrom warp._src import build\n"
        f"if not os.fork(): ctypes.CDLL({str(make('warp.so'))!r}); os._exit(0)\n"
        "os.wait()\n"
    )
    done, verdict = judged(cli, *script(code))
    assert (done.code, verdict["verdict"]) == (0, "accounted")
    assert len(verdict["compiler_libraries"]) == 1


NUMBA = """\
import ctypes

def compile_extra(typingctx, targetctx, func, args, return_type, flags, locals):
    print("built", func.__name__)
    if args:
        compile_extra(typingctx, targetctx, args[0], (), None, None, {})

def compile_ir(typingctx, targetctx, func_ir, args, return_type, flags, locals):
    print("built", func_ir.func_id.func_name)

ctypes.CDLL({llvm!r})
"""
TARGET = "class CPUContext: pass\n"
HOST = """\
def inner(): pass
def f(): pass
compiler.compile_extra(None, CPUContext(), f, (inner,), None, None, {})
"""
IR = """\
class Id: func_name = "lifted"
class Ir: func_id = Id
target = CPUContext()
compiler.compile_ir(None, targetctx=target, func_ir=Ir, args=(), return_type=0, flags=0, locals={})
"""
GPU = """\
class CUDAContext: pass
def k(): pass
compiler.compile_extra(None, CUDAContext(), k, (), None, None, {})
"""


@pytest.fixture
def numba(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Installs a stand-in for Numba, whose LLVM is in another library."""

    def install(source: str = NUMBA) -> None:
        package = tmp_path / "site-packages" / "numba" / "core"
        package.mkdir(parents=True)
        (package.parent / "__init__.py").touch()
        (package / "__init__.py").touch()
        (package / "cpu.py").write_text(TARGET)
        (package / "compiler.py").write_text(
            source.replace("{llvm!r}", repr(str(make("libllvmlite.so"))))
        )
        about = package.parents[1] / "numba-0.68.1.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: numba\nVersion: 0.68.1\n")
        monkeypatch.setenv("PYTHONPATH", f"{package.parents[1]}{os.pathsep}{os.environ['PYTHONPATH']}")

    return install


def numba_program(code: str) -> str:
    return f"from numba.core import compiler\nfrom numba.core.cpu import CPUContext\n{code}\n"


@pytest.mark.parametrize(("code", "name"), [(HOST, "f"), (IR, "lifted")], ids=["function", "IR"])
def test_a_compile_for_the_cpu_by_numba_is_reported_once(
    cli: Cli, numba: Callable[..., None], script: Script, code: str, name: str
) -> None:
    """A compile that it leads to is a part of it."""
    numba()
    done = cli("audit", "--json", "--", *script(numba_program(code)))
    assert [(row["compiler"], row["name"]) for row in done.report["compiles"]] == [("Numba", name)]


def test_a_sealed_process_refuses_a_compile_for_the_cpu_by_numba(
    cli: Cli, numba: Callable[..., None], script: Script
) -> None:
    numba()
    done, verdict = judged(cli, *script(numba_program(HOST)))
    assert (done.code, done.out, verdict["verdict"]) == (1, "", "not accounted")


@pytest.mark.parametrize("code", [GPU, "pass"], ids=["GPU", "nothing"])
def test_numba_without_a_compile_for_the_cpu_is_accounted_for(
    cli: Cli, numba: Callable[..., None], script: Script, code: str
) -> None:
    """libNVVM compiles its GPU code, and the audit library sees that."""
    numba()
    done, verdict = judged(cli, *script(numba_program(code)))
    assert (done.code, verdict["verdict"]) == (0, "accounted")
    assert [each["seen"] for each in verdict["compiler_libraries"]] == [True]


def test_a_numba_with_other_functions_is_not_seen(
    cli: Cli, numba: Callable[..., None], script: Script
) -> None:
    numba(NUMBA.replace("targetctx, func_ir", "target, func_ir"))
    _, verdict = judged(cli, *script(numba_program("pass")))
    (unseen,) = verdict["unseen"]
    assert unseen.endswith("compile_ir of this Numba has other parameters")


CUTE = {
    "__init__.py": "import cutlass.base_dsl.compiler\n",
    "_mlir/passmanager.py": 'class PassManager:\n    def run(self): print("ran passes")\n',
    "_mlir/execution_engine.py": """\
import ctypes, types
class Base:
    def __init__(self, module): print("made an engine")
_execution_engine = types.SimpleNamespace(ExecutionEngine=Base)
class ExecutionEngine(_execution_engine.ExecutionEngine):
    pass
ctypes.CDLL({library!r})
""",
    "base_dsl/compiler.py": """\
from cutlass._mlir import execution_engine, passmanager
class Compiler:
    def compile(self): passmanager.PassManager().run()
    def jit(self): return execution_engine.ExecutionEngine("module")
""",
}
CUTE_CALLS = {
    "compiler.Compiler().compile()": "GPU code",
    "compiler.Compiler().jit()": "host code",
    "compiler.passmanager.PassManager().run()": "GPU code",
    "compiler.execution_engine.ExecutionEngine(module='')": "host code",
    "compiler.execution_engine._execution_engine.ExecutionEngine('')": "host code",
}


@pytest.fixture
def cute(cli: Cli, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installs a stand-in for CuTe DSL and its MLIR bindings."""
    del cli  # It sets PYTHONPATH.
    place = tmp_path / "site-packages"
    for name, source in CUTE.items():
        path = place / "cutlass" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source.replace("{library!r}", repr(str(make("_cutlass_ir.so")))))
    about = place / "nvidia_cutlass_dsl-4.8.1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: nvidia-cutlass-dsl\nVersion: 4.8.1\n")
    monkeypatch.setenv("PYTHONPATH", f"{place}{os.pathsep}{os.environ['PYTHONPATH']}")


@pytest.mark.usefixtures("cute")
@pytest.mark.parametrize("call", CUTE_CALLS)
def test_each_compile_of_cute_and_of_its_bindings_is_reported_once(
    cli: Cli, script: Script, call: str
) -> None:
    words = script(f"from cutlass.base_dsl import compiler\n{call}\n")
    report = cli("audit", "--json", "--", *words).report
    assert [(row["name"], row["line"]) for row in report["compiles"]] == [
        (CUTE_CALLS[call], "app.py:2")
    ]
    assert report["unseen"] == []
    done, verdict = judged(cli, *words)
    assert (done.code, done.out, verdict["verdict"]) == (1, "", "not accounted")
