"""Helpers for the tests of warm-ups: programs, manifests, and the failures of an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from preheat.ahead.manifest import GraphKeys, Manifest, ManifestProgram
from preheat.errors import (
    WarmError,
)
from preheat.model.program import Program
from tests.faulty import FaultyGpu

Opener = Callable[..., FaultyGpu]


ONE = 'extern "C" __global__ void one(int* x) { x[0] += 1; }'


TWO = """
extern "C" __global__ void two(int* x) { x[0] += 2; }
template <typename T> __global__ void many(T* x) { x[0] += 10; }
"""


THREE = 'extern "C" __global__ void three(int* x) { x[0] += 3; }'


WRONG = 'extern "C" __global__ void wrong(int* x) { x[0] = nonsense; }'


VERBS = ("load", "module.function", "stream.begin_capture", "graph.instantiate")


def program(source: str, label: str = "program.cu", **more: Any) -> Program:
    return Program.of(source, label=label, **more)


def manifest(*rows: Program | ManifestProgram, **graphs: tuple[str, ...]) -> Manifest:
    """Return a manifest of these programs and graph keys."""
    wanted = tuple(row if isinstance(row, ManifestProgram) else ManifestProgram(row) for row in rows)
    return Manifest(wanted, tuple(GraphKeys(name, keys) for name, keys in graphs.items()))


def failures(error: WarmError) -> dict[str, type[Exception]]:
    return {what: type(why) for what, why in error.failures}
