"""One session of a device, and what is loaded in it."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar
from weakref import WeakValueDictionary

from preheat.build.builder import Builder
from preheat.build.code import (
    Code,
    compiled_code,
    find_code,
    find_source_lines,
    obtain_given,
)
from preheat.build.compile_lock import SingleFlight
from preheat.build.reload import TrackedFiles
from preheat.build.request import CompiledCode, ModuleRequest
from preheat.devices import base
from preheat.devices.active_capture import LOAD, UNLOAD
from preheat.devices.base import ON_GPU
from preheat.devices.context import Context
from preheat.devices.fill import FILL, KernelFill
from preheat.devices.kernel import Kernel
from preheat.devices.module import Module
from preheat.errors import InvalidCodeError
from preheat.model.artifact import EntryPoint
from preheat.model.config import SealMode
from preheat.model.program import Program

if TYPE_CHECKING:  # `pending` imports this module.
    from preheat.devices.pending import PendingKernel

__all__ = ["LoadedObject", "Prepared", "Session"]

T = TypeVar("T")


class LoadedObject(NamedTuple, Generic[T]):
    """A loaded module or kernel, and the files that it was compiled from, if any."""

    value: T
    files: TrackedFiles | None = None

    @property
    def current(self) -> bool:
        """Return True unless a file has changed since."""
        return self.files is None or not self.files.changed()


_loaded_object: Callable[[tuple[Any, TrackedFiles | None]], LoadedObject[Any]] = partial(
    tuple.__new__, LoadedObject
)  # in C


class Prepared(NamedTuple):
    """A program, its files as they were before it was read, and its code."""

    program: Program
    files: TrackedFiles | None
    code: Code


class Session:
    """What a device has loaded between its opening, or its last reset, and the next reset.

    A load that is running during a reset stays in the old session. `modules` and `kernels` have what
    was requested, by request. `loaded` has every module that is still referenced, by artifact, because
    different requests may lead to the same module.

    `jit` lets the driver compile PTX for a device that is newer than the compiler, `blocking` waits
    after every launch, and `reload` compiles a program again when one of its files has changed.
    """

    def __init__(
        self, device: base.Device, builder: Builder, *, jit: bool, blocking: bool, reload: bool
    ) -> None:
        self.device = device
        self.builder = builder
        #: Returns the stored code of a program for this device, or the build that compiles it.
        self.find_code = partial(find_code, device, builder, jit=jit)
        self._obtain_given = partial(obtain_given, device, builder, jit=jit)
        self._blocking = blocking
        self._reload = reload
        self.context = Context(device, builder.events)
        if device.dlpack[0] == ON_GPU:
            load = partial(_load_fill_kernel, weakref.ref(self))
            self.context.kernel_fill = KernelFill(self.context, load)
        self.modules: dict[object, LoadedObject[Module]] = {}
        self.kernels: dict[object, LoadedObject[Kernel]] = {}
        self.loaded: WeakValueDictionary[str, Module] = WeakValueDictionary()
        # Kernels that were requested with `wait=False` and have not been used yet, by request.
        self.pending: weakref.WeakValueDictionary[object, PendingKernel] = weakref.WeakValueDictionary()
        self._module_loads: SingleFlight[LoadedObject[Module]] = SingleFlight(builder.events)
        self._code_loads: SingleFlight[Module] = SingleFlight(builder.events)

    def kernel(
        self,
        request: ModuleRequest,
        name: str,
        prepared: Callable[[], Prepared | None] | None = None,
        make: Callable[[Module, EntryPoint], Kernel] = Kernel,
    ) -> Kernel:
        """Return the kernel `name` of a module; compile and load the module first if necessary.

        See `module` for `prepared`. `make` makes a new kernel.
        """
        key = (request, name)
        entry = self.kernels.get(key)
        if entry is not None:
            if entry.current:
                return entry.value
            self.kernels.pop(key, None)
        if "<" in name:
            request = request.for_kernel(name)
        module, files = self.module(request, prepared)
        new: LoadedObject[Kernel] = _loaded_object((make(module, module.artifact.entry(name)), files))
        shared = self.kernels.setdefault(key, new)
        if (
            shared is not new and not shared.current
        ):  # Another thread put it there before the last edit of a file.
            shared = self.kernels[key] = new
        return shared.value

    def module(
        self, request: ModuleRequest, prepared: Callable[[], Prepared | None] | None = None
    ) -> LoadedObject[Module]:
        """Return a module with its files; compile and load it first if necessary.

        `prepared` returns the code if the caller has it, or None. It is called at most once, and only
        if the module has to be loaded.
        """
        entry = self.modules.get(request)
        if entry is not None and entry.current:
            return entry
        busy = not self.context.unrestricted
        if busy:
            self.context.require_alive()
        if isinstance(request.source, CompiledCode):
            self.context.refuse_in_capture(LOAD)
            code = self._obtain_given(request.source, request.label, strict=request.strict)
            return self.modules.setdefault(request, LoadedObject(self.load(code)))
        if busy and self.context.active_captures():
            files = self.track_files(request)
            program = request.program()
            module = self._find_loaded(program, request)
            if module is not None:
                return self._remember(request, module, program, files)
            self.context.refuse_in_capture(LOAD)

        def load() -> LoadedObject[Module]:
            entry = self.modules.get(request)
            if entry is not None and entry.current:  # The thread before this one loaded it.
                return entry
            nonlocal prepared
            ready = None if prepared is None else prepared()
            prepared = None  # If a file is edited meanwhile, its new content counts.
            if ready is None:
                files = None if type(request.source) is str else self.track_files(request)
                program = request.program()
                result = self.find_code(program, request.arch, strict=request.strict)
                code = result if isinstance(result, Code) else compiled_code(result, result.obtain())
            else:
                program, files, code = ready
            return self._remember(request, self.load(code), program, files)

        title = f"load on {self.device.name}"
        entry = self._module_loads.run(request, load, title=title)
        if entry.files is None or entry.current:
            return entry
        # A file was edited while another thread was compiling it.
        return self._module_loads.run(request, load, title=title)

    def track_files(self, request: ModuleRequest) -> TrackedFiles | None:
        """Return the source file of a request, hashed before it is read; None if no file is tracked."""
        if not isinstance(request.source, Path) or not self._tracks_files():
            return None
        return TrackedFiles(self.builder, request.source)

    def _tracks_files(self) -> bool:
        return self._reload and self.builder.sealed is not SealMode.ERROR

    def _remember(
        self, request: ModuleRequest, module: Module, program: Program, files: TrackedFiles | None
    ) -> LoadedObject[Module]:
        """Return this module for equal requests, until a file that it was compiled from changes."""
        if files is None and module.artifact.headers and self._tracks_files():
            files = TrackedFiles(self.builder, None)
        if files is not None:
            files = files.track(program, module.artifact)
        entry = self.modules[request] = _loaded_object((module, files))
        return entry

    def _find_loaded(self, program: Program, request: ModuleRequest) -> Module | None:
        """Return the module of a program that a warm-up, or an equal program, has loaded."""
        exact = request.strict or request.arch is not None
        artifact = self.builder.lookup(program, request.arch or self.device.arch, exact=exact).artifact
        module = None if artifact is None else self.loaded.get(artifact.digest)
        return None if module is None or module.artifact != artifact else module

    def load(self, code: Code) -> Module:
        """Return the module of an artifact, which all programs with equal artifacts share."""
        artifact = code.artifact

        def load() -> Module:
            module = self.loaded.get(artifact.digest)
            # Older bundles have different code under one digest, for example that of a program that
            # reads the clock.
            if module is None or module.artifact != artifact:
                module = self.loaded[artifact.digest] = self._load(code)
            return module

        return self._code_loads.run(artifact, load, title=f"load on {self.device.name}")

    def preload(self, code: Code) -> Module:
        """Load code that was not requested yet, and keep it loaded until `trim`."""
        module = self.load(code)
        self.modules[code.artifact.digest] = LoadedObject(module)
        return module

    def _load(self, code: Code) -> Module:
        started = time.perf_counter()
        artifact, program, jit = code
        try:
            lines = partial(find_source_lines, self.builder, program, artifact)
            raw = self.device.load(artifact, jit=jit, lines=lines)
        except InvalidCodeError as error:
            if jit or program is None:
                raise
            artifact = self.builder.rebuild(program, artifact.arch, reason=str(error))
            lines = partial(find_source_lines, self.builder, program, artifact)
            raw = self.device.load(artifact, lines=lines)
        seconds = time.perf_counter() - started
        self.builder.events.emit(
            "load",
            device=self.device.name,
            program=artifact.label,
            key=artifact.digest,
            seconds=seconds,
        )
        return Module(self.context, artifact, raw, blocking=self._blocking)

    def trim(self) -> int:
        """Unload every module that nothing but this session holds, and return how many."""
        self.context.require_alive()
        self.context.refuse_in_capture(UNLOAD)
        before = self._count()
        _drop_unused(self.kernels)
        _drop_unused(self.modules)
        self.context.drain(modules=True)
        self.device.trim()
        return before - self._count()

    def _count(self) -> int:
        return len({module for module, _ in self.modules.values()})

    def clear(self) -> None:
        """Release everything; the context has ended."""
        self.kernels.clear()
        self.modules.clear()
        self.pending.clear()


def _load_fill_kernel(session: weakref.ref[Session]) -> Kernel | None:
    """Return the kernel for large fills; None if a sealed process would have to compile it."""
    alive = session()
    if alive is None:
        return None
    program = Program.of(FILL, label="preheat-fill.cu")
    builder = alive.builder
    sealed = builder.sealed is not SealMode.OFF
    if sealed and builder.lookup(program, alive.device.arch).artifact is None:
        return None
    return alive.kernel(ModuleRequest.of(program), "preheat_fill8")


def _drop_unused(entries: dict[object, LoadedObject[T]]) -> None:
    """Remove what nothing but `entries` holds."""
    weak = {key: (weakref.ref(value), files) for key, (value, files) in entries.items()}
    entries.clear()
    for key, (value, files) in weak.items():
        if (alive := value()) is not None:
            entries[key] = LoadedObject(alive, files)
