"""`preheat emulate`: run a command on the CPU driver, or list what the emulator can run."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import click

from preheat.driver.library import driver_environment
from preheat.driver.reports import WITHOUT_RUNTIME, RunReport, hand_over, read_report
from preheat.driver.settings import MAX_DEVICES, DriverSettings, gpu_refusal, is_seed
from preheat.errors import InputError
from preheat.model import ptx
from preheat.model.arch import Arch
from preheat.model.config import environ
from preheat.process.files import read_whole
from preheat.process.lazy import LazyModule
from preheat.store.publish import publish, unwritable_reason
from preheat.tools.cli.child import CannotRunError, run_command
from preheat.tools.cli.output import (
    attempt,
    columns,
    count,
    print_error,
    print_json,
    print_line,
    print_message,
)

if TYPE_CHECKING:
    from preheat.emulator import coverage
else:
    coverage = LazyModule("preheat.emulator.coverage")

__all__ = ["command"]

_EPILOG = """\b
Examples:
  preheat emulate -- python saxpy.py
  preheat emulate --devices 2 --arch sm_100 -- python -m pytest tests
  preheat emulate --schedule 3 --report report.json -- python saxpy.py
  preheat emulate -- preheat audit -- python saxpy.py
  preheat emulate --coverage kernel.ptx

\b
COMMAND finds a libcuda.so.1 that executes kernels on the CPU: unmodified programs of cuda.bindings,
cuda.core, numba-cuda, Triton and preheat run without a GPU. A fault of a kernel is printed with its
thread, its buffer and its line, while the program sees the error that a GPU would give. A program that
contains NVIDIA's CUDA runtime (torch, CuPy) cannot run.

\b
The exit status is that of the command. It is 126 or 127 if the command cannot be run, 1 if it succeeded
but the report cannot be written, and 2 if an argument cannot be used. With --coverage, it is 1 when the
file has an instruction that the emulator cannot run.
"""
_STDERR = 2


@click.command(epilog=_EPILOG, context_settings={"allow_interspersed_args": False})
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[--] [COMMAND [ARG]...]")
@click.option("--arch", metavar="ARCH", help="Architecture of the devices. Default: sm_90.")
@click.option(
    "--devices",
    type=click.IntRange(1, MAX_DEVICES),
    metavar="N",
    help="Number of devices. Default: 1.",
)
@click.option(
    "--schedule",
    metavar="SEED",
    callback=lambda _, __, text: _check_seed(text),
    help="Seed of the order in which streams execute: each one is another order that CUDA allows. "
    "With 'off', work is executed at once. Default: 0.",
)
@click.option("--sanitize", is_flag=True, help="Stop kernels at values that CUDA leaves undefined.")
@click.option("--beside-gpu", is_flag=True, help="Use the CPU although this machine has a GPU.")
@click.option(
    "--report",
    "target",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write launches, faults and functions that are not supported to FILE, as JSON.",
)
@click.option(
    "--coverage",
    "file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="List the instructions of a PTX file, and which of them can run. There is no COMMAND.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report or the list as JSON.")
def command(
    words: tuple[str, ...],
    arch: str | None,
    devices: int | None,
    schedule: str | None,
    sanitize: bool,
    beside_gpu: bool,
    target: Path | None,
    file: Path | None,
    as_json: bool,
) -> int:
    """Run COMMAND with a CUDA driver that executes kernels on the CPU."""
    if file is not None:
        if words or target is not None:
            more = "a COMMAND" if words else "--report"
            raise click.UsageError(f"--coverage and {more} exclude each other")
        return _list_coverage(file, as_json)
    if not words:
        raise click.UsageError("there is no COMMAND to run", click.get_current_context())
    settings: dict[str, str | int | None] = {
        "arch": None if arch is None else str(Arch.parse(arch)),
        "devices": devices,
        "schedule": schedule,
        "sanitize": 1 if sanitize else None,
        "beside_gpu": 1 if beside_gpu else None,
    }
    return _run(
        words, {name: value for name, value in settings.items() if value is not None}, target, as_json
    )


def _check_seed(text: str | None) -> str | None:
    """Return a seed; raise a usage error if it is none."""
    if text is not None and not is_seed(text):
        raise click.BadParameter(f"{text!r} is neither a whole number nor 'off'")
    return text


def _run(
    words: tuple[str, ...], settings: dict[str, str | int], target: Path | None, as_json: bool
) -> int:
    """Run a command, and report what its processes have done."""
    if target is not None and (why := unwritable_reason(target.absolute())):
        raise InputError(f"cannot write {target}: {why}", hint="name another file with --report")
    with TemporaryDirectory(prefix="preheat-emulate-", ignore_cleanup_errors=True) as place:
        env = driver_environment(environ(), **settings, report=place)
        if (why := gpu_refusal(DriverSettings.from_env(env))) is not None:
            raise InputError(why)
        try:
            output = _STDERR if as_json else None
            status = run_command(words, env, output=output, adapters="")
        except CannotRunError as error:
            print_error(str(error), error.hint)
            return error.status
        report = read_report(Path(place))
        hand_over(Path(place), DriverSettings.from_env(environ()).report)
    return _print(report, status, target, as_json)


def _print(report: RunReport, status: int, target: Path | None, as_json: bool) -> int:
    """Print and write a report, and return the exit status."""
    printed = True
    if report.needs_runtime:
        attempt(print_error, WITHOUT_RUNTIME)
    if as_json:
        printed = attempt(print_json, report.json())
    else:
        attempt(print_message, f"preheat: {report}")
    if target is not None:
        try:
            text = json.dumps(report.json(), indent=2)
            publish(target.absolute(), [text.encode(), b"\n"], mode=0o600)
        except OSError as fault:
            attempt(print_error, f"cannot write {target}: {fault.strerror or fault}")
            return status or 1
    return status if printed else status or 1


def _list_coverage(file: Path, as_json: bool) -> int:
    """List the instructions of a PTX file, and return whether one is not supported."""

    try:
        forms = coverage.coverage(ptx.parse(read_whole(file).decode()))
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
