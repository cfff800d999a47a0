"""Loaded modules: their kernels by name, and their variables."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn

from preheat.devices import base
from preheat.devices.active_capture import FROM_HOST, RESOLVE_KERNEL, TO_HOST
from preheat.devices.arguments import Signature
from preheat.devices.context import Context
from preheat.devices.host import convert, host_array, host_bytes
from preheat.devices.kernel import Kernel
from preheat.errors import InputError, PreheatError
from preheat.model.artifact import Artifact, EntryPoint, check_name
from preheat.model.dtypes import DType, dtype_of
from preheat.model.tracebacks import short_methods, shorten_traceback
from preheat.process.lazy import LazyModule
from preheat.process.messages import did_you_mean

if TYPE_CHECKING:
    import numpy as np

    from preheat.model import ptx
else:
    np = LazyModule("numpy")
    ptx = LazyModule("preheat.model.ptx")  # It takes milliseconds that only an error needs.

__all__ = ["Module", "SymbolView"]

_LOAD = "load the module again: gpu.module(…)"
_LOOK_UP = "look the variable up again: gpu.module(…).symbol(…)"
# Methods of CuPy's modules, and what a module of preheat has instead.
_OF_CUPY = {"get_function": "module['name']", "get_global": "module.symbol('name')"}


@short_methods(without={"function"})
class Module:
    """A program that is loaded on one device, made by `gpu.module`. `module["name"]` is a kernel.

    It is unloaded once nothing holds it any more.

    Examples:
        >>> module = gpu.module(SAXPY)
        >>> module["saxpy"].name
        'saxpy'
    """

    def __init__(
        self, context: Context, artifact: Artifact, raw: base.Module, *, blocking: bool = False
    ) -> None:
        self.context = context
        self.artifact = artifact
        self.raw = raw
        self.blocking = blocking
        self._functions: dict[str, tuple[base.Function, Signature]] = {}
        context.modules.add(self)

    def __getitem__(self, name: str) -> Kernel:
        try:
            return Kernel(self, self.artifact.entry(name))
        except PreheatError as error:
            shorten_traceback(error)
            raise

    def __iter__(self) -> Iterator[str]:
        return map(self.artifact.name_of, self.artifact.entries)

    def __len__(self) -> int:
        return len(self.artifact.entries)

    def symbol(self, name: str, dtype: object = None) -> SymbolView:
        """Return the `__device__` or `__constant__` variable `name`, as elements of `dtype`.

        Without `dtype`, the variable is bytes. A variable in a namespace, or an instance of a template
        of variables, needs a name expression: `gpu.module(source, names=["&ns::table"])`, and then
        `module.symbol("ns::table")`.

        Raises:
            InputError: The program has no such variable, or its size is not a multiple of the element
                size.

        Examples:
            >>> module = gpu.module("__device__ float table[2] = {1, 2};")
            >>> module.symbol("table", "float32").numpy()
            array([1., 2.], dtype=float32)
        """
        check_name("a variable", name)
        self.context.require_alive(_LOAD)
        variable = self.raw.symbol(self.artifact.names.get(f"&{name}", name))
        if variable is None:
            raise InputError(
                f"{self.artifact.label} has no variable {name!r}",
                hint=did_you_mean(name, self._variables())
                or "a variable in a namespace needs a name expression: names=['&ns::table']",
            )
        return SymbolView(self, name, variable, None if dtype is None else dtype_of(dtype))

    def _variables(self) -> list[str]:
        """Return the names that `symbol` accepts, as far as the PTX of the program lists them."""
        expressions = {name.removeprefix("&") for name in self.artifact.names if name.startswith("&")}
        try:
            declared = {*ptx.parse(self.artifact.ptx.decode()).variables}
        except ValueError:  # Another compiler made the PTX, or there is none.
            declared = set()
        return sorted(name for name in declared | expressions if "__preheat" not in name)

    def function(self, entry: EntryPoint) -> tuple[base.Function, Signature]:
        """Return a kernel of this module, resolved once, with its signature."""
        resolved = self._functions.get(entry.name)
        if resolved is not None:
            return resolved
        context = self.context
        if not context.unrestricted:
            context.refuse_in_capture(RESOLVE_KERNEL)
        with context.resolve_lock:  # One thread resolves the kernel, and the others find it.
            resolved = self._functions.get(entry.name)
            if resolved is None:
                if context.lost is not None:
                    context.require_alive(_LOAD)
                resolved = (self.raw.function(entry.name), Signature(entry))
                self._functions[entry.name] = resolved
                events, artifact, fields = context.events, self.artifact, {}
                if events.has_sink("resolve"):  # Otherwise it is only counted.
                    name = artifact.name_of(entry)
                    fields = {"key": artifact.digest, "program": artifact.label, "entry": name}
                events.emit("resolve", **fields)
            return resolved

    if not TYPE_CHECKING:  # A type checker must report every attribute that is not there.

        def __getattr__(self, name: str) -> NoReturn:
            meant = _OF_CUPY.get(name)
            instead = f"; write {meant}" if meant else ""
            raise AttributeError(f"a Module has no attribute {name!r}{instead}", name=name, obj=self)

    def __repr__(self) -> str:
        kernels = ", ".join(entry.prototype for entry in self.artifact.entries) or "no kernels"
        return f"<Module {self.artifact.label} on {self.context.device.name}: {kernels}>"

    def __del__(self) -> None:
        if hasattr(self, "raw") and self.context.lost is None:
            self.context.unused_modules.append(self.raw)


@short_methods()
class SymbolView:
    """A variable of a module on the device, made by `Module.symbol`. It keeps the module loaded.

    Attributes:
        name: The name of the variable.
        dtype: The element type. It is `uint8` for a variable without one.
        nbytes: The size in bytes.
        address: The address on the device. `preheat.Pointer(view.address)` passes it to a kernel.

    Examples:
        >>> view = gpu.module("__constant__ int limits[2];").symbol("limits", "int32")
        >>> view.write([3, 4])
        >>> view.numpy()
        array([3, 4], dtype=int32)
    """

    def __init__(self, module: Module, name: str, symbol: base.Symbol, dtype: DType | None) -> None:
        self._module = module
        self.name = name
        self._is_typed = dtype is not None
        self.dtype = dtype or dtype_of("uint8")
        self.address, self.nbytes = symbol.address, symbol.size
        self._require_multiple_of(self.dtype)

    def _require_multiple_of(self, dtype: DType) -> None:
        if self.nbytes % dtype.size:
            raise InputError(
                f"{self.name} has {self.nbytes} bytes, which is not a multiple of the size of {dtype}"
            )

    def numpy(self, dtype: object = None) -> Any:
        """Copy the value to the host after all work on the device.

        Args:
            dtype: The element type of the result. The elements of a variable that has an element type
                are converted, as in `Array.numpy`. A variable without one is bytes, which are read as
                elements of `dtype`.

        Examples:
            >>> gpu.module("__device__ int n = 7;").symbol("n", "int32").numpy()
            array([7], dtype=int32)
        """
        wanted = None if dtype is None else dtype_of(dtype)
        stored = self.dtype if self._is_typed or wanted is None else wanted
        self._require_multiple_of(stored)
        context = self._module.context
        context.require_alive(_LOOK_UP)
        context.refuse_in_capture(TO_HOST)
        out = np.empty(self.nbytes // stored.size, stored.numpy())
        context.wait_for_work()  # Any stream may have written it.
        context.device.copy_out(host_bytes(out), self.address, context.stream)
        return convert(out, stored, wanted)

    def write(self, data: object) -> None:
        """Set the value from the host, after all earlier work on the device and before later work.

        Args:
            data: Bytes, a `ctypes.Structure`, an array, or numbers of the element type.

        Examples:
            >>> gpu.module("__device__ int n = 7;").symbol("n", "int32").write([8])
        """
        context = self._module.context
        context.require_alive(_LOOK_UP)
        context.refuse_in_capture(FROM_HOST)
        if isinstance(data, ctypes.Structure):
            data = bytes(data)
        # A variable without an element type takes the bytes of any array.
        raw = not self._is_typed and hasattr(data, "dtype")
        host = host_bytes(host_array(data, None if raw else self.dtype))
        if len(host) != self.nbytes:
            hint = f"write {self.nbytes // self.dtype.size} elements of {self.dtype}"
            raise InputError(f"{self.name} has {self.nbytes} bytes, not {len(host)}", hint=hint)
        context.wait_for_work()
        context.device.copy_in(self.address, host, context.stream)
        context.stream.synchronize()

    def __repr__(self) -> str:
        return f"<variable {self.name}, {self.nbytes} bytes on {self._module.context.device.name}>"
