"""An application that knows nothing of preheat."""

import kernels as k
import triton
from tensors import Tensor


def main():
    x, y, o = Tensor("fp32"), Tensor("fp32"), Tensor("fp32")
    k.add[(4,)](x, y, o, 4096, 1.5, BLOCK=1024)
    k.add[(4,)](x, y, o, 4097, 1.5, BLOCK=1024)
    k.add[(1,)](x, y, o, 1, 1.5, BLOCK=1024)
    k.add[(4,)](x, Tensor("fp32", offset=4), o, 2**40, 1.5, BLOCK=1024)
    bf16 = triton.language.bfloat16
    k.strided[(4,)](
        x, Tensor("bf16"), 64, 64, 64, 1, (64, 7), ACT=k.relu, DT=bf16, BM=16, BN=64, num_warps=8
    )
    a, b, c = Tensor("bf16"), Tensor("bf16"), Tensor("bf16")
    k.mm[(8, 8)](a, b, c, 64, 64, 64, 64, 64, 64, BM=32, BN=32, BK=32, num_stages=2)


if __name__ == "__main__":
    main()
