"""Two kernels of preheat, and a graph of them."""

import numpy as np

import preheat

SOURCE = """
extern "C" __global__ void add(float* x, float v) { x[threadIdx.x] += v; }
extern "C" __global__ void scale(float* x, float v) { x[threadIdx.x] *= v; }
"""

gpu = preheat.device()
module = gpu.module(SOURCE, label="app.cu")
add, scale = module["add"], module["scale"]
x = gpu.zeros(32)
with gpu.capture() as graph:
    add[1, 32](x, 1.0)
    scale[1, 32](x, 2.0)
for _ in range(3):
    graph.replay()
assert np.array_equal(x.numpy(), np.full(32, 14, "float32"))
print("right")
