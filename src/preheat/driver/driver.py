"""The state of the driver in one process."""

from __future__ import annotations

import ctypes
import itertools
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

from preheat.driver.allocations import Allocation, Allocations
from preheat.driver.calls import CallError, fault_status, say
from preheat.driver.contexts import Context
from preheat.driver.devices import Gpu
from preheat.driver.settings import DriverSettings, gpu_refusal
from preheat.driver.status import (
    CONTEXT_IS_DESTROYED,
    INVALID_CONTEXT,
    INVALID_DEVICE,
    INVALID_HANDLE,
    NO_DEVICE,
    NOT_INITIALIZED,
)
from preheat.errors import DriverError, EmulatorFault, UnsupportedInstructionError
from preheat.process.lazy import LazyModule, lazy

if TYPE_CHECKING:
    from preheat.driver import images, reports
    from preheat.driver.graphs.graph import Graph
    from preheat.driver.modules import Function
    from preheat.emulator.graph_work import GraphAllocation
    from preheat.emulator.launch import Launch
else:
    images = LazyModule("preheat.driver.images")  # The first load of a module needs it.
    reports = LazyModule("preheat.driver.reports")  # It is written under `preheat emulate`.

__all__ = ["CAPTURE_MODES", "Driver", "Handles", "Threads"]

T = TypeVar("T")


#: The capture modes of streams and of threads, in the order of their numbers.
CAPTURE_MODES = ("global", "thread_local", "relaxed")

_FIRST_HANDLE = 0x7E00_0000_0010


class Threads(Protocol):
    """What the shim keeps for each thread, and the contexts, which it has to recognise."""

    def new_context(self) -> int:
        """Return the handle of a new context."""

    def set_alive(self, context: int, alive: bool) -> None:
        """Set whether the context with this handle can be made current."""

    def current(self) -> int:
        """Return the handle of the current context of this thread, or 0."""

    def make_current(self, context: int) -> None:
        """Push a context on the stack of this thread."""

    def pop_current(self) -> None:
        """Pop a context from the stack of this thread."""

    def capture_mode(self) -> int:
        """Return the capture mode of this thread: 0 global, 1 thread local, 2 relaxed."""

    def set_initialized(self) -> None:
        """Let forked children answer that the driver is not initialized."""


class Handles:
    """The objects of the driver by the handle that programs have. No handle is used twice."""

    def __init__(self) -> None:
        self._numbers = itertools.count(_FIRST_HANDLE, 16)
        self._objects: dict[int, Any] = {}

    def add(self, thing: object) -> int:
        """Return the handle of a new object."""
        number = next(self._numbers)
        self._objects[number] = thing
        return number

    def find(self, number: int, kind: type[T]) -> T | None:
        """Return the object with this handle, or None if there is none of this kind."""
        found = self._objects.get(number)
        return found if isinstance(found, kind) else None

    def get(self, number: int, kind: type[T]) -> T:
        """Return the object with this handle; `CallError` if there is none of this kind."""
        found = self._objects.get(number)
        if not isinstance(found, kind):
            raise CallError(INVALID_HANDLE)
        return found

    def all(self, kind: type[T]) -> list[T]:
        """Return all objects of a kind."""
        return [thing for thing in self._objects.values() if isinstance(thing, kind)]

    def remove(self, number: int) -> None:
        """Forget a handle."""
        self._objects.pop(number, None)

    def remove_of(self, context: Context) -> None:
        """Forget the objects of a context that was destroyed."""
        self._objects = {
            number: thing
            for number, thing in self._objects.items()
            if getattr(thing, "context", None) is not context
        }


