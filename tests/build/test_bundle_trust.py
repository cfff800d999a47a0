"""Bundles that must be signed or match a pin, and what a sealed process says of others."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from preheat.ahead.bundles import sign
from preheat.build.builder import Builder
from preheat.errors import BundleError
from preheat.model.config import SealMode
from preheat.store.bundle import Bundle
from preheat.store.signing.keys import SigningKey
from tests.build.sealed import PLAIN, Baked
from tests.conftest import Recorder

pytest.importorskip("cryptography", reason="cryptography is not installed")

KEY, OTHER = SigningKey.new(), SigningKey.new()
Bare = Callable[..., Builder]


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, Path]:
    """Return files: the private key, and the public keys of both."""
    KEY.save(tmp_path / "private.pem")
    for name, key in (("trusted.pem", KEY), ("others.pem", OTHER)):
        (tmp_path / name).write_text(key.public.pem())
    return {file.stem: file for file in tmp_path.glob("*.pem")}


@pytest.fixture
def unsigned(baked: Baked, tmp_path: Path) -> Path:
    return Path(shutil.copy(baked.path, tmp_path / "kernels.heat"))


@pytest.fixture
def signed(unsigned: Path) -> Path:
    sign(Bundle.open(unsigned), KEY)
    return unsigned


def pinned(path: Path) -> Path:
    return Path(f"{path}@sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}")


def assert_refused(builder: Builder, recorder: Recorder, path: Path, reason: str, hint: str) -> None:
    """One event has the reason, and the error of the first use in a sealed process has it too."""
    (event,) = recorder.named("refused")
    assert event["path"] == str(path)
    assert reason in event["reason"]
    assert builder.bundles == ()
    with pytest.raises(BundleError) as caught:
        builder.build(PLAIN, "sm_90")
    assert reason in str(caught.value)
    assert hint in str(caught.value.hint)


def test_a_signed_bundle_is_used_where_its_key_is_trusted(
    signed: Path, keys: dict[str, Path], bare: Bare, recorder: Recorder
) -> None:
    for settings in (
        {"trusted_keys": (keys["trusted"],)},
        {"trusted_keys": (keys["others"], keys["trusted"])},
        {"signing_key": keys["private"]},
    ):
        builder = bare(sealed=SealMode.ERROR, bundles=(signed,), require_signed=True, **settings)
        assert builder.build(PLAIN, "sm_90").cubin
    assert recorder.named("refused") == []


def test_bundles_that_nobody_trusted_has_signed_are_refused(
    unsigned: Path, keys: dict[str, Path], bare: Bare, recorder: Recorder
) -> None:
    settings = {"sealed": SealMode.ERROR, "bundles": (unsigned,), "require_signed": True}
    builder = bare(**settings, trusted_keys=(keys["trusted"],))
    reason = f"bundle {unsigned} cannot be trusted: it is not signed"
    assert_refused(builder, recorder, unsigned, reason, "sign it with 'preheat bundle sign FILE'")
    recorder.seen.clear()
    sign(Bundle.open(unsigned), KEY)
    builder = bare(**settings, trusted_keys=(keys["others"],))
    reason = f"signed by key {KEY.id.hex()}, which is not trusted"
    assert_refused(builder, recorder, unsigned, reason, "PREHEAT_TRUSTED_KEYS if you trust it")


def test_signatures_are_not_looked_at_unless_they_are_required(
    unsigned: Path, keys: dict[str, Path], bare: Bare
) -> None:
    builder = bare(bundles=(unsigned,), trusted_keys=(keys["others"],), sealed=SealMode.ERROR)
    assert builder.build(PLAIN, "sm_90").cubin


def test_keys_that_cannot_be_used_are_named(
    signed: Path, keys: dict[str, Path], bare: Bare, recorder: Recorder
) -> None:
    settings = {"sealed": SealMode.ERROR, "bundles": (signed,), "require_signed": True}
    reason = "PREHEAT_REQUIRE_SIGNED is on, and no key is trusted"
    assert_refused(bare(**settings), recorder, signed, reason, "PREHEAT_TRUSTED_KEYS")
    recorder.seen.clear()
    keys["private"].chmod(0o644)
    builder = bare(**settings, signing_key=keys["private"])
    assert_refused(builder, recorder, signed, "other users can read this private key", "chmod 600")


def test_a_pinned_bundle_is_used_with_and_without_required_signatures(
    unsigned: Path, keys: dict[str, Path], bare: Bare, recorder: Recorder
) -> None:
    keys["private"].chmod(0o644)  # A pin needs no key.
    for settings in ({}, {"require_signed": True}, {"signing_key": keys["private"]}):
        builder = bare(sealed=SealMode.ERROR, bundles=(pinned(unsigned),), **settings)
        assert builder.build(PLAIN, "sm_90").cubin
    assert recorder.named("refused") == []


def test_another_bundle_than_the_pinned_one_is_refused(
    unsigned: Path, bare: Bare, recorder: Recorder
) -> None:
    source = pinned(unsigned)
    sign(Bundle.open(unsigned), KEY)
    builder = bare(sealed=SealMode.ERROR, bundles=(source,))
    reason = f"bundle {unsigned} cannot be trusted: its SHA-256 is "
    assert_refused(builder, recorder, source, reason, "copy the file again, or correct the pin")


def test_a_bundle_is_mounted_once_with_or_without_its_pin(unsigned: Path, bare: Bare) -> None:
    builder = bare()
    plain = builder.mount(unsigned)
    assert builder.mount(os.path.relpath(unsigned)) is plain
    proven = builder.mount(pinned(unsigned))
    assert proven is not plain
    assert builder.bundles == (proven,)
    assert builder.mount(unsigned) is proven
    assert builder.mount(pinned(unsigned)) is proven
    with pytest.raises(BundleError, match="and the pin is 0000"):
        builder.mount(f"{unsigned}@sha256:{'0' * 64}")
    assert builder.bundles == (proven,)


def test_a_replaced_bundle_must_be_signed_too(
    signed: Path, baked: Baked, keys: dict[str, Path], bare: Bare
) -> None:
    builder = bare(bundles=(signed,), require_signed=True, trusted_keys=(keys["trusted"],))
    shutil.copy(baked.path, signed.with_name("next.heat"))
    os.replace(signed.with_name("next.heat"), signed)
    with pytest.raises(BundleError, match="it is not signed"):
        builder.mount(signed)
    assert builder.build(PLAIN, "sm_90").cubin  # from the file that is open
