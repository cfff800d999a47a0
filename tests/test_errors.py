"""Errors: their attributes and their messages."""

from __future__ import annotations

import pickle
import traceback

import pytest

from preheat.errors import CompileError, Diagnostic, InputError, PreheatError, copy_error, did_you_mean


def row(number: int, severity: str = "error") -> Diagnostic:
    return Diagnostic("k.cu", number, severity, f"message {number}")


def test_a_caret_stands_under_its_column_also_behind_tabs() -> None:
    shown = str(Diagnostic("k.cu", 2, "error", "bad", "\tx[0] = q;", 9))
    assert shown == "k.cu:2:9: error: bad\n    \tx[0] = q;\n    \t       ^"


def test_many_errors_are_cut_short_and_warnings_left_out() -> None:
    error = CompileError("k.cu", "sm_90", (), "log", [row(0, "warning"), *map(row, range(1, 12))])
    assert "message 8" in str(error)
    assert "message 9" not in str(error)
    assert "message 0" not in str(error)
    assert str(error).endswith("… and 3 more errors; error.log has all of them")
    assert len(error.rows) == 12


@pytest.mark.parametrize(("log", "shown"), [("why\n", "why"), ("", "the compiler gave no reason")])
def test_a_log_without_rows_is_shown_whole(log: str, shown: str) -> None:
    assert str(CompileError("k.cu", "sm_90", ("-a",), log)).splitlines() == [
        "k.cu does not compile for sm_90 with -a",
        shown,
    ]


def test_a_fresh_copy_is_another_object_with_the_same_content() -> None:
    error = CompileError("k.cu", "sm_90", ("-a",), "log", [row(1)])
    copy = copy_error(error, count=7)
    assert copy is not error
    assert (str(copy), copy.log, copy.rows, copy.count) == (str(error), "log", (row(1),), 7)
    assert error.count == 1


def test_a_traceback_has_the_hint_that_counts_and_other_notes() -> None:
    error = InputError("no", hint="first")
    error.add_note("seen on the way")
    error.hint = "do this"
    for each in (error, copy_error(error), pickle.loads(pickle.dumps(error))):
        lines = "".join(traceback.format_exception(each)).splitlines()
        assert lines[-3:] == ["preheat.errors.InputError: no", "seen on the way", "hint: do this"]
    copy_error(error, hint="not that").add_note("on the copy alone")
    error.hint = None
    assert error.__notes__ == ["seen on the way"]


def test_a_guess_is_made_only_when_something_is_close() -> None:
    assert did_you_mean("saxpi", ["gemm", "saxpy"]) == "did you mean 'saxpy'?"
    assert did_you_mean("zzz", ["gemm", "saxpy"]) is None


def test_every_error_is_in_the_tree_of_the_docstring() -> None:
    import preheat.errors as module

    def all_below(base: type[Exception]) -> set[str]:
        return {c.__name__ for c in base.__subclasses__()}.union(
            *(all_below(c) for c in base.__subclasses__())
        )

    assert module.__doc__ is not None
    for name in all_below(PreheatError) & set(module.__all__):
        assert f" {name} " in module.__doc__, name
