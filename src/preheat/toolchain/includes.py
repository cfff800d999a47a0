"""What a text asks the preprocessor to look for: by `#include` and by `__has_include`."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import NamedTuple

from preheat.lexer import certain, joined, readings, stripped

__all__ = ["QUESTIONS", "Include", "includes", "line_names", "questions", "wrappers"]

#: Operators that ask whether a file exists. The compiler does not report what it answered.
QUESTIONS = ("__has_include", "__has_include_next")

_BLANK = r"[ \t\v\f\r]*+"
_DIRECTIVE = re.compile(
    rf'^{_BLANK}(?:#|%:){_BLANK}(?:include(?:_next)?+|import)\b{_BLANK}(?:<([^<>\n]+)>|"([^"\n]+)"|)',
    re.M,
)
_LINE = re.compile(rf'^{_BLANK}(?:#|%:){_BLANK}(?:line\b)?+{_BLANK}\d++{_BLANK}"([^"\n]+)"', re.M)
_NAME = re.compile(rf'{_BLANK}\({_BLANK}(?:<([^<>\n]+)>|"([^"\n]+)"){_BLANK}\)')
# What stands before a name that is only asked for or defined: its directive, from the line's start.
_DEFINED = re.compile(
    r"(?:\A|\n)[ \t]*+(?:#|%:)[ \t]*+"
    r"(?:(?:el)?if\b[^\n]*\bdefined[ \t]*+\(?|(?:el)?ifn?def\b|define\b)[ \t]*+\Z"
)
_BEFORE = 200  # characters in which such a directive must begin
_MACRO = re.compile(rf"^{_BLANK}#{_BLANK}define{_BLANK}(\w+)([^\n]*)", re.M)


class Include(NamedTuple):
    """An `#include`. `name` is None where a macro names the file."""

    name: str | None
    quoted: bool = True


def includes(text: str, *, exact: bool = True) -> Iterator[Include]:
    """The includes of `text`, in branches that are not taken as well.

    Unless `exact`, comments are not looked for: then one that holds a directive counts as it does.
    """
    for reading in readings(text):
        code = joined(reading)
        if "include" not in code and "import" not in code:
            continue
        if exact:
            code = stripped(reading, strings=True)
        for angled, quoted in _DIRECTIVE.findall(code):
            yield Include(angled or quoted or None, quoted=not angled)


def line_names(text: str) -> set[str]:
    """The names that `#line` gives to parts of `text`: compilers report them as if they were files."""
    if '"' not in text or "#" not in text:
        return set()
    found: set[str] = set()
    for reading in readings(text):
        found.update(_LINE.findall(stripped(reading, strings=True)))
    return found


def questions(text: str, names: Collection[str] = QUESTIONS) -> Iterator[str | None]:
    """The file that each use of an operator in `names` asks for; None where that is not spelled out."""
    if not any(name in joined(reading) for reading in readings(text) for name in names):
        return
    word = re.compile(rf"\b(?:{'|'.join(names)})\b")
    for reading in readings(text):
        code = certain(reading, strings=True)
        for use in word.finditer(code):
            asked = _NAME.match(code, use.end())
            if asked is not None:
                yield asked[1] or asked[2]
            elif not _DEFINED.search(code[max(use.start() - _BEFORE, 0) : use.start()]):
                yield None


def wrappers(text: str, names: Collection[str] = QUESTIONS) -> set[str]:
    """The macros that `text` defines by an operator in `names`, and that ask the same therefore."""
    if not any(name in text for name in names):
        return set()
    word = re.compile(rf"\b(?:{'|'.join(names)})\b")
    return {macro for macro, body in _MACRO.findall(joined(text)) if word.search(body)}
