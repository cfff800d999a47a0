"""A process that races for objects with others: `python -m tests.store.remote.racers ID ROUNDS URL...`.

It prints "ready" and waits for a line. Then it prints, as JSON, which rounds it won, by URL and kind.
"""

from __future__ import annotations

import json
import sys

from preheat.store.remote.engine import Engine, open_engine
from preheat.store.remote.url import parse_remote

__all__ = ["RACES", "prepare", "race"]

RACES = ("create", "swap", "discard")


def prepare(engine: Engine, rounds: int) -> None:
    """Write the objects that racers replace or remove."""
    for each in range(rounds):
        engine.put(f"v1/swap/{each}", b"old")
        engine.put(f"v1/discard/{each}", b"old")


def race(engine: Engine, kind: str, rounds: int, mine: bytes) -> list[int]:
    """Return the rounds in which this racer created, replaced or removed the object."""

    def wins(name: str) -> bool:
        if kind == "create":
            return engine.create(name, mine, seconds=600)
        if kind == "swap":
            return engine.swap(name, b"old", mine, seconds=600)
        return engine.discard(name, b"old")

    return [each for each in range(rounds) if wins(f"v1/{kind}/{each}")]


def _main(identity: str, rounds: int, urls: list[str]) -> None:
    engines = [open_engine(parse_remote(url), timeout=60) for url in urls]
    for engine in engines:
        engine.get("warm")  # Connections are open, and modules are imported.
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    won = [[race(engine, kind, rounds, identity.encode()) for kind in RACES] for engine in engines]
    sys.stdout.write(json.dumps(won))


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
