"""The program runs as it does without the audit, also in places where there is little room."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.audit.conftest import Audited, Cli, Standins
from tests.audit.modules import PTX
from tests.audit.test_modules import LOAD

Audit = Callable[[Sequence[str]], Audited]
Script = Callable[[str], list[str]]


def test_a_thread_with_a_small_stack_can_wait(audit: Audit, standins: Standins) -> None:
    assert audit([str(standins.loader), "stack"]).report["exit_status"] == 0


def test_a_forked_child_does_not_wait_for_the_loader(audit: Audit, standins: Standins) -> None:
    done = audit([str(standins.loader), "fork"])
    assert [row["library"] for row in done.report["modules"]] == ["loader"]


def test_a_sandbox_without_process_vm_readv(cli: Cli, standins: Standins) -> None:
    """The image ends with its page, so that a read beyond its end is an error."""
    done = cli("audit", "--json", "--", str(standins.loader), "sandbox")
    if done.code == 77:
        pytest.skip("there is no seccomp")
    (row,) = done.report["modules"]
    assert (done.code, row["kind"], row["bytes"]) == (0, "PTX", 44)


@pytest.mark.parametrize("command", [["audit"], ["run", "--sealed"]])
def test_a_sandbox_that_ends_a_process_which_opens_a_file(
    cli: Cli, standins: Standins, command: list[str]
) -> None:
    """The end of the child is an event, which goes to a file that was opened before."""
    done = cli(*command, "--", str(standins.loader), "nofiles")
    if done.code == 77:
        pytest.skip("there is no seccomp")
    assert done.code == 4


def test_a_search_in_the_libraries_of_the_caller(
    audit: Audit, script: Script, standins: Standins
) -> None:
    """A library that was opened locally finds the libraries that it needs by RTLD_DEFAULT."""
    library = str(standins.libraries / "libuser.so")
    code = f"import ctypes\nassert ctypes.CDLL({library!r}).finds_compiler()"
    assert audit(script(code)).report["exit_status"] == 0


def test_a_driver_that_is_not_loaded_is_not_found(
    audit: Audit, script: Script, standins: Standins
) -> None:
    """The audit library has functions of the same names."""
    library = str(standins.libraries / "libuser.so")
    code = (
        "import ctypes\n"
        "def found():\n"
        f"    user, all_ = ctypes.CDLL({library!r}), ctypes.CDLL(None)\n"
        "    return user.finds_driver(), hasattr(all_, 'cuInit'), hasattr(all_, 'cuModuleLoad')\n"
        "assert found() == (0, False, False), found()\n"
        "ctypes.CDLL('libcuda.so.1', ctypes.RTLD_GLOBAL)\n"
        "assert found() == (1, True, True), found()\n"
    )
    assert audit(script(code)).report["exit_status"] == 0


def test_the_caller_of_execlp_is_the_program(audit: Audit, standins: Standins) -> None:
    (row,) = audit([str(standins.loader), "execlp", "nvcc", "a.cu"]).compilers
    assert (row["argv"], row["library"], row["line"]) == (["nvcc", "a.cu"], "loader", "loader")


def test_a_triton_without_a_compile_function_can_be_imported(cli: Cli, tmp_path: Path) -> None:
    package = tmp_path / "triton" / "compiler"
    package.mkdir(parents=True)
    (tmp_path / "triton" / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "compiler.py").write_text("name = 'a stub'\n")
    (tmp_path / "app.py").write_text("import triton.compiler.compiler as c\nprint(c.name)\n")
    done = cli("audit", "--", sys.executable, "app.py")
    assert (done.code, done.out) == (0, "a stub\n")
    assert "compiles by Triton: AttributeError" in done.err


def test_a_failed_compile_of_triton_is_rejected(cli: Cli, tmp_path: Path) -> None:
    package = tmp_path / "triton" / "compiler"
    package.mkdir(parents=True)
    (tmp_path / "triton" / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "compiler.py").write_text(
        "class ASTSource:\n"
        "    name = 'add'\n"
        "    def make_ir(self): pass\n"
        "def compile(src):\n"
        "    src.make_ir()\n"
        "    raise ValueError\n"
    )
    code = (
        "import triton.compiler.compiler as c\ntry: c.compile(c.ASTSource())\nexcept ValueError: pass"
    )
    (tmp_path / "app.py").write_text(code)
    done = cli("audit", "--json", "--", sys.executable, "app.py")
    (row,) = done.report["compiles"]
    assert (row["compiler"], row["name"], row["rejected"]) == ("Triton", "add", True)


def test_the_line_of_a_deep_stack_is_known(audit: Audit, script: Script, tmp_path: Path) -> None:
    """The frames of libraries take more room than an event has."""
    package = tmp_path / "site-packages" / ("long" * 40)
    package.mkdir(parents=True)
    (package / "deep.py").write_text(
        "import subprocess\n"
        "def call(depth, words):\n"
        "    return call(depth - 1, words) if depth else subprocess.run(words)\n"
    )
    code = f"import sys\nsys.path.insert(0, {str(package)!r})\nimport deep\n"
    done = audit(script(code + "deep.call(80, ['nvcc', *['x' * 30] * 90])\n"))
    (row,) = done.compilers
    assert row["line"] == "app.py:4"


def test_lines_are_known_under_contention(audit: Audit, script: Script) -> None:
    code = (
        "import threading\n"
        "def deep(n):\n"
        f"    return deep(n - 1) if n else [load({PTX!r}) for _ in range(30)]\n"
        "threads = [threading.Thread(target=deep, args=(60,)) for _ in range(24)]\n"
        "[thread.start() for thread in threads]\n"
        "[thread.join() for thread in threads]\n"
    )
    rows = audit(script(LOAD + code)).report["modules"]
    assert len(rows) == 24 * 30
    assert {row["line"] for row in rows} == {"app.py:6"}
