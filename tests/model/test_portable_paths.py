"""Spellings of directories: equal on every machine, and different for different directories."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preheat.errors import InputError
from preheat.model.portable_paths import format_spellings, is_spelling, spell, spelled_in_manifest
from preheat.model.program import Program

INCLUDING = '#include "cfg.h"\n'


@pytest.mark.parametrize(
    ("directory", "reported"),
    {
        "/app/k": "{file}",
        "/app/k/": "{file}",
        "/app/k/inc": "{file}/inc",
        "/app/k/../inc": "{file}/../inc",
        "/app": "{file}/..",
        "/app/kernels": "{file}/../kernels",
        "/app/k/..dots": "{file}/..dots",
        "/opt/lib": "/opt/lib",
        "/": "/",
    }.items(),
)
def test_a_directory_is_spelled_from_the_file(directory: str, reported: str) -> None:
    assert spell(directory, "/app/k/k.cu") == reported


def test_a_file_in_the_root_directory_has_its_own_directory_only_in_common_with_others() -> None:
    assert spell("/", "/k.cu") == "{file}"
    assert spell("/usr/include", "/k.cu") == "/usr/include"


def test_text_has_the_list_as_it_is_written_or_seen_from_the_python_file_that_asks() -> None:
    def asking() -> str:
        return "/app/src/serve.py"

    assert spell("inc/../x", None, asking) == "{cwd}/x"
    assert spell(".", None, asking) == "{cwd}"
    assert spell("/app/include", None, asking) == "{caller}/../include"
    assert spell("/opt/include", None, asking) == "/opt/include"
    assert spell("/app/include", None, lambda: None) == "/app/include"


def test_the_python_file_that_asks_is_the_one_that_calls_preheat(tmp_path: Path) -> None:
    names: dict[str, Program] = {}
    for file in ("a.py", "<string>"):
        name = file if file.startswith("<") else str(tmp_path / file)
        code = compile(
            f"p = Program.of({INCLUDING!r}, include=[{str(tmp_path / 'inc')!r}])", name, "exec"
        )
        exec(code, {"Program": Program}, names)
        reported = "{caller}/inc" if file == "a.py" else str(tmp_path / "inc")
        assert names["p"].include_spellings == (reported,)


def test_an_installed_package_is_spelled_from_where_packages_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the project has its environment inside: on another machine it is elsewhere."""
    reported = []
    for root in ("app/.venv/lib/site-packages", "usr/lib/dist-packages"):
        packages = tmp_path / root
        (packages / "x" / "include").mkdir(parents=True)
        monkeypatch.setattr(sys, "path", [str(packages)])
        reported.append(spell(str(packages / "x" / "include"), str(tmp_path / "app" / "k.cu")))
    assert reported == ["{packages}/x/include"] * 2
    assert spell(str(packages / "x" / "include"), str(packages / "x" / "k.cu")) == "{file}/include"
    assert spell(str(tmp_path / "inc"), str(packages / "x" / "k.cu")) == str(tmp_path / "inc")


def test_a_package_that_an_import_would_not_find_is_spelled_by_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (tmp_path / name / "site-packages" for name in ("first", "second"))
    for packages in (first, second):
        (packages / "x").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(first), str(second)])
    assert spell(str(first / "x"), None) == "{packages}/x"
    assert spell(str(second / "x"), None) == str(second / "x")
    monkeypatch.setattr(sys, "path", [str(first)])
    assert spell(str(second / "x"), None) == str(second / "x")


def test_a_link_to_the_project_changes_no_spelling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`__file__` goes through the link, the working directory does not."""
    release, current = tmp_path / "releases" / "7", tmp_path / "current"
    (release / "kernels").mkdir(parents=True)
    current.symlink_to(release)
    monkeypatch.chdir(current)
    assert spell("include", str(current / "kernels" / "k.cu")) == "{file}/../include"
    assert spell("include", str(current / "k.cu")) == "{file}/include"


def test_a_link_inside_the_project_is_a_directory_of_the_project(tmp_path: Path) -> None:
    for place in ("app/kernels", "store/a", "store/b"):
        (tmp_path / place).mkdir(parents=True)
    file = str(tmp_path / "app" / "kernels" / "k.cu")
    for name in "ab":
        (tmp_path / "app" / name).symlink_to(tmp_path / "store" / name)
        assert spell(str(tmp_path / "app" / name), file) == f"{{file}}/../{name}"


steps = st.lists(st.sampled_from(["a", "b", "..x", "c d"]), max_size=3).map("/".join)


@given(directories=st.lists(steps, min_size=2, max_size=2, unique=True), home=steps)
def test_two_directories_never_have_one_spelling(directories: list[str], home: str) -> None:
    paths = [os.path.abspath(f"/{directory}") for directory in directories]
    for file in (None, os.path.abspath(f"/{home}/k.cu")):
        one, other = (spell(path, file) for path in paths)
        assert one != other
        assert is_spelling(one)


@given(top=st.sampled_from(["/x", "/x/y/z"]), directory=steps, home=steps)
def test_a_project_that_moves_keeps_every_spelling(top: str, directory: str, home: str) -> None:
    here, there = (
        spell(os.path.abspath(f"{root}/{directory}"), os.path.abspath(f"{root}/{home}/k.cu"))
        for root in ("/app", top)
    )
    assert here == there
    assert spelled_in_manifest(directory or ".", os.path.join(home, "k.cu")) == here


@pytest.mark.parametrize("directory", [b"inc", 3, None])
def test_a_directory_is_a_path(directory: object) -> None:
    with pytest.raises(InputError, match="include must hold paths"):
        Program.of(INCLUDING, include=[directory])  # type: ignore[list-item]
    with pytest.raises(InputError, match="NUL"):
        Program.of(INCLUDING, include=["a\0"])


def test_another_include_list_by_replacing_it_has_spellings_of_its_own() -> None:
    from dataclasses import replace

    program = Program.of(INCLUDING, include=["a", "/opt/b"])
    assert program.include_spellings == ("{cwd}/a", "/opt/b")
    other = replace(program, include=("/opt/b", "/opt/c"))
    assert other.include_spellings == ("/opt/b", "/opt/c")
    assert other == Program.of(INCLUDING, include=["/opt/b", "/opt/c"])


def test_for_people_what_is_clear_is_left_out() -> None:
    assert (
        format_spellings(("{file}", "{file}/../a", "{cwd}/b", "{caller}/c", "/d"))
        == "../a, b, {caller}/c, /d"
    )
