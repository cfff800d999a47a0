"""`preheat emulate`: what the emulator can run."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from preheat.cli.output import columns, count, print_json, print_line, print_message
from preheat.errors import InputError
from preheat.files import read_whole
from preheat.toolchain import ptx

__all__ = ["command"]

_EPILOG = """\b
Examples:
  preheat emulate --coverage kernel.ptx
  preheat emulate --coverage kernel.ptx --json | jq '.[] | select(.supported | not)'

Exit status 1 when the file has an instruction that the emulator cannot run.
"""


@click.command(epilog=_EPILOG)
@click.option(
    "--coverage",
    "file",
    required=True,
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="List the instructions of a PTX file, and which of them can run.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the list as JSON.")
def command(file: Path, as_json: bool) -> int:
    """Show what the CPU emulator can run."""
    from preheat.devices.emulator.coverage import coverage

    try:
        forms = coverage(ptx.parse(read_whole(file).decode()))
    except ptx.SyntaxFault as bad:
        hint = (
            f"compile it first: preheat compile {file} --arch sm_90 -o DIR"
            if file.suffix == ".cu"
            else None
        )
        raise InputError(f"{file}:{bad.line}: {bad}", hint=hint) from None
    except (OSError, UnicodeDecodeError) as fault:
        raise InputError(f"cannot read {file}: {getattr(fault, 'strerror', None) or fault}") from None
    missing = [form for form in forms if not form.supported]
    if as_json:
        print_json([asdict(form) for form in forms])
    else:
        rows = [(form.opcode, str(form.count), "yes" if form.supported else "no") for form in forms]
        for row in columns([("instruction", "count", "supported"), *rows], right=[1]):
            print_line(row)
        known = f"{count(len(forms) - len(missing), 'instruction')} supported"
        print_message(f"{known}, {len(missing)} not supported" if missing else known)
        for form in missing:
            print_message(f"{file}:{form.line}: {form.opcode}")
    return 1 if missing else 0
