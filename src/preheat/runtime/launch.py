"""Launches: arguments checked and packed, operands ordered, the kernel submitted.

`Launch.run` is the whole story, for any arguments; `preheat.runtime.quick` writes it out as one Python
function for the arguments most launches have. What other libraries do for us is a `Call` as well.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from preheat.artifact import Artifact
from preheat.devices import base
from preheat.devices.base import ON_HOST
from preheat.errors import DeviceError, InputError, LaunchError, StaleBufferError, brief
from preheat.runtime.active_capture import ActiveCapture
from preheat.runtime.arguments import Block, Refusal, Signature, Slot, new_block
from preheat.runtime.array import Array
from preheat.runtime.context import Context
from preheat.runtime.operands import Kind, Operand, Pointer, Strided, kind_of
from preheat.runtime.stream import record
from preheat.runtime.uses import Uses, add_use

UNORDERED = -1  # for DLPack: a stream that needs no ordering, here because it is captured
MANY_STREAMS = 64  # streams for which one launch, or one graph, is kept prepared
_CONTIGUOUS = "make a copy that is; or preheat.strided(x), for a kernel that takes strides"
_READ_ONLY = "declare the parameter const, or pass a copy"

__all__ = ["MANY_STREAMS", "UNORDERED", "Call", "Gathered", "Launch", "Loaded", "lent", "ordered"]


@dataclass(slots=True)
class Gathered:
    """The arguments of one call: values to pack, and the memory behind them."""

    values: list[Any] = field(default_factory=list)
    uses: dict[Uses, bool] = field(default_factory=dict)  # of our memory, and True where it is written
    foreign: list[Operand] = field(default_factory=list)
    others: dict[int, str] = field(default_factory=dict)  # streams of their libraries, by handle
    held: list[object] = field(default_factory=list)  # owners of memory whose library does not wait
    arrays: dict[int, Array] = field(default_factory=dict)  # ours, by position
    libraries: set[str] = field(default_factory=set)  # others that work in streams of their own

    def use(self, array: Array, *, write: bool) -> None:
        """Note that the call reads, or writes, an array of ours."""
        add_use(self.uses, array.buffer.uses, write=write)


class Loaded(Protocol):
    """The module of a kernel, which must not be unloaded while a launch of it can run."""

    artifact: Artifact


class Call(ABC):
    """Work on arguments that a signature describes, in a stream where the caller named one.

    Without one it goes to the stream that the library of its operands (torch, CuPy) is working in, else
    to the device's own. `AGAIN` says how to replace one whose context is lost.
    """

    AGAIN: ClassVar[str]

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

    def run(self, *args: Any, **named: Any) -> None:
        """Check, order and submit. Raises `LaunchError` before anything happened.

        In a thread that captures it becomes part of the capture; what makes its operands is ordered
        by whoever replays.
        """
        if named:
            self.signature.refuse_names(named)
        self.context.require(self.AGAIN)
        capture = self.context.active_capture(self.stream)
        if capture is not None:
            with capture.note_errors():
                self._capture(self.gather(args, UNORDERED), capture)
            return
        stream = self.choose(args)
        captured = self.context.order.captured(stream)
        gathered = self.gather(args, UNORDERED if captured else stream.handle)
        with ordered(self.context, gathered, stream, captured=captured):
            self._submit(gathered, stream)
        if self.blocking and not captured:
            self._wait(stream)

    @abstractmethod
    def _submit(self, gathered: Gathered, stream: base.Stream) -> object:
        """Hand the work to the device."""

    @abstractmethod
    def _capture(self, gathered: Gathered, capture: ActiveCapture) -> None:
        """Hand it to a capture, and let that know what it uses."""

    # Arguments

    def gather(self, args: tuple[Any, ...], stream: int) -> Gathered:
        """Every argument as a value to pack, checked against its parameter; for use in `stream`."""
        self.signature.check_count(args)
        gathered = Gathered()
        for position, (slot, given) in enumerate(zip(self.signature.slots, args, strict=True)):
            try:
                gathered.values.append(self._value(slot, given, stream, gathered))
                array = given.array if isinstance(given, Strided) else given
                if isinstance(array, Array):
                    gathered.use(array, write=slot.writes)
                    gathered.arrays[position] = array
            except (Refusal, InputError) as bad:
                raise self._refused(bad, position) from None
        return gathered

    def _value(self, slot: Slot, given: Any, stream: int, gathered: Gathered) -> Any:
        tensor = given.array if isinstance(given, Strided) else given
        if slot.pointer and isinstance(tensor, Array):
            return self._own(slot, tensor)
        if slot.pointer and (kind := kind_of(tensor)) is not None:
            found = kind.read(tensor, stream)
            if not found.contiguous and tensor is given:
                raise Refusal(f"{type(given).__name__} is not contiguous", _CONTIGUOUS)
            return self._foreign(slot, kind, found, tensor, gathered)
        if slot.pointer and isinstance(given, Pointer):
            return slot.address(given.address)
        if slot.pointer and given is None:
            return 0
        if slot.value is not None:
            return slot.number(given)
        if slot.pointer:
            hint = "pass an array, such as gpu.array(…); for a bare address, preheat.Pointer(address)"
            raise Refusal(f"{slot.title} cannot take {type(given).__name__} {brief(given)}", hint)
        return slot.block(given)

    def _own(self, slot: Slot, array: Array) -> int:
        buffer = array.buffer
        if buffer.lost is not None:
            raise _Gone(f"{array!r}: {buffer.lost}", array.remedy)
        if buffer.context is not self.context:
            raise Refusal(f"{array!r} is on another device than the kernel, {self.context.device.name}")
        if slot.dtypes is not None and array.dtype not in slot.dtypes:
            raise Refusal(f"{slot.title} cannot take an array of {array.dtype}")
        return array.address

    def _foreign(self, slot: Slot, kind: Kind, found: Operand, given: Any, gathered: Gathered) -> int:
        here, name = self.context.device, type(given).__name__
        if not found.reaches(here.dlpack):
            on_host = found.device[0] == ON_HOST
            where = "host memory" if on_host else f"GPU {found.device[1]}"
            hint = "copy it first: gpu.array(…)" if on_host else None
            raise Refusal(f"{name} is in {where}, the kernel is on {here.name}", hint)
        if slot.dtypes is not None and found.dtype is not None and found.dtype not in slot.dtypes:
            raise Refusal(f"{slot.title} cannot take a {name} of {found.dtype}")
        if not found.writable and slot.writes and slot.parameter.type is not None:
            raise Refusal(f"{name} is read-only, and {slot.title} may be written", _READ_ONLY)
        source, current = kind.source, None
        if source is not None and source.place == here.dlpack[0]:
            current = source.current(here.dlpack[1])
            gathered.libraries.add(source.name)
            gathered.others[current] = source.name
        if found.ready is not None:
            gathered.others[found.ready] = kind.library
        gathered.foreign.append(found)
        if self.stream is not None or current is None:
            gathered.held.append(found.owner)
        return found.address

    def _refused(self, bad: Refusal | InputError, position: int) -> LaunchError:
        kind = StaleBufferError if isinstance(bad, _Gone) else LaunchError
        return kind(self.signature.kernel, str(bad), argument=position, hint=bad.hint)

    # Streams

    def choose(self, args: tuple[Any, ...]) -> base.Stream:
        """The stream this goes to."""
        if self.stream is not None:
            return self.stream
        place, index = self.context.device.dlpack
        for given in args:
            kind = kind_of(given.array if isinstance(given, Strided) else given)
            if kind is not None and kind.source is not None and kind.source.place == place:
                return self.context.order.adopt(kind.source.current(index))
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

    AGAIN = "ask for the kernel again: gpu.kernel(…)"

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

    def _capture(self, gathered: Gathered, capture: ActiveCapture) -> None:
        capture.add_launch(self, gathered, self._submit(gathered, capture.stream))

    def complain(self, status: tuple[int, ...]) -> None:
        """Raise what a status stands for."""
        self.context.device.check(status, f"launch of {self.signature.kernel}")

    def prepared(self, stream: base.Stream) -> base.Submit:
        """The device's prepared launch for one stream."""
        found = self.submits.get(stream.handle)
        if found is None:
            if len(self.submits) >= MANY_STREAMS:
                self.submits.clear()
            found = self.submits[stream.handle] = self.function.prepare(self.geometry, stream)
        return found


def lent(context: Context, gathered: Gathered) -> AbstractContextManager[object]:
    """On a device that shares the host's memory: the operands that are in it, for one launch."""
    if not gathered.foreign or context.device.dlpack[0] != ON_HOST:
        return _NOTHING
    with ExitStack() as lend:
        for each in gathered.foreign:
            lend.enter_context(context.device.lend(each.start, each.nbytes, each.writable))
        return lend.pop_all()


_NOTHING = nullcontext()


@contextmanager
def ordered(
    context: Context, gathered: Gathered, stream: base.Stream, *, captured: bool = False
) -> Iterator[None]:
    """Order work in `stream` with every other use of its operands, and keep them until it has ended.

    `captured` tells that another library captures the stream: the operands are kept by its graph.
    """
    context.tidy()
    with context.order.section(stream, gathered.uses, gathered.others, captured=captured):
        yield
    on_host = context.device.dlpack[0] == ON_HOST
    if gathered.held and not on_host and not captured:
        context.hold(record(context, stream), gathered.held)


class _Gone(Refusal):
    """The memory was freed, or lost with its context."""
