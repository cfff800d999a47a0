"""cuda.core recorded, baked without a GPU for other architectures, checked, and run sealed."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from preheat.adapters.cuda_core import adapter as adapter_module
from preheat.adapters.cuda_core import rows
from preheat.adapters.cuda_core.adapter import CudaCoreAdapter
from preheat.adapters.cuda_core.request import CompileRequest
from preheat.ahead.manifest import Manifest
from preheat.build.builder import Builder
from preheat.errors import AdapterError, InputError
from preheat.model.arch import Arch
from tests.adapters.cuda_core.support import NVVM, PTX, SAXPY, TEMPLATE, WITH_HEADER, core, options
from tests.processes import SOURCE, start_process, wait_for_exit

APP = """\
import json, os, sys
import preheat
from cuda.core import Program, ProgramOptions

TEMPLATE = "template<class T> __global__ void fill(T *x, T value) { *x = value; }"
HEADER = '#include "scale.h"\\nextern "C" __global__ void scale(float *x) { *x *= SCALE; }'

def compile(code, *names, **more):
    options = ProgramOptions(arch=os.environ["ARCH"], **more)
    return Program(code, "c++", options).compile("cubin", name_expressions=names)

def main():
    made = [compile(TEMPLATE, "fill<float>"), compile(HEADER, include_path=["inc"])]
    if "MORE" in os.environ:
        made.append(compile(TEMPLATE, "fill<int>", name="more"))
    stats = preheat.default_builder().stats()["process"]
    print(json.dumps({"sizes": [len(each.code) for each in made], "stats": stats}))

main()
"""
EIGHT = """\
import json, os, sys
import preheat, preheat.adapters
from cuda.core import Program, ProgramOptions
preheat.adapters.install("cuda_core")
CODE = 'extern "C" __global__ void k(float *x) { *x *= 2; }'
children = []
for number in range(8):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = Program(CODE, "c++", ProgramOptions(arch="sm_90")).compile("cubin").code
        stats = preheat.default_builder().stats()["process"]
        os.write(writer, json.dumps([len(code), stats.get("compiles", 0)]).encode())
        os._exit(0)
    os.close(writer)
    children.append((child, reader))
found = []
for child, reader in children:
    found.append(json.loads(os.read(reader, 4096)))
    os.waitpid(child, 0)
print(json.dumps(found))
"""


class Place:
    """The directory of an application, and processes in it with a cache."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "inc").mkdir(parents=True)
        (root / "app.py").write_text(APP)
        (root / "inc" / "scale.h").write_text("#define SCALE 2.0f\n")

    def run(self, *words: str, cache: str = "cache", **env: str) -> tuple[int, str, str]:
        """Run Python in the directory, and return its status, output and errors."""
        base = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.root / "home"),
            "PYTHONPATH": os.pathsep.join([str(SOURCE), *filter(None, sys.path)]),
            "PREHEAT_CACHE_DIR": str(self.root / cache),
            "PREHEAT_LOCK_DIR": str(self.root / "locks"),
            "ARCH": "sm_90",
        }
        process = start_process([sys.executable, *words], env={**base, **env}, cwd=self.root)
        out, err = wait_for_exit(process)
        return process.returncode, out, err

    def preheat(self, *words: str, cache: str = "cache", **env: str) -> str:
        """Run a command of preheat that succeeds, and return its output."""
        status, out, err = self.run("-m", "preheat", *words, cache=cache, **env)
        assert status == 0, out + err
        return out


