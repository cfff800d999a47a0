"""The report of a warm-up."""

from __future__ import annotations

from typing import NamedTuple

from preheat.messages import count

__all__ = ["WarmReport"]


class WarmReport(NamedTuple):
    """What `gpu.warm` did.

    `hits` of the `programs` were stored, and `compiles` had to be compiled. `entries` is the number of
    kernels that are resolved. `modules` with `nbytes` of code were loaded, and `graphs` captured, not
    counting those that existed before. `seconds` is the total time; `compiling` (with lookups),
    `loading` and `capturing` are its parts.
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

    def __str__(self) -> str:
        return (
            f"{count(self.programs, 'program')}: {self.hits} found, {self.compiles} compiled "
            f"({self.compiling:.3f} s)\n"
            f"{count(self.modules, 'module')} loaded: {count(self.nbytes, 'byte')}, "
            f"{count(self.entries, 'kernel')} resolved ({self.loading:.3f} s)\n"
            f"{count(self.graphs, 'graph')} captured ({self.capturing:.3f} s)\n"
            f"{self.seconds:.3f} s in all"
        )
