"""What Triton computes about itself is computed once, and equals what Triton computes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is a large package, which `make test-adapters` installs")

from preheat.adapters.triton import identity
from tests.adapters.triton.world import World

COUNTED = """
import sys, watch
import triton.runtime.cache as cache
import triton.compiler.compiler, triton.backends.nvidia.compiler as nvidia

computed = []
real_key, real_version = cache.triton_key, nvidia.get_ptxas_version

def triton_key():
    computed.append(1)
    return real_key()

for module in [*sys.modules.values()]:
    if getattr(module, "triton_key", None) is real_key:
        module.triton_key = triton_key
import preheat.adapters
from preheat.adapters.triton import identity
if len(sys.argv) > 1:
    identity._stamp_of_triton = lambda: sys.argv[1]
preheat.adapters.install("triton")
assert cache.triton_key() == cache.triton_key()
nvidia.get_ptxas_version(90), nvidia.get_ptxas_version(100), nvidia.get_ptxas_version(90)
print(len(computed))
"""
SAME = (
    COUNTED
    + """
assert cache.triton_key() == real_key()
for arch in (80, 90, 100):
    assert nvidia.get_ptxas_version(arch) == real_version(arch)
"""
)


def run(world: World, code: str, *words: str, **env: str) -> tuple[int, int]:
    """Return how often the key was computed, and how many programs were asked for their versions."""
    file = world.root / "counted.py"
    file.write_text(code)
    ran = world.python(str(file), *words, cc=None, **env).ok()
    return int(ran.out), sum("--version" in line for line in ran.started)


def test_the_identity_of_the_compiler_is_computed_once(world: World) -> None:
    computed, versions = run(world, COUNTED)
    assert computed == 1
    assert versions >= 1
    assert run(world, COUNTED) == (0, 0)
    # Other files have another stamp. The version of a tool belongs to the build, which is the same.
    assert run(world, COUNTED, "other-stamp") == (1, 0)
    assert run(world, COUNTED, "other-stamp") == (0, 0)


def test_the_remembered_values_are_those_of_triton(world: World) -> None:
    for _ in range(2):
        run(world, SAME)


def test_a_tool_of_the_user_is_asked_again_when_its_file_changes(world: World) -> None:
    import triton

    (real,) = Path(triton.__file__).parent.rglob("bin/ptxas")
    tool = world.root / "ptxas"
    tool.write_text(f'#!/bin/sh\nexec "{real}" "$@"\n')
    tool.chmod(0o755)
    env = dict.fromkeys(("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH"), str(tool))
    assert run(world, COUNTED, **env)[1] >= 1
    assert run(world, COUNTED, **env)[1] == 0
    os.utime(tool, ns=(0, 1))
    assert run(world, COUNTED, **env)[1] >= 1


def test_the_stamp_changes_with_any_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    package = tmp_path / "triton"
    for name in ("_C/libtriton.so", "compiler/a.py", "backends/x/b.py", "language/c.py"):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text("1")
    (package / "runtime").mkdir()
    (package / "runtime" / "cache.py").write_text("1")
    (package / "__init__.py").write_text("")
    monkeypatch.setattr(triton, "__file__", str(package / "__init__.py"))
    stamps = [identity._stamp_of_triton()]
    assert identity._stamp_of_triton() == stamps[0]
    for name in ("_C/libtriton.so", "compiler/a.py", "backends/x/b.py", "runtime/cache.py"):
        os.utime(package / name, ns=(0, 1))
        stamps.append(identity._stamp_of_triton())
    (package / "language" / "c.py").write_text("12")
    stamps.append(identity._stamp_of_triton())
    # A copy with the same times is another file.
    shutil.copy2(package / "_C" / "libtriton.so", package / "copy")
    (package / "copy").replace(package / "_C" / "libtriton.so")
    stamps.append(identity._stamp_of_triton())
    (package / "language" / "d.py").write_text("")
    stamps.append(identity._stamp_of_triton())
    assert len(set(stamps)) == 8
