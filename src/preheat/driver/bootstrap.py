"""Puts the functions of the driver into the shim of this process."""

from __future__ import annotations

import atexit
import ctypes
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from preheat.devices import base
from preheat.driver import (
    arrays,
    calls,
    contexts,
    copies,
    devices,
    events,
    functions,
    interprocess,
    launches,
    linking,
    managed,
    memory,
    modules,
    pointers,
    pools,
    streams,
    textures,
)
from preheat.driver.calls import KINDS, EntryPoint, read_table, say
from preheat.driver.driver import Driver
from preheat.driver.graphs import (
    captures,
    edges,
    executables,
    kernel_nodes,
    memory_nodes,
    nodes,
    structure,
    updates,
    user_objects,
)
from preheat.driver.settings import DriverSettings
from preheat.driver.status import DEINITIALIZED
from preheat.model.config import environ
from preheat.native.build import BUILD_AGAIN, is_stale
from preheat.process.lazy import LazyModule

if TYPE_CHECKING:
    from preheat.driver import reports
else:
    reports = LazyModule("preheat.driver.reports")  # Only programs with the CUDA runtime need it.

__all__ = ["driver_of_this_process", "install"]

#: The modules that register functions when they are imported.
_SUBJECTS = (
    arrays, captures, contexts, copies, devices, edges, events, executables, functions, interprocess,
    kernel_nodes, launches, linking, managed, memory, memory_nodes, modules, nodes, pointers, pools,
    streams, structure, textures, updates, user_objects,
)  # fmt: skip

_SOURCES = Path(__file__).with_name("native")

_installing = threading.Lock()
_installed: list[Driver] = []
_callbacks: list[Any] = []


class _ShimThreads:
    """The state of threads that the shim keeps."""

    def __init__(self, shim: ctypes.PyDLL) -> None:
        shim.preheat_driver_new_context.restype = ctypes.c_void_p
        shim.preheat_driver_current.restype = ctypes.c_void_p
        shim.preheat_driver_context_alive.argtypes = (ctypes.c_void_p, ctypes.c_int)
        shim.preheat_driver_push.argtypes = (ctypes.c_void_p,)
        self._shim = shim
        self._current = shim.preheat_driver_current
        self.capture_mode = shim.preheat_driver_capture_mode

    def new_context(self) -> int:
        return int(self._shim.preheat_driver_new_context())

    def set_alive(self, context: int, alive: bool) -> None:
        self._shim.preheat_driver_context_alive(context, int(alive))

    def current(self) -> int:
        return self._current() or 0

    def make_current(self, context: int) -> None:
        self._shim.preheat_driver_push(context)

    def pop_current(self) -> None:
        self._shim.preheat_driver_pop()

    def set_initialized(self) -> None:
        self._shim.preheat_driver_initialized()


def driver_of_this_process() -> Driver | None:
    """Return the driver of this process, or None if no program has called it."""
    return _installed[0] if _installed else None


def install(library: str) -> None:
    """Put preheat's functions into the shim, a library of this process.

    Threads that call this at the same time wait for the first one.
    """
    with _installing:
        if _installed:
            return
        if is_stale(Path(library), _SOURCES):
            raise RuntimeError(f"{library} was built from other sources: {BUILD_AGAIN}")
        _install(ctypes.PyDLL(library))


def _install(shim: ctypes.PyDLL) -> None:
    driver = Driver(DriverSettings.from_env(environ()), _ShimThreads(shim))
    table = list(read_table())
    found = calls.find_implementations(table)
    functions = (ctypes.c_void_p * len(table))()
    for slot, (point, implementation) in enumerate(zip(table, found, strict=True)):
        if implementation is not None:
            # After the end of the interpreter, releasing something succeeds.
            ended = 0 if shim.preheat_driver_releases(point.name.encode()) else DEINITIALIZED
            function = ctypes.CFUNCTYPE(ctypes.c_int, *map(KINDS.__getitem__, point.kinds))(
                calls.bind(driver, point, implementation, ended=ended)
            )
            _callbacks.append(function)
            functions[slot] = ctypes.cast(function, ctypes.c_void_p)
    # Libraries call these also while the interpreter ends and removes this module.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_callbacks))
    ctypes.pythonapi.Py_AtExit(ctypes.cast(shim.preheat_driver_end, ctypes.c_void_p))
    atexit.register(_report, driver, shim, table)
    base.before_load.append(lambda artifact, lines: driver.images.add(artifact, lines))
    base.before_foreign_load.append(lambda cubin, ptx: driver.images.add_foreign(cubin, ptx))
    shim.preheat_driver_install(functions)
    _installed.append(driver)


def _report(driver: Driver, shim: ctypes.PyDLL, table: list[EntryPoint]) -> None:
    """Name the functions that the program called and that are not supported."""
    refused = {point.name for slot, point in enumerate(table) if shim.preheat_driver_refused(slot)}
    needs_runtime = bool(ctypes.c_int.in_dll(shim, "preheat_driver_wants_tables").value)
    if driver.report is not None:  # The command that has started this process says all of it.
        launches = sum(gpu.emulator.executed for gpu in driver.gpus)
        driver.report.end(launches, refused, needs_runtime)
        return
    if needs_runtime:
        say(reports.WITHOUT_RUNTIME)
    if refused:
        say(f"the CPU driver does not support {', '.join(sorted(refused))}")
        sys.stderr.flush()
