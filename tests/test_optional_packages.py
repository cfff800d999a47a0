"""Tests are collected where optional packages are missing, as on a machine that only tests a GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.processes import expect_success, start_process

ROOT = Path(__file__).parents[1]

#: Packages of the tests that `make carry` does not install, and that not every machine with a GPU has.
ABSENT = (
    "cryptography", "cuda.core", "cupy", "distributed", "hatchling", "lightkube", "numba", "numba_cuda",
    "nvmath", "opendal", "opentelemetry", "prometheus_client", "pycuda", "ray", "torch", "triton",
    "xdist", "yaml", "zstandard",
)  # fmt: skip

IMPORTS = """
import importlib, json, sys
import pytest

class Others:
    # Finds what another finder finds, except the absent packages.

    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        if not any(name == each or name.startswith(f"{each}.") for each in absent):
            return self.finder.find_spec(name, path, target)

absent, names = json.loads(sys.argv[1])
sys.meta_path[:] = map(Others, sys.meta_path)
failed = {}
for name in names:
    try:
        importlib.import_module(name)
    except pytest.skip.Exception as skip:
        assert skip.allow_module_level and skip.msg, name
    except Exception as error:
        failed[name] = repr(error)
print(json.dumps(failed))
"""


def test_every_file_of_tests_can_be_imported_or_is_skipped() -> None:
    """One file that cannot be imported would end the whole run."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files]
    out = expect_success(
        start_process([sys.executable, "-c", IMPORTS, json.dumps([ABSENT, names])], cwd=ROOT)
    )
    assert json.loads(out) == {}
