"""Measure the GPU memory of 16 graphs of one torch model: separate memory pools, and a shared one.

The model is an MLP, captured at 16 batch sizes, the largest first. For each kind of pool a process of
its own captures all graphs, replays each of them and compares the results with the model itself. Memory
is what torch has reserved from the GPU for the graphs: after the captures, less what it had before. The
largest graph alone is measured, too.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any

from common import options, report, us

SIZES = tuple(range(16, 257, 16))
CHILD = """
import gc, json, sys, time
import torch
import preheat

sizes, width, kind = json.loads(sys.argv[1])
torch.manual_seed(0)
gpu = preheat.device("cuda")
nn = torch.nn
block = lambda: (nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.GELU())
layers = [module for _ in range(4) for module in block()]
model = nn.Sequential(*layers, nn.Linear(width, 64)).cuda().eval()
inputs = {size: torch.randn(size, width, device="cuda") for size in sizes}
makes = {
    "separate": lambda: None,
    "shared": gpu.shared_pool,
    "torch.cuda.MemPool": torch.cuda.MemPool,
    "graph_pool_handle": torch.cuda.graph_pool_handle,
}
graphs = gpu.graphs(len(sizes), pool=makes[kind]())

def step(size):
    with torch.no_grad():
        return model(inputs[size])

expected = {size: step(size).clone() for size in sizes}
torch.cuda.synchronize()
gc.collect()
torch.cuda.empty_cache()
before = torch.cuda.memory_reserved()
started = time.perf_counter()
graphs.warm(sizes, step)
torch.cuda.synchronize()
seconds = time.perf_counter() - started
# The warm-up runs each step once outside of its graph; that memory can be given back.
torch.cuda.empty_cache()
reserved = torch.cuda.memory_reserved() - before
worst = 0.0
for size in (*sizes, *reversed(sizes)):
    found = graphs.run(size, lambda size=size: step(size))
    worst = max(worst, (found - expected[size]).abs().max().item())
rounds = 200
torch.cuda.synchronize()
started = time.perf_counter()
for _ in range(rounds):
    for size in sizes:
        graphs.replay(size)
host = (time.perf_counter() - started) / rounds / len(sizes) * 1e6
torch.cuda.synchronize()
print(json.dumps({"bytes": reserved, "warm_s": seconds, "replay_us": host, "error": worst}))
"""


def measured(kind: str, sizes: tuple[int, ...], width: int) -> dict[str, Any]:
    """Return what a new process measures with one kind of pool."""
    command = [sys.executable, "-c", CHILD, json.dumps([sizes, width, kind])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{kind}: the process failed\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if result["error"] > 1e-3:
        raise SystemExit(f"{kind}: results differ by {result['error']}")
    return result


def main() -> None:
    parser: argparse.ArgumentParser = options(__doc__)
    parser.add_argument("--width", type=int, default=4096, help="of the model")
    args = parser.parse_args()
    kinds = ("separate", "shared", "torch.cuda.MemPool", "graph_pool_handle")
    found = {kind: measured(kind, SIZES, args.width) for kind in kinds}
    found["largest graph alone"] = measured("separate", SIZES[-1:], args.width)
    separate = found["separate"]["bytes"]
    head = ("pool", "graphs", "memory", "separate / this", "warm", "replay, host")
    rows = [
        (
            kind,
            1 if kind == "largest graph alone" else len(SIZES),
            f"{row['bytes'] / 2**20:.1f} MiB",
            f"{separate / row['bytes']:.2f} x",
            f"{row['warm_s']:.3f} s",
            us(row["replay_us"]),
        )
        for kind, row in found.items()
    ]
    title = f"graphs of an MLP at {len(SIZES)} batch sizes, 4 blocks of width {args.width}"
    report("bench_pool", title, head, rows, into=args.json)


if __name__ == "__main__":
    main()
