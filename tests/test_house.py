"""Rules for the whole package: imports point down, importing is light, public names are documented."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache, lru_cache
from pathlib import Path

import pytest

import preheat
from tests.conftest import LONGEST_FILES

SOURCE = Path(__file__).parents[1] / "src" / "preheat"

# From the ground up. A room may import those before it in this list and, of course, itself.
ROOMS = (
    *("_version", "process", "errors", "model", "native", "store", "signing", "toolchain", "build"),
    *("devices", "emulator", "driver", "graph", "gpu", "ahead", "kernels", "lora", "adapters"),
    *("audit", "tools", "telemetry", "pytest_plugin", "__main__"),
)
# `Gpu.warm` forwards to the warm-up, which is built on `Gpu`. A builder of a recorded run
# imports the recorder, which knows manifests; one with a port for metrics imports their server.
UPWARD = {("gpu.py", "ahead"), ("build/opening.py", "ahead"), ("build/counters.py", "tools")}
RANK = {name: rank for rank, name in enumerate(ROOMS)}


@lru_cache(maxsize=100)
def module_of(file: Path) -> ast.Module:
    """Return the syntax tree of a file. The tests of a room follow one another."""
    return ast.parse(file.read_text())


@lru_cache(maxsize=100)
def nodes_of(file: Path) -> list[ast.AST]:
    """Return all nodes of the syntax tree of a file."""
    return list(ast.walk(module_of(file)))


@cache
def imports_of(file: Path) -> list[ast.Import | ast.ImportFrom]:
    """Return the imports of a file, wherever they are. Several tests look at those of all files."""
    return [node for node in nodes_of(file) if isinstance(node, ast.Import | ast.ImportFrom)]


def room(file: Path) -> str:
    return file.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported(file: Path, package: str = "preheat") -> Iterator[str]:
    """Yield the rooms that a file imports, at the top, in a function or for type checkers.

    With the name of a room as `package`, yield the modules of that room.
    """
    depth = package.count(".") + 1
    for node in imports_of(file):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif node.module:
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            names = inside if node.module == package else [node.module]
        else:
            continue
        yield from (name.split(".")[depth] for name in names if name.startswith(f"{package}."))


def imported_modules(file: Path) -> Iterator[str]:
    """Yield the modules of preheat that a file imports, also for type checkers and late."""
    for node in imports_of(file):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("preheat"))
        elif node.module and node.module.startswith("preheat"):
            for alias in node.names:
                inside = f"{node.module}.{alias.name}"
                is_module = (SOURCE.parent / inside.replace(".", "/")).with_suffix(".py").is_file()
                yield inside if is_module else node.module
    for call in nodes_of(file):
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "LazyModule":
            yield ast.literal_eval(call.args[0])


def packages(file: Path) -> Iterator[str]:
    """Yield the packages that a file imports, wherever it does."""
    for node in imports_of(file):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif node.module:
            yield node.module.partition(".")[0]


FILES = sorted(
    file for file in SOURCE.rglob("*.py") if file.name != "__init__.py" or file.parent != SOURCE
)
#: The scope lets pytest run all tests of a layer before those of the next one.
each_layer = pytest.mark.parametrize("name", sorted({room(file) for file in FILES}), scope="module")


def files_of(name: str) -> list[Path]:
    """Return the files of a layer."""
    return [file for file in FILES if room(file) == name]


@each_layer
def test_imports_point_down(name: str) -> None:
    for file in files_of(name):
        place = file.relative_to(SOURCE).as_posix()
        for other in imported(file):
            allowed = RANK[other] < RANK[name] or other == name or (place, other) in UPWARD
            assert allowed, f"{place} imports {other}"


def test_devices_do_not_know_each_other() -> None:
    for mine, other in (("devices/cuda", "preheat.emulator"), ("emulator", "preheat.devices.cuda")):
        for file in (SOURCE / mine).rglob("*.py"):
            assert other not in file.read_text(), file


#: The interface of devices. Anything else is handed in by the factory of the emulator.
FOR_THE_EMULATOR = {"preheat.process.lazy", "preheat.devices.base", "preheat.devices.registry"}


def test_the_emulator_knows_only_the_interface_of_devices() -> None:
    for file in files_of("emulator"):
        for name in imported_modules(file):
            known = name in FOR_THE_EMULATOR or name.startswith(("preheat.emulator", "preheat.model"))
            assert known or name == "preheat.errors", f"{file}: {name}"


def test_only_the_edges_know_the_cpu_driver() -> None:
    """Everything else must work in the same way with the driver of a GPU."""
    users = {room(file) for file in FILES if "driver" in imported(file)}
    assert users <= {"driver", "tools"}


def test_the_store_knows_nothing_of_cuda() -> None:
    """It maps digests to bytes, and can be used for anything."""
    values = {"codec", "events", "setting_values"}
    for file in (SOURCE / "store").rglob("*.py"):
        assert set(imported(file)) <= {"store", "process", "errors", "model"}, file
        # Credentials of servers that the URL does not have come from the environment.
        more = {"config"} if file.name == "opendal_engine.py" else set()
        assert set(imported(file, "preheat.model")) <= values | more, file
        assert not set(packages(file)) & {"cuda", "numpy", "torch", "cupy", "triton", "numba"}, file


def test_commands_print_by_the_functions_that_escape_control_characters() -> None:
    ours = {"output.py", "__init__.py", "demo.py"}  # The second prints help, the last its own text.
    for file in (SOURCE / "tools" / "cli").glob("*.py"):
        prints = {"click.echo", "click.secho", "print("}
        assert file.name in ours or not any(f"    {each}" in file.read_text() for each in prints), file


def test_nothing_waits_for_a_lock_of_a_cached_property() -> None:
    """In Python 3.11 it holds a lock of its class, which a forked child cannot renew."""
    for file in SOURCE.rglob("*.py"):
        assert "cached_property" not in file.read_text().replace("`functools.cached_property`", ""), (
            file
        )


def test_compilers_are_loaded_in_the_worker_only() -> None:
    users = {
        file.name
        for file in SOURCE.rglob("*.py")
        for node in imports_of(file)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("cuda")
    }
    assert users == {"nvjitlink.py", "worker.py", "driver.py"}
    callers = {
        file.name
        for file in SOURCE.rglob("*.py")
        for node in imports_of(file)
        if isinstance(node, ast.ImportFrom) and node.module == "preheat.toolchain"
        if {"nvrtc", "nvjitlink"} & {alias.name for alias in node.names}
    }
    assert callers == {"worker.py"}


def python(code: str, home: Path) -> subprocess.CompletedProcess[str]:
    env = {"HOME": str(home), "PATH": os.environ["PATH"], "PYTHONPATH": str(SOURCE.parent)}
    return subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )


LIGHT = """
import sys
before = set(sys.modules)
import preheat
dir(preheat)
maps = open("/proc/self/maps").read()
loaded = {name.partition(".")[0] for name in set(sys.modules) - before}
import json
print(json.dumps({"loaded": sorted(loaded), "cuda": "libcuda" in maps or "libnvrtc" in maps}))
"""


def test_importing_touches_nothing_and_loads_next_to_nothing(tmp_path: Path) -> None:
    home = tmp_path / "empty"
    home.mkdir()
    seen = json.loads(python(LIGHT, home).stdout)
    assert seen["cuda"] is False
    assert not {"cuda", "numpy", "click", "rich", "subprocess", "logging"} & set(seen["loaded"])
    assert list(home.iterdir()) == []


LAUNCH = """
import json, sys
import preheat
SOURCE = 'extern "C" __global__ void k(float* x, int n) { if (threadIdx.x < n) x[threadIdx.x] += 1; }'
gpu = preheat.device("emulator")
x = gpu.zeros(32)
for _ in range(3):
    gpu.kernel(SOURCE, "k")[1, 32](x, 4)
