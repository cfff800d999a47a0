"""Requests of other libraries in a manifest: read, written, merged and rejected as programs are."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preheat.ahead.manifest import (
    COVERAGES,
    ForeignProgram,
    GraphKeys,
    Manifest,
    ManifestProgram,
    require_programs,
)
from preheat.ahead.recorder import merge_into
from preheat.errors import InputError
from preheat.model.program import Program
from tests.ahead.manifest.support import (
    KERNEL,
    SM_80,
    SM_90,
    SM_100,
    shared_directory,
    texts,
    unhurried,
    written,
)

REQUEST = '{"env":{},"function":"kernels:add"}'
RECORDED = '{"line":12}'
ADD = ForeignProgram(
    *("triton", "kernels:add", REQUEST, RECORDED, "/srv/app"),
    archs=(SM_90,),
    entries=("KEY variant",),
    seconds=0.25,
    requests=3,
    callers=("app.py:7",),
)

json_tables = st.dictionaries(st.text(max_size=4), st.integers() | st.text(max_size=8), max_size=3)
requests = st.builds(
    ForeignProgram,
    kind=st.sampled_from(["triton", "cupy"]),
    name=texts.filter(bool),
    request=json_tables.map(json.dumps),
    recorded=st.just("") | json_tables.map(json.dumps),
    root=st.sampled_from(["", "/srv/app", "/"]),
    archs=st.lists(st.sampled_from([SM_80, SM_90, SM_100]), max_size=3).map(tuple),
    entries=st.lists(texts, max_size=3).map(tuple),
    coverage=st.sampled_from(COVERAGES),
    seconds=st.integers(0, 10_000_000).map(lambda ms: ms / 1000),
    requests=st.integers(0, 1000),
    callers=st.lists(texts, max_size=3).map(tuple),
)
recordings = st.builds(
    lambda items: Manifest(foreign=tuple(items)),
    st.lists(
        st.builds(
            ForeignProgram,
            kind=st.just("triton"),
            name=st.sampled_from(["a", "b"]),
            request=st.sampled_from(["", '{"x":1}']),
            recorded=st.just('{"line":1}'),  # Those of another build replace entries.
            archs=st.lists(st.sampled_from([SM_80, SM_90]), max_size=2).map(tuple),
            entries=st.lists(st.sampled_from("xyz"), max_size=2).map(tuple),
            coverage=st.sampled_from(COVERAGES),
            seconds=st.sampled_from([0.0, 0.5]),
            requests=st.integers(0, 3),
            callers=st.lists(st.sampled_from("abcdefghijkl"), max_size=9).map(tuple),
        ),
        max_size=4,
    ),
)


# Reading


def test_a_request_is_read(read: Callable[[str], Manifest], manifest_file: Path) -> None:
    (item,) = read(
        """
        [[foreign]]
        kind = "triton"
        name = "kernels:add"
        root = "src"
        request = '{"function":"kernels:add"}'
        recorded = '{"line":12}'
        coverage = "weak"
        arch = ["sm_90", "sm_80"]
        entries = ["KEY variant", "OTHER"]
        seconds = 1
        requests = 2
        callers = ["app.py:7"]
        """
    ).foreign
    assert item == ForeignProgram(
        *("triton", "kernels:add", '{"function":"kernels:add"}', RECORDED),
        root=str(manifest_file.parent / "src"),
        archs=(SM_80, SM_90),
        entries=("KEY variant", "OTHER"),
        coverage="weak",
        seconds=1.0,
        requests=2,
        callers=("app.py:7",),
    )
    assert item.title == "triton kernels:add"
    assert item.row == {
        "function": "kernels:add",
        "root": str(manifest_file.parent / "src"),
        "recorded": {"line": 12},
    }


def test_a_kind_a_name_and_entries_are_enough(read: Callable[[str], Manifest]) -> None:
    (item,) = read('[[foreign]]\nkind = "triton"\nname = "host code"\nentries = ["K"]\n').foreign
    assert item == ForeignProgram("triton", "host code", entries=("K",))
    assert item.coverage == "recorded"


def test_a_manifest_with_requests_alone_lists_something(read: Callable[[str], Manifest]) -> None:
    manifest = read('[[foreign]]\nkind = "triton"\nname = "x"\nentries = ["K"]\n')
    assert require_programs(manifest) is manifest


HEAD = '[[foreign]]\nkind = "triton"\nname = "f"\n'
REJECTS: dict[str, tuple[str, str, str | None]] = {
    "no kind": (
        '[[foreign]]\nname = "f"\nentries = ["K"]\n',
        ":2: f: a [[foreign]] needs a kind",
        None,
    ),
    "an empty kind": (
        '[[foreign]]\nkind = ""\nname = "f"\nentries = ["K"]\n',
        ":2: f: a [[foreign]] needs a kind",
        None,
    ),
    "no name": (
        '[[foreign]]\nkind = "triton"\nentries = ["K"]\n',
        "a [[foreign]] needs a name",
        None,
    ),
    "neither": (HEAD, ":2: f: a [[foreign]] needs a `request` or `entries`", None),
    "both empty": (
        HEAD + 'request = ""\nentries = []\n',
        ":2: f: a [[foreign]] needs a `request` or `entries`",
        None,
    ),
    "coverage": (
        HEAD + 'entries = ["K"]\ncoverage = "all"\n',
        ":6: f: 'all' is not one of recorded, closure, weak",
        None,
    ),
    "a request of another form": (
        HEAD + "request = '[1]'\n",
        ":5: f: request is not a JSON object",
        "only `coverage` and `arch` are meant to be edited",
    ),
    "a request that was cut": (
        HEAD + "request = '{\"a\":'\n",
        ":5: f: request is not a JSON object",
        "record again",
    ),
    "a deep request": (
        HEAD + f"request = '{'[' * 100_000}'\n",
        ":5: f: request is not a JSON object",
        "record again",
    ),
    "facts": (
        HEAD + 'entries = ["K"]\nrecorded = "x"\n',
        ":6: f: recorded is not a JSON object",
        "record again",
    ),
    "unknown key": (
        HEAD + 'entries = ["K"]\narchs = ["sm_90"]\n',
        ":6: f: unknown key 'archs'",
        "did you mean 'arch'?",
    ),
    "a number for text": (
        "[[foreign]]\nkind = 1\n",
        ":3: foreign 1: kind must be text, not 1",
        None,
    ),
    "text for a list": (
        HEAD + 'entries = "K"\n',
        ":5: f: entries must be a list of texts, not 'K'",
        None,
    ),
    "a negative count": (
        HEAD + 'entries = ["K"]\nrequests = -1\n',
        ":6: f: requests must be a whole number, not -1",
        None,
    ),
    "a count of text": (
        HEAD + 'entries = ["K"]\nseconds = "1"\n',
        ":6: f: seconds must be a number of seconds, not '1'",
        None,
    ),
    "an unknown architecture": (
        HEAD + 'entries = ["K"]\narch = ["hopper"]\n',
        ":6: f: ",
        None,
    ),
    "one table": ('[foreign]\nkind = "a"\n', ":2: foreign must be written as [[foreign]]", None),
    "a list": ("foreign = [1]\n", ":2: foreign must be written as [[foreign]], not [1]", None),
}


@pytest.mark.parametrize(("text", "message", "hint"), REJECTS.values(), ids=REJECTS)
def test_a_wrong_value_is_rejected_with_its_line(
    read: Callable[[str], Manifest], manifest_file: Path, text: str, message: str, hint: str | None
) -> None:
    with pytest.raises(InputError) as refused:
        read(text)
    assert str(refused.value).startswith(str(manifest_file))
    assert message in str(refused.value)
    assert hint is None or hint in (refused.value.hint or "")


# Writing


def test_a_request_is_written_without_values_that_follow(tmp_path: Path) -> None:
    file = tmp_path / "kernels.toml"
    Manifest(foreign=(replace(ADD, root=str(tmp_path / "app")),)).write(file)
    text = file.read_text()
    assert (
        text[text.index("[[foreign]]") :]
        == """\
