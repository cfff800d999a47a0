"""`RawKernel` and `RawModule` with the interface of CuPy's classes, on preheat.

They are compiled at most once, ever, recorded, baked and sealed like all kernels of preheat, and their
arguments are checked before the driver sees them.
"""

from __future__ import annotations

import math
import os
import sys
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

from preheat.adapters.cupy.arguments import converted, has_stream
from preheat.adapters.cupy.place import Place, current_stream, gpu_at, place_of
from preheat.adapters.cupy.source import RawSource
from preheat.artifact import check_name
from preheat.callsite import warn_caller
from preheat.devices.base import ON_GPU
from preheat.errors import InputError, LaunchError, PreheatError, SealedError, UnknownEntryError
from preheat.program import file_of, list_argument
from preheat.runtime.arguments import param_specs
from preheat.runtime.kernel import Kernel
from preheat.runtime.module import Module
from preheat.tracebacks import short_errors, short_methods, shorten_traceback

__all__ = ["RawKernel", "RawModule"]

_BACKENDS = ("nvrtc", "nvcc")
_VERSION = 1  # of pickles

_ATTRIBUTES = (
    "max_threads_per_block", "shared_size_bytes", "const_size_bytes", "local_size_bytes", "num_regs",
    "ptx_version", "binary_version", "cache_mode_ca", "max_dynamic_shared_size_bytes",
    "preferred_shared_memory_carveout",
)  # fmt: skip


