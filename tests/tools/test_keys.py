"""`preheat keys`, and signed and pinned bundles on the command line."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from pathlib import Path

import pytest

from preheat.ahead.bundles import sign
from preheat.model.config import Config
from preheat.store.bundle import Bundle, write
from preheat.store.signing.keys import Keyring, SigningKey, load_public
from tests.command import Cli, Ran
from tests.tools.test_bake import ONE, bundle, manifest, promise


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return one cache for all tests here: each kernel is compiled once."""
    return tmp_path_factory.mktemp("cli") / "cache"


@pytest.fixture
def key(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> SigningKey:
    """Return a key that the settings name as the one that signs."""
    cli("keys", "new", "signing.pem")
    monkeypatch.setenv("PREHEAT_SIGNING_KEY", "signing.pem")
    return SigningKey.load("signing.pem")


def pin_of(file: str) -> str:
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


# keys


def test_a_new_key_is_written_and_its_public_half_printed(cli: Cli) -> None:
    ran = cli("keys", "new", "signing.pem")
    made = SigningKey.load("signing.pem")
    assert ran.code == 0
    assert ran.out == f"# preheat key {made.id.hex()}, from signing.pem\n{made.public.pem()}"
    assert f"PREHEAT_SIGNING_KEY={Path('signing.pem').absolute()}" in ran.err
    assert "PREHEAT_TRUSTED_KEYS" in ran.err
    assert stat.S_IMODE(os.stat("signing.pem").st_mode) == 0o600
    Path("trusted.pem").write_text(ran.out)
    assert Keyring.load(["trusted.pem"]).keys == (made.public,)


def test_a_key_is_not_overwritten(cli: Cli) -> None:
    cli("keys", "new", "signing.pem")
    before = Path("signing.pem").read_bytes()
    ran = cli("keys", "new", "signing.pem")
    assert ran == Ran(
        2,
        "",
        "error: key file signing.pem: it exists, and a key is never overwritten\n\n"
        "hint: name a file that does not exist\n",
    )
    assert Path("signing.pem").read_bytes() == before


def test_the_public_key_of_a_new_key_is_written_to_a_file(cli: Cli) -> None:
    ran = cli("keys", "new", "signing.pem", "--public", "trusted.pem")
    made = SigningKey.load("signing.pem")
    assert (ran.code, ran.out) == (0, "")
    assert f"PREHEAT_TRUSTED_KEYS={Path('trusted.pem').absolute()}" in ran.err
    written = Path("trusted.pem").read_text()
    assert written == f"# preheat key {made.id.hex()}, from signing.pem\n{made.public.pem()}"
    assert Keyring.load(["trusted.pem"]).keys == (made.public,)
    (row,) = cli("keys", "new", "other.pem", "--public", "other.pub", "--json").json()
    assert row["public"] in Path("other.pub").read_text()


def test_neither_file_of_a_new_key_is_overwritten(cli: Cli) -> None:
    cli("keys", "new", "signing.pem", "--public", "trusted.pem")
    before = {name: Path(name).read_bytes() for name in ("signing.pem", "trusted.pem")}
    for private, public, named in (
        ("signing.pem", "new.pem", "signing.pem"),
        ("new.pem", "trusted.pem", "trusted.pem"),
    ):
        ran = cli("keys", "new", private, "--public", public)
        assert ran.code == 2
        assert f"key file {named}: it exists" in ran.err
        assert not Path("new.pem").exists()
    assert {name: Path(name).read_bytes() for name in before} == before


def test_what_show_prints_is_a_file_of_all_keys(cli: Cli) -> None:
    cli("keys", "new", "old.pem")
    Path("new.pub").write_text(cli("keys", "new", "new.pem").out)
    shown = cli("keys", "show", "old.pem", "new.pub")
    assert shown.code == 0
    Path("both.pem").write_text(shown.out)
    both = (*load_public("old.pem"), *load_public("new.pem"))
    assert load_public("both.pem") == both
    rows = cli("keys", "show", "both.pem", "--json").json()
    assert [row["id"] for row in rows] == [key.id.hex() for key in both]
    assert [row["public"] for row in rows] == [key.pem() for key in both]
    assert {row["file"] for row in rows} == {"both.pem"}


def test_no_command_prints_a_private_key(cli: Cli) -> None:
    made = cli("keys", "new", "signing.pem")
    secret = Path("signing.pem").read_text().splitlines()[1]
    as_json = cli("keys", "new", "other.pem", "--json")
    for ran in (made, as_json, cli("keys", "show", "signing.pem")):
        assert secret not in ran.out + ran.err
        assert "PRIVATE" not in ran.out


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "it cannot be read: No such file or directory"),
        ("hello", "it has lines that are neither a key in PEM form nor a comment"),
        ("", "it has no key, where public keys are expected"),
    ],
)
def test_a_file_without_keys_is_named(cli: Cli, content: str | None, reason: str) -> None:
    if content is not None:
        Path("keys").write_text(content)
    ran = cli("keys", "show", "keys")
    assert ran.code == 2
    assert ran.err.startswith(f"error: key file keys: {reason}\n")


