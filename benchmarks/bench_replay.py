"""Measure graphs: capture, instantiation, replay, caches, tensors of torch, scalars set per replay.

Every graph is a chain of the same tiny kernel from the same cubin, whoever captured it, and every
contender's result is checked first. The host cost of a replay is that of a call in a short burst, the
device idle before it. End to end is many replays and one wait.

No contender can do less than the loop of native C that launches a graph. A comparison shows this only
if nothing but the caller differs:

- One process, one thread. A process of its own has another CPU core, perhaps of another socket than the
  GPU, and command buffers in other memory. The same C loop then differs by more than half from one
  process to the next, with CuPy's replay between the results. So the loop is a shared library, called
  in this process. A row shows the process of its own as well, which the tables of making a graph use.
- The same graph. The process of its own makes a graph in every round and times its first replays, for
  which the driver may have to touch memory it has not used yet. The contenders here replay a graph that
  they have replayed thousands of times. So the loop here launches the executable of the cuda.bindings
  contender, in its stream. Another table has the loop on the executables of the other libraries: where
  that differs from the first row, the graph itself costs more or less, whoever launches it.
- The same kind of stream: one that does not wait for the legacy default stream, of the default
  priority, and of the library alone. All graphs are instantiated without flags, except that torch lets
  a launch free memory, and all have been launched before, which uploads them.
- The same batch: every burst has as many replays, and begins after a wait for the whole context. A full
  queue would make calls wait for the device. The row with shorter bursts shows whether that happened.
- The same timer: `timeit` around the statement, without a function, and a clock in C around the loop.
  The loop of `timeit` itself costs some hundredths of a microsecond for each statement.
- No fixed order. The clocks of CPU and GPU follow the load, so whoever comes next after an end-to-end
  measurement finds another state. The order is drawn anew in every round. Numbers are medians over all
  rounds, a difference is the median of the differences within each round, and a spread is the distance
  of the quartiles.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
import timeit
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

import preheat
import replay_contenders as make
from bench_launch import Driver, names
from common import options, report, spread, us
from replay_contenders import (
    BARE,
    CACHED,
    CORE,
    CUPY,
    NATIVE,
    NODES,
    OURS,
    SOURCE,
    TENSORS,
    TORCH,
    Capturer,
    Contender,
    N,
    Ours,
)

SLOW = 180_000  # Cycles: about 100 µs.
SIZES = ((1, 0), (10, 0), (100, 0), (320, 0), (1000, 0), (20, SLOW))
PARTS = 5  # Native C runs after each.
NATIVE_ALONE = "native C, process of its own"
USELESS = "does not pay"
NOTES = """\
Bursts: where shorter ones of the bare call cost about the same, no call waited for the device.
A graph pays once eager - replay, from end to end, has made up for its capture, instantiation and
upload; with a gain under 5 % it does not pay, however often it is used."""

Makers = Sequence[tuple[str, Callable[[], Iterator[Contender]]]]
CaptureMakers = Sequence[tuple[str, Callable[[], Iterator[Capturer]]]]


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


@dataclass
class Field:
    """All contenders, by category."""

    replays: list[Contender] = field(default_factory=list)
    eager: list[Contender] = field(default_factory=list)
    early: list[Contender] = field(default_factory=list)
    turns: list[Contender] = field(default_factory=list)
    scalars: list[Contender] = field(default_factory=list)
    short: list[Contender] = field(default_factory=list)  # The bare call in shorter bursts.
    floors: list[Contender] = field(default_factory=list)  # Native C on the graphs of the others.
    cached: list[Contender] = field(default_factory=list)
    tensors: list[Contender] = field(default_factory=list)
    captures: list[Capturer] = field(default_factory=list)

    def named(self, title: str) -> Contender:
        """Return the contender of a title, or raise if it does not work."""
        for each in self.replays:
            if each.title == title and not each.failure:
                return each
        raise LookupError(f"{title} does not work")


# Graphs of several sizes


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


# The contenders take turns


def gathered(driver: Driver, makers: Makers) -> list[Contender]:
    """Return all contenders, and why the others do not work on this machine."""
    found = []
    for title, contenders in makers:
        try:
            made = list(contenders())
            for each in made:
                prove(driver, each)
            found += made
        except Exception as why:  # A library may be missing or broken in any way. The others continue.
            reason = textwrap.shorten(f"failed: {type(why).__name__}: {why}", 80)
            print(f"{title}: {reason}", flush=True)
            found.append(Contender(title, failure=reason))
    return found


def gathered_captures(driver: Driver, makers: CaptureMakers) -> list[Capturer]:
    """Return all ways to capture, and why the others do not work on this machine."""
    found = []
    for title, capturers in makers:
        try:
            made = list(capturers())
            for each in made:
                prove_capture(driver, each)
            found += made
        except Exception as why:  # See `gathered`.
            reason = textwrap.shorten(f"failed: {type(why).__name__}: {why}", 80)
            print(f"{title}, capture: {reason}", flush=True)
            found.append(Capturer(title, failure=reason))
    return found


def prove_capture(driver: Driver, capturer: Capturer) -> None:
    """Capture three times and check what each graph does."""
    rng = np.random.default_rng(5)
    assert capturer.capture is not None
    for _ in range(3):
        _, launch_once = capturer.capture()
        x, y = (rng.integers(-999, 999, N, dtype=np.int32) for _ in "xy")
        driver.write(capturer.x, x)
        driver.write(capturer.y, y)
        launch_once()
        if not np.array_equal(driver.read(capturer.y).view(np.int32), y + NODES * x):
            raise RuntimeError("a wrong result")


def prove(driver: Driver, contender: Contender) -> None:
    """Run the statement three times, because repeated replays take another path, and check each."""
    rng = np.random.default_rng(4)
    code = compile(contender.statement, contender.title, "exec")
    for _ in range(3):
        x, y = (rng.integers(-999, 999, N, dtype=np.int32) for _ in "xy")
        driver.write(contender.x, x)
        driver.write(contender.y, y)
        exec(code, contender.names)
        expected = y + contender.replays * (NODES * x + contender.adds)
        if not np.array_equal(driver.read(contender.y).view(np.int32), expected):
            raise RuntimeError("a wrong result")


def gather(driver: Driver, ours: Ours, native: Native, cubin: Path, args: argparse.Namespace) -> Field:
    """Return all contenders; preheat's before other libraries are loaded, which captures also check."""
    code = cubin.read_bytes()
    raw = make.Raw(driver, code)
    torch, cupy = cache(lambda: make.Torch(raw)), cache(lambda: make.Cupy(cubin))
    loop = cache(native.loop)

    def some(*makers: tuple[str, Callable[[], Iterator[Contender]]]) -> list[Contender]:
        return gathered(driver, makers)

    found = Field()
    found.replays += some(
        (BARE, lambda: make.bare(driver, raw)), (OURS, lambda: make.preheat_replay(ours))
    )
    found.early = duel(driver, found.replays, args)
    found.replays.insert(0, *some((NATIVE, lambda: make.native(loop(), found.named(BARE)))))
    found.cached += some((CACHED, lambda: make.cached(ours)))
    found.eager += some(("preheat, eager", lambda: make.preheat_eager(ours)))
    found.turns += some(
        ("cuda.bindings, in turn", lambda: make.bare_in_turn(driver, raw)),
        ("preheat, in turn", lambda: make.graphs_in_turn(ours)),
        ("preheat, slots, in turn", lambda: make.slots_in_turn(ours)),
    )
    found.scalars += some(
        ("preheat, scalars", lambda: make.preheat_scalars(ours)),
        ("cuda.bindings, scalars", lambda: make.bare_scalars(driver, raw)),
        ("torch, scalars", lambda: make.torch_scalars(torch())),
        ("torch, 4 by copy_", lambda: make.torch_copied(torch())),
        ("CuPy, scalars", lambda: make.cupy_scalars(cupy())),
    )
    found.replays += some(
        (TORCH, lambda: make.torch_replay(torch())),
        (CUPY, lambda: make.cupy_replay(cupy())),
        (CORE, lambda: make.core_replay(driver, code)),
    )
    found.tensors += some(
        (f"{TENSORS}, preheat", lambda: make.preheat_on_tensors(ours, torch())),
        (f"{TENSORS}, torch", lambda: make.torch_on_tensors(torch())),
    )
    floors: dict[str, Callable[[], Iterator[Contender]]] = {
        OURS: lambda: make.native_preheat(loop(), ours, found.named(OURS)),
        TORCH: lambda: make.native_torch(loop(), torch(), found.named(TORCH)),
        CUPY: lambda: make.native_cupy(loop(), cupy(), found.named(CUPY)),
        CORE: lambda: make.native_core(loop(), found.named(CORE)),
    }
    found.floors += some(*((f"{make.FLOOR}{title}", one) for title, one in floors.items()))
    found.captures += gathered_captures(
        driver,
        (
            ("cuda.bindings", lambda: make.bare_capture(driver, raw)),
            (OURS, lambda: make.preheat_capture(ours)),
            (CORE, lambda: make.core_capture(driver, code)),
            (TORCH, lambda: make.torch_capture(torch())),
        ),
    )
    return found


