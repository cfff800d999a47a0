"""CuPy: its compiles use the cache of preheat, and `RawKernel` and `RawModule` run on preheat.

    from preheat.adapters.cupy import RawKernel, RawModule        # instead of: from cupy import …

Importing this package does not import CuPy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from preheat.adapters.cupy.raw import RawKernel, RawModule

__all__ = ["RawKernel", "RawModule"]


def __getattr__(name: str) -> Any:
    """Import the classes when they are first used: the adapter alone does not need them."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("preheat.adapters.cupy.raw"), name)
