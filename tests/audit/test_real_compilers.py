"""The libraries of the table of hidden compilers themselves: each is skipped where it is not installed.

`make test-audit-libraries` installs some of them.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from preheat.tools.cli.run import NOT_ACCOUNTED
from tests.audit.conftest import Audited, Cli
from tests.processes import SOURCE

PATHS = os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")])

CUTE = """\
import os
os.environ["CUTE_DSL_ARCH"] = "sm_90a"
import cutlass, cutlass.cute as cute

@cute.kernel
def kernel(n: cutlass.Int32):
    if cute.arch.thread_idx()[0] == 0:
        cute.printf("%d", n)

@cute.jit
def host(n: cutlass.Int32):
    kernel(n).launch(grid=[1, 1, 1], block=[32, 1, 1])

cute.compile(host, 3)
"""
MLIR = """\
from cutlass._mlir import execution_engine, ir, passmanager
from cutlass._mlir._mlir_libs._cutlass_ir import _mlirExecutionEngine as below
with ir.Context(), ir.Location.unknown():
    module = ir.Module.parse("llvm.func @f() { llvm.return }")
    made = {call}
"""
MLIR_CALLS = {
    "engine": "execution_engine.ExecutionEngine(module)",
    "engine below": "below.ExecutionEngine(module)",
    "passes": "passmanager.PassManager.parse('builtin.module()').run(module.operation)",
}
WARP = """\
import sys
import warp as wp

@wp.kernel
def saxpy(a: float, x: wp.array(dtype=float), y: wp.array(dtype=float)):
    i = wp.tid()
    y[i] = a * x[i] + y[i]

"""
WARP_CPU = (
    WARP
    + """\
x, y = wp.zeros(8, dtype=float, device="cpu"), wp.ones(8, dtype=float, device="cpu")
wp.launch(saxpy, dim=8, inputs=[2.0, x, y], device="cpu")
"""
)
WARP_AOT = WARP + 'wp.compile_aot_module(sys.modules["__main__"], arch=[90], module_dir="aot")\n'
NUMBA = "import numba\n@numba.njit\ndef double(x): return x * 2\n\nassert double(3) == 6\n"
JAX = "import jax, jax.numpy as jnp\njax.jit(lambda x: jnp.sin(x) * 2)(jnp.arange(4.0))\n"
TAICHI = """\
import taichi as ti
ti.init(arch=ti.cpu, offline_cache=False)
@ti.kernel
def f(n: ti.i32) -> ti.i32:
    return n * 2

assert f(3) == 6
"""
HALIDE = 'import halide as hl\nx, f = hl.Var("x"), hl.Func("f")\nf[x] = x * x\nf.realize([8])\n'
DRJIT = "import drjit as dr\nfrom drjit.llvm import Float\nprint(dr.sin(dr.arange(Float, 4)))\n"
CPPYY = (
    'import cppyy\ncppyy.cppdef("int twice(int x) { return 2 * x; }")\nassert cppyy.gbl.twice(4) == 8\n'
)

Script = Callable[[str], list[str]]


@pytest.fixture(autouse=True)
def caches(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test empty caches, the libraries of this Python, and no stand-in for the driver."""
    del cli  # It sets these variables.
    monkeypatch.delenv("LD_LIBRARY_PATH")
    monkeypatch.setenv("PYTHONPATH", PATHS)
    monkeypatch.setenv("WARP_CACHE_PATH", str(tmp_path / "warp"))
    monkeypatch.setenv("PREHEAT_ADAPTERS", "off")


def require(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


def judged(cli: Cli, words: list[str]) -> tuple[Audited, dict[str, Any]]:
    done = cli("run", "--sealed", "--verdict", "v.json", "--", *words)
    verdict: dict[str, Any] = json.loads(Path("v.json").read_text())
    return done, verdict


SEEN = [
    ("cutlass", "CuTe", CUTE, 14),
    ("warp", "Warp", WARP_CPU, 10),
    ("warp", "Warp", WARP_AOT, 9),
    ("numba", "Numba", NUMBA, 5),
]
NAMES = ["CuTe", "Warp on the CPU", "Warp ahead of time", "Numba"]


@pytest.mark.parametrize(("package", "name", "code", "line"), SEEN, ids=NAMES)
def test_a_compile_is_reported_with_its_line(
    cli: Cli, script: Script, package: str, name: str, code: str, line: int
) -> None:
    require(package)
    done = cli("audit", "--json", "--", *script(code))
    assert done.code == 0, done.err
    report = json.loads(done.out[done.out.index("{\n") :])
    assert {(row["compiler"], row["line"]) for row in report["compiles"]} == {(name, f"app.py:{line}")}
    assert report["unseen"] == []
    if name == "CuTe":  # What the wrapped functions call is wrapped, too, and counts once.
        assert [row["name"] for row in report["compiles"]] == ["GPU code", "host code"]


@pytest.mark.parametrize(("package", "name", "code", "line"), SEEN, ids=NAMES)
def test_a_compile_is_refused(
    cli: Cli, script: Script, package: str, name: str, code: str, line: int
) -> None:
    require(package)
    done, verdict = judged(cli, script(code))
    assert (done.code, verdict["verdict"], verdict["compiled"]) == (1, "not accounted", [])
    assert {(row["name"], row["line"]) for row in verdict["refused"]} == {(name, f"app.py:{line}")}


@pytest.mark.parametrize(
    ("package", "name", "code"),
    [
        ("jax", "XLA", JAX),
        ("taichi", "Taichi", TAICHI),
        ("halide", "Halide", HALIDE),
        ("drjit", "DrJit", DRJIT),
        ("cppyy", "Cling", CPPYY),
    ],
    ids=["JAX", "Taichi", "Halide", "Dr.Jit", "cppyy"],
)
def test_a_compile_that_nobody_sees_is_not_accounted_for(
    cli: Cli, script: Script, package: str, name: str, code: str
) -> None:
    require(package)
    done, verdict = judged(cli, script(code))
    assert done.code == NOT_ACCOUNTED
    assert verdict["verdict"] != "accounted"
    assert {row["name"] for row in verdict["compiler_libraries"] if not row["seen"]} == {name}


@pytest.mark.parametrize("call", MLIR_CALLS)
def test_a_compile_by_the_bindings_of_cute_is_seen(cli: Cli, script: Script, call: str) -> None:
    require("cutlass")
    words = script(MLIR.replace("{call}", MLIR_CALLS[call]))
    report = cli("audit", "--json", "--", *words).report
    (compile,) = report["compiles"]
    assert (compile["compiler"], compile["line"], report["unseen"]) == ("CuTe", "app.py:5", [])
    done, verdict = judged(cli, words)
    assert (done.code, verdict["verdict"]) == (1, "not accounted")
    assert [row["line"] for row in verdict["refused"]] == ["app.py:5"]


@pytest.mark.parametrize("package", ["cutlass", "warp", "numba", "numba.cuda", "triton", "torch"])
def test_a_process_that_compiles_nothing_is_accounted_for(
    cli: Cli, script: Script, package: str
) -> None:
    require(package.partition(".")[0])
    done, verdict = judged(cli, script(f"import {package}\n"))
    assert (done.code, verdict["verdict"]) == (0, "accounted")


def test_what_warp_has_compiled_before_is_accounted_for(cli: Cli, script: Script) -> None:
    require("warp")
    words = script(WARP_CPU)
    assert cli("audit", "--", *words).code == 0
    done, verdict = judged(cli, words)
    assert (done.code, verdict["verdict"]) == (0, "accounted")
