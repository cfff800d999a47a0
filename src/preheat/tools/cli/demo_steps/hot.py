"""A step of `preheat demo`, in a new process: look up every kernel, and run two of them."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from pathlib import Path

import numpy as np

import preheat

__all__: list[str] = []


def main(kernels: Path, arch: str, spawned: float) -> None:
    """Look up every program in `kernels`, run two of them, and print the results as JSON.

    `spawned` is the time of the monotonic clock at which this process was started.
    """
    processes: list[str] = []  # Compilers run in separate processes, and a lookup must start none.
    sys.addaudithook(lambda event, _: processes.append(event) if event == "subprocess.Popen" else None)
    builder = preheat.default_builder()
    cubins = {}
    for file in sorted(kernels.glob("*.cu")):
        artifact = builder.build(preheat.Program.from_file(file), arch)
        cubins[file.stem] = hashlib.sha256(artifact.cubin).hexdigest()
    seconds = time.monotonic() - spawned
    started = len(processes)
    gpu = preheat.device()
    error = float(np.max([_softmax(gpu, kernels / "softmax.cu"), _gemm(gpu, kernels / "gemm.cu")]))
    compiles = builder.stats()["process"].get("compiles", 0)
    result = {"seconds": seconds, "compiles": compiles, "processes": started, "error": error}
    print(json.dumps({**result, "cubins": cubins}))


def _softmax(gpu: preheat.Gpu, file: Path) -> float:
    rows = np.random.default_rng().normal(size=(8, 100)).astype("float32")
    out = gpu.empty(rows.shape)
    gpu.kernel(file, "softmax")[8, 64](gpu.array(rows), out, 100)
    expected = np.exp(rows.astype("float64"))
    return float(abs(out.numpy() - expected / expected.sum(axis=1, keepdims=True)).max())


def _gemm(gpu: preheat.Gpu, file: Path) -> float:
    m, n, k = 65, 33, 20  # not multiples of the tile size
    random = np.random.default_rng()
    a, b = (random.random(shape, dtype="float32") for shape in ((m, k), (k, n)))
    out = gpu.empty((m, n))
    gpu.kernel(file, "gemm")[(1, 2), 256](gpu.array(a), gpu.array(b), out, m, n, k)
    expected = a.astype("float64") @ b.astype("float64")
    return float(abs(out.numpy() / expected - 1).max())


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
