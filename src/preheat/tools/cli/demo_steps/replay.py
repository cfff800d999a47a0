"""A step of `preheat demo`: the same launches one by one, and as a replayed graph."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import preheat

__all__: list[str] = []

SIDE = 12  # cells along one side of the cube
K = 0.1  # how fast heat spreads
LAUNCHES = 20
ROUNDS = 20


def main(file: Path) -> None:
    """Spread heat through a cube in both ways, and print the results as JSON."""
    gpu = preheat.device()
    heat3d = gpu.kernel(file, "heat3d")
    start = np.random.default_rng().random((SIDE, SIDE, SIDE), dtype="float32")
    here, there = gpu.array(start), gpu.empty(start.shape)

    def steps() -> None:
        for _ in range(LAUNCHES // 2):
            for old, new in ((here, there), (there, here)):
                heat3d[(1, 3, 3), (16, 4, 4)](old, new, SIDE, SIDE, SIDE, K)

    def timed(run: Callable[[], None]) -> tuple[float, np.ndarray]:
        """Return the seconds of the quickest round, and the cube after all rounds."""
        here.write(start)
        run()  # The first round is not counted, because it loads code.
        seconds = []
        for _ in range(ROUNDS - 1):
            gpu.synchronize()
            started = time.perf_counter()
            run()
            gpu.synchronize()
            seconds.append(time.perf_counter() - started)
        return min(seconds), here.numpy()

    eager, launched = timed(steps)
    started = time.perf_counter()
    with gpu.capture(name="heat") as graph:
        steps()
    captured = time.perf_counter() - started
    replay, replayed = timed(graph.replay)
    result = {
        "launches": LAUNCHES,
        "eager": eager,
        "capture": captured,
        "replay": replay,
        "same_bits": bool((launched == replayed).all()),
        "error": float(abs(replayed - _expected(start.astype("float64"))).max()),
    }
    print(json.dumps(result))


def _expected(cube: np.ndarray) -> np.ndarray:
    """Return the cube after all rounds, computed by NumPy."""
    inside = (slice(1, -1),) * 3
    for _ in range(LAUNCHES * ROUNDS):
        around = sum(np.roll(cube, by, axis) for axis in range(3) for by in (-1, 1))
        cube[inside] += K * (around - 6 * cube)[inside]
    return cube


if __name__ == "__main__":
    main(Path(sys.argv[1]))
