"""An application of Numba is recorded, baked without a driver, checked, and run sealed."""

from __future__ import annotations

import json
import re
import shutil
import sys

import pytest

pytest.importorskip("numba_cuda", reason="Numba-CUDA is installed by `make test-adapters`")

from numba.cuda.codegen import CUDACodeLibrary

from preheat.adapters.numba import target
from preheat.ahead.manifest import Manifest
from preheat.errors import AdapterError
from preheat.model.arch import Arch
from tests.adapters.numba.world import PRELUDE, World

BOTH = ("--arch", "sm_90", "--arch", "sm_100")


def test_a_recording_lists_what_was_asked_for(baked: World) -> None:
    manifest = Manifest.read(baked.root / "kernels.toml")
    assert manifest.unrecorded == ()
    rows = {(item.name, item.row["signature"]): item for item in manifest.foreign}
    arrays = "float32[::1], float32[::1]"
    assert sorted(rows) == [
        ("kernels:add", f"({arrays}, float64)"),
        ("kernels:add", f"({arrays}, int32)"),
        ("kernels:add", f"({arrays}, int64)"),
        ("kernels:halve", "(float32[::1])"),
        ("more:eager", "(float32[::1])"),
    ]
    item = rows["kernels:add", f"({arrays}, int64)"]
    assert (item.kind, item.archs, item.coverage) == ("numba", (Arch(9, 0),), "recorded")
    assert item.root == str(baked.app)
    assert [by.partition(":")[0] for by in item.callers] == ["app/app.py"]
    assert item.row["recorded"]["parts"]["SCALE of helper"] == "3.0"


@pytest.mark.parametrize("cc", [90, 100])
def test_a_sealed_run_compiles_nothing(baked: World, cc: int) -> None:
    code = (baked.app / "app.py").read_text().replace('if __name__ == "__main__":', "if True:")
    ran = baked.sibling(f"sealed-{cc}").run(code, cc=cc, sealed=baked.root / "kernels.heat")
    assert (ran.compiles, ran.told["nvvm"]) == (0, 0)
    assert ran.stats["hits.bundle"] >= 5
    assert not any(name.startswith("misses") for name in ran.stats)
    assert ran.launches == 5


def test_an_application_that_does_not_know_preheat_runs_sealed(baked: World) -> None:
    sealed = baked.sibling("unknowing")
    command = ["--bundle", str(baked.root / "kernels.heat"), "--sealed", "--", sys.executable]
    ran = sealed.preheat("run", *command, str(baked.app / "app.py"), cc=90).ok()
    assert ran.launches == 5


def test_a_bundle_is_checked(baked: World) -> None:
    manifest, bundle = str(baked.root / "kernels.toml"), str(baked.root / "kernels.heat")
    other = baked.sibling("check")
    other.preheat("check", manifest, *BOTH, "--bundle", bundle).ok()
    ran = other.preheat("check", manifest, "--arch", "sm_80", "--bundle", bundle)
    assert ran.code == 1
    assert "numba kernels:add sm_80: not baked for this architecture" in ran.out


def test_a_check_reports_what_has_changed(baked: World, world: World) -> None:
    shutil.copy(baked.root / "kernels.toml", world.root)
    world.edit("SCALE = 3.0", "SCALE = 4.0")
    world.edit("fastmath=True", "fastmath=False")
    ran = world.preheat(
        "check", "kernels.toml", "--arch", "sm_90", "--bundle", str(baked.root / "kernels.heat")
    )
    assert ran.code == 1
    assert "numba kernels:add sm_90: SCALE of helper was 3.0, and is 4.0" in ran.out
    assert re.search(
        "numba kernels:halve sm_90: options of halve was fastmath=True, .*, and is lto=", ran.out
    )
    assert "more:eager" not in ran.out


def test_a_check_reports_a_variable_that_changes_code(baked: World) -> None:
    ran = baked.sibling("variable").preheat(
        "check", str(baked.root / "kernels.toml"), "--arch", "sm_90",
        "--bundle", str(baked.root / "kernels.heat"), NUMBA_OPT="0",
    )  # fmt: skip
    assert ran.code == 1
    assert "NUMBA_OPT was not set, and is 0" in ran.out


def test_a_missing_kernel_names_function_signature_line_and_the_nearest_one(baked: World) -> None:
    code = "k.add[1, 32](x, cuda.to_device(np.ones(32)), 32)\n"
    ran = baked.sibling("missing").attempt(code, sealed=baked.root / "kernels.heat")
    assert ran.code == 1
    line = PRELUDE.count("\n") + 1
    assert re.search(
        rf"SealedError: program_\d+\.py:{line}: numba kernels:add \(sm_90\) cannot be compiled in this "
        r"sealed process: it is in no bundle and in no cache\n"
        r"  searched \.\./kernels\.heat, which has numba kernels:add for sm_90 and sm_100\n"
        r"  most similar: \(float32\[::1\], float32\[::1\], int64\) for sm_90; the request differs in\n"
        r"    signature: \(float32\[::1\], float32\[::1\], int64\) became "
        r"\(float32\[::1\], float64\[::1\], int64\)\n",
        ran.err,
    )
    assert not ran.launches


