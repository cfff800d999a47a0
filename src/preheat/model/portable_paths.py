"""Portable paths of include directories, called spellings: the same text on every machine.

Include directories are part of the key of a request in a bundle. Their absolute paths differ from one
machine to the next, so each directory is spelled relative to a base that the program knows:

    {file}/include      relative to the directory of the program's own file
    {cwd}/include       relative to the working directory: a relative path, for a program that is text
    {caller}/include    relative to the Python file that makes the request: an absolute path, such as
                        one made from `__file__`, for a program that is text
    {packages}/x/inc    relative to the directory of installed packages
    /opt/include        any other directory

Two directories have the same spelling only for programs in different files, in different working
directories, or requested by different Python files. A bake compares their headers, and fails.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Callable

__all__ = ["FILE", "format_spellings", "is_spelling", "spell", "spelled_in_manifest"]

FILE = "{file}"
_CWD = "{cwd}"
_CALLER = "{caller}"
_PACKAGES = "{packages}"
_SPELLING = re.compile(r"(?:\{(?:file|cwd|caller|packages)\}(?:/.*)?|/.*)", re.S)
_BASE = "/" + "x/" * 64  # Replaces the directory of the manifest; deep enough for every `..`.


def spell(written: str, file: str | None, caller: Callable[[], str | None] | None = None) -> str:
    """Return the spelling of an include directory that the program gave as `written`.

    `file` is the file of the program. `caller` returns the Python file that makes the request.
    """
    directory = os.path.abspath(written)
    if file is not None and (path := _path_from(file, directory)) is not None:
        return _join(FILE, path)
    if not os.path.isabs(written):
        return _join(_CWD, os.path.normpath(written))
    asking = caller() if caller is not None else None
    if asking is not None and (path := _path_from(asking, directory)) is not None:
        return _join(_CALLER, path)
    packages = _packages_above(directory)
    if packages and _is_first(packages, directory[len(packages) + 1 :]):
        return _join(_PACKAGES, directory[len(packages) + 1 :])
    return directory


def spelled_in_manifest(directory: str, file: str | None) -> str:
    """Return the spelling that follows from the paths of a program in a manifest.

    The paths are absolute or relative to the manifest. Without a `file`, the application is expected to
    run in the directory of its manifest.
    """
    if os.path.isabs(directory):
        return os.path.normpath(directory)
    if file is None:
        return _join(_CWD, os.path.normpath(directory))
    if os.path.isabs(file):
        return ""  # No spelling would be valid on another machine.
    return _join(FILE, os.path.relpath(_BASE + directory, os.path.dirname(_BASE + file)))


def is_spelling(text: str) -> bool:
    """Return True if `text` is a spelling, and not any other path."""
    return _SPELLING.fullmatch(text) is not None


def format_spellings(spellings: tuple[str, ...]) -> str:
    """Return spellings for a message: short, and without the directory of the program itself."""
    own = [each for each in spellings if each != FILE]
    return ", ".join(each.removeprefix(FILE + "/").removeprefix(_CWD + "/") for each in own)


def _join(start: str, path: str) -> str:
    return start if path == "." else f"{start}/{path}"


def _path_from(file: str, directory: str) -> str | None:
    """Return the relative path from `file` to `directory`, or None when they share only the root.

    The result is also None for an installed package and a project, which can move independently.
    """
    home = os.path.dirname(os.path.abspath(file))
    if directory == home:
        return "."
    if _packages_above(file) != _packages_above(directory):
        return None
    lexical = _relative_path(home, directory)
    if lexical is not None and lexical.split(os.sep)[0] != os.pardir:
        return lexical
    paths = [path for path in (lexical, _resolved_path(home, directory)) if path is not None]
    return min(paths, key=lambda path: path.split(os.sep).count(os.pardir), default=None)


@functools.lru_cache(maxsize=256)
def _relative_path(home: str, directory: str) -> str | None:
    if home != os.sep and directory.startswith(home + os.sep):
        return directory[len(home) + 1 :]
    near = os.path.commonpath((home, directory)) != os.sep
    return os.path.relpath(directory, home) if near else None


@functools.lru_cache(maxsize=256)  # `realpath` reads every directory of the path.
def _resolved_path(home: str, directory: str) -> str | None:
    """Return the relative path with links resolved, if it is also right from `home` as written.

    A working directory never has links in its path. `__file__` often has.
    """
    real = os.path.realpath(directory)
    path = _relative_path(os.path.realpath(home), real)
    if path is None or os.path.realpath(os.path.normpath(os.path.join(home, path))) != real:
        return None
    return path


def _packages_above(path: str) -> str:
    """Return the directory of installed packages that contains `path`, or an empty text."""
    if "-packages/" not in path:
        return ""
    return next((root for root in _package_roots() if path.startswith(root + os.sep)), "")


def _is_first(packages: str, rest: str) -> bool:
    """Return True if an import would find `rest` in `packages`, not in an earlier directory."""
    roots = _package_roots()
    earlier = roots[: roots.index(packages)]
    return not any(os.path.lexists(os.path.join(root, rest)) for root in earlier)


def _package_roots() -> list[str]:
    return [entry for entry in sys.path if entry.endswith("-packages") and os.path.isabs(entry)]
