"""Comments and literals of CUDA C++ and PTX text, found in one pass over it.

Every pass takes linear time, whatever the text is, because the scanner never moves back. An
unterminated comment extends to the end of the text, an unterminated string or character literal to the
end of its line, as compilers read them. An unterminated raw string is read as code. No compiler accepts
it, and as code it hides nothing.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

__all__ = [
    "Piece",
    "blank_comments",
    "find_name",
    "find_pasted_name",
    "join_lines",
    "scan",
    "split_commas",
    "strip_comments",
    "strip_unambiguous_comments",
    "trigraph_variants",
]

_SPLICE = r"(?:\\\r?\n)*"  # A backslash at the end of a line joins it with the next.
_SPLICES = re.compile(r"\\\r?\n")
# Where a comment or literal begins. A number such as 1'000 and a name such as <a//b.h> are here because
# nothing begins inside them.
_CPP_START = re.compile(
    r"(?P<name>(?:#|%:)[ \t\v\f]*include(?:_next)?[ \t\v\f]*<[^<>\n]*>)"
    rf"|(?P<block>/{_SPLICE}\*)"
    rf"|(?P<line>/{_SPLICE}/)"
    rf'|(?P<raw>\b(?:u8|[uUL])?R{_SPLICE}")'
    r'|(?P<string>")'
    r"|(?P<number>(?<![\w.])\.?\d[\w.]*(?:'[\w.]+)+)"
    r"|(?P<character>')"
)
_PTX_START = re.compile(r'(?P<block>/\*)|(?P<line>//)|(?P<string>")')
_CPP_LINE = re.compile(r"[^\n\\]*(?:\\(?:\r?\n|.)?[^\n\\]*)*")
_PTX_LINE = re.compile(r"[^\n]*")
_CPP_BLOCK_END = re.compile(rf"\*{_SPLICE}/")
_PTX_BLOCK_END = re.compile(r"\*/")
# The characters of a literal up to its closing quote or the end of its line.
_INSIDE = {
    '"': re.compile(r'[^"\\\n]*(?:\\(?:\r\n|.)[^"\\\n]*)*"?', re.S),
    "'": re.compile(r"[^'\\\n]*(?:\\(?:\r\n|.)[^'\\\n]*)*'?", re.S),
}
_RAW_OPENING = re.compile(r'([^()\\\s"]{0,16})\(')
_NOT_BREAK = re.compile(r"[^\n]")
_DOUBTFUL = re.compile(r'R"|include[^\n<"]{0,200}<[^<>\n]*/[/*]')
_MAX_PIECES = 3
_WORD = re.compile(r"\w+")
_TRIGRAPHS = {"??/": "\\", "??=": "#"}
_SEPARATOR = re.compile(r"[,(\[{<>}\])]")  # A comma, or a bracket.


class Piece(NamedTuple):
    """A comment, string, raw string or character literal at `text[start:end]`."""

    kind: str
    start: int
    end: int


def scan(text: str, *, ptx: bool = False) -> Iterator[Piece]:
    """Yield the comments and literals of `text` in order. The text between them is code."""
    opening = _PTX_START if ptx else _CPP_START
    at = 0
    raw_strings = True
    while opened := opening.search(text, at):
        at = opened.end()
        match opened.lastgroup:
            case "block":
                closing = (_PTX_BLOCK_END if ptx else _CPP_BLOCK_END).search(text, at)
                at = closing.end() if closing else len(text)
                yield Piece("comment", opened.start(), at)
            case "line":
                at = _end(_PTX_LINE if ptx else _CPP_LINE, text, at)
                yield Piece("comment", opened.start(), at)
            case "raw" if raw_strings and (end := _raw_end(text, at)):
                at = end
                yield Piece("raw string", opened.start(), at)
            case "raw":
                raw_strings = False  # One search to the end of the text is enough.
            case "string":
                at = _end(_INSIDE['"'], text, at)
                yield Piece("string", opened.start(), at)
            case "character":
                at = _end(_INSIDE["'"], text, at)
                yield Piece("character", opened.start(), at)


def strip_comments(text: str, *, strings: bool = False) -> str:
    """Return C++ `text` with lines joined at backslashes and each comment replaced by a space.

    Literals also become spaces. With `strings`, only raw strings do.
    """
    parts: list[str] = []
    at = 0
    for kind, start, end in scan(text):
        parts.append(join_lines(text[at:start]))
        parts.append(text[start:end] if strings and kind == "string" else " ")
        at = end
    parts.append(join_lines(text[at:]))
    return "".join(parts)


def strip_unambiguous_comments(text: str, *, strings: bool = False) -> str:
    """Return `stripped(text)`, or the whole text where scanner and compiler may disagree on literals.

    Standards before C++11 have no raw strings, and a header name may contain what looks like a comment.
    """
    whole = join_lines(text)
    return whole if _DOUBTFUL.search(whole) else strip_comments(text, strings=strings)


def blank_comments(text: str) -> str:
    """Return PTX `text` with comments and strings replaced by spaces. Lines and columns stay."""
    parts: list[str] = []
    at = 0
    for _, start, end in scan(text, ptx=True):
        parts += text[at:start], _NOT_BREAK.sub(" ", text[start:end])
        at = end
    parts.append(text[at:])
    return "".join(parts)


def join_lines(text: str) -> str:
    """Return C++ `text` with lines joined where a backslash ends one."""
    return _SPLICES.sub("", text) if "\\" in text else text


def trigraph_variants(text: str) -> Iterator[str]:
    """Yield the text and, if it has trigraphs, the text with trigraphs replaced (before C++17)."""
    yield text
    if "??/" in text or "??=" in text:
        for trigraph, character in _TRIGRAPHS.items():
            text = text.replace(trigraph, character)
        yield text


def find_name(texts: Iterable[str], names: Collection[str]) -> str | None:
    """Return the first of `names` in the code of `texts`, also where `##` could compose it.

    A name in a comment or in a literal does not count.
    """
    words = _words(texts, names)
    return next((name for name in names if words and _can_compose(name, words)), None)


def find_pasted_name(texts: Iterable[str], names: Collection[str]) -> str | None:
    """Return the first of `names` that `##` could compose from words in the code of `texts`."""
    words = _words(texts, names).difference(names)
    return next((name for name in names if words and _can_compose(name, words)), None)


def _words(texts: Iterable[str], names: Collection[str]) -> set[str]:
    """Return the words in the code of `texts`, or none if they cannot compose any of `names`."""
    read = [reading for text in texts for reading in trigraph_variants(text)]
    rough = {word for reading in read for word in _WORD.findall(join_lines(reading))}
    if not any(_can_compose(name, rough) for name in names):  # The usual case.
        return set()
    return {word for reading in read for word in _WORD.findall(strip_unambiguous_comments(reading))}


def _can_compose(name: str, words: Collection[str]) -> bool:
    """Return True if `name` is one of `words`, or two or three of them joined.

    More pieces are not tried: single letters are words of ordinary programs.
    """
    parts = [word for word in words if word in name]
    reached = {0}
    for _ in range(_MAX_PIECES):
        reached = {at + len(part) for at in reached for part in parts if name.startswith(part, at)}
        if not reached:
            return False
        if len(name) in reached:
            return True
    return False


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Return the end of a match of a pattern that matches any text."""
    match = pattern.match(text, at)
    return match.end() if match else at


def _raw_end(text: str, at: int) -> int | None:
    """Return the end of the raw string that opens before `at`, or None when it is not closed."""
    opening = _RAW_OPENING.match(text, at)
    if opening is None:
        return None
    closing = text.find(f'){opening[1]}"', opening.end())
    return None if closing < 0 else closing + len(opening[1]) + 2


def split_commas(text: str) -> list[str]:
    """Return the parts of `text` between commas outside brackets, without surrounding white space."""
    parts = []
    depth = start = 0
    for separator in _SEPARATOR.finditer(text):
        char = separator[0]
        if char in "([{<":
            depth += 1
        elif char != ",":
            depth -= 1
        elif depth == 0:
            parts.append(text[start : separator.start()].strip())
            start = separator.end()
    if last := text[start:].strip():
        parts.append(last)
    return parts