def duel(driver: Driver, two: Sequence[Contender], args: argparse.Namespace) -> list[Contender]:
    """Compare two in a process that has loaded nothing else: what one costs beyond the other."""
    alone = [replace(each, hosts=[], ends=[]) for each in two if not each.failure]
    for _ in range(2 * args.rounds):
        for each in random.sample(alone, len(alone)):
            driver.wait()
            each.hosts.append(each.run(args.burst))
    return alone


def compete(driver: Driver, everyone: Field, native: Native, args: argparse.Namespace) -> None:
    """Let all contenders take turns in parts, with native C after each, on the same machine state."""
    alone = Contender(NATIVE_ALONE, "cuGraphLaunch(…)")
    eager = Contender("native C, eager", "cuLaunchKernel(…)")
    everyone.short += [
        replace(each, title=f"cuda.bindings, bursts of {args.burst // 4}", hosts=[], ends=[])
        for each in everyone.replays
        if each.title == BARE and not each.failure
    ]
    rounds = max(2, args.rounds // PARTS)
    for _ in range(PARTS):
        take_turns(driver, everyone, rounds, args)
        capture_in_turn(driver, everyone.captures, max(2, rounds // 6))
        lines = native.lives(NODES, 0, max(2, rounds // 2), args.burst, args.runs)
        alone.hosts += [line.host for line in lines]
        alone.ends += [line.replay for line in lines]
        eager.ends += [line.eager for line in lines]
    alone.failure = eager.failure = native.failure
    everyone.replays.insert(1, alone)
    everyone.eager.insert(0, eager)


def capture_in_turn(driver: Driver, capturers: Sequence[Capturer], rounds: int) -> None:
    """Capture with each contender once in every round."""
    working = [each for each in capturers if each.capture is not None and not each.failure]
    for _ in range(rounds):
        for each in random.sample(working, len(working)):
            assert each.capture is not None
            driver.wait()
            cost, launch_once = each.capture()
            each.costs.append(cost)
            launch_once()


def take_turns(driver: Driver, everyone: Field, rounds: int, args: argparse.Namespace) -> None:
    """Run a burst of each contender in every round, and many replays in every sixth."""
    listed = (
        *(*everyone.replays, *everyone.floors, *everyone.cached),
        *(*everyone.tensors, *everyone.turns, *everyone.scalars),
    )
    working = [each for each in listed if not each.failure]
    for turn in range(-1, rounds):
        # The order is drawn anew, so that no contender always follows the same one.
        for each in random.sample(working, len(working)):
            driver.wait()
            cost = each.run(args.burst)
            if turn >= 0:  # The first one is the warm-up.
                each.hosts.append(cost)
            if turn % 6 == 0:
                end_to_end(driver, each, args.runs)
        for each in everyone.short:
            driver.wait()
            each.hosts.append(each.run(args.burst // 4))
    for each in everyone.eager:
        if not each.failure:
            end_to_end(driver, each, max(2, args.runs // 3))


def end_to_end(driver: Driver, contender: Contender, runs: int) -> None:
    driver.wait()
    started = time.perf_counter()
    contender.run(runs)
    driver.wait()
    contender.ends.append((time.perf_counter() - started) / runs * 1e6)


# Tables


def of(value: float, other: float | None) -> str:
    return "-" if other is None else f"{value / other:.2f} x"


def shown(value: float) -> str:
    return "-" if math.isnan(value) else us(value)


def failed(each: Contender | Capturer, columns: int) -> tuple[str, ...]:
    return (each.title, *("-",) * (columns - 2), each.failure)


def host_rows(contenders: Sequence[Contender]) -> list[tuple[str, ...]]:
    cost = {each.title: each.host for each in contenders if each.hosts}
    rows = []
    for each in contenders:
        if each.failure:
            rows.append(failed(each, 7))
            continue
        shares = (of(each.host, cost.get(NATIVE)), of(each.host, cost.get(BARE)))
        cells = (us(each.host), us(min(each.hosts)), spread(each.hosts), *shares)
        rows.append((each.title, *cells, each.statement))
    return rows


def end_rows(contenders: Sequence[Contender]) -> list[tuple[str, ...]]:
    cost = {each.title: each.end for each in contenders if each.ends}
    return [
        failed(each, 5)
        if each.failure
        else (
            each.title,
            us(each.end),
            spread(each.ends),
            of(each.end, cost.get(NATIVE)),
            each.statement,
        )
        for each in contenders
    ]


def over(each: Contender, other: Contender) -> float:
    """Return what one costs beyond another: the median of the differences within a round."""
    rounds = zip(each.hosts, other.hosts, strict=True)
    return statistics.median(mine - theirs for mine, theirs in rounds)


def group_rows(contenders: Sequence[Contender]) -> list[tuple[str, ...]]:
    """Return rows that compare each contender with the first one of its category."""
    rows = []
    first: dict[str, Contender] = {}
    for each in contenders:
        if each.failure:
            rows.append(failed(each, 7))
            continue
        one = first.setdefault(each.title.rpartition(", ")[0], each)
        shares = (f"{over(each, one):+.2f} µs", of(each.host, one.host))
        cells = (us(each.host), spread(each.hosts), *shares, us(each.end))
        rows.append((each.title, *cells, each.statement))
    return rows


def capture_rows(capturers: Sequence[Capturer]) -> list[tuple[str, ...]]:
    cost = {each.title: each.cost for each in capturers if each.costs}
    return [
        failed(each, 5)
        if each.failure
        else (
            each.title,
            us(each.cost),
            spread(each.costs),
            of(each.cost, cost.get("cuda.bindings")),
            each.statement,
        )
        for each in capturers
    ]


def making_rows(sizes: Sequence[Size]) -> list[tuple[str, ...]]:
    def cells(costs: Costs, nodes: int) -> tuple[str, ...]:
        each = (costs.capture / nodes, costs.instantiate / nodes, costs.upload, costs.first)
        return tuple(map(shown, each))

    return [
        (size.title, *cells(size.ours, size.nodes), *cells(size.native, size.nodes)) for size in sizes
    ]


def paying_rows(sizes: Sequence[Size]) -> list[tuple[str, ...]]:
    def cells(costs: Costs) -> tuple[str, ...]:
        return tuple(map(shown, (costs.host, costs.replay, costs.eager)))

    return [
        (
            *(size.title, *cells(size.ours), of(size.ours.eager, size.ours.replay)),
            *(*cells(size.native), verdict(size.ours)),
        )
        for size in sizes
    ]


def verdict(costs: Costs) -> str:
    """Return after how many uses a graph pays off. A gain below 5 % does not count."""
    made, gain = costs.capture + costs.instantiate + costs.upload, costs.eager - costs.replay
    if gain < 0.05 * costs.eager:
        return USELESS
    return f"pays from {math.ceil(made / gain)} uses on"


SLOTS = f"{OURS}, slots"


def target_rows(everyone: Field, sizes: Sequence[Size]) -> list[tuple[str, ...]]:
    """What was wanted. torch and CuPy slow a whole process down, on the host and on the GPU, so native
    C and the bare call are met before they come.
    """
    groups = (everyone.replays, everyone.turns, everyone.cached, everyone.tensors, everyone.scalars)
    listed = [each for group in groups for each in group if each.hosts]
    host = {each.title: each.host for each in listed}
    end = {each.title: each.end for each in listed if each.ends}
    first = {each.title: each.host for each in everyone.early}
    early: dict[str, float] = {}
    for size in sizes:
        if (size.nodes, size.cycles) == (NODES, 0):
            early = {OURS: size.ours.replay, NATIVE: size.native.replay}
    peers = [host[each] for each in (NATIVE, CUPY) if each in host]
    host |= {_LEAST: min(peers)} if peers else {}
    captured = {each.title: each.cost for each in everyone.captures if each.costs}
    by_title = {each.title: each for each in listed}

    def more(ours: str, theirs: str) -> float | None:
        found = [by_title[title] for title in (ours, theirs) if title in by_title]
        return over(*found) if len(found) == 2 else None

    once, turn = "one twice", "two in turn"
    extra = {
        name: host.get(f"{name}, {turn}", 0.0) / host.get(f"{name}, {once}", math.inf)
        for name in ("preheat", "preheat, slots", "cuda.bindings")
    }
    return [
        target("host cost, of the bare cuda.bindings call", first, OURS, BARE, 1.15),
        target(f"host cost, of {_LEAST}", host, OURS, _LEAST, 1.15),
        target("host cost, of torch", host, OURS, TORCH, 1.0),
        target("host cost, of cuda.core", host, OURS, CORE, 1.0),
        target("end to end, of native C", early, OURS, NATIVE, 1.05),
        target("end to end, of the bare cuda.bindings call", end, OURS, BARE, 1.03),
        target(
            "two slots in turn, of one, end to end", end, f"{SLOTS}, {turn}", f"{SLOTS}, {once}", 1.03
        ),
        target("two graphs in turn, of one, as cuda.bindings", extra, OURS, "cuda.bindings", 1.1),
        target("two slots in turn, of one, as cuda.bindings", extra, SLOTS, "cuda.bindings", 1.1),
        *(
            target_over(f"{name}, over graph.replay", more(f"{CACHED}, {name}", _REPLAY), most)
            for name, most in (("graphs.replay", 0.5), ("graphs.run", 2.0), ("@graphed", 4.0))
        ),
        *(
            target_over(f"{name}, over our arrays", more(f"{TENSORS}, {name}", _ARRAYS), 2.0)
            for name in ("preheat on torch tensors", "preheat on one of each")
        ),
        target_over("one scalar", more("preheat, 1", "preheat, 0"), 2.5),
        target_over("four scalars", more("preheat, 4", "preheat, 0"), 4.0),
        target_over("capture, for each kernel", captured.get(OURS), 4.0),
    ]


_LEAST = "the better of native C and CuPy"
_REPLAY = f"{CACHED}, graph.replay"
_ARRAYS = f"{TENSORS}, preheat on our arrays"


def target_over(title: str, more: float | None, most: float) -> tuple[str, ...]:
    """Return a row for a target in microseconds."""
    wanted = f"at most {most:g} µs"
    if more is None:
        return title, "-", wanted, "not measured"
    return title, f"{more:.2f} µs", wanted, "met" if more <= most else "missed"


def target(title: str, cost: dict[str, float], ours: str, theirs: str, most: float) -> tuple[str, ...]:
    wanted = f"at most {most:.2f} x"
    if ours not in cost or theirs not in cost:
        return title, "-", wanted, "not measured"
    share = cost[ours] / cost[theirs]
    return title, f"{share:.3f} x", wanted, "met" if share <= most else "missed"


def tell(everyone: Field, sizes: Sequence[Size], args: argparse.Namespace) -> None:
    def table(title: str, head: tuple[str, ...], rows: Sequence[Sequence[str]]) -> None:
        report("bench_replay", title, head, rows, into=args.json)

    table(
        f"Host cost of one replay of {NODES} kernels ({args.rounds} bursts of {args.burst})",
        ("", "a replay", "least", "spread", "of native C", "of cuda.bindings", "statement"),
        host_rows([*everyone.replays, *everyone.short]),
    )
    table(
        "The same graphs, launched by native C in this process",
        ("", "a replay", "least", "spread", "of native C", "of cuda.bindings", "statement"),
        host_rows(
            [each for each in everyone.replays if each.title in (NATIVE, BARE)] + everyone.floors
        ),
    )
    table(
        f"The same before any other library is loaded ({2 * args.rounds} bursts of {args.burst})",
        ("", "a replay", "least", "spread", "of native C", "of cuda.bindings", "statement"),
        host_rows(everyone.early),
    )
    table(
        f"End to end, {NODES} kernels ({args.runs} times and one wait)",
        ("", "a replay", "spread", "of native C", "statement"),
        end_rows([*everyone.replays, *everyone.eager]),
    )
    head = ("", "a replay", "spread", "over the first", "of the first", "end to end", "statement")
    table(f"Two graphs in turn, {NODES} kernels each", head, group_rows(everyone.turns))
    table(f"The cache and the decorator, {NODES} kernels", head, group_rows(everyone.cached))
    table(f"Tensors of torch, {NODES} kernels", head, group_rows(everyone.tensors))
    table(
        f"Capture of {NODES} kernels, for each of them",
        ("", "a node", "spread", "of cuda.bindings", "statement"),
        capture_rows(everyone.captures),
    )
    table(f"Scalars set before a replay of {NODES + 1} kernels", head, group_rows(everyone.scalars))
    made = ("capture/node", "instantiate/node", "upload", "first replay")
    table("Making a graph", ("", *made, *(f"C: {each}" for each in made)), making_rows(sizes))
    used = ("host cost", "replay", "eager")
    table(
        "Where graphs pay and where they do not, end to end",
        ("", *used, "eager/replay", *(f"C: {each}" for each in used), "in preheat, a graph"),
        paying_rows(sizes),
    )
    table("Targets", ("", "measured", "wanted", ""), target_rows(everyone, sizes))
    print(f"\n{NOTES}")
    idle = [size.title for size in sizes if verdict(size.ours) == USELESS]
    print(f"Graphs did not pay for: {', '.join(idle) or 'none of these'}.")


def arguments() -> argparse.Namespace:
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=150, help="turns of each contender")
    parser.add_argument(
        "--burst", type=int, default=20, help="replays of one host cost, a multiple of 4"
    )
    parser.add_argument("--runs", type=int, default=60, help="replays of one end to end time, even")
    args = parser.parse_args()
    if args.burst % 4 or args.runs % 2:
        parser.error(
            "--burst must be a multiple of 4, and --runs even: graphs are also replayed in pairs"
        )
    return args


def run(driver: Driver, gpu: preheat.Gpu, place: Path, args: argparse.Namespace) -> None:
    cubin = place / "replay.cubin"
    cubin.write_bytes(preheat.compile(SOURCE, gpu.arch).cubin)
    ours = Ours(gpu)
    native = Native(place, cubin)
    sizes = measured_sizes(ours, native, max(3, args.rounds // 12), args.burst)
    everyone = gather(driver, ours, native, cubin, args)
    compete(driver, everyone, native, args)
    tell(everyone, sizes, args)


def main() -> None:
    args = arguments()
    with tempfile.TemporaryDirectory(prefix="preheat-bench-") as name:
        place = Path(name)
        for variable in ("PREHEAT_CACHE_DIR", "PREHEAT_LOCK_DIR", "CUPY_CACHE_DIR"):
            os.environ[variable] = str(place / variable)
        try:
            gpu = preheat.device("cuda")
        except preheat.NoGpuError as why:
            sys.exit(str(why))
        run(Driver(), gpu, place, args)


if __name__ == "__main__":
    main()
