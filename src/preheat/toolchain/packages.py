"""The locations of NVRTC and of the toolkit headers in the packages of NVIDIA.

This is a guess. The full search (`locate.py`) takes longer, and its result decides.
"""

from __future__ import annotations

import os
from collections import namedtuple

TYPE_CHECKING = False  # Compiler processes start with this module, and `typing` takes long to import.
if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Guess", "guess", "nvrtc_in_packages"]

_PACKAGE = "nvidia/cu13"

#: The file of NVRTC, and the include directories of the toolkit by label, as in `Located`.
Guess = namedtuple("Guess", "library roots")


def nvrtc_in_packages(places: Iterable[str]) -> str | None:
    """Return the file of NVRTC in the first of these directories, as in `sys.path`, that has it."""
    for place in places:
        path = os.path.realpath(f"{place}/{_PACKAGE}/lib/libnvrtc.so.13")
        if os.path.exists(path):
            return path
    return None


def guess(places: Iterable[str]) -> Guess | None:
    """Return what the full search will probably find; None if the packages are not installed."""
    library = nvrtc_in_packages(places)
    if library is None:
        return None
    include = os.path.realpath(f"{os.path.dirname(os.path.dirname(library))}/include")
    roots = {"cuda": include, "cccl": os.path.realpath(f"{include}/cccl")}
    return Guess(library, {label: path for label, path in roots.items() if os.path.isdir(path)})