print(json.dumps(sorted(sys.modules)))
"""
#: What a process that only launches stored kernels need not import: captures, compilers and the headers
#: that they report, bundles, messages of errors, and modules of the standard library that take long.
NOT_FOR_A_LAUNCH = {
    *("preheat.graph.graph", "preheat.graph.cache", "preheat.graph.graphed", "preheat.graph.pool"),
    *("preheat.graph.nodes", "preheat.graph.capture", "preheat.graph.trees", "preheat.graph.keys"),
    *("preheat.toolchain.pool", "preheat.toolchain.translate", "preheat.toolchain.headers.survey"),
    *(
        "preheat.toolchain.headers.includes",
        "preheat.toolchain.headers.absent_names",
        "preheat.toolchain.headers.observe",
    ),
    *("preheat.build.compile", "preheat.build.refusal", "preheat.model.linked_program"),
    *("preheat.ahead.manifest", "preheat.ahead.warmup", "preheat.store.bundle", "preheat.kernels.ops"),
    *("preheat.telemetry", "socket", "selectors", "http", "opentelemetry"),
    *("preheat.tools.cli", "click", "rich", "logging", "subprocess", "tempfile", "difflib", "shutil"),
    *("asyncio", "concurrent.futures", "multiprocessing", "cuda.core"),
    *("preheat.store.signing.keys", "cryptography", "zstandard"),
}


def test_a_process_that_launches_stored_kernels_imports_little_else(tmp_path: Path) -> None:
    for _ in range(2):  # The first process compiles and stores.
        imported = set(json.loads(python(LAUNCH, tmp_path).stdout))
    assert imported & NOT_FOR_A_LAUNCH == set()


def test_the_public_surface_is_what_all_says() -> None:
    for name in preheat.__all__:
        assert getattr(preheat, name) is not None
    assert set(dir(preheat)) == {*preheat.__all__, "lora"}
    with pytest.raises(AttributeError, match="nonsense"):
        preheat.nonsense  # type: ignore[attr-defined]  # noqa: B018


def test_type_checkers_find_the_public_names() -> None:
    """The stub of the package imports each name from the module that has it when the program runs."""
    stub = ast.parse((SOURCE / "__init__.pyi").read_text())
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    assert {name.name for node in imports for name in node.names} == {*preheat.__all__, "lora"}
    for node in imports:
        for name in node.names:
            assert name.asname == name.name  # Otherwise, the import does not export the name.
            module = importlib.import_module(node.module or "")
            assert getattr(module, name.name) is getattr(preheat, name.name)


def test_a_public_function_is_not_hidden_by_a_room_of_the_same_name(tmp_path: Path) -> None:
    code = "import preheat; preheat.Array; import preheat.devices.base; print(preheat.device.__name__)"
    assert python(code, tmp_path).stdout == "device\n"
    assert python("import preheat.devices.base, preheat; preheat.device('emulator')", tmp_path)


def public(module: ast.Module) -> Iterator[ast.FunctionDef | ast.ClassDef]:
    for node in module.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield node


@each_layer
def test_every_module_and_public_name_has_a_docstring(name: str) -> None:
    for file in files_of(name):
        module = module_of(file)
        assert ast.get_docstring(module), file
        for node in public(module):
            assert ast.get_docstring(node), f"{file}: {node.name}"


LONGEST, MOST_METHODS = 500, 30


def docstring_lines(node: ast.AST) -> int:
    """Return the number of lines of the docstring of a definition beyond the first."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
        return (node.body[0].end_lineno or 0) - node.body[0].lineno
    return 0


