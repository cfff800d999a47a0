"""Attacks of another user of the machine on the cache: files of that user are refused."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from preheat.build.bundles import MountedBundles
from preheat.errors import BundleError
from preheat.model.events import Events
from preheat.store import Chain, LayerStore
from preheat.store.bundle import write
from preheat.store.disk import DiskStore
from tests import processes
from tests.conftest import Recorder
from tests.store.entries import blob_of, digest_of
from tests.store.support import needs_root
from tests.torture.conftest import Campaign
from tests.torture.hangs import no_hang as no_hang
from tests.torture.strangers import ATTACKER, VICTIM, act, play, public_place, start_as

pytestmark = [needs_root, pytest.mark.usefixtures("no_hang")]
KEY = digest_of(1)
BLOB = blob_of(1)

#: What an attacker can have in the place of the victim's directory `preheat-<uid>`.
SQUATS = {
    "a directory that all can write": "os.mkdir(mine, 0o777)",
    "a directory that he alone can write": "os.mkdir(mine, 0o755)",
    "a directory with a sticky bit": "os.mkdir(mine, 0o777); os.chmod(mine, 0o1777)",
    "a directory with all in it": "os.makedirs(mine / 'cache'); os.mkdir(mine / 'locks', 0o777)",
    "a link to a directory of his": "os.mkdir(mine.parent / 'his', 0o777); os.symlink('his', mine)",
    "a link to a directory of the victim": "os.symlink(mine.parent / 'vault', mine)",
    "a link that leads nowhere": "os.symlink(mine.parent / 'nowhere', mine)",
    "a file": "open(mine, 'w').close()",
    "a pipe": "os.mkfifo(mine, 0o666)",
}
LOOK = """
said = []
for number in range(int(sys.argv[3])):
    there = place / str(number)
    seen = []
    events = Events(lambda name, fields: seen.append([name, fields["path"], fields["reason"]]))
    temporary = Config.from_env({"TMPDIR": str(there), "PREHEAT_LOCK_DIR": str(there / "vlocks")})
    disk = open_disk(temporary, events)
    refused, seen[:] = list(seen), []
    home = {"PREHEAT_CACHE_DIR": str(place / "home" / str(number) / "cache")}
    home["PREHEAT_LOCK_DIR"] = str(there / f"preheat-{os.getuid()}" / "locks")
    mine = open_disk(Config.from_env(home), events)
    locks = str(mine.lock_dir.relative_to(mine.root))
    said.append([disk and str(disk.root), refused, locks, list(seen)])
print(json.dumps(said))
"""


def test_directories_that_another_user_prepared_are_not_used() -> None:
    """In a temporary directory for the cache, and in shared memory for the locks."""
    with public_place() as place:
        for number, squat in enumerate(SQUATS.values()):
            there = place / str(number)
            there.mkdir()
            there.chmod(0o1777)
            act(VICTIM, there, "os.mkdir(place / 'vault', 0o700)")
            act(ATTACKER, there, f"mine = place / 'preheat-{VICTIM}'; {squat}")
        (place / "home").mkdir(mode=0o700)
        os.chown(place / "home", VICTIM, VICTIM)
        said = json.loads(play(VICTIM, place, LOOK, str(len(SQUATS))))
        for number, (what, (root, refused, locks, passed)) in enumerate(zip(SQUATS, said, strict=True)):
            assert root is None, what
            assert [name for name, *_ in refused] == ["refused"], what
            assert locks == "locks", what
            assert [name for name, *_ in passed] == ["refused"], what
            made = {path.name for path in (place / str(number)).rglob("*")}
            assert made - {"cache", "locks"} <= {f"preheat-{VICTIM}", "vault", "his", "vlocks"}, what
            assert list((place / str(number) / "vault").iterdir()) == [], what


def test_a_lock_directory_that_vanished_and_was_taken_by_another_user_is_not_waited_for() -> None:
    code = """
seen = []
events = Events(lambda name, fields: seen.append(name))
locks = place / "shm" / "v" / "locks"
env = {"PREHEAT_CACHE_DIR": str(place / "home" / "cache"), "PREHEAT_LOCK_DIR": str(locks)}
disk = open_disk(Config.from_env(env), events)
assert seen == [] and disk.lock_dir == locks
shutil.rmtree(place / "shm" / "v")
print("gone", flush=True)
sys.stdin.readline()
from preheat.store.trust import make_private
try:
    make_private(disk.lock_dir)
except PermissionError as refused:
    print("refused" if "belongs to user" in str(refused) else refused)
