"""Requests of other libraries are made by processes of their adapters, bundled, and checked."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from preheat.ahead.bake import BakedProgram, FailedProgram, bake
from preheat.ahead.check import check
from preheat.ahead.foreign import ForeignJob
from preheat.ahead.manifest import ForeignProgram, Manifest, ManifestProgram
from preheat.build.builder import Builder
from preheat.build.bundles import baked_archs
from preheat.errors import AdapterError, InputError
from preheat.model import codec
from preheat.model.arch import Arch
from preheat.model.config import Config
from preheat.model.foreign import ForeignEntry, foreign_digest
from preheat.model.program import Program
from preheat.store.bundle import Bundle
from tests.adapters.fake import write_library
from tests.conftest import SAXPY

SM_80, SM_90 = Arch(8, 0), Arch(9, 0)
KEPT = "it cannot be compiled again; the recorded entry was copied"


@pytest.fixture(autouse=True)
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the library and its adapter on the path, which the processes of adapters get."""
    monkeypatch.syspath_prepend(str(write_library(tmp_path / "library")))


def asked(function: str, coverage: str = "recorded", **more: object) -> ForeignProgram:
    request = json.dumps({"function": function, "env": {}, **more})
    return ForeignProgram("fakelib", function, request, "{}", archs=(SM_90,), coverage=coverage)


def listed(*items: ForeignProgram) -> Manifest:
    return Manifest(foreign=items)


def keys_in(bundle: Path) -> list[str]:
    with Bundle.open(bundle) as opened:
        blobs = [opened.get(digest) for digest in opened.digests()]
    return sorted(_entry(blob).key for blob in blobs if blob is not None)


def _entry(blob: bytes) -> ForeignEntry:
    meta, sections = codec.unpack_checked(blob)
    digest = foreign_digest("fakelib", meta["name"], meta["variant"])
    return ForeignEntry.decode(digest, meta, sections)


# Baking


def test_a_bake_makes_the_entries_of_every_architecture(builder: Builder, tmp_path: Path) -> None:
    manifest = listed(asked("add"), asked("mul", coverage="weak"))
    bundle = tmp_path / "k.heat"
    seen: list[str] = []
    result = bake(
        *(manifest, ["sm_80", "sm_90"]),
        output=bundle,
        builder=builder,
        on_start=lambda job: seen.append(f"starts {job}"),
        on_done=lambda job, _: seen.append(f"ends {job}"),
    )
    assert result.ok
    rows = [(row.label, str(row.arch), row.source, row.note) for row in result.rows]
    assert rows == [
        ("fakelib add", "sm_80", "compiler", ""),
        ("fakelib add", "sm_90", "compiler", ""),
        ("fakelib mul", "sm_80", "compiler", ""),
        ("fakelib mul", "sm_90", "compiler", ""),
    ]
    assert sorted(seen)[:4] == [f"ends {row[0]} for {row[1]}" for row in rows]
    assert len(seen) == 8
    plain = ["add/1/sm_80", "add/1/sm_90", "mul/1/sm_80", "mul/1/sm_90"]
    assert keys_in(bundle) == sorted([*plain, "mul/1/sm_80/weak", "mul/1/sm_90/weak"])
    with Bundle.open(bundle) as opened:
        assert set(baked_archs(opened)) == {SM_80, SM_90}
    again = bake(manifest, ["sm_80", "sm_90"], builder=builder)
    assert [row.source for row in again.rows] == ["cache"] * 4
    assert [row._replace(source="") for row in again.rows] == [
        row._replace(source="") for row in result.rows
    ]


def test_a_bake_says_when_a_key_is_not_the_recorded_one(builder: Builder) -> None:
    other = "its key is not the recorded one, although nothing that was recorded has changed"
    recorded = replace(asked("add"), entries=("add/1/sm_90",))
    changed = replace(asked("mul"), entries=("mul/0/sm_90",))
    told = replace(asked("sub", notes=["moved"]), entries=("sub/0/sm_90",))
    rows = bake(listed(recorded, changed, told), ["sm_80", "sm_90"], builder=builder).rows
    notes = {(row.label, str(row.arch)): row.note for row in rows if row.note}
    assert notes.pop(("fakelib mul", "sm_90")).startswith(other)
    assert set(notes.values()) == {"moved"}


