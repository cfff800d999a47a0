"""The command line: one module for each command, messages on stderr, data on stdout."""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING

import click

from preheat._version import __version__
from preheat.process.lazy import LazyModule

if TYPE_CHECKING:
    from preheat import errors
    from preheat.build import counters
    from preheat.tools.cli import output as _output
else:
    errors = LazyModule("preheat.errors")
    counters = LazyModule("preheat.build.counters")
    _output = LazyModule("preheat.tools.cli.output")

__all__ = ["main"]

_COMMANDS = {
    "compile": "Compile CUDA or PTX files into the cache",
    "record": "Run a command and record the kernels it needs",
    "run": "Run a command with kernels from bundles and the cache",
    "emulate": "Run a command on the CPU, as if there were a GPU",
    "audit": "Run a command and report what it compiled and loaded",
    "plan": "List the kernels of a training step before it runs",
    "bake": "Compile the programs of a manifest into one bundle",
    "check": "Verify that nothing is left to compile",
    "bundle": "List, verify, sign and merge bundles",
    "keys": "Make and show the keys that sign entries and bundles",
    "cache": "Inspect and clean the cache",
    "debug": "Write sources for debuggers and profilers",
    "doctor": "Check compilers, directories and settings",
    "demo": "Run all steps, from a cold compile to a sealed run",
}

_EPILOG = """\b
Examples:
  preheat compile kernels/*.cu --arch sm_90 --arch sm_100
  preheat bake kernels.toml --arch sm_90 -o kernels.heat
  preheat cache stats
  preheat doctor

\b
Exit status: 0 success; 1 a failure or a problem that was found; 2 an argument, a setting or an input
file cannot be used; 130 interrupted.
"""


class _LazyGroup(click.Group):
    """Imports the module of a command when the command is used, so that help stays quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        if cmd_name not in _COMMANDS:
            return None
        counters.disable_server()
        command: click.Command = importlib.import_module(f"preheat.tools.cli.{cmd_name}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in _COMMANDS and not args[0].startswith("-"):
            hint = errors.did_you_mean(args[0], _COMMANDS)
            raise click.UsageError(f"no such command: {args[0]}" + (f"; {hint}" if hint else ""), ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


@click.group(cls=_LazyGroup, epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="preheat")
def _preheat() -> None:
    """Compile CUDA kernels once, cache them, and bake them into bundles ahead of time."""


def main(args: list[str] | None = None) -> None:
    """Run the command line and exit with its status."""
    try:
        sys.exit(_preheat.main(args, prog_name="preheat", standalone_mode=False) or 0)
    except click.UsageError as error:
        if error.format_message().startswith("Usage:"):  # No command was given: show the help.
            click.echo(error.format_message(), err=True)
            sys.exit(2)
        usage = error.ctx.command_path if error.ctx else "preheat"
        _output.print_error(error.format_message(), f"see '{usage} --help'")
        sys.exit(2)
    except click.ClickException as error:
        _output.print_error(error.format_message())
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt) as stop:
        progress = str(stop.__cause__ or stop)  # click replaces KeyboardInterrupt by Abort.
        _output.print_error("interrupted" + (f": {progress}" if progress else ""))
        # Threads may be compiling or waiting for another process: exit without them. Their workers
        # notice that and exit too, and the operating system releases the locks.
        sys.stdout.flush()
        os._exit(130)
    except errors.PreheatError as error:
        _output.print_error(str(error), error.hint)
        sys.exit(2 if isinstance(error, errors.InputError | errors.ConfigError) else 1)
    except BrokenPipeError:  # The reader of the output has exited: `preheat cache ls | head`.
        sys.stderr.close()
        sys.exit(0)
    except OSError as fault:
        _output.print_error(str(fault), "'preheat doctor' checks directories and permissions")
        sys.exit(1)


if __name__ == "__main__":
    main()
