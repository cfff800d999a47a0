"""Helpers for the tests of sealed processes: programs, a bundle of them, and a missing compiler."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from preheat.build.builder import Builder
from preheat.errors import (
    ToolchainNotFoundError,
)
from preheat.model.program import Program
from tests.conftest import SAXPY, Recorder

PLAIN = Program.of(SAXPY, label="saxpy.cu", options=("-lineinfo",))


TWO = """
template <typename T> __global__ void scale(T* x, T by) { x[threadIdx.x] *= by; }
"""


NAMED = Program.of(TWO, label="scale.cu", names=("scale<float>",))


IN_MEMORY = Program.of(
    '#include "by.h"\nextern "C" __global__ void k(int* x) { x[0] *= BY; }',
    label="memory.cu",
    headers={"by.h": "#define BY 3\n"},
)


CLOCK = Program.of('extern "C" __global__ void when(char* x) { x[0] = __TIME__[0]; }', label="clock.cu")


def on_disk(place: Path) -> Program:
    """Return a program in `place` that includes files beside it, two steps away."""
    place.mkdir(exist_ok=True)
    (place / "outer.h").write_text('#include "inner.h"\n')
    (place / "inner.h").write_text("#define BY 5\n")
    source = '#include "outer.h"\nextern "C" __global__ void k(int* x) { x[0] *= BY; }'
    (place / "file.cu").write_text(source)
    return Program.from_file(place / "file.cu")


def elsewhere(program: Program, place: str) -> Program:
    """Return the program of a moved project: its file and its directory are in `place`."""
    if program.path is None:
        return program
    return replace(program, include=(place,), path=f"{place}/{program.label}")


class _NoCompiler:
    """A toolchain on a machine without compilers: every call fails and is listed in `asked`."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name in ("close", "after_fork"):
            return lambda: None

        def refuse(*_: object) -> Any:
            self.asked.append(name)
            raise ToolchainNotFoundError("NVRTC was not found: not installed")

        return refuse


@dataclass
class Baked:
    """A bundle of a few programs, and what was put into it."""

    path: Path
    include: Path
    programs: dict[str, Program]


def recorded(builder: Builder, name: str) -> list[Any]:
    (sink,) = builder.events._sinks[name]
    assert isinstance(sink, Recorder)
    return sink.named(name)
