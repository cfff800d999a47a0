"""Built-in functions: those that `printf`, `assert`, `malloc` and `free` call."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from preheat.emulator import access
from preheat.emulator.addresses import Addresses, resolve_generic, to_int64
from preheat.emulator.memory import Violation, align_up, positions_in

if TYPE_CHECKING:
    from preheat.emulator.generate import CompiledBlock
    from preheat.emulator.group import Group

__all__ = ["FUNCTIONS", "Builtin"]

_SPECIFIER = re.compile(
    rb"%([-+ #0]*)(\*|\d*)(?:\.(\*|\d*))?(hh|h|ll|l|j|z|t|L)?([diouxXcsfFeEgGaAp%])"
)
_SIZES = {b"ll": 8, b"l": 8, b"j": 8, b"z": 8, b"t": 8}
_MAX_STRING = 1 << 16
_HEX_DIGITS = 13  # Of a float64, after the point.


class Builtin(NamedTuple):
    """The implementation of a function for a group, and the sizes of its arguments."""

    run: Callable[[Group, CompiledBlock, list[int]], None]
    sizes: tuple[int, ...]


def _printf(group: Group, call: CompiledBlock, arguments: list[int]) -> None:
    """`vprintf`: print for each thread, in the order of the threads. Return the number of arguments."""
    formats, lists = (_argument(group, at, 8) for at in arguments)
    counts = np.zeros(group.count, np.int32)
    for position, (pattern, values) in enumerate(zip(formats, lists, strict=True)):
        chosen = np.array([position])
        thread = group.subgroup(chosen)
        with positions_in(chosen):
            text = _string(thread, int(pattern), call.site)
            line, counts[position] = _format(thread, text, int(values), call.site)
        sys.stdout.write(line.decode(errors="replace"))
    _return(group, call, counts)


def _format(thread: Group, pattern: bytes, values: int, site: int) -> tuple[bytes, int]:
    """Return the text of a format with its arguments, and how many arguments it used."""
    out = []
    at = values
    end = 0
    count = 0
    for match in _SPECIFIER.finditer(pattern):
        out.append(pattern[end : match.start()])
        end = match.end()
        flags, *sizes, length, kind = match.groups()
        if kind == b"%":
            out.append(b"%")
            continue
        for i, size in enumerate(sizes):
            if size == b"*":
                at, star = _next_argument(thread, at, 4, "i4", site)
                sizes[i] = None if i and star < 0 else b"%d" % star
                count += 1
        bytes_ = 8 if kind in b"sfFeEgGaAp" else _SIZES.get(length, 4)
        code = "f8" if kind in b"fFeEgGaA" else f"{'i' if kind in b'dic' else 'u'}{bytes_}"
        at, value = _next_argument(thread, at, bytes_, code, site)
        count += 1
        if kind == b"s":
            value = _string(thread, value, site) if value else b"(null)"
        out.append(_format_argument(flags + sizes[0], sizes[1], kind, value))
    return b"".join([*out, pattern[end:]]), count


def _format_argument(flags: bytes, precision: bytes | None, kind: bytes, value: Any) -> bytes:
    """Return one argument as C formats it. `flags` includes the width."""
    if kind == b"p":
        flags = b"#" + flags
        kind = b"x"
    elif kind == b"c":
        value &= 0xFF
    elif kind in b"aA":
        value = _hexadecimal(value, precision, kind)
        precision = None
        kind = b"s"
    elif kind == b"o" and b"#" in flags:
        flags = flags.replace(b"#", b"")
        least = len(b"%o" % value) + (value != 0)
        precision = b"%d" % max(int(precision or 0), least)
    dot = b"" if precision is None else b"." + precision
    text: bytes = (b"%" + flags + dot + {b"i": b"d", b"u": b"d"}.get(kind, kind)) % value
    return text


def _hexadecimal(value: float, precision: bytes | None, kind: bytes) -> bytes:
    """`%a`: return all non-zero digits, or as many as `precision` says."""
    text = value.hex()
    if math.isfinite(value):
        least = int(precision or 0)
        if precision is not None:
            fraction, exponent = math.frexp(value)
            unit = 2.0 * 16 ** min(least, _HEX_DIGITS)
            text = math.ldexp(round(fraction * unit) / unit, exponent).hex()
        digits, _, power = text.partition("p")
        head, _, tail = digits.partition(".")
        tail = tail.rstrip("0").ljust(least, "0")
        text = f"{head}.{tail}p{power}" if tail else f"{head}p{power}"
    return (text.upper() if kind == b"A" else text).encode()


def _next_argument(thread: Group, at: int, size: int, code: str, site: int) -> tuple[int, Any]:
    """Return the next argument of a list, and where the following one begins."""
    at = align_up(at, size)
    addresses = _resolve(thread, at)
    value = access.load(thread, addresses, 0, np.dtype(code), site)
    return at + size, np.atleast_1d(value)[0].item()


def _resolve(thread: Group, address: int) -> Addresses:
    return resolve_generic(thread, np.array([to_int64(address)]))


def _string(thread: Group, address: int, site: int) -> bytes:
    addresses = _resolve(thread, address)
    byte = np.dtype(np.uint8)
    out = bytearray()
    while len(out) < _MAX_STRING and (
        char := int(np.atleast_1d(access.load(thread, addresses, len(out), byte, site))[0])
    ):
        out.append(char)
    return bytes(out)


def _assertfail(group: Group, call: CompiledBlock, arguments: list[int]) -> None:
    """`__assertfail`: raise the failure of the first thread."""
    thread = group.subgroup(np.array([0]))
    message, file, line, function, _ = (
        int(_argument(thread, at, size)[0])
        for at, size in zip(arguments, FUNCTIONS["__assertfail"].sizes, strict=True)
    )
    text, where, name = (
        _string(thread, address, call.site).decode(errors="replace")
        for address in (message, file, function)
    )
    raise Violation(f"assertion {text!r} failed in {name}, {where}:{line}", call.site)


def _malloc(group: Group, call: CompiledBlock, arguments: list[int]) -> None:
    """`malloc`: return the address of new memory for each thread, or null."""
    heap = group.wave.program.heap
    sizes = _argument(group, arguments[0], 8).tolist()
    _return(group, call, np.array([heap.allocate(size) for size in sizes], np.uint64))


def _free(group: Group, call: CompiledBlock, arguments: list[int]) -> None:
    """`free`: free memory that `malloc` returned. Null is allowed."""
    for position, address in enumerate(_argument(group, arguments[0], 8).tolist()):
        try:
            if address:
                group.wave.program.heap.free(address)
        except KeyError:
            freed = group.wave.memory.was_freed(address)
            why = "is freed already" if freed else "no malloc returned"
            raise Violation(f"frees {address:#x}, which {why}", call.site, position, address) from None


def _return(group: Group, call: CompiledBlock, values: np.ndarray[Any, Any]) -> None:
    """Store each thread's result, if the call uses it."""
    for name in call.returns:
        at = group.frame.base + group.frame.code.local_offsets[name]
        size = values.itemsize
        group.wave.local[_lanes(group), at : at + size] = values.view(np.uint8).reshape(-1, size)


def _argument(group: Group, offset: int, size: int) -> np.ndarray[Any, Any]:
    """Return an argument of each thread from local memory."""
    rows = np.ascontiguousarray(group.wave.local[_lanes(group), offset : offset + size])
    return rows.view(f"u{size}")[:, 0]


def _lanes(group: Group) -> Any:
    return slice(None) if group.lanes is None else group.lanes


FUNCTIONS = {
    "vprintf": Builtin(_printf, (8, 8)),
    "__assertfail": Builtin(_assertfail, (8, 8, 4, 8, 8)),
    "malloc": Builtin(_malloc, (8,)),
    "free": Builtin(_free, (8,)),
}
