"""Ways to compile past an audit: each is refused, or the verdict says that it was not seen."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.audit.conftest import COMPILER, Cli, Programs

#: What becomes of a way. `harmless` compiles nothing, and docs/audit.md lists what is `unnoticed`.
REFUSED, UNSEEN, HARMLESS, UNNOTICED = "refused", "unseen", "harmless", "unnoticed"

#: NVRTC in the process: how the compile function is found.
IN_PROCESS = {
    "dlsym": REFUSED,
    "dlvsym": REFUSED,
    "dlmopen": REFUSED,
    "default": REFUSED,
    "next": REFUSED,
    "program": REFUSED,
    "dlvsym-default": REFUSED,
    "symbols": REFUSED,
}
#: Commands. {cc1} is a part of gcc, {cc1_copy} is a copy under another name, {file} is a source.
COMMANDS = {
    "gcc": ("gcc -c {file} -o t.o", REFUSED),
    "a copy of as": ("{as_copy} --version", HARMLESS),
    "a copy of as that assembles": ("{as_copy} t.s -o t.o", REFUSED),
    "a copy of cc1": ("{cc1_copy} -quiet {file} -o t.s", REFUSED),
    "a tracer": ("strace -f -o /dev/null gcc -c {file} -o t.o", REFUSED),
    "the loader": ("{loader} {gcc} -c {file} -o t.o", REFUSED),
    "the loader, with cc1": ("{loader} {cc1} -quiet {file} -o t.s", REFUSED),
    "a question with a file": ("gcc -c {file} -o t.o --version", HARMLESS),
    "a question to the linker": ("gcc -c {file} -o t.o -Wl,--version", REFUSED),
    "a wordy compile": ("gcc -v {file} -o t.exe", REFUSED),
    "env": ("env -i {gcc} -c {file} -o t.o", REFUSED),
    "env, with cc1": ("env -i {cc1} -quiet {file} -o t.s", REFUSED),
    "another user": ("setpriv --reuid 65534 --regid 65534 --clear-groups {as} --help", UNSEEN),
    "another root": ("chroot / {gcc} -c {file} -o t.o", REFUSED),
    "another namespace": ("unshare -p -f --mount-proc gcc -c {file} -o t.o", REFUSED),
}
#: How a program is started, by the ways of `spawner.c`: what becomes of cc1, and of a static program.
STARTS = {
    "raw": (REFUSED, UNSEEN),
    "raw-bare": (REFUSED, UNSEEN),
    "raw-bare-orphan": (REFUSED, UNSEEN),
    "fork-bare": (REFUSED, UNSEEN),
    "vfork": (REFUSED, UNSEEN),
    "spawn-bare": (REFUSED, UNSEEN),
    "instruction": (REFUSED, UNSEEN),
    "instruction-bare": (UNSEEN, UNSEEN),
    "instruction-bare-orphan": (UNSEEN, UNSEEN),
    "instruction-bare-unwaited": (UNNOTICED, UNNOTICED),
}
IN_MEMORY = f"""\
import os
file = os.memfd_create("innocent")
with open({str(COMPILER)!r}, "rb") as gcc, os.fdopen(os.dup(file), "wb") as copy:
    copy.write(gcc.read() + b"more, so that it is no copy")
os.execve(file, ["gcc", "-c", "t.c", "-o", "t.o"], os.environ)
"""
PYTHON = {
    "memory": (IN_MEMORY, REFUSED),
    "subprocess": ("import subprocess; subprocess.run(['gcc', '-c', 't.c', '-o', 't.o'])", REFUSED),
    "system": ("import os; del os.environ['LD_PRELOAD']; os.system('gcc -c t.c -o t.o')", UNSEEN),
}


def outcome(cli: Cli, *words: str) -> str:
    """Run a command sealed, and return what the verdict says."""
    cli("run", "--sealed", "--verdict", "verdict.json", "--", *words)
    verdict = json.loads(Path("verdict.json").read_text())
    found = REFUSED if verdict["refused"] else UNSEEN if verdict["unseen"] else HARMLESS
    assert verdict["accounted"] is (found == HARMLESS)
    return found


def part_of_gcc(name: str) -> str:
    done = subprocess.run([str(COMPILER), f"-print-prog-name={name}"], capture_output=True, text=True)
    path = shutil.which(done.stdout.strip())
    if COMPILER is None or path is None:
        pytest.skip(f"{name} of gcc is not installed")
    return os.path.realpath(path)


@pytest.fixture
def source(tmp_path: Path) -> str:
    (tmp_path / "t.c").write_text("int main(void) { return 0; }\n")
    (tmp_path / "t.s").write_text("\n")
    return "t.c"


@pytest.fixture(scope="module")
def static(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A static program, which could be a compiler."""
    place = tmp_path_factory.mktemp("static")
    (place / "p.c").write_text("int main(void) { return 0; }\n")
    words = [str(COMPILER), "-static", "-o", str(place / "program"), str(place / "p.c")]
    if COMPILER is None or subprocess.run(words, capture_output=True).returncode:
        pytest.skip("static programs cannot be built")
    return str(place / "program")


@pytest.mark.parametrize("how", IN_PROCESS)
def test_a_compile_in_the_process(cli: Cli, programs: Programs, how: str) -> None:
    words = (programs.program, how, programs.compiler("libnvrtc.so.13"))
    assert outcome(cli, *words) == IN_PROCESS[how]


def test_a_compile_in_a_library_with_another_name(cli: Cli, programs: Programs, tmp_path: Path) -> None:
    copy = shutil.copy(programs.compiler("libnvrtc.so.13"), tmp_path / "libinnocent.so")
    assert outcome(cli, programs.program, "dlsym", str(copy)) == REFUSED