def test_a_bake_for_an_architecture_that_does_not_exist_starts_no_adapter(builder: Builder) -> None:
    started: list[object] = []
    with pytest.raises(InputError, match=r"^sm_91 is not a known GPU architecture"):
        bake(listed(asked("add")), ["sm_90", "sm_91"], builder=builder, on_start=started.append)
    assert started == []


def test_two_bakes_with_other_caches_write_the_same_bytes(
    open_builder: Callable[..., Builder], config: Config, tmp_path: Path
) -> None:
    manifest = listed(*(asked(f"f{n}") for n in range(3)))
    for name in ("a", "b"):
        fresh = replace(config, cache_dirs=(tmp_path / name,))
        bake(manifest, output=tmp_path / f"{name}.heat", builder=open_builder(fresh))
    assert (tmp_path / "a.heat").read_bytes() == (tmp_path / "b.heat").read_bytes()


def test_a_bake_without_a_cache_directory_hands_entries_over(
    open_builder: Callable[..., Builder], config: Config, tmp_path: Path
) -> None:
    without = open_builder(replace(config, cache_dirs=()))
    assert without.disk is None
    result = bake(listed(asked("add")), output=tmp_path / "k.heat", builder=without)
    assert result.ok
    assert keys_in(tmp_path / "k.heat") == ["add/1/sm_90"]


