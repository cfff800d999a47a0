"""Nodes that share a cache directory on a network filesystem, which a local directory stands in for."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from preheat.build import opening
from preheat.build.builder import Builder
from preheat.build.opening import open_disk
from preheat.build.remotes import open_directory_leases
from preheat.model.config import Config, node_local_lock_dirs
from preheat.model.events import Events
from preheat.model.foreign import ForeignRequest
from preheat.store import DiskStore, filesystem
from preheat.store.filesystem import Mount
from preheat.store.remote.lease_request import LeaseRequest
from tests.conftest import Recorder
from tests.processes import expect_success, kill, read_line, start_process, write_line
from tests.store.entries import blob_of, digest_of

NODES = 3
KEYS = 4


@pytest.fixture
def network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory that counts as one on NFS, with everything below it."""
    place = tmp_path / "nfs"
    place.mkdir(mode=0o700)
    mounts = [Mount((0, 1), "/", "ext4"), Mount((0, 2), str(place), "nfs4")]
    monkeypatch.setattr(opening, "read_mounts", lambda: mounts)
    monkeypatch.setattr(filesystem, "read_mounts", lambda: mounts)
    return place


@pytest.fixture
def local_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the directory of this node where locks go that may not go elsewhere."""
    place = tmp_path / "shm" / "locks"
    monkeypatch.setattr(opening, "node_local_lock_dirs", lambda: [place])
    return place


def test_a_cache_on_a_network_filesystem_has_its_locks_on_the_node(
    network: Path, tmp_path: Path, events: Events
) -> None:
    config = Config(cache_dirs=(network / "cache",), lock_dir=tmp_path / "locks")
    disk = open_disk(config, events)
    assert disk is not None
    assert disk.shared
    assert disk.lock_dir == tmp_path / "locks"


def test_a_lock_directory_on_a_network_filesystem_is_refused_with_the_reason(
    network: Path, local_locks: Path, events: Events, recorder: Recorder
) -> None:
    recorder.forgive = True
    config = Config(cache_dirs=(network / "cache",), lock_dir=network / "locks")
    disk = open_disk(config, events)
    assert disk is not None
    assert disk.lock_dir == local_locks
    assert [row["path"] for row in recorder.named("refused")] == [
        str(network / "locks"),
        str(network / "cache" / "locks"),
    ]
    assert {row["reason"] for row in recorder.named("refused")} == {
        "it is on nfs4, which other nodes share; locks must be local to this node"
    }
    assert not (network / "locks").exists()


@pytest.mark.usefixtures("local_locks")
def test_the_locks_of_a_local_cache_do_not_go_to_a_network_filesystem(
    network: Path, tmp_path: Path, events: Events, recorder: Recorder
) -> None:
    recorder.forgive = True
    disk = open_disk(Config(cache_dirs=(tmp_path / "c",), lock_dir=network / "locks"), events)
    assert disk is not None
    assert disk.lock_dir == tmp_path / "c" / "locks"
    assert not disk.shared


def test_the_default_lock_directory_is_on_the_node() -> None:
    directories = node_local_lock_dirs()
    assert Config.from_env({}).lock_dir == directories[0]
    assert directories[-1] == Path(f"/tmp/preheat-{os.getuid()}/locks")


def test_only_a_shared_directory_has_leases(network: Path, tmp_path: Path) -> None:
    local = Config(cache_dirs=(tmp_path / "cache",), lock_dir=tmp_path / "locks")
    shared = replace(local, cache_dirs=(network / "cache",))
    assert Builder.open(local)._locks._leases is None
    assert Builder.open(shared)._locks._leases is not None


def test_a_builder_without_leases_does_not_import_them(tmp_path: Path) -> None:
    code = (
        "import sys, preheat.build.builder as b; b.Builder.open(); print('links' in str(sys.modules))"
    )
    env = {"PREHEAT_CACHE_DIR": str(tmp_path / "cache"), "PREHEAT_LOCK_DIR": str(tmp_path / "locks")}
    assert expect_success(start_process([sys.executable, "-c", code], env=env)) == "False\n"


_NODE = """
import sys, time
from preheat.build import builder, opening
from preheat.store.filesystem import Filesystem
from preheat.store.remote import lease
from preheat.model.foreign import ForeignRequest

opening.filesystem_of = lambda path, *_: Filesystem("nfs4" if path.name == "cache" else "ext4")
lease.LEASE_SECONDS = 1.5
node = builder.Builder.open()
assert node.disk.shared
print("ready", flush=True)
for line in iter(sys.stdin.readline, ""):
    key, seconds = line.split()

    def make():
        print("makes", key, flush=True)
        time.sleep(float(seconds))
        return {"file": key.encode()}

    entry = node.foreign.obtain(ForeignRequest("test", key), make)
    print("has", entry.files["file"].decode(), flush=True)
