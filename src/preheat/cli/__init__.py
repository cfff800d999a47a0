"""The command line: one file a command, talk on stderr, data on stdout."""

from __future__ import annotations

import importlib
import os
import sys

import click

from preheat._version import __version__

__all__ = ["main"]

_COMMANDS = {
    "compile": "Compile CUDA or PTX files into the cache",
    "record": "Run a command and write down the kernels it needs",
    "plan": "List the kernels of a training step before it runs",
    "bake": "Compile all that a manifest lists into one bundle",
    "check": "Prove that nothing is left to compile",
    "bundle": "Look into bundles, verify and merge them",
    "cache": "Look into the cache and keep it tidy",
    "debug": "Help debuggers and profilers to show source",
    "emulate": "See what the CPU emulator can run",
    "doctor": "Check compilers, directories and settings",
    "demo": "See all of it, from a cold compile to a sealed run",
}

_EPILOG = """\b
Examples:
  preheat compile kernels/*.cu --arch sm_90 --arch sm_100
  preheat bake kernels.toml --arch sm_90 -o kernels.heat
  preheat cache stats
  preheat doctor

\b
Exit status: 0 done; 1 something failed or was found wrong; 2 an argument, a setting or an input file
cannot be used; 130 interrupted.
"""


class _Lazy(click.Group):
    """Loads a command's module when that command is asked for: help stays quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"preheat.cli.{cmd_name}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        from preheat.errors import did_you_mean

        if args and args[0] not in _COMMANDS and not args[0].startswith("-"):
            hint = did_you_mean(args[0], _COMMANDS)
            raise click.UsageError(f"no such command: {args[0]}" + (f"; {hint}" if hint else ""), ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


@click.group(cls=_Lazy, epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="preheat")
def _preheat() -> None:
    """GPU programs that start hot: CUDA kernels compiled once, ever."""


def main(args: list[str] | None = None) -> None:
    """Run the command line and exit with its status."""
    from preheat.cli.output import complain
    from preheat.errors import ConfigError, InputError, PreheatError

    try:
        sys.exit(_preheat.main(args, prog_name="preheat", standalone_mode=False) or 0)
    except click.UsageError as error:
        if error.format_message().startswith("Usage:"):  # called with nothing: that is a question
            click.echo(error.format_message(), err=True)
            sys.exit(2)
        usage = error.ctx.command_path if error.ctx else "preheat"
        complain(error.format_message(), f"see '{usage} --help'")
        sys.exit(2)
    except click.ClickException as error:
        complain(error.format_message())
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt) as stop:
        how_far = str(stop.__cause__ or stop)  # click raises its own in the place of Ctrl-C
        complain("interrupted" + (f": {how_far}" if how_far else ""))
        # Threads may be compiling or waiting for another process: leave without them. Their workers
        # notice and end too, and the kernel gives back the locks.
        sys.stdout.flush()
        os._exit(130)
    except PreheatError as error:
        complain(str(error), error.hint)
        sys.exit(2 if isinstance(error, InputError | ConfigError) else 1)
    except BrokenPipeError:  # the reader of our output left: `preheat cache ls | head`
        sys.stderr.close()
        sys.exit(0)
    except OSError as fault:
        complain(str(fault), "'preheat doctor' looks at directories and permissions")
        sys.exit(1)


if __name__ == "__main__":
    main()