@short_methods()
class RawKernel:
    """A kernel from CUDA C++ source, with the interface of `cupy.RawKernel`.

    NVRTC compiles the source for both values of `backend`. Arrays are passed by the address of their
    first element, whatever their strides are. CuPy need not be installed.

    Examples:
        >>> from preheat.adapters.cupy import RawKernel
        >>> saxpy = RawKernel(SAXPY, "saxpy")
        >>> x, y = gpu.array([1, 2], "float32"), gpu.zeros(2)
        >>> saxpy((1,), (32,), (np.float32(2), x, y, np.int32(2)))
        >>> y.numpy()
        array([2., 4.], dtype=float32)
    """

    def __init__(
        self,
        code: str,
        name: str,
        options: Sequence[str] = (),
        backend: str = "nvrtc",
        *,
        translate_cucomplex: bool = False,
        enable_cooperative_groups: bool = False,
        jitify: bool | None = None,
    ) -> None:
        _check_texts(code=code, name=name)
        check_name("a kernel", name)
        _check_backend(backend)
        _warn_of_jitify(jitify)
        source = RawSource(
            code=code,
            options=list_argument("options", options),
            translate_cucomplex=bool(translate_cucomplex),
            jitify=bool(jitify),
        )
        self._set(source, name, backend, bool(enable_cooperative_groups))

    @classmethod
    def _of(cls, source: RawSource, name: str, backend: str, cooperative: bool) -> RawKernel:
        made = cls.__new__(cls)
        made._set(source, name, backend, cooperative)
        return made

    def _set(self, source: RawSource, name: str, backend: str, cooperative: bool) -> None:
        self._source = source
        self.name = self.__name__ = name
        self.backend = backend
        self.enable_cooperative_groups = cooperative
        self._dynamic_shared: int | None = None
        self._kernels: dict[Place, Kernel] = {}

    # What it was made from

    @property
    def code(self) -> str | None:
        """The source, or None for a kernel of a compiled file."""
        return self._source.code

    @property
    def options(self) -> tuple[str, ...]:
        """The options that were given."""
        return self._source.options

    @property
    def file_path(self) -> str | None:
        """The compiled file, or None for a kernel that has source."""
        return self._source.path

    @property
    def name_expressions(self) -> tuple[str, ...] | None:
        """The name expressions of the module, if any."""
        return self._source.names

    @property
    def translate_cucomplex(self) -> bool:
        """Whether functions of `cuComplex.h` are replaced by those of Thrust."""
        return self._source.translate_cucomplex

    @property
    def jitify(self) -> bool:
        """Whether headers of the standard library are taken from libcu++."""
        return self._source.jitify

    # Launches

    def __call__(
        self,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: Sequence[Any],
        *,
        shared_mem: int = 0,
        stream: Any = None,
    ) -> None:
        """Launch the kernel, which is compiled and loaded at the first call on each device.

        `args` is a tuple. The launch goes to `stream`, by default to CuPy's current stream. Raises
        `LaunchError` for arguments that do not fit the parameters.
        """
        try:
            kernel = self._kernel(place_of(args))
        except PreheatError as error:
            shorten_traceback(error)
            raise
        device = kernel.module.context.device
        values = converted(param_specs(kernel.entry.parameters), args, device)
        if stream is None and not has_stream(values):
            stream = current_stream(kernel.module.context)
        grid, block = _sizes(grid), _sizes(block)
        if self.enable_cooperative_groups:
            grid = _resident(kernel, grid, block, shared_mem)
        kernel.launch(
            *values,
            grid=grid,
            block=block,
            shared=shared_mem,
            stream=stream,
            cooperative=self.enable_cooperative_groups,
        )

    @property
    @short_errors
    def kernel(self) -> Kernel:
        """The kernel of preheat on the current device."""
        return self._kernel(place_of())

    def _kernel(self, place: Place) -> Kernel:
        found = self._kernels.get(place)
        if found is None or found.module.context.lost is not None:
            try:
                found = self._source.kernel(gpu_at(place), self.name)
            except SealedError as error:
                raise error.naming(self.name) from None
            self._kernels[place] = found
        return found

    def compile(self, log_stream: Any = None) -> None:
        """Compile and load the kernel.

        Args:
            log_stream: A text stream for the messages of the compiler.

        Examples:
            >>> from preheat.adapters.cupy import RawKernel
            >>> RawKernel(SAXPY, "saxpy").compile()
        """
        self._kernels.clear()
        _write_log(self.kernel.module, log_stream)

    # Attributes

    @property
    def attributes(self) -> dict[str, int]:
        """The attributes below, by name."""
        return {name: getattr(self, name) for name in _ATTRIBUTES}

    @property
    def max_threads_per_block(self) -> int:
        """The maximum number of threads in a block of the kernel."""
        return self.kernel.attributes.threads

    @property
    def shared_size_bytes(self) -> int:
        """The size of static shared memory."""
        return self.kernel.attributes.shared

    @property
    def const_size_bytes(self) -> int:
        """The size of constant memory."""
        return self.kernel.attributes.constant

    @property
    def local_size_bytes(self) -> int:
        """The size of local memory of a thread."""
        return self.kernel.attributes.local

    @property
    def num_regs(self) -> int:
        """The number of registers of a thread."""
        return self.kernel.attributes.registers

    @property
    def ptx_version(self) -> int:
        """The architecture of the PTX: 90 for compute_90."""
        return self.kernel.attributes.ptx_version

    @property
    def binary_version(self) -> int:
        """The architecture of the machine code: 90 for sm_90."""
        return self.kernel.attributes.binary_version

    @property
    def cache_mode_ca(self) -> int:
        """1 if the kernel was compiled with `-Xptxas --dlcm=ca`, otherwise 0."""
        return self.kernel.attributes.cache_mode_ca

    @property
    def max_dynamic_shared_size_bytes(self) -> int:
        """The maximum size of the dynamic shared memory of a launch.

        A launch does not need this setting. Setting it checks that the device has that much.
        """
        most = self.kernel.attributes.dynamic_shared
        return most if self._dynamic_shared is None else self._dynamic_shared

    @max_dynamic_shared_size_bytes.setter
    def max_dynamic_shared_size_bytes(self, size: int) -> None:
        most = self.kernel.attributes.dynamic_shared
        if not 0 <= size <= most:
            why = f"{size} bytes of dynamic shared memory; a launch can have {most}"
            raise LaunchError(self.name, why)
        self._dynamic_shared = int(size)

    @property
    def preferred_shared_memory_carveout(self) -> int:
        """The preferred shared memory in percent, or -1 for no preference. It can be set."""
        percent = self.kernel.carveout
        return -1 if percent is None else percent

    @preferred_shared_memory_carveout.setter
    def preferred_shared_memory_carveout(self, percent: int) -> None:
        self.kernel.carveout = None if percent == -1 else percent

    # Pickles

    def __getstate__(self) -> dict[str, Any]:
        cooperative = self.enable_cooperative_groups
        return _pickled(self._source, self.backend, cooperative) | {"name": self.name}

    def __setstate__(self, state: dict[str, Any]) -> None:
        source, backend, cooperative = _unpickled(state)
        self._set(source, state["name"], backend, cooperative)

    def __repr__(self) -> str:
        return f"<RawKernel {self.name}>"


