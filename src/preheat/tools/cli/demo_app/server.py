"""A tiny server: three kernels classify batches of rows, with a graph for each batch size.

It answers batches of random rows, compares every answer with NumPy in float64, and prints one line.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np

import preheat

CLASSES = 10
SIZES = preheat.buckets(8)  # a batch is padded to one of 1, 2, 4 and 8 rows

PROJECT = """
template <class T>
__global__ void project(const T* x, const T* weight, T* y, int width, int classes) {
    const T* row = x + blockIdx.x * width;
    T sum = 0;
    for (int i = 0; i < width; ++i) sum += row[i] * weight[i * classes + threadIdx.x];
    y[blockIdx.x * classes + threadIdx.x] = sum;
}
"""


class Server:
    """Keeps kernels, weights and buffers on the device, so that a request allocates nothing."""

    def __init__(self, width: int) -> None:
        self.gpu = gpu = preheat.device()  # PREHEAT_DEVICE selects it.
        headers = {"model.h": f"constexpr int WIDTH = {width};\n"}  # generated, not a file
        self.rms_norm = gpu.kernel("layers.cu", "rms_norm", headers=headers)
        self.softmax = gpu.kernel("layers.cu", "softmax", headers=headers)
        self.project = gpu.kernel(PROJECT, "project<float>", label="project.cu")
        weight = np.random.default_rng(0).normal(size=(width, CLASSES)) / np.sqrt(width)
        self.weight = gpu.array(weight, "float32")
        self.rows = {size: gpu.zeros((size, width)) for size in SIZES}
        self.hidden = {size: gpu.empty((size, width)) for size in SIZES}
        self.scores = {size: gpu.empty((size, CLASSES)) for size in SIZES}
        self.answers = {size: gpu.empty((size, CLASSES)) for size in SIZES}
        self.graphs = gpu.graphs(name="classify")
        self.graphs.warmer(self.step)
        gpu.warm(*gpu.builder.bundles)  # Before traffic: load what was baked, and capture the graphs.

    def step(self, size: int) -> None:
        """Launch the kernels that classify a batch of `size` rows."""
        self.rms_norm[size, 32](self.rows[size], self.hidden[size])
        width = self.weight.shape[0]
        self.project[size, CLASSES](self.hidden[size], self.weight, self.scores[size], width, CLASSES)
        self.softmax[size, 32](self.scores[size], self.answers[size], CLASSES)

    def answer(self, rows: np.ndarray) -> np.ndarray:
        """Return the probability of each class, for each of the rows."""
        size = preheat.bucket(len(rows), SIZES)
        self.rows[size].write(preheat.padded(rows, size))
        self.graphs.run(size, lambda: self.step(size))  # launches first, then captures, then replays
        return self.answers[size].numpy()[: len(rows)]

    def expected(self, rows: np.ndarray) -> np.ndarray:
        """Return the answer of NumPy in float64."""
        x = rows.astype("float64")
        x /= np.sqrt((x**2).mean(axis=1, keepdims=True) + 1e-5)
        scores: np.ndarray = np.exp(x @ self.weight.numpy().astype("float64"))
        scores /= scores.sum(axis=1, keepdims=True)
        return scores


def main() -> None:
    """Start the server, answer batches of every size, and print a summary."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--width", type=int, default=64, help="numbers in a row")
    width = arguments.parse_args().width
    started = time.perf_counter()
    server = Server(width)
    ready = time.perf_counter() - started
    random = np.random.default_rng()
    errors = []
    for size in 3 * [*range(1, 9)]:
        rows = random.normal(size=(size, width)).astype("float32")
        errors.append(abs(server.answer(rows) - server.expected(rows)).max())
    error = float(np.max(errors))
    compiles = server.gpu.builder.stats()["process"].get("compiles", 0)
    summary = {
        "device": server.gpu.name,
        "ready": round(ready, 3),
        "batches": len(errors),
        "graphs": len(server.graphs),
        "compiles": compiles,
        "error": error,
    }
    print(json.dumps(summary))
    if not error < 1e-5:
        raise SystemExit(f"an answer is off by {error:.1e}")


if __name__ == "__main__":
    main()
