"""Compilers in the process that a program is linked against, or finds in whatever way."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from preheat.audit.library import LIBRARY
from tests.audit.conftest import COMPILER_LIBRARIES, Cli, Programs

FUNCTIONS = {
    "nvrtcCompileProgram": ("libnvrtc.so.13", "NVRTC", 6),
    "nvJitLinkComplete": ("libnvJitLink.so.13", "nvJitLink", 6),
    "__nvJitLinkComplete_13_2": ("libnvJitLink.so.13", "nvJitLink", 6),
    "nvvmCompileProgram": ("libnvvm.so.4", "libNVVM", 9),
}
EXPORTED = re.compile(r"libnv(rtc|JitLink|vm)")


def compiles(cli: Cli, *words: str) -> tuple[str, list[str], Any]:
    """Audit a command. Return its output, the compilers of the report, and who called them."""
    done = cli("audit", "--report", "report.json", "--", *words)
    rows = json.loads(Path("report.json").read_text())["compiles"]
    return done.out.strip(), [row["compiler"] for row in rows], [row["library"] for row in rows]


def refused(cli: Cli, *words: str) -> tuple[str, list[str]]:
    """Run a command sealed. Return its output, and what was refused."""
    done = cli("run", "--sealed", "--verdict", "verdict.json", "--", *words)
    verdict = json.loads(Path("verdict.json").read_text())
    assert verdict["accounted"] is False
    return done.out.strip(), [row["name"] for row in verdict["refused"]]


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("by", ["program", "library"])
def test_a_call_of_a_linked_compiler_is_seen_and_refused(
    cli: Cli, programs: Programs, function: str, by: str
) -> None:
    """A library that was loaded locally, as torch loads its own, calls what it was linked against."""
    library, compiler, error = FUNCTIONS[function]
    words = [programs.linked, "call", function]
    if by == "library":
        words = [programs.program, "library", programs.compiler("newest.so"), "compile_with", function]
    result = str(COMPILER_LIBRARIES[library])
    name = "linked" if by == "program" else "newest.so"
    assert compiles(cli, *words) == (result, [compiler], [name])
    assert refused(cli, *words) == (str(error), [compiler])


def test_each_caller_gets_its_own_version(cli: Cli, programs: Programs) -> None:
    """The program is linked against one version of NVRTC, and its library against another one."""
    library = programs.compiler("oldest.so")
    words = [programs.linked, "library", library, "compile_with", "nvrtcCompileProgram"]
    assert compiles(cli, *words)[:2] == ("12", ["NVRTC"])
    assert compiles(cli, programs.linked, "call", "nvrtcCompileProgram")[:2] == ("13", ["NVRTC"])


@pytest.mark.parametrize("function", ["nvrtcCompileProgram", "nvvmCompileProgram"])
def test_a_library_may_pass_the_address_on(cli: Cli, programs: Programs, function: str) -> None:
    library, compiler, error = FUNCTIONS[function]
    words = [programs.program, "pointer", programs.compiler("newest.so"), function]
    assert compiles(cli, *words)[:2] == (str(COMPILER_LIBRARIES[library]), [compiler])
    assert refused(cli, *words) == (str(error), [compiler])


@pytest.mark.parametrize(
    "how", ["dlsym", "dlvsym", "dlmopen", "default", "dlvsym-default", "next", "program"]
)
def test_a_lookup_of_any_kind_finds_the_wrapped_function(
    cli: Cli, programs: Programs, how: str
) -> None:
    words = [programs.program, how, programs.compiler("libnvrtc.so.13")]
    assert compiles(cli, *words)[:2] == ("13", ["NVRTC"])
    assert refused(cli, *words) == ("6", ["NVRTC"])


@pytest.mark.parametrize("function", ["compile_default", "compile_next"])
def test_a_lookup_in_the_libraries_of_a_local_caller(
    cli: Cli, programs: Programs, function: str
) -> None:
    words = [programs.program, "library", programs.compiler("newest.so"), function, ""]
    assert compiles(cli, *words)[:2] == ("13", ["NVRTC"])
    assert refused(cli, *words) == ("6", ["NVRTC"])


@pytest.mark.parametrize("how", ["default", "dlvsym-default", "next", "program"])
def test_a_program_that_has_not_loaded_a_compiler_finds_none(
    cli: Cli, programs: Programs, how: str
) -> None:
    assert compiles(cli, programs.program, how, "none")[:2] == ("99", [])


COUNT = """\
import ctypes
counter, program = ctypes.CDLL({counter!r}), ctypes.CDLL(None)
counter.count_lookups()
def lookups(name):
    before = counter.count_lookups()
    hasattr(program, name)
    return counter.count_lookups() - before
print(lookups("qsort"), lookups("no_such_function"), lookups("nvrtcVersion"))
"""


def test_a_lookup_of_any_other_function_is_one_lookup(
    cli: Cli, programs: Programs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The library that counts finds the C library as others do that wrap `dlsym`: by `dlvsym`."""
    counter = programs.compiler("counter.so")
    (tmp_path / "app.py").write_text(COUNT.format(counter=counter))
    monkeypatch.setenv("LD_PRELOAD", counter)
    assert cli("audit", "--", sys.executable, "app.py").out.split() == ["1", "1", "1"]


def test_a_weak_reference_is_null_without_the_library(cli: Cli, programs: Programs) -> None:
    assert compiles(cli, programs.program, "weak", "none")[0] == "not there"
    assert compiles(cli, programs.linked, "weak", "none")[0] == "there"


def installed() -> Iterator[Path]:
    found = importlib.util.find_spec("nvidia")
    for package in (found.submodule_search_locations if found else None) or ():
        yield from (path for path in Path(package).glob("**/lib*.so.*") if EXPORTED.match(path.name))


@pytest.mark.parametrize("path", list(installed()) or [None], ids=lambda path: path and path.name)
def test_each_function_of_the_installed_libraries_is_exported(path: Path | None) -> None:
    """A program that is linked against a newer library would not reach the audit library."""
    if path is None:
        pytest.skip("the libraries of CUDA are not installed")
    own = ctypes.CDLL(str(LIBRARY))
    find = ctypes.CDLL(None).dlvsym
    find.restype, find.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p]
    names = {
        name
        for name in re.findall(
            rb"\0(__nvJitLinkComplete_\d+_\d+|nv[A-Za-z]+Comp\w+)(?=\0)", path.read_bytes()
        )
        if re.fullmatch(rb".*Complete.*|nvrtcCompileProgram|nvvmCompileProgram", name)
    }
    defined = {name for name in names if hasattr(ctypes.CDLL(str(path)), name.decode())}
    version = b"PREHEAT" if path.name.startswith("libnvvm") else path.name.encode()
    for name in defined:
        assert find(own._handle, name, version), name
    assert defined or "builtins" in path.name
