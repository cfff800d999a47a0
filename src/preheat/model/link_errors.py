"""The error of a link, and the symbols that it is about."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from preheat.errors import CompileError

__all__ = ["LinkError", "LinkedSymbol"]


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


class LinkError(CompileError):
    """The linker rejected the parts of a program.

    Add the part that defines a missing symbol, or define a symbol in one part only.

    Attributes:
        undefined: The symbols that no part defines, as `LinkedSymbol` objects.
        multiple: The symbols that several parts define.
        log: The output of the linker.
    """

    def __init__(
        self,
        program: str,
        arch: str,
        options: Sequence[str],
        log: str,
        *,
        undefined: Sequence[LinkedSymbol] = (),
        multiple: Sequence[LinkedSymbol] = (),
    ) -> None:
        self.undefined = tuple(undefined)
        self.multiple = tuple(multiple)
        super().__init__(program, arch, options, log)
        with_options = f" with {' '.join(options)}" if options else ""
        self.args = (f"{program} does not link for {arch}{with_options}\n{self._evidence()}",)
        if any(symbol.similar for symbol in undefined):
            self.hint = 'compare the types and namespaces of the two, and whether both are extern "C"'
        elif undefined:
            self.hint = "add the part that defines it"
        elif multiple:
            self.hint = "define it in one part and declare it extern in the others, or make it static"

    def _evidence(self) -> str:
        lines = [line for symbol in self.undefined for line in _about_undefined(symbol)]
        lines += map(_about_multiple, self.multiple)
        rest = len(lines) - self.SHOWN
        shown = lines[: self.SHOWN] + ([f"  … and {rest} more; error.log has all"] if rest > 0 else [])
        return "\n".join(shown) or self.log.rstrip() or "the linker gave no reason"


def _about_undefined(symbol: LinkedSymbol) -> Iterator[str]:
    where = f", used by {', '.join(symbol.parts)}" if symbol.parts else _mentioned(symbol)
    yield f"  undefined: {symbol}{where}"
    yield from (f"    {similar}" for similar in symbol.similar)


def _about_multiple(symbol: LinkedSymbol) -> str:
    if symbol.parts:
        return f"  defined in {' and '.join(symbol.parts)}: {symbol}"
    return f"  defined twice: {symbol}{_mentioned(symbol)}"


def _mentioned(symbol: LinkedSymbol) -> str:
    return f", mentioned in {', '.join(symbol.mentioned)}" if symbol.mentioned else ""
