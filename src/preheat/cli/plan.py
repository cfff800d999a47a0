"""`preheat plan`: the kernels of a training step, known before it has ever run."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from preheat.cli.manifests import require_writable
from preheat.cli.output import count, data, emit_json, say
from preheat.errors import InputError, did_you_mean
from preheat.lora import MODELS, Plan, backward_plan
from preheat.warm.recorder import merge

__all__ = ["command"]

_OPTIONS = {"max_seq": "--seq", "lora_rank": "--rank"}

_EPILOG = """\b
Examples:
  preheat plan lora --model qwen3-4b
  preheat plan lora --model llama-3-8b --seq 4096 --rank 64 --nf4 --dtype bfloat16
  preheat plan lora --model qwen2-0.5b -o kernels.toml

Needs neither a GPU nor a compiler. 'preheat bake' makes a bundle of the manifest; for a model that is
not listed, preheat.lora.backward_plan takes its dimensions.
"""


@click.group()
def command() -> None:
    """List the kernels of a training step before it runs.

    \b
    Example:
      preheat plan lora --model qwen3-4b -o kernels.toml
    """


@command.command(epilog=_EPILOG, short_help="The backward step of a block with LoRA")
@click.option("--model", required=True, metavar="NAME", help=f"One of {', '.join(MODELS)}.")
@click.option("--seq", default=2048, show_default=True, metavar="N", help="Positions of a sequence.")
@click.option("--rank", default=16, show_default=True, metavar="N", help="Rank of LoRA; 0 is none.")
@click.option("--nf4", is_flag=True, help="The base is frozen, and quantised to NF4.")
@click.option("--dtype", default="float32", show_default=True, metavar="TYPE", help="Element type.")
@click.option("--blas/--no-blas", default=None, help="Leave products of matrices to cuBLAS, or not.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: every operation, in order.")
@click.option(
    "-o",
    "--output",
    metavar="MANIFEST",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Manifest to add the kernels to.",
)
def lora(
    model: str,
    seq: int,
    rank: int,
    nf4: bool,
    dtype: str,
    blas: bool | None,
    as_json: bool,
    output: Path | None,
) -> None:
    """List what the backward step of a transformer block launches, with LoRA on q, k and v."""
    sizes = {**_sizes(model), "max_seq": seq, "lora_rank": rank}
    plan = _plan(**sizes, nf4=nf4, dtype=dtype, blas="auto" if blas is None else blas)
    if output is not None:
        _add(plan, output)
    if as_json:
        emit_json(_as_dict(model, plan))
    else:
        data(str(plan))
    told = f"{count(len(plan.operations), 'operation')}, {count(len(plan.requests), 'kernel')}"
    say(told if output is None else f"{told} → {output}")


def _sizes(model: str) -> dict[str, Any]:
    found = MODELS.get(model.lower())
    if found is None:
        hint = did_you_mean(model.lower(), MODELS) or f"there are {', '.join(MODELS)}"
        raise InputError(f"model {model!r} is not known", hint=hint)
    return found.sizes


def _plan(**given: Any) -> Plan:
    """The plan; errors call parameters what the command line calls them."""
    try:
        return backward_plan(**given)
    except InputError as error:
        told = re.sub("|".join(_OPTIONS), lambda name: _OPTIONS[name[0]], str(error))
        raise InputError(told, hint=error.hint) from None


def _add(plan: Plan, output: Path) -> None:
    try:
        require_writable(output)
        merge(output, plan.manifest())
    except OSError as fault:
        raise InputError(f"cannot write {output}: {fault.strerror or fault}") from None


def _as_dict(model: str, plan: Plan) -> dict[str, Any]:
    return {
        "model": MODELS[model.lower()].repository,
        "shape": asdict(plan.shape),
        "operations": [
            {
                "operation": op.name,
                "dims": dict(op.dims),
                "kernel": op.entry if op.by is None else None,
                "by": op.by,
            }
            for op in plan.operations
        ],
        "kernels": [{"program": program.label, "entry": entry} for program, entry in plan.requests],
    }
