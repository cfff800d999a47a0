"""An application that knows nothing of preheat. It prints whether its results are right."""

import json
import warnings

import kernels as k
import numpy as np
from numba import cuda
from numba.core.errors import NumbaWarning

warnings.simplefilter("ignore", NumbaWarning)  # The grids are small, about which Numba warns.


def main():
    x = np.arange(1000, dtype=np.float32)
    scaled, total = cuda.device_array_like(x), cuda.to_device(np.zeros(1, np.float64))
    k.scale[8, 128](cuda.to_device(x), scaled, np.float32(2.5))
    k.total[8, 128](cuda.to_device(x), total)
    small = x / np.float32(1000)
    values = cuda.device_array_like(small)
    k.polynomial[8, 128](cuda.to_device(small), values, np.float32(2.5))
    expected = small.astype(np.float64) ** 3 - small.astype(np.float64) ** 2 + 2.5 * small + 1
    right = {
        "scale": bool((scaled.copy_to_host() == np.float32(2.5) * x + 1).all()),
        "polynomial": bool(np.allclose(values.copy_to_host(), expected, rtol=1e-6)),
        "total": bool(total.copy_to_host()[0] == x.sum(dtype=np.float64)),
    }
    print(json.dumps(right))


if __name__ == "__main__":
    main()
