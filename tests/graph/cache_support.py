"""Helpers for the tests of graph caches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from preheat.graph.cache import GraphCache
from tests.graph.support import (
    AxpyCase,
)


class Step:
    """A body that adds `a * x` to `y`, and counts how often Python went through it."""

    def __init__(self, made: AxpyCase, a: int = 3) -> None:
        self.made, self.a, self.entered = made, a, 0

    def __call__(self) -> Any:
        self.entered += 1
        self.made.launch(self.a)
        return self.made.y


def cache_graphs(
    graphs: GraphCache, step: Callable[[], object], *keys: Any, owner: object = None
) -> None:
    """Cache graphs of these keys, in this order."""
    for key in keys:
        for _ in range(2):
            graphs.run(key, step, owner=owner)