[[foreign]]
kind = "triton"
name = "kernels:add"
root = "app"
request = '{"env":{},"function":"kernels:add"}'
recorded = '{"line":12}'
arch = ["sm_90"]
entries = ["KEY variant"]
seconds = 0.25
requests = 3
callers = ["app.py:7"]
"""
    )


@pytest.mark.parametrize(
    ("value", "line"),
    {
        "quotes": ('{"a":1}', "request = '{\"a\":1}'"),
        "an apostrophe": ('{"a":"it\'s"}', 'request = "{\\"a\\":\\"it\'s\\"}"'),
        "a control character": ('{"a":"\x7f"}', 'request = "{\\"a\\":\\"\\u007f\\"}"'),
        "no quotes": ("{}", 'request = "{}"'),
    }.values(),
)
def test_text_with_quotes_is_a_literal_where_toml_allows_it(
    tmp_path: Path, value: str, line: str
) -> None:
    file = tmp_path / "kernels.toml"
    Manifest(foreign=(ForeignProgram("triton", "f", value),)).write(file)
    assert line in file.read_text().splitlines()
    assert Manifest.read(file).foreign[0].request == value


@shared_directory
@given(items=st.lists(requests, max_size=3))
def test_requests_survive_a_round_trip(tmp_path: Path, items: list[ForeignProgram]) -> None:
    before = Manifest(foreign=tuple(items)).merged()
    assert written(before, tmp_path / "kernels.toml") == before


def test_the_kinds_of_tables_have_an_order(tmp_path: Path) -> None:
    file = tmp_path / "kernels.toml"
    program = ManifestProgram(Program.of(KERNEL, label="k.cu"))
    Manifest(graphs=(GraphKeys("g", ("1",)),)).write(file)
    merge_into(file, Manifest(foreign=(ADD,)))
    merge_into(file, Manifest((program,)))
    merge_into(file, Manifest(foreign=(replace(ADD, name="a"), replace(ADD, name="z"))))
    tables = [line for line in file.read_text().splitlines() if line.startswith("[[")]
    assert tables == ["[[program]]", *["[[foreign]]"] * 3, "[[graph]]"]
    names = [row["name"] for row in tomllib.loads(file.read_text())["foreign"]]
    assert names == ["a", "kernels:add", "z"]
    fresh = tmp_path / "fresh.toml"
    Manifest.read(file).write(fresh)
    assert Manifest.read(fresh) == Manifest.read(file)


COMMENTED = """\
# Owned by the inference team.
version = 2

