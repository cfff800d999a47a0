"""The report of a warm-up."""

from __future__ import annotations

from typing import NamedTuple

from preheat.process.messages import count

__all__ = ["WarmReport"]


class WarmReport(NamedTuple):
    """The result of `gpu.warm`.

    Attributes:
        programs: The number of programs.
        hits: How many of them were stored.
        compiles: How many of them had to be compiled.
        modules: The number of modules that were loaded. Those that were loaded before do not count.
        nbytes: The size of their code.
        entries: The number of kernels that are resolved.
        graphs: The number of graphs that were captured. Those that existed before do not count.
        seconds: The total time.
        compiling: The part of it for lookups and compiles.
        loading: The part of it for loading.
        capturing: The part of it for captures.
        skipped: The number of programs whose bundle has code for other devices only.

    Examples:
        >>> report = gpu.warm("kernels.toml")
        >>> report.programs == report.hits + report.compiles
        True
    """

    programs: int = 0
    hits: int = 0
    compiles: int = 0
    modules: int = 0
    nbytes: int = 0
    entries: int = 0
    graphs: int = 0
    seconds: float = 0.0
    compiling: float = 0.0
    loading: float = 0.0
    capturing: float = 0.0
    skipped: int = 0

    def __str__(self) -> str:
        skipped = f"; {self.skipped} without code for this device" if self.skipped else ""
        return (
            f"{count(self.programs, 'program')}: {self.hits} found, {self.compiles} compiled "
            f"({self.compiling:.3f} s){skipped}\n"
            f"{count(self.modules, 'module')} loaded: {count(self.nbytes, 'byte')}, "
            f"{count(self.entries, 'kernel')} resolved ({self.loading:.3f} s)\n"
            f"{count(self.graphs, 'graph')} captured ({self.capturing:.3f} s)\n"
            f"{self.seconds:.3f} s in all"
        )
