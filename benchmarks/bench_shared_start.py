"""Measure a machine with an empty cache that launches 50 kernels for the first time.

Contenders take turns, one fresh Python each, with a cache directory of its own. "Shared store" finds
all 50 kernels, signed, on a server of the tests on loopback; the rows with 5 ms have a proxy before it
that delays each request. "Local disk" has them in its own cache, and "nothing stored" compiles them.
"One by one" asks for a kernel and launches it before it asks for the next; "together" asks for all of
them with `gpu.kernels`. The time counts from the first line of the script, after its imports, until
the results of all launches are checked. Where there is no GPU, the emulator runs the kernels.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from common import options, report, spread

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.store.remote.proxy import Proxy
from tests.store.remote.servers import Server, redis_server, s3_server, webdav_server

COUNT = 50
DELAY = 0.005
CHILD = """
import sys, time
import numpy as np
import preheat
SOURCE = '''
extern "C" __global__ void k_NUMBER(float a, const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = a * x[i] + y[i] + NUMBER;
}
'''
gpu = preheat.device("auto")
x, y = gpu.array(np.ones(64, "float32")), gpu.zeros(64)
wanted = [(SOURCE.replace("NUMBER", str(i)), f"k_{i}") for i in range(COUNT)]
gpu.synchronize()
began = time.perf_counter()
if sys.argv[1] == "together":
    for kernel in gpu.kernels(wanted):
        kernel[1, 64](2.0, x, y, 64)
else:
    for source, name in wanted:
        gpu.kernel(source, name)[1, 64](2.0, x, y, 64)
total = float(y.numpy()[0])
print(time.perf_counter() - began)
assert total == sum(2 + i for i in range(COUNT)), total
stats = preheat.default_builder().stats()["process"]
print(int(stats.get("compiles", 0)), file=sys.stderr)
"""


def run(cache: Path, how: str, env: Mapping[str, str]) -> tuple[float, int]:
    """Run the child with a cache directory, and return its seconds and its compiles."""
    places = {"PREHEAT_CACHE_DIR": str(cache), "PREHEAT_LOCK_DIR": f"{cache}-locks"}
    ran = subprocess.run(
        [sys.executable, "-c", CHILD.replace("COUNT", str(COUNT)), how],
        env={**os.environ, **env, **places},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return float(ran.stdout), int(ran.stderr.splitlines()[-1])


@contextmanager
def servers(root: Path) -> Iterator[dict[str, Server]]:
    """Yield the servers that can run here."""
    found = {}
    with ExitStack() as running:
        for name, start in (("Redis", redis_server), ("S3", s3_server), ("WebDAV", webdav_server)):
            folder = root / name
            folder.mkdir()
            try:
                found[name] = running.enter_context(start(folder))
            except pytest.skip.Exception as missing:
                print(f"{name} is left out: {missing}")
        yield found


def contenders(found: Mapping[str, Server], running: ExitStack) -> dict[str, dict[str, str]]:
    """Return the settings of each contender."""
    made: dict[str, dict[str, str]] = {"nothing stored": {}, "local disk": {}}
    for name, server in found.items():
        made[f"shared store on {name}"] = {"PREHEAT_REMOTE": server.url("start")}
        proxy = running.enter_context(Proxy(server.port, delay=DELAY))
        url = server.url("start", port=proxy.port)
        made[f"shared store on {name}, 5 ms added"] = {"PREHEAT_REMOTE": url}
    return made


def measure(root: Path, rounds: int) -> list[tuple[str, ...]]:
    """Return a row for each contender."""
    key, trusted = root / "signing.pem", root / "trusted.pem"
    made = subprocess.run(
        [sys.executable, "-m", "preheat", "keys", "new", str(key)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    trusted.write_text(made.stdout)
    signing = {"PREHEAT_SIGNING_KEY": str(key)}
    reading = {"PREHEAT_TRUSTED_KEYS": str(trusted)}
    with ExitStack() as running:
        found = running.enter_context(servers(root))
        for server in found.values():
            run(
                root / f"writer-{server.port}",
                "together",
                {**signing, "PREHEAT_REMOTE": server.url("start")},
            )
        run(root / "disk", "together", {})
        times: dict[str, dict[str, list[float]]] = {}
        for number in range(rounds):
            for name, env in contenders(found, running).items():
                for how in ("one by one", "together"):
                    cache = root / (
                        "disk" if name == "local disk" else f"{number}-{how}-{name}".replace(" ", "-")
                    )
                    seconds, compiles = run(cache, how, {**reading, **env})
                    assert compiles == (COUNT if name == "nothing stored" else 0), (name, compiles)
                    times.setdefault(name, {}).setdefault(how, []).append(seconds)
    return [
        (name, *(text for values in by.values() for text in (median(values), spread(values))))
        for name, by in times.items()
    ]


def median(seconds: list[float]) -> str:
    """Return the median of measured times as text."""
    return f"{statistics.median(seconds):.3f} s"


def main() -> None:
    """Print and store the table."""
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder), arguments.rounds)
    head = ("where 50 kernels are", "one by one", "spread", "together", "spread")
    report("bench_shared_start", "50 kernels, first launch", head, rows, into=arguments.json)


if __name__ == "__main__":
    main()
