"""The call site: the line of the program, outside this package, that called preheat."""

from __future__ import annotations

import os
import sys
from _thread import get_ident
from types import CodeType
from typing import TYPE_CHECKING, Any

from preheat.process.lazy import LazyModule

if TYPE_CHECKING:
    import warnings
else:
    warnings = LazyModule("warnings")

__all__ = [
    "CallSite", "attributed_to", "call_site", "caller", "exclude_library", "file_and_line",
    "format_site", "is_user_file", "shown_path", "warn_caller",
]  # fmt: skip

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_COMMANDS = os.path.join(_HERE, "tools", "cli")  # has one module for each command
_PYTHON = os.path.dirname(os.__file__) + os.sep  # the standard library; installed packages are below it
_INSIDE = (_HERE, _PYTHON, "<frozen ")

#: The code that called preheat and the offset of its instruction. The line is computed when it is
#: needed, because that takes longer than a launch. The code is None if it is not known.
CallSite = tuple[CodeType | None, int]

_attributed_to: dict[int, CallSite] = {}  # by thread


_libraries: list[str] = []  # prefixes of the files of libraries that call preheat for the program


class _UserFiles(dict[str, bool]):
    """A dict that says for each file name whether its code belongs to the program.

    It does not if the file is in preheat, in the standard library or in an excluded library. The
    commands of preheat count as programs.
    """

    def __missing__(self, name: str) -> bool:
        outside = (
            _is_command(name)
            or not name.startswith(_INSIDE)
            or ("-packages" in name and not name.startswith(_HERE))
        )
        outside = outside and not name.startswith(tuple(_libraries))
        self[name] = outside
        return outside


def _is_command(name: str) -> bool:
    return os.path.dirname(name) == _COMMANDS


is_user_file = _UserFiles()


def exclude_library(files: str) -> None:
    """Do not count the code of a library as the program: it calls preheat for its own callers.

    The names of its files begin with `files`, which is a directory with a separator at its end.
    """
    if files not in _libraries:
        _libraries.append(files)
        is_user_file.clear()


def call_site(*libraries: str) -> CallSite:
    """Return the place in the program that called preheat.

    Code below the directories `libraries` does not count as the program.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if is_user_file[code.co_filename] and not code.co_filename.startswith(libraries):
            return (code, frame.f_lasti)
        frame = frame.f_back
    return _attributed_to.get(get_ident(), (None, 0))


class attributed_to:  # noqa: N801 - used like a function
    """In a thread of preheat, let `call_site` return the line that requested the work."""

    def __init__(self, site: CallSite) -> None:
        self._site = site

    def __enter__(self) -> None:
        _attributed_to[get_ident()] = self._site

    def __exit__(self, *_: object) -> None:
        _attributed_to.pop(get_ident(), None)


def file_and_line(site: CallSite) -> tuple[str, int]:
    """Return the file and the line of a call site, or `("?", 0)` when it is not known."""
    code, offset = site
    if code is None:
        return ("?", 0)
    lines = (line for start, end, line in code.co_lines() if start <= offset < end)
    return (code.co_filename, next(lines, None) or code.co_firstlineno)


def format_site(site: CallSite) -> str:
    """Return a call site as `path:line`, as the name of a command, or as `?` when it is not known."""
    file, line = file_and_line(site)
    if _is_command(file):
        return f"preheat {os.path.basename(file).removesuffix('.py')}"
    return f"{shown_path(file)}:{line}" if line else file


def shown_path(path: str) -> str:
    """Return an absolute path as messages show it: from the working directory, if that is shorter.

    A file of an installed package is shown by its path in the directory of packages.
    """
    if not os.path.isabs(path):  # such as "<stdin>"
        return path
    installed = path.rpartition("-packages/")[2]
    if installed != path:
        return installed
    try:
        return min(os.path.relpath(path), path, key=len)
    except OSError:  # The working directory was removed.
        return path


def caller() -> str:
    """Return the call site as `path:line`."""
    return format_site(call_site())


def warn_caller(warning: Warning) -> None:
    """Issue a warning at the call site. Warning filters may turn it into an error."""
    file, line = file_and_line(call_site())
    warnings.warn_explicit(warning, type(warning), file, line)
