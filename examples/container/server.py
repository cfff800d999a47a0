"""A server that starts sealed in a container: nothing is compiled there.

The width of the rows is an argument, and each width is another instance of the template.
"""

import sys
from pathlib import Path

import numpy as np

import preheat

SOURCE = Path(__file__).with_name("norm.cu")


def main() -> None:
    """Load the kernel, answer one request, and compare the answer with NumPy."""
    width = int(sys.argv[1]) if len(sys.argv) > 1 else 64
    gpu = preheat.device()  # PREHEAT_DEVICE=emulator tries the image without a GPU.
    # In a sealed process, a kernel that the bundle lacks is an error here, at the start, and not
    # a pause during the first request.
    normalize = gpu.kernel(SOURCE, f"normalize<{width}>")
    rows = np.random.default_rng(0).random((4, width), dtype="float32")
    x, y = gpu.array(rows), gpu.empty(rows.shape)
    normalize[len(rows), 32](x, y)
    expected = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    right = bool(np.allclose(y.numpy(), expected, rtol=1e-5))
    compiles = gpu.builder.stats()["process"].get("compiles", 0)
    print(f"width {width}: {'right' if right else 'wrong'}, {compiles:.0f} compiled")


if __name__ == "__main__":
    main()