@short_methods()
class RawModule:
    """Several kernels from one source, or from a compiled file, with the interface of `cupy.RawModule`.

    `path` is a file of PTX or machine code.

    Examples:
        >>> from preheat.adapters.cupy import RawModule
        >>> module = RawModule(code=SAXPY)
        >>> module.get_function("saxpy").max_threads_per_block
        1024
    """

    def __init__(
        self,
        *,
        code: str | None = None,
        path: str | None = None,
        options: Sequence[str] = (),
        backend: str = "nvrtc",
        translate_cucomplex: bool = False,
        enable_cooperative_groups: bool = False,
        name_expressions: Iterable[str] | None = None,
        jitify: bool | None = None,
    ) -> None:
        if (code is None) == (path is None):
            raise TypeError("a RawModule takes either code= or path=")
        _check_texts(**({"code": code} if path is None else {"path": path}))
        _check_backend(backend)
        if name_expressions is not None and (path is not None or backend != "nvrtc"):
            raise ValueError("name_expressions need code, and backend='nvrtc'")
        if jitify and (path is not None or backend != "nvrtc"):
            raise ValueError("jitify=True needs code, and backend='nvrtc'")
        _warn_of_jitify(jitify)
        self._source = RawSource(
            code=code,
            path=path,
            options=list_argument("options", options) if path is None else (),
            translate_cucomplex=bool(translate_cucomplex) and path is None,
            names=None if name_expressions is None else tuple(name_expressions),
            jitify=bool(jitify),
        )
        self.backend = backend if path is None else "nvcc"
        self.enable_cooperative_groups = bool(enable_cooperative_groups)

    @property
    def code(self) -> str | None:
        """The source, or None for a compiled file."""
        return self._source.code

    @property
    def file_path(self) -> str | None:
        """The compiled file, or None for a module that has source."""
        return self._source.path

    @property
    def options(self) -> tuple[str, ...]:
        """The options that were given."""
        return self._source.options

    @property
    def name_expressions(self) -> tuple[str, ...] | None:
        """The name expressions that were given, if any."""
        return self._source.names

    @property
    @short_errors
    def module(self) -> Module:
        """The module of preheat on the current device."""
        return self._source.module(gpu_at(place_of()))

    def compile(self, log_stream: Any = None) -> None:
        """Compile and load the module.

        Args:
            log_stream: A text stream for the messages of the compiler.

        Examples:
            >>> from preheat.adapters.cupy import RawModule
            >>> RawModule(code=SAXPY).compile()
        """
        _write_log(self.module, log_stream)

    def get_function(self, name: str) -> RawKernel:
        """Return the kernel `name`, which may be one of the name expressions.

        Raises:
            UnknownEntryError: The module has no such kernel.

        Examples:
            >>> from preheat.adapters.cupy import RawModule
            >>> module = RawModule(
            ...     code="template <class T> __global__ void one(T* x) { *x = 1; }",
            ...     options=("-std=c++17",), name_expressions=["one<float>"],
            ... )
            >>> one = module.get_function("one<float>")
        """
        made = RawKernel._of(self._source, name, self.backend, self.enable_cooperative_groups)
        try:
            made.kernel  # noqa: B018
        except UnknownEntryError as error:
            if error.hint is not None:  # This class has CuPy's name for the argument.
                error.hint = error.hint.replace(": names=[", ": name_expressions=[")
            raise
        return made

    def get_global(self, name: str) -> Any:
        """Return a `__device__` or `__constant__` variable.

        With CuPy on a GPU it is a `cupy.cuda.MemoryPointer`, as CuPy returns it, which keeps the module
        loaded. Otherwise it is what `Module.symbol` returns.

        Examples:
            >>> from preheat.adapters.cupy import RawModule
            >>> table = RawModule(code='extern "C" __device__ float table[4];').get_global("table")
        """
        module = self.module
        symbol = module.symbol(name)
        cupy, (kind, index) = sys.modules.get("cupy"), module.context.device.dlpack
        if cupy is None or kind != ON_GPU:
            return symbol
        memory = cupy.cuda.UnownedMemory(symbol.address, symbol.nbytes, symbol, index)
        return cupy.cuda.MemoryPointer(memory, 0)

    def __getstate__(self) -> dict[str, Any]:
        return _pickled(self._source, self.backend, self.enable_cooperative_groups)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._source, self.backend, self.enable_cooperative_groups = _unpickled(state)

    def __repr__(self) -> str:
        return f"<RawModule {self._source.path or 'of source'}>"