"""
    with public_place() as place:
        (place / "home").mkdir(mode=0o700)
        os.chown(place / "home", VICTIM, VICTIM)
        (place / "shm").mkdir()
        (place / "shm").chmod(0o1777)
        victim = start_as(VICTIM, place, code)
        assert processes.read_line(victim) == "gone"
        act(ATTACKER, place, "os.makedirs(place / 'shm' / 'v' / 'locks')")
        out, err = processes.wait_for_exit(victim, "\n")
        assert (out, err) == ("refused\n", "")


# Layers


@pytest.fixture
def layer() -> Iterator[Path]:
    """Return a layer that root owns, with one entry."""
    with public_place() as place:
        place.chmod(0o755)
        disk = DiskStore(place / "layer", Events(), lock_dir=place / "locks")
        disk.put(KEY, BLOB)
        for path in (disk.root, *disk.root.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        yield disk.root


def _shard(layer: Path) -> Path:
    return layer / "v1" / KEY[:2]


def _entry(layer: Path) -> Path:
    return _shard(layer) / f"{KEY}.heat"


def _by_link(layer: Path) -> None:
    _shard(layer).rename(layer / "elsewhere")
    _shard(layer).symlink_to(layer / "elsewhere")


def _pipe(layer: Path) -> None:
    _entry(layer).unlink()
    os.mkfifo(_entry(layer))


FOREIGN: dict[str, Callable[[Path], object]] = {
    "an entry of another owner": lambda layer: os.chown(_entry(layer), ATTACKER, 0),
    "an entry that a group can write": lambda layer: _entry(layer).chmod(0o664),
    "an entry that all can write": lambda layer: _entry(layer).chmod(0o646),
    "a shard of another owner": lambda layer: os.chown(_shard(layer), ATTACKER, 0),
    "a shard that all can write": lambda layer: _shard(layer).chmod(0o777),
    "a shard with a sticky bit": lambda layer: _shard(layer).chmod(0o1777),
    "a version of another owner": lambda layer: os.chown(layer / "v1", ATTACKER, 0),
    "a version that all can write": lambda layer: (layer / "v1").chmod(0o777),
}


@pytest.mark.parametrize("spoil", FOREIGN.values(), ids=FOREIGN.keys())
def test_an_entry_of_a_layer_that_another_user_may_have_written_is_not_loaded(
    layer: Path, events: Events, recorder: Recorder, spoil: Callable[[Path], object]
) -> None:
    recorder.forgive = True
    assert Chain([LayerStore(layer)], events).get(KEY) == (BLOB, "layer")
    spoil(layer)
    assert Chain([LayerStore(layer)], events).get(KEY) is None
    assert [event["path"] for event in recorder.named("refused")] == [str(_entry(layer))]
    assert LayerStore(layer, trust=True).get(KEY) == BLOB


@pytest.mark.parametrize("spoil", [_by_link, _pipe])
def test_links_and_pipes_in_a_layer_are_faults(
    layer: Path, events: Events, recorder: Recorder, spoil: Callable[[Path], object]
) -> None:
    recorder.forgive = True
    spoil(layer)
    assert Chain([LayerStore(layer)], events).get(KEY) is None
    assert len(recorder.named("fault")) == 1


def test_an_entry_that_changed_hands_under_a_running_process_is_not_loaded(
    layer: Path, events: Events, recorder: Recorder
) -> None:
    recorder.forgive = True
    chain = Chain([LayerStore(layer)], events)
    assert chain.get(KEY) == (BLOB, "layer")
    os.chown(_entry(layer), ATTACKER, 0)
    assert chain.get(KEY) is None


# Bundles

SWAP = """
import ctypes, os, sys, time
os.setgroups([]); os.setgid(int(sys.argv[1])); os.setuid(int(sys.argv[1]))
libc = ctypes.CDLL(None)
print("swapping", flush=True)
while True:
    libc.renameat2(-100, sys.argv[2].encode(), -100, sys.argv[3].encode(), 2)
"""


@pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "renameat2"), reason="needs renameat2"
)
def test_a_bundle_that_another_user_swaps_is_never_mounted(campaign: Campaign) -> None:
    """The other user owns the directory and decides which file it contains."""
    good, evil = {KEY: BLOB}, {digest_of(2): blob_of(2)}
    with public_place() as place:
        his = place / "his"
        his.mkdir(mode=0o755)
        write(his / "app.heat", good, {})
        write(his / "other", evil, {})
        os.chown(his, ATTACKER, ATTACKER)
        os.chown(his / "other", ATTACKER, ATTACKER)
        command = [sys.executable, "-c", SWAP, str(ATTACKER), str(his / "app.heat"), str(his / "other")]
        swapper = processes.start_process(command)
        assert processes.read_line(swapper) == "swapping"
        for _ in range(campaign.rounds(quick=2_000, long=100_000)):
            with pytest.raises(BundleError, match=r"cannot be (trusted|read)"):
                MountedBundles(Events(), trust=False).mount(his / "app.heat")
        assert len(MountedBundles(Events(), trust=True).mount(his / "app.heat")) == 1
        processes.kill(swapper)


def test_a_bundle_in_a_place_like_tmp_is_mounted_if_this_user_owns_it() -> None:
    with public_place() as place:
        write(place / "mine.heat", {KEY: BLOB}, {})
        shutil.copy(place / "mine.heat", place / "his.heat")
        os.chown(place / "his.heat", ATTACKER, ATTACKER)
        os.symlink(place / "mine.heat", place / "link.heat")
        os.lchown(place / "link.heat", ATTACKER, ATTACKER)
        shelf = MountedBundles(Events(), trust=False)
        assert shelf.mount(place / "mine.heat").get(KEY) == BLOB
        for name, why in (
            ("his.heat", "belongs to user"),
            ("link.heat", "symbolic link owned by user"),
        ):
            with pytest.raises(BundleError, match=why):
                shelf.mount(place / name)
