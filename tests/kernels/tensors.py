"""Stand-ins for tensors of torch and arrays of CuPy, with shapes and types for the shipped kernels."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from preheat.devices.host import host_bytes
from preheat.gpu import Gpu
from preheat.model.dtypes import DTYPES
from tests.standin import ITEM, FakeArray, FakeCuPy, FakeTensor, FakeTorch, Storage

__all__ = ["FloatCuPy", "FloatTorch"]


class Element:
    """An element type of the library, which compares by identity as those of torch do."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return f"torch.{self._name}"


class FloatTensor(FakeTensor):
    """A tensor with any shape and element type."""

    sizes: tuple[int, ...] = ()
    element = "float32"

    @property
    def dtype(self) -> object:
        return getattr(self.library.module, self.element)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.sizes

    @property
    def nbytes(self) -> int:
        return math.prod(self.sizes) * self.itemsize

    @property
    def itemsize(self) -> int:  # type: ignore[override]
        return DTYPES[self.element].size

    def stride(self) -> tuple[int, ...]:
        return tuple(math.prod(self.sizes[n + 1 :]) * self.step for n in range(len(self.sizes)))

    def numpy(self) -> Any:
        out = np.empty(self.sizes, DTYPES[self.element].numpy())
        self.library.device.copy_out(host_bytes(out), self.data_ptr(), self.library.current)
        return out


class FloatTorch(FakeTorch):
    """torch, with floating-point tensors in its default stream."""

    def __init__(self, gpu: Gpu, name: str = "faketorch") -> None:
        super().__init__(gpu, name)
        self.Tensor = type("Tensor", (FloatTensor,), {"__module__": name})
        self.module.Tensor = self.Tensor
        for element in ("float32", "float16", "float64"):
            setattr(self.module, element, Element(element))
        self.current = self.default = gpu._device.adopt(0)

    def view(
        self, storage: Any, shape: tuple[int, ...], *, offset: int = 0, element: str = "float32"
    ) -> Any:
        """Return a tensor over memory, which begins `offset` words after its start."""
        made = self.Tensor(self, storage, math.prod(shape), offset)
        made.sizes, made.element = shape, element
        return made

    def tensor(self, values: Any) -> Any:
        """Return a copy of an array of NumPy."""
        host = np.ascontiguousarray(values)
        words = -(-host.nbytes // ITEM)
        made = self.view(Storage(self, max(words, 1)), host.shape, element=str(host.dtype))
        if host.nbytes:
            self.device.copy_in(made.data_ptr(), host_bytes(host), self.current)
        return made


class FloatArray(FakeArray):
    """An array of CuPy of float32 with any shape."""

    sizes: tuple[int, ...] = ()

    @property
    def dtype(self) -> Any:
        return np.dtype("float32")

    @property
    def shape(self) -> tuple[int, ...]:
        return self.sizes

    @property
    def strides(self) -> tuple[int, ...]:
        step = 1 if self._c_contiguous else 2
        return tuple(math.prod(self.sizes[n + 1 :]) * step * ITEM for n in range(len(self.sizes)))

    def numpy(self) -> Any:
        out = np.empty(self.sizes, "float32")
        self.library.device.copy_out(host_bytes(out), self.data.ptr, self.library.current)
        return out


class FloatCuPy(FakeCuPy):
    """CuPy, with arrays of float32 in its default stream."""

    def __init__(self, gpu: Gpu, name: str = "fakecupy") -> None:
        super().__init__(gpu, name)
        self.ndarray = type("ndarray", (FloatArray,), {"__module__": name})
        self.module.ndarray = self.ndarray
        self.module.float32 = np.float32
        self.current = self.default = gpu._device.adopt(0)

    def array(self, values: Any) -> Any:
        """Return a copy of an array of NumPy."""
        host = np.ascontiguousarray(values, "float32")
        made = self.ndarray(self, Storage(self, host.size), host.size)
        made.sizes = host.shape
        self.device.copy_in(made.data.ptr, host_bytes(host), self.current)
        return made
