"""The key of a program of cuda.core: it differs on all that the code depends on, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from preheat.adapters.cuda_core import request
from preheat.adapters.cuda_core.request import CompileRequest
from tests.adapters.cuda_core.support import PTX, SAXPY, TEMPLATE, options

SOURCE = '#include "outer.h"\nextern "C" __global__ void k(float *x) { *x = VALUE; }'


def key(code: str = SAXPY, target: str = "cubin", names: tuple[Any, ...] = (), **more: Any) -> str:
    kind = more.pop("code_type", "c++")
    return CompileRequest(code, kind, options(**more), target, names).identity.key


DIFFERENT: list[dict[str, Any]] = [
    {},
    {"code": SAXPY + " "},
    {"arch": "sm_90a"},
    {"arch": "compute_90"},
    {"arch": "sm_100"},
    {"target": "ptx"},
    {"name": "mine"},
    {"fma": False},
    {"define_macro": "A"},
    {"define_macro": ("A", "2")},
    {"code": TEMPLATE},
    {"code": TEMPLATE, "names": ("fill<int>",)},
    {"code": TEMPLATE, "names": ("fill<int>", "fill<float>")},
    {"code": TEMPLATE, "names": (b"fill<int>",)},
    {"code": PTX, "code_type": "ptx"},
]


def test_everything_that_is_given_differs() -> None:
    assert len({key(**each) for each in DIFFERENT}) == len(DIFFERENT)


def test_the_build_of_the_compiler_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key()
    monkeypatch.setattr(request, "_compiler", lambda name: f"{name} of another build")
    assert key() != before


def test_the_same_request_has_the_same_key() -> None:
    assert key() == key(debug=False) == key(include_path=[]) == key(include_path="/nowhere")
    assert key(TEMPLATE, names=("fill<int>", "fill<float>")) == key(
        TEMPLATE, names=("fill<float>", "fill<int>")
    )


# Headers


@pytest.fixture
def tree(here: Path) -> Path:
    """Return the current directory, with a header that includes another one."""
    (here / "inc").mkdir()
    (here / "later").mkdir()
    (here / "outer.h").write_text("#include <inner.h>\n")
    (here / "inc" / "inner.h").write_text("#define VALUE 1.0f\n")
    return here


def with_headers(**more: Any) -> str:
    return key(SOURCE, **{"include_path": ["inc", "later"], **more})


CHANGES: dict[str, Callable[[Path], object]] = {
    "a header": lambda tree: (tree / "outer.h").write_text("#include <inner.h>\n#define MORE\n"),
    "a header of a header": lambda tree: (tree / "inc" / "inner.h").write_text("#define VALUE 2.0f\n"),
    "a header that is gone": lambda tree: (tree / "inc" / "inner.h").unlink(),
    "a header that appears in another directory": lambda tree: (tree / "later" / "inner.h").write_text(
        "#define VALUE 3.0f\n"
    ),
    "a header that hides another": lambda tree: (tree / "inc" / "outer.h").write_text("\n"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_headers_differ(tree: Path, change: str) -> None:
    before = with_headers()
    CHANGES[change](tree)
    assert with_headers() != before


def test_headers_that_nothing_includes_do_not_differ(tree: Path) -> None:
    before = with_headers()
    (tree / "inc" / "other.h").write_text("#define OTHER\n")
    (tree / "outer.cu").write_text("nothing")
    assert with_headers() == before


def test_where_the_headers_are_does_not_differ(tree: Path) -> None:
    before = with_headers()
    (tree / "inc").rename(tree / "moved")
    assert with_headers(include_path=[str(tree / "moved"), "later"]) == before


def test_a_header_beside_the_name_of_the_program_differs(tree: Path) -> None:
    (tree / "sub").mkdir()
    (tree / "sub" / "outer.h").write_text("#define VALUE 4.0f\n")
    before = with_headers(name="sub/mine.cu")
    (tree / "sub" / "outer.h").write_text("#define VALUE 5.0f\n")
    assert with_headers(name="sub/mine.cu") != before


def test_a_header_before_the_program_differs(tree: Path) -> None:
    before = key(pre_include="outer.h", include_path="inc")
    (tree / "inc" / "inner.h").write_text("#define VALUE 6.0f\n")
    assert key(pre_include="outer.h", include_path="inc") != before


@pytest.mark.parametrize(
    "query", ["__has_include(<extra.h>)", '__has_include("extra.h")', "WRAPPED(<extra.h>)"]
)
def test_a_file_that_is_only_tested_for_differs(tree: Path, query: str) -> None:
    code = f"#define WRAPPED(x) __has_include(x)\n#if {query}\n#endif\n{SAXPY}"
    before = key(code, include_path="inc")
    (tree / "inc" / "extra.h").write_text("")
    assert key(code, include_path="inc") != before
    (tree / "inc" / "extra.h").write_text("more")
    after = key(code, include_path="inc")
    (tree / "inc" / "extra.h").write_text("")
    assert key(code, include_path="inc") == after


def test_a_directive_in_a_comment_is_none(tree: Path) -> None:
    assert key(f"/*\n#include MACRO\n*/\n// #include H\n{SAXPY}")
    (tree / "noted.h").write_text("/*\n#include directives are explained here\n*/\n")
    assert key(f'#include "noted.h"\n{SAXPY}')


def test_headers_that_include_each_other_end(tree: Path) -> None:
    (tree / "a.h").write_text('#pragma once\n#include "b.h"\n')
    (tree / "b.h").write_text('#pragma once\n#include "a.h"\n')
    assert key(f'#include "a.h"\n{SAXPY}')


def test_toolkit_headers_have_a_key() -> None:
    import importlib.util

    spec = importlib.util.find_spec("nvidia")
    roots = [] if spec is None else [Path(each) for each in spec.submodule_search_locations or ()]
    found = [
        each / "cu13" / "include" for each in roots if (each / "cu13/include/cuda_fp16.h").is_file()
    ]
    if not found:
        pytest.skip("the headers of the toolkit are not installed as packages")
    paths = [str(found[0]), str(found[0] / "cccl")]
    code = f"#include <cuda_fp16.h>\n#include <cuda/std/atomic>\n{SAXPY}"
    assert key(code, include_path=paths) == key(code, include_path=tuple(paths))
