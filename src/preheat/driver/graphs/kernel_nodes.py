"""Kernel nodes: their parameters and attributes."""

from __future__ import annotations

import ctypes
import struct
from typing import TYPE_CHECKING

from preheat.devices.base import Dim3, Geometry
from preheat.driver.calls import CallError, entry
from preheat.driver.graphs.graph import Graph, Node, node_of
from preheat.driver.graphs.node_kinds import (
    ATTRIBUTES_CHANGED,
    FUNCTION_CHANGED,
    SUCCESS,
    Described,
    NodeKind,
)
from preheat.driver.launches import parameter_pointers, prepare_launch
from preheat.driver.modules import Function, function_of
from preheat.driver.raw import read, write
from preheat.driver.status import INVALID_VALUE, NOT_SUPPORTED
from preheat.driver.streams import Stream
from preheat.emulator.graph_work import KernelWork

if TYPE_CHECKING:
    from preheat.driver.driver import Driver

__all__ = ["KERNEL"]

_STRUCTURE = struct.Struct("<Q7I4xQQQQ")
_LEGACY = 1  # any stream: a graph decides in which one it is launched

_VALUE_SIZE = 64
_COOPERATIVE, _CLUSTER, _DEVICE_UPDATABLE = 2, 4, 13
#: The attributes of kernel nodes. Most of them change no result.
_ATTRIBUTES = {1, _COOPERATIVE, _CLUSTER, 5, 8, 9, 10, 11, _DEVICE_UPDATABLE, 14}


def _work(node: Node) -> KernelWork:
    if not isinstance(node.work, KernelWork):
        raise CallError(INVALID_VALUE)
    return node.work


def _describe(driver: Driver, function: Function, geometry: Geometry, values: list[bytes]) -> Described:
    stream = Stream(function.context, function.context.gpu.emulator.adopt(_LEGACY))
    work = KernelWork(prepare_launch(driver, function, geometry, stream), values)
    return Described(work, function.emulated.name)


def _read(driver: Driver, data: bytes, place: Graph | Node) -> Described:
    handle, *sizes, parameters, extra, kernel, context = _STRUCTURE.unpack(data)
    if not (handle or kernel) or (parameters and extra):
        raise CallError(INVALID_VALUE)
    if not handle:
        driver.context(context)
    function = function_of(driver, handle or kernel)
    gx, gy, gz, bx, by, bz, shared = sizes
    geometry = Geometry((gx, gy, gz), (bx, by, bz), shared)
    if isinstance(place, Node):  # Attributes are not among the parameters.
        old = _work(place).launch.geometry
        geometry = geometry._replace(cooperative=old.cooperative, cluster=old.cluster)
    pointers, kept = parameter_pointers(function, parameters, extra)
    values = [
        read(ctypes.c_uint64.from_address(pointers + 8 * at).value, parameter.size)
        for at, parameter in enumerate(function.emulated.parameters)
    ]
    del kept
    return _describe(driver, function, geometry, values)


def _write(driver: Driver, node: Node) -> bytes:
    """Return the structure of a node, whose pointers are valid until it changes."""
    launch, values = _work(node).launch, _work(node).values
    held = [ctypes.create_string_buffer(value, len(value)) for value in values]
    pointers = (ctypes.c_uint64 * max(len(held), 1))(*map(ctypes.addressof, held))
    node.kept = held, pointers
    geometry, function = launch.geometry, driver.kernels[launch]
    fields = (*geometry.grid, *geometry.block, geometry.shared)
    return _STRUCTURE.pack(function.handle, *fields, ctypes.addressof(pointers), 0, 0, 0)


def _refusal(driver: Driver, old: Node, new: Described) -> int:
    assert isinstance(new.work, KernelWork)
    before, after = _work(old).launch, new.work.launch
    if driver.kernels[before].context is not driver.kernels[after].context:
        return FUNCTION_CHANGED
    if before.geometry.cooperative != after.geometry.cooperative:
        return ATTRIBUTES_CHANGED
    return SUCCESS


KERNEL = NodeKind(0, _STRUCTURE.size, _read, _write, _refusal)


# Attributes


@entry("cuGraphKernelNodeGetAttribute")
def _attribute(driver: Driver, handle: int, which: int, out: int) -> None:
    node = node_of(driver, handle)
    geometry = _work(node).launch.geometry
    if which not in _ATTRIBUTES:
        raise CallError(INVALID_VALUE)
    value = node.attributes.get(which, b"")
    if which == _COOPERATIVE:
        value = struct.pack("<i", geometry.cooperative)
    elif which == _CLUSTER:
        value = struct.pack("<3I", *(geometry.cluster or (0, 0, 0)))
    write(out, value.ljust(_VALUE_SIZE, b"\0"))


@entry("cuGraphKernelNodeSetAttribute")
def _set_attribute(driver: Driver, handle: int, which: int, address: int) -> None:
    node = node_of(driver, handle)
    geometry = _work(node).launch.geometry
    if which not in _ATTRIBUTES:
        raise CallError(INVALID_VALUE)
    value = read(address, _VALUE_SIZE)
    first: int = struct.unpack("<i", value[:4])[0]
    if which == _DEVICE_UPDATABLE and first:
        raise CallError(NOT_SUPPORTED)
    if which == _COOPERATIVE:
        geometry = geometry._replace(cooperative=bool(first))
    elif which == _CLUSTER:
        cluster: Dim3 = struct.unpack("<3I", value[:12])
        if any(size % each for size, each in zip(geometry.grid, cluster, strict=True) if each):
            raise CallError(INVALID_VALUE)
        geometry = geometry._replace(cluster=cluster if all(cluster) else None)
    _change(driver, node, geometry)
    node.attributes[which] = value


@entry("cuGraphKernelNodeCopyAttributes")
def _copy_attributes(driver: Driver, target: int, source: int) -> None:
    to, of = node_of(driver, target), node_of(driver, source)
    ours, theirs = _work(to).launch, _work(of).launch
    if driver.kernels[ours].context is not driver.kernels[theirs].context:
        raise CallError(INVALID_VALUE)
    geometry = ours.geometry._replace(
        cooperative=theirs.geometry.cooperative, cluster=theirs.geometry.cluster
    )
    _change(driver, to, geometry)
    to.attributes = dict(of.attributes)


def _change(driver: Driver, node: Node, geometry: Geometry) -> None:
    """Launch the kernel of a node otherwise; `CallError` if a GPU would refuse that launch."""
    work = _work(node)
    node.work = _describe(driver, driver.kernels[work.launch], geometry, work.values).work
