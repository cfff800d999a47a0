"""Damaged entries and failing tiers below a builder: builds succeed, and an event has the reason."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from preheat.build.builder import Builder
from preheat.model import codec
from preheat.model.config import Config
from tests.build.test_builder import PROGRAM, Open, disk
from tests.conftest import Recorder


def entry_file(config: Config, digest: str) -> Path:
    return config.cache_dirs[0] / "v1" / digest[:2] / f"{digest}.heat"


def test_a_damaged_entry_is_removed_and_rebuilt(
    open_builder: Open, config: Config, recorder: Recorder
) -> None:
    made = open_builder().build(PROGRAM, "sm_90")
    file = entry_file(config, made.digest)
    file.write_bytes(file.read_bytes()[:-1])
    recorder.forgive = True
    again = open_builder().build(PROGRAM, "sm_90")
    assert again.cubin == made.cubin
    assert [d["reason"] for d in recorder.named("damaged")] == ["checksum mismatch"]
    assert len(recorder.named("compile")) == 2


@pytest.mark.parametrize("part", ["cubin", "ptx", "log", "provenance", "parts"])
def test_a_bit_that_is_flipped_where_a_hit_does_not_read_is_a_miss(
    part: str, open_builder: Open, config: Config, recorder: Recorder
) -> None:
    """The code is copied and some fields are decoded later, but the whole entry is verified at once."""
    made = open_builder().build(PROGRAM, "sm_90")
    file = entry_file(config, made.digest)
    entry = bytearray(file.read_bytes())
    _, places = codec.layout(bytes(entry))
    at = entry.index(b'"parts"') if part == "parts" else places[part].start
    entry[at] ^= 1
    file.write_bytes(entry)
    recorder.forgive = True
    again = open_builder()
    assert again.build(PROGRAM, "sm_90") == made
    assert [d["reason"] for d in recorder.named("damaged")] == ["checksum mismatch"]
    assert len(recorder.named("compile")) == 2


def test_an_artifact_and_the_memory_tier_share_the_bytes_of_the_entry(open_builder: Open) -> None:
    open_builder().build(PROGRAM, "sm_90")
    builder = open_builder()
    found = builder.build(PROGRAM, "sm_90")
    blob, _ = vars(found)["_entry"]
    assert builder.cache.tiers[0].get(found.digest) is blob
    builder.clear_memory()
    assert found.cubin == builder.build(PROGRAM, "sm_90").cubin, "it does not need the tier"


def test_a_whole_entry_that_holds_no_artifact_is_a_miss(
    open_builder: Open, config: Config, recorder: Recorder
) -> None:
    made = open_builder().build(PROGRAM, "sm_90")
    file = entry_file(config, made.digest)
    file.write_bytes(codec.pack(made.digest, {"kind": "artifact"}, {}))
    recorder.forgive = True
    assert open_builder().build(PROGRAM, "sm_90").cubin == made.cubin
    assert len(recorder.named("damaged")) == 1


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Return a file system of 64 KiB, which the test fills."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k,mode=0700", "tmpfs", str(place)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def fill(place: Path) -> None:
    with (place / "filler").open("wb", 0) as file, suppress(OSError):
        while file.write(b"\1" * 4096):
            pass


def test_a_full_disk_still_returns_the_kernel(
    small_disk: Path, open_builder: Open, config: Config, recorder: Recorder
) -> None:
    builder = open_builder(replace(config, cache_dirs=(small_disk / "cache",)))
    (small_disk / "cache" / "v1" / "staged").mkdir(parents=True)
    fill(small_disk)
    recorder.forgive = True
    made = builder.build(PROGRAM, "sm_90")
    assert made.cubin[:4] == b"\x7fELF"
    faults = [f for f in recorder.named("fault") if f["where"] == "disk"]
    assert len(faults) == 1
    assert "No space left" in faults[0]["error"]
    assert builder.build(PROGRAM, "sm_90") == made  # from memory


def test_a_read_only_directory_is_passed_over_for_the_next(
    small_disk: Path, open_builder: Open, config: Config, tmp_path: Path, recorder: Recorder
) -> None:
    (small_disk / "cache").mkdir(mode=0o700)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    recorder.forgive = True
    builder = open_builder(replace(config, cache_dirs=(small_disk / "cache", tmp_path / "next")))
    builder.build(PROGRAM, "sm_90")
    assert [r["reason"] for r in recorder.named("refused")] == ["it is not writable"]
    assert disk(builder).root == tmp_path / "next"
    assert list((tmp_path / "next").rglob("*.heat"))


def test_a_directory_that_turns_read_only_costs_no_compile(
    small_disk: Path, open_builder: Open, config: Config, recorder: Recorder
) -> None:
    builder = open_builder(replace(config, cache_dirs=(small_disk / "cache",)))
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    recorder.forgive = True
    assert builder.build(PROGRAM, "sm_90").cubin
    assert any("Read-only file system" in f["error"] for f in recorder.named("fault"))


def test_a_foreign_cache_directory_is_refused_with_the_override(
    open_builder: Open, config: Config, recorder: Recorder
) -> None:
    root = config.cache_dirs[0]
    root.mkdir(mode=0o700)
    os.chown(root, 4321, 4321)
    recorder.forgive = True
    builder = open_builder()
    assert builder.disk is None
    assert builder.build(PROGRAM, "sm_90").cubin
    (refused,) = recorder.named("refused")
    assert "belongs to user 4321" in refused["reason"]
    assert "PREHEAT_TRUST_CACHE_DIR=1" in refused["reason"]
    assert open_builder(replace(config, trust_cache_dir=True)).disk is not None


def test_a_symlinked_cache_planted_by_another_user_is_refused(
    open_builder: Open, config: Config, tmp_path: Path, recorder: Recorder
) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    config.cache_dirs[0].symlink_to(tmp_path / "elsewhere")
    os.lchown(config.cache_dirs[0], 4321, 4321)
    recorder.forgive = True
    assert open_builder().disk is None
    assert "symbolic link owned by user 4321" in recorder.named("refused")[0]["reason"]


def test_a_cache_directory_that_vanishes_is_made_again(
    builder: Builder, config: Config, recorder: Recorder
) -> None:
    builder.build(PROGRAM, "sm_90")
    shutil.rmtree(config.cache_dirs[0])
    builder.build(replace(PROGRAM, label="again.cu"), "sm_90")
    assert list(config.cache_dirs[0].rglob("*.heat"))
    assert recorder.named("fault") == []


def test_a_lock_directory_that_cannot_be_made_costs_no_compile(
    open_builder: Open, config: Config, tmp_path: Path, recorder: Recorder
) -> None:
    (tmp_path / "file").write_text("")
    recorder.forgive = True
    builder = open_builder(replace(config, lock_dir=tmp_path / "file" / "locks"))
    assert builder.build(PROGRAM, "sm_90").cubin
    assert "cannot be created" in recorder.named("refused")[0]["reason"]
    assert recorder.named("fault") == []
    assert (config.cache_dirs[0] / "locks").is_dir()


def test_a_lock_directory_of_another_user_is_not_used(
    open_builder: Open, config: Config, recorder: Recorder
) -> None:
    config.lock_dir.mkdir(mode=0o700)
    os.chown(config.lock_dir, 4321, 4321)
    recorder.forgive = True
    open_builder().build(PROGRAM, "sm_90")
    assert "belongs to user 4321" in recorder.named("refused")[0]["reason"]


def test_without_a_cache_everything_still_works(
    open_builder: Open, config: Config, recorder: Recorder
) -> None:
    builder = open_builder(replace(config, cache=False))
    builder.build(PROGRAM, "sm_90")
    builder.build(PROGRAM, "sm_90")
    assert not config.cache_dirs[0].exists()
    assert not config.lock_dir.exists()  # A lock that is not shared is not waited for.
    assert len(recorder.named("compile")) == 1


def test_a_builder_says_which_directory_its_cache_is_in(
    config: Config, open_builder: Open, tmp_path: Path, recorder: Recorder
) -> None:
    recorder.forgive = True
    (tmp_path / "file").write_text("")
    usable = tmp_path / "second"
    builder = open_builder(replace(config, cache_dirs=(tmp_path / "file" / "cache", usable)))
    made = builder.build(PROGRAM, "sm_90")
    assert builder.cache_dir == usable
    assert [*usable.rglob(f"{made.digest}*")]
    assert open_builder(replace(config, cache=False)).cache_dir is None
