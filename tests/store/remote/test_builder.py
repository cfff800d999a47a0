"""Builders of several machines that share a store: one compiles, and the others find it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from preheat.ahead.adapter_process import AdapterProcesses
from preheat.ahead.bake import bake
from preheat.ahead.check import check
from preheat.ahead.stores import open_store
from preheat.build import remotes
from preheat.build.builder import Builder
from preheat.build.lookup import Miss
from preheat.build.remotes import open_leases
from preheat.errors import ConfigError, InputError, SealedError
from preheat.model import codec
from preheat.model.artifact import Artifact
from preheat.model.config import Config, SealMode
from preheat.model.events import Events
from preheat.model.foreign import ForeignEntry, ForeignRequest
from preheat.model.program import Program
from preheat.store import Chain
from preheat.store.base import UploadResult
from preheat.store.remote.engine import RemoteError
from preheat.store.remote.url import entry_name
from preheat.store.signing import entries as envelope
from preheat.store.signing.keys import SigningKey
from preheat.toolchain.compiler import Toolchain
from preheat.toolchain.headers.states import HeaderLists, decode_states, is_header_list, pack_states
from tests.conftest import SAXPY, Recorder
from tests.processes import expect_success, start_python
from tests.store.remote.memory_engine import MemoryEngine

OPEN = "redis://127.0.0.1:1/0"  # Nobody asks it: an engine in memory takes its place.


class Fleet:
    """Machines with disks of their own, and one store for all of them.

    They share the compiler processes of the test session, so that none has to be started.
    """

    def __init__(self, place: Path, toolchain: Toolchain, monkeypatch: pytest.MonkeyPatch) -> None:
        self._toolchain = toolchain
        self.engine = MemoryEngine()
        self.recorder = Recorder()
        self.opened: list[Builder] = []
        self._place = place
        monkeypatch.setattr(remotes, "open_engine", self._open)

    def _open(self, _: object, *, timeout: float, private: bool) -> MemoryEngine:
        assert (timeout, private) == (2.0, False)
        self.engine.closed = False  # One engine stands for the connections of all machines.
        return self.engine

    def machine(self, number: int, **settings: object) -> Builder:
        """Open a builder on the machine with this number."""
        builder = Builder.open(self.config(number, **settings), events=Events(self.recorder))
        builder.toolchain = self._toolchain
        self.opened.append(builder)
        return builder

    def config(self, number: int, **settings: object) -> Config:
        """Return the settings of a machine."""
        config = Config(
            cache_dirs=(self._place / f"cache-{number}",),
            lock_dir=self._place / f"locks-{number}",
            remote=(OPEN,),
            remote_unsigned=True,
        )
        return replace(config, **settings)  # type: ignore[arg-type]

    def entries(self) -> dict[str, bytes]:
        """Return the blobs on the server by their digests."""
        found = {name.rpartition("/")[2]: data for name, data in self.engine.objects.items()}
        return {digest: envelope.unwrap(digest, data, None) for digest, data in found.items()}


@pytest.fixture
def fleet(tmp_path: Path, shared_builder: Builder, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path, shared_builder.toolchain, monkeypatch)
    yield fleet
    for builder in fleet.opened:
        builder.cache.close()


def tiers(builder: Builder) -> dict[str, float]:
    """Return how many hits each tier had, and how many compiles there were."""
    stats = builder.stats()["process"]
    counted = {name.removeprefix("hits."): value for name, value in stats.items() if "hits." in name}
    return counted | ({"compiles": stats["compiles"]} if "compiles" in stats else {})


PLAIN = Program.of(SAXPY, label="saxpy.cu")


def including(directory: Path) -> Program:
    source = '#include "scale.h"\nextern "C" __global__ void k(int* x) { *x *= SCALE; }'
    return Program.of(source, label="scaled.cu", include=[directory])


def write_header(directory: Path, scale: int) -> None:
    directory.mkdir(exist_ok=True)
    (directory / "scale.h").write_text(f"#define SCALE {scale}\n")


# Plain programs


def test_one_machine_compiles_and_the_others_find_it(fleet: Fleet) -> None:
    first = fleet.machine(1)
    compiled = first.build(PLAIN, "sm_90")
    first.cache.close()
    # It asks, takes the lease, asks once more, stores, and gives the lease back.
    assert fleet.engine.calls == {"read": 2, "create": 1, "write": 1, "discard": 1}
    second = fleet.machine(2)
    assert second.build(PLAIN, "sm_90").cubin == compiled.cubin
    assert tiers(second) == {"remote": 1}
    assert fleet.engine.calls == {"read": 3, "create": 1, "write": 1, "discard": 1}


def test_a_hit_of_the_store_fills_memory_and_disk(fleet: Fleet) -> None:
    first = fleet.machine(1)
    first.build(PLAIN, "sm_90")
    first.cache.close()
    second = fleet.machine(2)
    assert second.build(PLAIN, "sm_90") is not None
    second.clear_memory()
    assert isinstance(second.lookup(PLAIN, "sm_90").artifact, Artifact)
    assert isinstance(second.lookup(PLAIN, "sm_90").artifact, Artifact)
    assert tiers(second) == {"remote": 1, "disk": 1, "memory": 1}
    assert fleet.engine.calls["read"] == 3  # one of each machine, and one of the first with its lease


def test_hits_on_this_machine_make_no_request(fleet: Fleet) -> None:
    fleet.machine(1).build(PLAIN, "sm_90")
    fleet.opened[0].cache.close()
    fleet.engine.calls.clear()
    again = fleet.machine(1)
    again.build(PLAIN, "sm_90")
    again.build(PLAIN, "sm_90")
    assert not fleet.engine.calls
    assert tiers(again) == {"disk": 1, "memory": 1}


def test_a_lookup_for_a_device_asks_for_all_other_architectures_at_once(fleet: Fleet) -> None:
    assert isinstance(fleet.machine(1).lookup(PLAIN, "sm_89"), Miss)
    assert fleet.engine.calls == {"read": 1, "existing": 1}


def test_an_entry_of_another_architecture_on_the_store_is_found(fleet: Fleet) -> None:
    fleet.machine(1).build(PLAIN, "sm_80")
    fleet.opened[0].cache.close()
    found = fleet.machine(2).lookup(PLAIN, "sm_89")
    assert found.artifact is not None
    assert found.artifact.arch.name == "sm_80"


def test_without_a_disk_the_store_still_serves(fleet: Fleet) -> None:
    fleet.machine(1, cache=False).build(PLAIN, "sm_90")
    fleet.opened[0].cache.close()
    second = fleet.machine(2, cache=False)
    second.build(PLAIN, "sm_90")
    assert tiers(second) == {"remote": 1}


def test_code_that_a_device_refuses_is_compiled_again_and_replaced_on_the_store(fleet: Fleet) -> None:
    first = fleet.machine(1)
    artifact = first.build(PLAIN, "sm_90")
    first.cache.close()
    name = entry_name(artifact.digest)
    fleet.recorder.forgive = True
    again = first.rebuild(PLAIN, "sm_90", reason="illegal instruction")
    first.cache.close()
    assert again.cubin == artifact.cubin
    assert name in fleet.engine.objects
    assert fleet.engine.calls["write"] == 2
    assert fleet.engine.calls["delete"] == 0


# Lists of header states


def test_a_program_with_headers_is_found_on_another_machine(fleet: Fleet, tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    write_header(here, 2)
    write_header(there, 2)
    fleet.machine(1).build(including(here), "sm_90")
    fleet.opened[0].cache.close()
    assert sum(map(is_header_list, fleet.entries().values())) == 1
    second = fleet.machine(2)
    second.build(including(there), "sm_90")
    assert tiers(second) == {"remote": 1}


def test_states_of_two_machines_are_merged_on_the_store_and_lost_on_neither(
    fleet: Fleet, tmp_path: Path
) -> None:
    place = tmp_path / "include"
    for number, scale in ((1, 2), (2, 3)):
        write_header(place, scale)
        machine = fleet.machine(number)
        machine.build(including(place), "sm_90")
        machine.cache.close()
        assert tiers(machine) == {"compiles": 1}
    states = [
        decode_states(codec.unpack_checked(blob).meta)
        for blob in fleet.entries().values()
        if is_header_list(blob)
    ]
    assert [len(each) for each in states] == [2]
    # The second machine has its own state on the disk, and takes that of the first from the store.
    machine = fleet.machine(2)
    write_header(place, 2)
    machine.build(including(place), "sm_90")
    assert tiers(machine) == {"remote": 1}
    # Both are now on its disk, which needs the store no more.
    fleet.engine.calls.clear()
    for scale in (2, 3):
        write_header(place, scale)
        alone = fleet.machine(2, remote=())
        alone.build(including(place), "sm_90")
        assert tiers(alone) == {"disk": 1}
    assert not fleet.engine.calls


def test_a_state_that_the_store_has_already_is_not_written_again(fleet: Fleet, tmp_path: Path) -> None:
    place = tmp_path / "include"
    write_header(place, 2)
    first = fleet.machine(1)
    artifact = first.build(including(place), "sm_90")
    first.cache.close()
    (listing,) = (digest for digest, blob in fleet.entries().items() if is_header_list(blob))
    fleet.engine.calls.clear()
    first.cache.put(listing, fleet.entries()[listing])
    first.cache.close()
    assert fleet.engine.calls == {"read": 1}
    assert artifact.digest in fleet.entries()


def test_merging_keeps_all_of_the_own_states_and_the_newest_of_the_others(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lists = []
    place = tmp_path / "include"
    for number in (1, 2):
        machine = fleet.machine(number, remote=())
        for scale in (3 * number, 3 * number + 1, 3 * number + 2):
            write_header(place, scale)
            machine.build(including(place), "sm_90")
        digest = machine.key(including(place), "sm_90").digest
        found = machine.cache.get(digest)
        assert found is not None
        lists.append(found.blob)
    mine, theirs = lists
    monkeypatch.setattr("preheat.toolchain.headers.states._MAX_STATES", 5)

    def entries(blob: bytes) -> list[str]:
        return [entry for _, entry in decode_states(codec.unpack_checked(blob).meta)]

    merged = HeaderLists().merge(digest, mine, theirs)
    assert codec.damage(digest, merged) is None
    assert entries(merged) == entries(theirs)[1:] + entries(mine)
    assert HeaderLists().merge(digest, merged, mine) is merged
    assert HeaderLists().merge(digest, merged, theirs) is merged  # There is no room for the other one.


def test_a_sealed_process_names_a_store_that_could_not_be_asked(fleet: Fleet) -> None:
    def refuse(*_: str) -> None:
        raise RemoteError("connection refused", retryable=True)

    builder = fleet.machine(1, sealed=SealMode.ERROR)
    with pytest.raises(SealedError, match="process: nothing is stored under this key\n"):
        builder.build(PLAIN, "sm_90")
    fleet.engine.before = refuse
    fleet.recorder.forgive = True
    with pytest.raises(SealedError, match="this key; the shared store remote could not be used\n"):
        builder.build(PLAIN, "sm_90")
    with pytest.raises(SealedError, match="in no cache; the shared store remote could not be used\n"):
        builder.foreign.obtain(ForeignRequest("mylib", "key"), dict)


# Foreign entries, bakes and checks


def test_entries_of_other_libraries_are_shared(fleet: Fleet) -> None:
    entry = ForeignEntry("mylib", "key", {"file": b"content"})
    first = fleet.machine(1)
    first.foreign.put(entry)
    first.cache.close()
    assert fleet.machine(2).foreign.get(ForeignRequest("mylib", "key")) == entry


ARCHS = ("sm_80", "sm_90")


def manifest_of(place: Path, programs: int) -> Path:
    place.mkdir(exist_ok=True)
    text = "version = 1\n"
    for number in range(programs):
        source = f'extern "C" __global__ void k{number}(int* x) {{ *x = {number}; }}\n'
        (place / f"k{number}.cu").write_text(source)
        text += f'\n[[program]]\nfile = "k{number}.cu"\n'
    (place / "kernels.toml").write_text(text)
    return place / "kernels.toml"


def test_a_check_of_many_programs_makes_one_request(fleet: Fleet, tmp_path: Path) -> None:
    checked = check(manifest_of(tmp_path / "m", 5), ARCHS, builder=fleet.machine(1))
    assert len(checked.missing) == 10
    assert fleet.engine.calls == {"existing": 1}


def test_a_check_says_that_a_store_could_not_be_asked(fleet: Fleet, tmp_path: Path) -> None:
    fleet.recorder.forgive = True

    def fail(*_: object) -> None:
        raise RemoteError("the server did not answer in time")

    fleet.engine.before = fail
    checked = check(manifest_of(tmp_path / "m", 5), ARCHS, builder=fleet.machine(1))
    assert checked.unasked == len(checked.missing) == 10
    assert "could not be used" in checked.missing[0].reason
    fleet.engine.before = None
    assert check(manifest_of(tmp_path / "m", 5), ARCHS, builder=fleet.machine(2)).unasked == 0


def test_a_bake_asks_once_for_what_is_missing_and_fills_the_store(fleet: Fleet, tmp_path: Path) -> None:
    manifest = manifest_of(tmp_path / "m", 4)
    assert bake(manifest, ARCHS, builder=fleet.machine(1)).ok
    leases = {"create": 8, "read": 8, "discard": 8}
    assert fleet.engine.calls == {"existing": 2, "write": 8, **leases}
    fleet.engine.calls.clear()
    second = fleet.machine(2)
    assert {row.source for row in bake(manifest, ARCHS, builder=second).rows} == {"remote"}
    assert fleet.engine.calls == {"existing": 2, "read": 8}
    assert check(manifest, ARCHS, builder=fleet.machine(3)).ok
    assert fleet.engine.calls == {"existing": 3, "read": 16}


def test_a_bake_writes_what_the_cache_has_and_the_store_lacks(fleet: Fleet, tmp_path: Path) -> None:
    manifest = manifest_of(tmp_path / "m", 3)
    bake(manifest, ARCHS, builder=fleet.machine(1, remote=()))
    baked = bake(manifest, ARCHS, builder=fleet.machine(1))
    assert {row.source for row in baked.rows} == {"disk"}
    assert baked.stores == (UploadResult("remote", present=0, written=6, missing=0, reason=""),)
    assert fleet.engine.calls == {"existing": 1, "write": 6}
    again = bake(manifest, ARCHS, builder=fleet.machine(1))
    assert again.stores == (UploadResult("remote", present=6, written=0, missing=0, reason=""),)
    assert {row.source for row in bake(manifest, ARCHS, builder=fleet.machine(2)).rows} == {"remote"}


def test_a_bake_writes_the_header_states_that_the_store_lacks(fleet: Fleet, tmp_path: Path) -> None:
    manifest = manifest_of(tmp_path / "m", 1)
    (tmp_path / "m" / "k0.cu").write_text('#include "by.h"\n__global__ void k(int* x) { *x = BY; }')
    header = tmp_path / "m" / "by.h"
    for number, text in ((1, "#define BY 1"), (2, "#define BY 2")):
        header.write_text(text)
        bake(manifest, "sm_90", builder=fleet.machine(number, remote=()))
        assert bake(manifest, "sm_90", builder=fleet.machine(number)).stores[0].written == 1
    (states,) = [
        decode_states(codec.unpack_checked(blob).meta)
        for blob in fleet.entries().values()
        if is_header_list(blob)
    ]
    assert len(states) == 2
    # The code is there, and a writer of the list has lost the second state.
    (name,) = [name for name, blob in fleet.entries().items() if is_header_list(blob)]
    fleet.engine.put(entry_name(name), envelope.wrap(name, pack_states(name, "", states[:1]), None))
    assert bake(manifest, "sm_90", builder=fleet.machine(2)).stores[0].present == 1
    assert bake(manifest, "sm_90", builder=fleet.machine(3)).rows[0].source == "remote"


def test_a_bake_says_what_a_store_refuses_to_take(fleet: Fleet, tmp_path: Path) -> None:
    fleet.recorder.forgive = True
    manifest = manifest_of(tmp_path / "m", 2)
    bake(manifest, ARCHS, builder=fleet.machine(1, remote=()))

    def refuse(verb: str, *_: object) -> None:
        if verb == "write":
            raise RemoteError("the server is full", retryable=False)

    fleet.engine.before = refuse
    baked = bake(manifest, ARCHS, builder=fleet.machine(1))
    assert baked.ok
    (store,) = baked.stores
    assert (store.present, store.written, store.missing) == (0, 0, 4)
    assert store.reason == "the server is full"
    assert len(fleet.recorder.named("fault")) == 1
    assert len(fleet.recorder.named("dropped")) == 4


def test_a_bake_fills_no_store_that_it_may_not_write_to(fleet: Fleet, tmp_path: Path) -> None:
    manifest = manifest_of(tmp_path / "m", 1)
    key = SigningKey.new()
    (tmp_path / "trusted").write_text(key.public.pem())
    reader = {"remote_unsigned": False, "trusted_keys": (tmp_path / "trusted",)}
    assert bake(manifest, "sm_90", builder=fleet.machine(1, **reader)).stores == ()
    assert not fleet.entries()


def test_a_bake_in_other_processes_fills_the_store_from_their_answers(
    fleet: Fleet, tmp_path: Path
) -> None:
    manifest = manifest_of(tmp_path / "m", 2)
    without = fleet.config(5, remote=())
    with ThreadPoolExecutor(2) as executor:
        baked = bake(manifest, "sm_90", builder=fleet.machine(1), executor=executor, config=without)
    assert baked.stores == (UploadResult("remote", present=0, written=2, missing=0, reason=""),)
    assert bake(manifest, "sm_90", builder=fleet.machine(2)).rows[0].source == "remote"


def test_processes_of_adapters_use_the_store_of_their_builder(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREHEAT_REMOTE", OPEN)
    monkeypatch.setenv("PREHEAT_RECORD", "kernels.toml")
    for settings, expected in (({}, OPEN), ({"remote": ()}, None)):
        with closing(AdapterProcesses(fleet.machine(1, **settings))) as processes:
            env = processes._environment({})
        assert env.get("PREHEAT_REMOTE") == expected
        assert "PREHEAT_RECORD" not in env


# Settings


@pytest.fixture
def settings(config: Config) -> Config:
    return replace(config, remote=(OPEN,))


def test_a_network_store_without_keys_is_refused_with_a_hint(
    settings: Config, open_builder: Callable[..., Builder], recorder: Recorder
) -> None:
    recorder.forgive = True
    builder = open_builder(settings)
    (event,) = recorder.named("refused")
    assert event["path"] == OPEN
    assert "PREHEAT_TRUSTED_KEYS" in event["reason"]
    assert "PREHEAT_REMOTE_UNSIGNED=1" in event["reason"]
    assert not builder.cache.shared


def test_a_key_file_that_is_missing_refuses_the_store(
    settings: Config, open_builder: Callable[..., Builder], recorder: Recorder, tmp_path: Path
) -> None:
    recorder.forgive = True
    assert not open_builder(replace(settings, signing_key=tmp_path / "none")).cache.shared
    assert "none" in recorder.named("refused")[0]["reason"]


def test_a_missing_package_refuses_the_store(
    settings: Config,
    open_builder: Callable[..., Builder],
    recorder: Recorder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorder.forgive = True
    monkeypatch.setattr("preheat.store.remote.engine.find_spec", lambda _: None)
    settings = replace(settings, remote=("s3://bucket/kernels",), remote_unsigned=True)
    assert not open_builder(settings).cache.shared
    assert "pip install 'preheat[remote]'" in recorder.named("refused")[0]["reason"]


@pytest.mark.parametrize("url", ["ftp://host/kernels", "s3://", "redis://host:port/0"])
def test_a_malformed_url_is_an_error(settings: Config, url: str) -> None:
    with pytest.raises(ConfigError, match="PREHEAT_REMOTE"):
        Builder.open(replace(settings, remote=(url,)), events=Events())


@pytest.mark.parametrize("text", ["bucket/kernels", "s3://bucket redis"])
def test_what_is_no_url_is_an_error_without_the_password(text: str) -> None:
    with pytest.raises(ConfigError, match="PREHEAT_REMOTE") as raised:
        Config.from_env({"PREHEAT_REMOTE": f"redis://:secret@host/0 {text}"})
    assert "secret" not in str(raised.value)


def test_several_stores_have_names_of_their_own(
    settings: Config, open_builder: Callable[..., Builder]
) -> None:
    two = ("redis://127.0.0.1:1/0", "redis://127.0.0.1:1/1")
    builder = open_builder(replace(settings, remote=two, remote_unsigned=True))
    assert [tier.name for tier in builder.cache.tiers] == ["memory", "disk", "remote", "remote.2"]


def test_signed_entries_need_the_keys_of_both_sides(fleet: Fleet, tmp_path: Path) -> None:
    signing, trusted, other = (tmp_path / name for name in ("signing", "trusted", "other"))
    key = SigningKey.new()
    key.save(signing)
    trusted.write_text(key.public.pem())
    other.write_text(SigningKey.new().public.pem())
    for file in (trusted, other):
        file.chmod(0o600)
    writer = fleet.machine(1, remote_unsigned=False, signing_key=signing)
    writer.build(PLAIN, "sm_90")
    writer.cache.close()
    reader = fleet.machine(2, remote_unsigned=False, trusted_keys=(trusted,))
    reader.build(PLAIN, "sm_90")
    reader.build(PLAIN, "sm_80")
    reader.cache.close()
    assert tiers(reader) == {"remote": 1, "compiles": 1}
    assert fleet.engine.calls["write"] == 1  # A process without a key to sign only reads.
    fleet.recorder.forgive = True
    stranger = fleet.machine(3, remote_unsigned=False, trusted_keys=(other,))
    stranger.build(PLAIN, "sm_90")
    assert tiers(stranger) == {"compiles": 1}
    assert len(fleet.recorder.named("untrusted")) == 1


def test_a_process_that_accepts_unsigned_entries_signs_none(fleet: Fleet, tmp_path: Path) -> None:
    SigningKey.new().save(tmp_path / "signing")
    place = tmp_path / "include"
    write_header(place, 2)
    stranger = fleet.machine(1)
    stranger.build(including(place), "sm_90")
    stranger.cache.close()
    writer = fleet.machine(2, signing_key=tmp_path / "signing")
    write_header(place, 3)
    writer.build(including(place), "sm_90")  # Its header list is merged with that of the stranger.
    writer.build(PLAIN, "sm_90")
    writer.cache.close()
    assert len(fleet.engine.objects) == 4
    assert {envelope.key_id(data) for data in fleet.engine.objects.values()} == {None}


def test_a_directory_needs_no_keys_while_only_this_user_can_write_it(
    config: Config, open_builder: Callable[..., Builder], recorder: Recorder, tmp_path: Path
) -> None:
    place = tmp_path / "shared"
    first = open_builder(replace(config, remote=(f"file://{place}",)))
    first.build(PLAIN, "sm_90")
    first.close()
    assert len(list(place.glob("v1/??/*"))) == 1
    os.chmod(place, 0o777)
    recorder.forgive = True
    moved = replace(config, remote=(f"file://{place}",), cache_dirs=(tmp_path / "cache-2",))
    second = open_builder(moved)
    second.build(PLAIN, "sm_90")
    second.close()
    assert tiers(second)["compiles"] == 2  # Both builders count into one set of events.
    assert "PREHEAT_TRUSTED_KEYS" in recorder.named("fault")[0]["error"]


@pytest.mark.parametrize("changed", ["v1/??/*", "v1/??", "v1"])
def test_what_others_could_write_in_a_directory_without_keys_is_not_used(
    config: Config,
    open_builder: Callable[..., Builder],
    recorder: Recorder,
    tmp_path: Path,
    changed: str,
) -> None:
    place = tmp_path / "shared"
    settings = replace(config, remote=(f"file://{place}",))
    umask = os.umask(0)
    try:
        first = open_builder(settings)
        first.build(PLAIN, "sm_90")
        first.close()
    finally:
        os.umask(umask)
    found = [place, *place.rglob("*")]
    assert not [path for path in found if path.stat().st_mode & 0o077]
    os.chmod(next(place.glob(changed)), 0o777)
    recorder.forgive = True
    second = open_builder(replace(settings, cache_dirs=(tmp_path / "cache-2",)))
    second.build(PLAIN, "sm_90")
    assert tiers(second)["compiles"] == 2
    assert "others can write to it" in recorder.named("fault")[0]["error"]


LAZY = """
import sys, preheat
from preheat.build.builder import Builder
from preheat.build.remotes import open_leases
builder = Builder.open()
names = [tier.name for tier in builder.cache.shared]
print(names, {"opendal", "redis", "cryptography", "zstandard"} & set(sys.modules))
"""


def test_opening_a_builder_imports_no_client(tmp_path: Path) -> None:
    env = {"PREHEAT_REMOTE": "s3://bucket/kernels", "PREHEAT_REMOTE_UNSIGNED": "1"}
    process = start_python(LAZY, env={**env, "PREHEAT_CACHE_DIR": str(tmp_path / "cache")})
    assert expect_success(process).split() == ["['remote']", "set()"]


# Where leases are


@pytest.mark.parametrize(
    ("urls", "tier"),
    [
        ("http://127.0.0.1:1/a redis://127.0.0.1:1/0", "remote.2"),
        ("dav://127.0.0.1:1/a s3://bucket", "remote.2"),
        ("redis://127.0.0.1:1/0 s3://bucket", "remote"),
        ("http://127.0.0.1:1/a dav://127.0.0.1:1/b", "remote.2"),
        ("http://127.0.0.1:1/a", None),
    ],
)
def test_leases_are_on_the_first_store_that_can_be_written_and_hold_them(
    urls: str, tier: str | None, events: Events
) -> None:
    config = Config(cache_dirs=(), lock_dir=Path(), remote=tuple(urls.split()), remote_unsigned=True)
    leases = open_leases(Chain([], events, shared=remotes.open_remotes(config, events)), events)
    assert (None if leases is None else leases.server.name) == tier


def test_a_store_on_a_web_server_is_not_written(tmp_path: Path, events: Events) -> None:
    url = "http://127.0.0.1:1/kernels"
    key = SigningKey.new()
    key.save(tmp_path / "key")
    config = Config(cache_dirs=(), lock_dir=Path(), remote=(url,), signing_key=tmp_path / "key")
    (tier,) = remotes.open_remotes(config, events)
    assert not tier.writable
    with pytest.raises(InputError, match="is read-only"):
        open_store(url, config, write=True)
