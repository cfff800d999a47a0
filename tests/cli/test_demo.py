"""`preheat demo`: its steps, its results, and the absence of leftovers."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from preheat.cli import demo, main

STEPS = ["cold", "hot", "eager", "replay", "record", "bake", "sealed", "sealed"]
EMULATOR = {"name": "emulator:0", "model": "PTX emulator", "arch": "sm_90"}
FEW = ("gemm.cu", "softmax.cu", "stencil.cu")  # those that are run


def environment(root: Path) -> dict[str, str]:
    """Return the environment of a user's shell; every file that a run could leave is under `root`."""
    path = os.pathsep.join(os.path.abspath(place) for place in sys.path if place)
    places = {"HOME": root / "home", "TMPDIR": root / "tmp", "PREHEAT_CACHE_DIR": root / "cache"}
    for place in (places["HOME"], places["TMPDIR"]):
        place.mkdir(exist_ok=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PREHEAT_")}
    sealed = {"PREHEAT_SEALED": "1", "PREHEAT_BUNDLE": "/no/such.heat"}  # of the user: not of the demo
    return {
        **kept,
        **{name: str(place) for name, place in places.items()},
        **sealed,
        "PYTHONPATH": path,
    }


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the output of the shipped demo as JSON."""
    root = tmp_path_factory.mktemp("demo")
    command = [sys.executable, "-m", "preheat.cli", "demo", "--arch", "sm_80", "--arch", "sm_100"]
    started = time.monotonic()
    ran = subprocess.run(
        [*command, "--json"], env=environment(root), cwd=root, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    seconds = time.monotonic() - started
    left = sorted(str(path.relative_to(root)) for path in root.rglob("*"))
    return {**json.loads(ran.stdout), "stderr": ran.stderr, "left": left, "seconds": seconds}


def test_every_step_is_shown_and_timed(reported: dict[str, Any]) -> None:
    assert [row["step"] for row in reported["steps"]] == STEPS
    assert all(0 < row["seconds"] < reported["seconds"] for row in reported["steps"])
    assert [n for n in range(1, 7) if f"\n{n}/6 " in reported["stderr"]] == [1, 2, 3, 4, 5, 6]


@pytest.mark.gpu
def test_all_of_it_runs_on_the_gpu_that_is_there(reported: dict[str, Any]) -> None:
    assert reported["device"]["name"] == reported["sealed"]["device"] == "cuda:0"


def test_a_fresh_process_finds_all_twelve_and_starts_no_compiler(reported: dict[str, Any]) -> None:
    cold, hot = reported["steps"][:2]
    assert (cold["what"], hot["what"]) == (
        "12 programs compiled",
        "the same 12 found by a new process",
    )
    assert reported["hot"] == {"compiles": 0, "processes": 0}
    times = cold["seconds"] / hot["seconds"]
    assert hot["note"] == f"{times:,.0f} x; no compiler was started"


def test_the_sealed_run_compiles_nothing_and_has_all_its_graphs(
    reported: dict[str, Any],
) -> None:
    assert reported["sealed"]["compiles"] == 0
    assert reported["sealed"]["graphs"] == 4


def test_the_sealed_run_finds_no_compiler_that_pip_installed(reported: dict[str, Any]) -> None:
    packages = [place for place in sys.path if place.endswith("-packages")]
    found = [*reported["in_reach"]["compilers"], *reported["in_reach"]["headers"]]
    assert not [path for path in found if path.startswith(tuple(packages))]


def test_it_bakes_for_the_architectures_asked_for_and_the_devices_own(reported: dict[str, Any]) -> None:
    (bake,) = (row for row in reported["steps"] if row["step"] == "bake")
    archs = {"sm_80", "sm_100", reported["device"]["arch"]}
    assert set(bake["what"].removeprefix("kernels.toml for ").split(", ")) == archs


def test_it_shows_the_error_of_the_seal_as_a_user_sees_it(reported: dict[str, Any]) -> None:
    first, *rest = reported["refusal"].splitlines()
    assert first.startswith("server.py:")
    assert "rms_norm (layers.cu, sm_" in first
    assert any("header:model.h" in line and "WIDTH = 96" in line for line in rest)
    assert first in reported["stderr"]


def test_results_are_compared_with_numpy_in_float64(reported: dict[str, Any]) -> None:
    assert 0 < reported["error"] < 1e-5


def test_nothing_is_left_behind_and_the_users_cache_and_settings_are_not_used(
    reported: dict[str, Any],
) -> None:
    assert reported["left"] == ["home", "tmp"]


def test_the_closing_table_says_what_ran_where(reported: dict[str, Any]) -> None:
    rows = [demo.Row(**row) for row in reported["steps"]]
    head, *table, ran, honest = demo.closing(rows, {**reported, "device": EMULATOR})
    assert head.split() == ["STEP", "WHAT", "TIME", "NOTE"]
    assert [row.split()[0] for row in table] == STEPS
    assert ran.startswith("\nRan on emulator:0, PTX emulator, sm_90; every result agrees with NumPy")
    assert honest == "These are times of the PTX emulator: they say nothing about a GPU."
    gpu = {**EMULATOR, "name": "cuda:0"}
    assert "emulator" not in list(demo.closing(rows, {**reported, "device": gpu}))[-1].partition(",")[0]


# In this process, with few kernels


@pytest.fixture
def few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of the shipped demo to change: `kernels` with three programs, and `app`."""
    (tmp_path / "kernels").mkdir()
    for name in FEW:
        shutil.copy(demo.KERNELS / name, tmp_path / "kernels")
    shutil.copytree(demo.APP, tmp_path / "app")
    monkeypatch.setattr(demo, "KERNELS", tmp_path / "kernels")
    monkeypatch.setattr(demo, "APP", tmp_path / "app")
    return tmp_path


@pytest.fixture
def run_demo(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[object, str, str]]:
    def run(*args: str) -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["demo", *args])
        return (ended.value.code, *capsys.readouterr())

    return run


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def test_a_wrong_result_is_an_error_with_its_size(
    few: Path, run_demo: Callable[..., tuple[object, str, str]]
) -> None:
    edit(few / "kernels" / "softmax.cu", "expf(x[i] - top) / sum", "expf(x[i] - top) / sum + 0.01f")
    status, out, err = run_demo()
    assert (status, out) == (1, "")
    assert "error: the new process: a result differs from NumPy in float64 by 1.0e-02" in err


