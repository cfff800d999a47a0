"""The parameters of kernel nodes."""

from __future__ import annotations

import ctypes
import struct
from typing import TYPE_CHECKING

from preheat.devices.emulator.launch import KernelWork
from preheat.driver.calls import CallError, entry
from preheat.driver.graphs.graph import Node, node_of
from preheat.driver.raw import write
from preheat.driver.status import INVALID_VALUE

if TYPE_CHECKING:
    from preheat.driver.driver import Driver

__all__: list[str] = []

#: The structure in its first version. The second one has a kernel and a context more.
_PARAMETERS = struct.Struct("<Q7I4xQQ")
_MORE = struct.Struct("<QQ")


def _work(node: Node) -> KernelWork:
    if not isinstance(node.work, KernelWork):
        raise CallError(INVALID_VALUE)
    return node.work


def _told(node: Node) -> int:
    """Return the address of pointers to the parameters, which are valid as long as the node."""
    values = [ctypes.create_string_buffer(value, len(value)) for value in _work(node).values]
    pointers = (ctypes.c_uint64 * max(len(values), 1))(*map(ctypes.addressof, values))
    node.kept = values, pointers
    return ctypes.addressof(pointers)


@entry("cuGraphKernelNodeGetParams", 10000)
def _parameters(driver: Driver, handle: int, out: int) -> None:
    node = node_of(driver, handle)
    launch = _work(node).launch
    geometry = launch.geometry
    function = driver.kernels[launch]
    fields = (*geometry.grid, *geometry.block, geometry.shared)
    write(out, _PARAMETERS.pack(function.handle, *fields, _told(node), 0))


@entry("cuGraphKernelNodeGetParams", 12000)
def _parameters_2(driver: Driver, handle: int, out: int) -> None:
    _parameters(driver, handle, out)
    write(out + _PARAMETERS.size, _MORE.pack(0, 0))
