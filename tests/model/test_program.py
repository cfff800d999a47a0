"""Programs: accepted and refused arguments, and programs that no key can describe."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import preheat
from preheat.errors import InputError
from preheat.gpu import Gpu
from preheat.model.program import Program, first_token

PTX = "//\n// Generated\n//\n.version 8.0\n.target sm_90\n.address_size 64\n"


def test_language_is_distinguished_from_the_text() -> None:
    assert Program.of(PTX).language == "ptx"
    assert Program.of("/* .version 8.0 */ __global__ void k() {}").language == "cuda"


@pytest.mark.parametrize(
    "text", ["\ufeff.version 8.0", ".visible .entry k() {}", "/* a */ .address_size 64"]
)
def test_text_that_starts_with_a_dot_is_ptx(text: str) -> None:
    assert Program.of(text).language == "ptx"


def test_a_program_made_by_hand_is_checked_too() -> None:
    with pytest.raises(InputError, match="plain name"):
        Program(source="x", label="a/b.cu")


@pytest.mark.parametrize(
    "options",
    [["-I/inc"], ["-I", "/inc"], ["-I=/inc"], ["--include-path=/inc"], ["--include-path", "/inc"]],
)
def test_include_options_move_to_the_include_field(options: list[str]) -> None:
    program = Program.of("x", options=["-a", *options, "-b"])
    assert program.options == ("-a", "-b")
    assert program.include == ("/inc",)


def test_explicit_include_directories_come_before_those_among_options() -> None:
    assert Program.of("x", include=["/first"], options=["-I/second"]).include == ("/first", "/second")


def test_relative_include_directories_are_fixed_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert Program.of("x", include=["inc"]).include == (str(tmp_path / "inc"),)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bytes as source": ({"source": b"x"}, "text"),
    "options as one string": ({"options": "-a"}, "must be a list"),
    "names as one string": ({"names": "t<int>"}, "must be a list"),
    "options as a number": ({"options": 5}, "options must be a list, not int: 5"),
    "include as a mapping": ({"include": {"a": "b"}}, "include must be a list, not dict"),
    "include as bytes": ({"include": b"inc"}, "include must be a list, not one value"),
    "a directory in bytes": ({"include": [b"inc"]}, "include must hold paths"),
    "an option that is no string": ({"options": [1]}, "option must be text"),
    "a path as label": ({"label": "/tmp/k.cu"}, "plain name"),
    "an empty label": ({"label": ""}, "plain name"),
    **{
        f"a label with {what}": ({"label": f"k{character}.cu"}, "without control characters")
        for what, character in {
            "an escape sequence": "\x1b[31m",
            "a line break": "\n",
            "a tab": "\t",
            "a NUL byte": "\0",
            "a change of direction": "\u202e",
            "a lone surrogate": "\ud800",
        }.items()
    },
    "an architecture among the options": (
        {"options": ["--gpu-architecture=sm_90"]},
        "cannot be an option of a program",
    ),
    "the short spelling of it": ({"options": ["-arch=sm_90"]}, "cannot be an option of a program"),
    **{
        f"unlinked code by {' '.join(options)}": ({"options": ["-a", *options]}, "has to be linked")
        for options in (
            *(
                ["-rdc=true"],
                ["-rdc", "true"],
                ["--relocatable-device-code=true"],
                ["-dc"],
                ["--device-c"],
            ),
            *(["--relocatable-device-code", "true"], ["-dlto"], ["--dlink-time-opt"], ["-r"], ["-lto"]),
        )
    },
    "a NUL byte": ({"source": "a\0b"}, "NUL"),
    "a NUL byte in an option": ({"options": ["-D\0"]}, "an option contains a NUL"),
    "a header name that is no text": ({"headers": {"\ud800.h": ""}}, "a header is not valid"),
    "a lone surrogate": ({"source": "\ud800"}, "Unicode"),
    "-I without a directory": ({"options": ["-I"]}, "directory"),
    "include as one path": ({"include": Path("x")}, "must be a list"),
    "an include that is no path": ({"include": [3]}, "include must hold paths"),
    "headers as a list": ({"headers": [("a.h", "")]}, "must be a mapping"),
    "header text in bytes": ({"headers": {"a.h": b""}}, "header a.h must be text"),
    "a label that is no text": ({"label": 3}, "label must be text"),
    "no source at all": ({"source": " \n"}, "the source is empty"),
    "another language": ({"language": "hip"}, "'cuda' or 'ptx'"),
    "headers for PTX": ({"source": PTX, "headers": {"a.h": ""}}, "PTX takes no headers"),
    "names for PTX": ({"source": PTX, "names": ["t<int>"]}, "PTX takes no names"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refuses(what: str) -> None:
    given, message = REFUSED[what]
    with pytest.raises(InputError, match=message):
        Program.of(**{"source": "x", **given})


ASK: dict[str, Callable[..., object]] = {
    "Program.of": lambda _, file, **given: Program.of(file.read_text(), **given),
    "Program.from_file": lambda _, file, **given: Program.from_file(file, **given),
    "preheat.compile": lambda _, file, **given: preheat.compile(file, "sm_90", **given),
    "gpu.module": lambda gpu, file, **given: gpu.module(file, **given),
    "gpu.kernel": lambda gpu, file, **given: gpu.kernel(file, "k<int>", **given),
}


@pytest.mark.parametrize("ask", ASK)
@pytest.mark.parametrize(
    ("given", "message", "hint"),
    [
        ({"include": "inc"}, "include must be a list, not one value: 'inc'", "write include=['inc']"),
        ({"include": Path("inc")}, "include must be a list, not one value", "write include=['inc']"),
        ({"options": "-G"}, "options must be a list, not one value: '-G'", "write options=['-G']"),
        ({"names": "tk<int>"}, "names must be a list, not one value", "write names=['tk<int>']"),
        ({"options": 5}, "options must be a list, not int: 5", None),
        ({"include": [["a"]]}, "include must hold paths, not list", None),
        ({"headers": 5}, "headers must be a mapping from name to text, not int", None),
        ({"headers": {1: "a", "b.h": ""}}, "header name must be text", None),
    ],
)
def test_one_value_where_a_list_belongs_is_refused_by_every_call(
    ask: str,
    given: dict[str, Any],
    message: str,
    hint: str | None,
    tmp_path: Path,
    open_device: Callable[..., Gpu],
) -> None:
    file = tmp_path / "k.cu"
    file.write_text("template <class T> __global__ void k(T* x) { *x = 1; }")
    with pytest.raises(InputError) as caught:
        ASK[ask](open_device("emulator"), file, **given)
    assert message in str(caught.value)
    assert caught.value.hint == hint


def test_none_is_an_empty_list() -> None:
    assert Program.of("x", options=None, include=None, names=None, headers=None) == Program.of("x")


def test_a_pipe_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "k.cu")
    with pytest.raises(InputError, match=r"cannot read .*k\.cu: it is a pipe or a device, not a file"):
        Program.from_file(tmp_path / "k.cu")


UNCACHEABLE: dict[str, dict[str, Any]] = {
    "__TIME__": {"source": "int t = sizeof(__TIME__);"},
    "__DATE__ in a header": {"source": '#include "d.h"', "headers": {"d.h": "#define D __DATE__"}},
    "a clock macro among the options": {"source": "x", "options": ["-DNOW=__TIMESTAMP__"]},
    "the user's own time trace": {"source": "x", "options": ["--fdevice-time-trace=t"]},
    "the user's own timing file": {"source": "x", "options": ["-time=t"]},
    "an automatic precompiled header": {"source": "x", "options": ["-pch"]},
    "a precompiled header": {"source": "x", "options": ["--use-pch=a.pch"]},
    "options from a file": {"source": "x", "options": ["-Xptxas=--options-file=f"]},
    "the short spelling of it": {"source": "x", "options": ["-Xptxas=-optf=f"]},
    "a clock behind a raw string": {"source": 'auto s = R"(a " /* b)"; int t = sizeof(__TIME__);'},
    "a clock behind a quoted quote": {
        "source": "char a = '\"'; int t = sizeof(__TIME__); char b = '\"';"
    },
    "bundled headers": {"source": "x", "options": ["--use-bundled-headers=d"]},
}


@pytest.mark.parametrize("what", UNCACHEABLE)
def test_an_uncacheable_program_says_so(what: str) -> None:
    given = dict(UNCACHEABLE[what])
    assert Program.of(given.pop("source"), **given).uncacheable


@pytest.mark.parametrize(
    "source",
    [
        "// __TIME__ is not used\nint a;",
        '/* __DATE__ */ const char* s = "__TIME__";',
        "int my__TIME__x;",
    ],
)
def test_a_clock_macro_that_is_not_used_does_no_harm(source: str) -> None:
    assert Program.of(source).uncacheable is None


@pytest.mark.parametrize(
    ("source", "may"),
    [
        ("int a;", False),
        ("#include <a.h>", True),
        ("#inc\\\nlude <a.h>", True),
        ("#if __has_include(<a.h>)\n#endif", True),
    ],
)
def test_may_include_errs_on_the_side_of_yes(source: str, may: bool) -> None:
    assert Program.of(source).may_include is may


def test_a_forced_include_counts_as_including() -> None:
    assert Program.of("int a;", options=["-include=/a.h"]).may_include


def test_from_file_takes_label_language_and_directory_from_the_path(tmp_path: Path) -> None:
    (tmp_path / "k.cu").write_text("int a;")
    program = Program.from_file(tmp_path / "k.cu", include=["/more"])
    assert (program.label, program.language) == ("k.cu", "cuda")
    assert program.include == (str(tmp_path), "/more")


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read .*none\.cu: No such file"):
        Program.from_file(tmp_path / "none.cu")


def test_a_compiled_file_is_refused_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "k.cu").write_bytes(b"ok\n\xff\xfe\n")
    with pytest.raises(InputError, match=r"k\.cu:2: byte 0xff is not UTF-8") as caught:
        Program.from_file(tmp_path / "k.cu")
    assert caught.value.hint
    assert "source" in caught.value.hint


# What a source means


@pytest.fixture
def saxpy_file(tmp_path: Path) -> Path:
    path = tmp_path / "saxpy.cu"
    path.write_text("int a;\n")
    return path


@pytest.mark.parametrize("kind", [str, Path, lambda path: DirEntry(path)])
def test_a_path_or_a_name_that_ends_like_one_is_a_file(
    saxpy_file: Path, kind: Callable[[Path], Any]
) -> None:
    program = Program.read(kind(saxpy_file), options=["-G"])
    assert (program.label, program.source, program.options) == ("saxpy.cu", "int a;\n", ("-G",))


class DirEntry:
    """A path that is no `Path`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __fspath__(self) -> str:
        return str(self._path)


