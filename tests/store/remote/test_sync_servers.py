"""`preheat cache sync` and `preheat bundle push` and `pull` with every kind of server, signed."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote

import pytest

from preheat.model.events import Events
from preheat.store import DiskStore
from preheat.store.bundle import write
from preheat.store.remote.engine import RemoteError
from preheat.store.signing.keys import SigningKey
from tests.command import Cli, command_line
from tests.store.copy.support import artifact, foreign, listing
from tests.store.entries import blob_of, digest_of
from tests.store.remote.memory_engine import MemoryEngine
from tests.store.remote.servers import PASSWORD, Server
from tests.store.remote.stores import Store


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cli:
    key = SigningKey.new()
    key.save(tmp_path / "signing.pem")
    monkeypatch.setenv("PREHEAT_SIGNING_KEY", str(tmp_path / "signing.pem"))
    return command_line(capsys, monkeypatch, tmp_path, tmp_path / "cache")


def test_entries_travel_over_a_server(cli: Cli, served: Store, tmp_path: Path) -> None:
    disk = DiskStore(tmp_path / "from", Events(), lock_dir=tmp_path / "locks")
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
    copied = DiskStore(tmp_path / "to", Events(), lock_dir=tmp_path / "locks")
    assert {digest: copied.get(digest) for digest in entries} == entries


def test_a_reader_with_another_key_takes_nothing(
    cli: Cli, served: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = DiskStore(tmp_path / "from", Events(), lock_dir=tmp_path / "locks")
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
    (name,) = served.open().names()  # The empty object of the check is deleted.
    assert name == f"bundles/{pushed.out.strip().removeprefix('sha256:')}"


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    path = tmp_path / "kernels.heat"
    write(path, {digest_of(number): blob_of(number) for number in range(3)}, {})
    return path


@pytest.mark.usefixtures("bundle")
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_bundle_is_not_pushed_to_a_web_server(cli: Cli, scheme: str) -> None:
    """No request is made: nothing listens there."""
    ran = cli("bundle", "push", "kernels.heat", f"{scheme}://tester:secret@127.0.0.1:1/plain")
    assert (ran.code, ran.out) == (2, "")
    said = "error: {}://127.0.0.1:1/plain is read-only: preheat does not write to a web server\n"
    assert ran.err.startswith(said.format(scheme))
    assert "hint: use a URL that can be written, such as dav://" in ran.err


@pytest.mark.usefixtures("bundle")
def test_a_bundle_is_not_sent_to_a_webdav_server_that_refuses_writes(cli: Cli, webdav: Server) -> None:
    url = webdav.url("pushed").replace("/stores/", "/readable/")
    ran = cli("bundle", "push", "kernels.heat", url)
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.startswith("error: nothing was pushed: dav://127.0.0.1")
    assert "hint: if it refuses writes, let the server accept PUT and MKCOL from this user" in ran.err
    assert not (webdav.folder / "stores" / "readable").exists()


def test_only_an_empty_object_is_sent_to_a_server_that_refuses_writes(
    cli: Cli, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []

    def refuse(verb: str, name: str) -> None:
        if verb == "write":
            written.append(name)
            raise RemoteError("memory://test: it refuses writes")

    engine = MemoryEngine(before=refuse)
    monkeypatch.setattr("preheat.store.remote.bundles.open_engine", lambda *_, **__: engine)
    assert cli("bundle", "push", str(bundle), "s3://bucket/kernels").code == 1
    (name,) = written
    assert name.startswith("v1/probe/")


def test_a_bundle_is_pushed_to_a_server_that_refuses_deletes(
    cli: Cli, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(verb: str, name: str) -> None:
        if verb == "delete":
            raise RemoteError(f"memory://test: it does not delete {name}")

    engine = MemoryEngine(before=refuse)
    monkeypatch.setattr("preheat.store.remote.bundles.open_engine", lambda *_, **__: engine)
    pushed = cli("bundle", "push", str(bundle), "s3://bucket/kernels")
    assert pushed.code == 0, pushed.err
    digest = pushed.out.strip().removeprefix("sha256:")
    assert engine.objects[f"bundles/{digest}"] == bundle.read_bytes()
