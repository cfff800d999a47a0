"""Adapters are installed when their libraries are imported, and a Python without them pays nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

import preheat.adapters
from preheat.adapters import imports
from preheat.adapters.imports import child_environment
from preheat.errors import InputError
from tests.adapters.fake import write_library
from tests.processes import SOURCE, TIMEOUT_SECONDS

Run = Callable[..., subprocess.CompletedProcess[str]]
SITE = SOURCE / "preheat" / "adapters" / "site"


@pytest.fixture
def library(tmp_path: Path) -> Path:
    return write_library(tmp_path / "library")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs code in a Python whose path is given."""

    def run(
        code: str, *path: Path, env: Mapping[str, str] | None = None, words: tuple[str, ...] = ()
    ) -> subprocess.CompletedProcess[str]:
        base = {
            "PATH": os.environ["PATH"],
            "HOME": str(tmp_path / "home"),
            "PYTHONPATH": os.pathsep.join(map(str, path or (SOURCE,))),
            "PREHEAT_CACHE_DIR": str(tmp_path / "cache"),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        return subprocess.run(
            [sys.executable, *words, "-c", code],
            env={**base, **(env or {})},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
        )

    return run


def out(ran: subprocess.CompletedProcess[str]) -> str:
    """Return what a process printed; fail with its stderr if it failed."""
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


# What is switched on

CONNECTED = "import preheat, fakelib; print(len(fakelib.adapters))"


@pytest.mark.parametrize(
    ("value", "connected"),
    [
        *(("auto", 1), ("fakelib", 1), (" triton , fakelib ", 1), ("auto,triton", 1)),
        *(("off", 0), ("none", 0), ("0", 0), ("", 0), ("triton", 0), (None, 0)),
    ],
)
def test_the_variable_names_adapters(
    run: Run, library: Path, value: str | None, connected: int
) -> None:
    env = {} if value is None else {"PREHEAT_ADAPTERS": value}
    ran = run(CONNECTED, library, SOURCE, env=env)
    assert (out(ran), ran.stderr) == (str(connected), "")


def test_an_unknown_name_is_a_warning(run: Run, library: Path) -> None:
    ran = run(CONNECTED, library, SOURCE, env={"PREHEAT_ADAPTERS": "fakelib,cupie"})
    assert out(ran) == "1"
    assert "PREHEAT_ADAPTERS names 'cupie', which has no adapter; there are triton, " in ran.stderr


def test_a_library_that_is_imported_already_is_connected(run: Run, library: Path) -> None:
    code = (
        "import sys, fakelib, preheat.adapters.imports as imports\n"
        "before = len(fakelib.adapters)\n"
        "imports.activate('fakelib')\n"
        "imports.activate('fakelib')\n"
        "import preheat.adapters\n"
        "print(before, len(fakelib.adapters), preheat.adapters.installed())\n"
    )
    assert out(run(code, library, SOURCE)) == "0 1 ('fakelib',)"


def test_several_activations_share_one_finder(run: Run, library: Path) -> None:
    code = (
        "import sys, preheat.adapters.imports as imports\n"
        "for value in ('triton', 'fakelib', 'auto', 'off'): imports.activate(value)\n"
        "print([type(each).__name__ for each in sys.meta_path].count('ImportHook'))\n"
        "import fakelib\n"
        "print(len(fakelib.adapters))\n"
    )
    assert out(run(code, library, SOURCE)).split() == ["1", "1"]


# The import of the library

LOOKS = """
import json, sys
import preheat
import importlib.util
spec = importlib.util.find_spec("fakelib")  # a program that only asks
import fakelib
print(json.dumps({
    "loader": type(fakelib.__loader__).__name__,
    "same": fakelib.__spec__.loader is fakelib.__loader__,
    "origin": fakelib.__spec__.origin,
    "name": fakelib.__spec__.name,
    "cached": fakelib.__spec__.cached,
    "attributes": sorted(vars(fakelib)),
    "source": fakelib.__loader__.get_source("fakelib") is not None,
}))
import importlib
fakelib.adapters.clear()
importlib.reload(fakelib)
print(len(fakelib.adapters))
"""


def test_a_library_looks_as_if_preheat_were_not_there(run: Run, library: Path) -> None:
    plain = out(run(LOOKS, library, SOURCE)).splitlines()
    hooked = out(run(LOOKS, library, SOURCE, env={"PREHEAT_ADAPTERS": "auto"})).splitlines()
    assert hooked == plain
    assert json.loads(plain[0])["loader"] == "SourceFileLoader"


def test_a_probe_does_not_use_up_the_hook(run: Run, library: Path) -> None:
    code = "import importlib.util, preheat\nimportlib.util.find_spec('fakelib')\n" + CONNECTED
    assert out(run(code, library, SOURCE, env={"PREHEAT_ADAPTERS": "auto"})) == "1"


INSPECTED = """
import copy, importlib.util, runpy
import preheat
loader = importlib.util.find_spec("fakelib").loader
print(loader.get_filename("fakelib"), loader.path, loader.is_package("fakelib"))
print(loader.get_source("fakelib"), hasattr(loader, "no_such_method"))
print(loader.get_data(loader.path) == open(loader.path, "rb").read())
print(copy.copy(loader).get_filename("fakelib"))
print(sorted(name for name in runpy.run_module("fakelib") if not name.startswith("_")))
"""


def test_a_program_can_inspect_the_loader_before_the_import(run: Run, library: Path) -> None:
    plain = out(run(INSPECTED, library, SOURCE))
    assert out(run(INSPECTED, library, SOURCE, env={"PREHEAT_ADAPTERS": "auto"})) == plain


def test_a_library_whose_import_fails_leaves_no_trace(run: Run, library: Path) -> None:
    text = (library / "fakelib.py").read_text()
    (library / "fakelib.py").write_text("import os\nif 'FIXED' not in os.environ: 1 / 0\n" + text)
    code = (
        "import os, sys, preheat, preheat.adapters\n"
        "try:\n    import fakelib\nexcept ZeroDivisionError as error:\n"
        "    print(error, 'fakelib' in sys.modules, preheat.adapters.installed())\n"
        "os.environ['FIXED'] = '1'\n"
        "import fakelib\n"
        "print(len(fakelib.adapters))\n"
    )
    ran = run(code, library, SOURCE, env={"PREHEAT_ADAPTERS": "auto"})
    assert out(ran).splitlines() == ["division by zero False ()", "1"]


def test_a_library_that_is_not_there_is_not_there(run: Run, library: Path) -> None:
    (library / "fakelib.py").unlink()
    code = (
        "import preheat\n"
        "try:\n    import fakelib\nexcept ModuleNotFoundError as error:\n    print(error.name)\n"
    )
    assert out(run(code, library, SOURCE, env={"PREHEAT_ADAPTERS": "auto"})) == "fakelib"


def test_packages_with_modules_of_their_own_are_found(run: Run, tmp_path: Path, library: Path) -> None:
    (library / "fakelib.py").rename(tmp_path / "code")
    (library / "fakelib").mkdir()
    (tmp_path / "code").rename(library / "fakelib" / "__init__.py")
    (library / "fakelib" / "part.py").write_text("value = 7\n")
    code = "import preheat, fakelib.part\nprint(fakelib.part.value, len(fakelib.adapters))"
    assert out(run(code, library, SOURCE, env={"PREHEAT_ADAPTERS": "auto"})) == "7 1"


# Versions that an adapter does not know


def test_an_unknown_version_is_left_alone_with_a_warning(run: Run, library: Path) -> None:
    (library / "fakelib.py").write_text("version = 2\nadapters = []\n")
    ran = run(CONNECTED, library, SOURCE, env={"PREHEAT_ADAPTERS": "auto"})
    assert out(ran) == "0"
    assert ran.stderr == "the adapter for fakelib is not installed: version 2 is not known\n"


def test_an_unknown_version_is_an_error_of_a_sealed_process(run: Run, library: Path) -> None:
    (library / "fakelib.py").write_text("version = 2\nadapters = []\n")
    env = {"PREHEAT_ADAPTERS": "auto", "PREHEAT_SEALED": "1"}
    ran = run(CONNECTED, library, SOURCE, env=env)
    assert ran.returncode == 1
    assert "AdapterError: version 2 is not known" in ran.stderr


@pytest.mark.parametrize("version", ["3.5.1", "3.10.0", "4.0.0"])
def test_an_unknown_version_of_triton_is_left_alone(run: Run, tmp_path: Path, version: str) -> None:
    package = tmp_path / "other" / "triton"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f"__version__ = {version!r}\n")
    code = "import preheat, triton, sys; print(triton.__version__, sorted(vars(triton))[-1])"
    env = {"PREHEAT_ADAPTERS": "auto"}
    ran = run(code, package.parent, SOURCE, env=env)
    assert out(ran) == f"{version} __version__"
    assert (
        f"the adapter for triton is not installed: Triton {version} is not known: the adapter "
        "accepts 3.6 to 3.9" in ran.stderr
    )
    ran = run(code, package.parent, SOURCE, env={**env, "PREHEAT_SEALED": "1"})
    assert ran.returncode == 1
    assert f"AdapterError: Triton {version} is not known" in ran.stderr


