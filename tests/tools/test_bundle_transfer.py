"""`preheat bundle push` and `pull`: a bundle on a server is what its pin says, or an error."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from preheat.store.bundle import write
from tests.command import Cli
from tests.store.entries import blob_of, digest_of


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/shared"


@pytest.fixture
def bundle(tmp_path: Path) -> bytes:
    path = tmp_path / "kernels.heat"
    write(path, {digest_of(number): blob_of(number) for number in range(3)}, {})
    return path.read_bytes()


def test_a_bundle_is_pulled_by_its_pin(cli: Cli, url: str, bundle: bytes, tmp_path: Path) -> None:
    pushed = cli("bundle", "push", "kernels.heat", url)
    assert pushed.out == f"sha256:{hashlib.sha256(bundle).hexdigest()}\n"
    again = cli("bundle", "push", "kernels.heat", url, "--json").json()
    assert (again["pin"], again["written"]) == (pushed.out.strip(), False)
    for pin in (pushed.out.strip(), pushed.out.strip().removeprefix("sha256:")):
        assert cli("bundle", "pull", url, pin, "-o", "copy.heat").code == 0
        assert (tmp_path / "copy.heat").read_bytes() == bundle


def test_other_bytes_are_refused(cli: Cli, url: str, bundle: bytes, tmp_path: Path) -> None:
    pin = cli("bundle", "push", "kernels.heat", url).out.strip()
    (stored,) = (path for path in (tmp_path / "shared").rglob("*") if path.is_file())
    stored.write_bytes(bundle[:-1] + b"\0")
    (tmp_path / "copy.heat").write_bytes(bundle)
    ran = cli("bundle", "pull", url, pin, "-o", "copy.heat")
    assert ran.code == 2
    assert f"in the place of {pin}" in ran.err
    assert (tmp_path / "copy.heat").read_bytes() == bundle


@pytest.mark.parametrize("wrong", [b"garbage", None])
def test_a_wrong_object_in_the_place_of_a_bundle_is_replaced(
    cli: Cli, url: str, bundle: bytes, tmp_path: Path, wrong: bytes | None
) -> None:
    pin = cli("bundle", "push", "kernels.heat", url).out.strip()
    (stored,) = (path for path in (tmp_path / "shared").rglob("*") if path.is_file())
    stored.write_bytes(bundle[:-1] + b"\0" if wrong is None else wrong)
    pushed = cli("bundle", "push", "kernels.heat", url, "--json").json()
    assert (pushed["pin"], pushed["written"]) == (pin, True)
    assert cli("bundle", "pull", url, pin, "-o", "copy.heat").code == 0


def test_what_cannot_be_transferred_is_an_error(cli: Cli, url: str, bundle: bytes) -> None:
    absent = f"sha256:{'0' * 64}"
    assert "has no bundle" in cli("bundle", "pull", url, absent, "-o", "copy.heat").err
    for arguments in (
        ("pull", url, "sha256:12", "-o", "copy.heat"),
        ("pull", "gopher://host", absent, "-o", "copy.heat"),
        ("push", "absent.heat", url),
    ):
        assert cli("bundle", *arguments).code == 2
    Path("kernels.heat").write_bytes(bundle[:-1])
    assert cli("bundle", "push", "kernels.heat", url).code == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ("push", "redis://:secret@127.0.0.1:1/0", "kernels.heat"),
        ("pull", "file:///shared", "redis://:secret@127.0.0.1:1/0", "-o", "copy.heat"),
        ("pull", "file:///shared", f"sha256:{'0' * 64}", "-o", "redis://:secret@127.0.0.1:1/0"),
        ("ls", "redis://:secret@127.0.0.1:1/0"),
        ("verify", "redis://:secret@127.0.0.1:1/0@sha256:12"),
        ("merge", "kernels.heat", "-o", "redis://:secret@127.0.0.1:1/0"),
    ],
)
@pytest.mark.usefixtures("bundle")
def test_a_url_in_the_place_of_a_file_is_refused_without_its_password(
    cli: Cli, arguments: tuple[str, ...]
) -> None:
    ran = cli("bundle", *arguments)
    assert ran.code == 2
    assert "redis://… is " in ran.err
    assert "secret" not in ran.out + ran.err


@pytest.mark.usefixtures("bundle")
def test_an_error_names_the_server_once(cli: Cli) -> None:
    ran = cli("bundle", "push", "kernels.heat", "redis://:secret@127.0.0.1:1/0")
    assert ran.code == 1
    assert ran.err == "error: redis://127.0.0.1:1/0: Connection refused\n"


def test_a_bundle_that_no_store_returns_is_not_pushed(
    cli: Cli, url: str, bundle: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("preheat.store.remote.bundles.MAX_OBJECT_BYTES", len(bundle) - 1)
    refused = cli("bundle", "push", "kernels.heat", url)
    assert refused.code != 0
    assert f"has {len(bundle):,} bytes" in refused.err
    assert "hint: bake a bundle for each architecture" in refused.err