# Every shape of the server.
[[foreign]]  # by Triton
kind = "triton"
name = "kernels:add"
request = '{"env":{},"function":"kernels:add"}'
recorded = '{"line":12}'
coverage = "weak"  # shapes change at run time
arch = ["sm_90"]
entries = ["KEY variant"]
# From the build machine.
seconds = 0.25
requests = 3

# The end.
"""


def test_comments_and_coverage_stay_when_a_run_is_recorded_again(tmp_path: Path) -> None:
    file = tmp_path / "kernels.toml"
    file.write_text(COMMENTED)
    merge_into(
        file, Manifest(foreign=(replace(ADD, root="", archs=(SM_100,), callers=(), requests=2),))
    )
    changed = COMMENTED.replace('["sm_90"]', '["sm_90", "sm_100"]').replace(
        "requests = 3", "requests = 5"
    )
    assert file.read_text() == changed


def test_old_manifests_are_not_changed_by_a_rewrite(tmp_path: Path) -> None:
    file = tmp_path / "kernels.toml"
    (tmp_path / "k.cu").write_text(KERNEL)
    text = 'version = 2\n\n[[program]]\nfile = "k.cu"\n\n[[graph]]\nname = "g"\nkeys = ["1"]\n'
    file.write_text(text)
    merge_into(file, Manifest(graphs=(GraphKeys("g", ("1",)),)))
    rows = tomllib.loads(file.read_text())
    assert [*rows] == ["version", "program", "graph"]
    assert file.read_text().startswith('version = 2\n\n[[program]]\nfile = "k.cu"\n')
    assert file.read_text().endswith('\n[[graph]]\nname = "g"\nkeys = ["1"]\n')


# Merging


@unhurried
@given(a=recordings, b=recordings, c=recordings)
def test_merging_is_associative(a: Manifest, b: Manifest, c: Manifest) -> None:
    assert a.merged(b).merged(c) == a.merged(b.merged(c)) == a.merged(b, c)


@unhurried
@given(rows=st.lists(recordings, min_size=1, max_size=4))
def test_merging_adds_counts_and_keeps_architectures(rows: list[Manifest]) -> None:
    both = Manifest().merged(*rows)
    items = [item for manifest in rows for item in manifest.foreign]
    assert {item.identity for item in both.foreign} == {item.identity for item in items}
    for item in both.foreign:
        same = [each for each in items if each.identity == item.identity]
        assert item.requests == sum(each.requests for each in same)
        assert set(item.archs) == {arch for each in same for arch in each.archs}
        assert item.seconds == max(each.seconds for each in same)
        assert (item.coverage == "recorded") == all(each.coverage == "recorded" for each in same)
        assert set(item.callers) <= {caller for each in same for caller in each.callers}


def test_a_later_recording_replaces_facts_and_entries() -> None:
    later = replace(ADD, recorded='{"line":13}', entries=("NEW",), requests=1)
    (item,) = Manifest(foreign=(ADD,)).merged(Manifest(foreign=(later,))).foreign
    assert (item.recorded, item.entries, item.requests) == ('{"line":13}', ("NEW",), 4)
    (item,) = Manifest(foreign=(ADD,)).merged(Manifest(foreign=(replace(ADD, entries=("X",)),))).foreign
    assert item.entries == ("KEY variant", "X")


def test_what_cannot_be_made_again_keeps_all_its_entries() -> None:
    kept = [
        ForeignProgram("triton", "f", recorded=facts, entries=(key,))
        for facts, key in (("", "A"), ('{"line":1}', "B"), ('{"line":2}', "C"))
    ]
    (item,) = Manifest(foreign=tuple(kept)).merged().foreign
    assert item.entries == ("A", "B", "C")


def test_other_requests_stay_apart() -> None:
    others = (replace(ADD, kind="cupy"), replace(ADD, name="g"), replace(ADD, request='{"b":1}'))
    assert len(Manifest(foreign=(ADD, *others)).merged().foreign) == 4


# Jobs


def test_every_request_is_paired_with_architectures() -> None:
    kept = ForeignProgram("triton", "closure", archs=(SM_90,), entries=("K",))
    any_arch = ForeignProgram("triton", "host code", entries=("H",))
    manifest = Manifest(foreign=(ADD, kept, any_arch))
    jobs = [(item.name, arch) for item, arch in manifest.foreign_jobs([SM_100, SM_80, SM_100])]
    assert jobs == [
        ("closure", SM_80),
        ("closure", SM_100),
        ("host code", None),
        ("kernels:add", SM_80),
        ("kernels:add", SM_100),
    ]
    own = [(item.name, arch) for item, arch in manifest.foreign_jobs()]
    assert own == [("closure", SM_90), ("host code", None), ("kernels:add", SM_90)]


def test_a_request_without_an_architecture_is_an_error() -> None:
    with pytest.raises(InputError, match="triton kernels:add: there is no architecture") as refused:
        Manifest(foreign=(replace(ADD, archs=()),)).foreign_jobs()
    assert "--arch" in (refused.value.hint or "")
