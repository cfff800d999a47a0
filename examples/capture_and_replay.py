"""Capture a step of many launches as a graph, and replay it with one call.

    python capture_and_replay.py

A step of a model launches hundreds of kernels, and each launch costs microseconds of the host. A
graph is launched as a whole.
"""

import numpy as np

import preheat

SOURCE = """
// One explicit step of the heat equation in a rod. The step size is read from memory.
extern "C" __global__ void heat(const float* old_, float* new_, const float* rate, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i == 0 || i >= n - 1) { if (i < n) new_[i] = old_[i]; return; }
    new_[i] = old_[i] + *rate * (old_[i - 1] - 2 * old_[i] + old_[i + 1]);
}
"""
N, STEPS = 1000, 20

gpu = preheat.device("auto")
heat = gpu.kernel(SOURCE, "heat")
start = np.zeros(N, dtype="float32")
start[N // 2] = 1
here, there = gpu.array(start), gpu.empty(N)

# A scalar is a value in device memory. A replay can set it by its name.
rate = gpu.scalar("float32", 0.1, name="rate")

# Nothing runs in the block. The launches are recorded, with everything that they use.
with gpu.capture(name="rod") as graph:
    for _ in range(STEPS // 2):
        heat[-(-N // 256), 256](here, there, rate, N)
        heat[-(-N // 256), 256](there, here, rate, N)
print(f"{len(graph.nodes)} launches in one graph")

# Each replay runs all of them, with the data that the arrays have now.
for _ in range(5):
    graph.replay()
graph.replay(rate=0.2)  # the same graph with another value
rod = here.numpy()
print(f"after {6 * STEPS} steps: middle {rod[N // 2]:.4f}, sum {rod.sum():.4f}")

# The same in NumPy.
expected = start.astype("float64")
for step in range(6 * STEPS):
    inner = expected[:-2] - 2 * expected[1:-1] + expected[2:]
    expected[1:-1] += (0.1 if step < 5 * STEPS else 0.2) * inner
assert np.abs(rod - expected).max() < 1e-5

# `graph.svg()` draws the graph, and a notebook shows this picture automatically.
graph.close()