@each_layer
def test_files_and_classes_have_one_subject(name: str) -> None:
    """A file with many lines, or a class with many methods, has several; the facade only forwards.

    Docstrings do not count: their examples make a file long, and do not add a subject.
    """
    for file in files_of(name):
        lines = file.read_text().count("\n")
        assert lines - sum(map(docstring_lines, nodes_of(file))) <= LONGEST, file
        for node in nodes_of(file):
            if isinstance(node, ast.ClassDef) and node.name != "Gpu":
                methods = sum(isinstance(each, ast.FunctionDef) for each in node.body)
                assert methods <= MOST_METHODS, f"{file}: {node.name}"


def test_all_at_fork_hooks_are_in_two_modules() -> None:
    """`locks` holds a fork back, and `fork` has everything that a child must renew."""
    users = {file.name for file in SOURCE.rglob("*.py") if "os.register_at_fork(" in file.read_text()}
    assert users == {"fork.py", "locks.py"}


def test_the_files_of_tests_that_run_first_exist() -> None:
    """A file that was renamed would silently take its place in the order of names."""
    tests = Path(__file__).parent
    assert [name for name in LONGEST_FILES if not (tests / name).is_file()] == []
    assert len(set(LONGEST_FILES)) == len(LONGEST_FILES)


def unguarded_imports(node: ast.AST, *, inside: bool = False) -> Iterator[int]:
    """Yield the lines of imports in functions that are not in a `with no_fork` block."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom) and inside:
            yield child.lineno
        guards = [item.context_expr for item in child.items] if isinstance(child, ast.With) else []
        if any(isinstance(each, ast.Name) and each.id == "no_fork" for each in guards):
            continue
        function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
        yield from unguarded_imports(child, inside=inside or function)


#: Layers whose functions run in threads of preheat, beside a thread of the user that may fork.
IN_THREADS = {
    *("process", "errors", "model", "native", "store", "toolchain", "build", "devices", "emulator"),
    *("driver", "graph", "gpu", "ahead", "kernels", "lora", "audit", "tools"),
}
#: This process of a compiler has no such threads.
WORKER = SOURCE / "toolchain" / "worker.py"


@pytest.mark.parametrize("name", sorted(IN_THREADS))
def test_no_fork_happens_during_an_import_in_a_thread(name: str) -> None:
    """A child that is forked at that moment would wait for the lock of the import for ever."""
    for file in files_of(name):
        assert file == WORKER or list(unguarded_imports(module_of(file))) == [], file


ROOMS_ON_DISK = sorted(path.parent for path in SOURCE.glob("*/__init__.py"))


@pytest.mark.parametrize("folder", ROOMS_ON_DISK, ids=lambda folder: folder.name)
def test_a_room_has_a_short_readme_that_names_its_files(folder: Path) -> None:
    text = (folder / "README.md").read_text()
    assert len(text.splitlines()) <= 40
    files = {file.stem for file in folder.glob("*.py")} - {"__init__", "__main__"}
    assert [name for name in sorted(files) if not re.search(rf"\b{name}\b", text)] == []
