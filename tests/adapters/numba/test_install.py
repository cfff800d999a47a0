"""The adapter is installed when `numba.cuda` is imported, and stands aside for unknown versions."""

from __future__ import annotations

import pytest

pytest.importorskip("numba_cuda", reason="Numba-CUDA is installed by `make test-adapters`")

from tests.adapters.numba.world import World

LAUNCH = """
import warnings; warnings.simplefilter("ignore")
import preheat
import numba_cuda
VERSION
from numba import cuda
import numba.cuda
import kernels as k, numpy as np
k.add[1, 32](np.ones(32, np.float32), np.ones(32, np.float32), 32)
import preheat.adapters
compiles = preheat.default_builder().stats()["process"].get("compiles", 0)
# Numba imports cuda.core, which has an adapter as well.
print("numba" in preheat.adapters.installed(), compiles)
"""


def launch(version: str = "") -> str:
    """Return a program that launches a kernel, with another version of Numba-CUDA if it is given."""
    return LAUNCH.replace("VERSION", f"numba_cuda.__version__ = {version!r}" if version else "")


def test_an_import_of_numba_cuda_installs_it(world: World) -> None:
    ran = world.python("-c", launch(), PREHEAT_ADAPTERS="auto").ok()
    assert (ran.out, ran.err) == ("True 1\n", "")


def test_numba_without_cuda_is_left_alone(world: World) -> None:
    code = "import preheat, numba, sys; print('numba.cuda' in sys.modules, preheat.__name__)\n"
    ran = world.python("-c", code, PREHEAT_ADAPTERS="auto").ok()
    assert ran.err == ""


@pytest.mark.parametrize("version", ["0.31.0", "1.0.0", "0.21.9"])
def test_an_unknown_version_warns_once_and_works_alone(world: World, version: str) -> None:
    ran = world.python("-c", launch(version), PREHEAT_ADAPTERS="auto").ok()
    assert ran.out == "False 0\n"
    assert ran.err.count("the adapter for numba is not installed") == 1
    assert f"Numba-CUDA {version} is not known: the adapter accepts 0.22 to 0.30" in ran.err
    assert ran.launches == 1


def test_an_unknown_version_is_an_error_in_a_sealed_process(world: World) -> None:
    ran = world.python("-c", launch("0.31.0"), PREHEAT_ADAPTERS="auto", PREHEAT_SEALED="1")
    assert ran.code == 1
    assert "AdapterError: Numba-CUDA 0.31.0 is not known" in ran.err


def test_the_simulator_is_left_alone(world: World) -> None:
    code = (
        "import preheat.adapters; preheat.adapters.install('numba')\n"
        "import kernels as k, numpy as np\n"
        "y = np.zeros(4, np.float32)\n"
        "k.add[1, 4](np.zeros(4, np.float32), y, 4)\n"
        "print(y.tolist())\n"
    )
    ran = world.python("-W", "ignore", "-c", code, cc=None, NUMBA_ENABLE_CUDASIM="1").ok()
    assert ran.out == "[1.0, 2.0, 4.0, 1.0]\n"


def test_functions_that_were_decorated_before_are_connected(world: World) -> None:
    code = (
        "import warnings; warnings.simplefilter('ignore')\n"
        "import kernels as k, numpy as np, preheat.adapters\n"
        "preheat.adapters.install('numba')\n"
        "k.halve[1, 32](np.ones(32, np.float32))\n"
        "print(preheat.default_builder().stats()['process']['compiles'])\n"
    )
    assert world.python("-c", code).ok().out == "1\n"
