"""The adapter for CuPy with CuPy's own compiler: found, stored, recorded, baked, and sealed."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("cupy", reason="CuPy is a large package, which `make test-adapters` installs")

from tests.adapters.cupy_world import CupyWorld

SCALE = (
    "SCALE = 'extern \"C\" __global__ void scale(float* x) { x[threadIdx.x] *= 2; }'\ncompile(SCALE)\n"
)
NAMES = (
    "TEMPLATE = 'template <class T, int N> __global__ void tk(T* x) { x[0] = N; }'\n"
    "made = compile(TEMPLATE, name_expressions=('tk<float, 3>', 'tk<int,4>'))\n"
    "print(sorted(made.mapping.items()))\n"
)
BOTH = SCALE + NAMES


@pytest.fixture
def world(tmp_path: Path) -> CupyWorld:
    return CupyWorld(tmp_path / "world")


def test_code_is_stored_and_found_by_the_next_process(world: CupyWorld) -> None:
    first, second = world.run(BOTH), world.run(BOTH)
    assert (first.compiles, second.compiles) == (2, 0)
    assert second.report["stats"]["hits.disk"] == 2
    # CuPy loads what it compiles before it is stored, and the process loads what is stored.
    assert first.report["loaded"][::2] == first.report["loaded"][1::2] == second.report["loaded"]
    assert all(magic == "7f454c46" for _, _, magic in second.report["loaded"])  # ELF
    mangled = "[('tk<float, 3>', '_Z2tkIfLi3EEvPT_'), ('tk<int,4>', '_Z2tkIiLi4EEvPT_')]"
    assert first.out.splitlines()[0] == second.out.splitlines()[0] == mangled
    assert not (world.root / "cupy-cache").exists() or not any((world.root / "cupy-cache").iterdir())


@pytest.mark.parametrize(
    "other",
    [
        *("compile(SCALE, '-DX=1')", "compile(SCALE + ' ')", "compile(SCALE, arch='80')"),
        "compile(SCALE, name_expressions=('scale',))",
    ],
)
def test_another_request_is_another_entry(world: CupyWorld, other: str) -> None:
    assert world.run(f"{SCALE}{other}\n").compiles == 2


def test_the_order_of_compiles_does_not_matter(world: CupyWorld) -> None:
    """CuPy's own key holds the texts of headers that earlier compiles of the process asked for."""
    complex_first = "compile('#include <cuComplex.h>\\n', translate_cucomplex=True)\n"
    world.run(SCALE)
    assert world.run(complex_first + SCALE).compiles == 1


def test_code_that_is_linked_later_is_bytes(world: CupyWorld) -> None:
    code = (
        "options = core.assemble_cupy_compiler_options(())\n"
        "made = compiler._compile_module_with_cache('__device__ int f() { return 1; }', options,"
        " to_ltoir=True)\nprint(type(made).__name__, len(made) > 100)\n"
    )
    for compiles in (1, 0):
        ran = world.run(code)
        assert (ran.out.splitlines()[0], ran.compiles) == ("bytes True", compiles)


def test_cupys_cache_in_memory_is_on_the_store_as_well(world: CupyWorld) -> None:
    assert world.run(SCALE).compiles == 1
    assert world.run(SCALE, CUPY_CACHE_IN_MEMORY="1").compiles == 0


def test_messages_of_the_compiler_are_written_when_it_runs(world: CupyWorld) -> None:
    code = (
        "import io\nlog = io.StringIO()\n"
        "compile('extern \"C\" __global__ void k() { int unused; }', log_stream=log)\n"
        "print('never referenced' in log.getvalue())\n"
    )
    assert [world.run(code).out.splitlines()[0] for _ in range(2)] == ["True", "False"]


def test_a_program_that_does_not_compile_raises_what_cupy_raises(world: CupyWorld) -> None:
    code = (
        "try:\n    compile('broken')\n"
        "except compiler.CompileException as error:\n    print('error: ' in str(error))\n"
    )
    assert world.run(code).out.splitlines()[0] == "True"
    assert world.run(SCALE).compiles == 1  # Nothing is left behind.


def test_eight_cold_processes_compile_once(world: CupyWorld) -> None:
    file = world.program(BOTH)
    started = [world.start(str(file)) for _ in range(8)]
    ran = [world.ended(process).ok() for process in started]
    assert sum(each.compiles for each in ran) == 2
    assert len({each.report["loaded"][-1][0] for each in ran}) == 1


def test_damage_is_a_miss(world: CupyWorld) -> None:
    world.run(SCALE)
    entries = [path for path in world.cache.rglob("*") if path.is_file() and path.stat().st_size > 2000]
    for path in entries:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    assert entries
    assert world.run(SCALE).compiles == 1
    assert world.run(SCALE).compiles == 0


# Sealed


def test_a_sealed_process_needs_no_compiler(world: CupyWorld) -> None:
    world.run(BOTH)
    sealed = world.run(BOTH, PREHEAT_SEALED="1")
    assert sealed.compiles == 0
    assert len(sealed.report["loaded"]) == 2
    assert sealed.report["nvrtc"] is False


def test_a_missing_kernel_is_named_with_the_line_of_the_program(world: CupyWorld) -> None:
    code = "source = 'extern \"C\" __global__ void scale() {}'\n\ncore.compile_with_cache(source)\n"
    ran = world.attempt(code, PREHEAT_SEALED="1")
    assert ran.code == 1
    assert (
        "SealedError: program.py:7: cupy scale (sm_90) cannot be compiled in this sealed "
        "process: it is in no bundle and in no cache" in ran.err
    )


