"""`preheat plan lora`: the table, the JSON, the manifest, and refused arguments."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from preheat import InputError, Manifest
from preheat.kernels.op import cpp_of
from preheat.lora import MODELS, Model, backward_plan
from preheat.tools.cli import main

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Runs `preheat plan lora`, or another `command`, in a directory of its own."""
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.chdir(tmp_path)

    def run(*words: str, command: tuple[str, ...] = ("plan", "lora")) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([*command, *words])
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


@pytest.mark.parametrize("model", MODELS)
def test_every_model_has_its_table(plan: Run, model: str) -> None:
    wanted = backward_plan(**MODELS[model].sizes, max_seq=2048, lora_rank=16)
    code, out, err = plan("--model", model)
    assert (code, out) == (0, f"{wanted}\n")
    assert err == f"{len(wanted.operations)} operations, {len(wanted.requests)} kernels\n"


def test_options_reach_the_plan(plan: Run) -> None:
    options = "--seq", "100", "--rank", "0", "--nf4", "--dtype", "bfloat16", "--blas"
    code, out, _ = plan("--model", "Qwen3-4B", *options)
    sizes = MODELS["qwen3-4b"].sizes
    wanted = backward_plan(**sizes, max_seq=100, lora_rank=0, nf4=True, dtype="bfloat16", blas=True)
    assert (code, out) == (0, f"{wanted}\n")


@pytest.mark.parametrize("words", [("--frozen",), ("--nf4",), ("--frozen", "--nf4")])
def test_a_frozen_base_is_planned(plan: Run, words: tuple[str, ...]) -> None:
    code, out, _ = plan("--model", "qwen3-4b", *words)
    nf4 = "--nf4" in words
    wanted = backward_plan(**MODELS["qwen3-4b"].sizes, max_seq=2048, lora_rank=16, frozen=True, nf4=nf4)
    assert (code, out) == (0, f"{wanted}\n")


@pytest.mark.parametrize("model", MODELS.values(), ids=lambda model: model.repository)
def test_a_model_has_the_name_of_its_repository_as_well(plan: Run, model: Model) -> None:
    for name in (model.repository, model.repository.lower()):
        code, out, _ = plan("--model", name, "--json")
        assert (code, json.loads(out)["model"]) == (0, model.repository)


def test_shorter_adds_the_kernels_of_every_length(plan: Run) -> None:
    wanted = backward_plan(**MODELS["qwen2-0.5b"].sizes, max_seq=500, lora_rank=16)
    words = ("--model", "qwen2-0.5b", "--seq", "500", "--all-lengths")
    kernels = len(wanted.requests_up_to_max_seq)
    assert kernels > len(wanted.requests)
    code, out, err = plan(*words, "-o", "kernels.toml")
    assert (code, out) == (0, f"{wanted}\n")
    reported = f"{len(wanted.operations)} operations, {kernels} kernels for every length up to 500"
    assert err == f"{reported} → kernels.toml\n"
    assert Manifest.read("kernels.toml") == wanted.manifest(shorter=True)
    _, out, _ = plan(*words, "--json")
    listed = [row["entry"] for row in json.loads(out)["kernels"]]
    assert listed == [request.entry for request in wanted.requests_up_to_max_seq]


def test_products_are_left_to_cublas_only_where_that_is_asked_for(plan: Run) -> None:
    for words, by_cublas in (((), False), (("--no-blas",), False), (("--blas",), True)):
        code, out, _ = plan("--model", "qwen2-0.5b", *words)
        assert (code, "cuBLAS" in out) == (0, by_cublas)


def test_json_lists_every_operation_in_order(plan: Run) -> None:
    code, out, _ = plan("--model", "qwen2-0.5b", "--seq", "64", "--blas", "--json")
    wanted = backward_plan(**MODELS["qwen2-0.5b"].sizes, max_seq=64, lora_rank=16, blas=True)
    found = json.loads(out)
    assert code == 0
    assert found["model"] == "Qwen/Qwen2-0.5B"
    assert found["shape"]["kv_dim"] == 128
    listed = [(row["operation"], tuple(row["dims"].items())) for row in found["operations"]]
    assert listed == [(op.name, op.dims) for op in wanted.operations]
    kernels = [row["kernel"] for row in found["operations"] if row["kernel"]]
    assert kernels == [op.entry for op in wanted.launches]
    assert [row["by"] for row in found["operations"]] == [op.by for op in wanted.operations]
    assert {row["by"] for row in found["operations"]} == {None, "cuBLAS"}
    assert found["kernels"] == [
        {"program": program.label, "entry": entry} for program, entry in wanted.requests
    ]


def test_a_manifest_is_made_and_added_to(plan: Run) -> None:
    sizes = MODELS["qwen2-0.5b"].sizes
    file = Path("kernels.toml")
    plain = backward_plan(**sizes, max_seq=64, lora_rank=16)
    quantised = backward_plan(**sizes, max_seq=64, lora_rank=16, nf4=True)
    code, _, err = plan("--model", "qwen2-0.5b", "--seq", "64", "-o", str(file))
    assert code == 0
    assert err.endswith(f"{len(plain.requests)} kernels → kernels.toml\n")
    assert Manifest.read(file) == plain.manifest()
    plan("--model", "qwen2-0.5b", "--seq", "64", "--nf4", "-o", str(file))
    assert Manifest.read(file) == plain.manifest().merged(quantised.manifest())
    assert not Path("kernels.toml.spool").exists()


