"""Names of bundles with a pin: what they are split into, alone and in lists like PATH."""

from __future__ import annotations

from pathlib import Path

import pytest

from preheat.errors import BundleError, ConfigError
from preheat.model.config import Config
from preheat.model.setting_values import split_pin

PIN, OTHER = "0123456789abcdef" * 4, "f" * 64


@pytest.mark.parametrize(
    ("text", "path", "pin"),
    [
        ("k.heat", "k.heat", None),
        (f"k.heat@sha256:{PIN}", "k.heat", PIN),
        (f"k.heat@sha256:{PIN.upper()}", "k.heat", PIN),
        (f"/a b/x@y/k.heat@sha256:{PIN}", "/a b/x@y/k.heat", PIN),
        ("k.heat@sha256", "k.heat@sha256", None),
        ("me@example/k.heat", "me@example/k.heat", None),
    ],
)
def test_a_name_is_split_into_path_and_pin(text: str, path: str, pin: str | None) -> None:
    assert split_pin(text) == split_pin(Path(text)) == (Path(path), pin)


@pytest.mark.parametrize(
    "text",
    [
        "k.heat@sha256:",
        "k.heat@sha256:abc",
        f"k.heat@sha256:{PIN}0",
        f"k.heat@sha256:{PIN[:-1]}g",
        f"k.heat@sha256:{PIN}/more",
        f"@sha256:{PIN}",
    ],
)
def test_a_pin_that_is_not_a_digest_is_refused(text: str) -> None:
    with pytest.raises(BundleError, match="a pin is @sha256: and 64 hexadecimal digits") as caught:
        split_pin(text)
    assert "preheat bundle ls" in str(caught.value.hint)
    with pytest.raises(ConfigError, match=r"PREHEAT_BUNDLE=.* is not a list of bundles: a pin is"):
        Config.from_env({"PREHEAT_BUNDLE": f"/a.heat:{text}"})


def test_the_colon_of_a_pin_does_not_separate_bundles() -> None:
    text = f"/a.heat@sha256:{PIN}:/b.heat:/c.heat@sha256:{OTHER}::"
    bundles = [f"/a.heat@sha256:{PIN}", "/b.heat", f"/c.heat@sha256:{OTHER}"]
    assert Config.from_env({"PREHEAT_BUNDLE": text}).bundles == tuple(map(Path, bundles))


def test_a_pinned_bundle_has_an_absolute_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    text = f"k.heat@sha256:{PIN}:~/k.heat@sha256:{PIN}"
    found = Config.from_env({"PREHEAT_BUNDLE": text}).bundles
    assert found == (tmp_path / f"k.heat@sha256:{PIN}", Path(f"/home/me/k.heat@sha256:{PIN}"))