def test_a_compile_of_a_linked_program(cli: Cli, programs: Programs) -> None:
    assert outcome(cli, programs.linked, "call", "nvrtcCompileProgram") == REFUSED


def test_nvrtc_compiles_although_its_function_was_not_looked_up(cli: Cli, programs: Programs) -> None:
    """It opens its library of built-in functions then, and fails without it."""
    words = (programs.program, "symbols", programs.compiler("libnvrtc.so.13"))
    assert cli("run", "--sealed", "--", *words).out.strip() == "7"
    warned = cli("run", "--sealed", "warn", "--", *words)
    assert (warned.out.strip(), "was permitted" in warned.err) == ("13", True)
    report = cli("audit", "--json", "--", *words).report
    assert report["unseen"] == ["compiles by NVRTC: the process did not find its function by dlsym"]


@pytest.mark.parametrize("function", ["nvrtcCompileProgram", "nvvmCompileProgram"])
def test_a_library_that_binds_to_its_own_libraries_first_is_unnoticed(
    cli: Cli, programs: Programs, function: str
) -> None:
    """The page on audits lists RTLD_DEEPBIND among what they cannot notice."""
    words = (programs.program, "deepbind", programs.compiler("newest.so"), "compile_with", function)
    assert outcome(cli, *words) == HARMLESS


@pytest.mark.parametrize("env", ["env -u LD_PRELOAD", "env -i"])
def test_a_program_that_drops_the_audit(cli: Cli, programs: Programs, env: str) -> None:
    words = [*env.split(), programs.program, "dlsym", programs.compiler("libnvrtc.so.13")]
    assert outcome(cli, *words) == UNSEEN


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command(cli: Cli, source: str, tmp_path: Path, name: str) -> None:
    command, expected = COMMANDS[name]
    tool = shutil.which(command.split()[0])
    if not command.startswith("{") and tool is None:
        pytest.skip(f"{command.split()[0]} is not installed")
    if command.startswith(("setpriv", "chroot", "unshare")) and os.geteuid():
        pytest.skip("only root can do this")
    parts = {part: part_of_gcc(part) for part in ("cc1", "as")}
    for part, path in parts.items():
        shutil.copy(path, tmp_path / f"innocent-{part[::-1]}")
    names = {
        **parts,
        "as_copy": str(tmp_path / "innocent-sa"),
        "cc1_copy": str(tmp_path / "innocent-1cc"),
        "gcc": str(COMPILER),
        "loader": next(iter(map(str, Path("/").glob("lib*/ld-linux-*.so.*"))), "none"),
        "file": source,
    }
    words = command.format(**names).split()
    if (
        words[0] == "unshare"
        and subprocess.run(["unshare", "-pf", "true"], capture_output=True).returncode
    ):
        pytest.skip("namespaces cannot be made")
    assert outcome(cli, *words) == expected


@pytest.mark.parametrize("how", STARTS)
def test_a_start_of_a_compiler(cli: Cli, programs: Programs, source: str, how: str) -> None:
    expected = STARTS[how][0]
    words = [programs.spawner, how, part_of_gcc("cc1"), "-quiet", source, "-o", "t.s"]
    assert outcome(cli, *words) == (HARMLESS if expected == UNNOTICED else expected)


@pytest.mark.parametrize("how", STARTS)
def test_a_start_of_a_static_program(cli: Cli, programs: Programs, static: str, how: str) -> None:
    expected = STARTS[how][1]
    assert outcome(cli, programs.spawner, how, static) == (
        HARMLESS if expected == UNNOTICED else expected
    )


@pytest.mark.parametrize("how", PYTHON)
def test_a_start_by_python(cli: Cli, source: str, how: str) -> None:
    assert source == "t.c"
    code, expected = PYTHON[how]
    assert outcome(cli, sys.executable, "-I", "-S", "-c", code) == expected


#: Waits for programs that were seen, or for none. The C library waits by itself in some of them.
WAITS = {
    "subprocess": "import subprocess; [subprocess.run(['true']) for _ in range(3)]",
    "system": "import os; os.system('true')",
    "popen": "import ctypes; c = ctypes.CDLL(None); c.popen.restype = ctypes.c_void_p; "
    "c.pclose(ctypes.c_void_p(c.popen(b'true', b'r')))",
    "fork": "import os\nif child := os.fork(): os.waitpid(child, 0)\nelse: os._exit(os.system('true'))",
    "waitid": "import os\nif child := os.fork(): os.waitid(os.P_PID, child, os.WEXITED)\n"
    "else: os._exit(3)",
    "no such program": "import ctypes\nctypes.CDLL(None).posix_spawnp("
    "ctypes.byref(ctypes.c_int()), b'/no/such/program', None, None, None, None)",
    "thread": "import subprocess, threading\n"
    "threading.Thread(target=subprocess.run, args=[['true']], daemon=True).start()",
}


@pytest.mark.parametrize("command", ["{python} app.py", "sh -c '(true; true); exec {python} app.py'"])
@pytest.mark.parametrize("waits", WAITS)
def test_children_that_were_seen_are_accounted(
    cli: Cli, tmp_path: Path, command: str, waits: str
) -> None:
    """A shell may become another program, whose children are those of the shell, too."""
    (tmp_path / "app.py").write_text(WAITS[waits])
    assert outcome(cli, *shlex.split(command.format(python=sys.executable))) == HARMLESS


def test_a_link_with_the_name_of_a_compiler_hides_no_other_program(cli: Cli, tmp_path: Path) -> None:
    """The stand-ins for compilers are links to `true`, which is not a compiler."""
    copy = shutil.copy(os.path.realpath(shutil.which("true") or "/bin/true"), tmp_path / "tool")
    assert outcome(cli, str(copy)) == HARMLESS