def test_a_process_that_is_sealed_with_a_warning_compiles(world: World) -> None:
    ran = world.run("k.add[1, 32](x, x, 32)\n", PREHEAT_SEALED="warn")
    assert (ran.compiles, ran.launches) == (1, 1)
    assert "kernels:add" in ran.err


LOCAL = """
import warnings; warnings.simplefilter("ignore")
import kernels as k, more as m, numpy as np
from numba import cuda

def main():
    x = cuda.to_device(np.ones(32, np.float32))
    m.made(2)[1, 32](x)
    cuda.jit(k.add.py_func, fastmath=True)[1, 32](x, x, 32)

if __name__ == "__main__":
    main()
"""


def test_what_cannot_be_imported_is_kept_for_its_architecture(world: World) -> None:
    """A function inside another one is kept as it is. One with other options is made again."""
    script = world.app / "local.py"
    script.write_text(LOCAL)
    manifest = str(world.record(str(script)))
    ran = world.preheat("bake", manifest, "-o", "kept.heat", "--arch", "sm_90").ok()
    assert "more:made.<locals>.scaled" in ran.err
    assert "the recorded entry was copied" in ran.err
    command = ["--bundle", "kept.heat", "--sealed", "--", sys.executable, str(script)]
    sealed = world.sibling("sealed")
    shutil.copy(world.root / "kept.heat", sealed.root)
    assert sealed.preheat("run", *command, cc=90).ok().launches == 2

    other = world.preheat("bake", manifest, "-o", "other.heat", "--arch", "sm_100")
    assert other.code == 1
    assert "it was recorded for sm_90, and only a run on a GPU makes it for another" in other.err


def test_a_script_that_only_defines_functions_is_imported(world: World) -> None:
    script = world.root / "script.py"
    script.write_text(
        "import warnings\n"
        "import numpy as np\n"
        "from numba import cuda\n\n"
        "@cuda.jit\n"
        "def negate(x):\n"
        "    x[cuda.grid(1)] *= -1\n\n"
        'if __name__ == "__main__":\n'
        '    warnings.simplefilter("ignore")\n'
        "    negate[1, 32](np.ones(32))\n"
    )
    manifest = str(world.record(str(script)))
    world.sibling("bake").preheat("bake", manifest, "-o", str(world.root / "s.heat"), *BOTH).ok()
    sealed = world.sibling("sealed")
    for cc in (90, 100):
        words = ("run", "--bundle", str(world.root / "s.heat"), "--sealed", "--")
        ran = sealed.preheat(*words, sys.executable, str(script), cc=cc).ok()
        assert ran.launches == 1


def test_a_compile_that_fails_in_a_bake_names_the_kernel(baked: World, world: World) -> None:
    shutil.copy(baked.root / "kernels.toml", world.root)
    world.edit("return math.sin(x) * SCALE", "return math.sin(x) * UNKNOWN")
    ran = world.preheat("bake", "kernels.toml", "--arch", "sm_90")
    assert ran.code == 1
    assert "numba kernels:add for sm_90: TypingError" in ran.err


def test_a_function_that_is_gone_is_an_error_with_a_hint(baked: World, world: World) -> None:
    shutil.copy(baked.root / "kernels.toml", world.root)
    world.edit("def halve(x)", "def halved(x)")
    ran = world.preheat("bake", "kernels.toml", "--arch", "sm_90")
    assert ran.code == 1
    assert "numba kernels:halve for sm_90: module kernels has no function halve" in ran.err
    assert "hint: did you mean 'halved'? If so, record again with --fresh" in ran.err


def test_rows_are_json(baked: World) -> None:
    for item in Manifest.read(baked.root / "kernels.toml").foreign:
        assert json.loads(item.request)["function"] == item.name


def test_a_process_that_dies_in_a_bake_fails_its_kernels_alone(baked: World, world: World) -> None:
    """The kernels of the other modules are baked."""
    shutil.copy(baked.root / "kernels.toml", world.root)
    with (world.app / "more.py").open("a") as file:
        file.write("import os\nos._exit(3)\n")
    ran = world.preheat("bake", "kernels.toml", "--arch", "sm_90", "-j1")
    assert ran.code == 1
    assert "numba more:eager for sm_90: its process ended with status 3" in ran.err + ran.out
    assert "kernels:add for" not in ran.err


def test_a_numba_whose_libraries_cannot_be_ordered_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "_SETS", ("_linking_libraries", "_renamed"))
    with target.compiling_for(Arch(9, 0)), pytest.raises(AdapterError, match="no set _renamed"):
        CUDACodeLibrary(None, "library")
