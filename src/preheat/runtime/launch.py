"""Launches: arguments checked and packed, operands ordered, the kernel submitted.

`Launch.run` is the whole story, for any arguments; `preheat.runtime.quick` writes it out as one Python
function for the arguments most launches have. What other libraries do for us is a `Call` as well.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

from preheat.artifact import Artifact
from preheat.devices import base
from preheat.devices.base import ON_HOST
from preheat.errors import DeviceError, InputError, LaunchError, StaleBufferError
from preheat.runtime.arguments import Block, Refusal, Signature, Slot, new_block
from preheat.runtime.array import Array
from preheat.runtime.context import Context
from preheat.runtime.memory import Buffer, follow, use_of
from preheat.runtime.operands import Kind, Operand, Pointer, kind_of
from preheat.runtime.stream import record
from preheat.runtime.window import Window

UNORDERED = -1  # for DLPack: a stream that needs no ordering, here because it is captured

__all__ = ["UNORDERED", "Call", "Gathered", "Launch", "Loaded", "lent", "order", "settle"]


@dataclass(slots=True)
class Gathered:
    """The arguments of one call: values to pack, and the memory behind them."""

    values: list[Any] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    foreign: list[Operand] = field(default_factory=list)
    homes: list[int | None] = field(default_factory=list)  # the streams their libraries work in
    streams: set[int] = field(default_factory=set)  # whose work must come first
    arrays: dict[int, Array] = field(default_factory=dict)  # ours, by position
    libraries: set[str] = field(default_factory=set)  # others that work in streams of their own


class Loaded(Protocol):
    """The module of a kernel, which must not be unloaded while a launch of it can run."""

    artifact: Artifact


class Call(ABC):
    """Work on arguments that a signature describes, in a stream where the caller named one.

    Without one it goes to the stream that the library of its operands (torch, CuPy) is working in, else
    to the device's own.
    """

    def __init__(
        self,
        context: Context,
        signature: Signature,
        stream: base.Stream | None,
        *,
        blocking: bool = False,
    ) -> None:
        self.context, self.signature = context, signature
        self.stream, self.blocking = stream, blocking

    def run(self, *args: Any) -> None:
        """Check, order and submit. Raises `LaunchError` before anything happened.

        In a thread that captures it becomes part of the capture; what makes its operands is ordered
        by whoever replays.
        """
        self.context.require()
        window = self.context.window(self.stream)
        if window is not None:
            with window.attempt():
                self._capture(self.gather(args, UNORDERED), window)
            return
        stream = self.choose(args)
        gathered = self.gather(args, stream.handle)
        order(self.context, gathered, stream, named=self.stream is not None)
        self._submit(gathered, stream)
        settle(self.context, gathered, stream, named=self.stream is not None)
        if self.blocking:
            self._wait(stream)

    @abstractmethod
    def _submit(self, gathered: Gathered, stream: base.Stream) -> object:
        """Hand the work to the device."""

    @abstractmethod
    def _capture(self, gathered: Gathered, window: Window) -> None:
        """Hand it to a capture, and let that know what it uses."""

    # Arguments

    def gather(self, args: tuple[Any, ...], stream: int) -> Gathered:
        """Every argument as a value to pack, checked against its parameter; for use in `stream`."""
        self.signature.check_count(args)
        gathered = Gathered()
        for position, (slot, given) in enumerate(zip(self.signature.slots, args, strict=True)):
            try:
                gathered.values.append(self._value(slot, given, stream, gathered))
                if isinstance(given, Array):
                    gathered.arrays[position] = given
            except (Refusal, InputError) as bad:
                raise self._refused(bad, position, given) from None
        return gathered

    def _value(self, slot: Slot, given: Any, stream: int, gathered: Gathered) -> Any:
        if slot.pointer and isinstance(given, Array):
            return self._own(slot, given, gathered)
        if slot.pointer and (kind := kind_of(given)) is not None:
            return self._foreign(slot, kind, given, stream, gathered)
        if slot.pointer and isinstance(given, Pointer):
            return given.address
        if slot.pointer and given is None:
            return 0
        if slot.value is not None:
            return slot.number(given)
        if slot.pointer:
            hint = "pass an array; for a bare address, preheat.Pointer(address)"
            raise Refusal(f"{slot.title} cannot take {type(given).__name__} {given!r}"[:200], hint)
        return slot.block(given)

    def _own(self, slot: Slot, array: Array, gathered: Gathered) -> int:
        buffer = array.buffer
        if buffer.lost is not None:
            raise _Gone(buffer.lost)
        if buffer.context is not self.context:
            raise Refusal(f"{array!r} is on another device than the kernel, {self.context.device.name}")
        if slot.dtypes is not None and array.dtype not in slot.dtypes:
            raise Refusal(f"{slot.title} cannot take an array of {array.dtype}")
        gathered.buffers.append(buffer)
        return array.address

    def _foreign(self, slot: Slot, kind: Kind, given: Any, stream: int, gathered: Gathered) -> int:
        here = self.context.device
        found = kind.read(given, stream)
        if not found.reaches(here.dlpack):
            on_host = found.device[0] == ON_HOST
            where = "host memory" if on_host else f"GPU {found.device[1]}"
            hint = "copy it first: gpu.array(…)" if on_host else None
            raise Refusal(f"{type(given).__name__} is in {where}, the kernel is on {here.name}", hint)
        if slot.dtypes is not None and found.dtype is not None and found.dtype not in slot.dtypes:
            raise Refusal(f"{slot.title} cannot take a {type(given).__name__} of {found.dtype}")
        home = None
        if kind.current is not None and here.dlpack[0] != ON_HOST:
            home = kind.current(here.dlpack[1])
            gathered.libraries.add(kind.library)
        gathered.foreign.append(found)
        gathered.homes.append(home)
        gathered.streams |= {handle for handle in (found.ready, home) if handle is not None}
        return found.address

    def _refused(self, bad: Refusal | InputError, position: int, given: Any) -> LaunchError:
        kind = StaleBufferError if isinstance(bad, _Gone) else LaunchError
        shown = f"{given!r}: {bad}" if isinstance(bad, _Gone) else str(bad)
        return kind(self.signature.kernel, shown, argument=position, hint=bad.hint)

    # Streams

    def choose(self, args: tuple[Any, ...]) -> base.Stream:
        """The stream this goes to."""
        if self.stream is not None:
            return self.stream
        place, index = self.context.device.dlpack
        for given in args:
            kind = kind_of(given)
            if kind is not None and kind.current is not None and place != ON_HOST:
                return self.context.adopt(kind.current(index))
        return self.context.stream

    def _wait(self, stream: base.Stream) -> None:
        try:
            stream.synchronize()
        except DeviceError as error:
            error.args = (f"{self.signature.kernel}: {error}",)
            if self.context.lost is not None:
                self.context.lost.args = (f"{self.context.device.name} is lost since: {error}",)
            raise


class Launch(Call):
    """One kernel with a geometry."""

    def __init__(
        self,
        context: Context,
        function: base.Function,
        signature: Signature,
        geometry: base.Geometry,
        stream: base.Stream | None,
        *,
        module: Loaded,
        blocking: bool = False,
    ) -> None:
        super().__init__(context, signature, stream, blocking=blocking)
        self.function, self.geometry, self.module = function, geometry, module
        self.submits: dict[int, base.Submit] = {}  # by the number of the stream
        self.blocks: list[Block] = []  # free ones: a launch takes one, so threads never share

    def _submit(self, gathered: Gathered, stream: base.Stream) -> bytes:
        """Hand the launch to the device; returns the bytes of its parameters."""
        try:
            block = self.blocks.pop()
        except IndexError:
            block = new_block(self.signature)
        block.pack(*gathered.values)
        with lent(self.context, gathered):
            status = self.prepared(stream)(block.pointers, 0)
        data = bytes(block.data[: self.signature.layout.size])
        self.blocks.append(block)
        if status[0]:
            self.complain(status)
        return data

    def _capture(self, gathered: Gathered, window: Window) -> None:
        window.launched(self, gathered, self._submit(gathered, window.stream))

    def complain(self, status: tuple[int, ...]) -> None:
        """Raise what a status stands for."""
        self.context.device.check(status, f"launch of {self.signature.kernel}")

    def prepared(self, stream: base.Stream) -> base.Submit:
        """The device's prepared launch for one stream."""
        found = self.submits.get(stream.handle)
        if found is None:
            found = self.submits[stream.handle] = self.function.prepare(self.geometry, stream)
        return found


