"""`preheat audit`: run a command and report what it compiled and loaded."""

from __future__ import annotations

import json
from pathlib import Path

import click

from preheat.audit.session import audit_session
from preheat.errors import InputError
from preheat.model.config import environ
from preheat.store.publish import publish, unwritable_reason
from preheat.tools.cli.audit_text import report_lines
from preheat.tools.cli.child import CannotRunError, run_command
from preheat.tools.cli.output import attempt, print_error, print_json, print_message

__all__ = ["command"]

_EPILOG = """\b
Examples:
  preheat audit -- python serve.py
  preheat audit --report audit.json -- torchrun --nproc-per-node 8 train.py
  preheat audit --json -- ./server | jq '.libraries'
  preheat audit -- preheat run --bundle kernels.heat --sealed -- python serve.py

\b
The command does not have to use preheat, and it runs as it does without the audit: nothing is stored,
and no adapter is installed unless PREHEAT_ADAPTERS names it. Its child processes are audited as well.
The report goes to stderr. With --json it goes to stdout, and the output of the command to stderr.

\b
The exit status is that of the command. It is 127 if there is no such command, and 1 if the command
succeeded but the report cannot be written. 'preheat run --sealed' refuses what this command reports.
"""

_STDERR = 2


@click.command(epilog=_EPILOG, context_settings={"allow_interspersed_args": False})
@click.argument(
    "words", nargs=-1, required=True, type=click.UNPROCESSED, metavar="[--] COMMAND [ARG]..."
)
@click.option(
    "--report",
    "target",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Also write the whole report to FILE, as JSON.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the whole report as JSON at the end.")
@click.option(
    "--no-cupti",
    is_flag=True,
    help="Leave CUPTI to another profiler. Only loads that a library asks for are seen.",
)
@click.option(
    "--keep",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Keep the events and copies of the modules in DIR.",
)
def command(
    words: tuple[str, ...], target: Path | None, as_json: bool, no_cupti: bool, keep: Path | None
) -> int:
    """Run COMMAND and report every module and every compiler of its processes."""
    if target is not None and (why := unwritable_reason(target.absolute())):
        raise InputError(f"cannot write {target}: {why}", hint="name another file with --report")
    with audit_session(environ(), cupti=not no_cupti, keep=keep) as session:
        try:
            output = _STDERR if as_json else None
            status = run_command(words, session.env, output=output, adapters="")
        except CannotRunError as error:
            print_error(str(error), error.hint)
            return error.status
        report = session.report(words, status)
    if as_json:
        printed = attempt(print_json, report.json())
    else:
        printed = attempt(print_message, "\n".join(["", *report_lines(report)]))
    if target is not None:
        try:
            text = json.dumps(report.json(), indent=2)
            publish(target.absolute(), [text.encode(), b"\n"], mode=0o600)
        except OSError as fault:
            attempt(print_error, f"cannot write {target}: {fault.strerror or fault}")
            return status or 1
    return status if printed else status or 1
