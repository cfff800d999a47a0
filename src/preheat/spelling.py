"""How a program names its include directories: the same text wherever the program is installed.

A bundle answers a sealed process by what was asked for, and include directories are part of that. Their
absolute paths differ from one machine to the next, so each directory is spelled by where it starts:

    {file}/include      at the directory of the program's own file
    {cwd}/include       at the working directory: written as a relative path, for a program that is text
    {caller}/include    at the directory of the Python file that asks: an absolute path, such as one
                        made from `__file__`, for a program that is text
    {packages}/x/inc    at the directory of installed packages
    /opt/include        anywhere else

Two directories have the same spelling only for programs in different files, in different working
directories, or asked for by different Python files. A bake finds that out by their headers, and fails.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Callable

__all__ = ["FILE", "format_spellings", "is_spelling", "spelled", "spelled_in_manifest"]

FILE = "{file}"
_CWD, _CALLER, _PACKAGES = "{cwd}", "{caller}", "{packages}"
_SPELLING = re.compile(r"(?:\{(?:file|cwd|caller|packages)\}(?:/.*)?|/.*)", re.S)
_BASE = "/" + "x/" * 64  # stands for the manifest's directory, however many `..` lead out of it


def spelled(written: str, file: str | None, caller: Callable[[], str | None] | None = None) -> str:
    """The spelling of an include directory that the program wrote as `written`.

    `file` is the program's own file, `caller` finds the Python file that asks.
    """
    directory = os.path.abspath(written)
    if file is not None and (steps := _steps(file, directory)) is not None:
        return _joined(FILE, steps)
    if not os.path.isabs(written):
        return _joined(_CWD, os.path.normpath(written))
    asking = caller() if caller is not None else None
    if asking is not None and (steps := _steps(asking, directory)) is not None:
        return _joined(_CALLER, steps)
    packages = _packages_above(directory)
    if packages and _is_first(packages, directory[len(packages) + 1 :]):
        return _joined(_PACKAGES, directory[len(packages) + 1 :])
    return directory


def spelled_in_manifest(directory: str, file: str | None) -> str:
    """What the paths in a row of a manifest say about a spelling, wherever the manifest lies.

    The paths are absolute, or start at the manifest. Without a `file` an application is expected to run
    where its manifest is.
    """
    if os.path.isabs(directory):
        return os.path.normpath(directory)
    if file is None:
        return _joined(_CWD, os.path.normpath(directory))
    if os.path.isabs(file):
        return ""  # nothing that would hold elsewhere
    return _joined(FILE, os.path.relpath(_BASE + directory, os.path.dirname(_BASE + file)))


def is_spelling(text: str) -> bool:
    """Whether `text` is a spelling, as opposed to any other path."""
    return _SPELLING.fullmatch(text) is not None


def format_spellings(spellings: tuple[str, ...]) -> str:
    """A list of spellings for people: without the program's own directory, as short as it is clear."""
    own = [each for each in spellings if each != FILE]
    return ", ".join(each.removeprefix(FILE + "/").removeprefix(_CWD + "/") for each in own)


def _joined(start: str, steps: str) -> str:
    return start if steps == "." else f"{start}/{steps}"


def _steps(file: str, directory: str) -> str | None:
    """The way from `file` to `directory`; None when they have nothing but the root in common.

    An installed package and a project have nothing in common either: only one of the two moves.
    """
    home = os.path.dirname(os.path.abspath(file))
    if directory == home:
        return "."
    if _packages_above(file) != _packages_above(directory):
        return None
    lexical = _way(home, directory)
    if lexical is not None and lexical.split(os.sep)[0] != os.pardir:
        return lexical
    ways = [way for way in (lexical, _real_way(home, directory)) if way is not None]
    return min(ways, key=lambda way: way.split(os.sep).count(os.pardir), default=None)


@functools.lru_cache(maxsize=256)
def _way(home: str, directory: str) -> str | None:
    if home != os.sep and directory.startswith(home + os.sep):
        return directory[len(home) + 1 :]
    near = os.path.commonpath((home, directory)) != os.sep
    return os.path.relpath(directory, home) if near else None


@functools.lru_cache(maxsize=256)  # costs a look at every directory on the way
def _real_way(home: str, directory: str) -> str | None:
    """The way when links are followed, if it leads there from `home` as it is written, too.

    A working directory never goes through a link; `__file__` often does.
    """
    real = os.path.realpath(directory)
    way = _way(os.path.realpath(home), real)
    if way is None or os.path.realpath(os.path.normpath(os.path.join(home, way))) != real:
        return None
    return way


def _packages_above(path: str) -> str:
    """The directory of installed packages that `path` is in, if any."""
    if "-packages/" not in path:
        return ""
    return next((root for root in _package_roots() if path.startswith(root + os.sep)), "")


def _is_first(packages: str, rest: str) -> bool:
    """Whether an import would find `rest` in `packages`, and not in an earlier directory."""
    roots = _package_roots()
    earlier = roots[: roots.index(packages)]
    return not any(os.path.lexists(os.path.join(root, rest)) for root in earlier)


def _package_roots() -> list[str]:
    return [entry for entry in sys.path if entry.endswith("-packages") and os.path.isabs(entry)]
