"""What the processes of a command have done on the CPU driver, for the command that has started them.

Each process appends lines of JSON to a file of its own: one for each fault when it happens, and one
with the counts when the process ends.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from preheat.errors import EmulatorFault
from preheat.process.messages import count

__all__ = ["WITHOUT_RUNTIME", "Fault", "ProcessReport", "RunReport", "hand_over", "read_report"]

WITHOUT_RUNTIME = (
    "this program contains NVIDIA's CUDA runtime (libcudart, also inside other libraries such as "
    "torch and CuPy), which works with NVIDIA's own driver alone, because it requires private tables "
    "of it; programs that use the driver API are executed: cuda.bindings.driver, cuda.core, "
    "numba-cuda, Triton without torch, preheat"
)


@dataclass(frozen=True)
class Fault:
    """A fault of a kernel: the status that the program saw, and what no GPU tells.

    Attributes:
        status: The status of the driver, such as 700.
        kernel: The name of the kernel.
        block: The block of the first thread at fault.
        thread: This thread.
        source: The line of the source, followed by the lines of calls around it, as far as known.
        message: All of it as a text, with the buffer, the argument and the instruction.
    """

    status: int
    kernel: str
    block: tuple[int, ...] | None
    thread: tuple[int, ...] | None
    source: tuple[str, ...]
    message: str

    @classmethod
    def of(cls, fault: EmulatorFault, status: int) -> Fault:
        """Return what a program is told about a fault."""
        source = tuple(map(str, fault.source))
        return cls(status, fault.kernel, fault.block, fault.thread, source, str(fault))


@dataclass(frozen=True)
class RunReport:
    """What a command has done on the CPU driver.

    Attributes:
        processes: How many of its processes have called the driver.
        killed: How many of them ended without their counts.
        launches: How many kernels were executed, also in graphs.
        faults: The faults, in the order of their processes.
        unsupported: The functions that were called and that the driver does not have.
        needs_runtime: Whether NVIDIA's CUDA runtime was part of the command and did not work.
    """

    processes: int
    killed: int
    launches: int
    faults: tuple[Fault, ...]
    unsupported: tuple[str, ...]
    needs_runtime: bool

    def __str__(self) -> str:
        """Return the report in one line."""
        if not self.processes:
            return "no Python process of the command called the CUDA driver"
        parts = [count(self.launches, "launch"), count(len(self.faults), "fault")]
        if self.unsupported:
            calls = count(len(self.unsupported), "function")
            parts.append(f"{calls} not supported ({', '.join(self.unsupported)})")
        if self.killed:
            parts.append(f"{count(self.killed, 'process')} ended too suddenly to be counted")
        return ", ".join(parts)

    def json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return asdict(self)


class ProcessReport:
    """Writes what this process does. Forked children cannot use the driver, and write nothing."""

    def __init__(self, directory: Path) -> None:
        self._pid = os.getpid()
        self._path = directory / f"{self._pid}-{os.urandom(4).hex()}.jsonl"
        self._write({"start": self._pid})

    def fault(self, fault: Fault) -> None:
        """Add a fault."""
        self._write({"fault": asdict(fault)})

    def end(self, launches: int, unsupported: Iterable[str], needs_runtime: bool) -> None:
        """Add the counts of the whole process."""
        names = sorted(unsupported)
        self._write({"launches": launches, "unsupported": names, "needs_runtime": needs_runtime})

    def _write(self, row: dict[str, Any]) -> None:
        if os.getpid() == self._pid:
            with open(self._path, "a") as file:
                file.write(json.dumps(row) + "\n")


def read_report(directory: Path) -> RunReport:
    """Return what the processes that have written to a directory have done together."""
    processes = [list(_rows(path)) for path in sorted(directory.glob("*.jsonl"))]
    rows = [row for each in processes for row in each]
    ends = [row for row in rows if "launches" in row]
    return RunReport(
        processes=len(processes),
        killed=len(processes) - len(ends),
        launches=sum(row["launches"] for row in ends),
        faults=tuple(Fault(**row["fault"]) for row in rows if "fault" in row),
        unsupported=tuple(sorted({name for row in ends for name in row["unsupported"]})),
        needs_runtime=any(row["needs_runtime"] for row in ends),
    )


def hand_over(directory: Path, outer: Path | None) -> None:
    """Copy what processes have written to the directory of the command around this one, if any."""
    if outer is not None and outer.is_dir():
        for path in directory.glob("*.jsonl"):
            shutil.copy(path, outer)


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n"):  # The process was killed within the last line.
            yield json.loads(line)
