"""Keys: which values change a key, which do not, and that no two requests share one."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preheat.model.arch import Arch
from preheat.model.key import Key, bundle_key, explain, request_digest, request_key
from preheat.model.program import Program

BASE = Program.of('extern "C" __global__ void k() {}', label="k.cu", options=["-a"], names=["t<int>"])
SM_90 = Arch.parse("sm_90")
TOOLCHAIN = "nvrtc 79209de6"


def key(program: Program = BASE, arch: str = "sm_90", toolchain: str = TOOLCHAIN) -> Key:
    return request_key(program, Arch.parse(arch), toolchain)


DIFFERENT = {
    "source": key(replace(BASE, source=BASE.source + " ")),
    "label": key(replace(BASE, label="other.cu")),
    "language": key(replace(BASE, language="ptx", names=())),
    "no names": key(replace(BASE, names=())),
    "option value": key(replace(BASE, options=("-b",))),
    "option order": key(replace(BASE, options=("-b", "-a"))),
    "one option more": key(replace(BASE, options=("-a", "-b"))),
    "no options": key(replace(BASE, options=())),
    "an empty option": key(replace(BASE, options=("",))),
    "header text": key(replace(BASE, headers=(("h.h", "1"),))),
    "header name": key(replace(BASE, headers=(("g.h", "1"),))),
    "name": key(replace(BASE, names=("t<float>",))),
    "name among options": key(replace(BASE, names=(), options=("-a", "t<int>"))),
    "arch": key(arch="sm_100"),
    "arch suffix": key(arch="sm_90a"),
    "toolchain build": key(toolchain="nvrtc 79209de7"),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_key_differs_on(what: str) -> None:
    assert DIFFERENT[what].digest != key().digest


def test_all_of_these_keys_differ_from_one_another() -> None:
    assert len({k.digest for k in DIFFERENT.values()}) == len(DIFFERENT)


def test_key_is_the_same_for_another_include_directory() -> None:
    assert key(replace(BASE, include=("/somewhere/else",))) == key()


# What a bundle goes by

INCLUDING = '#include "cfg.h"\nextern "C" __global__ void k() {}'


def asked(program: Program, arch: str = "sm_90") -> Key:
    return bundle_key(program, Arch.parse(arch))


def in_file(home: str, *include: str) -> Program:
    """Return a program in a file of the project in `home`."""
    own = f"{home}/kernels"
    return Program.of(INCLUDING, label="k.cu", include=[own, *include], path=f"{own}/k.cu")


BESIDE = in_file("/app", "/app/a", "/app/b")
OTHER_LISTS = {
    "another directory": in_file("/app", "/app/a", "/app/c"),
    "another order": in_file("/app", "/app/b", "/app/a"),
    "one directory more": in_file("/app", "/app/a", "/app/b", "/app/c"),
    "one directory twice": in_file("/app", "/app/a", "/app/b", "/app/b"),
    "one directory less": in_file("/app", "/app/a"),
    "no directory": Program.of(INCLUDING, label="k.cu", path="/app/kernels/k.cu"),
    "a directory elsewhere": in_file("/app", "/app/a", "/b"),
    "text, which has no file": replace(
        BESIDE, path=None, spellings=(), include=("/app/kernels", "/app/a", "/app/b")
    ),
    "text and its working directory": Program.of(
        INCLUDING, label="k.cu", include=[".", "../a", "../b"]
    ),
    "directories that read like spellings": Program.of(
        INCLUDING, label="k.cu", include=["{file}", "{file}/../a", "{file}/../b"]
    ),
    "a list that joins alike": in_file("/app", "/app/a/../b"),
}


@pytest.mark.parametrize("what", OTHER_LISTS)
def test_bundle_key_differs_on(what: str) -> None:
    assert asked(OTHER_LISTS[what]) != asked(BESIDE)


def test_all_of_these_bundle_keys_differ_from_one_another() -> None:
    assert len({asked(program).digest for program in OTHER_LISTS.values()}) == len(OTHER_LISTS)


@pytest.mark.parametrize("what", OTHER_LISTS)
def test_the_key_of_a_compile_is_the_same_for_any_include_list(what: str) -> None:
    assert key(OTHER_LISTS[what]) == key(BESIDE)


@pytest.mark.parametrize("home", ["/home/me/app", "/srv/x", "/a/b/c/d/e"])
def test_bundle_key_is_the_same_for_a_project_that_moves(home: str) -> None:
    assert asked(in_file(home, f"{home}/a", f"{home}/b")) == asked(BESIDE)


def test_bundle_key_is_the_same_for_an_option_that_names_a_directory() -> None:
    option = Program.of(
        INCLUDING,
        label="k.cu",
        include=["/app/kernels"],
        options=["-I/app/a", "--include-path=/app/kernels/../b"],
        path="/app/kernels/k.cu",
    )
    assert asked(option) == asked(BESIDE)


def test_bundle_key_is_the_same_for_text_and_its_relative_list_wherever_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = []
    for place in ("one", "other"):
        (tmp_path / place).mkdir()
        monkeypatch.chdir(tmp_path / place)
        keys.append(asked(Program.of(INCLUDING, include=["include", "./deep//../x"])))
    assert keys[0] == keys[1]
    assert dict(keys[0].parts)["include[1]"] == b"{cwd}/x"


def test_bundle_key_of_a_program_that_includes_nothing_has_no_directories() -> None:
    assert asked(replace(BASE, include=("/somewhere/else",))) == asked(BASE)
    assert asked(BASE).digest == "fc5eb81f139e0cf849bb74118f461bae193393e3a182ab3b639d90e11b334f1c"


def test_a_directory_whose_name_is_not_text_has_a_bundle_key() -> None:
    program = Program.of(INCLUDING, include=[os.fsdecode(b"/\xff")])
    assert dict(asked(program).parts)["include[0]"] == b"/\xff"


def test_explain_names_the_include_directory_that_differs() -> None:
    reported = explain(asked(BESIDE), asked(OTHER_LISTS["another directory"]))
    assert reported == ("include[2]: '{file}/../b' became '{file}/../c'",)


def test_key_is_the_same_for_headers_given_in_another_order() -> None:
    one = Program.of("x", headers={"a.h": "1", "b.h": "2"})
    other = Program.of("x", headers={"b.h": "2", "a.h": "1"})
    assert key(one) == key(other)


def test_key_never_changes_between_releases() -> None:
    """Existing caches go by this digest: change SCHEMA if the meaning changes, not the encoding."""
    assert key().digest == "d630a9de63070607d6be052ed6a25ddc2b53ae1d775a0297140c17930aafce26"


def test_key_holds_no_path_and_no_time() -> None:
    labels = {label for label, _ in key().parts}
    assert labels == {
        *("schema", "toolchain", "arch", "language", "form", "label", "source"),
        *("options", "option[0]", "names", "name[0]"),
    }


@pytest.mark.parametrize(
    ("left", "right"),
    [(["ab", "c"], ["a", "bc"]), (["-a", "-b"], ["-b", "-a"]), ([], [""]), (["a"], ["a", ""])],
)
def test_option_lists_that_join_alike_key_apart(left: list[str], right: list[str]) -> None:
    assert key(replace(BASE, options=tuple(left))) != key(replace(BASE, options=tuple(right)))


rows = st.lists(st.tuples(st.text(max_size=8), st.binary(max_size=8)), max_size=6)


@given(rows, rows)
def test_digest_is_injective_over_parts(a: list[tuple[str, bytes]], b: list[tuple[str, bytes]]) -> None:
    assert (Key(tuple(a)).digest == Key(tuple(b)).digest) == (a == b)


texts = st.lists(st.text(alphabet="ab-", max_size=3), max_size=3)


@given(texts, texts, texts, texts)
def test_requests_key_alike_only_when_equal(
    options: list[str], names: list[str], other_options: list[str], other_names: list[str]
) -> None:
    one = replace(BASE, options=tuple(options), names=tuple(names))
    other = replace(BASE, options=tuple(other_options), names=tuple(other_names))
    assert (key(one).digest == key(other).digest) == (one == other)


def test_explain_names_exactly_the_parts_that_differ() -> None:
    reported = explain(key(), key(replace(BASE, options=("-z",)), arch="sm_90a"))
    assert reported == ("arch: 'sm_90' became 'sm_90a'", "option[0]: '-a' became '-z'")


def test_explain_of_equal_keys_is_empty() -> None:
    assert explain(key(), key()) == ()


def test_explain_tells_what_only_one_side_has() -> None:
    reported = explain(key(), key(replace(BASE, options=(), headers=(("h.h", "x"),))))
    assert "option[0]: '-a' is gone" in reported
    assert "header:h.h: 'x' is new" in reported


def test_a_long_part_is_kept_by_hash_and_still_explained() -> None:
    long, longer = "/" * 500, "/" * 501
    reported = explain(key(replace(BASE, source=long)), key(replace(BASE, source=longer)))
    assert len(reported) == 1
    assert "500 bytes" in reported[0]
    assert "501 bytes" in reported[0]


@given(
    source=st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1),
    label=st.text(st.characters(codec="utf-8", exclude_characters="/"), min_size=1).filter(
        str.isprintable
    ),
    rows=st.sampled_from(("", "options", "names", "headers")),
    ptx=st.booleans(),
)
def test_the_digest_of_a_request_is_that_of_its_key(
    source: str, label: str, rows: str, ptx: bool
) -> None:
    """It is made in a shorter way for a program without options, names and headers."""
    more = {"options": {"options": ("-a",)}, "names": {"names": ("t<int>",)}}
    fields = more.get(rows, {"headers": (("h.h", "1"),)} if rows else {})
    language = "ptx" if ptx and rows in ("", "options") else "cuda"
    program = Program(source=f"x{source}", label=label, language=language, **fields)
    for arch in (SM_90, Arch.parse("sm_90a")):
        expected = request_key(program, arch, TOOLCHAIN).digest
        assert request_digest(program, arch, TOOLCHAIN) == expected
