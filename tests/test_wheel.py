"""Wheels contain the whole package, and the native libraries where there is a compiler."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

from preheat.native.build import is_stale

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "preheat"
EXTENSION = f"_core{sysconfig.get_config_var('EXT_SUFFIX')}"
AUDIT_LIBRARY = "libpreheat_audit.so"
DRIVER_LIBRARY = "libcuda.so.1"
BUILT_FROM = ("native/core.c", "native/build.py", "native/mark.c")
COMPILER = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
HAS_COMPILER = shutil.which(shlex.split(COMPILER)[0]) is not None

BUILD = """
import os, sys
os.chdir(sys.argv[1])
from hatchling import build
getattr(build, sys.argv[3])(sys.argv[2])
"""

IMPORT = """
import importlib, os, sys
for name in sys.argv[2:]:
    module = importlib.import_module(name)
    assert module.__file__.startswith(sys.argv[1] + os.sep), module.__file__
"""

LAUNCH = """
import sys
import preheat
from preheat import native
assert preheat.__file__.startswith(sys.argv[1]), preheat.__file__
assert native.core is None or native.core.__file__.startswith(sys.argv[1]), native.core
source = 'extern "C" __global__ void k(int* x, int n) { if (threadIdx.x < n) x[threadIdx.x] += n; }'
gpu = preheat.device("emulator")
kernel = gpu.kernel(source, "k")
x = gpu.zeros(4, "int32")
for _ in range(5):
    kernel[1, 32](x, 3)
with gpu.capture() as graph:
    kernel[1, 32](x, 4)
for _ in range(5):
    graph.replay()
try:
    kernel[1, 32](x, 1 << 40)
except preheat.LaunchError as error:
    print(error)
