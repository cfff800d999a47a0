"""The state of the driver in one process."""

from __future__ import annotations

import ctypes
import itertools
from typing import Any, Protocol, TypeVar

from preheat.driver.contexts import Context
from preheat.driver.devices import Gpu
from preheat.driver.faults import CallError, fault_status, say
from preheat.driver.settings import DriverSettings
from preheat.errors import EmulatorFault, UnsupportedInstructionError

__all__ = ["Driver", "Handles", "Threads"]

T = TypeVar("T")
_INVALID_VALUE = 1
_NOT_INITIALIZED = 3
_INVALID_DEVICE = 101
_INVALID_CONTEXT = 201
_INVALID_HANDLE = 400
_CONTEXT_IS_DESTROYED = 709
_FIRST_HANDLE = 0x7E00_0000_0010


class Threads(Protocol):
    """What the shim keeps for each thread, and the contexts, which it has to recognise."""

    def new_context(self) -> int:
        """Return the handle of a new context."""

    def set_alive(self, context: int, alive: bool) -> None:
        """Set whether a handle is that of a context that can be made current."""

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
            raise CallError(_INVALID_HANDLE)
        return found

    def remove(self, number: int) -> None:
        """Forget a handle."""
        self._objects.pop(number, None)

    def all(self, kind: type[T]) -> list[T]:
        """Return all objects of one kind."""
        return [thing for thing in list(self._objects.values()) if isinstance(thing, kind)]


class Driver:
    """Everything that functions of the driver share.

    Attributes:
        faulted: True if a fault has ended a context; each call then asks for the status of its own.
    """

    def __init__(self, settings: DriverSettings, threads: Threads) -> None:
        self.settings = settings
        self.threads = threads
        self.handles = Handles()
        self.initialized = False
        self.gpus: list[Gpu] = []
        self.contexts: dict[int, Context] = {}  # By handle, those that were destroyed too.
        self.faulted = False
        self.faults: list[EmulatorFault] = []
        self._texts: dict[str, ctypes.Array[ctypes.c_char]] = {}

    def initialize(self) -> None:
        """Open the devices. Doing this again is allowed."""
        if not self.initialized:
            self.gpus = [Gpu(index, self.settings) for index in range(self.settings.devices)]
            self.threads.set_initialized()
            self.initialized = True

    def gpu(self, number: int) -> Gpu:
        """Return a device by its number."""
        if not self.initialized:
            raise CallError(_NOT_INITIALIZED)
        if not 0 <= number < len(self.gpus):
            raise CallError(_INVALID_DEVICE)
        return self.gpus[number]

    # Contexts

    def new_context(self, gpu: Gpu, *, primary: bool = False) -> Context:
        """Return a new context of a device."""
        handle = self.threads.new_context()
        made = self.contexts[handle] = Context(handle, gpu, primary=primary)
        return made

    def context(self, handle: int) -> Context:
        """Return the context with this handle, or the current one for 0."""
        if not handle:
            return self.current()
        found = self.contexts.get(handle)
        if found is None or not found.alive:
            raise CallError(_INVALID_CONTEXT)
        return found

    def current(self) -> Context:
        """Return the current context of this thread."""
        found = self.contexts.get(self.threads.current())
        if found is None:
            raise CallError(_INVALID_CONTEXT)
        if not found.alive:
            raise CallError(_CONTEXT_IS_DESTROYED)
        return found

    def end_context(self, context: Context) -> None:
        """Remove what belongs to a context that was destroyed."""
        gpu = context.gpu
        if any(other.alive and other.gpu is gpu for other in self.contexts.values()):
            return
        gpu.emulator.reset()

    def context_status(self) -> int:
        """Return the status with which every call in the current context ends, or 0."""
        found = self.contexts.get(self.threads.current())
        return found.status if found is not None else 0

    # Faults

    def report_fault(self, fault: EmulatorFault) -> int:
        """Tell the user about a fault, end the contexts of its device, and return the status."""
        status = fault_status(fault)
        if any(str(known) == str(fault) for known in self.faults):
            return self.context_status() or status
        say(str(fault))
        self.faults.append(fault)
        if isinstance(fault, UnsupportedInstructionError):
            return status
        self.faulted = True
        for context in self.contexts.values():
            context.status = context.status or status
        return status

    # Texts

    def text(self, text: str) -> int:
        """Return the address of a text that is valid until the process ends."""
        made = self._texts.get(text)
        if made is None:
            made = self._texts[text] = ctypes.create_string_buffer(text.encode())
        return ctypes.addressof(made)