"""


@pytest.fixture
def nodes(tmp_path: Path) -> list[subprocess.Popen[str]]:
    """Start a process on each of several nodes, which have the cache in common, and no lock."""
    started = []
    for number in range(NODES):
        env = {
            "PREHEAT_CACHE_DIR": str(tmp_path / "cache"),
            "PREHEAT_LOCK_DIR": str(tmp_path / f"node{number}" / "locks"),
        }
        started.append(start_process([sys.executable, "-c", _NODE], env=env))
    assert {read_line(node) for node in started} == {"ready"}
    return started


def answers(node: subprocess.Popen[str]) -> list[str]:
    """Return what a node prints until it has its entry."""
    lines = [read_line(node)]
    while not lines[-1].startswith("has"):
        lines.append(read_line(node))
    return lines


def test_nodes_that_share_a_directory_make_each_entry_once(
    nodes: list[subprocess.Popen[str]], tmp_path: Path
) -> None:
    for key in range(KEYS):
        for node in nodes:
            write_line(node, f"{key} 0.05")
        said = [answers(node) for node in nodes]
        assert sum(lines[0] == f"makes {key}" for lines in said) == 1, said
        assert {lines[-1] for lines in said} == {f"has {key}"}
    assert os.listdir(tmp_path / "cache" / "v1" / "leases") == []


def test_another_node_takes_over_when_the_holder_is_killed(
    nodes: list[subprocess.Popen[str]],
) -> None:
    write_line(nodes[0], "key 600")
    assert read_line(nodes[0]) == "makes key"
    for node in nodes[1:]:
        write_line(node, "key 0.05")
    kill(nodes[0])
    said = [answers(node) for node in nodes[1:]]
    assert sum(lines[0] == "makes key" for lines in said) == 1, said
    assert {lines[-1] for lines in said} == {"has key"}


def test_a_directory_without_links_costs_no_compile(
    network: Path, tmp_path: Path, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    config = Config(cache_dirs=(network / "cache",), lock_dir=tmp_path / "locks")
    builder = Builder.open(config, events=events)
    for key in ("one", "two"):
        entry = builder.foreign.obtain(ForeignRequest("test", key), lambda: {"file": b"made"})
        assert entry.files == {"file": b"made"}


def test_a_directory_that_cannot_hold_leases_costs_no_compile(
    network: Path, tmp_path: Path, events: Events, recorder: Recorder
) -> None:
    recorder.forgive = True
    (network / "cache" / "v1").mkdir(parents=True, mode=0o700)
    (network / "cache" / "v1" / "leases").write_text("not a directory")
    config = Config(cache_dirs=(network / "cache",), lock_dir=tmp_path / "locks")
    builder = Builder.open(config, events=events)
    for key in ("one", "two"):
        entry = builder.foreign.obtain(ForeignRequest("test", key), lambda: {"file": b"made"})
        assert entry.files == {"file": b"made"}
    assert len(recorder.named("fault")) == 1
    assert recorder.named("fault")[0]["where"] == "lease"


def test_a_node_whose_clock_is_ahead_leaves_the_leases_of_other_nodes(
    network: Path, tmp_path: Path
) -> None:
    place = network / "cache"
    one = DiskStore(place, Events(), lock_dir=tmp_path / "locks", shared=True)
    two = DiskStore(
        place, Events(), lock_dir=tmp_path / "locks", shared=True, clock=lambda: time.time() + 7200
    )
    request: LeaseRequest[str] = LeaseRequest(
        open_directory_leases(one, Events()), digest_of(1), lambda: None, limit=60
    )
    assert request.poll() is None
    assert request.lease is not None
    lease = place / "v1" / "leases" / digest_of(1)
    two.put(digest_of(2), blob_of(2))
    two.sweep()
    assert lease.stat().st_mode & 0o777 == 0o600
    request.close()


def test_a_full_directory_forms_no_queue(network: Path, tmp_path: Path) -> None:
    disk = DiskStore(network / "cache", Events(), lock_dir=tmp_path / "locks", shared=True)
    leases = open_directory_leases(disk, Events())
    for number, outcome in ((1, True), (2, False)):
        request: LeaseRequest[str] = LeaseRequest(leases, digest_of(number), lambda: None, limit=60)
        assert request.poll() is None
        assert request.lease is not None
        if number == 2:
            disk.put(digest_of(2), blob_of(2))
        request.lease.release()
        assert (network / "cache" / "v1" / "leases" / digest_of(number)).exists() == outcome


def test_leases_that_nobody_renews_are_removed_after_an_hour(network: Path, tmp_path: Path) -> None:
    disk = DiskStore(network / "cache", Events(), lock_dir=tmp_path / "locks", shared=True)
    disk.put(digest_of(1), blob_of(1))
    leases = network / "cache" / "v1" / "leases"
    leases.mkdir()
    for name, age in (("held", 10), ("left", 4000)):
        (leases / name).write_text(name)
        os.utime(leases / name, (time.time() - age,) * 2)
    disk.sweep()
    assert os.listdir(leases) == ["held"]
    assert [item.digest for item in disk.items()] == [digest_of(1)]
