"""The measured times of the steps of `preheat demo` on a GPU.

The figures are those of benchmarks/results, which is not installed. A test compares the two.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["COMMIT", "DATE", "GPU", "MEASURED", "Measured"]

GPU = "NVIDIA H200"
DATE = "2026-11-16"
COMMIT = "6dbb71d7"


class Measured(NamedTuple):
    """One cell of a table of benchmarks/results, and what was measured."""

    value: str
    what: str
    results: str
    table: str
    row: str
    column: str


_START = ("bench_coldstart", "A new process, 50 cached kernels, first launch of each")
_GRAPH = ("bench_replay", "End to end, 320 kernels (60 times and one wait)")

#: By the step of the demo.
MEASURED = {
    "cold": Measured("2.221 s", "50 kernels", *_START, "preheat, nothing cached", "to last launch"),
    "hot": Measured("0.296 s", "50 kernels", *_START, "preheat", "to last launch"),
    "eager": Measured("1.58 ms", "320 launches", *_GRAPH, "preheat, eager", "a replay"),
    "replay": Measured("345 µs", "320 launches", *_GRAPH, "preheat", "a replay"),
    "sealed": Measured("0.284 s", "50 kernels", *_START, "preheat, sealed", "to last launch"),
}
