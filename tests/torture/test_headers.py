"""The header matrix: after any change of a file, no build uses code of the old files.

Each case builds a kernel whose value comes from headers, changes the files, and builds it again: in
another process and in the same one. A long campaign compares with a compile that no cache can touch.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from preheat.build.builder import Builder
from preheat.errors import PreheatError
from preheat.model.artifact import Artifact
from preheat.model.config import Config
from preheat.model.program import Program
from preheat.toolchain.compiler import Toolchain

KERNEL = 'extern "C" __global__ void k(int* x) { *x = V; }\n'
OLD, NEW = "#define V 111\n", "#define V 222\n"
_STORED = re.compile(
    rb"(?:mov\.(?:b32|u32|s32)\s+%r\d+, |st\.global\.(?:b32|u32|s32)\s+\[%rd\d+\], )(-?\d+);"
)

Change = Callable[[Path], object]


@dataclass(frozen=True)
class Case:
    """One way to change files. `{}` in a text stands for the directory that the files are in."""

    files: Mapping[str, str]
    change: Mapping[str, str] | Change
    source: str
    include: Sequence[str] = ("i",)
    options: Sequence[str] = ()
    headers: Mapping[str, str] = field(default_factory=dict)

    def program(self, home: Path) -> Program:
        def placed(text: str) -> str:
            return text.replace("{}", str(home))

        return Program.of(
            placed(self.source) + KERNEL,
            include=[home / name for name in self.include],
            options=[placed(option) for option in self.options],
            headers={placed(name): text for name, text in self.headers.items()},
        )


def write(home: Path, files: Mapping[str, str]) -> None:
    """Write files; a name that ends in a slash is a directory."""
    for name, text in files.items():
        path = home / name
        if name.endswith("/"):
            path.mkdir(parents=True, exist_ok=True)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())


def rewritten_with_the_same_times(home: Path) -> None:
    header = home / "i/v.h"
    before = header.stat()
    header.write_text(NEW)
    os.utime(header, ns=(before.st_atime_ns, before.st_mtime_ns))


def replaced_with_the_same_times(home: Path) -> None:
    header, other = home / "i/v.h", home / "other.h"
    before = header.stat()
    other.write_text(NEW)
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(header)


def linked(link: str, target: str) -> Change:
    """Point `link` to `target`, and replace its previous target."""

    def change(home: Path) -> None:
        (home / link).unlink(missing_ok=True)
        (home / link).parent.mkdir(parents=True, exist_ok=True)
        (home / link).symlink_to(home / target)

    return change


def swapped(a: str, b: str) -> Change:
    def change(home: Path) -> None:
        (home / a).rename(home / "between")
        (home / b).rename(home / a)
        (home / "between").rename(home / b)

    return change


def directory_becomes_a_file(home: Path) -> None:
    (home / "e/v.h").rmdir()
    (home / "e/v.h").write_text(NEW)


def links(before: Mapping[str, str]) -> Change:
    """Files that are there from the beginning as symbolic links."""

    def make(home: Path) -> None:
        for link, target in before.items():
            linked(link, target)(home)

    return make


SIMPLE = {"i/v.h": OLD}
EDIT = {"i/v.h": NEW}
EMPTY = {"i/": ""}
QUOTED, ANGLED = '#include "v.h"\n', "#include <v.h>\n"
BESIDE = {"i/s/v.h": NEW}
APPEARS = {"i/o.h": NEW}


def conditional(condition: str) -> str:
    return f'#if {condition}\n#include "o.h"\n#else\n#define V 111\n#endif\n'


CASES: dict[str, Case] = {
    "same size and time": Case(SIMPLE, rewritten_with_the_same_times, QUOTED),
    "renamed over, same size and time": Case(SIMPLE, replaced_with_the_same_times, QUOTED),
    "include directory is a link that leads elsewhere": Case(
        {"a/v.h": OLD, "b/v.h": NEW}, linked("i", "b"), QUOTED
    ),
    "header is a link that leads elsewhere": Case(
        {"a.h": OLD, "b.h": NEW, "i/": ""}, linked("i/v.h", "b.h"), QUOTED
    ),
    "file appears in an earlier directory": Case(
        {"e/": "", "i/v.h": OLD}, {"e/v.h": NEW}, ANGLED, ("e", "i")
    ),
    "dangling link in an earlier directory gets a target": Case(
        {"e/": "", "i/v.h": OLD}, {"later/v.h": NEW}, ANGLED, ("e", "i")
    ),
    "directory of that name in an earlier directory becomes a file": Case(
        {"e/v.h/": "", "i/v.h": OLD}, directory_becomes_a_file, ANGLED, ("e", "i")
    ),
    "file appears beside the header that includes it": Case(
        {"i/s/a.h": QUOTED, "i/v.h": OLD}, BESIDE, '#include "s/a.h"\n'
    ),
}
LINKS = {
    "include directory is a link that leads elsewhere": {"i": "a"},
    "header is a link that leads elsewhere": {"i/v.h": "a.h"},
    "dangling link in an earlier directory gets a target": {"e/v.h": "later/v.h"},
    "up through a linked directory": {"i/s": "x/y"},
    "up through a linked directory, file appears beside the link": {"i/s": "x/y"},
}
for name, text in {
    "comment between # and include": '#/**/include "v.h"\n',
    "trigraph": '??=include "v.h"\n',
    "digraph": '%:include "v.h"\n',
    "comment after include": '#include/**/"v.h"\n',
    "comment with a line break": '#/*\n*/include "v.h"\n',
    "line joined after a carriage return": '#inc\\\r\nlude "v.h"\r\n',
    "line joined": '#inc\\\nlude "v.h"\n',
    "backslash and blank": '#inc\\ \nlude "v.h"\n',
    "line joined before the name": '#include \\\r\n"v.h"\r\n',
    "vertical tab": '#\x0binclude\x0b"v.h"\n',
    "macro": '#define M "v.h"\n#include M\n',
    "macro with an angled name": "#define M <v.h>\n#include M\n",
    "import": '#import "v.h"\n',
    "macro that makes a string": "#define S_(x) #x\n#define S(x) S_(x)\n#include S(v.h)\n",
    "pragma once": '#include "v.h"\n#pragma once\n',
}.items():
    CASES[f"file appears beside, {name}"] = Case(
        {"i/s/a.h": text, "i/v.h": OLD}, BESIDE, '#include "s/a.h"\n'
    )
    if name.startswith("trigraph"):
        old_standard = Case(
            {"i/s/a.h": text, "i/v.h": OLD}, BESIDE, '#include "s/a.h"\n', options=["-std=c++14"]
        )
        CASES[f"file appears beside, {name}, older standard"] = old_standard
for name, text in {
    "plain": QUOTED,
    "line joined after a carriage return": '#inc\\\r\nlude "v.h"\r\n',
    "backslash and blank": '#inc\\ \nlude "v.h"\n',
    "trigraph": '??=include "v.h"\n',
    "line joined by a trigraph": '#inc??/\nlude "v.h"\n',
    "import": '#import "v.h"\n',
    "embed": 'const int a[] = {\n#embed "v.h"\n};\n#define V a[8]\n',
    "universal character": '#\\u0069nclude "v.h"\n',
}.items():
    CASES[f"edit, {name}"] = Case(SIMPLE, EDIT, text)
    if "trigraph" in name:
        CASES[f"edit, {name}, older standard"] = Case(SIMPLE, EDIT, text, options=["-std=c++14"])
for name, condition in {
    "plain": '__has_include("o.h")',
    "line joined": '__has_\\\ninclude("o.h")',
    "line joined after a carriage return": '__has_\\\r\ninclude("o.h")',
    "comment before the parenthesis": '__has_include/**/("o.h")',
    "next": '__has_include_next("o.h")',
}.items():
    CASES[f"has_include, {name}"] = Case(EMPTY, APPEARS, conditional(condition))
for name, (condition, options) in {
    "value": ("HAVE", ['-DHAVE=__has_include("o.h")']),
    "function": ('HAVE("o.h")', ["-DHAVE(x)=__has_include(x)"]),
    "alias": ('HAVE("o.h")', ["-DHAVE=__has_include"]),
    "value in an option of its own": ("HAVE", ["-D", 'HAVE=__has_include("o.h")']),
    "first half": ('C(HAS, include)("o.h")', ["-DHAS=__has_", "-DC_(a,b)=a##b", "-DC(a,b)=C_(a,b)"]),
}.items():
    CASES[f"has_include by option, {name}"] = Case(
        EMPTY, APPEARS, conditional(condition), options=options
    )
QUOTE_TRICK = '__device__ const char q = \'\\"\', *o = "/*";\n{body}__device__ const char *c = "*/";\n'
CASES |= {
    "has_include, joined line and no other include": Case(
        EMPTY,
        APPEARS,
        '#if __has_inc\\\r\nlude("o.h")\n#define V 222\n#else\n#define V 111\n#endif\n',
    ),
    "has_include, put together": Case(
        EMPTY, APPEARS, "#define C(a, b) a##b\n" + conditional('C(__has_, include)("o.h")')
    ),
    "has_include and nothing included": Case(
        EMPTY, APPEARS, '#if __has_include("o.h")\n#define V 222\n#else\n#define V 111\n#endif\n'
    ),
    "has_include between quotes": Case(
        EMPTY, APPEARS, QUOTE_TRICK.replace("{body}", conditional('__has_include("o.h")'))
    ),
    "has_include between quotes in a header": Case(
        {"i/h.h": QUOTE_TRICK.replace("{body}", conditional('__has_include("o.h")'))},
        APPEARS,
        '#include "h.h"\n',
    ),
    "has_include of a macro": Case(
        EMPTY, APPEARS, '#define N "o.h"\n' + conditional("__has_include(N)")
    ),
    "has_include behind ifdef": Case(
        EMPTY,
        APPEARS,
        "#ifdef __has_include\n" + conditional('__has_include("o.h")') + "#endif\n",
    ),
    "has_include by a macro of the toolkit": Case(
        EMPTY, APPEARS, "#include <cuda/std/version>\n" + conditional('_CCCL_HAS_INCLUDE("o.h")')
    ),
    "has_include by a macro of the toolkit and nothing included": Case(
        EMPTY,
        APPEARS,
        "#include <cuda/std/version>\n"
        '#if _CCCL_HAS_INCLUDE("o.h")\n#define V 222\n#else\n#define V 111\n#endif\n',
    ),
}
for name, options in {
    "--pre-include": ["--pre-include=v.h"],
    "-include and a name": ["-include", "v.h"],
    "-include=": ["-include=v.h"],
}.items():
    CASES[f"option {name}"] = Case(SIMPLE, EDIT, "", options=options)
for name, options in {
    "-I": ["-I{}/i"],
    "-I and a directory": ["-I", "{}/i"],
    "-I and a directory in one": ["-I {}/i"],
    "-I=": ["-I={}/i"],
    "--include-path and a directory": ["--include-path", "{}/i"],
    "-include-path": ["-include-path={}/i"],
    "an abbreviation": ["--include-pa={}/i"],
    "-isystem": ["-isystem={}/i"],
    "--system-include": ["--system-include={}/i"],
}.items():
    CASES[f"option {name}"] = Case(SIMPLE, EDIT, QUOTED, (), options)
CASES |= {
    "options from a file": Case(
        {**SIMPLE, "opt": "-I{}/i"}, EDIT, QUOTED, (), ["--options-file={}/opt"]
    ),
    "options from a file, short": Case({**SIMPLE, "opt": "-I{}/i"}, EDIT, QUOTED, (), ["@{}/opt"]),
    "options of the assembler from a file": Case(
        {"i/v.h": OLD, "opt": "-O3"}, {**EDIT, "opt": "-O0"}, QUOTED, options=["-Xptxas=-optf={}/opt"]
    ),
    "absolute name": Case(SIMPLE, EDIT, '#include "{}/i/v.h"\n', ()),
    "up": Case({**SIMPLE, "i/s/a.h": '#include "../v.h"\n'}, EDIT, '#include "s/a.h"\n'),
    "up and out of the directory": Case(
        {**SIMPLE, "j/a.h": '#include "../i/v.h"\n'}, EDIT, '#include "a.h"\n', ("j",)
    ),
    "up through a linked directory": Case(
        {"x/y/a.h": '#include "../v.h"\n', "x/v.h": OLD, "i/": ""}, {"x/v.h": NEW}, '#include "s/a.h"\n'
    ),
    "up through a linked directory, file appears beside the link": Case(
        {"x/y/a.h": '#include "../v.h"\n', "x/v.h": OLD, "i/": ""}, EDIT, '#include "s/a.h"\n'
    ),
    "file appears beside the header before the last": Case(
        {"i/p/a.h": '#include "q/b.h"\n', "i/p/q/b.h": QUOTED, "i/v.h": OLD},
        {"i/p/v.h": NEW},
        '#include "p/a.h"\n',
    ),
    "include_next, file appears in between": Case(
        {"a/v.h": "#include_next <v.h>\n", "b/": "", "c/v.h": OLD},
        {"b/v.h": NEW},
        ANGLED,
        ("a", "b", "c"),
    ),
    "include_next, edit": Case(
        {"a/v.h": "#include_next <v.h>\n", "b/": "", "c/v.h": OLD},
        {"c/v.h": NEW},
        ANGLED,
        ("a", "b", "c"),
    ),
    "include directories swap": Case(
        {"a/v.h": OLD, "b/v.h": NEW}, swapped("a", "b"), ANGLED, ("a", "b")
    ),
    "cycle": Case(
        {"i/v.h": f'#ifndef V\n{OLD}#include "w.h"\n#endif\n', "i/w.h": QUOTED},
        {"i/v.h": f'#ifndef V\n{NEW}#include "w.h"\n#endif\n'},
        ANGLED,
    ),
    "endless cycle that is broken": Case({"i/v.h": QUOTED}, EDIT, ANGLED),
    "directory hides a header of the toolkit": Case(
        EMPTY, {"i/cuda_fp16.h": NEW}, "#include <cuda_fp16.h>\n#ifndef V\n#define V 111\n#endif\n"
    ),
    "directory hides an inner header of the toolkit": Case(
        EMPTY, {"i/cuda_fp16.hpp": NEW}, "#include <cuda_fp16.h>\n#ifndef V\n#define V 111\n#endif\n"
    ),
    "directory hides a deep header of the toolkit": Case(
        EMPTY,
        {"i/cuda/std/__cccl/compiler.h": NEW},
        "#include <cuda/std/version>\n#ifndef V\n#define V 111\n#endif\n",
    ),
}
IN_MEMORY = (
    "@0/v.h",
    "/abs/v.h",
    "./v.h",
    "../v.h",
    "a b.h",
    'v"h',
    "<v.h>",
    "",
    "@",
    "__nv_nvrtc_builtin_header.h",
    "v.h\n",
    "émoji😀.h",
    "//v.h",
    "cuda_runtime.h",
    "vector",
    "@cuda/cuda_fp16.h",
    "./@0/v.h",
    "/proc/self/cwd/@0/v.h",
)
for name in IN_MEMORY:
    CASES[f"in memory, {name!r}"] = Case(SIMPLE, EDIT, QUOTED, headers={name: "#define Q 5\n"})
CASES |= {
    "in memory, a name inside a directory": Case(
        SIMPLE, EDIT, ANGLED, headers={"@0/v.h": "#define V 333\n"}
    ),
    "in memory, absolute, file appears beside": Case(
        SIMPLE, {"j/v.h": NEW}, '#include "{}/j/a.h"\n', headers={"{}/j/a.h": QUOTED}
    ),
    "in memory, inside a directory, file appears beside": Case(
        SIMPLE, BESIDE, '#include "@0/s/a.h"\n', headers={"@0/s/a.h": QUOTED}
    ),
    "in memory, below a directory, file appears beside": Case(
        SIMPLE, BESIDE, '#include "s/a.h"\n', headers={"s/a.h": QUOTED}
    ),
    "in memory, included by a file, file of that name appears": Case(
        {"i/a.h": QUOTED}, EDIT, '#include "a.h"\n', headers={"v.h": OLD}
    ),
    "in memory, included by the source, file of that name appears": Case(
        EMPTY, EDIT, QUOTED, headers={"v.h": OLD}
    ),
    "in memory, included by a file below, file appears beside": Case(
        {"i/s/a.h": QUOTED}, BESIDE, '#include "s/a.h"\n', headers={"v.h": OLD}
    ),
    "in memory, included with a dot, file appears beside": Case(
        {"i/s/a.h": '#include "./v.h"\n'},
        BESIDE,
        '#include "s/a.h"\n',
        headers={"v.h": OLD, "./v.h": "#define V 113\n"},
    ),
}


class Cache:
    """Processes that share a cache, played by builders that share nothing else but workers."""

    def __init__(self, root: Path, toolchain: Toolchain) -> None:
        self._config = Config(cache_dirs=(root / "cache",), lock_dir=root / "locks")
        self._toolchain = toolchain

    def process(self, *, cached: bool = True) -> Builder:
        config = self._config if cached else Config(cache_dirs=(), lock_dir=Path("/"), cache=False)
        builder = Builder.open(config)
        builder.toolchain = self._toolchain
        return builder


@pytest.fixture
def cache(tmp_path: Path, toolchain: Toolchain) -> Cache:
    return Cache(tmp_path, toolchain)


def value(made: Artifact) -> int:
    found = _STORED.search(made.ptx)
    assert found is not None
    return int(found[1])


def built(builder: Builder, case: Case, home: Path) -> int | str:
    """Return the value in the kernel, or the kind of error."""
    try:
        return value(builder.build(case.program(home), "sm_90"))
    except PreheatError as error:
        return type(error).__name__


def prepared(name: str, home: Path) -> Case:
    case = CASES[name]
    home.mkdir()
    write(home, {file: text.replace("{}", str(home)) for file, text in case.files.items()})
    links(LINKS.get(name, {}))(home)
    for path in home.rglob("*"):
        if path.is_file() and not path.is_symlink():
            os.utime(path, (time.time() - 100,) * 2)
    return case


def apply(case: Case, home: Path) -> None:
    """Change the files as the case says."""
    if callable(case.change):
        case.change(home)
    else:
        write(home, case.change)


# A few of every kind run always. A long campaign runs all of them.
QUICK = set(list(CASES)[::6])
ALL = [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in CASES]


@pytest.mark.parametrize("name", ALL)
def test_nobody_is_served_what_the_old_files_gave(name: str, cache: Cache, tmp_path: Path) -> None:
    home = tmp_path / "home-of-headers"
    case = prepared(name, home)
    same = cache.process()
    built(same, case, home)
    apply(case, home)
    truth = built(cache.process(cached=False), case, home)
    assert built(cache.process(), case, home) == truth
    assert built(same, case, home) == truth


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_the_matrix_still_holds_once_stamps_are_believed(
    name: str, cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home-of-headers"
    case = prepared(name, home)
    passed = [0.0]
    monkeypatch.setattr("preheat.toolchain.headers.evidence._now", lambda: passed[0])
    same = cache.process()
    for _ in range(3):
        built(cache.process(), case, home)
        built(same, case, home)
        passed[0] += 10
    apply(case, home)
    truth = built(cache.process(cached=False), case, home)
    assert built(cache.process(), case, home) == truth
    assert built(same, case, home) == truth
