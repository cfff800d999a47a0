"""Audits of real applications on a GPU, where CUPTI sees every module. Counts are those that are known.

What launches nothing is also tested beside the stand-ins for the driver and CUPTI. Each application is
also a command: `preheat audit -- python tests/audit/applications/torch_app.py`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from preheat.audit.library import LIBRARY
from preheat.build.bundles import foreign_of
from preheat.store.bundle import Bundle, write
from tests.adapters.mixed.runs import APPLICATION, MixedApplication
from tests.audit.conftest import Standins
from tests.audit.prove import Proof
from tests.processes import TIMEOUT_SECONDS, import_path

pytestmark = pytest.mark.skipif(not LIBRARY.is_file(), reason="the audit library was not built")

APPLICATIONS = Path(__file__).parent / "applications"


def needs(name: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(name) is None
    return pytest.mark.skipif(missing, reason=f"{name} is not installed")


class Machine:
    """Runs commands of preheat with caches of their own."""

    def __init__(self, root: Path, **env: str) -> None:
        self.root = root
        self.env = {
            **os.environ,
            "PYTHONPATH": import_path(),
            "HOME": str(root),
            "PREHEAT_CACHE_DIR": str(root / "preheat"),
            "TRITON_CACHE_DIR": str(root / "triton"),
            "CUPY_CACHE_DIR": str(root / "cupy"),
            "CUDA_CACHE_PATH": str(root / "driver"),
            "PREHEAT_AUDIT_DEBUG": "1",
            **env,
        }

    def preheat(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "preheat", *words]
        return subprocess.run(
            command, cwd=self.root, env={**self.env, **env}, capture_output=True, text=True,
            timeout=TIMEOUT_SECONDS,
        )  # fmt: skip

    def audit(self, name: str, **env: str) -> dict[str, Any]:
        """Audit an application that succeeds; every module must be seen by CUPTI."""
        words = ["audit", "--json", "--keep", str(self.root / "kept"), "--"]
        ran = self.preheat(*words, sys.executable, str(APPLICATIONS / name), **env)
        log = self.root / "kept" / "debug.log"
        said = log.read_text() if log.exists() else "no debug log"
        assert ran.returncode == 0, ran.stderr + said
        report: dict[str, Any] = json.loads(ran.stdout)
        for file in (self.root / "kept").iterdir():
            file.unlink()
        assert report["cupti"], f"{report['unseen']}\n{said}"
        assert report["unseen"] == [], said
        return report


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu)])
def machine(tmp_path: Path) -> Machine:
    """Return a machine with a GPU."""
    return Machine(tmp_path)


@pytest.fixture(params=["stand-ins", pytest.param("cuda", marks=pytest.mark.gpu)])
def any_machine(request: pytest.FixtureRequest, tmp_path: Path) -> Machine:
    """Return a machine with a GPU, and one whose driver accepts every module."""
    if request.param == "cuda":
        return Machine(tmp_path)
    standins: Standins = request.getfixturevalue("standins")
    cupti = standins.libraries / "libcupti.so.13"
    return Machine(tmp_path, LD_LIBRARY_PATH=str(standins.libraries), PREHEAT_AUDIT_CUPTI=str(cupti))


def compiled_by(report: dict[str, Any], compiler: str) -> list[dict[str, Any]]:
    return [row for row in report["compiles"] if row["compiler"] == compiler]


def loaded_by(report: dict[str, Any], library: str) -> list[dict[str, Any]]:
    return [row for row in report["modules"] if row["library"] == library]


@needs("torch")
def test_torch_loads_code_of_its_files_and_compiles_nothing(machine: Machine) -> None:
    report = machine.audit("torch_app.py")
    assert report["compiles"] == []
    assert report["modules"]
    unaccounted = [row for row in report["modules"] if not row["accounted"]]
    assert unaccounted == []
    assert any(row["from"].startswith("torch ") for row in report["modules"])
    assert report["clean"] is True


@needs("triton")
@needs("torch")
def test_triton_compiles_when_cold_and_not_when_warm(machine: Machine) -> None:
    cold, warm = machine.audit("triton_app.py"), machine.audit("triton_app.py")
    assert [len(compiled_by(report, "Triton")) for report in (cold, warm)] == [2, 0]
    assert warm["compiles"] == []
    for report in (cold, warm):
        rows = loaded_by(report, "triton")
        assert [row["kind"] for row in rows] == ["cubin", "cubin"]
        assert all(row["line"].startswith("triton_app.py:") for row in rows)
        assert {row["compiled_by_driver"] for row in rows} == {False}
    assert cold["libraries"][0]["library"] == "triton"
    assert [row["argv"][0] for row in cold["compilers"] if not row["probe"]]  # ptxas, gcc
    assert [row for row in warm["compilers"] if not row["probe"]] == []


def test_ptx_is_a_compile_of_the_driver_and_refused_when_sealed(any_machine: Machine) -> None:
    machine = any_machine
    report = machine.audit("ptx_app.py", CUDA_CACHE_DISABLE="1")
    (row,) = loaded_by(report, "ptx_app.py")
    assert (row["kind"], row["compiled_by_driver"], row["result"]) == ("PTX", True, 0)
    assert row["line"].startswith("ptx_app.py:")
    (compile_,) = compiled_by(report, "driver")
    assert compile_["seconds"] > 0
    ran = machine.preheat("run", "--sealed", "--", sys.executable, str(APPLICATIONS / "ptx_app.py"))
    assert ran.stdout.split() == ["223"], ran.stderr
    assert (
        "loading PTX was refused (the driver would have to compile it), called from File" in ran.stderr
    )
    assert "tried to load code that the driver must compile: PTX" in ran.stderr
    by_driver = machine.preheat(
        "run", "--", sys.executable, str(APPLICATIONS / "ptx_app.py"),
        CUDA_DISABLE_PTX_JIT="1", CUDA_CACHE_DISABLE="1",
    )  # fmt: skip
    assert by_driver.stdout.split() == ["223"]  # The driver refuses it as well.


@needs("cupy")
def test_cupy_compiles_by_nvrtc(machine: Machine) -> None:
    cold, warm = machine.audit("cupy_app.py"), machine.audit("cupy_app.py")
    assert compiled_by(cold, "NVRTC")
    assert len(compiled_by(warm, "NVRTC")) < len(compiled_by(cold, "NVRTC"))
    assert loaded_by(cold, "cupy")


def test_a_sealed_application_of_preheat_is_accounted_for(machine: Machine) -> None:
    words = [sys.executable, str(APPLICATIONS / "preheat_app.py")]
    assert machine.preheat("record", "--", *words).returncode == 0
    assert machine.preheat("bake", "kernels.toml").returncode == 0
    sealed = ["run", "--bundle", "kernels.heat", "--sealed", "--manifest", "kernels.toml"]
    empty = str(machine.root / "empty")
    ran = machine.preheat(*sealed, "--verdict", "v.json", "--", *words, PREHEAT_CACHE_DIR=empty)
    verdict = json.loads((machine.root / "v.json").read_text())
    assert ran.returncode == 0, ran.stderr + json.dumps(verdict, indent=2)
    assert verdict["accounted"] is True
    assert verdict["modules"]["by_origin"] == {"bundle": 1}
    assert verdict["modules"]["seen_by"] == "CUPTI"


@pytest.mark.gpu
@needs("torch")
def test_the_mixed_application_is_accounted_for_and_each_entry_matters(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Without one entry, nothing starts with a manifest, and no kernel of it is launched without."""
    import torch

    application = MixedApplication(tmp_path_factory.mktemp("mixed"))
    application.record()
    major, minor = torch.cuda.get_device_capability()
    application.bake(f"sm_{major}{minor}")
    command = [sys.executable, str(APPLICATION)]
    verdict = application.root / "verdict.json"

    def run(bundle: Path, caches: str, *more: str, **env: str) -> subprocess.CompletedProcess[str]:
        words = ["run", "--sealed", "--bundle", str(bundle), *more, "--", *command]
        return subprocess.run(
            [sys.executable, "-m", "preheat", *words], env=application.environment(caches, **env),
            capture_output=True, text=True, timeout=TIMEOUT_SECONDS,
        )  # fmt: skip

    ran = run(application.bundle, "sealed", "--verdict", str(verdict))
    found = json.loads(verdict.read_text())
    if place := os.environ.get("PREHEAT_PROOF"):
        shutil.copy(verdict, Path(place) / "mixed_verdict.json")
    assert ran.returncode == 0, ran.stderr + json.dumps(found, indent=2)
    assert found["accounted"] is True
    assert found["modules"]["accounted"] == found["modules"]["loaded"] > 0
    less = application.root / "less.heat"
    with Bundle.open(application.bundle) as bundle:
        kernels = (each for each in foreign_of(bundle) if each.kind == "triton" and each.arch)
        missing = next(each.digest for each in kernels if "scaled_sum" in each.label)
        rest = {digest: bundle.get(digest) or b"" for digest in bundle.digests() if digest != missing}
        write(less, rest, bundle.meta)
    assert run(less, "less", "--manifest", str(application.manifest)).returncode == 3
    # Another variant of the function would serve the launch.
    ran = run(less, "less", PREHEAT_WEAK_KERNELS="0")
    assert ran.returncode not in (0, 3, 4)
    assert "SealedError" in ran.stderr
    assert "scaled_sum" in ran.stderr
    assert "app.py:" in ran.stderr


def test_the_reports_of_applications_are_written(any_machine: Machine, tmp_path: Path) -> None:
    """`make prove-audit-gpu` does so for all of them."""
    proof = Proof(tmp_path, 300.0, any_machine.env)
    assert proof.reports(["ptx_app.py"]), (tmp_path / "reports.txt").read_text()
    text = (tmp_path / "reports.txt").read_text()
    assert text.startswith(f"$ preheat audit -- {Path(sys.executable).name} ptx_app.py\n0\n")
    assert "PTX (compiled)" in text
    (run,) = json.loads((tmp_path / "reports.json").read_text())["runs"]
    assert run["report"]["cupti"] is True
    assert "libcupti" in run["debug"]
