"""Foreign entries in caches and bundles: found, stored, made once, verified, sealed."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import preheat
from preheat.build.builder import Builder
from preheat.errors import InputError, SealedError
from preheat.model import codec
from preheat.model.arch import Arch
from preheat.model.config import Config, SealMode
from preheat.model.foreign import ForeignEntry, ForeignRequest
from preheat.store.bundle import write
from tests.conftest import Recorder
from tests.processes import expect_success, kill, read_line, start_python, write_line

REQUEST = ForeignRequest("triton", "k" * 52, label="kernels:add", arch=Arch.parse("sm_90"))
FILES = {"add.cubin": b"code", "add.json": b"{}"}
ENTRY = ForeignEntry("triton", REQUEST.key, FILES, label=REQUEST.label, arch=REQUEST.arch)

# Makes one entry of 8 processes. It prints "making" when it makes it, and goes on when it is told.
MAKE = """
import sys
import preheat

def make():
    print("making", flush=True)
    sys.stdin.readline()
    return {"file": sys.argv[1].encode()}

entry = preheat.obtain_entry("test", "key", make)
print(entry.files["file"].decode(), flush=True)
"""


def test_what_is_put_is_found_by_every_builder(
    builder: Builder, open_builder: Callable[..., Builder], recorder: Recorder
) -> None:
    assert builder.foreign.get(REQUEST) is None
    builder.foreign.put(ENTRY)
    assert builder.foreign.get(REQUEST) == ENTRY
    assert open_builder().foreign.get(REQUEST) == ENTRY
    assert [hit["tier"] for hit in recorder.named("hit")] == ["memory", "disk"]
    assert recorder.named("hit")[0]["program"] == "triton kernels:add"


def test_the_directory_of_a_builder_is_where_its_entries_are_found(builder: Builder) -> None:
    builder.foreign.put(ENTRY)
    assert preheat.get_entry(REQUEST.kind, REQUEST.key, cache_dir=builder.cache_dir) == ENTRY


def test_what_is_put_is_read_from_disk_after_the_memory_was_cleared(
    builder: Builder, recorder: Recorder
) -> None:
    builder.foreign.put(ENTRY)
    builder.clear_memory()
    for tier in ("disk", "memory"):
        assert builder.foreign.get(REQUEST) == ENTRY
        assert recorder.named("hit")[-1]["tier"] == tier


def test_an_entry_is_made_once_and_counted(builder: Builder) -> None:
    made = []

    def make() -> dict[str, bytes]:
        made.append(1)
        return FILES

    first, second = (builder.foreign.obtain(REQUEST, make) for _ in range(2))
    assert first == second == ENTRY
    assert len(made) == 1
    assert first.provenance.created.endswith("Z")
    stats = builder.stats()["process"]
    assert (stats["compiles"], stats["misses.absent"], stats["hits.memory"]) == (1, 1, 1)


def test_threads_share_one_making(builder: Builder) -> None:
    begun = threading.Event()
    go = threading.Event()
    made: list[int] = []
    found: list[ForeignEntry] = []

    def make() -> dict[str, bytes]:
        made.append(1)
        begun.set()
        assert go.wait(60)
        return FILES

    def obtain() -> None:
        found.append(builder.foreign.obtain(REQUEST, make))

    threads = [threading.Thread(target=obtain) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert begun.wait(60)
    go.set()
    for thread in threads:
        thread.join(60)
    assert (len(made), len(found)) == (1, 4)


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return {
        "PREHEAT_CACHE_DIR": str(tmp_path / "cache"),
        "PREHEAT_LOCK_DIR": str(tmp_path / "locks"),
        "PREHEAT_LOCK_WAIT": "3000",
    }


def test_processes_share_one_making(env: dict[str, str]) -> None:
    first = start_python(MAKE, "first", env=env)
    assert read_line(first) == "making"
    others = [start_python(MAKE, f"other {number}", env=env) for number in range(3)]
    write_line(first, "go")
    assert read_line(first) == "first"
    for process in (first, *others):
        said = expect_success(process)
        assert process is first or said == "first\n"


def test_a_process_that_is_killed_while_it_makes_an_entry_is_replaced(env: dict[str, str]) -> None:
    first = start_python(MAKE, "first", env=env)
    assert read_line(first) == "making"
    second = start_python(MAKE, "second", env=env)
    kill(first)
    assert read_line(second) == "making"
    write_line(second, "go")
    assert expect_success(second) == "second\n"


def test_an_error_in_the_making_is_raised_and_nothing_is_stored(builder: Builder) -> None:
    def fail() -> dict[str, bytes]:
        raise RuntimeError("no such kernel")

    with pytest.raises(RuntimeError, match="no such kernel"):
        builder.foreign.obtain(REQUEST, fail)
    assert builder.foreign.obtain(REQUEST, lambda: FILES) == ENTRY


def test_a_lock_ends_with_the_call_that_took_it(builder: Builder) -> None:
    def lock_and_raise() -> None:
        _, found = builder.foreign.lock(REQUEST, sys._getframe())
        assert found is None
        raise RuntimeError("the compile failed")

    with pytest.raises(RuntimeError, match="the compile failed"):
        lock_and_raise()
    lock, found = builder.foreign.lock(REQUEST, sys._getframe())
    assert found is None
    lock.release()


def entry_file(config: Config) -> Path:
    (path,) = (config.cache_dirs[0] / "v1").glob(f"*/{ENTRY.digest}.heat")
    return path


@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_a_damaged_entry_is_a_miss(
    damage: str, config: Config, open_builder: Callable[..., Builder], recorder: Recorder
) -> None:
    open_builder().foreign.put(ENTRY)
    path = entry_file(config)
    blob = bytearray(path.read_bytes())
    blob[len(blob) // 2] ^= 1
    path.write_bytes(blob[:-5] if damage == "cut" else blob)
    recorder.forgive = True
    builder = open_builder()
    assert builder.foreign.get(REQUEST) is None
    assert len(recorder.named("damaged")) == 1
    assert builder.foreign.obtain(REQUEST, lambda: FILES) == ENTRY
    assert open_builder().foreign.get(REQUEST) == ENTRY


def test_an_entry_whose_content_is_not_one_is_a_miss(builder: Builder, recorder: Recorder) -> None:
    recorder.forgive = True
    builder.cache.put(ENTRY.digest, codec.pack(ENTRY.digest, {"kind": "other"}, {}))
    assert builder.foreign.get(REQUEST) is None
    assert recorder.named("damaged")


def test_a_bundle_is_asked_first(
    builder: Builder, config: Config, open_builder: Callable[..., Builder], tmp_path: Path
) -> None:
    builder.foreign.put(replace(ENTRY, files={"old": b""}))
    bundle = tmp_path / "all.heat"
    write(bundle, {ENTRY.digest: ENTRY.encode(provenance=False)}, {})
    sealed = open_builder(replace(config, bundles=(bundle,), sealed=SealMode.ERROR))
    assert sealed.foreign.get(REQUEST) == ENTRY
    assert [*sealed.foreign.all("triton")] == [ENTRY]
    assert [*sealed.foreign.all("other")] == []


def test_a_damaged_bundle_entry_is_a_miss(
    config: Config, open_builder: Callable[..., Builder], recorder: Recorder, tmp_path: Path
) -> None:
    bundle = tmp_path / "all.heat"
    write(bundle, {ENTRY.digest: ENTRY.encode(provenance=False)}, {})
    blob = bytearray(bundle.read_bytes())
    blob[-1] ^= 1
    bundle.write_bytes(blob)
    recorder.forgive = True
    builder = open_builder(replace(config, bundles=(bundle,)))
    assert builder.foreign.get(REQUEST) is None
    assert [*builder.foreign.all()] == []
    assert recorder.named("damaged")[0]["tier"] == "bundle"


def test_a_sealed_process_makes_nothing(
    config: Config, open_builder: Callable[..., Builder], recorder: Recorder
) -> None:
    def make() -> dict[str, bytes]:
        raise AssertionError("a sealed process made an entry")

    sealed = open_builder(replace(config, sealed=SealMode.ERROR))
    with pytest.raises(SealedError, match=r"test_foreign_store\.py:\d+: triton kernels:add \(sm_90\)"):
        sealed.foreign.obtain(REQUEST, make)
    assert recorder.named("sealed")[0]["mode"] == "error"
    assert not recorder.named("miss")


def test_a_seal_that_warns_makes_the_entry(
    config: Config, open_builder: Callable[..., Builder], recorder: Recorder
) -> None:
    warned = open_builder(replace(config, sealed=SealMode.WARN))
    assert warned.foreign.obtain(REQUEST, lambda: FILES) == ENTRY
    assert [event["mode"] for event in recorder.named("sealed")] == ["warn"]


def test_variants_of_one_key_do_not_replace_each_other(builder: Builder) -> None:
    for variant in ("int", "str"):
        builder.foreign.put(replace(ENTRY, variant=variant, files={"a": variant.encode()}))
    found = [builder.foreign.get(REQUEST._replace(variant=v)) for v in ("int", "str")]
    assert [entry and entry.files["a"] for entry in found] == [b"int", b"str"]
    assert builder.foreign.get(REQUEST) is None


def test_entries_are_evicted_like_artifacts(
    config: Config, open_builder: Callable[..., Builder]
) -> None:
    builder = open_builder(replace(config, cache_limit=20_000))
    for number in range(20):
        builder.foreign.put(ForeignEntry("test", str(number), {"file": os.urandom(2_000)}))
    kept = [*open_builder().foreign.all("test")]
    assert 1 <= len(kept) < 10


def test_public_calls(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert preheat.get_entry("mine", "key", cache_dir=cache) is None
    put = preheat.put_entry("mine", "key", {"a": b"1"}, label="a file", arch="sm_90", cache_dir=cache)
    assert preheat.get_entry("mine", "key", arch="sm_90", cache_dir=cache) == put
    made = preheat.obtain_entry("mine", "other", lambda: {"b": b"2"}, cache_dir=cache)
    assert made.files == {"b": b"2"}
    with pytest.raises(InputError, match="is not a kind of entry"):
        preheat.get_entry("Mine", "key", cache_dir=cache)
    with pytest.raises(InputError, match="is bytes, not str"):
        preheat.obtain_entry("mine", "bad", lambda: {"b": "2"}, cache_dir=cache)  # type: ignore[dict-item]
