"""`preheat cache sync`: what it prints, its exit status, and that copied entries are found."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from preheat.model.events import Events
from preheat.store import DiskStore
from preheat.store.signing import entries as envelope
from preheat.store.signing.keys import SigningKey
from tests.command import Cli
from tests.conftest import SAXPY
from tests.processes import start_python, wait_for
from tests.store.copy.support import artifact, listing

HEADER = '#include "scale.h"\nextern "C" __global__ void scale(float* x) { *x *= SCALE; }\n'


@pytest.fixture
def filled(cli: Cli, tmp_path: Path) -> Cli:
    """Return the command line with a cache of two programs, one of them with a header file."""
    (tmp_path / "saxpy.cu").write_text(SAXPY)
    (tmp_path / "scale.cu").write_text(HEADER)
    (tmp_path / "scale.h").write_text("#define SCALE 2\n")
    assert cli("compile", "saxpy.cu", "scale.cu", "--arch", "sm_90").code == 0
    return cli


@pytest.fixture
def stored(cli: Cli, tmp_path: Path) -> Cli:
    """Return the command line with a cache of three entries that nobody compiled."""
    disk = DiskStore(tmp_path / "cache", Events(), lock_dir=tmp_path / "locks")
    for entry in (artifact("a.cu"), artifact("b.cu")):
        disk.put(entry.digest, entry.encode())
    disk.put(*listing("a.cu", "a.cu"))
    return cli


def test_a_copied_cache_compiles_nothing(
    filled: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for source, target in (("cache", "file://{}/shared"), ("file://{}/shared", "other")):
        ran = filled("cache", "sync", source.format(tmp_path), target.format(tmp_path), "--json")
        assert ran.code == 0, ran.err
        assert ran.json() | {"from": "", "to": "", "bytes": 0} == {
            "from": "",
            "to": "",
            "dry_run": False,
            "copied": 2,
            "bytes": 0,
            "present": 0,
            "merged_lists": 1,
            "left_out": 0,
            "skipped": {},
            "refused": {},
        }
    monkeypatch.setenv("PREHEAT_CACHE_DIR", str(tmp_path / "other"))
    ran = filled("compile", "saxpy.cu", "scale.cu", "--arch", "sm_90")
    assert ran.err.strip() == "0 programs compiled, 2 found in the cache"


def test_the_summary_counts(stored: Cli) -> None:
    ran = stored("cache", "sync", "cache", "other", "--dry-run")
    assert ran.out == ""
    assert ran.err.startswith("cache to other: 2 entries would be copied, ")
    assert ran.err.strip().endswith("0 present, 1 header list merged")
    stored("cache", "sync", "cache", "other")
    assert "0 entries copied, 0 B, 2 present" in stored("cache", "sync", "cache", "other").err


def test_damage_has_an_exit_status(stored: Cli, tmp_path: Path) -> None:
    key = stored("cache", "ls", "--json").json()[0]["key"]
    path = next((tmp_path / "cache").rglob(f"{key}.heat"))
    path.write_bytes(path.read_bytes()[:-1])
    ran = stored("cache", "sync", "cache", "other")
    assert ran.code == 1
    assert ran.out == f"{key}  damaged: checksum mismatch\n"
    assert "1 entry copied" in ran.err
    assert "1 refused" in ran.err


def test_a_bundle_fills_a_cache_and_another_bundle(
    filled: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = 'version = 1\n\n[[program]]\nfile = "saxpy.cu"\n\n[[program]]\nfile = "scale.cu"\n'
    (tmp_path / "kernels.toml").write_text(manifest)
    assert filled("bake", "kernels.toml", "--arch", "sm_90", "-o", "kernels.heat").code == 0
    ran = filled("cache", "sync", "kernels.heat", "other")
    assert ran.code == 0
    assert "1 entry not copied: a bundle does not hold the list" in ran.err
    assert "1 entry copied" in ran.err
    assert "2 entries not copied" in filled("cache", "sync", "cache", "new.heat").err
    assert filled("cache", "sync", "kernels.heat", "copy.heat").code == 0
    assert (tmp_path / "copy.heat").read_bytes() == (tmp_path / "kernels.heat").read_bytes()
    assert "0 entries copied" in filled("cache", "sync", "kernels.heat", "copy.heat").err
    assert filled("cache", "sync", "kernels.heat", "copy.heat", "--kind", "cuda").code == 2
    wrong = filled("cache", "sync", f"kernels.heat@sha256:{'0' * 64}", "third")
    assert wrong.code == 2
    assert "kernels.heat" in wrong.err
    monkeypatch.setenv("PREHEAT_REQUIRE_SIGNED", "1")
    assert filled("cache", "sync", "kernels.heat", "third").code == 2
    monkeypatch.delenv("PREHEAT_REQUIRE_SIGNED")
    monkeypatch.setenv("PREHEAT_CACHE_DIR", str(tmp_path / "other"))
    ran = filled("compile", "saxpy.cu", "--arch", "sm_90")
    assert ran.err.strip() == "0 programs compiled, 1 found in the cache"


def test_a_hit_in_the_second_store_says_so(
    filled: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = f"file://{tmp_path}/near", f"file://{tmp_path}/far"
    assert filled("cache", "sync", "cache", far).code == 0
    monkeypatch.setenv("PREHEAT_CACHE_DIR", str(tmp_path / "other"))
    monkeypatch.setenv("PREHEAT_REMOTE", f"{near} {far}")
    assert "found in shared store 2, " in filled("compile", "saxpy.cu", "--arch", "sm_90").out


def test_a_process_that_accepts_unsigned_entries_copies_them_without_a_signature(
    stored: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert stored("cache", "sync", "cache", f"file://{tmp_path}/theirs").code == 0
    SigningKey.new().save(tmp_path / "signing.pem")
    monkeypatch.setenv("PREHEAT_SIGNING_KEY", str(tmp_path / "signing.pem"))
    copy = ("cache", "sync", f"file://{tmp_path}/theirs", f"file://{tmp_path}/ours")
    assert stored(*copy).code == 1  # No entry is signed, and none is copied.
    monkeypatch.setenv("PREHEAT_REMOTE_UNSIGNED", "1")
    assert stored(*copy).code == 0
    copied = [path for path in (tmp_path / "ours").rglob("*") if path.is_file()]
    assert [envelope.key_id(path.read_bytes()) for path in copied] == [None] * 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("cache", "./cache/"), "are the same store"),
        (("s3://a/b", "s3://a/b"), "are the same store"),
        (("cache", f"new.heat@sha256:{'0' * 64}"), "has a pin, and cannot be written"),
        (("cache", "new.heat@sha256:12"), "a pin is"),
        (("nowhere", "other"), "the directory .*nowhere cannot be used"),
        (("cache", "other", "--arch", "sm_9z"), "sm_9z"),
        (("redis://127.0.0.1:1/0", "other"), "entries of a shared store must be signed"),
        (("gopher://host/x", "other"), "gopher"),
    ],
)
def test_bad_arguments(stored: Cli, arguments: tuple[str, ...], message: str) -> None:
    ran = stored("cache", "sync", *arguments)
    assert ran.code == 2
    assert re.search(message, ran.err), ran.err


def test_a_dead_server_is_an_error_with_a_hint(stored: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREHEAT_REMOTE_UNSIGNED", "1")
    ran = stored("cache", "sync", "cache", "redis://127.0.0.1:1/0")
    assert ran.code == 1
    assert "127.0.0.1:1" in ran.err


SYNC = "import sys, preheat.tools.cli; preheat.tools.cli.main(sys.argv[1:])"


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_an_interrupted_copy_is_continued(cli: Cli, tmp_path: Path, how: signal.Signals) -> None:
    disk = DiskStore(tmp_path / "from", Events(), lock_dir=tmp_path / "locks")
    entries = {each.digest: each.encode() for each in (artifact(str(n)) for n in range(60))}
    for digest, blob in entries.items():
        disk.put(digest, blob)
    process = start_python(SYNC, "cache", "sync", str(tmp_path / "from"), str(tmp_path / "to"))
    wait_for(lambda: any((tmp_path / "to").rglob("*.heat")))
    os.kill(process.pid, how)
    process.wait()
    assert cli("cache", "sync", "from", "to").code == 0
    copied = DiskStore(tmp_path / "to", Events(), lock_dir=tmp_path / "locks")
    assert {digest: copied.get(digest) for digest in entries} == entries