@pytest.fixture(scope="module")
def baked(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Return an application that was recorded as sm_90 and baked for sm_90 and sm_100."""
    place = Place(tmp_path_factory.mktemp("cuda_core") / "app")
    place.preheat("record", "-o", "kernels.toml", "--", sys.executable, "app.py")
    place.preheat("bake", "kernels.toml", "--arch", "sm_90", "--arch", "sm_100", cache="other")
    return place


def test_a_recording_has_the_programs(baked: Place) -> None:
    manifest = Manifest.read(baked.root / "kernels.toml")
    assert manifest.unrecorded == ()
    found = manifest.foreign
    assert [(item.kind, item.name) for item in found] == [("cuda_core", "fill"), ("cuda_core", "scale")]
    assert all(item.request and item.requests == 1 for item in found)
    assert [[str(arch) for arch in item.archs] for item in found] == [["sm_90"]] * 2
    assert all(item.callers[0].startswith("app.py:") for item in found)


@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
def test_a_sealed_run_compiles_nothing(baked: Place, arch: str) -> None:
    env = {"PREHEAT_BUNDLE": "kernels.heat", "PREHEAT_SEALED": "1", "PREHEAT_ADAPTERS": "auto"}
    status, out, err = baked.run("app.py", cache=f"none-{arch}", ARCH=arch, **env)
    assert status == 0, err
    found = json.loads(out)
    assert found["stats"]["hits.bundle"] == 2
    assert "compiles" not in found["stats"]
    assert all(size > 1000 for size in found["sizes"])


def test_a_sealed_miss_names_the_kernel_and_the_line(baked: Place) -> None:
    env = {"PREHEAT_BUNDLE": "kernels.heat", "PREHEAT_SEALED": "1", "PREHEAT_ADAPTERS": "auto"}
    status, _, err = baked.run("app.py", cache="none", MORE="1", **env)
    line = next(number for number, text in enumerate(APP.splitlines(), 1) if "return Program" in text)
    assert status == 1
    assert f"app.py:{line}: cuda_core fill of more (sm_90) cannot be compiled" in err


def test_a_check_finds_what_is_missing(baked: Place) -> None:
    checked = baked.preheat("check", "kernels.toml", "--arch", "sm_90", "--bundle", "kernels.heat")
    assert checked is not None
    header = baked.root / "inc" / "scale.h"
    before = header.read_text()
    try:
        header.write_text("#define SCALE 5.0f\n")
        words = ("check", "kernels.toml", "--arch", "sm_90", "--bundle", "kernels.heat")
        status, out, err = baked.run("-m", "preheat", *words)
    finally:
        header.write_text(before)
    assert status == 1
    assert "a header that it includes has changed" in out + err


def test_eight_processes_compile_once(tmp_path: Path) -> None:
    place = Place(tmp_path / "eight")
    status, out, err = place.run("-W", "ignore::DeprecationWarning", "-c", EIGHT)
    assert status == 0, err
    found = json.loads(out)
    assert sum(compiles for _, compiles in found) == 1
    assert len({size for size, _ in found}) == 1


# Rows


def inputs_of(
    code: Any = SAXPY, kind: str = "c++", target: str = "cubin", **more: Any
) -> CompileRequest:
    names = more.pop("names", ())
    return CompileRequest(code, kind, options(**more), target, names)


REQUESTS: dict[str, Mapping[str, Any]] = {
    "plain": {},
    "a template": {"code": TEMPLATE, "names": ("fill<float>", "fill<int>")},
    "a macro with a value": {"define_macro": ("A", "1")},
    "two macros": {"define_macro": ["A", "B"]},
    "macros of both kinds": {"define_macro": ["A", ("B", "2")], "undefine_macro": ("C",)},
    "options": {
        "name": "mine",
        "std": "c++20",
        "fma": False,
        "max_register_count": 64,
        "lineinfo": True,
    },
    "a virtual architecture": {"arch": "compute_90", "target": "ptx"},
    "a header": {"code": WITH_HEADER, "include_path": ["inc"]},
    "ptx": {"code": PTX, "kind": "ptx"},
    "nvvm": {"code": NVVM.encode(), "kind": "nvvm", "target": "ptx"},
}


@pytest.mark.parametrize("case", REQUESTS)
def test_a_row_makes_the_same_request(case: str, here: Path) -> None:
    (here / "inc").mkdir()
    (here / "inc" / "scale.h").write_text("#define SCALE 2.0f\n")
    inputs = inputs_of(**REQUESTS[case])
    found = inputs.identity
    row = json.loads(json.dumps(inputs.row()))
    assert rows.request_of(row, Arch.parse("sm_90")).identity == found
    other = rows.request_of(row, Arch.parse("sm_100"))
    assert other.identity.key != found.key
    assert other.options.arch == inputs.options.arch.replace("90", "100")
    assert not rows.changes(row, inputs)


def test_a_row_has_no_directory_of_installed_packages() -> None:
    path = next(place for place in sys.path if place.endswith("-packages"))
    inputs = inputs_of(include_path=[f"{path}/somewhere", "/opt/include", "relative"])
    row = inputs.row()
    assert row is not None
    assert row["options"]["include_path"] == ["{packages}/somewhere", "/opt/include", "relative"]
    again = rows.request_of(row, Arch.parse("sm_90"))
    assert again.options.include_path[1:] == ["/opt/include", "relative"]


def test_a_request_that_is_no_json_has_no_row() -> None:
    inputs = inputs_of(TEMPLATE, names=(b"fill<int>",))
    assert inputs.row() is None
    inputs = inputs_of(b"BC\xc0\xde", kind="nvvm", target="ptx")
    assert inputs.row() is None


def test_changes_are_named(here: Path) -> None:
    (here / "scale.h").write_text("#define SCALE 2.0f\n")
    inputs = inputs_of(WITH_HEADER)
    row = dict(inputs.row() or {})
    row["recorded"] = {"cuda.core": "0.9", "compiler": "nvrtc of before", "headers": "other"}
    assert rows.changes(row, inputs) == [
        f"recorded with cuda.core 0.9, and this is {core.__version__}",
        "recorded with another build of the compiler",
        "a header that it includes has changed",
    ]


@pytest.mark.parametrize(
    ("named", "arch", "expected"),
    [
        ("sm_90", "sm_90", ["sm_90"]),
        ("sm_90", "sm_100", ["sm_100"]),
        ("sm_90a", "sm_90", ["sm_90", "sm_90a"]),
        ("sm_80", "sm_86", ["sm_86", "sm_80"]),
        ("sm_86", "sm_80", ["sm_80"]),
        ("compute_80", "sm_90", ["sm_90"]),
        ("nonsense", "sm_90", ["sm_90"]),
    ],
)
def test_code_that_names_its_architecture_is_made_where_it_runs(
    named: str, arch: str, expected: list[str]
) -> None:
    row = {"recorded": {"arch": named}}
    assert [str(each) for each in rows.archs_of(row, Arch.parse(arch))] == expected


# The adapter


@pytest.fixture
def adapter(builder: Builder, monkeypatch: pytest.MonkeyPatch, use: Callable[[Builder], None]) -> Any:
    """Return the adapter, whose bakes go to the store of the test."""
    use(builder)
    monkeypatch.setattr(adapter_module, "default_builder", lambda: builder)
    return CudaCoreAdapter()


def test_ptx_is_baked_without_a_driver(adapter: Any, builder: Builder) -> None:
    inputs = inputs_of(TEMPLATE, target="ptx", names=("fill<float>",))
    row = inputs.row()
    made = adapter.bake(row, Arch.parse("sm_100"), "recorded")
    assert made == adapter.keys(row, Arch.parse("sm_100"), "recorded")
    (request,) = made.entries
    entry = builder.foreign.get(request)
    assert entry is not None
    assert b".target sm_100" in entry.files["code"]
    assert json.loads(entry.files["names.json"]) == [[["text", "fill<float>"], "_Z4fillIfEvPT_S0_"]]
    assert adapter.count(row, "closure") == 1


def test_an_empty_log_changes_no_object_of_the_interpreter(adapter: Any, builder: Builder) -> None:
    """A bytes object of one byte exists once: writing into it changes it for the whole process."""
    del builder
    inputs = inputs_of(SAXPY, target="ptx")
    adapter.bake(inputs.row(), Arch(9, 0), "recorded")
    assert [bytes([value])[0] for value in range(256)] == list(range(256))


def test_a_program_that_does_not_compile_is_an_error_with_its_log(adapter: Any) -> None:
    inputs = inputs_of('extern "C" __global__ void k() { unknown = 1; }', target="ptx")
    row = inputs.row()
    with pytest.raises(AdapterError, match=r"k does not compile for sm_90[^$]*unknown"):
        adapter.bake(row, Arch.parse("sm_90"), "recorded")


def test_a_directory_that_is_gone_is_an_error(adapter: Any, tmp_path: Path) -> None:
    inputs = inputs_of()
    row = {**(inputs.row() or {}), "root": str(tmp_path / "gone")}
    with pytest.raises(AdapterError, match=r"the program includes files from .*gone: No such file"):
        adapter.keys(row, Arch.parse("sm_90"), "recorded")


def test_an_option_of_another_release_is_an_error(adapter: Any) -> None:
    inputs = inputs_of()
    row = dict(inputs.row() or {})
    row["options"] = {"an_option_of_tomorrow": True}
    with pytest.raises(AdapterError, match=r"recorded options: .*an_option_of_tomorrow"):
        adapter.bake(row, Arch.parse("sm_90"), "recorded")


def test_a_request_that_cannot_be_stored_any_more_is_an_error(adapter: Any, here: Path) -> None:
    (here / "scale.h").write_text("#define SCALE 2.0f\n")
    inputs = inputs_of(WITH_HEADER)
    row = inputs.row()
    (here / "scale.h").write_text("#include WHATEVER\n")
    with pytest.raises(AdapterError, match=r"it cannot be stored: scale\.h includes a file whose"):
        adapter.keys(row, Arch.parse("sm_90"), "recorded")


def test_cuda_core_that_is_not_installed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.core", None)  # as if there were none
    with pytest.raises(InputError, match=r"cuda\.core is not installed: ") as refused:
        adapter_module.require_cuda_core()
    assert refused.value.hint == "pip install cuda-core"