print(x.numpy().tolist(), native.core is not None)
"""


class Wheel(NamedTuple):
    """A wheel, its content in a folder, and what the build wrote to stderr."""

    name: str
    content: Path
    messages: str


def build(home: Path, what: str = "build_wheel", **env: str) -> str:
    """Build with the backend of the project, without a network. Return what it wrote to stderr."""
    pytest.importorskip("hatchling", reason="the build backend is not installed")
    command = [sys.executable, "-c", BUILD, str(ROOT), str(home), what]
    done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stderr


def build_wheel(home: Path, **env: str) -> Wheel:
    """Build a wheel and unpack it."""
    messages = build(home, **env)
    (wheel,) = home.iterdir()  # The build leaves nothing else there.
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(home / "site")
    return Wheel(wheel.name, home / "site", messages)


@pytest.fixture(scope="module")
def native_wheel(tmp_path_factory: pytest.TempPathFactory) -> Wheel:
    if not HAS_COMPILER:
        pytest.skip("there is no C compiler")
    return build_wheel(tmp_path_factory.mktemp("native"))


@pytest.fixture(scope="module")
def pure_wheel(tmp_path_factory: pytest.TempPathFactory) -> Wheel:
    return build_wheel(tmp_path_factory.mktemp("pure"), CC="false")


@pytest.fixture(params=["native", "pure"])
def wheel(request: pytest.FixtureRequest) -> Wheel:
    """Return each kind of wheel."""
    made: Wheel = request.getfixturevalue(f"{request.param}_wheel")
    return made


#: Modules of adapters that import their library. The modules that `preheat.adapters` lists do not.
NEEDS_LIBRARY = {
    *("triton.manager", "cuda_core.program_cache"),
    *("cupy.compile", "cupy.connection"),
}


def modules() -> list[str]:
    """Return the names of all modules in the source tree that need no other library."""
    files = (file.relative_to(SOURCE.parent).with_suffix("") for file in SOURCE.rglob("*.py"))
    names = (".".join(file.parts).removesuffix(".__init__") for file in files)
    return sorted(name for name in names if not name.endswith("__main__") and not needs_library(name))


def needs_library(name: str) -> bool:
    """Return whether a module imports the library of its adapter, which imports it when it is used."""
    _, _, path = name.partition("preheat.adapters.")
    return path in NEEDS_LIBRARY or (path.startswith("numba.") and path != "numba.adapter")


def run_from(content: Path, home: Path, code: str, *args: str) -> str:
    """Run a program that imports preheat from the content of a wheel, and return its output."""
    env = {"PATH": os.environ["PATH"], "HOME": str(home), "PYTHONPATH": str(content)}
    ran = subprocess.run(
        [sys.executable, "-c", code, content, *args],
        cwd=home,
        env=env,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_every_module_is_imported_from_the_wheel(pure_wheel: Wheel, tmp_path: Path) -> None:
    run_from(pure_wheel.content, tmp_path, IMPORT, *modules())


def test_the_wheel_has_every_file_of_the_package(wheel: Wheel) -> None:
    """Also those that are not Python, such as the source of the shipped kernels.

    The source of the native core is not among them, so that a start need not read it.
    """

    def files(package: Path) -> set[str]:
        found = (file for file in package.rglob("*") if file.is_file())
        return {
            str(file.relative_to(package)) for file in found if file.suffix not in (".pyc", ".so", ".1")
        }

    assert files(wheel.content / "preheat") == files(SOURCE) - {"native/core.c", "native/mark.c"}


def test_a_wheel_with_the_native_core_is_for_one_python_and_platform(native_wheel: Wheel) -> None:
    python = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    assert native_wheel.name.split("-", 2)[2].startswith(f"{python}-{python}-linux_")
    assert {each.name for each in native_wheel.content.rglob("*.so")} == {EXTENSION, AUDIT_LIBRARY}
    assert (native_wheel.content / "preheat" / "native" / EXTENSION).is_file()
    assert (native_wheel.content / "preheat" / "audit" / AUDIT_LIBRARY).is_file()
    assert (native_wheel.content / "preheat" / "driver" / DRIVER_LIBRARY).is_file()
    for place, library in (("audit", AUDIT_LIBRARY), ("driver", DRIVER_LIBRARY)):
        folder = native_wheel.content / "preheat" / place
        assert not is_stale(folder / library, folder / "native")
    (described,) = native_wheel.content.glob("*.dist-info/WHEEL")
    assert "Root-Is-Purelib: false" in described.read_text()
    assert "preheat is used without" not in native_wheel.messages


def test_a_wheel_without_a_compiler_is_for_every_platform(pure_wheel: Wheel) -> None:
    """An extension in the source tree is not included, either."""
    assert pure_wheel.name.endswith("-py3-none-any.whl")
    assert not list(pure_wheel.content.rglob("*.so*"))
    for what in ("its native core", "the audit library", "the CPU driver"):
        expected = f"preheat is used without {what}: the compiler exited with 1\n"
        assert expected in pure_wheel.messages


def test_a_program_runs_from_every_wheel(wheel: Wheel, tmp_path: Path) -> None:
    shown = run_from(wheel.content, tmp_path, LAUNCH).splitlines()
    assert shown == [
        "k, argument 1: int cannot hold 1099511627776",
        f"[35, 35, 35, 20] {not wheel.name.endswith('-none-any.whl')}",
    ]


def test_the_launch_tests_pass_from_every_wheel(wheel: Wheel, tmp_path: Path) -> None:
    # `tests` and `tests.*` are found from the root, and preheat in the wheel.
    code = (
        "import sys, pytest, preheat; assert preheat.__file__.startswith(sys.argv[1]); "
        "sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', *sys.argv[2:]]))"
    )
    named = ("arguments_may_change", "geometry_may", "many_is_right", "without_parameters")
    chosen = " or ".join(named)
    shown = run_from(
        wheel.content, tmp_path, code, f"{ROOT}/tests/devices/test_launch.py", f"--rootdir={ROOT}",
        "-c", f"{ROOT}/pyproject.toml", "-k", f"({chosen}) and not cuda",
    )  # fmt: skip
    assert " passed" in shown


def test_a_source_distribution_has_what_a_wheel_is_built_from(tmp_path: Path) -> None:
    build(tmp_path / "dist", "build_sdist")
    (archive,) = (tmp_path / "dist").iterdir()
    with tarfile.open(archive) as content:
        names = {name.partition("/")[2] for name in content.getnames()}
    assert names >= {
        "hatch_build.py",
        "pyproject.toml",
        *(f"src/preheat/{name}" for name in BUILT_FROM),
    }
    assert {f"src/preheat/audit/native/{name}" for name in ("audit.h", "loads.c")} <= names
    assert {f"src/preheat/driver/native/{name}" for name in ("stubs.c", "errors.def")} <= names
    assert not [name for name in names if name.endswith((".so", DRIVER_LIBRARY))]


# The builder of the extension


def load_builder(root: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("hatch_build", root / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def copy_sources(root: Path) -> Path:
    """Copy what the builder needs, and return the directory of the package."""
    package = root / "src" / "preheat"
    (package / "native").mkdir(parents=True)
    for name in ("hatch_build.py", *(f"src/preheat/{name}" for name in BUILT_FROM)):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    for sources in ("audit/native", "driver/native"):
        shutil.copytree(SOURCE / sources, package / sources)
    return package


@pytest.fixture
def hatch_build(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.delenv("CFLAGS", raising=False)
    return load_builder(ROOT)


@pytest.mark.parametrize("compiler", [COMPILER, "false"])
def test_an_editable_installation_builds_into_the_source_tree(
    compiler: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("hatchling", reason="the build backend is not installed")
    if not HAS_COMPILER:
        pytest.skip("there is no C compiler")
    monkeypatch.setenv("CC", compiler)
    package = copy_sources(tmp_path)
    hook = load_builder(tmp_path).NativeBuildHook(str(tmp_path), {}, None, None, "", "wheel")
    build_data = {"force_include": {}, "pure_python": True}
    hook.initialize("editable", build_data)
    assert build_data == {"force_include": {}, "pure_python": True}
    assert (package / "native" / EXTENSION).is_file() == (compiler != "false")
    assert (package / "audit" / AUDIT_LIBRARY).is_file() == (compiler != "false")
    assert (package / "driver" / DRIVER_LIBRARY).is_file() == (compiler != "false")


@pytest.mark.parametrize(
    ("compiler", "why"),
    [
        ("false", "the compiler exited with 1"),
        ("true", "No such file or directory"),  # It makes no file.
        ("sh -c 'kill -SEGV $$'", "the compiler exited with -11"),
        ("sh -c 'printf \\\\377 >&2; exit 3'", "the compiler exited with 3\n\N{REPLACEMENT CHARACTER}"),
        ("no-such-compiler", "No such file or directory: 'no-such-compiler'"),
        ("cc '", "No closing quotation"),
        ("sh -c 'exec sleep 1000'", "timed out after 0.5 seconds"),
        ("/", "Permission denied"),
    ],
)
def test_a_compiler_that_fails_is_a_message(
    hatch_build: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    compiler: str,
    why: str,
) -> None:
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setattr(hatch_build, "SECONDS", 0.5)
    (tmp_path / EXTENSION).write_bytes(b"of an older source")
    assert hatch_build.build_native(tmp_path) is None
    assert list(tmp_path.glob("_core*")) == []
    message = capsys.readouterr().err
    assert message.startswith("preheat is used without its native core: ")
    assert why in message


def test_a_missing_header_is_a_message(
    hatch_build: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    if not HAS_COMPILER:
        pytest.skip("there is no C compiler")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    assert hatch_build.build_native(tmp_path) is None
    assert "Python.h" in capsys.readouterr().err


def test_a_directory_that_cannot_be_written_is_a_message(
    hatch_build: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The tests may run as root, who can write to every directory but those of the kernel."""
    (tmp_path / "file").touch()
    for directory in (tmp_path / "file" / "below", Path("/proc/self")):
        assert hatch_build.build_native(directory) is None
        assert "without its native core" in capsys.readouterr().err


def test_the_builder_needs_no_build_backend(tmp_path: Path) -> None:
    """`python hatch_build.py` builds into the source tree, with any Python."""
    if not HAS_COMPILER:
        pytest.skip("there is no C compiler")
    package = copy_sources(tmp_path)
    command = [sys.executable, "-I", "-S", str(tmp_path / "hatch_build.py")]  # without site-packages
    assert subprocess.run(command, env={**os.environ, "CFLAGS": "-Werror"}).returncode == 0
    assert (package / "native" / EXTENSION).is_file()
    assert (package / "audit" / AUDIT_LIBRARY).is_file()
    failed = subprocess.run(command, env={**os.environ, "CC": "false"}, stderr=subprocess.DEVNULL)
    assert failed.returncode == 1
    assert not (package / "native" / EXTENSION).exists()
    assert not (package / "audit" / AUDIT_LIBRARY).exists()
