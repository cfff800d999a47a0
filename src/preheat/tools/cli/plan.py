"""`preheat plan`: list the kernels of a training step before it runs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from preheat.ahead.manifest import Manifest
from preheat.ahead.recorder import merge_into
from preheat.errors import InputError, did_you_mean
from preheat.kernels.lora import MODELS, Model, Plan, Request, backward_plan
from preheat.tools.cli.arguments import require_file, require_writable
from preheat.tools.cli.output import count, print_json, print_line, print_message

__all__ = ["command"]

_OPTIONS = {"max_seq": "--seq", "lora_rank": "--rank"}

_MODEL = f"One of {', '.join(MODELS)}, or its repository, such as {MODELS['qwen3-4b'].repository}."
_SEQ = "Exact number of positions of a sequence; the largest with --all-lengths."
_DTYPE = "Element type: float32, float16 or bfloat16."
_BLAS = (
    "Compute matrix products with cuBLAS. Without it, the plan includes the kernels of products, which "
    "suits machines with and without cuBLAS."
)

_EPILOG = """\b
Examples:
  preheat plan lora --model qwen3-4b
  preheat plan lora --model llama-3-8b --seq 4096 --rank 64 --nf4 --dtype bfloat16
  preheat plan lora --model qwen2-0.5b --frozen --all-lengths -o kernels.toml

A plan needs neither a GPU nor a compiler. The manifest names no architecture, so 'preheat bake' and
'preheat check' need --arch. It has only the backward step: 'preheat record' adds the other kernels of a
run. For a model that is not listed, call preheat.lora.backward_plan with its dimensions.
"""


@click.group()
def command() -> None:
    """List the kernels of a training step before it runs.

    \b
    Example:
      preheat plan lora --model qwen3-4b -o kernels.toml
    """


@command.command(epilog=_EPILOG, short_help="The backward step of a block with LoRA")
@click.option("--model", required=True, metavar="NAME", help=_MODEL)
@click.option("--seq", default=2048, show_default=True, metavar="N", help=_SEQ)
@click.option("--all-lengths", is_flag=True, help="Plan the kernels of every length from 1 to --seq.")
@click.option(
    "--rank", default=16, show_default=True, metavar="N", help="Rank of LoRA; 0 means no LoRA."
)
@click.option("--frozen", is_flag=True, help="The base is frozen: its weights get no gradients.")
@click.option("--nf4", is_flag=True, help="The base is frozen and quantised to NF4.")
@click.option("--dtype", default="float32", show_default=True, metavar="TYPE", help=_DTYPE)
@click.option("--blas/--no-blas", default=False, show_default=True, help=_BLAS)
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
    all_lengths: bool,
    rank: int,
    frozen: bool,
    nf4: bool,
    dtype: str,
    blas: bool,
    as_json: bool,
    output: Path | None,
) -> None:
    """List what the backward step of a transformer block launches, with LoRA on q, k and v."""
    found = _model(model)
    sizes = {**found.sizes, "max_seq": seq, "lora_rank": rank}
    plan = _plan(**sizes, frozen=frozen, nf4=nf4, dtype=dtype, blas=blas)
    requests = plan.requests_up_to_max_seq if all_lengths else plan.requests
    if output is not None:
        _add(plan.manifest(shorter=all_lengths), output)
    if as_json:
        print_json(_as_dict(found, plan, requests))
    else:
        print_line(str(plan))
    summary = f"{count(len(plan.operations), 'operation')}, {count(len(requests), 'kernel')}"
    summary += f" for every length up to {seq}" if all_lengths else ""
    print_message(summary if output is None else f"{summary} → {output}")


def _model(name: str) -> Model:
    """Return the model with this name or Hugging Face repository. Case does not matter."""
    known = MODELS | {model.repository.lower(): model for model in MODELS.values()}
    if (found := known.get(name.lower())) is None:
        hint = did_you_mean(name.lower(), known) or f"the models are {', '.join(MODELS)}"
        raise InputError(f"model {name!r} is not known", hint=hint)
    return found


def _plan(**given: Any) -> Plan:
    """Return the plan. Errors use the names of the command line options."""
    try:
        return backward_plan(**given)
    except InputError as error:
        message = re.sub("|".join(_OPTIONS), lambda name: _OPTIONS[name[0]], str(error))
        raise InputError(message, hint=error.hint) from None


def _add(manifest: Manifest, output: Path) -> None:
    try:
        require_file(output)
        require_writable(output)
        merge_into(output, manifest)
    except OSError as fault:
        raise InputError(f"cannot write {output}: {fault.strerror or fault}") from None


def _as_dict(model: Model, plan: Plan, requests: Iterable[Request]) -> dict[str, Any]:
    return {
        "model": model.repository,
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
        "kernels": [{"program": program.label, "entry": entry} for program, entry in requests],
    }
