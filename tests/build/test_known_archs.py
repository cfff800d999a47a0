"""Architectures that exist, by the list of preheat and by the compiler."""

from __future__ import annotations

import pytest

from preheat.build.builder import Builder
from preheat.build.known_archs import require_known
from preheat.errors import InputError
from preheat.model.arch import LISTED_ARCHS, Arch
from preheat.toolchain.locate import Located


def with_nvrtc_for(monkeypatch: pytest.MonkeyPatch, *archs: int) -> None:
    """Let NVRTC support these architectures."""
    located = Located({}, {}, {}, archs)
    monkeypatch.setattr("preheat.toolchain.compiler.Toolchain.located", property(lambda _: located))


def test_listed_architectures_are_known_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("preheat.toolchain.compiler.Toolchain.located", None)
    require_known(LISTED_ARCHS)
    require_known([Arch.parse("sm_90a"), Arch.parse("sm_100f")])


@pytest.mark.parametrize("name", ["sm_91", "sm_104a", "sm_130", "sm_999"])
def test_an_architecture_that_nothing_knows_is_refused_with_those_that_are_known(
    builder: Builder, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    with_nvrtc_for(monkeypatch)  # NVRTC is not installed.
    for given in (builder, None):
        with pytest.raises(InputError, match=f"^{name} is not a known GPU architecture") as caught:
            require_known([Arch(9, 0), Arch.parse(name)], given)
        known = ", ".join(map(str, sorted(LISTED_ARCHS)))
        assert caught.value.hint == f"known architectures: {known}"


def test_a_compiler_that_is_newer_than_the_list_is_asked(
    builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_nvrtc_for(monkeypatch, 90, 130)
    require_known([Arch.parse("sm_130"), Arch.parse("sm_130a")], builder)
    with pytest.raises(InputError, match="sm_131") as caught:
        require_known([Arch.parse("sm_130"), Arch.parse("sm_131")], builder)
    assert str(caught.value.hint).endswith(", sm_121, sm_130")
