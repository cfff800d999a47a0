"""Fixtures of the tests of the corpus."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from preheat import Builder, Config


@pytest.fixture(scope="session")
def corpus_builder(pytestconfig: pytest.Config) -> Iterator[Builder]:
    """Compiles into the cache directory of pytest: every run but the first finds everything there."""
    assert pytestconfig.cache is not None
    home = pytestconfig.cache.mkdir("corpus")
    config = Config(cache_dirs=(home / "kernels",), lock_dir=home / "locks")
    with closing(Builder.open(config)) as builder:
        yield builder
