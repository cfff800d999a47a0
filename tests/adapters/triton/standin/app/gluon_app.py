"""An application in Gluon that knows nothing of preheat."""

import gluon_kernels as k
from tensors import Tensor
from triton.experimental.gluon import language as gl


def main(sizes=(4096, 4097)):
    x, o = Tensor("fp32"), Tensor("fp32")
    rows = gl.SliceLayout(1, gl.BlockedLayout([1, 1], [32, 1], [4, 1], [1, 0]))
    for n in sizes:
        k.scale[(4,)](x, o, n, 1.5, BLOCK=1024)
    k.shift[(4,)](x, o, 4096, BLOCK=1024, layout=rows)


if __name__ == "__main__":
    main()