# Installing by hand


def test_an_unknown_adapter_is_an_error_with_a_suggestion() -> None:
    with pytest.raises(InputError, match="there is no adapter for 'tritom'") as refused:
        preheat.adapters.install("tritom")
    assert refused.value.hint == "did you mean 'triton'?"
    with pytest.raises(InputError, match="there is no adapter for 'zzz'") as refused:
        preheat.adapters.adapter("zzz")
    assert refused.value.hint == f"the adapters are {', '.join(preheat.adapters.known())}"
    with pytest.raises(InputError, match="no library was named"):
        preheat.adapters.install()
    assert "triton" in preheat.adapters.known()


def test_a_library_that_is_not_installed_is_an_error(run: Run, library: Path) -> None:
    (library / "fakelib.py").unlink()
    code = (
        "import preheat, preheat.adapters\n"
        "try:\n    preheat.adapters.install('fakelib')\n"
        "except preheat.InputError as error:\n    print(error, '/', error.hint)\n"
        "print(preheat.adapters.installed())\n"
    )
    assert out(run(code, library, SOURCE)).splitlines() == [
        "fakelib is not installed: No module named 'fakelib' / pip install fakelib",
        "()",
    ]


def test_installing_twice_changes_nothing(run: Run, library: Path) -> None:
    code = (
        "import preheat.adapters, fakelib\n"
        "for _ in range(2): preheat.adapters.install('fakelib')\n"
        "print(len(fakelib.adapters))\n"
    )
    assert out(run(code, library, SOURCE)) == "1"


