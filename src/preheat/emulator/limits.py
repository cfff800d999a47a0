"""The limits of GPUs, by compute capability, as in the CUDA programming guide."""

from __future__ import annotations

from typing import NamedTuple

from preheat.devices import base
from preheat.model.arch import Arch

__all__ = ["Multiprocessor", "launch_limits", "multiprocessor"]

_CLUSTER = 16  # Blocks. A GPU allows 8, and 16 for functions that opt in, as launches do by themselves.


class Multiprocessor(NamedTuple):
    """The resources that the resident blocks of a multiprocessor share. Sizes are in bytes."""

    shared: int
    threads: int
    blocks: int
    reserved: int = 1 << 10  # Shared memory of each block that CUDA itself uses.
    registers: int = 1 << 16


# An architecture that is not listed has the limits of the last one before it.
_MULTIPROCESSORS = {
    (5, 0): Multiprocessor(64 << 10, 2048, 32, reserved=0),
    (7, 0): Multiprocessor(96 << 10, 2048, 32, reserved=0),
    (7, 5): Multiprocessor(64 << 10, 1024, 16, reserved=0),
    (8, 0): Multiprocessor(164 << 10, 2048, 32),
    (8, 6): Multiprocessor(100 << 10, 1536, 16),
    (8, 7): Multiprocessor(164 << 10, 1536, 16),
    (8, 8): Multiprocessor(100 << 10, 1536, 16),
    (8, 9): Multiprocessor(100 << 10, 1536, 24),
    (9, 0): Multiprocessor(228 << 10, 2048, 32),
    (10, 0): Multiprocessor(228 << 10, 2048, 32),
    (10, 1): Multiprocessor(228 << 10, 1536, 24),  # The name of 11.0 in CUDA 12.
    (10, 3): Multiprocessor(228 << 10, 2048, 32),
    (11, 0): Multiprocessor(228 << 10, 1536, 24),
    (12, 0): Multiprocessor(100 << 10, 1536, 24),
}


def multiprocessor(arch: Arch) -> Multiprocessor:
    """Return the resources of one multiprocessor."""
    known = max(number for number in _MULTIPROCESSORS if number <= (arch.major, arch.minor))
    return _MULTIPROCESSORS[known]


def launch_limits(arch: Arch) -> base.Limits:
    """Return the limits of one launch."""
    limits = base.Limits(cluster=_CLUSTER if arch.major >= 9 else 0)
    if arch.major < 7:  # A block cannot opt in to more than the usual limit.
        return limits._replace(shared_optin=limits.shared)
    resources = multiprocessor(arch)
    return limits._replace(shared_optin=resources.shared - resources.reserved)