def test_a_request_that_fails_does_not_stop_the_others(
    builder: Builder, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    done: list[BakedProgram | FailedProgram] = []
    manifest = listed(*map(asked, ("add", "raises", "refused", "dies", "forgets")))
    result = bake(
        manifest,
        output=tmp_path / "k.heat",
        builder=builder,
        on_done=lambda _, outcome: done.append(outcome),
    )
    assert not result.ok
    assert keys_in(tmp_path / "k.heat") == ["add/1/sm_90"]
    messages = {failed.title: (str(failed.error), failed.error.hint) for failed in result.failures}
    assert messages == {
        "fakelib dies": (
            "the process of the adapter for fakelib ended with status 3",
            "its messages are above",
        ),
        "fakelib forgets": (
            "fakelib forgets for sm_90: 1 of 2 entries were evicted during the bake",
            None,
        ),
        "fakelib raises": ("fakelib raises for sm_90: ZeroDivisionError: division by zero", None),
        "fakelib refused": ("fakelib refused for sm_90: its code is gone", "find it"),
    }
    assert all(isinstance(failed.error, AdapterError) for failed in result.failures)
    assert sum(isinstance(each, FailedProgram) for each in done) == 4
    out, err = capfd.readouterr()
    assert "a line of the application" not in out
    assert "a line of the application" in err


def test_notes_of_an_adapter_are_on_the_row(builder: Builder) -> None:
    result = bake(listed(asked("add", notes=["moved", "changed"])), builder=builder)
    assert [row.note for row in result.rows] == ["moved; changed"]


def test_an_unknown_adapter_is_an_error_of_its_requests(builder: Builder) -> None:
    unknown = replace(asked("add"), kind="fakelibs")
    result = bake(listed(unknown), builder=builder)
    (failed,) = result.failures
    assert str(failed.error) == "fakelibs add for sm_90: there is no adapter for 'fakelibs'"
    assert failed.error.hint == "did you mean 'fakelib'?"


def test_settings_for_runs_do_not_reach_the_processes(
    builder: Builder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PREHEAT_SEALED", "1")
    monkeypatch.setenv("PREHEAT_RECORD", str(tmp_path / "recorded.toml"))
    assert bake(listed(asked("add")), builder=builder).ok
    assert not (tmp_path / "recorded.toml").exists()


def test_programs_and_requests_are_in_one_bundle(builder: Builder, tmp_path: Path) -> None:
    program = ManifestProgram(Program.of(SAXPY, label="saxpy.cu"), (SM_90,))
    done: list[object] = []
    result = bake(
        Manifest((program,), foreign=(asked("add"),)),
        output=tmp_path / "k.heat",
        builder=builder,
        on_done=lambda job, _: done.append(type(job)),
    )
    assert [row.label for row in result.rows] == ["saxpy.cu", "fakelib add"]
    assert done.count(ForeignJob) == 1
    assert len(done) == 2


# Entries that are kept


def stored(builder: Builder, key: str, arch: Arch | None = SM_90, variant: str = "") -> str:
    """Store an entry, and return how a manifest lists it."""
    entry = ForeignEntry("fakelib", key, {"code": key.encode()}, variant, key, arch)
    builder.foreign.put(entry)
    return f"{key} {variant}".strip()


def test_an_entry_that_cannot_be_made_again_is_kept(builder: Builder, tmp_path: Path) -> None:
    entries = (stored(builder, "K"), stored(builder, "L", variant="typed"))
    kept = ForeignProgram("fakelib", "K", archs=(SM_90,), entries=entries)
    anywhere = ForeignProgram("fakelib", "host", entries=(stored(builder, "H", None),))
    result = bake(listed(kept, anywhere), output=tmp_path / "k.heat", builder=builder)
    assert result.ok
    assert [(row.label, row.arch, row.source, row.note) for row in result.rows] == [
        ("fakelib K", SM_90, "cache", KEPT),
        ("fakelib host", None, "cache", ""),
    ]
    assert keys_in(tmp_path / "k.heat") == ["H", "K", "L"]


def test_a_kept_entry_has_its_own_architecture_alone(builder: Builder) -> None:
    kept = ForeignProgram("fakelib", "K", archs=(SM_90,), entries=(stored(builder, "K"),))
    result = bake(listed(kept), ["sm_80", "sm_90"], builder=builder)
    assert [str(row.arch) for row in result.rows] == ["sm_90"]
    (failed,) = result.failures
    assert str(failed.error) == (
        "fakelib K for sm_80 cannot be made: it was recorded for sm_90, and only a run on a GPU makes "
        "it for another architecture"
    )
    assert failed.error.hint == (
        "record on a GPU of sm_80, and add that recording: preheat record -o MANIFEST --merge OTHER"
    )


def test_a_kept_entry_that_is_gone_is_a_note(builder: Builder) -> None:
    """It may belong to an earlier recording. A check still names what is missing."""
    kept = ForeignProgram("fakelib", "K", archs=(SM_90,), entries=(stored(builder, "K"), "GONE"))
    (row,) = bake(listed(kept), builder=builder).rows
    assert row.note == (
        f"{KEPT}; 1 of 2 recorded entries are neither beside the manifest nor in the cache; "
        "other shards may make them, or 'preheat record --fresh' drops them"
    )


def test_kept_entries_that_are_all_gone_are_an_error(builder: Builder) -> None:
    kept = ForeignProgram("fakelib", "K", archs=(SM_90,), entries=("GONE", "GONE TOO"))
    (failed,) = bake(listed(kept), builder=builder).failures
    assert str(failed.error) == (
        "fakelib K for sm_90: its 2 recorded entries are neither beside the manifest nor in the cache"
    )
    assert failed.error.hint == "record again on a GPU of sm_90"


def test_the_recorded_content_comes_before_that_of_the_cache(builder: Builder, tmp_path: Path) -> None:
    """The same manifest gives the same bundle on every machine."""
    (tmp_path / "spool").mkdir()
    entry = ForeignEntry("fakelib", "K", {"code": b"recorded"}, label="K", arch=SM_90)
    (tmp_path / "spool" / f"{entry.digest}.entry").write_bytes(entry.encode())
    kept = ForeignProgram("fakelib", "K", archs=(SM_90,), entries=(stored(builder, "K"),))
    Manifest(foreign=(kept,), recorded=(str(tmp_path / "spool"),)).write(tmp_path / "k.toml")
    assert bake(tmp_path / "k.toml", output=tmp_path / "k.heat", builder=builder).ok
    with Bundle.open(tmp_path / "k.heat") as opened:
        blob = opened.get(entry.digest)
    assert blob is not None
    assert _entry(blob).files == {"code": b"recorded"}


def test_an_entry_for_another_architecture_is_not_missed(builder: Builder, tmp_path: Path) -> None:
    """A recording of two GPUs may be baked for one of them."""
    (tmp_path / "spool").mkdir()
    for key, arch in (("K80", SM_80), ("K90", SM_90)):
        entry = ForeignEntry("fakelib", key, {"code": b"c"}, label="K", arch=arch)
        (tmp_path / "spool" / f"{entry.digest}.entry").write_bytes(entry.encode())
    kept = ForeignProgram("fakelib", "K", archs=(SM_80, SM_90), entries=("K80", "K90"))
    manifest = tmp_path / "k.toml"
    Manifest(foreign=(kept,), recorded=(str(tmp_path / "spool"),)).write(manifest)
    assert bake(manifest, "sm_90", output=tmp_path / "k.heat", builder=builder).ok
    assert keys_in(tmp_path / "k.heat") == ["K90"]
    builder.mount(tmp_path / "k.heat")
    assert check(manifest, "sm_90", builder=builder).ok
    found = check(manifest, "sm_80", builder=builder)
    assert [each.reason for each in found.missing] == ["not baked for this architecture"]
    found = check(manifest, "sm_100", builder=builder)
    assert found.to_record == found.missing


def test_kept_entries_come_after_those_that_are_made(builder: Builder) -> None:
    """Another request of the same bake may have made them."""
    kept = ForeignProgram("fakelib", "a", archs=(SM_90,), entries=("z/1/sm_90",))
    assert bake(listed(kept, asked("z")), builder=builder, jobs=1).ok


# Checks


def reasons(manifest: Manifest, builder: Builder, *archs: str) -> dict[tuple[str, str], str]:
    found = check(manifest, archs or None, builder=builder)
    return {(missing.title, str(missing.arch)): missing.reason for missing in found.missing}


def test_a_check_compiles_nothing_and_says_what_is_missing(
    builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = listed(asked("add"), asked("mul", coverage="weak"), asked("raises"))
    title = ("fakelib add", "sm_90")
    before = reasons(manifest, builder)
    assert before == {
        title: "not baked",
        ("fakelib mul", "sm_90"): "not baked",
        ("fakelib raises", "sm_90"): "ZeroDivisionError: division by zero",
    }
    assert reasons(manifest, builder) == before

    bake(listed(asked("add"), asked("mul")), builder=builder)
    assert reasons(listed(asked("add")), builder) == {}
    assert reasons(manifest, builder)["fakelib mul", "sm_90"] == "1 of 2 not baked"
    assert reasons(listed(asked("add")), builder, "sm_80", "sm_90") == {
        ("fakelib add", "sm_80"): "not baked for this architecture"
    }
    checked = check(listed(asked("add")), ["sm_80"], builder=builder)
    assert (checked.programs, checked.archs) == (1, (SM_80,))

    monkeypatch.setenv("FAKELIB_LINE", "2")
    assert reasons(listed(asked("add")), builder) == {title: "moved from line 1 to line 2"}


def test_a_check_of_kept_entries_looks_for_them(builder: Builder) -> None:
    kept = ForeignProgram("fakelib", "K", archs=(SM_90,), entries=(stored(builder, "K"),))
    assert reasons(listed(kept), builder) == {}
    lost = replace(kept, entries=("K", "GONE"))
    assert reasons(listed(lost), builder) == {("fakelib K", "sm_90"): "1 of 2 not baked"}
