"""Fixtures of the tests of sealed processes: a bundle, and builders without a compiler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from preheat.build.builder import Builder
from preheat.build.seal import unseal
from preheat.model.config import Config
from preheat.model.events import Events
from preheat.store.bundle import write
from tests.build.sealed import CLOCK, IN_MEMORY, NAMED, PLAIN, Baked, _NoCompiler, on_disk
from tests.conftest import Recorder


@pytest.fixture(scope="module")
def baked(shared_builder: Builder, tmp_path_factory: pytest.TempPathFactory) -> Baked:
    place = tmp_path_factory.mktemp("baked")
    file = on_disk(place / "include")
    entries: dict[str, bytes] = {}
    programs = {p.label: p for p in (PLAIN, NAMED, IN_MEMORY, CLOCK, file)}
    for program in programs.values():
        entries |= shared_builder.bundle_entry(program, "sm_90")[0].encode()
    write(place / "kernels.heat", entries, {})
    return Baked(place / "kernels.heat", place / "include", programs)


@pytest.fixture
def bare(tmp_path: Path, recorder: Recorder) -> Callable[..., Builder]:
    """Opens builders with an empty cache and no compiler."""

    def open_one(**settings: Any) -> Builder:
        config = Config(cache_dirs=(tmp_path / "empty",), lock_dir=tmp_path / "locks", **settings)
        builder = Builder.open(config, events=Events(recorder))
        builder.toolchain = _NoCompiler()  # type: ignore[assignment]
        return builder

    recorder.forgive = True
    return open_one


# The process


@pytest.fixture(autouse=True)
def unsealed() -> Iterator[None]:
    yield
    unseal()
