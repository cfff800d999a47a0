"""Under the driver, every cubin of a compiler has the PTX of the same program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from preheat.audit.events import read_events
from preheat.audit.library import LIBRARY as AUDIT
from preheat.model import ptx
from preheat.toolchain.ptx_merge import PtxPart, merge

ROOT = Path(__file__).parents[2]
SHIM = ROOT / "src" / "preheat" / "driver" / "libcuda.so.1"
#: The kernels and functions in the PTX, by the way in which a cubin was made.
DEFINED = {
    "compiled": {"k"},
    "only PTX": set(),
    "linked PTX": {"k"},
    "linked cubins": {"k", "_Z1ff"},
    "linked files": {"k", "_Z1ff"},
    "linked anything": {"k", "_Z1ff"},
    "optimised": {"k"},
    "optimised beside PTX": {"k", "_Z1ff"},
}

needs_shim = pytest.mark.skipif(not SHIM.is_file(), reason="the CPU driver was not built")


def texts(*preloads: Path, env: dict[str, str] | None = None) -> dict[str, list[str]]:
    """Return the PTX in each cubin that a process with these libraries makes."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.driver.compiled"],
        env={**os.environ, **(env or {}), "LD_PRELOAD": ":".join(map(str, preloads))},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


def defined(parts: list[str]) -> set[str]:
    """Return what the merged parts define."""
    if not parts:
        return set()
    merged = merge([PtxPart.of(str(number), text) for number, text in enumerate(parts)])
    return {each.name for each in ptx.parse(merged).functions if each.body is not None}


@needs_shim
def test_every_cubin_has_the_ptx_of_its_program() -> None:
    assert {name: defined(parts) for name, parts in texts(SHIM).items()} == DEFINED


@needs_shim
@pytest.mark.skipif(not AUDIT.is_file(), reason="the audit library was not built")
@pytest.mark.parametrize("audit_is_first", [True, False])
def test_an_audit_sees_the_same_compiles(audit_is_first: bool, tmp_path: Path) -> None:
    preloads = (AUDIT, SHIM) if audit_is_first else (SHIM, AUDIT)
    found = texts(*preloads, env={"PREHEAT_AUDIT": str(tmp_path), "PREHEAT_AUDIT_LIBRARY": str(AUDIT)})
    assert {name: defined(parts) for name, parts in found.items()} == DEFINED
    compilers = [event.fields["compiler"] for event in read_events(tmp_path).named("compile")]
    assert compilers.count("NVRTC") == 6
    assert compilers.count("nvJitLink") == 6  # The second link is no compile of the program.


def test_without_the_driver_no_cubin_is_changed() -> None:
    assert not any(texts().values())