# What a Python that does not use adapters pays

LOADED = """
import json, sys
import preheat
print(json.dumps([name for name in sys.modules if name.startswith("preheat")]))
"""


def test_importing_preheat_without_the_variable_imports_no_adapter(run: Run) -> None:
    loaded = json.loads(out(run(LOADED)))
    assert not [name for name in loaded if name.startswith("preheat.adapters")]
    switched_on = json.loads(out(run(LOADED, env={"PREHEAT_ADAPTERS": "auto"})))
    more = sorted(set(switched_on) - set(loaded))
    own = ["preheat.adapters", "preheat.adapters.import_hook", "preheat.adapters.imports"]
    assert more == own


def test_the_package_installs_no_pth_file() -> None:
    assert [*SOURCE.rglob("*.pth")] == []
    build = tomllib.loads((SOURCE.parent / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    assert "pth" not in json.dumps(build)
    assert ".pth" not in (SOURCE.parent / "hatch_build.py").read_text()


# Commands that preheat starts


def test_the_environment_of_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREHEAT_ADAPTERS", raising=False)
    env = child_environment({"A": "1"})
    assert env == {"A": "1", "PREHEAT_ADAPTERS": "auto", "PYTHONPATH": str(SITE)}
    env = child_environment({"PREHEAT_ADAPTERS": "off", "PYTHONPATH": "/x:/y"})
    assert env == {"PREHEAT_ADAPTERS": "off", "PYTHONPATH": f"{SITE}:/x:/y"}


def test_the_sitecustomize_that_is_there_runs_first(run: Run, tmp_path: Path, library: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "added").mkdir()
    (other / "added" / "later.py").write_text("value = 5\n")
    (other / "sitecustomize.py").write_text(
        f"import sys\nsys.path.append({str(other / 'added')!r})\nran = __file__\n"
    )
    code = (
        "import sys, sitecustomize, later\n"
        "print(sitecustomize.ran == sitecustomize.__file__, later.value)\n"
        "print('preheat.adapters.imports' in sys.modules)\n"
        "print('triton' in __import__('preheat.adapters.imports').adapters.known())\n"
    )
    ran = run(code, SITE, other, SOURCE, env={"PREHEAT_ADAPTERS": "auto"})
    assert out(ran).splitlines() == ["True 5", "True", "True"]
    assert out(run(CONNECTED, SITE, library, SOURCE, env={"PREHEAT_ADAPTERS": "auto"})) == "1"


def test_a_sitecustomize_that_fails_is_reported_as_always(run: Run, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "sitecustomize.py").write_text("1 / 0\n")
    plain = run("print('runs')", other, SOURCE)
    ran = run("print('runs')", SITE, other, SOURCE)
    assert out(ran) == out(plain) == "runs"
    for each in (plain, ran):
        assert "Error in sitecustomize" in each.stderr
        assert "ZeroDivisionError: division by zero" in each.stderr


def test_a_python_without_preheat_runs_unchanged(run: Run) -> None:
    file = str(SITE / "sitecustomize.py")
    code = (
        "import sys\n"
        "sys.path[:] = [each for each in sys.path if '-packages' not in each and 'src' not in each]\n"
        "import importlib.util\n"
        "assert importlib.util.find_spec('preheat') is None\n"
        f"exec(compile(open({file!r}).read(), {file!r}, 'exec'), {{'__file__': {file!r}}})\n"
        "print('preheat' in sys.modules)\n"
    )
    ran = run(code, SITE / "nothing", env={"PREHEAT_ADAPTERS": "auto"})
    assert (out(ran), ran.stderr) == ("False", "")


def test_isolated_and_siteless_pythons_run_unchanged(run: Run) -> None:
    for words in (("-I",), ("-S",)):
        ran = run("print('runs')", SITE, SOURCE, env={"PREHEAT_ADAPTERS": "auto"}, words=words)
        assert (out(ran), ran.stderr) == ("runs", "")


@pytest.mark.parametrize("name", preheat.adapters.known())
def test_an_adapter_is_made_without_its_library(name: str) -> None:
    made = preheat.adapters.adapter(name)
    assert made.name == name
    assert made.module == imports._MODULES[name]


def test_every_adapter_is_installed_when_its_library_is_imported() -> None:
    assert set(imports._MODULES) == set(preheat.adapters.known())
