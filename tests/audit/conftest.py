"""Fixtures of the tests of audits: stand-ins for the driver and CUPTI, and audited commands."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from preheat.audit.library import LIBRARY
from tests.command import run_command
from tests.processes import SOURCE

STANDIN = Path(__file__).parent / "standin"
COMPILER = shutil.which("gcc") or shutil.which("cc")
#: Each compiler library, and its result. The functions of all but libNVVM have versions.
COMPILER_LIBRARIES = {
    "libnvrtc.so.12": 12,
    "libnvrtc.so.13": 13,
    "libnvJitLink.so.13": 14,
    "libnvvm.so.4": 15,
}
# A program that compiles and loads one kernel of preheat.
PREHEAT = """\
import preheat
artifact = preheat.compile('extern "C" __global__ void k() {}', "sm_90", label="k.cu")
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
cuda.cuInit(0)
module = ctypes.c_void_p()
cuda.cuModuleLoadData(ctypes.byref(module), artifact.cubin)
"""


@dataclass(frozen=True)
class Standins:
    """Where the stand-ins are: libraries, a program in C, and programs that are called as compilers."""

    libraries: Path
    loader: Path
    programs: Path


@pytest.fixture(scope="session")
def standins(tmp_path_factory: pytest.TempPathFactory) -> Standins:
    if COMPILER is None or not LIBRARY.is_file():
        pytest.skip("the audit library needs a C compiler")
    place = tmp_path_factory.mktemp("standins")
    common = [COMPILER, "-O1", "-fPIC", "-Wall", "-Wextra", "-Werror"]
    driver, cupti, loader = place / "libcuda.so.1", place / "libcupti.so.13", place / "loader"
    needed = {"user.c": ["-Wl,--no-as-needed", str(cupti)]}
    for source, made in (("driver.c", driver), ("cupti.c", cupti), ("user.c", place / "libuser.so")):
        shared = [*common, "-shared", f"-Wl,-soname,{made.name}", "-o", str(made)]
        subprocess.run([*shared, str(STANDIN / source), *needed.get(source, []), "-ldl"], check=True)
    program = ["-o", str(loader), str(STANDIN / "loader.c"), str(driver), "-ldl", "-lpthread"]
    subprocess.run([*common, *program], check=True)
    programs = place / "bin"
    programs.mkdir()
    names = "nvcc ptxas g++-13 x86_64-linux-gnu-gcc ld tool run-as sccache rustc llc"
    for name in names.split():
        (programs / name).symlink_to(shutil.which("true") or "/bin/true")
    return Standins(place, loader, programs)


@dataclass(frozen=True)
class Programs:
    """Stand-ins for compiler libraries, and programs that use them.

    `program` is linked against none of the libraries, and `linked` against the newest. `spawner` starts
    other programs.
    """

    place: Path
    program: str
    linked: str
    spawner: str

    def compiler(self, name: str) -> str:
        return str(self.place / name)


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    if COMPILER is None or not LIBRARY.is_file():
        pytest.skip("the audit library needs a C compiler")
    place = tmp_path_factory.mktemp("linked")

    def build(made: str, source: str, *options: str) -> None:
        words = [str(COMPILER), "-O1", "-fPIC", "-Wall", "-Wextra", "-Werror", *options]
        files = [str(STANDIN / source), "-Wl,--no-as-needed", *links, "-ldl", "-o", str(place / made)]
        subprocess.run([*words, *files], check=True)

    links: list[str] = []
    for name, result in COMPILER_LIBRARIES.items():
        script = place / "versions"
        kind = name.partition(".")[0]
        script.write_text(f"{name if kind != 'libnvvm' else ''} {{ global: *; }};")
        shared = ("-shared", f"-Wl,-soname,{name}", f"-Wl,--version-script={script}")
        found = f"-Wl,-rpath,{place}"
        build(name, "compilers.c", f"-D{kind}", f"-DRESULT={result}", found, *shared)
    build("libnvrtc-builtins.so.13", "compilers.c", "-shared")
    build("program", "linked.c")
    build("spawner", "spawner.c")
    build("counter.so", "counter.c", "-shared")
    newest = ["libnvrtc.so.13", "libnvJitLink.so.13", "libnvvm.so.4"]
    links = [str(place / name) for name in newest]
    build("linked", "linked.c", "-DLINKED", f"-Wl,-rpath,{place}")
    build("newest.so", "linked.c", "-DLINKED", "-DLIBRARY", "-shared", f"-Wl,-rpath,{place}")
    links[0] = str(place / "libnvrtc.so.12")
    build("oldest.so", "linked.c", "-DLINKED", "-DLIBRARY", "-shared", f"-Wl,-rpath,{place}")
    return Programs(place, str(place / "program"), str(place / "linked"), str(place / "spawner"))


@dataclass(frozen=True)
class Audited:
    """What an audit came to. `report` is empty where the command line failed before."""

    code: int
    out: str
    err: str

    @property
    def report(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.out)
        return found

    @property
    def compilers(self) -> list[dict[str, Any]]:
        """The compilers that compile, but for those that other compilers started."""
        rows = self.report["compilers"]
        return [row for row in rows if not row["probe"] and not row["started_by_compiler"]]

    @property
    def probes(self) -> list[dict[str, Any]]:
        return [row for row in self.report["compilers"] if row["probe"]]


Cli = Callable[..., Audited]


@pytest.fixture
def cli(
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    standins: Standins,
) -> Cli:
    """Runs a command of preheat beside the stand-ins, in a directory of its own."""
    monkeypatch.setenv("PREHEAT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PREHEAT_LOCK_DIR", str(tmp_path / "locks"))
    monkeypatch.setenv("PYTHONPATH", str(SOURCE))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(standins.libraries))
    monkeypatch.setenv("PREHEAT_AUDIT_CUPTI", str(standins.libraries / "libcupti.so.13"))
    monkeypatch.delenv("CUDA_INJECTION64_PATH", raising=False)
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    monkeypatch.setenv("PATH", f"{standins.programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)

    return lambda *args: Audited(*run_command(capfd, args))


@pytest.fixture
def audit(cli: Cli) -> Callable[[Sequence[str]], Audited]:
    """Audits a command that succeeds, and returns the report as JSON."""

    def run(words: Sequence[str]) -> Audited:
        done = cli("audit", "--json", "--", *words)
        assert done.code == 0, done.err
        return done

    return run


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], list[str]]:
    """Writes a program in Python, and returns the command that runs it."""

    def write(code: str) -> list[str]:
        path = tmp_path / "app.py"
        path.write_text(code)
        return [sys.executable, str(path)]

    return write


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory for the manifest, the sources and the bundle that the first test makes."""
    return tmp_path_factory.mktemp("baked")


@pytest.fixture
def baked(
    cli: Cli,
    script: Callable[[str], list[str]],
    made_once: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> list[str]:
    """An application with its bundle, `kernels.heat`, and an empty cache. Return its command."""
    words = script(PREHEAT)
    if not (made_once / "kernels.heat").exists():
        monkeypatch.chdir(made_once)
        assert cli("record", "--", *words).code == 0
        assert cli("bake", "kernels.toml").code == 0
        monkeypatch.chdir(tmp_path)
    shutil.copytree(made_once, tmp_path, dirs_exist_ok=True)
    monkeypatch.setenv("PREHEAT_CACHE_DIR", str(tmp_path / "empty"))
    return words