def test_a_step_that_fails_ends_the_demo_with_its_last_output(
    few: Path, run_demo: Callable[..., tuple[object, str, str]]
) -> None:
    (few / "kernels" / "gemm.cu").write_text("nonsense")
    status, _, err = run_demo()
    assert status == 1
    assert "failed with status 1" in err
    assert "gemm.cu does not compile for" in err


@pytest.mark.parametrize(("wrong", "by"), [("+ 0.01f", "1.0e-02"), ("* (0.0f / 0.0f)", "nan")])
def test_the_application_says_so_when_an_answer_is_wrong(
    wrong: str, by: str, few: Path, tmp_path: Path
) -> None:
    edit(few / "app" / "layers.cu", "expf(x[i] - top) / sum", f"expf(x[i] - top) / sum {wrong}")
    env = {**environment(tmp_path), "PREHEAT_DEVICE": "emulator", "PREHEAT_SEALED": "0"}
    ran = subprocess.run(
        [sys.executable, "server.py"], cwd=few / "app", env=env, capture_output=True, text=True
    )
    assert (ran.returncode, json.loads(ran.stdout)["batches"]) == (1, 24)
    assert f"an answer is off by {by}" in ran.stderr


def test_an_unknown_architecture_is_refused_before_anything_is_compiled(
    run_demo: Callable[..., tuple[object, str, str]],
) -> None:
    status, _, err = run_demo("--arch", "nine")
    assert status == 2
    assert "nine" in err
    assert "/6" not in err


def test_ctrl_c_ends_every_process_and_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "preheat.cli", "demo"]
    child = subprocess.Popen(command, env=environment(tmp_path), stderr=subprocess.PIPE, text=True)
    with child:
        assert child.stderr is not None
        for line in child.stderr:
            if line.startswith("  $ preheat compile"):
                break
        child.send_signal(signal.SIGINT)
        rest = child.stderr.read()
    assert (child.returncode, rest.strip()) == (130, "error: interrupted")
    assert list((tmp_path / "tmp").iterdir()) == []
    assert not (tmp_path / "cache").exists()