def _check_texts(**texts: object) -> None:
    for name, value in texts.items():
        if not isinstance(value, str):
            raise TypeError(f"{name} must be text, not {type(value).__name__}")
    if (file := file_of(texts.get("code"))) is not None:
        raise InputError(
            f"code is source text, and {os.fspath(file)!r} is the name of a file",
            hint=f"read the file: code=open({os.fspath(file)!r}).read()",
        )
    if str(texts.get("path", "")).endswith((".cu", ".cuh", ".cpp")):
        raise InputError(
            f"path is a file of PTX or machine code, and {texts['path']!r} is source text",
            hint=f"read the file: code=open({texts['path']!r}).read()",
        )


def _check_backend(backend: str) -> None:
    if backend not in _BACKENDS:
        raise ValueError(f"backend must be 'nvrtc' or 'nvcc', not {backend!r}")


def _warn_of_jitify(jitify: bool | None) -> None:
    """Warn as CuPy does, which removes the argument in version 15."""
    if jitify:
        warn_caller(DeprecationWarning("jitify=True is deprecated: CuPy 15 removes it"))
    elif jitify is not None:
        text = "The jitify argument is deprecated: CuPy 15 removes it. Avoid passing jitify=False."
        warn_caller(DeprecationWarning(text))


def _sizes(given: Any) -> Any:
    """Return a grid or block with at least 1 in each axis, as CuPy makes it."""
    return tuple(max(1, size) for size in given) if isinstance(given, tuple) else given


def _resident(kernel: Kernel, grid: Any, block: Any, shared: int) -> Any:
    """Return a grid whose blocks fit on the device together, with a warning where it was reduced."""
    blocks = kernel.occupancy(block, shared).blocks
    most = blocks * kernel.module.context.device.limits.processors
    sizes = grid if isinstance(grid, tuple) else (grid,)
    if math.prod(sizes) <= most:
        return grid
    if any(size != 1 for size in sizes[1:]):
        why = f"grid {grid} has more blocks than the {most} that run at the same time"
        raise LaunchError(kernel.name, why)
    text = f"{kernel.name}: the grid is reduced from {sizes[0]} to {most} blocks, which run together"
    warnings.warn(text, RuntimeWarning, stacklevel=3)
    return (most,)


def _write_log(module: Module, log_stream: Any) -> None:
    if log_stream is not None:
        log_stream.write(module.artifact.log)


def _pickled(source: RawSource, backend: str, cooperative: bool) -> dict[str, Any]:
    """Return what a pickle keeps: the source, and nothing that is loaded."""
    return {
        "version": _VERSION,
        "code": source.code,
        "path": source.path,
        "options": source.options,
        "translate_cucomplex": source.translate_cucomplex,
        "names": source.names,
        "jitify": source.jitify,
        "backend": backend,
        "cooperative": cooperative,
    }


def _unpickled(state: dict[str, Any]) -> tuple[RawSource, str, bool]:
    fields = dict(state)
    if fields.pop("version", None) != _VERSION:
        raise ValueError("this pickle of a raw kernel was made by another version of preheat")
    fields.pop("name", None)
    backend, cooperative = fields.pop("backend"), fields.pop("cooperative")
    return RawSource(**fields), backend, cooperative
