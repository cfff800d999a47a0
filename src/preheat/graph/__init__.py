"""Graphs: work captured once, owned, and replayed.

The names in `__all__` are those that `preheat.gpu` uses. Their modules are imported when one of them is
first used, because many processes launch kernels and capture nothing.
"""

from __future__ import annotations

import importlib

from preheat.process.locks import no_fork

TYPE_CHECKING = False  # Type checkers assume True.
if TYPE_CHECKING:
    from preheat.graph.cache import GraphCache
    from preheat.graph.graph import RESERVED, Graph
    from preheat.graph.graphed import Graphed, call_key_text
    from preheat.graph.keys import key_text
    from preheat.graph.libraries import SharedPool, capture_memory
    from preheat.graph.pool import Pool

__all__ = [
    "RESERVED",
    "Graph",
    "GraphCache",
    "Graphed",
    "Pool",
    "SharedPool",
    "call_key_text",
    "capture_memory",
    "key_text",
]

_MODULE_OF = {
    "RESERVED": "graph",
    "Graph": "graph",
    "GraphCache": "cache",
    "Graphed": "graphed",
    "Pool": "pool",
    "SharedPool": "libraries",
    "call_key_text": "graphed",
    "capture_memory": "libraries",
    "key_text": "keys",
}


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'preheat.graph' has no attribute {name!r}")
    with no_fork:
        module = importlib.import_module(f"preheat.graph.{_MODULE_OF[name]}")
    value = getattr(module, name)
    globals()[name] = value
    return value
