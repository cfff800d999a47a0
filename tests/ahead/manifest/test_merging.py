"""Merged manifests: equal programs become one row, others stay separate; and the jobs of a manifest."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from preheat.ahead.manifest import GraphKeys, Manifest, ManifestProgram
from preheat.errors import InputError
from preheat.model.arch import Arch
from preheat.model.key import bundle_key
from preheat.model.program import Program
from tests.ahead.manifest.support import (
    INCLUDING,
    KERNEL,
    SM_80,
    SM_90,
    SM_90A,
    SM_100,
    digest,
    recordings,
    unhurried,
    written,
)

# Merging


@unhurried
@given(a=recordings, b=recordings, c=recordings)
def test_merging_is_associative(a: Manifest, b: Manifest, c: Manifest) -> None:
    left = a.merged(b).merged(c)
    right = a.merged(b.merged(c))
    assert left == right == a.merged(b, c)
    assert [w.program.path for w in left.programs] == [w.program.path for w in right.programs]


@unhurried
@given(a=recordings, b=recordings)
def test_merging_is_idempotent_up_to_how_often(a: Manifest, b: Manifest) -> None:
    once = a.merged(b)
    twice = once.merged(b)
    assert [replace(w, requests=0) for w in twice.programs] == [
        replace(w, requests=0) for w in once.programs
    ]
    assert twice.graphs == once.graphs
    assert once.merged() == once


@unhurried
@given(a=recordings, b=recordings)
def test_merging_loses_nothing_and_adds_nothing(a: Manifest, b: Manifest) -> None:
    both = a.merged(b)
    rows = [*a.programs, *b.programs]
    assert len(both.programs) == len({told_apart_by(wanted) for wanted in rows})
    for wanted in both.programs:
        same = [row for row in rows if told_apart_by(row) == told_apart_by(wanted)]
        assert set(wanted.archs) == {arch for row in same for arch in row.archs}
        assert set(wanted.entries) == {entry for row in same for entry in row.entries}
        assert set(wanted.program.include) == {place for row in same for place in row.program.include}
        assert wanted.requests == sum(row.requests for row in same)
        assert wanted.seconds == max(row.seconds for row in same)


def told_apart_by(wanted: ManifestProgram) -> object:
    """Return the parts by which a row of the recordings above differs from another."""
    program = wanted.program
    return program.source, *(
        (program.include_spellings, program.include) if program.may_include else ()
    )


def test_equal_programs_are_one_row() -> None:
    one, other = (Program.of(KERNEL, include=[d]) for d in ("/b", "/a"))
    rows = (
        ManifestProgram(one, (SM_100, SM_90), ("k",), 0.5, 2, ("b.py:1",)),
        ManifestProgram(other, (SM_80, SM_90A, SM_90), ("a", "k"), 0.2, 3, ("a.py:1",), changed=True),
    )
    assert Manifest(rows[:1]).merged(Manifest(rows[1:])).programs == (
        ManifestProgram(
            replace(one, include=("/b", "/a")),
            (SM_80, SM_90, SM_90A, SM_100),
            ("a", "k"),
            0.5,
            5,
            ("a.py:1", "b.py:1"),
            changed=True,
        ),
    )


def test_of_equal_files_the_first_is_named() -> None:
    one, other = (replace(Program.of(KERNEL), path=path) for path in ("/b/k.cu", "/a/k.cu"))
    (wanted,) = Manifest((ManifestProgram(one), ManifestProgram(other))).merged().programs
    assert wanted.program.path == "/b/k.cu"


def test_a_program_from_text_and_one_from_its_file_are_one_with_a_file(
    kernel: Path, manifest_file: Path
) -> None:
    rows = (
        ManifestProgram(Program.of(KERNEL, label="k.cu")),
        ManifestProgram(Program.from_file(kernel)),
    )
    (wanted,) = written(Manifest(rows), manifest_file).programs
    assert wanted.program.path == str(kernel)


@pytest.mark.parametrize("other", [["/b"], [], ["/a", "/b"], ["/b", "/a"]])
def test_include_lists_stay_separate_where_a_file_is_included(other: list[str]) -> None:
    rows = tuple(ManifestProgram(Program.of(INCLUDING, include=include)) for include in (["/a"], other))
    assert len(Manifest(rows).merged().programs) == 2


def test_lists_that_are_spelled_alike_stay_separate_too(tmp_path: Path) -> None:
    """Only their headers tell whether they are the same."""
    programs = []
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "k.cu").write_text(INCLUDING)
        programs.append(Program.from_file(tmp_path / name / "k.cu"))
    assert digest(programs[0]) == digest(programs[1])
    again = written(Manifest(tuple(map(ManifestProgram, programs))), tmp_path / "kernels.toml")
    assert [wanted.program for wanted in again.programs] == programs


def test_a_title_has_the_include_list_where_that_tells_it_from_a_namesake() -> None:
    def titles(*programs: Program) -> list[str]:
        return [
            wanted.title for wanted in Manifest(tuple(map(ManifestProgram, programs))).merged().programs
        ]

    one, other, named = (
        Program.of(INCLUDING, label="k.cu", include=include, names=names)
        for include, names in ((["/a"], ()), (["b", "/c"], ()), (["/b"], ["tk<int>"]))
    )
    assert titles(one, named) == ["k.cu", "k.cu (tk<int>)"]
    assert titles(one, other) == ["k.cu (include /a)", "k.cu (include b, /c)"]
    assert titles(named, replace(named, include=())) == [
        "k.cu (tk<int>; include -)",
        "k.cu (tk<int>; include /b)",
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"source": "x"},
        {"label": "x"},
        {"language": "ptx"},
        {"options": ("x",)},
        {"names": ("x",)},
        {"headers": (("x", ""),)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_programs_that_differ_stay_separate(change: dict[str, Any]) -> None:
    program = Program.of(KERNEL)
    rows = (ManifestProgram(program), ManifestProgram(replace(program, **change)))
    assert len(Manifest(rows).merged().programs) == 2


def test_few_callers_are_kept_and_always_the_same() -> None:
    many = [
        Manifest((ManifestProgram(Program.of(KERNEL), callers=(f"app.py:{n}",)),))
        for n in range(10, 99)
    ]
    kept = [reduce(Manifest.merged, order).programs[0].callers for order in (many, many[::-1])]
    assert kept == [tuple(f"app.py:{n}" for n in range(10, 18))] * 2


def test_graph_keys_stay_in_the_order_they_were_seen() -> None:
    a = Manifest(graphs=(GraphKeys("g", ("9", "1")), GraphKeys("f", ("0",))))
    b = Manifest(graphs=(GraphKeys("g", ("5", "9")),))
    assert a.merged(b).graphs == (GraphKeys("f", ("0",)), GraphKeys("g", ("9", "1", "5")))


# Jobs


def test_jobs_are_for_the_recorded_architectures_unless_others_are_given() -> None:
    a = ManifestProgram(Program.of(KERNEL, label="a.cu"), (SM_90, SM_100))
    b = ManifestProgram(Program.of(KERNEL, label="b.cu"), (SM_80,))
    manifest = Manifest((b, a))
    assert manifest.jobs() == manifest.jobs([]) == [(a, SM_90), (a, SM_100), (b, SM_80)]
    assert manifest.jobs([SM_90A, SM_80, SM_80]) == [
        (wanted, arch) for wanted in (a, b) for arch in (SM_80, SM_90A)
    ]


@unhurried
@given(manifest=recordings)
def test_no_job_is_listed_twice(manifest: Manifest) -> None:
    jobs = manifest.jobs([SM_90, SM_80])
    found = [job_of(wanted, arch) for wanted, arch in jobs]
    assert len(set(found)) == len(found)
    assert set(found) == {
        job_of(wanted, arch) for wanted in manifest.programs for arch in (SM_80, SM_90)
    }


def job_of(wanted: ManifestProgram, arch: Arch) -> object:
    """Return the identity of a job: its request, and the directories whose headers may decide it."""
    program = wanted.program
    directories = program.include if program.may_include else ()
    return bundle_key(program, arch).digest, directories


def test_a_program_without_architecture_is_an_error_that_names_it() -> None:
    with pytest.raises(InputError, match=r"k\.cu: there is no architecture") as caught:
        Manifest((ManifestProgram(Program.of(KERNEL, label="k.cu")),)).jobs()
    assert "--arch" in str(caught.value.hint)
