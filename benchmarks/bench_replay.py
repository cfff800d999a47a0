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
import os
import random
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TypeVar

import numpy as np

import preheat
import replay_contenders as make
from bench_launch import Driver
from common import options
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
from replay_sizes import Native, measured_sizes
from replay_tables import Field, tell

PARTS = 5  # Native C runs after each.
NATIVE_ALONE = "native C, process of its own"

C = TypeVar("C", Contender, Capturer)
Maker = tuple[str, Callable[[], Iterator[C]]]  # a title, and what makes the contenders


# Who takes part


def gathered(driver: Driver, kind: type[C], makers: Sequence[Maker[C]]) -> list[C]:
    """Return all contenders, and why the others do not work on this machine."""
    found: list[C] = []
    for title, contenders in makers:
        try:
            made = list(contenders())
            for each in made:
                prove(driver, each)
            found += made
        except Exception as why:  # A library may be missing or broken in any way. The others continue.
            reason = textwrap.shorten(f"failed: {type(why).__name__}: {why}", 80)
            print(f"{title} ({kind.__name__}): {reason}", flush=True)
            found.append(kind(title, failure=reason))
    return found


def prove(driver: Driver, contender: Contender | Capturer) -> None:
    """Do the work three times, because repeated replays take another path, and check each result."""
    rng = np.random.default_rng(4)
    for _ in range(3):
        run_once = contender.prepared()
        x, y = (rng.integers(-999, 999, N, dtype=np.int32) for _ in "xy")
        driver.write(contender.x, x)
        driver.write(contender.y, y)
        run_once()
        expected = y + contender.replays * (NODES * x + contender.adds)
        if not np.array_equal(driver.read(contender.y).view(np.int32), expected):
            raise RuntimeError("a wrong result")


def gather(driver: Driver, ours: Ours, native: Native, cubin: Path, args: argparse.Namespace) -> Field:
    """Return all contenders; preheat's before other libraries are loaded, which captures also check."""
    code = cubin.read_bytes()
    raw = make.Raw(driver, code)
    torch, cupy = cache(lambda: make.Torch(raw)), cache(lambda: make.Cupy(cubin))
    loop = cache(native.loop)

    def some(*makers: Maker[Contender]) -> list[Contender]:
        return gathered(driver, Contender, makers)

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
    found.captures += gathered(
        driver,
        Capturer,
        (
            ("cuda.bindings", lambda: make.bare_capture(driver, raw)),
            (OURS, lambda: make.preheat_capture(ours)),
            (CORE, lambda: make.core_capture(driver, code)),
            (TORCH, lambda: make.torch_capture(torch())),
        ),
    )
    return found


# The contenders take turns


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
