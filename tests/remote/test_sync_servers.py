"""`preheat cache sync` and `preheat bundle push` and `pull` with every kind of server, signed."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote

import pytest

from preheat.cache import DiskTier
from preheat.cache.bundle import write
from preheat.events import Events
from preheat.signing import SigningKey
from tests.cache.entries import blob_of, digest_of
from tests.command import Cli, command_line
from tests.remote.servers import PASSWORD
from tests.remote.stores import Store
from tests.sync.support import artifact, foreign, listing


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cli:
    key = SigningKey.new()
    key.save(tmp_path / "signing.pem")
    monkeypatch.setenv("PREHEAT_SIGNING_KEY", str(tmp_path / "signing.pem"))
    return command_line(capsys, monkeypatch, tmp_path, tmp_path / "cache")


def test_entries_travel_over_a_server(cli: Cli, served: Store, tmp_path: Path) -> None:
    disk = DiskTier(tmp_path / "from", Events(), lock_dir=tmp_path / "locks")
    entries = {each.digest: each.encode() for each in (artifact("a.cu"), foreign("softmax"))}
    entries |= [listing("a.cu", "a.cu")]
    for digest, blob in entries.items():
        disk.put(digest, blob)
    for source, target in (("from", served.url()), (served.url(), "to")):
        first, again = (cli("cache", "sync", source, target, "--json") for _ in range(2))
        assert (first.code, again.code) == (0, 0), first.err + again.err
        assert PASSWORD not in unquote(first.out + first.err)
        assert (first.json()["copied"], first.json()["merged_lists"]) == (2, 1)
        assert (again.json()["copied"], again.json()["merged_lists"]) == (0, 0)
    copied = DiskTier(tmp_path / "to", Events(), lock_dir=tmp_path / "locks")
    assert {digest: copied.get(digest) for digest in entries} == entries


def test_a_reader_with_another_key_takes_nothing(
    cli: Cli, served: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = DiskTier(tmp_path / "from", Events(), lock_dir=tmp_path / "locks")
    disk.put(artifact("a.cu").digest, artifact("a.cu").encode())
    assert cli("cache", "sync", "from", served.url()).code == 0
    SigningKey.new().save(tmp_path / "other.pem")
    monkeypatch.setenv("PREHEAT_SIGNING_KEY", str(tmp_path / "other.pem"))
    ran = cli("cache", "sync", served.url(), "to")
    assert ran.code == 1
    assert "untrusted: " in ran.out
    assert not list((tmp_path / "to").rglob("*.heat"))


def test_a_bundle_travels_over_a_server(cli: Cli, served: Store, tmp_path: Path) -> None:
    write(tmp_path / "kernels.heat", {digest_of(number): blob_of(number) for number in range(3)}, {})
    pushed = cli("bundle", "push", "kernels.heat", served.url())
    assert pushed.code == 0, pushed.err
    assert cli("bundle", "pull", served.url(), pushed.out.strip(), "-o", "copy.heat").code == 0
    assert (tmp_path / "copy.heat").read_bytes() == (tmp_path / "kernels.heat").read_bytes()
