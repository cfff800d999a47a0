"""Count what hosts with empty caches compile and ask of one store that they share.

Every host has a cache and locks of its own, and several processes, half of which ask for their kernels
together and half for one after another. All processes start at the same time. Then the same again,
while one process is killed in its first compile, with a lease. `compiles` are those that began.
Requests and bytes are those of all processes, and per kernel and host: multiply them by the number of
hosts to know the load of a fleet on its store. The servers run on this machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import options, report

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
ENGINES = ("redis", "s3", "webdav", "file")
KILLED = -9
PROCESS = """
import json, os, random, signal, sys, time
from pathlib import Path
from preheat.model.arch import Arch
from preheat.build.builder import Builder
from preheat.build.batch import build_all
from preheat.model.program import Program
from preheat.toolchain import translate

folder = Path(sys.argv[1])
kernels, together, dies = map(int, sys.argv[2:])
SOURCE = 'extern "C" __global__ void k_{0}(float* x) {{ x[threadIdx.x] += {0}; }}'
wanted = [Program.of(SOURCE.format(number), label=f"k{number}.cu") for number in range(kernels)]
random.shuffle(wanted)
arch = Arch.parse("sm_90")
compile_cuda = translate.compile_cuda

def noted(pool, library, program, *rest):
    with (folder / "compiles").open("a") as file:
        file.write(f"{program.label}\\n")
    if dies:
        os.kill(os.getpid(), signal.SIGKILL)
    return compile_cuda(pool, library, program, *rest)

translate.compile_cuda = noted
builder = Builder.open()
print("ready", flush=True)
sys.stdin.readline()
started = time.monotonic()
if together:
    artifacts = build_all(builder, [(program, arch) for program in wanted])
else:
    artifacts = [builder.build(program, arch) for program in wanted]
ended = time.monotonic()
assert [f"k_{program.label[1:-3]}" for program in wanted] == [a.entries[0].name for a in artifacts]
builder.close()
print(json.dumps({"started": started, "ended": ended, **builder.stats()["process"]}), flush=True)
"""


@dataclass(frozen=True)
class Size:
    """How many hosts, processes of each, and kernels."""

    hosts: int
    processes: int
    kernels: int


@dataclass(frozen=True)
class Outcome:
    """The compiles of all processes by label, and the counters of those that were not killed."""

    compiles: Counter[str]
    counters: list[dict[str, float]]

    def total(self, *names: str) -> float:
        """Return the sum of some counters; a name that ends in a dot means all that begin with it."""
        return sum(
            value
            for counters in self.counters
            for name, value in counters.items()
            if any(name == each or (each.endswith(".") and name.startswith(each)) for each in names)
        )

    @property
    def seconds(self) -> float:
        """The seconds until the last process had everything."""
        first = min(counters["started"] for counters in self.counters)
        return max(counters["ended"] for counters in self.counters) - first


@contextmanager
def store(engine: str, folder: Path) -> Iterator[str]:
    """Run a server, and yield the URL of an empty store on it."""
    from tests.store.remote import servers

    if engine == "file":
        yield f"file://{folder / 'store'}"
        return
    place = folder / engine
    place.mkdir()
    with getattr(servers, f"{engine}_server")(place) as server:
        yield server.url("bench")


def run(url: str, folder: Path, size: Size, *, kill: bool) -> Outcome:
    """Run all processes of all hosts."""
    running = [
        start(url, folder, size, host, number, dies=kill and host == number == 0)
        for host in range(size.hosts)
        for number in range(size.processes)
    ]
    try:
        for process in running:
            expect(process, "ready\n")
        for process in running[: 1 if kill else None]:
            go_on(process)
        if kill:
            assert running[0].wait() == KILLED
            for process in running[1:]:
                go_on(process)
        rows = [json.loads(line(process)) for process in running[1 if kill else 0 :]]
    finally:
        for process in running:
            process.kill()
            process.communicate()
    return Outcome(Counter((folder / "compiles").read_text().split()), rows)


def start(
    url: str, folder: Path, size: Size, host: int, number: int, *, dies: bool
) -> subprocess.Popen[str]:
    """Start one process of a host."""
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "PREHEAT_REMOTE": url,
        "PREHEAT_REMOTE_UNSIGNED": "1",
        "PREHEAT_REMOTE_TIMEOUT": "30",
        "PREHEAT_CACHE_DIR": str(folder / f"cache-{host}"),
        "PREHEAT_LOCK_DIR": str(folder / f"locks-{host}"),
        "CUDA_CACHE_DISABLE": "1",
    }
    together = number % 2 == 0 and not dies  # The one that dies has one compile at a time.
    arguments = [str(folder), str(size.kernels), str(int(together)), str(int(dies))]
    return subprocess.Popen(
        [sys.executable, "-c", PROCESS, *arguments], env=env, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def line(process: subprocess.Popen[str]) -> str:
    """Return the next line of a process, or exit with its error."""
    assert process.stdout is not None
    said = process.stdout.readline()
    if not said:
        sys.exit(process.communicate()[1])
    return said


def expect(process: subprocess.Popen[str], said: str) -> None:
    """Wait until a process says something."""
    heard = line(process)
    assert heard == said, heard


def go_on(process: subprocess.Popen[str]) -> None:
    """Let a process begin."""
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def row(engine: str, size: Size, outcome: Outcome, *, kill: bool) -> tuple[Any, ...]:
    """Return what a run has shown, as a row of the table."""
    each = size.kernels * size.hosts
    requests = outcome.total("requests.remote.")
    lease = outcome.total("lease_requests")
    sent, received = outcome.total("bytes_sent.remote"), outcome.total("bytes_received.remote")
    return (
        engine,
        "killed" if kill else "-",
        outcome.compiles.total(),
        f"{outcome.seconds:.1f} s",
        int(requests),
        f"{requests / each:.1f}",
        int(lease),
        f"{lease / each:.1f}",
        f"{sent / each:.0f}",
        f"{received / each:.0f}",
        int(outcome.total("faults")),
    )


HEAD = (
    *("engine", "holder", "compiles", "time", "requests", "per kernel and host"),
    *("lease requests", "leases per kernel and host", "bytes sent per kernel and host"),
    *("bytes received per kernel and host", "faults"),
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all engines, without and with a holder that is killed."""
    parser = options(__doc__)
    parser.add_argument("engines", nargs="*", default=ENGINES, help=f"of {', '.join(ENGINES)}")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--processes", type=int, default=8, help="of each host")
    parser.add_argument("--kernels", type=int, default=20)
    chosen = parser.parse_args(arguments)
    size = Size(chosen.hosts, chosen.processes, chosen.kernels)
    rows = []
    for engine in chosen.engines:
        for kill in (False, True):
            with tempfile.TemporaryDirectory() as place, store(engine, Path(place)) as url:
                outcome = run(url, Path(place), size, kill=kill)
            rows.append(row(engine, size, outcome, kill=kill))
            print(*rows[-1], flush=True)
    title = f"{size.hosts} hosts, {size.processes} processes each, {size.kernels} kernels, empty caches"
    report("bench_hosts", title, HEAD, rows, into=chosen.json)


if __name__ == "__main__":
    main()
