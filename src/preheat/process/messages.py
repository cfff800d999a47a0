"""Parts of error messages: diagnostics, source lines, suggestions and short reprs."""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from preheat.process.lazy import LazyModule

if TYPE_CHECKING:
    import difflib
else:
    difflib = LazyModule("difflib")  # It takes a millisecond that only an error needs.

__all__ = [
    "Diagnostic",
    "LinkedSymbol",
    "SourceLine",
    "count",
    "did_you_mean",
    "kernel_hint",
    "printable",
    "sealed_message",
    "short_repr",
    "source_lines",
    "symbol_lines",
]


class Diagnostic(NamedTuple):
    """One message in the log of a compiler.

    Attributes:
        file: The file.
        line: The line, or None.
        severity: `"error"`, `"warning"` or another word of the compiler.
        message: The text.
        source: The line of the source, if the log has it.
        column: The column of the caret under that line, counted from 1.
        context: Notes and template instances.

    Examples:
        >>> try:
        ...     preheat.compile("__global__ void k() { undefined(); }", "sm_90", label="k.cu")
        ... except preheat.CompileError as error:
        ...     print(error.rows[0].line, error.rows[0].message)
        1 identifier "undefined" is undefined
    """

    file: str
    line: int | None
    severity: str
    message: str
    source: str | None = None  # the source line, where the log has it
    column: int | None = None  # of the caret under that line, counted from 1
    context: tuple[str, ...] = ()  # notes and template instances

    def __str__(self) -> str:
        where = ":".join(str(p) for p in (self.file, self.line, self.column) if p is not None)
        lines = [f"{where}: {self.severity}: {self.message}"]
        if self.source is not None:
            lines.append(self.source)
            if self.column is not None:
                lead = ("\t" if c == "\t" else " " for c in self.source[: self.column - 1])
                lines.append("".join((*lead, "^")))
        return "\n    ".join((*lines, *self.context))


class SourceLine(NamedTuple):
    """A line of CUDA source. `text` is None when the file is missing or has changed."""

    file: str
    line: int
    text: str | None

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class LinkedSymbol(NamedTuple):
    """A symbol that a link could not resolve, or that several parts define.

    Attributes:
        name: Its name in the code.
        title: Its C++ name.
        parts: The labels of the parts that use an undefined symbol, or that define a symbol twice.
        mentioned: The labels of the parts whose source contains the name, if LTO-IR shows nothing more
            exact.
        similar: The symbols of the same unqualified name that parts define, each with the label of its
            part.

    Examples:
        >>> KERNEL = '__device__ int twice(int); extern "C" __global__ void k(int* x) {*x = twice(7);}'
        >>> try:
        ...     preheat.link([KERNEL], "sm_90")
        ... except preheat.LinkError as error:
        ...     print(error.undefined[0].title)
        twice(int)
    """

    name: str
    title: str
    parts: tuple[str, ...] = ()
    mentioned: tuple[str, ...] = ()
    similar: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.title if self.title == self.name else f"{self.title} [{self.name}]"


def source_lines(places: Sequence[SourceLine], limit: int) -> Iterator[str]:
    """Yield the text of a source line and the calls around it, at most `limit`."""
    for depth, place in enumerate(places[:limit]):
        parts = (f"called from {place}" if depth else "", place.text)
        if text := ": ".join(filter(None, parts)):
            yield text
    if len(places) > limit:
        yield f"… and {len(places) - limit} more calls in .source"


def count(number: int, noun: str) -> str:
    """Format a count: `1 entry`, `2 entries`, `3 files`, `4 launches`."""
    plural = noun[:-1] + "ies" if noun.endswith(("ry", "ty")) else noun + "s"
    if noun.endswith(("ch", "ss")):
        plural = noun + "es"
    return f"{number:,} {noun if number == 1 else plural}"


def sealed_message(
    caller: str,
    what: str,
    reason: str,
    evidence: Iterable[str],
    nearest: str | None,
    differences: Collection[str],
) -> str:
    """Return the message of a `SealedError`: a sentence, and lines of evidence."""
    kind, _, why = reason.partition(": ")  # The word before the colon is for counters and events.
    verb = "measured" if kind == "unmeasured" else "compiled"
    lines = [f"{caller}: {what} cannot be {verb} in this sealed process: {why or reason}", *evidence]
    if nearest is not None:
        lines.append(f"most similar: {nearest}{'; the request differs in' if differences else ''}")
    return "\n  ".join([*lines, *(f"  {line}" for line in differences)])


