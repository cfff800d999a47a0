"""What may happen while work is captured, in the thread that captures and in others."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple, Protocol

from preheat.devices import base

if TYPE_CHECKING:
    from preheat.dtypes import DType
    from preheat.runtime.array import Array
    from preheat.runtime.launch import Gathered, Launch

__all__ = [
    "ALLOCATE", "FREE", "FROM_HOST", "LOAD", "READY", "RECORD", "REPLAY", "RESET", "RESOLVE", "SET",
    "SYNCHRONIZE", "TO_HOST", "UNLOAD", "Act", "Allocator", "Window",
]  # fmt: skip


class Act(NamedTuple):
    """Something that no capture can hold: refused in the thread that captures.

    `relaxed` says that a relaxed capture lets it pass, `unsafe` that it would spoil a global capture
    from any thread, so that it is refused in all of them meanwhile.
    """

    name: str
    hint: str
    relaxed: bool = False
    unsafe: bool = False


LOAD = Act("compiling or loading a program", "ask for the kernel before the capture", relaxed=True)
RESOLVE = Act(
    "first use of a kernel", "take the kernel from its module before the capture", relaxed=True
)
ALLOCATE = Act(
    "allocating memory", "make arrays before the capture, or take them from a gpu.pool()",
    relaxed=True, unsafe=True,
)  # fmt: skip
FREE = Act("freeing memory", "close arrays after the capture", relaxed=True, unsafe=True)
UNLOAD = Act("unloading programs", "trim after the capture", relaxed=True, unsafe=True)
SYNCHRONIZE = Act("synchronising", "synchronise after the replay", unsafe=True)
RECORD = Act("using an event", "record events outside, before or after the replay")
TO_HOST = Act("copying to the host", "read results after the replay", unsafe=True)
FROM_HOST = Act(
    "copying from the host", "write before the replay; the graph reads the array's newest content",
    unsafe=True,
)  # fmt: skip
SET = Act("setting a scalar", "graph.replay(name=value) sets it for every replay anew")
READY = Act("making a graph ready", "do so before or after the capture", unsafe=True)
REPLAY = Act("replaying a graph", "replay after the capture")
RESET = Act("resetting or closing the device", "leave the capture first", unsafe=True)


class Allocator(Protocol):
    """Memory for the new arrays of a thread, instead of memory that the device allocates for each."""

    def empty(self, shape: tuple[int, ...], dtype: DType) -> Array:
        """A new array, holding nothing in particular."""


class Window(Protocol):
    """A capture under way: work of its thread becomes part of it."""

    stream: base.Stream  # which is captured
    meant: base.Stream | None  # the one the caller named: work for it becomes part of the capture, too
    allocator: Allocator | None  # what new arrays of its thread come from; without one there are none

    @property
    def forsaken(self) -> bool:
        """Whether nobody is left who could end it: its graph was dropped, or its thread is over."""

    def forsake(self) -> None:
        """End it in their place."""

    def refuse(self, act: Act, stream: base.Stream | None) -> None:
        """Raise where this capture cannot stand an act in this thread, on `stream` if on one."""

    def attempt(self) -> AbstractContextManager[None]:
        """Note an error that happens inside as this capture's, with the line that caused it."""

    def exported(self, array: Array) -> None:
        """Another library uses an array of ours in its part of the capture."""

    def used(self, gathered: Gathered) -> None:
        """A call became part of the capture, which needs its operands from now on."""

    def launched(self, launch: Launch, gathered: Gathered, data: bytes) -> None:
        """So did a launch; `data` are its parameters."""

    def filled(self, array: Array, value: bytes, pieces: int) -> None:
        """So did setting every element of an array, in so many pieces."""

    def copied(self, target: Array, source: Array) -> None:
        """So did copying an array."""
