"""Bakes on fleets: workers that are killed, scaling, and the bytes that engines return.

kills    2,000 small kernels on Dask and on Ray, on this machine, while workers are killed at random
         times with SIGKILL. Every kernel must be in the bundle, which must be that of a local bake.
         Compiles are counted by the events of all workers. A kernel may be compiled twice only if its
         worker died between the compile and the end of its job, so at most as often as workers died.
scaling  Such kernels on 1, 2, 4, … cores: by shards, each one `preheat bake --shard i/n -j1`, whose
         bundles are merged; and by Dask, with one worker for each core. No process uses other cores.
         The seconds of shards include the start of Python; those of Dask exclude the start of workers.
bytes    2,000 results of 100 KB and of 100 bytes: the cost of workers that return code, not digests.

Caches begin empty, and the compiler's own cache is bypassed.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from bench_bake import small, write_manifest
from common import options, ratio, report
from preheat.ahead.bake import bake
from preheat.ahead.fleets import fleet
from preheat.ahead.jobs import BakedProgram
from preheat.model.config import Config

KERNELS = 2000
RETURNED = 100_000  # bytes of a large result


def config(root: Path, name: str) -> Config:
    """Return the settings of a bake with an empty cache, whose events go to a file."""
    return Config(cache_dirs=(root / name,), lock_dir=root / "locks", events=root / f"{name}.events")


def compiles(root: Path, name: str) -> Counter[str]:
    """Return how often each kernel was compiled, by all processes."""
    counted: Counter[str] = Counter()
    with (root / f"{name}.events").open() as events:
        for event in map(json.loads, events):
            if event["event"] == "compile":
                counted[event["key"]] += 1
    return counted


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


# Kills


class Killer:
    """Kills workers at random times, about one every `interval` seconds."""

    def __init__(self, interval: float, seed: int) -> None:
        self._draw = random.Random(seed)
        self._interval = interval
        self._seen: dict[int, None] = {}  # process ids, the last that ended a job at the end
        self._stop = threading.Event()
        self.kills = 0

    def saw(self, row: BakedProgram) -> None:
        pid = int(row.worker.rpartition(":")[2])
        self._seen.pop(pid, None)
        self._seen[pid] = None

    def __enter__(self) -> Killer:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._draw.expovariate(1 / self._interval)):
            if self._seen:
                pid = self._draw.choice([*self._seen][-(os.cpu_count() or 1) :])
                self._seen.pop(pid, None)
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    self.kills += 1


def bake_with_kills(
    engine: str, manifest: Path, root: Path, interval: float, seed: int
) -> tuple[str, ...]:
    with Killer(interval, seed) as killer:

        def saw(_: object, row: Any) -> None:
            if isinstance(row, BakedProgram):
                killer.saw(row)

        baked = bake(
            manifest,
            executor=f"{engine}://local",
            config=config(root, engine),
            output=root / f"{engine}.heat",
            on_done=saw,
        )
    for failed in baked.failures[:3]:
        print(f"{engine}: {failed.error}", file=sys.stderr)
    counted = compiles(root, engine)
    return (
        engine,
        f"{baked.seconds:.1f}",
        str(killer.kills),
        f"{len(baked.rows):,}",
        str(len(baked.failures)),
        f"{counted.total():,}",
        str(sum(number - 1 for number in counted.values())),
        digest(root / f"{engine}.heat"),
    )


def measure_kills(args: Any, manifest: Path, root: Path) -> None:
    local = bake(manifest, config=config(root, "local"), output=root / "local.heat")
    expected = digest(root / "local.heat")
    rows: list[tuple[str, ...]] = [
        (
            *("here, without a fleet", f"{local.seconds:.1f}", "0", f"{len(local.rows):,}"),
            *(str(len(local.failures)), f"{compiles(root, 'local').total():,}", "0", expected),
        )
    ]
    for engine in args.engines.split(","):
        shutil.rmtree(root / "local", ignore_errors=True)
        rows.append(bake_with_kills(engine, manifest, root, args.kill, args.seed))
        if rows[-1][-1] != expected:
            print(f"{engine}: the bundle differs from that of a local bake", file=sys.stderr)
    head = ("bake", "seconds", "killed", "baked", "failed", "compiles", "compiled twice", "sha256")
    title = (
        f"{args.kernels:,} kernels for sm_90 on {os.cpu_count()} cores, a kill every {args.kill:g} s"
    )
    report("bench_fleet", f"{title} (seed {args.seed})", head, rows, into=args.json)


# Scaling


@contextmanager
def on_cores(count: int) -> Iterator[None]:
    """Let this process and those that it starts use `count` cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def bake_shards(manifest: Path, root: Path, count: int) -> float:
    """Return the seconds of `count` shards at the same time and of the merge of their bundles."""
    environment = {
        **os.environ,
        "PREHEAT_CACHE_DIR": str(root / f"shards-{count}"),
        "PREHEAT_LOCK_DIR": str(root / "locks"),
        "PREHEAT_EVENTS": str(root / f"shards-{count}.events"),
    }
    command = [sys.executable, "-m", "preheat"]
    bundles = [str(root / f"{number}-of-{count}.heat") for number in range(1, count + 1)]
    started = time.perf_counter()
    processes = [
        subprocess.Popen(
            [*command, "bake", str(manifest), "--shard", f"{number}/{count}", "-j1", "-o", bundle],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number, bundle in enumerate(bundles, start=1)
    ]
    messages = [process.communicate()[1] for process in processes]
    for process, message in zip(processes, messages, strict=True):
        if process.returncode:
            sys.exit(f"a shard of {count} failed:\n{message[-2000:]}")
    merged = str(root / f"shards-{count}.heat")
    subprocess.run(
        [*command, "bundle", "merge", *bundles, "-o", merged], check=True, capture_output=True
    )
    return time.perf_counter() - started


def bake_on_dask(manifest: Path, root: Path, count: int) -> float:
    from distributed import LocalCluster

    name = f"dask-{count}"
    with LocalCluster(
        n_workers=count, threads_per_worker=1, host="127.0.0.1", dashboard_address=None
    ) as cluster:
        address = cluster.scheduler_address.replace("tcp://", "dask://")
        settings = config(root, name)
        baked = bake(manifest, executor=address, config=settings, output=root / f"{name}.heat")
    if not baked.ok:
        sys.exit(f"Dask on {count} cores failed: {baked.failures[0].error}")
    return baked.seconds


def measure_scaling(args: Any, manifest: Path, root: Path) -> None:
    ways: dict[str, Callable[[Path, Path, int], float]] = {"shards": bake_shards}
    if "dask" in args.engines.split(","):
        ways["dask"] = bake_on_dask
    seconds: dict[str, dict[int, float]] = {way: {} for way in ways}
    rows = []
    counts = [int(word) for word in args.cores.split(",")]
    for count in counts:
        row = [str(count)]
        for way, run in ways.items():
            with on_cores(count):
                seconds[way][count] = run(manifest, root, count)
            compiled = compiles(root, f"{way}-{count}")
            speed = ratio(seconds[way][counts[0]], seconds[way][count])
            row += [f"{seconds[way][count]:.1f}", speed, f"{compiled.total():,}"]
            row.append(digest(root / f"{way}-{count}.heat"))
        rows.append(tuple(row))
        print(*row, flush=True)  # A time limit may end the run before the table.
    columns = ("seconds", f"against {counts[0]}", "compiles", "sha256")
    head = ("cores", *(f"{way}: {column}" for way in ways for column in columns))
    title = f"{args.scaling_kernels:,} kernels for sm_90 by cores, of {os.cpu_count()}"
    report("bench_fleet", title, head, rows, into=args.json)


# Bytes


def blob(size: int, number: int) -> bytes:
    return random.Random(number).randbytes(size)


def seconds_of(executor: Executor, size: int) -> float:
    for future in [executor.submit(blob, 100, number) for number in range(50)]:
        future.result()  # The workers have started.
    started = time.perf_counter()
    for future in [executor.submit(blob, size, number) for number in range(KERNELS)]:
        assert len(future.result()) == size
    return time.perf_counter() - started


def measure_bytes(args: Any) -> None:
    rows = []
    for engine in args.engines.split(","):
        executor = fleet(f"{engine}://local")()
        small_seconds, large = (seconds_of(executor, size) for size in (100, RETURNED))
        executor.shutdown()
        each = (large - small_seconds) / KERNELS * 1e3
        rows.append((engine, f"{small_seconds:.2f}", f"{large:.2f}", f"{each:.2f} ms"))
    head = ("engine", "100 bytes: seconds", "100 KB: seconds", "more for each result")
    report("bench_fleet", f"{KERNELS:,} results of workers on this machine", head, rows, into=args.json)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--parts", default="kills,scaling,bytes", help="which parts to run")
    parser.add_argument("--engines", default="dask,ray", help="which engines to use")
    parser.add_argument("--kernels", type=int, default=KERNELS, help="of the part with kills")
    parser.add_argument("--scaling-kernels", type=int, default=800, help="of the part on scaling")
    parser.add_argument("--cores", default="1,2", help="such as 1,2,4,8,16")
    parser.add_argument("--kill", type=float, default=10.0, help="mean seconds between two kills")
    parser.add_argument("--seed", type=int, default=1, help="of the times and victims of kills")
    args = parser.parse_args()
    parts = args.parts.split(",")
    # Ray listens on loopback alone. It reads this when it is imported.
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    with tempfile.TemporaryDirectory(prefix="preheat-bench-") as place:
        root = Path(place)
        if "bytes" in parts:
            measure_bytes(args)
        for part, number, measure in (
            ("scaling", args.scaling_kernels, measure_scaling),
            ("kills", args.kernels, measure_kills),
        ):
            if part in parts:
                (root / part).mkdir()
                texts = {f"k{seed}": small(seed) for seed in range(number)}
                measure(args, write_manifest(root / part, texts), root / part)


if __name__ == "__main__":
    main()
