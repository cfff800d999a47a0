"""Tensors at addresses that nothing reads."""


class Tensor:
    def __init__(self, dtype, *, offset=0):
        self.dtype = dtype
        self.address = 0x7F0000000000 + offset

    def data_ptr(self):
        return self.address
