"""Graphs of several sizes: what it costs to make and replay each, by preheat and by native C."""

from __future__ import annotations

import math
import shutil
import statistics
import subprocess
import textwrap
import time
import timeit
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

import replay_contenders as make
from bench_launch import names
from replay_contenders import NATIVE, N, Ours

SLOW = 180_000  # Cycles: about 100 µs.
SIZES = ((1, 0), (10, 0), (100, 0), (320, 0), (1000, 0), (20, SLOW))


class Costs(NamedTuple):
    """Microseconds for the phases of one graph, as in a line of the C program."""

    capture: float
    instantiate: float
    upload: float
    first: float
    host: float
    replay: float
    eager: float


class Size(NamedTuple):
    """The costs of graphs of one size."""

    nodes: int
    cycles: int
    ours: Costs
    native: Costs

    @property
    def title(self) -> str:
        kind = "kernel" if self.nodes == 1 else "kernels"
        long = " of about 100 µs" if self.cycles else ""
        return f"{self.nodes} {'' if long else 'tiny '}{kind}{long}"


def measured_sizes(ours: Ours, native: Native, rounds: int, burst: int) -> list[Size]:
    """Measure all sizes. Call this before other libraries are loaded, which captures also check."""
    found = []
    for nodes, cycles in SIZES:
        given = (nodes, cycles, rounds, burst, max(20, 1000 // nodes))
        found.append(Size(nodes, cycles, middle(lives(ours, *given)), middle(native.lives(*given))))
    return found


def middle(lines: Sequence[Costs]) -> Costs:
    """Return the median of each cost, or NaN if there is none."""
    columns = zip(*lines, strict=True) if lines else ((math.nan,) for _ in Costs._fields)
    return Costs(*(statistics.median(column) for column in columns))


def lives(ours: Ours, nodes: int, cycles: int, rounds: int, burst: int, runs: int) -> list[Costs]:
    """Graphs of one size made, replayed and closed again; the sum of all of it is checked."""
    ours.y.fill(0)
    found = [life(ours, nodes, cycles, burst, runs) for _ in range(rounds + 1)]
    steps = (rounds + 1) * (1 + burst + 2 * runs)
    if not np.array_equal(ours.y.numpy(), steps * nodes * ours.x.numpy()):
        raise RuntimeError(f"a wrong result of {nodes} nodes")
    return found[1:]  # The first one was the warm-up.


def life(ours: Ours, nodes: int, cycles: int, burst: int, runs: int) -> Costs:
    wait = ours.gpu.synchronize
    args = (ours.y, ours.x, N, cycles)
    marks = [time.perf_counter()]
    graph = ours.gpu.capture().begin()
    for _ in range(nodes):
        ours.tick(*args)
    for act in (graph.end, graph.instantiate, graph.upload):
        act()
        marks.append(time.perf_counter())
    wait()
    given = names(graph=graph, tick=ours.tick, args=args, nodes=nodes)
    replay = timeit.Timer("graph.replay()", globals=given)
    eager = timeit.Timer("for _ in range(nodes): tick(*args)", globals=given)
    made = [(after - before) * 1e6 for before, after in pairwise(marks)]
    hosts = [timed(replay, count, wait)[0] for count in (1, burst)]
    ends = [timed(each, runs, wait)[1] for each in (replay, eager)]
    graph.close()
    return Costs(*made, *hosts, *ends)


def timed(timer: timeit.Timer, count: int, wait: Callable[[], None]) -> tuple[float, float]:
    """Return the microseconds of a run: until all were submitted, and until all were done."""
    started = time.perf_counter()
    submitted = timer.timeit(count)
    wait()
    return submitted / count * 1e6, (time.perf_counter() - started) / count * 1e6


class Native:
    """The compiled C program, of which every use starts a new process, and the loop for this one."""

    def __init__(self, place: Path, cubin: Path) -> None:
        self._program, self._library, self._cubin = place / "replay", place / "burst.so", cubin
        self.failure = ""
        nvcc = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
        sources = Path(__file__).with_name("native")
        if nvcc is None:
            self._failed("there is no nvcc")
            return
        shared = ("-shared", "-Xcompiler", "-fPIC")
        self._done(nvcc, "-O2", "-o", self._program, sources / "replay.c", "-ldl")
        self._done(nvcc, "-O2", *shared, "-o", self._library, sources / "burst.c", "-ldl")

    def loop(self) -> make.NativeLoop:
        """Return the loop for this process."""
        if self.failure:
            raise RuntimeError(self.failure)
        return make.NativeLoop(self._library)

    def lives(self, *given: int) -> list[Costs]:
        """Return the costs of graphs of one size, once a round; an empty list if the program fails."""
        lines = [] if self.failure else self._done(self._program, self._cubin, *given).splitlines()
        return [Costs(*map(float, line.split())) for line in lines]

    def _done(self, *command: object) -> str:
        done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
        if done.returncode:
            self._failed(done.stderr.strip() or done.stdout.strip() or f"exit {done.returncode}")
        return "" if done.returncode else done.stdout

    def _failed(self, why: str) -> None:
        self.failure = textwrap.shorten(f"failed: {why}", 80)
        print(f"{NATIVE}: {self.failure}", flush=True)