def test_keys_without_a_command_shows_the_help(cli: Cli) -> None:
    ran = cli("keys", "--help")
    assert ran.code == 0
    assert "preheat keys new signing.pem --public trusted.pem" in ran.out


# Signed bundles


def test_bundle_sign_signs_and_replaces_a_signature(cli: Cli, key: SigningKey) -> None:
    file = bundle("k.heat", promise())
    ran = cli("bundle", "sign", file)
    assert ran.code == 0
    assert ran.err.startswith(f"k.heat: signed by key {key.id.hex()}, ")
    assert Bundle.open(file).require_signature(Keyring((key.public,))) == key.id
    first = Path(file).read_bytes()
    (row,) = cli("bundle", "sign", file, "--json").json()
    assert row == {"bundle": "k.heat", "bytes": len(first), "signed_by": key.id.hex()}
    assert Path(file).read_bytes() == first


def test_signing_needs_a_key(cli: Cli) -> None:
    file = bundle("k.heat", promise())
    manifest(ONE)
    for command in (
        ("bundle", "sign", file),
        ("bundle", "merge", file, "-o", "m.heat", "--sign"),
        ("bake", "k.toml", "--arch", "sm_90", "--sign", "-o", "m.heat"),
    ):
        ran = cli(*command)
        assert ran.code == 2
        assert "there is no key to sign with: PREHEAT_SIGNING_KEY is not set" in ran.err
        assert "hint: make a key with 'preheat keys new FILE'" in ran.err
    assert not Path("m.heat").exists()


def test_bake_and_merge_sign(cli: Cli, key: SigningKey) -> None:
    manifest(ONE)
    assert cli("bake", "k.toml", "--arch", "sm_90", "--sign").code == 0
    assert cli("bundle", "merge", "k.heat", "-o", "m.heat", "--sign").code == 0
    for file in ("k.heat", "m.heat"):
        assert Bundle.open(file).require_signature(Keyring((key.public,))) == key.id
    assert cli("bundle", "merge", "k.heat", "-o", "plain.heat").code == 0
    assert Bundle.open("plain.heat").signature is None


def signed_by_another(file: str) -> str:
    """Write a bundle that a key signed which is not trusted; return the id of the key."""
    evil = SigningKey.new()
    sign(Bundle.open(bundle(file, promise(cubin=b"evil"))), evil)
    return evil.id.hex()


