"""Instantiate a template that includes headers, for several types and widths.

python header_and_template/main.py
"""

from pathlib import Path

import numpy as np

import preheat

NORM = Path(__file__).parent / "kernels" / "norm.cu"

gpu = preheat.device("auto")

# The name of an instance is written as in C++. The compiler finds headers in the directory of the
# file. `include=` lists other directories, and `headers=` has headers that the program makes.
variants = [("float", 64), ("float", 256), ("__half", 64)]

# All instances in one call: those that no cache has are compiled on all cores.
kernels = gpu.kernels([(NORM, f"rms_norm<{kind}, {width}>") for kind, width in variants])

dtypes = {"float": "float32", "__half": "float16"}
for (kind, width), kernel in zip(variants, kernels, strict=True):
    rows = np.random.default_rng(0).standard_normal((8, width)).astype(dtypes[kind])
    x, out = gpu.array(rows), gpu.empty(rows.shape, dtypes[kind])
    kernel[len(rows), 32](x, out)
    exact = rows.astype("float64")
    exact /= np.sqrt((exact**2).mean(axis=1, keepdims=True) + 1e-6)
    error = np.abs(out.numpy() - exact).max()
    print(f"rms_norm<{kind}, {width}>: right to {'1e-5' if error < 1e-5 else '2e-3'}")
    assert error < (1e-5 if kind == "float" else 2e-3), error
