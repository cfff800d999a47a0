"""Architectures: names, compatibility, and the order in which stored code is tried."""

from __future__ import annotations

import pytest

from preheat.errors import InputError
from preheat.model.arch import Arch, mismatch, runnable_archs


@pytest.mark.parametrize("text", ["sm_90a", "90a", "9.0a", "compute_90a"])
def test_parse_reads_the_usual_spellings(text: str) -> None:
    assert Arch.parse(text) == Arch(9, 0, "a")
    assert str(Arch.parse(text)) == "sm_90a"


def test_three_digits_are_major_and_minor() -> None:
    assert Arch.parse("sm_121") == Arch(12, 1)


@pytest.mark.parametrize("text", ["", "sm_", "sm_9", "sm_90b", "hopper", "sm_1000", "sm_20", "sm_90 a"])
def test_parse_refuses(text: str) -> None:
    with pytest.raises(InputError, match="not a GPU architecture"):
        Arch.parse(text)


@pytest.mark.parametrize(
    ("target", "device"),
    [
        ("sm_80", "sm_90"),
        ("sm_90", "sm_90"),
        ("sm_90a", "sm_90"),
        ("sm_100f", "sm_100"),
        ("sm_100f", "sm_103"),
        ("sm_120f", "sm_121"),
    ],
)
def test_code_runs(target: str, device: str) -> None:
    assert mismatch(Arch.parse(target), Arch.parse(device)) is None


@pytest.mark.parametrize(
    ("target", "device"),
    [
        ("sm_100", "sm_90"),
        ("sm_90a", "sm_100"),
        ("sm_100a", "sm_103"),
        ("sm_103f", "sm_100"),
        ("sm_100f", "sm_120"),
        ("sm_121f", "sm_120"),
    ],
)
def test_code_does_not_run(target: str, device: str) -> None:
    assert mismatch(Arch.parse(target), Arch.parse(device))


def test_strict_demands_equality() -> None:
    assert "strict" in str(mismatch(Arch.parse("sm_80"), Arch.parse("sm_90"), strict=True))
    assert "strict" in str(mismatch(Arch.parse("sm_80"), Arch.parse("sm_86"), strict=True))
    assert mismatch(Arch.parse("sm_90"), Arch.parse("sm_90"), strict=True) is None


def test_runnable_archs_go_from_exact_to_lower_minor() -> None:
    assert [str(a) for a in runnable_archs(Arch.parse("sm_103"))] == [
        *("sm_103", "sm_103a", "sm_103f", "sm_102f", "sm_101f", "sm_100f"),
        *("sm_102", "sm_101", "sm_100"),
    ]


def test_every_runnable_arch_runs() -> None:
    for name in ("sm_80", "sm_86", "sm_90", "sm_103", "sm_121"):
        device = Arch.parse(name)
        assert all(mismatch(arch, device) is None for arch in runnable_archs(device))
