"""`preheat run`: run a command whose libraries use the store of preheat."""

from __future__ import annotations

import os
from pathlib import Path

import click

from preheat.cli.child import CannotRunError, run_command
from preheat.cli.output import print_error
from preheat.config import environ
from preheat.errors import InputError

__all__ = ["command"]

_EPILOG = """\b
Examples:
  preheat run -- python serve.py
  preheat run --bundle kernels.heat --sealed -- python serve.py --port 8000
  preheat run --bundle kernels.heat --sealed warn -- torchrun --nproc-per-node 8 train.py

\b
Every Python that the command starts installs the adapters of the libraries that it imports (Triton,
Inductor), without a change of the application. PREHEAT_ADAPTERS names others than all. The exit status
is that of the command; 127 when there is no such command.
"""


@click.command(epilog=_EPILOG, context_settings={"allow_interspersed_args": False})
@click.argument(
    "words", nargs=-1, required=True, type=click.UNPROCESSED, metavar="[--] COMMAND [ARG]..."
)
@click.option(
    "--bundle",
    "bundles",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Bundle that is asked first; repeatable. Default: PREHEAT_BUNDLE.",
)
@click.option(
    "--sealed",
    is_flag=False,
    flag_value="error",
    type=click.Choice(["error", "warn"]),
    help="Compile nothing: a kernel that is missing is an error, or with 'warn' a warning.",
)
def command(words: tuple[str, ...], bundles: tuple[Path, ...], sealed: str | None) -> int:
    """Run COMMAND with kernels from bundles and the cache, also those of other libraries."""
    env = dict(environ())
    if bundles:
        for path in bundles:
            if os.pathsep in str(path):
                raise InputError(f"{path} has {os.pathsep!r} in its name", hint="rename the bundle")
        env["PREHEAT_BUNDLE"] = os.pathsep.join(os.path.abspath(path) for path in bundles)
    if sealed is not None:
        env["PREHEAT_SEALED"] = "1" if sealed == "error" else "warn"
    try:
        return run_command(words, env)
    except CannotRunError as error:
        print_error(str(error), error.hint)
        return error.status
