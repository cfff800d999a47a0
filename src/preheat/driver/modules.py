"""Modules and libraries: what a program loads, with its kernels and variables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from preheat.driver.allocations import Allocation, Kind
from preheat.driver.calls import CallError, entry
from preheat.driver.contexts import Context
from preheat.driver.raw import I32, U32, U64, put, text
from preheat.driver.status import INVALID_HANDLE, INVALID_VALUE, NOT_FOUND
from preheat.process.lazy import LazyModule

if TYPE_CHECKING:
    from preheat.devices.base import Geometry
    from preheat.driver.driver import Driver
    from preheat.emulator.launch import Launch
    from preheat.emulator.module import EmulatorFunction, EmulatorModule
    from preheat.model import lines
    from preheat.model.artifact import Artifact
else:
    lines = LazyModule("preheat.model.lines")  # The first fault needs it.

__all__ = ["Function", "Library", "Module", "function_of"]

_LAZY = 2


class Module:
    """A module of a context."""

    def __init__(self, context: Context, loaded: EmulatorModule) -> None:
        self.handle = 0
        self.context = context
        self.loaded = loaded
        self.library: Library | None = None  # of which it is the module in its context
        self.functions: dict[str, Function] = {}

    @property
    def names(self) -> list[str]:
        """The names of its kernels."""
        return list(self.loaded.image.module.entries)


class Function:
    """A kernel of a module, whose handle means the kernel and its function.

    Attributes:
        values: The attributes that the program has set.
    """

    def __init__(self, module: Module, emulated: EmulatorFunction) -> None:
        self.handle = 0
        self.module = module
        self.context = module.context
        self.emulated = emulated
        self.values: dict[int, int] = {}
        self.launches: dict[tuple[Geometry, int], Launch] = {}  # prepared, by stream


class Library:
    """A library. Its kernels are in one module in each context that uses it."""

    def __init__(self, artifact: Artifact) -> None:
        self.handle = 0
        self.artifact = artifact
        self.modules: dict[int, Module] = {}  # by context


def function_of(driver: Driver, handle: int) -> Function:
    """Return the function or kernel with this handle."""
    return driver.handles.get(handle, Function)


# Modules


def _load(driver: Driver, context: Context, artifact: Artifact) -> Module:
    find_lines = driver.images.lines(artifact)
    if find_lines is None:
        find_lines = lambda: lines.lines_with_files(artifact.ptx)  # noqa: E731
    loaded = context.gpu.emulator.load(artifact, lines=find_lines)
    made = Module(context, loaded)
    made.handle = driver.handles.add(made)
    return made


@entry("cuModuleLoadData")
def _load_data(driver: Driver, out: int, image: int) -> None:
    context = driver.current()
    put(out, _load(driver, context, driver.images.read(image, context.gpu.emulator.arch)).handle)


@entry("cuModuleLoadDataEx")
def _load_data_with(
    driver: Driver, out: int, image: int, count: int, options: int, values: int
) -> None:
    del count, options, values  # They concern the compiler of the driver.
    _load_data(driver, out, image)


@entry("cuModuleLoadFatBinary")
def _load_fat_binary(driver: Driver, out: int, image: int) -> None:
    _load_data(driver, out, image)


@entry("cuModuleLoad")
def _load_file(driver: Driver, out: int, path: int) -> None:
    context = driver.current()
    artifact = driver.images.read_file(text(path), context.gpu.emulator.arch)
    put(out, _load(driver, context, artifact).handle)


@entry("cuModuleUnload")
def _unload(driver: Driver, handle: int) -> None:
    _close(driver, driver.handles.get(handle, Module))


def _close(driver: Driver, module: Module) -> None:
    module.loaded.unload()
    for function in module.functions.values():
        driver.handles.remove(function.handle)
    for name in module.loaded.image.module.variables:
        symbol = module.loaded.symbol(name)
        if symbol is not None:
            driver.memory.remove(symbol.address)
    driver.handles.remove(module.handle)


@entry("cuModuleGetLoadingMode", after_fault=True)
def _loading_mode(driver: Driver, out: int) -> None:
    del driver
    put(out, _LAZY, I32)


def _function(driver: Driver, module: Module, name: str) -> int:
    found = module.functions.get(name)
    if found is None:
        if name not in module.loaded.image.module.entries:
            raise CallError(NOT_FOUND)
        found = module.functions[name] = Function(module, module.loaded.function(name))
        found.handle = driver.handles.add(found)
    return found.handle


def _list_functions(driver: Driver, out: int, count: int, module: Module) -> None:
    for at, name in enumerate(module.names[:count]):
        put(out + 8 * at, _function(driver, module, name), U64)


def _variable(driver: Driver, out: int, size: int, module: Module, name: int) -> None:
    found = module.loaded.symbol(text(name))
    if found is None:
        raise CallError(NOT_FOUND)
    if driver.memory.at(found.address) is None:
        driver.memory.add(Allocation(found.address, found.size, Kind.VARIABLE, module.context))
    put(out, found.address)
    put(size, found.size)


@entry("cuModuleGetFunction")
def _get_function(driver: Driver, out: int, handle: int, name: int) -> None:
    put(out, _function(driver, driver.handles.get(handle, Module), text(name)))


@entry("cuModuleGetFunctionCount")
def _function_count(driver: Driver, out: int, handle: int) -> None:
    put(out, len(driver.handles.get(handle, Module).names), U32)


@entry("cuModuleEnumerateFunctions")
def _enumerate(driver: Driver, out: int, count: int, handle: int) -> None:
    _list_functions(driver, out, count, driver.handles.get(handle, Module))


@entry("cuModuleGetGlobal", 3020)
def _global(driver: Driver, out: int, size: int, handle: int, name: int) -> None:
    _variable(driver, out, size, driver.handles.get(handle, Module), name)


# Libraries


def _add_library(driver: Driver, out: int, artifact: Artifact) -> None:
    made = Library(artifact)
    made.handle = driver.handles.add(made)
    put(out, made.handle)


def _any_context(driver: Driver) -> Context:
    """Return the current context, or the primary one of the first device: a library needs none."""
    found = driver.contexts.get(driver.threads.current())
    return found if found is not None and found.alive else driver.primary(driver.gpu(0))


@entry("cuLibraryLoadData")
def _load_library(
    driver: Driver, out: int, image: int, _: int, __: int, ___: int, ____: int, _____: int, ______: int
) -> None:
    arch = _any_context(driver).gpu.emulator.arch
    _add_library(driver, out, driver.images.read(image, arch))


@entry("cuLibraryLoadFromFile")
def _load_library_file(
    driver: Driver, out: int, path: int, _: int, __: int, ___: int, ____: int, _____: int, ______: int
) -> None:
    arch = _any_context(driver).gpu.emulator.arch
    _add_library(driver, out, driver.images.read_file(text(path), arch))


def _library_module(driver: Driver, library: Library) -> Module:
    """Return the module of a library in the current context. It is loaded when it is first used."""
    context = _any_context(driver)
    found = library.modules.get(context.handle)
    if found is None or driver.handles.find(found.handle, Module) is None:
        found = library.modules[context.handle] = _load(driver, context, library.artifact)
        found.library = library
    return found


def _library(driver: Driver, handle: int) -> Library:
    return driver.handles.get(handle, Library)


@entry("cuLibraryUnload")
def _unload_library(driver: Driver, handle: int) -> None:
    for module in _library(driver, handle).modules.values():
        if driver.handles.find(module.handle, Module) is not None:
            _close(driver, module)
    driver.handles.remove(handle)


@entry("cuLibraryGetKernel")
def _kernel(driver: Driver, out: int, handle: int, name: int) -> None:
    module = _library_module(driver, _library(driver, handle))
    put(out, _function(driver, module, text(name)))


@entry("cuLibraryGetKernelCount")
def _kernel_count(driver: Driver, out: int, handle: int) -> None:
    put(out, len(_library_module(driver, _library(driver, handle)).names), U32)


@entry("cuLibraryEnumerateKernels")
def _enumerate_kernels(driver: Driver, out: int, count: int, handle: int) -> None:
    _list_functions(driver, out, count, _library_module(driver, _library(driver, handle)))


@entry("cuLibraryGetModule")
def _module(driver: Driver, out: int, handle: int) -> None:
    put(out, _library_module(driver, _library(driver, handle)).handle)


@entry("cuLibraryGetGlobal")
def _library_global(driver: Driver, out: int, size: int, handle: int, name: int) -> None:
    _variable(driver, out, size, _library_module(driver, _library(driver, handle)), name)


@entry("cuLibraryGetManaged")
def _library_managed(driver: Driver, out: int, size: int, handle: int, name: int) -> None:
    _library_global(driver, out, size, handle, name)


@entry("cuKernelGetFunction")
def _kernel_function(driver: Driver, out: int, handle: int) -> None:
    """Return the function of a kernel in the current context, which may be another one."""
    kernel = function_of(driver, handle)
    library = kernel.module.library
    module = kernel.module if library is None else _library_module(driver, library)
    put(out, _function(driver, module, kernel.emulated.name))


@entry("cuKernelGetLibrary")
def _kernel_library(driver: Driver, out: int, handle: int) -> None:
    library = function_of(driver, handle).module.library
    if library is None:
        raise CallError(INVALID_HANDLE)
    put(out, library.handle)


@entry("cuFuncGetModule")
def _function_module(driver: Driver, out: int, handle: int) -> None:
    if not out:
        raise CallError(INVALID_VALUE)
    put(out, function_of(driver, handle).module.handle)
