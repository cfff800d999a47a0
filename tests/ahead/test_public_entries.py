"""Entries of `preheat.obtain_entry` are recorded, baked and found by a sealed process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import preheat
from preheat.ahead.bake import bake
from preheat.ahead.check import check
from preheat.ahead.manifest import Manifest
from preheat.ahead.recorder import Recorder
from preheat.build import default
from preheat.build.builder import Builder
from preheat.errors import AdapterError, InputError, SealedError
from preheat.model.arch import Arch
from preheat.model.config import Config, SealMode

SM_80, SM_90 = Arch(8, 0), Arch(9, 0)
OpenBuilder = Callable[..., Builder]


@pytest.fixture
def default_builder(builder: Builder, monkeypatch: pytest.MonkeyPatch) -> Builder:
    """Return the builder that the public functions use."""
    monkeypatch.setattr(default, "_builder", lambda _: builder)
    return builder


def obtain_all() -> list[preheat.ForeignEntry]:
    """Request an entry for each of two architectures, and one for none, which has no label."""
    return [
        preheat.obtain_entry("mine", "tile", lambda: {"cubin": b"80"}, label="tile", arch="sm_80"),
        preheat.obtain_entry("mine", "tile", lambda: {"cubin": b"90"}, label="tile", arch="sm_90"),
        preheat.obtain_entry("mine", "table %1", lambda: {"table": b"7"}),
    ]


@pytest.fixture
def recorded(default_builder: Builder, tmp_path: Path) -> Manifest:
    """Return the manifest of a process that has requested the entries."""
    recorder = Recorder(tmp_path / "kernels.toml", default_builder.events)
    default_builder.events.subscribe(recorder.on_event, "foreign_request")
    obtain_all()
    obtain_all()
    recorder.close()
    return Manifest.read(tmp_path / "kernels.toml")


@pytest.mark.usefixtures("default_builder")
def test_one_key_has_an_entry_for_each_architecture_and_one_without() -> None:
    first, second, _ = entries = obtain_all()
    bare = preheat.put_entry("mine", "tile", {"cubin": b"any"})
    assert len({entry.digest for entry in (*entries, bare)}) == 4
    for arch, entry in (("sm_80", first), (SM_90, second), (None, bare)):
        assert preheat.get_entry("mine", "tile", arch=arch) == entry
    assert preheat.get_entry("mine", "tile", arch="sm_90a") is None
    preheat.put_entry("mine", "tile", {"cubin": b"other"}, arch="sm_90")
    assert [
        preheat.get_entry("mine", "tile", arch=arch).files["cubin"]  # type: ignore[union-attr]
        for arch in ("sm_80", "sm_90")
    ] == [b"80", b"other"]
    with pytest.raises(InputError, match="is not a GPU architecture"):
        preheat.get_entry("mine", "tile", arch="hopper")


def test_what_is_requested_is_recorded_once_with_its_line(recorded: Manifest) -> None:
    table, tile = recorded.foreign
    assert (table.title, table.archs, table.entries) == ("mine table %1", (), ("table%20%251",))
    assert (tile.title, tile.archs) == ("mine tile", (SM_80, SM_90))
    assert tile.entries == ("tile sm_80", "tile sm_90")
    assert (table.requests, tile.requests) == (2, 4)
    (line,) = table.callers
    assert line.startswith(f"{Path(__file__).name}:") or f"/{Path(__file__).name}:" in line


def test_a_bundle_of_another_machine_has_them_and_a_sealed_process_finds_them(
    recorded: Manifest,
    config: Config,
    open_builder: OpenBuilder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    elsewhere = replace(config, cache_dirs=(tmp_path / "elsewhere",))
    baked = bake(recorded, output=tmp_path / "k.heat", builder=open_builder(elsewhere))
    assert (baked.failures, len(baked.rows)) == ((), 3)
    served = replace(
        elsewhere,
        cache_dirs=(tmp_path / "served",),
        bundles=(tmp_path / "k.heat",),
        sealed=SealMode.ERROR,
    )
    sealed = open_builder(served)
    assert check(recorded, builder=sealed).ok
    monkeypatch.setattr(default, "_builder", lambda _: sealed)
    assert [entry.files for entry in obtain_all()] == [
        {"cubin": b"80"},
        {"cubin": b"90"},
        {"table": b"7"},
    ]
    with pytest.raises(SealedError, match=r"mine tile \(sm_100\)"):
        preheat.obtain_entry("mine", "tile", dict, label="tile", arch="sm_100")


def test_a_bake_says_that_it_cannot_make_them_for_another_architecture(
    recorded: Manifest, default_builder: Builder
) -> None:
    baked = bake(recorded, "sm_100", builder=default_builder)
    ((title, arch, error),) = baked.failures
    assert (title, str(arch), type(error)) == ("mine tile", "sm_100", AdapterError)
    assert "it was recorded for sm_80, sm_90" in str(error)