def test_a_process_that_is_sealed_with_a_warning_compiles(world: CupyWorld) -> None:
    ran = world.run(SCALE, PREHEAT_SEALED="warn")
    assert (ran.compiles, ran.report["stats"]["sealed"]) == (1, 1)
    assert "cupy scale for sm_90 is compiled although this process is sealed" in ran.err


# Record, bake, check


@pytest.fixture(scope="module")
def baked(tmp_path_factory: pytest.TempPathFactory) -> CupyWorld:
    """Return an application that was recorded as sm_90, and baked for sm_90 and sm_100."""
    world = CupyWorld(tmp_path_factory.mktemp("baked") / "world")
    file = world.program(BOTH, adapter=False)
    world.preheat("record", "-o", "kernels.toml", "--", sys.executable, str(file)).ok()
    shutil.rmtree(world.cache)
    world.preheat("bake", "kernels.toml", "--arch", "sm_90", "--arch", "sm_100").ok()
    shutil.rmtree(world.cache)
    return world


def test_a_manifest_says_what_was_asked(baked: CupyWorld) -> None:
    rows = tomllib.loads((baked.root / "kernels.toml").read_text())["foreign"]
    assert [row["kind"] for row in rows] == ["cupy", "cupy"]
    assert {row["name"] for row in rows} == {"scale", "tk<float, 3>, tk<int,4>"}
    text = (baked.root / "kernels.toml").read_text()
    assert "-I{cupy}" in text
    assert "-I{cuda}" in text
    assert "_core/include" not in text  # no directory of this machine


@pytest.mark.parametrize("capability", ["90", "100"])
def test_a_baked_program_runs_sealed_from_the_bundle_alone(baked: CupyWorld, capability: str) -> None:
    file = baked.program(BOTH, adapter=False)
    command = ("run", "--bundle", "kernels.heat", "--sealed", "--", sys.executable, str(file))
    ran = baked.preheat(*command, STANDIN_CC=capability).ok()
    assert (ran.compiles, ran.report["nvrtc"]) == (0, False)
    assert len(ran.report["loaded"]) == 2
    assert ran.report["stats"]["hits.bundle"] == 4  # each with the entry that names its compiler


def test_a_check_finds_what_is_there_and_what_is_not(baked: CupyWorld) -> None:
    check = ("check", "kernels.toml", "--bundle", "kernels.heat", "--arch")
    assert baked.preheat(*check, "sm_100").code == 0
    missing = baked.preheat(*check, "sm_80")
    assert missing.code == 1
    assert "not baked for this architecture" in missing.out + missing.err


def test_a_bundle_serves_a_cupy_in_another_directory(baked: CupyWorld, tmp_path: Path) -> None:
    """CuPy's own key holds the directories of its headers."""
    found = importlib.util.find_spec("cupy")
    assert found is not None
    assert found.origin is not None
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for path in Path(found.origin).parents[1].glob("cupy*"):
        (elsewhere / path.name).symlink_to(path)
    file = baked.program(BOTH)
    env = baked.environment({"PREHEAT_SEALED": "1", "PREHEAT_BUNDLE": "kernels.heat"})
    env["PYTHONPATH"] = f"{elsewhere}{os.pathsep}{env['PYTHONPATH']}"
    ran = baked.python(str(file), **env).ok()
    assert (ran.compiles, len(ran.report["loaded"])) == (0, 2)


LINKED = """
class LinkState:
    def add_ptr_data(self, data, name): self.data = data
    def add_ptr_file(self, path): pass
    def complete(self): return self.data

Functions.LinkState = LinkState
compiler._get_cudadevrt_path = lambda: "libcudadevrt.a"
compile('extern "C" __global__ void parent(float* x) { *x = 1; }', "-dc")
"""


def test_code_that_the_driver_links_is_kept_as_it_was_compiled(world: CupyWorld) -> None:
    file = world.program(LINKED, adapter=False)
    command = ("--", sys.executable, str(file))
    world.preheat("record", "-o", "kernels.toml", *command).ok()
    baked = world.preheat("bake", "kernels.toml", "--arch", "sm_90", "-o", "kernels.heat").ok()
    assert "it cannot be compiled again; the recorded entry was copied" in baked.err
    other = world.preheat("bake", "kernels.toml", "--arch", "sm_100", "-o", "other.heat")
    assert other.code != 0
    assert "record on a GPU of sm_100, and add that recording" in other.err
    shutil.rmtree(world.cache)
    ran = world.preheat("run", "--bundle", "kernels.heat", "--sealed", *command).ok()
    assert (ran.compiles, len(ran.report["loaded"])) == (0, 1)


# Versions


@pytest.mark.parametrize("version", ["13.6.0", "14.0.1", "14.3.0", "15.0.0a1"])
def test_an_unknown_version_is_left_alone_with_one_warning(world: CupyWorld, version: str) -> None:
    code = (
        f"import cupy\ncupy.__version__ = {version!r}\n"
        "import preheat.adapters\nfrom preheat.adapters import imports\n"
        "imports.activate('cupy')\nfrom standin import *\n"
        "compile('extern \"C\" __global__ void k() {}')\nprint(preheat.adapters.installed())\n"
    )
    file = world.root / "program.py"
    file.write_text(code)
    ran = world.python(str(file)).ok()
    assert ran.out.splitlines()[0] == "()"
    assert ran.err.count(f"CuPy {version} is not known: the adapter accepts 14.1 to 14.2") == 1
    assert ran.compiles == 0
    assert len([*(world.root / "cupy-cache").iterdir()]) == 1  # It uses its own cache.
    sealed = world.python(str(file), PREHEAT_SEALED="1")
    assert sealed.code == 1
    assert f"AdapterError: CuPy {version} is not known" in sealed.err