@pytest.mark.usefixtures("key")
@pytest.mark.parametrize(
    "command", [("sign", "evil.heat"), ("merge", "evil.heat", "-o", "out.heat", "--sign")]
)
def test_what_an_untrusted_key_has_signed_is_not_signed_again(
    cli: Cli, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    evil = signed_by_another("evil.heat")
    before = Path("evil.heat").read_bytes()
    for required in ("0", "1"):
        monkeypatch.setenv("PREHEAT_REQUIRE_SIGNED", required)
        ran = cli("bundle", *command)
        assert ran.code == 2
        assert f"it is signed by key {evil}, which is not trusted" in ran.err
    assert Path("evil.heat").read_bytes() == before
    assert not Path("out.heat").exists()
    pinned = [f"{each}@sha256:{pin_of(each)}" if each == "evil.heat" else each for each in command]
    assert cli("bundle", *pinned).code == 0


@pytest.mark.usefixtures("key")
def test_merge_takes_only_signed_bundles_where_signatures_are_required(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = bundle("k.heat", promise())
    monkeypatch.setenv("PREHEAT_REQUIRE_SIGNED", "1")
    for more in ((), ("--sign",)):
        ran = cli("bundle", "merge", file, "-o", "out.heat", *more)
        assert ran.code == 2
        assert "it is not signed" in ran.err
    assert cli("bundle", "sign", file).code == 0  # It is the command for a bundle without a signature.
    assert cli("bundle", "merge", file, "-o", "out.heat", "--sign").code == 0


def test_entries_are_compared_with_the_signature_before_they_are_signed_again(
    cli: Cli, key: SigningKey
) -> None:
    file = bundle("k.heat", promise(cubin=b"good"))
    cli("bundle", "sign", file)
    signature = Bundle.open(file).signature
    write(file, promise(cubin=b"evil").encode(), {**Bundle.open(file).meta, "signature": signature})
    assert key.id.hex() in cli("bundle", "ls", file).out
    for command in (("sign", file), ("merge", file, "-o", "out.heat", "--sign")):
        ran = cli("bundle", *command)
        assert ran.code == 2
        assert "not the entry that was signed or pinned" in ran.err


def test_verify_reports_the_signature(
    cli: Cli, key: SigningKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = bundle("k.heat", promise())
    assert cli("bundle", "verify", file) == Ran(0, "", "Checked 1 bundle: 0 damaged\n")
    cli("bundle", "sign", file)
    end = "Checked 1 bundle: 0 damaged\n"
    trusted = f"k.heat: signed by key {key.id.hex()}, which is trusted\n"
    assert cli("bundle", "verify", file) == Ran(0, "", trusted + end)
    monkeypatch.delenv("PREHEAT_SIGNING_KEY")
    unknown = f"k.heat: signed by key {key.id.hex()}; no key is trusted here\n"
    assert cli("bundle", "verify", file) == Ran(0, "", unknown + end)
    Path("other.pem").write_text(SigningKey.new().public.pem())
    monkeypatch.setenv("PREHEAT_TRUSTED_KEYS", "other.pem")
    ran = cli("bundle", "verify", file)
    assert ran.code == 1
    assert ran.out == f"k.heat: it is signed by key {key.id.hex()}, which is not trusted\n"
    assert cli("bundle", "verify", file, "--json").json() == {file: [ran.out.strip()[8:]]}


def test_verify_finds_a_missing_signature_where_one_is_required(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREHEAT_REQUIRE_SIGNED", "1")
    ran = cli("bundle", "verify", bundle("k.heat", promise()))
    assert ran == Ran(1, "k.heat: it is not signed\n", "Checked 1 bundle: 1 damaged\n")


def test_verify_compares_entries_with_the_signature(cli: Cli, key: SigningKey) -> None:
    file = bundle("k.heat", promise(cubin=b"good"))
    cli("bundle", "sign", file)
    signature = Bundle.open(file).signature
    evil = promise(cubin=b"evil")
    write(file, evil.encode(), {**Bundle.open(file).meta, "signature": signature})
    ran = cli("bundle", "verify", file)
    assert ran.code == 1
    assert f"signed by key {key.id.hex()}" in ran.err
    assert ran.out.endswith(": not the entry that was signed or pinned\n")


# Pins


def test_ls_prints_the_name_with_its_pin_and_who_signed(cli: Cli, key: SigningKey) -> None:
    file = bundle("k.heat", promise())
    assert cli("bundle", "ls", file).out.endswith(
        f"\nname with its pin\n  k.heat@sha256:{pin_of(file)}\n"
    )
    cli("bundle", "sign", file)
    assert cli("bundle", "ls", file).out.endswith(
        f"\n  k.heat@sha256:{pin_of(file)}\n\nsigned by\n  key {key.id.hex()}\n"
    )
    shown = cli("bundle", "ls", f"{file}@sha256:{pin_of(file)}", "--json").json()
    assert (shown["file"], shown["sha256"]) == ("k.heat", pin_of(file))
    assert shown["signed_by"] == key.id.hex()
    assert "signature" not in shown


def test_every_command_that_takes_a_bundle_takes_a_pin(cli: Cli) -> None:
    manifest(ONE)
    assert cli("bake", "k.toml", "--arch", "sm_90").code == 0
    right, wrong = f"k.heat@sha256:{pin_of('k.heat')}", f"k.heat@sha256:{'0' * 64}"
    check = ("check", "k.toml", "--arch", "sm_90", "--bundle")
    for command in (check, ("bundle", "ls"), ("bundle", "verify"), ("bundle", "merge", "-o", "m.heat")):
        assert cli(*command, right).code == 0
        ran = cli(*command, wrong)
        assert ran.code in (1, 2)
        assert re.search(r"k\.heat cannot be trusted: its SHA-256 is [0-9a-f]{64}, ", ran.out + ran.err)
    malformed = cli(*check, "k.heat@sha256:12")
    assert malformed.code == 2
    assert "a pin is @sha256: and 64 hexadecimal digits" in malformed.err


def test_run_gives_the_pin_to_the_command(cli: Cli) -> None:
    file = bundle("k.heat", promise())
    pinned = f"k.heat@sha256:{pin_of(file)}"
    ran = cli("run", "--bundle", pinned, "--bundle", file, "--explain")
    assert ran.code == 0
    (value,) = re.findall(r"^PREHEAT_BUNDLE=(.*)$", ran.err, re.M)
    found = Config.from_env({"PREHEAT_BUNDLE": value}).bundles
    assert found == (Path.cwd() / pinned, Path.cwd() / file)
    for name, reason in (("k.heat@sha256:12", "a pin is @sha256:"), ("no.heat", "does not exist")):
        refused = cli("run", "--bundle", name, "--", "true")
        assert refused.code == 2
        assert reason in refused.err


# doctor


def test_doctor_shows_keys(cli: Cli, key: SigningKey, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("preheat.tools.cli.doctor._test_compiles", lambda _: [])
    rows = {row["what"]: row for row in cli("doctor", "--json").json()}
    assert rows["signing key"]["detail"].startswith(f"{key.id.hex()} in ")
    assert rows["trusted keys"]["detail"] == key.id.hex()
    Path("signing.pem").chmod(0o644)
    rows = {row["what"]: row for row in cli("doctor", "--json").json()}
    assert rows["keys"]["verdict"] == "fail"
    assert "other users can read this private key (mode 0644)" in rows["keys"]["detail"]
    assert "chmod 600" in rows["keys"]["fix"]
