"""Emit the instructions that fetch from textures, and load from and store to surfaces."""

from __future__ import annotations

import re

import numpy as np

from preheat.emulator.decode import CompoundAddress, Op, Operand, Register, Vector
from preheat.emulator.variant import TYPES
from preheat.emulator.writer import U64, DType, Writer

__all__ = ["emit_fetch", "emit_surface_load", "emit_surface_store"]

_GEOMETRY = r"(?P<geometry>1d|2d|3d|a1d|a2d)"
_FETCH = re.compile(
    rf"tex(?P<level>\.base|\.level)?\.{_GEOMETRY}\.v4\.(?P<type>f32|u32|s32)\.(?P<coordinate>f32|s32)"
)
_SURFACE = re.compile(
    rf"(?:suld|sust)\.b\.{_GEOMETRY}(?:\.(?:ca|cg|cs|cv|wb|wt))?(?P<vector>\.v2|\.v4)?"
    r"\.(?P<type>b8|b16|b32|b64)\.(?P<outside>trap|clamp|zero)"
)
#: How many coordinates each geometry has, and how many more an instruction may give without a meaning.
_COORDINATES = {"1d": (1, 0), "2d": (2, 0), "3d": (3, 1), "a1d": (2, 0), "a2d": (3, 1)}
_S32 = np.dtype(np.int32)
_LEVEL = np.dtype(np.float32)


def emit_fetch(w: Writer, op: Op) -> None:
    """Emit `tex` without gradients."""
    found = _FETCH.fullmatch(op.opcode)
    leveled = found is not None and found["level"] == ".level"
    if found is None or len(op.operands) != 2 + leveled:
        raise w.unsupported()
    target, source = op.operands[:2]
    if not isinstance(target, Vector) or len(target.items) != 4:
        raise w.unsupported()
    handle, places = _place(w, source, found["geometry"], TYPES[found["coordinate"]])
    level = w.read(op.operands[2], _LEVEL) if leveled else w.constant(np.float32(0))
    layered = found["geometry"].startswith("a")
    dtype = TYPES[found["type"]]
    where = f"G, {w.site()}, {w.constant(dtype)}, {layered}"
    call = f"fetch({where}, {handle}, {level}, {', '.join(places)})"
    w.write_results(target.items, (dtype,) * 4, call)


def emit_surface_load(w: Writer, op: Op) -> None:
    """Emit `suld`."""
    found = _surface_form(w, op)
    target, source = op.operands
    items = _elements(w, found, target)
    handle, places = _place(w, source, found["geometry"], _S32)
    dtype = TYPES[found["type"]]
    layered = found["geometry"].startswith("a")
    where = f"G, {w.site()}, {w.constant(dtype)}, {len(items)}, {found['outside']!r}, {layered}"
    call = f"load_surface({where}, {handle}, {', '.join(places)})"
    # One result is not assigned from a list of them.
    w.write_results(items, (dtype,) * len(items), f"{call}[0]" if len(items) == 1 else call)


def emit_surface_store(w: Writer, op: Op) -> None:
    """Emit `sust` of bytes."""
    found = _surface_form(w, op)
    place, source = op.operands
    items = _elements(w, found, source)
    handle, places = _place(w, place, found["geometry"], _S32)
    dtype = TYPES[found["type"]]
    layered = found["geometry"].startswith("a")
    values = [w.read(item, dtype) for item in items]
    where = f"G, {w.site()}, {w.constant(dtype)}, {found['outside']!r}, {layered}, {len(places)}"
    w.lines.append(f"store_surface({where}, {handle}, {', '.join((*places, *values))})")


def _surface_form(w: Writer, op: Op) -> re.Match[str]:
    found = _SURFACE.fullmatch(op.opcode)
    if found is None or len(op.operands) != 2:
        raise w.unsupported()
    return found


def _elements(w: Writer, found: re.Match[str], operand: Operand | None) -> tuple[Operand | None, ...]:
    """Return the registers of an access."""
    count = int((found["vector"] or ".v1")[2:])
    items = operand.items if isinstance(operand, Vector) else (operand,)
    if len(items) != count:
        raise w.unsupported()
    return items


def _place(w: Writer, operand: Operand | None, geometry: str, dtype: DType) -> tuple[str, list[str]]:
    """Return expressions for the handle and the coordinates of `[handle, {coordinates}]`."""
    if not isinstance(operand, CompoundAddress) or len(operand.items) != 2:
        raise w.unsupported()
    handle, given = operand.items
    if not isinstance(handle, Register):  # A variable of a type such as .texref.
        raise w.unsupported()
    items = given.items if isinstance(given, Vector) else (given,)
    count, more = _COORDINATES[geometry]
    if not count <= len(items) <= count + more:
        raise w.unsupported()
    layered = geometry.startswith("a")
    kinds = [_S32 if layered and at == 0 else dtype for at in range(count)]
    places = [w.read(item, kind) for item, kind in zip(items[:count], kinds, strict=True)]
    return w.read(handle, U64), places
