"""Find the files that a text names in `#include` directives and `__has_include` operators."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import NamedTuple

from preheat.model.lexer import (
    join_lines,
    strip_comments,
    strip_unambiguous_comments,
    trigraph_variants,
)

__all__ = [
    "QUERIES",
    "Include",
    "has_include_macros",
    "has_include_queries",
    "include_lines",
    "includes",
    "line_names",
]

#: Operators that test whether a file exists. The compiler does not report their results.
QUERIES = ("__has_include", "__has_include_next")

_BLANK = r"[ \t\v\f\r]*+"
_DIRECTIVE = re.compile(
    rf'^{_BLANK}(?:#|%:){_BLANK}(?:include(?:_next)?+|import)\b{_BLANK}(?:<([^<>\n]+)>|"([^"\n]+)"|)',
    re.M,
)
_LINE = re.compile(rf'^{_BLANK}(?:#|%:){_BLANK}(?:line\b)?+{_BLANK}\d++{_BLANK}"([^"\n]+)"', re.M)
_NAME = re.compile(rf'{_BLANK}\({_BLANK}(?:<([^<>\n]+)>|"([^"\n]+)"){_BLANK}\)')
# Matches the directive before a name that is only tested or defined, from the start of its line.
_DEFINED = re.compile(
    r"(?:\A|\n)[ \t]*+(?:#|%:)[ \t]*+"
    r"(?:(?:el)?if\b[^\n]*\bdefined[ \t]*+\(?|(?:el)?ifn?def\b|define\b)[ \t]*+\Z"
)
_BEFORE = 200  # Such a directive begins within this many characters.
_MACRO = re.compile(rf"^{_BLANK}#{_BLANK}define{_BLANK}(\w+)([^\n]*)", re.M)


class Include(NamedTuple):
    """An `#include` directive. `name` is None if a macro gives the name."""

    name: str | None
    quoted: bool = True


def includes(text: str, *, exact: bool = True) -> Iterator[Include]:
    """Yield the includes of `text`, also those in branches that are not taken.

    Unless `exact`, comments are not removed, so a directive inside a comment counts as well.
    """
    for reading in trigraph_variants(text):
        code = join_lines(reading)
        if "include" not in code and "import" not in code:
            continue
        if exact:
            code = strip_comments(reading, strings=True)
        for angled, quoted in _DIRECTIVE.findall(code):
            yield Include(angled or quoted or None, quoted=not angled)


def include_lines(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield number, text and name of each line of `text` that is an include of a literal name."""
    names = {each.name for each in includes(text)}
    for number, line in enumerate(text.splitlines(), 1):
        directive = _DIRECTIVE.match(line)
        name = None if directive is None else directive[1] or directive[2]
        if name is not None and name in names:
            yield number, line.strip(), name


def line_names(text: str) -> set[str]:
    """Return the names set by `#line` in `text`. Compilers report them as if they were files."""
    if '"' not in text or "#" not in text:
        return set()
    names: set[str] = set()
    for reading in trigraph_variants(text):
        names.update(_LINE.findall(strip_comments(reading, strings=True)))
    return names


def has_include_queries(text: str, names: Collection[str] = QUERIES) -> Iterator[str | None]:
    """Yield the file that each use of an operator in `names` tests; None if it is not a literal."""
    if not any(name in join_lines(reading) for reading in trigraph_variants(text) for name in names):
        return
    word = re.compile(rf"\b(?:{'|'.join(names)})\b")
    for reading in trigraph_variants(text):
        code = strip_unambiguous_comments(reading, strings=True)
        for use in word.finditer(code):
            queried = _NAME.match(code, use.end())
            if queried is not None:
                yield queried[1] or queried[2]
            elif not _DEFINED.search(code[max(use.start() - _BEFORE, 0) : use.start()]):
                yield None


def has_include_macros(text: str, names: Collection[str] = QUERIES) -> set[str]:
    """Return the macros that `text` defines with an operator of `names` in their body."""
    if not any(name in text for name in names):
        return set()
    word = re.compile(rf"\b(?:{'|'.join(names)})\b")
    return {macro for macro, body in _MACRO.findall(join_lines(text)) if word.search(body)}
