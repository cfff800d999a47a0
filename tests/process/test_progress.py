"""The progress bar: on a terminal, after a delay where one is wanted, and lines without a terminal."""

from __future__ import annotations

import sys

import pytest

from preheat.process.progress import DelayedProgress, progress


def test_without_a_terminal_long_work_says_now_and_then_how_far_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 5.0, 10.5, 10.5, 12.0, 21.0, 21.0])
    monkeypatch.setattr("preheat.process.progress.time.monotonic", lambda: next(clock))
    with progress("baking", 4) as bar:
        for number in range(4):
            bar.step(f"k{number}.cu")
    assert capsys.readouterr().err == "baking: 2 of 4, k1.cu\nbaking: 4 of 4, k3.cu\n"


@pytest.mark.parametrize("show", [None, True])
def test_what_is_being_done_cannot_control_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, show: bool | None
) -> None:
    monkeypatch.setattr("preheat.process.progress._EVERY", 0.0)
    with progress("baking", 1, show=show) as bar:
        bar.step("a\x1b]0;owned\x07b")
    shown = capsys.readouterr().err
    assert "\x1b]0" not in shown
    assert r"a\x1b]0;owned\x07b" in shown


def test_a_progress_bar_is_shown_on_a_terminal_only(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("working", 3) as bar:
        bar.step("one")
    assert capsys.readouterr().err == ""
    with progress("working", 3, show=True) as bar:
        bar.step("one")
    assert "working" in capsys.readouterr().err


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that a progress bar sees."""
    now = [0.0]
    monkeypatch.setattr("preheat.process.progress.time.monotonic", lambda: now[0])
    return now


def test_a_delayed_bar_appears_after_two_seconds_and_knows_what_was_done_before(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with DelayedProgress("compiling", 3, work=3.0) as bar:
        bar.step("one.cu", 1, 1.0)
        clock[0] = 1.9
        bar.tick()
        assert capsys.readouterr().err == ""
        clock[0] = 2.1
        bar.tick()
        bar.tick()
        bar.step("two.cu", 1, 1.0)
    shown = capsys.readouterr().err
    assert "compiling" in shown
    assert "2/3" in shown
    assert "two.cu" in shown


def test_a_delayed_bar_writes_nothing_without_a_terminal(
    capsys: pytest.CaptureFixture[str], clock: list[float]
) -> None:
    with DelayedProgress("compiling", 3, work=3.0) as bar:
        clock[0] = 100.0
        bar.tick()
        bar.step("one.cu", 1, 1.0)
    assert capsys.readouterr().err == ""