def symbol_lines(
    undefined: Iterable[LinkedSymbol], multiple: Iterable[LinkedSymbol], limit: int
) -> list[str]:
    """Return the lines of a `LinkError` about its symbols, at most `limit` and one about the rest."""
    lines = [line for symbol in undefined for line in _undefined_lines(symbol)]
    lines += map(_multiple_line, multiple)
    rest = len(lines) - limit
    return lines if rest <= 0 else [*lines[:limit], f"  … and {rest} more; error.log has all"]


def _undefined_lines(symbol: LinkedSymbol) -> Iterator[str]:
    where = f", used by {', '.join(symbol.parts)}" if symbol.parts else _mentions(symbol)
    yield f"  undefined: {symbol}{where}"
    yield from (f"    {similar}" for similar in symbol.similar)


def _multiple_line(symbol: LinkedSymbol) -> str:
    if symbol.parts:
        return f"  defined in {' and '.join(symbol.parts)}: {symbol}"
    return f"  defined twice: {symbol}{_mentions(symbol)}"


def _mentions(symbol: LinkedSymbol) -> str:
    return f", mentioned in {', '.join(symbol.mentioned)}" if symbol.mentioned else ""


def printable(text: str, *, keep: str = "") -> str:
    """Return a text with unprintable characters escaped, except those in `keep`.

    A text from a file or a server then cannot control a terminal.
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or each in keep else ascii(each)[1:-1] for each in text)


def did_you_mean(name: str, known: Iterable[str]) -> str | None:
    """Return a hint with the closest known name, or None when no name is close."""
    close = _closest(name, known)
    return None if close is None else f"did you mean {close!r}?"


def _closest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most similar to `name`, or None when no name is close."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)), None)


def kernel_hint(
    name: str, known: Iterable[str], templates: Iterable[str], *, rejected: bool
) -> str | None:
    """Return a hint with the name to use instead of `name`."""
    base, angle, rest = name.removeprefix("&").partition("<")
    named = {template.partition("<")[0]: template for template in templates}
    if base in named and angle and not rejected:
        return f"an instance is named when the program is compiled: names=[{name!r}]"
    if base in named:
        example = _instance(named[base])
        such_as = "" if example is None else f", such as {example!r}"
        return f"name an instance of the template {named[base]}{such_as}"
    candidates = (*known, *named)
    spelled = {one.partition("<")[0].rpartition("::")[2]: one for one in reversed(candidates)}
    spelled |= {one: one for one in candidates}
    close = _closest(name, spelled) or _closest(base, spelled)
    if close is None:
        return None
    meant = spelled[close]
    if meant in named:
        meant = f"{meant}{angle}{rest}" if angle else named[meant]
    return f"did you mean {meant!r}?"


_TYPE_PARAMETERS = ("class", "typename")
_NUMBER_PARAMETERS = ("int", "unsigned", "long", "short", "char", "bool", "size_t", "auto")


def _instance(template: str) -> str | None:
    """Return `tk<float, 1>` for `tk<class T, int N>`, or None for parameters of other kinds."""
    base, _, parameters = template.removesuffix(">").partition("<")
    arguments = []
    for parameter in parameters.split(", "):
        word = parameter.partition(" ")[0].removesuffix("...")
        if word not in (*_TYPE_PARAMETERS, *_NUMBER_PARAMETERS):
            return None
        arguments.append("float" if word in _TYPE_PARAMETERS else "1")
    return f"{base}<{', '.join(arguments)}>"


class _ShortRepr(reprlib.Repr):
    """Makes reprs that fit on a line."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = 60
        self.fillvalue = "…"

    def repr_int(self, value: int, level: int) -> str:
        if value.bit_length() > 256:  # Python refuses to convert very long integers to text.
            return f"an integer of {value.bit_length()} bits"
        return super().repr_int(value, level)


_short_repr = _ShortRepr()


def short_repr(value: object) -> str:
    """Return the repr of a value for an error message, shortened if it is long."""
    return _short_repr.repr(value)
