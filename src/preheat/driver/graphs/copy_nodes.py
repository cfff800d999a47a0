"""Nodes that copy or fill memory."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from preheat.driver.calls import CallError
from preheat.driver.copies import BOX_3D, IN_ARRAY, Copy, Fill, Side, box_of, fill_of
from preheat.driver.graphs.graph import Graph, Node
from preheat.driver.graphs.node_kinds import PARAMETERS_CHANGED, SUCCESS, Described, NodeKind
from preheat.driver.status import INVALID_VALUE

if TYPE_CHECKING:
    from preheat.driver.contexts import Context
    from preheat.driver.driver import Driver

__all__ = ["COPY", "FILL", "is_plain_copy"]

_COPY = struct.Struct(f"<iiQ{BOX_3D.size}s")
_FILL = struct.Struct("<QQIIQQQ")
_ELEMENT_SIZES = (1, 2, 4)
_ON_HOST, _ON_DEVICE = 1, 2


def _mapping(driver: Driver, side: Side) -> Context | None:
    """Return what an executable cannot change about a side: the context of its memory, or the host."""
    found = driver.memory.find(side.address)
    return None if found is None or found.on_host else found.context


def is_plain_copy(work: object) -> bool:
    """Return whether work is a copy of one row."""
    return isinstance(work, Copy) and work.height == work.depth == 1


# Copies


def _read_copy(driver: Driver, data: bytes, place: Graph | Node) -> Described:
    flags, reserved, context, parameters = _COPY.unpack(data)
    if flags or reserved:
        raise CallError(INVALID_VALUE)
    if context or not isinstance(place, Node):
        driver.context(context)
    copy = box_of(driver, parameters, depth=True)
    if not copy.width * copy.height * copy.depth:
        raise CallError(INVALID_VALUE)
    return Described(copy, parameters=data)


def _write_copy(driver: Driver, node: Node) -> bytes:
    """Return what the program gave, or what describes a copy that was captured."""
    if not isinstance(node.work, Copy):
        raise CallError(INVALID_VALUE)
    copy = node.work
    sides = (*_fields(driver, copy, copy.source), *_fields(driver, copy, copy.target))
    box = BOX_3D.pack(*sides, copy.width, copy.height, copy.depth)
    return node.parameters or _COPY.pack(0, 0, driver.threads.current(), box)


def _fields(driver: Driver, copy: Copy, side: Side) -> tuple[int, ...]:
    if side.array is not None:
        x, y, z = side.start_in_array()
        return (x, y, z, 0, IN_ARRAY, 0, 0, side.array.handle, 0, 0, 0)
    on_host = _mapping(driver, side) is None
    pitch = side.pitch or copy.width
    height = (side.layer or pitch * copy.height) // pitch
    places = (side.address, 0) if on_host else (0, side.address)
    return (0, 0, 0, 0, _ON_HOST if on_host else _ON_DEVICE, *places, 0, 0, pitch, height)


def _refuse_copy(driver: Driver, old: Node, new: Described) -> int:
    before, after = old.work, new.work
    assert isinstance(before, Copy)
    assert isinstance(after, Copy)
    same = all(
        _mapping(driver, mine) is _mapping(driver, other)
        for mine, other in ((before.source, after.source), (before.target, after.target))
    )
    return SUCCESS if same else PARAMETERS_CHANGED


COPY = NodeKind(1, _COPY.size, _read_copy, _write_copy, _refuse_copy)


# Fills


def _read_fill(driver: Driver, data: bytes, place: Graph | Node) -> Described:
    target, pitch, value, size, width, height, context = _FILL.unpack(data)
    if size not in _ELEMENT_SIZES or not width or not height:
        raise CallError(INVALID_VALUE)
    if context or not isinstance(place, Node):
        driver.context(context)
    return Described(fill_of(driver, target, value, size, width, height, pitch))


def _write_fill(driver: Driver, node: Node) -> bytes:
    if not isinstance(node.work, Fill):
        raise CallError(INVALID_VALUE)
    fill, to = node.work, node.work.target
    value, size = int.from_bytes(fill.value, "little"), len(fill.value)
    context = _mapping(driver, to)
    handle = driver.threads.current() if context is None else context.handle
    return _FILL.pack(to.address, to.pitch, value, size, fill.count, fill.height, handle)


def _refuse_fill(driver: Driver, old: Node, new: Described) -> int:
    before, after = old.work, new.work
    assert isinstance(before, Fill)
    assert isinstance(after, Fill)
    if _mapping(driver, before.target) is not _mapping(driver, after.target):
        return PARAMETERS_CHANGED
    if before.height == after.height == 1:
        return SUCCESS
    same = _shape(before) == _shape(after)
    return SUCCESS if same else PARAMETERS_CHANGED


def _shape(fill: Fill) -> tuple[int, ...]:
    return len(fill.value), fill.count, fill.height, fill.target.pitch


FILL = NodeKind(2, _FILL.size, _read_fill, _write_fill, _refuse_fill)
