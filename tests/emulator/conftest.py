"""Fixtures of the emulator's tests: a compiler with a cache that outlives a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from preheat.build.builder import Builder
from preheat.model.config import Config
from preheat.model.program import Program
from tests.emulator.support import ARCHS, Machine

Cuda = Callable[..., Machine]


@pytest.fixture(scope="session")
def compiler(pytestconfig: pytest.Config) -> Iterator[Builder]:
    """Compiles into the cache directory of pytest: every run but the first finds everything there."""
    assert pytestconfig.cache is not None
    home = pytestconfig.cache.mkdir("emulator")
    config = Config(cache_dirs=(home / "kernels",), lock_dir=home / "locks")
    with closing(Builder.open(config)) as builder:
        yield builder


@pytest.fixture(params=ARCHS)
def cuda(request: pytest.FixtureRequest, compiler: Builder) -> Cuda:
    """Loads CUDA source into the emulator, compiled for each dialect of PTX in turn."""

    def load(source: str, **settings: int) -> Machine:
        return Machine(compiler.build(Program.of(source), request.param), **settings)

    return load
