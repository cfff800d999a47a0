"""`preheat demo`: its steps, its results, and the absence of leftovers."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from preheat.tools.cli import demo, main, output
from tests.test_doc_pictures import demo_picture, terminal

STEPS = ["cold", "hot", "eager", "replay", "record", "bake", "sealed", "sealed"]
EMULATOR = {"name": "emulator:0", "model": "PTX emulator", "arch": "sm_90"}
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
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
    command = [sys.executable, "-m", "preheat", "demo", "--arch", "sm_80", "--arch", "sm_100"]
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
        "the same 12 found by a new process, 0 compiled",
    )
    assert reported["hot"] == {"compiles": 0, "processes": 0}
    times = cold["seconds"] / hot["seconds"]
    assert hot["note"] == f"{times:,.0f} x as fast; no compiler was started"


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
    assert set(bake["what"].removeprefix("one file for ").split(", ")) == archs


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


def test_the_closing_table_has_measured_figures_where_there_is_no_gpu(reported: dict[str, Any]) -> None:
    rows = [demo.Row(**row) for row in reported["steps"]]
    text = list(demo.closing(rows, {**reported, "device": EMULATOR}))
    head, table, rest = text[0], text[1 : len(STEPS) + 1], text[len(STEPS) + 1 :]
    assert re.split("  +", head) == ["STEP", "WHAT HAPPENED", "HERE", "ON AN NVIDIA H200 *"]
    assert [row.split()[0] for row in table] == STEPS
    assert [row.split()[-1] for row in table if "launches" in row] == ["launches", "launches"]
    assert all(re.search(r" -  [\d.]+ [mµ]s for 320 launches$", row) for row in table[2:4])
    assert rest[1].startswith("* Measured on 2026-11-16 at commit 6dbb71d7, in benchmarks/results: ")
    assert rest[-2] == "Ran on emulator:0, PTX emulator, sm_90."
    assert rest[-1].startswith("Every result agrees with NumPy in float64")


def test_no_time_of_the_emulator_is_shown_for_launches(reported: dict[str, Any]) -> None:
    eager, replay = (demo.Row(**row) for row in reported["steps"][2:4])
    facts = {**reported, "device": EMULATOR}
    assert demo.summary(eager, facts) == "done: 20 launches, one by one"
    assert demo.summary(replay, facts) == "done: the same launches as one graph; the same bits"


def test_on_a_gpu_every_step_has_the_time_that_it_took(reported: dict[str, Any]) -> None:
    rows = [demo.Row(**row) for row in reported["steps"]]
    facts = {**reported, "device": {**EMULATOR, "name": "cuda:0", "model": "NVIDIA L4"}}
    text = "\n".join(demo.closing(rows, facts))
    assert "H200" not in text
    assert all(f"{output.duration(row.seconds)}  {row.note}" in text for row in rows)
    assert all(output.duration(row.seconds) in demo.summary(row, facts) for row in rows)


def test_measured_figures_are_those_of_the_committed_results() -> None:
    for figure in demo.MEASURED.values():
        results = json.loads((RESULTS / f"{figure.results}.json").read_text())
        table = results["tables"][figure.table]
        (row,) = (row for row in table["rows"] if row[0] == figure.row)
        assert row[table["head"].index(figure.column)] == figure.value
        assert figure.what.split()[0] in figure.table
        assert results["machine"]["date"] == demo.DATE
        assert results["machine"]["commit"] == demo.COMMIT
        assert results["machine"]["gpu"].startswith(f"{demo.GPU},")


def test_every_step_ends_with_a_line_that_has_its_time(reported: dict[str, Any]) -> None:
    shown = [line for line in reported["stderr"].splitlines() if line.startswith("  done")]
    rows = [demo.Row(**row) for row in reported["steps"]]
    assert shown == [f"  {demo.summary(row, reported)}" for row in rows]


def test_the_picture_in_the_readme_shows_what_the_demo_prints(reported: dict[str, Any]) -> None:
    """`make pictures` draws it. Times and keys may differ, and a long line is cut."""
    if reported["device"] != EMULATOR:
        pytest.skip("the picture is that of the emulator")
    rows = [demo.Row(**row) for row in reported["steps"]]
    printed = [*reported["stderr"].splitlines(), *demo.closing(rows, reported)]
    real = [_comparable(line) for line in ["$ make demo", *filter(None, printed)]]
    shown = [_comparable(line) for line in terminal.lines(demo_picture.TARGET.read_text())]
    assert len(shown) == len(real), "make pictures"
    for a, b in zip(shown, real, strict=True):
        assert a == b or (a.endswith("…") and b.startswith(a[:-1])), "make pictures"


def _comparable(line: str) -> str:
    line = re.sub(r"\(([0-9a-f]{12})\)", "(KEY)", "".join(line.split()))
    return re.sub(r"\d[\d.,]*(e-\d+|µs|ms|s|x|KiB)", "N", line)


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
    command = [sys.executable, "-m", "preheat", "demo"]
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