class Driver:
    """Everything that functions of the driver share.

    Attributes:
        kernels: The kernel of each prepared launch, for the parameters of nodes.
        graph_memory: The work of graphs that allocates memory, by the address.
        faulted: True if a fault has ended a context; each call then asks for the status of its own.
    """

    def __init__(self, settings: DriverSettings, threads: Threads) -> None:
        self.settings = settings
        self.threads = threads
        self.handles = Handles()
        self.memory = Allocations()
        self.kernels: WeakKeyDictionary[Launch, Function] = WeakKeyDictionary()
        self.graph_memory: WeakValueDictionary[int, GraphAllocation] = WeakValueDictionary()
        self.captures: dict[int, Graph] = {}  # by the number of the capture
        self.initialized = False
        self.gpus: list[Gpu] = []
        self.contexts: dict[int, Context] = {}  # By handle, those that were destroyed too.
        self.report = None if settings.report is None else reports.ProcessReport(settings.report)
        self.faulted = False
        self.faults: list[EmulatorFault] = []
        self.reported: str | None = None  # The fault that ended the contexts, which many calls see.
        self._texts: dict[str, ctypes.Array[ctypes.c_char]] = {}

    @lazy
    def images(self) -> images.Images:
        """What reads the images that programs load."""
        return images.Images()

    def initialize(self) -> None:
        """Open the devices. Doing this again is allowed."""
        if not self.initialized:
            if (why := gpu_refusal(self.settings)) is not None:
                say(why)
                raise CallError(NO_DEVICE)
            count = self.settings.devices
            self.gpus = [Gpu(index, self.settings, self._capture_mode) for index in range(count)]
            self.threads.set_initialized()
            self.initialized = True

    def restart_schedule(self, seed: int | None = None) -> None:
        """Let the order of deferred work depend on a seed alone, by default on the settings' seed."""
        seed = self.settings.schedule if seed is None else seed
        for gpu in self.gpus:
            if gpu.emulator.scheduler is not None and seed is not None:
                gpu.emulator.schedule = seed  # also after a reset
                gpu.emulator.scheduler.restart(seed)

    def _capture_mode(self) -> str:
        return CAPTURE_MODES[self.threads.capture_mode()]

    def gpu(self, number: int) -> Gpu:
        """Return a device by its number."""
        if not self.initialized:
            raise CallError(NOT_INITIALIZED)
        if not 0 <= number < len(self.gpus):
            raise CallError(INVALID_DEVICE)
        return self.gpus[number]

    # Contexts

    def new_context(self, gpu: Gpu, *, primary: bool = False) -> Context:
        """Return a new context of a device.

        The first one imports what loads and executes modules: the program may forget preheat later.
        """
        gpu.emulator.import_loader()
        _ = self.images
        handle = self.threads.new_context()
        made = self.contexts[handle] = Context(handle, gpu, primary=primary)
        return made

    def primary(self, gpu: Gpu) -> Context:
        """Return the primary context of a device, which is made if there is none."""
        if gpu.primary is None:
            gpu.primary = self.new_context(gpu, primary=True)
        elif not gpu.primary.alive:
            gpu.primary.revive()
            self.threads.set_alive(gpu.primary.handle, True)
        return gpu.primary

    def context(self, handle: int) -> Context:
        """Return the context with this handle, or the current one for 0."""
        if not handle:
            return self.current()
        found = self.contexts.get(handle)
        if found is None or not found.alive:
            raise CallError(INVALID_CONTEXT)
        return found

    def current(self) -> Context:
        """Return the current context of this thread."""
        found = self.contexts.get(self.threads.current())
        if found is None:
            raise CallError(INVALID_CONTEXT)
        if not found.alive:
            raise CallError(CONTEXT_IS_DESTROYED)
        return found

    def end_context(self, context: Context) -> None:
        """Remove what belongs to a destroyed context, and with the last one all of its device."""
        gpu = context.gpu
        last = not any(other.alive and other.gpu is gpu for other in self.contexts.values())
        allocator = gpu.emulator.allocator
        for made in self.memory.of_context(context):
            if not last and allocator.is_allocated(made.start):
                allocator.free_now(made.start)
            self.forget(made)
        self.handles.remove_of(context)
        if last:
            gpu.emulator.reset()
            gpu.default_pool = gpu.pool = 0
        if not any(other.status for other in self.contexts.values() if other.alive):
            self.reported = None

    # Memory

    def forget(self, made: Allocation) -> None:
        """Forget memory that was freed. A graph's memory has its address while the graph exists."""
        if made.of_graph:
            return
        self.memory.remove(made.start)
        if made.pool is not None:
            made.pool.count(-made.size)
        made.release()

    def context_status(self) -> int:
        """Return the status with which every call in the current context ends, or 0."""
        found = self.contexts.get(self.threads.current())
        return found.status if found is not None else 0

    # Faults

    def report_fault(self, fault: EmulatorFault) -> int:
        """Tell the user about a fault, end the contexts of its device, and return the status."""
        status = fault_status(fault)
        if str(fault) == self.reported:
            return self.context_status() or status
        self.reported = str(fault)
        say(self.reported)
        self.faults.append(fault)
        if self.report is not None:
            self.report.fault(reports.Fault.of(fault, status))
        if isinstance(fault, UnsupportedInstructionError):
            return status
        self.faulted = True
        for context in self.contexts.values():
            context.status = context.status or status
        return status

    def recover(self) -> list[EmulatorFault]:
        """Execute queued work, let contexts work again after a fault, and return the faults so far."""
        for gpu in self.gpus:
            try:
                gpu.emulator.synchronize()
            except EmulatorFault as fault:
                self.report_fault(fault)
            except DriverError:
                pass  # A stream is captured.
            if gpu.emulator.scheduler is not None:
                gpu.emulator.scheduler.recover()
        faults, self.faults = self.faults, []
        if faults:
            self.faulted = False
            self.reported = None
            for context in self.contexts.values():
                context.status = 0
        return faults

    # Texts

    def text(self, text: str) -> int:
        """Return the address of a text that is valid until the process ends."""
        made = self._texts.get(text)
        if made is None:
            made = self._texts[text] = ctypes.create_string_buffer(text.encode())
        return ctypes.addressof(made)
