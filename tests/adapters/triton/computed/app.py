"""An application that knows nothing of preheat or torch. It prints the largest errors of its kernels.

They are compared with NumPy in float64, relative to the largest result.
"""

import json

import kernels as k
import numpy as np
from cuda.bindings import driver as cu

ROWS, COLUMNS, INNER = 50, 70, 96


def ok(result):
    assert int(result[0]) == 0, result[0]
    return result[1] if len(result) == 2 else None


class Tensor:
    """An array in the memory of the device."""

    def __init__(self, array):
        self.array = array
        self.dtype = {"float16": "fp16", "float32": "fp32"}[array.dtype.name]
        self.address = int(ok(cu.cuMemAlloc(array.nbytes)))
        ok(cu.cuMemcpyHtoD(self.address, array.ctypes.data, array.nbytes))

    def data_ptr(self):
        return self.address

    def back(self):
        ok(cu.cuMemcpyDtoH(self.array.ctypes.data, self.address, self.array.nbytes))
        return self.array


def error(found, expected):
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def result(*shape):
    return Tensor(np.full(shape, np.nan, np.float32))


def main():
    ok(cu.cuInit(0))
    ok(cu.cuCtxPushCurrent(ok(cu.cuDevicePrimaryCtxRetain(0))))
    rng = np.random.default_rng(7)
    a, b = (
        rng.standard_normal(shape).astype(np.float16) for shape in ((ROWS, INNER), (INNER, COLUMNS))
    )
    x = rng.standard_normal((ROWS, COLUMNS)).astype(np.float32)
    weight, bias = (rng.standard_normal(COLUMNS).astype(np.float32) for _ in range(2))
    product, shares, normal = result(ROWS, COLUMNS), result(ROWS, COLUMNS), result(ROWS, COLUMNS)
    sizes = {"BM": 32, "BN": 32, "BK": 32}
    k.matmul[(2, 3)](Tensor(a), Tensor(b), product, ROWS, COLUMNS, INNER, **sizes)
    k.softmax[(ROWS,)](Tensor(x), shares, COLUMNS, BLOCK=128)
    given = Tensor(x), Tensor(weight), Tensor(bias)
    k.layer_norm[(ROWS,)](*given, normal, COLUMNS, 1e-5, BLOCK=128)
    exact = x.astype(np.float64)
    powers = np.exp(exact - exact.max(axis=1, keepdims=True))
    deviation = np.sqrt(exact.var(axis=1, keepdims=True) + 1e-5)
    centred = exact - exact.mean(axis=1, keepdims=True)
    errors = {
        "matmul": error(product.back(), a.astype(np.float64) @ b.astype(np.float64)),
        "softmax": error(shares.back(), powers / powers.sum(axis=1, keepdims=True)),
        "layer_norm": error(normal.back(), centred / deviation * weight + bias),
    }
    print(json.dumps(errors))


if __name__ == "__main__":
    main()
