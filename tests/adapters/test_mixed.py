"""An application with several compilers in one process: recorded, baked without a GPU, run sealed."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from tests.adapters.mixed.runs import MixedApplication
from tests.adapters.numba.usable import unusable

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed"),
]

#: Programs that torch and Triton start to look around. They compile nothing.
HARMLESS = ("ldconfig", "file", "nvidia-smi", "uname", "lscpu")


def compilers(started: list[str]) -> list[str]:
    """Return the programs of a run that are no search for libraries and no Python worker of torch."""
    names = [os.path.basename(line.split()[0]) for line in started]
    return [name for name in names if name not in HARMLESS and not name.startswith("python")]


def _arch() -> str:
    import torch

    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


#: Parts of the application. The empty group is all of them together, without Numba.
GROUPS = [
    (),
    ("torch.compile", "torch operator"),
    ("torch kernel",),
    ("CuPy",),
    ("cuda.core",),
    ("Numba",),
]


@pytest.fixture(scope="module", params=GROUPS, ids=lambda parts: " and ".join(parts) or "all")
def baked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> MixedApplication:
    """Return parts of the application, recorded on the GPU and baked with no visible GPU."""
    if "Numba" in request.param and (reason := unusable()) is not None:
        pytest.skip(f"Numba-CUDA cannot be used here: {reason}")
    application = MixedApplication(tmp_path_factory.mktemp("mixed"), *request.param)
    application.record()
    application.bake(_arch())
    return application


def test_a_sealed_process_compiles_nothing_and_its_results_are_right(baked: MixedApplication) -> None:
    ran = baked.sealed("sealed")
    misses = {name: value for name, value in ran["stats"].items() if name.startswith("misses.")}
    assert misses == {}
    assert "compiles" not in ran["stats"]
    assert compilers(ran["started"]) == []
    # A program of cuda.core loads NVRTC when it is made, and compiles nothing with it.
    assert ran["loaded"] in ({}, {"cuda.core": ["libnvrtc"]})


def test_the_bundle_passes_the_check_in_a_process_with_empty_caches(baked: MixedApplication) -> None:
    baked.check(_arch())


def test_an_application_that_was_killed_is_recorded(tmp_path: Path) -> None:
    """Everything that was compiled before the kill is in the manifest, the graphs of Inductor too."""
    application = MixedApplication(tmp_path, "torch.compile", "killed")
    with pytest.raises(AssertionError):
        application.record()
    text = application.manifest.read_text()
    for part in ("compiled graphs", "traced graphs", "triton"):
        assert part in text


def test_400_random_launches_run_on_weak_kernels_with_right_results(tmp_path: Path) -> None:
    application = MixedApplication(tmp_path, "triton")
    application.record()
    intro, *tables = application.manifest.read_text().split("[[foreign]]")
    changed = [
        table.replace("\nrequest = ", '\ncoverage = "weak"\nrequest = ', 1)
        if 'name = "triton_kernels:matmul"' in table
        else table
        for table in tables
    ]
    application.manifest.write_text("[[foreign]]".join([intro, *changed]))
    application.bake(_arch())
    application.parts = ("random",)
    ran = application.sealed("sealed")
    assert "compiles" not in ran["stats"]
    assert ran["stats"]["weak"] > 100  # The variants of 400 random launches.
    assert not [name for name in ran["stats"] if name.startswith("misses.")]
