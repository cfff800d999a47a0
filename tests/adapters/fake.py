"""A library that compiles nothing, its adapter, and a way to register it in every process.

The directory that `write_library` makes is on the path of a process. Its `sitecustomize` registers the
adapter, as the package of preheat does for real libraries.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["write_library"]

_SITE = """\
import os

value = os.environ.pop("PREHEAT_ADAPTERS", None)  # The adapter has to be known first.
import preheat.adapters, preheat.adapters.imports

preheat.adapters._ADAPTERS["fakelib"] = ("fakelib_adapter", "FakeAdapter")
preheat.adapters.imports._MODULES["fakelib"] = "fakelib"
if value is not None:
    os.environ["PREHEAT_ADAPTERS"] = value
    preheat.adapters.imports.activate()
"""
_LIBRARY = """\
import os

adapters = []  # those that are connected

def compile(function, arch="sm_90", portable=True):
    return adapters[0].compile(function, arch, portable)
"""
_ADAPTER = """\
import os
from preheat.adapters.base import Adapter, Connection, RequiredEntries
from preheat.model.arch import Arch
from preheat.errors import AdapterError
from preheat.model.foreign import ForeignRequest

connections = []

def request(row, arch, coverage="recorded"):
    key = f"{row['function']}/{row.get('line', 1)}/{arch}"
    yield ForeignRequest("fakelib", key, label=row["function"], arch=arch)
    if coverage != "recorded":
        yield ForeignRequest("fakelib", f"{key}/{coverage}", label=row["function"], arch=arch)

class FakeAdapter(Adapter):
    name = module = "fakelib"

    def install(self, builder):
        import fakelib

        if getattr(fakelib, "version", 1) > 1:
            raise AdapterError(f"version {fakelib.version} is not known", hint="use version 1")
        connections.append(Connection(builder.foreign, fakelib))
        fakelib.adapters.append(self)

    def compile(self, function, arch, portable):
        row = {"function": function, "root": os.getcwd(), "env": {}, "recorded": {"line": 1}}
        (wanted,) = request(row, Arch.parse(arch))
        make = lambda: {"code": f"{function} {arch}".encode()}
        entry = connections[0].obtain(wanted, make, lambda: row if portable else None)
        return entry.files["code"].decode()

    def required(self, row, arch, coverage, *, make):
        if row["function"] == "raises":
            raise ZeroDivisionError("division by zero")
        if make:
            return made(row, arch, coverage)
        line = int(os.environ.get("FAKELIB_LINE", 1))
        notes = () if line == 1 else (f"moved from line 1 to line {line}",)
        return RequiredEntries(tuple(request({**row, "line": line}, arch, coverage)), notes)

    def count(self, row, coverage):
        if row["function"] == "raises":
            raise ZeroDivisionError("division by zero")
        return 3 if coverage == "closure" else 1

def made(row, arch, coverage):
    function = row["function"]
    print("a line of the application")  # It must not reach the answers.
    if function == "refused":
        raise AdapterError("its code is gone", hint="find it")
    if function == "dies":
        os._exit(3)
    wanted = [*request(row, arch, coverage)]
    for each in wanted:
        connections[0].store.obtain(each, lambda: {"code": f"{function} {arch}".encode()})
    if function == "forgets":
        wanted.append(ForeignRequest("fakelib", "nowhere"))
    return RequiredEntries(tuple(wanted), tuple(row.get("notes", ())))
"""


def write_library(directory: Path) -> Path:
    """Write the library, its adapter and a `sitecustomize` into a directory, and return it."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "sitecustomize.py").write_text(_SITE)
    (directory / "fakelib.py").write_text(_LIBRARY)
    (directory / "fakelib_adapter.py").write_text(_ADAPTER)
    return directory
