"""The command line options that describe a program."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from preheat.ahead.manifest import COVERAGES
from preheat.build.known_archs import require_known
from preheat.errors import DeviceError, InputError
from preheat.model import ptx
from preheat.model.arch import Arch
from preheat.model.linked_program import BINARY_SUFFIXES, BinaryPart, LinkedProgram
from preheat.model.program import Program
from preheat.process.lazy import LazyModule

if TYPE_CHECKING:
    from preheat.devices.cuda import device as cuda_device
else:
    cuda_device = LazyModule("preheat.devices.cuda.device")

__all__ = [
    "LinkOptions",
    "ProgramOptions",
    "archs_option",
    "coverage_option",
    "link_options",
    "program_options",
    "require_known_archs",
    "targets",
]

_OPTION = "Option for the compiler, such as -X=-use_fast_math; repeatable."
_NAME = "Template instance to compile, such as 'tk<float>'; repeatable."


@dataclass(frozen=True, slots=True)
class ProgramOptions:
    """The values of `-I`, `-D`, `-X` and `--name`."""

    include: tuple[str, ...]
    defines: tuple[str, ...]
    options: tuple[str, ...]
    names: tuple[str, ...]

    def read(self, file: str) -> Program:
        """Read the program in `file`. Raises `InputError` with a message of one line."""
        if not file:
            raise InputError("a file name is empty")
        if Path(file).is_dir():
            raise InputError(f"{file} is a directory", hint=f"name the files in it: {file}/*.cu")
        given = [option.removeprefix("=") for option in self.options]
        for option in given:
            if not option.startswith("-"):
                raise InputError(
                    f"{option!r} is not a compiler option",
                    hint="pass an option such as -X=-use_fast_math",
                )
        for directory in self.include:
            if not Path(directory).is_dir():
                raise InputError(f"include directory {directory} does not exist")
        options = [*(f"-D{define}" for define in self.defines), *given]
        return Program.from_file(file, options=options, include=self.include, names=self.names)

    def read_linked(self, files: Iterable[str], link: LinkOptions) -> LinkedProgram:
        """Read files as the parts of one program. The options of a program go to each source.

        A template instance goes to the sources that have the name of the template.
        """
        parts = [self._read_part(file) for file in files]
        return LinkedProgram.of(parts, lto=link.lto, options=link.options)

    def _read_part(self, file: str) -> Program | BinaryPart:
        if file.endswith(BINARY_SUFFIXES):
            return BinaryPart.from_file(file)
        part = replace(self, names=()).read(file)
        bases = {name: re.escape(name.partition("<")[0].rpartition("::")[2]) for name in self.names}
        own = (name for name, base in bases.items() if re.search(rf"\b{base}\b", part.source))
        return part if part.language == "ptx" else replace(part, names=tuple(own))


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """The values of `--link`, `--lto` and `--link-option`."""

    link: bool
    lto: bool
    options: tuple[str, ...]

    @property
    def wanted(self) -> bool:
        """Whether the files are linked into one program."""
        return self.link or self.lto or bool(self.options)


def targets(program: Program, given: Iterable[str]) -> list[Arch]:
    """Return the given architectures, or the target of PTX, or the architecture of the GPU."""
    if archs := list(dict.fromkeys(Arch.parse(text) for text in given)):
        return archs
    if program.language == "ptx":
        try:
            return [Arch.parse(ptx.parse(program.source).target[0])]
        except ptx.SyntaxFault as bad:
            raise InputError(f"{program.label}:{bad.line}: {bad}") from None
    return [_own_gpu(program.label)]


def _own_gpu(label: str) -> Arch:
    """Return the architecture of the first GPU. Raises `InputError` when there is none."""
    hint = "add --arch, such as --arch sm_90"
    try:
        gpus = cuda_device.visible()
    except DeviceError as error:
        why = str(error).partition("\n")[0]
        if why.startswith("no GPU"):
            why = f"there is {why}"
        raise InputError(f"{label}: no architecture was given, and {why}", hint=hint) from None
    if not gpus:
        raise InputError(f"{label}: no architecture was given, and there is no GPU", hint=hint)
    return gpus[0].arch


def archs_option(default: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the option `--arch`, with its `default` in words."""
    text = f"Architecture, such as sm_90a; repeatable. Default: {default}."
    return click.option(
        "--arch", "archs", multiple=True, metavar="ARCH", help=text, callback=require_known_archs
    )


def require_known_archs(
    context: click.Context, parameter: click.Parameter, given: str | tuple[str, ...] | None
) -> str | tuple[str, ...] | None:
    """Return the value of an option `--arch`. Raises `InputError` for an architecture of no GPU."""
    del context, parameter
    require_known(Arch.parse(text) for text in ([given] if isinstance(given, str) else given or ()))
    return given


def coverage_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the option `--coverage`. The command receives None if it is not given."""
    text = "Variants of kernels of other libraries: recorded, closure or weak. Default: as in MANIFEST."
    choices = click.Choice(COVERAGES)
    return click.option("--coverage", type=choices, metavar="WHICH", help=text)(command)


def link_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of a link. The command receives them as `link`."""

    @click.option("--link", is_flag=True, help="Link all files into one program.")
    @click.option("--lto", is_flag=True, help="Link with link-time optimisation.")
    @click.option(
        "--link-option",
        "linker",
        multiple=True,
        metavar="OPTION",
        help="Option for the linker, such as --link-option=-O3; repeatable.",
    )
    @wraps(command)
    def wrapped(link: bool, lto: bool, linker: tuple[str, ...], **more: Any) -> Any:
        return command(link=LinkOptions(link, lto, linker), **more)

    return wrapped


def program_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that describe a program. The command receives them as `given`."""

    @click.option(
        "-I",
        "include",
        multiple=True,
        metavar="DIR",
        help="Directory to search for headers; repeatable.",
    )
    @click.option(
        "-D", "defines", multiple=True, metavar="NAME[=VALUE]", help="Define a macro; repeatable."
    )
    @click.option("-X", "--option", "options", multiple=True, metavar="OPTION", help=_OPTION)
    @click.option("--name", "names", multiple=True, metavar="EXPR", help=_NAME)
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
