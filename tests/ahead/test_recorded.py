"""Entries that cannot be made again travel in a bundle beside the manifest."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from preheat.ahead.manifest import ForeignProgram, Manifest
from preheat.ahead.manifest.recorded import RecordedEntries, recorded_name
from preheat.ahead.recorder import Recorder, merge_into, spool_directory
from preheat.errors import BundleError, InputError
from preheat.model.arch import Arch
from preheat.model.events import Events
from preheat.model.foreign import ForeignEntry
from preheat.store.bundle import Bundle

SM_90 = Arch(9, 0)
ROW = {"function": "f", "root": "", "env": {}, "recorded": {}}


def used(record: Recorder, key: str, *, arch: Arch | None = SM_90, **row: object) -> ForeignEntry:
    """Record an entry, with a description if there is one; return the entry."""
    entry = ForeignEntry("lib", key, {"f": key.encode()}, label=key, arch=arch)
    fields = {"entry": entry, "row": {**ROW, **row} if row else None, "site": (None, 0)}
    record.on_event("foreign_request", fields)
    return entry


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    return tmp_path / "kernels.toml"


@pytest.fixture
def record(manifest: Path, events: Events) -> Recorder:
    return Recorder(manifest, events)


def digests(manifest: Path) -> set[str]:
    with Bundle.open(manifest.with_name(recorded_name(manifest))) as bundle:
        assert bundle.verify() == {}
        return set(bundle.digests())


def test_measurements_and_copied_code_are_written(record: Recorder, manifest: Path) -> None:
    copied = used(record, "copied")
    host = used(record, "host", arch=None)
    measured = used(record, "measured", kept=True)
    used(record, "made", made=1)
    record.close()
    assert digests(manifest) == {entry.digest for entry in (copied, host, measured)}
    entries = RecordedEntries(Manifest.read(manifest).recorded)
    assert entries.get(measured.request) == measured
    assert not spool_directory(manifest).exists()


def test_host_code_alone_is_not_written(record: Recorder, manifest: Path) -> None:
    """A bake of any kernel makes it."""
    used(record, "host", arch=None)
    used(record, "made", made=1)
    record.close()
    assert Manifest.read(manifest).recorded == ()
    assert not manifest.with_name(recorded_name(manifest)).exists()


def test_entries_of_a_process_that_still_records_are_kept(manifest: Path, events: Events) -> None:
    first, second = Recorder(manifest, events), Recorder(manifest, events)
    one, two = used(first, "one"), used(second, "two")
    first.close()
    assert digests(manifest) == {one.digest}
    second.close()
    assert digests(manifest) == {one.digest, two.digest}
    assert not spool_directory(manifest).exists()


def test_the_entries_of_a_killed_process_are_merged(record: Recorder, manifest: Path) -> None:
    entry = used(record, "one")
    spool = record._spool
    assert spool is not None
    spool.close()  # as the end of a process does
    record._reset()  # This process goes on.
    assert merge_into(manifest) == 0
    assert digests(manifest) == {entry.digest}


def test_manifests_are_merged_with_their_entries(tmp_path: Path, events: Events) -> None:
    found = []
    for name in ("a", "b"):
        recorder = Recorder(tmp_path / f"{name}.toml", events)
        found.append(used(recorder, name))
        recorder.close()
    both = Manifest.read(tmp_path / "a.toml").merged(Manifest.read(tmp_path / "b.toml"))
    both.write(tmp_path / "all.toml")
    assert digests(tmp_path / "all.toml") == {entry.digest for entry in found}
    # Equal content gives equal bytes, and comments stay.
    text = (tmp_path / "all.toml").read_text()
    (tmp_path / "all.toml").write_text(f"# Mine.\n{text}")
    Manifest.read(tmp_path / "all.toml").write(tmp_path / "all.toml")
    assert (tmp_path / "all.toml").read_text() == f"# Mine.\n{text}"


def test_an_entry_that_is_no_longer_listed_is_dropped(record: Recorder, manifest: Path) -> None:
    used(record, "one")
    used(record, "two")
    record.close()
    read = Manifest.read(manifest)
    kept = tuple(item for item in read.foreign if item.name == "one")
    Manifest(foreign=kept, recorded=read.recorded).write(manifest)
    assert len(digests(manifest)) == 1
    Manifest(foreign=(ForeignProgram("lib", "f", "{}", archs=(SM_90,)),)).write(manifest)
    assert not manifest.with_name(recorded_name(manifest)).exists()
    assert "recorded" not in manifest.read_text()


def test_a_bundle_is_trusted_by_the_rules_of_bundles(record: Recorder, manifest: Path) -> None:
    used(record, "one")
    record.close()
    sources = Manifest.read(manifest).recorded
    place = manifest.with_name(recorded_name(manifest))
    place.chmod(0o666)
    with pytest.raises(BundleError, match="others can write to it"):
        RecordedEntries(sources, trust=False)
    assert RecordedEntries(sources, trust=True).absent == []
    place.chmod(0o644)
    blob = bytearray(place.read_bytes())
    blob[-1] ^= 1
    place.write_bytes(blob)
    with pytest.raises(BundleError):
        RecordedEntries(sources, trust=False)
    os.unlink(place)
    assert RecordedEntries(sources).absent == [str(place)]


@pytest.mark.parametrize("name", ["kernels.recorded.heat", "kernels.recorded.heat@sha256:12"])
def test_a_name_without_a_digest_is_refused(manifest: Path, name: str) -> None:
    manifest.write_text(f'version = 1\nrecorded = "{name}"\n')
    with pytest.raises(InputError, match=r"kernels\.toml:2: ") as error:
        Manifest.read(manifest)
    assert error.value.hint == (
        "'preheat record' writes this line; it ends with @sha256: and 64 digits"
    )
