"""An application that knows nothing of preheat."""

import warnings

import kernels as k
import more as m
import numpy as np
from numba import cuda

warnings.simplefilter("ignore")  # The grids are small, about which Numba warns.


def main():
    x = cuda.to_device(np.ones(32, np.float32))
    k.add[1, 32](x, x, 32)
    k.add[1, 32](x, x, 32.0)
    k.halve[1, 32](x)
    m.eager[1, 32](x)
    k.add.forall(32)(x, x, np.int32(32))


if __name__ == "__main__":
    main()