def test_a_manifest_does_not_claim_that_anything_ran(plan: Run) -> None:
    plan("--model", "qwen2-0.5b", "-o", "kernels.toml")
    head = Path("kernels.toml").read_text().partition("version")[0]
    assert head.startswith("# The kernels an application needs; `preheat bake` compiles them.\n")
    assert "saw" not in head
    assert "`preheat plan`" in head


def test_a_file_that_is_no_manifest_stays_as_it_is(plan: Run) -> None:
    Path("notes.txt").write_text("remember the milk")
    code, out, err = plan("--model", "qwen2-0.5b", "-o", "notes.txt")
    assert (code, out) == (2, "")
    assert "notes.txt" in err
    assert Path("notes.txt").read_text() == "remember the milk"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--model", "qwen3-4c"), "model 'qwen3-4c' is not known\n\nhint: did you mean 'qwen3-4b'"),
        (("--model", "gpt"), "model 'gpt' is not known\n\nhint: the models are qwen2-0.5b"),
        (("--model", "Qwen/Qwen3-8B"), "hint: did you mean 'qwen/qwen3-4b'?"),
        (("--model", "qwen3-4b", "--rank", "1025"), "error: --rank 1025 is outside 0 to 1024"),
        (("--model", "qwen3-4b", "--rank", "-1"), "error: --rank -1 is outside 0 to 1024"),
        (("--model", "qwen3-4b", "--seq", "0"), "error: --seq 0 is outside 1 to"),
        (("--model", "qwen3-4b", "--seq", "200000"), "heads 32 by --seq 200000 by --seq 200000 is"),
        (("--model", "qwen3-4b", "--dtype", "float64"), "do not take float64"),
        (
            ("--model", "qwen3-4b", "-o", "nowhere/k.toml"),
            "cannot write nowhere/k.toml: nowhere is not a directory\n\nhint: create it: mkdir -p now",
        ),
        (("--model", "qwen3-4b", "-o", "no where/k.toml"), "hint: create it: mkdir -p 'no where'\n"),
        ((), "--model"),
    ],
)
def test_what_makes_no_sense_is_refused(plan: Run, words: tuple[str, ...], message: str) -> None:
    code, out, err = plan(*words)
    assert (code, out) == (2, "")
    assert message in err


NO_FILE = "it exists and is not a file"
PLACES: dict[str, str] = {
    "": NO_FILE,
    ".": "is a directory",
    "pipe": NO_FILE,
    "/dev/null": NO_FILE,
    "-": "cannot be written to standard output",
    "/proc/x.toml": "cannot write",
    "notes.txt/k.toml": "notes.txt is not a directory",
    f"{'k' * 300}.toml": "File name too long",
}


@pytest.mark.parametrize("place", PLACES, ids=lambda place: f"'{place[:20]}'")
def test_a_place_where_no_manifest_can_be_is_refused(plan: Run, place: str) -> None:
    os.mkfifo("pipe")
    Path("notes.txt").write_text("remember the milk")
    before = os.listdir()
    code, out, err = plan("--model", "qwen2-0.5b", "-o", place)
    assert (code, out) == (2, "")
    assert PLACES[place] in err.splitlines()[0]
    assert os.listdir() == before


def test_a_file_in_the_place_of_a_directory_is_not_to_be_made_one(plan: Run) -> None:
    Path("notes.txt").write_text("remember the milk")
    _, _, err = plan("--model", "qwen2-0.5b", "-o", "notes.txt/k.toml")
    assert "hint: name another file" in err


def test_only_a_dash_alone_is_standard_output(plan: Run, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    code, _, _ = plan("--model", "qwen2-0.5b", "-o", "there/-")
    assert code == 0
    assert Manifest.read("there/-").programs


@pytest.mark.parametrize("place", ["", "pipe", "-"])
def test_a_recording_is_refused_there_before_the_command_runs(plan: Run, place: str) -> None:
    os.mkfifo("pipe")
    code, _, err = plan("-o", place, "--", "touch", "ran", command=("record",))
    assert code == 1
    assert PLACES[place] in err.splitlines()[0]
    assert not Path("ran").exists()


def test_help_has_examples_and_every_model(plan: Run) -> None:
    code, out, _ = plan("--help")
    assert code == 0
    assert "preheat plan lora --model qwen2-0.5b --frozen --all-lengths -o kernels.toml" in out
    assert all(model in " ".join(out.split()) for model in MODELS)


def test_help_has_every_element_type_and_says_what_no_choice_means(plan: Run) -> None:
    with pytest.raises(InputError) as refused:
        cpp_of("float64")
    types = (refused.value.hint or "").removeprefix("they take ").split(", ")
    assert len(types) == 3
    out = "".join(plan("--help")[1].split())
    assert f"Elementtype:{types[0]},{types[1]}or{types[2]}." in out
    assert "[default:no-blas]" in out
    assert "Exactnumberofpositionsofasequence;thelargestwith--all-lengths." in out
