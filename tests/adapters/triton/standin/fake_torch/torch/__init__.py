"""The names of torch by which Triton until 3.7 drives a GPU. The stand-in driver answers."""

import ctypes
import sys
import types

_driver = ctypes.CDLL("libcuda.so.1")


class version:
    hip = None
    cuda = "13.0"


class dtype:
    """Triton asks whether a constant is one."""


float32 = "torch.float32"
int = "i32"


class Tensor:
    """A tensor at an address that nothing reads."""

    def __init__(self, dtype):
        self.dtype = dtype

    def data_ptr(self):
        return 0x7F0000000000

    def zero_(self):
        return self


def empty(size, *, dtype, device):
    del size, device
    return Tensor(dtype)


class cuda:
    @staticmethod
    def is_available():
        return True

    @staticmethod
    def current_device():
        return 0

    @staticmethod
    def set_device(device):
        del device

    @staticmethod
    def synchronize():
        """Nothing runs."""

    class Event:
        """Every measurement takes 50 milliseconds."""

        def __init__(self, enable_timing):
            del enable_timing

        def record(self):
            pass

        def elapsed_time(self, end):
            del end
            return 50.0

    @staticmethod
    def get_device_capability(device=0):
        parts = []
        for attribute in (75, 76):
            value = ctypes.c_int()
            _driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
            parts.append(value.value)
        return tuple(parts)


_C = types.ModuleType("torch._C")
_C._cuda_getCurrentRawStream = lambda _: 0
sys.modules["torch._C"] = _C
