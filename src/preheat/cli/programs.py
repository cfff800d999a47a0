"""How a program is named on the command line: a file and the options that go with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import click

from preheat.errors import InputError
from preheat.program import Program

__all__ = ["ProgramOptions", "program_options"]


@dataclass(frozen=True, slots=True)
class ProgramOptions:
    """What `-I`, `-D`, `-O` and `--name` said."""

    include: tuple[str, ...]
    defines: tuple[str, ...]
    options: tuple[str, ...]
    names: tuple[str, ...]

    def read(self, file: str) -> Program:
        """The program in `file`, or an `InputError` in one line."""
        if Path(file).is_dir():
            raise InputError(f"{file} is a directory", hint=f"name the files in it: {file}/*.cu")
        options = [*(f"-D{d}" for d in self.defines), *(o.removeprefix("=") for o in self.options)]
        program = Program.from_file(file, options=options, include=self.include, names=self.names)
        if not program.source.strip():
            raise InputError(f"{file} is empty")
        return program


def program_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options that describe a program; the command gets them as `given`."""

    @click.option("-I", "include", multiple=True, metavar="DIR", help="Directory with headers.")
    @click.option("-D", "defines", multiple=True, metavar="NAME[=VALUE]", help="Macro to define.")
    @click.option("-O", "--option", "options", multiple=True, metavar="OPTION", help="Compiler option.")
    @click.option("--name", "names", multiple=True, metavar="EXPR", help="Instance, like 'tk<float>'.")
    @wraps(command)
    def wrapped(
        include: tuple[str, ...],
        defines: tuple[str, ...],
        options: tuple[str, ...],
        names: tuple[str, ...],
        **more: Any,
    ) -> Any:
        return command(given=ProgramOptions(include, defines, options, names), **more)

    return wrapped
