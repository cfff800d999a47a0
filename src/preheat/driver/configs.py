"""The structure with which a program describes a launch."""

from __future__ import annotations

import struct
from typing import NamedTuple

from preheat.devices.base import Dim3, Geometry
from preheat.driver.raw import I32, get, read

__all__ = ["LaunchConfig", "read_config"]

_CONFIG = struct.Struct("<7I4xQQI")
_ATTRIBUTE_SIZE = 72
_COOPERATIVE, _CLUSTER, _PROGRAMMATIC = 2, 4, 6


class LaunchConfig(NamedTuple):
    """The structure `CUlaunchConfig`, as far as it matters here."""

    geometry: Geometry
    stream: int


def read_config(address: int) -> LaunchConfig:
    """Return the structure at an address."""
    gx, gy, gz, bx, by, bz, shared, stream, attributes, count = _CONFIG.unpack(
        read(address, _CONFIG.size)
    )
    geometry = Geometry((gx, gy, gz), (bx, by, bz), shared)
    for at in range(attributes, attributes + _ATTRIBUTE_SIZE * count, _ATTRIBUTE_SIZE):
        kind = get(at, I32)
        if kind == _CLUSTER:
            cluster: Dim3 = struct.unpack("<3I", read(at + 8, 12))
            geometry = geometry._replace(cluster=cluster if all(cluster) else None)
        elif kind == _COOPERATIVE:
            geometry = geometry._replace(cooperative=bool(get(at + 8, I32)))
        elif kind == _PROGRAMMATIC:
            geometry = geometry._replace(programmatic=bool(get(at + 8, I32)))
    return LaunchConfig(geometry, stream)
