"""The kernel of an operator of torch: where it comes from, and on which device it runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from preheat.adapters.torch.schema import Schema
from preheat.build.request import Source
from preheat.devices.kernel import Kernel
from preheat.errors import short_repr
from preheat.gpu import Gpu, device
from preheat.model.artifact import without_types
from preheat.model.config import Config
from preheat.model.program import Program

__all__ = ["KernelChoice", "LoadedKernel", "OperatorKernel", "SourceKernel", "operator_kernel"]

Tensor = Any  # torch is imported when an operator is made
#: How a caller names the kernel of an operator.
KernelChoice = Source | tuple[Source, str | Callable[..., str]] | Kernel
_HOSTED = ("emulator", "auto")  # the kinds of devices that may take tensors of the host
_FORMS = "a source, (source, name), or a kernel that gpu.kernel returned"


@dataclass(frozen=True)
class SourceKernel:
    """A kernel of a program, loaded on the device of the tensors when it is first launched.

    `name` may be a function of the arguments. `host` is the device for tensors of the host, or None.
    """

    program: Program
    name: str | Callable[..., str]
    host: str | None

    def on_device_of(self, tensor: Tensor, known: tuple[Any, ...]) -> Kernel:
        """Return the kernel for these arguments, on the device of `tensor`."""
        name = self.name if isinstance(self.name, str) else self.name(*known)
        program = _instantiate(self.program, name) if "<" in name else self.program
        return _gpu(tensor, self.host).kernel(program, name)


@functools.lru_cache(maxsize=1024)
def _instantiate(program: Program, name: str) -> Program:
    """Return the program with an instance of one of its templates."""
    instance = without_types(name)
    if instance in program.names:
        return program
    return replace(program, names=(instance, *program.names))


@dataclass(frozen=True)
class LoadedKernel:
    """A kernel on one device. A launch refuses tensors of another one."""

    kernel: Kernel

    @property
    def host(self) -> str | None:
        """The device of the kernel, if it takes tensors of the host."""
        name = self.kernel.module.context.device.name
        return name if name.startswith(_HOSTED) else None

    def on_device_of(self, tensor: Tensor, known: tuple[Any, ...]) -> Kernel:
        """Return the kernel."""
        del tensor, known
        return self.kernel


OperatorKernel = SourceKernel | LoadedKernel


def operator_kernel(
    schema: Schema, given: KernelChoice, settings: Mapping[str, Any], device: str | None
) -> OperatorKernel:
    """Return the kernel that the arguments of `op` describe.

    The program is read here, so that its include directories are those of this caller.
    """
    if isinstance(given, Kernel):
        if device is not None or any(settings.values()):
            raise schema.error("a kernel that is loaded has its device, label, options and headers")
        return LoadedKernel(given)
    pair = given if isinstance(given, tuple) else (given, schema.name.rpartition("::")[2])
    if len(pair) != 2:
        raise schema.error(f"the kernel is not {short_repr(given)}", f"it is {_FORMS}")
    source, name = pair
    if not (isinstance(name, str) or callable(name)):
        raise schema.error(f"the name of a kernel is text, or a function, not {short_repr(name)}")
    return SourceKernel(Program.read(source, **settings), name, _host(schema, device))


def _host(schema: Schema, named: str | None) -> str | None:
    """Return the device for tensors of the host, or None when they are refused."""
    which = Config.from_env().device if named is None else named
    if isinstance(which, str) and which.startswith(_HOSTED):
        return which
    if named is not None:
        raise schema.error(
            f"device={named!r} is not an emulator, and tensors of a GPU are computed there",
            'leave it out, or write device="emulator[host_arrays]" for tensors of the host',
        )
    return None


_known: dict[int, Gpu] = {}  # by the index of the GPU


def _gpu(tensor: Tensor, host: str | None) -> Gpu:
    """Return the device of a tensor, which is `host` for a tensor of the host."""
    index = tensor.get_device()
    if index < 0:
        return device(host)
    gpu = _known.get(index)
    if gpu is None or gpu._closed:
        gpu = _known[index] = device(f"cuda:{index}")
    return gpu
