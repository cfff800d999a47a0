"""`preheat plan lora`: the table, the JSON, the manifest, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from preheat import Manifest
from preheat.cli import main
from preheat.lora import MODELS, backward_plan

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Runs `preheat plan lora` in a directory of its own."""
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(["plan", "lora", *words])
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
    assert found["kernels"] == [
        {"program": program.label, "entry": entry} for program, entry in wanted.requests
    ]


def test_a_manifest_is_made_and_added_to(plan: Run) -> None:
    sizes, file = MODELS["qwen2-0.5b"].sizes, Path("kernels.toml")
    plain = backward_plan(**sizes, max_seq=64, lora_rank=16)
    quantised = backward_plan(**sizes, max_seq=64, lora_rank=16, nf4=True)
    code, _, err = plan("--model", "qwen2-0.5b", "--seq", "64", "-o", str(file))
    assert code == 0
    assert err.endswith(f"{len(plain.requests)} kernels → kernels.toml\n")
    assert Manifest.read(file) == plain.manifest()
    plan("--model", "qwen2-0.5b", "--seq", "64", "--nf4", "-o", str(file))
    assert Manifest.read(file) == plain.manifest().merged(quantised.manifest())
    assert not Path("kernels.toml.spool").exists()


def test_what_is_no_manifest_stays_as_it_is(plan: Run) -> None:
    Path("notes.txt").write_text("remember the milk")
    code, out, err = plan("--model", "qwen2-0.5b", "-o", "notes.txt")
    assert (code, out) == (2, "")
    assert "notes.txt" in err
    assert Path("notes.txt").read_text() == "remember the milk"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--model", "qwen3-4c"), "model 'qwen3-4c' is not known\n\nhint: did you mean 'qwen3-4b'"),
        (("--model", "gpt"), "model 'gpt' is not known\n\nhint: there are qwen2-0.5b"),
        (("--model", "qwen3-4b", "--rank", "1025"), "lora_rank 1025 is outside 1 to 1024"),
        (("--model", "qwen3-4b", "--seq", "0"), "max_seq 0 is outside 1 to"),
        (("--model", "qwen3-4b", "--dtype", "float64"), "do not take float64"),
        (
            ("--model", "qwen3-4b", "-o", "nowhere/k.toml"),
            "cannot write nowhere/k.toml: nowhere is not",
        ),
        ((), "--model"),
    ],
)
def test_what_makes_no_sense_is_refused(plan: Run, words: tuple[str, ...], message: str) -> None:
    code, out, err = plan(*words)
    assert (code, out) == (2, "")
    assert message in err


def test_help_has_examples_and_every_model(plan: Run) -> None:
    code, out, _ = plan("--help")
    assert code == 0
    assert "preheat plan lora --model qwen2-0.5b -o kernels.toml" in out
    assert all(model in " ".join(out.split()) for model in MODELS)
