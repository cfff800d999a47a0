"""Compile with Triton, and launch on the emulator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import pytest

from preheat import Gpu

if TYPE_CHECKING:
    from tests.adapters.triton.compiled import Compiler, Launcher


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compiler]:
    """Yield a compiler of Triton kernels that stops at PTX and has a cache of its own."""
    from triton import knobs

    from tests.adapters.triton.compiled import Compiler, without_assembling

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        patch.setattr(knobs.runtime, "add_stages_inspection_hook", without_assembling)
        yield Compiler()


@pytest.fixture(params=[90, 100], ids="sm_{}".format)
def launch(
    request: pytest.FixtureRequest, compiler: Compiler, open_device: Callable[..., Gpu]
) -> Launcher:
    """Return what compiles and launches kernels, by default for both dialects of PTX."""
    from tests.adapters.triton.compiled import Launcher

    gpu = open_device("emulator", arch=f"sm_{request.param}", host_arrays=True)
    return Launcher(compiler, gpu, request.param)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Return random numbers that are the same in every run, and others in every test."""
    return np.random.default_rng(list(request.node.name.encode()))
