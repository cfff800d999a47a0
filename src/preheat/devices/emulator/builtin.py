"""Functions that the machine provides: what `printf` and `assert` come down to."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from preheat.devices.emulator import access
from preheat.devices.emulator.memory import Violation

if TYPE_CHECKING:
    from preheat.devices.emulator.generate import Step
    from preheat.devices.emulator.group import Group

__all__ = ["FUNCTIONS"]

_SPECIFIER = re.compile(
    rb"%([-+ #0]*)(\*|\d*)(?:\.(\*|\d*))?(hh|h|ll|l|j|z|t|L)?([diouxXcsfFeEgGaAp%])"
)
_SIZES = {b"ll": 8, b"l": 8, b"j": 8, b"z": 8, b"t": 8}
_LONGEST = 1 << 16


def _printf(group: Group, step: Step, arguments: list[int]) -> None:
    """`vprintf`: what each thread prints, in the order of the threads."""
    formats, lists = (_argument(group, at, 8) for at in arguments)
    for position, (pattern, values) in enumerate(zip(formats, lists, strict=True)):
        one = group.part(np.array([position]))
        text = _string(one, int(pattern), step.site)
        sys.stdout.write(_formatted(one, text, int(values), step.site).decode(errors="replace"))


def _formatted(one: Group, pattern: bytes, values: int, site: int) -> bytes:
    out, at, end = [], values, 0
    for match in _SPECIFIER.finditer(pattern):
        out.append(pattern[end : match.start()])
        end = match.end()
        flags, width, precision, length, kind = match.groups()
        if kind == b"%":
            out.append(b"%")
            continue
        stars = []
        for part in (width, precision):
            if part == b"*":
                at, star = _take(one, at, 4, "i4", site)
                stars.append(star)
        size = 8 if kind in b"sfFeEgGaAp" else _SIZES.get(length, 4)
        code = "f8" if kind in b"fFeEgGaA" else f"{'i' if kind in b'dic' else 'u'}{size}"
        at, value = _take(one, at, size, code, site)
        out.append(
            _one(
                flags,
                width,
                precision,
                kind,
                stars,
                _string(one, value, site) if kind == b"s" else value,
            )
        )
    return b"".join([*out, pattern[end:]])


def _one(
    flags: bytes, width: bytes, precision: bytes | None, kind: bytes, stars: list[Any], value: Any
) -> bytes:
    if kind == b"p":
        flags, kind = b"#", b"x"
    elif kind in b"aA":
        value, kind = value.hex().encode(), b"s"
    head = b"%" + flags + width + (b"" if precision is None else b"." + precision)
    return (head + {b"i": b"d", b"u": b"d"}.get(kind, kind)) % (*stars, value)


def _take(one: Group, at: int, size: int, code: str, site: int) -> tuple[int, Any]:
    """The next argument of a list, and where the one behind it begins."""
    at = -(-at // size) * size
    place = access.place_generic(one, np.array([at]))
    value = access.load(one, place, 0, np.dtype(code), site)
    return at + size, np.atleast_1d(value)[0].item()


def _string(one: Group, address: int, site: int) -> bytes:
    place, byte = access.place_generic(one, np.array([address])), np.dtype(np.uint8)
    out = bytearray()
    while len(out) < _LONGEST and (
        char := int(np.atleast_1d(access.load(one, place, len(out), byte, site))[0])
    ):
        out.append(char)
    return bytes(out)


def _assertfail(group: Group, step: Step, arguments: list[int]) -> None:
    """`__assertfail`: the first thread that failed names what did."""
    one = group.part(np.array([0]))
    sizes = (8, 8, 4, 8)
    message, file, line, function = (
        int(_argument(one, at, size)[0]) for at, size in zip(arguments, sizes, strict=False)
    )
    text, where, name = (
        _string(one, address, step.site).decode(errors="replace")
        for address in (message, file, function)
    )
    raise Violation(f"assertion {text!r} failed in {name}, {where}:{line}", step.site)


def _argument(group: Group, offset: int, size: int) -> np.ndarray[Any, Any]:
    """An argument of each thread, from local memory."""
    lanes: Any = slice(None) if group.lanes is None else group.lanes
    rows = np.ascontiguousarray(group.wave.local[lanes, offset : offset + size])
    return rows.view(f"u{size}")[:, 0]


FUNCTIONS: dict[str, Callable[[Group, Step, list[int]], None]] = {
    "vprintf": _printf,
    "__assertfail": _assertfail,
}
