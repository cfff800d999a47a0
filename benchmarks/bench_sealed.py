"""Measure the start of an application that uses several compilers: stock beside sealed. Needs a GPU.

The application of tests/adapters/mixed is recorded and baked once. Then the contenders take turns, each
run in a process of its own. "cold" has empty caches, "warm" those of an earlier run. A sealed run has
the bundle, and every other cache is empty. A time is that from the start of the process to the end of
the last part; the columns of parts have the time from its beginning to its first results.

    PYTHONPATH=src:.carry python3 benchmarks/bench_sealed.py [--rounds 3]
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import options, report, spread

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.adapters.mixed.runs import MixedApplication

COLD, WARM, SEALED = "stock, cold", "stock, warm", "preheat, sealed"


def main() -> None:
    """Record, bake, and measure all contenders."""
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--arch", default="sm_90")
    parser.add_argument("parts", nargs="*", help="parts of the application; default: all")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        application = MixedApplication(Path(place), *given.parts)
        application.record()
        application.bake(given.arch)
        application.stock("warm")
        runs: dict[str, list[dict[str, Any]]] = {COLD: [], WARM: [], SEALED: []}
        for number in range(given.rounds):
            runs[COLD].append(application.stock(f"cold-{number}"))
            runs[WARM].append(application.stock("warm"))
            runs[SEALED].append(application.sealed(f"sealed-{number}"))
    parts = list(runs[COLD][0]["seconds"])
    rows = [
        [
            name,
            f"{statistics.median(total):.2f} s",
            spread(total) if len(total) > 1 else "-",
            *(f"{statistics.median(run['seconds'][part] for run in ran):.2f}" for part in parts),
            _compiles(ran[-1]),
        ]
        for name, ran in runs.items()
        for total in [[run["total"] for run in ran]]
    ]
    head = ["contender", "whole process", "spread", *parts, "compiles"]
    report(
        "bench_sealed", "Start of an application with several compilers", head, rows, into=given.json
    )


def _compiles(run: dict[str, Any]) -> str:
    """Return how many compiles preheat counted; it does not see those of stock libraries."""
    return str(int(run["stats"].get("compiles", 0))) if run.get("stats") else "-"


if __name__ == "__main__":
    main()
