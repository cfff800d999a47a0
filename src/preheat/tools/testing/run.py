"""A run of pytest with the plugin: the devices of its tests, and the programs that they use.

Every pytest run of an environment that has preheat loads this module, so it imports almost nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from preheat.process.lazy import LazyModule

TYPE_CHECKING = False  # Type checkers assume True.
if TYPE_CHECKING:
    from preheat import errors
    from preheat import gpu as gpus
    from preheat.gpu import Gpu
    from preheat.model import events
else:
    errors = LazyModule("preheat.errors")
    events = LazyModule("preheat.model.events")
    gpus = LazyModule("preheat.gpu")

__all__ = ["ALL", "AUTO", "DRIVER", "KINDS", "SCHEDULES", "Run", "Target"]

#: The kinds of devices, and the marker of tests that run on only one kind.
KINDS = {"emulator": "preheat_emulator", "cuda": "preheat_gpu"}
AUTO = "auto"  # a GPU if there is one, and otherwise the emulator
#: The options of runs on the CPU driver, which `driver.py` has.
DRIVER = "--preheat-driver"
SCHEDULES = "--preheat-schedules"

ALL = "all"  # every kind, if there is such a device


class Target(NamedTuple):
    """A device that tests run on. Without a device that is not `required`, its tests are skipped."""

    name: str
    required: bool = True

    @property
    def kind(self) -> str:
        """The kind of the device, such as `emulator`, or `auto`."""
        return re.split(r"[:\[]", self.name)[0]

    @property
    def id(self) -> str:
        """The name in the names of tests, such as `emulator-sm_80`."""
        return self.name.replace("[", "-").replace("]", "")


class Run:
    """A run of pytest: the devices of its tests, and the programs that they use."""

    def __init__(self, names: Iterable[str], source: str) -> None:
        self.names = list(dict.fromkeys(names))
        self.source = source  # what has chosen the devices
        self.open: list[Gpu] = []  # the devices of fixtures that are active
        self.used: dict[str, None] = {}  # the names of all devices that a fixture has returned
        self.found: set[str] = set()  # keys of programs
        self.compiled: set[str] = set()
        self.found_earlier = self.compiled_earlier = 0  # before the tests, and in other processes
        self._counts = False

    @property
    def targets(self) -> list[Target]:
        """The devices that each test runs on."""
        targets = {name: Target(name) for name in self.names if name != ALL}
        if ALL in self.names:
            targets = {kind: Target(kind, required=kind != "cuda") for kind in KINDS} | targets
        return list(targets.values())

    def count_programs(self) -> None:
        """Count the programs that this process finds and compiles, from its start on."""
        if self._counts:
            return
        self._counts = True
        earlier = events.process_counters.stats()
        hits = (amount for name, amount in earlier.items() if name.startswith("hits."))
        self.found_earlier += int(sum(hits) - earlier.get("hits.memory", 0))
        self.compiled_earlier += int(earlier.get("compiles", 0))
        events.process_counters.subscribe(self._count, "hit", "compile")

    def _count(self, event: str, fields: Mapping[str, Any]) -> None:
        (self.compiled if event == "compile" else self.found).add(fields["key"])

    def results(self) -> dict[str, Any]:
        """Return the counts as values that a worker can send."""
        return {
            "used": [*self.used],
            "found": [*self.found],
            "compiled": [*self.compiled],
            "earlier": [self.found_earlier, self.compiled_earlier],
        }

    def add(self, results: Mapping[str, Any]) -> None:
        """Add the counts of a worker."""
        self.used |= dict.fromkeys(results["used"])
        self.found |= set(results["found"])
        self.compiled |= set(results["compiled"])
        self.found_earlier += results["earlier"][0]
        self.compiled_earlier += results["earlier"][1]

    def summary(self) -> str | None:
        """Return how many programs were found and compiled, or None if no test has used a device."""
        if not self.used:
            return None
        found = self.found_earlier + len(self.found - self.compiled)
        compiled = self.compiled_earlier + len(self.compiled)
        programs = "program" if found == 1 else "programs"
        devices = ", ".join(sorted(self.used))
        return f"preheat: {found} {programs} found, {compiled} compiled ({devices})"

    # The end of a test

    def finish_work(self) -> errors.PreheatError | None:
        """Wait for the work of the devices; return an error of a kernel that was not raised yet."""
        first = None
        if self.open:
            for gpu in self.open:
                try:
                    if gpu._context.lost is None:
                        gpu.synchronize()
                except errors.PreheatError as error:
                    first = first or error
        return first

    def recover(self) -> None:
        """Make every open emulator usable again after a fault."""
        if self.used:
            for gpu in {id(gpu): gpu for gpu in (*gpus.open_devices(), *self.open)}.values():
                _recover(gpu)


def _recover(gpu: Gpu) -> None:
    """Make a device usable again after a fault; keep its kernels and arrays, or else reset it."""
    lost = gpu._context.lost is not None
    if lost and gpu._context.recovers and gpu._device.recovers and not gpu._context.recover():
        gpu.reset()