def lent(context: Context, gathered: Gathered) -> AbstractContextManager[object]:
    """On a device that shares the host's memory: the operands that are in it, for one launch."""
    if not gathered.foreign or context.device.dlpack[0] != ON_HOST:
        return _NOTHING
    with ExitStack() as lend:
        for each in gathered.foreign:
            lend.enter_context(context.device.lend(each.address, each.nbytes, each.writable))
        return lend.pop_all()


_NOTHING = nullcontext()


def order(context: Context, gathered: Gathered, stream: base.Stream, *, named: bool) -> None:
    """Let `stream` wait for whatever made the operands; `named` says that the caller chose it."""
    for buffer in gathered.buffers:
        buffer.before(stream)
    for handle in gathered.streams:
        if handle != stream.handle:
            follow(stream, context.adopt(handle))
    if gathered.buffers and _borrowed(context, stream, named):
        follow(stream, context.stream)


def settle(context: Context, gathered: Gathered, stream: base.Stream, *, named: bool) -> None:
    """Keep operands until `stream` is past this use, and order our own stream behind it."""
    elsewhere = [buffer for buffer in gathered.buffers if buffer.home is not stream]
    if elsewhere:
        use = use_of(context, stream)
        for buffer in elsewhere:
            buffer.after(stream, use)
        if _borrowed(context, stream, named):
            follow(context.stream, use)
    if not named:
        for handle in gathered.streams - {stream.handle}:
            follow(context.adopt(handle), stream)
    rows = zip(gathered.foreign, gathered.homes, strict=True)
    held = [each.owner for each, home in rows if home != stream.handle]
    if held and context.device.dlpack[0] != ON_HOST:
        context.hold(record(context, stream), held)


def _borrowed(context: Context, stream: base.Stream, named: bool) -> bool:
    """Whether work goes to another library's stream without the caller saying so."""
    return not named and stream is not context.stream


class _Gone(Refusal):
    """The memory was freed, or lost with its context."""