@pytest.mark.parametrize(
    "text", ["int a;", "// saxpy.cu\nint a;", "int a; // see\nsaxpy.cu", "saxpy.cuh"]
)
def test_every_other_string_is_source(text: str) -> None:
    assert Program.read(text).source == text


def test_a_file_that_is_not_there_is_said_by_name() -> None:
    with pytest.raises(InputError, match=r"cannot read nowhere\.cu: No such file") as caught:
        Program.read("nowhere.cu")
    assert "Path(__file__).with_name('nowhere.cu')" in str(caught.value.hint)


def test_a_program_is_taken_as_it_is() -> None:
    program = Program.of("int a;")
    assert Program.read(program, options=(), headers=None) is program
    with pytest.raises(InputError, match="already has its label"):
        Program.read(program, options=["-G"])


def test_compile_takes_a_file_by_name(saxpy_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saxpy_file.write_text('extern "C" __global__ void k(int* x) { *x = 1; }\n')
    monkeypatch.chdir(saxpy_file.parent)
    assert preheat.compile("saxpy.cu", "sm_90").label == "saxpy.cu"
    assert preheat.compile(saxpy_file, "sm_90").entries[0].name == "k"


@pytest.mark.parametrize("source", ["saxpy.cu", "a/b.ptx", Path("saxpy.cu")])
def test_a_program_of_text_refuses_the_name_of_a_file(source: Any) -> None:
    with pytest.raises(InputError, match=r"names a file, and Program\.of takes source text") as caught:
        Program.of(source)
    assert f"Program.from_file({str(source)!r})" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("text", "token"),
    [
        ("", ""),
        (" \n\t", ""),
        ("/* a */ // b\n.version", ".version"),
        ("\ufeff.version", ".version"),
        ("/* a", ""),
        ("// a", ""),
        ("/ a", "/ a"),
    ],
)
def test_the_first_token_follows_blanks_and_comments(text: str, token: str) -> None:
    assert text[first_token(text) :] == token


def test_a_program_is_the_same_however_it_is_made() -> None:
    """`Program.of` sets the fields without the constructor, so none of them may be missing."""
    made = Program.of("int x;", label="x.cu", options=["-a"], names=["t<int>"], headers={"h.h": "1"})
    fields = {field.name: getattr(made, field.name) for field in dataclasses.fields(Program)}
    assert vars(made) == fields
    assert Program(**fields) == made
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.label = "y.cu"  # type: ignore[misc]


def test_a_file_whose_text_looks_like_a_file_name_is_read(tmp_path: Path) -> None:
    (tmp_path / "k.cu").write_text("other.cu")
    assert Program.from_file(tmp_path / "k.cu").source == "other.cu"
